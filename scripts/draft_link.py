"""What a slow link to a draft server costs, measured and as `ssd simulate` has it: `python scripts/draft_link.py`.

A proxy between one engine and `ssd draft-server` holds every message for a time. The simulation has the engine's round
without waiting and the draft's step as they were measured with the first delay, acceptance, the share of rounds whose
draft was at hand as its hits, and the link's delay.
Delays take turns, and the median of several answers counts, since other processes slow them down. --verify-ms makes
rounds last long enough for that on a busy machine.
"""

from __future__ import annotations

import argparse
import itertools
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from statistics import median
from typing import Any, NamedTuple

from ssd import LLM, SamplingParams
from ssd.drafting.process import ProcessDrafter
from ssd.parallel.address import Address
from ssd.simulation.rounds import Setup, World

PROMPT = "Once upon a time there was a little boy who"
REST = 0.00005  # seconds between two looks at what is held back


class Proxy:
    """Forwards both ways what came `delay` seconds ago."""

    def __init__(self, own: Address, server: Address) -> None:
        self.delay = 0.0
        self._server, self._listening = server, own.listen()
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            engine, _ = self._listening.accept()
            server = self._server.connect(5.0)
            for source, target in ((engine, server), (server, engine)):
                threading.Thread(target=self._forward, args=(source, target), daemon=True).start()

    def _forward(self, source: socket.socket, target: socket.socket) -> None:
        held: deque[tuple[float, bytes]] = deque()
        source.settimeout(None)
        with suppress(OSError):
            while True:
                source.setblocking(not held)
                with suppress(BlockingIOError):
                    data = source.recv(1 << 16)
                    if not data:
                        break
                    held.append((time.perf_counter() + self.delay, data))
                while held and held[0][0] <= time.perf_counter():
                    target.sendall(held.popleft()[1])
                if held:
                    time.sleep(REST)
        for end in (source, target):
            end.close()


@contextmanager
def draft_server(draft: str, address: Address) -> Iterator[None]:
    command = [sys.executable, "-m", "ssd", "draft-server", draft, "--listen", str(address), "--max-model-len", "2048"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, start_new_session=True) as process:
        assert process.stderr is not None
        try:
            while not process.stderr.readline().startswith(b"drafts of"):
                pass
            yield
        finally:
            process.terminate()


def lengthen(llm: LLM, seconds: float) -> None:
    """Makes every forward pass of the target last at least so long: one on another device, for which the host waits."""
    target = llm.engine.round.target
    forward = target.forward

    def slow(*given: Any, **options: Any) -> Any:
        began = time.perf_counter()
        made = forward(*given, **options)
        time.sleep(max(0.0, began + seconds - time.perf_counter()))
        return made

    target.forward = slow  # type: ignore[method-assign]


class Answer(NamedTuple):
    """Seconds of a round, in the mean of an answer's."""

    round: float
    waited: float  # of it, for drafts
    drafted: float  # the draft model computed


def answer(llm: LLM, tokens: int) -> Answer:
    metrics = llm.engine.metrics

    def totals() -> tuple[float, ...]:
        return time.perf_counter(), metrics.target_wait_seconds, metrics.draft_busy_seconds, metrics.num_rounds

    before = totals()
    llm.generate([PROMPT], SamplingParams(max_new_tokens=tokens, ignore_eos=True, temperature=0.0))
    *seconds, rounds = (after - old for after, old in zip(totals(), before, strict=True))
    return Answer(*(each / rounds for each in seconds))


def simulated(llm: LLM, alone: Answer, k: int, delay: float) -> float:
    """Seconds of a round in the simulation; `alone`: without delay."""
    metrics, drafter = llm.engine.metrics, llm.engine.round.drafter
    assert isinstance(drafter, ProcessDrafter)
    verify, step = alone.round - alone.waited, alone.drafted / (k + 1)
    reached = [metrics.spec_decode_num_drafts, *metrics.spec_decode_num_accepted_tokens_per_pos]
    rates = [after / before for before, after in itertools.pairwise(reached) if before][:k]
    setup = Setup(
        "ssd",
        verify=lambda rows, sequences: verify,
        draft=lambda rows, sequences: step,
        k=k,
        rates=rates + [0.0] * (k - len(rates)),
        hits=drafter.at_hand / max(1, drafter.at_hand + drafter.replies),
        backup="jit",
        link=delay,
    )
    world = World(setup)
    world.run()
    return world.totals.round_seconds / world.totals.rounds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="tiny-llama")
    parser.add_argument("--draft", default="tiny-llama-draft")
    parser.add_argument("--delays", default="0,0.1,0.5,1,2,5", help="ms, one way")
    parser.add_argument("--k", type=int, default=4)
    parser.add_argument("--verify-ms", type=float, default=0.0, help="least time of a verification, by sleeping")
    parser.add_argument("--tokens", type=int, default=150)
    parser.add_argument("--repeats", type=int, default=7)
    given = parser.parse_args()
    delays = [float(each) / 1e3 for each in given.delays.split(",")]
    with tempfile.TemporaryDirectory() as folder:
        server, between = Address(path=f"{folder}/server"), Address(path=f"{folder}/proxy")
        with draft_server(given.draft, server):
            proxy = Proxy(between, server)
            speculation: dict[str, Any] = {"draft_url": str(between), "k": given.k, "budget": 8, "backup": "jit"}
            with LLM(given.model, max_num_seqs=1, max_model_len=1024, speculation=speculation) as llm:
                lengthen(llm, given.verify_ms / 1e3)
                for _ in range(3):
                    answer(llm, given.tokens)
                found: dict[float, list[Answer]] = {delay: [] for delay in delays}
                for _ in range(given.repeats):
                    for delay in delays:
                        proxy.delay = delay
                        found[delay].append(answer(llm, given.tokens))
                usual = [Answer(*map(median, zip(*found[delay], strict=True))) for delay in delays]
                told = [simulated(llm, usual[0], given.k, delay) for delay in delays]
    print("| delay, one way | round, measured | round, simulated | speed, measured | speed, simulated |")
    print("|---|---|---|---|---|")
    for delay, own, other in zip(delays, usual, told, strict=True):
        times, speeds = (own.round, other), (usual[0].round / own.round, told[0] / other)
        cells = [f"{1e3 * each:.2f} ms" for each in (delay, *times)] + [f"{each:.2f}" for each in speeds]
        print(f"| {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
