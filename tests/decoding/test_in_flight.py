"""Rounds that are launched before the one before them is committed, as on a GPU: every answer stays what it was.

Over a suspicious decoder, and over small random models with drafts of their own (SD and SSD). On a CPU `run_ahead`
makes an engine commit every round one round late; results that are computed beyond a sequence's end must be dropped,
and nothing may be given to others that a round in flight still uses.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from collections.abc import Sequence as Seq
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
from conftest import mostly_slow
from engine_machine import BASE, EngineMachine
from fakes import StateDrafter, cached_prefixes, check_cache, make_harness, naive
from hypothesis import HealthCheck, settings
from hypothesis.stateful import rule
from random_requests import (
    MAX_LEN,
    UNPENALISED,
    Alone,
    Models,
    VerifiedDrafts,
    answers_alone,
    check_answers,
    play,
    random_requests,
)

from ssd import LLM, SamplingParams
from ssd.core import MODEL_WRITTEN, Origin

# --- over a suspicious decoder ----------------------------------------------------------------------------------------


class InFlightMachine(EngineMachine):
    """The random life of an engine that always has a round in flight."""

    run_ahead = True

    @rule()
    def commit_at_once(self) -> None:
        """What a drafter that needs every decided token asks for: for one step nothing is in flight."""
        self.engine.round.run_ahead = False
        self.harness.step()
        assert all(sequence.in_flight is None for sequence in self.engine.scheduler.running)
        self.engine.round.run_ahead = True


InFlightMachine.TestCase.settings = settings(stateful_step_count=20, suppress_health_check=list(HealthCheck))
TestInFlightMachine = InFlightMachine.TestCase


class LongMachine(InFlightMachine):
    """More of them, and longer ones."""


LongMachine.TestCase.settings = settings(
    max_examples=300, stateful_step_count=50, deadline=None, suppress_health_check=list(HealthCheck)
)
TestLongMachine = pytest.mark.slow(LongMachine.TestCase)


@pytest.mark.parametrize("lookahead", [0, 3])
def test_a_round_is_always_in_flight(lookahead: int) -> None:
    """Catches an engine that says that it runs ahead and commits at once; a round more is all that it may cost."""
    drafter = StateDrafter(lookahead) if lookahead else None
    harness = make_harness(drafter=drafter, run_ahead=True)
    request_id = harness.engine.add(BASE[:5], SamplingParams(max_new_tokens=20))
    harness.step()
    [sequence] = harness.engine.scheduler.running
    while sequence.num_remaining > 2 * (lookahead + 1):
        assert sequence.in_flight is not None
        num_before = len(sequence.tokens)
        harness.step()
        assert len(sequence.tokens) == num_before + 1 + lookahead
    output = harness.drain()[request_id]
    assert output.token_ids == naive(BASE[:5], SamplingParams(max_new_tokens=20), max_model_len=64).token_ids
    assert output.metrics.rounds == -(-20 // (lookahead + 1))
    num_rounds = harness.engine.metrics.num_rounds
    assert num_rounds == len(harness.decoder.batches)
    assert num_rounds <= output.metrics.rounds + (lookahead > 0), "the last token is foreseen where there are no drafts"


def test_a_prompt_that_waits_shares_its_blocks_with_one_of_higher_priority() -> None:
    """It has none of its own meanwhile: catches blocks of the one that are taken for the other's."""
    harness = make_harness(block_size=1, max_num_seqs=2, max_num_batched_tokens=2, run_ahead=True)
    prompts = {0: BASE[:16], -1: [*BASE[:8], 0]}  # by priority
    names = {}
    for priority, prompt in prompts.items():
        names[priority] = harness.engine.add(prompt, SamplingParams(max_new_tokens=3, priority=priority))
        harness.step()
        harness.engine.flush()
    outputs = harness.drain()
    for priority, prompt in prompts.items():
        expected = naive(prompt, SamplingParams(max_new_tokens=3), max_model_len=64)
        assert (outputs[names[priority]].error, outputs[names[priority]].token_ids) == (None, expected.token_ids)


