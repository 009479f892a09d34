"""The workloads of a benchmark: prompt sets, truncated and counted with the model's tokenizer."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Final

from ssd.bench.answers import Prompt
from ssd.errors import DataNotFound
from ssd.prompts import PromptSet, load_prompts
from ssd.text.tokenizer import Tokenizer

EXAMPLE: Final = "example"
RANDOM: Final = "random"
_EXAMPLES: Final = (
    "Explain in two sentences why the sky is blue.",
    "Write a Python function that returns the n-th Fibonacci number.",
    "A train leaves at 9:40 and arrives at 12:05. How long does the journey take?",
    "Give three tips for a good night's sleep.",
)
_RANDOM_LENGTH: Final = 128


@dataclass(frozen=True)
class Workload:
    """A prompt set, the same for every contender."""

    name: str
    prompts: list[Prompt]
    origin: str  # how many prompts, and where they come from, in words
    longest: int  # tokens of a prompt


def load_workload(
    name: str,
    tokenizer: Tokenizer,
    *,
    count: int,
    offset: int = 0,
    input_len: int | None = None,
    chat: bool = True,
    folder: str | None = None,
    seed: int = 0,
) -> Workload:
    """`count` prompts of a set from the `offset`-th on, truncated to `input_len` tokens."""
    if name == RANDOM:
        return _random(tokenizer, count, input_len or _RANDOM_LENGTH, seed)
    found = PromptSet(EXAMPLE, _EXAMPLES, "a few examples") if name == EXAMPLE else load_prompts(name, folder)
    known: list[Prompt] = [*(found.asked() if chat else found.prompts)]
    prompts = known[offset : offset + count]
    if not prompts:
        raise DataNotFound(
            f"prompt set {name!r} ({found.origin}) has no prompt after the first {offset}: lower the offset"
        )
    tokens = [encode(tokenizer, prompt) for prompt in prompts]
    if input_len is not None:
        prompts = [ids[:input_len] if len(ids) > input_len else p for p, ids in zip(prompts, tokens, strict=True)]
    longest = min(max(map(len, tokens)), input_len or max(map(len, tokens)))
    fewer = f" ({count} were asked for)" if len(prompts) < count else ""
    return Workload(name, prompts, f"{len(prompts)} of {len(known)} prompts{fewer}, {found.origin}", longest)


def encode(tokenizer: Tokenizer, prompt: Prompt) -> list[int]:
    if isinstance(prompt, str):
        return tokenizer.encode(prompt)
    if all(isinstance(item, int) for item in prompt):
        return list(prompt)  # type: ignore[arg-type]
    return tokenizer.encode(tokenizer.apply_chat_template(prompt), add_special_tokens=False)  # type: ignore[arg-type]


def _random(tokenizer: Tokenizer, count: int, length: int, seed: int) -> Workload:
    generator = random.Random(seed)
    vocabulary = [token for token in range(tokenizer.vocab_size) if not tokenizer.is_special(token)]
    prompts: list[Prompt] = [generator.choices(vocabulary, k=length) for _ in range(count)]
    return Workload(RANDOM, prompts, f"{count} prompts of random tokens, {length} each", length)
