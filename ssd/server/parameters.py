"""Parameters that the endpoints know and do not compute with: one table per endpoint, and those of inner objects.

Those of the published APIs are here, those of other servers in `other_servers.py`. A hint is accepted with every value
and ignored: it cannot change the text. Any other parameter of a published API is accepted with the values that change
nothing (null, empty, the API's default), and refused with others as not supported. docs/serving.md has these tables,
too; a test compares them.
"""

from __future__ import annotations

from typing import Final

from ssd.server import other_servers
from ssd.server.fields import EMPTY, Published, Table

_WHOLE: Final = "nothing is kept here, send the whole conversation"


def only(*values: object, ignored: str = "") -> Published:
    return Published((*EMPTY, *values), f"leave it out, or send {' or '.join(map(repr, values))}", ignored)


HINT: Final = Published(None)
REFUSED: Final = Published()

_CACHE: Final = dict.fromkeys(("prompt_cache_key", "prompt_cache_options", "prompt_cache_retention"), HINT)

CHAT: Final[Table] = {
    **other_servers.CHAT,
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
    "store": only(False, ignored="nothing is stored here"),
    "verbosity": only("medium"),
    "web_search_options": Published((None,)),  # {} asks for a search
}
COMPLETIONS: Final[Table] = {**other_servers.COMPLETIONS, "best_of": only(1), "suffix": REFUSED}
EMBEDDINGS: Final[Table] = {**other_servers.EMBEDDINGS, "dimensions": REFUSED}
TOKENIZE: Final[Table] = other_servers.TOKENIZE
STRUCTURED_OUTPUTS: Final[Table] = other_servers.STRUCTURED_OUTPUTS
RESPONSES: Final[Table] = {
    **other_servers.RESPONSES,
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
    "truncation": only("disabled", ignored="an input that is too long is refused"),
}
MESSAGES: Final[Table] = {
    **other_servers.MESSAGES,
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
_OLLAMA: Final[Table] = {
    "images": Published(remedy="images are not understood"),
    "logprobs": only(False, ignored="the answer is without them"),
    "top_logprobs": only(0, ignored="the answer is without them"),
    "truncate": only(False, ignored="a prompt that is too long is refused"),
    "shift": only(False, ignored="a text ends at the end of the context"),
}
OLLAMA_CHAT: Final[Table] = _OLLAMA
OLLAMA_GENERATE: Final[Table] = {
    **_OLLAMA,
    "context": Published(remedy="send the conversation to /api/chat"),
    "suffix": REFUSED,
    "template": Published(remedy="send raw=true and the whole prompt"),
    **dict.fromkeys(("width", "height", "steps"), REFUSED),
}
OLLAMA_EMBED: Final[Table] = {
    "dimensions": REFUSED,
    "truncate": only(False, ignored="an input that is too long is refused"),
}
OLLAMA_SHOW: Final[Table] = {"verbose": HINT}

# of inner objects
_UNTOLD: Final = "the model is not told of it"
_CALLERS: Final[Table] = {
    "allowed_callers": only(["direct"]),
    "defer_loading": only(False, ignored="the model is told of the tool at once"),
}
_OTHERWISE: Final = "the text is sampled without it"
OLLAMA_OPTIONS: Final[Table] = {
    **dict.fromkeys(("num_batch", "num_ctx", "num_gpu", "num_keep", "num_thread", "main_gpu"), HINT),
    **dict.fromkeys(("embedding_only", "f16_kv", "logits_all", "low_vram", "numa"), HINT),
    **dict.fromkeys(("use_mlock", "use_mmap", "vocab_only"), HINT),
    "mirostat": only(0, ignored=_OTHERWISE),
    **dict.fromkeys(("mirostat_eta", "mirostat_tau"), HINT),
    "penalize_newline": only(True, ignored="the penalties count new lines, too"),
    "repeat_last_n": only(-1, ignored="repeat_penalty counts the whole prompt and text"),
    **dict.fromkeys(("tfs_z", "typical_p"), only(1, ignored=_OTHERWISE)),
}
STREAM_OPTIONS: Final[Table] = {"include_obfuscation": HINT}
TEXT: Final[Table] = {"verbosity": only("medium")}
REASONING: Final[Table] = {
    "context": only("auto", ignored="the chat template chooses which reasoning of earlier turns it writes"),
    "generate_summary": HINT,
    "mode": only("standard"),
    "summary": HINT,
}
RESPONSES_TOOL: Final[Table] = {**_CALLERS, "async": only(False), "output_schema": Published(ignored=_UNTOLD)}
RESPONSES_ITEM: Final[Table] = {
    "async": only(False),
    "caller": only({"type": "direct"}),
    "encrypted_content": Published(remedy="send the content of the reasoning"),
    "id": HINT,
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
    "input_examples": Published(ignored=_UNTOLD),
}
MESSAGES_BLOCK: Final[Table] = {
    "cache_control": HINT,
    "caller": only({"type": "direct"}),
    "citations": REFUSED,
    "signature": HINT,
    "toolset_name": REFUSED,
}
