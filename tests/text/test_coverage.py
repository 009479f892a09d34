"""The number of tokens that a text has at least, known by its length: never more than it has."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Backend

import ssd
from ssd.text.tokenizer import Tokenizer, load_tokenizer

ALPHABET = {char: i for i, char in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
BYTES = {f"<0x{byte:02X}>": byte for byte in range(256)}
MERGES = [("a", "a"), ("aa", "aa")]
MERGED = {"aa": 1000, "aaaa": 1001}
SPECIAL = "<special>"


def byte_level(*steps: pre_tokenizers.PreTokenizer) -> Backend:
    backend = Backend(models.BPE({**ALPHABET, **MERGED}, MERGES))
    backend.pre_tokenizer = pre_tokenizers.Sequence([*steps, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    backend.decoder = decoders.ByteLevel()
    return backend


def normalized(*steps: normalizers.Normalizer) -> Backend:
    backend = byte_level()
    backend.normalizer = normalizers.Sequence(list(steps))
    return backend


def special(**options: bool) -> Backend:
    backend = byte_level()
    backend.add_tokens([AddedToken(SPECIAL, **options)])
    return backend


def unknown(vocab: dict[str, int], **options: bool) -> Backend:
    return Backend(models.BPE({**vocab, "a": 900, **MERGED, "<unk>": 999}, MERGES, unk_token="<unk>", **options))


BOUNDED: dict[str, tuple[Callable[[], Backend], int]] = {  # with the characters of one token at most
    "bytes": (byte_level, 4),
    "split": (lambda: byte_level(pre_tokenizers.Split(Regex(r"\s+"), "isolated"), pre_tokenizers.Digits()), 4),
    "NFC": (lambda: normalized(normalizers.NFC()), 16),
    "replaced": (lambda: normalized(normalizers.Prepend("_"), normalizers.Replace(" ", "__")), 4),
    "special": (special, len(SPECIAL)),
    "byte fallback": (lambda: unknown(BYTES, byte_fallback=True), 6),
    "unknown characters": (lambda: unknown({}), 5),
}
UNBOUNDED: dict[str, Callable[[], Backend]] = {
    "spaces are left out": lambda: byte_level(pre_tokenizers.WhitespaceSplit()),
    "spaces are removed": lambda: byte_level(pre_tokenizers.Split(" ", "removed")),
    "spaces are stripped": lambda: normalized(normalizers.Strip()),
    "a pattern is replaced": lambda: normalized(normalizers.Replace(Regex(" +"), " ")),
    "a text becomes a shorter one": lambda: normalized(normalizers.Replace("  ", "")),
    "a token takes the spaces before it": lambda: special(lstrip=True),
    "a token takes the spaces behind it": lambda: special(rstrip=True),
    "unknown characters are one token": lambda: unknown({}, fuse_unk=True),
    "unknown characters are left out": lambda: Backend(models.BPE({"a": 0}, [])),
    "bytes are missing": lambda: unknown({"<0x00>": 0}, byte_fallback=True, fuse_unk=True),
    "words": lambda: Backend(models.WordLevel({"a": 0, "<unk>": 1}, unk_token="<unk>")),
}
TEXTS = st.text(st.characters(exclude_categories=["Cs"]))
PIECES = st.lists(
    st.one_of(st.sampled_from(["aaaa" * 9, " " * 9, SPECIAL, "\u03b1\u0313\u0300\u0345", "\u1100\u1161\u11a8"]), TEXTS)
)


@pytest.mark.parametrize("name", BOUNDED)
@given(pieces=PIECES)
def test_a_text_has_as_many_tokens_as_its_length_shows(name: str, pieces: list[str]) -> None:
    """Catches a bound that would refuse a prompt that fits."""
    make, most = BOUNDED[name]
    tokenizer, text = Tokenizer(make()), "".join(pieces)
    assert tokenizer.least_tokens(text) <= len(tokenizer.encode(text))
    assert tokenizer.least_tokens("x" * most * 100) == 100


@pytest.mark.parametrize("name", UNBOUNDED)
def test_nothing_is_concluded_where_a_token_may_stand_for_any_text(name: str) -> None:
    tokenizer = Tokenizer(UNBOUNDED[name]())
    assert tokenizer.least_tokens(" " * 100_000) == 0


@pytest.mark.parametrize("model", ["tiny-llama", "tiny-qwen3"])
def test_the_longest_token_is_the_bound(model: str) -> None:
    """Of bundled models; without it their long prompts would be tokenized in vain."""
    tokenizer = load_tokenizer(Path(ssd.__file__).parent / "bundle" / model)
    longest = max(map(len, tokenizer.backend.get_vocab()))
    assert tokenizer.least_tokens("x" * longest * 10) == 10
