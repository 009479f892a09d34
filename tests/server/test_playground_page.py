"""The playground in a real browser: Debian's Chromium, driven by playwright."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from chromium import MARKS, launched, sync_api
from live_server import SPECULATION, Served, serving, until

from ssd import LLM
from ssd.core import Delta

expect = sync_api.expect
pytestmark = MARKS
PICTURES = os.environ.get("SSD_SCREENSHOTS")  # a folder: write the docs' screenshots there
QUESTION = "Tell me a story about a king and his three daughters."
SUM = "Tom has 12 apples. He buys 7 more and gives 5 to Anna. How many apples does Tom have?"


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with LLM("tiny-llama", device="cpu", speculation=SPECULATION["ssd"]) as llm, serving(llm) as served:
        yield served


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with launched() as browser:
        yield browser


@pytest.fixture
def page(browser: Any, served: Served) -> Iterator[Any]:
    """The page, with tokens in colours; anything that it logs as an error, or asks of another host, fails the test."""
    context = browser.new_context(viewport={"width": 1280, "height": 800}, color_scheme="light")
    page = context.new_page()
    problems: list[str] = []

    def logged(message: Any) -> None:
        if "status of 400" not in message.text:  # a refusal, which the page shows
            problems.append(message.text)

    page.on("pageerror", lambda error: problems.append(str(error)))
    page.on("console", lambda message: logged(message) if message.type == "error" else None)
    page.on("request", lambda r: problems.append(r.url) if not r.url.startswith((served.url, "data:")) else None)
    page.goto(served.url)
    expect(page.locator("#served")).to_contain_text("drafts")
    page.get_by_role("radio", name="Tokens").check()
    yield page
    assert problems == []
    context.close()


def ask(page: Any, text: str, *, mode: str = "server", tokens: int = 40, seed: int = 3) -> Any:
    """Sends a message and waits for the answer."""
    page.locator("#mode").select_option(mode)
    page.locator("#tokens").fill(str(tokens))
    page.locator("#seed").fill(str(seed))
    page.get_by_label("Message", exact=True).fill(text)
    page.keyboard.press("Enter")
    idle(page)
    return page.locator("article.assistant").last


def idle(page: Any) -> None:
    expect(page.locator("#log")).to_have_attribute("aria-busy", "false", timeout=20_000)


def test_chat_shows_branches_and_the_same_text_in_both_modes(page: Any, served: Served) -> None:
    article = ask(page, QUESTION)
    text = article.locator(".answer").text_content()
    assert len(text) > 20
    assert article.locator(".answer .draft").count() > 0
    rounds = page.locator("#paths > li")
    assert rounds.count() > 3
    assert page.locator(".branches li").count() > 3
    assert page.locator("#paths > li.hit").count() + page.locator("#paths > li.miss").count() > 0
    assert page.locator(".branches li.true").count() > 0
    assert "SSD" in article.locator(".speed").text_content()
    article.get_by_role("button", name="Again with AR, same seed").click()
    expect(page.locator(".speed .bar")).to_have_count(2)
    idle(page)
    assert article.locator(".answer").text_content() == text
    assert article.locator(".answer .draft").count() == 0
    assert "The same text in both modes." in page.locator(".speed").text_content()
    assert page.locator(".branches li").count() == 0
    article = ask(page, QUESTION, mode="ar")
    assert re.search(r"AR: [\d.]+ tokens/s, 40 tokens in 40 rounds", article.locator(".speed").text_content())


def test_the_answers_of_both_modes_can_be_switched_between(page: Any) -> None:
    """Catches a second answer that takes the place of the first, with its colours, rounds and speed."""
    article = ask(page, QUESTION)
    drafted, rounds = article.locator(".answer .draft").count(), page.locator("#paths > li").count()
    article.get_by_role("button", name="Again with AR, same seed").click()
    idle(page)
    buttons = article.locator("button[aria-pressed]")
    assert [buttons.nth(i).get_attribute("aria-pressed") for i in range(2)] == ["false", "true"]
    assert page.locator("#paths > li").count() == 40
    for mode, marked, shown in (("SSD", drafted, rounds), ("AR", 0, 40), ("SSD", drafted, rounds)):
        article.get_by_role("button", name=re.compile(f"^{mode}: ")).click()
        pressed = article.locator("button[aria-pressed=true]")
        assert pressed.text_content().startswith(f"{mode}: ")
        assert page.evaluate("document.activeElement.ariaPressed") == "true"
        assert (article.locator(".answer .draft").count(), page.locator("#paths > li").count()) == (marked, shown)
    assert page.locator(".branches li").count() > 3
    page.reload()
    page.wait_for_selector("article.assistant")
    assert (article.locator(".answer .draft").count(), page.locator("#paths > li").count()) == (drafted, rounds)


def test_the_speed_of_an_answer_stands_once(page: Any) -> None:
    article = ask(page, QUESTION)
    assert page.locator("#status").text_content() == ""
    assert article.text_content().count("tokens/s") == 1


def test_a_reload_keeps_the_conversation(page: Any) -> None:
    text = ask(page, "Who are you?").locator(".answer").text_content()
    page.reload()
    page.wait_for_selector("article.assistant")
    assert page.locator("article.assistant .answer").text_content() == text
    page.get_by_role("button", name="New chat").click()
    assert page.locator("article").count() == 0
    page.reload()
    expect(page.locator("#served")).to_contain_text("drafts")
    assert page.locator("article").count() == 0


@contextmanager
def held_after(llm: LLM, rounds: int) -> Iterator[None]:
    """The engine stands still after so many rounds, until it is told to abort the request."""
    engine, step = llm.engine, llm.engine.step
    end = engine.metrics.num_rounds + rounds

    def held() -> list[Delta]:
        if engine.metrics.num_rounds >= end and engine.num_unfinished_requests:
            until(lambda: not llm.driver._inbox.empty())
            return []
        return step()

    engine.step = held  # type: ignore[method-assign]
    try:
        yield
    finally:
        del engine.step  # type: ignore[method-assign]


@pytest.mark.parametrize("how", ["button", "Escape"])
def test_stop_in_mid_answer(page: Any, served: Served, how: str) -> None:
    """The engine stops, too: the client goes away, and its request is aborted."""
    before = served.llm.engine.metrics.num_aborted
    with held_after(served.llm, rounds=6):  # else the answer may end before it is stopped
        stop_in_mid_answer(page, how)
        until(lambda: served.llm.engine.metrics.num_aborted == before + 1)
    until(lambda: not served.llm.engine.scheduler.running)
    ask(page, "And now?")


def stop_in_mid_answer(page: Any, how: str) -> None:
    page.locator("#tokens").fill("400")
    page.locator("#seed").fill("3")  # of an answer that is long enough
    page.get_by_label("Message", exact=True).fill(QUESTION)
    page.keyboard.press("Enter")
    page.wait_for_selector("#paths > li:nth-child(3)")
    page.get_by_role("button", name="Stop").click() if how == "button" else page.keyboard.press("Escape")
    idle(page)
    assert page.locator("#status").text_content() == "stopped"
    assert len(page.locator(".answer").last.text_content()) > 0


def test_charts_follow(page: Any) -> None:
    ask(page, QUESTION, tokens=60)
    expect(page.locator("#chart-rate polyline")).to_have_attribute("points", re.compile(" "))
    expect(page.locator("#acceptance")).to_contain_text("%")
    expect(page.locator("#hits")).to_contain_text("%")


def test_an_error_is_shown(page: Any) -> None:
    page.get_by_label("Message", exact=True).fill("too long " * 20_000)
    with page.expect_response("**/playground/chat") as response:
        page.keyboard.press("Enter")
    assert response.value.status == 400
    idle(page)
    assert "tokens" in page.locator("article .error").text_content()


def test_keyboard_and_screen_reader(page: Any) -> None:
    """Every control has a name and can be reached by Tab, in the order of the page."""
    unnamed = page.evaluate(
        """[...document.querySelectorAll('button, input, select, textarea')].filter(
            (e) => !e.labels?.length && !e.textContent.trim() && !e.getAttribute('aria-label')).map((e) => e.id)"""
    )
    assert unnamed == []
    page.locator(".skip").focus()
    order = []
    for _ in range(14):
        page.keyboard.press("Tab")
        order.append(page.evaluate("document.activeElement.id || document.activeElement.tagName"))
    wanted = ["new", "theme", "log", "prompt", "send", "mode", "temperature", "seed", "tokens", "branches"]
    assert [name for name in order if name in wanted] == wanted
    assert "INPUT" in order[order.index("branches") :]  # the view
    page.get_by_label("Message", exact=True).focus()
    page.keyboard.type("one")
    page.keyboard.press("Shift+Enter")
    page.keyboard.type("two")
    assert page.get_by_label("Message", exact=True).input_value() == "one\ntwo"
    assert page.locator("#log").get_attribute("aria-live") == "polite"


def test_dark_mode(browser: Any, served: Served, page: Any) -> None:
    context = browser.new_context(color_scheme="dark")
    other = context.new_page()
    other.goto(served.url)
    background = "getComputedStyle(document.body).backgroundColor"
    assert other.evaluate(background) == "rgb(18, 23, 29)"
    context.close()
    assert page.evaluate(background) == "rgb(255, 255, 255)"
    page.get_by_role("button", name="Dark theme").click()
    assert page.evaluate(background) == "rgb(18, 23, 29)"
    page.reload()
    assert page.evaluate(background) == "rgb(18, 23, 29)"
    page.get_by_role("button", name="Light theme").click()  # it says what it does
    assert page.evaluate(background) == "rgb(255, 255, 255)"


def test_a_small_screen_needs_no_sideways_scrolling(page: Any) -> None:
    page.set_viewport_size({"width": 360, "height": 640})
    page.locator("#settings").click()
    ask(page, QUESTION)
    assert page.evaluate("document.documentElement.scrollWidth") <= 360
    assert page.locator("#send").is_visible()


@pytest.mark.skipif(PICTURES is None, reason="SSD_SCREENSHOTS names no folder")
def test_screenshots(browser: Any) -> None:
    """A pair in which speculation pays on a CPU with two cores."""
    speculation = {"mode": "ssd", "draft": "tiny-llama-draft", "k": 3}
    with LLM("graft:tiny-llama@cpu-75m", device="cpu", speculation=speculation) as llm, serving(llm) as served:
        for theme in ("light", "dark"):
            context = browser.new_context(viewport={"width": 1280, "height": 800}, color_scheme=theme)
            page = context.new_page()
            page.goto(served.url)
            expect(page.locator("#served")).to_contain_text("drafts")
            page.get_by_role("radio", name="Tokens").check()
            page.locator("#temperature").fill("0")
            article = ask(page, SUM, mode="ar", tokens=90, seed=1)
            article.get_by_role("button", name="Again with SSD, same seed").click()
            expect(page.locator(".speed .bar")).to_have_count(2, timeout=60_000)
            idle(page)
            page.wait_for_timeout(3000)
            page.screenshot(path=Path(PICTURES or "") / f"playground-{theme}.png")
            context.close()


def test_the_page_asks_for_the_api_key(browser: Any, served: Served) -> None:
    with serving(served.llm, api_keys=("secret",)) as closed:
        page = browser.new_page()
        page.goto(closed.url)
        expect(page.locator("#served")).to_contain_text("API key")
        page.get_by_label("API key").fill("secret")
        expect(page.locator("#served")).to_contain_text("drafts")
        assert len(ask(page, "Who are you?").locator(".answer").text_content()) > 0
        page.close()
