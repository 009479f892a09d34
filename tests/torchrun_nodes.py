"""Two nodes of torchrun, and all that runs of them (read from /proc)."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from collections.abc import Sequence as Seq
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from serve_process import free_port

ROOT = Path(__file__).parents[1]
_MARK = "SSD_TEST_NODE"  # an environment variable, which all processes of a node inherit


@dataclass(frozen=True)
class Node:
    torchrun: subprocess.Popen[bytes]
    mark: str
    output: Path  # of all its processes

    def processes(self) -> dict[int, str]:
        """Ids and command lines of what runs: torchrun, its process, and what that has started."""
        found = {}
        for folder in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                if f"{_MARK}={self.mark}".encode() in (folder / "environ").read_bytes().split(b"\0"):
                    found[int(folder.name)] = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode()
        return found

    def find(self, text: str) -> int:
        """The process that has a text in its command line, and is not torchrun."""
        [pid] = [pid for pid, line in self.processes().items() if text in line and pid != self.torchrun.pid]
        return pid

    def text(self) -> str:
        return self.output.read_text(errors="replace")

    def wait_for(self, text: str, seconds: float = 60.0) -> None:
        deadline = time.monotonic() + seconds
        while text not in self.text():
            assert self.torchrun.poll() is None, self.text()
            assert time.monotonic() < deadline, self.text()
            time.sleep(0.05)

    def check_gone(self, deadline: float) -> None:
        while left := self.processes():
            assert time.monotonic() < deadline, left
            time.sleep(0.05)


@contextmanager
def two_nodes(
    folder: Path, *command: str, each: int = 1, prefixes: Seq[Seq[str]] = ((), ()), host: str = "127.0.0.1"
) -> Iterator[list[Node]]:
    """Runs a command (a script, or `-m ssd …`) with `each` processes on each of two nodes.

    `prefixes`: a command before torchrun, of each node. `host`: the address of the first.
    """
    flags = ["--nnodes", "2", "--nproc-per-node", str(each), "--master-addr", host, "--master-port", str(free_port())]
    nodes: list[Node] = []
    for rank, prefix in enumerate(prefixes):
        mark, output = uuid.uuid4().hex, folder / f"node{rank}"
        env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), _MARK: mark}
        argv = [*prefix, sys.executable, "-m", "torch.distributed.run", *flags, "--node-rank", str(rank), *command]
        with output.open("wb") as file:
            process = subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=file, stderr=file, env=env)
        nodes.append(Node(process, mark, output))
    try:
        yield nodes
    finally:
        for node in nodes:
            for pid in node.processes():
                with suppress(OSError):
                    os.kill(pid, signal.SIGKILL)
            node.torchrun.wait()
