"""How much does speculation gain, and at which K? Plain decoding against speculative decoding, one stream, same text.

    python bench/speculation.py                                              # the bundled Llama pair
    python bench/speculation.py --target tiny-qwen3 --draft tiny-qwen3-draft --temperatures 0 0.7 1
    python bench/speculation.py --target graft:tiny-llama@llama-3.1-8b --draft graft:tiny-llama-draft@llama-3.2-1b

Decode speed after the first token, over prompts of four sets. The contenders alternate, so ratios hold on a noisy
machine; that every one of them writes the same tokens is checked.
"""

from __future__ import annotations

import argparse
import statistics
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console
from rich.progress import track
from rich.table import Table

from ssd import LLM, SamplingParams
from ssd.engine.metrics import EngineMetrics
from ssd.prompts import OWN_SETS, load_prompts


@dataclass
class Contender:
    """One way of decoding, and how long it took in each repeat."""

    name: str
    llm: LLM
    seconds: list[float] = field(default_factory=list)
    tokens: list[list[int]] = field(default_factory=list)

    def run(self, prompts: list[Any], params: SamplingParams) -> None:
        self.llm.engine.metrics = EngineMetrics()
        outputs = [self.llm.generate(prompt, params)[0] for prompt in prompts]
        spans = [(o.metrics.first_token, o.metrics.finished) for o in outputs]
        self.seconds.append(sum(end - start for start, end in spans if start is not None and end is not None))
        self.tokens = [output.token_ids for output in outputs]

    @property
    def decoded(self) -> int:
        return sum(len(tokens) - 1 for tokens in self.tokens)

    def row(self, plain: Contender) -> list[str]:
        counts = self.llm.engine.metrics
        ratios = [a / b for a, b in zip(plain.seconds, self.seconds, strict=True)]
        share = counts.spec_decode_num_accepted_tokens / max(1, counts.spec_decode_num_draft_tokens)
        return [
            self.name,
            f"{self.decoded / statistics.median(self.seconds):.1f}",
            f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})",
            f"{share:.3f}" if counts.spec_decode_num_drafts else "",
            f"{counts.output_tokens / counts.num_rounds:.2f}",
        ]


def main() -> None:
    args = arguments()
    console = Console()
    contenders = [Contender("plain", load(args, None))]
    contenders += [Contender(f"k = {k}", load(args, {"mode": "sd", "draft": args.draft, "k": k})) for k in args.k]
    if args.draft != "ngram":
        contenders.append(Contender("ngram, k = 5", load(args, {"mode": "sd", "draft": "ngram", "k": 5})))
    prompts = [prompt for name in OWN_SETS for prompt in load_prompts(name).asked(args.prompts)]
    for temperature in args.temperatures:
        params = SamplingParams(temperature=temperature, seed=5, max_new_tokens=args.tokens, ignore_eos=True)
        measure(contenders, prompts, params, args.repeats)
        table = Table("", "tokens/s", "of plain", "accepted", "tokens a round")
        table.title = f"{args.target}, drafted by {args.draft}, temperature {temperature:g}"
        for contender in contenders:
            table.add_row(*contender.row(contenders[0]))
        console.print(table)
    for note in {contender.llm.note for contender in contenders} - {""}:
        console.print(note)


def measure(contenders: list[Contender], prompts: list[Any], params: SamplingParams, repeats: int) -> None:
    for contender in contenders:
        contender.seconds = []
        contender.llm.generate(prompts[0], params)  # warm
    for contender in track([c for _ in range(repeats) for c in contenders], "measuring"):
        contender.run(prompts, params)
        if contender.tokens != contenders[0].tokens:
            raise SystemExit(f"{contender.name} wrote another text than plain decoding: this is a bug")


def load(args: argparse.Namespace, speculation: dict[str, Any] | None) -> LLM:
    options = {"device": args.device, "max_model_len": 1024, "max_num_seqs": 1, "num_kv_blocks": 65}
    return LLM(args.target, speculation=speculation, **options)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="tiny-llama")
    parser.add_argument("--draft", default="tiny-llama-draft")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--k", nargs="+", type=int, default=[1, 2, 3, 4, 5, 7])
    parser.add_argument("--temperatures", nargs="+", type=float, default=[0.0, 1.0])
    parser.add_argument("--prompts", type=int, default=4, help="of each set")
    parser.add_argument("--tokens", type=int, default=64, help="of each answer")
    parser.add_argument("--repeats", type=int, default=3)
    return parser.parse_args()


if __name__ == "__main__":
    main()
