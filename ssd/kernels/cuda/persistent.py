"""A whole forward step of a small decoder as one CUDA kernel (`persistent.cu`), for up to 16 rows.

The kernel is compiled at run time for one model's shape. It needs the bulk copies of Hopper GPUs (sm_90 and later). Its
sums are split over warps, so it has other bits than the Triton kernels: it is for draft models, whose bits never reach
a text.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence as Seq
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Final

import torch

from ssd.kernels.cuda.launch import processors
from ssd.kernels.cuda.nvrtc import BuildError, Kernel, compiled
from ssd.kernels.ops import DeviceBatch, HeadShape

MAX_ROWS: Final = 16
SOURCE: Final = Path(__file__).parent / "csrc" / "persistent.cu"
_MAX_HIDDEN = 3072  # x of wider models does not fit the registers
_TUNING: Final = {
    "WARPS": 8,
    "CHUNK": 1024,
    "STAGES": 10,
    "IN_FLIGHT": 4,
    "SPLIT": 128,
    "MAX_POLLS": 1 << 26,
}
_P = ctypes.c_void_p


@dataclass(frozen=True)
class StepLayer:
    """One layer's weights, as `TritonOps.prepare` lays them out, and its KV cache: `Layer` of the source."""

    qkv: torch.Tensor
    output: torch.Tensor
    gate_up: torch.Tensor
    down: torch.Tensor
    input_norm: torch.Tensor
    mlp_norm: torch.Tensor
    q_norm: torch.Tensor | None
    k_norm: torch.Tensor | None
    qkv_bias: torch.Tensor | None
    k_cache: torch.Tensor
    v_cache: torch.Tensor

    def tensors(self) -> list[torch.Tensor | None]:
        return [getattr(self, field.name) for field in fields(self)]


class Params(ctypes.Structure):
    """`Params` of the source."""

    _fields_ = [
        *((name, _P) for name in ("layers", "embedding", "norm", "head", "cos", "sin")),
        *((name, _P) for name in ("token_ids", "positions", "slots", "query_start", "tables", "table_rows", "tiles")),
        *((name, _P) for name in ("logit_rows", "logits", "buffers")),
        *((name, ctypes.c_int) for name in ("rows", "logit_count", "num_tiles", "sequences", "table_stride", "depth")),
        *((name, ctypes.c_float) for name in ("eps", "scale")),
    ]


class PersistentStep:
    """The forward step of one decoder over one KV cache; BuildError where there is no kernel for it."""

    def __init__(
        self,
        layers: Seq[StepLayer],
        heads: HeadShape,
        *,
        embedding: torch.Tensor,
        norm: torch.Tensor,
        head: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        eps: float,
    ) -> None:
        first, device = layers[0], embedding.device
        hidden, inter = embedding.shape[1], first.down.shape[1]
        _check(embedding, heads, hidden, inter)
        macros = {
            **{"HIDDEN": hidden, "INTER": inter, "LAYERS": len(layers), "VOCAB": len(head)},
            **{"HEADS": heads.num_heads, "KV_HEADS": heads.num_kv_heads, "DIM": heads.head_dim},
            **{"QK_NORM": int(first.q_norm is not None), "QKV_BIAS": int(first.qkv_bias is not None)},
            **{"BLOCK_SIZE": first.k_cache.shape[1], **_TUNING},
        }
        with ThreadPoolExecutor() as pool:  # NVRTC uses one core each
            cubins = list(pool.map(lambda halves: compiled(SOURCE, {**macros, "HALVES": halves}, device), (1, 2)))
        self._kernels = [Kernel(cubin, "step", device) for cubin in cubins]  # for 8 and for 16 rows
        self._shared_bytes = [kernel.constant("shared_bytes") for kernel in self._kernels]
        for kernel, size in zip(self._kernels, self._shared_bytes, strict=True):
            kernel.allow_shared(size)
        # Every block needs a share of the products of gate/up and of the head.
        self._blocks = min(processors(device), 2 * inter // 8, len(head) // 8)
        self._vocab, self._device = len(head), device
        pointers = [[0 if t is None else t.data_ptr() for t in layer.tensors()] for layer in layers]
        fixed = {
            "layers": torch.tensor(pointers, dtype=torch.int64, device=device),
            **{"embedding": embedding, "norm": norm, "head": head, "cos": cos, "sin": sin},
            "buffers": torch.full((self._kernels[0].constant("buffer_bytes"),), 255, dtype=torch.uint8, device=device),
        }
        self._kept = (fixed, layers)  # what the kernel has addresses of
        self._fixed = {name: tensor.data_ptr() for name, tensor in fixed.items()}
        self._fixed_scalars = {"eps": eps, "scale": heads.scale * 1.4426950408889634}  # exp2 instead of exp
        torch.cuda.synchronize(device)

    def takes(self, batch: DeviceBatch) -> bool:
        sizes = len(batch.token_ids), len(batch.table_rows), batch.tiles.shape[1]
        return batch.prefill_tiles is None and batch.tree is None and max(sizes) <= MAX_ROWS

    def __call__(self, batch: DeviceBatch) -> torch.Tensor:
        """Float32 logits of the batch's logit rows; writes KV."""
        rows = len(batch.token_ids)
        count = rows if batch.logit_rows is None else len(batch.logit_rows)
        logits = torch.empty((count, self._vocab), dtype=torch.float32, device=self._device)
        params = Params(
            **self._fixed,
            **self._fixed_scalars,
            token_ids=batch.token_ids.data_ptr(),
            positions=batch.positions.data_ptr(),
            slots=batch.slot_mapping.data_ptr(),
            query_start=batch.query_start.data_ptr(),
            tables=batch.block_tables.data_ptr(),
            table_rows=batch.table_rows.data_ptr(),
            tiles=batch.tiles.data_ptr(),
            logit_rows=None if batch.logit_rows is None else batch.logit_rows.data_ptr(),
            logits=logits.data_ptr(),
            rows=rows,
            logit_count=count,
            num_tiles=batch.tiles.shape[1],
            sequences=len(batch.table_rows),
            table_stride=batch.block_tables.stride(0),
            depth=-1 if batch.branches is None else batch.branches.depth,
        )
        which = rows > MAX_ROWS // 2
        threads = 32 * (_TUNING["WARPS"] + 1)
        self._kernels[which].launch(self._blocks, threads, self._shared_bytes[which], "cooperative", params)
        return logits


def _check(embedding: torch.Tensor, heads: HeadShape, hidden: int, inter: int) -> None:
    """BuildError where the kernel does not have the shape, the type or the GPU."""
    if embedding.dtype is not torch.bfloat16 or torch.cuda.get_device_capability(embedding.device) < (9, 0):
        raise BuildError("it is for bfloat16 on Hopper GPUs and later")
    fits = hidden <= _MAX_HIDDEN and not any(n % 32 for n in (hidden, inter)) and not len(embedding) % 8
    if not fits or heads.head_dim not in (64, 128) or heads.group_size > MAX_ROWS:
        raise BuildError("it has no such shape")
