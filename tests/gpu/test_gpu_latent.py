"""Latent attention on a Hopper GPU: the CUDA kernel for few queries against Triton's, bit by bit."""

from __future__ import annotations

import pytest
import torch
from bits import same_bits

if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
    pytest.skip("needs a Hopper GPU", allow_module_level=True)

from ssd.kernels.cuda import latent_attention as cuda
from ssd.kernels.ops import HeadShape
from ssd.kernels.triton import attention, latent
from tests.device_batches import paged_batch

pytestmark = [pytest.mark.gpu, pytest.mark.gpu_memory(5)]
DEVICE, BLOCK = torch.device("cuda"), 64
# Sequences of (tokens before, query tokens).
BATCHES = [
    [(0, 1)],
    [(before, 1) for before in (62, 63, 64, 126, 127, 128)],
    [(before, 1) for before in (510, 511, 512, 1022, 1023, 1024, 1025, 3999)],
    [(16383, 1)],
    [(16000, 1), (70, 1), (2500, 1)],
    [(300, 1)] * 64,
    [(1000 + 13 * i, 1) for i in range(64)],
    [(100 * (i % 30), 1) for i in range(150)],
    [(1023, 7), (9000, 9), (0, 5), (127, 2)],
]


@pytest.mark.parametrize("num_heads", [3, 16, 20, 32, 58, 64, 128])
def test_a_row_has_the_bits_of_triton_however_pieces_are_shared_out(
    num_heads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Planned before or not, for few items or many. Catches pieces that are folded in another order, and results that
    are read before they are written."""
    torch.manual_seed(0)
    heads = HeadShape(num_heads, 1, cuda.HEAD_DIM, latent_dim=cuda.VALUE_DIM, softmax_scale=0.06)
    workspace, tokens = attention.Workspace([heads], DEVICE), attention.tile_tokens([heads], False)
    for sequences in BATCHES:
        _, blocks = paged_batch(sequences, BLOCK, tile_tokens=tokens, device=DEVICE)
        cache = torch.randn(blocks, BLOCK, 1, cuda.HEAD_DIM, device=DEVICE).bfloat16()
        q = torch.randn(sum(n for _, n in sequences), num_heads, cuda.HEAD_DIM, device=DEVICE).bfloat16()
        found: list[torch.Tensor] = []
        for programs in (0, 132, 32, 7, 132):  # 0: Triton's kernel
            batch, _ = paged_batch(sequences, BLOCK, tile_tokens=tokens, device=DEVICE)
            with monkeypatch.context() as patch:
                if programs:
                    patch.setattr(workspace, "programs", lambda _, programs=programs: programs)
                else:
                    patch.setattr(cuda, "takes", lambda *_: False)
                if len(found) > 2:
                    workspace.items(batch, heads, before_pass=True)
                after = q + 0  # a kernel that is not launched early
                found.append(latent.latent_attention(after, batch, heads, cache, workspace))
        for i, each in enumerate(found):
            assert same_bits(each, found[0]), (sequences, i)
    assert not workspace.count.any()
