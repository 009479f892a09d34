"""A whole step as one kernel against the Triton kernels: logits and KV, for all kinds of decode-size batches."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from bits import same_bits

if not torch.cuda.is_available() or torch.cuda.get_device_capability() < (9, 0):
    pytest.skip("needs a Hopper GPU or a later one", allow_module_level=True)

from random_weights import RandomCheckpoint

from ssd.kernels.cuda.persistent import PersistentStep
from ssd.kernels.ops import Branches, DeviceBatch
from ssd.kernels.triton.ops import TritonOps
from ssd.layers.parameter import Build
from ssd.models.config import equal_layers
from ssd.models.decoder import Decoder, KVCache
from ssd.models.persistent import persistent_step
from tests.device_batches import make_device_batch

Model = tuple[Decoder, KVCache, PersistentStep]
CUDA = torch.device("cuda")
BLOCK, BLOCKS = 16, 64
LLAMA = equal_layers("llama", 1024, 2048, 4096, 3, 32, 8, 64, 512, tie_embeddings=True)
QWEN3 = equal_layers("qwen3", 1000, 512, 1536, 2, 4, 2, 128, 512, qk_norm=True)
QWEN2 = equal_layers("qwen2", 2048, 1536, 8960, 2, 12, 2, 128, 512, qkv_bias=True, tie_embeddings=True)


@pytest.fixture(scope="module", params=[QWEN2, QWEN3, LLAMA], ids=lambda config: config.family)
def model(request: pytest.FixtureRequest) -> Model:
    config, ops = request.param, TritonOps()
    decoder = Decoder(config, Build(ops, CUDA, torch.bfloat16), max_positions=512)
    generator = torch.Generator(CUDA).manual_seed(0)
    decoder.load(
        (
            name,
            torch.randn(weight.shape, generator=generator, device=CUDA) * (weight.shape[-1] ** -0.5)
            + (weight.dim() == 1),
        )
        for name, weight in RandomCheckpoint(config).weights(CUDA, torch.bfloat16)
    )
    ops.reserve(decoder.heads, CUDA)
    kv = decoder.make_kv_cache(BLOCKS, BLOCK)
    step = persistent_step(decoder, kv)
    assert step is not None
    for cache in (cache for pair in kv for cache in pair):
        cache.normal_(generator=generator)
    return decoder, kv, step


def texts(decoder: Decoder, lengths: list[int], queries: int) -> DeviceBatch:
    """The last `queries` tokens of sequences with disjoint blocks."""
    each = BLOCKS // len(lengths) // 2
    tables = [list(range(i * each, (i + 1) * each)) for i in range(len(lengths))]
    positions = [length - queries + j for length in lengths for j in range(queries)]
    tokens = zip([i for i in range(len(lengths)) for _ in range(queries)], positions, strict=True)
    slots = [tables[i][at // BLOCK] * BLOCK + at % BLOCK for i, at in tokens]
    starts = [i * queries for i in range(len(lengths) + 1)]
    return _batch(decoder, positions, slots, starts, lengths, tables, None)


def branches(decoder: Decoder, lengths: list[int], width: int, depth: int) -> DeviceBatch:
    """Branches after different tokens of each sequence; the last row is padding."""
    each = BLOCKS // len(lengths) // 2
    tables = [list(range(i * each, (i + 1) * each)) for i in range(len(lengths))]
    positions = [length - j % 3 + depth for length in lengths for j in range(width)]
    rows = len(positions)
    slots = [BLOCKS // 2 * BLOCK + row * 16 + depth for row in range(rows)]
    slots[-1] = -1 if rows > 1 else slots[-1]
    starts = [i * width for i in range(len(lengths) + 1)]
    return _batch(decoder, positions, slots, starts, lengths, tables, Branches(depth, 16))


def _batch(
    decoder: Decoder,
    positions: list[int],
    slots: list[int],
    starts: list[int],
    lengths: list[int],
    tables: list[list[int]],
    kind: Branches | None,
) -> DeviceBatch:
    tile = decoder.ops.tile_tokens(decoder.heads, False)
    batch = make_device_batch(positions, slots, starts, lengths, tables, tile_tokens=tile, device=CUDA, branches=kind)
    return replace(batch, token_ids=batch.positions * 7 % decoder.config.vocab_size)


def batches(decoder: Decoder) -> list[DeviceBatch]:
    read = texts(decoder, [40, 90, 17], 5)
    return [
        texts(decoder, [1], 1),
        texts(decoder, [33], 1),
        texts(decoder, [500], 1),
        texts(decoder, [5 + i for i in range(16)], 1),
        texts(decoder, [300], 16),
        replace(read, logit_rows=torch.tensor([4, 7, 14], device=CUDA)),
        branches(decoder, [200], 1, 0),
        branches(decoder, [200], 16, 3),
        branches(decoder, [60, 70], 8, 9),
    ]


def run(model: Model, batch: DeviceBatch, *, fused: bool) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Logits, and the KV caches afterwards; the caches themselves are left as they were."""
    decoder, kv, step = model
    before = [cache.clone() for pair in kv for cache in pair]
    with torch.inference_mode():
        logits = step(batch) if fused else decoder(batch, kv)
    after = [cache.clone() for pair in kv for cache in pair]
    for cache, old in zip((cache for pair in kv for cache in pair), before, strict=True):
        cache.copy_(old)
    return logits, after


def test_a_step_agrees_with_the_other_kernels(model: Model) -> None:
    for batch in batches(model[0]):
        real = batch.slot_mapping >= 0 if batch.logit_rows is None else slice(None)
        logits, caches = run(model, batch, fused=True)
        expected, expected_caches = run(model, batch, fused=False)
        assert (logits - expected)[real].norm() < 0.05 * expected[real].norm()
        for found, wanted in zip(caches, expected_caches, strict=True):
            assert (found.float() - wanted.float()).norm() < 5e-3 * wanted.float().norm()


def test_steps_repeat_themselves_in_any_order_and_in_graphs(model: Model) -> None:
    decoder, kv, step = model
    cases = batches(decoder)
    first = [run(model, batch, fused=True)[0] for batch in cases]
    graphs = []
    for batch in cases:
        graph = torch.cuda.CUDAGraph()
        with torch.inference_mode(), torch.cuda.graph(graph):
            logits = step(batch)
        graphs.append((graph, logits))
    order = [i * 5 % len(cases) for i in range(4 * len(cases))]
    saved = [cache.clone() for pair in kv for cache in pair]
    for i in order:
        graph, logits = graphs[i]
        graph.replay()
        real = cases[i].slot_mapping >= 0 if cases[i].logit_rows is None else slice(None)
        assert same_bits(logits[real], first[i][real])
        for cache, old in zip((cache for pair in kv for cache in pair), saved, strict=True):
            cache.copy_(old)


def test_larger_batches_are_not_taken(model: Model) -> None:
    decoder, _, step = model
    assert step.takes(texts(decoder, [300], 16))
    assert not step.takes(texts(decoder, [300], 17))
    batch = texts(decoder, [300], 16)
    assert not step.takes(replace(batch, prefill_tiles=batch.tiles))
