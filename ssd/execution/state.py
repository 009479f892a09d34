"""The device-resident state of all running sequences: tokens, drafts, sampling parameters.

A round reads its inputs from here and writes its decisions here, so the next round can be launched before the host has
seen them. A running sequence has one slot, a row of these tensors.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from collections.abc import Sequence as Seq
from typing import NamedTuple

import numpy as np
import torch

from ssd.core import Origin, Sequence
from ssd.kernels.state import StateView
from ssd.kernels.transfers import to_device
from ssd.sampling.sampler import SamplingColumns


class TreeState(NamedTuple):
    """What a draft that is a tree has beside its tokens: int32 [slots, nodes]."""

    parents: torch.Tensor  # index of the node that each is behind; -1: the last decided token
    of_chain: torch.Tensor  # the same of drafts that are chains
    path: torch.Tensor  # nodes accepted in the last round, `num_accepted` of them
    depth: int  # most nodes of a path


class SequenceState:
    """Tensors with one row per slot, and one more for padding."""

    def __init__(
        self,
        num_slots: int,
        *,
        max_len: int,
        lookahead: int,
        vocab_size: int,
        device: torch.device,
        tree_depth: int = 0,
    ) -> None:
        """`lookahead`: tokens of a draft, or nodes of a draft tree of `tree_depth` (0: all drafts are chains)."""
        self.device = device
        self.num_slots = num_slots
        self.padding = num_slots  # the slot that padding uses
        self.lookahead = lookahead
        self.vocab_size = vocab_size
        width = max(1, lookahead)
        # A round launched before the end of its sequence was known writes tokens beyond it.
        columns = max_len + self.slack(lookahead)
        self.token_ids = self._zeros(num_slots + 1, columns)
        self.length = self._zeros(num_slots + 1) + 1  # decided tokens
        self.drafts = self._zeros(num_slots + 1, width)  # to be verified in the next round
        shape = (num_slots + 1, width)
        self.confidence = torch.zeros(shape, dtype=torch.float32, device=device)  # of each draft token, at least 0
        self.origin = self._zeros(num_slots + 1)  # `Origin` of the draft
        self.num_accepted = self._zeros(num_slots + 1)  # draft tokens accepted in the last round
        self.tree: TreeState | None = None  # where drafts may be trees
        if tree_depth:
            parents, path = self._zeros(*shape), self._zeros(*shape)
            of_chain = torch.arange(-1, width - 1, dtype=torch.int32, device=device).repeat(num_slots + 1, 1)
            self.tree = TreeState(parents, of_chain, path, tree_depth)
        self.view = StateView(self.length, self.token_ids, self.drafts, self.confidence, self.origin, self.num_accepted)
        self.sampling = SamplingColumns(num_slots + 1, vocab_size, device)

    @staticmethod
    def slack(lookahead: int) -> int:
        """Tokens that rounds in flight may compute beyond the end of a sequence."""
        return 2 * (lookahead + 1)

    @property
    def max_positions(self) -> int:
        """Number of positions that a batch can have."""
        return self.token_ids.shape[1] + self.lookahead + 1

    def admit(self, slot: int, sequence: Sequence) -> None:
        """Writes a sequence's tokens and parameters to its slot."""
        tokens, prompt = sequence.tokens, sequence.num_prompt
        self._write(slot, 0, tokens)
        self.num_accepted[slot].fill_(0)
        self.origin[slot].fill_(0)
        self.sampling.set(
            slot, sequence.params, sequence.seed, tokens[:prompt], tokens[prompt:], sequence.stop_token_ids
        )

    def append(self, slot: int, start: int, tokens: Seq[int], num_accepted: int) -> None:
        """Appends tokens decided on the host, from position `start` on."""
        self._write(slot, start, tokens)
        self.num_accepted[slot].fill_(num_accepted)
        if self.sampling.counts is not None:
            new = to_device(np.array(tokens, dtype=np.int32), self.device)
            self.sampling.count(torch.full_like(new, slot), new, torch.ones_like(new, dtype=torch.bool))

    def set_drafts(self, slots: Seq[int], drafts: Seq[Seq[int]]) -> None:
        """Uploads drafts made on the host."""
        self._set_rows(self.drafts, slots, drafts)

    def set_parents(self, slots: Seq[int], parents: Seq[Seq[int]]) -> None:
        """Uploads the parents of drafts that are trees."""
        assert self.tree is not None
        self._set_rows(self.tree.parents, slots, parents)

    def _set_rows(self, columns: torch.Tensor, slots: Seq[int], values: Seq[Seq[int]]) -> None:
        rows = np.zeros((len(slots), columns.shape[1]), dtype=np.int32)
        for row, own in zip(rows, values, strict=True):
            row[: len(own)] = own
        columns[to_device(np.array(slots), self.device)] = to_device(rows, self.device)

    def set_prepared(self, slots: Seq[int], drafts: Seq[Seq[int]], confidence: Seq[Seq[float]]) -> None:
        """Uploads drafts that were looked up on the host."""
        self.set_drafts(slots, drafts)
        rows = np.zeros((len(slots), self.confidence.shape[1]), dtype=np.float32)
        for row, values in zip(rows, confidence, strict=True):
            row[: len(values)] = values
        index = to_device(np.array(slots), self.device)
        self.confidence[index] = to_device(rows, self.device)
        self.origin[index] = int(Origin.HIT)

    def _write(self, slot: int, start: int, tokens: Seq[int]) -> None:
        row = to_device(np.array([len(tokens) + start, *tokens], dtype=np.int32), self.device)
        self.token_ids[slot, start : start + len(tokens)].copy_(row[1:])
        self.length[slot].copy_(row[0])

    def _zeros(self, *shape: int) -> torch.Tensor:
        return torch.zeros(shape, dtype=torch.int32, device=self.device)