def test_what_is_computed_beyond_the_end_is_dropped() -> None:
    """Catches tokens, counts or KV of the round that was launched before a stop was seen."""
    params = SamplingParams(max_new_tokens=30)
    free = naive([1, 2, 3], params, max_model_len=64).token_ids
    for stop, lookahead in itertools.product(sorted(set(free))[::2], (0, 1, 7)):
        drafter = StateDrafter(lookahead, "mixed") if lookahead else None
        harness = make_harness(drafter=drafter, block_size=2, run_ahead=True)
        output = harness.run([1, 2, 3], replace(params, stop_token_ids=[stop], logprobs=1))
        assert (output.token_ids, output.finish_reason) == (free[: free.index(stop) + 1], "stop")
        assert len(output.logprobs or []) == len(output.token_ids) == harness.engine.metrics.output_tokens
        assert harness.engine.metrics.num_sequence_rounds == output.metrics.rounds
        check_cache(harness)
        tokens = (1, 2, 3, *output.token_ids)
        assert all(tokens[: len(p)] == p for p in cached_prefixes(harness.engine.scheduler.pool).values())


def test_an_aborted_request_is_answered_at_once_and_keeps_its_blocks() -> None:
    """Catches an abort that waits for the round in flight, and blocks that others get while that writes to them."""
    harness = make_harness(num_blocks=16, run_ahead=True)
    engine, pool = harness.engine, harness.engine.scheduler.pool
    aborted = engine.add(BASE[:9], SamplingParams(max_new_tokens=40))
    for _ in range(3):
        harness.step()
    engine.abort(aborted)
    [sequence] = engine.scheduler.leaving
    assert sequence.in_flight is not None
    assert pool.num_free == 16 - len(sequence.kv.blocks)
    other = engine.add(BASE[:9], SamplingParams(max_new_tokens=40))
    blocks = set(sequence.kv.blocks)
    harness.step()
    assert harness.outputs[aborted].finish_reason == "abort"
    [running] = engine.scheduler.running
    assert not blocks & set(running.kv.blocks[2:]), "all but two blocks of the prompt, which are shared"
    assert engine.scheduler.leaving == []
    assert (
        harness.drain()[other].token_ids
        == naive(BASE[:9], SamplingParams(max_new_tokens=40), max_model_len=64).token_ids
    )


def test_a_flush_leaves_nothing_in_flight() -> None:
    """Catches a flush that loses what the round decided."""
    harness = make_harness(run_ahead=True)
    params = SamplingParams(max_new_tokens=6)
    request_id = harness.engine.add([1, 2], params)
    for _ in range(3):
        harness.step()
        harness.engine.flush()
        [sequence] = harness.engine.scheduler.running
        assert sequence.in_flight is None
    assert sequence.num_output == 3
    assert harness.drain()[request_id].token_ids == naive([1, 2], params, max_model_len=64).token_ids


# --- over models ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def alone(models: Models) -> Iterator[Alone]:
    """What the requests of a seed are answered by plain decoding with every round committed at once."""
    with answers_alone(models) as answer:
        yield answer


@contextmanager
def engine_with(models: Models, speculation: dict[str, Any] | None, **options: Any) -> Iterator[LLM]:
    """An engine with little memory that runs ahead."""
    options = {"max_num_seqs": 4, "block_size": 4, "num_kv_blocks": 40, "max_num_batched_tokens": 24} | options
    if speculation is not None and speculation["draft"] in models.drafts:
        speculation = speculation | {"draft": models.drafts[speculation["draft"]]}
    with LLM(models.target, device="cpu", max_model_len=MAX_LEN, speculation=speculation, **options) as llm:
        llm.driver.call(lambda engine: setattr(engine.round, "run_ahead", True))
        yield llm


def check_life(
    models: Models,
    alone: Alone,
    speculation: dict[str, Any] | None,
    *,
    seeds: Seq[int],
    count: int = 10,
    depths: Seq[int] = (),
    **options: Any,
) -> None:
    """Random requests, aborts and preemptions."""
    with engine_with(models, speculation, **options) as llm:
        for seed in seeds:
            requests = random_requests(count, seed)
            outputs = llm.driver.call(
                lambda engine, r=requests, s=seed: play(engine, r, preempt=0.03, seed=s, depths=depths)
            )
            check_answers(requests, outputs, alone(count, seed))


def ssd(draft: str = "noisy", **options: Any) -> dict[str, Any]:
    return {"mode": "ssd", "draft": draft, "placement": "inline", **options}


SPECULATIONS: dict[str, dict[str, Any] | None] = {
    "ar": None,
    "sd": {"mode": "sd", "draft": "noisy", "k": 3},
    "sd-auto": {"mode": "sd", "draft": "noisy", "k": "auto"},
    "suffix": {"mode": "sd", "draft": "suffix", "k": 4},
    "both": {"mode": "sd", "draft": "noisy", "k": 3, "suffix": True, "suffix_cache_tokens": 200},
    "jit": ssd(k=3, backup="jit", budget=6),
    "fast": ssd(k=3, backup="fast", budget=6),
    "auto": ssd(k=4, backup="auto", budget=8),
    "ssd-auto": ssd(k="auto", budget="auto"),
}


