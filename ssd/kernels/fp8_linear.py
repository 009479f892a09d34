"""Products of e4m3 rows with e4m3 weights on the 8-bit tensor cores of Hopper GPUs, one scale a row and an output.

Few rows are multiplied by a Triton kernel whose A operand is the weight, many by the library. Both sum over the depth
in one chain of the same instruction (`wgmma`, 32 at a time), so a row has the same bits in any company. The product is
rounded to bfloat16 before a bias or an activation.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from ssd.kernels.quantized import Codes, RowType

_FEW_ROWS = 64


@dataclass(frozen=True)
class Fp8Weight:
    """A weight [columns, depth]; a gated one has alternating gate and up rows."""

    values: torch.Tensor  # float8_e4m3fn [columns, depth]
    scales: torch.Tensor  # float32 [columns]


def takes(codes: Codes, dtype: torch.dtype, rows: RowType | None) -> bool:
    """Whether products of this weight with such rows are for these kernels."""
    if rows != "fp8" or codes.type != "fp8" or codes.scales.shape[1] != 1 or codes.offsets is not None:
        return False
    fits = dtype is torch.bfloat16 and codes.depth % 256 == 0 and len(codes.values) % 16 == 0
    return fits and codes.values.is_cuda and torch.cuda.get_device_capability(codes.values.device) == (9, 0)


def prepare(codes: Codes) -> Fp8Weight:
    return Fp8Weight(codes.values.view(torch.float8_e4m3fn).contiguous(), codes.scales[:, 0].contiguous())


@triton.jit
def _fp8_kernel(
    x_ptr, w_ptr, row_scale_ptr, scale_ptr, bias_ptr, y_ptr, num_rows, N, K, y_stride,
    GATED: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """y[m, n] = sum_k x[m, k] w[n, k], scaled; for up to BLOCK_M rows."""
    m = tl.arange(0, BLOCK_M)
    n0 = tl.program_id(0) * BLOCK_N
    n = n0 + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    m_mask, n_mask = m < num_rows, n < N
    x_ptrs = x_ptr + m[None, :] * K + k[:, None]
    w_ptrs = w_ptr + n[:, None].to(tl.int64) * K + k[None, :]
    acc = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    for start in tl.range(0, K, BLOCK_K, num_stages=STAGES):
        w = tl.load(w_ptrs + start, mask=n_mask[:, None], other=0.0)
        x = tl.load(x_ptrs + start, mask=m_mask[None, :], other=0.0)
        acc = tl.dot(w, x, acc)
    acc = acc * tl.load(scale_ptr + n, mask=n_mask, other=0.0)[:, None]
    acc = acc * tl.load(row_scale_ptr + m, mask=m_mask, other=0.0)[None, :]
    _store(acc.to(tl.bfloat16), m, n, n0, m_mask, n_mask, bias_ptr, y_ptr, N, y_stride, GATED, BLOCK_M, BLOCK_N)


@triton.jit
def _store(y, m, n, n0, m_mask, n_mask, bias_ptr, y_ptr, N, y_stride,
           GATED: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):  # fmt: skip
    """Stores products [n, m], after the bias and the activation."""
    if bias_ptr is not None:
        y = (y.to(tl.float32) + tl.load(bias_ptr + n, mask=n_mask, other=0.0).to(tl.float32)[:, None]).to(tl.bfloat16)
    if GATED:
        both = tl.permute(tl.reshape(y.to(tl.float32), (BLOCK_N // 2, 2, BLOCK_M)), (0, 2, 1))
        gate, up = tl.split(both)
        y = gate / (1.0 + tl.exp(-gate)) * up
        n = n0 // 2 + tl.arange(0, BLOCK_N // 2)
        n_mask = n < N // 2
    mask = m_mask[None, :] & n_mask[:, None]
    tl.store(y_ptr + m[None, :].to(tl.int64) * y_stride + n[:, None], y.to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["num_rows"])
def _finish_kernel(product_ptr, bias_ptr, y_ptr, num_rows, N, y_stride,
                   GATED: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):  # fmt: skip
    """What `_fp8_kernel` does with products."""
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    n0 = tl.program_id(1) * BLOCK_N
    n = n0 + tl.arange(0, BLOCK_N)
    m_mask, n_mask = m < num_rows, n < N
    products = product_ptr + m[None, :].to(tl.int64) * N + n[:, None]
    y = tl.load(products, mask=m_mask[None, :] & n_mask[:, None], other=0.0)
    _store(y, m, n, n0, m_mask, n_mask, bias_ptr, y_ptr, N, y_stride, GATED, BLOCK_M, BLOCK_N)


def linear(
    x: torch.Tensor,
    weight: Fp8Weight,
    bias: torch.Tensor | None,
    *,
    gated: bool,
    out_dtype: torch.dtype,
    row_scales: torch.Tensor,
) -> torch.Tensor:
    """x [M, K] in e4m3 times the weight transposed; see `Ops.codes_linear`."""
    (num_rows, depth), columns = x.shape, len(weight.values)
    shape = (num_rows, columns // 2 if gated else columns)
    if num_rows > _FEW_ROWS:
        if row_scales.data_ptr() % 16:  # which the library refuses
            row_scales = row_scales.clone()
        product = torch._scaled_mm(
            *(x, weight.values.t(), row_scales, weight.scales[None]), out_dtype=torch.bfloat16, use_fast_accum=True
        )
        if bias is None and not gated:
            return product.to(out_dtype)
        y = torch.empty(shape, dtype=out_dtype, device=x.device)
        _finish_kernel[(triton.cdiv(num_rows, 8), triton.cdiv(columns, 256))](
            *(product, bias, y, num_rows, columns, y.stride(0)), **{"GATED": gated, "BLOCK_M": 8, "BLOCK_N": 256}
        )
        return y
    y = torch.empty(shape, dtype=out_dtype, device=x.device)
    rows = 16 if num_rows <= 16 else 32 if num_rows <= 32 else 64  # with 8, Triton has another instruction
    _fp8_kernel[(triton.cdiv(columns, 64),)](
        *(x, weight.values, row_scales, weight.scales, bias, y, num_rows, columns, depth, y.stride(0)),
        **{"GATED": gated, "BLOCK_M": rows, "BLOCK_N": 64, "BLOCK_K": 256, "STAGES": 4},
        num_warps=4,
    )
    return y
