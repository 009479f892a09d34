"""How fast is a layer of experts? Time and bandwidth for several rows, against the bytes of the experts that are hit.

    python bench/experts.py --rows 1 8                                           # the CPU, Qwen3-30B-A3B's experts
    python bench/experts.py --device cuda --format dense fp8 --rows 1 5 8 64     # one GPU, bfloat16
    python bench/experts.py --device cuda --layer gpt-oss-20b --format mxfp4
    python bench/experts.py --device cuda --layer kimi-k2.5 --format int4_group --rows 1 8 64
    python bench/experts.py --device cuda --layer deepseek-v3 --format fp8_block --rows 1 8 64
    python bench/experts.py --model graft:tiny-llama@gpt-oss-20b                 # how a graft's router spreads tokens

The rows choose their experts at random, other ones each time. `layer` is routing, both products and the weighted sum,
without the router's own product and shared experts; `hit` the number of experts, `floor` the bytes of their prepared
weights over the memory's bandwidth as a part of the time. On a GPU all is in one CUDA graph: launches do not count.
int4_group (groups of 32) and fp8_block (128 x 128, rows rounded) are as published; fp8, int8 and int4 round floats.

With --model: what share of the tokens of the prompt sets each expert of some layers has (1: as many as the others), and
how many experts are hit by tokens that follow each other in a prompt (`one text`: a verification), or by the same place
of as many prompts (`texts`: a batch), beside the number for random choices.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, get_args

import torch
from linear import seconds, stored_bytes
from random_weights import PUBLISHED, random_part

from ssd.assembly.open import open_checkpoint
from ssd.bench.floor import bandwidth
from ssd.bench.record import HELP, Rows, record
from ssd.grafts.expert_graft import CODE, add_codes
from ssd.grafts.graft import GraftCheckpoint, held_mlp, seeded
from ssd.grafts.shapes import SHAPES
from ssd.kernels.codes import Format
from ssd.kernels.device import kernels
from ssd.kernels.ops import Ops
from ssd.kernels.weights import Routing, Weight
from ssd.layers.formats import DENSE, Use, WeightFormat
from ssd.layers.formats.rounded import Rounded
from ssd.layers.spec import ExpertsSpec
from ssd.models.config import DecoderConfig
from ssd.prompts import OWN_SETS, load_prompts

_ROUTINGS: Final = 16  # timed one after the other
LAYERS: Final = sorted(name for name, shape in SHAPES.items() if isinstance(shape.layers[-1].mlp, ExpertsSpec))
FORMATS: Final[dict[str, WeightFormat]] = {
    "dense": DENSE,
    **PUBLISHED,
    **{name: Rounded(name, exact=True) for name in get_args(Format)},
}


class Layer:
    """Random experts in a format."""

    def __init__(self, name: str, form: str, device: torch.device) -> None:
        shape = SHAPES[name]
        self.spec, self.hidden = experts_of(shape), shape.hidden_size
        self.ops: Ops = kernels(device).ops()
        self.device, self.dtype = device, torch.bfloat16 if device.type == "cuda" else torch.float32
        self.format, inner = FORMATS[form], self.spec.intermediate_size
        self.gate_up, self.down = self._weight(2 * inner, self.hidden, True), self._weight(self.hidden, inner)
        self.correction = torch.zeros(self.spec.num_experts, device=device)
        self.num_bytes = [stored_bytes(each) / self.spec.num_experts for each in (self.gate_up, self.down)]

    def _weight(self, rows: int, depth: int, gated: bool = False) -> Weight:
        rows, use = rows * self.spec.num_experts, Use(gated=gated, experts=self.spec.num_experts)
        stored = {name: self._numbers(name, size) for name, size in self.format.shapes(rows, depth).items()}
        return self.format.prepare([stored], self.ops, self.dtype, use)

    def _numbers(self, name: str, size: tuple[int, ...]) -> torch.Tensor:
        if self.format in PUBLISHED.values():
            return random_part(self.format, name, size, self.device)
        return torch.randn(size, device=self.device, dtype=self.dtype)

    def route(self, logits: torch.Tensor) -> Routing:
        correction = self.correction if self.spec.rule.sigmoid else None
        return self.ops.route(logits, self.spec.experts_per_token, self.spec.rule, correction)

    def first(self, x: torch.Tensor, routing: Routing) -> torch.Tensor:
        return self.gate_up.expert_linear(x, routing, glu=self.spec.glu)

    def last(self, x: torch.Tensor, routing: Routing) -> torch.Tensor:
        return self.down.expert_linear(x, routing)

    def __call__(self, x: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        routing = self.route(logits)
        return self.ops.combine(self.last(self.first(x, routing), routing), routing)


@torch.inference_mode()
def bench(name: str, form: str, row_counts: list[int], device: torch.device) -> Rows:
    layer, speed = Layer(name, form, device), bandwidth(device)
    print(f"{name}'s experts in {form}, copies at {speed / 1e9:.0f} GB/s")
    print(f"{'part':<8} {'rows':>5} {'hit':>6} {'us':>9} {'GB/s':>6} {'floor':>6}")
    found: Rows = {}
    for rows in row_counts:
        x = torch.randn(rows, layer.hidden, device=device, dtype=layer.dtype)
        logits = torch.randn(_ROUTINGS, rows, layer.spec.num_experts, device=device).unbind()
        routed = [layer.route(each) for each in logits]
        for each in routed:
            layer.first(x, each)  # pairs are in order, if its kernel wants them so
        pairs, width = rows * layer.spec.experts_per_token, layer.spec.intermediate_size
        inner = torch.randn(pairs, width, device=device, dtype=layer.dtype)
        hit = sum(len(each.experts.unique()) for each in routed) / _ROUTINGS
        parts: dict[str, tuple[Callable[[Any], object], Any, int]] = {
            "layer": (functools.partial(layer, x), logits, sum(layer.num_bytes)),
            "gate/up": (functools.partial(_first, layer, x), routed, layer.num_bytes[0]),
            "down": (functools.partial(layer.last, inner), routed, layer.num_bytes[1]),
        }
        for part, (work, inputs, size) in parts.items():
            took = seconds(functools.partial(_for_each, work, inputs), device) / _ROUTINGS
            rates = f"{1e6 * took:>9.1f} {hit * size / took / 1e9:>6.0f} {hit * size / took / speed:>6.2f}"
            print(f"{part:<8} {rows:>5} {hit:>6.1f} {rates}", flush=True)
            shares = {"experts hit": round(hit, 1), "of the floor": round(hit * size / took / speed, 2)}
            found[f"{form}, {part}, rows {rows}"] = {"us": round(1e6 * took, 1), **shares}
    return found


def experts_of(shape: DecoderConfig) -> ExpertsSpec:
    """Of its last layer: the first ones of some models have none."""
    spec = shape.layers[-1].mlp
    assert isinstance(spec, ExpertsSpec)
    return spec


def graft_routing(
    graft: GraftCheckpoint, device: torch.device, dtype: torch.dtype = torch.bfloat16
) -> list[torch.Tensor]:
    """The experts of each of the base's tokens, layer by layer, as the graft's router chooses them: it reads a code of
    the token, nothing else. `device`: where the graft is made, since random numbers are different ones elsewhere."""
    parts = held_mlp(graft.base.config, graft.shape).parts

    def codes(layer: str, part: str, rows: int) -> torch.Tensor:
        tensor = torch.zeros(rows, CODE + 1, device=device)
        add_codes(part, tensor, seeded(f"{layer}{part}.weight", device), parts)
        return tensor.to(dtype).float()

    tokens, found = codes("", "model.embed_tokens", graft.config.vocab_size)[: graft.base.config.vocab_size], []
    for i, layer in enumerate(graft.config.layers):
        assert isinstance(layer.mlp, ExpertsSpec)
        part = f"{layer.mlp.names.block}.{layer.mlp.names.router}"
        router = codes(f"model.layers.{i}.", part, layer.mlp.num_experts)
        found.append((tokens @ router.t()).topk(layer.mlp.experts_per_token).indices)
    return found


def histogram(model: str, row_counts: list[int], device: torch.device) -> None:
    graft = open_checkpoint(model)
    if not isinstance(graft, GraftCheckpoint) or not isinstance(experts := graft.config.layers[0].mlp, ExpertsSpec):
        raise SystemExit(f"--model {model}: name a graft in a shape with experts")
    tokenizer, count, chosen = graft.tokenizer(), experts.num_experts, experts.experts_per_token
    texts = [torch.tensor(tokenizer.encode(text)) for name in OWN_SETS for text in load_prompts(name).prompts]
    routing, tokens = [layer.cpu() for layer in graft_routing(graft, device)], torch.cat(texts)
    print(f"{graft.note}\n{len(tokens)} tokens of {len(texts)} prompts, {chosen} of {count} experts a token")
    print("experts with 0, 0.25, … 2.75 times their share of the tokens:")
    for i in range(0, len(routing), -(-len(routing) // 6)):
        load = routing[i][tokens].flatten().bincount(minlength=count) * count / (chosen * len(tokens))
        shares = [float(((load >= low) & (load < low + 0.25)).float().mean()) for low in (x / 4 for x in range(12))]
        print(f"layer {i:>2}: {' '.join(f'{share:>4.0%}' for share in shares)}")
    print(f"{'rows':>5} {'one text':>9} {'texts':>7} {'random':>7}   experts hit in a layer, on average")
    for rows in row_counts:
        following = [window for text in texts for window in text[: len(text) // rows * rows].view(-1, rows)]
        places = [torch.stack([text[at] for text in texts[:rows]]) for at in range(min(map(len, texts[:rows])))]
        means = [_mean_hit(routing, each) if len(texts) >= rows else float("nan") for each in (following, places)]
        print(f"{rows:>5} {means[0]:>9.1f} {means[1]:>7.1f} {count * (1 - (1 - chosen / count) ** rows):>7.1f}")


def _mean_hit(routing: list[torch.Tensor], steps: list[torch.Tensor]) -> float:
    hit = [len(layer[tokens].unique()) for layer in routing[:: max(1, len(routing) // 6)] for tokens in steps[:200]]
    return sum(hit) / max(1, len(hit))


def _first(layer: Layer, x: torch.Tensor, routing: Routing) -> None:
    layer.first(x, replace(routing, settled=False))  # as right after it was made


def _for_each(work: Callable[[Any], object], inputs: Any) -> None:
    for each in inputs:
        work(each)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--layer", choices=LAYERS, default="qwen3-30b-a3b")
    parser.add_argument("--format", choices=sorted(FORMATS), nargs="+", default=["dense"])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 5, 8, 64])
    parser.add_argument("--model", help="a graft, whose router is looked at instead")
    parser.add_argument("--json", type=Path, help=HELP)
    args = parser.parse_args()
    if args.model:
        histogram(args.model, args.rows, torch.device(args.device))
        return
    found: Rows = {}
    for form in args.format:
        found |= bench(args.layer, form, args.rows, torch.device(args.device))
    record(args.json, found, [args.layer])


if __name__ == "__main__":
    main()
