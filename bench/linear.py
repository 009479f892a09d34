"""How fast are the products of a model's layers? Our kernel, torch's, and what the engine uses, for several rows.

    python bench/linear.py                                                # the CPU, SmolLM2-135M's products
    python bench/linear.py --device cuda --shape llama-3.1-8b qwen3-0.6b  # one GPU, bfloat16
    python bench/linear.py --rows 1 8 32 128
    python bench/linear.py --device cuda --shape llama-3.1-70b --quantization fp8 int4 --rows 1 8 32
    python bench/linear.py --device cuda --quantization q4_k q6_k q8_0 awq fp8_block --rows 1 8 32 64 256 4096

Ours and what is used (on a GPU ours or cuBLASLt's, whichever was measured to be faster) are row-invariant, torch's need
not be. The gate/up product includes its activation, except for torch's. The last columns are weights read per second
and operations per second of what is used. Each product runs over so many copies of its weight that no cache holds them
all; on a GPU in one CUDA graph: launches do not count. With --quantization: the layers' weights in these formats (those
of float weights that are rounded, or random codes as published files have them); `layer` is all products of a layer in
their order, `floor` the bytes of the prepared weights over the memory's bandwidth, and `bf16` the time of the widened
weights over theirs. Rows are rounded where the format says so.
"""

from __future__ import annotations

import argparse
import functools
import statistics
from collections.abc import Callable, Iterator
from dataclasses import is_dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple, cast, get_args

import torch

from ssd.bench.floor import bandwidth, device_seconds, host_seconds
from ssd.bench.record import HELP, Rows, record
from ssd.grafts.shapes import SHAPES
from ssd.kernels.codes import Codes, CodeType, Factors, Format, bits_of, dequantize, quantize
from ssd.kernels.device import kernels
from ssd.kernels.weights import RowRounding, Weight
from ssd.models.config import DecoderConfig

_BYTES = {"cpu": 128 << 20, "cuda": 1 << 30}  # of all copies of a weight
Product = Callable[[torch.Tensor, Any], object]


def main() -> None:
    args = _arguments()
    device = torch.device(args.device)
    found: Rows = {}
    for name in args.shape or ["llama-3.1-8b" if device.type == "cuda" else "smollm2-135m"]:
        for form in args.quantization or ():
            found |= bench_format(name, form, args.rows, device)
        if not args.quantization:
            found |= bench(name, args.rows, device)
    record(args.json, found)


@torch.inference_mode()
def bench(shape: str, row_counts: list[int], device: torch.device) -> Rows:
    found: Rows = {}
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    ops = kernels(device).ops()
    titles = f"{'product':<10} {'columns':>8} {'depth':>6} {'rows':>5} {'ours, us':>9} {'torch, us':>9}"
    print(f"{shape}\n{titles} {'used, us':>9} {'used':>7} {'GB/s':>6} {'TFLOP/s':>8}")
    for name, columns, depth in products(SHAPES[shape]):
        gated = name == "gate/up"
        size = columns * depth * dtype.itemsize
        weights = [torch.randn(columns, depth, device=device, dtype=dtype) for _ in range(copies(size, device))]
        prepared = [ops.prepare(weight, gated=gated) for weight in weights]
        for rows in row_counts:
            x = torch.randn(rows, depth, device=device, dtype=dtype)
            runs = ((own(gated=gated), prepared), (torch.nn.functional.linear, weights), (multiplied, prepared))
            timed = [seconds(functools.partial(over, product, x, of), device) / len(weights) for product, of in runs]
            times = " ".join(f"{1e6 * each:>9.1f}" for each in timed)
            rates = f"{size / timed[2] / 1e9:>6.0f} {2 * rows * columns * depth / timed[2] / 1e12:>8.2f}"
            kernel = used_kernel(x, prepared[0], gated=gated)
            print(f"{name:<10} {columns:>8} {depth:>6} {rows:>5} {times} {kernel:>7} {rates}", flush=True)
            figures = dict(zip(("ours, us", "torch, us", "used, us"), (round(1e6 * t, 1) for t in timed), strict=True))
            found[f"{shape}, {name}, rows {rows}"] = {**figures, "used, GB/s": round(size / timed[2] / 1e9)}
    return found


