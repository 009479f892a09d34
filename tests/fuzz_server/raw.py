"""Sends bytes over a connection of their own and reads one answer."""

from __future__ import annotations

import asyncio
import re
from urllib.parse import urlsplit

_STATUS = re.compile(rb"HTTP/1\.1 (\d{3}) ")
_LENGTH = re.compile(rb"\r\ncontent-length: (\d+)\r\n", re.IGNORECASE)


async def exchange(url: str, request: bytes, seconds: float) -> bytes:
    """The answer, or nothing where the server closes the connection without one. TimeoutError if neither happens."""
    address = urlsplit(url)
    async with asyncio.timeout(seconds):
        reader, writer = await asyncio.open_connection(address.hostname, address.port)
        try:
            writer.write(request)
            return await _answer(reader)
        except ConnectionError:
            return b""  # closed before it had read everything
        finally:
            writer.close()


async def _answer(reader: asyncio.StreamReader) -> bytes:
    answer = b""
    while not _complete(answer) and (received := await reader.read(1 << 16)):
        answer += received
    return answer


def _complete(answer: bytes) -> bool:
    """A chunked answer may also end with the connection."""
    head, end, content = answer.partition(b"\r\n\r\n")
    if not end:
        return False
    if head.startswith(b"HTTP/1.1 100 "):
        return _complete(content)
    length = _LENGTH.search(head + b"\r\n")
    return len(content) >= int(length[1]) if length else content.endswith(b"0\r\n\r\n")


def status(answer: bytes) -> int | None:
    """None: there is no answer. The last one counts, after those that tell the client to go on."""
    found = [int(code) for code in _STATUS.findall(answer) if code != b"100"]
    return found[0] if found else None
