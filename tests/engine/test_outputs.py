"""From tokens to text: stops, streaming, incomplete characters, samples; and LLM's loops over an engine.

The tokenizer is made on the spot: ids 0..255 are the bytes, then an end token, then a few longer pieces.
"""

from __future__ import annotations

import itertools
import math
import timeit
from collections.abc import Sequence as Seq
from dataclasses import replace

import pytest
from fakes import VOCAB, Harness, ScriptedDrafter, make_harness, make_sequence, naive, wait_until_idle
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend

from ssd.core import FinishReason, Outcome, SamplingParams, TokenLogprobs, sequence_seed
from ssd.engine.driver import Driver
from ssd.engine.outputs import OutputProcessor, StopStrings, refused
from ssd.errors import ALL_FORBIDDEN, NO_CHOICE, STRUCTURED_FAILED
from ssd.llm import LLM
from ssd.text.tokenizer import Tokenizer

EOS = 256
PIECES = [b"abc", b"b.c", b"xyz", b"stop here", b"x\xe2", b"\x82\xac!"]  # ids from 257 on
PIECE = {piece: 257 + i for i, piece in enumerate(PIECES)}


def byte_characters() -> list[str]:
    """The printable stand-ins that ByteLevel uses for the 256 bytes."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = itertools.count(256)
    return [chr(b if b in printable else next(others)) for b in range(256)]


def byte_tokenizer() -> Tokenizer:
    letters = byte_characters()
    vocabulary = {letter: byte for byte, letter in enumerate(letters)}
    vocabulary["<eos>"] = EOS
    vocabulary |= {"".join(letters[b] for b in piece): token for piece, token in PIECE.items()}
    backend = Backend(models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken("<eos>", special=True, normalized=False)])
    return Tokenizer(backend, special_tokens={"eos_token": "<eos>"})


TOKENIZER = byte_tokenizer()
Tokens = Seq[int] | bytes | str


def ids(tokens: Tokens) -> list[int]:
    return list(tokens.encode() if isinstance(tokens, str) else tokens)


class Script:
    """Writes outcomes one after the other, and reads the stream after each, as a user would."""

    def __init__(self, params: SamplingParams, *, stop_token_ids: Seq[int] = (EOS,), prompt: Tokens = "p") -> None:
        prompt = ids(prompt)
        self.sequence = make_sequence(
            prompt,
            params=params,
            stop_token_ids=frozenset(stop_token_ids),
            max_tokens=len(prompt) + params.max_new_tokens,
        )
        self.writer = OutputProcessor(self.sequence, TOKENIZER, VOCAB)
        self.reason: FinishReason | None = None
        self.pieces: list[str] = []

    def write(self, *outcomes: Tokens) -> Script:
        for outcome in outcomes:
            if self.reason is not None:
                break
            self.reason = self.writer.append(Outcome(tuple(ids(outcome))))
            if self.reason is not None:
                self.end(self.reason)
            else:
                self.pieces.append(self.writer.new_text())
        return self

    def end(self, reason: FinishReason) -> Script:
        """What the engine does when a sequence has finished."""
        self.sequence.finish_reason = reason
        self.writer.finish()
        self.pieces.append(self.writer.new_text())
        return self

    @property
    def result(self) -> tuple[str, FinishReason | None]:
        assert "".join(self.pieces) == self.writer.text, "the stream and the text disagree"
        return self.writer.text, self.reason


# --- no token to choose ----------------------------------------------------------------------------------------------


def test_a_failure_comes_after_the_accepted_tokens() -> None:
    """Catches text that is dropped or held back for a stop string when there is no next token."""
    script = Script(SamplingParams(stop="END")).write("one ", [*ids("two E"), -1])
    assert script.result == ("one two E", "error")
    assert script.writer.error == NO_CHOICE


@pytest.mark.parametrize(
    ("params", "error"),
    [
        (SamplingParams(logit_bias=dict.fromkeys(range(VOCAB), -math.inf)), ALL_FORBIDDEN),
        (SamplingParams(logit_bias=dict.fromkeys(range(1, VOCAB), -math.inf)), NO_CHOICE),
        (SamplingParams(logit_bias=dict.fromkeys(range(1, VOCAB), -math.inf), min_tokens=1), ALL_FORBIDDEN),
    ],
)
def test_what_the_request_forbids_is_told_from_what_the_model_computes(params: SamplingParams, error: str) -> None:
    """Catches a client that is told of bad weights, and an operator who is told of a client's parameters."""
    script = Script(params, stop_token_ids=[0]).write([-1])
    assert (script.writer.error, script.reason) == (error, "error")


