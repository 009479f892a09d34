"""Messages over a socket: put together as they were sent, refused if they make no sense, and never waited for."""

from __future__ import annotations

import socket

import numpy as np
import pytest

from ssd.parallel.transport import MAGIC, READY, Channel, ChannelClosed, Message, WireError

ROUND = 3


def channels() -> tuple[Channel, Channel]:
    left, right = socket.socketpair()
    return Channel(left), Channel(right)


@pytest.mark.parametrize(
    "header",
    [
        [0, 3, 1, 0, 0, 0],
        [MAGIC + 1, 3, 1, 0, 0, 0],
        [MAGIC, -1, 1, 0, 0, 0],
        [MAGIC, 3, -1, 0, 0, 0],
        [MAGIC, 3, 1, -1, 0, 0],
        [MAGIC, 3, 1, 0, -1, 0],
        [MAGIC, 3, 1, 0, 0, -1],
        [MAGIC, 3, 1, 0, 0, 101],
        [MAGIC, 3, 1, 0, 0, 1 << 62],
    ],
)
def test_senseless_headers_are_refused(header: list[int]) -> None:
    """Catches a length that is believed: with `limit` no more than that is ever taken in."""
    left, right = socket.socketpair()
    with left, right:
        left.sendall(np.array(header, dtype=np.int64).tobytes())
        with pytest.raises(WireError):
            Channel(right).receive(limit=100, timeout=0.0)


def test_a_message_of_another_kind_or_none_at_all_is_refused() -> None:
    """Catches a READY that is taken for a round, and a wait without end for a peer that says nothing."""
    here, there = channels()
    here.post(Message(READY))
    with pytest.raises(WireError, match="kind 3 was due"):
        there.expect(ROUND)
    with pytest.raises(WireError, match="kind 3 was due"):
        there.expect(ROUND, timeout=0.01)
    here.close()
    there.close()


def test_a_long_message_never_blocks_its_sender() -> None:
    """Catches a send that waits for the reader, and a message that comes in pieces and is put together wrongly."""
    here, there = channels()
    payload = np.arange(1 << 20, dtype=np.int64)
    assert there.receive(timeout=0.0) is None
    here.post(Message(ROUND, 1, payload))
    here.post(Message(ROUND, 2))
    message = there.receive(timeout=0.0)
    assert message is None
    while message is None:
        assert here.receive(timeout=0.0) is None  # sends on what is left
        message = there.receive(timeout=0.0)
    assert np.array_equal(message.payload, payload)
    last = there.receive(timeout=0.0)
    assert last is not None
    assert last.round == 2
    assert not there.waiting()
    here.close()
    assert there.waiting()
    with pytest.raises(ChannelClosed):
        there.receive()
    with pytest.raises(ChannelClosed):
        there.post(Message(READY))
    there.close()
