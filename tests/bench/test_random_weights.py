"""Random weights of `bench/`: what they have in common with trained ones."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from random_weights import DISTINCT, RandomCheckpoint
from split_models import loaded, logits_of

from ssd.kernels.weights import Routing
from ssd.layers.spec import ExpertsSpec
from ssd.models.config import equal_layers
from ssd.parallel.tensor import TensorParallel


def test_rows_choose_different_experts(monkeypatch: pytest.MonkeyPatch) -> None:
    """In every layer about as many experts are hit as by random choices, where shares of the floor are measured."""
    dense = equal_layers("qwen3_moe", 640, 512, 1, 4, 6, 2, 64, 64, qk_norm=True)
    shape = replace(dense, layers=(replace(dense.layer, mlp=ExpertsSpec(64, 4, 128)),) * 4)
    decoder = loaded(RandomCheckpoint(shape, embedding=DISTINCT), TensorParallel())
    hit: list[int] = []
    route = decoder.ops.route

    def counted(*args: object) -> Routing:
        routing: Routing = route(*args)
        hit.append(len(routing.experts.unique()))
        return routing

    monkeypatch.setattr(decoder.ops, "route", counted)
    tokens = torch.randint(0, 640, (16,), generator=torch.Generator().manual_seed(1)).tolist()
    logits_of(decoder, tokens)
    by_chance = 64 * (1 - (1 - 4 / 64) ** 16)
    assert len(hit) >= 4
    assert min(hit) > 0.8 * by_chance, hit
