"""Messages between processes over a socket: framing, timeouts, limits, and checked reading of payloads.

A message is a header (magic with version, kind, round, two times, length of the payload) and a payload of 64-bit
integers; floats are sent as their bits, arrays of smaller types packed. Nothing is pickled, an invalid message raises
WireError, and no buffer is allocated by a length that was not checked. The protocols give kinds and payloads their
meaning: `ssd.drafting.wire`, `ssd.assembly.ranks`, `ssd.assembly.torchrun`.
"""

from __future__ import annotations

import json
import math
import select
import socket
import struct
import time
from collections import deque
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from ssd.errors import SSDError

Words = npt.NDArray[np.int64]

MAGIC = 0x5353_4457_0000_0006  # "SSDW", version 6
HEADER_WORDS = 6
MAX_WORDS = 1 << 26  # longest payload: half a gigabyte
LOWEST, HIGHEST = -(1 << 63), (1 << 63) - 1
SETUP, READY = 1, 2  # kinds in every protocol: the configuration of a process, and its answer; others begin at 3
REFUSED = 0  # likewise, the last message of an end: why it closes the connection
MOST_REASON_WORDS = 512

_BYTES = 8  # per word
_CHUNK = 1 << 20  # bytes of one read
_GRACE = 0.005  # seconds after the timeout in which the rest of a message is still read


class WireError(SSDError):
    """An invalid message."""


class ChannelClosed(WireError):
    """The other end was closed."""


# --- payloads ---------------------------------------------------------------------------------------------------------


def words(values: Iterable[int]) -> Words:
    return np.array(list(values), dtype=np.int64)


def packed(values: npt.NDArray[Any]) -> Words:
    """The bytes of an array, padded to words."""
    return _padded(values.tobytes())


def float_bits(value: float) -> int:
    word: int = struct.unpack("=q", struct.pack("=d", value))[0]
    return word


def encode_json(value: Mapping[str, Any]) -> Words:
    text = json.dumps(value).encode()
    return np.concatenate((words([len(text)]), _padded(text)))


