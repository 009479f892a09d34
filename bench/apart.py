"""When does SSD pay? A draft on hardware of its own, beside SD with a draft on the target's GPU.

python bench/apart.py                                     # graft:tiny-qwen3@qwen3-32b, draft on the host's cores
python bench/apart.py --delays 0 0.5 1 2 4                # ms that every step of the draft takes longer
python bench/apart.py --model graft:tiny-llama@llama-3.1-8b --sd-draft graft:tiny-llama-draft@llama-3.2-1b \\
    --draft tiny-llama-draft --k 3 4
python bench/apart.py --draft graft:tiny-qwen3-draft@qwen3-0.6b --k 3 4 6     # a real 0.6B there, in 4 bits
python bench/apart.py --draft-url unix:ssd-draft.sock     # beside `ssd draft-server tiny-qwen3-draft`
python bench/apart.py --smoke                             # small models on a CPU: whether it runs

The target is a graft: a small trained model inside of a published shape, computed in full. `--draft` is the small
draft model itself, in a process of its own on the host's cores; `--sd-draft` is its graft, on the target's GPU. Both
compute the same function. So the small one plays the part of a draft model on another device: everything but its own
arithmetic is real (verification, messages, host, look-ups), and a delay per step stands for slower hardware.

All methods take turns on one engine. `round` is the time from one decision to the next, after a hit and after a miss;
`host`: the share of it in which the device waits for the host.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from arguments import add_options, given  # bench/arguments.py
from rich.console import Console
from rich.table import Table

from ssd import LLM, SamplingParams
from ssd.assembly import draft_workers, placement
from ssd.assembly.open import open_checkpoint
from ssd.bench import drawing
from ssd.bench.record import HELP, Figure, record
from ssd.config import EngineConfig, SpeculationConfig
from ssd.core import Origin, Outcome, Work
from ssd.decoding.drafter import Drafter
from ssd.decoding.observer import RoundObserver
from ssd.engine.engine import Engine
from ssd.parallel.process import Worker
from ssd.prompts import load_prompts

console = Console(width=170)


class Rounds(RoundObserver):
    """Durations and yields of the rounds by the origin of their drafts; of batches by their worst one."""

    def __init__(self) -> None:
        self.seconds: dict[Origin, list[float]] = defaultdict(list)
        self.tokens: dict[Origin, list[int]] = defaultdict(list)

    def decided(self, works: Seq[Work], outcomes: Seq[Outcome | None], seconds: float) -> None:
        if not all(work.is_decode for work in works):
            return
        found = [outcome for outcome in outcomes if outcome is not None]
        for outcome in found:
            self.tokens[outcome.origin].append(len(outcome.token_ids))
        worst = next((o.origin for o in found if o.origin is not Origin.HIT), Origin.HIT)
        self.seconds[worst].append(seconds)


class Figures(NamedTuple):
    tokens_per_second: float
    verification: float  # seconds
    drafting: float  # seconds that the draft model computes, a round
    host_share: float
    rounds: Rounds
    texts: list[list[int]]

    @property
    def tokens_per_round(self) -> float:
        counts = [count for counts in self.rounds.tokens.values() for count in counts]
        return sum(counts) / max(1, len(counts))

    def share(self, origin: Origin) -> float:
        return len(self.rounds.tokens[origin]) / max(1, sum(map(len, self.rounds.tokens.values())))

    def round_ms(self, *origins: Origin) -> float | None:
        values = sorted(value for origin in origins for value in self.rounds.seconds[origin])
        return 1e3 * values[len(values) // 2] if values else None


def measure(llm: LLM, drafter: Drafter, prompts: list[Any], args: argparse.Namespace, batch: int) -> Figures:
    """Decodes all prompts, `batch` at a time, after a first pass for a tenth of the tokens."""
    llm.driver.call(lambda engine: engine.use(drafter, batch))
    params = SamplingParams(max_new_tokens=args.tokens, ignore_eos=True, temperature=args.temperature, seed=7)
    groups = [prompts[i : i + batch] for i in range(0, len(prompts) - batch + 1, batch)]
    llm.generate(groups[0], SamplingParams(max_new_tokens=max(8, args.tokens // 10), ignore_eos=True))
    llm.driver.call(lambda engine: engine.use(drafter, batch))
    rounds, texts, decoding, busy = Rounds(), [], 0.0, drafter.stats.busy_seconds
    with llm.driver.observing(rounds):
        for group in groups:
            outputs = llm.generate(group, params)
            texts += [output.token_ids for output in outputs]
            first = max(output.metrics.first_token or 0.0 for output in outputs)
            decoding += max(output.metrics.finished or 0.0 for output in outputs) - first
    stats, num_rounds = llm.engine.round.stats, max(1, llm.engine.metrics.num_rounds)
    count = sum(len(text) - 1 for text in texts)
    verification = stats.verify_seconds / num_rounds
    drafting = (llm.engine.round.drafter.stats.busy_seconds - busy) / num_rounds
    host_share = stats.host_wait_seconds / stats.round_seconds
    return Figures(count / decoding, verification, drafting, host_share, rounds, texts)


@contextmanager
def worker_drafter(llm: LLM, args: argparse.Namespace, k: int, budget: int | str, delay: float) -> Iterator[Drafter]:
    """A draft in a process of its own, whose steps take `delay` ms longer."""
    options: dict[str, Any] = {
        "mode": "ssd",
        "draft": args.draft,
        "k": k,
        "draft_device": args.draft_device,
        "placement": "process",
    }
    wanted = SpeculationConfig(**given(args, SpeculationConfig) | options | {"budget": budget})
    device = torch.device(llm.config.device)
    speculation = placement.sized(placement.placed(wanted, device), open_checkpoint(args.draft), device)
    argv = [sys.executable, __file__, "--worker", str(delay)]
    own: Any = draft_workers
    own.Worker = lambda setup: Worker(setup, argv)
    config = _config(llm, args, speculation)
    with _closing(llm, lambda engine: draft_workers.start_workers(config, engine.round.target.state)) as drafter:
        yield drafter


def server_drafter(llm: LLM, args: argparse.Namespace, k: int, budget: int | str) -> AbstractContextManager[Drafter]:
    """A draft in the draft server that `--draft-url` names."""
    options = {"mode": "ssd", "draft_url": args.server, "k": k, "budget": budget}
    config = _config(llm, args, SpeculationConfig(**options))
    tokenizer = llm.tokenizer
    return _closing(
        llm, lambda engine: draft_workers.connect_draft_server(config, engine.round.target.state, tokenizer)
    )


def _config(llm: LLM, args: argparse.Namespace, speculation: SpeculationConfig) -> EngineConfig:
    length, most = llm.config.max_model_len, max(args.batches)
    return EngineConfig(args.model, max_model_len=length, max_num_seqs=most, speculation=speculation)


@contextmanager
def _closing(llm: LLM, make: Callable[[Engine], Drafter]) -> Iterator[Drafter]:
    """The drafter that `make` builds for the engine, meanwhile."""
    drafter = llm.driver.call(make)
    try:
        yield drafter
    finally:
        llm.driver.call(lambda engine: engine.use(Drafter(), 1))
        drafter.close()


def run_worker(delay: float, fd: int) -> None:
    """The worker, each step of whose draft takes `delay` ms longer."""
    from ssd.assembly.draft_workers import build_worker_drafter
    from ssd.drafting.runner import DraftRunner
    from ssd.drafting.worker import run

    for name in ("read", "extend"):
        compute = getattr(DraftRunner, name)

        def delayed(self: Any, *arguments: Any, compute: Any = compute) -> Any:
            found, end = compute(self, *arguments), time.perf_counter() + delay / 1e3
            while time.perf_counter() < end:
                pass
            return found

        setattr(DraftRunner, name, delayed)
    run(fd, build_worker_drafter)


def main() -> None:
    if sys.argv[1:2] == ["--worker"]:
        run_worker(float(sys.argv[2]), int(sys.argv[-1]))
        return
    args = _arguments()
    if args.picture:
        drawing.check_file("--picture", args.picture, (".png", ".svg"))
    rows = measured(args)
    show(rows, args)
    record(args.json, {_name(row): _figures(row) for row in rows}, [f"T = {args.temperature:g}"])
    if args.picture:
        draw(rows, args.picture, f"{args.model}, T = {args.temperature:g}")
    if any(row["differing"] for row in rows):
        raise SystemExit("some texts differ from plain decoding")


def measured(args: argparse.Namespace) -> list[dict[str, Any]]:
    speculation = {"mode": "sd", "draft": args.sd_draft, "k": max(args.k + args.sd_k)}
    longest = 512 + args.tokens
    llm = LLM(args.model, max_model_len=longest, max_num_seqs=max(args.batches), speculation=speculation)
    with llm:
        prompts = [
            prompt for each in zip(*(load_prompts(s).asked() for s in args.sets), strict=False) for prompt in each
        ]
        sd = llm.engine.round.drafter
        return [row for batch in args.batches for row in compare(llm, sd, prompts[: args.prompts], args, batch)]


def compare(llm: LLM, sd: Drafter, prompts: list[Any], args: argparse.Namespace, batch: int) -> list[dict[str, Any]]:
    prompts = prompts * -(-batch // len(prompts))
    plain = measure(llm, Drafter(), prompts, args, batch)
    rows: list[dict[str, Any]] = []

    def add(method: str, k: int, figures: Figures, delay: float = 0.0, **others: Any) -> None:
        rows.append(_row(method, k, delay, batch, figures, plain) | others)
        others_named = "".join(f", {name} {value}" for name, value in others.items())
        console.print(f"batch {batch}, {method}, K = {k}{others_named}: {figures.tokens_per_second:.1f} tokens/s")

    add("ar", 0, plain)
    for k in args.sd_k:
        sd.lookahead = k
        add("sd", k, measure(llm, sd, prompts, args, batch))
    for delay, k, budget in itertools.product(args.delays, args.k, args.budget):
        with worker_drafter(llm, args, k, budget, delay) as drafter:
            add("ssd", k, measure(llm, drafter, prompts, args, batch), delay, budget=budget)
    for k, budget in itertools.product(args.k, args.budget if args.server else ()):
        with server_drafter(llm, args, k, budget) as drafter:
            add("ssd, server", k, measure(llm, drafter, prompts, args, batch), budget=budget)
    return rows


def _row(method: str, k: int, delay: float, batch: int, figures: Figures, plain: Figures) -> dict[str, Any]:
    missed = (Origin.JIT, Origin.SIBLING, Origin.NONE) if method != "sd" else (Origin.DRAFT, Origin.NONE)
    origins = {origin.name.lower(): round(figures.share(origin), 3) for origin in Origin if figures.share(origin)}
    tokens = {o.name.lower(): round(sum(t) / len(t), 2) for o, t in figures.rounds.tokens.items() if t}
    return {
        "batch": batch,
        "method": method,
        "k": k,
        "delay_ms": delay,
        "round_ms_after_a_hit": figures.round_ms(Origin.HIT),
        "round_ms_otherwise": figures.round_ms(*missed),
        "verification_ms": 1e3 * figures.verification,
        "draft_ms": 1e3 * figures.drafting,
        "host_share": figures.host_share,
        "tokens_per_round": figures.tokens_per_round,
        "hits": figures.share(Origin.HIT),
        "origins": origins,
        "tokens_by_origin": tokens,
        "tokens_per_second": figures.tokens_per_second,
        "differing": sum(a != b for a, b in zip(figures.texts, plain.texts, strict=True)),
    }


def _name(row: dict[str, Any]) -> str:
    draft = f", K = {row['k']}" if row["k"] else ""
    branches = f", {row['budget']} branches, {row['delay_ms']:g} ms delay" if "budget" in row else ""
    return f"batch {row['batch']}, {row['method']}{draft}{branches}"


def _figures(row: dict[str, Any]) -> dict[str, Figure]:
    named = ("batch", "k", "delay_ms", "budget")
    return {name: round(row[name], 3) for name in row if isinstance(row[name], float | int) and name not in named}


def show(rows: Seq[dict[str, Any]], args: argparse.Namespace) -> None:
    title = f"{args.model}, SD: {args.sd_draft}, SSD: {args.draft} on {args.draft_device}, T = {args.temperature}"
    names = (
        "batch",
        "method",
        "k",
        "budget",
        "delay",
        "hit ms",
        "else ms",
        "verify ms",
        "draft ms",
        "host",
        "tok/round",
    )
    table = Table(*names, "origins: share, tokens", "tok/s", "/ SD", "differ", title=title)
    for row in rows:
        own = [r for r in rows if r["batch"] == row["batch"] and r["method"] == "sd"]
        best = max(r["tokens_per_second"] for r in own)
        times = [row[name] for name in ("round_ms_after_a_hit", "round_ms_otherwise", "verification_ms", "draft_ms")]
        origins = ", ".join(f"{o} {s:.2f} {row['tokens_by_origin'][o]}" for o, s in row["origins"].items())
        table.add_row(
            *(str(row["batch"]), row["method"], str(row["k"]), str(row.get("budget", "")), f"{row['delay_ms']:g}"),
            *("-" if value is None else f"{value:.2f}" for value in times),
            *(f"{row['host_share']:.1%}", f"{row['tokens_per_round']:.2f}", origins),
            *(f"{row['tokens_per_second']:.1f}", f"{row['tokens_per_second'] / best:.2f}", str(row["differing"])),
        )
    console.print(table)


def draw(rows: Seq[dict[str, Any]], file: Path, title: str) -> None:
    """SSD / SD over the time of a preparation, in verifications; one line per batch size and K."""
    figure = drawing.new_figure(6.4, 3.8)
    axes = figure.subplots()
    for batch in sorted({row["batch"] for row in rows}):
        own = [row for row in rows if row["batch"] == batch]
        best = max(row["tokens_per_second"] for row in own if row["method"] == "sd")
        for k in sorted({row["k"] for row in own if row["method"] == "ssd"}):
            points = [row for row in own if row["method"] == "ssd" and row["k"] == k]
            ratios = [row["draft_ms"] / row["verification_ms"] for row in points]
            speeds = [row["tokens_per_second"] / best for row in points]
            axes.plot(ratios, speeds, marker="o", label=f"batch {batch}, K = {k}")
    axes.axhline(1.0, color="#888888", linewidth=0.8)
    axes.set_xlabel("draft model's time a round / verification")
    axes.set_ylabel("SSD / SD, tokens per second")
    axes.set_title(title, fontsize=9)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(fontsize=8, frameon=False)
    file.write_bytes(drawing.encode(figure, file.suffix[1:]))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="graft:tiny-qwen3@qwen3-32b")
    parser.add_argument("--sd-draft", default="graft:tiny-qwen3-draft@qwen3-0.6b", help="SD's, on the target's GPU")
    parser.add_argument("--draft", default="tiny-qwen3-draft", help="SSD's, in a process of its own")
    parser.add_argument("--draft-device", default="cpu")
    parser.add_argument(
        "--draft-url", dest="server", help="a draft server of the same draft: SSD is measured with it, too"
    )
    parser.add_argument("--k", type=int, nargs="+", default=[6, 8], help="SSD's draft lengths")
    parser.add_argument("--sd-k", type=int, nargs="+", default=[4, 6], help="SD's draft lengths")
    parser.add_argument(
        "--budget", nargs="+", default=[16], type=lambda text: text if text == "auto" else int(text), help="SSD's"
    )
    names = {"draft_threads": "--draft-threads", "draft_quantization": "--draft-quantization"}
    add_options(parser, SpeculationConfig, **names)
    parser.add_argument("--backup", default="auto")
    parser.add_argument("--batches", type=int, nargs="+", default=[1])
    parser.add_argument("--delays", type=float, nargs="+", default=[0.0], help="ms added to every step of SSD's draft")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--tokens", type=int, default=192)
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--sets", nargs="+", default=["humaneval", "gsm8k"])
    parser.add_argument("--json", type=Path, help=HELP)
    parser.add_argument("--picture", type=Path, help="PNG or SVG: SSD / SD over the draft's time")
    parser.add_argument("--smoke", action="store_true", help="small models on this CPU: whether it runs")
    args = parser.parse_args()
    if args.smoke:
        args.model, args.sd_draft, args.draft = "tiny-llama", "tiny-llama-draft", "tiny-llama-draft"
        args.k, args.sd_k, args.tokens, args.prompts = [3], [3], 24, 2
    return args


if __name__ == "__main__":
    main()
