"""The split of a CPU's cores between the target and drafts in processes of their own, with times that the test sets."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ssd import LLM, SamplingParams
from ssd.assembly import cores, draft_workers, placement
from ssd.assembly.open import open_checkpoint
from ssd.config import EngineConfig, SpeculationConfig
from ssd.drafting.arms import PLAIN, Arm

K, BRANCHES = 3, 16


def runner(name: str) -> Any:
    return SimpleNamespace(name=name, decoder=SimpleNamespace(device=torch.device("cpu")))


@pytest.fixture
def split(monkeypatch: pytest.MonkeyPatch) -> Callable[..., int | None]:
    def chosen(num_cores: int, verify: float, step: float, **options: Any) -> int | None:
        """`verify`, `step`: seconds of a verification and of a step over all branches, on one core."""

        def seconds(measured: Any, rows: int, threads: int) -> float:
            assert rows == (K + 1 if measured.name == "target" else BRANCHES)
            return (verify if measured.name == "target" else step) / threads

        monkeypatch.setattr(cores, "num_cores", lambda: num_cores)
        monkeypatch.setattr(cores, "_seconds", seconds)
        speculation = {"mode": "ssd", "draft": "d", "k": K, "budget": BRANCHES, "placement": "process"} | options
        config = EngineConfig("m", speculation=speculation)  # type: ignore[arg-type]
        return cores.split_cores(config, runner("target"), runner("draft")).draft_threads

    return chosen


def test_a_draft_has_the_fewest_cores_that_are_enough(split: Callable[..., int | None]) -> None:
    """Catches one core for the draft however many there are, and cores that only the target could use."""
    assert split(16, 60.0, 1.0) == 1
    assert split(16, 30.0, 1.5) == 3  # 6 / 3 <= 30 / 13
    assert split(16, 10.0, 2.5) == 8
    assert split(64, 60.0, 1.0) == 4
    assert split(16, 60.0, 5.0, draft_replicas=4) == 2  # each has 2 of 16: as many as the target in all


def test_if_no_number_is_enough_the_round_is_as_short_as_possible(split: Callable[..., int | None]) -> None:
    assert split(16, 1.0, 4.0) == 8


def test_few_cores_and_a_given_number_are_not_measured(split: Callable[..., int | None]) -> None:
    assert split(2, 1.0, 4.0) == 1
    assert split(3, 1.0, 4.0) == 1
    assert split(16, 1.0, 4.0, draft_threads=5) == 5


@pytest.mark.parametrize(
    ("draft", "options", "threads", "form"),
    [
        ("graft:tiny-qwen3-draft@qwen3-0.6b", {}, 14, "int4"),
        ("graft:tiny-qwen3-draft@qwen3-0.6b", {"draft_replicas": 2}, 7, "int4"),
        ("graft:tiny-qwen3-draft@qwen3-0.6b", {"draft_threads": 6, "draft_quantization": "int8"}, 6, "int8"),
        ("graft:tiny-qwen3-draft@qwen3-0.6b:int8", {}, 14, None),
        ("tiny-qwen3-draft", {}, 4, None),
        ("tiny-qwen3-draft", {"draft_replicas": 2}, 4, None),
    ],
)
def test_a_large_draft_on_the_cpu_beside_a_gpu_is_rounded_and_has_most_cores(
    monkeypatch: pytest.MonkeyPatch, draft: str, options: dict[str, Any], threads: int, form: str | None
) -> None:
    monkeypatch.setattr(placement, "num_cores", lambda: 16)
    wanted = SpeculationConfig(mode="ssd", draft=draft, placement="process", draft_device="cpu", **options)
    found = placement.sized(wanted, open_checkpoint(draft), torch.device("cuda"))
    assert (found.draft_threads, found.draft_quantization) == (threads, form)
    assert placement.sized(wanted, open_checkpoint(draft), torch.device("cpu")) == wanted


@pytest.mark.parametrize(
    ("draft", "options", "form"),
    [
        ("graft:tiny-qwen3-draft@qwen3-0.6b:int8", {}, "dequantized"),
        ("graft:tiny-qwen3-draft@qwen3-0.6b:int8", {"draft_quantization": "none"}, "none"),
        ("graft:tiny-qwen3-draft@qwen3-8b:int8", {}, None),
        ("tiny-qwen3-draft", {}, None),
    ],
)
def test_a_small_quantised_draft_on_a_gpu_becomes_floats(draft: str, options: dict[str, Any], form: str | None) -> None:
    wanted = SpeculationConfig(mode="sd", draft=draft, **options)
    assert placement.sized(wanted, open_checkpoint(draft), torch.device("cuda")).draft_quantization == form
    assert placement.sized(wanted, open_checkpoint(draft), torch.device("cpu")) == wanted


@pytest.fixture
def passes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two cores, on which a pass over 1 + n rows of the target takes 1 + n / 4 s, one of the draft 0.5 s."""

    def seconds(measured: Any, rows: int, threads: int, repeats: int = 1) -> float:
        cost = 1.0 + (rows - 1) / 4 if hasattr(measured, "features") else 0.5
        return 2 * cost / threads

    monkeypatch.setattr(cores, "num_cores", lambda: 2)
    monkeypatch.setattr(cores, "ThreadController", lambda: SimpleNamespace(count=lambda limit: limit))
    monkeypatch.setattr(cores, "_seconds", seconds)


