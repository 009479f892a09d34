"""`ssd serve` of the bundled models in a process of its own, and what that process holds (read from /proc)."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import httpx

from ssd.server.http import memory

MODEL, DRAFT = "tiny-llama", "tiny-llama-draft"
START_SECONDS = 120.0  # with Ray, on cores that are busy, it may take one minute
GIVE_BACK_SECONDS = memory.SECONDS + 2.0  # until an idle server has given freed memory back
MEMORY = Path("/proc/self/smaps_rollup")
_kept: list[socket.socket] = []
CAN_BE_MEASURED = MEMORY.exists() and "Pss_Anon" in MEMORY.read_text()  # on Linux


@dataclass(frozen=True)
class Held:
    """What a process holds."""

    threads: int
    files: int  # open handles
    rss: float  # MiB
    pss: float  # MiB, of anonymous memory: the share of a library's pages depends on the other processes of the machine

    @classmethod
    def of(cls, pid: int) -> Held:
        proc = Path(f"/proc/{pid}")
        status, memory = (dict(_fields(proc / name)) for name in ("status", "smaps_rollup"))
        files = len(os.listdir(proc / "fd"))
        return cls(int(status["Threads"]), files, _kib(status["VmRSS"]) / 1024, _kib(memory["Pss_Anon"]) / 1024)

    def problems_since(self, before: Held, growth: float, *sizes: str) -> list[str]:
        """What was left behind: threads, file handles, more than `growth` MiB of one of the `sizes`."""
        problems = []
        if self.threads > before.threads or self.files > before.files:
            problems.append(f"threads or file handles are left: {before}, then {self}")
        if max(getattr(self, size) - getattr(before, size) for size in sizes) > growth:
            problems.append(f"memory grows by more than {growth:g} MiB: {before}, then {self}")
        return problems


def _fields(path: Path) -> Iterator[tuple[str, str]]:
    for line in path.read_text().splitlines():
        name, _, value = line.partition(":")
        yield name, value.strip()


def _runs(pid: int) -> bool:
    try:
        return not dict(_fields(Path(f"/proc/{pid}/status")))["State"].startswith("Z")
    except OSError:
        return False


def _kib(value: str) -> int:
    return int(value.removesuffix(" kB"))


@dataclass(frozen=True)
class ServeProcess:
    process: subprocess.Popen[bytes]
    url: str
    log_path: Path

    @property
    def log(self) -> str:
        """Its standard error."""
        return self.log_path.read_text(errors="replace")

    def held(self) -> Held:
        return Held.of(self.process.pid)

    def drafters(self) -> list[int]:
        """Its child processes that run, without those that compile grammars."""
        found = []
        for task in Path(f"/proc/{self.process.pid}/task").glob("*/children"):
            with suppress(OSError):  # the thread has ended
                found += [int(pid) for pid in task.read_text().split()]
        return [pid for pid in found if _runs(pid) and b"trial.py" not in Path(f"/proc/{pid}/cmdline").read_bytes()]

    def stop(self, seconds: float = 60.0) -> int:
        """The exit code after SIGTERM."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(seconds)


@contextmanager
def serve(*options: str, what: tuple[str, ...] = (MODEL,)) -> Iterator[ServeProcess]:
    """Runs `ssd serve WHAT OPTIONS` on a free port; at the end it is killed, if it still runs."""
    port = free_port()
    command = [sys.executable, "-m", "ssd", "serve", *what, "--device", "cpu", "--port", str(port), *options]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "log"
        with path.open("wb") as log:
            process = subprocess.Popen(command, stderr=log, env={"OMP_NUM_THREADS": "1", **os.environ})
        served = ServeProcess(process, f"http://127.0.0.1:{port}", path)
        try:
            _wait_until_it_answers(served)
            yield served
        finally:
            process.kill()
            process.wait()


def free_port() -> int:
    """A port of which this process keeps a socket: the system gives it to no other that asks for any port. It can be
    bound and listened at, since that socket does not listen."""
    free = socket.socket()
    free.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    free.bind(("127.0.0.1", 0))
    _kept.append(free)
    port: int = free.getsockname()[1]
    return port


def _wait_until_it_answers(served: ServeProcess) -> None:
    end = time.monotonic() + START_SECONDS
    while time.monotonic() < end and served.process.poll() is None:
        with suppress(httpx.TransportError):
            if httpx.get(f"{served.url}/health").status_code == 200:
                return
        time.sleep(0.05)
    raise AssertionError(f"the server does not start:\n{served.log}")


def gauges(text: str) -> dict[str, float]:
    """The unlabelled values of a `/metrics` page, without the prefix."""
    lines = [line.rsplit(" ", 1) for line in text.splitlines() if line.startswith("ssd_")]
    return {name.partition("{")[0].removeprefix("ssd_"): float(value) for name, value in lines}
