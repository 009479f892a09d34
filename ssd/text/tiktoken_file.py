"""Byte-pair vocabularies in tiktoken's form (`tiktoken.model`), as Kimi's checkpoints have them.

A line is a token, its bytes in base64, and its rank, which is its id; BPE merges the pair whose joined bytes have the
lowest rank. The file has neither merges nor special tokens nor the pattern that splits a text: the merges are derived
here, special tokens come from tokenizer_config.json, and the pattern is that of the one class of tokenizers that has
such a file.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from ssd.errors import SSDError
from ssd.text.byte_level import CHARACTERS
from ssd.text.json_file import read_text

FILE: Final = "tiktoken.model"
_CONFIG: Final = "tokenizer_config.json"
_CLASS: Final = "TikTokenTokenizer"  # Kimi's
_NUM_RESERVED: Final = 256  # ids of special tokens, after the ranks
_RESERVED: Final = "<|reserved_token_%d|>"  # one that tokenizer_config.json has no name for
_MAX_BYTES: Final = 1024  # of a token; merges are derived in time quadratic in it

# Runs of Han characters; words of other letters, with a character before and an English contraction after them; up to
# three digits; punctuation, then line ends; white space.
_UPPER, _LOWER = (rf"[{case}\p{{Lm}}\p{{Lo}}\p{{M}}&&[^\p{{Han}}]]" for case in (r"\p{Lu}\p{Lt}", r"\p{Ll}"))
_BEFORE, _AFTER = r"[^\r\n\p{L}\p{N}]?", r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_PATTERN: Final = "|".join(
    [
        r"\p{Han}+",
        f"{_BEFORE}{_UPPER}*{_LOWER}+{_AFTER}",
        f"{_BEFORE}{_UPPER}+{_LOWER}*{_AFTER}",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    ]
)


def load_tiktoken(path: Path, config: Mapping[str, Any]) -> tokenizers.Tokenizer:
    """The tokenizer of a directory. `config`: what its tokenizer_config.json has."""
    kind = config.get("tokenizer_class")
    if kind != _CLASS:
        raise SSDError(
            f"{path / _CONFIG}: tokenizer_class={kind!r:.60}: how a text is split before {FILE} applies is known for "
            f"{_CLASS!r} only: put a tokenizer.json beside it, or pass token ids"
        )
    vocabulary = {"".join(map(CHARACTERS.__getitem__, token)): rank for token, rank in _read_ranks(path / FILE).items()}
    # Pairs that BPE never comes to are among them, which changes no text: what is between the ends of a token is merged
    # as if it stood alone, so the token is made of one pair only.
    merges = [
        (token[:at], token[at:])
        for token in vocabulary
        for at in range(1, len(token))
        if token[:at] in vocabulary and token[at:] in vocabulary
    ]
    backend = tokenizers.Tokenizer(models.BPE(vocabulary, merges, ignore_merges=True))
    split = pre_tokenizers.Split(tokenizers.Regex(_PATTERN), behavior="isolated")
    as_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence([split, as_bytes])
    backend.decoder = decoders.ByteLevel()
    _add_special_tokens(backend, path, config.get("added_tokens_decoder") or {})
    return backend


def _read_ranks(file: Path) -> dict[bytes, int]:
    """The tokens in the order of their ranks; every byte is one of them."""
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(read_text(file).splitlines(), 1):
        try:
            encoded, rank = line.split()
            token = base64.b64decode(encoded, validate=True)
            expected = len(ranks) == int(rank) and token not in ranks and 0 < len(token) <= _MAX_BYTES
        except ValueError:
            expected = False
        if not expected:
            raise SSDError(
                f"{file}, line {number}: {line!r:.60}: expected a token in base64 that no earlier line has, 1 to "
                f"{_MAX_BYTES} bytes, and the rank {len(ranks)}: download the file again"
            )
        ranks[token] = len(ranks)
    missing = next((byte for byte in range(256) if bytes([byte]) not in ranks), None)
    if missing is not None:
        raise SSDError(f"{file} has no token for the byte 0x{missing:02x}: download the file again")
    return ranks


def _add_special_tokens(backend: tokenizers.Tokenizer, path: Path, declared: Mapping[str, Any]) -> None:
    """They have the ids after the ranks, and are matched literally, whatever else is said of them."""
    first = backend.get_vocab_size()
    ids = range(first, first + _NUM_RESERVED)
    named = {int(token_id): entry for token_id, entry in declared.items()}
    entries = [named.get(token_id, {"content": _RESERVED % token_id, "special": True}) for token_id in ids]
    backend.add_tokens(
        [tokenizers.AddedToken(e["content"], special=e.get("special", False), normalized=False) for e in entries]
    )
    wrong = next((i for i in named if i not in ids or backend.token_to_id(named[i]["content"]) != i), None)
    if wrong is not None:
        raise SSDError(
            f"{path / _CONFIG}: added_tokens_decoder has the id {wrong} for {named[wrong]['content']!r:.60}; {FILE} "
            f"has {first} tokens, after which special ones have the ids {ids[0]} to {ids[-1]}, each once: one of the "
            "files is incomplete or of another model: download both again"
        )
