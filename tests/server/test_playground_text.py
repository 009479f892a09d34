"""Answers of the playground as text, and its controls on a phone: in a browser, with answers that the test writes."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

import pytest
from chromium import MARKS, launched, sync_api

from ssd.server.playground.endpoints import page as page_router

expect = sync_api.expect
pytestmark = MARKS
FILES = {route.path: asyncio.run(route.endpoint()) for route in page_router().routes}  # type: ignore[attr-defined]
STATE = {"model": "m", "mode": "ssd", "draft": "d", "branches": True, "note": None, "seconds": 1.0, "running": 0}
STATE |= {"waiting": 0, "kv_usage": 0.0, "output_tokens": 0, "drafted": 0, "accepted": 0, "look_ups": 0, "hits": 0}
MARKDOWN = """# Title with *emphasis*

Some **bold** words, `inline <code>`, ~~struck~~ and [a link](https://example.org/a).
A second line with List<String>, <b>HTML</b> and ![a picture](https://example.org/p.png).

3. one

   ```python
   def f(x): return "**" + x  # a comment that is much longer than a phone is wide, so that the block is scrolled
   ```
4. two
   - inner
   - [x] done

| left | right | with_a_word_that_is_much_too_long_for_a_phone_and_cannot_be_broken_anywhere |
|:--|--:|---|
| a<br>b | 1 | **c** |

> quoted
> text

A paragraph that ends the answer, with https://example.org/a/very/long/address/that/goes/on/and/on/and/on/and/on/and/on.
"""
HOSTILE = {
    "script": "<script>window.broken = 1; fetch('https://evil.example/')</script>",
    "handler": '<img src=https://evil.example/x onerror="window.broken = 1"> <svg onload=window.broken=1>',
    "picture": "![alt](https://evil.example/x.png) [![in a link](https://evil.example/y.png)](https://evil.example/z)",
    "data picture": "![](data:image/svg+xml;base64,PHN2Zy8+)",
    "javascript": "[a](javascript:window.broken=1) [b](JaVaScript&#58;window.broken=1) <javascript:window.broken=1>",
    "data link": "[a](data:text/html,<script>window.broken=1</script>) [b](vbscript:x) [c](file:///etc/passwd)",
    "frame": '<iframe src="https://evil.example/"></iframe>\n\n<object data="https://evil.example/"></object>',
    "style": '<style>@import "https://evil.example/";</style>\n<link rel=stylesheet href=https://evil.example/s.css>',
    "form": '<form action="https://evil.example/"><input name=id autofocus onfocus=window.broken=1></form>',
    "broken": '<div <p "a\'b <!-- <![CDATA[ <a href="https://evil.example/" </table></div></article></main><b',
    "mutation": "<math><mtext><table><mglyph><style><!--</style><img src=x onerror=window.broken=1>",
    "language": '```"><img/src=x/onerror=window.broken=1>\ncode\n```',
    "title": '[a](https://example.org "\\"><img src=x onerror=window.broken=1>")',
    "clobbering": '<a id=log href="https://evil.example/">x</a>\n\n[log]: https://example.org\n\n[log]',
    "names of objects": "[constructor] [__proto__][] [toString][]\n\nb\n\nc",
    "nested quotes": "\n".join("> " * depth + "deep" for depth in range(1, 201)),
    "nested beyond all bounds": "> " * 20_000 + "deep",
    "nested lists": "\n".join("  " * depth + "- deep" for depth in range(200)),
}


def events(text: str) -> str:
    """The stream of an answer, three tokens a round."""
    tokens = re.findall(r"\s*\S{1,6}|\s+", text)
    rounds = [tokens[i : i + 3] for i in range(0, len(tokens), 3)]
    facts: dict[str, Any] = {"origin": "hit", "looked_up": True, "by": "draft", "rejected": [], "branches": []}
    sent: list[dict[str, Any]] = [
        {"rounds": [{**facts, "tokens": each, "accepted": len(each) - 1, "num_branches": 0}]} for each in rounds
    ]
    sent.append({"finish_reason": "stop", "output_tokens": len(tokens), "rounds_total": len(rounds)})
    return "".join(f"data: {json.dumps(event)}\n\n" for event in sent) + "data: [DONE]\n\n"


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with launched() as browser:
        yield browser


class Page:
    """The page with an engine that answers `text`. Requests for anything else are in `problems`."""

    def __init__(self, browser: Any, origin: str = "http://localhost", **options: Any) -> None:
        self._origin, self.text = origin, ""
        self.problems: list[str] = []
        self.context = browser.new_context(viewport={"width": 1280, "height": 800}, **options)
        self.context.route("**/*", self._answer)
        self.page = self.context.new_page()
        self.page.on("pageerror", lambda error: self.problems.append(str(error)))
        self.page.on("console", lambda logged: self.problems.append(logged.text) if logged.type == "error" else None)
        self.load()

    def load(self) -> None:
        self.page.goto(self._origin)
        expect(self.page.locator("#served")).to_contain_text("drafts")

    def _answer(self, route: Any) -> None:
        url = urlsplit(route.request.url)
        if not route.request.url.startswith(self._origin):
            self.problems.append(route.request.url)
            route.abort()
        elif url.path == "/playground/state":
            route.fulfill(json=STATE)
        elif url.path == "/playground/chat":
            route.fulfill(content_type="text/event-stream", body=events(self.text))
        else:
            route.fulfill(headers=dict(FILES[url.path].headers), body=FILES[url.path].body)

    def ask(self, text: str) -> Any:
        """The answer, which is `text`."""
        self.text = text
        self.page.get_by_label("Message", exact=True).fill("?")
        self.page.keyboard.press("Enter")
        expect(self.page.locator("article .speed")).to_have_count(self.page.locator("article.user").count())
        expect(self.page.locator("#log")).to_have_attribute("aria-busy", "false", timeout=20_000)
        return self.page.locator("article.assistant .answer").last


@pytest.fixture
def playground(browser: Any) -> Iterator[Page]:
    made = Page(browser)
    yield made
    assert made.problems == []
    made.context.close()


def test_an_answer_is_rendered(playground: Page) -> None:
    answer = playground.ask(MARKDOWN)
    assert answer.locator("h3").inner_html() == "Title with <em>emphasis</em>"  # below the page's own headings
    assert answer.locator("p strong").first.text_content() == "bold"
    assert answer.locator("p code").text_content() == "inline <code>"
    assert answer.locator("del").text_content() == "struck"
    assert "List<String>, <b>HTML</b> and" in answer.text_content()
    links = [answer.locator("a", has_text=text) for text in ("a link", "a picture", "very/long")]
    for link, address in zip(links, ("/a", "/p.png", "/a/very/long"), strict=True):
        assert link.get_attribute("href").startswith(f"https://example.org{address}")
        assert (link.get_attribute("target"), link.get_attribute("rel")) == ("_blank", "noopener noreferrer")
    assert answer.locator("img").count() == 0
    assert answer.locator(".code .head").inner_text().split() == ["python", "Copy"]
    assert answer.locator("pre code").text_content().startswith('def f(x): return "**" + x')
    assert answer.locator("ol > li").count() == answer.locator("ul > li").count() == 2
    assert answer.locator("ol").get_attribute("start") == "3"
    assert "☑ done" in answer.text_content()
    assert answer.locator("td").first.inner_html() == "a<br>b"
    assert answer.locator("td[align=right]").text_content() == "1"
    assert answer.locator("blockquote").inner_text() == "quoted\ntext"


@pytest.mark.parametrize("name", HOSTILE)
def test_a_text_can_make_the_browser_fetch_and_run_nothing(browser: Any, name: str) -> None:
    """Without the page's Content-Security-Policy, which would stop it, too."""
    playground = Page(browser, bypass_csp=True)
    answer = playground.ask(HOSTILE[name])
    page = playground.page
    page.wait_for_timeout(200)
    assert playground.problems == []
    assert page.evaluate("window.broken") is None
    made = set(answer.evaluate("e => [...e.querySelectorAll('*')].map((e) => e.localName)"))
    assert made <= {"p", "br", "ul", "ol", "li", "blockquote", "a", "div", "pre", "code", "button", "em", "strong"}
    names = set(answer.evaluate("e => [...e.querySelectorAll('*')].flatMap((e) => e.getAttributeNames())"))
    assert names <= {"class", "href", "target", "rel", "title", "type", "tabindex", "role", "aria-label"}
    addresses = answer.evaluate("e => [...e.querySelectorAll('[href]')].map((e) => e.getAttribute('href'))")
    assert all(address.startswith("https://") for address in addresses)
    assert page.locator("main > section > #log > article").count() == 2  # the page around it is as it was
    assert len(answer.text_content()) > 1
    playground.context.close()


def test_what_would_be_fetched_would_be_noticed(browser: Any) -> None:
    """Of the test above."""
    playground = Page(browser, bypass_csp=True)
    playground.page.evaluate("new Image().src = 'https://evil.example/'")
    playground.page.wait_for_timeout(200)
    assert "https://evil.example/" in playground.problems
    playground.context.close()


GROW = """([text, step]) => {
  const [place, whole] = [document.createElement('div'), document.createElement('div')];
  const grown = new Markdown(place), seen = [];
  let first = null;
  for (let end = 0; end <= text.length; end += step) {
    grown.draw(text.slice(0, end));
    seen.push(place.textContent);
    if (end > 600) first ??= place.firstElementChild;
  }
  grown.draw(text + "\\n");
  const kept = first === place.firstElementChild;
  new Markdown(whole).draw(text, true);
  return { seen, kept, grown: place.innerHTML.trim(), whole: whole.innerHTML.trim() };
}"""


@pytest.mark.parametrize(("step", "newline"), [(1, "\n"), (7, "\r\n")])
def test_a_text_that_grows_is_drawn_as_the_whole_one(playground: Page, step: int, newline: str) -> None:
    """Catches a block that is taken for finished too early, and one that is drawn again though it is finished."""
    found = playground.page.evaluate(GROW, [(MARKDOWN * 2).replace("\n", newline), step])
    assert found["grown"] == found["whole"]
    assert found["kept"]
    assert any("Title with em" in text for text in found["seen"])
    shown = [text.replace('"**', "") for text in found["seen"]]  # of the code
    for mark in ("```", "**", "~~", "](", "# T", "|:"):  # beginnings of markup whose end is still to come
        assert not [text for text in shown if mark in text], mark


def test_definitions_of_links_may_stand_at_the_end(playground: Page) -> None:
    answer = playground.ask("See [this][1].\n\nAnd more.\n\nAnd more.\n\n[1]: https://example.org/\n")
    assert answer.locator("a").get_attribute("href") == "https://example.org/"


def test_the_view_can_be_switched_and_is_remembered(playground: Page) -> None:
    page, answer = playground.page, playground.ask(MARKDOWN)
    assert page.get_by_role("radio", name="Text", exact=True).is_checked()
    assert answer.locator(".draft").count() == 0
    page.get_by_role("radio", name="Text", exact=True).focus()
    page.keyboard.press("ArrowRight")
    assert answer.locator(".draft").count() > 10
    assert answer.text_content() == MARKDOWN
    playground.load()
    assert page.get_by_role("radio", name="Tokens").is_checked()
    assert page.locator(".answer").text_content() == MARKDOWN
    assert playground.ask("**more**").text_content() == "**more**"
    page.get_by_role("radio", name="Text", exact=True).check()
    assert page.locator(".answer").last.inner_html().strip() == "<p><strong>more</strong></p>"
    assert page.locator(".answer h3").count() == 1


@pytest.mark.parametrize("origin", ["http://localhost", "http://host.example"])
def test_code_is_copied(browser: Any, origin: str) -> None:
    """The second origin is no secure context: it has no navigator.clipboard."""
    playground = Page(browser, origin, permissions=["clipboard-read", "clipboard-write"] if "local" in origin else [])
    page, answer = playground.page, playground.ask("```\none\n  two\n```")
    assert page.evaluate("isSecureContext") == ("localhost" in origin)
    answer.get_by_role("button", name="Copy").click()
    expect(answer.get_by_role("button", name="Copied")).to_be_visible()
    page.get_by_label("Message", exact=True).focus()
    page.keyboard.press("Control+V")
    assert page.get_by_label("Message", exact=True).input_value() == "one\n  two"
    playground.context.close()


@pytest.fixture
def phone(browser: Any) -> Iterator[Page]:
    made = Page(browser)
    made.page.set_viewport_size({"width": 390, "height": 844})
    yield made
    assert made.problems == []
    made.context.close()


def test_controls_are_folded_on_a_phone(phone: Page) -> None:
    page, button = phone.page, phone.page.get_by_role("button", name="Settings:")
    assert button.get_attribute("aria-expanded") == "false"
    assert button.inner_text().endswith("SSD, temperature 0.8, 128 tokens")
    assert not page.locator("#temperature").is_visible()
    button.focus()
    page.keyboard.press("Enter")
    assert button.get_attribute("aria-expanded") == "true"
    page.locator("#mode").select_option("ar")
    page.locator("#seed").fill("3")
    assert button.inner_text().endswith("AR, temperature 0.8, seed 3, 128 tokens")
    page.locator("#temperature").fill("9")
    button.click()
    assert not page.locator("#temperature").is_visible()
    page.get_by_label("Message", exact=True).fill("?")
    page.locator("#send").click()
    assert page.locator("#temperature").is_visible()  # it is what keeps the message from being sent
    page.set_viewport_size({"width": 1280, "height": 800})
    assert not button.is_visible()
    assert page.locator("#tokens").is_visible()


@pytest.mark.parametrize("view", ["Text", "Tokens"])
def test_nothing_overflows_on_a_phone(phone: Page, view: str) -> None:
    """Code and tables are scrolled in themselves; message box and button stay in the window, whatever is unfolded."""
    page = phone.page
    page.locator("#settings").click()
    page.get_by_role("radio", name=view, exact=True).check()
    answer = phone.ask(MARKDOWN * 2)
    assert page.evaluate("document.documentElement.scrollWidth") == 390
    assert page.locator("#log").evaluate("e => e.scrollWidth <= e.clientWidth")
    if view == "Text":
        assert answer.locator(".wide").evaluate_all("all => all.every((e) => e.scrollWidth > e.clientWidth)")
    for summary in page.locator("summary").all():
        summary.click()
    for name in ("#prompt", "#send"):
        box = page.locator(name).bounding_box()
        assert box["x"] >= 0
        assert box["x"] + box["width"] <= 390
        assert box["y"] + box["height"] <= 844
