"""Options of an engine: frozen and validated, built by the same code from keywords, the command line or JSON.

Knows nothing of how they are used.
"""

from __future__ import annotations

import dataclasses
import difflib
import os
import re
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import Any, Literal, TypedDict, TypeVar, get_args, get_type_hints

from ssd.core import is_int, plain
from ssd.errors import ConfigError

T = TypeVar("T")
DType = Literal["auto", "float32", "bfloat16", "float16"]


NGRAM = "ngram"
K_MAX = 8  # largest k of k="auto"
BUDGETS = (8, 16, 32)  # choices of budget="auto"
_AHEAD = {"fan_out", "fan_out_hit", "fan_out_miss", "budget", "backup", "placement", "draft_replicas"}  # of mode="ssd"


@dataclass(frozen=True)
class SpeculationConfig:
    """Options of speculative decoding.

    `ar`: autoregressive decoding without drafts. `sd`: `draft` proposes `k` tokens per round while the target waits.
    `ssd`: while the target verifies, the draft model prepares the next draft for each likely outcome.
    """

    mode: Literal["ar", "sd", "ssd"] = "ar"
    draft: str | None = None  # a small model with the same tokenizer, an EAGLE-3 head, or (sd) "ngram": n-gram look-up
    k: int | Literal["auto"] = 4  # draft tokens per round; "auto": chosen by measured speed, at most K_MAX
    draft_quantization: Literal["fp8", "int8", "int4"] | None = None  # the draft's weights in 8 or 4 bits
    acceptance: Literal["coupled", "rejection"] = "coupled"
    saguaro_c: float = 1.0  # rejection: factor on the draft's likeliest tokens; below 1: more hits, fewer accepted
    fan_out: int | Literal["geometric", "adaptive"] = "adaptive"  # ssd: which outcomes; a number: branches per position
    fan_out_hit: Seq[int] | None = None  # ssd: branches after 0, 1, … accepted tokens, for drafts that were hits
    fan_out_miss: Seq[int] | None = None  # ssd: the same for other drafts
    budget: int | Literal["auto"] = 16  # ssd: branches per sequence; "auto": chosen by measured speed
    backup: Literal["jit", "fast", "auto"] = "auto"  # ssd, after a miss: write a draft now, use a sibling's, or either
    placement: Literal["auto", "inline", "stream", "process"] = "auto"  # ssd: where the draft model runs
    draft_replicas: int = 1  # ssd, placement "process": draft models, each of which prepares `budget` branches
    draft_tensor_parallel_size: int = 1  # ssd, placement "process": ranks that each draft model is split over

    def __post_init__(self) -> None:
        _normalise(self)
        for name in ("mode", "acceptance", "backup", "placement"):
            known = get_args(get_type_hints(SpeculationConfig)[name])
            if getattr(self, name) not in known:
                raise ConfigError(f"speculation {name}={getattr(self, name)!r}: must be one of {', '.join(known)}")
        if self.draft is not None and (not isinstance(self.draft, (str, os.PathLike)) or not str(self.draft)):
            raise ConfigError(f"speculation draft={self.draft!r}: must be a model, or {NGRAM!r}")
        if self.draft_quantization not in (None, "fp8", "int8", "int4"):
            raise ConfigError(
                f"speculation draft_quantization={self.draft_quantization!r}: must be one of fp8, int8, int4, or None"
            )
        self._check_numbers()
        self._check_fan_out()
        self._check_together()
        if self.draft is not None:
            object.__setattr__(self, "draft", str(self.draft))

    def _check_numbers(self) -> None:
        if self.k != "auto" and (not is_int(self.k) or not 1 <= self.k <= 64):
            raise ConfigError(f"speculation k={self.k!r}: must be an integer from 1 to 64, or 'auto'")
        if self.budget != "auto" and (not is_int(self.budget) or not 1 <= self.budget <= 256):
            raise ConfigError(f"speculation budget={self.budget!r}: must be an integer from 1 to 256, or 'auto'")
        degree = self.draft_tensor_parallel_size
        if not is_int(degree) or degree < 1:
            raise ConfigError(f"speculation draft_tensor_parallel_size={degree!r}: must be a positive integer")
        if not is_int(self.draft_replicas) or not 1 <= self.draft_replicas <= 4:
            raise ConfigError(f"speculation draft_replicas={self.draft_replicas!r}: must be an integer from 1 to 4")
        c = self.saguaro_c
        if not (is_int(c) or isinstance(c, float)) or not 0 <= c <= 1:
            raise ConfigError(f"speculation saguaro_c={c!r}: must be a number from 0 to 1")
        object.__setattr__(self, "saguaro_c", float(c))

    def _check_fan_out(self) -> None:
        fan_out = self.fan_out
        if not (1 <= fan_out <= 16 if is_int(fan_out) else fan_out in ("geometric", "adaptive")):  # type: ignore[operator]
            raise ConfigError(f"speculation fan_out={self.fan_out!r}: must be 'adaptive', 'geometric' or 1 to 16")
        for name in ("fan_out_hit", "fan_out_miss"):
            value = getattr(self, name)
            if value is None:
                continue
            right = isinstance(value, (list, tuple)) and all(is_int(n) and 0 <= n <= 16 for n in value) and any(value)
            if not right or self.k == "auto" or len(value) != self.k + 1:
                raise ConfigError(
                    f"speculation {name}={value!r}: must be a list of k + 1 numbers from 0 to 16 (after 0, 1, …, k "
                    "accepted tokens), not all of them 0, and k a number"
                )
            object.__setattr__(self, name, tuple(value))
        if (self.fan_out_hit is None) != (self.fan_out_miss is None):
            raise ConfigError("speculation fan_out_hit and fan_out_miss belong together: give both, or neither")

    def _check_together(self) -> None:
        changed = {f.name for f in dataclasses.fields(self) if getattr(self, f.name) != f.default} - {"mode"}
        if self.mode == "ar" and changed:
            mode = "ssd" if changed & _AHEAD else "sd"
            raise ConfigError(
                f'speculation mode="ar" drafts nothing: leave the other options out, or use mode="{mode}" with a draft'
            )
        if self.mode != "ar" and self.draft is None:
            raise ConfigError(f'speculation mode="{self.mode}" needs a draft: name a model, or (sd) {NGRAM!r}')
        if self.mode == "sd" and (ahead := sorted(changed & _AHEAD)):
            other = "" if self.draft == NGRAM else ', or use mode="ssd"'
            raise ConfigError(f'speculation mode="sd" has no option {", ".join(ahead)}: leave it out{other}')
        if self.mode == "ssd" and self.draft == NGRAM:
            raise ConfigError(f'speculation draft={NGRAM!r} has nothing to prepare: use mode="sd", or a draft model')
        if self.draft == NGRAM and self.draft_quantization is not None:
            raise ConfigError(f"speculation draft_quantization is for draft models, not for {NGRAM!r}: leave it out")
        for name in ("draft_replicas", "draft_tensor_parallel_size"):
            if getattr(self, name) > 1 and self.placement != "process":
                raise ConfigError(
                    f"speculation {name}={getattr(self, name)} is for drafts in processes of their own: use "
                    'placement="process" with mode="ssd", or leave it out'
                )
        if self.draft_replicas > 1 and self.acceptance == "rejection":
            raise ConfigError(
                f"speculation draft_replicas={self.draft_replicas}: replicas send no distributions, which "
                'acceptance="rejection" needs; leave one of them out'
            )
        if self.saguaro_c != 1.0 and self.acceptance != "rejection":
            raise ConfigError('speculation saguaro_c is for acceptance="rejection": leave it out, or use that rule')
        if self.fan_out_hit is not None and self.fan_out != "adaptive":
            raise ConfigError("speculation fan_out and fan_out_hit/fan_out_miss are two ways to say it: leave one out")

    @property
    def lookahead(self) -> int:
        """Maximum draft length of a round."""
        if self.mode == "ar":
            return 0
        return K_MAX if self.k == "auto" else int(self.k)

    @property
    def budgets(self) -> tuple[int, ...]:
        """The possible numbers of branches per sequence."""
        return BUDGETS if self.budget == "auto" else (int(self.budget),)

    @property
    def draft_ranks(self) -> int:
        """The ranks of all draft models in processes of their own: GPUs, or cores of the CPU, that they have."""
        return self.draft_replicas * self.draft_tensor_parallel_size if self.placement == "process" else 0

    @classmethod
    def of(cls, value: SpeculationConfig | Mapping[str, Any] | None) -> SpeculationConfig:
        if isinstance(value, SpeculationConfig):
            return value
        if value is None:
            return cls()
        if not isinstance(value, Mapping):
            raise ConfigError(
                f'speculation={value!r}: must be None or a mapping such as {{"mode": "sd", "draft": "…", "k": 4}}'
            )
        return build(cls, dict(value))


