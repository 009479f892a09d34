"""Speculation changes nothing but speed: AR, SD and SSD write the same tokens, texts, log-probabilities
and finish reasons.

Every drafter (a trained draft, the target itself, a random model, look-up, one that lies), every K, any batch, any
sampling parameters mixed among the requests, prefix cache on, preemption forced.
"""

from __future__ import annotations

import functools
import itertools
import os
import random
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from conftest import TestModel, mostly_slow, ragged_prompts
from fakes import make_harness, wait_until_idle

from ssd import LLM, RequestOutput, SamplingParams
from ssd.core import MODEL_WRITTEN, Origin, Outcome, Proposal, Status, Work
from ssd.core import Sequence as Text
from ssd.decoding.drafter import Drafter, never
from ssd.decoding.observer import RoundObserver
from ssd.drafting.arms import Arm, ArmTimes
from ssd.engine.engine import Engine
from ssd.errors import ConfigError, RequestError, SSDError
from ssd.kv.blocks import BlockPool, BlockTable
from ssd.prompts import OWN_SETS, load_prompts

Answers = list[tuple[Any, ...]]
KS = (1, 2, 4, 7, 12)
BATCHES = (1, 5, 16)


def mixed_params(count: int, new_tokens: int, seed: int = 0) -> list[SamplingParams]:
    """Everything a request may ask for, at random: all temperatures, truncations, penalties, biases and stops."""
    dice = random.Random(seed)

    def one(i: int) -> SamplingParams:
        longest = dice.choice([1, 2, new_tokens // 2, new_tokens]) if i % 3 == 0 else new_tokens
        return SamplingParams(
            temperature=(0.0, 0.5, 1.0, 1.5)[i % 4],
            seed=i,
            top_k=dice.choice([0, 0, 5, 40]),
            top_p=dice.choice([1.0, 1.0, 0.9, 0.5]),
            min_p=dice.choice([0.0, 0.0, 0.05]),
            repetition_penalty=dice.choice([1.0, 1.0, 1.2]),
            presence_penalty=dice.choice([0.0, 0.0, 0.5]),
            frequency_penalty=dice.choice([0.0, 0.0, 0.3]),
            logit_bias=dice.choice([{}, {}, {7: 2.0, 11: -100.0}]),
            stop=dice.choice([(), (), ("e",), ("th", "\n\n")]),
            stop_token_ids=dice.choice([(), (), (10, 20, 30)]),
            min_tokens=min(longest, dice.choice([0, 0, 6])),
            max_new_tokens=longest,
            ignore_eos=dice.random() < 0.5,
            logprobs=dice.choice([None, None, 2]),
            speculate=dice.random() < 0.9,
        )

    return [one(i) for i in range(count)]


def answers(llm: LLM, prompts: Sequence[Any], params: Sequence[SamplingParams], batch: int) -> Answers:
    outputs: list[RequestOutput] = []
    for start in range(0, len(prompts), batch):
        outputs += llm.generate(prompts[start : start + batch], params[start : start + batch])
    wait_until_idle(llm.driver)
    assert llm.engine.metrics.drafter_failures == 0
    return [(o.token_ids, o.text, o.finish_reason, o.samples[0].logprobs) for o in outputs]


def check_draft_pool(llm: LLM, held: BlockTable | None = None) -> None:
    """No block of the draft's pool is left with anybody (but `held`) once all requests are done."""
    drafter: Any = llm.engine.round.drafter
    for each in getattr(drafter, "inner", [drafter]):
        model = getattr(each, "model", None)
        if model is not None:
            assert model.num_sequences == 0
            model.pool.check([] if held is None else [held])


def leave(pool: BlockPool, num_blocks: int) -> BlockTable:
    """Takes all blocks of a pool but so many."""
    held = BlockTable()
    assert pool.grow(held, (pool.num_free - num_blocks) * pool.block_size)
    return held


class Liar(Drafter):
    """Knows what the target will write, and says it, something else, too much, nothing or nonsense."""

    needs_tokens = True

    def __init__(self, known: dict[tuple[int, ...], list[int]], lookahead: int) -> None:
        super().__init__()
        self.known = known
        self.lookahead = lookahead
        self.dice = random.Random(1)

    def propose(self, works: Sequence[Work]) -> list[Proposal]:
        return [Proposal(tuple(self._lie(work.sequence))) for work in works]

    def _lie(self, text: Text) -> list[int]:
        truth = self.known[text.request.prompt_token_ids][text.num_output :][: self.dice.randint(0, self.lookahead)]
        manner = self.dice.random()
        if manner < 0.4:
            return truth
        if manner < 0.6:
            return [*truth[: self.dice.randint(0, len(truth))], *(self.dice.randrange(300) for _ in range(20))]
        return self.dice.choice([[], [-1], [10**9], [*truth[:1], -5], [0] * 50])


# --- random models: small, so that the whole table is walked every time -----------------------------------------------


@pytest.fixture(scope="module")
def target(make_model: Callable[[str], TestModel]) -> str:
    return make_model("llama3-scaled").path


@pytest.fixture(scope="module")
def stranger(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A random model of the same vocabulary."""
    path = tmp_path_factory.mktemp("stranger")
    torch.manual_seed(5)
    config = transformers.LlamaConfig(
        vocab_size=320, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=2,
        max_position_embeddings=512, initializer_range=0.3,
    )  # fmt: skip
    transformers.LlamaForCausalLM(config).save_pretrained(path)
    return str(path)


PROMPTS = ragged_prompts(16, longest=60)
PARAMS = mixed_params(16, new_tokens=20)


@pytest.fixture(scope="module")
def alone(target: str) -> Iterator[Answers]:
    """What the target writes by itself, one request at a time."""
    with LLM(target, device="cpu", prefix_caching=False, max_num_seqs=1) as llm:
        yield answers(llm, PROMPTS, PARAMS, 1)


WHOLE_TABLE = list(itertools.product(KS, BATCHES))


@pytest.mark.parametrize(("k", "batch"), mostly_slow(WHOLE_TABLE, fast={(12, 5)}))
@pytest.mark.parametrize("draft", mostly_slow(["target", "stranger", "suffix", "liar"], fast={"stranger", "liar"}))
def test_same_answers(target: str, stranger: str, alone: Answers, draft: str, k: int, batch: int) -> None:
    name = {"target": target, "stranger": stranger}.get(draft, "suffix")
    options: dict[str, Any] = {"num_kv_blocks": 18, "block_size": 8, "max_model_len": 120} if batch == 16 else {}
    with LLM(
        target, device="cpu", max_num_seqs=batch, speculation={"mode": "sd", "draft": name, "k": k}, **options
    ) as llm:
        if draft == "liar":
            known = {tuple(p): a[0] for p, a in zip(PROMPTS, alone, strict=True)}
            llm.engine.round.use(Liar(known, k))
        assert answers(llm, PROMPTS, PARAMS, batch) == alone
        if options:
            assert llm.engine.metrics.num_preemptions > 0
        if draft == "target":
            counts = llm.engine.metrics
            assert counts.spec_decode_num_accepted_tokens > 0.8 * counts.spec_decode_num_draft_tokens
        check_draft_pool(llm)


@pytest.mark.parametrize(("k", "batch"), mostly_slow(WHOLE_TABLE, fast={(4, 16)}))
@pytest.mark.parametrize("draft", mostly_slow(["target", "stranger"], fast={"target"}))
def test_same_answers_prepared_ahead(
    target: str, stranger: str, alone: Answers, draft: str, k: int, batch: int
) -> None:
    """SSD: every K and batch, requests of all kinds that join, leave and are preempted."""
    options: dict[str, Any] = {"num_kv_blocks": 18, "block_size": 8, "max_model_len": 120} if batch == 16 else {}
    speculation = {"mode": "ssd", "draft": {"target": target, "stranger": stranger}[draft], "k": k}
    speculation |= {"placement": "inline", "backup": "jit", "budget": k + 6}
    with LLM(target, device="cpu", max_num_seqs=batch, speculation=speculation, **options) as llm:
        assert answers(llm, PROMPTS, PARAMS, batch) == alone
        counts = llm.engine.metrics
        assert counts.num_preemptions > 0 or not options
        assert sum(counts.ssd_hits_after) > 0
        if draft == "target":
            assert counts.ssd_hit_rate > 0.8
        check_draft_pool(llm)


@pytest.mark.slow  # tests/decoding/test_in_flight.py has some
@pytest.mark.parametrize(
    ("fan_out", "backup"),
    [("geometric", "fast"), ("adaptive", "auto"), (1, "jit"), ("listed", "jit"), (3, "auto"), ("adaptive", "fast")],
)
def test_same_answers_with_every_fan_out_and_backup(
    target: str, stranger: str, alone: Answers, fan_out: Any, backup: str
) -> None:
    listed = {"fan_out_hit": [4, 3, 2, 1, 0], "fan_out_miss": (9, 0, 0, 0, 1)}
    fan = listed if fan_out == "listed" else {"fan_out": fan_out}
    speculation = {"mode": "ssd", "draft": stranger, "k": 4, "placement": "inline", "backup": backup, **fan}
    with LLM(target, device="cpu", max_num_seqs=8, speculation=speculation) as llm:
        assert answers(llm, PROMPTS, PARAMS, 8) == alone
        assert {"jit": "jit", "fast": "sibling", "auto": "jit"}[backup] in llm.engine.metrics.ssd_rounds


@pytest.mark.parametrize("mode", mostly_slow(["sd", "ssd"], fast={"ssd"}))
def test_same_answers_with_a_controller(target: str, stranger: str, alone: Answers, mode: str) -> None:
    """k="auto": drafting more, less or not at all from round to round."""
    speculation = {"mode": mode, "draft": stranger, "k": "auto"} | (
        {"placement": "inline", "budget": "auto"} if mode == "ssd" else {}
    )
    with LLM(target, device="cpu", max_num_seqs=5, speculation=speculation) as llm:
        assert answers(llm, PROMPTS, PARAMS, 32) == alone
        assert 0 < llm.engine.metrics.spec_decode_num_drafts < llm.engine.metrics.num_rounds * 5


@pytest.mark.parametrize("placement", mostly_slow(["inline", "process"], fast={"inline"}))
@pytest.mark.parametrize("draft", mostly_slow(["target", "stranger"], fast={"target"}))
def test_same_answers_whatever_mode_is_chosen(
    target: str, stranger: str, alone: Answers, monkeypatch: pytest.MonkeyPatch, draft: str, placement: str
) -> None:
    """Catches drafts and KV that are out of date after a change of mode in the middle of a text: here at random."""
    dice = random.Random(1)

    def choose(times: ArmTimes) -> Arm:
        if dice.random() < 0.15:
            times.trial = dice.choice(times.arms)
        return times.trial or times.best

    model = {"target": target, "stranger": stranger}[draft]
    speculation = {"mode": "auto", "draft": model, "k": 3, "placement": placement}
    with LLM(target, device="cpu", max_num_seqs=6, speculation=speculation) as llm:
        llm.engine.round.run_ahead = placement == "inline"
        monkeypatch.setattr(ArmTimes, "choose", choose)
        monkeypatch.setattr("ssd.drafting.controller._SHORT_REST", 2)
        monkeypatch.setattr("ssd.drafting.model._CATCH_UP_TOKENS", 64)
        for batch, count in ((1, 4), (4, 16), (16, 16)):
            assert answers(llm, PROMPTS[:count], PARAMS[:count], batch) == alone[:count]
        check_draft_pool(llm)
        rounds, metrics = llm.engine.round.drafter.stats.rounds, llm.engine.metrics
        assert min(rounds["ar"], rounds["sd"], rounds["ssd"]) > 5, rounds
        if draft == "target":
            assert metrics.ssd_rounds["hit"] > 10
            assert metrics.spec_decode_num_accepted_tokens > 0.8 * metrics.spec_decode_num_draft_tokens


class Parts(RoundObserver):
    """Counts batches that the kernel for whole draft steps is offered, by part of a round; it takes none."""

    def __init__(self) -> None:
        self.offered: Counter[str] = Counter()
        self.now = ""

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        before, self.now = self.now, name
        yield
        self.now = before

    def takes(self, batch: Any) -> bool:
        self.offered[self.now] += 1
        return False


def test_a_kernel_that_takes_the_whole_gpu_is_not_used_beside_the_target(target: str, stranger: str) -> None:
    """Catches branches that hold up the verification, and drafts of an SSD engine that are slower than those of SD."""
    speculation = {"mode": "ssd", "draft": stranger, "k": 3, "placement": "inline", "backup": "jit", "budget": 2}
    parts = Parts()
    with LLM(target, device="cpu", speculation=speculation) as llm, llm.driver.observing(parts):
        drafter: Any = llm.engine.round.drafter
        drafter.runner.one_kernel, drafter.runner.shared = parts, True
        llm.generate(PROMPTS[:4], [SamplingParams(max_new_tokens=16, temperature=1.0, seed=i) for i in range(4)])
        assert llm.engine.metrics.ssd_rounds["jit"] > 0
    assert parts.offered["settle"] > 0
    assert not parts.offered["prepare"]


@pytest.mark.slow
def test_ahead_with_small_chunks_and_a_small_pool(target: str, stranger: str, alone: Answers) -> None:
    speculation = {"mode": "ssd", "draft": stranger, "k": 7, "placement": "inline", "budget": 6}
    with LLM(target, device="cpu", max_num_seqs=8, max_num_batched_tokens=16, speculation=speculation) as llm:
        drafter: Any = llm.engine.round.drafter
        held = leave(drafter.model.pool, 12)
        assert answers(llm, PROMPTS, PARAMS, 32) == alone
        check_draft_pool(llm, held)


@pytest.mark.parametrize("k", mostly_slow([1, 4, 12], fast={4}))
def test_ahead_up_to_the_last_position(target: str, stranger: str, k: int) -> None:
    """K and all branches reach beyond the model's length, the pool's last block and the request's last token."""
    params = [
        SamplingParams(max_new_tokens=n, ignore_eos=True, temperature=1.0, seed=n) for n in (1, 2, 5, 31, 32, 500)
    ]
    prompts = [PROMPTS[i][:20] for i in range(len(params))]
    options: dict[str, Any] = {
        "device": "cpu",
        "max_model_len": 64,
        "block_size": 8,
        "num_kv_blocks": 8,
        "max_num_seqs": 3,
    }
    with LLM(target, **options) as llm:
        expected = answers(llm, prompts, params, 6)
    speculation = {"mode": "ssd", "draft": stranger, "k": k, "placement": "inline", "budget": 40}
    with LLM(target, **options, speculation=speculation) as llm:
        assert answers(llm, prompts, params, 6) == expected
        check_draft_pool(llm)


def test_a_draft_pool_that_is_too_small(target: str, stranger: str, alone: Answers) -> None:
    """Drafts for some sequences and not for others, and KV taken away from idle ones change no answer."""
    speculation = {"mode": "sd", "draft": stranger, "k": 4}
    with LLM(target, device="cpu", max_num_seqs=16, speculation=speculation) as llm:
        drafter: Any = llm.engine.round.drafter
        held = leave(drafter.model.pool, 12)
        assert answers(llm, PROMPTS, PARAMS, 16) == alone
        check_draft_pool(llm, held)
        assert llm.engine.metrics.spec_decode_num_drafts > 0


@pytest.mark.slow
@pytest.mark.parametrize("chunk", [16, 33])
def test_small_chunks(target: str, stranger: str, alone: Answers, chunk: int) -> None:
    """Drafts share a batch with prefill chunks, and get fewer slots when the budget is short."""
    speculation = {"mode": "sd", "draft": stranger, "k": 7}
    with LLM(target, device="cpu", max_num_seqs=8, max_num_batched_tokens=chunk, speculation=speculation) as llm:
        assert answers(llm, PROMPTS, PARAMS, 32) == alone


def save_small_draft(path: Path, vocab_size: int) -> None:
    config = transformers.LlamaConfig(
        vocab_size=vocab_size, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=2,
        max_position_embeddings=64, initializer_range=0.3,
    )  # fmt: skip
    transformers.LlamaForCausalLM(config).save_pretrained(path)


def test_a_draft_with_a_smaller_or_larger_vocabulary(
    target: str, alone: Answers, tmp_path_factory: pytest.TempPathFactory
) -> None:
    for vocabulary in (312, 400):
        path = tmp_path_factory.mktemp("other-vocabulary")
        torch.manual_seed(1)
        save_small_draft(path, vocabulary)
        speculation = {"mode": "sd", "draft": str(path), "k": 3}
        with LLM(target, device="cpu", max_num_seqs=16, speculation=speculation) as llm:
            assert answers(llm, PROMPTS, PARAMS, 16) == alone
            assert llm.engine.metrics.spec_decode_num_drafts > 0


@pytest.mark.parametrize("mode", ["sd", "ssd"])
def test_a_prompt_beyond_the_drafts_positions_leaves_the_others_their_drafts(
    target: str, mode: str, tmp_path: Path
) -> None:
    save_small_draft(tmp_path, 320)
    speculation = {"mode": mode, "draft": str(tmp_path), "k": 3} | ({"placement": "inline"} if mode == "ssd" else {})
    with LLM(target, device="cpu", max_num_seqs=2, speculation=speculation) as llm:
        long, short = llm.generate([[7] * 100, [8, 9]], SamplingParams(max_new_tokens=16))
        assert llm.engine.metrics.drafter_failures == 0
    assert (long.metrics.drafted, long.metrics.rounds) == (0, 16)
    assert short.metrics.drafted > 0


@pytest.mark.parametrize("acceptance", ["coupled", "rejection"])
def test_no_token_beyond_the_drafts_vocabulary_enters_its_embedding(
    target: str, acceptance: str, tmp_path: Path
) -> None:
    """Not even as the first token of a branch that is only there to fill the batch."""
    save_small_draft(tmp_path, 20)
    speculation = {"mode": "ssd", "draft": str(tmp_path), "k": 3, "placement": "inline", "acceptance": acceptance}
    with LLM(target, device="cpu", max_num_seqs=2, speculation=speculation) as llm:
        drafter: Any = llm.engine.round.drafter
        ops, seen = drafter.runner.decoder.embedding, list[int]()
        embed = ops.embed
        ops.embed = lambda tokens: seen.extend(tokens.tolist()) or embed(tokens)
        known = dict.fromkeys(range(20), 100.0)  # the target says nothing else
        params = SamplingParams(temperature=1.0, top_k=2, logit_bias=known, seed=1, max_new_tokens=24)
        llm.generate([[5, 6, 7], [8, 9]], params)
        assert llm.engine.metrics.drafter_failures == 0
    assert len(seen) > 100
    assert max(seen) < 20


@pytest.mark.slow  # tests/decoding/test_rejection.py tests the distributions
def test_rejection_keeps_greedy_text_and_finishes(target: str, stranger: str, alone: Answers) -> None:
    sd, inline = {"mode": "sd"}, {"mode": "ssd", "placement": "inline"}
    process: dict[str, Any] = {"mode": "ssd", "placement": "process", "saguaro_c": 0.25}
    hows: list[tuple[str, dict[str, Any]]] = [(stranger, sd), ("suffix", sd), (stranger, process)]
    hows += [(target, inline | {"backup": "fast"})]
    for draft, how in hows:
        speculation = {"draft": draft, "k": 3, "acceptance": "rejection", **how}
        with LLM(target, device="cpu", max_num_seqs=16, speculation=speculation) as llm:
            got = answers(llm, PROMPTS, PARAMS, 16)
        for params, mine, theirs in zip(PARAMS, got, alone, strict=True):
            if params.temperature == 0.0 or not params.speculate:
                assert mine == theirs
            assert len(mine[0]) <= params.max_new_tokens


# --- a draft that is the target itself --------------------------------------------------------------------------------


class Meddler:
    """Changes drafts on the device before they are verified, and what the drafter may do from round to round.

    Collects drafts of the model that are wrong in another place than where they were changed.
    """

    def __init__(self, engine: Engine, seed: int, *, corrupt: float = 0.0, change: float = 0.0, forget: float = 0.0):
        self.drafter: Any = engine.round.drafter
        self.state = engine.round.target.state
        self.dice = random.Random(seed)
        self.corrupt, self.change, self.forget = corrupt, change, forget
        self.places: dict[int, tuple[Work, int]] = {}  # by id of works: where their draft was changed
        self.origins: Counter[Origin] = Counter()
        self.wrong: list[Outcome] = []
        self.most = self.drafter.lookahead, getattr(self.drafter, "budget", 0)
        self._settle, self._observe = self.drafter.settle, self.drafter.observe
        self.drafter.settle, self.drafter.observe = self.settle, self.observe

    def settle(self, works: Sequence[Work]) -> None:
        for work in works:
            if work.proposal.num_on_device and self.dice.random() < self.corrupt:
                place = self.dice.randrange(work.proposal.num_on_device)
                draft = self.state.drafts[work.slot]
                draft[place] = (draft[place] + self.dice.randrange(1, 320)) % 320
                self.places[id(work)] = work, place
        self._settle(works)

    def observe(self, works: Sequence[Work], outcomes: Sequence[Outcome | None], seconds: float) -> None:
        for work, outcome in zip(works, outcomes, strict=True):
            if outcome is not None and outcome.draft and work.sequence.status is not Status.FINISHED:
                self.origins[outcome.origin] += 1
                changed = self.places.get(id(work), (work, -1))[1] if outcome.origin is not Origin.JIT else -1
                rejected = outcome.num_accepted < len(outcome.draft)
                if rejected and outcome.origin in MODEL_WRITTEN and outcome.num_accepted != changed:
                    self.wrong.append(outcome)
        self._observe(works, outcomes, seconds)
        if self.dice.random() < self.change:
            k, budget = self.most
            self.drafter.lookahead, self.drafter.budget = self.dice.choice([0, 1, k, k]), self.dice.choice([0, budget])
        for work in works:
            if self.dice.random() < self.forget and work.sequence.in_flight is None:
                self.drafter.forget(work.sequence)


MEDDLING: dict[str, dict[str, Any]] = {
    "rejections": {"corrupt": 0.4},
    "changes of depth": {"corrupt": 0.4, "change": 0.4},
    "forgotten": {"corrupt": 0.2, "forget": 0.2},
}


@pytest.mark.parametrize("run_ahead", mostly_slow([False, True], fast={True}))
@pytest.mark.parametrize(
    ("mode", "meddling"),
    mostly_slow(
        itertools.product(("sd", "jit", "fast"), MEDDLING), fast=list(zip(("sd", "jit", "fast"), MEDDLING, strict=True))
    ),
)  # every mode and every meddling once in the short run
def test_a_draft_of_the_target_itself_is_right(target: str, mode: str, meddling: str, run_ahead: bool) -> None:
    """Catches KV of rejected tokens, of other sequences or of none at all that the draft model reads.

    Whatever was decided before: a draft that the target's own weights have written for it is accepted to its end.
    """
    speculation = {"mode": "sd", "draft": target, "k": 3}
    if mode != "sd":
        speculation |= {"mode": "ssd", "placement": "inline", "backup": mode, "budget": 4}
    params = [SamplingParams(temperature=i % 2, seed=i, max_new_tokens=24, ignore_eos=True) for i in range(16)]
    options: dict[str, Any] = {"num_kv_blocks": 40, "block_size": 8, "max_model_len": 120}
    with LLM(
        target, device="cpu", max_num_seqs=5, max_num_batched_tokens=40, speculation=speculation, **options
    ) as llm:
        llm.engine.round.run_ahead = run_ahead
        meddler = Meddler(llm.engine, seed=1, **MEDDLING[meddling])
        llm.generate(PROMPTS[:16], params)
        wait_until_idle(llm.driver)
        check_draft_pool(llm)
        assert llm.engine.metrics.drafter_failures == 0
        assert not meddler.wrong
        assert meddler.origins[Origin.DRAFT if mode == "sd" else Origin.HIT] > 20


# --- the bundled pair -------------------------------------------------------------------------------------------------


def bundled_prompts(count: int) -> list[Any]:
    """The four sets in turn."""
    sets = [load_prompts(name).asked() for name in OWN_SETS]
    return [prompt for group in zip(*sets, strict=True) for prompt in group][:count]


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["sd", "ssd"])
@pytest.mark.parametrize(("family", "k", "batch"), [("llama", 4, 5), ("qwen3", 2, 8)])
def test_the_bundled_pairs(family: str, k: int, batch: int, mode: str) -> None:
    compare_bundled(family, f"tiny-{family}-draft", k, batch, count=8, new_tokens=16, mode=mode)


@pytest.mark.slow
@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("k", KS)
@pytest.mark.parametrize("draft", ["tiny-llama-draft", "tiny-llama", "suffix"])
def test_the_bundled_pair_over_the_whole_table(draft: str, k: int, batch: int) -> None:
    compare_bundled("llama", draft, k, batch, count=32, new_tokens=48)


@functools.cache
def bundled_answers(family: str, count: int, new_tokens: int) -> Answers:
    """What a bundled model writes by itself."""
    with LLM(f"tiny-{family}", device="cpu", max_model_len=1024, max_num_seqs=8) as llm:
        return answers(llm, bundled_prompts(count), mixed_params(count, new_tokens), 8)


def compare_bundled(
    family: str, draft: str, k: int, batch: int, *, count: int, new_tokens: int, mode: str = "sd", **options: Any
) -> None:
    prompts, params = bundled_prompts(count), mixed_params(count, new_tokens)
    expected = bundled_answers(family, count, new_tokens)
    speculation = {"mode": mode, "draft": draft, "k": k, **options}
    if mode == "ssd" and not options:
        speculation |= {"placement": "inline", "budget": "auto"}
    with LLM(f"tiny-{family}", device="cpu", max_model_len=1024, max_num_seqs=batch, speculation=speculation) as llm:
        assert answers(llm, prompts, params, batch) == expected
        assert llm.engine.metrics.spec_decode_num_accepted_tokens > 0
        check_draft_pool(llm)


QUANTIZED = [("sd", {}), ("ssd", {"placement": "inline"}), ("ssd", {"placement": "process"})]
FORMS = ["int4", "int8", "fp8"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("form", "mode", "options"),
    [
        pytest.param(form, *how, id=f"{form}-{name}")
        for form in FORMS
        for how, name in zip(QUANTIZED, ["sd", "inline", "process"], strict=True)
    ],
)
def test_a_quantized_draft_of_the_bundled_pair(form: str, mode: str, options: dict[str, str]) -> None:
    """At all temperatures, `mixed_params` has them."""
    options = {**options, "draft_quantization": form}
    compare_bundled("llama", "tiny-llama-draft", 3, 4, count=8, new_tokens=16, mode=mode, **options)


@pytest.mark.parametrize("form", mostly_slow(FORMS, fast={"int4"}))
def test_a_quantized_draft_of_the_target_itself_is_mostly_right(form: str) -> None:
    model = "tiny-llama-draft"
    speculation = {"mode": "sd", "draft": model, "k": 2, "draft_quantization": form}
    with LLM(model, device="cpu", max_num_seqs=2, max_model_len=256, speculation=speculation) as llm:
        [output] = llm.generate(["There was once a"], SamplingParams(max_new_tokens=48, ignore_eos=True))
    assert output.metrics.accepted > 0.7 * output.metrics.drafted
    assert form != "int4" or output.metrics.accepted < output.metrics.drafted  # catches weights that are not rounded


@pytest.mark.parametrize(
    ("form", "dtype"),
    mostly_slow(itertools.product(("fp8", "int8", "int4"), ("bfloat16", "float32")), fast={("int4", "bfloat16")}),
)
def test_a_quantized_target_writes_the_same_text_in_all_modes(form: str, dtype: str) -> None:
    """At all temperatures, `mixed_params` has them. Catches products whose bits depend on the number of rows, weights
    that are not rounded, and a text that is not that of the rounded model."""
    prompts, params = bundled_prompts(4), mixed_params(4, 12)
    options: dict[str, Any] = {"device": "cpu", "dtype": dtype, "quantization": form, "max_model_len": 1024}

    def written(mode: str, batch: int, **more: Any) -> Answers:
        how = {"mode": mode} if mode == "ar" else {"mode": mode, "draft": "tiny-llama-draft", "k": 3, **more}
        with LLM("tiny-llama-draft", max_num_seqs=batch, speculation=how, **options) as llm:
            assert llm.engine.round.target.runner.decoder.formats == {"dense", form}
            assert llm.note == f"weights rounded to {form} when loaded"
            return answers(llm, prompts, params, batch)

    alone = written("ar", 1)
    assert written("sd", 2) == alone
    assert written("ssd", 4, placement="inline") == alone


@pytest.mark.slow
@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("k", KS)
def test_the_bundled_pair_ahead_over_the_whole_table(k: int, batch: int) -> None:
    compare_bundled("llama", "tiny-llama-draft", k, batch, count=16, new_tokens=48, mode="ssd")


# --- a drafter of its own process -------------------------------------------------------------------------------------


def test_same_answers_from_a_process(target: str, stranger: str, alone: Answers) -> None:
    speculation = {"mode": "ssd", "draft": stranger, "k": 4, "placement": "process"}
    threads = torch.get_num_threads()
    with LLM(target, device="cpu", max_num_seqs=16, speculation=speculation) as llm:
        drafter: Any = llm.engine.round.drafter
        worker = drafter.replicas[0].supervisor.pid
        assert answers(llm, PROMPTS, PARAMS, 16) == alone
        assert llm.engine.metrics.spec_decode_num_accepted_tokens > 0
        assert Path(f"/proc/{worker}").exists()
    assert not Path(f"/proc/{worker}").exists()
    assert torch.get_num_threads() == threads


class Patience(RoundObserver):
    """Rounds wait until all replicas of the drafter have sent what they prepare."""

    def __init__(self, drafter: Any) -> None:
        self.replicas = drafter.replicas

    def part(self, name: str) -> None:
        deadline = time.monotonic() + 10
        while name == "propose" and any(not r.available() or r._last_prepared < r._round for r in self.replicas):
            assert time.monotonic() < deadline
            time.sleep(0.0005)


@pytest.mark.slow
def test_two_replicas_have_more_hits_than_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """The bundled pair, both with 4 branches a replica. Each round waits for what is being prepared: no luck in it."""
    monkeypatch.setattr("ssd.drafting.process._MOST_HIT", -1.0)  # drafts are always sent ahead
    prompts = bundled_prompts(8)
    params = [SamplingParams(max_new_tokens=32, temperature=i % 2, seed=i, ignore_eos=True) for i in range(8)]
    rates, texts = list[float](), list[Any]()
    for replicas in (1, 2):
        speculation: dict[str, Any] = {"mode": "ssd", "draft": "tiny-llama-draft", "placement": "process"}
        speculation |= {"draft_replicas": replicas, "budget": 4, "backup": "jit"}
        with LLM("tiny-llama", device="cpu", max_model_len=512, speculation=speculation) as llm:
            with llm.driver.observing(Patience(llm.engine.round.drafter)):
                texts.append(answers(llm, prompts, params, 8))
            rates.append(llm.engine.metrics.ssd_hit_rate)
    assert texts[0] == texts[1]
    assert rates[1] > rates[0] + 0.02


@pytest.mark.slow  # tests/drafting/test_drafter_process.py does so to a fake target
def test_a_worker_that_is_killed_again_and_again() -> None:
    """32 requests while the drafter's process is killed 20 times: all answered, nothing else changed."""
    prompts = bundled_prompts(32)
    params = [SamplingParams(max_new_tokens=24, temperature=i % 2, seed=i, ignore_eos=True) for i in range(32)]
    with LLM("tiny-llama", device="cpu", max_model_len=512, max_num_seqs=4) as llm:
        expected = answers(llm, prompts, params, 32)
    speculation = {"mode": "ssd", "draft": "tiny-llama-draft", "k": 4, "placement": "process"}
    with LLM("tiny-llama", device="cpu", max_model_len=512, max_num_seqs=4, speculation=speculation) as llm:
        drafter: Any = llm.engine.round.drafter
        supervisor, killed = drafter.replicas[0].supervisor, set()

        def kill(engine: Engine) -> bool:
            """Between any two rounds; and does not wait out the pauses of a lost worker, which are tested elsewhere."""
            if supervisor.pid is None:
                supervisor._restart_at = 0.0
            elif len(killed) < 20 and supervisor.pid not in killed:
                killed.add(supervisor.pid)
                os.kill(supervisor.pid, signal.SIGKILL)
            return engine.has_work

        requests = [(llm.encode(p), q) for p, q in zip(prompts, params, strict=True)]
        submissions = llm.driver.submit_many(requests)
        while llm.driver.call(kill):
            pass
        outputs = [submission.result() for submission in submissions]
        assert len(killed) == 20
        wait_until_idle(llm.driver)
        assert llm.engine.metrics.drafter_failures >= 19
        assert [output.token_ids for output in outputs] == [answer[0] for answer in expected]
        [again] = llm.generate([prompts[0]], params[0])
        assert again.token_ids == expected[0][0]


# --- drafters that fail -----------------------------------------------------------------------------------------------

CALLS = ("propose", "settle", "prepare", "observe")


class Broken(Drafter):
    """Works for a while, then raises, wherever it is asked to."""

    lookahead = 4

    def __init__(self, where: str) -> None:
        super().__init__()
        self.where = where
        self.calls = 0

    def _call(self, name: str) -> None:
        self.calls += name == self.where
        if name == self.where and self.calls % 3 == 0:
            raise RuntimeError("out of order")

    def propose(self, works: Sequence[Work]) -> list[Proposal]:
        self._call("propose")
        return [Proposal((1, 2, 3))] * (len(works) + (self.where == "count"))

    def settle(self, works: Sequence[Work]) -> None:
        self._call("settle")

    def prepare(self, works: Sequence[Work], interrupted: Callable[[], bool] = never) -> None:
        self._call("prepare")

    def observe(self, works: Sequence[Work], outcomes: Sequence[Outcome | None], seconds: float) -> None:
        self._call("observe")

    def forget(self, sequence: Text) -> None:
        self._call("forget")


@pytest.mark.parametrize("run_ahead", mostly_slow([False, True], fast={True}))
@pytest.mark.parametrize("where", mostly_slow([*CALLS, "forget", "count"], fast={"propose", "forget"}))
def test_a_drafter_that_raises_costs_no_request(target: str, alone: Answers, where: str, run_ahead: bool) -> None:
    with LLM(target, device="cpu", max_num_seqs=5, speculation={"mode": "sd", "draft": "suffix"}) as llm:
        llm.engine.round.use(Broken(where))
        llm.engine.round.run_ahead = run_ahead
        outputs = llm.generate(PROMPTS, PARAMS)
        assert [output.token_ids for output in outputs] == [answer[0] for answer in alone]
        wait_until_idle(llm.driver)
        assert (llm.engine.metrics.drafter_failures > 0) == (where in CALLS)


def test_a_drafter_that_goes_on_failing_is_asked_less_and_less() -> None:
    """Twice as many rounds go by after every failure; and it starts afresh with the sequences it was asked for."""

    class Hopeless(Drafter):
        lookahead = 2
        forgotten = 0

        def propose(self, works: Sequence[Work]) -> list[Proposal]:
            asked.append((harness.engine.metrics.num_rounds, len(works)))
            raise RuntimeError("out of order")

        def forget(self, sequence: Text) -> None:
            self.forgotten += 1

    drafter, asked = Hopeless(), list[tuple[int, int]]()
    harness = make_harness(drafter=drafter, max_model_len=256)
    for i in range(2):
        harness.engine.add([1, 2, 3 + i], SamplingParams(max_new_tokens=100))
    while harness.engine.has_work:
        harness.step()
    assert len(harness.outputs) == 2
    rounds = [round_ for round_, _ in asked]
    assert rounds[:4] == [0, 2, 6, 16]
    assert all(later - earlier >= 2 ** (i + 1) for i, (earlier, later) in enumerate(itertools.pairwise(rounds)))
    assert drafter.forgotten == sum(count for _, count in asked) + 2  # and when they have finished
    assert harness.engine.metrics.drafter_failures == len(asked)


@pytest.mark.parametrize("run_ahead", mostly_slow([False, True], fast={True}))
@pytest.mark.parametrize("late", mostly_slow([False, True], fast={True}))
@pytest.mark.parametrize("where", mostly_slow(CALLS, fast={"settle"}))
def test_a_request_that_a_drafter_cannot_serve_leaves_the_others_their_drafts(
    where: str, late: bool, run_ahead: bool
) -> None:
    """Whether it joins others or comes with them: it is soon asked for seldom, and they get drafts in most rounds."""

    class Picky(Broken):
        def __init__(self) -> None:
            super().__init__("nowhere")
            self.drafted = Counter[bool]()

        def _check(self, name: str, works: Sequence[Work]) -> None:
            bad = [work.sequence.request.id == "bad" for work in works]
            if name == "propose":
                self.drafted.update(bad)
            if name == where and any(bad):
                raise RuntimeError("out of order")

        def propose(self, works: Sequence[Work]) -> list[Proposal]:
            self._check("propose", works)
            return super().propose(works)

        def settle(self, works: Sequence[Work]) -> None:
            self._check("settle", works)

        def prepare(self, works: Sequence[Work], interrupted: Callable[[], bool] = never) -> None:
            self._check("prepare", works)

        def observe(self, works: Sequence[Work], outcomes: Sequence[Outcome | None], seconds: float) -> None:
            self._check("observe", works)

    drafter = Picky()
    harness = make_harness(drafter=drafter, max_model_len=256, num_blocks=400, run_ahead=run_ahead)
    params = SamplingParams(max_new_tokens=200)
    for i in range(3):
        harness.engine.add([1, 2, 3 + i], params, f"good-{i}")
    for _ in range(5 * late):
        harness.step()
    harness.engine.add([9, 9], params, "bad")
    while harness.engine.has_work:
        harness.step()
    rounds = harness.engine.metrics.num_rounds
    assert len(harness.outputs) == 4
    assert all(output.error is None for output in harness.outputs.values())
    assert rounds > 150
    assert drafter.drafted[True] < 20
    assert drafter.drafted[False] > 3 * (rounds - (35 if late else 55))


def fail_now_and_then(engine: Engine, where: str, after: bool) -> list[str]:
    """Every fourth call of that method raises, before its work or after it; returns a list of the failures.

    The count of failures is set back, so that backoffs stay short.
    """
    drafter, failures, calls = engine.round.drafter, list[str](), itertools.count(1)
    method = getattr(drafter, where)

    def failing(*arguments: Any) -> Any:
        fails = next(calls) % 4 == 0
        result = None if fails and not after else method(*arguments)
        if fails:
            engine.round.isolation.failures = 0
            failures.append(where)
            raise RuntimeError("out of order")
        return result

    setattr(drafter, where, failing)
    return failures


@pytest.mark.parametrize(
    ("after", "run_ahead"),
    mostly_slow([(False, False), (False, True), (True, False), (True, True)], fast={(True, True)}),
)
@pytest.mark.parametrize("where", mostly_slow(CALLS, fast={"prepare"}))
@pytest.mark.parametrize("mode", mostly_slow(["sd", "ssd"], fast={"ssd"}))
def test_a_draft_model_that_fails_starts_afresh(
    target: str, alone: Answers, mode: str, where: str, after: bool, run_ahead: bool
) -> None:
    """With whatever it had done by then: the answers are the same, and drafts are accepted as before."""
    speculation = {"mode": mode, "draft": target, "k": 3} | ({"placement": "inline"} if mode == "ssd" else {})
    with LLM(target, device="cpu", max_num_seqs=5, speculation=speculation) as llm:
        llm.engine.round.run_ahead = run_ahead
        failures = fail_now_and_then(llm.engine, where, after)
        outputs = llm.generate(PROMPTS[:12], PARAMS[:12])
        assert [output.token_ids for output in outputs] == [answer[0] for answer in alone[:12]]
        wait_until_idle(llm.driver)
        check_draft_pool(llm)
        assert len(failures) > 3
        counts = llm.engine.metrics
        assert counts.spec_decode_num_accepted_tokens > 0.6 * counts.spec_decode_num_draft_tokens


# --- books and refusals -----------------------------------------------------------------------------------------------


def test_statistics_of_a_request_and_of_the_engine(target: str) -> None:
    """A draft that is the target itself is always right."""
    params = SamplingParams(max_new_tokens=21, ignore_eos=True)
    with LLM(target, device="cpu", speculation={"mode": "sd", "draft": target, "k": 4}) as llm:
        [output] = llm.generate([PROMPTS[0]], params)
        metrics, counts = output.metrics, llm.engine.metrics
    assert (metrics.drafted, metrics.accepted) == (16, 16)  # 1 + 4 × (4 + 1) tokens: the first round has no draft
    assert metrics.accepted_per_position == [4, 4, 4, 4]
    assert metrics.rounds == 5
    assert counts.spec_decode_num_drafts == 4
    assert counts.spec_decode_num_draft_tokens == counts.spec_decode_num_accepted_tokens == 16
    assert counts.spec_decode_num_accepted_tokens_per_pos == [4, 4, 4, 4]


def test_a_request_may_do_without(target: str) -> None:
    params = SamplingParams(max_new_tokens=8, speculate=False, ignore_eos=True)
    with LLM(target, device="cpu", speculation={"mode": "sd", "draft": target, "k": 4}) as llm:
        [output] = llm.generate([PROMPTS[0]], params)
    assert (output.metrics.drafted, output.metrics.rounds) == (0, 8)
    with pytest.raises(RequestError, match="speculate"):
        SamplingParams(speculate=1)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("speculation", "message"),
    [
        ({"mode": "sd"}, "needs a draft"),
        ({"mode": "ar", "k": 3}, "leave the other options out"),
        ({"mode": "turbo"}, "ar, sd, ssd, auto"),
        ({"mode": "auto"}, 'mode="auto" needs a draft'),
        ({"mode": "auto", "draft": "suffix", "budget": 8}, "draft='suffix' has no option budget: leave it out$"),
        ({"mode": "sd", "draft": "tiny-llama-draft", "draft_threads": 2}, "no option draft_threads.*ssd"),
        (
            {"mode": "auto", "draft": "tiny-llama-draft", "suffix": True, "budget": 8},
            "suffix=True has no option budget",
        ),
        ({"mode": "ssd", "draft": "tiny-llama-draft", "suffix": True}, "use mode='sd' or 'auto'"),
        (
            {"mode": "auto", "draft": "tiny-llama-draft", "placement": "inline", "draft_threads": 1},
            'draft_threads=1 is for a draft in a process of its own.*not for placement="inline": leave it out',
        ),
        (
            {"mode": "ssd", "draft": "tiny-llama-draft", "placement": "process", "draft_threads": 9999},
            "draft_threads=9999 leaves none of the .* cores to the target: lower it",
        ),
        ({"mode": "sd", "draft": "suffix", "k": 0}, "from 1 to 64"),
        ({"mode": "sd", "draft": "suffix", "k": True}, "from 1 to 64"),
        ({"mode": "sd", "draft": "", "k": 2}, "must be a model"),
        ({"mode": "sd", "draft": "suffix", "acceptance": "argmax"}, "coupled, rejection"),
        ({"mode": "sd", "draught": "suffix"}, "did you mean 'draft'"),
        ({"mode": "ssd"}, "needs a draft"),
        ({"mode": "ssd", "draft": "suffix"}, "nothing to prepare"),
        ({"mode": "ar", "k": 3}, 'use mode="sd" with a draft'),
        ({"mode": "ar", "budget": 8}, 'use mode="ssd" with a draft'),
        ({"mode": "sd", "draft": "tiny-llama-draft", "backup": "fast"}, 'no option backup.*"ssd"'),
        ({"mode": "sd", "draft": "suffix", "backup": "fast"}, "no option backup: leave it out$"),
        ({"mode": "ssd", "draft": "tiny-llama-draft", "k": "most"}, "or 'auto'"),
        ({"mode": "ssd", "draft": "tiny-llama-draft", "fan_out": 0}, "adaptive"),
        ({"mode": "ssd", "draft": "tiny-llama-draft", "fan_out": "wide"}, "adaptive"),
        ({"mode": "ssd", "draft": "tiny-llama-draft", "fan_out_hit": [1, 1, 1, 1, 1]}, "belong together"),
        ({"mode": "ssd", "draft": "tiny-llama-draft", "fan_out_hit": [1], "fan_out_miss": [1]}, "k \\+ 1 numbers"),
        ({"mode": "ssd", "draft": "tiny-llama-draft", "budget": 0}, "from 1 to 256"),
        ({"mode": "ssd", "draft": "tiny-llama-draft", "saguaro_c": 0.5}, "rejection"),
        ({"mode": "ssd", "draft": "tiny-llama-draft", "saguaro_c": 2}, "from 0 to 1"),
        (
            {"mode": "sd", "draft": "tiny-llama-draft", "draft_quantization": "int3"},
            "='int3': must be one of none, fp8, int8",
        ),
        ({"mode": "sd", "draft": "tiny-llama-draft", "draft_quantization": 8}, "draft_quantization=8: must be one of"),
        ({"mode": "sd", "draft": "suffix", "draft_quantization": "int8"}, "draft_quantization is for draft models"),
        ({"mode": "ar", "draft_quantization": "int8"}, 'use mode="sd" with a draft'),
        (
            {"mode": "ssd", "draft": "tiny-llama-draft", "draft_replicas": 5},
            "draft_replicas=5: must be an integer from 1",
        ),
        ({"mode": "ssd", "draft": "tiny-llama-draft", "draft_replicas": True}, "draft_replicas=True: must be an"),
        ({"mode": "ssd", "draft": "tiny-llama-draft", "draft_replicas": 2}, 'use placement="process"'),
        ({"mode": "sd", "draft": "tiny-llama-draft", "draft_replicas": 2}, "no option draft_replicas"),
        (
            {"mode": "ssd", "draft": "x", "placement": "process", "draft_replicas": 2, "acceptance": "rejection"},
            "draft_replicas=2: replicas send no distributions",
        ),
        ({"mode": "ssd", "draft": "tiny-llama-draft", "placement": "stream"}, "for GPUs"),
        ({"mode": "sd", "draft": "tiny-llama-eagle", "tree": 1}, "from 2 to 64"),
        ({"mode": "sd", "draft": "tiny-llama-eagle", "k": 9, "tree": 8}, "tree=8: k=9 must be a number of at most"),
        ({"mode": "sd", "draft": "tiny-llama-eagle", "k": "auto", "tree": 8}, "tree=8: k='auto' must be a number"),
        ({"mode": "sd", "draft": "tiny-llama-eagle", "k": "auto", "tree": "auto"}, "tree=auto: k='auto' must be a num"),
        ({"mode": "ssd", "draft": "tiny-llama-draft", "tree": "auto"}, "tree must be a number"),
        ({"mode": "ssd", "draft": "tiny-llama-draft", "tree": 8, "budget": "auto"}, "budget must be a number"),
        ({"mode": "ssd", "draft": "tiny-llama-draft", "tree": 8, "k": 4, "fan_out": 3}, "leave fan_out, fan_out_hit"),
        (
            {"mode": "ssd", "draft": "x", "tree": 8, "k": 1, "fan_out_hit": [1, 1], "fan_out_miss": [1, 1]},
            "leave fan_out, fan_out_hit",
        ),
        (
            {"mode": "ssd", "draft": "tiny-llama-draft", "tree": 8, "placement": "process"},
            "on the device of the target",
        ),
        ({"mode": "ssd", "draft": "tiny-llama-draft", "tree": 8, "draft_device": "cpu"}, "no draft_device"),
        ({"mode": "ssd", "draft_url": "unix:/x", "tree": 8}, "has no option tree"),
        (
            {"mode": "sd", "draft": "tiny-llama-eagle", "tree": 8, "acceptance": "rejection"},
            'needs acceptance="coupled"',
        ),
        ({"mode": "ssd", "draft": "tiny-llama-eagle", "tree": 8}, "a head has hidden states at a few nodes"),
        (
            {"mode": "ssd", "draft": "tiny-llama-draft", "tree": 8, "acceptance": "rejection"},
            'needs acceptance="coupled"',
        ),
        ({"mode": "auto", "draft": "tiny-llama-eagle", "tree": 8}, 'is for mode="sd" or "ssd", not for mode="auto"'),
        ({"mode": "sd", "draft": "suffix", "tree": 8}, "suffix look-up proposes chains"),
        ({"mode": "sd", "draft": "tiny-llama-eagle", "tree": 8, "suffix": True}, "suffix look-up proposes chains"),
        ({"mode": "ssd", "draft": "tiny-llama-draft", "placement": "moon"}, "inline, stream, process"),
        ("sd", "mapping"),
    ],
)
def test_contradictions_are_refused(speculation: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        LLM("tiny-llama", device="cpu", speculation=speculation)


def test_trees_of_other_drafts_and_of_split_models_are_refused() -> None:
    class Mine:
        def propose(self, sequences: Sequence[list[int]], k: int) -> list[list[int]]:
            return [[] for _ in sequences]

    with pytest.raises(ConfigError, match="a drafter of your own proposes chains"):
        LLM("tiny-llama", device="cpu", speculation={"mode": "sd", "draft": Mine(), "tree": 8})
    speculation = {"mode": "sd", "draft": "tiny-llama-eagle", "tree": 8}
    with pytest.raises(ConfigError, match="tree=8 is for models that are not split"):
        LLM("tiny-llama", device="cpu", tensor_parallel_size=2, speculation=speculation)
    with LLM("tiny-llama", device="cpu", speculation=speculation) as llm:
        target: Any = llm.engine.round.target
        with pytest.raises(ConfigError, match="drawn for chains only"):
            llm.driver.call(lambda _: target.pin([0.5]))


@pytest.mark.parametrize("draft", ["no_such", "graft:no_such@llama-3.1-8b", "graft:tiny-llama-draft"])
def test_a_missing_draft_is_called_the_draft(draft: str) -> None:
    with pytest.raises(SSDError, match=r"^speculation draft='") as error:
        LLM("tiny-llama", device="cpu", speculation={"mode": "sd", "draft": draft})
    assert "model='" not in str(error.value)


def test_a_draft_of_another_tokenizer_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"another tokenizer.*suffix"):
        LLM("tiny-llama", device="cpu", speculation={"mode": "sd", "draft": "tiny-qwen3-draft"})
