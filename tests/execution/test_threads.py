"""The number of threads follows the load of the machine, on a simulated clock."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch

from ssd.execution.threads import CpuTimes, ThreadController, free_seconds, quotas
from ssd.kernels.cpu.threads import num_threads, openmp_paths

STAT = """cpu  300 30 60 3000 12 0 3 9 0 0
cpu0 100 10 20 1000 4 0 1 3 0 0
cpu1 100 10 20 1000 4 0 1 3 0 0
cpu2 100 10 20 1000 4 0 1 3 0 0
intr 12345
"""


@dataclass
class Machine:
    """Cores on which this process and others run; time passes in `work` and `idle` only."""

    num_cores: int
    others: float = 0.0  # cores that other processes use
    known: bool = True
    now: float = 0.0
    own: float = 0.0
    free: float = 100.0
    controller: ThreadController = field(init=False)

    def __post_init__(self) -> None:
        cores = frozenset(range(self.num_cores))
        self.controller = ThreadController(cores, self.read, lambda: self.now, self.num_cores)

    def read(self, cores: frozenset[int]) -> CpuTimes:
        assert len(cores) == self.num_cores
        return CpuTimes(self.now, self.own, self.free if self.known else None)

    def idle(self, seconds: float) -> None:
        self.now += seconds
        self.free += seconds * max(0.0, self.num_cores - self.others)

    def work(self, seconds: float, limit: int = 64, each: float = 0.005) -> list[int]:
        """Steps of `each` seconds whose threads all compute; returns the number of threads of every step."""
        counts = []
        for _ in range(round(seconds / each)):
            count = self.controller.count(limit)
            self.now += each
            shared = max(0.0, count + self.others - self.num_cores)  # cores that both want: each gets a half
            used = max(0.0, count - shared / 2)
            self.own += each * used
            self.free += each * max(0.0, self.num_cores - used - self.others + shared / 2)
            self.controller._left = self.now
            counts.append(count)
        return counts


def test_all_threads_on_a_quiet_machine() -> None:
    """Catches probes, and a load that the process's own threads are taken for."""
    machine = Machine(2, others=0.1)
    machine.idle(0.3)
    assert set(machine.work(20, limit=2)) == {2}


def test_load_that_is_there_from_the_start_costs_nothing() -> None:
    machine = Machine(2, others=1.0)
    machine.idle(0.3)  # the model is loaded
    assert set(machine.work(5, limit=2)) == {1}


def test_threads_follow_a_load_that_comes_and_goes() -> None:
    machine = Machine(16)
    machine.idle(0.3)
    assert machine.work(1)[-1] == 16
    machine.others = 3.0
    counts = machine.work(1)
    assert counts[0] == 16
    assert set(counts[120:]) == {13}  # others get half a core less for every core that is shared
    machine.others = 0.0
    assert set(machine.work(1)[80:]) == {16}
    machine.others = 16.0
    assert machine.work(2)[-1] == 1


def test_the_limit_holds() -> None:
    """A target beside a draft process has fewer threads than there are cores, whether the draft computes or not."""
    machine = Machine(16, others=1.0)
    machine.idle(0.3)
    assert set(machine.work(1, limit=15)) == {15}
    machine.others = 0.2
    assert set(machine.work(1, limit=15)) == {15}
    machine.others = 2.0
    assert machine.work(1, limit=15)[-1] == 14


def test_cores_of_our_own_processes_are_left_to_them_and_taken_back() -> None:
    """Catches a process of ours that counts as load of others: its cores are free as soon as it rests."""
    machine = Machine(16)
    machine.idle(0.3)
    assert set(machine.work(1)) == {16}
    machine.others = 4.0
    assert {machine.controller.count(16, taken=4)} == {12}
    for _ in range(200):
        machine.controller.count(16, taken=4)
        machine.now += 0.005
        machine.own += 0.005 * 12
        machine.controller._left = machine.now
    assert machine.controller.count(16, taken=4) == 12
    machine.others = 0.0
    assert set(machine.work(1)) == {16}  # at once
    assert machine.controller.count(8, taken=4) == 8