@pytest.mark.parametrize(
    ("options", "sd", "ssd"),
    [
        ({}, 2.0 + 4 * 0.5, 5 * 1.0),  # a verification of 5 rows and 4 steps; 5 steps on one core take longer than it
        ({"k": "auto"}, (1 + 4 / 4) + 4 * 0.5, (1 + 9.0) / 2),  # half of what 8 tokens take
        ({"placement": "inline"}, 2.0 + 4 * 0.5, 2.0 + 5 * 0.5),
    ],
)
def test_rounds_take_the_time_of_their_passes(passes: None, options: dict[str, Any], sd: float, ssd: float) -> None:
    """Catches passes that are forgotten, and a target that has the cores of the draft."""
    target: Any = SimpleNamespace(features=None)
    speculation = {"mode": "auto", "draft": "d", "k": 4, "placement": "process"} | options
    least = cores.least_seconds(EngineConfig("m", device="cpu", speculation=speculation), target, runner("draft"))  # type: ignore[arg-type]
    assert least is not None
    assert [least(arm) for arm in (PLAIN, Arm(4, 0), Arm(4, 16))] == pytest.approx([1.0, sd, ssd])


def test_passes_are_no_measure_of_rounds_on_a_gpu_with_ranks_or_a_head(passes: None) -> None:
    speculation = {"mode": "auto", "draft": "d", "placement": "process"}
    for features, options in ((None, {"device": "cuda"}), (None, {"tensor_parallel_size": 2}), ("head", {})):
        target: Any = SimpleNamespace(features=features)
        config = EngineConfig("m", **{"device": "cpu", "speculation": speculation} | options)  # type: ignore[arg-type]
        assert cores.least_seconds(config, target, runner("draft")) is None


@pytest.mark.parametrize(("verify", "needed"), [(10.0, False), (1.1, True)])
def test_a_process_is_started_if_ssd_can_pay(monkeypatch: pytest.MonkeyPatch, verify: float, needed: bool) -> None:
    """`verify`: plain steps that a verification takes. Catches a second draft model in memory that is never used."""
    targets, started = list[Any](), list[Any]()

    def seconds(measured: Any, rows: int, *_: int) -> float:
        targets.extend([] if targets else [measured])
        return 0.1 if measured is not targets[0] else verify if rows > 1 else 1.0

    def start(setup: Any) -> Any:
        started.append(setup)
        raise OSError("no more processes")

    monkeypatch.setattr(cores, "num_cores", lambda: 2)
    monkeypatch.setattr(cores, "ThreadController", lambda: SimpleNamespace(count=lambda limit: limit))
    monkeypatch.setattr(cores, "_seconds", seconds)
    monkeypatch.setattr(draft_workers, "Worker", start)
    monkeypatch.setattr(placement, "num_cores", lambda: 2)
    speculation = {"mode": "auto", "draft": "tiny-llama-draft"}
    with LLM("tiny-llama", device="cpu", speculation=speculation) as llm:
        assert bool(started) == needed
        params = SamplingParams(max_new_tokens=64, ignore_eos=True)
        assert len(llm.generate("The old man", params)[0].token_ids) == 64
        assert bool(started) == needed
        assert needed or set(llm.engine.round.drafter.stats.rounds) == {"ar"}


@pytest.mark.slow
def test_a_split_is_measured_and_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the real models, as on a machine of four cores: both modes choose a number, the target has the others."""
    monkeypatch.setattr(cores, "num_cores", lambda: 4)
    threads = torch.get_num_threads()
    for mode in ("ssd", "auto"):
        speculation = {"mode": mode, "draft": "tiny-llama-draft", "k": 3, "placement": "process"}
        with LLM("tiny-llama", device="cpu", speculation=speculation) as llm:
            chosen = llm.config.speculation.draft_threads
            assert chosen in (1, 2)
            drafter: Any = llm.engine.round.drafter
            assert getattr(drafter, "inner", [drafter])[-1].cores == chosen
            assert len(llm.generate("The old man", SamplingParams(max_new_tokens=8))[0].token_ids) == 8
    assert torch.get_num_threads() == threads
