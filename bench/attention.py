"""Speed of the attention kernels over paged KV.

python bench/attention.py                            # heads of Llama-3.1-8B, needs a GPU
python bench/attention.py --heads 16 8 128           # query heads, KV heads, head dimension
python bench/attention.py --kv-cache-dtype fp8

Decoding and verification: microseconds per layer, and bytes of KV read per second beside a copy's. Prefill: matrix
operations per second. The KV of all layers together is larger than the GPU's cache.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import math
import statistics
from collections.abc import Callable
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from ssd.bench.floor import bandwidth
from ssd.bench.record import HELP, record, rows_of
from ssd.kernels.ops import DeviceBatch, HeadShape
from ssd.kernels.triton.ops import TritonOps

BLOCK_SIZE = 64
_BYTES = 400 << 20  # of KV, larger than the cache
DECODE = [(1, 1, 300), (1, 1, 4096), (1, 1, 16384), (1, 4, 300), (8, 1, 16384), (16, 1, 300), (16, 1, 4096)]
DECODE += [(16, 4, 300), (64, 1, 300), (64, 4, 300), (64, 1, 4096), (256, 1, 300), (256, 1, 2048)]
PREFILL = [(1, 512, 512), (1, 2048, 2048), (1, 2048, 4096), (1, 4096, 4096), (4, 2048, 2048), (1, 2048, 16384)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--heads", nargs=3, type=int, default=[32, 8, 128], metavar=("Q", "KV", "DIM"))
    parser.add_argument("--kv-cache-dtype", choices=["auto", "fp8"], default="auto", help="auto: bfloat16")
    parser.add_argument("--json", type=Path, help=HELP)
    args = parser.parse_args()
    heads, stored = HeadShape(*args.heads), torch.float8_e4m3fn if args.kv_cache_dtype == "fp8" else torch.bfloat16
    if not torch.cuda.is_available():
        raise SystemExit("bench/attention.py needs a CUDA device")
    copy = bandwidth(torch.device("cuda"))
    console = Console(width=120)
    table = Table("sequences", "queries each", "context", "µs", "KV TB/s", f"of a copy ({copy / 1e12:.2f})")
    for sequences, queries, context in DECODE:
        seconds = attention_seconds(heads, stored, sequences, queries, context, prefill=False)
        rate = sequences * context * heads.num_kv_heads * heads.head_dim * 2 * stored.itemsize / seconds
        table.add_row(*map(str, (sequences, queries, context)), *figures(seconds, rate / 1e12, rate / copy))
    console.print(table)
    rows = rows_of(table, names=3, prefix="decoding, ")
    table = Table("sequences", "queries each", "context", "µs", "TFLOP/s")
    for sequences, queries, context in PREFILL:
        seconds = attention_seconds(heads, stored, sequences, queries, context, prefill=True)
        seen = sequences * queries * (context - queries / 2)
        operations = 4 * heads.num_heads * heads.head_dim * seen
        table.add_row(*map(str, (sequences, queries, context)), *figures(seconds, operations / seconds / 1e12))
    console.print(table)
    record(args.json, rows | rows_of(table, names=3, prefix="prefill, "))


def figures(seconds: float, *rates: float) -> list[str]:
    return [f"{1e6 * seconds:.1f}", *(f"{rate:.2f}" for rate in rates)]


def attention_seconds(
    heads: HeadShape, stored: torch.dtype, sequences: int, queries: int, context: int, *, prefill: bool
) -> float:
    """Seconds of one layer's attention, where all sequences have the same context. `stored`: type of the KV."""
    device = torch.device("cuda")
    ops = TritonOps()
    ops.reserve([heads], device)
    batch = make_batch(ops, heads, sequences, queries, context, prefill, device)
    blocks = batch.block_tables.numel()
    shape = (blocks, BLOCK_SIZE, heads.num_kv_heads, heads.head_dim)
    layers = max(2, min(32, -(-_BYTES // (2 * math.prod(shape) * stored.itemsize))))
    caches = [torch.randn((2, *shape), dtype=torch.bfloat16, device=device).to(stored) for _ in range(layers)]
    q = torch.randn((sequences * queries, heads.num_heads, heads.head_dim), dtype=torch.bfloat16, device=device)

    def run() -> None:
        own = dataclasses.replace(batch)  # a new forward pass
        for k, v in caches:
            ops.attention(q, own, heads, k, v)

    return replay_seconds(run) / layers


def make_batch(
    ops: TritonOps, heads: HeadShape, sequences: int, queries: int, context: int, prefill: bool, device: torch.device
) -> DeviceBatch:
    """Sequences of equal length over shuffled blocks."""

    def ints(values: object) -> torch.Tensor:
        return torch.as_tensor(values, dtype=torch.int32).to(device)

    each = -(-context // BLOCK_SIZE)
    tables = torch.randperm(sequences * each).view(sequences, each)
    positions = torch.arange(context - queries, context).repeat(sequences)
    row = torch.arange(sequences).repeat_interleave(queries)
    size = ops.tile_tokens([heads], prefill=prefill)
    tiles = ints(list(itertools.product(range(sequences), range(0, queries, size)))).t().contiguous()
    return DeviceBatch(
        token_ids=torch.zeros_like(ints(positions)),
        positions=ints(positions),
        slot_mapping=ints(tables[row, positions // BLOCK_SIZE] * BLOCK_SIZE + positions % BLOCK_SIZE),
        query_start=ints(range(0, sequences * queries + 1, queries)),
        context_len=ints([context] * sequences),
        block_tables=ints(tables),
        table_rows=ints(range(sequences)),
        tiles=tiles[:, :0] if prefill else tiles,
        prefill_tiles=tiles if prefill else None,
        logit_rows=None,
    )


def replay_seconds(run: Callable[[], object], repeats: int = 7) -> float:
    """Median time of a CUDA graph of what `run` launches."""
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    times = []
    for _ in range(repeats + 2):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / 1e3)
    return statistics.median(times[2:])


if __name__ == "__main__":
    main()
