"""Admission: how many sequences and tokens may be in flight, and the drain before the server stops."""

from __future__ import annotations

import asyncio
from typing import Final

from ssd.server.errors import ApiError

RETRY_AFTER: Final = {"Retry-After": "1"}


class Ticket:
    """What an admitted request occupies, until it is released."""

    def __init__(self, admission: Admission, sequences: int) -> None:
        self.sequences, self.tokens = sequences, 0
        self._admission = admission
        self._released = False

    def add_tokens(self, tokens: int) -> None:
        """Raises 429 if they are too many now, 400 if they always will be; the ticket is released then."""
        try:
            self._admission.add_tokens(self, tokens)
        except ApiError:
            self.release()
            raise

    def release(self) -> None:
        """Idempotent."""
        if not self._released:
            self._released = True
            self._admission.release(self)


class Admission:
    """Counts what is in flight. For the event loop's thread only."""

    def __init__(self, max_running: int, max_queue: int, max_tokens: int | None) -> None:
        self.sequences = 0  # in flight: running or waiting
        self.tokens = 0
        self.draining = False
        self._max_sequences = max_running + max_queue
        self._max_tokens = max_tokens
        self._idle = asyncio.Event()
        self._idle.set()

    def admit(self, sequences: int, param: str) -> Ticket:
        """`param` is named if the request is too large for this server."""
        if self.draining:
            raise ApiError(503, "the server is shutting down", code="draining", headers=RETRY_AFTER)
        if sequences > self._max_sequences:
            raise ApiError(400, f"{param}: {sequences} sequences; the limit is {self._max_sequences}", param=param)
        if self.sequences + sequences > self._max_sequences:
            raise _overloaded(f"{self.sequences} sequences are in flight; the limit is {self._max_sequences}")
        self.sequences += sequences
        self._idle.clear()
        return Ticket(self, sequences)

    def add_tokens(self, ticket: Ticket, tokens: int) -> None:
        limit = self._max_tokens
        if limit is not None and ticket.tokens + tokens > limit:
            raise ApiError(
                400,
                f"max_tokens: prompt and output may need {ticket.tokens + tokens} tokens; the limit is {limit}",
                param="max_tokens",
            )
        if limit is not None and self.tokens + tokens > limit:
            raise _overloaded(f"{self.tokens} tokens are in flight; the limit is {limit}")
        self.tokens += tokens
        ticket.tokens += tokens

    def release(self, ticket: Ticket) -> None:
        self.sequences -= ticket.sequences
        self.tokens -= ticket.tokens
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


def _overloaded(message: str) -> ApiError:
    return ApiError(429, f"the server is busy: {message}", code="overloaded", headers=RETRY_AFTER)
