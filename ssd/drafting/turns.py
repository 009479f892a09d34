"""Draft runs of several engines in one process: they take turns, and their forward passes are joined.

Each engine has a thread, which runs the code of a worker (`ssd.drafting.worker`). One of the threads computes at a
time: the one whose turn it is. A thread gives its turn away when it wants a forward pass. When every thread that is in
a round wants one, the last of them computes all of them as one pass, and each goes on with its own logits. So a round
that comes while others are under way begins within a step, and every engine has a step in each pass, however many
others there are. An engine that is alone in a round computes as a worker does.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from ssd.kernels.ops import DeviceBatch

Join = Callable[[Seq[DeviceBatch]], Seq[torch.Tensor]]  # computes batches in one forward pass: the logits of each


@dataclass
class _Wish:
    """A forward pass that a thread waits for."""

    batch: DeviceBatch | None  # None: it only lets others compute
    logits: torch.Tensor | None = None
    error: Exception | None = None
    done: bool = False


class Turns:
    """The turns of the threads of one draft model. `join` computes up to `max_rows` rows, or one batch, at a time."""

    def __init__(self, join: Join, max_rows: int) -> None:
        self.passes = 0  # that were joined, of several engines
        self.rows = 0  # of these
        self._join, self._max_rows = join, max_rows
        self._changed = threading.Condition()
        self._taken = False
        self._active = 0  # threads in a round
        self._wishes: list[_Wish] = []

    @contextmanager
    def round(self) -> Iterator[None]:
        """A round of the calling thread, which has the turn inside."""
        with self._changed:
            self._active += 1
            self._changed.wait_for(lambda: not self._taken)
            self._taken = True
        try:
            yield
        finally:
            with self._changed:
                self._active -= 1
                self._taken = False
                self._changed.notify_all()

    @property
    def shared(self) -> bool:
        """Whether another thread is in a round, too."""
        return self._active > 1

    def yield_(self) -> None:
        """Lets each of the others have a step."""
        if self.shared:
            self._wait(_Wish(None))

    def forward(self, batch: DeviceBatch) -> torch.Tensor:
        """Logits of the batch, which is computed together with those of the other threads."""
        wish = _Wish(batch)
        self._wait(wish)
        if wish.error is not None:
            raise wish.error
        assert wish.logits is not None
        return wish.logits

    def _wait(self, wish: _Wish) -> None:
        with self._changed:
            self._wishes.append(wish)
            self._taken = False
            self._changed.notify_all()
            self._changed.wait_for(lambda: not self._taken and (wish.done or len(self._wishes) == self._active))
            self._taken = True
            if wish.done:
                return
            wishes, self._wishes = self._wishes, []
        self._compute([each for each in wishes if each.batch is not None])
        for each in wishes:
            each.done = True

    def _compute(self, wishes: Seq[_Wish]) -> None:
        """In passes of at most `max_rows` rows, in the order in which they were wished for."""
        batches = [each.batch for each in wishes if each.batch is not None]
        first = 0
        while first < len(wishes):
            end, rows = first + 1, len(batches[first].token_ids)
            while end < len(wishes) and rows + len(batches[end].token_ids) <= self._max_rows:
                rows += len(batches[end].token_ids)
                end += 1
            self.passes += end - first > 1
            self.rows += rows if end - first > 1 else 0
            self._compute_together(wishes[first:end], batches[first:end])
            first = end

    def _compute_together(self, wishes: Seq[_Wish], batches: Seq[DeviceBatch]) -> None:
        try:
            for wish, logits in zip(wishes, self._join(batches), strict=True):
                wish.logits = logits
        except Exception as error:
            if len(wishes) == 1:
                wishes[0].error = error
                return
            for wish, batch in zip(wishes, batches, strict=True):  # the fault is of one of them
                self._compute_together([wish], [batch])
