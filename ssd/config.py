"""One frozen, validated description of an engine, built by the same code from keywords, the command line or a file.

Knows nothing of how anything runs.
"""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar, get_args

from ssd.errors import ConfigError

T = TypeVar("T")
Device = Literal["auto", "cpu", "cuda"]
DType = Literal["auto", "float32", "bfloat16", "float16"]


@dataclass(frozen=True)
class SpeculationConfig:
    """Who proposes tokens. `ar`: nobody, plain autoregressive decoding."""

    mode: Literal["ar"] = "ar"

    def __post_init__(self) -> None:
        if self.mode != "ar":
            raise ConfigError(
                f"speculation mode={self.mode!r}: this version decodes autoregressively; use 'ar' or None"
            )

    @classmethod
    def of(cls, value: SpeculationConfig | Mapping[str, Any] | None) -> SpeculationConfig:
        if isinstance(value, SpeculationConfig):
            return value
        if value is None:
            return cls()
        if not isinstance(value, Mapping):
            raise ConfigError(f'speculation={value!r}: must be None or a mapping such as {{"mode": "ar"}}')
        return build(cls, dict(value))


@dataclass(frozen=True)
class EngineConfig:
    """Every option of an engine. None means: chosen from the model and the device."""

    model: str
    device: Device = "auto"
    dtype: DType = "auto"
    max_model_len: int | None = None  # prompt and output of one sequence together
    max_num_seqs: int = 64  # sequences decoded at the same time
    max_num_batched_tokens: int | None = None  # tokens of one batch: prefill is cut into chunks of at most this
    block_size: int = 16  # tokens of one KV block
    num_kv_blocks: int | None = None
    gpu_memory_utilization: float = 0.9  # share of the GPU's memory that the engine may fill
    prefix_caching: bool = True
    eager: bool = False  # no CUDA graphs
    speculation: SpeculationConfig = field(default_factory=SpeculationConfig)

    def __post_init__(self) -> None:
        object.__setattr__(self, "model", str(self.model))
        object.__setattr__(self, "speculation", SpeculationConfig.of(self.speculation))
        if self.device not in get_args(Device) and not self.device.startswith("cuda:"):
            raise ConfigError(f"device={self.device!r}: must be one of auto, cpu, cuda, cuda:N")
        if self.dtype not in get_args(DType):
            raise ConfigError(f"dtype={self.dtype!r}: must be one of {', '.join(get_args(DType))}")
        for name in ("max_model_len", "max_num_seqs", "max_num_batched_tokens", "block_size", "num_kv_blocks"):
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
                raise ConfigError(f"{name}={value!r}: must be a positive integer")
        if not 0.0 < self.gpu_memory_utilization <= 1.0:
            raise ConfigError(f"gpu_memory_utilization={self.gpu_memory_utilization!r}: must be above 0 and at most 1")
        if self.max_num_batched_tokens is not None and self.max_num_batched_tokens < self.max_num_seqs:
            raise ConfigError(
                f"max_num_batched_tokens={self.max_num_batched_tokens} is below max_num_seqs={self.max_num_seqs}: "
                "every decoding sequence needs a token a round; raise the former or lower the latter"
            )


def build(cls: type[T], options: dict[str, Any]) -> T:
    """Makes a config from plain options; an unknown one is refused with the nearest known name."""
    known = [f.name for f in dataclasses.fields(cls)]  # type: ignore[arg-type]
    for name in options:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"known options: {', '.join(known)}"
            raise ConfigError(f"{name!r} is not an option of {cls.__name__}: {hint}")
    return cls(**options)