@dataclass(frozen=True)
class EngineConfig:
    """All options of an engine. None: chosen from the model and the device."""

    model: str
    device: str = "auto"  # auto, cpu, cuda, or a GPU's index: cuda:1
    dtype: DType = "auto"
    max_model_len: int | None = None  # prompt and output of one sequence together
    max_num_seqs: int = 64  # sequences decoded at the same time
    max_num_batched_tokens: int | None = None  # tokens of one batch; longer prefills are chunked
    block_size: int | None = None  # tokens of one KV block
    num_kv_blocks: int | None = None
    gpu_memory_utilization: float = 0.9  # share of the GPU's memory for weights, activations and KV
    tensor_parallel_size: int = 1  # ranks that the model is split over: GPUs from `device` on, or processes on the CPU
    prefix_caching: bool = True
    eager: bool = False  # no CUDA graphs
    trust_request_chat_template: bool = False  # whether chat_options may bring a chat_template of their own
    speculation: SpeculationConfig = field(default_factory=SpeculationConfig)

    def __post_init__(self) -> None:
        _normalise(self)
        if not isinstance(self.model, (str, os.PathLike)) or not str(self.model):
            raise ConfigError(f"model={self.model!r}: must be a directory, a .gguf file or a hub id")
        object.__setattr__(self, "model", str(self.model))
        object.__setattr__(self, "speculation", SpeculationConfig.of(self.speculation))
        if not isinstance(self.device, str) or not re.fullmatch(r"auto|cpu|cuda(:\d{1,3})?", self.device):
            raise ConfigError(f"device={self.device!r}: must be one of auto, cpu, cuda, or a GPU such as cuda:1")
        if self.dtype not in get_args(DType):
            raise ConfigError(f"dtype={self.dtype!r}: must be one of {', '.join(get_args(DType))}")
        self._check_numbers()
        for name in ("prefix_caching", "eager", "trust_request_chat_template"):
            if not isinstance(getattr(self, name), bool):
                raise ConfigError(f"{name}={getattr(self, name)!r}: must be True or False")

    def _check_numbers(self) -> None:
        chosen = ("max_model_len", "max_num_batched_tokens", "block_size", "num_kv_blocks")  # where they are None
        for name in (*chosen, "max_num_seqs", "tensor_parallel_size"):
            value = getattr(self, name)
            if not (value is None and name in chosen) and (not is_int(value) or value < 1):
                raise ConfigError(f"{name}={value!r}: must be a positive integer")
        share = self.gpu_memory_utilization
        if not (is_int(share) or isinstance(share, float)) or not 0.0 < share <= 1.0:
            raise ConfigError(f"gpu_memory_utilization={share!r}: must be a number above 0 and at most 1")
        object.__setattr__(self, "gpu_memory_utilization", float(share))
        if self.max_num_batched_tokens is not None and self.max_num_batched_tokens < self.max_num_seqs:
            raise ConfigError(
                f"max_num_batched_tokens={self.max_num_batched_tokens} is below max_num_seqs={self.max_num_seqs}: "
                "every decoding sequence needs a token a round; raise the former or lower the latter"
            )


