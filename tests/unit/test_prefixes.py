"""Requests with the same beginning meet the same replica, unless it is clearly busier."""

from __future__ import annotations

import json
from typing import Any

import pytest

pytest.importorskip("fastapi", reason="the extra `serve` is not installed")

from ssd.server.prefixes import PrefixTable, chunk_keys

IDLE = {"a": 0, "b": 0}


def keys(text: str, **more: Any) -> list[int]:
    return chunk_keys(json.dumps({"prompt": text, **more}).encode())


def shared(some: list[int], others: list[int]) -> int:
    return sum(x == y for x, y in zip(some, others, strict=False))


def test_prompts_share_the_keys_of_their_common_beginning_only() -> None:
    """And what comes after a difference has no equal keys, even if the text is the same."""
    some, others = keys("x" * 640 + "y" * 640), keys("x" * 640 + "z" + "y" * 640)
    assert len(some) >= 20
    assert shared(some, others) == 10
    assert some[:10] == keys("x" * 640)[:10]


def test_a_conversation_s_next_turn_begins_with_the_keys_of_the_turn_before() -> None:
    turns = [{"role": "user", "content": "Tell me of bees. " * 20}, {"role": "assistant", "content": "They hum. " * 20}]
    first, second = (chunk_keys(json.dumps({"messages": turns[:n], "seed": n}).encode()) for n in (1, 2))
    assert len(first) >= 5
    assert shared(first, second) >= len(first) - 1


@pytest.mark.parametrize("field", ["tools", "system", "instructions"])
def test_what_stands_before_the_messages_counts(field: str) -> None:
    some, others = (chunk_keys(json.dumps({"messages": "m" * 640, field: [text]}).encode()) for text in "xy")
    assert some
    assert shared(some, others) == 0


@pytest.mark.parametrize("body", [b"", b"{", b"\xff", b"[1]", b"7", b"{}", b"[" * 100_000])
def test_a_body_without_a_prompt_has_no_keys(body: bytes) -> None:
    assert chunk_keys(body) == []


def test_equal_beginnings_meet_the_same_replica_and_others_spread() -> None:
    table = PrefixTable()
    chosen = {text: table.choose(keys(text * 400), IDLE) for text in "tuvwxyz"}
    assert set(chosen.values()) == {"a", "b"}
    for text, replica in chosen.items():
        assert table.choose(keys(text * 300), IDLE) == replica


def test_a_replica_that_is_clearly_busier_is_passed_over_and_the_other_one_is_remembered() -> None:
    """A common system prompt does not keep every request on one replica."""
    table = PrefixTable()
    first = table.choose(keys("x" * 400), IDLE)
    other = "b" if first == "a" else "a"
    assert table.choose(keys("x" * 400), {first: 4, other: 0}) == first
    assert table.choose(keys("x" * 400), {first: 5, other: 0}) == other
    assert table.choose(keys("x" * 400), {first: 1, other: 0}) == other, "both know it: the idler one"


def test_the_longest_known_beginning_wins() -> None:
    table = PrefixTable()
    long = table.choose(keys("x" * 400 + "y" * 400), IDLE)
    other = "b" if long == "a" else "a"
    table.choose(keys("x" * 400), {long: 9, other: 0})
    assert table.choose(keys("x" * 400 + "y" * 400), {long: 1, other: 0}) == long


def test_a_replica_that_has_gone_is_never_chosen() -> None:
    table = PrefixTable()
    gone = table.choose(keys("x" * 400), IDLE)
    assert table.choose(keys("x" * 400), {"c": 3}) == "c"
    assert gone != "c"


def test_only_the_latest_beginnings_are_remembered() -> None:
    table = PrefixTable(most_keys=20)
    for i in range(50):
        table.choose(keys(f"{i}" * 400), IDLE)
    assert len(table._holders) == 20
