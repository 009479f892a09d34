"""What one GPU hides: a verification, a plain draft and a prepared cache alone, and the cache beside the verification.

python bench/overlap.py --target graft:tiny-qwen3@qwen3-32b --draft graft:tiny-qwen3-draft@qwen3-0.6b --k 4 6
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import torch
from rich.console import Console
from rich.table import Table
from ssd.drafting.program import Lane

from ssd import LLM
from ssd.core import Request, SamplingParams, Sequence
from ssd.decoding.drafter import Drafter
from ssd.drafting.ahead import AheadDrafter
from ssd.engine.engine import Engine
from ssd.execution.runner import ModelRunner

CONTEXT = 512


def milliseconds(run: Callable[[], object], repeats: int = 30) -> float:
    times = []
    for _ in range(repeats):
        torch.cuda.synchronize()
        began = time.perf_counter()
        run()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - began)
    return 1e3 * sorted(times)[len(times) // 2]


def alone_and_beside(llm: LLM, drafter: Drafter, k: int) -> tuple[float, float, float]:
    """Milliseconds of a verification, of a plain draft, and of a verification beside a preparation."""
    verify, draft, _, beside = llm.driver.call(lambda engine: timings(engine, drafter, k, 0.0))
    return verify, draft, beside


def timings(engine: Engine, drafter: Drafter, k: int, temperature: float) -> list[float]:
    """Milliseconds: verify, draft, prepare, prepare beside verify."""
    target = engine.round.target
    if not isinstance(drafter, AheadDrafter) or not isinstance(target, ModelRunner) or target.graphs is None:
        raise AssertionError("the engine was built for another mode")
    program, width = drafter.model.program, drafter.budget
    verify = target.graphs.graph(target.graphs.bucket(k + 1))
    forks = [(i % (k + 1), i // (k + 1)) for i in range(width)]
    request = Request("", (1,), SamplingParams(temperature=temperature))
    text = Sequence(0, request, 0, 7, frozenset(), 1024, blocks=list(range(65)))
    lane = Lane(CONTEXT, list(range(5, 6 + k)), text, 7, forks)

    def both() -> None:
        verify.replay()
        program.branch([lane], k)

    runs = (verify.replay, lambda: program.write([lane], k), lambda: program.branch([lane], k), both)
    return [milliseconds(run) for run in runs]


def main() -> None:
    args = arguments()
    table = Table("K", "verify", "draft", "prepare", "prepare beside verify", "one after the other")
    table.title = f"{args.target} + {args.draft}, {args.width} branches, ms"
    speculation = {"mode": "ssd", "draft": args.draft, "k": max(args.k), "budget": args.width}
    llm = LLM(
        args.target, device="cuda", max_model_len=1024, max_num_seqs=2, num_kv_blocks=130, speculation=speculation
    )
    for k in args.k:
        figures = llm.driver.call(lambda engine, k=k: timings(engine, engine.round.drafter, k, args.temperature))
        table.add_row(str(k), *(f"{f:.2f}" for f in figures), f"{figures[0] + figures[2]:.2f}")
    Console(width=120).print(table)
    Console().print(llm.note)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="graft:tiny-qwen3@qwen3-32b")
    parser.add_argument("--draft", default="graft:tiny-qwen3-draft@qwen3-0.6b")
    parser.add_argument("--k", nargs="+", type=int, default=[3, 4, 5, 6])
    parser.add_argument("--width", type=int, default=16)
    parser.add_argument("--temperature", type=float, default=0.0)
    return parser.parse_args()


if __name__ == "__main__":
    main()