class DeviceBlockTables:
    """The block tables of one model on its device, one for each group of layers; only new blocks are uploaded.

    Column 0 is the number of blocks of a slot: KV beyond them is not written. A block that is freed behind a window
    stays in its column, where nothing reads it.
    """

    def __init__(self, num_slots: int, max_blocks: int, device: torch.device, groups: int = 1) -> None:
        self._all = torch.zeros((groups, num_slots + 1, 1 + max_blocks), dtype=torch.int32, device=device)
        self.groups = list(self._all)
        self.tensor = self.groups[0]  # of the layers that see the whole context, if there are any
        self._known = [0] * (num_slots + 1)  # number of blocks uploaded for each group, by slot
        self.on_write: Callable[[Seq[int], Seq[int]], None] | None = None  # tells the other ranks

    def part(self, first: int, num_slots: int) -> DeviceBlockTables:
        """The tables of some of the slots, and padding behind them, for the sequences of another state."""
        made = copy.copy(self)
        made._all = self._all[:, first : first + num_slots + 1]
        made.groups = list(made._all)
        made.tensor, made._known = made.groups[0], [0] * (num_slots + 1)
        return made

    def reset(self, slot: int) -> None:
        """Called when a slot gets another sequence."""
        self._known[slot] = 0

    def update(self, tables: Seq[tuple[int, list[int]]]) -> None:
        """Uploads the blocks (`BlockTable.blocks`) that sequences were given since the last call."""
        groups, (rows, columns), places, values = len(self.groups), self.tensor.shape, list[int](), list[int]()
        for slot, blocks in tables:
            known, count = self._known[slot], len(blocks) // groups
            if count == known:
                continue
            for group in range(groups):
                first = (group * rows + slot) * columns
                places += [first, *range(first + 1 + known, first + 1 + count)]
                values += [count, *(max(0, block) for block in blocks[known * groups + group :: groups])]  # 0 for NULL
            self._known[slot] = count
        if places:
            if self.on_write is not None:
                self.on_write(places, values)
            self.write(places, values)

    def write(self, places: Seq[int], values: Seq[int]) -> None:
        """Uploads entries; `places`: their numbers in the flattened tables."""
        both = to_device(np.array([places, values]), self.tensor.device)
        self._all.view(-1).index_copy_(0, both[0], both[1].int())