class Published(NamedTuple):
    """Codes as published files have them."""

    kind: CodeType
    group: int
    numbers: str = "half"  # "half" or "factors" (K types); "zeros": with a zero point; "single": float32
    offsets: bool = False
    rows: RowRounding | None = None

    def codes(self, columns: int, depth: int, device: torch.device) -> Codes:
        """Random ones, of weights whose products have a deviation of about 1."""
        bits, groups = bits_of(self.kind), depth // self.group
        values = torch.randint(0, 1 << bits, (columns, depth), dtype=torch.uint8, device=device)
        if self.kind == "fp8":
            values[values & 0x7F == 0x7F] = 0  # not a number
        size = depth**-0.5 / (100 if self.kind == "fp8" else 2 ** (bits - 2))
        scales = (torch.rand(columns, groups, device=device) + 0.5) * size
        scales = scales if self.numbers == "single" else scales.half().float()
        offsets = -8 * scales if self.offsets else None
        if self.numbers == "zeros":
            offsets = scales * torch.randint(-2, 3, scales.shape, device=device)
        if self.numbers != "factors":
            return Codes(values, scales, self.kind, depth, offsets)
        if depth % 256:
            raise SystemExit(f"--quantization: K types have blocks of 256 weights, which do not divide {depth}")
        count = 2 if self.offsets else 1
        integers = torch.randint(16, 64, (count, columns, groups), dtype=torch.int8, device=device)
        units = torch.full((count, columns, depth // 256), size / 40, device=device).half()
        units[1:] *= -8
        scales, *others = units.float().repeat_interleave(256 // self.group, 2) * integers.float()
        factors = Factors(integers, units)
        return Codes(values, scales, self.kind, depth, others[0] if others else None, factors)


PUBLISHED: Final = {
    "q4_0": Published("int4", 32),
    "q4_1": Published("uint4", 32, offsets=True),
    "q4_k": Published("uint4", 32, "factors", offsets=True),
    "q5_k": Published("int8", 32, "factors", offsets=True),
    "q6_k": Published("int8", 16, "factors"),
    "q8_0": Published("int8", 32),
    "awq": Published("int4", 128, "zeros"),
    "gptq": Published("int4", 128),
    "fp8_block": Published("fp8", 128, "single", rows=RowRounding(group=128)),
}


@torch.inference_mode()
def bench_format(shape: str, form: str, row_counts: list[int], device: torch.device) -> Rows:
    """Products with quantised weights as a target multiplies them, beside those of the widened ones."""
    found: Rows = {}
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    ops = kernels(device).ops()
    ops.wide_bytes = 1 << 40  # as in an engine whose weights take less than half of the memory
    speed = bandwidth(device)
    titles = f"{'product':<10} {'columns':>8} {'depth':>6} {'rows':>5} {'us':>9} {'GB/s':>6} {'floor':>6} {'bf16':>6}"
    print(f"{shape} in {form}, memory at {speed / 1e9:.0f} GB/s\n{titles}")
    packed: list[list[Weight]] = []  # copies of each product's weight
    dense: list[list[Weight]] = []
    for name, columns, depth in products(SHAPES[shape]):
        if name == "head":
            continue
        gated = name == "gate/up"
        if form in PUBLISHED:
            codes, how = PUBLISHED[form].codes(columns, depth, device), PUBLISHED[form].rows
        else:
            codes, how = quantize(torch.randn(columns, depth, device=device, dtype=dtype), cast(Format, form)), None
        first = ops.prepare_codes(codes, dtype, gated=gated, rows=how)
        size = stored_bytes(first)
        count = copies(size, device)
        packed.append([first, *(ops.prepare_codes(codes, dtype, gated=gated, rows=how) for _ in range(count - 1))])
        dense.append([ops.prepare(dequantize(codes, dtype), gated=gated) for _ in range(max(2, count // 3))])
        for rows in row_counts:
            x = torch.randn(rows, depth, device=device, dtype=dtype)
            took, wide = (
                seconds(functools.partial(over, multiplied, x, each[-1]), device) / len(each[-1])
                for each in (packed, dense)
            )
            found[f"{shape} in {form}, {name}, rows {rows}"] = shown(
                name, columns, depth, rows, size, speed, took, wide
            )
    depths = [depth for name, _, depth in products(SHAPES[shape]) if name != "head"]
    total = sum(stored_bytes(of[0]) for of in packed)
    for rows in row_counts:
        xs = [torch.randn(rows, depth, device=device, dtype=dtype) for depth in depths]
        layers = [list(zip(*each, strict=False)) for each in (packed, dense)]
        took, wide = (seconds(functools.partial(over, layer, xs, each), device) / len(each) for each in layers)
        found[f"{shape} in {form}, layer, rows {rows}"] = shown("layer", "", "", rows, total, speed, took, wide)
    return found


def layer(xs: list[torch.Tensor], weights: tuple[Weight, ...]) -> None:
    """The products of one layer."""
    for x, weight in zip(xs, weights, strict=True):
        weight.linear(x)


def shown(
    name: str, columns: int | str, depth: int | str, rows: int, size: int, speed: float, took: float, wide: float
) -> dict[str, float]:
    floor, gain = size / took / speed, wide / took
    rates = f"{1e6 * took:>9.1f} {size / took / 1e9:>6.0f} {floor:>6.2f} {gain:>6.2f}"
    print(f"{name:<10} {columns:>8} {depth:>6} {rows:>5} {rates}", flush=True)
    return {"us": round(1e6 * took, 1), "of the floor": round(floor, 2), "of bf16": round(gain, 2)}


def stored_bytes(weight: Weight) -> int:
    """Of all tensors of a prepared weight that products of few rows read."""

    def tensors(of: object) -> Iterator[torch.Tensor]:
        if isinstance(of, torch.Tensor):
            yield of
        parts = {name: each for name, each in vars(of).items() if name != "wide"} if is_dataclass(of) else {}
        for each in of if isinstance(of, tuple) else parts.values():
            yield from tensors(each)

    return sum(each.nbytes for each in tensors(weight))


def own(*, gated: bool) -> Product:
    """Our kernel."""

    def product(x: torch.Tensor, weight: Weight) -> torch.Tensor:
        if not x.is_cuda:
            return weight.linear(x)
        from ssd.kernels.triton import linear

        assert weight.dense is not None
        return linear.linear(x, weight.dense, gated=gated)

    return product


def multiplied(x: torch.Tensor, weight: Weight, *, float32: bool = False) -> torch.Tensor:
    """As the engine does it."""
    return weight.linear(x, float32=float32)


def used_kernel(x: torch.Tensor, weight: Weight, *, gated: bool) -> str:
    """Whose kernel the engine uses."""
    if not x.is_cuda:
        return "ours"
    from ssd.kernels.cuda import cublaslt

    assert weight.dense is not None
    library = cublaslt.load()
    found = None if library is None else library.linear(x, weight.dense, None, x.dtype, gated=gated)
    return "ours" if found is None else "library"


def products(shape: DecoderConfig) -> list[tuple[str, int, int]]:
    """Name, columns and depth of every product of a layer, and of the head."""
    attention = shape.attention
    heads, kv_heads = attention.num_heads * attention.head_dim, attention.num_kv_heads * attention.head_dim
    return [
        ("qkv", heads + 2 * kv_heads, shape.hidden_size),
        ("output", shape.hidden_size, heads),
        ("gate/up", 2 * shape.mlp.intermediate_size, shape.hidden_size),
        ("down", shape.hidden_size, shape.mlp.intermediate_size),
        ("head", shape.vocab_size, shape.hidden_size),
    ]


def copies(size: int, device: torch.device) -> int:
    return max(2, min(32, _BYTES[device.type] // size))


def over(product: Callable[[Any, Any], object], x: object, weights: list[Any]) -> None:
    for weight in weights:
        product(x, weight)


def seconds(work: Callable[[], None], device: torch.device, repeats: int = 7) -> float:
    """Median of some runs, after one that does not count."""
    work()
    if device.type == "cpu":
        return statistics.median(host_seconds(work) for _ in range(repeats))
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    graph.replay()
    return statistics.median(device_seconds(graph.replay) for _ in range(repeats))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--shape", choices=sorted(SHAPES), nargs="+", help="whose products")
    parser.add_argument(
        "--quantization", choices=[*get_args(Format), *PUBLISHED], nargs="+", help="formats of the layers' weights"
    )
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 16, 32, 64, 128, 512])
    parser.add_argument("--json", type=Path, help=HELP)
    return parser.parse_args()


if __name__ == "__main__":
    main()
