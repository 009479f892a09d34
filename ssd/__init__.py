"""ssd: exact, extremely fast decoding of large language models."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ssd.config import Proposer
from ssd.constraints.structured import StructuredOutput
from ssd.core import Delta, RequestOutput, Sample, SamplingParams
from ssd.errors import (
    ConfigError,
    EngineClosed,
    EngineFailed,
    ModelNotFound,
    RequestError,
    RequestFailed,
    SSDError,
    UnsupportedModel,
)
from ssd.version import VERSION

if TYPE_CHECKING:
    from ssd.llm import LLM

__version__ = VERSION
__all__ = [
    "LLM",
    "ConfigError",
    "Delta",
    "EngineClosed",
    "EngineFailed",
    "ModelNotFound",
    "Proposer",
    "RequestError",
    "RequestFailed",
    "RequestOutput",
    "SSDError",
    "Sample",
    "SamplingParams",
    "StructuredOutput",
    "UnsupportedModel",
]


def __getattr__(name: str) -> Any:
    """`LLM` brings torch with it, so it is imported when first asked for: `import ssd` itself stays quick."""
    if name == "LLM":
        from ssd.llm import LLM

        return LLM
    raise AttributeError(f"module 'ssd' has no attribute {name!r}")
