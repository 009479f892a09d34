"""Three models of one server under load, while they are loaded and unloaded and a drafter is killed."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path

import pytest

pytest.importorskip("fastapi", reason="the extra `serve` is not installed")

import httpx
from serve_process import CAN_BE_MEASURED, GIVE_BACK_SECONDS, Held, ServeProcess, serve

from ssd import LLM, SamplingParams

FILE = """
[server]
max_loaded_models = 2
[engine]
max_model_len = 256
max_num_seqs = 8
[[models]]
model = "tiny-llama"
draft = "tiny-llama-draft"
mode = "ssd"
placement = "process"
k = 2
budget = 4
[[models]]
model = "tiny-qwen3"
keep_alive = 0.2
[[models]]
model = "tiny-llama-draft"
"""
NAMES = ("tiny-llama", "tiny-qwen3", "tiny-llama-draft")
PROMPTS = ("Once upon a time", "Mr. Holmes sat by the fire, and", "The sea was", "def main():")
REQUESTS, CLIENTS = 300, 8
CHANGE_SECONDS = 0.7  # between two changes of what is loaded
SETTLE_SECONDS = 30.0
GROWTH = 1.05  # of memory, with nothing loaded, from the first round to the last


@pytest.mark.slow
@pytest.mark.skipif(not CAN_BE_MEASURED, reason="what a process holds is read from /proc")
def test_no_text_changes_nothing_is_lost_and_memory_comes_back(tmp_path: Path) -> None:
    """Catches a request that is lost between two loads, a text that depends on the other models, and memory, threads
    or files that a model leaves behind."""
    (tmp_path / "server.toml").write_text(FILE)
    expected = {name: alone(name) for name in NAMES}
    with serve(what=("--config", str(tmp_path / "server.toml"))) as server:
        before, counts = asyncio.run(run(server, expected))
        end = time.monotonic() + SETTLE_SECONDS  # a busy machine gives memory and connections back later
        while problems := server.held().problems_since(before, before.rss * (GROWTH - 1), "rss", "pss"):
            assert time.monotonic() < end, problems
            time.sleep(GIVE_BACK_SECONDS)
        assert server.stop() == 0
        assert "Traceback" not in server.log
    assert counts["requests"] == REQUESTS
    assert min(counts["killed"], counts["loads"], counts["unloads"]) > 3, counts


def alone(name: str) -> list[str]:
    """What a model writes without a server, drafts and company."""
    params = SamplingParams(max_new_tokens=16, ignore_eos=True, temperature=0.8, seed=3)
    with LLM(name, device="cpu", max_model_len=256) as llm:
        return [llm.generate(prompt, params)[0].text for prompt in PROMPTS]


async def run(server: ServeProcess, expected: dict[str, list[str]]) -> tuple[Held, Counter[str]]:
    draw, counts = random.Random(5), Counter[str]()
    async with httpx.AsyncClient(base_url=server.url, timeout=120) as client:

        async def ask() -> None:
            name, index = draw.choice(NAMES), draw.randrange(len(PROMPTS))
            body = {"model": name, "prompt": PROMPTS[index], "max_tokens": 16, "ignore_eos": True}
            answer = await client.post("/v1/completions", json={**body, "temperature": 0.8, "seed": 3})
            assert answer.status_code == 200, answer.text
            assert answer.json()["choices"][0]["text"] == expected[name][index], name
            counts["requests"] += 1

        async def work(number: int) -> None:
            for _ in range(number):
                await ask()

        async def change() -> None:
            while True:
                await asyncio.sleep(CHANGE_SECONDS)
                path = draw.choice(("load", "unload"))
                answer = await client.post(f"/models/{path}", json={"model": draw.choice(NAMES)})
                assert answer.status_code == 200, answer.text
                counts[f"{path}s"] += 1
                for pid in server.drafters():
                    with suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
                        counts["killed"] += 1

        await asyncio.gather(*(work(5) for _ in range(CLIENTS)))
        before = await unloaded(client, server)
        counts.clear()
        changes = asyncio.create_task(change())
        try:
            await asyncio.gather(
                *(work(n) for n in [REQUESTS // CLIENTS + (i < REQUESTS % CLIENTS) for i in range(CLIENTS)])
            )
        finally:
            changes.cancel()
            with suppress(asyncio.CancelledError):
                await changes
        await unloaded(client, server)
        return before, counts


async def unloaded(client: httpx.AsyncClient, server: ServeProcess) -> Held:
    """What the server holds with no model."""
    for name in NAMES:
        (await client.post("/models/unload", json={"model": name})).raise_for_status()
    await asyncio.sleep(GIVE_BACK_SECONDS)
    return server.held()
