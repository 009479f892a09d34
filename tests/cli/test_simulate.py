"""`ssd simulate` on the command line: tables, JSON, pictures, errors that name the option; no torch."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from conftest import mostly_slow
from typer.testing import CliRunner

from ssd.cli.main import app

PAIR = ("qwen3-32b", "--draft", "qwen3-0.6b", "--accept", "4", "--k", "6")
LIGHT = """
import sys
from ssd.cli.main import app
try: app()
finally: print("torch" in sys.modules, "matplotlib" in sys.modules, file=sys.stderr)
"""


def run(*arguments: str) -> Any:
    """The JSON of a run."""
    done = CliRunner().invoke(app, ["simulate", *arguments, "--json", "-"])
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)


def refused(*arguments: str) -> str:
    done = CliRunner().invoke(app, ["simulate", *arguments])
    assert done.exit_code == 1, done.output
    return " ".join(done.stderr.split())


def test_it_imports_no_torch() -> None:
    """Catches a start that takes seconds."""
    done = subprocess.run(
        [sys.executable, "-c", LIGHT, "simulate", *PAIR, "--batch", "4"], capture_output=True, text=True, check=False
    )
    assert done.stderr.split()[-2:] == ["False", "False"]
    modes = [line.split()[0] for line in done.stdout.splitlines() if line.split()[:1] and "x" not in line]
    assert {"ar", "sd", "ssd"} <= set(modes)


def test_without_a_draft_it_tells_what_a_model_needs() -> None:
    found = {row["gpu"]: row for row in run("llama-3.1-70b")["needs"]}
    assert {name: row["gpus"] for name, row in found.items()}["h100-sxm"] == 2
    assert found["h100-sxm"]["weights_gib"] == pytest.approx(65.7, rel=0.01)
    assert found["rtx-4090"]["gpus"] == 8
    assert found["h200"]["tokens_per_second"] < found["h200"]["floor_tokens_per_second"]
    assert {row["gpu"]: row["gpus"] for row in run("llama-3.1-70b:fp8")["needs"]}["h100-sxm"] == 1
    [point] = run("llama-3.1-8b", "--gpu", "l40s")["points"]
    assert [each["mode"] for each in point["figures"]] == ["ar"]
    assert "more than 8" in CliRunner().invoke(app, ["simulate", "gpt-oss-120b:bf16"]).stdout


def test_a_pair_has_all_modes_and_ratios_to_the_first() -> None:
    [point] = run(*PAIR)["points"]
    ar, sd, ssd = point["figures"]
    assert [each["mode"] for each in (ar, sd, ssd)] == ["ar", "sd", "ssd"]
    assert (ar["gpus"], sd["gpus"], ssd["gpus"]) == (1, 1, 2)
    assert (
        ar["ratio"]
        == 1
        < sd["ratio"]
        < ssd["ratio"]
        == pytest.approx(ssd["tokens_per_second"] / ar["tokens_per_second"])
    )
    assert ssd["hits"] == pytest.approx(0.77, abs=0.03)
    assert 0 < ssd["draft_busy"] < ssd["target_busy"] < 1


def test_costs_are_those_of_all_gpus() -> None:
    [point] = run(*PAIR, "--compare", "sd,ssd", "--price", "3.6", "--draft-price", "1.8")["points"]
    sd, ssd = point["figures"]
    assert sd["cost"] == pytest.approx(3.6 / 3600 / sd["tokens_per_second"] * 1e6)
    assert ssd["cost"] == pytest.approx(5.4 / 3600 / ssd["tokens_per_second"] * 1e6)


def test_as_many_engines_run_as_fit() -> None:
    """16 GPUs: four targets of 4 with SD; three with a draft each, or three beside a shared one, with SSD."""
    split = ("llama-3.1-70b", "--draft", "llama-3.2-1b", "--accept", "4", "--gpus", "16", "--tensor-parallel-size", "4")
    [own], [shared] = (
        run(*split, *others, "--compare", "sd,ssd")["points"] for others in ((), ("--shared-drafts", "1"))
    )
    assert [each["engines"] for each in own["figures"]] == [4, 3]
    assert [each["engines"] for each in shared["figures"]] == [4, 3]
    assert {each["gpus"] for each in own["figures"] + shared["figures"]} == {16}
    sd, ssd = own["figures"]
    assert sd["tokens_per_second_per_gpu"] * 16 == pytest.approx(sd["tokens_per_second"])
    assert shared["figures"][1]["draft_busy"] > ssd["draft_busy"]


def test_more_replicas_have_more_hits() -> None:
    points = run(*PAIR, "--compare", "ssd", "--sweep", "draft_replicas=1,2,4")["points"]
    figures = [point["figures"][0] for point in points]
    assert [point["draft_replicas"] for point in points] == [1, 2, 4]
    for name in ("hits", "tokens_per_second"):
        assert [each[name] for each in figures] == sorted(each[name] for each in figures)


def test_arrivals_have_latencies() -> None:
    [point] = run(*PAIR, "--rate", "2", "--batch", "16", "--requests", "60", "--compare", "ar,sd")["points"]
    ar, sd = point["figures"]
    assert 0 < ar["first_token_50"] < ar["latency_50"] < ar["latency_99"]
    assert sd["latency_50"] < ar["latency_50"]
    assert ar["target_busy"] < 1


def test_measured_times_replace_predicted_ones() -> None:
    [point] = run(*PAIR, "--compare", "ar,ssd", "--measured-ar", "40", "--draft-step-ms", "5", "--hits", "1")["points"]
    ar, ssd = point["figures"]
    assert ar["tokens_per_second"] == pytest.approx(40)
    assert ssd["round_ms"] == pytest.approx(7 * 5 + 0.02, rel=0.01)


@pytest.mark.parametrize("kind", mostly_slow(["svg", "png"], fast={"svg"}))
def test_a_sweep_is_drawn(tmp_path: Path, kind: str) -> None:
    file = tmp_path / f"out.{kind}"
    arguments = ("--sweep", "batch=1,2", "--sweep", "hits=0.5,0.9", "--plot", str(file), "--show", "ratio")
    points = run(*PAIR, *arguments)["points"]
    assert [(point["batch"], point["hits"]) for point in points] == [(1, 0.5), (1, 0.9), (2, 0.5), (2, 0.9)]
    first = file.read_bytes()
    run(*PAIR, *arguments)
    assert file.read_bytes() == first
    assert len(first) > 5000


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("llama-3.1-9b",), "model='llama-3.1-9b' is no shape"),
        (("qwen3-32b", "--draft", "qwen3-0.6b"), "accept: sd and ssd need how many draft tokens are accepted"),
        (("qwen3-32b", "--compare", "ar,sd"), "draft: sd and ssd need a draft"),
        (("qwen3-32b", "--compare", "ar,tree"), "compare='ar,tree': must be some of ar, sd, ssd"),
        ((*PAIR, "--accept", "9"), "accept='9', k=6: a round with 6 draft tokens has at most 7 tokens"),
        ((*PAIR, "--gpu", "h300"), "gpu='h300': must be one of b200, h200"),
        ((*PAIR, "--gpu", "l40s"), "qwen3-32b need 61.1 GiB: use a larger tensor_parallel_size"),
        ((*PAIR, "--tensor-parallel-size", "3"), "tensor_parallel_size=3: the heads or the MLP of qwen3-32b"),
        ((*PAIR, "--gpus", "1"), "gpus=1: ssd needs 2 at least"),
        ((*PAIR, "--placement", "stream", "--shared-drafts", "1"), "shared_drafts=1: only with --placement process"),
        ((*PAIR, "--placement", "stream", "--draft-step-ms", "2"), "draft_step_ms=2.0: only with --placement process"),
        (("qwen3-32b", "--k", "6"), "k=6: there is no draft: name one with --draft"),
        (("qwen3-32b", "--placement", "stream"), "placement='stream': there is no draft"),
        ((*PAIR, "--draft-price", "2"), "draft_price=2.0: give the --price of the target's GPUs, too"),
        ((*PAIR, "--hits", "1.5"), "hits=1.5: must be a number from 0 to 1"),
        ((*PAIR, "--sweep", "batches=1,2"), "sweep='batches=1,2': did you mean batch?"),
        ((*PAIR, "--sweep", "batch=1,x"), "batch='x': must be an integer of at least 1"),
        ((*PAIR, "--plot", "x.svg"), "plot: there is no --sweep to draw"),
        ((*PAIR, "--sweep", "batch=1,2", "--plot", "x.pdf"), "must end in .png, .svg"),
        ((*PAIR, "--show", "speed"), "show='speed': must be one of gpus, engines, tokens_per_second"),
    ],
)
def test_errors_name_the_option(arguments: tuple[str, ...], message: str) -> None:
    assert message in refused(*arguments)
