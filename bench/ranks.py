"""What the sums of tensor parallelism cost: a decode step of one rank, without and with NCCL's calls. Needs a GPU.

    python bench/ranks.py                                      # the shape of Llama-3.1-8B
    python bench/ranks.py --shape llama-3.2-1b

A rank that is alone makes no calls. Here it makes all of them (gathers of the partial sums, of the embedding and of the
logits) in a group of one, inside of the CUDA graph: what remains on several GPUs when the time of the transfers is left
out. Random weights, a context of 512 tokens.
"""

from __future__ import annotations

import argparse
import functools
from pathlib import Path

from draft import CUDA, make, milliseconds, newest  # bench/draft.py
from rich.console import Console
from rich.table import Table

from ssd.bench.record import HELP, record, rows_of
from ssd.grafts.shapes import SHAPES
from ssd.parallel.group import listener, make_group
from ssd.parallel.tensor import TensorParallel

CONTEXT = 512  # tokens


def main() -> None:
    args = arguments()
    table = Table("rows", "alone", "with NCCL", "ratio", title=f"decode step of {args.shape}, ms")
    listening = listener()
    group = make_group(0, 1, CUDA, port=listening.getsockname()[1], listening=listening)
    found = [times(args, tp) for tp in (TensorParallel(), TensorParallel(0, 1, group))]
    for count, alone, together in zip(args.rows, *found, strict=True):
        table.add_row(str(count), f"{alone:.3f}", f"{together:.3f}", f"{together / alone:.3f}")
    Console().print(table)
    record(args.json, rows_of(table), [str(table.title)])
    group.abort()


def times(args: argparse.Namespace, tp: TensorParallel) -> list[float]:
    decoder, kv = make(args.shape, CONTEXT, tp=tp)
    batches = [newest(decoder, CONTEXT, count, None) for count in args.rows]
    return [milliseconds(functools.partial(decoder, batch, kv)) for batch in batches]


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=sorted(SHAPES), default="llama-3.1-8b")
    parser.add_argument("--rows", nargs="+", type=int, default=[1, 16, 64])
    parser.add_argument("--json", type=Path, help=HELP)
    return parser.parse_args()


if __name__ == "__main__":
    main()
