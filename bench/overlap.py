"""Overlap on one device: times of a verification, a plain draft and a preparation, and of verifying while preparing.

python bench/overlap.py --target graft:tiny-qwen3@qwen3-32b --draft graft:tiny-qwen3-draft@qwen3-0.6b --k 4 6
"""

from __future__ import annotations

import argparse
import functools
import time
from collections.abc import Callable
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from ssd import LLM
from ssd.bench.record import HELP, record, rows_of
from ssd.core import Request, SamplingParams, Sequence
from ssd.decoding.drafter import Drafter
from ssd.drafting.ssd import SSDDrafter
from ssd.engine.engine import Engine
from ssd.execution.batch import Batch
from ssd.execution.target import Target

CONTEXT = 512  # tokens
LONGEST = 1024
SLOT = 0  # of the one sequence


def milliseconds(run: Callable[[], object], repeats: int = 30) -> float:
    wait = torch.cuda.synchronize if torch.cuda.is_available() else lambda: None
    times = []
    for _ in range(repeats):
        wait()
        began = time.perf_counter()
        run()
        wait()
        times.append(time.perf_counter() - began)
    return 1e3 * sorted(times)[len(times) // 2]


def alone_and_beside(llm: LLM, drafter: Drafter, k: int) -> tuple[float, float, float]:
    """Milliseconds of a verification, of a plain draft, and of a verification beside a preparation."""
    verify, draft, _, beside = llm.driver.call(lambda engine: timings(engine, drafter, k, 0.0))
    return verify, draft, beside


def timings(engine: Engine, drafter: Drafter, k: int, temperature: float) -> list[float]:
    """Milliseconds: verify, draft, prepare, prepare beside verify. For an engine that is idle."""
    target = engine.round.target
    if not isinstance(drafter, SSDDrafter) or not isinstance(target, Target):
        raise AssertionError("the engine was built for another mode")
    runner, params = drafter.runner, SamplingParams(temperature=temperature)
    prompt = (1,) * CONTEXT
    target.state.admit(SLOT, Sequence(0, Request("", prompt, params), 0, 7, frozenset(), LONGEST, tokens=list(prompt)))
    for model in (target.runner, runner.model_runner):
        model.tables.reset(SLOT)
        model.tables.update([(SLOT, list(range(-(-(CONTEXT + 2 * k + 2) // model.block_size))))])
    staged = target.runner.stage(Batch([SLOT], [-1], [k + 1], [k + 1]))
    verify = functools.partial(target.runner.run, staged)

    def prepare(beside: Callable[..., object] = lambda **_: None) -> None:
        branches = runner.stage_branches(
            [SLOT], [k], [params], budget=drafter.budget, fan_out=drafter.fan_out, statistics=drafter.statistics
        )
        beside(in_part=runner.part_of(branches.shape) is not None)
        runner.branch(branches, k, overlap=drafter.overlap)

    runs = (verify, lambda: runner.write([SLOT], [params], k, k + 1), prepare, lambda: prepare(verify))
    return [milliseconds(run) for run in runs]


def main() -> None:
    args = arguments()
    table = Table("K", "verify", "draft", "prepare", "prepare beside verify", "one after the other")
    table.title = f"{args.target} + {args.draft}, {args.width} branches, ms"
    speculation = {"mode": "ssd", "draft": args.draft, "k": max(args.k), "budget": args.width}
    if args.device == "cpu":
        speculation["placement"] = "inline"
    options = {"max_model_len": LONGEST, "max_num_seqs": 2, "num_kv_blocks": 130}
    with LLM(args.target, device=args.device, **options, speculation=speculation) as llm:
        for k in args.k:
            figures = llm.driver.call(lambda engine, k=k: timings(engine, engine.round.drafter, k, args.temperature))
            table.add_row(str(k), *(f"{f:.2f}" for f in figures), f"{figures[0] + figures[2]:.2f}")
        Console(width=120).print(table)
        Console().print(llm.note)
    record(args.json, rows_of(table), [str(table.title)])


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="graft:tiny-qwen3@qwen3-32b")
    parser.add_argument("--draft", default="graft:tiny-qwen3-draft@qwen3-0.6b")
    parser.add_argument("--device", default="cuda", help="cuda, or cpu, where nothing is hidden")
    parser.add_argument("--k", nargs="+", type=int, default=[3, 4, 5, 6])
    parser.add_argument("--width", type=int, default=16)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--json", type=Path, help=HELP)
    return parser.parse_args()


if __name__ == "__main__":
    main()