class EngineOptions(TypedDict, total=False):
    """The fields of EngineConfig besides the model, as keywords of `LLM` (for editors and type checkers)."""

    device: str
    dtype: DType
    max_model_len: int | None
    max_num_seqs: int
    max_num_batched_tokens: int | None
    block_size: int | None
    num_kv_blocks: int | None
    tensor_parallel_size: int
    gpu_memory_utilization: float
    prefix_caching: bool
    eager: bool
    trust_request_chat_template: bool
    speculation: SpeculationConfig | Mapping[str, Any] | None


def _normalise(config: SpeculationConfig | EngineConfig) -> None:
    """Numpy's numbers become Python's own, in lists too."""
    for name, value in list(vars(config).items()):
        listed = isinstance(value, (list, tuple))
        object.__setattr__(config, name, tuple(map(plain, value)) if listed else plain(value))


def build(cls: type[T], options: dict[str, Any]) -> T:
    """Builds a config from a dict of options; an unknown one raises ConfigError with the nearest known name."""
    known = [f.name for f in dataclasses.fields(cls)]  # type: ignore[arg-type]
    for name in options:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"known options: {', '.join(known)}"
            raise ConfigError(f"{name!r} is not an option of {cls.__name__}: {hint}")
    required = [f.name for f in dataclasses.fields(cls) if f.default is f.default_factory]  # type: ignore[arg-type]
    for name in required:
        if name not in options:
            raise ConfigError(f"{name} is missing: {cls.__name__} cannot do without it")
    return cls(**options)
