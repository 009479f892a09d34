"""8-bit floats (e4m3) in Triton kernels, as bytes: GPUs before sm_89 and Triton's interpreter cannot convert them.

A KV cache in fp8 is stored so; `reference.encode` says how numbers are rounded.
"""

from __future__ import annotations

from typing import Literal

import torch
import triton
import triton.language as tl

Widening = Literal["", "bits", "f16", "cvt"]
# Four bytes to two pairs of float16. Sign, exponent and mantissa get their places; the exponent is that of another
# bias, which an exact product with 2^8 corrects.
_F16 = tl.constexpr("""{
    .reg .b32 p<2>, m<2>, factor, zero;
    mov.b32 factor, 0x5C005C00;
    mov.b32 zero, 0x80008000;
    prmt.b32 p0, $2, 0, 0x1404;
    prmt.b32 p1, $2, 0, 0x3424;
    shr.u32 m0, p0, 1;
    shr.u32 m1, p1, 1;
    and.b32 m0, m0, 0x3F803F80;
    and.b32 m1, m1, 0x3F803F80;
    lop3.b32 p0, p0, 0x80008000, m0, 0xEA;
    lop3.b32 p1, p1, 0x80008000, m1, 0xEA;
    fma.rn.f16x2 $0, p0, factor, zero;
    fma.rn.f16x2 $1, p1, factor, zero;
}""")
_CVT = tl.constexpr("""{
    .reg .b16 a, b;
    mov.b32 {a, b}, $2;
    cvt.rn.f16x2.e4m3x2 $0, a;
    cvt.rn.f16x2.e4m3x2 $1, b;
}""")

_ENCODE = tl.constexpr("""{
    .reg .b16 a, b;
    cvt.rn.satfinite.e4m3x2.f32 a, $2, $1;
    cvt.rn.satfinite.e4m3x2.f32 b, $4, $3;
    mov.b32 $0, {a, b};
}""")


def widening(cache: torch.Tensor, dtype: torch.dtype, capability: tuple[int, int]) -> Widening:
    """How `widen` reads this cache: as it is, or fp8 by integer operations; on a GPU, for 16-bit types, as float16, by
    an instruction where there is one (sm_89)."""
    if cache.dtype is not torch.float8_e4m3fn:
        return ""
    if cache.device.type == "cpu" or dtype is torch.float32:
        return "bits"
    return "cvt" if capability >= (8, 9) else "f16"


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

    Not `is_pure`: through pure operations Triton sees the width of the loaded type, and for some of the tensor cores'
    instructions it orders the depth by that width. Then decoding and prefill would have different bits.
    """
    if HOW == "cvt":
        return tl.inline_asm_elementwise(_CVT, "=r,=r,r", [x], dtype=tl.float16, is_pure=False, pack=4)
    elif HOW == "f16":
        return tl.inline_asm_elementwise(_F16, "=r,=r,r", [x], dtype=tl.float16, is_pure=False, pack=4)
    elif HOW == "bits":
        return widen_bits(x.to(tl.int32), dtype)
    else:
        return x


@triton.jit
def beside(q, HOW: tl.constexpr):
    """Queries in the type that stored numbers are widened to. float16 has more bits than bfloat16; what is beyond its
    range becomes its largest number."""
    if HOW == "cvt" or HOW == "f16":
        return tl.minimum(tl.maximum(q.to(tl.float32), -65504.0), 65504.0).to(tl.float16)
    else:
        return q


@triton.jit
def encode_by_cvt(x, scale):
    """What `encode` does, by an instruction (sm_89)."""
    scaled = tl.div_rn(x, scale)
    return tl.inline_asm_elementwise(_ENCODE, "=r,r,r,r,r", [scaled], dtype=tl.uint8, is_pure=True, pack=4)


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
