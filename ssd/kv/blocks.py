"""The KV block pool and its prefix cache: reference counts and contents of blocks.

Bookkeeping over block numbers: knows nothing of tensors, devices, requests or scheduling. Target and draft model each
have a pool of their own.

A full block of committed tokens is entered in the prefix cache under (entry of the block before it, its tokens): exact,
not hashed, so two prefixes are never confused. A block with no users keeps its entry until it is reused, least recently
used first.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

_ROOT = 0
_Key = tuple[int, tuple[int, ...]]  # entry number of the preceding block, tokens of this one


@dataclass
class BlockTable:
    """The KV blocks of one sequence in one model."""

    blocks: list[int] = field(default_factory=list)
    entries: list[int] = field(default_factory=list)  # prefix cache entry of every full, committed block
    num_computed: int = 0  # committed tokens with KV


class BlockPool:
    """A fixed number of KV blocks, shared by reference count, with an exact prefix cache.

    `recomputed`: tokens at the end of a cached prefix that are computed again (the same KV is written once more), for
    what else a forward pass gives.
    """

    def __init__(self, num_blocks: int, block_size: int, *, prefix_caching: bool = True, recomputed: int = 0) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.prefix_caching = prefix_caching
        self.recomputed = recomputed
        self._users = [0] * num_blocks
        self._unused: OrderedDict[int, None] = OrderedDict((b, None) for b in range(num_blocks))  # LRU order
        self._entries: dict[_Key, tuple[int, int]] = {}  # key -> (block, entry number)
        self._key_of: dict[int, _Key] = {}  # block -> its key, while it is in the cache
        self._next_entry = _ROOT + 1

    @property
    def num_free(self) -> int:
        return len(self._unused)

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def attach_prefix(self, table: BlockTable, tokens: Seq[int]) -> int:
        """Gives an empty table the longest cached prefix of `tokens`; returns how many tokens need not be computed.

        At least one token is always left to compute, because its logits are needed.
        """
        entry = _ROOT
        limit = (len(tokens) - 1) // self.block_size if self.prefix_caching else 0
        for i in range(limit):
            found = self._entries.get(self._key(tokens, i, entry))
            if found is None:
                break
            block, entry = found
            self._use(block)
            table.blocks.append(block)
            table.entries.append(entry)
        table.num_computed = max(0, len(table.blocks) * self.block_size - self.recomputed)
        return table.num_computed

    def grow(self, table: BlockTable, num_tokens: int) -> bool:
        """Allocates blocks for `num_tokens` tokens in all; False (and no change) if too few are free."""
        missing = self.blocks_for(num_tokens) - len(table.blocks)
        if missing > self.num_free:
            return False
        for _ in range(missing):
            block = next(iter(self._unused))
            self._forget(block)
            self._use(block)
            table.blocks.append(block)
        return True

    def commit(self, table: BlockTable, tokens: Seq[int]) -> None:
        """Enters the table's full blocks of computed, committed tokens in the prefix cache."""
        if not self.prefix_caching:
            return
        for i in range(len(table.entries), table.num_computed // self.block_size):
            parent = table.entries[-1] if i else _ROOT
            key = self._key(tokens, i, parent)
            if key not in self._entries:
                self._entries[key] = (table.blocks[i], self._next_entry)
                self._key_of[table.blocks[i]] = key
                self._next_entry += 1
            table.entries.append(self._entries[key][1])

    def release(self, table: BlockTable) -> None:
        """Frees all blocks of a table. Cache entries stay until the blocks are reused, the tail of a prefix first."""
        for block in reversed(table.blocks):
            self._users[block] -= 1
            if self._users[block] == 0:
                self._unused[block] = None
                if block not in self._key_of:
                    self._unused.move_to_end(block, last=False)
        table.blocks.clear()
        table.entries.clear()
        table.num_computed = 0

    def clear_prefix_cache(self) -> None:
        """Drops every entry; blocks in use are not affected."""
        for block in list(self._key_of):
            self._forget(block)

    def check(self, tables: Iterable[BlockTable]) -> None:
        """Raises AssertionError when the reference counts do not match the tables that hold blocks."""
        held = [0] * self.num_blocks
        for table in tables:
            for block in table.blocks:
                held[block] += 1
        if held != self._users:
            raise AssertionError(f"block users {self._users} do not match the sequences' blocks {held}")
        if {b for b, users in enumerate(self._users) if users == 0} != set(self._unused):
            raise AssertionError("a block is unused but not free, or free but used")
        if {block: key for key, (block, _) in self._entries.items()} != self._key_of:
            raise AssertionError("the prefix cache's two indices disagree")

    def _key(self, tokens: Seq[int], i: int, parent: int) -> _Key:
        return parent, tuple(tokens[i * self.block_size : (i + 1) * self.block_size])

    def _use(self, block: int) -> None:
        self._users[block] += 1
        self._unused.pop(block, None)

    def _forget(self, block: int) -> None:
        key = self._key_of.pop(block, None)
        if key is not None:
            del self._entries[key]
