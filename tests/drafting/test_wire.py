"""What crosses between an engine and a drafter in a process of its own: unchanged, or not at all."""

from __future__ import annotations

import math
import socket
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
import torch
from bits import same_bits
from fakes import VOCAB, make_sequence
from hypothesis import given
from hypothesis import strategies as st

from ssd.core import Origin, Proposal, SamplingParams
from ssd.drafting.wire import (
    Draft,
    Entry,
    Kind,
    decode_prepared,
    decode_proposals,
    decode_round,
    encode_prepared,
    encode_proposals,
    encode_round,
)
from ssd.parallel.transport import (
    HEADER_WORDS,
    SETUP,
    Channel,
    Message,
    WireError,
    Words,
    decode_json,
    encode_json,
)

LOOKAHEAD = 4

int64 = st.integers(-(1 << 63), (1 << 63) - 1)
tokens = st.lists(st.integers(0, 1 << 40), max_size=9)
sampling_params = st.builds(
    SamplingParams,
    temperature=st.floats(0, 100),
    top_k=st.integers(0, 1 << 80),
    top_p=st.floats(0, 1, exclude_min=True),
    min_p=st.floats(0, 1),
    repetition_penalty=st.floats(0, 100, exclude_min=True),
    presence_penalty=st.floats(-100, 100),
    frequency_penalty=st.floats(-100, 100),
    logit_bias=st.dictionaries(st.integers(0, 1 << 40), st.floats(-1000, 1000) | st.just(-math.inf), max_size=3),
    min_tokens=st.integers(0, 5),
    speculate=st.booleans(),
)
sequences = st.builds(
    lambda id, prompt, output, params, seed, stops, max_tokens: make_sequence(
        prompt, output, params=params, id=id, seed=seed, stop_token_ids=stops, max_tokens=max_tokens
    ),
    st.integers(0, (1 << 63) - 1),
    st.lists(st.integers(0, 1 << 40), min_size=1, max_size=9),
    tokens,
    sampling_params,
    st.integers(0, (1 << 64) - 1),
    st.frozensets(st.integers(0, 1 << 40), max_size=3),
    st.integers(1, 1 << 40),
)
given_drafts = st.lists(st.tuples(st.integers(0, (1 << 31) - 1), st.floats(0, 1e4)), max_size=LOOKAHEAD).map(
    lambda pairs: Draft(tuple(token for token, _ in pairs), tuple(sure for _, sure in pairs))
)
entries = st.lists(
    st.builds(lambda s, k: Entry(s.id, 0, s.tokens, k, sequence=s), sequences, st.integers(0, 9))
    | st.builds(
        lambda id, known, new, k, draft: Entry(id, known, new, k, draft),
        *(st.integers(0, 9), st.integers(0, 99), tokens, st.integers(0, 9), st.none() | given_drafts),
    ),
    max_size=4,
)
Told = tuple[list[int], list[Entry], bool, bool]
rounds = st.tuples(st.lists(st.integers(0, 1 << 40), max_size=4), entries, st.booleans(), st.booleans())


drafts = st.lists(st.integers(0, VOCAB - 1), max_size=LOOKAHEAD).map(tuple)
outcomes = st.dictionaries(st.tuples(st.integers(0, LOOKAHEAD), st.integers(0, VOCAB - 1)), drafts, max_size=5)
verified = st.lists(st.integers(0, VOCAB - 1), min_size=LOOKAHEAD, max_size=LOOKAHEAD).map(tuple)
prepared = st.dictionaries(st.integers(0, 1 << 40), st.tuples(verified, outcomes), max_size=3)


