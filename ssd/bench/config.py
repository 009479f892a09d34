"""Settings of `ssd bench` and of `ssd bench serve`: fields with a description are flags of these commands."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, field, replace
from itertools import cycle, islice
from typing import Any, Final

from ssd.bench.answers import Prompt, RequestSettings
from ssd.errors import ConfigError
from ssd.options import option, validate
from ssd.prompts import OWN_SETS, load_prompts, own_set
from ssd.sampling import rates

PEERS: Final = ("hf", "vllm", "sglang", "llamacpp")
SHAREGPT: Final = "sharegpt"
_SIGMA: Final = 1.0  # standard deviation of the logarithm of a length, about that of ShareGPT's conversations
_WORDS_OF: Final = "alpaca"  # the own prompt set whose words make up random prompts


@dataclass(frozen=True)
class BenchConfig:
    """Settings of a benchmark."""

    model: str
    draft: str | None = None
    methods: str = option(
        "ar,sd,ssd", "Methods to measure, separated by commas; ratios are to the first.", flags=("--compare",)
    )
    peers: tuple[str, ...] = option(
        (),
        "Other engines, separated by commas: hf, vllm, sglang, llamacpp (vllm:4: with 4 draft tokens), or URLs of "
        "OpenAI-compatible servers.",
        flags=("--peer",),
        listed=True,
    )
    k: int | str | None = None  # draft tokens of methods without a number; None: as many as an engine takes
    speculation: dict[str, Any] = field(default_factory=dict)  # options of ssd: fan_out, budget, backup, placement, …
    sets: tuple[str, ...] = option(
        tuple(OWN_SETS), "Prompt sets, separated by commas; random: random tokens.", listed=True
    )
    num_prompts: int = option(8, "Number of prompts of each set.", least=1, flags=("--prompts",))
    prompt_offset: int = option(0, "Skip this number of prompts of each set.", least=0)
    input_len: int | None = option(None, "Truncate prompts to this number of tokens.", least=1)
    output_len: int = option(128, "Maximum length of an answer.", least=1, flags=("--max-tokens", "-m"))
    chat: bool = option(True, "Send questions through the chat template.")
    folder: str | None = option(None, "Folder of prompt sets.")
    batch: int = option(1, "Requests at the same time.", least=1)
    temperature: float = 0.0
    seed: int = 0
    accept: str | None = option(
        None,
        "Draw how many draft tokens are accepted: 5.5 for the mean number of tokens of a round, or rates by position "
        "such as 0.9,0.8,0.7. For drafts with random weights: the text is not the model's.",
        pattern=rates.PATTERN,
        expects=rates.EXPECTS,
    )
    hits: float | None = option(
        None,
        "With --accept, ssd on the target's device: draw how often a draft has been prepared, with this probability.",
        least=0,
        most=1,
    )
    repeats: int = option(2, "Turns of every method on every prompt.", least=1)
    max_rounds: int | None = option(None, "Stop every set after this number of rounds.", least=1)
    engine: dict[str, Any] = field(default_factory=dict)  # other options of the engine: device, dtype, eager, …
    notes: tuple[str, ...] = ()  # for the report

    def __post_init__(self) -> None:
        validate(self)
        if not self.sets:
            raise ConfigError("sets: name at least one set of prompts")
        if self.accept is not None and self.speculation.get("acceptance", "coupled") != "coupled":
            raise ConfigError("accept: only with --acceptance coupled")
        if self.hits is not None and self.accept is None:
            raise ConfigError("hits: only with --accept")
        for peer in self.peers:
            name, _, k = peer.partition(":")
            if not is_url(peer) and (name not in PEERS or (k and not k.isdecimal())):
                raise ConfigError(
                    f"peer {peer!r}: must be {', '.join(PEERS)}, such as hf or hf:4, or the URL of a server"
                )
            if name in PEERS and k and self.draft is None:
                raise ConfigError(f"peer {peer!r} is to draft, and there is no draft: name one with --draft")

    @property
    def accepted(self) -> tuple[float, ...] | None:
        """`accept` as numbers."""
        return None if self.accept is None else rates.parsed(self.accept)


def is_url(peer: str) -> bool:
    return peer.startswith(("http://", "https://"))


@dataclass(frozen=True)
class Requests:
    """What is sent at every point of a sweep. Lengths are medians of log-normal distributions, in tokens."""

    dataset: str = option(SHAREGPT, "sharegpt (random words of such lengths), or a prompt set.")
    num_prompts: int = option(100, "Requests at every point of the sweep.", least=1)
    input_len: int = option(80, "Median length of sharegpt's prompts.", least=1)  # words: about as many tokens
    output_len: int = option(160, "Median length of answers.", least=1)
    max_input_len: int = option(1024, "Maximum length of such a prompt.", least=1)
    max_output_len: int = option(1024, "Maximum length of an answer.", least=1)
    temperature: float = 0.0
    seed: int = 0
    ignore_eos: bool = option(True, "Answers have the length that was drawn for them.")
    folder: str | None = option(None, "Folder of prompt sets.")

    def __post_init__(self) -> None:
        validate(self)

    def draw(self) -> list[tuple[Prompt, RequestSettings]]:
        """The same requests for the same seed."""
        generator = random.Random(self.seed)
        asked = RequestSettings(1, self.temperature, ignore_eos=self.ignore_eos)
        lengths = [_length(generator, self.output_len, self.max_output_len) for _ in range(self.num_prompts)]
        return [
            (prompt, replace(asked, max_new_tokens=length, seed=self.seed + i))
            for i, (prompt, length) in enumerate(zip(self._prompts(generator), lengths, strict=True))
        ]

    def _prompts(self, generator: random.Random) -> list[Prompt]:
        if self.dataset != SHAREGPT:
            return list(islice(cycle(load_prompts(self.dataset, self.folder).asked()), self.num_prompts))
        words = " ".join(own_set(_WORDS_OF).prompts).split()
        sizes = [_length(generator, self.input_len, self.max_input_len) for _ in range(self.num_prompts)]
        return [[{"role": "user", "content": " ".join(generator.choices(words, k=size))}] for size in sizes]


def _length(generator: random.Random, median: int, most: int) -> int:
    return max(1, min(most, round(generator.lognormvariate(math.log(median), _SIGMA))))
