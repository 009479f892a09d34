"""How much does speculation gain, and at which K? AR, SD and SSD over one target and one draft, same text.

    python bench/speculation.py                                              # the bundled Llama pair, on a CPU
    python bench/speculation.py --target tiny-qwen3 --draft tiny-qwen3-draft --temperatures 0 0.7 1
    python bench/speculation.py --target graft:tiny-llama@llama-3.1-8b --draft graft:tiny-llama-draft@llama-3.2-1b \
        --sd 2 3 4 --ssd 4 6 --batch 1 8

The contenders share both models and alternate, so ratios hold on a noisy machine; that every one of them writes the
same tokens is checked. Only rounds after the last prompt was read are timed. A round's time is split: the target waits
for the draft, verifies (forward pass and decision), and everything else.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import track
from rich.table import Table

from ssd import LLM, SamplingParams
from ssd.assembly import make_fan_out
from ssd.config import SpeculationConfig
from ssd.decoding.drafter import Drafter
from ssd.decoding.round import Clocks
from ssd.drafting.ahead import AheadDrafter
from ssd.drafting.model import DraftModel, ModelDrafter
from ssd.drafting.ngram import NgramDrafter
from ssd.engine.metrics import EngineMetrics
from ssd.prompts import OWN_SETS, load_prompts


@dataclass
class Contender:
    """One way of decoding, and what it did in each repeat."""

    name: str
    drafter: Drafter
    seconds: list[float] = field(default_factory=list)
    tokens: list[list[int]] = field(default_factory=list)
    decoded: int = 0
    rounds: int = 0
    clocks: Clocks = field(default_factory=Clocks)
    metrics: EngineMetrics = field(default_factory=EngineMetrics)

    def run(self, llm: LLM, groups: list[list[Any]], params: SamplingParams) -> None:
        engine = llm.engine
        engine.round.drafter, engine.round.clocks, engine.metrics = self.drafter, Clocks(), EngineMetrics()
        self.tokens, self.decoded, self.rounds, seconds, read = [], 0, 0, 0.0, Clocks()
        for group in groups:
            order = [engine.add(llm.encode(prompt), params) for prompt in group]
            before = engine.metrics.num_rounds
            outputs = {o.request_id: o for _ in reading(llm) for o in engine.step()}
            first, clocks, tokens = time.perf_counter(), engine.round.clocks, engine.metrics.output_tokens
            self.rounds -= engine.metrics.num_rounds
            read.draft, read.verify = read.draft - clocks.draft, read.verify - clocks.verify
            while engine.has_work:
                outputs |= {o.request_id: o for o in engine.step()}
            seconds += time.perf_counter() - first
            self.rounds += engine.metrics.num_rounds
            self.decoded += engine.metrics.output_tokens - tokens
            read.draft, read.verify = read.draft + clocks.draft, read.verify + clocks.verify
            self.tokens += [outputs[name].token_ids for name in order]
            assert before < engine.metrics.num_rounds
        self.seconds.append(seconds)
        self.clocks, self.metrics = read, engine.metrics

    def figures(self, plain: Contender) -> dict[str, Any]:
        ratios = sorted(a / b for a, b in zip(plain.seconds, self.seconds, strict=True))
        counts, each = self.metrics, 1e3 / self.rounds
        whole = self.seconds[-1] * each
        return {
            "name": self.name,
            "tokens_per_second": self.decoded / statistics.median(self.seconds),
            "of_plain": statistics.median(ratios),
            "of_plain_range": [ratios[0], ratios[-1]],
            "acceptance": counts.spec_decode_num_accepted_tokens / max(1, counts.spec_decode_num_draft_tokens),
            "tokens_per_round": self.decoded / self.rounds,
            "hit_rate": counts.ssd_hit_rate,
            "ms_per_round": whole,
            "ms_draft": self.clocks.draft * each,
            "ms_verify": self.clocks.verify * each,
            "share_else": 1 - (self.clocks.draft + self.clocks.verify) * each / whole,
            "origins": dict(counts.ssd_rounds),
            "failures": counts.drafter_failures,
        }


def reading(llm: LLM) -> Iterator[None]:
    """Until every prompt has been read."""
    while llm.engine.scheduler.waiting or any(s.num_output == 0 for s in llm.engine.scheduler.running):
        yield


def row(f: dict[str, Any]) -> list[str]:
    low, high = f["of_plain_range"]
    return [
        f["name"],
        f"{f['tokens_per_second']:.1f}",
        f"{f['of_plain']:.2f} ({low:.2f} to {high:.2f})",
        f"{f['acceptance']:.3f}" if f["acceptance"] else "",
        f"{f['tokens_per_round']:.2f}",
        f"{f['hit_rate']:.3f}" if f["origins"] else "",
        f"{f['ms_per_round']:.2f}",
        f"{f['ms_draft']:.2f}",
        f"{f['ms_verify']:.2f}",
        f"{f['share_else']:.3f}",
    ]


def contenders(args: argparse.Namespace, llm: LLM) -> list[Contender]:
    ahead = llm.engine.round.drafter
    if not isinstance(ahead, AheadDrafter):
        raise AssertionError("the engine was built for another mode")
    found = [Contender("ar", Drafter())]
    found += [Contender(f"sd k={k}", ModelDrafter(ahead.model, k)) for k in args.sd]
    found += [Contender(f"ngram k={k}", NgramDrafter(k)) for k in args.ngram]
    for k in args.ssd:
        for backup in args.backup:
            found.append(Contender(f"ssd k={k} {backup}", make_ahead(args, ahead.model, k, backup)))
    return found


def make_ahead(args: argparse.Namespace, model: DraftModel, k: int, backup: str) -> AheadDrafter:
    fan_out = int(args.fan_out) if args.fan_out.isdigit() else args.fan_out
    config = SpeculationConfig(mode="ssd", draft=args.draft, k=k, fan_out=fan_out, budget=args.budget)
    overlap = args.placement != "inline"
    return AheadDrafter(model, make_fan_out(config), lookahead=k, budget=args.budget, backup=backup, overlap=overlap)


def main() -> None:
    args = arguments()
    console = Console(width=150)
    speculation = {"mode": "ssd", "draft": args.draft, "k": max([*args.sd, *args.ssd, 1]), "budget": args.budget}
    llm = LLM(
        args.target,
        device=args.device,
        max_model_len=1024,
        max_num_seqs=max(args.batch),
        num_kv_blocks=65 * max(args.batch),
        speculation=speculation | {"placement": args.placement, "draft_weights": args.draft_weights},
    )
    prompts = [prompt for name in OWN_SETS for prompt in load_prompts(name).asked(args.prompts)]
    results = []
    for batch in args.batch:
        groups = [prompts[i : i + batch] for i in range(0, len(prompts), batch)]
        for temperature in args.temperatures:
            params = SamplingParams(temperature=temperature, seed=5, max_new_tokens=args.tokens, ignore_eos=True)
            field_ = contenders(args, llm)
            measure(llm, field_, groups, params, args.repeats)
            table = Table(
                "", "tokens/s", "of plain", "accepted", "tokens/round", "hits", "ms/round", "draft", "verify", "else"
            )
            table.title = f"{args.target}, drafted by {args.draft}, batch {batch}, temperature {temperature:g}"
            for contender in field_:
                figures = contender.figures(field_[0])
                results.append(figures | {"batch": batch, "temperature": temperature})
                table.add_row(*row(figures))
            console.print(table)
    if llm.note:
        console.print(llm.note)
    if args.json:
        args.json.write_text(json.dumps({"target": args.target, "draft": args.draft, "results": results}, indent=1))


def measure(llm: LLM, field_: list[Contender], groups: list[list[Any]], params: SamplingParams, repeats: int) -> None:
    for contender in field_:
        contender.run(llm, groups[:1], params)  # warm
        contender.seconds = []
    for contender in track([c for _ in range(repeats) for c in field_], "measuring"):
        contender.run(llm, groups, params)
        if contender.tokens != field_[0].tokens:
            raise SystemExit(f"{contender.name} wrote another text than plain decoding: this is a bug")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="tiny-llama")
    parser.add_argument("--draft", default="tiny-llama-draft")
    parser.add_argument("--draft-weights", default="full", help="full or int8")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--sd", nargs="*", type=int, default=[1, 2, 3, 4, 5, 7], metavar="K")
    parser.add_argument("--ssd", nargs="*", type=int, default=[4], metavar="K")
    parser.add_argument("--ngram", nargs="*", type=int, default=[5], metavar="K")
    parser.add_argument("--fan-out", default="adaptive", help="adaptive, geometric or a number")
    parser.add_argument("--budget", type=int, default=24, help="outcomes prepared for a sequence")
    parser.add_argument("--backup", nargs="+", default=["jit"])
    parser.add_argument("--placement", default="auto")
    parser.add_argument("--batch", nargs="+", type=int, default=[1])
    parser.add_argument("--temperatures", nargs="+", type=float, default=[0.0, 1.0])
    parser.add_argument("--prompts", type=int, default=4, help="of each set")
    parser.add_argument("--tokens", type=int, default=64, help="of each answer")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=Path, help="write all figures here")
    return parser.parse_args()


if __name__ == "__main__":
    main()
