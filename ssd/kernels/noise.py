"""The sampling noise of `ssd.sampling.noise` as one Triton kernel (a dozen small torch kernels otherwise)."""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def _gumbel_kernel(keys_ptr, out_ptr, vocab_size, GOLDEN, MIX1, MIX2, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(keys_ptr + row).to(tl.uint64) + token.to(tl.uint64) * GOLDEN.to(tl.uint64)
    x = (x ^ (x >> 30)) * MIX1.to(tl.uint64)
    x = (x ^ (x >> 27)) * MIX2.to(tl.uint64)
    bits = (x ^ (x >> 31)) >> 32
    uniform = (bits.to(tl.float64) + 0.5) * 2.3283064365386963e-10  # 2 ** -32
    noise = -tl.log(-tl.log(uniform))
    tl.store(out_ptr + row * vocab_size + token, noise.to(tl.float32), mask=token < vocab_size)


def gumbel(keys: torch.Tensor, vocab_size: int, golden: int, mix1: int, mix2: int) -> torch.Tensor:
    """Rows of Gumbel noise, one for each int64 key. The constants are those of the generator, as signed int64."""
    out = torch.empty((len(keys), vocab_size), dtype=torch.float32, device=keys.device)
    grid = (len(keys), triton.cdiv(vocab_size, 1024))
    _gumbel_kernel[grid](keys, out, vocab_size, golden, mix1, mix2, BLOCK=1024)
    return out
