"""Latent attention of few queries as a CUDA kernel for Hopper (`latent_attention.cu`), near the speed of reading KV.

It has the bits of `latent._attention_kernel`, which does what this one does not: other sizes and types, branches,
trees, prompts. Items are groups of pieces for clusters of blocks (`Workspace.items`).
"""

from __future__ import annotations

import ctypes
import functools
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch

from ssd.kernels.cuda.launch import processors
from ssd.kernels.cuda.nvrtc import Kernel, kernels, tensor_map
from ssd.kernels.cuda.partition import current_processors
from ssd.kernels.ops import DeviceBatch, HeadShape
from ssd.kernels.triton.attention import LATENT_GROUP, LOG2_E, WORKSPACE_PIECES, Items, Workspace, columns, tile_rows
from ssd.kernels.triton.compile import compiling

SOURCE: Final = Path(__file__).parent / "csrc" / "latent_attention.cu"
HEAD_DIM: Final = 576
VALUE_DIM: Final = 512
STEP: Final = 64  # positions
THREADS: Final = 32 * 12
CLUSTERS: Final = (8, 4, 2, 1)  # blocks of a cluster
_ROWS: Final = 32  # of a tile, at most
_TILES: Final = 24  # of the ring, at most
_SHARED: Final = 227 << 10  # bytes
_P = ctypes.c_void_p


class Params(ctypes.Structure):
    """`Params` of the source."""

    _fields_ = [
        *((name, _P) for name in ("out", "partial", "stats", "count", "items", "tables")),
        ("table_stride", ctypes.c_longlong),
        ("scale", ctypes.c_float),
        *((name, ctypes.c_int) for name in ("num_items", "parts", "block_size", "scratch", "planned", "lets_next")),
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
        """Bytes of shared memory: barriers, queries, weights of two steps, largest scores, factors, sums."""
        used = 1024 + self.padded * ((9 + 2) * 128 + 8 * 4 + 9 * 8 + 4) + 4
        return -(-used // 1024) * 1024

    @property
    def tiles(self) -> int:
        """Of 64 positions of 64 columns, in the ring."""
        return min(_TILES, (_SHARED - self._before_ring()) // (STEP * 128))

    @property
    def shared(self) -> int:
        return self._before_ring() + self.tiles * STEP * 128

    def macros(self, cluster: int) -> dict[str, int]:
        return {"CLUSTER": cluster, "ROWS": self.padded, "GROUP": self.group, "TILES": self.tiles}


@functools.cache
def _kernels(device: torch.device, tile: Tile) -> dict[int, Kernel] | None:
    """By blocks of a cluster. None where they cannot be built."""
    macros = [tile.macros(cluster) for cluster in CLUSTERS]
    made = kernels(SOURCE, macros, "attend", device, tile.shared, "latents are read by a slower kernel")
    return dict(zip(CLUSTERS, made, strict=True)) if made else None


def takes(batch: DeviceBatch, heads: HeadShape, tile: Tile, cache: torch.Tensor) -> bool:
    """Whether the kernel is for these tiles."""
    if not cache.is_cuda or torch.cuda.get_device_capability(cache.device) != (9, 0):
        return False
    sizes = heads.head_dim, heads.latent_dim, cache.stride(1), cache.shape[1] % STEP
    fits = sizes == (HEAD_DIM, VALUE_DIM, HEAD_DIM, 0) and cache.dtype is torch.bfloat16
    fits = fits and tile.rows <= _ROWS and (tile.parts == 1 or tile.rows == tile.group)  # rows follow each other
    plain = batch.branches is None and batch.tree is None and not heads.window and not heads.first_position
    return fits and plain and _kernels(cache.device, tile) is not None


def cluster_size(tiles: int, parts: int, device: torch.device) -> int:
    """Blocks that compute a tile together: as many as there are for each."""
    return next((size for size in CLUSTERS if tiles * parts * size <= processors(device)), CLUSTERS[-1])


@dataclass(frozen=True)
class Clusters:
    """How the kernel computes the tiles of a batch: by `size` blocks together, with `capacity` places of the workspace
    for each part of the heads."""

    tile: Tile
    size: int
    capacity: int

    @classmethod
    def of(cls, batch: DeviceBatch, heads: HeadShape, cache: torch.Tensor, workspace: Workspace) -> Clusters | None:
        """None: the batch has no such tiles, or they are for Triton's kernel."""
        parts, group = columns(heads)
        tile = Tile(parts, group, tile_rows(heads, False) // group * group)
        if not batch.tiles.shape[1] or not takes(batch, heads, tile, cache):
            return None
        size = cluster_size(batch.tiles.shape[1], parts, cache.device)
        numbers = min(workspace.partial.numel() // VALUE_DIM, workspace.stats.numel() // (2 * size))
        scratch = processors(cache.device) // size * (LATENT_GROUP if size > 1 else 1)
        return cls(tile, size, min(WORKSPACE_PIECES, (numbers // tile.padded - scratch) // parts))

    def plan(self, batch: DeviceBatch, heads: HeadShape, workspace: Workspace, *, before_pass: bool = False) -> Items:
        programs = max(1, processors(batch.tiles.device) // self.size // self.tile.parts)
        return workspace.items(batch, heads, programs, before_pass=before_pass, whole=True, capacity=self.capacity)

    def attend(
        self,
        q: torch.Tensor,
        out: torch.Tensor,
        batch: DeviceBatch,
        heads: HeadShape,
        cache: torch.Tensor,
        workspace: Workspace,
        *,
        lets_next: bool,
    ) -> None:
        """Writes `out` for the decode-size tiles of a batch."""
        (items, _, planned), found = self.plan(batch, heads, workspace), _kernels(q.device, self.tile)
        if compiling() or found is None:
            return
        parts, block_size = self.tile.parts, cache.shape[1]
        pointers = out, workspace.partial, workspace.stats, workspace.count, items, batch.block_tables
        params = Params(
            *(tensor.data_ptr() for tensor in pointers),
            *(batch.block_tables.stride(0), heads.scale * LOG2_E, len(items), parts, block_size),
            *(self.capacity * parts, planned, lets_next),
        )
        rows, stride = q.shape[0] * heads.num_heads, 2 * HEAD_DIM
        maps = [
            tensor_map(q.data_ptr(), rows, HEAD_DIM, stride, (HEAD_DIM // 64, self.tile.padded)),
            tensor_map(cache.data_ptr(), cache.shape[0] * block_size, HEAD_DIM, stride, (1, STEP)),
        ]
        clusters = max(1, min(current_processors(q.device) // self.size, len(items) * parts))
        found[self.size].launch(clusters * self.size, THREADS, self.tile.shared, "early", *maps, params)
