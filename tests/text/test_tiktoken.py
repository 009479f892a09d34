"""Checkpoints with tiktoken's ranks (Kimi): the ids are those of the library tiktoken with Kimi's pattern."""

from __future__ import annotations

import base64
import functools
import itertools
import json
import random
import time
import unicodedata
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from conftest import REAL_TOKENIZERS
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import models, pre_tokenizers, trainers

from ssd.constraints.grammars import Constraint, Grammars
from ssd.constraints.structured import StructuredOutput
from ssd.errors import SSDError
from ssd.prompts import own_set
from ssd.text.byte_level import BYTES
from ssd.text.detokenizer import IncrementalDecoder
from ssd.text.tokenizer import Tokenizer, load_tokenizer

HAN, OTHERS = r"\p{Han}", r"\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]"
CONTRACTED = "(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
PATTERN = (  # as tiktoken gets it; written apart from the one in the package
    rf"[{HAN}]+|[^\r\n\p{{L}}\p{{N}}]?[\p{{Lu}}\p{{Lt}}{OTHERS}]*[\p{{Ll}}{OTHERS}]+{CONTRACTED}"
    rf"|[^\r\n\p{{L}}\p{{N}}]?[\p{{Lu}}\p{{Lt}}{OTHERS}]+[\p{{Ll}}{OTHERS}]*{CONTRACTED}"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
OTHER = [
    "🙂",
    "👩\u200d👩\u200d👧",
    "🏳\ufe0f\u200d🌈",
    "👍🏽",
    "é",
    "e\u0301",
    "ﬁ",
    "Ⅷ",
    "ǅ",
    "\u02bcn",
    "ひら",
    "カナ々",
    "한국어",
    "العربية",
]
SPACES = [" ", "  ", "\n", "\r\n", "\t", " \n ", "\x85", "\u00a0", "\u3000", "        "]
WORDS = ["don't", "I'LL", "we'Re", "x's", "HTMLParser", "snake_case", "3.14", "2024", "!=", "/*", "中a文B", "[EOS]"]
POINTS = [*range(0xD800), *range(0xE000, 0x110000)]


@functools.cache
def passages() -> list[str]:
    return [text for name in ("humaneval", "gsm8k", "ultrafeedback") for text in own_set(name).prompts]


def mixed_text(length: int, seed: int = 0) -> str:
    """English, code, Han, other scripts, emoji, white space and single characters of all of Unicode."""
    dice, parts, total = random.Random(seed), [], 0
    while total < length:
        kind = dice.randrange(6)
        if kind == 0:
            text = dice.choice(passages())
            begin = dice.randrange(len(text))
            parts.append(text[begin : begin + dice.randrange(200)])
        elif kind == 1:
            parts.append("".join(chr(0x4E00 + min(dice.randrange(2000), dice.randrange(2000))) for _ in range(20)))
        elif kind == 2:
            parts.append(dice.choice("。、「」 a") + chr(dice.choice(POINTS)))
        else:
            parts.append(dice.choice((OTHER, SPACES, WORDS)[kind - 3]))
        total += len(parts[-1])
    return "".join(parts)[:length]


def write(path: Path, ranks: Sequence[bytes], **config: Any) -> Path:
    path.mkdir(exist_ok=True)
    lines = [f"{base64.b64encode(token).decode()} {rank}\n" for rank, token in enumerate(ranks)]
    (path / "tiktoken.model").write_text("".join(lines))
    names = {0: "[BOS]", 1: "[EOS]", 2: "<|im_end|>", 22: "<think>", 255: "[PAD]"}
    decoder = {str(len(ranks) + i): {"content": name, "special": i != 22} for i, name in names.items()}
    config = {"tokenizer_class": "TikTokenTokenizer", "eos_token": "[EOS]", "added_tokens_decoder": decoder, **config}
    (path / "tokenizer_config.json").write_text(json.dumps(config))
    return path


@functools.cache
def trained_ranks() -> list[bytes]:
    """A vocabulary of 3,000 tokens, among them parts of Han characters and of emoji."""
    backend = tokenizers.Tokenizer(models.BPE())
    split = pre_tokenizers.Split(tokenizers.Regex(PATTERN), behavior="isolated")
    as_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence([split, as_bytes])
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=3000, initial_alphabet=alphabet, show_progress=False)
    backend.train_from_iterator([*passages(), mixed_text(100_000, 1)], trainer)
    return ranks_of(backend.get_vocab())


