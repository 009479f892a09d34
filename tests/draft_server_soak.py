"""Soak of a draft server: `python -m draft_server_soak --requests 10000` (with `tests` in PYTHONPATH), or --minutes 30.

Engines come and go, end in the middle of a round, or send nonsense, while one engine decodes and compares its texts
with those of plain decoding. At the end the server holds no more threads, file handles and memory than after the
warm-up, and no sequence.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field

import httpx
from draft_servers import engine, new_entry, plain_texts, scripted, server_process, texts, until
from serve_process import Held, free_port, gauges

from ssd.drafting.wire import Entry
from ssd.parallel.transport import WireError

ENGINES = 4  # scripted ones at the same time
GROWTH = 16.0  # MiB
WARM_UP = 0.2  # of the soak


@dataclass
class Soak:
    url: str
    requests: int  # 0: until `seconds` are over
    seconds: float
    began: float = field(default_factory=time.monotonic)
    counts: Counter[str] = field(default_factory=Counter)

    @property
    def share(self) -> float:
        """How much of it is over."""
        done, passed = self.counts["requests"], time.monotonic() - self.began
        return done / self.requests if self.requests else passed / self.seconds

    def engines(self, seed: int, end: float) -> None:
        """One after the other until that share is reached."""
        dice = random.Random(seed)
        while self.share < end:
            with suppress(WireError, OSError):
                self._engine(dice, end)
            self.counts["engines"] += 1

    def _engine(self, dice: random.Random, end: float) -> None:
        own = scripted(self.url)
        try:
            last = -1
            for name in range(dice.randint(1, 80)):
                tokens = [dice.randrange(1000) for _ in range(dice.choice([2, 5, 20, 200]))]
                own.ask([new_entry(name, tokens)], [last] if last >= 0 else [])
                last = name
                for _ in range(dice.randint(0, 4)):
                    own.drafts(1)
                    own.prepared()
                    own.ask([Entry(name, len(tokens), [7], 4)])
                    tokens.append(7)
                own.drafts(1)
                own.prepared()
                self.counts["requests"] += 1
                if self.share >= end:
                    break
            if dice.random() < 0.3:
                own.ask([Entry(10**6, 5, [1], 4)])
                own.prepared()
            elif dice.random() < 0.5:
                own.ask([new_entry(10**6, [1, 2, 3])])  # and leaves in this round
        finally:
            own.channel.close()


def run(requests: int, seconds: float, seed: int) -> list[str]:
    """The problems."""
    expected, problems, port = plain_texts(), list[str](), free_port()
    with tempfile.TemporaryDirectory() as folder:
        url, page = f"unix:{folder}/socket", f"http://127.0.0.1:{port}/metrics"
        with server_process("--listen", url, "--http-port", str(port), "--num-kv-blocks", "2000") as process:
            soak, ended = Soak(url, requests, seconds), threading.Event()

            def decode() -> None:
                with engine(url) as llm:
                    while not ended.is_set():
                        if texts(llm) != expected:
                            problems.append("a text is another one")
                        soak.counts["texts"] += 5

            def phase(end: float) -> Held:
                with ThreadPoolExecutor(ENGINES) as pool:
                    list(pool.map(lambda i: soak.engines(seed + i, end), range(ENGINES)))
                until(lambda: gauges(httpx.get(page).text)["draft_server_engines"] == 1)
                time.sleep(1.0)
                return Held.of(process.pid)

            decoder = threading.Thread(target=decode)
            decoder.start()
            before = phase(WARM_UP)
            after = phase(1.0)
            ended.set()
            decoder.join()
            until(lambda: gauges(httpx.get(page).text)["draft_server_engines"] == 0)
            last = gauges(httpx.get(page).text)
            if last["draft_server_kv_blocks_free"] != last["draft_server_kv_blocks"]:
                problems.append(f"KV blocks are still in use: {last}")
            problems += after.problems_since(before, GROWTH, "rss", "pss")
            process.terminate()
            if process.wait(30):
                problems.append(f"exit code {process.returncode}")
    counts = ", ".join(f"{count} {name}" for name, count in soak.counts.items())
    seconds = time.monotonic() - soak.began
    sys.stdout.write(f"{counts}; {seconds:.0f} s; after the warm-up {before}, at the end {after}\n")
    return problems


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=0, help="in place of --minutes")
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    found = run(given.requests, 60 * given.minutes, given.seed)
    sys.exit("\n".join(found))
