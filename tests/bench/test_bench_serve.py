"""`ssd bench serve` against a server whose times and tokens are known."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest
from fake_server import PAUSE, PIECES, PROMPT_TOKENS, TOKENS_A_PIECE, serving
from typer.testing import CliRunner

from ssd.bench import frontier
from ssd.bench.answers import Answer, Progress
from ssd.bench.config import Requests
from ssd.bench.openai import ServerContender
from ssd.bench.serve import Load, Result, figures, parse_goals, sweep
from ssd.cli.main import app
from ssd.errors import ConfigError

TOKENS = TOKENS_A_PIECE * len(PIECES)  # of every answer


def run(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["bench", "serve", *arguments])
    return result.exit_code, result.output


def test_a_frontier_has_no_numbers_that_cover_each_other(tmp_path: Path) -> None:
    """Loads are shapes that the legend explains once, not numbers at points, which are close to those of others."""
    pytest.importorskip("matplotlib")
    latency = {"p50": 5.0, "p99": 9.0}
    rows = [
        {"server": server, "concurrency": load, "request_rate": None, "output_throughput": 100.0 * load + i}
        | {"ttft_ms": latency, "tpot_ms": {"p50": 4.0}, "e2e_ms": None}
        for i, server in enumerate(("ar", "sd", "ssd"))
        for load in (1, 4)
    ]
    frontier.draw(rows, tmp_path / "frontier.svg")
    drawn = (tmp_path / "frontier.svg").read_text()
    for text in ("1 in flight", "4 in flight", "p50", "p99", "ar", "sd", "ssd", "time per output token"):
        assert drawn.count(f"<!-- {text} -->") == 1, text
    assert "end to end" not in drawn  # nothing was measured of it


def test_a_sweep_counts_by_usage(tmp_path: Path) -> None:
    """The server sends three tokens a chunk: counting chunks would give a third of the tokens."""
    out, plot = tmp_path / "load.json", tmp_path / "frontier.svg"
    with serving() as server:
        points = ["--concurrency", "1,4", "--num-prompts", "8", "--goodput", "ttft:10000,tpot:10000"]
        code, output = run(f"fake={server.url}", *points, "--json", str(out), "--plot", str(plot))
        assert 1 < server.most_under_way <= 4  # 4, unless the machine is very busy
        lengths = {body["max_tokens"] for body in server.bodies}
    assert code == 0, output
    first, second = json.loads(out.read_text())["results"]
    for row, number in ((first, 1), (second, 4)):
        assert (row["server"], row["concurrency"], row["request_rate"]) == ("fake", number, None)
        assert (row["completed"], row["failed"]) == (8, 0)
        assert (row["output_tokens"], row["input_tokens"]) == (8 * TOKENS, 8 * PROMPT_TOKENS)
        assert row["ttft_ms"]["p50"] >= 1000 * PAUSE
        assert row["e2e_ms"]["p50"] >= 1000 * PAUSE * len(PIECES)
        after_first = row["e2e_ms"]["mean"] - row["ttft_ms"]["mean"]
        assert row["tpot_ms"]["mean"] * (TOKENS - 1) == pytest.approx(after_first)
        assert row["itl_ms"]["mean"] * (len(PIECES) - 1) > 0.99 * after_first  # chunks may coincide: fewer gaps
        assert row["good_share"] == 1
    alone, together = (row["output_throughput"] * row["e2e_ms"]["mean"] / 1000 / TOKENS for row in (first, second))
    assert alone <= 1 < together, "requests in flight on average: speed times duration"
    assert len(lengths) > 4, "lengths are drawn from a distribution"
    assert plot.read_text().lstrip().startswith("<?xml")
    with serving() as server:
        code, output = run(f"again={server.url}", "--num-prompts", "1", "--with", str(out))
    assert code == 0
    assert output.count("fake") == 2


def test_requests_arrive_at_their_rate() -> None:
    """Arrivals do not wait for answers: at 100 a second, several are under way at a server that takes 80 ms."""
    with serving() as server:
        code, output = run(server.url, "--request-rate", "100", "--num-prompts", "20", "--json", "-")
        assert server.most_under_way > 2
    assert code == 0, output
    gaps = [after - before for before, after in pairwise(Load(100.0).arrivals(5000, 1))]
    assert statistics.fmean(gaps) == pytest.approx(0.01, rel=0.1)  # 5000 gaps: seven standard deviations
    assert statistics.stdev(gaps) == pytest.approx(0.01, rel=0.15)
    assert Load(100.0).arrivals(5, 1) == Load(100.0).arrivals(5, 1)


@pytest.mark.parametrize("behaviour", ["dies", "garbled", "fails", "unfinished", "no-usage", "refuses"])
def test_failures_are_counted_and_exit_with_1(behaviour: str) -> None:
    """Of a server that breaks during the sweep; the warm-up passes."""
    with serving() as server:
        wanted = Requests(num_prompts=3, max_output_len=4)

        class Breaks(Progress):
            def begin(self, name: str, count: int) -> Callable[..., object]:
                server.behaviour = behaviour
                return super().begin(name, count)

        [row] = sweep([ServerContender(server.url)], [Load(concurrency=3)], wanted, {"ttft": 1e6}, Breaks())
        assert (row["completed"], row["failed"], row["good_share"]) == (0, 3, 0)
        assert row["errors"]
        assert row["ttft_ms"] is None
        code, output = run(server.url, "--num-prompts", "2")
    assert code == 1
    assert "error:" in output


def test_figures() -> None:
    """Percentiles, throughput and goodput of known answers; one request fails and meets no goal."""
    results = [Result(0.0, Answer(0.0, 10, "", [(0.1 * i, 1.0), (0.1 * i + 0.9, 9.0)])) for i in range(1, 101)]
    row = figures(Load(2.0), [*results, Result(0.0, None, "broken")], parse_goals(["ttft:5000 tpot:101"]))
    assert row["seconds"] == pytest.approx(10.9)
    assert row["output_throughput"] == pytest.approx(1000 / 10.9)
    assert [row["ttft_ms"][p] for p in ("p50", "p90", "p99")] == pytest.approx([5000, 9000, 9900])
    assert row["tpot_ms"]["mean"] == pytest.approx(100)
    assert row["good_share"] == pytest.approx(50 / 101)
    assert row["errors"] == ["broken"]


def test_requests_are_those_of_the_seed() -> None:
    assert Requests(seed=1).draw() == Requests(seed=1).draw() != Requests(seed=2).draw()
    lengths = [asked.max_new_tokens for _, asked in Requests(num_prompts=4000).draw()]
    assert statistics.median(lengths) == pytest.approx(160, rel=0.1)  # five standard deviations
    assert max(lengths) == 1024
    prompts = [prompt for prompt, _ in Requests("gsm8k", num_prompts=500).draw()]
    assert len(prompts) == 500


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--goodput", "speed:3"], "goodput"),
        (["--goodput", "ttft:fast"], "goodput"),
        (["--request-rate", "1,2", "--concurrency", "1,2"], "sweep over one"),
        (["--request-rate", "0"], "request_rate"),
        (["--concurrency", "1.5"], "concurrency"),
        (["--num-prompts", "0"], "num_prompts"),
        (["--plot", "frontier.txt"], "frontier.txt"),
        (["--with", "nowhere.json"], "nowhere.json"),
    ],
)
def test_what_cannot_be_is_refused(arguments: list[str], named: str) -> None:
    code, output = run("http://127.0.0.1:9", *arguments)
    assert code == 1
    assert named in output


def test_goals() -> None:
    assert parse_goals(["ttft:200,tpot:30", "e2e:5000"]) == {"ttft": 200, "tpot": 30, "e2e": 5000}
    with pytest.raises(ConfigError):
        parse_goals([f"ttft:{math.nan}"])
