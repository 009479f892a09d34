"""Logits processors: a request's own function of the tokens and the logits, called on the host for every position.

Knows nothing of models, devices or the engine.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from typing import Any

import numpy as np
import numpy.typing as npt

from ssd.errors import one_line

Logits = npt.NDArray[np.float32]


class RowProcessor:
    """The logits processor of one sequence; `error`: why it failed in the last round, if it did."""

    def __init__(self, function: Callable[[list[int], Any], Any]) -> None:
        self._function = function
        self.error: str | None = None

    def process(self, tokens: Seq[int], drafted: Seq[Seq[int]], rows: Logits) -> None:
        """Replaces the logits after the tokens and the draft tokens that come before each row.

        A position where it fails has no token to choose, so nothing after it can be decided.
        """
        self.error = None
        failed: list[Seq[int]] = []
        for draft, row in zip(drafted, rows, strict=True):
            if any(draft[: len(path)] == path for path in failed):
                continue
            try:
                row[:] = self._checked([*tokens, *draft], row.copy())
            except Exception as error:
                self.error = one_line(error)
                row[:] = np.nan
                failed.append(draft)

    def _checked(self, tokens: list[int], row: Logits) -> Logits:
        found = np.asarray(self._function(tokens, row), dtype=np.float32)
        if found.shape != row.shape:
            raise ValueError(f"it returned shape {found.shape}: return the logits of all {len(row)} tokens")
        return found
