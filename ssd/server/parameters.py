"""Parameters of the published APIs that nothing here computes with: one table per endpoint, and those of inner objects.

A hint is accepted with every value and ignored: it cannot change the text. Any other parameter is accepted with the
values that change nothing (null, empty, the API's default), and refused with others as not supported. Only a name that
is neither here nor a field of the endpoint is not known. docs/serving.md has these tables, too; a test compares them.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, Final

from ssd.server.errors import unknown, unsupported

EMPTY: Final[tuple[object, ...]] = (None, "", [], {})
_WHOLE: Final = "nothing is kept here, send the whole conversation"


@dataclass(frozen=True)
class Published:
    """`values`: those that are accepted; None: all of them, since it is a hint."""

    values: tuple[object, ...] | None = EMPTY
    remedy: str = "leave it out"


def only(*values: object) -> Published:
    return Published((*EMPTY, *values), f"leave it out, or send {' or '.join(map(repr, values))}")


Table = Mapping[str, Published]
HINT: Final = Published(None)
REFUSED: Final = Published()
NONE: Final[Table] = {}

_CACHE: Final = dict.fromkeys(("prompt_cache_key", "prompt_cache_options", "prompt_cache_retention"), HINT)

CHAT: Final[Table] = {
    "audio": REFUSED,
    "function_call": only("none", "auto"),
    "functions": Published(remedy="use tools"),
    "metadata": HINT,
    "modalities": only(["text"]),
    "moderation": REFUSED,
    "prediction": HINT,
    **_CACHE,
    "safety_identifier": HINT,
    "service_tier": HINT,
    "store": only(False),
    "verbosity": only("medium"),
    "web_search_options": Published((None,)),  # {} asks for a search
}
COMPLETIONS: Final[Table] = {"best_of": only(1), "suffix": REFUSED}
RESPONSES: Final[Table] = {
    "access_programs": REFUSED,
    "background": only(False),
    "client_metadata": HINT,
    "context_management": REFUSED,
    "conversation": Published(remedy=_WHOLE),
    "image": REFUSED,
    "max_tool_calls": HINT,
    "moderation": REFUSED,
    "previous_response_id": Published(remedy=_WHOLE),
    "prompt": REFUSED,
    **_CACHE,
    "safety_identifier": HINT,
    "service_tier": HINT,
    "store": only(True, False),
    "stream_options": HINT,
    "top_logprobs": only(0),
    "truncation": only("disabled"),
}
MESSAGES: Final[Table] = {
    "billing_policy": HINT,
    "cache_control": HINT,
    "compaction": REFUSED,
    "container": REFUSED,
    "context_management": only({"edits": []}, {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}),
    "diagnostics": HINT,
    "fallback_credit_token": HINT,
    "fallbacks": REFUSED,
    "inference_geo": only("global"),
    "mcp_servers": REFUSED,
    "service_tier": HINT,
    "speed": HINT,
    "thread": Published(remedy=_WHOLE),
    "user_profile_id": HINT,
    "workspace_id": HINT,
}

# of inner objects
_CALLERS: Final[Table] = {"allowed_callers": only(["direct"]), "defer_loading": only(False)}
STREAM_OPTIONS: Final[Table] = {"include_obfuscation": HINT}
TEXT: Final[Table] = {"verbosity": only("medium")}
REASONING: Final[Table] = {
    "context": only("auto"),
    "generate_summary": HINT,
    "mode": only("standard"),
    "summary": HINT,
}
RESPONSES_TOOL: Final[Table] = {**_CALLERS, "async": only(False), "output_schema": REFUSED}
RESPONSES_ITEM: Final[Table] = {
    "async": only(False),
    "caller": only({"type": "direct"}),
    "encrypted_content": Published(remedy="send the content of the reasoning"),
    "id": HINT,
    "namespace": REFUSED,
    "phase": HINT,
    "status": HINT,
    "summary": HINT,
}
OUTPUT_CONFIG: Final[Table] = {"task_budget": REFUSED}
THINKING: Final[Table] = {"budget_tokens": HINT, "display": only("summarized")}
MESSAGES_TOOL: Final[Table] = {
    **_CALLERS,
    "cache_control": HINT,
    "eager_input_streaming": HINT,
    "input_examples": REFUSED,
}
MESSAGES_BLOCK: Final[Table] = {
    "cache_control": HINT,
    "caller": only({"type": "direct"}),
    "citations": REFUSED,
    "signature": HINT,
    "toolset_name": REFUSED,
}


def check_published(path: str, value: object, parameter: Published) -> None:
    """Refuses a value that would change the answer."""
    if parameter.values is not None and value not in parameter.values:
        raise unsupported(path, f"is not supported: {parameter.remedy}")


def check_fields(where: str, value: Mapping[str, Any], known: Collection[str], published: Table = NONE) -> None:
    """Checks the names of an object's fields; null counts as left out."""
    for name in value:
        if name in published and name not in known:
            check_published(f"{where}.{name}", value[name], published[name])
        elif name not in known and value[name] is not None:
            raise unknown(f"{where}.{name:.60}")
