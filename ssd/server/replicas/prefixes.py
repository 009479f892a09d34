"""Prefix-aware routing: a request goes to a replica that has the beginning of its prompt in its prefix cache, if idle.

Replicas are not asked what they have cached: a table keeps which of them was sent which prefixes.
"""

from __future__ import annotations

import json
from collections import Counter, OrderedDict
from collections.abc import Collection, Iterable
from collections.abc import Sequence as Seq
from itertools import accumulate, count
from threading import Lock
from typing import Final, NamedTuple

from ssd.server.errors import ApiError
from ssd.server.http.bodies import read_json

_CHUNK: Final = 64  # characters: some 16 tokens, a KV block on a CPU
_MOST_CHUNKS: Final = 512  # chunks of a prompt that are compared
_MOST_KEYS: Final = 1 << 17  # keys that the table keeps
_PROMPT_FIELDS: Final = ("tools", "system", "instructions", "prompt", "messages", "input")  # in any endpoint
_SPARE, _RATIO = 4, 1.5  # a replica is busy with more requests than SPARE + RATIO times those of the idlest


def chunk_keys(body: bytes) -> list[int]:
    """A key for each chunk of a request's prompt: prompts with n equal chunks at the beginning have n equal keys.

    Keys are valid in this process only, because Python's hashes are salted. Empty where there is no prompt.
    """
    try:
        fields = read_json(body)
    except (ValueError, RecursionError, ApiError):
        return []  # the replica says what is wrong with it
    if not isinstance(fields, dict):
        return []
    text = _beginning([fields[name] for name in _PROMPT_FIELDS if name in fields], _CHUNK * _MOST_CHUNKS)
    chunks = (text[i * _CHUNK : (i + 1) * _CHUNK] for i in range(len(text) // _CHUNK))
    return list(accumulate(chunks, lambda before, chunk: hash((before, chunk)), initial=0))[1:]


def _beginning(value: object, chars: int) -> str:
    """The first characters of a value as JSON; no more of it is encoded."""
    parts, size = list[str](), 0
    for part in json.JSONEncoder().iterencode(value):
        parts.append(part)
        size += len(part)
        if size >= chars:
            break
    return "".join(parts)[:chars]


class Route(NamedTuple):
    """What a replica is chosen by."""

    request: int  # number returned by `PrefixTable.enter`
    keys: list[int]
    avoid: list[str]  # replicas that have failed it


class PrefixTable:
    """Recently used prefixes with the replicas they were sent to (LRU), and the number of requests of each replica."""

    def __init__(self, most_keys: int = _MOST_KEYS) -> None:
        self._holders: OrderedDict[int, set[str]] = OrderedDict()  # replicas by key, the oldest use first
        self._most_keys = most_keys
        self._turns: dict[str, int] = {}  # when a replica was chosen last
        self._running: dict[int, str | None] = {}  # the replicas of requests, once chosen
        self._numbers = count(1)
        self._lock = Lock()  # requests come and go on one thread, and replicas are chosen on another

    def enter(self) -> int:
        """A new request's number. It counts as load of its replica from `choose` to `leave`."""
        with self._lock:
            number = next(self._numbers)
            self._running[number] = None
            return number

    def leave(self, request: int) -> None:
        with self._lock:
            self._running.pop(request, None)

    def choose(self, route: Route, replicas: Collection[str]) -> str:
        """The replica for a request: among those that are not busy, the one with the longest known prefix.

        Ties go to the least loaded, then to the least recently chosen. Replicas of `route.avoid` are a last resort.
        """
        with self._lock:
            load = Counter(self._running.values())
            usable = [replica for replica in replicas if replica not in route.avoid] or replicas
            limit = _SPARE + _RATIO * min(load[replica] for replica in usable)
            known = self._known(route.keys)
            chosen = min(
                (replica for replica in usable if load[replica] <= limit),
                key=lambda replica: (-known.get(replica, 0), load[replica], self._turns.get(replica, 0)),
            )
            self._turns[chosen] = next(self._numbers)
            self._remember(route.keys, chosen)
            if route.request in self._running:  # its client is still there
                self._running[route.request] = chosen
            return chosen

    def _known(self, keys: Iterable[int]) -> dict[str, int]:
        """Length of the longest known prefix by replica, in chunks."""
        known: dict[str, int] = {}
        for length, key in enumerate(keys, 1):
            holders = self._holders.get(key)
            if holders is None:
                break
            known |= dict.fromkeys(holders, length)
        return known

    def _remember(self, keys: Seq[int], replica: str) -> None:
        for key in reversed(keys):  # longer prefixes are evicted before shorter ones
            self._holders.setdefault(key, set()).add(replica)
            self._holders.move_to_end(key)
        while len(self._holders) > self._most_keys:
            self._holders.popitem(last=False)


TABLE: Final = PrefixTable()  # the proxy's; global, because Ray constructs the router from a copy of its module
