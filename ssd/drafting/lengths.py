"""How many tokens of the drafts of a batch a round verifies, where drafts are longer than that.

The verification of a batch takes the time of its rows, whichever sequence they belong to. So the rows of a round are
those of the draft tokens that are likeliest to be accepted.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

import numpy as np


def shared_lengths(chances: np.ndarray, limits: Seq[int], k: int) -> list[int]:
    """The length of each draft, at least 1 and at most its limit: together those of drafts of k tokens.

    `chances` [drafts, most]: that a token and all before it are accepted, which does not grow along a draft.
    """
    places, most = np.arange(chances.shape[1]), np.array(limits)
    first = places == 0
    values = np.where(places < most[:, None], chances + first, -1.0)
    likeliest = np.argsort(-values, axis=None, kind="stable")[: int(np.minimum(most, k).sum())]
    return [int(n) for n in np.bincount(likeliest // len(places), minlength=len(most))]
