"""Products of e4m3 rows with e4m3 weights on the 8-bit tensor cores of Hopper GPUs, one scale a row and an output.

Few rows are multiplied by a CUDA kernel (`fp8_rows.cu`), many by the library. Both sum over the depth in one chain of
the same instruction (`wgmma`, 32 at a time), so a row has the same bits in any company. The product is rounded to
bfloat16 before a bias or an activation.
"""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path
from typing import Final

import torch
import triton
import triton.language as tl

from ssd.kernels.codes import Codes
from ssd.kernels.cuda.few_rows import RING_AT, SHARED, share_of
from ssd.kernels.cuda.nvrtc import Kernel, kernels, tensor_map
from ssd.kernels.cuda.partition import current_processors
from ssd.kernels.triton.compile import compiling
from ssd.kernels.triton.epilogue import gate_and_up, wide_gate
from ssd.kernels.weights import RowRounding

SOURCE: Final = Path(__file__).parent / "csrc" / "fp8_rows.cu"
TILES: Final = (1, 2, 4, 8)  # of 8 rows, each number a kernel of its own; for more rows the library is faster
PARTS: Final = 2  # of 128 numbers of the depth, that a stage holds
MAX_SHARE: Final = 16  # of 8 outputs
BEHIND: Final = 8 << 10  # bytes behind the ring that the tensor cores may read
_MAX_STAGES: Final = 20
_P = ctypes.c_void_p


class Params(ctypes.Structure):
    """`Params` of the source."""

    _fields_ = [
        *((name, _P) for name in ("scales", "row_scales", "bias", "y")),
        ("y_stride", ctypes.c_longlong),
        *((name, ctypes.c_int) for name in ("rows", "columns", "blocks", "share", "stages", "gated", "float32")),
    ]


def takes(codes: Codes, dtype: torch.dtype, rows: RowRounding) -> bool:
    """Whether products of this weight with such rows are for these kernels."""
    if (rows.kind, rows.group) != ("fp8", None):
        return False
    if codes.type != "fp8" or codes.scales.shape[1] != 1 or codes.offsets is not None:
        return False
    fits = dtype is torch.bfloat16 and codes.depth % 256 == 0 and len(codes.values) % 16 == 0
    return fits and codes.values.is_cuda and torch.cuda.get_device_capability(codes.values.device) == (9, 0)


@triton.jit(do_not_specialize=["num_rows"])
def _finish_kernel(product_ptr, bias_ptr, y_ptr, num_rows, N, y_stride,
                   GATED: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):  # fmt: skip
    """The bias and the activation of products."""
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    n0 = tl.program_id(1) * BLOCK_N
    n = n0 + tl.arange(0, BLOCK_N)
    m_mask, n_mask = m < num_rows, n < N
    products = product_ptr + m[None, :].to(tl.int64) * N + n[:, None]
    y = tl.load(products, mask=m_mask[None, :] & n_mask[:, None], other=0.0)
    if bias_ptr is not None:
        y = (y.to(tl.float32) + tl.load(bias_ptr + n, mask=n_mask, other=0.0).to(tl.float32)[:, None]).to(tl.bfloat16)
    if GATED:
        gate, up = gate_and_up(y.to(tl.float32), BLOCK_N, BLOCK_M)
        y = wide_gate(gate, up)
        n = n0 // 2 + tl.arange(0, BLOCK_N // 2)
        n_mask = n < N // 2
    mask = m_mask[None, :] & n_mask[:, None]
    tl.store(y_ptr + m[None, :].to(tl.int64) * y_stride + n[:, None], y.to(y_ptr.dtype.element_ty), mask=mask)


@functools.cache
def _kernels(device: torch.device) -> dict[int, Kernel]:
    """Kernels by tiles; none where they cannot be built."""
    slower = "few rows are multiplied with e4m3 weights by slower kernels"
    made = kernels(SOURCE, [{"TILES": tiles} for tiles in TILES], "product", device, SHARED, slower)
    return dict(zip(TILES, made, strict=False))


def stage_bytes(share: int, tiles: int) -> int:
    """`stage_bytes` of the source."""
    return PARTS * 1024 * (tiles + share)


def linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    scales: torch.Tensor,
    bias: torch.Tensor | None,
    *,
    gated: bool,
    out_dtype: torch.dtype,
    row_scales: torch.Tensor,
) -> torch.Tensor:
    """x [M, K] times a weight [N, K] transposed, both in e4m3, with float32 scales [N] of the weight and [M, 1] of x.
    A gated weight has alternating gate and up rows."""
    num_rows, columns = len(x), len(weight)
    y = torch.empty(num_rows, columns // 2 if gated else columns, dtype=out_dtype, device=x.device)
    if 0 < num_rows <= 8 * TILES[-1] and _kernels(x.device):
        if not compiling():
            _few_rows(x, weight, scales, bias, row_scales, y, gated)
        return y
    if row_scales.data_ptr() % 16:  # which the library refuses
        row_scales = row_scales.clone()
    product = torch._scaled_mm(
        *(x, weight.t(), row_scales, scales[None]), out_dtype=torch.bfloat16, use_fast_accum=True
    )
    if bias is None and not gated:
        return product.to(out_dtype)
    _finish_kernel[(triton.cdiv(num_rows, 8), triton.cdiv(columns, 256))](
        *(product, bias, y, num_rows, columns, y.stride(0)), **{"GATED": gated, "BLOCK_M": 8, "BLOCK_N": 256}
    )
    return y


def _few_rows(
    x: torch.Tensor,
    weight: torch.Tensor,
    scales: torch.Tensor,
    bias: torch.Tensor | None,
    row_scales: torch.Tensor,
    y: torch.Tensor,
    gated: bool,
) -> None:
    (rows, depth), columns, count = x.shape, len(weight), current_processors(x.device)
    tiles = next(each for each in TILES if 8 * each >= rows)
    share = share_of(-(-columns // 8), count, MAX_SHARE)
    size = stage_bytes(share, tiles)
    stages = min(_MAX_STAGES, (SHARED - RING_AT - BEHIND) // size)
    pointers = {"scales": scales, "row_scales": row_scales, "bias": bias, "y": y}
    params = Params(
        **{name: None if tensor is None else tensor.data_ptr() for name, tensor in pointers.items()},
        **{"y_stride": y.stride(0), "rows": rows, "columns": columns, "blocks": depth // (128 * PARTS)},
        **{"share": share, "stages": stages, "gated": gated, "float32": y.dtype is torch.float32},
    )
    maps = [  # pairs of numbers as one of 16 bits
        tensor_map(matrix.data_ptr(), len(matrix), depth // 2, depth, (PARTS, box))
        for matrix, box in ((x, 8 * tiles), (weight, 8 * share))
    ]
    blocks, threads = min(count, -(-columns // (8 * share))), 32 * (-(-share // 8) * 4 + 1)
    _kernels(x.device)[tiles].launch(blocks, threads, RING_AT + stages * size + BEHIND, "early", *maps, params)
