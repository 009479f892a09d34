"""The README's example runs as it stands, and what the docs point to is there."""

from __future__ import annotations

import re
import runpy
from ast import literal_eval
from inspect import signature
from pathlib import Path

import pytest

import ssd
from ssd import SamplingParams
from ssd.cli.demo import QUESTIONS
from ssd.cli.explain import explain

ROOT = Path(__file__).parents[2]
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md")),
    *sorted((ROOT / "docs").glob("*.md")),
]


@pytest.mark.parametrize("page", ["README.md", pytest.param("docs/index.md", marks=pytest.mark.slow)])
def test_the_first_example_runs(page: str, capsys: pytest.CaptureFixture[str]) -> None:
    [example] = re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)
    exec(compile(example, page, "exec"), {})
    assert len(capsys.readouterr().out) > 100


def test_the_prompts_that_are_shown_are_not_answered_by_a_loop() -> None:
    """A loop is easy to draft: acceptance and hit rate of such a text would mean nothing."""
    [listed] = re.findall(r"prompts = (\[.*\])", (ROOT / "README.md").read_text())
    shown = [signature(explain).parameters["prompt"].default, *literal_eval(listed)]
    greedy, drawn = SamplingParams(max_new_tokens=40), SamplingParams(temperature=0.8, seed=4, max_new_tokens=64)
    with ssd.LLM("tiny-llama", device="cpu") as llm:
        outputs = llm.generate([*shown, QUESTIONS[0].text], [greedy] * len(shown) + [drawn])
    for output in outputs:
        ids = output.token_ids
        triples = list(zip(ids, ids[1:], ids[2:], strict=False))
        assert len(set(triples)) > 0.7 * len(triples), output.text


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_links_and_paths_exist(page: Path) -> None:
    """Catches a page that points to a file which was moved or never written."""
    text = page.read_text()
    for target in re.findall(r"\]\(([^)#]+)\)", text):
        assert (page.parent / target).exists(), target
    for path in re.findall(r"`((?:ssd|tests|bench|docs|scripts)/[\w./-]*)`", text):
        assert (ROOT / path).exists(), path


def test_the_reference_is_what_its_script_writes() -> None:
    """Catches a change of an option or a docstring without `python scripts/reference.py`."""
    page = (ROOT / "docs" / "reference.md").read_text()
    assert runpy.run_path(str(ROOT / "scripts" / "reference.py"))["rendered"](page) == page


def test_the_reference_has_every_public_name() -> None:
    page = (ROOT / "docs" / "reference.md").read_text()
    shown = set(re.findall(r"^(?:### |\| `)(\w+)", page, re.MULTILINE))
    assert set(ssd.__all__) <= shown


def test_the_reference_reads_without_a_build() -> None:
    """Each section has a docstring and entries; each option is described. Catches markers with nothing behind them."""
    page = (ROOT / "docs" / "reference.md").read_text()
    sections = re.findall(r"<!-- (\w+).*? -->\n\n(.*?)\n\n<!-- end -->", page, re.DOTALL)
    assert len(sections) == page.count("<!-- end -->") > 12
    for kind, text in sections:
        entries = re.findall(r"^- `.+`", text, re.MULTILINE) or text.split("|---|---|---|\n")[1].splitlines()
        assert entries
        assert kind == "class" or all(re.fullmatch(r"\| `\w+` \| .+ \| .+ \|", line) for line in entries)


def test_the_site_has_every_page_and_its_home_names_it() -> None:
    navigation, home = ((ROOT / name).read_text() for name in ("mkdocs.yml", "docs/index.md"))
    for page in (ROOT / "docs").glob("*.md"):
        assert f" {page.name}\n" in navigation, page.name
        assert f"({page.name})" in home or page.name == "index.md", page.name
