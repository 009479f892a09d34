"""Parameters that llama.cpp, vLLM, Ollama, LM Studio, TGI and SGLang have and the published APIs have not."""

from __future__ import annotations

from typing import Any, Final

from ssd.server.effort import effort_options
from ssd.server.fields import INNER, Alias, Foreign, Table

Json = dict[str, Any]
_UNLIMITED: Final = 2**31 - 1  # tokens: to the end of the context
_SWITCHES: Final[dict[str, Json]] = {
    "enabled": {"enable_thinking": True},
    "disabled": {"enable_thinking": False},
    "adaptive": {},
    "auto": {},
}


# --- conversions ------------------------------------------------------------------------------------------------------


def _limit(value: Any) -> Any:
    """A number of tokens; -1 and -2 are no limit."""
    return _UNLIMITED if value in (-1, -2) else value


def _temperature(do_sample: Any) -> Any:
    return 0.0 if do_sample is False else None


def _thinking(value: Any) -> Any:
    """Variables of the chat template for a switch, an effort, or an object with either."""
    if isinstance(value, dict):
        value = next((value[name] for name in ("effort", "enabled", "type") if value.get(name) is not None), None)
    if isinstance(value, str):
        return _SWITCHES[value] if value in _SWITCHES else effort_options("reasoning_effort", value)
    return None if value is None else {"enable_thinking": value}


def _budget(value: Any) -> Any:
    """A budget of tokens for reasoning: only none at all can be kept to."""
    return {"enable_thinking": False} if value == 0 else None


def _grammar(value: Any) -> Any:
    """llama.cpp's is text in GBNF, TGI's an object."""
    if isinstance(value, dict) and value.get("type") in ("json", "json_object", "regex"):
        return {"regex" if value["type"] == "regex" else "json": value.get("value")}
    return {"grammar": value}


def _format(value: Any) -> Any:
    """Ollama's: "json", or a schema."""
    return {"json_object": True} if value == "json" else {"json": value}


def _response_format(value: Any) -> Any:
    """With the schema where llama.cpp and TGI have it."""
    if isinstance(value, dict) and value.get("type") in ("json", "json_object", "regex"):
        schema = value.get("schema", value.get("value"))
        if schema is not None and value["type"] == "regex":
            return {"type": "regex", "regex": schema}
        if schema is not None:
            return {"type": "json_schema", "json_schema": {"schema": schema}}
    return value


# --- tables -----------------------------------------------------------------------------------------------------------


def _limits(field: str) -> Table:
    names = ("n_predict", "num_predict", "max_new_tokens", "max_tokens", "max_completion_tokens", "max_output_tokens")
    return {name: Alias(field, _limit) for name in names}


def _variable(name: str) -> Alias:
    """A variable of the chat template."""
    return Alias("chat_template_kwargs", lambda value: {name: value})


def _structured(kind: str) -> Alias:
    return Alias("structured_outputs", lambda value: {kind: value})


def _all(names: str, entry: Foreign) -> Table:
    return dict.fromkeys(names.split(), entry)


_SAMPLED: Final = "the text is sampled without it"
_SAMPLERS: Final[Table] = {  # they change the distribution of the text, but for these values
    **_all("typical_p typical typ_p tfs tfs_z guidance_scale cfg_scale num_beams beam_width", Foreign((1,), _SAMPLED)),
    **_all(
        "mirostat mirostat_mode dynatemp_range dry_multiplier xtc_probability top_a epsilon_cutoff eta_cutoff "
        "smoothing_factor no_repeat_ngram_size penalty_alpha",
        Foreign((0,), _SAMPLED),
    ),
    **_all("use_beam_search watermark", Foreign((False,), _SAMPLED)),
    "top_n_sigma": Foreign((-1, 0), _SAMPLED),
    "length_penalty": Foreign((1, 0), _SAMPLED),
    **_all("samplers sampler_order", Foreign((), _SAMPLED)),
    **_all("repeat_last_n penalty_last_n", Foreign((-1,), "repetition_penalty counts the whole prompt and text")),
    "penalize_nl": Foreign((True,), "the penalties count new lines, too"),
    # they set what one of the others does
    **_all(
        "mirostat_tau mirostat_eta dynatemp_exponent dry_base dry_allowed_length dry_penalty_last_n "
        "dry_sequence_breakers xtc_threshold smoothing_curve early_stopping min_keep",
        Foreign(None),
    ),
}
_SETTINGS: Final[Table] = {  # of other servers: of their caches, devices, models and logs
    **_all(
        "ttl id_slot slot_id n_cache_reuse n_keep num_keep n_discard t_max_predict_ms n_indent num_ctx "
        "num_batch num_gpu num_thread main_gpu low_vram numa use_mmap use_mlock f16_kv draft_model cache_salt "
        "request_id kv_transfer_params guided_decoding_backend guided_whitespace_pattern mm_processor_kwargs "
        "return_hidden_states custom_params context_overflow_policy",
        Foreign(),
    ),
    "keep_alive": Foreign(None),  # a server of several models has read it
    "cache_prompt": Foreign((True,), "prompts are always looked up in the prefix cache"),
}
_ANSWERS: Final[Table] = {  # what an answer has beside its text
    "skip_special_tokens": Foreign((True,), "the text is without special tokens"),
    "spaces_between_special_tokens": Foreign(None),
    "include_stop_str_in_output": Foreign((False,), "the text ends before a stop string"),
    "no_stop_trim": Foreign((False,), "the text ends before a stop string"),
    "n_probs": Foreign((0,), "use logprobs"),
    "top_n_tokens": Foreign((0,), "use logprobs"),
    "prompt_logprobs": Foreign((), "use echo and logprobs of /v1/completions"),
    "post_sampling_probs": Foreign((False,), "log-probabilities are the model's own"),
    **_all(
        "return_tokens_as_token_ids timings_per_token return_progress details decoder_input_details logprob_start_len "
        "response_fields",
        Foreign((False, -1), "the answer is without it"),
    ),
}
_REFUSED: Final[Table] = {  # a client that sends them relies on them
    "allowed_token_ids": Foreign((), "use structured_outputs or logit_bias", refused=True),
    "bad_words": Foreign((), "use logit_bias", refused=True),
    "custom_token_bans": Foreign((), "use logit_bias", refused=True),
    **_all("logits_processors custom_logit_processor", Foreign((), "use LLM.generate", refused=True)),
    "stop_regex": Foreign((), "use stop", refused=True),
    "structural_tag": Foreign((), "use tools, or a grammar in structured_outputs", refused=True),
    "grammar_lazy": Foreign((False,), "use tools", refused=True),
    **_all("lora lora_path lora_request adapter_id", Foreign((), "one model is served", refused=True)),
    **_all("images image_data", Foreign((), "images are not understood", refused=True)),
    "best_of": Foreign((1,), "use n", refused=True),
    "truncate_prompt_tokens": Foreign((-1,), "send a prompt that fits", refused=True),
}

