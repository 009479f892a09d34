"""How many threads the CPU kernels use: no more than there are cores that other processes leave free.

The threads of a kernel share its work piece by piece. If one of them has to share its core with another process, the
others wait for its last piece: two threads are then slower than one.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import torch

from ssd.kernels.cpu.threads import use_threads

TOLERATED: Final = 0.25  # cores that others may use before one thread less is faster
_INTERVAL: Final = 0.2  # seconds between two measurements: Linux counts in steps of 10 ms
_PAUSE: Final = 0.05  # seconds without work after which the measurement starts anew
_TICKS: Final = os.sysconf("SC_CLK_TCK")  # of Linux's counters, per second


def own_cores() -> frozenset[int]:
    """Numbers of the CPU cores that this process may use."""
    return frozenset(os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1))


def num_cores() -> int:
    """CPU cores that this process may keep busy: no more than the quota of its container."""
    return max(1, math.floor(min(len(own_cores()), *quotas(), math.inf)))


def quotas(groups: Path = Path("/proc/self/cgroup"), mount: Path = Path("/sys/fs/cgroup")) -> list[float]:
    """CPU time per time that each of this process's control groups (v1 and v2) may use: limits in cores."""
    found = []
    lines = groups.read_text(encoding="utf-8").splitlines() if groups.is_file() else []
    for _, controllers, path in (line.split(":", 2) for line in lines):
        if controllers and "cpu" not in controllers.split(","):
            continue
        root, names = (
            (mount / "cpu", ("cpu.cfs_quota_us", "cpu.cfs_period_us")) if controllers else (mount, ("cpu.max",))
        )
        own = root / path.lstrip("/")
        for folder in (each for each in (own, *own.parents) if each.is_relative_to(root)):
            with suppress(OSError, ValueError):  # ValueError: "max" or -1, no limit
                quota, period = " ".join((folder / name).read_text(encoding="ascii") for name in names).split()
                found += [int(quota) / int(period)] if int(quota) > 0 else []
    return found


def free_seconds(cores: frozenset[int], counters: Path = Path("/proc/stat")) -> float | None:
    """Time that no process of normal priority has used, summed over `cores`; None if it is not counted.

    That is idle, iowait, nice (processes of a lower priority give way) and steal (another virtual machine had the core,
    which slows down one thread as much as several).
    """
    idle = free = 0
    try:
        with counters.open(encoding="ascii") as file:
            file.readline()  # the sums of all cores
            for line in file:
                name, *columns = line.split()
                if not name.startswith("cpu"):
                    break
                if int(name[3:]) in cores:
                    idle += int(columns[3])
                    free += sum(int(columns[i]) for i in (1, 3, 4, 7))
    except (OSError, ValueError, IndexError):
        return None
    return free / _TICKS if idle else None  # some sandboxes have zeros


@dataclass(frozen=True)
class CpuTimes:
    """What the clocks of this process and of its cores show, in seconds."""

    wall: float
    own: float  # CPU time of this process, all threads
    free: float | None  # see `free_seconds`

    @classmethod
    def now(cls, cores: frozenset[int]) -> CpuTimes:
        return cls(time.perf_counter(), time.process_time(), free_seconds(cores))

    def others_since(self, earlier: CpuTimes, num_cores: int) -> float:
        """Cores that other processes have used, on average; 0 if it is not known."""
        seconds = self.wall - earlier.wall
        if self.free is None or earlier.free is None or seconds <= 0:
            return 0.0
        return max(0.0, num_cores - (self.free - earlier.free + self.own - earlier.own) / seconds)


@dataclass
class ThreadController:
    """Chooses the number of threads for the work of one thread. The first measurement begins with its construction."""

    cores: frozenset[int] = field(default_factory=own_cores)
    read: Callable[[frozenset[int]], CpuTimes] = CpuTimes.now
    clock: Callable[[], float] = time.perf_counter
    most: int = field(default_factory=num_cores)  # threads
    _others: float = 0.0  # cores in use by other processes
    _taken: int = 0  # cores that processes of ours had during the last work
    _since: CpuTimes = field(init=False)  # when the current measurement began
    _left: float | None = None  # end of the last work; None: there was none

    def __post_init__(self) -> None:
        self._since = self.read(self.cores)

    @contextmanager
    def adapted(self, taken: int = 0) -> Iterator[None]:
        """Kernels inside have as many threads as cores are free, `torch.get_num_threads()` at most.

        `taken`: cores that processes of ours compute on, which count as used whether they do or not.
        """
        limit = torch.get_num_threads()
        count = self.count(limit, taken) if limit > 1 else 1
        try:
            with use_threads(count):
                yield
        finally:
            self._left = self.clock()

    def count(self, limit: int, taken: int = 0) -> int:
        """Number of threads for work that begins now, `limit` at most."""
        if taken != self._taken:  # what was measured since then is of both
            self._others = max(0.0, self._others - max(0, self._taken - taken))
            self._taken, self._since = taken, self.read(self.cores)
        self._measure(self.clock())
        free = math.floor(len(self.cores) - self._others + TOLERATED)
        return max(1, min(limit, self.most - taken, free))

    def _measure(self, now: float) -> None:
        paused = self._left is not None and now - self._left > _PAUSE
        if self._left is not None and not paused and now - self._since.wall < _INTERVAL:
            return
        times = self.read(self.cores)
        if not paused:
            self._others = times.others_since(self._since, len(self.cores))
        self._since = times
