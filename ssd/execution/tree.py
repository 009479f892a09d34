"""A draft on the host: its tokens are a chain, or the nodes of a tree.

It has a row of logits for the last decided token, then one for each node. Knows nothing of devices.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from collections.abc import Sequence as Seq

import numpy as np
import numpy.typing as npt


class DraftTree:
    """`parents`: the node that each one is behind, which comes before it; -1: the last decided token.

    What has another parent is no node, and never accepted. Its row is one behind the last decided token.
    """

    def __init__(self, tokens: Seq[int], parents: Iterable[int]) -> None:
        self._above = [-1, *(parent + 1 if parent < i else 0 for i, parent in enumerate(parents))]  # by row
        self.before: list[list[int]] = [[]]  # draft tokens before the position that each row decides
        for token, above in zip(tokens, self._above[1:], strict=True):
            self.before.append([*self.before[above], token])

    def masks(self, of_chain: Callable[[Seq[int]], npt.NDArray[np.int32]]) -> npt.NDArray[np.int32]:
        """Of all rows; `of_chain` gives those before and after the tokens of a path."""
        found: dict[int, npt.NDArray[np.int32]] = {}
        for leaf in reversed(range(len(self.before))):
            if leaf in found:
                continue
            row = leaf
            for mask in reversed(of_chain(self.before[leaf])):
                found.setdefault(row, mask)
                row = self._above[row]
        return np.stack([found[row] for row in range(len(self.before))])
