"""Which requests end when a round raises: the one at fault, or all if the device no longer computes.

An exception does not say which sequence caused it. So the sequences of a failed round are computed again one at a time,
and a request that fails alone is the cause.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from collections.abc import Sequence as Seq

from ssd.core import Sequence, Status, Work
from ssd.decoding.round import Round
from ssd.engine.outputs import RunningRequest
from ssd.engine.scheduler import Scheduler
from ssd.errors import EngineFailed, one_line

log = logging.getLogger("ssd")
_MAX_FAILURES = 3  # failed rounds of a request, and failed rounds in a row before the device is tested


class RoundFailures:
    """Counts failed rounds, isolates their sequences, and decides which requests end."""

    def __init__(self, round_: Round, scheduler: Scheduler) -> None:
        self.fatal: Exception | None = None  # the last error, once the engine cannot go on
        self._round = round_
        self._scheduler = scheduler
        self._num_in_a_row = 0

    def clear(self) -> None:
        """A round has succeeded."""
        self._num_in_a_row = 0

    def handle(self, works: Seq[Work], error: Exception, requests: Mapping[str, RunningRequest]) -> set[str]:
        """Handles the error of a round with these works; returns the ids of the requests that end. None is in flight.

        A request that was alone in the round ends, and one that was in _MAX_FAILURES failed rounds. All end if another
        rank of the model was lost (EngineFailed), or if _MAX_FAILURES rounds in a row and one of padding have failed.
        """
        log.error("a round failed: %s", one_line(error))
        log.debug("how it failed", exc_info=error)
        self._num_in_a_row += 1
        sequences = _unfinished(works)
        involved = {sequence.request.id for sequence in sequences}
        for request_id in involved:
            requests[request_id].failed_rounds += 1
        if isinstance(error, EngineFailed) or not self._can_compute():
            log.error("the engine ends all requests and takes no more")
            self.fatal = error.with_traceback(None)  # a traceback keeps the round's tensors alive
            return set(requests)
        if len({work.sequence.request.id for work in works}) == 1:
            return involved
        self._scheduler.isolate(sequences)
        return {request_id for request_id in involved if requests[request_id].failed_rounds >= _MAX_FAILURES}

    def _can_compute(self) -> bool:
        return self._num_in_a_row < _MAX_FAILURES or self._round.can_compute()


def _unfinished(works: Seq[Work]) -> list[Sequence]:
    return list(dict.fromkeys(work.sequence for work in works if work.sequence.status is not Status.FINISHED))
