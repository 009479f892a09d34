"""Harmony, the chat format of GPT-OSS: a chat as the text of a prompt.

A message is `<|start|>header<|message|>content<|end|>`. A header has the role, and for the assistant's messages a
channel: analysis (reasoning), commentary (tool calls, and what is said before them) or final. The system message is the
same for all chats but for the effort of reasoning; what APIs call the system message is Harmony's developer message,
which also describes the tools, in a syntax like TypeScript's. Knows nothing of tokenizers; `harmony_parser` reads
answers.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from ssd.errors import RequestError

START, END, MESSAGE, CHANNEL = "<|start|>", "<|end|>", "<|message|>", "<|channel|>"
CONSTRAIN, CALL, RETURN = "<|constrain|>", "<|call|>", "<|return|>"
STOPS: Final = (RETURN, CALL)  # tokens that end an answer
TOKENS: Final = (START, END, MESSAGE, CHANNEL, CONSTRAIN, *STOPS)
REPLY: Final = f"{START}assistant"  # the end of a prompt
_EFFORTS: Final = {"none": "low", "minimal": "low", "xhigh": "high", "max": "high"}  # others by the nearest known one
_IDENTITY: Final = "You are ChatGPT, a large language model trained by OpenAI."
_CHANNELS: Final = "# Valid channels: analysis, commentary, final. Channel must be included for every message."
_FUNCTIONS: Final = "\nCalls to these tools must go to the commentary channel: 'functions'."
Json = Mapping[str, Any]


def is_harmony(chat_template: str) -> bool:
    """Whether a chat template writes Harmony."""
    return all(token in chat_template for token in (START, CHANNEL, MESSAGE))


def render(
    messages: Sequence[Json],
    tools: Sequence[Json] | None = None,
    *,
    current_date: str,
    add_generation_prompt: bool = True,
    reasoning_effort: str | None = None,
    model_identity: str = _IDENTITY,
    **_: Any,
) -> str:
    """The prompt of a chat in OpenAI's shape. Further keywords are for the chat templates of other models."""
    wanted = reasoning_effort or "medium"
    effort = _EFFORTS.get(wanted, wanted)
    if effort not in ("low", "medium", "high"):
        raise RequestError(f"reasoning_effort={reasoning_effort!r:.60}: expected low, medium or high")
    about = f"{model_identity}\nKnowledge cutoff: 2024-06\nCurrent date: {current_date}\n\nReasoning: {effort}\n\n"
    system = _message("system", about + _CHANNELS + (_FUNCTIONS if tools else ""))
    first = next((i for i, message in enumerate(messages) if message["role"] not in ("system", "developer")), None)
    instructions = "\n\n".join(str(message["content"]) for message in messages[:first] if message["content"])
    sections = [f"# Instructions\n\n{instructions}"] if instructions else []
    sections += [_namespace(tools)] if tools else []
    developer = _message("developer", "\n\n".join(sections)) if sections else ""
    spoken = "".join(_conversation(messages, len(messages) if first is None else first))
    return system + developer + spoken + (REPLY if add_generation_prompt else "")


def _message(header: str, content: str, end: str = END) -> str:
    return f"{START}{header}{MESSAGE}{content}{end}"


def _conversation(messages: Sequence[Json], first: int) -> Iterator[str]:
    """The messages after the first ones; reasoning only since the last answer."""
    names: dict[Any, str] = {}  # of the functions that were called, by the call's id
    answers = [i for i, message in enumerate(messages) if message["role"] == "assistant" and not _calls(message)]
    for i, message in enumerate(messages[first:], first):
        role, content = message["role"], message.get("content") or ""
        if role in ("system", "developer"):
            yield _message("developer", f"# Instructions\n\n{content}")
        elif role == "user":
            yield _message("user", content)
        elif role == "tool":
            name = names.get(message.get("tool_call_id"), message.get("name"))
            if name is None:
                raise RequestError(f"messages[{i}].tool_call_id: no tool call before this message has it")
            yield _message(f"functions.{name} to=assistant{CHANNEL}commentary", content)
        elif role == "assistant":
            names |= {call.get("id"): call["function"]["name"] for call in _calls(message)}
            yield from _assistant(message, content, reasons=not answers or i > answers[-1])
        else:
            raise RequestError(f"messages[{i}].role={role!r:.60}: expected system, developer, user, assistant or tool")


