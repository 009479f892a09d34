"""A pytest plugin for tests of one GPU in several processes: `pytest -p lanes -n 14 tests/gpu` (`make test-gpu`).

Each process has OWN bytes of the GPU's memory and sees no more of it. A test that needs more (`gpu_memory`) waits until
so much is left. There is a line for each file once its tests are done, in place of a character for each test; failures
come last.
"""

from __future__ import annotations

import fcntl
import gc
import os
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

GIB = 1 << 30
OWN = 5 * GIB  # memory of a process
CONTEXT = GIB // 2  # what a process has on the GPU beside its tensors
SHARED = 0.95  # of the GPU's memory
PATIENCE = 200.0  # seconds that a test waits for memory: a process that crashed gives none back
LEDGER = "SSD_TEST_GPU_LEDGER"  # names the file with the bytes that are taken
WORST = ("failed", "skipped", "passed")  # what a test is counted as: the first that occurred


def pytest_configure(config: pytest.Config) -> None:
    worker = getattr(config, "workerinput", None)
    if worker is not None:
        config.pluginmanager.register(Memory(worker["workercount"]))
        return
    handle, os.environ[LEDGER] = tempfile.mkstemp()
    os.close(handle)
    config.pluginmanager.register(Lines(config))


def pytest_unconfigure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):
        Path(os.environ.pop(LEDGER)).unlink()


class Memory:
    """A process's part of the GPU's memory."""

    def __init__(self, processes: int) -> None:
        import torch

        self._cuda, self._ledger = torch.cuda, Path(os.environ[LEDGER])
        if not torch.cuda.is_available():
            return
        self._total = torch.cuda.mem_get_info()[1]
        self._left = int(SHARED * self._total) - processes * (OWN + CONTEXT)
        self._use(OWN)
        torch.cuda.mem_get_info = lambda *_: (self._mine - torch.cuda.memory_allocated(), self._mine)

    def _use(self, size: int) -> None:
        self._mine = size
        self._cuda.set_per_process_memory_fraction(size / self._total)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        marker = item.get_closest_marker("gpu_memory")
        if marker is None or not self._cuda.is_available():
            return (yield)
        more = marker.args[0] * GIB - OWN
        self._take(more)
        self._use(OWN + more)
        try:
            return (yield)
        finally:
            gc.collect()
            self._cuda.empty_cache()
            self._use(OWN)
            self._change(-more)

    def _take(self, size: int) -> None:
        end = time.monotonic() + PATIENCE
        while not self._change(size) and time.monotonic() < end:
            time.sleep(0.1)

    def _change(self, size: int) -> bool:
        """Enters that so many bytes are taken (or given back), unless that is more than there are."""
        with self._ledger.open("r+") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            taken = int(file.read() or 0)
            if taken and taken + size > self._left:
                return False
            file.seek(0)
            file.truncate()
            file.write(str(taken + size))
        return True


class Lines:
    """Prints a line for each file."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._left: Counter[str] = Counter()  # tests, by file
        self._outcomes: defaultdict[str, set[str]] = defaultdict(set)  # by test
        self._counts: defaultdict[str, Counter[str]] = defaultdict(Counter)  # by file
        self._seconds: Counter[str] = Counter()

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, node: Any, ids: list[str]) -> None:
        self._left = Counter(name.partition("::")[0] for name in ids)  # the same for all processes

    @pytest.hookimpl(tryfirst=True)
    def pytest_report_teststatus(self, report: pytest.TestReport) -> tuple[str, str, str] | None:
        """No character for a test that passes or is skipped."""
        counted = report.outcome if report.when == "call" or not report.passed else ""
        return None if report.failed else (counted, "", "")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        file = report.nodeid.partition("::")[0]
        self._outcomes[report.nodeid].add(report.outcome)
        self._seconds[file] += report.duration
        if report.when != "teardown":
            return
        outcomes = self._outcomes.pop(report.nodeid)
        self._counts[file][next(each for each in WORST if each in outcomes)] += 1
        self._left[file] -= 1
        if not self._left[file]:
            counts = ", ".join(f"{count} {outcome}" for outcome, count in sorted(self._counts[file].items()))
            terminal: Any = self._config.pluginmanager.getplugin("terminalreporter")
            terminal.write_line(f"{file:50} {counts:30} {self._seconds[file]:6.0f} s")