@pytest.mark.parametrize("speculation", mostly_slow(SPECULATIONS, fast={"both", "fast"}))
def test_everything_at_once(models: Models, alone: Alone, speculation: str) -> None:
    """Catches any difference to plain decoding that commits every round at once."""
    check_life(models, alone, SPECULATIONS[speculation], seeds=[0])


def test_the_rejection_rule_commits_at_once(models: Models) -> None:
    """Catches a round that is launched before the host has decided the one before it."""
    answers = []
    for run_ahead in (False, True):
        with engine_with(models, {"mode": "sd", "draft": "noisy", "k": 3, "acceptance": "rejection"}) as llm:
            llm.driver.call(lambda engine, ahead=run_ahead: setattr(engine.round, "run_ahead", ahead))
            outputs = llm.driver.call(lambda engine: play(engine, random_requests(10, 0), preempt=0.03))
            answers.append([[(s.token_ids, s.text, s.logprobs) for s in output.samples] for output in outputs])
    assert answers[0] == answers[1]


OPTIONS: dict[str, dict[str, Any]] = {
    "no memory to spare": {"num_kv_blocks": 18, "max_num_seqs": 8},
    "one at a time": {"max_num_seqs": 1, "max_num_batched_tokens": 5},
    "large blocks, all at once": {"max_num_seqs": 16, "block_size": 16, "max_num_batched_tokens": 512},
    "no prefix cache": {"prefix_caching": False, "num_kv_blocks": 24},
}


@pytest.mark.slow
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("speculation", SPECULATIONS)
def test_everything_for_long(models: Models, alone: Alone, speculation: str, options: str) -> None:
    """The same with every draft, with more and less memory, and with depths that change from round to round."""
    chosen, memory = SPECULATIONS[speculation], OPTIONS[options]
    if chosen is None or chosen["draft"] == "suffix":
        check_life(models, alone, chosen, seeds=[1, 2, 3], count=20, **memory)
        return
    for seed, draft in enumerate(models.drafts, start=1):
        depths = (0, 1, 2, 3) if seed == 2 else ()
        check_life(models, alone, chosen | {"draft": draft}, seeds=[seed], count=20, depths=depths, **memory)


@pytest.mark.parametrize(
    "speculation",
    [
        pytest.param({"mode": "sd", "draft": "self", "k": 3}, marks=pytest.mark.slow),
        pytest.param({"mode": "sd", "draft": "self", "k": 3, "suffix": True}, marks=pytest.mark.slow),
        ssd("self", k=3, backup="jit", budget=6),
        pytest.param(ssd("self", k=3, backup="fast", budget=6, fan_out="geometric"), marks=pytest.mark.slow),
        pytest.param({"mode": "sd", "draft": "self", "k": "auto"}, marks=pytest.mark.slow),
        pytest.param(ssd("self", k="auto"), marks=pytest.mark.slow),
    ],
    ids=["sd", "both", "jit", "fast", "sd-auto", "ssd-auto"],
)
@pytest.mark.parametrize("run_ahead", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_what_the_target_drafts_for_itself_stands(models: Models, speculation: dict[str, Any], run_ahead: bool) -> None:
    """Catches draft KV that is wrong, missing or somebody else's, which costs nothing but speed: so nobody notices.

    A model's own drafts all stand where no penalty counts drafted tokens. Rounds with and without drafts alternate.
    """
    verified = VerifiedDrafts()
    with engine_with(models, speculation) as llm, llm.driver.observing(verified):
        llm.driver.call(lambda engine: setattr(engine.round, "run_ahead", run_ahead))
        for seed in range(2):
            requests = [replace(r, params=replace(r.params, **UNPENALISED)) for r in random_requests(12, seed)]
            llm.driver.call(lambda e, r=requests, s=seed: play(e, r, preempt=0.03, seed=s, depths=(0, 0, 1, 2, 3)))
    written = [each for each in verified.drafts if each[0] in MODEL_WRITTEN]
    assert len(written) > 50
    assert [each for each in written if each[1] != each[2]] == []
    if speculation["mode"] == "ssd" and speculation["k"] != "auto":
        assert sum(origin is Origin.HIT for origin, _, _ in written) > 20
