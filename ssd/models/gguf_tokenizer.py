"""The tokenizer inside a GGUF file: built here for the byte-level vocabularies we know, else by transformers."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors

from ssd.errors import SSDError, UnsupportedModel
from ssd.models.fields import FLAG, LIST, TEXT, TOKEN_ID, Field, check_field
from ssd.text.tokenizer import Tokenizer, transformers_backend

_FIELDS: Final[Mapping[str, Field]] = {
    "model": TEXT,
    "pre": TEXT,
    "tokens": LIST,
    "merges": LIST,
    "token_type": LIST,
    "add_bos_token": FLAG,
    "add_eos_token": FLAG,
    **{f"{name}_token_id": TOKEN_ID for name in ("bos", "eos", "eot", "eom", "unknown", "padding")},
}
_CHAT_ENDS: Final = ("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end|>", "<end_of_turn>")


def stop_token_ids(metadata: Mapping[str, Any], path: Path) -> tuple[int, ...]:
    """The ids that the file names, and the tokens that its chat template ends a turn with."""
    _check_metadata(metadata, path)
    named = [metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")]
    template = metadata.get("tokenizer.chat_template", "")
    used = {token for token in _CHAT_ENDS if token in template}
    tokens = metadata.get("tokenizer.ggml.tokens", []) if used else []
    ends = [index for index, token in enumerate(tokens) if token in used]
    return tuple(dict.fromkeys(token_id for token_id in (*named, *ends) if token_id is not None))


def _check_metadata(metadata: Mapping[str, Any], path: Path) -> None:
    """Types of what is read here: texts, token ids, flags and lists of one type each."""
    for key, field in _FIELDS.items():
        check_field(f"tokenizer.ggml.{key}", metadata.get(f"tokenizer.ggml.{key}"), field, str(path))
    for key, text in metadata.items():
        if key.startswith("tokenizer.chat_template"):
            check_field(key, text, TEXT, str(path))
    for key, kind in (("tokens", str), ("merges", str), ("token_type", int)):
        if not set(map(type, metadata.get(f"tokenizer.ggml.{key}", []))) <= {kind}:
            raise UnsupportedModel(f"tokenizer.ggml.{key} in {path}: expected a list of {kind.__name__}")


def load_tokenizer(metadata: Mapping[str, Any], path: Path) -> Tokenizer:
    """The file's tokenizer: built here for the byte-level vocabularies we know, else by transformers (slowly)."""
    _check_metadata(metadata, path)
    tokens = metadata.get("tokenizer.ggml.tokens")
    if not tokens:
        return Tokenizer(None)
    splitting = metadata.get("tokenizer.ggml.pre")
    known = metadata.get("tokenizer.ggml.model") == "gpt2" and splitting in _SPLITTINGS
    try:
        backend = _byte_level(metadata) if known else transformers_backend(path.parent, gguf_file=path.name)
    except SSDError:
        raise
    except Exception as error:  # the library raises bare Exception
        raise SSDError(f"the tokenizer in {path} cannot be built ({error}): download the file again") from error
    named = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
    ids = {name: metadata.get(f"tokenizer.ggml.{key}_token_id") for name, key in named.items()}
    special = {f"{name}_token": tokens[i] for name, i in ids.items() if i is not None and i < len(tokens)}
    sentencepiece = metadata.get("tokenizer.ggml.model") == "llama"
    add_bos = metadata.get("tokenizer.ggml.add_bos_token", sentencepiece or splitting in ("llama-bpe", "llama3"))
    add_eos = metadata.get("tokenizer.ggml.add_eos_token", False)
    _set_bos_eos(backend, special.get("bos_token"), special.get("eos_token"), add_bos, add_eos)
    return Tokenizer(backend, chat_templates=_chat_templates(metadata), special_tokens=special)


def _set_bos_eos(backend: tokenizers.Tokenizer, bos: str | None, eos: str | None, add_bos: bool, add_eos: bool) -> None:
    """Make `encode` add exactly these tokens."""
    before = [bos] if add_bos and bos is not None else []
    after = [eos] if add_eos and eos is not None else []
    pairs = [(token, backend.token_to_id(token)) for token in dict.fromkeys((*before, *after))]
    known = [(token, token_id) for token, token_id in pairs if token_id is not None]
    backend.post_processor = processors.TemplateProcessing(single=[*before, "$A", *after], special_tokens=known)


_CONTROL, _USER_DEFINED = 3, 4  # token types: special, and matched whole without being special


def _byte_level(metadata: Mapping[str, Any]) -> tokenizers.Tokenizer:
    """The byte-level BPE that Llama 3, Qwen and SmolLM use; they differ in how text is split into words."""
    tokens: list[str] = metadata["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ", 1)) for merge in metadata["tokenizer.ggml.merges"]]
    split, ignore_merges = _SPLITTINGS[metadata["tokenizer.ggml.pre"]]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    backend = tokenizers.Tokenizer(models.BPE(vocabulary, merges, ignore_merges=ignore_merges))
    backend.pre_tokenizer = _splitter(split)
    backend.decoder = decoders.ByteLevel()
    if metadata["tokenizer.ggml.pre"] == "qwen2":
        backend.normalizer = normalizers.NFC()
    kinds = metadata.get("tokenizer.ggml.token_type", [])
    added = [(tokens[index], kind) for index, kind in enumerate(kinds) if kind in (_CONTROL, _USER_DEFINED)]
    backend.add_tokens(
        [tokenizers.AddedToken(token, special=kind == _CONTROL, normalized=False) for token, kind in added]
    )
    return backend


def _splitter(pattern: str | None) -> pre_tokenizers.PreTokenizer:
    """By a pattern of the model's own, or (None) by GPT-2's with every digit apart."""
    if pattern is None:
        parts = [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    else:
        split = pre_tokenizers.Split(tokenizers.Regex(pattern), behavior="isolated")
        parts = [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    return pre_tokenizers.Sequence(parts)


def _words(digits: str) -> str:
    """Contractions, words with what precedes them, numbers, punctuation, line ends, spaces."""
    return (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
        + digits
        + r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    )


_SPLITTINGS: Final[Mapping[str, tuple[str | None, bool]]] = {
    "smollm": (None, False),
    "llama-bpe": (_words(r"\p{N}{1,3}"), True),
    "llama3": (_words(r"\p{N}{1,3}"), True),
    "qwen2": (_words(r"\p{N}"), False),
}


def _chat_templates(metadata: Mapping[str, Any]) -> dict[str, str]:
    """The default one, and those with a name of their own."""
    prefix = "tokenizer.chat_template"
    named = {key.removeprefix(prefix + "."): text for key, text in metadata.items() if key.startswith(prefix + ".")}
    return {"default": metadata[prefix], **named} if prefix in metadata else named
