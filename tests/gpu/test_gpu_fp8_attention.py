"""KV in fp8 on a Hopper GPU: the CUDA kernel for few queries against that for prompts, bit by bit, and all modes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from bits import same_bits

if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
    pytest.skip("needs a Hopper GPU", allow_module_level=True)

from ssd import LLM, SamplingParams
from ssd.kernels.cuda import fp8_attention
from ssd.kernels.ops import DeviceBatch, HeadShape, KVScales
from ssd.kernels.triton import attention
from ssd.prompts import load_prompts
from tests.device_batches import paged_batch

pytestmark = [pytest.mark.gpu, pytest.mark.gpu_memory(10)]
CUDA, BLOCK = torch.device("cuda"), 64
HEADS = [HeadShape(32, 8, 128), HeadShape(64, 8, 128), HeadShape(40, 8, 128), HeadShape(16, 1, 128)]
# Sequences of (tokens before, query tokens).
BATCHES = [
    [(0, 1)],
    [(300, 1)],
    [(511, 3), (0, 5), (512, 1)],
    [(4000, 1)] * 8,
    [(16000, 1), (70, 1), (2500, 1)],
    [(1000 + 13 * i, 1) for i in range(64)],
    [(1023, 7), (9000, 5)],
]


def batch_of(sequences: list[tuple[int, int]], heads: HeadShape, prefill: bool) -> tuple[DeviceBatch, int]:
    tokens = attention.tile_rows(heads, prefill) // heads.group_size
    return paged_batch(sequences, BLOCK, tile_tokens=tokens, device=CUDA, prefill=prefill)


@pytest.mark.parametrize("heads", HEADS, ids=str)
def test_a_row_has_the_same_bits_alone_in_company_and_in_a_prompt(
    heads: HeadShape, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pieces shared by several warps or not, tiles of one and of several tokens, in parts of any size."""
    torch.manual_seed(0)
    workspace, scales = attention.Workspace([heads], CUDA), KVScales(0.7, 1.3)
    for sequences in BATCHES:
        batch, blocks = batch_of(sequences, heads, prefill=True)
        shape = (2, blocks, BLOCK, heads.num_kv_heads, heads.head_dim)
        k, v = torch.randn(shape, device=CUDA).to(torch.float8_e4m3fn)
        assert fp8_attention.takes(heads, torch.bfloat16, k, plain=True)
        q = torch.randn(sum(n for _, n in sequences), heads.num_heads, heads.head_dim, device=CUDA).bfloat16()
        expected = attention.paged_attention(q, batch, heads, k, v, workspace, scales=scales)
        for programs in (1, 5, 132, 132):  # for which pieces are shared out
            monkeypatch.setattr(fp8_attention, "programs", lambda *_, programs=programs: programs)
            batch, _ = batch_of(sequences, heads, prefill=False)
            found = attention.paged_attention(q, batch, heads, k, v, workspace, scales=scales)
            assert same_bits(found, expected), (sequences, programs)


@pytest.mark.gpu_memory(20)
def test_all_modes_write_the_same_text() -> None:
    prompts = load_prompts("gsm8k").asked()[:16]
    params = [SamplingParams(temperature=float(i % 2), max_new_tokens=48, ignore_eos=True, seed=i) for i in range(16)]

    def write(batch: int, **speculation: Any) -> list[list[int]]:
        options = {"max_model_len": 1024, "max_num_seqs": batch, "kv_cache_dtype": "fp8"}
        with LLM("graft:tiny-llama@llama-3.2-3b", device="cuda", speculation=speculation or None, **options) as llm:
            return [output.token_ids for output in llm.generate(prompts, params)]

    draft = "graft:tiny-llama-draft@llama-3.2-1b"
    expected = write(1)
    assert write(16) == expected
    assert write(6, mode="sd", draft=draft, k=3) == expected
    assert write(16, mode="ssd", draft=draft, k=4) == expected
