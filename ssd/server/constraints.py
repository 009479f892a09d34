"""What a request asks of its output beyond sampling: structured output."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Final

from ssd.constraints.structured import StructuredOutput
from ssd.core import SamplingParams
from ssd.errors import RequestError
from ssd.server.errors import ApiError, unsupported
from ssd.server.protocol import GenerationRequest

_VLLM_NAMES: Final = {"json": "json_schema"}  # of `structured_outputs`


def constrained(body: GenerationRequest, params: SamplingParams) -> SamplingParams:
    """The parameters with the constraint that a request asks for: `response_format` or `structured_outputs`."""
    asked = body.structured_outputs
    if asked is None:
        structured = _read("response_format", body.response_format)
    elif body.response_format is not None:
        raise unsupported("structured_outputs", "cannot be combined with response_format: give one of them")
    else:
        structured = _read("structured_outputs", {_VLLM_NAMES.get(name, name): what for name, what in asked.items()})
    if structured is None:
        return params
    try:
        return replace(params, structured=structured)
    except RequestError as error:  # parameters that cannot be combined with it
        raise ApiError(400, str(error), param=str(error).partition("=")[0]) from error


def _read(name: str, value: dict[str, Any] | None) -> StructuredOutput | None:
    try:
        if name == "structured_outputs" and value is not None and "type" in value:
            raise RequestError("type: is not a field of structured_outputs")
        return StructuredOutput.of(value)
    except RequestError as error:
        message = str(error)
        raise ApiError(400, message if message.startswith(name) else f"{name}: {message}", param=name) from error
