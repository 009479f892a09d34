"""Latent attention of few queries as a CUDA kernel for Hopper (`latent_attention.cu`), near the speed of reading KV.

It has the bits of `latent._attention_kernel`, which does what this one does not: other sizes and types, branches,
trees, prompts. Items are the same (`Workspace.items`).

Blocks of a tile wait for each other, so all blocks must come to run before those of any kernel that is launched later.
That is so on streams of one priority. Drafts, whose stream has priority (`Ops.reserve`), have Triton's kernel.
"""

from __future__ import annotations

import ctypes
import functools
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch

from ssd.kernels.cuda.nvrtc import Kernel, kernels, tensor_map
from ssd.kernels.cuda.partition import current_processors
from ssd.kernels.ops import DeviceBatch, HeadShape
from ssd.kernels.triton.attention import LOG2_E, Workspace, columns, tile_rows
from ssd.kernels.triton.compile import compiling

SOURCE: Final = Path(__file__).parent / "csrc" / "latent_attention.cu"
HEAD_DIM: Final = 576
VALUE_DIM: Final = 512
STEP: Final = 64  # positions
THREADS: Final = 512
_ROWS: Final = 32  # of a tile, at most
_CHUNK: Final = 128  # places of the workspace that are folded at a time
_SHARED: Final = 227 << 10  # bytes
BOX: Final = 3  # times 64 columns, of a copy
_P = ctypes.c_void_p


class Params(ctypes.Structure):
    """`Params` of the source."""

    _fields_ = [
        *((name, _P) for name in ("out", "partial", "stats", "count", "items", "tables")),
        ("table_stride", ctypes.c_longlong),
        ("scale", ctypes.c_float),
        *((name, ctypes.c_int) for name in ("num_items", "parts", "block_size", "planned", "lets_next")),
    ]


@dataclass(frozen=True)
class Tile:
    """The query heads of a tile, `group` of all heads cut into `parts`, and its rows: those of some tokens."""

    parts: int
    group: int
    rows: int

    @property
    def padded(self) -> int:
        return -(-self.rows // 8) * 8

    def _before_ring(self) -> int:
        """Bytes of shared memory: barriers and statistics, queries; of two steps weights and largest scores."""
        used = 1024 + self.padded * (9 * 128 + 2 * (128 + 16))
        return -(-used // 1024) * 1024

    @property
    def boxes(self) -> int:
        """Of 64 positions of three times 64 columns, in the ring."""
        return (_SHARED - self._before_ring()) // (BOX * STEP * 128)

    @property
    def shared(self) -> int:
        return self._before_ring() + self.boxes * BOX * STEP * 128

    @property
    def macros(self) -> dict[str, int]:
        return {"ROWS": self.padded, "GROUP": self.group, "BOXES": self.boxes, "CHUNK": _CHUNK}


@functools.cache
def _kernel(device: torch.device, tile: Tile) -> Kernel | None:
    """None where it cannot be built."""
    made = kernels(SOURCE, [tile.macros], "attend", device, tile.shared, "latents are read by a slower kernel")
    return made[0] if made else None


def takes(batch: DeviceBatch, heads: HeadShape, tile: Tile, cache: torch.Tensor) -> bool:
    """Whether the kernel is for these tiles."""
    if not cache.is_cuda or torch.cuda.get_device_capability(cache.device) != (9, 0):
        return False
    sizes = heads.head_dim, heads.latent_dim, cache.stride(1), cache.shape[1] % STEP
    fits = sizes == (HEAD_DIM, VALUE_DIM, HEAD_DIM, 0) and cache.dtype is torch.bfloat16
    fits = fits and tile.rows <= _ROWS and (tile.parts == 1 or tile.rows == tile.group)  # rows follow each other
    plain = batch.branches is None and batch.tree is None and not heads.window and not heads.first_position
    return fits and plain and _kernel(cache.device, tile) is not None


def tile_of(batch: DeviceBatch, heads: HeadShape, cache: torch.Tensor, workspace: Workspace) -> Tile | None:
    """A tile of the batch; None: it is for Triton's kernel."""
    parts, group = columns(heads)
    tile = Tile(parts, group, tile_rows(heads, False) // group * group)
    return tile if not workspace.ahead and takes(batch, heads, tile, cache) else None


def attend(
    q: torch.Tensor,
    out: torch.Tensor,
    batch: DeviceBatch,
    heads: HeadShape,
    cache: torch.Tensor,
    workspace: Workspace,
    tile: Tile,
    *,
    lets_next: bool,
) -> None:
    """Writes `out` for the decode-size tiles of a batch. At most one block a multiprocessor: those of a tile wait for
    each other."""
    (items, _, planned), kernel = workspace.items(batch, heads), _kernel(q.device, tile)
    if compiling() or kernel is None:
        return
    block_size = cache.shape[1]
    pointers = out, workspace.partial, workspace.stats, workspace.count, items, batch.block_tables
    params = Params(
        *(tensor.data_ptr() for tensor in pointers),
        *(batch.block_tables.stride(0), heads.scale * LOG2_E, len(items), tile.parts, block_size, planned, lets_next),
    )
    rows, stride = q.shape[0] * heads.num_heads, 2 * HEAD_DIM
    maps = [
        tensor_map(q.data_ptr(), rows, HEAD_DIM, stride, (HEAD_DIM // 64, tile.padded)),
        tensor_map(cache.data_ptr(), cache.shape[0] * block_size, HEAD_DIM, stride, (BOX, STEP)),
    ]
    blocks = min(current_processors(q.device), len(items) * tile.parts)
    kernel.launch(blocks, THREADS, tile.shared, "early", *maps, params)
