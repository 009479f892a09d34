"""A whole forward step of a small decoder as one CUDA kernel (`persistent.cu`), for up to 16 rows.

The kernel is compiled at run time for one model's shape, with the NVRTC that torch ships, and kept in the user's cache.
It needs the bulk copies of Hopper GPUs (sm_90 and later). Its sums are split over warps, so it has other bits than the
Triton kernels: it is for draft models, whose bits never reach a text.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Final

import torch

from ssd.kernels import cache
from ssd.kernels.driver import call
from ssd.kernels.ops import DeviceBatch, HeadShape

MAX_ROWS: Final = 16
SOURCES = [Path(__file__).with_name(name) for name in ("persistent_ptx.cu", "persistent.cu")]
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
_FUNC_MAX_DYNAMIC_SHARED = 8  # cuda.h


class BuildError(Exception):
    """The kernel cannot be used; the text says why."""


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
            cubins = list(pool.map(lambda halves: _compiled({**macros, "HALVES": halves}, device), (1, 2)))
        self._kernels = [_Kernel(cubin, device) for cubin in cubins]  # for 8 and for 16 rows
        processors = torch.cuda.get_device_properties(device).multi_processor_count
        self._blocks = min(processors, 2 * inter // 8, len(head) // 8)  # every block needs a share of these products
        self._vocab, self._device = len(head), device
        pointers = [[0 if t is None else t.data_ptr() for t in layer.tensors()] for layer in layers]
        fixed = {
            "layers": torch.tensor(pointers, dtype=torch.int64, device=device),
            **{"embedding": embedding, "norm": norm, "head": head, "cos": cos, "sin": sin},
            "buffers": torch.full((self._kernels[0].buffer_bytes,), 255, dtype=torch.uint8, device=device),
        }
        self._kept = (fixed, layers)  # what the kernel has addresses of
        self._fixed = {name: tensor.data_ptr() for name, tensor in fixed.items()}
        self._fixed_scalars = {"eps": eps, "scale": heads.scale * 1.4426950408889634}  # exp2 instead of exp
        torch.cuda.synchronize(device)

    def takes(self, batch: DeviceBatch) -> bool:
        sizes = len(batch.token_ids), len(batch.table_rows), batch.tiles.shape[1]
        return batch.prefill_tiles is None and max(sizes) <= MAX_ROWS

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
        self._kernels[rows > MAX_ROWS // 2].launch(self._blocks, params)
        return logits


def _check(embedding: torch.Tensor, heads: HeadShape, hidden: int, inter: int) -> None:
    """BuildError where the kernel does not have the shape, the type or the GPU."""
    if embedding.dtype is not torch.bfloat16 or torch.cuda.get_device_capability(embedding.device) < (9, 0):
        raise BuildError("it is for bfloat16 on Hopper GPUs and later")
    fits = hidden <= _MAX_HIDDEN and not any(n % 32 for n in (hidden, inter)) and not len(embedding) % 8
    if not fits or heads.head_dim not in (64, 128) or heads.group_size > MAX_ROWS:
        raise BuildError("it has no such shape")


@functools.cache
def _nvrtc() -> ctypes.CDLL:
    """The NVRTC of torch's CUDA version."""
    name = f"libnvrtc.so.{str(torch.version.cuda).split('.')[0]}"
    site = Path(torch.__file__).parent.parent
    found = [str(path) for folder in (site / "torch" / "lib", *site.glob("nvidia/*/lib")) for path in folder.glob(name)]
    for path in (*found, name):
        try:
            return ctypes.CDLL(path)
        except OSError:
            continue
    raise BuildError(f"{name} was not found")


def source() -> bytes:
    return b"".join(path.read_bytes() for path in SOURCES)


def compile_source(macros: Mapping[str, int], architecture: str) -> bytes:
    """The source's cubin for one shape."""
    library, program, size = _nvrtc(), _P(), ctypes.c_size_t()
    options = [f"--gpu-architecture={architecture}", "--std=c++17", *(f"-D{name}={n}" for name, n in macros.items())]
    array = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
    library.nvrtcCreateProgram(ctypes.byref(program), source(), b"persistent.cu", 0, None, None)
    try:
        failed = library.nvrtcCompileProgram(program, len(options), array)
        what = "ProgramLog" if failed else "CUBIN"
        getattr(library, f"nvrtcGet{what}Size")(program, ctypes.byref(size))
        text = ctypes.create_string_buffer(size.value)
        getattr(library, f"nvrtcGet{what}")(program, text)
    finally:
        library.nvrtcDestroyProgram(ctypes.byref(program))
    if failed:
        raise BuildError(f"NVRTC: {text.value.decode(errors='replace')[:500]}")
    return text.raw


def _compiled(macros: Mapping[str, int], device: torch.device) -> bytes:
    """The cubin from the user's cache, compiling it first if it is not there yet."""
    architecture = "sm_{}{}".format(*torch.cuda.get_device_capability(device))
    major, minor = ctypes.c_int(), ctypes.c_int()
    _nvrtc().nvrtcVersion(ctypes.byref(major), ctypes.byref(minor))
    identity = f"{sorted(macros.items())} {architecture} {major.value}.{minor.value}"
    key = hashlib.sha256(source() + identity.encode()).hexdigest()[:20]
    made = cache.compiled(f"persistent-{key}", ".cubin", lambda: compile_source(macros, architecture))
    return made.read_bytes()


class _Kernel:
    """A cubin that was loaded."""

    def __init__(self, cubin: bytes, device: torch.device) -> None:
        self._module, self._function = _P(), _P()
        with torch.cuda.device(device):
            torch.cuda.synchronize()  # there is a context
            call("cuModuleLoadData", ctypes.byref(self._module), cubin)
            call("cuModuleGetFunction", ctypes.byref(self._function), self._module, b"step")
            self.buffer_bytes, self._shared_bytes = self._constant(b"buffer_bytes"), self._constant(b"shared_bytes")
            call("cuFuncSetAttribute", self._function, _FUNC_MAX_DYNAMIC_SHARED, self._shared_bytes)

    def _constant(self, name: bytes) -> int:
        at, size, value = _P(), ctypes.c_size_t(), ctypes.c_uint32()
        call("cuModuleGetGlobal_v2", ctypes.byref(at), ctypes.byref(size), self._module, name)
        call("cuMemcpyDtoH_v2", ctypes.byref(value), at, size)
        return value.value

    def launch(self, blocks: int, params: Params) -> None:
        """Cooperative: all blocks run at the same time, or the launch fails."""
        stream, arguments = _P(torch.cuda.current_stream().cuda_stream), (_P * 1)(ctypes.addressof(params))
        grid, block = (blocks, 1, 1), (32 * (_TUNING["WARPS"] + 1), 1, 1)
        call("cuLaunchCooperativeKernel", self._function, *grid, *block, self._shared_bytes, stream, arguments)