def ranks_of(vocabulary: Mapping[str, int]) -> list[bytes]:
    return [bytes(BYTES[c] for c in token) for token in sorted(vocabulary, key=vocabulary.__getitem__)]


def oracle(ranks: Sequence[bytes], **special_tokens: int) -> Any:
    tiktoken = pytest.importorskip("tiktoken")
    by_token = {token: rank for rank, token in enumerate(ranks)}
    return tiktoken.Encoding("oracle", pat_str=PATTERN, mergeable_ranks=by_token, special_tokens=special_tokens)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return load_tokenizer(write(tmp_path_factory.mktemp("trained"), trained_ranks()))


@pytest.mark.parametrize("length", [30_000, pytest.param(1_000_000, marks=pytest.mark.slow)])
def test_the_ids_are_tiktoken_s(trained: Tokenizer, length: int) -> None:
    """A difference of one character class or of one merge would change what the model reads."""
    text = mixed_text(length)
    num_ranks = len(trained_ranks())
    theirs = oracle(trained_ranks(), **{"[EOS]": num_ranks + 1})
    ids = trained.encode(text)
    assert ids == theirs.encode(text, allowed_special="all")
    assert num_ranks + 1 in ids
    assert trained.decode(ids, skip_special_tokens=False) == text


@pytest.mark.slow
def test_all_characters_are_split_as_tiktoken_splits_them(trained: Tokenizer) -> None:
    """The two libraries have regular expressions, and tables of Unicode, of their own."""
    theirs = oracle(trained_ranks())
    for c in map(chr, POINTS):
        if unicodedata.category(c) not in ("Cn", "Co"):  # assigned
            text = f"a{c}A{c}{c}1{c}!{c} {c}'s中{c}\n{c}"
            assert trained.encode(text) == theirs.encode_ordinary(text), hex(ord(c))


tokens = st.lists(st.lists(st.sampled_from(b"ab "), min_size=2, max_size=6).map(bytes), unique=True, max_size=30)


@given(tokens, st.lists(st.text("aab ", max_size=30), min_size=1, max_size=8), st.randoms(use_true_random=False))
def test_any_order_of_ranks(
    tmp_path_factory: pytest.TempPathFactory, tokens: list[bytes], texts: list[str], dice: random.Random
) -> None:
    """Ranks that no training gives: long tokens before their parts, several ways to the same token, and tokens that
    merging never makes, which a text is only if all of it is the token."""
    ranks = [*(bytes([byte]) for byte in range(256)), *tokens]
    dice.shuffle(ranks)
    ours, theirs = load_tokenizer(write(tmp_path_factory.mktemp("random"), ranks)), oracle(ranks)
    assert [ours.encode(text) for text in texts] == [theirs.encode_ordinary(text) for text in texts]


def test_special_tokens(trained: Tokenizer) -> None:
    """256 ids follow the ranks; what the configuration has no name for is called after its id, as Kimi's code does."""
    first = len(trained_ranks())
    assert trained.vocab_size == first + 256
    assert trained.encode(f"[BOS]<think><|reserved_token_{first + 3}|>") == [first, first + 22, first + 3]
    assert [trained.is_special(first + i) for i in (0, 1, 3, 22)] == [True, True, True, False]
    assert trained.eos_token_id == first + 1
    assert trained.decode(trained.encode("a[BOS]b<think>")) == "ab<think>"


def test_text_is_streamed(trained: Tokenizer) -> None:
    """Characters that are spread over several tokens come whole; the bound of a text's tokens holds."""
    text = mixed_text(3000, 2).replace("[EOS]", "")
    ids = trained.encode(text)
    decoder = IncrementalDecoder(trained)
    assert "".join(map(decoder.push, ids)) + decoder.flush() == text
    assert 0 < trained.least_tokens(text) <= len(ids)


def test_structured_output(trained: Tokenizer) -> None:
    """The grammar library reads the vocabulary: what fits the schema is allowed, token by token, and nothing else."""
    pytest.importorskip("llguidance")
    eos = trained.eos_token_id or 0
    wanted = StructuredOutput(json_schema={"type": "object", "properties": {"城市": {"type": "string"}}})
    grammar = Grammars(trained.backend, trained.vocab_size, [eos]).compiled(wanted).result()
    constraint = Constraint(grammar)
    ids = trained.encode('{"城市": "北京 🙂"}')
    assert constraint.num_valid(ids) == len(ids)
    assert constraint.num_valid(trained.encode('{"town')) < len(trained.encode('{"town'))


