"""SD and SSD with an EAGLE head write what plain decoding writes; its drafts are those of a plain implementation.

The latter holds only if every K and V of the head, and every feature that it begins from, is the right one: after
chunked prompts, with prefixes from the cache, at block borders, after preemptions and rejected drafts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from bits import same_bits
from conftest import TestModel, mostly_slow, ragged_prompts
from eagle_heads import Head, make_head
from eagle_observers import FEW, Branches, Drafts
from fakes import wait_until_idle

from ssd import LLM, SamplingParams
from ssd.drafting.runner import DraftRun, DraftRunner, StagedBranches
from ssd.drafting.ssd import SSDDrafter
from ssd.models.eagle import EagleHead

PROMPTS = ragged_prompts(8, longest=40)
Answers = list[tuple[Any, ...]]


@pytest.fixture(scope="module", params=mostly_slow(["llama-tied", "qwen3"], fast={"llama-tied"}))
def target(request: pytest.FixtureRequest, make_model: Callable[[str], TestModel]) -> TestModel:
    return make_model(request.param)


@pytest.fixture(scope="module")
def head(target: TestModel, tmp_path_factory: pytest.TempPathFactory) -> Head:
    head = make_head(target, tmp_path_factory.mktemp("head"))
    ids = torch.arange(200) + head.weights["d2t"]
    assert len(set(FEW) & set(ids.tolist())) > 1
    return head


def params(i: int, new_tokens: int = 24) -> SamplingParams:
    """Greedy and sampled, within a few tokens or not."""
    bias = dict.fromkeys(FEW, 100.0) if i % 2 else {}
    return SamplingParams(
        temperature=(0.0, 0.0, 0.8, 1.2)[i % 4],
        top_p=(1.0, 0.9)[i % 2],
        seed=i,
        logit_bias=bias,
        max_new_tokens=new_tokens - i,
        ignore_eos=True,
    )


PARAMS = [params(i) for i in range(len(PROMPTS))]


def answers(llm: LLM) -> Answers:
    outputs = llm.generate(PROMPTS, PARAMS)
    wait_until_idle(llm.driver)
    assert llm.engine.metrics.drafter_failures == 0
    llm.engine.check()
    return [(output.token_ids, output.finish_reason) for output in outputs]


@pytest.fixture(scope="module")
def alone(target: TestModel) -> Iterator[Answers]:
    with LLM(target.path, device="cpu", prefix_caching=False, max_num_seqs=1) as llm:
        yield answers(llm)


OPTIONS: dict[str, dict[str, Any]] = {
    "one at a time": {"max_num_seqs": 1, "block_size": 4},
    "together": {},
    "no prefix cache": {"prefix_caching": False, "max_num_seqs": 4},
    "chunked prompts": {"max_num_seqs": 3, "max_num_batched_tokens": 7, "block_size": 4},
    "preempted": {"max_num_seqs": 6, "block_size": 4, "num_kv_blocks": 20, "max_model_len": 72},
}


@pytest.mark.slow  # the next test compares the text as well
@pytest.mark.parametrize("k", range(1, 7))
def test_every_k_writes_what_plain_decoding_writes(target: TestModel, head: Head, alone: Answers, k: int) -> None:
    options = list(OPTIONS.values())[k % len(OPTIONS)]
    with LLM(target.path, device="cpu", speculation={"mode": "sd", "draft": head.path, "k": k}, **options) as llm:
        assert answers(llm) == alone
        counts = llm.engine.metrics
        assert 0 < counts.spec_decode_num_accepted_tokens < counts.spec_decode_num_draft_tokens


@pytest.mark.parametrize("case", mostly_slow(OPTIONS, fast={"preempted"}))
def test_drafts_are_those_of_a_plain_implementation(target: TestModel, head: Head, alone: Answers, case: str) -> None:
    """Every draft of every round of greedy requests."""
    drafts = Drafts(head)
    speculation = {"mode": "sd", "draft": head.path, "k": 3}
    with (
        LLM(target.path, device="cpu", speculation=speculation, **OPTIONS[case]) as llm,
        llm.driver.observing(drafts),
    ):
        assert answers(llm) == alone
        if case == "preempted":
            assert llm.engine.metrics.num_preemptions > 0
        elif case in ("one at a time", "chunked prompts"):
            assert llm.engine.metrics.cached_prompt_tokens > 0
    assert len(drafts.seen) > 20
    assert [draft for draft, _ in drafts.seen] == [wanted for _, wanted in drafts.seen]


@pytest.mark.slow  # the next test compares the text as well
@pytest.mark.parametrize("k", range(1, 7))
def test_every_k_writes_the_same_when_it_is_prepared_ahead(
    target: TestModel, head: Head, alone: Answers, k: int
) -> None:
    options = list(OPTIONS.values())[k % len(OPTIONS)]
    speculation = {"mode": "ssd", "draft": head.path, "k": k, "budget": 2 * k + 4, "backup": ("jit", "fast")[k % 2]}
    with LLM(target.path, device="cpu", speculation=speculation, **options) as llm:
        assert answers(llm) == alone
        counts = llm.engine.metrics
        assert sum(counts.ssd_hits_after) > 0
        assert counts.spec_decode_num_accepted_tokens > 0


@pytest.mark.parametrize("case", mostly_slow(["one at a time", "chunked prompts", "preempted"], fast={"preempted"}))
def test_branches_are_those_of_a_plain_implementation(target: TestModel, head: Head, alone: Answers, case: str) -> None:
    """Every branch of greedy requests begins with the head's states of the draft under verification."""
    branches = Branches(head)
    speculation = {"mode": "ssd", "draft": head.path, "k": 3, "budget": 8, "backup": "jit"}
    with (
        LLM(target.path, device="cpu", speculation=speculation, **OPTIONS[case]) as llm,
        llm.driver.observing(branches),
    ):
        assert answers(llm) == alone
    assert len(branches.seen) >= 60
    assert branches.num_after_hits > 10
    assert [draft for draft, _ in branches.seen] == [wanted for _, wanted in branches.seen]


