"""What a request asks of its output beyond sampling: structured output and tools."""

from __future__ import annotations

from ssd.core import SamplingParams
from ssd.server.errors import unsupported
from ssd.server.protocol import ChatRequest, GenerationRequest


def constrained(body: GenerationRequest, params: SamplingParams) -> SamplingParams:
    """The parameters with the constraints that a request asks for. So far there are none: 400 names the field."""
    if body.response_format is not None and body.response_format != {"type": "text"}:
        raise unsupported("response_format", "only {'type': 'text'} is supported")
    if body.structured_outputs is not None:
        raise unsupported("structured_outputs")
    if isinstance(body, ChatRequest):
        if body.tools:
            raise unsupported("tools")
        if body.tool_choice not in (None, "none"):
            raise unsupported("tool_choice", "only 'none' is supported")
        if body.parallel_tool_calls is not None:
            raise unsupported("parallel_tool_calls", "needs tools, which are not supported")
    return params
