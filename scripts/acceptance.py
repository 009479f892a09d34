"""How often is the draft right? Acceptance of a pair of models, set by set, at several temperatures.

    python scripts/acceptance.py tiny-llama tiny-llama-draft
    python scripts/acceptance.py tiny-llama tiny-llama-draft --data PROMPTS --prompts 100 --json out.json

The target writes its answers alone; then both models read them once. *Coupled* is how often the draft, given the same
noise, chooses the target's token (at temperature 0: the same argmax); *rejection* is the mean of sum(min(p, q)), what
the ratio rule accepts. Tokens a round follow exactly from the runs of right guesses, since with coupled sampling what
is accepted depends on the text alone. *Near* says how often, where the draft is wrong, the target's token is among its
next three: what a speculation cache with fan-out 3 could have prepared.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table

from ssd import LLM, SamplingParams
from ssd.assembly.build import build_runners
from ssd.assembly.device import resolve_device
from ssd.assembly.open import open_checkpoint
from ssd.config import EngineConfig
from ssd.core import Request, RequestOutput, Sequence
from ssd.execution.batch import Batch
from ssd.execution.runner import ModelRunner
from ssd.llm import Prompt
from ssd.prompts import OWN_SETS, load_prompts
from ssd.sampling.sampler import Needs, Rows, Sampler

LONGEST = 1536  # tokens of prompt and output
SLOT = 0  # of the one sequence that is read
COLUMNS = ("coupled", "rejection", "near", "tokens a round, K = 4", "K = 7")


@dataclass
class Tally:
    """Sums over the answers of one set at one temperature."""

    tokens: int = 0
    coupled: int = 0
    rejection: float = 0.0
    wrong: int = 0
    near: int = 0
    rounds: tuple[int, int] = (0, 0)  # K = 4, K = 7

    def add(self, right: list[bool], near: int, overlap: float) -> None:
        self.tokens += len(right)
        self.coupled += sum(right)
        self.rejection += overlap
        self.wrong += len(right) - sum(right)
        self.near += near
        self.rounds = (self.rounds[0] + rounds(right, 4), self.rounds[1] + rounds(right, 7))

    def figures(self) -> tuple[float, ...]:
        per_round = [self.tokens / n for n in self.rounds]
        return (self.coupled / self.tokens, self.rejection / self.tokens, self.near / max(1, self.wrong), *per_round)


def rounds(right: list[bool], k: int) -> int:
    """How many rounds of k drafted tokens it takes to write an answer."""
    place = count = 0
    while place < len(right):
        run = next((i for i, ok in enumerate(right[place : place + k]) if not ok), k)
        place += run + 1
        count += 1
    return count


def measure(llm: LLM, readers: list[ModelRunner], prompts: list[Prompt], params: SamplingParams) -> Tally:
    tally = Tally()
    for output in llm.generate(prompts, params):
        if output.error is None and output.token_ids:
            tally.add(*compare(readers, output, params))
    return tally


@torch.inference_mode()
def compare(readers: list[ModelRunner], output: RequestOutput, params: SamplingParams) -> tuple[list[bool], int, float]:
    """Which tokens the draft guesses, how many wrong guesses were near, and the summed overlap of the distributions."""
    prompt, answer = tuple(output.prompt_token_ids), output.token_ids
    request, seed = Request("", prompt, params), params.seed or 0
    sequence = Sequence(0, request, 0, seed, frozenset(), LONGEST, tokens=[*prompt, *answer])
    p, q = (read(reader, sequence) for reader in readers)
    positions = torch.arange(len(prompt), len(sequence.tokens), dtype=torch.int32, device=q.device)
    rows = Rows(torch.full_like(positions, SLOT), positions)
    best = Sampler(readers[1].state.sampling).best(q, rows, Needs.of([params]), 4)[0].tolist()
    right = [guesses[0] == token for guesses, token in zip(best, answer, strict=True)]
    near = sum(token in guesses[1:] for guesses, token in zip(best, answer, strict=True))
    if params.greedy:
        return right, near, float(sum(right))
    distributions = [(logits / params.temperature).softmax(-1) for logits in (p, q)]
    return right, near, float(torch.minimum(*distributions).sum())


def read(runner: ModelRunner, sequence: Sequence) -> torch.Tensor:
    """Logits of the positions that decided the output's tokens, in one pass over the whole text."""
    length = len(sequence.tokens) - 1
    runner.state.admit(SLOT, sequence)
    runner.tables.reset(SLOT)
    runner.tables.update([(SLOT, list(range(-(-length // runner.block_size))))])
    return runner.forward(Batch([SLOT], [0], [length], [sequence.num_output])).logits


def reader(model: str, device: str, dtype: str) -> ModelRunner:
    config = EngineConfig(
        model=model, dtype=dtype, max_model_len=LONGEST, max_num_seqs=1, num_kv_blocks=LONGEST, eager=True
    )
    return build_runners(config, open_checkpoint(model), None, resolve_device(device))[0]


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target")
    parser.add_argument("draft")
    parser.add_argument("--sets", nargs="+", default=list(OWN_SETS))
    parser.add_argument("--data", type=Path, help="folder of prompt sets; without it SSD_DATASET_DIR, else our own")
    parser.add_argument("--temperatures", nargs="+", type=float, default=[0.0, 1.0])
    parser.add_argument("--prompts", type=int, default=40, help="of each set")
    parser.add_argument("--tokens", type=int, default=128, help="of each answer, at most")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


def main() -> None:
    args = arguments()
    console = Console()
    llm = LLM(
        args.target, device=args.device, dtype=args.dtype, max_model_len=LONGEST, max_num_seqs=16, num_kv_blocks=LONGEST
    )
    readers = [reader(model, args.device, args.dtype) for model in (args.target, args.draft)]
    table = Table("set", "T", "tokens", *COLUMNS, title=f"{args.target} + {args.draft}")
    results = []
    for name, temperature in track([(name, t) for name in args.sets for t in args.temperatures], "measuring"):
        prompts = load_prompts(name, args.data)
        params = SamplingParams(temperature=temperature, seed=1, max_new_tokens=args.tokens)
        tally = measure(llm, readers, prompts.asked(args.prompts), params)
        results.append({"set": name, "origin": prompts.origin, "temperature": temperature, "tokens": tally.tokens})
        results[-1] |= dict(zip(COLUMNS, tally.figures(), strict=True))
        table.add_row(name, f"{temperature:g}", str(tally.tokens), *(f"{figure:.3f}" for figure in tally.figures()))
    console.print(table)
    for origin in dict.fromkeys(f"{row['set']}: {row['origin']}" for row in results):
        console.print(f"[dim]{origin}[/]")
    if args.json:
        args.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
