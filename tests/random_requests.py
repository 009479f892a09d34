"""Random requests over small models, as a script: when they come, how they decode, when they are aborted.

Whoever serves them must answer each with what plain decoding writes for it alone.
"""

from __future__ import annotations

import copy
import functools
import itertools
import random
import shutil
from collections import defaultdict
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from block_drafts import make_block
from conftest import VOCAB, TestModel
from eagle_heads import make_head
from mtp_heads import make_mtp

from ssd import LLM, SamplingParams
from ssd.core import Origin, Outcome, RequestOutput, Status, Work
from ssd.decoding.drafter import Drafter
from ssd.decoding.observer import RoundObserver
from ssd.drafting.model import DraftModel
from ssd.engine.engine import Engine

MAX_LEN = 72
Alone = Callable[[int, int], list[RequestOutput]]  # answers by number of requests and seed
UNPENALISED: dict[str, Any] = {  # changes of parameters after which a model's drafts for itself are right
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "speculate": True,
    "stop": (),
    "stop_token_ids": (),
    "max_new_tokens": 30,
    "n": 1,
}


@dataclass(frozen=True)
class Asked:
    """A request, when it comes, and when it is aborted (if ever), in steps."""

    prompt: list[int]
    params: SamplingParams
    arrival: int = 0
    abort: int | None = None
    stream: bool = False


def random_params(dice: random.Random) -> SamplingParams:
    longest = dice.choice([1, 2, 3, dice.randint(4, 40), dice.randint(20, 40)])
    return SamplingParams(
        temperature=dice.choice([0.0, 0.0, 0.7, 1.0, 1.5]),
        seed=dice.randrange(10),
        top_k=dice.choice([0, 0, 0, 5, 40]),
        top_p=dice.choice([1.0, 1.0, 0.9, 0.5]),
        min_p=dice.choice([0.0, 0.0, 0.05]),
        repetition_penalty=dice.choice([1.0, 1.0, 1.0, 1.2]),
        presence_penalty=dice.choice([0.0, 0.0, 0.0, 0.5]),
        frequency_penalty=dice.choice([0.0, 0.0, 0.0, 0.3]),
        logit_bias=dice.choice([{}, {}, {}, {7: 2.0, 11: -100.0, 12: float("-inf")}]),
        stop=dice.choice([(), (), ("e",), ("\n", "th"), ("é", "a1")]),
        stop_token_ids=dice.sample(range(VOCAB), dice.choice([0, 0, 5, 20])),
        min_tokens=min(longest, dice.choice([0, 0, 0, 1, 6])),
        max_new_tokens=longest,
        logprobs=dice.choice([None, None, 0, 3]),
        n=dice.choice([1, 1, 1, 2, 3]),
        speculate=dice.random() < 0.9,
    )


def with_dead_end(asked: Asked) -> Asked:
    """Perhaps with all tokens forbidden, or all but the stop tokens, which `min_tokens` forbids: no sample has a token.

    Drawn by the prompt: a seed gives the same requests as before these were known.
    """
    dice = random.Random(f"dead end {asked.prompt}")
    if dice.random() > 0.06:
        return asked
    stops = dice.sample(range(VOCAB), dice.choice([0, 3]))
    bias = {token: float("-inf") for token in range(VOCAB) if token not in stops}
    changes: dict[str, Any] = {"logit_bias": bias, "stop_token_ids": stops, "min_tokens": 1, "n": dice.choice([1, 3])}
    return replace(asked, params=replace(asked.params, **changes))


