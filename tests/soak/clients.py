"""One client of each kind."""

from __future__ import annotations

import asyncio
import json
import random
import socket
from urllib.parse import urlsplit

import httpx

from soak.asks import Ask, Choice, read_answer, read_stream

SLOW_BYTES, SLOW_PAUSE, SLOW_SECONDS = 16, 0.25, 3.0


async def plain(client: httpx.AsyncClient, ask: Ask, *, stream: bool) -> list[Choice]:
    """Reads its answer as it comes."""
    body = ask.body | {"stream": stream}
    if not stream:
        answer = await client.post(ask.path, json=body)
        _check_status(answer.status_code, answer.text)
        return read_answer(answer.json())
    async with client.stream("POST", ask.path, json=body) as response:
        lines = [line async for line in response.aiter_lines()]
        _check_status(response.status_code, "\n".join(lines))
    return read_stream(lines)


async def vanishing(client: httpx.AsyncClient, ask: Ask, draw: random.Random) -> None:
    """Closes its connection in the middle of a stream."""
    left = draw.randint(0, 10)
    async with client.stream("POST", ask.path, json=ask.body | {"stream": True}) as response:
        _check_status(response.status_code, "")
        async for line in response.aiter_lines():
            left -= line.startswith("data: ")
            if left < 0:
                return


async def slow(url: str, ask: Ask) -> list[Choice]:
    """Reads some bytes a second for a while, then the rest."""
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)  # the system reads little in its place
    connection.setblocking(False)
    address, data = urlsplit(url), json.dumps(ask.body | {"stream": True}).encode()
    await asyncio.get_running_loop().sock_connect(connection, (address.hostname, address.port))
    reader, writer = await asyncio.open_connection(sock=connection, limit=1024)
    try:
        head = f"POST {ask.path} HTTP/1.0\r\nContent-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
        writer.write(head.encode() + data)
        got = b""
        for _ in range(int(SLOW_SECONDS / SLOW_PAUSE)):
            got += await reader.read(SLOW_BYTES)
            await asyncio.sleep(SLOW_PAUSE)
        got += await reader.read()
    finally:
        writer.close()
    top, _, content = got.partition(b"\r\n\r\n")
    _check_status(int(top.split()[1]), content.decode())
    return read_stream(content.decode().splitlines())


def _check_status(status: int, text: str) -> None:
    if status != 200:
        raise ValueError(f"status {status}: {text:.300}")
