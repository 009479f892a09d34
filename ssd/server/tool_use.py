"""The tools of a request: checks, the parser of their calls, and the constraint that `tool_choice` needs.

A constraint is a grammar of the calls in the model's own format, whose arguments follow the tools' JSON Schemas. It is
used when a call is required, and for tools that are `strict`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final

from ssd.constraints.closed import closed
from ssd.constraints.structured import StructuredOutput
from ssd.core import SamplingParams
from ssd.engine.validation import Limits, check_request
from ssd.errors import RequestError
from ssd.server.errors import invalid, unsupported
from ssd.server.fields import known_fields
from ssd.server.protocol import ChatRequest, Json
from ssd.server.tool_grammar import grammar
from ssd.text.harmony import is_harmony
from ssd.text.message_format import MessageFormat, format_of
from ssd.text.reasoning import CLOSING, OPENING
from ssd.text.tokenizer import Tokenizer
from ssd.text.tool_calls import ToolParser
from ssd.text.tool_formats import PARSERS, FencedParser, has_tools, parser_for

_MAX_DEPTH: Final = 64
_UNKNOWN_FORMAT: Final = (
    "the model's chat template has tools, but its format of calls is not known: if it is one of "
    f"{', '.join(PARSERS)}, start the server with --tool-parser and this name"
)
_NAME: Final = re.compile(r"[a-zA-Z0-9_.-]{1,64}")


@dataclass(frozen=True)
class ToolUse:
    """What a request's tools mean for its answer."""

    parser: type[ToolParser] | None  # None: Harmony's, whose messages have recipients
    schemas: Mapping[str, Json]  # JSON Schema of the arguments, by tool name, with closed objects
    paths: Mapping[str, str]  # where they are in the request
    strict: frozenset[str]  # tools whose arguments must follow their schema
    forced: bool  # the answer is a call
    parallel: bool
    tokens: frozenset[str]  # tags that are tokens of the model's vocabulary
    described: list[Json]  # the tools as the chat template gets them

    def constrained(self, params: SamplingParams) -> SamplingParams:
        """The parameters with the constraint, if one is needed.

        Where an answer in JSON is wanted, too, it is one or the other: calls or the answer. A forced call is a call.
        """
        answer = params.structured if isinstance(params.structured, StructuredOutput) else None
        if (answer is None and not self.forced and not self.strict) or self.parser is None:
            return params  # the grammar of Harmony is in `harmony_answers`
        if answer is not None and answer.kind not in ("json_schema", "json_object") and not self.forced:
            if not self.strict:
                return params  # no call is of that form
            raise unsupported("tools", f"strict tools cannot be combined with a {answer.kind}")
        return replace(params, structured=StructuredOutput(grammar=self._grammar(self.parser, answer)))

    def schema(self, name: str) -> Json:
        """What the arguments of a call must follow."""
        constrained = self.forced or name in self.strict
        return self.schemas[name] if constrained else {"type": "object"}

    def check_schemas(self, params: SamplingParams, limits: Limits) -> None:
        """Raises an error with the path of the schema for which the constraint cannot be compiled, if it is one."""
        for name, schema in self.schemas.items():
            try:
                structured = StructuredOutput(json_schema=schema, additional_properties=True)
                check_request([0], SamplingParams(structured=structured), limits)
            except RequestError as error:
                raise invalid(self.paths[name], str(error).removeprefix("structured.json_schema: ")) from error
        check_request([0], SamplingParams(structured=params.structured), limits)

    def _grammar(self, parser: type[ToolParser], answer: StructuredOutput | None) -> str:
        wanted = None if answer is None else answer.schema if isinstance(answer.schema, dict) else {}
        schemas = {name: self.schema(name) for name in self.schemas}
        return grammar(parser, schemas, self.tokens, forced=self.forced, parallel=self.parallel, answer=wanted)


