"""Tile shapes of products fit into the shared memory of every kind of GPU."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")

from ssd.kernels.triton import linear

WEIGHTS = [(n, k) for n in (64, 1024, 6144, 8192, 28672, 128256) for k in (512, 4096, 14336)]


@pytest.mark.parametrize("kibibytes", [99, 163, 227])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_tiles_fit(kibibytes: int, dtype: torch.dtype) -> None:
    limit = kibibytes << 10
    for rows in (*range(1, 140), 256, 300, 512, 513, 4096):
        for columns, depth in WEIGHTS:
            wanted = linear.choose_tile(rows, columns, depth)
            tile = linear.fitting(wanted, dtype.itemsize, limit)
            assert (tile.stages - 1) * 2 * tile.depth * (tile.rows + tile.columns) <= limit
            assert dtype is torch.bfloat16 or 4 * tile.rows * tile.columns <= limit
            assert tile.stages >= 2
            if dtype is torch.float32:  # whose bits depend on these
                assert (tile.depth, tile.columns >= 64, tile.warps >= 4) == (64, True, True)
            else:
                assert kibibytes < 227 or tile == wanted
