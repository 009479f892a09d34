"""What crosses between the engine and the draft's processes: messages and bytes of a round.

python bench/wire.py                                       # the bundled pair on this CPU
python bench/wire.py --model MODEL --draft DRAFT --k 7     # any pair

All rounds of requests that come together are counted, with the prompts and parameters of new sequences. Before each
round there is a pause, as with a large target: time for the workers to prepare all that they can.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from ssd import LLM, SamplingParams
from ssd.bench.record import HELP, record, rows_of
from ssd.decoding.observer import RoundObserver
from ssd.drafting.process import ProcessDrafter
from ssd.prompts import load_prompts


def main() -> None:
    args = _arguments()
    columns = ("rounds", "hits", "messages to a worker", "messages from it", "bytes a sequence to it", "bytes from it")
    table = Table("k", "replicas", "batch", *columns, title="per round and replica")
    pause = Pause(args.pause)
    for k in args.k:
        for replicas in args.replicas:
            speculation = {"mode": "ssd", "draft": args.draft, "placement": "process", "k": k}
            speculation |= {"draft_replicas": replicas, "budget": args.budget}
            with LLM(args.model, max_model_len=1024, speculation=speculation) as llm, llm.driver.observing(pause):
                for batch in args.batches:
                    table.add_row(str(k), str(replicas), str(batch), *measured(llm, batch, args.tokens))
    Console(width=120).print(table)
    record(args.json, rows_of(table, names=3), [str(table.title)])


class Pause(RoundObserver):
    """Pauses before the drafter is asked."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def part(self, name: str) -> None:
        if name == "propose":
            time.sleep(self.seconds)


def measured(llm: LLM, batch: int, tokens: int) -> list[str]:
    drafter: Any = llm.engine.round.drafter
    if not isinstance(drafter, ProcessDrafter):
        raise AssertionError("the draft has no process of its own")
    prompts = (load_prompts("humaneval").asked() * batch)[:batch]
    before = _counted(drafter)
    outputs = llm.generate(prompts, SamplingParams(max_new_tokens=tokens, ignore_eos=True))
    rounds, *messages, sent, received = (a - b for a, b in zip(_counted(drafter), before, strict=True))
    works = len(drafter.replicas) * sum(output.metrics.rounds for output in outputs)
    hits = sum(o.metrics.hits for o in outputs) / max(1, sum(o.metrics.look_ups for o in outputs))
    figures = [f"{count / rounds:.2f}" for count in messages] + [f"{size / works:.0f}" for size in (sent, received)]
    return [f"{rounds / len(drafter.replicas):.0f}", f"{hits:.2f}", *figures]


def _counted(drafter: ProcessDrafter) -> list[int]:
    """Rounds, messages to and from, bytes to and from: of all replicas."""
    channels = [each.supervisor.channel for each in drafter.replicas]
    rounds = sum(channel.sent.num_messages for channel in channels) - len(channels)  # less the setup
    messages = [sum(getattr(c, way).num_messages for c in channels) for way in ("sent", "received")]
    sizes = [sum(getattr(c, way).num_bytes for c in channels) for way in ("sent", "received")]
    return [rounds, *messages, *sizes]


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="tiny-llama")
    parser.add_argument("--draft", default="tiny-llama-draft")
    parser.add_argument("--k", type=int, nargs="+", default=[4, 7])
    parser.add_argument("--replicas", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--budget", type=int, default=16)
    parser.add_argument("--pause", type=float, default=0.08, help="seconds")
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--json", type=Path, help=HELP)
    return parser.parse_args()


if __name__ == "__main__":
    main()
