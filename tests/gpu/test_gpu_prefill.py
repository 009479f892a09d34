"""The overlapped prefill attention against the other kernel, bit by bit."""

from __future__ import annotations

import logging

import pytest
import torch
from bits import same_bits

if not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9:
    pytest.skip("needs a Hopper GPU", allow_module_level=True)

from ssd.kernels.ops import HeadShape
from ssd.kernels.triton import attention, prefill
from tests.device_batches import make_device_batch, paged_batch

pytestmark = pytest.mark.gpu
CUDA, BLOCK = torch.device("cuda"), 64
HEADS = [
    HeadShape(32, 8, 128),
    HeadShape(8, 8, 128),
    HeadShape(40, 8, 128),
    HeadShape(12, 2, 128),
    HeadShape(14, 2, 64),
]
# Sequences of (tokens before, query tokens).
BATCHES = [
    [(0, 1)],
    [(0, 700)],
    [(512, 33), (0, 64), (511, 1)],
    [(2000, 300), (63, 65)],
    [(1023, 129), (0, 17), (5, 600)],
]


def random(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator(CUDA).manual_seed(len(shape)), device=CUDA).to(dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("heads", HEADS, ids=str)
@pytest.mark.parametrize("sinks", [False, True])
def test_bits_are_those_of_the_other_kernel(heads: HeadShape, dtype: torch.dtype, sinks: bool) -> None:
    logits = torch.linspace(-4, 6, heads.num_heads, device=CUDA) if sinks else None
    workspace = attention.Workspace([heads], CUDA)
    for sequences in BATCHES:
        tokens = attention.tile_rows(heads, True) // heads.group_size
        batch, used = paged_batch(sequences, BLOCK, tile_tokens=tokens, device=CUDA, prefill=True)
        q = random(len(batch.positions), heads.num_heads, heads.head_dim, dtype=dtype)
        k, v = random(2, used, BLOCK, heads.num_kv_heads, heads.head_dim, dtype=dtype)
        expected = attention.paged_attention(q, batch, heads, k, v, workspace, sinks=logits)
        for _ in range(3):
            found = torch.full_like(expected, 7.0)
            prefill.prefill_attention(q, found, batch, heads, k, v, heads.scale * attention.LOG2_E, logits)
            assert same_bits(found, expected), sequences


def test_it_is_used_where_it_has_the_bits_of_the_other(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    heads = HEADS[0]
    batch = make_device_batch([0], [0], [0, 1], [1], [[0]], tile_tokens=32, device=CUDA, prefill=True)
    q, cache = random(1, 32, 128, dtype=torch.bfloat16), random(1, BLOCK, 8, 128, dtype=torch.bfloat16)

    def used() -> bool:
        kernel = prefill.OverlappedPrefill(attention.Workspace([heads], CUDA))
        return kernel(q, torch.empty_like(q).flatten(1), batch, heads, cache, cache)

    assert used()
    monkeypatch.setattr(prefill, "prefill_attention", lambda q, out, *_: out.copy_(q.flatten(1)))
    assert not used()
    assert "other bits" in caplog.text
    monkeypatch.setattr(prefill, "prefill_attention", None)  # cannot be called
    assert not used()
    assert "cannot be built" in caplog.text
