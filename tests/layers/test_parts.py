"""Layers described as data: a model whose layers differ, its KV, its memory, and the formats of its weights."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from bits import same_bits
from device_batches import make_device_batch
from random_weights import RandomCheckpoint
from reference_ops import ReferenceOps

from ssd.errors import UnsupportedModel
from ssd.kernels.cpu import library
from ssd.kernels.cpu.ops import CpuOps
from ssd.kernels.ops import DeviceBatch, Ops
from ssd.layers.formats import DENSE, FormatOf, Use, WeightFormat, dense
from ssd.layers.formats.rounded import Rounded, rounded
from ssd.layers.parameter import Build
from ssd.layers.spec import GQASpec, LayerSpec, MLPSpec, RopeConfig
from ssd.models.config import DecoderConfig
from ssd.models.decoder import Decoder, check_fits, check_split, parameter_shapes
from ssd.models.fields import check_shape
from ssd.parallel.tensor import TensorParallel

CPU = torch.device("cpu")
PLAIN = LayerSpec(GQASpec(4, 2, 16, RopeConfig()), MLPSpec(96))
NORMED = LayerSpec(GQASpec(4, 2, 16, RopeConfig(5e5), qk_norm=True), MLPSpec(160))
BIASED = LayerSpec(GQASpec(4, 2, 16, RopeConfig(), qkv_bias=True, output_bias=True), MLPSpec(96, bias=True))
MIXED = DecoderConfig("mixed", 64, 64, (PLAIN, NORMED, BIASED, NORMED, PLAIN), 128)
WIDE, MULTI_QUERY = (LayerSpec(GQASpec(*sizes, RopeConfig()), MLPSpec(96)) for sizes in ((4, 4, 32), (8, 1, 24)))
HEADS = DecoderConfig("heads", 64, 64, (PLAIN, WIDE, MULTI_QUERY, PLAIN), 128)
TOKENS = [3, 9, 27, 1, 5, 60]


def make(config: DecoderConfig, ops: Ops | None = None, format_of: FormatOf = dense) -> Decoder:
    decoder = Decoder(config, Build(ops or ReferenceOps(), CPU, torch.float32, format_of=format_of), max_positions=64)
    weights = RandomCheckpoint(config).weights(CPU, torch.float32)
    decoder.load((name, weight * 6 if weight.dim() > 1 else weight) for name, weight in weights)  # layers that matter
    return decoder


def batch(first: int, count: int) -> DeviceBatch:
    positions = list(range(first, first + count))
    made = make_device_batch(
        positions, positions, [0, count], [first + count], [[0, 1]], tile_tokens=1 << 30, device=CPU
    )
    return replace(made, token_ids=torch.tensor(TOKENS[first : first + count], dtype=torch.int32))


def logits(decoder: Decoder, *counts: int) -> torch.Tensor:
    """After every token of a text that is read in chunks of these sizes."""
    kv, found, done = decoder.make_kv_cache(2, 16), [], 0
    for count in counts:
        found.append(decoder(batch(done, count), kv))
        done += count
    return torch.cat(found)


@pytest.mark.parametrize("config", [MIXED, HEADS], ids=lambda config: config.family)
def test_a_model_whose_layers_differ(config: DecoderConfig) -> None:
    """Each layer has its own heads, sizes, norms, biases and rotary embedding: the kernels agree with plain torch, and
    reading a text in chunks, through the KV cache, gives the same bits."""
    expected, ours = logits(make(config), 6), make(config, CpuOps(library.load()))
    torch.testing.assert_close(logits(ours, 6), expected, atol=1e-4, rtol=1e-4)
    assert same_bits(logits(ours, 1, 3, 2), logits(ours, 6))
    assert not torch.allclose(logits(make(replace(MIXED, layers=(PLAIN,) * 5)), 6), expected, atol=1e-2)


def test_a_rehearsal_runs_one_layer_of_each_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first layer, which has no residual, and one of each kind after it: requests wait for no compiler."""
    decoder, run = make(MIXED), []
    for i, layer in enumerate(decoder.layers):
        monkeypatch.setattr(layer.mlp, "down", lambda x, i=i, down=layer.mlp.down: run.append(i) or down(x))
    with decoder.distinct_layers():
        logits(decoder, 2)
    assert run == [0, 1, 2, 4]
    run.clear()
    logits(decoder, 2)
    assert run == [0, 1, 2, 3, 4]


def test_a_rehearsal_knows_the_formats_of_weights() -> None:
    """Two layers of one description, whose weights have different formats, launch different kernels."""
    int8 = Rounded("int8")

    def last_is_rounded(name: str) -> WeightFormat:
        return int8 if ".layers.3.mlp" in name else DENSE

    decoder = make(replace(MIXED, layers=(PLAIN,) * 5), format_of=last_is_rounded)
    with decoder.distinct_layers():
        assert list(decoder._run) == [0, 1, 3]
    assert decoder.formats == {"dense", "int8"}