def test_a_stop_among_the_accepted_tokens_is_no_failure() -> None:
    """Catches a text that has ended, by a stop string, a stop token or its length, and fails all the same."""
    draft = [*ids("two END"), -1]
    assert Script(SamplingParams(stop="END")).write("one ", draft).result == ("one two ", "stop")
    assert Script(SamplingParams(max_new_tokens=11)).write("one ", draft).result == ("one two END", "length")
    script = Script(SamplingParams()).write("one ", [*ids("two"), EOS, -1])
    assert (script.result, script.writer.error) == (("one two", "stop"), None)


class StuckConstraint:
    """Reaches a limit in the mask after the tokens "ab". What it finds out about a draft is forgotten."""

    complete = False
    error: str | None = None

    def __init__(self) -> None:
        self.consumed: list[int] = []

    def advance(self, token: int) -> None:
        self.consumed.append(token)

    def masks(self, draft: Seq[int]) -> None:
        if not draft and self.consumed == ids("ab"):
            self.error = "too many items"


@pytest.mark.parametrize("outcomes", [["a", "b", [-1]], ["a", [*ids("b"), -1]], [[*ids("ab"), -1]]])
def test_a_limit_of_structured_output_is_named(outcomes: list[Tokens]) -> None:
    """Catches an error that depends on the draft: its masks were computed before its tokens were accepted."""
    script = Script(SamplingParams())
    script.sequence.constraint = StuckConstraint()  # type: ignore[assignment]
    script.write(*outcomes)
    assert (script.result, script.writer.error) == (("ab", "error"), f"{STRUCTURED_FAILED}: too many items")


# --- stop strings -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("outcomes", [["hello END", " more"], ["hello ", "E", "N", "D", "x"], ["hello END more"]])
def test_a_stop_string_ends_the_text(outcomes: list[str]) -> None:
    """Catches stops missed across token boundaries, inside an outcome, and text written after them."""
    script = Script(SamplingParams(stop="END")).write(*outcomes)
    assert script.result == ("hello ", "stop")
    assert script.sequence.output_token_ids == ids("hello END"), "tokens after the stop are not the user's"


@pytest.mark.parametrize(
    ("stops", "text", "expected"),
    [
        (["b", "a"], "xxab", "xx"),
        (["cd", "abcd"], "xabcdx", "x"),
        (["zz", "b"], "abzz", "a"),
        (["aab"], "aaab", "a"),
        (["abab"], "ababab", ""),
        (["\n\n"], "a\n\n\nb", "a"),
        (["€"], "5€", "5"),
        (["é\u0301"], "caé\u0301!", "ca"),
    ],
)
def test_the_earliest_stop_string_counts(stops: list[str], text: str, expected: str) -> None:
    """Catches a search in the order of the list instead of the text, and overlapping beginnings that are lost."""
    for outcomes in ([text], list(text), [bytes([b]) for b in text.encode()]):
        assert Script(SamplingParams(stop=stops)).write(*outcomes).result == (expected, "stop")


@pytest.mark.parametrize(
    ("piece", "stops", "expected"),
    [
        (b"abc", ["bc"], "-a"),
        (b"abc", ["c", "-ab"], ""),
        (b"b.c", [".c", "b.c"], "-"),
        (b"stop here", ["here", "op"], "-st"),
    ],
)
def test_a_stop_string_inside_one_token(piece: bytes, stops: list[str], expected: str) -> None:
    """Catches a comparison of whole tokens: the text is cut inside the token's text, at the earliest beginning."""
    script = Script(SamplingParams(stop=stops)).write([*ids("-"), PIECE[piece], *ids("!")])
    assert script.result == (expected, "stop")
    assert script.sequence.num_output == 2


