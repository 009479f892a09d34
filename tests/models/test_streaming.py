"""Safetensors read in pieces by several threads, as they are for a GPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from bits import same_bits
from safetensors.torch import save_file

from ssd.models.streaming import StoredTensor, read_tensors, stored_tensors

CPU = torch.device("cpu")


@pytest.fixture
def tensors() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        "wide": torch.randn((100, 33), generator=generator),
        "half": torch.randn((513, 64), generator=generator).half(),
        "small": torch.randn(7, generator=generator).bfloat16(),
        "empty": torch.empty((0, 3)),
        "scalar": torch.tensor(3.0),
        "fp8": torch.randn((9, 40), generator=generator).to(torch.float8_e4m3fn),
        "words": torch.arange(100, dtype=torch.int32),
        "bytes": torch.arange(100, dtype=torch.int8),
    }


def save(tensors: dict[str, torch.Tensor], folder: Path) -> list[StoredTensor]:
    """In two files."""
    names, found = list(tensors), []
    for i, part in enumerate((names[:2], names[2:])):
        file = folder / f"{i}.safetensors"
        save_file({name: tensors[name] for name in part}, file, metadata={"format": "pt"})
        found += stored_tensors(file) or []
    return found


@pytest.mark.parametrize("piece", [64, 1000, 1 << 20])
def test_tensors_are_read_whole(tensors: dict[str, torch.Tensor], tmp_path: Path, piece: int) -> None:
    got = dict(read_tensors(save(tensors, tmp_path), CPU, piece=piece))
    assert set(got) == set(tensors)
    for name, tensor in tensors.items():
        assert same_bits(got[name], tensor), name


def test_a_file_cut_off_meanwhile_is_an_error(tensors: dict[str, torch.Tensor], tmp_path: Path) -> None:
    stored = save(tensors, tmp_path)
    with stored[0].file.open("rb+") as file:
        file.truncate(stored[0].offset + 10)
    with pytest.raises(OSError, match="ends within"):
        list(read_tensors(stored, CPU, piece=1000))


def test_other_dtypes_are_left_to_the_library(tmp_path: Path) -> None:
    save_file({"mask": torch.ones(3, dtype=torch.bool)}, tmp_path / "mask.safetensors")
    assert stored_tensors(tmp_path / "mask.safetensors") is None


def test_reading_can_be_given_up(tensors: dict[str, torch.Tensor], tmp_path: Path) -> None:
    reading = read_tensors(save(tensors, tmp_path), CPU, piece=64)
    next(reading)
    reading.close()  # type: ignore[attr-defined]
