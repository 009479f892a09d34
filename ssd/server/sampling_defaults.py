"""Sampling parameters of requests that leave them out: the model's generation_config.json, and the operator's own."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

from ssd.core import SamplingParams
from ssd.errors import ConfigError, RequestError
from ssd.server.options import ServerOptions
from ssd.text.json_file import read_json

FILE: Final = "generation_config.json"
_OF_THE_API: Final = {"temperature": 1.0}  # OpenAI's; `SamplingParams` has 0
_OF_MODELS: Final = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


def sampling_defaults(model: Path, options: ServerOptions) -> dict[str, Any]:
    """`model`: a checkpoint's directory; a file has no such defaults."""
    file = model / FILE
    stated = read_json(file) if options.generation_config == "auto" and file.is_file() else {}
    found = {name: stated[name] for name in _OF_MODELS if stated.get(name) is not None}
    if found.get("top_k") == -1:
        found["top_k"] = 0  # all tokens
    try:
        SamplingParams(**found)
    except RequestError as error:
        raise ConfigError(f"{file}: {error}; --generation-config none leaves the file out") from error
    return {**_OF_THE_API, **found, **options.override_generation_config}