@pytest.mark.slow
def test_a_large_vocabulary_loads_in_seconds(tmp_path: Path) -> None:
    """The ranks of Qwen 3, 151,643 tokens, as tiktoken has them."""
    if not (REAL_TOKENIZERS / "qwen3").is_dir():
        pytest.skip(f"no tokenizer at {REAL_TOKENIZERS / 'qwen3'}: set SSD_TEST_TOKENIZERS")
    vocabulary = load_tokenizer(REAL_TOKENIZERS / "qwen3").backend.get_vocab(with_added_tokens=False)
    ranks = ranks_of(vocabulary)
    path, begin = write(tmp_path, ranks), time.thread_time()
    ours = load_tokenizer(path)
    assert time.thread_time() - begin < 10
    text = mixed_text(200_000, 3)
    assert ours.encode(text) == oracle(ranks, **{"[EOS]": len(ranks) + 1}).encode(text, allowed_special="all")


SINGLE = [bytes([byte]) for byte in range(256)]
DECODER = {"content": "[EOS]", "special": True}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda lines: [*lines[:40], "YQ=", *lines[41:]], r"tiktoken\.model, line 41: 'YQ='.*rank 40.*download"),
        (lambda lines: [*lines[:40], "é 40", *lines[41:]], r"line 41.*base64"),
        (lambda lines: [*lines[:40], *lines[41:]], "line 41.*the rank 40"),
        (lambda lines: [*lines, "YQ== 256"], "line 257.*no earlier line"),
        (lambda lines: [*lines, "YQ==YQ== 256"], "line 257"),
        (lambda lines: [*lines, base64.b64encode(b"a" * 5000).decode() + " 256"], "1 to 1024 bytes"),
        (lambda lines: [*lines, " 256"], "line 257"),
        (lambda lines: lines[:200], "no token for the byte 0xc8: download"),
        (lambda lines: [], "no token for the byte 0x00"),
    ],
)
def test_a_broken_file_is_named(tmp_path: Path, change: Any, message: str) -> None:
    path = write(tmp_path, SINGLE)
    lines = (path / "tiktoken.model").read_text().splitlines()
    (path / "tiktoken.model").write_text("\n".join(change(lines)))
    with pytest.raises(SSDError, match=message):
        load_tokenizer(path)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"tokenizer_class": "QWenTokenizer"}, "tokenizer_class='QWenTokenizer'.*'TikTokenTokenizer' only"),
        ({"tokenizer_class": None}, r"tokenizer_class=None.*put a tokenizer\.json"),
        ({"added_tokens_decoder": {"255": DECODER}}, r"the id 255 for '\[EOS\]'; tiktoken.model has 256 tokens"),
        ({"added_tokens_decoder": {"512": DECODER}}, "the id 512 .*the ids 256 to 511.*incomplete or of another model"),
        ({"added_tokens_decoder": {"256": DECODER, "257": DECODER}}, "the id 25.*each once"),
        ({"added_tokens_decoder": {"256": {"content": "a"}}}, "the id 256 for 'a'"),
        ({"added_tokens_decoder": {"x": DECODER}}, "unknown form"),
        ({"added_tokens_decoder": {"256": "[EOS]"}}, "unknown form"),
        ({"added_tokens_decoder": {"256": {"content": 3}}}, "unknown form"),
        ({"added_tokens_decoder": [1]}, "unknown form"),
    ],
)
def test_what_contradicts_the_ranks_is_named(tmp_path: Path, config: dict[str, Any], message: str) -> None:
    with pytest.raises(SSDError, match=message):
        load_tokenizer(write(tmp_path, SINGLE, **config))


def test_a_truncated_file_is_not_taken_for_a_small_one(tmp_path: Path) -> None:
    """Cut between two lines, the ranks are valid, but the special tokens would have other ids than the model's."""
    path = write(tmp_path, trained_ranks())
    lines = (path / "tiktoken.model").read_text().splitlines(keepends=True)
    for length in (len(lines) - 1, 2000):
        (path / "tiktoken.model").write_text("".join(itertools.islice(lines, length)))
        with pytest.raises(SSDError, match="incomplete"):
            load_tokenizer(path)
