"""Admission: how many sequences and tokens may be in flight, and the drain before the server stops."""

from __future__ import annotations

import asyncio
from typing import Final

from ssd.server.errors import ApiError, invalid

RETRY_AFTER: Final = {"Retry-After": "1"}


class Admission:
    """Counts what is in flight. For the event loop's thread only."""

    def __init__(self, max_running: int, max_queue: int, max_tokens: int | None) -> None:
        self.sequences = 0  # in flight: running or waiting
        self.tokens = 0
        self.max_tokens = max_tokens
        self.draining = False
        self._max_sequences = max_running + max_queue
        self._idle = asyncio.Event()
        self._idle.set()

    def admit(self, sequences: int, param: str) -> Permit:
        """`param` is named if the request is too large for this server."""
        if self.draining:
            raise ApiError(503, "the server is shutting down", code="draining", headers=RETRY_AFTER)
        if sequences > self._max_sequences:
            raise invalid(param, f"{sequences} sequences; the limit is {self._max_sequences}")
        if self.sequences + sequences > self._max_sequences:
            raise _overloaded(f"{self.sequences} sequences are in flight; the limit is {self._max_sequences}")
        self.sequences += sequences
        self._idle.clear()
        return Permit(self, sequences)

    def release(self, sequences: int, tokens: int) -> None:
        self.sequences -= sequences
        self.tokens -= tokens
        if self.sequences == 0:
            self._idle.set()

    async def drain(self, timeout: float) -> bool:
        """Admits nothing more and waits until nothing is in flight; False after `timeout` seconds."""
        self.draining = True
        try:
            await asyncio.wait_for(self._idle.wait(), timeout)
        except TimeoutError:
            return False
        return True


class Permit:
    """The sequences and tokens that an admitted request occupies, until they are released."""

    def __init__(self, admission: Admission, sequences: int) -> None:
        self._admission = admission
        self._sequences, self._tokens = sequences, 0

    def add_tokens(self, tokens: int) -> None:
        """Called once. Raises 429 if they are too many now, 400 if they always will be."""
        in_flight, limit = self._admission.tokens, self._admission.max_tokens
        if limit is not None and tokens > limit:
            raise invalid("max_tokens", f"prompt and output may need {tokens} tokens; the limit is {limit}")
        if limit is not None and in_flight + tokens > limit:
            raise _overloaded(f"{in_flight} tokens are in flight; the limit is {limit}")
        self._admission.tokens += tokens
        self._tokens = tokens

    def release(self) -> None:
        """To be called once."""
        self._admission.release(self._sequences, self._tokens)


def _overloaded(message: str) -> ApiError:
    return ApiError(429, f"the server is busy: {message}", code="overloaded", headers=RETRY_AFTER)