def test_a_stop_string_in_the_prompt_does_not_count() -> None:
    """Catches a search that reaches back into the prompt, whole or half."""
    assert Script(SamplingParams(stop="END"), prompt="the END").write("ok").result == ("ok", None)
    assert Script(SamplingParams(stop="END"), prompt="EN").write("D").result == ("D", None)


def test_no_stop_string_is_left_in_a_text_that_is_flushed() -> None:
    """Catches a stop string that the decoder held back behind half a character and that comes out at the end."""
    half = [PIECE[b"x\xe2"]]  # an "x", and the first byte of a character
    for script in (
        Script(SamplingParams(stop="x", max_new_tokens=2)).write("a", half),
        Script(SamplingParams(stop="x")).write("a", half, [EOS]),
        Script(SamplingParams(stop="x")).write("a", half).end("abort"),
    ):
        assert script.result[0] == "a"


# --- streaming --------------------------------------------------------------------------------------------------------


def test_the_beginning_of_a_stop_string_is_held_back_and_released() -> None:
    """Catches a stream that shows part of a stop string, and one that swallows what turned out not to be one."""
    script = Script(SamplingParams(stop=["END", "NIL"])).write("a", "E", "N", "!", "N", "I", "L")
    assert script.pieces == ["a", "", "", "EN!", "", "", ""]
    assert script.result == ("aEN!", "stop")


@pytest.mark.parametrize("reason", ["length", "abort"])
def test_what_was_held_back_comes_out_at_the_end(reason: FinishReason) -> None:
    """Catches a text that loses its last characters because they looked like a stop string."""
    script = Script(SamplingParams(stop="END", max_new_tokens=3 if reason == "length" else 99)).write("a", "E", "N")
    if reason == "abort":
        script.end("abort")
    assert script.pieces[-1] == "EN"
    assert script.result[0] == "aEN"


def naive_stop(text: str, stops: list[str]) -> tuple[str, bool]:
    """Character by character: cut where the first stop string that is complete begins."""
    for end in range(1, len(text) + 1):
        starts = [text.find(stop) for stop in stops if stop in text[:end]]
        if starts:
            return text[: min(starts)], True
    return text, False


@given(
    st.text("aab.é€", max_size=14),
    st.lists(st.text("ab.é€", min_size=1, max_size=4), max_size=3),
    st.lists(st.integers(1, 5), min_size=14 * 3),
)
def test_streams_against_a_naive_search(text: str, stops: list[str], cuts: list[int]) -> None:
    """Catches any disagreement between the stream and a search of the whole text, however the tokens land."""
    expected, stopped = naive_stop(text, stops)
    script = Script(SamplingParams(stop=stops, max_new_tokens=1000))
    rest = text.encode()
    for size in cuts:
        outcome, rest = rest[:size], rest[size:]
        if not outcome or script.reason:
            break
        script.write(outcome)
        emitted = "".join(script.pieces)
        assert expected.startswith(emitted), "the stream runs ahead of the text"
        if script.reason is None:
            held = script.writer.text[len(emitted) :]
            assert not held or any(s.startswith(held) and s != held for s in stops), "held back without need"
    if not script.reason:
        script.end("abort")
    assert script.result == (expected, "stop" if stopped else None)


# --- stop tokens, lengths ---------------------------------------------------------------------------------------------


def test_a_thousand_stop_strings_cost_no_milliseconds() -> None:
    """All begin and end alike, so that an index by first or last characters alone does not help."""
    stops = StopStrings(f" zz{i} end" for i in range(1000))
    text = "a word zz7 ended zz12 en" * 20
    assert stops.start(text, len(text) - 5) is None
    assert stops.held_back(text) == len(" zz12 en")
    search = timeit.repeat(lambda: (stops.start(text, len(text) - 5), stops.held_back(text)), number=1, repeat=50)
    assert min(search) < 0.0002  # a search for each string takes several times as long
    assert stops.start(text + "d", len(text)) == text.rindex(" zz12")