def _assistant(message: Json, content: str, *, reasons: bool) -> Iterator[str]:
    reasoning, calls = message.get("reasoning_content") or message.get("thinking"), _calls(message)
    if reasoning and reasons:
        yield _message(f"assistant{CHANNEL}analysis", reasoning)
    if content or not calls:
        yield _message(f"assistant{CHANNEL}{'commentary' if calls else 'final'}", content)
    for call in calls:
        arguments = call["function"].get("arguments", "{}")
        text = arguments if isinstance(arguments, str) else _compact(arguments)
        header = f"assistant{CHANNEL}commentary to=functions.{call['function']['name']} {CONSTRAIN}json"
        yield _message(header, text, CALL)


def _calls(message: Json) -> Sequence[Json]:
    return message.get("tool_calls") or ()


def _compact(value: object) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


# --- the types of tools -----------------------------------------------------------------------------------------------


def _namespace(tools: Sequence[Json]) -> str:
    lines = ["# Tools\n\n## functions\n\nnamespace functions {\n"]
    for tool in tools:
        function = tool.get("function", tool)
        lines += [f"// {line}" for line in (function.get("description") or "").splitlines()]
        parameters = function.get("parameters") or {}
        none = parameters.get("type", "object") == "object" and not parameters.keys() & {"properties", "oneOf"}
        argument = "" if none or parameters.get("properties") == {} else f"_: {_type(parameters, '')}"
        lines.append(f"type {function['name']} = ({argument}) => any;\n")
    return "\n".join([*lines, "} // namespace functions"])


def _type(schema: Json, indent: str) -> str:
    """The type of a JSON Schema. What the syntax has no type for (`anyOf`, `$ref`) is any."""
    if isinstance(schema.get("oneOf"), list):
        return "".join(f"\n{line}" for line in _variants(schema["oneOf"], indent))
    kind = schema.get("type")
    if isinstance(kind, list):
        return " | ".join("number" if each == "integer" else str(each) for each in kind) or "any"
    if kind == "object":
        return _object(schema, indent)
    if kind == "array":
        return f"{_type(schema['items'], indent)}[]" if "items" in schema else "Array<any>"
    if kind == "string":
        return " | ".join(f'"{each}"' for each in _enum(schema) if isinstance(each, str)) or "string"
    return {"number": "number", "integer": "number", "boolean": "boolean"}.get(str(kind), "any")


def _object(schema: Json, indent: str) -> str:
    lines = [f"{indent}// {schema['description']}"] if isinstance(schema.get("description"), str) else []
    lines.append("{")
    required = schema.get("required") or ()
    for name, value in (schema.get("properties") or {}).items():
        lines += [f"{indent}{line}" for line in _comments(value)]
        optional = "" if name in required else "?"
        if isinstance(value.get("oneOf"), list):
            lines += [f"{indent}// {default}" for default in _default(value)]
            lines += [f"{indent}{name}{optional}:", *_variants(value["oneOf"], indent, value), f"{indent},"]
        else:
            comment = "".join(f" // {default}" for default in _default(value))
            lines.append(f"{indent}{name}{optional}: {_nullable(value, f'{indent}    ')},{comment}")
    return "\n".join([*lines, f"{indent}}}"])


def _comments(value: Json) -> Iterator[str]:
    """The lines above a property."""
    title, description, examples = value.get("title"), value.get("description"), value.get("examples")
    described = [f"// {description}"] if isinstance(description, str) else []
    variants = value.get("oneOf")
    if isinstance(title, str):
        yield from (f"// {title}", "//")
    if not isinstance(variants, list):
        yield from described
    if isinstance(examples, list) and examples:
        yield "// Examples:"
        yield from (f'// - "{each}"' for each in examples if isinstance(each, str))
    if isinstance(variants, list) and not (variants and variants[0].get("description") == description):
        yield from described


def _variants(variants: Sequence[Json], indent: str, owner: Json | None = None) -> Iterator[str]:
    """A line for each; `owner`: the property that has them, whose description stands for the first one's."""
    above = None if owner is None else owner.get("description")
    for i, variant in enumerate(variants):
        said = variant.get("description")
        known = isinstance(above, str) and (i == 0 or said == above)
        comments = [said] if isinstance(said, str) and not known else []
        comments += _default(variant)
        trailing = f" // {' '.join(comments)}" if comments else ""
        yield f"{indent} | {_nullable(variant, f'{indent}   ')}{trailing}"


def _nullable(schema: Json, indent: str) -> str:
    written = _type(schema, indent)
    return f"{written} | null" if schema.get("nullable") is True and "null" not in written else written


def _default(schema: Json) -> list[str]:
    if "default" not in schema:
        return []
    default = schema["default"]
    quoted = f'"{default}"' if isinstance(default, str) and not _enum(schema) else None
    return [f"default: {quoted or (default if isinstance(default, str) else _compact(default))}"]


def _enum(schema: Json) -> list[Any]:
    values = schema.get("enum")
    return values if isinstance(values, list) else []
