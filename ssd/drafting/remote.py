"""Draft servers in the place of a child process: which one an engine is connected to.

What is said after SETUP is what is said to a child (`ssd.drafting.replica`).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence as Seq
from contextlib import suppress

from ssd.drafting.wire import MOST_HELLO_WORDS, Hello, Kind
from ssd.parallel.address import Address
from ssd.parallel.process import setup_message
from ssd.parallel.transport import REFUSED, Channel, ChannelClosed, Message, WireError, decode_json, reason_of

_TIMEOUT = 2.0  # seconds for a connection, and for the answer to HELLO
_SEARCH_SECONDS = 3.0  # for all answers: a server waits 5 s for SETUP, and to look up a host's name may take longer


class Refused(WireError):
    """The server does not take this engine."""


class Connection:
    """A connection to a draft server, as `Supervisor` takes it."""

    exited = True  # nothing of it is on this machine

    def __init__(self, channel: Channel, pid: int) -> None:
        self.channel, self.pid = channel, pid

    def kill(self) -> None:
        self.channel.close()

    close = kill


_Answer = tuple[Connection, int, float] | WireError | OSError  # what `_greet` returns or raises


class DraftServers:
    """Connects to the nearest of some draft servers: the one that answers HELLO the soonest.

    A thread of its own looks for it, since a host may not answer, and asks all of them at the same time: a server waits
    for SETUP for seconds only. A call begins a search, or returns what has been found; None while it goes on.
    WireError if no server takes the engine.
    """

    def __init__(self, addresses: Seq[Address], hello: Hello) -> None:
        self.refused: list[str] = []  # why no server takes the engine, by those that answered the last search
        self.cores = 0  # of this host, that the server found last computes on
        self._addresses, self._hello = tuple(dict.fromkeys(addresses)), hello
        self._search: threading.Thread | None = None
        self._found: Connection | None = None
        self._failed = ""

    def __call__(self) -> Connection | None:
        if self._search is None:
            self._found = None
            self._search = threading.Thread(target=self._look, name="draft servers", daemon=True)
            self._search.start()
        if self._search.is_alive():
            return None
        self._search = None
        if self._found is None:
            raise WireError(self._failed)
        return self._found

    def wait(self, timeout: float) -> None:
        """Waits for the search that goes on."""
        if self._search is not None:
            self._search.join(timeout)

    def _look(self) -> None:
        nearest, best, refused, failed = None, 0.0, list[str](), list[str]()
        cores = 0
        for address, answer in self._answers():
            if isinstance(answer, Refused):
                refused.append(f"{address}: {answer}")
            elif isinstance(answer, Exception):
                failed.append(f"{address}: {answer}")
            else:
                found, threads, seconds = answer
                if nearest is not None and best <= seconds:
                    found.close()
                    continue
                if nearest is not None:
                    nearest.close()
                nearest, best, cores = found, seconds, threads if address.path else 0
        self.cores, self.refused, self._failed = cores, refused if nearest is None else [], "; ".join(refused + failed)
        if nearest is not None:
            with suppress(OSError, WireError):
                nearest.channel.post(setup_message({}))
        self._found = nearest

    def _answers(self) -> list[tuple[Address, _Answer]]:
        """That of every server, or why there is none; one that comes too late is dropped with its connection."""
        answers: dict[Address, _Answer] = {}
        deadline = time.monotonic() + _SEARCH_SECONDS

        def ask(address: Address) -> None:
            try:
                answers[address] = _greet(address, self._hello)
            except (WireError, OSError) as error:
                answers[address] = error

        threads = [threading.Thread(target=ask, args=(each,), daemon=True) for each in self._addresses]
        for each in threads:
            each.start()
        for each in threads:
            each.join(max(0.0, deadline - time.monotonic()))
        late = WireError(f"no answer within {_SEARCH_SECONDS:g} s")
        return [(each, answers.get(each, late)) for each in self._addresses]


def _greet(address: Address, hello: Hello) -> tuple[Connection, int, float]:
    """A connection to a server that takes the engine, its CPU threads, and how many seconds its answer took."""
    channel = Channel(address.connect(_TIMEOUT))
    try:
        began = time.perf_counter()
        with suppress(ChannelClosed):  # it has refused the connection already: what it sent says why
            channel.post(Message(Kind.HELLO, payload=hello.encode()))
        answer = channel.receive(MOST_HELLO_WORDS, _TIMEOUT)
        seconds = time.perf_counter() - began
        if answer is None:
            raise WireError(f"no answer within {_TIMEOUT:g} s")
        if answer.kind == REFUSED:
            raise Refused(reason_of(answer))
        if answer.kind != Kind.WELCOME:
            raise WireError(f"it sent a message of kind {answer.kind}, not WELCOME: it is no draft server")
        said = decode_json(answer.payload)
        pid, threads = (value if isinstance(value := said.get(name), int) else 0 for name in ("pid", "threads"))
        return Connection(channel, pid), threads, seconds
    except (WireError, OSError):
        channel.close()
        raise
