"""Where a round's time goes under speculation, and whether the speed model explains the speed-up.

    python bench/speculation.py                     # the bundled Llama pair, on a CPU
    python bench/speculation.py --target graft:tiny-llama@cpu-75m --placement process --methods ar,sd:3,ssd:3
    python bench/speculation.py --target graft:tiny-llama@llama-3.1-8b --draft graft:tiny-llama-draft@llama-3.2-1b \
        --methods ar,sd:3,sd:4,ssd:3,ssd:4,ssd:auto --temperatures 0 1

Contenders and times are those of `ssd bench`. A round's time is split into waiting for the draft, verifying (forward
pass and decision), and everything else. *model*: the ratio to the first contender that the speed model predicts, from
the times of verifying, drafting and both at once, the hit rate and the tokens per round. With `--placement process`, SD
also runs with the number of cores that the target has there.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from arguments import add_options, given
from overlap import alone_and_beside
from rich.console import Console
from rich.table import Table

from ssd.assembly.open import open_checkpoint
from ssd.bench.answers import RequestSettings
from ssd.bench.measure import MEAN, Measured, figures, measure, same_text, warnings
from ssd.bench.ours import OurContender, methods_of, our_contenders
from ssd.bench.record import HELP, Rows, record, rows_of
from ssd.bench.report import speed_up
from ssd.bench.workload import Workload, load_workload
from ssd.cli.console import measuring
from ssd.config import EngineConfig, SpeculationConfig
from ssd.prompts import OWN_SETS

LESS = ", one core less"


@dataclass
class Round:
    """The mean round of a contender without prefill, in milliseconds."""

    whole: float
    draft: float
    verify: float
    tokens: float
    hits: float | None


def round_of(measured: Measured) -> Round:
    """Prefill time is subtracted from verifying; rounds with prefill are few, and otherwise left in."""
    turns = [turn for turns in measured.turns.values() for turn in turns]
    row = next(row for row in figures([measured]) if row["set"] == MEAN)
    rounds = row["rounds"] - row["requests"]
    seconds = sum(turn.speed.decode_seconds for turn in turns)
    read = sum(turn.speed.prefill_seconds for turn in turns)
    metrics = [turn.metrics for turn in turns if turn.metrics is not None]
    draft, verify = sum(m.target_wait_seconds for m in metrics), sum(m.verify_seconds for m in metrics) - read
    each = 1e3 / rounds
    tokens = sum(turn.speed.decode_tokens for turn in turns) / rounds
    return Round(seconds * each, draft * each, verify * each, tokens, row["hit_rate"])


def predicted(measured: Measured, found: list[Measured]) -> float | None:
    """The speed model's ratio to the first contender: a round is max(verify, prepare), plus a draft after a miss.

    On a GPU both are timed together, without the engine; on a CPU they run on different cores, and the times of
    verifying and drafting are those of SD on the same cores.
    """
    contender = measured.contender
    mode, _, k = contender.name.partition(" k=")
    if mode != "ssd" or not k.isdecimal() or not isinstance(contender, OurContender):
        return None
    this, plain = round_of(measured), round_of(found[0])
    hits = this.hits or 0.0
    if torch.cuda.is_available():
        verify, draft, beside = alone_and_beside(contender.llm, contender.drafter, int(k))
        return this.tokens * plain.whole / (beside + (1 - hits) * draft + plain.whole - verify)
    like = next((other for other in found if other.contender.name == f"sd k={k}{LESS}"), None)
    if like is None:
        return None
    other = round_of(like)
    return this.tokens * plain.whole / (other.whole - hits * other.draft)


def with_fewer_cores(contenders: list[OurContender]) -> list[OurContender]:
    """And plain speculation on the cores that a target has beside a draft in a process of its own."""
    fewer = torch.get_num_threads() - 1
    return [
        version
        for contender in contenders
        for version in (
            [contender, replace(contender, name=contender.name + LESS, threads=fewer)]
            if contender.name.startswith("sd")
            else [contender]
        )
    ]


def show(title: str, found: list[Measured], with_model: bool) -> Table:
    columns = ("", "tokens/s", "of the first", "accepted", "tokens/round", "hits", "ms/round", "draft", "verify")
    table = Table(*columns, "else", "model", title=title)
    for measured in found:
        row = next(row for row in figures([found[0], measured])[::-1] if row["set"] == MEAN)
        mean, model = round_of(measured), predicted(measured, found) if with_model else None
        table.add_row(
            measured.contender.name,
            f"{row['decode_tokens_per_second']:.1f}",
            speed_up(row),
            f"{row['acceptance']:.3f}" if row["acceptance"] else "",
            f"{mean.tokens:.2f}",
            f"{mean.hits:.3f}" if mean.hits else "",
            f"{mean.whole:.2f}",
            f"{mean.draft:.2f}",
            f"{mean.verify:.2f}",
            f"{1 - (mean.draft + mean.verify) / mean.whole:.3f}",
            f"{model:.2f}" if model else "",
        )
    Console(width=150).print(table)
    return table


def main() -> None:
    args = arguments()
    options = {"backup": "jit", **given(args, SpeculationConfig)}
    methods = methods_of(args.methods, args.draft, None, options)
    engine = {"prefix_caching": False, "max_model_len": 1024, **given(args, EngineConfig)}
    contenders = our_contenders(args.target, methods, batch=args.batch, **engine)
    if args.placement == "process":
        contenders = with_fewer_cores(contenders)
    checkpoint = open_checkpoint(args.target)
    sets = [load_workload(name, checkpoint.tokenizer(), count=args.prompts) for name in OWN_SETS]
    work = Workload("all", [prompt for one in sets for prompt in one.prompts], "", max(one.longest for one in sets))
    rows: Rows = {}
    for temperature in args.temperatures:
        asked = RequestSettings(args.tokens, temperature, batch=args.batch)
        with measuring("warm-up", Console()) as progress:
            found = measure(contenders, [work], asked, args.repeats, progress)
        if same_text(found) is False:
            raise SystemExit("the methods wrote different texts: this is a bug")
        title = f"{args.target} + {args.draft}, batch {args.batch}, temperature {temperature:g}"
        rows |= rows_of(show(title, found, with_model=args.batch == 1), prefix=f"T = {temperature:g}, ")
        for warning in warnings([measured for measured in found if LESS not in measured.contender.name]):
            Console().print(f"warning: {warning}")
    Console().print(checkpoint.note)
    record(args.json, rows)
    for contender in contenders:
        contender.close()


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="tiny-llama")
    parser.add_argument("--draft", default="tiny-llama-draft")
    parser.add_argument("--methods", default="ar,sd:1,sd:2,sd:3,sd:4,suffix:16", help="as for `ssd bench --compare`")
    add_options(parser, EngineConfig, "device")
    add_options(parser, SpeculationConfig, "budget", "backup", "placement", draft_quantization="--draft-quantization")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--temperatures", nargs="+", type=float, default=[0.0, 1.0])
    parser.add_argument("--prompts", type=int, default=4, help="of each set")
    parser.add_argument("--max-tokens", dest="tokens", type=int, default=64, help="maximum length of an answer")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=Path, help=HELP)
    return parser.parse_args()


if __name__ == "__main__":
    main()
