"""How fast is latent attention alone on a GPU? The time of a layer's attention, beside the bytes of its latents.

    python bench/latent.py                           # GLM-4.7-Flash's 20 heads
    python bench/latent.py --heads 128 --at 8x16384  # DeepSeek-V3's, 8 sequences of 16,384 tokens
    python bench/latent.py --prompt 4096 32768       # prompts, each in one chunk, beside the expanded form

Layers follow each other in one CUDA graph, with so many caches that the L2 holds no two of them. `floor` is the time of
reading a layer's latents once, at the memory's bandwidth, as a part of the time.

A prompt's time includes the products of heads with queries and with weighted latents. The expanded form makes keys and
values of every head from the latents instead (of GLM-4.7-Flash: 256 numbers each) and is torch's attention then.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from linear import seconds

from ssd.bench.floor import bandwidth
from ssd.bench.record import HELP, Rows, record
from ssd.kernels.device import kernels
from ssd.kernels.ops import DeviceBatch, HeadShape, Ops

_BLOCK = 64  # positions
_BYTES = 400 << 20  # of all caches
_KEY, _VALUE = 192, 256  # numbers of a head's key that come from latents, and of its value


def main() -> None:
    args = _arguments()
    device = torch.device("cuda")
    heads = HeadShape(args.heads, 1, 576, latent_dim=512, softmax_scale=192**-0.5)
    ops: Ops = kernels(device).ops()
    ops.reserve([heads], device)
    found: Rows = {}
    for length in args.prompt:
        attention, _ = bench(ops, heads, 1, length, length, device)
        absorbed, expanded = attention + head_products(ops, heads, length, device), expanded_form(heads, length, device)
        found[f"prompt of {length}"] = {
            "attention, us": round(1e6 * attention, 1),
            "TFLOP/s": round(args.heads * (576 + 512) * length**2 / attention / 1e12),
            "with products, us": round(1e6 * absorbed, 1),
            "expanded, us": round(1e6 * expanded, 1),
            "ratio": round(absorbed / expanded, 2),
        }
        print(f"prompt of {length}: {found[f'prompt of {length}']}", flush=True)
    for shape in [] if args.prompt else args.at:
        count, context = map(int, shape.split("x"))
        time, floor = bench(ops, heads, count, context, 1, device)
        found[shape] = {"us": round(1e6 * time, 1), "floor": round(floor / time, 2)}
        print(f"{shape:<10} {1e6 * time:8.1f} us  {floor / time:.2f} floor", flush=True)
    record(args.json, found)


@torch.inference_mode()
def bench(
    ops: Ops, heads: HeadShape, count: int, context: int, queries: int, device: torch.device
) -> tuple[float, float]:
    """Seconds of the last `queries` positions of each of `count` sequences, and of reading the latents once."""
    batch = batch_of(ops, heads, count, context, queries, device)
    shape = (batch.block_tables.numel(), _BLOCK, 1, heads.head_dim)
    size = 2 * count * context * heads.head_dim
    caches = [torch.randn(shape, device=device, dtype=torch.bfloat16) for _ in range(min(20, max(2, _BYTES // size)))]
    q = torch.randn(count * queries, heads.num_heads, heads.head_dim, device=device, dtype=torch.bfloat16)
    ops.plan(batch, heads, caches[0])

    def layers() -> None:
        for cache in caches:
            ops.attention(q, batch, heads, cache, cache)

    return seconds(layers, device) / len(caches), size / bandwidth(device)


@torch.inference_mode()
def head_products(ops: Ops, heads: HeadShape, length: int, device: torch.device) -> float:
    """Seconds of the products of heads with a prompt's queries, and with its weighted latents."""
    count, latent = heads.num_heads, heads.latent_dim
    keys, values = (
        ops.prepare(torch.randn(count * rows, depth, device=device, dtype=torch.bfloat16), experts=count)
        for rows, depth in ((latent, _KEY), (_VALUE, latent))
    )
    queries, latents = (
        torch.randn(length, count, depth, device=device, dtype=torch.bfloat16) for depth in (_KEY, latent)
    )
    return seconds(lambda: (keys.head_linear(queries), values.head_linear(latents)), device)


@torch.inference_mode()
def expanded_form(heads: HeadShape, length: int, device: torch.device) -> float:
    """Seconds of a prompt's attention with keys and values of its own for each head, and of making these."""
    count, latent, width = heads.num_heads, heads.latent_dim, _KEY + heads.head_dim - heads.latent_dim
    shapes = (length, latent), (latent, count * (_KEY + _VALUE)), (1, count, length, width), (1, count, length, _VALUE)
    latents, weight, q, v = (torch.randn(shape, device=device, dtype=torch.bfloat16) for shape in shapes)
    attention = torch.nn.functional.scaled_dot_product_attention
    return seconds(lambda: (latents @ weight, attention(q, q, v, is_causal=True)), device)


def batch_of(ops: Ops, heads: HeadShape, count: int, context: int, queries: int, device: torch.device) -> DeviceBatch:
    def ints(values: list[int] | range) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    blocks = -(-context // _BLOCK)
    firsts = ints(range(0, queries, ops.tile_tokens([heads], prefill=queries > 1)))
    tiles = torch.stack((ints(range(count)).repeat_interleave(len(firsts)), firsts.repeat(count)))
    return DeviceBatch(
        token_ids=ints([0] * count * queries),
        positions=ints(range(context - queries, context)).repeat(count),
        slot_mapping=ints([0] * count * queries),
        query_start=ints(range(0, (count + 1) * queries, queries)),
        context_len=ints([context] * count),
        block_tables=torch.randperm(count * blocks, device=device).int().view(count, blocks),
        table_rows=ints(range(count)),
        tiles=tiles[:, :0] if queries > 1 else tiles,
        prefill_tiles=tiles if queries > 1 else None,
        logit_rows=None,
    )


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--heads", type=int, default=20, help="query heads")
    decoding = ["1x512", "1x4096", "1x16384", "8x16384", "64x2048"]
    parser.add_argument("--at", nargs="+", default=decoding, help="sequences that decode, and tokens of each")
    parser.add_argument("--prompt", type=int, nargs="+", default=[], help="tokens of prompts, timed in their place")
    parser.add_argument("--json", type=Path, help=HELP)
    return parser.parse_args()


if __name__ == "__main__":
    main()
