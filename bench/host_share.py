"""The host's share of a decoding round: time of the engine's round against the model's CUDA graph alone.

python bench/host_share.py                                  # 8B shape, batches of 1, 16, 64 and 256, needs a GPU
python bench/host_share.py --model graft:tiny-llama@llama-3.2-1b --batches 1 8

`model`: replay of the forward pass's graph. `decided`: the same with the graph that samples and accepts. `round`: time
from one committed round of the engine to the next. All at about the same context length.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from ssd import LLM, SamplingParams
from ssd.bench.record import HELP, record, rows_of
from ssd.engine.engine import Engine
from ssd.execution.target import Target
from ssd.sampling.sampler import Needs

SAMPLING: dict[str, dict[str, Any]] = {
    "T = 0": {},
    "T = 1": {"temperature": 1.0},
    "T = 1, top-p 0.9": {"temperature": 1.0, "top_p": 0.9},
}


def main() -> None:
    args = _arguments()
    columns = ("model ms", "decided ms", "round ms", "median ms", "slowest ms", "round / model", "round / decided")
    table = Table("batch", "sampling", *columns)
    options: dict[str, Any] = {"max_model_len": 1024, "max_num_seqs": max(args.batches), "prefix_caching": False}
    with LLM(args.model, device="cuda", **options) as llm:
        for batch in args.batches:
            round_seconds(llm, batch, args.context - args.tokens, SamplingParams(max_new_tokens=16), 8)  # warm-up
            for name, chosen in SAMPLING.items():
                params = SamplingParams(max_new_tokens=args.tokens, ignore_eos=True, seed=1, **chosen)
                times = round_seconds(llm, batch, args.context - args.tokens, params, args.rounds)
                measure = functools.partial(graph_seconds, batch=batch, needs=Needs.of([params]))
                model, decided = llm.driver.call(measure)
                seconds = statistics.fmean(times)
                shown = (model, decided, seconds, statistics.median(times), max(times))
                figures = [f"{1e3 * value:.3f}" for value in shown]
                table.add_row(str(batch), name, *figures, f"{seconds / model:.3f}", f"{seconds / decided:.3f}")
    Console(width=120).print(table)
    record(args.json, rows_of(table, names=2))


def round_seconds(llm: LLM, batch: int, prompt: int, params: SamplingParams, rounds: int) -> list[float]:
    """Seconds of each of `rounds` rounds in which the whole batch decodes, after the last prefill."""
    generator = torch.Generator().manual_seed(batch)
    prompts = torch.randint(10, 2000, (batch, prompt), generator=generator).tolist()
    outputs = llm.generate(prompts, params)
    last = max(outputs, key=lambda output: output.metrics.first_token or 0.0)  # the last to begin decoding
    times = [when for when, _ in last.metrics.deliveries][4 : 5 + rounds]
    return [b - a for a, b in itertools.pairwise(times)]


def graph_seconds(engine: Engine, *, batch: int, needs: Needs) -> tuple[float, float]:
    """Seconds of the model's graph, and of it with the decision's graph, for the last batch."""
    target = engine.round.target
    if not isinstance(target, Target) or target.runner.graphs is None:
        raise SystemExit("there are no CUDA graphs to compare with")
    graph = target.runner.graphs.of(batch)
    return _timed(graph.graph.replay), _timed(lambda: (graph.graph.replay(), target.replay_decision(graph, needs)))


def _timed(run: Callable[[], object], repeats: int = 40) -> float:
    """Mean time of consecutive replays (a busy GPU has lower clocks)."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    run()
    begin.record()
    for _ in range(repeats):
        run()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1e3 / repeats


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="graft:tiny-llama@llama-3.1-8b")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 16, 64, 256])
    parser.add_argument("--context", type=int, default=300, help="tokens of a sequence at the end")
    parser.add_argument("--max-tokens", dest="tokens", type=int, default=100, help="generated tokens of a sequence")
    parser.add_argument("--rounds", type=int, default=64, help="rounds that are timed")
    parser.add_argument("--json", type=Path, help=HELP)
    return parser.parse_args()


if __name__ == "__main__":
    main()