@pytest.mark.parametrize("gated", [False, True])
def test_a_weight_in_two_formats_is_rounded_for_few_rows_only(gated: bool) -> None:
    torch.manual_seed(0)
    stored, x = [{"weight": torch.randn(64, 32)}], torch.randn(33, 32)
    both, codes, ops, use = rounded("int8+bf16")(""), rounded("int8")(""), ReferenceOps(), Use(gated=gated)

    def product(form: WeightFormat, rows: int) -> torch.Tensor:
        return form.prepare(stored, ops, torch.float32, use).linear(x[:rows])

    assert same_bits(product(both, 32), product(codes, 32))
    assert same_bits(product(both, 33), product(DENSE, 33))
    assert not torch.equal(product(codes, 33), product(DENSE, 33))


def test_kv_memory_is_the_sum_over_layers() -> None:
    wide = replace(PLAIN, attention=replace(PLAIN.attention, num_kv_heads=4))
    config = replace(MIXED, layers=(PLAIN, wide, wide))
    assert config.kv_bytes_per_token(torch.bfloat16) == (2 + 4 + 4) * 2 * 16 * 2
    assert config.kv_bytes_per_token(torch.bfloat16, ranks=4) == (1 + 1 + 1) * 2 * 16 * 2
    cache = make(config).make_kv_cache(3, 8)
    assert [tensor.shape for tensor in cache[1]] == [(3, 8, 4, 16)] * 2
    assert sum(tensor.nbytes for layer in cache for tensor in layer) == 3 * 8 * config.kv_bytes_per_token(torch.float32)


def test_layers_of_two_groups_share_tensors_of_the_same_layout() -> None:
    """Catches a block that is shared by layers whose tokens are of different sizes."""
    short, wide = (replace(each, attention=replace(each.attention, window=8)) for each in (PLAIN, WIDE))
    config = replace(HEADS, layers=(PLAIN, short, wide, MULTI_QUERY, short))
    build = Build(ReferenceOps(), CPU, torch.float32)
    decoder = Decoder(config, build, max_positions=64, windowed=True)
    cache = [k for k, _ in decoder.make_kv_cache(3, 8)]
    assert [tuple(k.shape[2:]) for k in cache] == [(2, 16), (2, 16), (4, 32), (1, 24), (2, 16)]
    assert [cache[0] is k for k in cache] == [True, True, False, False, False]
    stored = {k.data_ptr(): 2 * k.nbytes for k in cache}
    assert sum(stored.values()) == 3 * 8 * decoder.kv_bytes_per_token


def test_weights_are_counted_layer_by_layer() -> None:
    """Catches an estimate that takes one layer for all."""
    decoder, shapes = make(MIXED), parameter_shapes(MIXED)
    count = sum(map(math.prod, shapes.values()))
    assert decoder.num_bytes() == 4 * count
    check_fits(MIXED, count)
    with pytest.raises(UnsupportedModel, match=f"describes {count} parameters"):
        check_fits(MIXED, count - 1)


def test_a_split_has_to_fit_every_layer() -> None:
    odd = replace(PLAIN, mlp=MLPSpec(95))
    assert MIXED.splits(2)
    with pytest.raises(Exception, match=r"intermediate_size=95: use one of 1$"):
        check_split(replace(MIXED, layers=(PLAIN, odd)), 2)


@pytest.mark.parametrize(
    ("changes", "refusal"),
    [
        ({"num_kv_heads": 3}, "num_key_value_heads=3 does not divide"),
        ({"head_dim": 15}, "head_dim=15: the rotary"),
        ({"head_dim": 1 << 15}, "head_dim=32768: the rotary"),
        ({"rope": RopeConfig(scaling="llama3", high_freq_factor=1.0)}, "high_freq_factor=1.0"),
    ],
)
def test_what_the_kernels_cannot_do_is_refused_in_any_layer(changes: dict[str, Any], refusal: str) -> None:
    check_shape(HEADS)
    changed = replace(PLAIN, attention=replace(PLAIN.attention, **changes))
    with pytest.raises(UnsupportedModel, match=refusal):
        check_shape(replace(MIXED, layers=(PLAIN, changed)))


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_loads_its_share_of_every_part(rank: int) -> None:
    """Gate and up, q, k and v are cut each on its own; the weight of a row-parallel layer by its columns."""
    whole = make(MIXED)
    build = Build(ReferenceOps(), CPU, torch.float32, TensorParallel(rank, 2))
    half = Decoder(MIXED, build, max_positions=64)
    half.load((name, weight * 6) for name, weight in RandomCheckpoint(MIXED).weights(CPU, torch.float32))
    for ours, theirs in zip(half.layers, whole.layers, strict=True):
        gate_up, down = theirs.mlp.gate_up.weight.dense.chunk(2), theirs.mlp.down.weight.dense
        assert same_bits(ours.mlp.gate_up.weight.dense, torch.cat([each.chunk(2)[rank] for each in gate_up]))
        assert same_bits(ours.mlp.down.weight.dense, down.chunk(2, dim=1)[rank])
        q, k, v = theirs.attention.qkv.weight.dense.split([64, 32, 32])
        assert same_bits(ours.attention.qkv.weight.dense, torch.cat([each.chunk(2)[rank] for each in (q, k, v)]))