def test_a_pause_is_not_measured() -> None:
    """Catches a number of threads that depends on what others did while there was nothing to compute."""
    machine = Machine(2)
    machine.idle(0.3)
    assert machine.work(1, limit=2)[-1] == 2
    machine.others = 1.0
    machine.idle(60)
    machine.others = 0.0
    assert set(machine.work(1, limit=2)) == {2}


def test_steps_longer_than_the_interval_are_measured() -> None:
    machine = Machine(4, others=2.0)
    machine.idle(0.3)
    machine.others = 1.0
    assert machine.work(12, limit=4, each=3.0) == [2, 3, 3, 3]


def test_where_nothing_is_counted_the_limit_is_used() -> None:
    machine = Machine(4, others=3.0, known=False)
    machine.idle(0.3)
    assert set(machine.work(2, limit=4)) == {4}


def test_counters_of_the_own_cores_are_summed(tmp_path: Path) -> None:
    """Catches other cores, user time in place of idle time, and counters that are all zero."""
    file = tmp_path / "stat"
    file.write_text(STAT)
    assert free_seconds(frozenset({0, 2}), file) == pytest.approx(2 * (10 + 1000 + 4 + 3) / 100)
    file.write_text("cpu  0 0 0 0 0 0 0 0 0 0\ncpu0 0 0 0 0 0 0 0 0 0 0\n")
    assert free_seconds(frozenset({0}), file) is None
    assert free_seconds(frozenset({0}), tmp_path / "missing") is None


def test_only_the_work_of_this_thread_is_adapted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a number that stays, or that threads get which use torch for the first time meanwhile."""
    numbers: list[tuple[int, int]] = []
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        machine = Machine(4, others=2.0)
        machine.idle(0.3)
        with machine.controller.adapted():
            numbers.append((num_threads(), torch.get_num_threads()))
            other = threading.Thread(target=lambda: numbers.append((num_threads(), torch.get_num_threads())))
            other.start()
            other.join()
        numbers.append((num_threads(), torch.get_num_threads()))
    finally:
        torch.set_num_threads(before)
    assert numbers == [(2, 1), (3, 3), (3, 3)]


def test_quotas_of_control_groups(tmp_path: Path) -> None:
    """Catches a container with four cores' worth of time on a machine with 64, whose threads are held up."""
    groups = tmp_path / "cgroup"
    groups.write_text("4:cpu,cpuacct:/old\n3:memory:/old\n0::/outer/inner\n")
    for name, text in {
        "outer/cpu.max": "250000 100000\n",
        "outer/inner/cpu.max": "max 100000\n",
        "cpu/old/cpu.cfs_quota_us": "50000\n",
        "cpu/old/cpu.cfs_period_us": "100000\n",
        "cpu/cpu.cfs_quota_us": "-1\n",
        "cpu/cpu.cfs_period_us": "100000\n",
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert quotas(groups, tmp_path) == [0.5, 2.5]
    assert quotas(tmp_path / "none", tmp_path) == []


def test_no_more_threads_than_the_quota() -> None:
    cores, times = frozenset(range(8)), CpuTimes(0.0, 0.0, None)
    assert ThreadController(cores, lambda _: times, lambda: 0.0, most=3).count(8) == 3


def test_torch_s_own_openmp_is_the_first_of_several() -> None:
    """Wheels of other packages have one, too, whose number of threads is not torch's."""
    site = "/venv/site-packages"
    paths = [f"{site}/sentencepiece.libs/libgomp-1.so.1", f"{site}/torch/lib/libgomp.so.1", "/usr/lib/libgomp.so.1"]
    maps = "".join(f"7f00-7f01 r-xp 00000000 08:01 42  {path}\n" for path in (*paths, f"{site}/torch/lib/libtorch.so"))
    assert openmp_paths(maps, f"{site}/torch") == [paths[1], paths[2], paths[0]]