def random_requests(count: int, seed: int) -> list[Asked]:
    """Prompts of all lengths, which share beginnings; most of them come while others are running."""
    dice = random.Random(seed)
    base = [dice.randrange(VOCAB) for _ in range(MAX_LEN)]

    def one() -> Asked:
        length = dice.randint(1, dice.choice([4, 20, MAX_LEN - 1]))
        shared = dice.choice([0, length // 2, length - 1])
        own = [dice.randrange(VOCAB) for _ in range(length - shared)]
        abort = dice.choice([None, None, None, dice.randint(0, 30)])
        return Asked(base[:shared] + own, random_params(dice), dice.randint(0, 4 * count), abort, dice.random() < 0.5)

    return [with_dead_end(one()) for _ in range(count)]


def play(
    engine: Engine, requests: Seq[Asked], *, preempt: float = 0.0, seed: int = 0, depths: Seq[int] = ()
) -> list[RequestOutput]:
    """Serves the requests as scripted.

    Before a step, one running sequence is preempted with that probability, and the drafter is told to propose another
    number of tokens, if there are any to choose from.
    """
    dice = random.Random(seed)
    outputs: dict[str, RequestOutput] = {}
    tokens, texts, logprobs = defaultdict[Any, Any](list), defaultdict[Any, str](str), defaultdict[Any, Any](list)
    for step in itertools.count():
        for i, asked in enumerate(requests):
            if asked.arrival == step:
                engine.add(asked.prompt, asked.params, str(i), stream=asked.stream)
            if asked.abort is not None and asked.arrival + asked.abort == step:
                engine.abort(str(i))
        if dice.random() < preempt:
            engine.flush()
            if engine.scheduler.running:
                engine.scheduler.preempt(dice.choice(engine.scheduler.running))
        if depths:
            engine.round.drafter.lookahead = dice.choice(depths)
        for delta in engine.step():
            assert delta.request_id not in outputs
            sample = delta.request_id, delta.index
            tokens[sample] += delta.token_ids
            texts[sample] += delta.text
            logprobs[sample] += delta.logprobs
            if delta.output is not None:
                outputs[delta.request_id] = delta.output
        engine.check()
        if len(outputs) == len(requests) and not engine.has_work:
            break
        assert step < 5000, "requests are not served"
    for request_id, output in outputs.items():
        for sample in output.samples:
            key = request_id, sample.index
            assert (tokens[key], texts[key]) == (sample.token_ids, sample.text), "deltas do not make up the answer"
            assert logprobs[key] == (sample.logprobs or [])
    check_idle(engine)
    return [outputs[str(i)] for i in range(len(requests))]


def draft_model(drafter: Drafter) -> DraftModel | None:
    models = [getattr(each, "model", None) for each in getattr(drafter, "inner", [drafter])]
    return next((model for model in models if isinstance(model, DraftModel)), None)


def check_idle(engine: Engine) -> None:
    """Nothing is left of anybody, and the drafter has never raised."""
    assert engine.metrics.drafter_failures == 0
    check_empty(engine)


def check_empty(engine: Engine) -> None:
    """No request, block or slot is left, in the engine and in the draft model."""
    engine.check()
    scheduler = engine.scheduler
    assert not [*scheduler.running, *scheduler.waiting, *scheduler.leaving]
    assert scheduler.pool.num_free == scheduler.pool.num_blocks
    assert engine.num_unfinished_requests == 0
    assert sorted(scheduler._slots) == list(range(engine.round.target.state.num_slots))
    model = draft_model(engine.round.drafter)
    if model is not None:
        model.check()
        assert model.num_sequences == 0
        assert model.pool.num_free == model.pool.num_blocks


def check_answers(requests: Seq[Asked], outputs: Seq[RequestOutput], expected: Seq[RequestOutput]) -> None:
    for asked, output, whole in zip(requests, outputs, expected, strict=True):
        assert output.error == whole.error or asked.abort is not None
        for sample, full in zip(output.samples, whole.samples, strict=True):
            end = len(sample.token_ids)
            if sample.finish_reason == "abort":
                assert asked.abort is not None
                assert end < len(full.token_ids) or full.finish_reason == "error"
            else:
                assert (sample.token_ids, sample.text) == (full.token_ids, full.text)
                assert sample.finish_reason == full.finish_reason
            assert sample.token_ids == full.token_ids[:end]
            assert sample.logprobs == (None if full.logprobs is None else full.logprobs[:end])


class VerifiedDrafts(RoundObserver):
    """Origin, length and accepted tokens of every draft that is verified, as long as its sequence runs."""

    def __init__(self) -> None:
        self.drafts: list[tuple[Origin, int, int]] = []

    def decided(self, works: Seq[Work], outcomes: Seq[Outcome | None], seconds: float) -> None:
        self.drafts.extend(
            (outcome.origin, len(outcome.draft), outcome.num_accepted)
            for work, outcome in zip(works, outcomes, strict=True)
            if outcome is not None and outcome.draft and work.sequence.status is Status.RUNNING
        )


@dataclass(frozen=True)
class Models:
    """Paths of a target and of drafts for it: a noisy copy, itself, a model of its own, a random EAGLE head, a random
    MTP head, and a random block draft."""

    target: str
    drafts: dict[str, str]


def make_models(make_model: Callable[[str], TestModel], path: Path, kind: str = "llama-tied") -> Models:
    target = make_model(kind)
    noisy = copy.deepcopy(target.reference)
    torch.manual_seed(1)
    for parameter in noisy.parameters():
        parameter.data += 0.1 * parameter.data.std() * torch.randn_like(parameter)
    noisy.save_pretrained(path)
    shutil.copy(Path(target.path) / "tokenizer.json", path)
    stranger = make_model("qwen3" if kind == "qwen2" else "qwen2")
    head = make_head(target, path / "head")
    windows: dict[str, Any] = {"windows": (9, None), "causal": (True, False)}
    block = make_block(target, path / "block", "deepspec", block_size=16, markov="gated", **windows)
    drafts = {"noisy": str(path), "self": target.path, "stranger": stranger.path, "head": head.path}
    drafts |= {"block": block.path, "mtp-head": make_mtp(target, path / "mtp", "nextn").path}
    return Models(target.path, drafts)


@contextmanager
def plain_decoding(models: Models) -> Iterator[Callable[[Seq[Asked]], list[RequestOutput]]]:
    """Answers requests, all of which are there at once, with every round committed at once."""
    with LLM(models.target, device="cpu", max_model_len=MAX_LEN, max_num_seqs=8, prefix_caching=False) as llm:
        yield lambda asked: llm.driver.call(lambda engine: play(engine, [Asked(a.prompt, a.params) for a in asked]))


@contextmanager
def answers_alone(models: Models) -> Iterator[Alone]:
    """What the requests of a seed are answered by plain decoding."""
    with plain_decoding(models) as answer:
        yield functools.cache(lambda count, seed: answer(random_requests(count, seed)))
