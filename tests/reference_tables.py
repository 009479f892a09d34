"""`ssd.kernels.triton.draft_table` in numpy: what its kernels must compute, and their stand-in on a CPU."""

from __future__ import annotations

import numpy as np
import torch

from ssd.kernels.state import StateView


def look_up(
    state: StateView,
    wanted: torch.Tensor,
    tables: torch.Tensor,
    record: torch.Tensor,
    *,
    limit: int,
    hit: int,
    miss: int,
) -> None:
    k = state.drafts.shape[1]
    for slot, round_ in wanted.T.tolist():
        last, accepted = int(state.token_ids[slot, state.length[slot] - 1]), int(state.num_accepted[slot])
        rows = [
            entry
            for table in tables[:, slot].numpy()
            if table[0] == round_ >= 0
            for entry in table[2:].reshape(-1, 2 + 2 * k)[: table[1]]
        ]
        siblings = [entry for entry in rows if entry[0] == accepted]
        matches = [entry for entry in siblings if entry[1] == last]
        found = (matches or siblings or [None])[0]
        state.origin[slot] = record[slot, 0] = hit if matches else miss if siblings else 0
        record[slot, 1:] = torch.tensor([-1] * k + [0] * k)
        if found is not None:
            state.drafts[slot] = torch.from_numpy(found[2 : 2 + k].clip(min=0))
            state.confidence[slot] = torch.from_numpy(found[2 + k :].view(np.float32))
            record[slot, 1:] = torch.from_numpy(found[2:])


def await_answers(
    state: StateView,
    slots: torch.Tensor,
    answers: torch.Tensor,
    *,
    round_: int,
    limit: int,
    hit: int,
    written: int,
) -> None:
    """Of answers that are there already: nobody could give one while a CPU waits."""
    k = state.drafts.shape[1]
    for slot in slots.tolist():
        answer = answers[slot]
        if int(state.origin[slot]) != hit and int(answer[0]) == round_ and int(answer[1]) > 0:
            state.drafts[slot] = answer[2 : 2 + k].clamp(min=0)
            state.confidence[slot] = answer[2 + k :].view(torch.float32)
            state.origin[slot] = written