def decode_json(payload: Words) -> dict[str, Any]:
    reader = Reader(payload)
    length = reader.number(0, reader.left * _BYTES)
    text = reader.packed((length,), np.uint8).tobytes()
    reader.finish()
    try:
        value = json.loads(text)
    except ValueError as error:
        raise WireError(f"the payload is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise WireError("the payload is not a JSON object")
    return value


def refusal(reason: str) -> Message:
    return Message(REFUSED, payload=encode_json({"reason": reason[: MOST_REASON_WORDS * 4]}))


def reason_of(message: Message) -> str:
    """Why the other end closes the connection, by its last message."""
    return f"it says: {decode_json(message.payload).get('reason')}"


def _padded(data: bytes) -> Words:
    return np.frombuffer(data + bytes(-len(data) % _BYTES), dtype=np.int64)


class Reader:
    """Reads a payload from front to back, with bounds checks."""

    def __init__(self, payload: Words) -> None:
        self._payload = payload
        self._at = 0

    @property
    def left(self) -> int:
        return len(self._payload) - self._at

    def array(self, count: int) -> Words:
        if count > self.left:
            raise WireError(f"{count} words are announced, {self.left} are left")
        self._at += count
        return self._payload[self._at - count : self._at]

    def packed(self, shape: tuple[int, ...], dtype: type) -> npt.NDArray[Any]:
        """An array that was encoded by the function `packed`."""
        count = math.prod(shape)
        found = self.array(-(-count * np.dtype(dtype).itemsize // _BYTES))
        return found.view(dtype)[:count].reshape(shape)

    def numbers(self, count: int, low: int = LOWEST, high: int = HIGHEST) -> list[int]:
        values: list[int] = self.array(count).tolist()
        if values and not (low <= min(values) and max(values) <= high):
            raise WireError(f"a number is not in {low}..{high}")
        return values

    def number(self, low: int = LOWEST, high: int = HIGHEST) -> int:
        if not self.left:
            raise WireError("a number is missing at the end")
        value: int = self._payload.item(self._at)
        self._at += 1
        if not low <= value <= high:
            raise WireError(f"{value} is not in {low}..{high}")
        return value

    def count(self) -> int:
        """The number of items that follow, of at least one word each."""
        return self.number(0, self.left - 1)

    def real(self) -> float:
        return float(self.array(1).view(np.float64)[0])

    def finish(self) -> None:
        if self.left:
            raise WireError(f"{self.left} words too many")


# --- the channel ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Message:
    kind: int
    round: int = 0
    payload: Words = field(default_factory=lambda: np.empty(0, dtype=np.int64))
    times: tuple[int, int] = (0, 0)  # ns, as the protocol defines them


@dataclass
class Traffic:
    """Messages and bytes that a channel has transferred in one direction."""

    num_messages: int = 0
    num_bytes: int = 0


class Channel:
    """Complete messages over one end of a connection; non-blocking, partial messages are buffered."""

    def __init__(self, end: socket.socket) -> None:
        end.setblocking(False)
        self.sent, self.received = Traffic(), Traffic()
        self._socket = end
        self._unsent: deque[memoryview] = deque()
        self._partial = bytearray()  # the message that is arriving

    @property
    def num_bytes(self) -> int:
        """Transferred, in both directions."""
        return self.sent.num_bytes + self.received.num_bytes

    def fileno(self) -> int:
        return self._socket.fileno()

    @property
    def address(self) -> str:
        """IP address of this end; "" for a socket pair."""
        name = self._socket.getsockname()
        return str(name[0]) if name else ""

    def waiting(self) -> bool:
        """Whether there is something to receive (or the other end was closed)."""
        return self._poll(select.POLLIN, 0.0)

    def post(self, message: Message) -> None:
        """Sends without blocking; the rest is sent by `receive` or `flush`."""
        header = words([MAGIC, message.kind, message.round, *message.times, len(message.payload)])
        self._unsent.append(np.concatenate((header, message.payload)).data.cast("B"))
        self.sent.num_messages += 1
        self._write()

    def flush(self, timeout: float = math.inf) -> None:
        """Waits until everything has been sent; WireError if the other end does not take it in `timeout` seconds."""
        deadline = time.monotonic() + timeout
        while self._unsent:
            if not self._poll(select.POLLOUT, max(0.0, deadline - time.monotonic())):
                raise WireError(f"it does not read its messages for {timeout:g} s")
            self._write()

    def send(self, message: Message) -> None:
        """Sends, and waits until everything has been sent."""
        self.post(message)
        self.flush()

    def receive(self, limit: int = MAX_WORDS, timeout: float = math.inf) -> Message | None:
        """The next message, of at most `limit` words of payload; None if it is not complete after `timeout` seconds."""
        deadline = time.monotonic() + timeout
        while True:
            self._write()
            moved = self._read(limit)
            if not self._missing(limit):
                return self._take()
            left = deadline - time.monotonic() + (_GRACE if self._partial else 0.0)
            if left <= 0:
                return None
            if not moved:
                self._poll(select.POLLIN | (select.POLLOUT if self._unsent else 0), left)

    def expect(self, kind: int, limit: int = MAX_WORDS, timeout: float = math.inf) -> Message:
        """The next message; WireError if it is not complete in time, or of another kind."""
        message = self.receive(limit, timeout)
        if message is None or message.kind != kind:
            raise WireError(f"a message of kind {kind!r} was due")
        return message

    def end(self) -> None:
        """Receives no more: what waits for a message in another thread gets ChannelClosed."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RD)

    def close(self) -> None:
        self._socket.close()

    def _poll(self, events: int, timeout: float) -> bool:
        poller = select.poll()
        poller.register(self._socket, events)
        return bool(poller.poll(None if timeout == math.inf else timeout * 1000))

    def _write(self) -> None:
        try:
            while self._unsent:
                sent = self._socket.send(self._unsent[0])
                self.sent.num_bytes += sent
                rest = self._unsent.popleft()[sent:]
                if rest:
                    self._unsent.appendleft(rest)
        except BlockingIOError:
            return
        except ConnectionError as error:
            self._unsent.clear()  # what the other end sent before can still be received
            raise ChannelClosed("the other end is closed") from error

    def _read(self, limit: int) -> bool:
        """Reads what has arrived of the current message; returns whether there was anything."""
        try:
            data = self._socket.recv(min(self._missing(limit), _CHUNK))
        except BlockingIOError:
            return False
        except ConnectionError as error:
            raise ChannelClosed("the other end is closed") from error
        if not data:
            raise ChannelClosed("the other end is closed")
        self.received.num_bytes += len(data)
        self._partial += data
        return True

    def _missing(self, limit: int) -> int:
        """Bytes that are missing of the message, or of its header."""
        header = HEADER_WORDS * _BYTES
        if len(self._partial) < header:
            return header - len(self._partial)
        magic, *numbers, length = struct.unpack_from(f"={HEADER_WORDS}q", self._partial)
        if magic != MAGIC or min(numbers) < 0:
            raise WireError("this is not the beginning of a message")
        if not 0 <= length <= limit:
            raise WireError(f"a payload of {length} words, where {limit} are possible")
        return int(header + length * _BYTES - len(self._partial))

    def _take(self) -> Message:
        data, self._partial = self._partial, bytearray()
        self.received.num_messages += 1
        found = np.frombuffer(data, np.int64)
        kind, number, *times = found[1:5].tolist()
        return Message(kind, number, found[HEADER_WORDS:], (times[0], times[1]))
