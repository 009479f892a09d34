"""Settings of `ssd simulate`: fields with a description are its flags."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal

from ssd.config import K_DEFAULT
from ssd.errors import ConfigError
from ssd.options import option, options_of, validate
from ssd.sampling import rates
from ssd.simulation.hardware import GPUS

if TYPE_CHECKING:
    from ssd.simulation.rounds import Mode

MODES: Final[tuple[Mode, ...]] = ("ar", "sd", "ssd")
_GPU: Final = "|".join(GPUS)
_DRAFTS: Final = ("k", "accept", "hits", "budget", "backup", "draft_step_ms", "placement")  # only with a draft
_APART: Final = ("draft_gpu", "draft_replicas", "shared_drafts", "link_us", "draft_price")  # only with GPUs of its own
_EXPECTS: Final = f"one of {', '.join(GPUS)}"


@dataclass(frozen=True)
class SimulationConfig:
    """Models, hardware and load of a simulation."""

    model: str
    draft: str | None = option(None, "Draft model, named as MODEL is; eagle: an EAGLE-3 head.")
    modes: tuple[str, ...] = option(
        (),
        "Modes, separated by commas: ar, sd, ssd; ratios are to the first. Left out: ar, and with a draft all.",
        flags=("--compare",),
        listed=True,
    )
    gpu: str = option("h200", f"GPU type: {', '.join(GPUS)}.", pattern=_GPU, expects=_EXPECTS)
    draft_gpu: str | None = option(
        None, "GPU type of a draft that has GPUs of its own; left out: as --gpu.", pattern=_GPU, expects=_EXPECTS
    )
    gpus: int | None = option(
        None, "GPUs in all, on which as many engines run as fit; left out: those of one engine.", least=1
    )
    tensor_parallel_size: int = option(1, "GPUs of a target.", least=1)
    placement: Literal["process", "stream"] = option(
        "process", "SSD's draft: on GPUs of its own (process), or beside the verification on the target's (stream)."
    )
    draft_replicas: int = option(
        1, "Draft models of an engine, each on a GPU, that share the outcomes.", least=1, most=4
    )
    shared_drafts: int = option(0, "Draft servers that all engines share; 0: every engine has its own.", least=0)
    batch: int = option(1, "Sequences of an engine at the same time.", least=1)
    rate: float | None = option(
        None, "Requests that arrive in a second, at random times; left out: batches are always full.", above=0
    )
    requests: int | None = option(
        None, "Requests in all; left out: 200 with --rate, else a fixed number of rounds.", least=1
    )
    prompt: int = option(256, "Tokens of a prompt. Without --rate it is read already.", least=1)
    tokens: int = option(128, "Tokens of an answer.", least=1)
    k: int = option(K_DEFAULT, "Draft tokens per round.", least=1, most=64)
    accept: str | None = option(
        None,
        "How many draft tokens are accepted: 3.5 for the mean tokens of a round, or rates by position such as "
        "0.9,0.8,0.7; 0.8: that rate at every position. `ssd bench` measures it.",
        pattern=rates.PATTERN,
        expects=rates.EXPECTS,
    )
    hits: float = option(
        0.77,
        "ssd: share of drafts that one draft model has prepared. The default is what 16 branches had at T = 0 "
        "(bench/results/hit-rates.json).",
        least=0,
        most=1,
    )
    budget: int = option(
        16, "ssd: branches of a sequence that one draft model prepares, at most 256 of a batch.", least=1
    )
    backup: Literal["auto", "jit", "fast"] = option(
        "auto",
        "ssd, after a miss: wait for a draft (jit), take a sibling's (fast, of which nothing is accepted), or either.",
    )
    draft_step_ms: float | None = option(
        None, "Measured time of a step of the draft, whatever its rows; left out: by its size.", above=0
    )
    link_us: float = option(
        10.0, "Microseconds of a message between target and draft, one way; the default is an assumption.", least=0
    )
    measured_ar: float | None = option(
        None, "Measured tokens/s of the target alone at batch 1: all times are scaled to it.", above=0
    )
    price: float | None = option(None, "Price of a GPU for an hour, in any currency: adds the cost of tokens.", above=0)
    draft_price: float | None = option(None, "The same of a --draft-gpu; left out: as --price.", above=0)
    seed: int = option(0, "Of arrivals, acceptance and hits.")

    def __post_init__(self) -> None:
        validate(self)
        object.__setattr__(self, "modes", self.modes or (MODES if self.draft else MODES[:1]))
        wrong = next((mode for mode in self.modes if mode not in MODES), None)
        if wrong is not None:
            raise ConfigError(f"compare={','.join(self.modes)!r}: must be some of {', '.join(MODES)}")
        if self.drafts and self.draft is None:
            raise ConfigError("draft: sd and ssd need a draft: name one with --draft, or compare ar only")
        if self.drafts and self.accept is None:
            raise ConfigError(
                "accept: sd and ssd need how many draft tokens are accepted, such as 3.5 for the mean tokens of a "
                "round; `ssd bench MODEL --draft DRAFT --compare ar,sd` measures it"
            )
        if self.draft is None and (name := self._given(*_DRAFTS, *_APART)):
            raise ConfigError(f"{name}={getattr(self, name)!r}: there is no draft: name one with --draft")
        if self.placement == "stream" and (name := self._given("draft_step_ms", *_APART)):
            raise ConfigError(f"{name}={getattr(self, name)!r}: only with --placement process")
        if self.draft_price is not None and self.price is None:
            raise ConfigError(f"draft_price={self.draft_price}: give the --price of the target's GPUs, too")
        self.accepted  # noqa: B018 (refuses rates that this k cannot have)

    def _given(self, *names: str) -> str | None:
        """The first of these fields that is not as by default."""
        known = options_of(SimulationConfig)
        return next((name for name in names if getattr(self, name) != known[name].default), None)

    @property
    def drafts(self) -> bool:
        return any(mode != "ar" for mode in self.modes)

    @property
    def accepted(self) -> list[float]:
        """Rates by position; none without a draft."""
        if self.accept is None:
            return []
        try:
            return rates.rates_of(rates.parsed(self.accept), self.k)
        except ValueError as error:
            raise ConfigError(f"accept={self.accept!r}, k={self.k}: {error}") from None
