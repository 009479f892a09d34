"""Timestamps in a device's work, taken without waiting for it."""

from __future__ import annotations

import time
from typing import Protocol

import torch


class Clock(Protocol):
    """A point in a device's stream of work."""

    def wait(self) -> None:
        """Waits until the device has reached this point."""

    @property
    def reached(self) -> bool:
        """Whether the device has reached this point."""

    def since(self, earlier: Clock) -> float:
        """Seconds between two points of one device that have been reached."""


class HostClock:
    """The host's clock: on a CPU, work is done when its call returns."""

    reached = True

    def __init__(self) -> None:
        self.seconds = time.perf_counter()

    def wait(self) -> None:
        return

    def since(self, earlier: Clock) -> float:
        return self.seconds - earlier.seconds  # type: ignore[attr-defined,no-any-return]


class StreamClock:
    """A CUDA event in the current stream."""

    def __init__(self) -> None:
        self.event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        self.event.record()

    @property
    def reached(self) -> bool:
        return bool(self.event.query())  # type: ignore[no-untyped-call]

    def wait(self) -> None:
        self.event.synchronize()

    def since(self, earlier: Clock) -> float:
        return float(earlier.event.elapsed_time(self.event)) / 1e3  # type: ignore[attr-defined]


def now(device: torch.device) -> Clock:
    """The current point; on a GPU that of the current stream."""
    return StreamClock() if device.type == "cuda" else HostClock()
