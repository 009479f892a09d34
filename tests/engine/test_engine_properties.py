"""The whole engine over a suspicious decoder: whatever happens, every sample is what a naive loop would write."""

from __future__ import annotations

import bisect
import collections
import itertools
import math
import types
from collections.abc import Sequence as Seq
from typing import Any

import pytest
import torch
from conftest import mostly_slow
from engine_machine import BASE, EOS, EngineMachine
from fakes import (
    VOCAB,
    Expected,
    Harness,
    Manner,
    ScriptedDrafter,
    SeenBatch,
    cached_prefixes,
    check_cache,
    make_harness,
    naive,
)
from hypothesis import HealthCheck, settings

from ssd.core import Proposal, SamplingParams, Work
from ssd.decoding.round import InFlight
from ssd.errors import EngineFailed, RequestError

EngineMachine.TestCase.settings = settings(stateful_step_count=20, suppress_health_check=list(HealthCheck))
TestEngineMachine = EngineMachine.TestCase


# --- fixed scripts ----------------------------------------------------------------------------------------------------


def crowd(harness: Harness, params: Seq[SamplingParams], max_len: int = 64) -> dict[str, Expected]:
    """Many requests at once, with shared heads; returns what each must be answered."""
    wanted = {}
    for i, p in enumerate(params):
        prompt = [*BASE[: 2 + i % 9], i % VOCAB]
        request_id = harness.engine.add(prompt, p)
        wanted[request_id] = naive(prompt, p, max_model_len=max_len, stop_token_ids=EOS)
    return wanted


def check_crowd(harness: Harness, wanted: dict[str, Expected]) -> None:
    outputs = harness.drain()
    got = {i: Expected(outputs[i].token_ids, outputs[i].finish_reason or "abort") for i in wanted}
    assert got == wanted


@pytest.mark.parametrize("lookahead", mostly_slow([1, 3, 7], fast={3}))
@pytest.mark.parametrize("manner", ["right", "wrong", "mixed"])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_drafts_never_change_the_tokens(lookahead: int, manner: Manner, temperature: float) -> None:
    """Catches acceptance of a token the target would not have chosen, and KV of rejected drafts that stays visible."""
    drafter = ScriptedDrafter(lookahead, manner)
    harness = make_harness(drafter=drafter, num_blocks=24, stop_token_ids=EOS)
    check_crowd(harness, crowd(harness, [SamplingParams(temperature=temperature, seed=i) for i in range(8)]))
    metrics = [output.metrics for output in harness.outputs.values()]
    assert sum(m.drafted for m in metrics) == harness.engine.metrics.spec_decode_num_draft_tokens > 0
    assert sum(m.accepted for m in metrics) == harness.engine.metrics.spec_decode_num_accepted_tokens
    for output, m in zip(harness.outputs.values(), metrics, strict=True):
        if manner == "right":  # what is drafted behind a stop is not counted as accepted
            assert m.accepted <= m.drafted < m.accepted + (lookahead if output.finish_reason == "stop" else 1)
        elif manner == "wrong":
            assert m.accepted == 0
    assert not drafter.known


