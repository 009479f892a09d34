"""Suffix trees of token sequences, and the drafts that are looked up in them: `csrc/suffix.c`, called through ctypes.

Knows nothing of requests and rounds. Not for several threads at once.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence as Seq

from ssd.kernels.cpu.build import library_of
from ssd.kernels.cpu.variants import SUFFIX

MOST_DRAFTED = 23  # tokens: a window of the tree without its first one

_Tokens = ctypes.c_int * MOST_DRAFTED


@functools.cache
def _library() -> ctypes.CDLL:
    """BuildError where it can be neither compiled nor found in the package."""
    library, tree, count = ctypes.CDLL(str(library_of(SUFFIX))), ctypes.c_void_p, ctypes.c_uint32
    library.ssd_suffix_new.argtypes, library.ssd_suffix_new.restype = [count], tree
    library.ssd_suffix_free.argtypes, library.ssd_suffix_free.restype = [tree], None
    library.ssd_suffix_extend.argtypes, library.ssd_suffix_extend.restype = [tree, tree, count], count
    library.ssd_suffix_add.argtypes, library.ssd_suffix_add.restype = [tree, tree, count], None
    library.ssd_suffix_draft.argtypes = [tree, tree, ctypes.c_int, tree, tree]
    library.ssd_suffix_bytes.argtypes, library.ssd_suffix_bytes.restype = [tree], ctypes.c_uint64
    return library


class SuffixTree:
    """All strings of up to 24 tokens of a text, and how often each occurred.

    `limit`: that of the texts that are added instead, up to so many tokens; the oldest texts make room for new ones.
    """

    def __init__(self, limit: int = 0) -> None:
        self._library, self.length = _library(), 0
        self._tree = self._library.ssd_suffix_new(limit)
        if not self._tree:
            raise MemoryError("no memory for a suffix tree")
        self._drafted, self._score = _Tokens(), ctypes.c_float()

    def extend(self, tokens: Seq[int]) -> None:
        """Appends to the text. MemoryError: its rest was not appended."""
        count = self._library.ssd_suffix_extend(self._tree, _array(tokens), len(tokens))
        self.length += count
        if count < len(tokens):
            raise MemoryError("no memory for a suffix tree")

    def add(self, tokens: Seq[int]) -> None:
        """Adds a whole text."""
        self._library.ssd_suffix_add(self._tree, _array(tokens), len(tokens))

    def draft(self, most: int, others: SuffixTree | None = None) -> tuple[list[int], float]:
        """Up to `most` tokens that may follow the text, and how many of them are expected to be accepted.

        By what followed its last tokens earlier, in the text and in the `others`.
        """
        other = None if others is None else others._tree
        wanted, out, score = min(most, MOST_DRAFTED), self._drafted, self._score
        count = self._library.ssd_suffix_draft(self._tree, other, wanted, out, ctypes.byref(score))
        return out[:count], score.value

    @property
    def num_bytes(self) -> int:
        return int(self._library.ssd_suffix_bytes(self._tree))

    def __del__(self) -> None:
        self._library.ssd_suffix_free(self._tree)


def _array(tokens: Seq[int]) -> ctypes.Array[ctypes.c_int]:
    return (ctypes.c_int * len(tokens))(*tokens)
