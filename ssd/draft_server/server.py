"""A draft server: takes connections of engines until a signal ends it."""

from __future__ import annotations

import logging
import select
import signal
import socket
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Final

from ssd.assembly.draft_server import SharedDraft
from ssd.draft_server.options import DraftServerOptions
from ssd.draft_server.session import Session
from ssd.kernels.cpu.kernels import trim_heap
from ssd.parallel.address import Address
from ssd.parallel.transport import Channel, refusal

log = logging.getLogger("ssd")

_STRANGERS: Final = 32  # connections beside those of `max_engines`: engines that look for the nearest server
_DRAIN_SECONDS: Final = 10.0  # for the rounds under way


class DraftServer:
    """Serves engines on `sockets`, each in a session of its own."""

    def __init__(self, draft: SharedDraft, options: DraftServerOptions, sockets: list[socket.socket]) -> None:
        self.draft, self.options = draft, options
        self.refused = Counter[str]()  # connections, by reason
        self.draining = False
        self._served = Counter[int]()  # rounds of sessions that have ended, by tenant
        self._lock = threading.Lock()
        self._sockets, self._sessions, self._number = sockets, set[Session](), 0
        self.addresses = [Address.bound(each) for each in sockets]
        self._wake, self._woken = socket.socketpair()

    @property
    def sessions(self) -> list[Session]:
        """Of engines that have been welcomed."""
        with self._lock:
            return [each for each in self._sessions if each.tenant is not None]

    @property
    def rounds(self) -> Counter[int]:
        """Of all sessions, by tenant."""
        with self._lock:
            rounds = Counter(self._served)
            for each in self._sessions:
                if each.tenant is not None:
                    rounds[each.tenant] += each.rounds
        return rounds

    def serve(self) -> None:
        """Returns when `drain` was called and the rounds that were under way have ended."""
        try:
            while not self.draining:
                self._accept()
        finally:
            for address in self.addresses:  # first: what listens there once they are closed is another server
                if address.path:
                    Path(address.path).unlink(missing_ok=True)
            for each in self._sockets:
                each.close()
        self._end_sessions()

    def drain(self) -> None:
        """Ends `serve`; for signal handlers and other threads."""
        self.draining = True
        with suppress(OSError):
            self._wake.send(b"\0")

    def _accept(self) -> None:
        ready, _, _ = select.select([*self._sockets, self._woken], [], [])
        for each in ready:
            if each is self._woken:
                continue
            try:
                end, _ = each.accept()
            except OSError as error:  # the connection is gone, or there are no file handles
                log.warning("a connection was not accepted: %s", error)
                time.sleep(0.1)
                continue
            self._begin(end)

    def _begin(self, end: socket.socket) -> None:
        self._number += 1
        with self._lock:
            full = len(self._sessions) >= self.options.max_engines + _STRANGERS
        if full:
            self.refused["no place"] += 1
            with suppress(OSError):
                Channel(end).post(refusal("there are too many connections: try again later"))
            end.close()
            return
        session = Session(self._number, end, self.draft, self.options, self._forget)
        with self._lock:
            self._sessions.add(session)
        session.thread.start()

    def _forget(self, session: Session) -> None:
        trim_heap()
        with self._lock:
            self._sessions.discard(session)
            if session.tenant is not None:
                self._served[session.tenant] += session.rounds
            if session.refusal:
                self.refused[session.refusal] += 1

    def _end_sessions(self) -> None:
        with self._lock:
            sessions = list(self._sessions)
        for each in sessions:
            each.drain()
        deadline = time.monotonic() + _DRAIN_SECONDS
        for each in sessions:
            each.thread.join(max(0.0, deadline - time.monotonic()))
        if left := sum(each.thread.is_alive() for each in sessions):
            log.warning("%d engines have a round that did not end within %g s", left, _DRAIN_SECONDS)


@contextmanager
def ended_by_signals(server: DraftServer) -> Iterator[None]:
    """SIGTERM or SIGINT drains; a second one ends the process at once."""

    def handle(number: int, _: FrameType | None) -> None:
        if server.draining:
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)
        log.info("stopping: rounds under way end, engines go on without drafts")
        server.drain()

    before = {number: signal.signal(number, handle) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