@pytest.mark.parametrize("lookahead", [1, 3, 7])
def test_right_drafts_save_rounds(lookahead: int) -> None:
    """Catches accepted drafts, or their KV, that are thrown away: K right drafts a round must give K + 1 tokens."""
    harness = make_harness(drafter=ScriptedDrafter(lookahead))
    output = harness.run([1, 2, 3], SamplingParams(max_new_tokens=40))
    assert len(output.token_ids) == 40
    assert output.metrics.rounds == -(-40 // (lookahead + 1))
    positions = [p for batch in harness.decoder.batches for p in batch.positions]
    assert positions == list(range(3 + 40 - 1)), "every position is computed once, and the last token never"


@pytest.mark.parametrize("lookahead", [0, 3])
def test_the_host_s_share_of_rounds(lookahead: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches time of the device, of drafting, or without requests, that counts as the host's; and rounds left out."""
    seconds = 0.0

    def passes(more: float) -> None:
        nonlocal seconds
        seconds += more

    class SlowDrafter(ScriptedDrafter):
        def propose(self, works: Seq[Work]) -> list[Proposal]:
            passes(10)
            return super().propose(works)

    monkeypatch.setattr("ssd.execution.clock.time", types.SimpleNamespace(perf_counter=lambda: seconds))
    harness = make_harness(drafter=SlowDrafter(lookahead, "wrong") if lookahead else None)
    harness.decoder.before = lambda batch: passes(4)
    for _ in range(2):
        harness.engine.add([1, 2], SamplingParams(max_new_tokens=3))
        while harness.engine.has_work:
            harness.step()
            passes(1)  # the host's time
        passes(1000)  # nobody asks
    stats, drafting = harness.engine.metrics, 6 * 10 if lookahead else 0
    assert stats.num_rounds == 6
    assert stats.host_wait_seconds == 4, "between the three rounds of two requests"
    assert stats.round_seconds == 4 + 6 * 4 + drafting
    assert stats.host_share == stats.host_wait_seconds / stats.round_seconds


@pytest.mark.parametrize("prompt_len", [1, 3, 15])
@pytest.mark.parametrize("lookahead", [0, 7])
def test_length_is_reached_exactly(prompt_len: int, lookahead: int) -> None:
    """Catches off-by-ones at max_model_len, also with a pool of exactly that size and a long lookahead."""
    drafter = ScriptedDrafter(lookahead) if lookahead else None
    harness = make_harness(drafter=drafter, num_blocks=4, max_model_len=16)
    output = harness.run(BASE[:prompt_len], SamplingParams(max_new_tokens=1000))
    assert output.finish_reason == "length"
    assert len(output.token_ids) == 16 - prompt_len


def test_stop_inside_accepted_drafts() -> None:
    """Catches tokens after a stop that a multi-token outcome brought along, in the text, the counts or the cache."""
    free = naive([1, 2, 3], SamplingParams(max_new_tokens=30), max_model_len=64).token_ids
    for stop in sorted(set(free)):
        harness = make_harness(drafter=ScriptedDrafter(7), block_size=2)
        output = harness.run([1, 2, 3], SamplingParams(max_new_tokens=30, stop_token_ids=[stop], logprobs=1))
        assert output.finish_reason == "stop"
        assert output.token_ids == free[: free.index(stop) + 1]
        assert len(output.logprobs or []) == len(output.token_ids) == harness.engine.metrics.output_tokens
        check_cache(harness)
        tokens = (1, 2, 3, *output.token_ids)
        assert all(tokens[: len(p)] == p for p in cached_prefixes(harness.engine.scheduler.pool).values())


class UnrulyDrafter(ScriptedDrafter):
    """Breaks the rules of the protocol in one way; the tokens themselves start out right."""

    def __init__(self, fault: str) -> None:
        super().__init__(3, rude=True)
        self.fault = fault

    def propose(self, works: Seq[Work]) -> list[Proposal]:
        proposals = super().propose(works)
        if self.fault == "too long":
            return [Proposal(p.token_ids + p.token_ids * 3) for p in proposals]
        if self.fault == "beyond the vocabulary":
            return [Proposal((p.token_ids[0], VOCAB + 5, 1)) for p in proposals]
        if self.fault == "negative":
            return [Proposal((p.token_ids[0], -3, 1)) for p in proposals]
        return proposals


@pytest.mark.parametrize("fault", ["no room", "too long", "beyond the vocabulary", "negative"])
def test_a_faulty_drafter_costs_no_request(fault: str) -> None:
    """Catches drafts that are trusted: too many for the room or the slots, or ids that no embedding has.

    The protocol only says "up to `lookahead` tokens", so a drafter need not know a sequence's room.
    """
    harness = make_harness(drafter=UnrulyDrafter(fault), num_blocks=16, max_model_len=32, stop_token_ids=EOS)
    penalised = SamplingParams(repetition_penalty=1.2, max_new_tokens=100)
    wanted = crowd(harness, [SamplingParams(max_new_tokens=9), penalised, SamplingParams()], max_len=32)
    check_crowd(harness, wanted)
    for batch in harness.decoder.batches:
        assert max(batch.positions) < 32, "a drafted position lies beyond max_model_len"
        assert all(0 <= token < VOCAB for token in batch.token_ids)


@pytest.mark.parametrize("lookahead", [0, 1, 3, 7])
def test_batches_stay_within_their_limits(lookahead: int) -> None:
    """Catches batches beyond what the device reserved: tokens (drafts included), and rows of logits."""
    drafter = ScriptedDrafter(lookahead) if lookahead else None
    budget = 4 * (1 + lookahead)
    harness = make_harness(drafter=drafter, max_num_seqs=4, max_num_batched_tokens=budget)
    check_crowd(harness, crowd(harness, [SamplingParams(ignore_eos=True, max_new_tokens=9 + i) for i in range(9)]))
    assert max(len(batch.logit_rows) for batch in harness.decoder.batches) <= budget
    assert max(batch.num_tokens for batch in harness.decoder.batches) <= budget


def test_parameters_of_all_kinds_side_by_side() -> None:
    """Catches parameters that reach the wrong row."""
    harness = make_harness(stop_token_ids=EOS)
    kinds = [
        SamplingParams(),
        SamplingParams(temperature=0.8, seed=1),
        SamplingParams(logit_bias={3: 1.0}),
        SamplingParams(frequency_penalty=0.5),
        SamplingParams(min_tokens=5, top_k=3, temperature=1.0, seed=2),
    ]
    check_crowd(harness, crowd(harness, kinds))


def test_a_failing_target_leaves_the_books_in_order() -> None:
    """Catches a failing round that costs a request which was not alone in it, or that leaves blocks behind."""
    harness = make_harness(max_num_batched_tokens=5, stop_token_ids=EOS)
    wanted = crowd(harness, [SamplingParams(temperature=0.8, seed=i, n=1 + i % 2, max_new_tokens=9) for i in range(40)])
    calls, lost, repeated = itertools.count(1), set(), collections.Counter[str]()

    def flaky(batch: SeenBatch) -> None:
        if next(calls) % 4 == 0:
            involved = {sequence.request.id for sequence in batch.sequences}
            repeated.update(involved)
            lost.update(name for name in involved if len(involved) == 1 or repeated[name] == 3)
            raise MemoryError("out of memory\nin detail")

    harness.decoder.before = flaky
    outputs = harness.drain()
    assert 0 < len(lost) < len(repeated) <= len(wanted)
    for name, output in outputs.items():
        reasons = [sample.finish_reason for sample in output.samples]
        if name in lost:
            assert output.error == "the round that computed this request failed: MemoryError: out of memory"
            assert "error" in reasons
        else:
            assert (output.error, output.token_ids, reasons[0]) == (
                None,
                wanted[name].token_ids,
                wanted[name].finish_reason,
            )
    assert harness.engine.metrics.num_failed == len(lost)
    assert harness.engine.metrics.num_finished == len(wanted)
    assert harness.engine.scheduler.pool.num_free == harness.engine.scheduler.pool.num_blocks


@pytest.mark.parametrize("run_ahead", [False, True])
@pytest.mark.parametrize("when_collected", [False, True])
def test_a_request_that_always_fails_fails_alone(run_ahead: bool, when_collected: bool) -> None:
    """Catches a poison request that costs others their answers, or that is tried for ever."""
    harness = make_harness(stop_token_ids=EOS)
    harness.engine.round.run_ahead = run_ahead
    wanted = crowd(harness, [SamplingParams(temperature=0.8, seed=i, n=1 + i % 2, max_new_tokens=9) for i in range(12)])
    collect = harness.engine.round.collect

    def poisoned(names: list[str]) -> None:
        if "request-5" in names and len(harness.decoder.batches) > 3:
            raise ValueError("poison")

    def collect_poisoned(round_: InFlight) -> Any:
        found = collect(round_)
        poisoned([work.sequence.request.id for work in round_.works])
        return found

    if when_collected:
        harness.engine.round.collect = collect_poisoned  # type: ignore[method-assign]
    else:
        harness.decoder.before = lambda batch: poisoned([s.request.id for s in batch.sequences])
    outputs = harness.drain()
    assert outputs.pop("request-5").finish_reason == "error"
    assert len(outputs) == len(wanted) - 1
    for name, output in outputs.items():
        assert (output.error, output.token_ids) == (None, wanted[name].token_ids)
    assert harness.engine.scheduler.pool.num_free == harness.engine.scheduler.pool.num_blocks


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_logits_without_a_choice_fail_their_request_alone(monkeypatch: pytest.MonkeyPatch, value: float) -> None:
    """Catches token 0 written in place of an error, and an error that reaches other requests."""
    harness = make_harness(stop_token_ids=EOS)
    wanted = crowd(harness, [SamplingParams(temperature=0.8 * (i % 2), seed=i, max_new_tokens=9) for i in range(8)])
    compute = type(harness.decoder).__call__

    def broken(decoder: Any, batch: Any, kv: Any) -> torch.Tensor:
        logits = compute(decoder, batch, kv)
        seen = decoder.batches[-1]
        for row, source in enumerate(seen.logit_rows):
            sequence = seen.sequences[bisect.bisect_right(seen.query_start, source) - 1]
            if sequence.request.id in ("request-3", "request-4") and len(sequence.tokens) > sequence.num_prompt + 2:
                logits[row] = value
        return logits

    monkeypatch.setattr(type(harness.decoder), "__call__", broken)
    outputs = harness.drain()
    for name, output in outputs.items():
        if name in ("request-3", "request-4"):
            assert output.error is not None
            assert "NaN or infinite" in output.error
            assert output.token_ids == wanted[name].token_ids[:3]
        else:
            assert (output.error, output.token_ids) == (None, wanted[name].token_ids)


def test_an_engine_whose_rounds_keep_failing_says_so() -> None:
    """Catches requests that wait for ever for a device that is lost, and a single good round that does not count."""
    harness = make_harness(max_num_seqs=1)
    broken = True

    def flaky(batch: SeenBatch) -> None:
        if broken:
            raise RuntimeError("device lost")

    harness.decoder.before = flaky
    names = [harness.engine.add([1, 2], SamplingParams(max_new_tokens=1)) for _ in range(9)]
    for _ in range(2):
        harness.step()
    broken = False
    harness.step()
    broken = True
    for _ in range(2):
        harness.step()
    assert [harness.outputs[name].finish_reason for name in names[:5]] == ["error", "error", "length", "error", "error"]
    harness.engine.add([1, 2], SamplingParams())
    harness.step()
    assert not harness.engine.has_work
    assert all(harness.outputs[name].finish_reason == "error" for name in names[5:])
    with pytest.raises(EngineFailed, match="device lost"):
        harness.engine.add([1, 2], SamplingParams())
    harness.engine.check()


def test_deltas_make_up_the_answer() -> None:
    """Catches tokens, log-probabilities or samples that are missing, doubled or out of order in the deltas."""
    params = SamplingParams(n=3, max_new_tokens=11, temperature=0.8, seed=1, logprobs=1)
    for stream in (True, False):
        harness = make_harness(drafter=ScriptedDrafter(3, "mixed"))
        engine = harness.engine
        engine.add([1, 2], params, stream=stream)
        deltas = []
        while engine.has_work:
            deltas += engine.step()
        [output] = [delta.output for delta in deltas if delta.output is not None]
        assert deltas[-1].output is output
        for sample in output.samples:
            own = [delta for delta in deltas if delta.index == sample.index]
            assert (len(own) > 3) == stream
            assert [t for delta in own for t in delta.token_ids] == sample.token_ids
            assert [t for delta in own for t in delta.logprobs] == sample.logprobs
            assert [delta.finish_reason for delta in own] == [None] * (len(own) - 1) + ["length"]
        assert sum(delta.num_accepted for delta in deltas) == engine.metrics.spec_decode_num_accepted_tokens


def test_the_prefix_cache_saves_work() -> None:
    """Catches a cache that is always missed, and tokens reported as cached that were computed."""
    harness = make_harness()
    harness.run(BASE[:17])
    before = sum(batch.num_tokens for batch in harness.decoder.batches)
    output = harness.run([*BASE[:17], 30], SamplingParams(max_new_tokens=1))
    assert output.metrics.cached_tokens == harness.engine.metrics.cached_prompt_tokens == 16
    assert sum(batch.num_tokens for batch in harness.decoder.batches) - before == 2


def test_generated_ids_avoid_the_users_own() -> None:
    """Catches a request without an id that is refused because another id looks like a generated one."""
    harness = make_harness()
    chosen = [harness.engine.add([1], SamplingParams(), f"request-{i}") for i in range(3, 9)]
    generated = [harness.engine.add([1], SamplingParams()) for _ in range(6)]
    assert len({*chosen, *generated}) == 12


def test_an_id_may_be_used_again_when_its_request_is_done() -> None:
    """Catches ids that stay taken for ever."""
    harness = make_harness()
    for _ in range(3):
        assert harness.engine.add([1, 2], SamplingParams(max_new_tokens=2), "mine") == "mine"
        harness.drain().pop("mine")
    assert harness.engine.metrics.num_finished == 3


@pytest.mark.parametrize(
    ("prompt", "params", "message"),
    [
        ([], SamplingParams(), "empty"),
        ([0] * 64, SamplingParams(), "maximum context length is 64"),
        ([0, VOCAB], SamplingParams(), "token ids"),
        ([-1], SamplingParams(), "token ids"),
        ([1.5], SamplingParams(), "token ids"),
        ([1], SamplingParams(logit_bias={VOCAB: 1.0}), "logit_bias"),
        ([1], SamplingParams(stop="x"), "stop"),
    ],
)
def test_refused_requests_harm_nobody(prompt: list[int], params: SamplingParams, message: str) -> None:
    """Catches a refusal that leaves a half-made request behind, or an error that does not say what was wrong."""
    harness = make_harness(stop_token_ids=EOS)
    wanted = crowd(harness, [SamplingParams(seed=i, temperature=0.8) for i in range(3)])
    harness.step()
    with pytest.raises(RequestError, match=message):
        harness.engine.add(prompt, params, "bad")
    harness.engine.abort("bad")
    check_crowd(harness, wanted)
    assert harness.engine.metrics.num_requests == 3
    assert harness.engine.metrics.num_refused == 1


def test_a_prompt_of_the_longest_length_gets_one_token() -> None:
    """Catches refusing, or overrunning with, a prompt of max_model_len - 1 tokens."""
    harness = make_harness(num_blocks=16)
    output = harness.run([i % VOCAB for i in range(63)])
    assert len(output.token_ids) == 1
    assert output.finish_reason == "length"


def test_abort_returns_what_was_written() -> None:
    """Catches an abort that loses finished samples, or that is answered again by a later round."""
    harness = make_harness(max_num_seqs=2)
    request_id = harness.engine.add([1, 2], SamplingParams(n=3, max_new_tokens=4, temperature=0.8, seed=1))
    for _ in range(5):
        harness.step()
    harness.engine.abort(request_id)
    harness.engine.abort(request_id)
    assert harness.engine.has_work
    [delta] = harness.engine.step()
    assert (delta.index, delta.finish_reason) == (2, "abort")
    assert delta.output is not None
    assert [sample.finish_reason for sample in delta.output.samples] == ["length", "length", "abort"]
    assert not harness.engine.has_work
    assert harness.engine.step() == []
    harness.engine.check()
