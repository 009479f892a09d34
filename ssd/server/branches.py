"""Watches which branches the drafter prepares for single requests."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq

from ssd.core import Sequence, Work
from ssd.decoding.drafter import Prepared
from ssd.decoding.observer import RoundObserver


class BranchWatch(RoundObserver):
    """Keeps the branches that the drafter prepares for watched requests.

    While a request is watched, a round is collected before the next one is launched, because a later round would
    overwrite the branches: on a GPU that costs some speed, for every request. Nothing changes while none is watched.
    """

    def __init__(self) -> None:
        self._found: dict[str, dict[int, Prepared]] = {}  # by request, then by the number of output tokens before

    def watch(self, request_id: str) -> None:
        """For any thread, as are `take` and `unwatch`."""
        self._found[request_id] = {}

    def take(self, request_id: str, num_output: int) -> Prepared:
        """Branches of the round that began after `num_output` output tokens, the likeliest first."""
        return self._found[request_id].pop(num_output, {})

    def unwatch(self, request_id: str) -> None:
        self._found.pop(request_id, None)

    @property
    def synchronous(self) -> bool:  # type: ignore[override]
        return bool(self._found)

    def launched(self, works: Seq[Work], prepared: Callable[[Sequence], Prepared]) -> None:
        for work in works if self._found else ():
            found = self._found.get(work.sequence.request.id)
            earlier = work.sequence.in_flight is not None  # launched before the request was watched
            if found is not None and work.decides and work.sequence.index == 0 and not earlier:
                found[work.sequence.num_output] = prepared(work.sequence)
