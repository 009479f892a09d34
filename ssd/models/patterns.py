"""Regular expressions in a checkpoint's config, matched in a time that no pattern makes long.

`re` tries one way through a pattern after the other, of which there may be exponentially many. Here all of them are
followed at once: a state is the set of places in the pattern that may match what comes next, and the step from a state
by a character is computed once. Knows Python's syntax as far as published checkpoints use it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final, NamedTuple

_MOST: Final = 500  # characters of a pattern, and its places: a character that may come {m,n} times has n
_MOST_STATES: Final = 1024  # of a pattern that are kept
_START, _END = "start", "end"  # what anchors match: no characters
_ONE: Final = r"\\[dDwWsS]|\\[^a-zA-Z0-9]|\[\^?\]?(?:\\.|[^\]\\])*\]|[^\\\[()|*+?{^$]"  # matches one character
_REPEAT: Final = r"[*+?]|\{[0-9]*,[0-9]*\}|\{[0-9]+\}"
_TOKEN: Final = re.compile(rf"{_ONE}|(?:{_REPEAT})\??|[\^$|)]|\((?!\?)|\(\?[:!=]", re.DOTALL)
KNOWN: Final = "characters, classes, groups, | * + ? {m,n} ^ $ and, at the beginning, look-aheads"


class Pattern:
    """A regular expression. ValueError: it is none, or has something that is not known here.

    A place is a character of the pattern, an anchor or an end. It is a bit, and a set of places is an integer.
    """

    def __init__(self, text: str) -> None:
        if len(text) > _MOST:
            raise ValueError(f"has more than {_MOST} characters")
        try:
            re.compile(text)
            reader = _Reader(text)
        except (re.error, OverflowError, RecursionError) as error:
            raise ValueError(f"is no regular expression: {error}") from None
        self._places, self._after = reader.places, reader.after
        self._ends, self._wanted = reader.ends, reader.wanted
        self._matching: dict[str, int] = {}  # by character or anchor: the places that match it
        self._states: dict[int, _State] = {}
        self._first = self._anchored(reader.first, _START)

    @property
    def num_places(self) -> int:
        return len(self._places)

    def match(self, text: str) -> bool:
        """Whether the text, which has no line ends, begins with a match, as `re.match` says."""
        state = self._state(self._first)
        for character in text:
            found = state.after.get(character)
            if found is None:
                found = state.after[character] = self._state(self._step(state.places, character))
            state = found
            if not state.places:
                return False
        return state.final

    def _state(self, places: int) -> _State:
        state = self._states.get(places)
        if state is None:
            if len(self._states) >= _MOST_STATES:
                self._states.clear()
            final = self._anchored(places, _END) & self._ends == self._wanted
            state = self._states[places] = _State(places, final, {})
        return state

    def _step(self, places: int, character: str) -> int:
        """The places that may match what comes after a character or an anchor."""
        if character not in self._matching:
            own = (1 << i for i, place in enumerate(self._places) if _matches(place, character))
            self._matching[character] = sum(own) | self._ends  # an end that was reached stays so
        found = 0
        for place in _each(places & self._matching[character]):
            found |= self._after[place]
        return found

    def _anchored(self, places: int, anchor: str) -> int:
        """These places, and those behind them where anchors match."""
        new = places
        while new := self._step(new, anchor) & ~places:
            places |= new
        return places


class _State(NamedTuple):
    places: int
    final: bool  # whether a text that ends here matches
    after: dict[str, _State]  # by the next character


def _matches(place: str, character: str) -> bool:
    return place == character if character in (_START, _END) else re.fullmatch(place, character) is not None


class _Part(NamedTuple):
    """A part of a pattern: the places that it may begin with, and those that it may end with."""

    first: int = 0
    last: int = 0
    empty: bool = True  # whether it matches an empty text


class _Reader:
    """The places of a pattern that `re` accepts, and which may follow which."""

    def __init__(self, text: str) -> None:
        self.places: list[str] = []  # patterns of one character, anchors, and "" for an end
        self.after: dict[int, int] = {}  # by place: those that may come next
        self.first = self.ends = 0
        self.wanted = 0  # ends that a match reaches; it reaches none of the others
        self._tokens = _tokens(text)[::-1]  # the next one is at the end
        self._take("^")  # a match begins there in any case
        ahead = False
        while token := self._take("(?!", "(?="):
            self._end(self._alternatives(), wanted=token == "(?=")
            self._take(")")
            ahead = True
        self._end(self._sequence() if ahead else self._alternatives(), wanted=True)
        if self._tokens:
            raise ValueError("has a look-ahead in one of several alternatives")

    def _take(self, *expected: str) -> str:
        """The next token, if it is one of these; else ""."""
        return self._tokens.pop() if self._tokens and self._tokens[-1] in expected else ""

    def _end(self, part: _Part, *, wanted: bool) -> None:
        end = self._place("")
        self.after[end.first] = end.first
        self.first |= self._joined(part, end).first
        self.ends |= end.first
        self.wanted |= end.first if wanted else 0

    def _alternatives(self) -> _Part:
        found = self._sequence()
        while self._take("|"):
            other = self._sequence()
            found = _Part(found.first | other.first, found.last | other.last, found.empty or other.empty)
        return found

    def _sequence(self) -> _Part:
        found = _Part()
        while self._tokens and self._tokens[-1] not in ("|", ")"):
            found = self._joined(found, self._item())
        return found

    def _item(self) -> _Part:
        """A character, group or anchor, and how often it is repeated."""
        token, group = self._tokens.pop(), None
        if token in ("^", "$"):
            return self._place(_START if token == "^" else _END)
        if token in ("(", "(?:"):
            group = self._alternatives()
            self._take(")")
        elif token[0] in "(*+?{":
            raise ValueError(f"has {token!r} where it is not known")
        least, most = self._count()
        copies = max(1, least) if most is None else most
        if group is not None and copies != 1:
            raise ValueError("repeats a group a number of times")
        found = _Part()
        for i in reversed(range(copies)):  # x{1,3} is x(x(x)?)?
            part = group or self._place(token)
            if most is None and i == copies - 1:
                self._connect(part.last, part.first)
            found = self._joined(part, found)
            found = found if i < least else found._replace(empty=True)
        return found

    def _count(self) -> tuple[int, int | None]:
        """The least and most repetitions, by the next token."""
        if not self._tokens or self._tokens[-1][0] not in "*+?{":
            return 1, 1
        token = self._tokens.pop()
        if token[0] != "{":
            return int(token[0] == "+"), 1 if token[0] == "?" else None
        least, comma, most = token.strip("{}?").partition(",")
        return int(least or 0), int(most) if most else None if comma else int(least)

    def _place(self, what: str) -> _Part:
        if len(self.places) > _MOST:
            raise ValueError(f"repeats its characters more than {_MOST} times")
        place = 1 << len(self.places)
        self.places.append(what)
        self.after[place] = 0
        return _Part(place, place, False)

    def _joined(self, one: _Part, other: _Part) -> _Part:
        self._connect(one.last, other.first)
        first = one.first | (other.first if one.empty else 0)
        return _Part(first, other.last | (one.last if other.empty else 0), one.empty and other.empty)

    def _connect(self, ends: int, firsts: int) -> None:
        for place in _each(ends):
            self.after[place] |= firsts


def _tokens(text: str) -> list[str]:
    found, at = list[str](), 0
    while at < len(text):
        token = _TOKEN.match(text, at)
        if token is None:
            raise ValueError(f"has {text[at : at + 4]!r}, which is not known")
        found.append(token[0])
        at = token.end()
    return found


def _each(places: int) -> Iterator[int]:
    while places:
        place = places & -places
        yield place
        places ^= place
