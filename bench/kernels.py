"""What does each product kernel of a GPU gain over the next more general one? Times of a layer's four products.

    python bench/kernels.py                             # those of Llama-3.1-8B
    python bench/kernels.py --json bench/results/kernels.json

Each kernel is timed on the same weights and rows, in one CUDA graph over more copies of a weight than the GPU's cache
holds. `general` is the next kernel that would multiply if the one of the row did not exist.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from unittest import mock

import torch
from linear import copies, multiplied, over, products, seconds  # bench/linear.py

from ssd.bench.record import HELP, Rows, record
from ssd.grafts.shapes import SHAPES
from ssd.kernels.codes import Codes, quantize
from ssd.kernels.cuda import cublaslt, few_rows, fp8_linear, grouped_rows
from ssd.kernels.triton import codes_linear
from ssd.kernels.triton.ops import TritonOps
from ssd.kernels.weights import RowRounding, Weight

CUDA = torch.device("cuda")
NARROW = [("qkv", 5120, 2048), ("output", 2048, 4096)]  # attention of Qwen3-30B-A3B
Prepare = Callable[[TritonOps, torch.Tensor, bool], Weight]


def dense(ops: TritonOps, weight: torch.Tensor, gated: bool) -> Weight:
    return ops.prepare(weight, gated=gated)


def coded(form: str, rows: RowRounding | None = None) -> Prepare:
    def prepare(ops: TritonOps, weight: torch.Tensor, gated: bool) -> Weight:
        codes: Codes = quantize(weight, form)  # type: ignore[arg-type]
        return ops.prepare_codes(codes, torch.bfloat16, gated=gated, rows=rows)

    return prepare


def without(module: object, name: str, value: object) -> Callable[[], mock._patch[object]]:
    """Takes a kernel away."""
    return functools.partial(mock.patch.object, module, name, value)


no_library = without(cublaslt, "load", lambda: None)
no_few_rows = without(few_rows, "takes", lambda *_: False)
no_grouped_rows = without(grouped_rows, "supports", lambda *_: False)
no_wide = without(codes_linear, "is_wide", lambda *_: False)
no_ahead = without(few_rows, "ahead_of", lambda *_: 0)
no_fp8_rows = without(fp8_linear, "_kernels", lambda _: {})
no_fp8 = without(fp8_linear, "takes", lambda *_: False)
E4M3 = RowRounding()
# name: how weights are prepared, rows, what is taken away for the more general one while preparing and multiplying
CASES: dict[str, tuple[Prepare, tuple[int, ...], tuple[Callable[[], mock._patch[object]], ...]]] = {
    "cuBLASLt / Triton, bfloat16": (dense, (1, 16, 64, 256, 4096), (no_library,)),
    "few_rows.cu / Triton, fp8": (coded("fp8"), (1, 8, 32, 64, 128), (no_few_rows,)),
    "few_rows.cu / Triton, int8": (coded("int8"), (1, 8, 32, 64, 128), (no_few_rows,)),
    "grouped_rows.cu / Triton, int4": (coded("int4"), (1, 8, 32, 64, 256, 4096), (no_grouped_rows,)),
    "AHEAD / without, fp8": (coded("fp8"), (1, 8, 16), (no_ahead,)),
    "wide_linear / Triton, fp8": (coded("fp8"), (512, 4096), (no_wide,)),
    "fp8_rows.cu / library, e4m3 rows": (coded("fp8", E4M3), (1, 8, 32, 64), (no_fp8_rows,)),
    "library / widened codes, e4m3 rows": (coded("fp8", E4M3), (128, 512, 4096), (no_fp8,)),
}


@contextmanager
def taken_away(kernels: tuple[Callable[[], mock._patch[object]], ...]) -> Iterator[None]:
    with ExitStack() as stack:
        for each in kernels:
            stack.enter_context(each())
        yield


def main() -> None:
    args = _arguments()
    found: Rows = {}
    shapes = {"qwen3-30b-a3b": NARROW} | {
        name: [each for each in products(SHAPES[name]) if each[0] != "head"] for name in args.shape
    }
    print(f"{'kernel / more general one':<36} {'rows':>5} {'us':>8} {'general':>8} {'gain':>5}")
    for shape, sizes in shapes.items():
        print(shape)
        for name, (prepare, row_counts, kernels) in CASES.items():
            for rows, (own, general) in timed(sizes, prepare, row_counts, kernels).items():
                print(f"{name:<36} {rows:>5} {1e6 * own:>8.1f} {1e6 * general:>8.1f} {general / own:>5.2f}", flush=True)
                found.setdefault(f"{shape}, rows {rows}", {})[name] = round(general / own, 2)
    record(args.json, found)


@torch.inference_mode()
def timed(
    sizes: list[tuple[str, int, int]],
    prepare: Prepare,
    row_counts: tuple[int, ...],
    kernels: tuple[Callable[[], mock._patch[object]], ...],
) -> dict[int, tuple[float, float]]:
    """Seconds of all products by rows, with the kernel and without it."""
    ops, total = TritonOps(), {rows: [0.0, 0.0] for rows in row_counts}
    ops.wide_bytes = 1 << 40  # see bench/linear.py
    for name, columns, depth in sizes:
        weight = torch.randn(columns, depth, device=CUDA).mul_(depth**-0.5).bfloat16()
        for i, absent in enumerate(((), kernels)):
            with taken_away(absent):
                prepared = [prepare(ops, weight, name == "gate/up") for _ in range(copies(weight.nbytes // 2, CUDA))]
                for rows in row_counts:
                    x = torch.randn(rows, depth, device=CUDA).bfloat16()
                    work = functools.partial(over, multiplied, x, prepared)
                    total[rows][i] += seconds(work, CUDA) / len(prepared)
    return {rows: (own, general) for rows, (own, general) in total.items()}


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=sorted(SHAPES), nargs="*", default=["llama-3.1-8b"], help="whose products")
    parser.add_argument("--json", type=Path, help=HELP)
    return parser.parse_args()


if __name__ == "__main__":
    main()