GENERATION: Final[Table] = {  # of all endpoints that generate
    **dict.fromkeys(("options", "extra_body", "parameters"), INNER),
    **dict.fromkeys(("repeat_penalty", "rep_pen"), Alias("repetition_penalty")),
    "random_seed": Alias("seed"),
    "do_sample": Alias("temperature", _temperature),
    **dict.fromkeys(("stop_sequences", "stopping_strings"), Alias("stop")),
    "ban_eos_token": Alias("ignore_eos"),
    **dict.fromkeys(("min_new_tokens", "min_length"), Alias("min_tokens")),
    "num_return_sequences": Alias("n"),
    "return_tokens": Alias("return_token_ids"),
    **dict.fromkeys(("guided_json", "json_schema"), _structured("json")),
    **dict.fromkeys(("guided_regex", "regex"), _structured("regex")),
    "guided_choice": _structured("choice"),
    **dict.fromkeys(("guided_grammar", "ebnf"), _structured("grammar")),
    "grammar": Alias("structured_outputs", _grammar),
    "format": Alias("structured_outputs", _format),
    **_SAMPLERS,
    **_SETTINGS,
    **_ANSWERS,
    **_REFUSED,
}
_CHATS: Final[Table] = {
    **GENERATION,
    **dict.fromkeys(("think", "thinking", "enable_thinking"), Alias("chat_template_kwargs", _thinking)),
    **dict.fromkeys(("reasoning_budget", "thinking_budget_tokens"), Alias("chat_template_kwargs", _budget)),
    "documents": _variable("documents"),
    "add_special_tokens": Foreign((False,), "the chat template writes them"),
    **_all("include_reasoning separate_reasoning", Foreign((True,), "reasoning is reasoning_content")),
    "reasoning_format": Foreign(("auto", "deepseek"), "reasoning is reasoning_content"),
    "parse_tool_calls": Foreign((True,), "calls of tools are always parsed"),
    **_all("system template", Foreign((), "write it into messages", refused=True)),
}
CHAT: Final[Table] = {
    **_CHATS,
    **_limits("max_tokens"),
    "max_completion_tokens": Alias("max_completion_tokens", _limit),
    "reasoning": Alias("chat_template_kwargs", _thinking),
    "response_format": Alias("response_format", _response_format),
}
COMPLETIONS: Final[Table] = {
    **GENERATION,
    **_limits("max_tokens"),
    "response_format": Alias("response_format", _response_format),
    "n_probs": Alias("logprobs", lambda value: value or None),
    "return_full_text": Alias("echo"),
    "add_special_tokens": Foreign((True,), "texts get the tokenizer's, token ids none"),
    **_all("system template", Foreign((), "write it into prompt", refused=True)),
}
RESPONSES: Final[Table] = {**_CHATS, **_limits("max_output_tokens"), "system": Alias("instructions")}
MESSAGES: Final[Table] = {**_CHATS, **_limits("max_tokens")}
EMBEDDINGS: Final[Table] = {
    **_SETTINGS,
    **dict.fromkeys(("options", "extra_body", "parameters"), INNER),
    "add_special_tokens": Foreign((True,), "texts get the tokenizer's, token ids none"),
    "embd_normalize": Foreign((2,), "embeddings have the length 1"),
    "normalize": Foreign((True,), "embeddings have the length 1"),
    "input_type": Foreign((), "write the instruction into input"),
    **_all("truncate truncate_prompt_tokens", Foreign((False, -1), "send an input that fits", refused=True)),
}
TOKENIZE: Final[Table] = {
    "content": Alias("prompt"),
    "add_special": Alias("add_special_tokens"),
    "parse_special": Foreign((True,), "names of special tokens are these tokens"),
    **_all("with_pieces return_token_strs", Foreign((False,), "use /detokenize")),
}
STRUCTURED_OUTPUTS: Final[Table] = {
    **_all("disable_fallback disable_any_whitespace", Foreign(None)),
    "whitespace_pattern": Foreign((), "white space between the parts of a JSON text is bounded"),
    "disable_additional_properties": Alias("additional_properties", lambda value: None if value else True),
    "structural_tag": Foreign((), "use tools, or a grammar", refused=True),
}
