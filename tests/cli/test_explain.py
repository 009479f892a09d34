"""`ssd explain`: that the recording is what happened, and that what is shown can be read."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import cast
from xml.etree import ElementTree

import pytest
from conftest import mostly_slow
from rich.cells import cell_len
from rich.console import Console
from typer.testing import CliRunner, Result

from ssd.cli import paths
from ssd.cli.explain import _escaped, _print_heading, branches, rounds, spelling, summary, tinted, verdict
from ssd.cli.main import app
from ssd.cli.trace import Branch, Step, record
from ssd.config import SpeculationConfig
from ssd.core import Origin, RequestMetrics, SamplingParams
from ssd.llm import LLM

PROMPT = "It was a dark night, and the old captain"
SPECULATION = {"mode": "ssd", "draft": "tiny-llama-draft", "k": 4, "placement": "inline"}
SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture(scope="module")
def plain() -> Iterator[LLM]:
    with LLM("tiny-llama", device="cpu") as llm:
        yield llm


@pytest.fixture(scope="module")
def ahead() -> Iterator[LLM]:
    with LLM("tiny-llama", device="cpu", speculation=SPECULATION) as llm:
        yield llm


def explain(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["explain", *arguments])


def spell(token: int) -> str:
    return chr(token)


def ids(text: str) -> tuple[int, ...]:
    return tuple(map(ord, text))


def step(draft: str, accepted: int, own: str, *prepared: tuple[int, str], origin: Origin = Origin.HIT) -> Step:
    made = tuple(Branch(after, ord(text[0]), ids(text[1:])) for after, text in prepared)
    return Step(ids(draft), origin, made, accepted, ids(draft[:accepted] + own))


def written(steps: list[Step]) -> list[int]:
    return [token for step in steps for token in step.written]


def accepted(steps: list[Step]) -> int:
    """Accepted draft tokens that were written."""
    return sum(min(step.accepted, len(step.written)) for step in steps)


# --- recording --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("temperature", "seed"), mostly_slow([(0.0, 0), (0.8, 3), (0.8, 4)], fast={(0.8, 3)}))
def test_every_token_is_in_the_trace_once(plain: LLM, ahead: LLM, temperature: float, seed: int) -> None:
    params = SamplingParams(temperature=temperature, seed=seed, max_new_tokens=32)
    before = sum(ahead.engine.metrics.ssd_hits_after)
    output, steps = record(ahead, PROMPT, params)
    assert written(steps) == output.token_ids == plain.generate(PROMPT, params)[0].token_ids
    counted, hits = output.metrics, sum(step.hit for step in steps)
    assert (len(steps), sum(len(step.draft) for step in steps)) == (counted.rounds, counted.drafted)
    assert accepted(steps) == counted.accepted
    assert (hits, sum(step.looked_up for step in steps)) == (counted.hits, counted.look_ups)
    assert hits == sum(ahead.engine.metrics.ssd_hits_after) - before > 0


def test_a_hit_is_the_branch_that_came_true(ahead: LLM) -> None:
    output, steps = record(ahead, PROMPT, SamplingParams(temperature=0.8, seed=3, max_new_tokens=40))
    assert 0 < output.metrics.hits < output.metrics.look_ups  # both kinds are seen
    for one, two in (pair for pair in pairwise(steps) if pair[1].looked_up):
        true = [branch for branch in one.branches if one.came_true(branch)]
        assert len(true) == two.hit
        assert all(branch.draft[: len(two.draft)] == two.draft for branch in true)


def test_a_text_that_ends_in_the_middle_of_a_round(ahead: LLM) -> None:
    """Catches tokens that were accepted and never written."""
    tokens = ahead.generate(PROMPT, SamplingParams(max_new_tokens=24))[0].token_ids
    cut = 0
    for token in sorted(set(tokens))[::2]:
        output, steps = record(ahead, PROMPT, SamplingParams(max_new_tokens=24, stop_token_ids=[token]))
        assert written(steps) == output.token_ids == tokens[: tokens.index(token) + 1]
        assert accepted(steps) == output.metrics.accepted
        cut += not steps[-1].own
    assert cut  # some do


def test_tinted_text_is_the_text(ahead: LLM) -> None:
    """Catches a stop string that is shown, and a tint on tokens that nobody had drafted."""
    params = SamplingParams(temperature=0.8, seed=3, max_new_tokens=32)
    whole = ahead.generate(PROMPT, params)[0].text
    params = SamplingParams(temperature=0.8, seed=3, max_new_tokens=32, stop=whole[40:44])
    output, steps = record(ahead, PROMPT, params)
    text = tinted(steps, ahead.engine.tokenizer, output)
    assert text.plain == output.text
    assert 0 < len([span for span in text.spans if span.style == "green"]) <= output.metrics.accepted


def test_a_token_is_spelt_as_inside_a_text(ahead: LLM) -> None:
    tokenizer = ahead.engine.tokenizer
    assert tokenizer is not None
    name = spelling(tokenizer)
    assert "".join(map(name, tokenizer.encode(" a cat <sat>\n", add_special_tokens=False))) == " a cat <sat>\n"
    assert name(tokenizer.eos_token_id or 0) == tokenizer.eos_token


# --- the terminal -----------------------------------------------------------------------------------------------------


def test_bytes_of_a_character_are_escaped(ahead: LLM) -> None:
    """Catches characters of several tokens, such as Chinese ones, that are shown as one replacement sign per byte."""
    tokenizer = ahead.engine.tokenizer
    assert tokenizer is not None
    tokens = tokenizer.encode("京", add_special_tokens=False)
    assert "".join(map(spelling(tokenizer), tokens)) == r"\xe4\xba\xac"
    assert (_escaped("<0xE4>"), _escaped("Ġäº"), _escaped("東")) == (r"\xe4", r" \xe4\xba", "")


def test_as_many_outcomes_are_announced_as_are_prepared(capsys: pytest.CaptureFixture[str]) -> None:
    wanted = SpeculationConfig(mode="ssd", draft="small", k=4, fan_out=2)
    config = SimpleNamespace(speculation=wanted, device="cpu", model="large", quantization="fp8")
    _print_heading(cast(LLM, SimpleNamespace(config=config, note="")), SamplingParams(seed=0), Console())
    said = " ".join(capsys.readouterr().out.split())
    assert "large (in fp8) writes; small drafts" in said
    assert "prepares for up to 10 outcomes" in said


def test_the_verdict_tells_what_stands() -> None:
    assert verdict(step("abcd", 2, "x"), spell).plain == "a b ✗ c d → x"
    assert verdict(step("ab", 2, "x"), spell).plain == "a b → x"
    assert verdict(step("", 0, " "), spell).plain == "→ ·"
    styles = {span.style for span in verdict(step("ab", 1, "x"), spell).spans}
    assert styles == {"green", "red", "red strike", "bold"}


def test_branches_are_listed_by_place_and_the_one_that_came_true_is_marked() -> None:
    now = step("abc", 1, "x", (3, "y12"), (1, "x34"), (1, "w56"), (0, "[78"))
    assert branches(now, step("34", 2, "z"), spell, 40).plain == "0: [  1: [x] w  3: y  hit"
    assert branches(now, step("56", 2, "z", origin=Origin.JIT), spell, 40).plain == "0: [  1: x w  3: y  miss"
    assert branches(now, None, spell, 40).plain == "0: [  1: x w  3: y"
    narrow = branches(now, step("34", 2, "z"), spell, 16).plain
    assert narrow == "1: [x]  3: y  +2  hit"  # the likeliest ones, and the one that came true


def test_lines_are_not_longer_than_the_terminal(ahead: LLM) -> None:
    _, steps = record(ahead, PROMPT, SamplingParams(max_new_tokens=24))
    table = rounds(steps, spelling(ahead.engine.tokenizer), 80)
    assert max(cell.cell_len for cell in table.columns[2].cells) <= 80 - 16


def test_unprintable_characters_are_shown() -> None:
    assert paths.visible(" a\n\tb\x1b\x00\u200b\ud800") == "·a↵⇥b\\x1b\\x00\\u200b\\ud800"


def test_the_summary_has_every_figure() -> None:
    counted = RequestMetrics(output_tokens=5, rounds=3, accepted=2, drafted=5, hits=1, look_ups=2)
    assert summary(counted) == (
        "5 tokens in 3 rounds, 1.67 a round; acceptance 40% (2 of 5 drafted tokens); hit rate 50% (1 of 2 drafts)"
    )


# --- the picture ------------------------------------------------------------------------------------------------------


def nasty(token: int) -> str:
    return ("<&>", ' "quoted"', "\n\n", "\x00\x1b\ud800\ufffe", " 漢字", "]]>", "  ", "</svg>")[token % 8]


def long_trace(num_rounds: int) -> list[Step]:
    rounds = []
    for i in range(num_rounds):
        prepared = tuple(Branch(after, i + after, (i, i + 1, i + 2)) for after in range(5) for _ in range(3))
        origin = (Origin.HIT, Origin.JIT, Origin.SIBLING)[i % 3] if i else Origin.DRAFT
        draft, accepted = (i + 1, i + 2, i + 3, i + 4), i % 5
        rounds.append(Step(draft, origin, prepared, accepted, (*draft[:accepted], i)))
    return rounds


def texts(root: ElementTree.Element, *kinds: str) -> list[ElementTree.Element]:
    return [text for text in root.iter(f"{SVG}text") if text.get("class") in kinds]


def test_the_picture_is_well_formed_and_holds_every_token() -> None:
    steps = long_trace(300)
    drawn = paths.svg(steps, nasty, "<title> & more", "a & b")
    root = ElementTree.fromstring(drawn)
    assert len(texts(root, "stands", "own")) == len(written(steps))
    assert len(drawn) < 1_500_000
    assert float(root.get("width", "0")) == paths.WIDTH
    assert root.findtext(f"{SVG}title") == "<title> & more"
    assert not re.search(r"href|url\(|@import|<script|src=", drawn)
    assert "Noto Sans CJK SC" in drawn
    assert "+N: N more prepared" in drawn


def test_nothing_is_written_over_something_else(ahead: LLM) -> None:
    output, steps = record(ahead, PROMPT, SamplingParams(temperature=0.8, seed=3, max_new_tokens=40))
    long = "a summary that is longer than a line of the picture, " * 4
    root = ElementTree.fromstring(paths.svg(steps, spelling(ahead.engine.tokenizer), "title", long))
    boxes = []
    for group, text in [(each, text) for each in root for text in each.iter(f"{SVG}text")]:
        size = 0.8 if "small" in text.get("class", "") else 1.0
        content = (text.text or "") + "".join(part.text or "" for part in text.iter(f"{SVG}tspan"))
        left, top = map(float, re.findall(r"-?[0-9.]+", group.get("transform", "translate(0 0)")))
        x, y = left + float(text.get("x", "")), top + float(text.get("y", ""))
        boxes.append((y, x, x + cell_len(content) * paths.CELL * size, content))
        assert x > 0
        assert boxes[-1][2] < float(root.get("width", ""))
        assert 0 < y < float(root.get("height", ""))
    boxes.sort()
    for i, (y, left, right, content) in enumerate(boxes):
        for other_y, other_left, other_right, other in boxes[i + 1 :]:
            if other_y - y > 9:
                break
            assert right <= other_left or other_right <= left, (content, other)
    assert len(output.token_ids) == 40


def test_a_page_is_well_formed_too(tmp_path: Path) -> None:
    file = tmp_path / "paths.html"
    paths.write(file, long_trace(3), nasty, "a < b & {c}", "summary")
    page = file.read_text(encoding="utf-8")
    root = ElementTree.fromstring(page)
    assert root.findtext("{*}head/{*}title") == "a < b & {c}"
    assert root.find(f"{{*}}body/{{*}}figure/{SVG}svg") is not None
    assert not re.search(r"href|url\(|@import|<script|src=", page)


# --- the command ------------------------------------------------------------------------------------------------------


def test_it_explains_trees(ahead: LLM) -> None:
    """The text is that of chains, and the drafts have as many tokens as the trees have nodes."""
    options = "--k", "3", "--tree", "6", "--max-tokens", "16", "-t", "0.8", "--seed", "3"
    done = explain("tiny-llama", PROMPT, *options, "--device", "cpu")
    assert done.exit_code == 0, done.output
    said = " ".join(done.stdout.split())
    assert "drafts trees of 6 tokens, 3 on a path, a round and prepares for up to 16 outcomes" in said
    text = ahead.generate(PROMPT, SamplingParams(temperature=0.8, seed=3, max_new_tokens=16))[0].text
    assert " ".join(text.split()) in said


@pytest.mark.parametrize("name", mostly_slow(["paths.svg", "paths.html"], fast={"paths.svg"}))
def test_it_explains_and_draws(tmp_path: Path, name: str) -> None:
    options = ("--max-tokens", "12", "--k", "3", "--budget", "5", "--fan-out", "2", "-t", "0.5", "--seed", "7")
    done = explain("tiny-llama", "Once upon a time", *options, "--device", "cpu", "--out", str(tmp_path / name))
    assert done.exit_code == 0, done.output
    said = " ".join(done.stdout.split())
    for part in ("drafts 3 tokens a round", "12 tokens in", "hit rate", "Once upon a time", name):
        assert part in said
    assert "Once upon a time" in (tmp_path / name).read_text()
    ElementTree.parse(tmp_path / name)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--out", "paths.png"), "name it paths.svg"),
        (("--out", "no/such/place/paths.svg"), "no directory no/such/place"),
        (("tiny-llama-draft",), "--draft"),
        (("--draft", "suffix"), "nothing to prepare"),
        (("--k", "none"), "k='none'"),
        (("--fan-out", "99"), "fan_out=99"),
        (("--max-tokens", "0"), "max_new_tokens=0"),
        (("tiny-lama",), "did you mean tiny-llama?"),
        (("org/name",), "name a small model"),
    ],
)
def test_mistakes_are_explained_and_exit_with_one(arguments: tuple[str, ...], message: str) -> None:
    done = explain(*arguments, "--device", "cpu")
    assert done.exit_code == 1
    assert message in " ".join(done.stderr.split())
