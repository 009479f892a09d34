"""Pages that ssd writes, in a real browser: nothing is cut off, and nothing has to be scrolled sideways."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from chromium import MARKS, launched

from ssd.bench.config import BenchConfig
from ssd.bench.measure import MEAN
from ssd.bench.pictures import write_picture
from ssd.bench.report import Report
from ssd.bench.run import _header
from ssd.cli import paths
from ssd.cli.trace import Branch, Step
from ssd.core import Origin

pytestmark = MARKS
# What is wider than its place: the page itself, or an element that scrolls or is cut.
TOO_WIDE = """[...document.querySelectorAll('*')].filter((e) => e.clientWidth && e.scrollWidth > e.clientWidth + 1
    && (e === document.documentElement || getComputedStyle(e).overflowX !== 'visible')).map((e) => e.tagName)"""


@pytest.fixture(scope="module")
def page() -> Iterator[Any]:
    with launched() as browser:
        yield browser.new_page(viewport={"width": 1200, "height": 800})


def check(page: Any, file: Path) -> None:
    page.goto(file.as_uri())
    page.evaluate("document.querySelectorAll('details').forEach((each) => { each.open = true; })")
    assert page.evaluate(TOO_WIDE) == []


def test_a_report_fits_1200_pixels(page: Any, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    spread = {"p50": 1234.5, "p90": 11757.4, "p99": 41769.6}
    row = {
        "ratio": 1.85,
        "ratio_interval": [1.47, 2.48],
        "acceptance": 0.75,
        "tokens_per_round": 3.16,
        "hit_rate": 0.92,
    }
    row |= {"decode_tokens_per_second": 12345.6, "decode_tokens_per_second_range": [12000.0, 13000.0]}
    row |= {"ttft_ms": spread, "gap_ms": spread, "ms_per_token": 24.97}
    names = ("ar", "sd k=6", "ssd k=auto", "http://127.0.0.1:8000")
    rows = [row | {"contender": name, "set": each} for name in names for each in ("humaneval", "ultrafeedback", MEAN)]
    config = BenchConfig("graft:tiny-qwen3@qwen3-32b", "graft:tiny-qwen3-draft@qwen3-0.6b", notes=("a note " * 60,))
    header = _header(config) | {"command": f"ssd bench --folder {'a-long-path/' * 40}"}
    write_picture(Report(header, rows, [*config.notes], True, [], ["a warning " * 40]), tmp_path / "report.html")
    check(page, tmp_path / "report.html")


def test_forking_paths_fit_1200_pixels(page: Any, tmp_path: Path) -> None:
    branches = tuple(Branch(i, 100 + i, (1, 2, 3, 4)) for i in range(5))
    steps = [Step((1, 2, 3, 4), Origin.HIT, branches, i % 5, (1, 2, 3, 4, 5)[: i % 5 + 1]) for i in range(40)]
    steps.append(Step((1,) * 40, Origin.HIT, (), 40, (1,) * 41))  # a round that is wider than the picture
    summary = "a summary that is longer than a line, " * 8
    paths.write(tmp_path / "paths.html", steps, lambda token: f" token{token}", "a title", summary)
    check(page, tmp_path / "paths.html")
    for text in page.locator("svg > text").all():
        box = text.bounding_box()
        assert box["x"] + box["width"] < 1200, text.text_content()
