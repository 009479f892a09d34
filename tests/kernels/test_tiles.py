"""Tile shapes of products fit into the shared memory of every kind of GPU."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")

from ssd.assembly.device import resolve_dtype
from ssd.config import EngineConfig
from ssd.errors import ConfigError
from ssd.grafts.shapes import SHAPES
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
            assert kibibytes < 227 or tile == wanted


def test_float32_is_refused_where_attention_does_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    config, cuda = EngineConfig("any", dtype="float32"), torch.device("cuda")
    monkeypatch.setattr("ssd.assembly.device.shared_memory", lambda device: 99 << 10)
    with pytest.raises(ConfigError, match=r"heads of 128 dimensions.*use bfloat16"):
        resolve_dtype(config, SHAPES["llama-3.1-8b"], cuda)
    assert resolve_dtype(config, SHAPES["llama-3.2-1b"], cuda) is torch.float32
    monkeypatch.setattr("ssd.assembly.device.shared_memory", lambda device: 163 << 10)
    assert resolve_dtype(config, SHAPES["llama-3.1-8b"], cuda) is torch.float32
