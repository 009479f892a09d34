"""The grammar of answers in Harmony, the chat format of GPT-OSS."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Final

from ssd.constraints.structured import StructuredOutput
from ssd.core import SamplingParams
from ssd.server.errors import unsupported
from ssd.server.tool_use import ToolUse
from ssd.text.harmony import CHANNEL, CONSTRAIN, END, MESSAGE, START

_LAYOUT: Final = {"whitespace_pattern": " ?"}  # of a call's arguments


def in_harmony(params: SamplingParams, tools: ToolUse | None, *, continued: bool) -> SamplingParams:
    """The parameters of an answer in Harmony with its constraint, if one is needed.

    What is asked for binds the content of the final message or the body of a call; reasoning stays free. `continued`:
    the answer continues the content of a final message.
    """
    answer = params.structured if isinstance(params.structured, StructuredOutput) else None
    forced, strict = (tools.forced, bool(tools.strict)) if tools is not None else (False, False)
    if continued and (forced or strict):
        raise unsupported("tools", "a message that is continued cannot become a call of a forced or strict tool")
    if continued or not (answer is not None or forced or strict):
        return params
    if answer is None or forced:
        return replace(params, structured=StructuredOutput(grammar=_grammar(tools, "TEXT?")))
    return replace(params, structured=replace(answer, frame=_grammar(tools, "@answer")))


def _grammar(tools: ToolUse | None, answer: str) -> str:
    """Any messages before the last one, which is the answer (unless a call is forced) or a call. An answer of a given
    form is all that the user sees, so nothing else is said before it."""
    channels = '"analysis"' if answer == "@answer" else '("analysis" | "commentary")'
    before = f'before: {CHANNEL} {channels} {MESSAGE} TEXT? {END} {START} "assistant"'
    rules, last = [before, r"TEXT: /[\s\S]+/"], []
    if tools is None or not tools.forced:
        rules.append(f'final: {CHANNEL} "final" {MESSAGE} {answer}')
        last.append("final")
    for i, name in enumerate(tools.schemas if tools is not None else ()):
        schema = {**({} if tools is None else tools.schema(name)), "x-guidance": _LAYOUT}
        head = f'{CHANNEL} "commentary to=functions.{name} " {CONSTRAIN} "json" {MESSAGE}'
        rules += [f"call_{i}: {head} arguments_{i}", f"arguments_{i}: %json {json.dumps(schema)}"]
        last.append(f"call_{i}")
    return "\n".join([f"start: before* ({' | '.join(last)})", *rules])
