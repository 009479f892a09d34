"""The fuzzer itself: a few of its cases pass, and it finds, shrinks and replays defects that are planted."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from conftest import mostly_slow
from fuzz.__main__ import fuzz
from fuzz.case import Call, Case, random_case
from fuzz.oracle import Oracle
from fuzz.run import run

from ssd import SamplingParams
from ssd.core import FinishReason, Outcome
from ssd.engine.engine import Engine
from ssd.engine.outputs import OutputProcessor
from ssd.execution.batch import BatchInputs
from ssd.execution.state import SequenceState
from ssd.kv.blocks import BlockPool, BlockTable

SEEDS = (150, 199, 198, 76, 96, 165, 172, 47)  # cases of one small model that together do almost everything


@pytest.fixture(scope="module")
def oracle() -> Iterator[Oracle]:
    with Oracle() as oracle:
        yield oracle


def test_a_case_survives_json() -> None:
    """Catches a parameter that is lost in a file, or comes back as another type."""
    for seed in range(50):
        case = random_case(seed)
        again = Case.from_json(case.to_json())
        assert (again.to_json(), again.calls) == (case.to_json(), case.calls)


@pytest.mark.parametrize("cases", mostly_slow([2, 8], fast={2}))
def test_random_engines_answer_like_plain_decoding(oracle: Oracle, cases: int) -> None:
    """Catches what the guarantees' own tests do not combine; `make fuzz` does this for longer."""
    covered: Counter[str] = Counter()
    for seed in SEEDS[:cases]:
        covered += run(random_case(seed, processes=False), oracle)
    assert {"preemption", "abort", "dropped stream", "interrupt", "failed request", "drafts accepted"} <= covered.keys()


@pytest.mark.slow
def test_structured_output_is_fuzzed(oracle: Oracle) -> None:
    """Catches requests that are drawn without it: AR, SD and SSD must write the same there, too."""
    pytest.importorskip("llguidance")
    covered = run(random_case(116, processes=False), oracle)
    assert {"structured output", "drafts accepted", "prepared drafts hit"} <= covered.keys()


APPEND, FINISH = OutputProcessor.append, Engine._finish


def drop_accepted(processor: OutputProcessor, outcome: Outcome) -> FinishReason | None:
    """The draft tokens accepted in a round that finds no token to choose are lost."""
    return APPEND(processor, outcome._replace(token_ids=(-1,)) if outcome.token_ids[-1] < 0 else outcome)


def end_siblings(engine: Engine, processor: OutputProcessor, reason: FinishReason, now: float) -> None:
    """A sample that fails ends the others of its request."""
    FINISH(engine, processor, reason, now)
    if reason == "error" and processor.sequence.request.id in engine._requests:
        engine._end(processor.sequence.request.id, "error", processor.error)


@pytest.mark.slow
def test_dead_ends_are_fuzzed(
    oracle: Oracle, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Catches requests that always have a token to choose: how the others fail would not be compared."""
    pytest.importorskip("llguidance")
    caplog.set_level(logging.CRITICAL, "ssd")  # records of planned errors would refer to their frames
    case = random_case(24, processes=False)
    assert {"no token to choose", "drafts accepted"} <= run(case, oracle).keys()
    for owner, name, defect in ((OutputProcessor, "append", drop_accepted), (Engine, "_finish", end_siblings)):
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, defect)
            with pytest.raises(AssertionError, match=r"sample|no token to choose"):
                run(case, oracle)


ACCEPT, GROW = BatchInputs.accept, BlockPool.grow


def accept_wrongly(inputs: BatchInputs, chosen: torch.Tensor, state: SequenceState, out: torch.Tensor) -> None:
    """The first token of every draft is accepted, whatever the target chooses."""
    for slot, row, count in zip(*(inputs[name].tolist() for name in ("slots", "first_row", "num_logits")), strict=True):
        if count > 1:
            chosen[row] = state.drafts[slot, 0]
    ACCEPT(inputs, chosen, state, out)


def hand_out_twice(pool: BlockPool, table: BlockTable, num_tokens: int) -> bool:
    """The last block that a sequence gets is free for others as well."""
    num_before = len(table.blocks)
    grown = GROW(pool, table, num_tokens)
    if len(table.blocks) > num_before:
        pool._unused[table.blocks[-1]] = None
    return grown


@pytest.mark.slow  # a test of the fuzzer
@pytest.mark.parametrize(
    ("seed", "owner", "name", "defect"),
    [(146, BatchInputs, "accept", accept_wrongly), (47, BlockPool, "grow", hand_out_twice)],
    ids=["acceptance", "blocks"],
)
def test_a_planted_defect_is_found_and_shrunk(
    oracle: Oracle,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    seed: int,
    owner: type,
    name: str,
    defect: Callable[..., object],
) -> None:
    """Catches a fuzzer that sees nothing, that loses the defect while it shrinks, or whose file is another case."""
    with monkeypatch.context() as patch:
        patch.setattr(owner, name, defect)
        assert fuzz(oracle, 0.001, seed, False, tmp_path) == 1
        case = Case.from_json((tmp_path / f"case-{seed}.json").read_text())
        with pytest.raises(AssertionError):
            run(case, oracle)
    run(case, oracle)
    assert f"--replay {tmp_path}" in capsys.readouterr().out
    if name == "accept":  # the request that is made after everything is enough
        assert case == Case([], speculation={"mode": "sd", "draft": "stranger", "k": 1})
    else:
        assert case == Case([Call(case.calls[0].prompt[:1], SamplingParams(seed=0, max_new_tokens=2))])
