"""A sample for which there is no token to choose fails alone, after the same tokens in every mode and batch.

Over a suspicious decoder with dead ends, and on the bundled models with structured output whose next tokens are
forbidden.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from collections.abc import Sequence as Seq
from typing import Any

import pytest
from conftest import mostly_slow
from engine_machine import BASE, EOS
from fakes import Expected, Harness, ScriptedDrafter, StateDrafter, make_harness, naive, state_of

from ssd import LLM, SamplingParams
from ssd.core import Delta, Outcome, RequestOutput, Work
from ssd.decoding.rejection import RejectionTarget
from ssd.errors import ALL_FORBIDDEN, NO_CHOICE, RequestFailed

# --- over a suspicious decoder ----------------------------------------------------------------------------------------

DEAD_ENDS = 24  # of 256 prefixes


class Watcher(StateDrafter):
    """Right drafts; counts draft tokens that were accepted in rounds without a choice."""

    num_accepted_before_failure = 0

    def observe(self, works: Seq[Work], outcomes: Seq[Outcome | None], seconds: float) -> None:
        super().observe(works, outcomes, seconds)
        for outcome in outcomes:
            if outcome is not None and outcome.token_ids[-1] < 0:
                self.num_accepted_before_failure += outcome.num_accepted


PARAMS = [
    SamplingParams(
        temperature=0.8 * (i % 3 > 0),
        seed=i,
        n=1 + i % 4,
        max_new_tokens=3 + i % 20,
        logprobs=[None, 2][i % 2],
        stop_token_ids=[i % 32],
        repetition_penalty=[1.0, 1.2][i % 2],
    )
    for i in range(24)
]


def prompt(i: int) -> list[int]:
    return [*BASE[: 2 + i % 9], i % 32]


def naive_answer(prompt: Seq[int], params: SamplingParams, index: int) -> Expected:
    return naive(prompt, params, index, max_model_len=64, stop_token_ids=EOS, dead_ends=DEAD_ENDS)


@functools.cache
def expected(i: int, index: int) -> Expected:
    """The answer to one of PARAMS."""
    return naive_answer(prompt(i), PARAMS[i], index)


def serve(harness: Harness, params: Seq[SamplingParams]) -> tuple[dict[str, RequestOutput], list[Delta]]:
    """Every other request is streamed."""
    for i, each in enumerate(params):
        harness.engine.add(prompt(i), each, str(i), stream=i % 2 == 0)
    deltas = []
    while harness.engine.has_work:
        deltas += harness.engine.step()
        harness.engine.check()
    return {delta.request_id: delta.output for delta in deltas if delta.output is not None}, deltas


@pytest.mark.parametrize("run_ahead", mostly_slow([False, True], fast={True}))
@pytest.mark.parametrize(("lookahead", "max_num_seqs"), mostly_slow([(0, 1), (0, 8), (3, 8), (7, 1)], fast={(3, 8)}))
def test_samples_fail_alone_after_their_accepted_tokens(lookahead: int, max_num_seqs: int, run_ahead: bool) -> None:
    """Catches siblings that end with a sample that fails, accepted drafts that are dropped with it, and a stop among
    them that is taken for a failure."""
    drafter = Watcher(lookahead)
    harness = make_harness(
        drafter=drafter, max_num_seqs=max_num_seqs, stop_token_ids=EOS, dead_ends=DEAD_ENDS, run_ahead=run_ahead
    )
    outputs, deltas = serve(harness, PARAMS)
    reasons = set()
    for i in range(len(PARAMS)):
        samples = outputs[str(i)].samples
        for sample in samples:
            assert Expected(sample.token_ids, sample.finish_reason or "abort") == expected(i, sample.index)
            own = [delta for delta in deltas if (delta.request_id, delta.index) == (str(i), sample.index)]
            assert [token for delta in own for token in delta.token_ids] == sample.token_ids
            assert [entry for delta in own for entry in delta.logprobs] == (sample.logprobs or [])
            assert [delta.finish_reason for delta in own[-1:]] == [sample.finish_reason]
            assert sum(count for _, count in sample.metrics.deliveries) == len(sample.token_ids)
            assert (sample.metrics.first_token is None) == (not sample.token_ids)
        found = {sample.finish_reason for sample in samples}
        assert outputs[str(i)].error == (NO_CHOICE if "error" in found else None)
        reasons.add(frozenset(found))
    assert {frozenset({"error"}), frozenset({"error", "length"})} <= reasons
    assert harness.engine.metrics.num_failed == sum(output.error is not None for output in outputs.values())
    assert bool(drafter.num_accepted_before_failure) == bool(lookahead)
    assert harness.engine.metrics.output_tokens == sum(len(s.token_ids) for o in outputs.values() for s in o.samples)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_the_rejection_rule_fails_where_a_sample_gets_to(temperature: float) -> None:
    """Catches a failure for a position behind a rejected draft token, and accepted tokens that are dropped."""
    harness = make_harness(
        drafter=ScriptedDrafter(5, "mixed"), target=RejectionTarget, stop_token_ids=EOS, dead_ends=DEAD_ENDS
    )
    params = [SamplingParams(temperature=temperature, seed=i, n=2, max_new_tokens=20) for i in range(20)]
    outputs, _ = serve(harness, params)
    failed = 0
    for output in outputs.values():
        for sample in output.samples:
            text = output.prompt_token_ids + sample.token_ids
            ends = [state_of(text[:end])[0] < DEAD_ENDS for end in range(len(output.prompt_token_ids), len(text) + 1)]
            assert not any(ends[:-1])
            if sample.finish_reason == "error":
                assert ends[-1]
                failed += 1
            if temperature == 0.0:
                wanted = naive_answer(output.prompt_token_ids, output.params, sample.index)
                assert (sample.token_ids, sample.finish_reason) == (wanted.token_ids, wanted.finish_reason)
    assert failed > 5


# --- on the bundled models --------------------------------------------------------------------------------------------

SIBLINGS = r"(the( old){3}!|(a|one|my)( man){2,30}\.)"  # some samples come to an end, others need a "!"
REPEATED = r"(la ){9}!"  # drafts are right after a few rounds
SD: dict[str, Any] = {"mode": "sd", "draft": "tiny-llama-draft", "k": 4}
SSD: dict[str, Any] = {"mode": "ssd", "draft": "tiny-llama-draft", "k": 3, "budget": 6, "placement": "inline"}
HEAD = "tiny-llama-eagle"
VARIANTS: dict[str, dict[str, Any]] = {
    "sd": {"speculation": SD},
    "ssd": {"speculation": SSD},
    "suffix": {"speculation": {"mode": "sd", "draft": "suffix", "k": 4}},
    "sd, head": {"speculation": SD | {"draft": HEAD}},
    "ssd, head": {"speculation": SSD | {"draft": HEAD}},
    "ssd, process": {"speculation": SSD | {"placement": "process"}},
}


def forbidden(llm: LLM, character: str = "!") -> dict[int, float]:
    texts = ((token, llm.tokenizer.token_text(token)) for token in range(llm.engine.limits.vocab_size))
    return {token: float("-inf") for token, text in texts if character in text}


def answer(**options: Any) -> list[RequestOutput]:
    with LLM("tiny-llama", device="cpu", max_model_len=128, **options) as llm:
        bias = forbidden(llm)
        shared: dict[str, Any] = {"logit_bias": bias, "logprobs": 1, "max_new_tokens": 64, "n": 4, "seed": 5}
        params = [
            SamplingParams(temperature=1.5, structured={"regex": SIBLINGS}, **shared),
            SamplingParams(temperature=0.7, structured={"regex": REPEATED}, **shared),
            SamplingParams(temperature=0.0, structured={"regex": REPEATED}, **shared | {"n": 1}),
            SamplingParams(temperature=0.0, structured={"regex": REPEATED}, **shared | {"n": 1, "stop": "la la la la"}),
            SamplingParams(temperature=0.0, structured={"regex": REPEATED}, **shared | {"n": 1, "max_new_tokens": 6}),
        ]
        outputs = llm.generate(["Once upon a time"] * len(params), params)
        deltas = list(llm.stream_deltas("Once upon a time", params[0]))
        streamed = deltas[-1].output
        assert streamed is not None
        assert answers([streamed]) == answers(outputs[:1])
        for sample in streamed.samples:
            own = [delta for delta in deltas if delta.index == sample.index]
            assert "".join(delta.text for delta in own) == sample.text
        llm.driver.call(lambda engine: engine.check())
    return outputs


def answers(outputs: Seq[RequestOutput]) -> list[Any]:
    fields = [[(s.token_ids, s.text, s.finish_reason, s.logprobs) for s in output.samples] for output in outputs]
    return [(output.error, samples) for output, samples in zip(outputs, fields, strict=True)]


@pytest.fixture(scope="module")
def alone() -> list[RequestOutput]:
    """One sequence at a time, without drafts."""
    pytest.importorskip("llguidance")
    return answer(max_num_seqs=1, prefix_caching=False)


def test_a_sample_without_a_choice_fails_alone(alone: list[RequestOutput]) -> None:
    """The samples after it, and in a larger batch those beside it, come to their own ends."""
    ends = [("a man man man man.", "stop")] + [("the old old old", "error")] * 3
    assert [(sample.text, sample.finish_reason) for sample in alone[0].samples] == ends
    assert alone[0].error == ALL_FORBIDDEN
    assert [output.finish_reason for output in alone[1:]] == ["error", "error", "stop", "length"]
    assert answers(answer(max_num_seqs=8)) == answers(alone)


@pytest.mark.parametrize("variant", mostly_slow(VARIANTS, fast={"ssd"}))
def test_failures_are_the_same_with_drafts(alone: list[RequestOutput], variant: str) -> None:
    """Catches accepted draft tokens that are dropped in the round that finds no token to choose."""
    outputs = answer(max_num_seqs=8, **VARIANTS[variant])
    assert answers(outputs) == answers(alone)
    assert sum(sample.metrics.accepted for output in outputs[1:] for sample in output.samples) > 0


@pytest.mark.slow
def test_failures_are_the_same_with_drafts_on_two_ranks() -> None:
    """Two ranks round otherwise than one, so they are compared with themselves."""
    pytest.importorskip("llguidance")
    alone = answer(max_num_seqs=1, tensor_parallel_size=2)
    assert answers(answer(max_num_seqs=8, tensor_parallel_size=2, speculation=SD)) == answers(alone)


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM("tiny-llama", device="cpu", max_model_len=128) as llm:
        yield llm


def test_a_request_fails_if_all_samples_do(llm: LLM) -> None:
    """Catches samples that are lost with one that fails, and a failure that nobody is told of."""
    everything = SamplingParams(n=2, logit_bias={t: float("-inf") for t in range(llm.engine.limits.vocab_size)})
    with pytest.raises(RequestFailed, match="there is no token to choose"):
        llm.generate("Once", everything)
    [output] = llm.generate(["Once"], everything)
    assert (output.error, [sample.finish_reason for sample in output.samples]) == (ALL_FORBIDDEN, ["error", "error"])
    assert [sample.metrics.time_to_first_token for sample in output.samples] == [None, None]
    pytest.importorskip("llguidance")
    some = SamplingParams(1.5, seed=5, n=4, structured={"regex": SIBLINGS}, logit_bias=forbidden(llm))
    [output] = llm.generate("Once upon a time", some)
    assert output.samples[0].finish_reason == "stop"
    assert "error: there is no token" in str(output)