@pytest.mark.parametrize("outcome", [[97, EOS], [97, EOS, 98, EOS], [97, EOS, EOS]])
def test_a_stop_token_ends_the_text(outcome: list[int]) -> None:
    """Catches a stop token's text in the text, its id missing from the tokens, and tokens after it."""
    script = Script(SamplingParams()).write(outcome)
    assert script.result == ("a", "stop")
    assert script.sequence.output_token_ids == [97, EOS]


def test_an_ordinary_stop_token_leaves_no_text() -> None:
    """Catches text of a stop token that is not special (a newline, say)."""
    assert Script(SamplingParams(), stop_token_ids=[10]).write("a\nb").result == ("a", "stop")


def test_without_stop_tokens_the_end_token_is_just_skipped() -> None:
    """Catches `ignore_eos` that shows "<eos>" or ends the text: the engine then passes no stop ids."""
    assert Script(SamplingParams(), stop_token_ids=()).write([97, EOS, 98]).result == ("ab", None)


def test_min_tokens_holds_off_every_stop() -> None:
    """Catches stops that count too early (the law forbids the ids; strings can still come about) or never again."""
    params = SamplingParams(stop="END", min_tokens=4)
    assert Script(params).write("END", "x").result == ("ENDx", None)
    assert Script(params).write("ENDEND").result == ("END", "stop")
    assert Script(params).write("xEND").result == ("x", "stop"), "with the fourth token it counts"
    assert Script(params).write([97, EOS, 98]).result == ("ab", None)
    assert Script(params).write([97, 97, 97, 97, EOS]).result == ("aaaa", "stop")


def test_length_counts_every_token() -> None:
    """Catches an outcome that runs over max_new_tokens; a stop with the last token is still a stop."""
    script = Script(SamplingParams(max_new_tokens=3)).write("ab", "cde")
    assert script.result == ("abc", "length")
    assert script.sequence.num_output == 3
    assert Script(SamplingParams(max_new_tokens=3)).write([97, 98, EOS, 99]).result == ("ab", "stop")
    assert Script(SamplingParams(max_new_tokens=3, stop="c")).write("abcd").result == ("ab", "stop")


# --- characters -------------------------------------------------------------------------------------------------------


def test_characters_come_whole() -> None:
    """Catches replacement characters in a stream whose next token would have completed the character."""
    script = Script(SamplingParams()).write(*(bytes([b]) for b in "é€🙂".encode()))
    assert [p for p in script.pieces if p] == ["é", "€", "🙂"]
    script = Script(SamplingParams()).write([PIECE[b"x\xe2"]], [PIECE[b"\x82\xac!"]])
    assert script.pieces == ["", "x€!"]


@pytest.mark.parametrize("reason", ["length", "stop", "abort"])
def test_an_incomplete_character_at_the_end_is_shown(reason: FinishReason) -> None:
    """Catches a text that ends before its tokens do: the bytes cannot be completed any more, so they show as U+FFFD."""
    script = Script(SamplingParams(max_new_tokens=3 if reason == "length" else 9)).write("a", b"\xe2\x82")
    if reason == "stop":
        script.write([EOS])
    elif reason == "abort":
        script.end("abort")
    assert script.result == ("a\ufffd", None if reason == "abort" else reason)


def test_nothing_is_flushed_after_a_stop_string() -> None:
    """Catches half a character that appears behind the cut."""
    assert Script(SamplingParams(stop="b")).write(b"ab\xe2\x82").result == ("a", "stop")


def test_without_a_tokenizer_there_are_tokens_only() -> None:
    """Catches a checkpoint without a tokenizer that cannot be served at all."""
    sequence = make_sequence([1], stop_token_ids=frozenset({9}))
    writer = OutputProcessor(sequence, None, 16)
    assert writer.append(Outcome((5, 6))) is None
    assert writer.append(Outcome((9, 7))) == "stop"
    writer.finish()
    assert (writer.sample().text, writer.sample().token_ids, writer.new_text()) == ("", [5, 6, 9], "")


# --- samples ----------------------------------------------------------------------------------------------------------


