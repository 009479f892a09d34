"""Compiles grammars on threads of its own, within limits of time and memory. Knows nothing of requests or masks.

Two lanes, each a thread: a grammar that takes longer than the first lane allows goes to the second, so that ordinary
grammars do not wait for expensive ones.
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from queue import SimpleQueue
from typing import Any, Final

from ssd.constraints.trial import MAX_BYTES
from ssd.errors import EngineClosed, RequestError

QUICK_SECONDS: Final = 0.1  # CPU time of the first lane
MAX_SECONDS: Final = 2.0  # CPU time of the second lane
_MAX_QUICK_CHARACTERS: Final = 16 * 1024  # longer definitions begin in the second lane
_CLOSED: Final = "the engine was closed while a grammar was compiled"


class Trial:
    """Tells whether a grammar is compiled within a CPU time, and within the memory that `ssd.constraints.trial` allows.

    A process compiles it first, which its system ends at the limit; then another one is started. For one thread.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._process: subprocess.Popen[str] | None = None

    def passes(self, definition: str) -> bool:
        if self._process is None:
            command = [sys.executable, "-P", str(Path(__file__).with_name("trial.py"))]
            pipe = subprocess.PIPE
            self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, text=True)
        asked, answer = self._process.stdin, self._process.stdout
        if asked is None or answer is None:
            raise AssertionError("the process has no pipes")
        with suppress(OSError):
            asked.write(json.dumps([self._seconds, definition]) + "\n")
            asked.flush()
        passed = answer.readline() == "\n"
        if not passed:
            self.close()
        return passed

    def close(self) -> None:
        """Ends the process."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            with suppress(OSError), process:  # closes the pipes and waits
                pass


@dataclass
class _Task:
    """A grammar to compile, under the name of its parameter."""

    name: str
    define: Callable[[], str]
    compile: Callable[[str], Any]
    result: Future[Any] = field(default_factory=Future)


class CompilePool:
    """Compiles grammars; safe on any thread. Threads and processes are started when they are needed."""

    def __init__(self) -> None:
        self._lanes: tuple[SimpleQueue[_Task | None], ...] = SimpleQueue(), SimpleQueue()
        self._lock = threading.Lock()
        self._started = self._closed = False

    def submit(self, name: str, size: int, define: Callable[[], str], compile: Callable[[str], Any]) -> Future[Any]:
        """The result of `compile(define())`, both called on a thread of the pool; RequestError at a limit.

        `name`: of the parameter; `size`: its characters.
        """
        task = _Task(name, define, compile)
        task.result.set_running_or_notify_cancel()  # one of several waiters cannot cancel it
        with self._lock:
            for lane, seconds in enumerate((QUICK_SECONDS, MAX_SECONDS) if not self._started else ()):
                threading.Thread(target=self._run, args=(lane, seconds), name="ssd-grammars", daemon=True).start()
            self._started = True
            self._put(size > _MAX_QUICK_CHARACTERS, task)
        return task.result

    def _put(self, lane: int, task: _Task) -> None:
        """With the lock held."""
        if self._closed:
            raise EngineClosed(_CLOSED)
        self._lanes[lane].put(task)

    def close(self) -> None:
        """Ends threads and processes; grammars that wait are not compiled (EngineClosed)."""
        with self._lock:
            self._closed = True
            for lane in self._lanes:
                lane.put(None)

    def _run(self, lane: int, seconds: float) -> None:
        trial = Trial(seconds)
        while (task := self._lanes[lane].get()) is not None:
            try:
                if self._closed:
                    raise EngineClosed(_CLOSED)
                definition = task.define()
                if trial.passes(definition):
                    task.result.set_result(task.compile(definition))
                elif lane == 0:
                    with self._lock:
                        self._put(1, task)
                else:
                    raise RequestError(
                        f"{task.name}: takes more than {MAX_SECONDS:g} seconds of CPU time or {MAX_BYTES >> 30} GiB of "
                        "memory to compile, which is the limit: simplify it"
                    )
            except BaseException as error:
                task.result.set_exception(error)
        trial.close()
