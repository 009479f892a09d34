"""Drafts that come after a round was launched, where a kernel of the target's device finds them: pinned host memory.

The host writes rows while rounds are in flight, and the device reads them when it executes a look-up
(`ssd.kernels.triton.draft_table`). A row becomes valid by its first word, which is written last. Whatever is read, at
most speed is lost: the target verifies it.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

import numpy as np
import torch

from ssd.core import Origin
from ssd.drafting.wire import Draft, PreparedDrafts
from ssd.execution.clock import Clock, now
from ssd.execution.state import SequenceState
from ssd.kernels.device import kernels
from ssd.kernels.transfers import to_device

_NO_ROUND = -1  # of a sequence for which nothing was prepared


class DraftTables:
    """What drafters in other processes have prepared, by replica and slot, and the record of the last look-up."""

    def __init__(self, state: SequenceState, replicas: int, width: int) -> None:
        self.state = state
        self._kernels = kernels(state.device).draft_table
        self._k, self._width = state.drafts.shape[1], width
        entry, slots = 2 + 2 * self._k, state.num_slots + 1
        self._tables = _pinned(state.device, replicas, slots, 2 + width * entry)
        self._record = _pinned(state.device, slots, 1 + 2 * self._k)
        self._wanted = _pinned(state.device, 2 * slots)
        self.looked_up: Clock | None = None  # end of the last look-up

    def write(self, replica: int, slot: int, round_: int, prepared: PreparedDrafts) -> None:
        """Enters what a replica has prepared for the outcomes of a round."""
        row, count = self._tables[replica, slot].numpy(), min(len(prepared.outcomes), self._width)
        entries = row[2:].reshape(self._width, -1)
        depth = prepared.outcomes.shape[1] - 2
        row[0] = _NO_ROUND
        entries[:count, 2:] = -1
        entries[:count, : 2 + depth] = prepared.outcomes[:count]
        entries[:count, 2 + self._k : 2 + self._k + depth].view(np.float32)[:] = prepared.confidence[:count]
        row[1], row[0] = count, round_

    def look_up(self, slots: Seq[int], rounds: Seq[int | None], seconds: float) -> None:
        """Launches the look-up of these sequences, each in the tables of a round (None: there are none).

        It waits `seconds` at most for tables that are not there yet.
        """
        wanted = self._wanted[: 2 * len(slots)].view(2, -1)
        wanted.numpy()[:] = [slots, [_NO_ROUND if each is None else each for each in rounds]]
        self._kernels.look_up(
            self.state.view,
            wanted,
            self._tables,
            self._record,
            limit=int(seconds * 1e9),
            hit=Origin.HIT,
            miss=Origin.SIBLING,
        )
        self.looked_up = now(self.state.device)

    def found(self, slots: Seq[int]) -> list[tuple[Origin, Draft]]:
        """What the last look-up found for these sequences. Waits for it."""
        if self.looked_up is not None:
            self.looked_up.wait()
        record = self._record.numpy()[list(slots)]
        tokens, sure = record[:, 1 : 1 + self._k], record[:, 1 + self._k :].view(np.float32)
        lengths = (tokens >= 0).cumprod(axis=1).sum(axis=1).tolist()
        drafts = zip(tokens.tolist(), sure.tolist(), lengths, strict=True)
        origins = map(Origin, record[:, 0].tolist())
        return [(o, Draft(tuple(t[:n]), tuple(s[:n]))) for o, (t, s, n) in zip(origins, drafts, strict=True)]


class DraftAnswers:
    """Drafts that the host gives while the device waits for them, by slot."""

    def __init__(self, state: SequenceState) -> None:
        self.state = state
        self._kernels = kernels(state.device).draft_table
        self._k = state.drafts.shape[1]
        self._answers = _pinned(state.device, state.num_slots + 1, 2 + 2 * self._k)

    def wait(self, slots: Seq[int], round_: int, seconds: float, origin: Origin) -> None:
        """Launches a wait of `seconds` at most for `answer`, for those of these sequences whose draft is no hit."""
        self._kernels.await_answers(
            self.state.view,
            to_device(np.array(slots, dtype=np.int32), self.state.device),
            self._answers,
            round_=round_,
            limit=int(seconds * 1e9),
            hit=Origin.HIT,
            written=origin,
        )

    def answer(self, slot: int, round_: int, token_ids: Seq[int]) -> None:
        """Ends the wait of a sequence, with a draft or without one."""
        row, count = self._answers[slot].numpy(), min(len(token_ids), self._k)
        row[2:] = -1
        row[2 + self._k :] = 0
        row[2 : 2 + count] = token_ids[:count]
        row[1], row[0] = count, round_


def _pinned(device: torch.device, *shape: int) -> torch.Tensor:
    return torch.full(shape, _NO_ROUND, dtype=torch.int32, pin_memory=device.type == "cuda")
