"""Hit rates of SSD over prompt sets, temperatures, acceptance rules, K and fan-out policies.

    python bench/hits.py                                      # table, and docs/pictures/hit-rates.svg
    SSD_DATASET_DIR=… python bench/hits.py --prompts 32 --max-tokens 128

After a miss (backup jit) the draft model writes the same draft that a hit would have found, so the rounds do not depend
on the policy. One generation is therefore enough for all policies: each round is recorded (confidence of the draft
tokens, number accepted, rank of the target's own token), and the policies are evaluated afterwards.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table

from ssd import LLM, SamplingParams
from ssd.bench.record import HELP, record, rows_of
from ssd.drafting.fan_out import RANKS, Adaptive, FanOut, Geometric, Listed, OutcomeStatistics
from ssd.drafting.ssd import SSDDrafter
from ssd.engine.engine import Engine
from ssd.prompts import OWN_SETS, load_prompts

Round = tuple[list[float], int, int | None]  # confidence of each drafted token, accepted, rank of the target's own
BUDGETS = (2, 4, 6, 8, 12, 16, 20, 24)


@dataclass
class RecordedRounds(OutcomeStatistics):
    """Records every round instead of updating the statistics."""

    rounds: list[Round] = field(default_factory=list)

    def learn(self, confidence: Sequence[float], accepted: int, rank: int | None) -> None:
        self.rounds.append((list(confidence), accepted, rank))


def play(args: argparse.Namespace, name: str, temperature: float, rule: str, c: float, k: int) -> list[Round]:
    speculation = {"mode": "ssd", "draft": args.draft, "k": k, "acceptance": rule, "saguaro_c": c}
    speculation |= {"placement": "inline", "backup": "jit", "budget": 1}
    params = SamplingParams(temperature=temperature, seed=1, max_new_tokens=args.tokens, ignore_eos=True)
    with LLM(args.target, device=args.device, max_model_len=2048, max_num_seqs=8, speculation=speculation) as llm:
        recorded = llm.driver.call(record_rounds)
        llm.generate(load_prompts(name).asked(args.prompts), params)
    return recorded.rounds


def record_rounds(engine: Engine) -> RecordedRounds:
    drafter = engine.round.drafter
    if not isinstance(drafter, SSDDrafter):
        raise AssertionError("the engine was built for another mode")
    drafter.statistics = recorded = RecordedRounds()
    return recorded


def hit_rate(policy: FanOut, rounds: Sequence[Round], budget: int) -> float:
    """Share of rounds whose outcome was planned; statistics are updated online, as in the engine."""
    learned, hits = OutcomeStatistics(), 0
    for confidence, accepted, rank in rounds:
        hits += (accepted, rank) in planned(policy, learned, confidence, budget)
        learned.learn(confidence, accepted, rank)
    return hits / max(1, len(rounds))


def planned(
    policy: FanOut, learned: OutcomeStatistics, confidence: Sequence[float], budget: int
) -> set[tuple[int, int]]:
    """The outcomes that a policy prepares for, for a draft that was a hit."""
    drafted = len(confidence)
    width = min(policy.width(budget), RANKS * (drafted + 1))
    constants = torch.from_numpy(policy.constants(learned, drafted, width))
    after, rank = policy.plan(
        constants, torch.tensor([confidence]), torch.tensor([True]), torch.tensor([drafted]), width
    )
    return set(zip(after[0].tolist(), rank[0].tolist(), strict=True))


def uniform(budget: int, k: int) -> Listed:
    """An even split of the budget over the positions."""
    each, more = divmod(budget, k + 1)
    counts = tuple(each + (place < more) for place in range(k + 1))
    return Listed(counts, counts)


def yields(rounds: Sequence[Round]) -> float:
    return statistics.mean(accepted + 1 for _, accepted, _ in rounds)


def main() -> None:
    args = arguments()
    console = Console(width=140)
    rules = [("coupled", 1.0), *(("rejection", c) for c in args.c)]
    table = Table("set", "T", "rule", "tokens/round", "three each", "geometric 16", "adaptive 16", "adaptive 24")
    table.title = f"{args.target} + {args.draft}, K = {args.k[0]}: hit rates"
    played: dict[float, list[list[Round]]] = {}  # by temperature, one per set
    cases = [(n, t, r, c) for n in OWN_SETS for t in args.temperatures for r, c in rules if t or r == "coupled"]
    for name, temperature, rule, c in track(cases, "playing", transient=True):
        rounds = play(args, name, temperature, rule, c, args.k[0])
        three = Listed((3,) * (args.k[0] + 1), (3,) * (args.k[0] + 1))
        rates = [hit_rate(three, rounds, 99), hit_rate(Geometric(), rounds, 16)]
        rates += [hit_rate(Adaptive(), rounds, budget) for budget in (16, 24)]
        title = rule if c == 1.0 else f"{rule}, C = {c:g}"
        table.add_row(name, f"{temperature:g}", title, f"{yields(rounds):.2f}", *(f"{rate:.3f}" for rate in rates))
        if rule == "coupled":
            played.setdefault(temperature, []).append(rounds)
    console.print(table)
    over_k = sweep(args)
    console.print(over_k)
    record(args.json, rows_of(table, names=3) | rows_of(over_k, names=2), [str(table.title)])
    args.picture.write_text(picture(curves_of(played, args.k[0]), args.k[0]), encoding="utf-8")
    console.print(f"written: {args.picture}")


def sweep(args: argparse.Namespace) -> Table:
    """Hit rates over K: coupled rule, mean of the sets."""
    table = Table("K", "T", "tokens/round", *(f"{n} each" for n in (1, 2, 3, 4)), "adaptive 16")
    table.title = "coupled, mean of the sets"
    for k in track(args.k, "sweeping", transient=True):
        for temperature in args.temperatures:
            played = [play(args, name, temperature, "coupled", 1.0, k) for name in OWN_SETS]
            each = [[hit_rate(Listed((n,) * (k + 1), (n,) * (k + 1)), r, 99) for r in played] for n in (1, 2, 3, 4)]
            each.append([hit_rate(Adaptive(), r, 16) for r in played])
            rates = [f"{statistics.mean(found):.3f}" for found in each]
            table.add_row(str(k), f"{temperature:g}", f"{statistics.mean(map(yields, played)):.2f}", *rates)
    return table


# --- the picture ------------------------------------------------------------------------------------------------------

STYLE = """<style>text{font:12px sans-serif;fill:#555}.middle{text-anchor:middle}.end{text-anchor:end}line{stroke:#ccc}
polyline{fill:none;stroke-width:2}.adaptive{stroke:#2a7de1}.geometric{stroke:#e08a1e}.uniform{stroke:#8a8a8a}
@media(prefers-color-scheme:dark){text{fill:#bbb}line{stroke:#444}}</style>"""
POLICIES: dict[str, Callable[[int, int], FanOut]] = {  # of budget and K
    "adaptive": lambda budget, k: Adaptive(),
    "geometric": lambda budget, k: Geometric(),
    "uniform": uniform,
}
Curves = dict[float, dict[str, list[float]]]  # hit rates by temperature and policy, one per budget


def curves_of(played: dict[float, list[list[Round]]], k: int) -> Curves:
    """Hit rates, mean of the sets."""

    def rates(policy: Callable[[int, int], FanOut], sets: list[list[Round]]) -> list[float]:
        return [statistics.mean(hit_rate(policy(budget, k), rounds, budget) for rounds in sets) for budget in BUDGETS]

    return {t: {name: rates(policy, sets) for name, policy in POLICIES.items()} for t, sets in played.items()}


def picture(curves: Curves, k: int) -> str:
    """Hit rate over budget, one panel per temperature, below the legend."""
    names = {"adaptive": "adaptive", "geometric": "geometric", "uniform": "uniform: the same number at every position"}
    legend = "".join(
        f'<polyline class="{name}" points="{60 + 110 * i},16 {84 + 110 * i},16"/>'
        f'<text x="{90 + 110 * i}" y="20">{names[name]}</text>'
        for i, name in enumerate(POLICIES)
    )
    panels = "".join(
        f'<g transform="translate({260 * i} 34)">{panel(f"T = {temperature:g}, K = {k}", rates)}</g>'
        for i, (temperature, rates) in enumerate(curves.items())
    )
    box = f'viewBox="0 0 {260 * len(curves)} 300" role="img" aria-label="Hit rates over the number of branches"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {box}>{STYLE}{legend}{panels}</svg>\n'


def panel(title: str, rates: dict[str, list[float]]) -> str:
    parts = [f'<text class="middle" x="152" y="22">{title}</text>']
    parts.append('<text class="middle" transform="translate(14 130) rotate(-90)">hit rate</text>')
    parts.append('<text class="middle" x="152" y="258">prepared branches</text>')
    for rate in (0.0, 0.25, 0.5, 0.75, 1.0):
        y = 220 - 180 * rate
        parts.append(f'<line x1="56" y1="{y}" x2="248" y2="{y}"/>')
        parts.append(f'<text class="end" x="50" y="{y + 4}">{rate:g}</text>')
    parts += [f'<text class="middle" x="{56 + 8 * budget}" y="236">{budget}</text>' for budget in (4, 8, 16, 24)]
    for name, found in rates.items():
        points = " ".join(f"{56 + 8 * b},{220 - 180 * rate:.1f}" for b, rate in zip(BUDGETS, found, strict=True))
        parts.append(f'<polyline class="{name}" points="{points}"/>')
    return "".join(parts)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="tiny-llama")
    parser.add_argument("--draft", default="tiny-llama-draft")
    parser.add_argument("--device", default="auto")
    parser.add_argument(
        "--k", nargs="+", type=int, default=[4, 2, 6], help="the first one is the tables' and picture's"
    )
    parser.add_argument(
        "--c", nargs="+", type=float, default=[1.0, 0.5, 0.25], help="Saguaro's C, of the rejection rule"
    )
    parser.add_argument("--temperatures", nargs="+", type=float, default=[0.0, 0.7, 1.0])
    parser.add_argument("--prompts", type=int, default=8, help="of each set")
    parser.add_argument("--max-tokens", dest="tokens", type=int, default=64, help="of each answer")
    parser.add_argument("--picture", type=Path, default=Path("docs/pictures/hit-rates.svg"))
    parser.add_argument("--json", type=Path, help=HELP)
    return parser.parse_args()


if __name__ == "__main__":
    main()
