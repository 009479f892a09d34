"""The whole engine over a suspicious fake target: whatever happens, every sample is what a naive loop would write.

The state machine mixes arrivals, rounds, aborts, forced preemptions and refused requests, with and without drafts.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence as Seq
from dataclasses import dataclass

import pytest
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
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from ssd.core import Proposal, RequestOutput, SamplingParams, Work
from ssd.decoding.drafter import Drafter
from ssd.errors import EngineFailed, RequestError

MAX_LEN = 24
EOS = frozenset({7})
BASE = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3, 2, 3, 8, 4, 6, 2, 6]  # prompts share heads of it

prompts = st.builds(
    lambda shared, tail: (BASE[:shared] + tail)[: MAX_LEN - 1],
    st.integers(0, MAX_LEN - 1),
    st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=5),
)
sampling_params = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.8]),
    seed=st.integers(0, 5),
    top_k=st.sampled_from([0, 0, 5]),
    repetition_penalty=st.sampled_from([1.0, 1.0, 1.3]),
    stop_token_ids=st.lists(st.integers(0, VOCAB - 1), max_size=4),
    max_new_tokens=st.integers(3, 30),
    min_tokens=st.integers(0, 3),
    ignore_eos=st.booleans(),
    logprobs=st.sampled_from([None, None, 0, 2]),
    n=st.sampled_from([1, 1, 1, 2, 3]),
)


@dataclass
class Asked:
    """A request as it was made, and whether it was aborted."""

    prompt: list[int]
    params: SamplingParams
    aborted: bool = False

    def expected(self, index: int) -> Expected:
        return naive(self.prompt, self.params, index, max_model_len=MAX_LEN, stop_token_ids=EOS)


def check_output(asked: Asked, output: RequestOutput) -> None:
    assert output.prompt_token_ids == asked.prompt
    assert output.error is None
    assert [sample.index for sample in output.samples] == list(range(asked.params.n))
    for sample in output.samples:
        expected = asked.expected(sample.index)
        if sample.finish_reason == "abort":
            assert asked.aborted
            assert sample.token_ids == expected.token_ids[: len(sample.token_ids)]
            assert len(sample.token_ids) < len(expected.token_ids)
        else:
            assert (sample.token_ids, sample.finish_reason) == (expected.token_ids, expected.finish_reason)
        assert sample.metrics.output_tokens == len(sample.token_ids)
        assert sample.metrics.rounds <= len(sample.token_ids)
        assert sample.metrics.cached_tokens < sample.metrics.prompt_tokens == len(asked.prompt)
        if asked.params.logprobs is None:
            assert sample.logprobs is None
        else:
            assert [entry.token_id for entry in sample.logprobs or []] == sample.token_ids


class EngineMachine(RuleBasedStateMachine):
    """Random life of an engine. Catches every bug of bookkeeping that changes a token, a reason or a count."""

    @initialize(
        lookahead=st.sampled_from([0, 0, 1, 3, 7]),
        manner=st.sampled_from(["right", "wrong", "mixed"]),
        block_size=st.sampled_from([1, 2, 4, 5]),
        extra_blocks=st.integers(0, 12),
        max_num_seqs=st.integers(1, 5),
        extra_budget=st.integers(0, 20),
        prefix_caching=st.sampled_from([True, True, False]),
    )
    def start(
        self,
        lookahead: int,
        manner: Manner,
        block_size: int,
        extra_blocks: int,
        max_num_seqs: int,
        extra_budget: int,
        prefix_caching: bool,
    ) -> None:
        self.drafter = ScriptedDrafter(lookahead, manner) if lookahead else Drafter()
        self.harness: Harness = make_harness(
            drafter=self.drafter,
            block_size=block_size,
            num_blocks=-(-MAX_LEN // block_size) + extra_blocks,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_seqs + extra_budget,
            max_model_len=MAX_LEN,
            prefix_caching=prefix_caching,
            stop_token_ids=EOS,
        )
        self.engine = self.harness.engine
        self.asked: dict[str, Asked] = {}
        self.forced = self.refused = 0

    def live(self) -> list[str]:
        return [request_id for request_id in self.asked if request_id not in self.harness.outputs]

    @rule(prompt=prompts, params=sampling_params)
    def add(self, prompt: list[int], params: SamplingParams) -> None:
        request_id = self.engine.add(prompt, params)
        assert request_id not in self.asked
        self.asked[request_id] = Asked(list(prompt), params)
        prompt.clear()  # the engine must not depend on the caller's list

    @rule(count=st.integers(1, 6))
    def step(self, count: int) -> None:
        for _ in range(count):
            self.harness.step()
            self.engine.check()

    @precondition(lambda self: self.live())
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        request_id = data.draw(st.sampled_from(self.live()))
        self.asked[request_id].aborted = True
        self.engine.abort(request_id)
        assert self.engine.has_work, "the answer is still to be handed out"
        self.harness.step()
        output = self.harness.outputs[request_id]
        assert any(sample.finish_reason == "abort" for sample in output.samples)

    @precondition(lambda self: self.engine.scheduler.running)
    @rule(data=st.data())
    def preempt(self, data: st.DataObject) -> None:
        self.engine.scheduler.preempt(data.draw(st.sampled_from(self.engine.scheduler.running)))
        self.forced += 1

    @rule()
    def forget_prefixes(self) -> None:
        self.engine.scheduler.pool.clear_prefix_cache()

    @rule(prompt=st.sampled_from([[], [VOCAB], [-1, 0], [0] * MAX_LEN]))
    def refuse(self, prompt: list[int]) -> None:
        with pytest.raises(RequestError):
            self.engine.add(prompt, SamplingParams(n=2))
        self.refused += 1

    @precondition(lambda self: self.live())
    @rule(data=st.data())
    def refuse_duplicate(self, data: st.DataObject) -> None:
        request_id = data.draw(st.sampled_from(self.live()))
        with pytest.raises(RequestError, match=request_id):
            self.engine.add([1], SamplingParams(), request_id)
        self.refused += 1

    @invariant()
    def books_balance(self) -> None:
        self.engine.check()
        check_cache(self.harness)

    def teardown(self) -> None:
        if not hasattr(self, "engine"):
            return
        outputs = self.harness.drain()
        assert outputs.keys() == self.asked.keys()
        for request_id, asked in self.asked.items():
            check_output(asked, outputs[request_id])
        self.check_cache_holds_committed_tokens_only()
        self.check_metrics()
        assert self.engine.scheduler.pool.num_free == self.engine.scheduler.pool.num_blocks
        if isinstance(self.drafter, ScriptedDrafter):
            assert not self.drafter.known

    def check_cache_holds_committed_tokens_only(self) -> None:
        samples = [(a.prompt, s.token_ids) for i, a in self.asked.items() for s in self.harness.outputs[i].samples]
        committed = {tuple((p + t)[:end]) for p, t in samples for end in range(len(p) + len(t) + 1)}
        assert set(cached_prefixes(self.engine.scheduler.pool).values()) <= committed

    def check_metrics(self) -> None:
        metrics = self.engine.metrics
        samples = [sample for output in self.harness.outputs.values() for sample in output.samples]
        assert metrics.num_requests == metrics.num_finished == len(self.asked)
        assert metrics.num_aborted == sum(asked.aborted for asked in self.asked.values())
        assert metrics.num_refused == self.refused
        assert metrics.num_rounds == len(self.harness.decoder.batches)
        assert metrics.prompt_tokens == sum(sample.metrics.prompt_tokens for sample in samples)
        assert metrics.cached_prompt_tokens == sum(sample.metrics.cached_tokens for sample in samples)
        assert metrics.output_tokens == sum(len(sample.token_ids) for sample in samples)
        assert self.engine.scheduler.num_preemptions >= self.forced
        assert self.engine.scheduler.num_preemptions == sum(sample.metrics.preemptions for sample in samples)


EngineMachine.TestCase.settings = settings(
    max_examples=80, stateful_step_count=30, deadline=None, suppress_health_check=list(HealthCheck)
)
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


@pytest.mark.parametrize("lookahead", [1, 3, 7])
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
    """Catches a failing round that costs a request which was not in it, or that leaves blocks behind."""
    harness = make_harness(max_num_batched_tokens=5, stop_token_ids=EOS)
    wanted = crowd(harness, [SamplingParams(temperature=0.8, seed=i, n=1 + i % 2, max_new_tokens=9) for i in range(40)])
    calls, lost = itertools.count(1), set()

    def flaky(batch: SeenBatch) -> None:
        if next(calls) % 19 == 0:
            lost.update(sequence.request.id for sequence in batch.sequences)
            raise MemoryError("out of memory\nin detail")

    harness.decoder.before = flaky
    outputs = harness.drain()
    assert lost
    assert lost < wanted.keys()
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
        ([0] * 64, SamplingParams(), "max_model_len=64"),
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
