"""8-bit floats (e4m3) in Triton kernels, as bytes: GPUs before sm_89 and Triton's interpreter cannot convert them.

A KV cache in fp8 is stored so; `reference.encode` says how numbers are rounded.
"""

from __future__ import annotations

from typing import Final, Literal

import torch
import triton
import triton.language as tl

Widening = Literal["", "bits", "bf16", "f16"]
_TYPES: Final[dict[torch.dtype, Widening]] = {torch.bfloat16: "bf16", torch.float16: "f16"}


def _assembly(kind: str, shift: int, mask: int, factor: int) -> tl.constexpr:
    """Four bytes to two pairs of a 16-bit type. Sign, exponent and mantissa get their places; the exponent is that of
    another bias, which an exact product with a power of two corrects."""
    return tl.constexpr(f"""{{
        .reg .b32 p<2>, m<2>, factor, zero;
        mov.b32 factor, {factor:#x};
        mov.b32 zero, 0x80008000;
        prmt.b32 p0, $2, 0, 0x1404;
        prmt.b32 p1, $2, 0, 0x3424;
        shr.u32 m0, p0, {shift};
        shr.u32 m1, p1, {shift};
        and.b32 m0, m0, {mask:#x};
        and.b32 m1, m1, {mask:#x};
        lop3.b32 p0, p0, 0x80008000, m0, 0xEA;
        lop3.b32 p1, p1, 0x80008000, m1, 0xEA;
        fma.rn.{kind}x2 $0, p0, factor, zero;
        fma.rn.{kind}x2 $1, p1, factor, zero;
    }}""")


_BF16 = _assembly("bf16", 4, 0x07F007F0, 0x7B807B80)  # 2^120
_F16 = _assembly("f16", 1, 0x3F803F80, 0x5C005C00)  # 2^8


def widening(cache: torch.Tensor, dtype: torch.dtype) -> Widening:
    """How `widen` reads this cache: as it is, by integer operations, or (16-bit types on a GPU) by its own."""
    if cache.dtype is not torch.float8_e4m3fn:
        return ""
    return _TYPES.get(dtype, "bits") if cache.device.type != "cpu" else "bits"


def as_bytes(cache: torch.Tensor) -> torch.Tensor:
    """A cache in fp8 as these kernels take it; any other as it is."""
    return cache.view(torch.uint8) if cache.dtype is torch.float8_e4m3fn else cache


@triton.jit
def widen_bits(code, dtype: tl.constexpr):
    """The number of an e4m3 code in the lowest byte of an integer of 32 bits; 480 for the code of NaN."""
    bits = (code & 0x80) << 24 | (code & 0x7F) << 20
    return (bits.to(tl.float32, bitcast=True) * 1.329227995784916e36).to(dtype)  # 2^120


@triton.jit
def widen(x, dtype: tl.constexpr, HOW: tl.constexpr):
    """Stored numbers as `dtype`, exactly. HOW: a `Widening`.

    Not `is_pure`: Triton looks behind pure operations for the width of what was loaded, and chooses an order of sums by
    it, but for some of the tensor cores' instructions only. Decoding and prefill would have different bits.
    """
    if HOW == "bf16":
        return tl.inline_asm_elementwise(_BF16, "=r,=r,r", [x], dtype=tl.bfloat16, is_pure=False, pack=4)
    elif HOW == "f16":
        return tl.inline_asm_elementwise(_F16, "=r,=r,r", [x], dtype=tl.float16, is_pure=False, pack=4)
    elif HOW == "bits":
        return widen_bits(x.to(tl.int32), dtype)
    else:
        return x


@triton.jit
def encode(x, scale):
    """float32 numbers / scale as the nearest codes (ties to even); beyond ±448 the largest, NaN stays NaN."""
    bits = tl.div_rn(x, scale).to(tl.int32, bitcast=True)
    size = bits & 0x7FFFFFFF
    # Below 2^-6 codes are multiples of 2^-9, to which an addition of 2^14 rounds.
    small = (size.to(tl.float32, bitcast=True) + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
    code = ((size + 0x7FFFF + ((size >> 20) & 1)) >> 20) - (120 << 3)
    code = tl.where(size < 0x3C800000, small, code)
    code = tl.where(size >= 0x43E00000, 0x7E, code)
    code = tl.where(size > 0x7F800000, 0x7F, code)
    return (code | ((bits >> 24) & 0x80)).to(tl.uint8)