def test_logprobs_are_cut_with_the_tokens() -> None:
    """Catches log-probabilities of tokens after a stop; None unless asked for."""
    tokens = (97, 98, EOS, 99)
    entries = tuple(TokenLogprobs(t, -1.0, {}) for t in tokens)
    for wanted in (None, 0, 2):
        script = Script(SamplingParams(logprobs=wanted))
        script.writer.append(Outcome(tokens, entries if wanted is not None else ()))
        found = script.writer.sample().logprobs
        assert found == (None if wanted is None else list(entries[:3]))


@pytest.mark.parametrize("lookahead", [0, 3])
def test_samples_have_derived_seeds(lookahead: int) -> None:
    """Catches samples that are all alike, a first sample that differs from the request's own, and order."""
    drafter = ScriptedDrafter(lookahead) if lookahead else None
    params = SamplingParams(temperature=1.0, seed=12, n=5, max_new_tokens=10, logprobs=1)
    output = make_harness(drafter=drafter).run([1, 2, 3], params)
    assert [sample.index for sample in output.samples] == list(range(5))
    for sample in output.samples:
        assert sample.token_ids == naive([1, 2, 3], params, sample.index, max_model_len=64).token_ids
        assert len(sample.logprobs or []) == len(sample.token_ids) == 10
    assert len({tuple(sample.token_ids) for sample in output.samples}) == 5
    alone = make_harness().run([1, 2, 3], SamplingParams(temperature=1.0, seed=12, max_new_tokens=10))
    assert alone.token_ids == output.token_ids == output.samples[0].token_ids


def test_sequence_seeds() -> None:
    """Catches seeds that collide, are not 64 bits, or are not random where none was given (false alarm: 2^-58)."""
    assert sequence_seed(7, 0) == 7
    assert sequence_seed(-1, 0) == 2**64 - 1
    derived = [sequence_seed(seed, i) for seed in range(20) for i in range(20)]
    assert len(set(derived)) == 400
    assert all(0 <= s < 2**64 for s in derived)
    assert derived == [sequence_seed(seed, i) for seed in range(20) for i in range(20)]
    assert len({sequence_seed(None, 0) for _ in range(8)}) == 8


def test_a_request_without_a_seed_is_random() -> None:
    """Catches a default seed. False alarm: 16 tokens of 32 with the same noise by chance, below 1e-9."""
    params = SamplingParams(temperature=1.0, max_new_tokens=16)
    assert make_harness().run([1], params).token_ids != make_harness().run([1], params).token_ids


@pytest.mark.parametrize("seed", [None, 12])
def test_the_seeds_in_an_output_give_its_samples_again(seed: int | None) -> None:
    """Catches a drawn seed that nobody can know: the output's params repeat all samples, a sample's seed that one."""
    params = SamplingParams(temperature=1.0, max_new_tokens=10, n=3, seed=seed)
    output = make_harness().run([1, 2, 3], params)
    assert output.params == replace(params, seed=output.params.seed)
    assert output.params.seed is not None
    assert seed in (None, output.params.seed)
    again = make_harness().run(output.prompt_token_ids, output.params)
    assert [s.token_ids for s in again.samples] == [s.token_ids for s in output.samples]
    for sample in output.samples:
        alone = make_harness().run([1, 2, 3], replace(params, n=1, seed=sample.seed))
        assert alone.token_ids == sample.token_ids
        assert alone.samples[0].seed == sample.seed


def test_an_output_is_printed_in_one_short_line() -> None:
    """Catches a print of every token, time and log-probability."""
    output = make_harness().run([1, 2, 3], SamplingParams(max_new_tokens=40))
    sample = replace(output.samples[0], text="a\nb" * 100)
    line = str(replace(output, samples=[sample]))
    assert line == repr(replace(output, samples=[sample]))
    assert "a\\nba" in line
    assert line.endswith("(40 tokens, length)")
    assert len(line) < 150
    assert str(replace(output, samples=[sample] * 2)).endswith("(40 tokens, 2 samples, length)")
    assert str(refused("r", [1], SamplingParams(), "too long")) == "r: '' (0 tokens, error: too long)"


