"""Requests with the same beginning meet the same replica, unless it is clearly busier."""

from __future__ import annotations

import json
from typing import Any

import pytest

pytest.importorskip("fastapi", reason="the extra `serve` is not installed")

from ssd.server.replicas.prefixes import PrefixTable, Route, chunk_keys


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


class Table(PrefixTable):
    """Requests end at once unless they `stay`."""

    def send(self, text: str, replicas: str = "ab", *, avoid: str = "", stay: bool = False) -> str:
        request = self.enter()
        chosen = self.choose(Route(request, keys(text), list(avoid)), replicas)
        if not stay:
            self.leave(request)
        return chosen


def other(replica: str) -> str:
    return "b" if replica == "a" else "a"


def test_equal_beginnings_meet_the_same_replica_and_others_spread() -> None:
    table = Table()
    chosen = {text: table.send(text * 400) for text in "tuvwxyz"}
    assert set(chosen.values()) == {"a", "b"}
    for text, replica in chosen.items():
        assert table.send(text * 300) == replica


def test_a_replica_that_is_clearly_busier_is_passed_over_and_the_other_one_is_remembered() -> None:
    """A common system prompt does not keep every request on one replica, and requests that come at once spread."""
    table = Table()
    chosen = [table.send("x" * 400, stay=True) for _ in range(40)]
    first = chosen[0]
    assert chosen[:5] == [first] * 5
    assert chosen[5] == other(first)
    assert 18 <= chosen.count(first) <= 22, "both know it: the idler one"


def test_short_prompts_that_come_at_once_spread() -> None:
    table = Table()
    chosen = [table.send("x", stay=True) for _ in range(40)]
    assert chosen.count("a") == 20


def test_requests_that_have_left_do_not_count() -> None:
    """Not even one that leaves before a replica is chosen for it."""
    table = Table()
    first = table.send("x" * 400)
    for _ in range(20):
        gone = table.enter()
        table.leave(gone)
        assert table.choose(Route(gone, keys("x" * 400), []), "ab") == first
    assert table.send("x" * 400) == first
    assert table._running == {}


def test_the_longest_known_beginning_wins() -> None:
    table = Table()
    long = table.send("x" * 400 + "y" * 400)
    assert table.send("x" * 400, avoid=long) == other(long)
    assert table.send("x" * 400 + "y" * 400) == long


def test_a_replica_that_has_failed_a_request_or_has_gone_is_not_chosen() -> None:
    table = Table()
    first = table.send("x" * 400)
    assert table.send("x" * 400, avoid=first) == other(first)
    assert table.send("x" * 400, "c") == "c"
    assert table.send("x" * 400, "c", avoid="c") == "c", "there is no other"


def test_only_the_latest_beginnings_are_remembered() -> None:
    table = Table(most_keys=20)
    for i in range(50):
        table.send(f"{i}" * 400)
    assert len(table._holders) == 20