@pytest.mark.parametrize("acceptance", ["coupled", "rejection"])
def test_a_preparation_is_one_step_for_the_draft_and_one_for_each_token_of_the_next(
    target: TestModel, head: Head, acceptance: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls, steps = list[EagleHead](), list[tuple[int, int]]()
    call, branch = EagleHead.__call__, DraftRunner.branch

    def counted_call(self: EagleHead, *args: Any) -> torch.Tensor:
        calls.append(self)
        return call(self, *args)

    def counted_branch(self: DraftRunner, staged: StagedBranches, count: int, **options: Any) -> DraftRun:
        before = len(calls)
        run = branch(self, staged, count, **options)
        steps.append((count, len(calls) - before))
        return run

    monkeypatch.setattr(EagleHead, "__call__", counted_call)
    monkeypatch.setattr(DraftRunner, "branch", counted_branch)
    speculation = {"mode": "ssd", "draft": head.path, "k": 4, "budget": 8, "acceptance": acceptance}
    with LLM(target.path, device="cpu", max_num_seqs=2, speculation=speculation) as llm:
        llm.generate(PROMPTS[0], SamplingParams(temperature=0.0, max_new_tokens=20, ignore_eos=True))
    assert (4, 5) in steps
    assert all(num_calls == 1 + count for count, num_calls in steps)


def test_drafts_looked_up_have_the_states_of_their_branch(
    target: TestModel, head: Head, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under the rejection rule, where the host chooses the branch: the device has to choose the same."""
    checked, look_up = list[bool](), SSDDrafter._look_up

    def spy(self: SSDDrafter, run: DraftRun, places: dict[int, int]) -> Any:
        found, missed = look_up(self, run, places)
        buffers = self.runner.buffers
        for work, _ in self._looked_up:
            if id(work) in found:
                place, outcome = places[work.sequence.id], (work.sequence.last_accepted, work.sequence.tokens[-1])
                rows = range(place * run.width, (place + 1) * run.width)
                outcomes = [(after, run.tokens[row][0]) for after, row in zip(run.after[place], rows, strict=True)]
                states = buffers.states[rows[outcomes.index(outcome)]]
                checked.append(same_bits(buffers.draft_states[work.slot], states))
        return found, missed

    monkeypatch.setattr(SSDDrafter, "_look_up", spy)
    speculation = {"mode": "ssd", "draft": head.path, "k": 4, "budget": 8, "acceptance": "rejection"}
    with LLM(target.path, device="cpu", max_num_seqs=4, speculation=speculation) as llm:
        llm.generate(PROMPTS, PARAMS)
    assert len(checked) > 3
    assert all(checked)


@pytest.mark.parametrize(
    ("mode", "quantization"),
    mostly_slow([("sd", "int8"), ("sd", None), ("ssd", None)], fast={("ssd", None)}),
)
def test_a_controller_and_quantised_heads_change_no_token(
    target: TestModel, head: Head, alone: Answers, mode: str, quantization: str | None
) -> None:
    """k="auto" skips rounds: what they decide has KV of the head all the same."""
    speculation = {"mode": mode, "draft": head.path, "k": "auto", "draft_quantization": quantization}
    speculation |= {"budget": "auto"} if mode == "ssd" else {}
    with LLM(target.path, device="cpu", max_num_seqs=4, speculation=speculation) as llm:
        assert answers(llm) == alone


def test_a_head_of_a_rounded_target_stays_as_it_is(target: TestModel, head: Head) -> None:
    """Catches a head that is rounded with its target."""
    texts: list[Answers] = []
    for speculation in ({"mode": "ar"}, {"mode": "ssd", "draft": head.path, "k": 3}):
        options = {"quantization": "fp8", "speculation": speculation}
        with LLM(target.path, device="cpu", max_num_seqs=4, **options) as llm:
            texts.append(answers(llm))
            features = llm.engine.round.target.runner.features
            assert features is None or features.head.formats == {"dense"}
    assert texts[0] == texts[1]


@pytest.mark.parametrize("mode", mostly_slow(["sd", "ssd"], fast={"sd"}))
def test_the_rejection_rule_gets_distributions_over_the_targets_vocabulary(
    target: TestModel, head: Head, alone: Answers, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tokens outside of the draft vocabulary have probability 0; greedy requests get the same text."""
    kept: list[torch.Tensor] = []
    distributions = DraftRunner.distributions

    def spy(self: DraftRunner, *args: int) -> torch.Tensor:
        kept.append(distributions(self, *args))
        return kept[-1]

    monkeypatch.setattr(DraftRunner, "distributions", spy)
    speculation = {"mode": mode, "draft": head.path, "k": 4, "acceptance": "rejection"}
    with LLM(target.path, device="cpu", max_num_seqs=4, speculation=speculation) as llm:
        found = answers(llm)
    greedy = [i for i, each in enumerate(PARAMS) if each.greedy]
    assert [found[i] for i in greedy] == [alone[i] for i in greedy]
    q = torch.cat(kept)
    assert torch.allclose(q.sum(-1), torch.ones(len(q), dtype=q.dtype))
    assert not q[:, ~head.weights["t2d"]].any()


def test_aborted_requests_leave_nothing_behind(target: TestModel, head: Head, alone: Answers) -> None:
    """Their slots and blocks go to others, whose drafts begin afresh."""
    speculation = {"mode": "sd", "draft": head.path, "k": 4}
    with LLM(target.path, device="cpu", max_num_seqs=2, block_size=4, speculation=speculation) as llm:
        for prompt in PROMPTS[:4]:
            stream = llm.stream(prompt, SamplingParams(max_new_tokens=40, ignore_eos=True))
            next(stream)
            stream.close()
        assert answers(llm) == alone


def test_engines_without_a_head_compute_no_features(target: TestModel, tmp_path: Path) -> None:
    with LLM(target.path, device="cpu") as llm:
        runner: Any = llm.engine.round.target
        assert runner.runner.features is None
        assert llm.engine.scheduler.pool.recomputed == 0
