"""Draft models, EAGLE heads and block drafts: acceptance by position, tokens a round and hit rate, in SD and (not block
drafts) SSD, set by set.

    python bench/drafts.py tiny-llama tiny-llama-draft tiny-llama-eagle      # table, and docs/pictures/drafts.png
    SSD_DATASET_DIR=… python bench/drafts.py tiny-qwen3 tiny-qwen3-draft tiny-qwen3-eagle --prompts 32 --device cuda

Acceptance at a position is that of drafts whose tokens before it were all accepted. In SSD a head prepares a draft
before the features of the tokens under verification exist; after a miss (backup jit) it has them, as in SD.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import cycle, zip_longest
from pathlib import Path

from rich.console import Console
from rich.progress import track
from rich.table import Table

from ssd import LLM, SamplingParams
from ssd.assembly.open import open_feature_draft
from ssd.bench.record import HELP, record, rows_of
from ssd.core import RequestMetrics
from ssd.models.block import BlockCheckpoint
from ssd.prompts import OWN_SETS, load_prompts

MODES = {"sd": "-", "ssd": "--"}  # and their lines in the picture
_COLOURS = ("#e07a1f", "#4c8bf5", "#0b9e6b", "#a259c4")  # of drafts


@dataclass
class Tally:
    """Answers to some prompts. Each begins with a round that has no draft, which is left out."""

    answers: list[RequestMetrics] = field(default_factory=list)
    drafts: int = 0

    def add(self, other: Tally) -> None:
        self.answers += other.answers
        self.drafts += other.drafts

    @property
    def tokens_per_round(self) -> float:
        rounds = sum(answer.rounds - 1 for answer in self.answers)
        return sum(answer.output_tokens - 1 for answer in self.answers) / max(1, rounds)

    @property
    def hit_rate(self) -> float:
        return sum(answer.hits for answer in self.answers) / max(1, sum(answer.look_ups for answer in self.answers))

    def acceptance(self) -> list[float]:
        """By position."""
        columns = zip_longest(*(answer.accepted_per_position for answer in self.answers), fillvalue=0)
        accepted = [sum(column) for column in columns]
        return [n / max(1, before) for n, before in zip(accepted, [self.drafts, *accepted], strict=False)]

    def cells(self, mode: str) -> list[str]:
        hits = f"{self.hit_rate:.2f}" if mode == "ssd" else ""
        return [f"{self.tokens_per_round:.2f}", hits, " ".join(f"{rate:.2f}" for rate in self.acceptance())]


def play(llm: LLM, name: str, args: argparse.Namespace, temperature: float) -> Tally:
    """Answers to the prompts of a set."""
    params = SamplingParams(temperature=temperature, seed=1, max_new_tokens=args.tokens, ignore_eos=True)
    before = llm.engine.metrics.spec_decode_num_drafts
    outputs = llm.generate(load_prompts(name).asked(args.prompts), params)
    return Tally([output.metrics for output in outputs], llm.engine.metrics.spec_decode_num_drafts - before)


def prepares(draft: str) -> bool:
    """Whether SSD can prepare its drafts."""
    return not isinstance(open_feature_draft(draft), BlockCheckpoint)


def engine(args: argparse.Namespace, draft: str, mode: str) -> LLM:
    speculation = {"mode": mode, "draft": draft, "k": args.k}
    speculation |= {"placement": "inline", "backup": "jit", "budget": args.budget} if mode == "ssd" else {}
    sizes = {"max_model_len": 2048, "max_num_seqs": args.batch, "num_kv_blocks": 2048}
    return LLM(args.target, device=args.device, **sizes, speculation=speculation)


def main() -> None:
    args = arguments()
    table = Table("draft", "mode", "T", "set", "tokens/round", "hits", f"acceptance at 1 to {args.k}")
    table.title = f"{args.target}, K = {args.k}, {args.prompts} prompts of a set, {args.tokens} tokens each"
    means: dict[tuple[str, str, float], Tally] = {}
    pairs = [(draft, mode) for draft in args.drafts for mode in MODES if mode == "sd" or prepares(draft)]
    for draft, mode in track(pairs, "measuring", transient=True):
        with engine(args, draft, mode) as llm:
            for temperature in args.temperatures:
                total = means[draft, mode, temperature] = Tally()
                for name in OWN_SETS:
                    found = play(llm, name, args, temperature)
                    table.add_row(draft, mode, f"{temperature:g}", name, *found.cells(mode))
                    total.add(found)
                table.add_row(draft, mode, f"{temperature:g}", "all", *total.cells(mode), end_section=True)
    Console(width=120).print(table)
    record(args.json, rows_of(table, names=4), [str(table.title)])
    draw(args, means)
    print(f"written: {args.picture}")


def draw(args: argparse.Namespace, means: dict[tuple[str, str, float], Tally]) -> None:
    """Acceptance over the position in a draft, one panel per temperature."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4.2 * len(args.temperatures), 3.6), layout="constrained")
    panels: Sequence = figure.subplots(1, len(args.temperatures), sharey=True, squeeze=False)[0]
    for axes, temperature in zip(panels, args.temperatures, strict=True):
        colours = dict(zip(args.drafts, cycle(_COLOURS), strict=False))
        for (draft, mode, at), found in means.items():
            if at == temperature:
                label = f"{draft}, {mode.upper()}: {found.tokens_per_round:.2f} tokens a round"
                places = range(1, args.k + 1)
                axes.plot(places, found.acceptance(), MODES[mode], color=colours[draft], marker="o", label=label)
        axes.set(title=f"temperature {temperature:g}", xlabel="position in the draft", xticks=range(1, args.k + 1))
        axes.set_ylim(0, 1)
        axes.grid(alpha=0.3)
        axes.legend(fontsize=7, loc="lower right")
    panels[0].set_ylabel("acceptance, if all before were accepted")
    figure.savefig(args.picture, dpi=150)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target")
    parser.add_argument("drafts", nargs="+", help="draft models, EAGLE heads and block drafts")
    parser.add_argument("--k", type=int, default=5)
    parser.add_argument("--budget", type=int, default=16, help="branches a sequence, in SSD")
    parser.add_argument("--temperatures", nargs="+", type=float, default=[0.0, 1.0])
    parser.add_argument("--prompts", type=int, default=8, help="of each set")
    parser.add_argument("--tokens", type=int, default=64, help="of each answer")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--picture", type=Path, default=Path("docs/pictures/drafts.png"))
    parser.add_argument("--json", type=Path, help=HELP)
    return parser.parse_args()


if __name__ == "__main__":
    main()
