"""Latent attention of few queries as a CUDA kernel for Hopper (`latent_attention.cu`), near the speed of reading KV.

It has the bits of `latent._attention_kernel`, which does what this one does not: other sizes and types, branches, trees,
prompts. Items are groups of pieces for clusters of blocks (`Workspace.items`).
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
from ssd.kernels.triton.compile import compiling

SOURCE: Final = Path(__file__).parent / "csrc" / "latent_attention.cu"
HEAD_DIM: Final = 576
VALUE_DIM: Final = 512
STEP: Final = 64  # positions
THREADS: Final = 32 * 12
CLUSTERS: Final = (8, 4, 2, 1)  # blocks of a cluster
_FOLDED: Final = 8  # pieces of a group
_TILE: Final = STEP * 128  # bytes of the ring's tiles
_SHARED: Final = 227 << 10  # bytes
_P = ctypes.c_void_p


class Params(ctypes.Structure):
    """`Params` of the source."""

    _fields_ = [
        *((name, _P) for name in ("out", "partial", "stats", "count", "items", "tables")),
        ("table_stride", ctypes.c_longlong),
        ("scale", ctypes.c_float),
        *((name, ctypes.c_int) for name in ("num_items", "parts", "block_size", "scratch", "lets_next")),
    ]


@dataclass(frozen=True)
class Tile:
    """The query heads of a tile, one of `parts` of all heads, and its rows: those of some tokens."""

    parts: int
    group: int
    rows: int

    @property
    def padded(self) -> int:
        return -(-self.rows // 8) * 8

    def macros(self, cluster: int) -> dict[str, int]:
        before = 1024 + self.padded * ((9 + 2) * 128 + 8 * 4 + 9 * 8 + 4) + 4  # bytes before the ring
        tiles = min(24, (_SHARED - -(-before // 1024) * 1024) // _TILE)
        return {"CLUSTER": cluster, "ROWS": self.padded, "GROUP": self.group, "TILES": tiles}


def shared_bytes(macros: dict[str, int]) -> int:
    before = 1024 + macros["ROWS"] * ((9 + 2) * 128 + 8 * 4 + 9 * 8 + 4) + 4
    return -(-before // 1024) * 1024 + macros["TILES"] * _TILE


def takes(heads: HeadShape, tile: Tile, cache: torch.Tensor, *, plain: bool) -> bool:
    """Whether `attend` is for these heads. plain: there are neither branches nor trees."""
    if not cache.is_cuda or torch.cuda.get_device_capability(cache.device) != (9, 0):
        return False
    fits = (heads.head_dim, heads.latent_dim) == (HEAD_DIM, VALUE_DIM) and cache.dtype is torch.bfloat16
    fits = fits and cache.shape[1] % STEP == 0 and cache.stride(1) == HEAD_DIM
    fits = fits and tile.rows <= 32 and (tile.parts == 1 or tile.rows == tile.group)  # rows follow each other
    whole = plain and not heads.window and not heads.first_position
    return fits and whole and _kernels(cache.device, tile) is not None


def cluster_size(tiles: int, parts: int, device: torch.device) -> int:
    """Blocks that compute a tile together: as many as there are for each."""
    return next((size for size in CLUSTERS if tiles * parts * size <= processors(device)), CLUSTERS[-1])


def scratch_places(cluster: int, device: torch.device) -> int:
    """Of results that the blocks of each cluster fold, in the workspace."""
    return processors(device) // cluster * (_FOLDED if cluster > 1 else 1)


@functools.cache
def _kernels(device: torch.device, tile: Tile) -> dict[int, Kernel] | None:
    """By blocks of a cluster. None where they cannot be built."""
    macros = [tile.macros(cluster) for cluster in CLUSTERS]
    made = kernels(SOURCE, macros, "attend", device, _SHARED, "latents are read by a slower kernel")
    return dict(zip(CLUSTERS, made, strict=True)) if made else None


def attend(
    q: torch.Tensor,
    out: torch.Tensor,
    batch: DeviceBatch,
    tile: Tile,
    cluster: int,
    cache: torch.Tensor,
    items: torch.Tensor,
    workspace: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    capacity: int,
    scale: float,
    *,
    lets_next: bool,
) -> None:
    """Writes `out` for the decode-size tiles of a batch. items: see `attention._plan_kernel`; workspace: partial
    results, their statistics, counters; capacity: places of a part that items have; scale: of products, to base 2."""
    found = _kernels(q.device, tile)
    if compiling() or found is None:
        return
    pointers, block_size = (out, *workspace, items, batch.block_tables), cache.shape[1]
    params = Params(
        *(tensor.data_ptr() for tensor in pointers),
        *(batch.block_tables.stride(0), scale, len(items), tile.parts, block_size, capacity * tile.parts, lets_next),
    )
    rows = q.shape[0] * tile.parts * tile.group
    maps = [
        tensor_map(q.data_ptr(), rows, HEAD_DIM, 2 * HEAD_DIM, (HEAD_DIM // 64, tile.padded)),
        tensor_map(cache.data_ptr(), cache.shape[0] * block_size, HEAD_DIM, 2 * HEAD_DIM, (1, STEP)),
    ]
    clusters = max(1, min(current_processors(q.device) // cluster, len(items) * tile.parts))
    macros = tile.macros(cluster)
    found[cluster].launch(clusters * cluster, THREADS, shared_bytes(macros), "early", *maps, params)
