"""Tokenizers: ids and chat prompts equal to transformers', and streamed text equal to the whole text.

The real tokenizers (Llama 3.2, Qwen 3) are used where SSD_TEST_TOKENIZERS says that they are.
"""

from __future__ import annotations

import json
import random
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from conftest import REAL_TOKENIZERS
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

from ssd.errors import RequestError, SSDError
from ssd.text.detokenizer import IncrementalDecoder
from ssd.text.tokenizer import Tokenizer, load_tokenizer

CHAT = [
    {"role": "system", "content": "Be brief. "},
    {"role": "user", "content": "Wie heißt „du“? <b>&'\" 你好 🙂"},
    {"role": "assistant", "content": "Ich bin ein Modell."},
    {"role": "user", "content": "And in 2024?"},
]
TOOLS = [{"type": "function", "function": {"name": "f", "description": "größer <1>", "parameters": {"type": "object"}}}]
TEXTS = [
    "",
    " ",
    "Hello, world! It's 12345.67 o'clock.\r\n\r\n\tdef f(x):\n        return x ** 2  # ok   ",
    "naïve café é e\u0301 \u00a0 Ⅷ ﬁ 中文字符 ひらがな 한국어 العربية ไทย",
    "👩‍👩‍👧‍👦 🏳️‍🌈 𒀀𐍈 \x00 \ufffd \u200b",
    "<|begin_of_text|><|im_start|>user<|eot_id|> <think>x</think>",
]


def decode_stream(tokenizer: Tokenizer, ids: Iterable[int], prompt_ids: Sequence[int] = ()) -> Iterator[str]:
    """The text of a stream of tokens, piece by piece, without empty pieces."""
    decoder = IncrementalDecoder(tokenizer, prompt_ids)
    for token_id in ids:
        if piece := decoder.push(token_id):
            yield piece
    if piece := decoder.flush():
        yield piece


@pytest.fixture(scope="session", params=["llama-3.2", "qwen3"])
def real(request: pytest.FixtureRequest) -> tuple[Tokenizer, Path]:
    path = REAL_TOKENIZERS / request.param
    if not path.is_dir():
        pytest.skip(f"no tokenizer at {path}: set SSD_TEST_TOKENIZERS to a folder with llama-3.2 and qwen3")
    return load_tokenizer(path), path


@pytest.fixture(scope="session")
def reference(real: tuple[Tokenizer, Path]) -> Any:
    return pytest.importorskip("transformers").AutoTokenizer.from_pretrained(str(real[1]))