def test_ignore_eos() -> None:
    """Catches an engine's stop ids that count although they were to be ignored; the user's own always count."""
    free = naive([1], SamplingParams(max_new_tokens=20), max_model_len=64).token_ids
    eos, own = frozenset({free[4]}), free[9]
    harness = make_harness(stop_token_ids=eos)
    assert harness.run([1]).token_ids == free[:5]
    assert harness.run([1], SamplingParams(ignore_eos=True, max_new_tokens=20)).token_ids == free
    own_stop = SamplingParams(ignore_eos=True, max_new_tokens=20, stop_token_ids=[own])
    assert harness.run([1], own_stop).token_ids == free[: free.index(own) + 1]


def test_a_refused_request_says_why() -> None:
    """Catches a refused request without its error, or one whose attributes cannot be read."""
    output = refused("r", [1, 2], SamplingParams(n=3), "too long")
    assert (output.error, output.finish_reason, output.text, output.token_ids) == ("too long", "abort", "", [])


# --- LLM over an engine ----------------------------------------------------------------------------------------------


def llm_over(harness: Harness) -> LLM:
    """The public front, with a fake model behind it."""
    llm = object.__new__(LLM)
    llm._driver = Driver(harness.engine)
    llm._refusals = itertools.count()
    return llm


def text_harness() -> Harness:
    """The fake model's 32 ids as text: control characters, but text."""
    return make_harness(tokenizer=TOKENIZER)


def test_generate_keeps_the_order_of_the_prompts() -> None:
    """Catches answers in the order of finishing, and a bad prompt that takes the others down."""
    llm = llm_over(text_harness())
    lengths = [9, 2, 5]
    params = [SamplingParams(max_new_tokens=n) for n in (*lengths, 3)]
    outputs = llm.generate([[1], [2], [3], [VOCAB + 1]], params)
    assert [len(o.token_ids) for o in outputs] == [*lengths, 0]
    assert outputs[3].error is not None
    assert outputs[3].finish_reason == "abort"
    assert llm.driver.call(lambda engine: engine.metrics.num_refused) == 1
    wait_until_idle(llm.driver)


def test_a_stream_is_the_text() -> None:
    """Catches pieces that are lost or doubled between the stream's last round and the output."""
    for stop in ((), ("\x05",), ("\x01\x0f",)):
        params = SamplingParams(max_new_tokens=30, stop=stop)
        expected = llm_over(text_harness()).generate([1, 2], params)[0].text
        assert "".join(llm_over(text_harness()).stream([1, 2], params)) == expected


def test_streams_side_by_side() -> None:
    """Catches a stream whose last output was swallowed by the loop of another stream: it would wait for ever."""
    llm = llm_over(text_harness())
    wanted = [llm.generate([i], SamplingParams(max_new_tokens=5 * i))[0].text for i in (1, 2, 3)]
    streams = [llm.stream([i], SamplingParams(max_new_tokens=5 * i)) for i in (1, 2, 3)]
    texts = ["", "", ""]
    for pieces in itertools.zip_longest(*streams, fillvalue=""):
        texts = [text + piece for text, piece in zip(texts, pieces, strict=True)]
    assert texts == wanted


def test_generate_inside_a_stream() -> None:
    """Catches a stream that hangs, or loses text, because `generate` finished its request meanwhile."""
    llm = llm_over(text_harness())
    expected = llm.generate([1], SamplingParams(max_new_tokens=6))[0].text
    stream = llm.stream([1], SamplingParams(max_new_tokens=6))
    text = next(stream)
    llm.generate([2], SamplingParams(max_new_tokens=20))
    assert text + "".join(stream) == expected


def test_a_closed_stream_has_ended() -> None:
    """Catches a stream that waits for ever for a request that was aborted."""
    llm = llm_over(text_harness())
    stream = llm.stream([1], SamplingParams(max_new_tokens=50))
    next(stream)
    stream.close()
    assert list(stream) == []


def test_leaving_a_stream_ends_its_request() -> None:
    """Catches a request that goes on after its reader has left, also one who never started to read."""
    llm = llm_over(text_harness())
    stream = llm.stream([1], SamplingParams(max_new_tokens=50))
    next(stream)
    stream.close()
    wait_until_idle(llm.driver)
    llm.stream([1], SamplingParams(max_new_tokens=50)).close()
    wait_until_idle(llm.driver)