def read_tools(
    body: ChatRequest,
    chat_template: str,
    tool_parser: str,
    tokenizer: Tokenizer,
    additional_properties: bool = False,
) -> ToolUse | None:
    """The request's tools, checked; None if there are none, or none to be called.

    `tool_parser`: a name of `PARSERS`, or "auto" for the one that fits the chat template. `additional_properties`: as
    in `StructuredOutput`.
    """
    if not body.tools:
        if body.tool_choice not in (None, "none", "auto"):
            raise invalid("tool_choice", "only with tools")
        return None
    if _is_deep(body.tools):
        raise invalid("tools", f"nested more than {_MAX_DEPTH} levels deep")
    described = [_tool(f"tools[{i}]", tool) for i, tool in enumerate(body.tools)]
    functions = [tool["function"] for tool in described]
    schemas = {function["name"]: function.get("parameters") or {"type": "object"} for function in functions}
    if len(schemas) < len(functions):
        raise invalid("tools", "two tools have the same name")
    choice = _choice(body.tool_choice, schemas)
    if choice == "none":
        return None
    named = PARSERS.get(tool_parser) if not is_harmony(chat_template) else None
    parser = named or parser_for(chat_template) or (None if has_tools(chat_template) else FencedParser)
    if parser is None and not is_harmony(chat_template):
        raise unsupported("tools", _UNKNOWN_FORMAT)
    paths = {function["name"]: f"tools[{i}].function.parameters" for i, function in enumerate(functions)}
    if choice == "auto":
        parallel = body.parallel_tool_calls is not False
    elif choice == "required":
        parallel = body.parallel_tool_calls is True  # a small model would repeat the call until its tokens are used up
    else:
        schemas, parallel = {choice: schemas[choice]}, False  # exactly one call
    if not additional_properties:
        schemas = {name: closed(schema) for name, schema in schemas.items()}
    strict = frozenset(function["name"] for function in functions if function.get("strict"))
    tags = (*(() if parser is None else parser.tags()), OPENING, CLOSING)
    tokens = frozenset(tag for tag in tags if tag.startswith("<") and tokenizer.token_id(tag) is not None)
    return ToolUse(parser, schemas, paths, strict, choice != "auto", parallel, tokens, described)


def message_format(chat_template: str, prompt_end: str, tools: ToolUse | None) -> MessageFormat:
    """How the answers are parsed. A forced call comes without reasoning, but for Harmony."""
    if tools is None:
        return format_of(chat_template, prompt_end)
    form = format_of(chat_template, prompt_end, tools.parser, tools.schemas, tools.parallel)
    return replace(form, forced=True, reasoning=False, reasoning_opened=False) if tools.forced else form


def _tool(where: str, tool: Json) -> Json:
    """The tool, checked, with its known fields."""
    if tool.get("type") != "function" or not isinstance(tool.get("function"), dict):
        raise unsupported(where, "only {'type': 'function', 'function': {…}} is supported")
    tool = known_fields(where, tool, ("type", "function"))
    function = known_fields(f"{where}.function", tool["function"], ("name", "description", "parameters", "strict"))
    name = function.get("name")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise invalid(f"{where}.function.name", "expected 1 to 64 letters, digits, '_', '-' or '.'")
    for field, kinds in (("description", str), ("parameters", dict), ("strict", bool)):
        if not isinstance(function.get(field), (kinds, type(None))):
            raise invalid(f"{where}.function.{field}", "has another type")
    return {**tool, "function": function}


def _is_deep(value: object) -> bool:
    level = [value]
    for _ in range(_MAX_DEPTH):
        inner = [item.values() if isinstance(item, dict) else item for item in level if isinstance(item, (dict, list))]
        level = [value for values in inner for value in values]
    return bool(level)


def _choice(choice: str | Json | None, schemas: Mapping[str, Json]) -> str:
    """ "auto", "none", "required", or a name."""
    if choice is None or choice in ("auto", "none", "required"):
        return str(choice or "auto")
    function = choice.get("function") if isinstance(choice, dict) and choice.get("type") == "function" else None
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(name, str):
        what = "expected 'auto', 'none', 'required' or {'type': 'function', 'function': {'name': …}}"
        raise invalid("tool_choice", what)
    if name not in schemas:
        raise invalid("tool_choice", f"there is no tool {name!r:.80}")
    return name