@pytest.fixture(scope="session")
def spm() -> Tokenizer:
    """A small tokenizer of the Llama 2 kind: spaces as ▁, bytes for what is not in the vocabulary."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    words = ["▁", "▁▁", "▁Hello", "▁world", "a", "b", "▁a", "é", "!", "lo"]
    vocabulary = {piece: index for index, piece in enumerate([*pieces, *words])}
    backend = tokenizers.Tokenizer(models.BPE(vocabulary, [], unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.add_special_tokens(["<unk>", "<s>", "</s>"])
    return Tokenizer(backend, special_tokens={"bos_token": "<s>", "eos_token": "</s>"})


def byte_level() -> tokenizers.Tokenizer:
    """A small byte-level BPE with a BOS."""
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=["<s>", "</s>"], initial_alphabet=alphabet, show_progress=False
    )
    backend.train_from_iterator(["hello world, hello there"] * 3, trainer)
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    return backend


def write_tokenizer(path: Path, **config: Any) -> Path:
    byte_level().save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text(json.dumps(config))
    return path


# --- encoding ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("add_special_tokens", [True, False])
def test_encode_equals_transformers(real: tuple[Tokenizer, Path], reference: Any, add_special_tokens: bool) -> None:
    for text in TEXTS:
        ids = real[0].encode(text, add_special_tokens)
        assert ids == reference.encode(text, add_special_tokens=add_special_tokens)
        for skip in (True, False):
            assert real[0].decode(ids, skip) == reference.decode(ids, skip_special_tokens=skip)


def test_what_the_tokenizer_says_about_itself(real: tuple[Tokenizer, Path], reference: Any) -> None:
    tokenizer = real[0]
    assert tokenizer.vocab_size == len(reference)
    assert (tokenizer.eos_token_id, tokenizer.bos_token) == (reference.eos_token_id, reference.bos_token)
    assert all(tokenizer.is_special(token_id) for token_id in reference.all_special_ids)
    assert not any(tokenizer.is_special(token_id) for token_id in range(1000))


@pytest.mark.parametrize(("add_bos", "add_eos"), [(None, None), (False, None), (True, True), (False, True)])
def test_bos_and_eos_as_the_configuration_says(add_bos: bool | None, add_eos: bool | None, tmp_path: Path) -> None:
    """A doubled or missing BOS changes every answer of a model; transformers is the oracle."""
    transformers = pytest.importorskip("transformers")
    flags = {"add_bos_token": add_bos, "add_eos_token": add_eos}
    config: dict[str, Any] = {"bos_token": {"content": "<s>", "__type": "AddedToken"}, "eos_token": "</s>"}
    config.update({key: value for key, value in flags.items() if value is not None})
    path = write_tokenizer(tmp_path, tokenizer_class="PreTrainedTokenizerFast", **config)
    theirs = transformers.AutoTokenizer.from_pretrained(str(path))
    assert load_tokenizer(path).encode("hello") == theirs.encode("hello")


def test_special_tokens_that_only_the_configuration_names(tmp_path: Path) -> None:
    """They must be one token, not their letters, and must not show up in text."""
    path = write_tokenizer(
        tmp_path, eos_token="<|end|>", added_tokens_decoder={"300": {"content": "<|x|>", "special": False}}
    )
    tokenizer = load_tokenizer(path)
    assert tokenizer.encode("hello<|end|>")[-1] == tokenizer.eos_token_id
    assert tokenizer.is_special(tokenizer.eos_token_id or 0)
    assert tokenizer.decode(tokenizer.encode("hello<|x|><|end|>")) == "hello<|x|>"


def test_a_length_limit_in_the_file_does_not_cut_prompts(tmp_path: Path) -> None:
    backend = byte_level()
    backend.enable_truncation(2)
    backend.save(str(tmp_path / "tokenizer.json"))
    assert load_tokenizer(tmp_path).decode(load_tokenizer(tmp_path).encode("hello there")) == "hello there"


def test_without_a_tokenizer_token_ids_still_work(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(tmp_path)
    assert (tokenizer.available, tokenizer.vocab_size, tokenizer.eos_token_id) == (False, 0, None)
    with pytest.raises(SSDError, match=r"no tokenizer: pass token ids.*tokenizer\.json"):
        tokenizer.encode("hello")
    assert IncrementalDecoder(tokenizer, [1, 2]).push(3) == ""


def test_a_broken_tokenizer_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(SSDError, match=r"tokenizer\.json"):
        load_tokenizer(tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("add_special_tokens", [True, False])
def test_long_texts_are_encoded_as_short_ones_are(spm: Tokenizer, add_special_tokens: bool) -> None:
    """Catches another path for long texts that gives other tokens, or that keeps other threads from running."""
    text, ticks = " ".join(TEXTS) * 4000, []
    expected = spm.backend.encode(text, add_special_tokens=add_special_tokens).ids
    with ThreadPoolExecutor(1) as pool:
        encoding = pool.submit(spm.encode, text, add_special_tokens)
        while not encoding.done():
            ticks.append(time.sleep(0.001))
    assert encoding.result() == expected
    assert len(ticks) > 3
    with pytest.raises(RequestError, match="not valid Unicode"):
        spm.encode(text + "\ud800")


def test_only_text_is_encoded(spm: Tokenizer) -> None:
    with pytest.raises(RequestError, match="prompt=3"):
        spm.encode(3)  # type: ignore[arg-type]


def test_without_transformers_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "tokenizer.model").touch()
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(SSDError, match=r"pip install '\.\[hf\]'"):
        load_tokenizer(tmp_path)


def test_a_sentencepiece_model_goes_through_transformers(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    pytest.importorskip("google.protobuf")
    sentencepiece = pytest.importorskip("sentencepiece")
    corpus = tmp_path / "corpus.txt"
    corpus.write_text("hello world, hello there, what a world\n" * 20)
    sentencepiece.SentencePieceTrainer.train(
        input=str(corpus),
        model_prefix=str(tmp_path / "tokenizer"),
        vocab_size=300,
        model_type="bpe",
        byte_fallback=True,
        minloglevel=2,
    )
    config = {"tokenizer_class": "LlamaTokenizer", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.decode(tokenizer.encode("hello world")) == "hello world"
    assert tokenizer.eos_token_id == 2


# --- chats ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "kwargs",
    [
        {},
        {"add_generation_prompt": False},
        {"enable_thinking": False},
        {"enable_thinking": True},
        {"tools": TOOLS},
        {"date_string": "1 Jan 2020", "tools": TOOLS, "tools_in_user_message": False},
    ],
)
@pytest.mark.parametrize("turns", [2, 3, 4])
def test_chat_prompts_equal_transformers(
    real: tuple[Tokenizer, Path], reference: Any, kwargs: dict[str, Any], turns: int
) -> None:
    kwargs = {"add_generation_prompt": True, **kwargs}
    ours = real[0].apply_chat_template(CHAT[:turns], **kwargs)
    assert ours == reference.apply_chat_template(CHAT[:turns], tokenize=False, **kwargs)
    ids = reference.apply_chat_template(CHAT[:turns], tokenize=True, return_dict=False, **kwargs)
    assert real[0].encode(ours, add_special_tokens=False) == ids


def test_templates_by_name_and_by_file(tmp_path: Path) -> None:
    named = [{"name": "default", "template": "D{{ bos_token }}"}, {"name": "tool_use", "template": "T"}]
    tokenizer = load_tokenizer(write_tokenizer(tmp_path, bos_token="<s>", chat_template=named))
    assert tokenizer.apply_chat_template(CHAT) == "D<s>"
    assert tokenizer.apply_chat_template(CHAT, tools=TOOLS) == "T"
    assert tokenizer.apply_chat_template(CHAT, chat_template="tool_use") == "T"
    assert tokenizer.apply_chat_template(CHAT, chat_template="{{ messages[0].role }}") == "system"
    (tmp_path / "chat_template.jinja").write_text("F")
    assert load_tokenizer(tmp_path).apply_chat_template(CHAT) == "F"


def test_what_templates_may_use() -> None:
    """Settings that published templates rely on: block trimming, break, generation blocks, plain JSON, the date."""
    template = (
        "{% for m in messages %}\n  {% if loop.index > 1 %}{% break %}{% endif %}\n"
        "{% generation %}{{ m | tojson }}{% endgeneration %}\n{% endfor %}{{ strftime_now('%Y') | length }}"
    )
    tokenizer = Tokenizer(None, chat_templates={"default": template})
    messages = [{"role": "user", "content": "<ü>"}, {"role": "user", "content": "x"}]
    assert tokenizer.apply_chat_template(messages) == '{"role": "user", "content": "<ü>"}4'


@pytest.mark.parametrize(
    "template", ["{{ raise_exception('roles must alternate') }}", "{{ messages[0].content + 1 }}", "{% if %}"]
)
def test_a_template_that_refuses_is_the_requests_fault(template: str) -> None:
    with pytest.raises(RequestError, match="chat template refuses"):
        Tokenizer(None).apply_chat_template(CHAT, chat_template=template)


def test_templates_run_in_a_sandbox() -> None:
    with pytest.raises(RequestError):
        Tokenizer(None).apply_chat_template(CHAT, chat_template="{{ ''.__class__.__mro__[1].__subclasses__() }}")


def test_no_chat_template_says_what_to_do(spm: Tokenizer) -> None:
    with pytest.raises(RequestError, match=r"no chat template.*plain prompt.*chat_template\.jinja"):
        spm.apply_chat_template(CHAT)


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ("hello", "messages: expected a list"),
        ([], "messages: the list is empty"),
        (["hello"], r"messages\[0\]: expected a dict"),
        ([CHAT[0], {"content": "x"}], r"messages\[1\]\.role=None"),
        ([{"role": 3, "content": "x"}], r"messages\[0\]\.role=3"),
        ([{"role": "user"}], r"messages\[0\]\.content=None"),
        ([{"role": "user", "content": 3}], r"messages\[0\]\.content=3"),
    ],
)
def test_messages_are_checked_field_by_field(messages: Any, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        Tokenizer(None, chat_templates={"default": "x"}).apply_chat_template(messages)


def test_a_message_that_calls_tools_needs_no_content() -> None:
    message = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f"}}]}
    assert Tokenizer(None, chat_templates={"default": "x"}).apply_chat_template([message]) == "x"


# --- streaming --------------------------------------------------------------------------------------------------------


def streamed(tokenizer: Tokenizer, ids: list[int], prompt_ids: list[int] | None = None) -> str:
    """Token by token; however many come together, the text is the same."""
    text = "".join(decode_stream(tokenizer, ids, prompt_ids or []))
    for size in (2, 5, len(ids) + 1):
        decoder = IncrementalDecoder(tokenizer, prompt_ids or [])
        pieces = [decoder.push(*ids[i : i + size]) for i in range(0, len(ids), size)]
        assert "".join(pieces) + decoder.flush() == text
    return text


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(text=st.text(max_size=60))
def test_streamed_unicode_is_the_text(real: tuple[Tokenizer, Path], text: str) -> None:
    ids = real[0].encode(text)
    assert streamed(real[0], ids) == real[0].decode(ids)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_streamed_random_tokens_are_their_text(real: tuple[Tokenizer, Path], data: st.DataObject) -> None:
    """Random ids hold invalid bytes, special tokens and ids beyond the vocabulary; low ids are single bytes."""
    token = st.one_of(st.integers(0, 255), st.integers(0, real[0].vocab_size + 50))
    ids = data.draw(st.lists(token, max_size=60))
    assert streamed(real[0], ids) == real[0].decode(ids)
    prompt = data.draw(st.lists(token, max_size=6))
    if not real[0].decode(prompt).endswith("\ufffd"):
        assert streamed(real[0], ids, prompt) == real[0].decode(prompt + ids)[len(real[0].decode(prompt)) :]


def test_no_piece_holds_half_a_character(real: tuple[Tokenizer, Path]) -> None:
    ids = real[0].encode("".join(TEXTS[1:4]) + "👩‍👩‍👧‍👦𒀀𐍈🏳️‍🌈")
    assert not any("\ufffd" in piece for piece in decode_stream(real[0], ids))


def test_text_comes_without_delay(real: tuple[Tokenizer, Path]) -> None:
    """Plain text is out with the token that completes it, also behind invalid bytes."""
    ids = real[0].encode("The quick brown fox", add_special_tokens=False)
    decoder = IncrementalDecoder(real[0])
    assert all(decoder.push(token_id) for token_id in ids)


def test_endless_invalid_bytes_are_neither_hoarded_nor_slow(real: tuple[Tokenizer, Path]) -> None:
    """A decoder that waits for a valid character decodes an ever longer buffer: quadratic, and silent."""
    broken = real[0].token_id("ð")  # byte 0xF0, the first of four
    assert broken is not None
    decoder = IncrementalDecoder(real[0])
    pieces = [decoder.push(broken) for _ in range(2000)]
    assert len("".join(pieces)) >= 1990
    assert len(decoder._pending) < 8
    assert len(decoder._context) < 8
    assert "".join(pieces) + decoder.flush() == "\ufffd" * 2000


def test_the_work_per_token_does_not_grow(real: tuple[Tokenizer, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    decoded: list[int] = []
    tokenizer = Tokenizer(real[0].backend)

    def counted(ids: list[int], skip: bool) -> str:
        decoded.append(len(ids))
        return real[0].decode(ids, skip)

    monkeypatch.setattr(tokenizer, "decode", counted)
    ids = real[0].encode("word 🙂 " * 500)
    assert "".join(decode_stream(tokenizer, ids))
    assert max(decoded) <= 24
    assert sum(decoded) < 12 * len(ids)


def test_sentencepiece_spaces_survive(spm: Tokenizer) -> None:
    prompt, text = spm.encode("Hello"), [spm.token_id("▁world"), spm.token_id("▁"), spm.token_id("▁a")]
    ids = [token_id for token_id in text if token_id is not None]
    assert streamed(spm, ids, prompt) == " world  a"
    assert streamed(spm, ids) == spm.decode(ids) == "world  a"


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    pieces=st.lists(st.sampled_from(["Hello", " world", "a", " a", "é", " ", "  ", "中", "🙂", "!", "ß"]), max_size=20)
)
def test_streamed_sentencepiece_text_is_the_text(spm: Tokenizer, pieces: list[str]) -> None:
    """Here characters outside of the vocabulary come as bytes, and leading spaces as part of words."""
    ids = spm.encode("".join(pieces))
    assert streamed(spm, ids) == spm.decode(ids)


def test_special_tokens_can_be_kept(spm: Tokenizer) -> None:
    ids = [1, *spm.encode("Hello"), 2]
    decoder = IncrementalDecoder(spm, skip_special_tokens=False)
    text = "".join(decoder.push(token_id) for token_id in ids) + decoder.flush()
    assert text == spm.decode(ids, skip_special_tokens=False)


def test_streams_of_a_long_random_mixture(real: tuple[Tokenizer, Path]) -> None:
    def stretches() -> Iterator[int]:
        source = random.Random(7)
        for _ in range(300):
            low = source.random() < 0.5
            yield from (source.randrange(256 if low else real[0].vocab_size) for _ in range(source.randrange(1, 30)))
            yield from real[0].encode(source.choice(TEXTS), add_special_tokens=False)

    ids = list(stretches())
    assert streamed(real[0], ids) == real[0].decode(ids)


def metaspace() -> Tokenizer:
    """A small tokenizer of the sentencepiece unigram kind."""
    pieces = [(piece, -1.0) for piece in ("<unk>", "▁", "▁Hello", "▁world", "a", "b", "▁a", "é", "!", "lo", "中")]
    backend = tokenizers.Tokenizer(models.Unigram(pieces, unk_id=0))
    backend.decoder = decoders.Metaspace()
    return Tokenizer(backend)


def straddling() -> Tokenizer:
    """Byte-level, with tokens that end inside of characters."""
    split = pre_tokenizers.ByteLevel(add_prefix_space=False)
    shown = "".join(part for part, _ in split.pre_tokenize_str("a你好🙂b"))  # a character stands for each byte
    parts = [shown[i : i + n] for n in (2, 3, 4, 5) for i in range(len(shown) - n + 1)]
    symbols = dict.fromkeys([*sorted(split.alphabet()), *parts])
    backend = tokenizers.Tokenizer(models.BPE({symbol: i for i, symbol in enumerate(symbols)}, []))
    backend.pre_tokenizer, backend.decoder = split, decoders.ByteLevel()
    return Tokenizer(backend)


@pytest.mark.parametrize("kind", ["byte fallback", "byte level", "metaspace"])
def test_text_does_not_depend_on_how_tokens_are_grouped(spm: Tokenizer, kind: str) -> None:
    """Random tokens, half of them bytes: prompts and outputs that end inside a character, invalid bytes, specials."""
    tokenizer = {"byte fallback": lambda: spm, "byte level": straddling, "metaspace": metaspace}[kind]()
    dice = random.Random(3)
    characters = [tokenizer.encode(text, add_special_tokens=False) for text in ("é", "中", "🙂", "a", "Hello")]

    def some() -> list[int]:
        groups = [dice.choice([*characters, [dice.randrange(tokenizer.vocab_size)]]) for _ in range(dice.randrange(9))]
        ids = [token for group in groups for token in group]
        return ids[: dice.randint(len(ids) // 2, len(ids))]

    for _ in range(400):
        prompt, ids = some(), some()
        one_by_one = "".join(decode_stream(tokenizer, ids, prompt))
        for _ in range(3):
            decoder, left, text = IncrementalDecoder(tokenizer, prompt), ids, ""
            while left:
                size = dice.randint(1, len(left))
                text, left = text + decoder.push(*left[:size]), left[size:]
            assert text + decoder.flush() == one_by_one, (prompt, ids)
