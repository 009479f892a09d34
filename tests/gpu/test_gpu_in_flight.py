"""Random requests on a GPU, where a round is always in flight: everybody gets what plain decoding writes alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from conftest import TestModel
from random_requests import (
    MAX_LEN,
    UNPENALISED,
    Asked,
    Models,
    VerifiedDrafts,
    check_answers,
    make_models,
    play,
    random_requests,
)

from ssd import LLM
from ssd.core import MODEL_WRITTEN, Origin, RequestOutput

DEVICE = "cuda"
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
COUNT, SEEDS = 24, (0, 1, 2)
SPECULATIONS: dict[str, dict[str, Any] | None] = {
    "ar": None,
    "sd": {"mode": "sd", "draft": "noisy", "k": 3},
    "sd-auto": {"mode": "sd", "draft": "noisy", "k": "auto"},
    "suffix": {"mode": "sd", "draft": "suffix", "k": 4},
    "both": {"mode": "sd", "draft": "noisy", "k": 3, "suffix": True, "suffix_cache_tokens": 500},
    "head-both": {"mode": "sd", "draft": "head", "k": 3, "suffix": True},
    "jit": {"mode": "ssd", "draft": "noisy", "k": 3, "backup": "jit", "budget": 6},
    "fast": {"mode": "ssd", "draft": "noisy", "k": 6, "backup": "fast", "budget": 12},
    "inline": {"mode": "ssd", "draft": "noisy", "k": 3, "backup": "jit", "budget": 6, "placement": "inline"},
    "auto": {"mode": "ssd", "draft": "stranger", "k": 4, "backup": "auto", "budget": 8},
    "ssd-auto": {"mode": "ssd", "draft": "noisy", "k": "auto", "budget": "auto"},
    "worker-jit": {"mode": "ssd", "draft": "noisy", "k": 3, "backup": "jit", "budget": 6, "draft_device": "cpu"},
    "worker-fast": {"mode": "ssd", "draft": "noisy", "k": 6, "backup": "fast", "budget": 12, "draft_device": "cpu"},
    "worker-auto": {"mode": "ssd", "draft": "noisy", "k": "auto", "budget": "auto", "draft_device": "cpu"},
    "head-sd": {"mode": "sd", "draft": "head", "k": 3},
    "head-ssd": {"mode": "ssd", "draft": "head", "k": 3, "backup": "fast", "budget": 6},
}


@pytest.fixture(scope="module")
def models(make_model: Callable[[str], TestModel], tmp_path_factory: pytest.TempPathFactory) -> Models:
    return make_models(make_model, tmp_path_factory.mktemp("noisy"))


@pytest.fixture(scope="module")
def alone(models: Models) -> list[list[RequestOutput]]:
    """Every request of every seed by itself: no drafts, no graphs, no prefix cache, every round committed at once."""
    options: dict[str, Any] = {"max_num_seqs": 1, "eager": True, "prefix_caching": False, "num_kv_blocks": 64}
    with LLM(models.target, device=DEVICE, max_model_len=MAX_LEN, **options) as llm:
        llm.driver.call(lambda engine: setattr(engine.round, "run_ahead", False))
        scripts = [[Asked(r.prompt, r.params) for r in random_requests(COUNT, seed)] for seed in SEEDS]
        return [llm.driver.call(lambda engine, r=requests: play(engine, r)) for requests in scripts]


@contextmanager
def engine_with(models: Models, speculation: dict[str, Any] | None, **options: Any) -> Iterator[LLM]:
    """An engine with little memory."""
    options = {"max_num_seqs": 4, "block_size": 16, "num_kv_blocks": 14, "max_num_batched_tokens": 24} | options
    if speculation is not None and speculation["draft"] in models.drafts:
        speculation = speculation | {"draft": models.drafts[speculation["draft"]]}
    with LLM(models.target, device=DEVICE, max_model_len=MAX_LEN, speculation=speculation, **options) as llm:
        yield llm


@pytest.mark.parametrize("speculation", SPECULATIONS)
def test_everything_at_once(models: Models, alone: list[list[RequestOutput]], speculation: str) -> None:
    """Requests join, stop, are aborted and preempted, with parameters of all kinds, while rounds are in flight."""
    chosen = SPECULATIONS[speculation]
    depths = (0, 1, 2, 3) if chosen is not None and chosen["k"] != "auto" else ()  # so many tokens may be drafted
    with engine_with(models, chosen) as llm:
        assert not llm.engine.round.synchronous
        for seed, expected in zip(SEEDS, alone, strict=True):
            requests = random_requests(COUNT, seed)
            outputs = llm.driver.call(
                lambda engine, r=requests, s=seed: play(engine, r, preempt=0.03, seed=s, depths=depths if s else ())
            )
            check_answers(requests, outputs, expected)


@pytest.mark.parametrize(
    "options", [{"max_num_seqs": 16, "num_kv_blocks": 200, "max_num_batched_tokens": 512}, {"eager": True}]
)
@pytest.mark.parametrize("speculation", ["ar", "sd", "jit"])
def test_everything_in_other_engines(
    models: Models, alone: list[list[RequestOutput]], speculation: str, options: dict[str, Any]
) -> None:
    """All requests at once, and no graphs."""
    with engine_with(models, SPECULATIONS[speculation], **options) as llm:
        requests = random_requests(COUNT, SEEDS[0])
        outputs = llm.driver.call(lambda engine: play(engine, requests, preempt=0.03))
        check_answers(requests, outputs, alone[0])


@pytest.mark.parametrize("speculation", ["sd", "jit", "fast", "inline"])
def test_what_the_target_drafts_for_itself_stands(models: Models, speculation: str) -> None:
    """Catches draft KV that is wrong, missing or somebody else's, which costs nothing but speed: so nobody notices.

    Nearly all: a branch's attention adds its own tokens up by themselves, and a rounding may change a token.
    """
    chosen = SPECULATIONS[speculation]
    assert chosen is not None
    verified = VerifiedDrafts()
    with engine_with(models, chosen | {"draft": "self"}) as llm, llm.driver.observing(verified):
        for seed in SEEDS:
            requests = [replace(r, params=replace(r.params, **UNPENALISED)) for r in random_requests(COUNT, seed)]
            llm.driver.call(lambda e, r=requests, s=seed: play(e, r, preempt=0.03, seed=s, depths=(0, 0, 1, 2, 3)))
    written = [each for each in verified.drafts if each[0] in MODEL_WRITTEN]
    assert len(written) > 200
    assert sum(drafted == accepted for _, drafted, accepted in written) > 0.97 * len(written)
    if chosen["mode"] == "ssd":
        assert sum(origin is Origin.HIT for origin, _, _ in written) > 50
