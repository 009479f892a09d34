"""Fields of requests that mean nothing here: refused where parameters are strict, else ignored, with a warning.

A request's `Ignored` collects its warnings from the reading of the body to the answer, on whatever thread the request
is read. `IgnoredFields` are those of all requests of a server: its metric and its log. Knows no parameter by name.
"""

from __future__ import annotations

import logging
import re
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Final

log = logging.getLogger("ssd")

OTHER: Final = "other"  # the metric's name of all parameters that are not known by name
_MOST_WARNINGS: Final = 20  # of one answer
_MOST_LOGGED: Final = 1000  # kinds of fields that a server's log names
_MOST_CHARS: Final = 120  # of a path in a warning
_INDEX: Final = re.compile(r"\[\d+\]")


class Ignored:
    """The warnings of one request, one a kind: the path of a field without the indices of lists."""

    def __init__(self, *, strict: bool) -> None:
        self.strict = strict  # such fields are refused
        self.names: dict[str, str] = {}  # what the client calls fields, by their names here
        self.counts = Counter[str]()  # ignored fields, by parameter
        self.warnings: dict[str, str] = {}  # by kind
        self._num_more = 0  # fields beyond the limit

    def add(self, path: str, why: str, parameter: str = OTHER) -> None:
        """`why`: what is to be said of the field. `parameter`: its name in the metric, of a limited number."""
        self.counts[parameter] += 1
        if self.full:
            self._num_more += 1
            return
        kind = ascii(_INDEX.sub("[]", path)[:_MOST_CHARS])[1:-1]  # a name is the client's, and may have line breaks
        self.warnings.setdefault(kind, f"{kind}: ignored: {why}")

    @property
    def full(self) -> bool:
        """Whether further kinds of fields are counted only."""
        return len(self.warnings) >= _MOST_WARNINGS

    @property
    def answer(self) -> dict[str, Any]:
        """What the answer says of it: nothing, or the field `ssd_warnings`."""
        if not self.warnings:
            return {}
        more = [f"{self._num_more} other fields: ignored"] if self._num_more else []
        return {"ssd_warnings": [*self.warnings.values(), *more]}


class IgnoredFields:
    """The ignored fields of a server's requests. For the event loop's thread only."""

    def __init__(self) -> None:
        self.counts = Counter({OTHER: 0})  # by parameter
        self._logged = set[str]()

    def add(self, ignored: Ignored) -> None:
        """Counts those of a request; a kind is logged once."""
        self.counts.update(ignored.counts)
        for kind, warning in ignored.warnings.items():
            if kind not in self._logged and len(self._logged) < _MOST_LOGGED:
                self._logged.add(kind)
                text = warning.replace(": ignored: ", ": ", 1)
                log.warning("a field of a request is ignored: %s (said once)", text)


_CURRENT: Final[ContextVar[Ignored | None]] = ContextVar("ignored", default=None)


def current() -> Ignored:
    """Those of the request that is being read; outside of one, parameters are strict."""
    return _CURRENT.get() or Ignored(strict=True)


@contextmanager
def reading(*, strict: bool) -> Iterator[Ignored]:
    """A request is read and answered inside of this context, and of copies of it."""
    ignored = Ignored(strict=strict)
    token = _CURRENT.set(ignored)
    try:
        yield ignored
    finally:
        _CURRENT.reset(token)
