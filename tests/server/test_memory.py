"""Memory that requests have used and freed is given back to the system."""

from __future__ import annotations

import asyncio
import ctypes
from pathlib import Path

import pytest

pytest.importorskip("fastapi", reason="the extra `serve` is not installed")

from ssd import LLM
from ssd.server.app import create_app
from ssd.server.http import memory
from ssd.server.options import ServerOptions
from ssd.server.run import Server

BLOCK, COUNT = 16 << 10, 3000  # 47 MiB of blocks that are too small for mappings of their own


def resident() -> float:
    """MiB of RSS."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096 / 2**20


@pytest.mark.skipif(memory._trim is None, reason="not glibc")
def test_freed_memory_is_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also what lies below memory that is in use, where free() gives nothing back."""
    libc = ctypes.CDLL(None)
    libc.malloc.restype, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
    asyncio.run(memory.give_back())  # what other tests have freed would be used again
    before = resident()
    with monkeypatch.context() as patch:
        patch.setattr(memory, "_trim", None)  # no server of another test gives it back
        blocks = [libc.malloc(BLOCK) for _ in range(COUNT)]
        for block in blocks:
            ctypes.memset(block, 1, BLOCK)
        for block in blocks[:-1]:
            libc.free(block)
        assert resident() > before + 30
    asyncio.run(memory.give_back())
    assert resident() < before + 15
    libc.free(blocks[-1])


def test_a_server_gives_memory_back_while_it_runs(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    monkeypatch.setattr(memory, "_trim", calls.append)
    server = Server(create_app(llm, ServerOptions(served_model_name="tiny-llama")))
    asyncio.run(server.on_tick(0))
    assert calls
    assert server.config.timeout_notify == memory.SECONDS
