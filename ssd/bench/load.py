"""The load of the machine by others while something is measured, and the warning that it deserves."""

from __future__ import annotations

import os
import time
from pathlib import Path

from ssd.execution.threads import TOLERATED, CpuTimes, free_seconds, own_cores

_TICKS = os.sysconf("SC_CLK_TCK")


class LoadMeter:
    """Measures how many cores are in use by processes other than this one and those that it has started."""

    def __init__(self) -> None:
        self._cores = own_cores()
        self._since = self._now()

    def others(self) -> float:
        """Cores in use by others, on average since construction; 0 if it is not known."""
        return self._now().others_since(self._since, len(self._cores))

    def warning(self, needed: int) -> str | None:
        """What to tell about a measurement that needs so many cores; None: it had them."""
        return load_warning(self.others(), needed)

    def _now(self) -> CpuTimes:
        return CpuTimes(time.perf_counter(), own_seconds(), free_seconds(self._cores))


def load_warning(others: float, needed: int) -> str | None:
    """`others`: cores in use by other processes; `needed`: by what was measured. None: there were enough."""
    cores = len(own_cores())
    if others <= cores - min(needed, cores) + TOLERATED:
        return None
    return (
        f"the machine was busy: other processes used {others:.1f} of its {cores} cores. Speeds are too low, and ratios "
        "say little, since methods with more threads lose more: measure again when it is idle"
    )


def own_seconds() -> float:
    """CPU time of this process, of children that have ended, and of all its descendants."""
    own = os.times()
    seconds = own.user + own.system + own.children_user + own.children_system
    parents: dict[int, int] = {}
    used: dict[int, float] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()  # from the third on: state, parent, …
        except OSError:
            continue  # it has ended
        pid = int(stat.parent.name)
        parents[pid], used[pid] = int(fields[1]), sum(map(int, fields[11:15])) / _TICKS  # with its ended children
    family = {os.getpid()}
    while found := {pid for pid, parent in parents.items() if parent in family} - family:
        family |= found
    return seconds + sum(used[pid] for pid in family - {os.getpid()})
