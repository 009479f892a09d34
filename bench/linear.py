"""How fast are the products of a model's layers? Against torch's own, for several numbers of rows.

    python bench/linear.py                                     # the CPU, SmolLM2-135M's products
    python bench/linear.py --device cuda --shape llama-3.1-8b  # one GPU, bfloat16
    python bench/linear.py --rows 1 8 32 128

Ours are row-invariant, torch's need not be: the last column is what that costs (above 1) or gains. Each product runs
over so many copies of its weight that no cache holds them all; on a GPU in one CUDA graph: launches do not count.
"""

from __future__ import annotations

import argparse
import functools
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from decode import device_seconds

from ssd.assembly.device import make_ops
from ssd.kernels.ops import Ops
from ssd.models.config import DecoderConfig
from ssd.models.shapes import SHAPES

_BYTES = {"cpu": 128 << 20, "cuda": 1 << 30}  # of all copies of a weight


def main() -> None:
    args = _arguments()
    device = torch.device(args.device)
    shape = SHAPES[args.shape or ("llama-3.1-8b" if device.type == "cuda" else "smollm2-135m")]
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    ops = make_ops(device)
    print(f"{'product':<10} {'columns':>8} {'depth':>6} {'rows':>5} {'ours, us':>9} {'torch, us':>9} {'of torch':>8}")
    for name, columns, depth in products(shape):
        size = columns * depth * dtype.itemsize
        weights = [torch.randn(columns, depth, device=device, dtype=dtype) for _ in range(copies(size, device))]
        prepared = [ops.prepare(weight) for weight in weights]
        for rows in args.rows:
            x = torch.randn(rows, depth, device=device, dtype=dtype)
            ours = seconds(functools.partial(_ours, ops, x, prepared), device) / len(weights)
            theirs = seconds(functools.partial(_torchs, x, weights), device) / len(weights)
            figures = f"{1e6 * ours:>9.1f} {1e6 * theirs:>9.1f} {ours / theirs:>8.2f}"
            print(f"{name:<10} {columns:>8} {depth:>6} {rows:>5} {figures}", flush=True)


def products(shape: DecoderConfig) -> list[tuple[str, int, int]]:
    """Name, columns and depth of every product of a layer, and of the head."""
    heads, kv_heads = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    return [
        ("qkv", heads + 2 * kv_heads, shape.hidden_size),
        ("output", shape.hidden_size, heads),
        ("gate/up", 2 * shape.intermediate_size, shape.hidden_size),
        ("down", shape.hidden_size, shape.intermediate_size),
        ("head", shape.vocab_size, shape.hidden_size),
    ]


def copies(size: int, device: torch.device) -> int:
    return max(2, min(32, _BYTES[device.type] // size))


def _ours(ops: Ops, x: torch.Tensor, weights: list[Any]) -> None:
    for weight in weights:
        ops.linear(x, weight)


def _torchs(x: torch.Tensor, weights: list[torch.Tensor]) -> None:
    for weight in weights:
        torch.nn.functional.linear(x, weight)


@torch.inference_mode()
def seconds(work: Callable[[], None], device: torch.device, repeats: int = 7) -> float:
    """Median of some runs, after one that does not count."""
    work()
    if device.type == "cpu":
        return statistics.median(_clocked(work) for _ in range(repeats))
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    graph.replay()
    return statistics.median(device_seconds(graph.replay) for _ in range(repeats))


def _clocked(work: Callable[[], None]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--shape", choices=sorted(SHAPES), help="whose products")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 16, 32, 64, 128, 512])
    return parser.parse_args()


if __name__ == "__main__":
    main()
