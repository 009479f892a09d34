"""Milliseconds of a step of a draft model or an EAGLE head: one row, and 8 and 16 branches of one sequence.

    python bench/draft.py                                      # shapes of Llama-3.2-1B and Qwen3-0.6B
    python bench/draft.py --shape qwen3-0.6b --quantization int8
    python bench/draft.py --eagle llama-3.1-8b                 # the head of a target of this shape
    python bench/draft.py --device cpu --shape qwen3-0.6b --quantization int4 --context 256 --threads 16

A step is one forward pass as a CUDA graph, without sampling, with random weights, at a context of 512 tokens. On a CPU
it is what the engine repeats from its recordings; `sampled`: with the choice of the next token of each row, at T = 1.
`kernels`: one kernel per operation. `one kernel`: `ssd.kernels.cuda.persistent`. The floor is the weights' bytes over
the bandwidth of a large copy. A head reads hidden states beside the tokens; `fc`, which makes them of the target's, is
a part of the target's forward pass.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import math
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import get_args

import torch
from random_weights import RandomCheckpoint
from rich.console import Console
from rich.table import Table

from ssd.bench.floor import bandwidth, device_seconds
from ssd.bench.record import HELP, record, rows_of
from ssd.core import SamplingParams
from ssd.execution.graphs import capture
from ssd.grafts.graft import fill_random
from ssd.grafts.shapes import SHAPES
from ssd.kernels.codes import Format
from ssd.kernels.cpu.threads import set_threads
from ssd.kernels.device import kernels
from ssd.kernels.ops import Branches, DeviceBatch
from ssd.layers.formats.rounded import rounded
from ssd.layers.parameter import Build
from ssd.models.decoder import Decoder, KVCache
from ssd.models.eagle import EagleConfig, EagleHead
from ssd.models.persistent import persistent_step
from ssd.parallel.tensor import TensorParallel
from ssd.sampling.sampler import Needs, Rows, Sampler, SamplingColumns

CUDA, CPU = torch.device("cuda"), torch.device("cpu")
BLOCK, DEPTH, SLOTS = 64, 3, 8  # of a block, a branch; KV slots of a branch
DRAFT_VOCAB = 32_000


def main() -> None:
    args = arguments()
    if args.device == "cpu":
        return on_cpu(args)
    speed, at = bandwidth(CUDA), args.context
    table = Table("shape", "weights", "rows", "floor", "kernels", "one kernel", title="step of a draft, ms")
    for shape in args.eagle:
        head, kv = make_head(shape, at)
        floor = head_bytes(head.eagle) / speed
        for name, batch in batches_of(head, at).items():
            times = (1e3 * floor, milliseconds(functools.partial(head, batch, kv)))
            table.add_row(f"head of {shape}", "bfloat16", name, *(f"{x:.3f}" for x in times), "")
    for shape in args.shape if not args.eagle else ():
        for form in (None, *args.quantization):
            decoder, kv = make(shape, at, form)
            floor = decoder.num_bytes() / speed
            batches = batches_of(decoder, at)
            step = persistent_step(decoder, kv)
            for name, batch in batches.items():
                several = milliseconds(functools.partial(decoder, batch, kv))
                one = float("nan") if step is None else milliseconds(functools.partial(step, batch))
                table.add_row(shape, form or "bfloat16", name, *(f"{x:.3f}" for x in (1e3 * floor, several, one)))
            decoder = kv = step = batches = None  # type: ignore[assignment]
            torch.cuda.empty_cache()
    Console(width=120).print(table)
    record(args.json, rows_of(table, names=3), ["ms"])


def on_cpu(args: argparse.Namespace) -> None:
    set_threads(args.threads or torch.get_num_threads())
    columns = ("pass", "pass, best", "sampled", "sampled, best")
    table = Table("shape", "weights", "rows", *columns, title="step of a draft, ms")
    for shape, form in itertools.product(args.shape, args.quantization or [None]):
        decoder, kv = make(shape, args.context, form, CPU)
        columns = SamplingColumns(16, decoder.config.vocab_size, CPU)
        for slot in range(16):
            columns.set(slot, SamplingParams(temperature=1.0), slot, [], [], [])
        sampler = Sampler(columns)
        for name, batch in batches_of(decoder, args.context).items():
            step = functools.partial(decoder, batch, kv)
            rows = Rows(torch.arange(len(batch.token_ids), dtype=torch.int32), batch.positions)
            times = (*seconds(step), *seconds(functools.partial(choose, step, sampler, rows)))
            table.add_row(shape, form or "bfloat16", name, *(f"{1e3 * x:.2f}" for x in times))
    Console(width=120).print(table)
    record(args.json, rows_of(table, names=3), ["ms"])


def choose(step: Callable[[], torch.Tensor], sampler: Sampler, rows: Rows) -> None:
    sampler.choose(step(), rows, Needs())


@torch.inference_mode()
def seconds(step: Callable[[], object], turns: int = 60) -> tuple[float, float]:
    """Median and least."""
    times = []
    for _ in range(turns):
        began = time.perf_counter()
        step()
        times.append(time.perf_counter() - began)
    return statistics.median(times), min(times)


def make(
    shape: str,
    context: int,
    form: Format | None = None,
    device: torch.device = CUDA,
    tp: TensorParallel = TensorParallel(),  # noqa: B008
) -> tuple[Decoder, KVCache]:
    config, ops = SHAPES[shape], kernels(device).ops()
    build = Build(ops, device, torch.bfloat16, tp, rounded(form))
    decoder = Decoder(config, build, max_positions=2 * context)
    decoder.load(RandomCheckpoint(config).weights(device, torch.bfloat16))
    ops.reserve(decoder.heads, device)
    return decoder, decoder.make_kv_cache(2 * context // BLOCK, BLOCK)


def make_head(shape: str, context: int) -> tuple[EagleHead, KVCache]:
    """With random weights, and as many draft tokens as published heads have."""
    target, ops = SHAPES[shape], kernels(CUDA).ops()
    fields = vars(target.with_layers(1, first_position=1)) | {"family": "eagle3", "tie_embeddings": False}
    sizes = {"draft_vocab_size": DRAFT_VOCAB, "target_hidden_size": target.hidden_size}
    config = EagleConfig(**fields, **sizes, own_embedding=True).for_target(target)
    head = EagleHead(config, Build(ops, CUDA, torch.bfloat16), max_positions=2 * context)
    head.load(
        (name, fill_random(torch.empty(size, dtype=torch.bfloat16, device=CUDA), name))
        for name, size in config.shapes().items()
    )
    head.map_tokens(torch.arange(DRAFT_VOCAB))
    head.hidden = torch.zeros((16, config.hidden_size), dtype=torch.bfloat16, device=CUDA)
    ops.reserve(head.heads, CUDA)
    return head, head.make_kv_cache(2 * context // BLOCK, BLOCK)


def head_bytes(config: EagleConfig) -> int:
    """Bytes of the weights that a step reads, in bfloat16."""
    unread = ("fc.weight", "embed_tokens.weight")
    return sum(2 * math.prod(shape) for name, shape in config.shapes().items() if name not in unread)


def batches_of(decoder: Decoder, context: int) -> dict[str, DeviceBatch]:
    branches = {f"{count} branches": newest(decoder, context, count, Branches(DEPTH, SLOTS)) for count in (8, 16)}
    return {"1": newest(decoder, context, 1, None), **branches}


def newest(decoder: Decoder, context: int, count: int, branches: Branches | None) -> DeviceBatch:
    """The newest tokens of one sequence; branches have their KV in the second half of the cache."""
    tile = decoder.ops.tile_tokens(decoder.heads, False)

    def ints(*values: int) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=decoder.device)

    if branches is None:
        slots = positions = list(range(context - count, context))
    else:
        slots = [context + branches.depth + row * SLOTS for row in range(count)]
        positions = [context + branches.depth] * count
    starts = range(0, count, tile)
    return DeviceBatch(
        token_ids=ints(*range(1, count + 1)),
        positions=ints(*positions),
        slot_mapping=ints(*slots),
        query_start=ints(0, count),
        context_len=ints(context),
        block_tables=ints(*range(context // BLOCK))[None],
        table_rows=ints(0),
        tiles=torch.stack((ints(*(0 for _ in starts)), ints(*starts))),
        prefill_tiles=None,
        logit_rows=None,
        branches=branches,
    )


@torch.inference_mode()
def milliseconds(step: Callable[[], object]) -> float:
    step()  # kernels are compiled
    graph, _ = capture(step, None)
    return 1e3 * statistics.median(device_seconds(graph.replay) for _ in range(50))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--context", type=int, default=512, help=f"tokens of the sequence, a multiple of {BLOCK}")
    parser.add_argument("--threads", type=int, help="on a CPU; default: torch's number")
    parser.add_argument("--shape", nargs="+", choices=sorted(SHAPES), default=["llama-3.2-1b", "qwen3-0.6b"])
    parser.add_argument("--eagle", nargs="+", choices=sorted(SHAPES), default=[], help="heads instead of models")
    parser.add_argument("--quantization", nargs="+", choices=get_args(Format), default=[])
    parser.add_argument("--json", type=Path, help=HELP)
    return parser.parse_args()


if __name__ == "__main__":
    main()
