"""How much does speculation gain, and at which K? AR, SD and SSD over one target and one draft, same text.

    python bench/speculation.py                                              # the bundled Llama pair, on a CPU
    python bench/speculation.py --target tiny-qwen3 --draft tiny-qwen3-draft --temperatures 0 0.7 1
    python bench/speculation.py --target graft:tiny-llama@llama-3.1-8b --draft graft:tiny-llama-draft@llama-3.2-1b \
        --sd 2 3 4 --ssd 4 6 --batch 1 8

The contenders share both models and alternate, so ratios hold on a noisy machine; that every one of them writes the
same tokens is checked. Only rounds after the last prompt was read are timed. A round's time is split: the target waits
for the draft, verifies (forward pass and decision), and everything else. *model* is what the speed model says instead
of the ratio to plain decoding: from times of verifying, drafting and both at once, the hit rate and the tokens a round.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from overlap import alone_and_beside
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
from ssd.drafting.pace import Paced, make_arms
from ssd.engine.metrics import EngineMetrics
from ssd.prompts import OWN_SETS, load_prompts

COLUMNS = ("", "tokens/s", "of plain", "accepted", "tokens/round", "hits", "ms/round", "draft", "verify", "else")
THREADS = torch.get_num_threads()


@dataclass
class Contender:
    """One way of decoding, and what it did in each repeat."""

    name: str
    llm: LLM
    drafter: Drafter
    k: int = 0
    threads: int = 0  # of the target, where it is not the machine's number
    seconds: list[float] = field(default_factory=list)
    tokens: list[list[int]] = field(default_factory=list)
    decoded: int = 0
    rounds: int = 0
    clocks: Clocks = field(default_factory=Clocks)
    metrics: EngineMetrics = field(default_factory=EngineMetrics)

    def run(self, groups: list[list[Any]], params: SamplingParams) -> None:
        engine = self.llm.engine
        engine.round.drafter, engine.round.clocks, engine.metrics = self.drafter, Clocks(), EngineMetrics()
        self.tokens, self.decoded, self.rounds, self.clocks = [], 0, 0, Clocks()
        self.seconds.append(0.0)
        torch.set_num_threads(self.threads or THREADS)
        for group in groups:
            order = [engine.add(self.llm.encode(prompt), params) for prompt in group]
            outputs = {o.request_id: o for _ in reading(self.llm) for o in engine.step()}
            before, clocks, metrics = time.perf_counter(), replace(engine.round.clocks), replace(engine.metrics)
            while engine.has_work:
                outputs |= {o.request_id: o for o in engine.step()}
            self.seconds[-1] += time.perf_counter() - before
            self.rounds += engine.metrics.num_rounds - metrics.num_rounds
            self.decoded += engine.metrics.output_tokens - metrics.output_tokens
            self.clocks.draft += engine.round.clocks.draft - clocks.draft
            self.clocks.verify += engine.round.clocks.verify - clocks.verify
            self.tokens += [outputs[name].token_ids for name in order]
        self.metrics = engine.metrics

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
        f"{f['predicted']:.2f}" if f["predicted"] else "",
    ]


def contenders(
    args: argparse.Namespace, here: LLM, model: DraftModel, elsewhere: tuple[LLM, Drafter] | None
) -> list[Contender]:
    """`elsewhere` has its draft in another process; `here` both models are in this one."""
    found = [Contender("ar", here, Drafter())]
    for k in args.sd:
        found.append(Contender(f"sd k={k}", here, ModelDrafter(model, k), k))
        if elsewhere is not None:
            found.append(Contender(f"sd k={k}, one core less", here, ModelDrafter(model, k), k, THREADS - 1))
    found += [Contender(f"ngram k={k}", here, NgramDrafter(k), k) for k in args.ngram]
    for k in args.ssd:
        if elsewhere is not None:
            found.append(Contender(f"ssd k={k}, process", *elsewhere, k, THREADS - 1))
        else:
            found.append(Contender(f"ssd k={k}", here, make_ahead(args, model, k), k))
    if args.auto and elsewhere is None:
        inner = make_ahead(args, model, model.program.lookahead)
        found.append(Contender("ssd k=auto", here, Paced(inner, make_arms(None, (args.budget,)))))
    return found


def make_ahead(args: argparse.Namespace, model: DraftModel, k: int) -> AheadDrafter:
    config = SpeculationConfig(mode="ssd", draft=args.draft, k=k, fan_out=fan_out(args), budget=args.budget)
    overlap = args.placement != "inline"
    return AheadDrafter(
        model, make_fan_out(config), lookahead=k, budget=args.budget, backup=args.backup, overlap=overlap
    )


def fan_out(args: argparse.Namespace) -> Any:
    return int(args.fan_out) if args.fan_out.isdigit() else args.fan_out


def predicted(contender: Contender, field_: list[Contender]) -> float | None:
    """The speed model: a round is the longer of verifying and preparing, and after a miss drafting as well.

    Over plain decoding. On a GPU both are timed side by side, without the engine; on a CPU they are on different cores,
    and verifying and drafting are those of plain speculation on the same cores.
    """
    p, tokens = contender.metrics.ssd_hit_rate, contender.decoded / contender.rounds
    plain = field_[0].seconds[-1] * 1e3 / field_[0].rounds
    if not contender.name.startswith("ssd k=") or not contender.k:
        return None
    if torch.cuda.is_available():
        verify, draft, beside = alone_and_beside(contender.llm, contender.drafter, contender.k)
        return tokens * plain / (beside + (1 - p) * draft + plain - verify)
    like = next((c for c in field_ if c.name == f"sd k={contender.k}, one core less"), None)
    if like is None:
        return None
    each = 1e3 / like.rounds
    return tokens * plain / (like.seconds[-1] * each - p * like.clocks.draft * each)


def main() -> None:
    args = arguments()
    console = Console(width=150)
    here, elsewhere = load(args, "auto" if torch.cuda.is_available() else "inline"), None
    drafter = here.engine.round.drafter
    if not isinstance(drafter, AheadDrafter):
        raise AssertionError("the engine was built for another mode")
    if args.placement == "process":
        llm = load(args, "process")
        elsewhere = llm, llm.engine.round.drafter
    prompts = [prompt for name in OWN_SETS for prompt in load_prompts(name).asked(args.prompts)]
    results = []
    for batch, temperature in itertools.product(args.batch, args.temperatures):
        groups = [prompts[i : i + batch] for i in range(0, len(prompts), batch)]
        params = SamplingParams(temperature=temperature, seed=5, max_new_tokens=args.tokens, ignore_eos=True)
        field_ = contenders(args, here, drafter.model, elsewhere)
        measure(field_, groups, params, args.repeats)
        table = Table(
            *COLUMNS, "model", title=f"{args.target} + {args.draft}, batch {batch}, temperature {temperature:g}"
        )
        for contender in field_:
            figures = contender.figures(field_[0]) | {"predicted": predicted(contender, field_) if batch == 1 else None}
            results.append(figures | {"batch": batch, "temperature": temperature})
            table.add_row(*row(figures))
        console.print(table)
    if here.note:
        console.print(here.note)
    if args.json:
        args.json.write_text(json.dumps({"target": args.target, "draft": args.draft, "results": results}, indent=1))
    if elsewhere is not None:
        elsewhere[1].close()


def load(args: argparse.Namespace, placement: str) -> LLM:
    speculation = {"mode": "ssd", "draft": args.draft, "k": max([*args.sd, *args.ssd, 1]), "budget": args.budget}
    speculation |= {"placement": placement, "backup": args.backup, "fan_out": fan_out(args)}
    return LLM(
        args.target,
        device=args.device,
        max_model_len=1024,
        max_num_seqs=max(args.batch),
        num_kv_blocks=65 * max(args.batch),
        speculation=speculation,
    )


def measure(field_: list[Contender], groups: list[list[Any]], params: SamplingParams, repeats: int) -> None:
    for contender in field_:
        contender.run(groups[:1], params)  # warm
        contender.seconds = []
    for contender in track([c for _ in range(repeats) for c in field_], "measuring"):
        contender.run(groups, params)
        if contender.tokens != field_[0].tokens:
            raise SystemExit(f"{contender.name} wrote another text than plain decoding: this is a bug")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="tiny-llama")
    parser.add_argument("--draft", default="tiny-llama-draft")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--sd", nargs="*", type=int, default=[1, 2, 3, 4, 5, 7], metavar="K")
    parser.add_argument("--ssd", nargs="*", type=int, default=[4], metavar="K")
    parser.add_argument("--ngram", nargs="*", type=int, default=[5], metavar="K")
    parser.add_argument("--fan-out", default="adaptive", help="adaptive, geometric or a number")
    parser.add_argument("--budget", type=int, default=16, help="outcomes prepared for a sequence")
    parser.add_argument("--backup", default="jit")
    parser.add_argument("--placement", default="auto", help="process: the draft of ssd on a core of its own (CPU)")
    parser.add_argument("--auto", action="store_true", help="let the controller choose, too")
    parser.add_argument("--batch", nargs="+", type=int, default=[1])
    parser.add_argument("--temperatures", nargs="+", type=float, default=[0.0, 1.0])
    parser.add_argument("--prompts", type=int, default=4, help="of each set")
    parser.add_argument("--tokens", type=int, default=64, help="of each answer")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=Path, help="write all figures here")
    return parser.parse_args()


if __name__ == "__main__":
    main()
