"""How many characters of a text one token stands for at most: a text of n times as many has at least n tokens."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping
from math import inf, prod
from typing import Any, Final

import tokenizers
from tokenizers.models import BPE
from tokenizers.normalizers import Normalizer
from tokenizers.pre_tokenizers import ByteLevel, PreTokenizer

_KEEPING: Final = ("ByteLevel", "Digits", "Metaspace", "Split")  # pre-tokenizers that leave out no character
_COMPOSED: Final = 4  # characters that NFC makes one of at most: the longest canonical decomposition
_BYTES: Final = [f"<0x{byte:02X}>" for byte in range(256)]


def chars_per_token(backend: tokenizers.Tokenizer) -> float | None:
    """Characters of the longest token, times those that the normalizer makes one of.

    None where there may be no such bound: a step that is not known here may leave out characters, or make one token of
    any number of unknown ones, and added tokens with `lstrip` or `rstrip` take all spaces beside them.
    """
    vocab, normalizer = backend.get_vocab(with_added_tokens=False), backend.normalizer
    added = backend.get_added_tokens_decoder().values()
    shrink = _shrink(_fields(normalizer))
    if shrink == inf or not _keeps_text(backend, vocab) or any(token.lstrip or token.rstrip for token in added):
        return None
    contents = [
        normalizer.normalize_str(token.content) if token.normalized and normalizer is not None else token.content
        for token in added
    ]
    return shrink * max(map(len, (*vocab, *contents)), default=1)


def _shrink(normalizer: Mapping[str, Any]) -> float:
    """Times as many characters as its result that a text has before this normalizer, at most."""
    kind = normalizer.get("type")
    if kind is None or kind == "Prepend":
        return 1
    if kind == "Sequence":
        return prod(map(_shrink, normalizer["normalizers"]))
    if kind == "NFC":
        return _COMPOSED
    pattern = normalizer["pattern"].get("String") if kind == "Replace" else None
    return 1 if pattern is not None and len(normalizer["content"]) >= len(pattern) else inf


def _keeps_text(backend: tokenizers.Tokenizer, vocab: Collection[str]) -> bool:
    """Whether every character of a normalized text is in a token, which has as many characters of its own."""
    model, steps = backend.model, list(_steps(_fields(backend.pre_tokenizer)))
    if not isinstance(model, BPE) or model.continuing_subword_prefix or model.end_of_word_suffix:
        return False
    if any(step["type"] not in _KEEPING or step.get("behavior") == "Removed" for step in steps):
        return False
    if any(step["type"] == "ByteLevel" for step in steps):
        return all(char in vocab for char in ByteLevel.alphabet())
    if model.byte_fallback:
        return all(byte in vocab for byte in _BYTES)
    return model.unk_token is not None and not model.fuse_unk


def _steps(pre_tokenizer: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    if pre_tokenizer.get("type") == "Sequence":
        for each in pre_tokenizer["pretokenizers"]:
            yield from _steps(each)
    elif pre_tokenizer:
        yield pre_tokenizer


def _fields(step: Normalizer | PreTokenizer | None) -> dict[str, Any]:
    """A step as in tokenizer.json; empty if there is none."""
    return {} if step is None else json.loads(step.__getstate__())
