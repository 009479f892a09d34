"""How one GPU is shared between target and draft: the fastest way that was measured is kept. Without a GPU."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from ssd.assembly import sharing
from ssd.drafting.fan_out import Adaptive
from ssd.drafting.shapes import RunShapes
from ssd.kernels.cuda.driver import DriverError, call
from ssd.kernels.cuda.partition import Part, Partition

PROCESSORS = 132


@dataclass
class Gpu:
    """Stands for target and draft: what a round takes with each size of the draft's part (0: without parts)."""

    milliseconds: dict[int, float]
    widths: tuple[int, ...] = (16,)
    followers: object | None = None
    device = torch.device("cuda")
    part: Part | None = None
    captured: list[tuple[Any, int]] = field(default_factory=list)

    @property
    def shapes(self) -> RunShapes:
        return RunShapes(6, 8, 128, self.widths, bucketed=True)

    def capture_in_part(self, stream: Any, most_rows: int) -> None:
        self.captured.append((stream, most_rows))

    def split(self, _: torch.device, size: int) -> Partition:
        if size not in self.milliseconds:
            raise DriverError("cuDevSmResourceSplitByCount: not supported")
        return Partition(Part(size, f"{size}"), Part(PROCESSORS - size, f"{PROCESSORS - size}"))  # type: ignore[arg-type]

    def round_seconds(self, *_: object) -> float:
        return self.milliseconds[0 if self.part is None else self.part.processors] / 1e3


def share(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sharing, "split", gpu.split)
    monkeypatch.setattr(sharing, "_round_seconds", gpu.round_seconds)
    sharing.share_gpu(gpu, gpu, Adaptive())  # type: ignore[arg-type]


def test_the_fastest_split_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """And the target's graphs are in the other part, for one sequence."""
    gpu = Gpu({0: 20.0, 32: 20.5, 40: 19.4, 48: 19.7}, widths=(4, 16))
    share(gpu, monkeypatch)
    assert gpu.part is not None
    assert gpu.part.processors == 40
    assert gpu.captured[-1] == ("92", 7)


def test_a_target_that_is_faster_on_the_whole_gpu_keeps_it(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = Gpu({0: 7.0, 32: 9.0, 40: 8.0, 48: 7.5})
    share(gpu, monkeypatch)
    assert gpu.part is None


@pytest.mark.parametrize(("milliseconds", "kept"), [({0: 20.0}, None), ({0: 20.0, 32: 19.0}, 32)])
def test_a_driver_that_cannot_split(
    milliseconds: dict[int, float], kept: int | None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Catches a part of the last size that was tried, where a later one fails."""
    gpu = Gpu(milliseconds)
    with caplog.at_level("INFO", logger="ssd"):
        share(gpu, monkeypatch)
    assert (gpu.part.processors if gpu.part else None) == kept
    assert "not supported" in caplog.text


@pytest.mark.parametrize("other", [{"widths": (32,)}, {"followers": object()}])
def test_many_branches_and_split_models_have_no_parts(other: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = Gpu({0: 20.0, 32: 1.0, 40: 1.0, 48: 1.0}, **other)
    share(gpu, monkeypatch)
    assert gpu.part is None
    assert not gpu.captured


def test_a_function_that_the_driver_lacks_is_named() -> None:
    """Also where there is no driver."""
    with pytest.raises(DriverError, match="cuNoSuchFunction"):
        call("cuNoSuchFunction")
