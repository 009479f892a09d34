"""The random life of an engine over a suspicious decoder, as a hypothesis state machine.

It mixes arrivals, rounds, aborts, forced preemptions, failing rounds and refused requests, with and without drafts,
with and without a round in flight, and texts after which there is no token to choose. Whatever happens, every sample is
what a naive loop would write.
"""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from fakes import (
    VOCAB,
    Expected,
    Harness,
    Manner,
    ScriptedDrafter,
    SeenBatch,
    StateDrafter,
    StateTreeDrafter,
    TreeDrafter,
    cached_prefixes,
    check_cache,
    make_harness,
    naive,
)
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from ssd.core import RequestOutput, SamplingParams
from ssd.decoding.drafter import Drafter
from ssd.decoding.round import InFlight
from ssd.errors import RequestError
from ssd.kv.blocks import Windows, most_blocks

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
    priority=st.sampled_from([0, 0, 0, -1, 2]),
)


@dataclass
class Asked:
    """A request as it was made, and what happened to it."""

    prompt: list[int]
    params: SamplingParams
    aborted: bool = False
    failed: bool = False  # one of its rounds did: it was repeated, or failed if it was alone in it or in three of them
    ended: bool = False  # its answer was there before that
    dead_ends: int = 0  # of the decoder

    def expected(self, index: int) -> Expected:
        ends = self.dead_ends
        return naive(self.prompt, self.params, index, max_model_len=MAX_LEN, stop_token_ids=EOS, dead_ends=ends)


def check_output(asked: Asked, output: RequestOutput) -> None:
    assert output.prompt_token_ids == asked.prompt
    assert (output.error is not None) == ("error" in {sample.finish_reason for sample in output.samples})
    assert [sample.index for sample in output.samples] == list(range(asked.params.n))
    for sample in output.samples:
        expected = asked.expected(sample.index)
        failed = expected.finish_reason == "error"
        if (sample.token_ids, sample.finish_reason) != (expected.token_ids, expected.finish_reason):
            assert (sample.finish_reason == "abort" and asked.aborted) or (
                sample.finish_reason == "error" and asked.failed
            )
            assert sample.token_ids == expected.token_ids[: len(sample.token_ids)]
            assert len(sample.token_ids) < len(expected.token_ids) + failed
        assert sample.metrics.output_tokens == len(sample.token_ids)
        assert sample.metrics.rounds <= len(sample.token_ids) + failed
        assert sample.metrics.cached_tokens < sample.metrics.prompt_tokens == len(asked.prompt)
        if asked.params.logprobs is None:
            assert sample.logprobs is None
        else:
            assert [entry.token_id for entry in sample.logprobs or []] == sample.token_ids


class EngineMachine(RuleBasedStateMachine):
    """Catches every bug of bookkeeping that changes a token, a reason or a count."""

    run_ahead = False
    trees = False

    @initialize(
        lookahead=st.sampled_from([0, 0, 1, 3, 7]),
        depth=st.integers(1, 5),
        manner=st.sampled_from(["right", "wrong", "mixed"]),
        rude=st.booleans(),
        block_size=st.sampled_from([1, 2, 4, 5]),
        extra_blocks=st.integers(0, 12),
        max_num_seqs=st.integers(1, 5),
        spare_slots=st.integers(0, 2),
        extra_budget=st.integers(0, 20),
        prefix_caching=st.sampled_from([True, True, False]),
        dead_ends=st.sampled_from([0, 0, 20]),
        windows=st.sampled_from([(None,), (None,), (None, 5), (6,), (None, 1, 9)]),
    )
    def start(
        self,
        lookahead: int,
        depth: int,
        manner: Manner,
        rude: bool,
        block_size: int,
        extra_blocks: int,
        max_num_seqs: int,
        spare_slots: int,
        extra_budget: int,
        prefix_caching: bool,
        dead_ends: int,
        windows: Windows,
    ) -> None:
        budget = max_num_seqs + extra_budget
        scripted = StateDrafter if self.run_ahead else ScriptedDrafter
        self.drafter = scripted(lookahead, manner, rude=rude) if lookahead else Drafter()
        if self.trees:
            of_trees = StateTreeDrafter if self.run_ahead else TreeDrafter
            self.drafter = of_trees(2 * lookahead + 1, depth, manner, rude=rude)
        self.harness: Harness = make_harness(
            drafter=self.drafter,
            block_size=block_size,
            num_blocks=most_blocks(MAX_LEN, block_size, windows, 2 * budget) + extra_blocks,
            max_num_seqs=max_num_seqs,
            spare_slots=spare_slots,
            max_num_batched_tokens=budget,
            max_model_len=MAX_LEN,
            prefix_caching=prefix_caching,
            stop_token_ids=EOS,
            run_ahead=self.run_ahead,
            dead_ends=dead_ends,
            windows=windows,
        )
        self.dead_ends = dead_ends
        self.engine = self.harness.engine
        self.asked: dict[str, Asked] = {}
        self.forced = self.refused = self.num_good = self.num_lost = 0

    def live(self) -> list[str]:
        return [request_id for request_id in self.asked if request_id not in self.harness.outputs]

    @rule(prompt=prompts, params=sampling_params)
    def add(self, prompt: list[int], params: SamplingParams) -> None:
        request_id = self.engine.add(prompt, params)
        assert request_id not in self.asked
        self.asked[request_id] = Asked(list(prompt), params, dead_ends=self.dead_ends)
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
        self.engine.flush()
        if self.engine.scheduler.running:
            self.engine.scheduler.preempt(data.draw(st.sampled_from(self.engine.scheduler.running)))
            self.forced += 1
        self.harness.step()  # hands out what the flush has finished

    @precondition(lambda self: self.engine.has_work and self.engine.metrics.num_rounds > self.num_good)
    @rule(when_collected=st.booleans())
    def fail(self, when_collected: bool) -> None:
        """The next round that is launched, or collected, fails. Never two in a row: too many end the engine."""
        for request_id in self.harness.outputs:
            self.asked[request_id].ended = True
        lost: set[str] = set()
        collect = self.engine.round.collect

        def fail_launch(batch: SeenBatch) -> None:
            lost.update(sequence.request.id for sequence in batch.sequences)
            raise MemoryError("out of memory")

        def fail_collect(round_: InFlight) -> None:
            self.engine.round.collect = collect  # type: ignore[method-assign]
            lost.update(work.sequence.request.id for work in round_.works)
            raise MemoryError("out of memory")

        if when_collected:
            self.engine.round.collect = fail_collect  # type: ignore[method-assign,assignment]
        else:
            self.harness.decoder.before = fail_launch
        self.harness.step()
        self.engine.round.collect = collect  # type: ignore[method-assign]
        self.harness.decoder.before = lambda batch: None
        for request_id in lost:
            self.asked[request_id].failed |= not self.asked[request_id].ended
        if lost:
            self.num_good = self.engine.metrics.num_rounds
            self.num_lost += when_collected

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
        assert metrics.num_failed == sum(output.error is not None for output in self.harness.outputs.values())
        lost = len(self.harness.decoder.batches) - metrics.num_rounds
        assert self.num_lost <= lost <= 2 * self.num_lost  # the one in flight, too
        assert metrics.prompt_tokens == sum(sample.metrics.prompt_tokens for sample in samples)
        assert metrics.cached_prompt_tokens == sum(sample.metrics.cached_tokens for sample in samples)
        assert metrics.output_tokens == sum(len(sample.token_ids) for sample in samples)
        assert self.engine.scheduler.num_preemptions >= self.forced
        assert self.engine.scheduler.num_preemptions == sum(sample.metrics.preemptions for sample in samples)
