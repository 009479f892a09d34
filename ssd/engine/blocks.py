"""The KV block pool and its prefix cache: which block holds what, and who uses it.

Plain bookkeeping over block numbers: knows nothing of tensors, devices or scheduling.

A block whose tokens are all committed may be entered in the prefix cache under its exact content: the entry of the
block before it, and its own tokens. (Exact, not hashed: two different prefixes can never be confused.) A block that
nobody uses keeps its entry until the block is needed for something else; the longest unused one goes first.
"""

from __future__ import annotations

from collections import OrderedDict

from ssd.core import Sequence

_ROOT = 0
_Key = tuple[int, tuple[int, ...]]  # entry number of the preceding block, tokens of this one


class BlockPool:
    """A fixed number of KV blocks, shared by reference count, with an exact prefix cache."""

    def __init__(self, num_blocks: int, block_size: int, *, prefix_caching: bool = True) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.prefix_caching = prefix_caching
        self._users = [0] * num_blocks
        self._unused: OrderedDict[int, None] = OrderedDict((b, None) for b in range(num_blocks))  # next to go first
        self._entries: dict[_Key, tuple[int, int]] = {}  # key -> (block, entry number)
        self._key_of: dict[int, _Key] = {}  # block -> its key, while it is in the cache
        self._next_entry = _ROOT + 1

    @property
    def num_free(self) -> int:
        return len(self._unused)

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def attach_prefix(self, sequence: Sequence) -> int:
        """Gives a sequence without blocks its longest cached prefix; returns how many tokens that covers.

        At least one token is always left to compute, because its logits are needed.
        """
        entry = _ROOT
        limit = (len(sequence.tokens) - 1) // self.block_size if self.prefix_caching else 0
        for i in range(limit):
            found = self._entries.get(self._key(sequence, i, entry))
            if found is None:
                break
            block, entry = found
            self._use(block)
            sequence.blocks.append(block)
            sequence.prefix_entries.append(entry)
        sequence.num_computed = len(sequence.blocks) * self.block_size
        return sequence.num_computed

    def grow(self, sequence: Sequence, num_tokens: int) -> bool:
        """Makes room for `num_tokens` tokens in all; False (and nothing changed) when too few blocks are unused."""
        missing = self.blocks_for(num_tokens) - len(sequence.blocks)
        if missing > self.num_free:
            return False
        for _ in range(missing):
            block = next(iter(self._unused))
            self._forget(block)
            self._use(block)
            sequence.blocks.append(block)
        return True

    def commit(self, sequence: Sequence) -> None:
        """Enters the sequence's full blocks of computed, committed tokens in the prefix cache."""
        if not self.prefix_caching:
            return
        for i in range(len(sequence.prefix_entries), sequence.num_computed // self.block_size):
            parent = sequence.prefix_entries[-1] if i else _ROOT
            key = self._key(sequence, i, parent)
            if key not in self._entries:
                self._entries[key] = (sequence.blocks[i], self._next_entry)
                self._key_of[sequence.blocks[i]] = key
                self._next_entry += 1
            sequence.prefix_entries.append(self._entries[key][1])

    def release(self, sequence: Sequence) -> None:
        """Takes all blocks back. Their cache entries stay until the blocks are reused, a prefix's tail first."""
        for block in reversed(sequence.blocks):
            self._users[block] -= 1
            if self._users[block] == 0:
                self._unused[block] = None
                if block not in self._key_of:
                    self._unused.move_to_end(block, last=False)
        sequence.blocks.clear()
        sequence.prefix_entries.clear()
        sequence.num_computed = 0

    def clear_prefix_cache(self) -> None:
        """Forgets every entry; blocks in use stay with their users."""
        for block in list(self._key_of):
            self._forget(block)

    def check(self, sequences: list[Sequence]) -> None:
        """Raises AssertionError when the books do not balance against the sequences that hold blocks."""
        held = [0] * self.num_blocks
        for sequence in sequences:
            for block in sequence.blocks:
                held[block] += 1
        if held != self._users:
            raise AssertionError(f"block users {self._users} do not match the sequences' blocks {held}")
        if {b for b, users in enumerate(self._users) if users == 0} != set(self._unused):
            raise AssertionError("a block is unused but not free, or free but used")
        if {block: key for key, (block, _) in self._entries.items()} != self._key_of:
            raise AssertionError("the prefix cache's two indices disagree")

    def _key(self, sequence: Sequence, i: int, parent: int) -> _Key:
        return parent, tuple(sequence.tokens[i * self.block_size : (i + 1) * self.block_size])

    def _use(self, block: int) -> None:
        self._users[block] += 1
        self._unused.pop(block, None)

    def _forget(self, block: int) -> None:
        key = self._key_of.pop(block, None)
        if key is not None:
            del self._entries[key]
