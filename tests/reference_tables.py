"""`ssd.kernels.triton.draft_table` in numpy: what its kernels must compute, and their stand-in on a CPU."""

from __future__ import annotations

import numpy as np
import torch


def look_up(
    wanted: torch.Tensor,
    tables: torch.Tensor,
    record: torch.Tensor,
    *,
    length: torch.Tensor,
    token_ids: torch.Tensor,
    num_accepted: torch.Tensor,
    drafts: torch.Tensor,
    confidence: torch.Tensor,
    origin: torch.Tensor,
    limit: int,
    hit: int,
    miss: int,
) -> None:
    k = drafts.shape[1]
    for slot, round_ in wanted.T.tolist():
        last, accepted = int(token_ids[slot, length[slot] - 1]), int(num_accepted[slot])
        rows = [
            entry
            for table in tables[:, slot].numpy()
            if table[0] == round_ >= 0
            for entry in table[2:].reshape(-1, 2 + 2 * k)[: table[1]]
        ]
        siblings = [entry for entry in rows if entry[0] == accepted]
        matches = [entry for entry in siblings if entry[1] == last]
        found = (matches or siblings or [None])[0]
        origin[slot] = record[slot, 0] = hit if matches else miss if siblings else 0
        record[slot, 1:] = torch.tensor([-1] * k + [0] * k)
        if found is not None:
            drafts[slot] = torch.from_numpy(found[2 : 2 + k].clip(min=0))
            confidence[slot] = torch.from_numpy(found[2 + k :].view(np.float32))
            record[slot, 1:] = torch.from_numpy(found[2:])


def await_answers(
    wanted: torch.Tensor,
    answers: torch.Tensor,
    *,
    drafts: torch.Tensor,
    confidence: torch.Tensor,
    origin: torch.Tensor,
    round_: int,
    limit: int,
    hit: int,
    written: int,
) -> None:
    """Of answers that are there already: nobody could give one while a CPU waits."""
    k = drafts.shape[1]
    for slot in wanted[0].tolist():
        answer = answers[slot]
        if int(origin[slot]) != hit and int(answer[0]) == round_ and int(answer[1]) > 0:
            drafts[slot] = answer[2 : 2 + k].clamp(min=0)
            confidence[slot] = answer[2 + k :].view(torch.float32)
            origin[slot] = written
