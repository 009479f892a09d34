"""Addresses of servers on this host (unix:/path) or over TCP (tcp://host:port), and sockets of them."""

from __future__ import annotations

import errno
import os
import re
import socket
import stat
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from ssd.errors import ConfigError

_BACKLOG: Final = 64


@dataclass(frozen=True)
class Address:
    path: str = ""  # of a Unix socket; "": TCP
    host: str = ""
    port: int = 0

    @classmethod
    def of(cls, text: str) -> Address:
        """One address; ConfigError if it is none."""
        if text.startswith("unix:") and text != "unix:":
            return cls(path=os.path.abspath(os.path.expanduser(text.removeprefix("unix:"))))
        found = re.fullmatch(r"tcp://(\[[^\]]+\]|[^:/]+):(\d{1,5})", text)
        if found is None or int(found[2]) > 65535:
            raise ConfigError(f"address {text!r}: must be unix:/path/of/a/socket or tcp://host:port")
        return cls(host=found[1].strip("[]"), port=int(found[2]))

    @classmethod
    def bound(cls, listening: socket.socket) -> Address:
        """That of a socket."""
        name = listening.getsockname()
        return cls(path=name) if listening.family == socket.AF_UNIX else cls(host=name[0], port=name[1])

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"unix:{self.path}" if self.path else f"tcp://{host}:{self.port}"

    def connect(self, timeout: float) -> socket.socket:
        """A connection; OSError if there is none within `timeout` seconds."""
        if not self.path:
            made = socket.create_connection((self.host, self.port), timeout)
            made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            return made
        made = socket.socket(socket.AF_UNIX)
        try:
            made.settimeout(timeout)
            made.connect(self.path)
        except OSError:
            made.close()
            raise
        return made

    def listen(self) -> socket.socket:
        """A socket that accepts connections; on this host those of the same user only."""
        try:
            return self._listen_at_path() if self.path else self._listen_at_port()
        except OSError as error:
            raise ConfigError(f"cannot listen on {self}: {error.strerror or error}: choose another address") from error

    def _listen_at_port(self) -> socket.socket:
        family, _, _, _, place = socket.getaddrinfo(self.host, self.port, type=socket.SOCK_STREAM)[0]
        return socket.create_server(place[:2], family=family, backlog=_BACKLOG)

    def _listen_at_path(self) -> socket.socket:
        self._remove_dead()
        made = socket.socket(socket.AF_UNIX)
        before = os.umask(0o177)
        try:
            made.bind(self.path)
        except OSError:
            made.close()
            raise
        finally:
            os.umask(before)
        made.listen(_BACKLOG)
        return made

    def _remove_dead(self) -> None:
        """Removes the socket of a server that was killed; one on which a server listens is in use."""
        path = Path(self.path)
        with suppress(FileNotFoundError):  # also of a server that ends meanwhile
            if not stat.S_ISSOCK(path.stat().st_mode):
                return
            try:
                self.connect(1.0).close()
            except ConnectionRefusedError:
                path.unlink()
                return
            raise OSError(errno.EADDRINUSE, "a server listens there")