@st.composite
def proposals(draw: st.DrawFn) -> list[Proposal]:
    made = []
    for _ in range(draw(st.integers(0, 4))):
        drafted = tuple(draw(st.lists(st.integers(0, VOCAB - 1), max_size=LOOKAHEAD)))
        seed = draw(st.integers(0, 99))
        q = torch.rand(len(drafted), VOCAB, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        q = q / q.sum(-1, keepdim=True) if drafted and draw(st.booleans()) else None
        made.append(Proposal(drafted, q, draw(st.sampled_from(Origin))))
    return made


def channels() -> tuple[Channel, Channel]:
    left, right = socket.socketpair()
    return Channel(left), Channel(right)


def carried(payload: Words, kind: int = Kind.ROUND, number: int = 7) -> Words:
    """The payload, as it comes out at the other end."""
    here, there = channels()
    here.post(Message(kind, number, payload))
    message = there.receive(timeout=10.0)
    assert message is not None
    assert (message.kind, message.round) == (kind, number)
    here.close()
    there.close()
    return message.payload


def about(confidence: tuple[float, ...]) -> Any:
    """One byte each is sent of them: within 2 percent of 1 + confidence, half the distance of two codes."""
    widest = 0.02 * (1.0 + max(confidence, default=0.0))
    return pytest.approx(confidence, rel=0.02, abs=widest)


def relevant(params: SamplingParams) -> dict[str, Any]:
    reals = ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")
    exact = {name: getattr(params, name) for name in (*reals, "min_tokens", "speculate", "logit_bias")}
    return {**exact, "top_k": min(params.top_k, (1 << 63) - 1)}


@given(rounds)
def test_a_round_crosses_unchanged(round_: Told) -> None:
    """Catches a field that is lost, swapped or rounded on the way: also seeds of 64 bits and biases of -inf."""
    how = {"budget": len(round_[1]), "reply": round_[2], "ahead": round_[3]}
    forgotten, sent, *found = decode_round(carried(encode_round(*round_[:2], **how)))
    assert found == list(how.values())
    assert forgotten == round_[0]
    for got, wanted in zip(sent, round_[1], strict=True):
        assert got.id == wanted.id
        assert (got.known, got.new_tokens, got.lookahead) == (wanted.known, wanted.new_tokens, wanted.lookahead)
        assert (got.draft is None) == (wanted.draft is None)
        if got.draft is not None and wanted.draft is not None:
            assert got.draft.token_ids == wanted.draft.token_ids
            assert got.draft.confidence == about(wanted.draft.confidence)
        assert (got.sequence is None) == (wanted.sequence is None)
        if got.sequence is not None and wanted.sequence is not None:
            assert relevant(got.sequence.params) == relevant(wanted.sequence.params)
            for name in ("seed", "num_prompt", "max_tokens", "stop_token_ids"):
                assert getattr(got.sequence, name) == getattr(wanted.sequence, name)


@pytest.mark.parametrize(
    "entry",
    [
        Entry(0, 3, [1, 2], 4, Draft((1, -2), (0.0, 0.0))),
        Entry(0, 3, [1, 2], -1),
        Entry(0, -1, [1, 2], 4),
        Entry(0, 3, [1, -2], 4),
        Entry(0, 1, [1, 2], 4, sequence=make_sequence([1, 2])),
        Entry(0, 0, [1], 4, sequence=make_sequence([1, 2])),
    ],
    ids=range(6),
)
def test_senseless_entries_are_refused(entry: Entry) -> None:
    """Catches tokens that there are not, and a new sequence that is not told from its beginning."""
    with pytest.raises(WireError):
        decode_round(encode_round([], [entry]))


@given(proposals())
def test_proposals_cross_unchanged(sent: list[Proposal]) -> None:
    """Catches distributions that lose a bit, and proposals that come back for another work."""
    got = decode_proposals(carried(encode_proposals(sent), Kind.PROPOSALS), len(sent), VOCAB)
    for a, b in zip(got, sent, strict=True):
        assert (a.token_ids, a.origin, a.distributions is None) == (b.token_ids, b.origin, b.distributions is None)
        assert a.distributions is None or same_bits(a.distributions, b.distributions)


Sent = dict[int, tuple[tuple[int, ...], dict[tuple[int, int], tuple[int, ...]]]]


@given(prepared)
def test_what_is_prepared_crosses_unchanged(sent: Sent) -> None:
    """Every draft is found by the tokens that its outcome decides, and by no others."""
    confidence = {i: {key: (0.5,) * len(draft) for key, draft in sent[i][1].items()} for i in sent}
    payload = encode_prepared(sent, confidence)
    found = decode_prepared(carried(payload, Kind.PREPARED), VOCAB)
    assert found.keys() == sent.keys()
    for i, (draft, prepared) in sent.items():
        for (accepted, token), following in prepared.items():
            assert found[i].find((*draft[:accepted], token)) == Draft(following, about((0.5,) * len(following)))
            assert not accepted or found[i].find((draft[0] + 1, *draft[1:accepted], token)) is None
        assert found[i].find(()) is None
        assert found[i].find((*draft, 1, 2)) is None
    for wrong in (payload[:-1], np.append(payload, 0)):
        with pytest.raises(WireError):
            decode_prepared(wrong, VOCAB)


def test_a_round_of_a_sequence_is_less_than_a_kilobyte_each_way() -> None:
    """Of the largest vocabularies, K = 7 and 16 branches, whatever the tokens are; with the header of a message."""
    last, k = (1 << 20) - 1, 7
    outcomes = {(i % (k + 1), last - i): (last,) * k for i in range(16)}
    confidence = {key: (1e4,) * k for key in outcomes}
    back = encode_prepared({1 << 40: ((last,) * k, outcomes)}, {1 << 40: confidence})
    there = encode_round([], [Entry(1 << 40, 10**6, [last] * (k + 1), k, Draft((last,) * k, (1e4,) * k))])
    assert decode_prepared(back, last + 1)[1 << 40].find((last,)) is not None
    assert 8 * (HEADER_WORDS + len(back)) < 900
    assert 8 * (HEADER_WORDS + len(there)) < 300


def test_lengths_may_be_beyond_a_small_vocabulary() -> None:
    """Only tokens have to be in it: a truthful worker with more draft tokens than that is not lost."""
    draft = (0, 1, 1, 0)
    found = decode_prepared(encode_prepared({7: (draft, {(4, 1): (0, 1, 0, 1), (3, 0): (1, 1, 1)})}), 2)
    assert found[7].outcomes.tolist() == [[4, 1, 0, 1, 0, 1], [3, 0, 1, 1, 1, -1]]
    for wrong in ({(4, 2): (0,)}, {(4, 1): (0, 2)}, {(-1, 1): (0,)}, {(5, 1): (0,)}):
        with pytest.raises(WireError):
            decode_prepared(encode_prepared({7: (draft, wrong)}), 2)


@given(st.dictionaries(st.text(), st.none() | st.integers() | st.text() | st.lists(st.floats(0, 1))))
def test_a_setup_crosses_unchanged(setup: dict[str, Any]) -> None:
    assert decode_json(carried(encode_json(setup), SETUP)) == setup


def decode_anything(payload: Words, num_works: int) -> None:
    decoders = (decode_json, decode_round, lambda p: decode_prepared(p, VOCAB))
    for decode in (*decoders, lambda p: decode_proposals(p, num_works, VOCAB)):
        with suppress(WireError):
            decode(payload)


@given(rounds, proposals(), st.data())
def test_truncated_payloads_are_refused(round_: Told, sent: list[Proposal], data: st.DataObject) -> None:
    """Catches reading past the end, and what is left over."""
    for payload, decode in (
        (encode_round(*round_[:2]), decode_round),
        (encode_proposals(sent), lambda p: decode_proposals(p, len(sent), VOCAB)),
    ):
        cut = data.draw(st.integers(0, len(payload) - 1))
        with pytest.raises(WireError):
            decode(payload[:cut])
        with pytest.raises(WireError):
            decode(np.append(payload, 0))


@given(rounds, proposals(), st.data())
def test_corrupted_payloads_do_no_harm(round_: Told, sent: list[Proposal], data: st.DataObject) -> None:
    """Catches any error but a WireError, and memory that a corrupted number asks for."""
    for payload in (encode_round(*round_[:2]), encode_proposals(sent)):
        corrupted = payload.copy()
        for _ in range(data.draw(st.integers(1, 3))):
            corrupted[data.draw(st.integers(0, len(payload) - 1))] = data.draw(int64 | st.integers(-2, 20))
        decode_anything(corrupted, len(sent))


@given(st.lists(int64, max_size=30))
def test_noise_is_no_payload(words: list[int]) -> None:
    decode_anything(np.array(words, dtype=np.int64), 1)
