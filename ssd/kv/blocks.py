"""The KV block pool and its prefix cache: reference counts and contents of blocks.

Bookkeeping over block numbers: knows nothing of tensors, devices, requests or scheduling. Target and draft model each
have a pool of their own.

The layers of a model form *groups* by what they need of a sequence's KV: all of it, or a window of its last tokens. A
block holds tokens for the layers of one group, and all groups take their blocks from one pool. A block that a window
has passed is freed while its sequence goes on.

The prefix cache is a tree: an entry is a full block of committed tokens behind those before it, and has a block of
every group. Tokens are compared, not hashed, so two prefixes are never confused. A block with no users keeps its entry
until it is reused, least recently used first.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

NULL = -1  # in a block table: a block that its group needs no longer
Windows = Seq[int | None]  # of each group: tokens that a query sees; None: the whole context


@dataclass(eq=False, slots=True)
class Entry:
    """Tokens of one block in the prefix cache, and the blocks that hold their KV."""

    parent: Entry | None = None
    tokens: tuple[int, ...] = ()
    blocks: dict[int, int] = field(default_factory=dict)  # by group; one that was reused is not there
    children: dict[tuple[int, ...], Entry] = field(default_factory=dict)


@dataclass
class BlockTable:
    """The KV blocks of one sequence in one model."""

    blocks: list[int] = field(default_factory=list)  # of all groups in turn: block i of group g at i * groups + g
    entries: list[Entry] = field(default_factory=list)  # of the full, committed blocks
    num_computed: int = 0  # committed tokens with KV; `BlockPool.commit` comes after each change
    owner: str = ""  # prefixes are shared among tables of the same one


def most_blocks(num_tokens: int, block_size: int, windows: Windows, most_new: int) -> int:
    """Upper bound of the blocks that a sequence of `num_tokens` tokens has at once.

    `most_new`: upper bound of the tokens behind the committed ones.
    """
    whole = -(-num_tokens // block_size)
    return sum(whole if w is None else min(whole, _most_of_window(w, block_size, most_new)) for w in windows)


def _most_of_window(window: int, block_size: int, most_new: int) -> int:
    """Blocks of `window - 1` committed tokens and `most_new` behind them, at most: wherever the first block begins."""
    return (window + most_new - 3 + block_size) // block_size + 1


class BlockPool:
    """A fixed number of KV blocks, shared by reference count, with an exact prefix cache.

    `recomputed`: tokens at the end of a cached prefix that are computed again (the same KV is written once more), for
    what else a forward pass gives. `most_new`: see `most_blocks`; where there are windows.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        *,
        windows: Windows = (None,),
        most_new: int = 1,
        prefix_caching: bool = True,
        recomputed: int = 0,
    ) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.windows = windows
        self.prefix_caching = prefix_caching
        self.recomputed = recomputed
        self._groups, self._most_new = len(windows), most_new
        self._whole = frozenset(group for group, window in enumerate(windows) if window is None)
        self._sliding = [(group, window) for group, window in enumerate(windows) if window is not None]
        self._users = [0] * num_blocks
        self._unused: OrderedDict[int, None] = OrderedDict((b, None) for b in range(num_blocks))  # LRU order
        self._roots: defaultdict[str, Entry] = defaultdict(Entry)  # by owner
        self._entry_of: dict[int, tuple[Entry, int]] = {}  # block -> its entry and group, while it is in the cache

    @property
    def num_free(self) -> int:
        return len(self._unused)

    def missing(self, table: BlockTable, num_tokens: int) -> int:
        """Upper bound of the blocks that a table still needs, until its sequence has `num_tokens` tokens."""
        indices = len(table.blocks) // self._groups
        new = max(0, -(-num_tokens // self.block_size) - indices)
        total = new * len(self._whole)
        for _, window in self._sliding:
            held = indices - self._first_seen(table.num_computed, window)
            total += min(new, max(0, _most_of_window(window, self.block_size, self._most_new) - held))
        return total

    def attach_prefix(self, table: BlockTable, tokens: Seq[int]) -> int:
        """Gives an empty table the longest cached prefix of `tokens`; returns how many tokens need not be computed.

        At least one token is always left to compute, because its logits are needed.
        """
        found = self._cached(table.owner, tokens)
        table.num_computed = max(0, len(found) * self.block_size - self.recomputed)
        table.entries += found
        table.blocks = [entry.blocks.get(group, NULL) for entry in found for group in range(self._groups)]
        for group, window in self._sliding:
            first = self._first_seen(table.num_computed, window)
            table.blocks[group : first * self._groups : self._groups] = [NULL] * first
        for block in table.blocks:
            self._use(block)
        return table.num_computed

    def grow(self, table: BlockTable, num_tokens: int) -> bool:
        """Allocates blocks for `num_tokens` tokens in all; False (and no change) if too few are free."""
        missing = -(-num_tokens // self.block_size) * self._groups - len(table.blocks)
        if missing > self.num_free:
            return False
        for _ in range(missing):
            block = next(iter(self._unused))
            self._forget(block)
            self._use(block)
            table.blocks.append(block)
        return True

    def commit(self, table: BlockTable, tokens: Seq[int]) -> None:
        """Enters the table's full blocks of computed, committed tokens in the prefix cache, then frees those that the
        windows have passed.

        A round in flight reads none of these: its first query is behind the committed tokens.
        """
        groups = self._groups
        if self.prefix_caching:
            for i in range(len(table.entries), table.num_computed // self.block_size):
                parent = table.entries[-1] if i else self._roots[table.owner]
                key = self._tokens(tokens, i)
                entry = parent.children.setdefault(key, Entry(parent, key))
                for group, block in enumerate(table.blocks[i * groups : (i + 1) * groups]):
                    if group not in entry.blocks:
                        entry.blocks[group] = block
                        self._entry_of[block] = entry, group
                table.entries.append(entry)
        for group, window in self._sliding:
            i = self._first_seen(table.num_computed, window) * groups + group
            while i >= groups and table.blocks[i - groups] != NULL:
                i -= groups
                self._free(table.blocks[i])
                table.blocks[i] = NULL

    def release(self, table: BlockTable) -> None:
        """Frees all blocks of a table. Cache entries stay until the blocks are reused, the tail of a prefix first."""
        for block in reversed(table.blocks):
            self._free(block)
        table.blocks.clear()
        table.entries.clear()
        table.num_computed = 0

    def clear_prefix_cache(self) -> None:
        """Drops every entry; blocks in use are not affected."""
        for block in list(self._entry_of):
            self._forget(block)

    def check(self, tables: Iterable[BlockTable]) -> None:
        """Raises AssertionError when the reference counts do not match the tables that hold blocks."""
        held = [0] * self.num_blocks
        for table in tables:
            for place, block in enumerate(table.blocks):
                i, group = divmod(place, self._groups)
                window = self.windows[group]
                if (block == NULL) != (window is not None and i < self._first_seen(table.num_computed, window)):
                    raise AssertionError(f"block {i} of group {group} was freed too early, or not at all")
                if block != NULL:
                    held[block] += 1
        if held != self._users:
            raise AssertionError(f"block users {self._users} do not match the sequences' blocks {held}")
        if {b for b, users in enumerate(self._users) if users == 0} != set(self._unused):
            raise AssertionError("a block is unused but not free, or free but used")
        if any(entry.blocks.get(group) != block for block, (entry, group) in self._entry_of.items()):
            raise AssertionError("the prefix cache's two indices disagree")

    def _cached(self, owner: str, tokens: Seq[int]) -> list[Entry]:
        """Entries of an owner's longest prefix of which each group has all blocks that the next token sees."""
        found, entry = list[Entry](), self._roots[owner]
        for i in range((len(tokens) - 1) // self.block_size if self.prefix_caching else 0):
            child = entry.children.get(self._tokens(tokens, i))
            if child is None or not self._whole <= child.blocks.keys():
                break
            found.append(entry := child)
        end = len(found)
        while (gap := self._last_gap(found, end)) is not None:
            end = gap
        return found[:end]

    def _last_gap(self, found: Seq[Entry], end: int) -> int | None:
        """The last entry without a block that a prefix of `end` blocks needs; no longer prefix can do without it."""
        for group, window in self._sliding:
            first = self._first_seen(max(0, end * self.block_size - self.recomputed), window)
            for i in range(end - 1, first - 1, -1):
                if group not in found[i].blocks:
                    return i
        return None

    def _first_seen(self, num_computed: int, window: int) -> int:
        """Index of the first block that the token behind the computed ones sees."""
        return max(0, num_computed - window + 1) // self.block_size

    def _tokens(self, tokens: Seq[int], i: int) -> tuple[int, ...]:
        return tuple(tokens[i * self.block_size : (i + 1) * self.block_size])

    def _use(self, block: int) -> None:
        if block != NULL:
            self._users[block] += 1
            self._unused.pop(block, None)

    def _free(self, block: int) -> None:
        if block != NULL:
            self._users[block] -= 1
            if self._users[block] == 0:
                self._unused[block] = None
                if block not in self._entry_of:
                    self._unused.move_to_end(block, last=False)

    def _forget(self, block: int) -> None:
        """Takes a block out of the cache; entries without blocks that lead to none go with it."""
        found, group = self._entry_of.pop(block, (None, 0))
        if found is None:
            return
        del found.blocks[group]
        while found.parent is not None and not found.blocks and not found.children:
            if found.parent.children.get(found.tokens) is found:  # else it went before a child of it came
                del found.parent.children[found.tokens]
            found = found.parent
