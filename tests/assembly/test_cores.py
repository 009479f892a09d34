"""The split of a CPU's cores between the target and drafts in processes of their own, with times that the test sets."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ssd import LLM, SamplingParams
from ssd.assembly import cores, placement
from ssd.assembly.open import open_checkpoint
from ssd.config import EngineConfig, SpeculationConfig

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
