"""Watches which branches the drafter prepares for single requests."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq

from ssd.core import Work
from ssd.decoding.drafter import DrafterWrapper, Prepared, never
from ssd.engine.engine import Engine


class BranchWatch(DrafterWrapper):
    """Wraps an engine's drafter and keeps the branches that it prepares for watched requests.

    While a request is watched, a round is collected before the next one is launched, because a later round would
    overwrite the branches: on a GPU that costs some speed, for every request. Nothing changes while none is watched.
    """

    def __init__(self, engine: Engine) -> None:
        """Installs itself in place of the engine's drafter; to be called on the engine's thread."""
        super().__init__(engine.round.drafter)
        self._found: dict[str, dict[int, Prepared]] = {}  # by request, then by the number of output tokens before
        engine.flush()
        engine.round.drafter = self

    def watch(self, request_id: str) -> None:
        """For any thread, as are `take` and `unwatch`."""
        self._found[request_id] = {}

    def take(self, request_id: str, num_output: int) -> Prepared:
        """Branches of the round that began after `num_output` output tokens, the likeliest first."""
        return self._found[request_id].pop(num_output, {})

    def unwatch(self, request_id: str) -> None:
        self._found.pop(request_id, None)

    @property
    def needs_tokens(self) -> bool:  # type: ignore[override]
        return self.inner.needs_tokens or bool(self._found)

    def prepare(self, works: Seq[Work], interrupted: Callable[[], bool] = never) -> None:
        super().prepare(works, interrupted)
        for work in works if self._found else ():
            found = self._found.get(work.sequence.request.id)
            ahead = work.sequence.in_flight is not None  # launched before the request was watched
            if found is not None and work.decides and work.sequence.index == 0 and not ahead:
                found[work.sequence.num_output] = self.inner.prepared(work.sequence)
