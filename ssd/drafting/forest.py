"""SSD over draft trees: the next tree is prepared for each likely outcome of the verification of a tree.

An outcome is a node of the tree, or none of them, and a token that the target adds behind it: one that is no child of
that node in the tree, or it would have been accepted. The draft model reads the tree and takes the likeliest outcomes
by scores such as those that rank nodes (`ssd.drafting.tree`): that of the node, plus that of the token among all that
may follow it. They are the roots of a forest, of which each later level has as many beams as there are roots: the best
ones of the whole level. So a likely outcome has a larger tree, and an unlikely one perhaps the children of its root
alone.

A row of the forest sees its sequence, the node's path, then its own: together the path of a node (`TreePaths`). Its KV
is where it was written: nodes, and rows of each level, have slots outside of the blocks. So what was accepted has no KV
in the blocks. It is read by the next run, as after a tree that the target has waited for.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable
from collections.abc import Sequence as Seq
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch

from ssd.core import Origin, SamplingParams
from ssd.drafting.fan_out import RANKS, FanOut
from ssd.drafting.runner import DraftRun, DraftRunner, StagedBranches
from ssd.drafting.shapes import RunShape, RunShapes
from ssd.drafting.tree import MOST_BEAMS, SHARPNESS, beams_of
from ssd.execution.clock import now
from ssd.execution.host_copy import HostCopy
from ssd.execution.runner import ModelRunner
from ssd.kernels.device import kernels
from ssd.kernels.ops import DeviceBatch, TreePaths
from ssd.kernels.state import Candidates
from ssd.kernels.triton.compile import compiling
from ssd.sampling.sampler import ALL_NEEDS, Needs, Rows


class _Rows(NamedTuple):
    """The tensors of a forward pass, at fixed addresses: int32."""

    tokens: torch.Tensor
    positions: torch.Tensor
    slot_mapping: torch.Tensor
    decided: torch.Tensor
    paths: torch.Tensor
    query_start: torch.Tensor
    tiles: torch.Tensor

    def fill(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        slots: torch.Tensor,
        decided: torch.Tensor,
        paths: torch.Tensor,
    ) -> None:
        for place, each in zip(self[:4], (tokens, positions, slots, decided.expand_as(tokens)), strict=True):
            place.copy_(each.flatten())
        self.paths.copy_(paths.flatten(0, 1))


class _Outcomes(NamedTuple):
    """Of each row of the forest's first level."""

    tokens: torch.Tensor  # the target's own; -1: there is no outcome
    after: torch.Tensor  # accepted nodes
    node: torch.Tensor  # the last of them; -1: none is accepted


class _Read(NamedTuple):
    """The nodes of the trees that are read, behind the last decided token: int64 [sequences, 1 + nodes]."""

    there: torch.Tensor  # bool
    depth: torch.Tensor
    paths: torch.Tensor  # [sequences, 1 + nodes, columns]: rows of the run, `depth` of them
    parents: torch.Tensor  # of the nodes: [sequences, nodes]; -1: none is before it, -2: it is not there


class ForestRunner(DraftRunner):
    """A DraftRunner that prepares trees, too: `stage_forest`, `grow`, `look_up_trees`.

    A run's rows have numbers, by which paths name them: `lookahead` of each row of the forest, one of each level, then
    those of the nodes that are read.
    """

    def __init__(self, model_runner: ModelRunner, shapes: RunShapes, **options: Any) -> None:
        super().__init__(model_runner, shapes, **options)
        self._children = beams_of(shapes.nodes)
        n, rows, nodes, levels = shapes.max_sequences, shapes.max_rows, shapes.nodes, shapes.lookahead
        self._levels, self._first_node = levels, rows * levels
        self._place = torch.arange(nodes, device=self.device)
        self._sequences = torch.arange(n, device=self.device)[:, None]
        self._slots = torch.arange(rows * levels + n * nodes, dtype=torch.int32, device=self.device)
        self._slots += self.buffers.first_slot
        self._nodes, self._parents = self._ints(n, nodes), self._ints(n, nodes)
        self._computed = torch.zeros_like(self.buffers.computed)
        # Results of the last run: its outcomes, the likeliest first, all candidates of its trees, and their outcomes.
        self._outcomes = _Outcomes(self._ints(rows), self._ints(rows), self._ints(rows))
        most = rows * self._children * levels
        scores = torch.zeros(most, dtype=torch.float32, device=self.device)
        self._candidates = Candidates(self._ints(most), scores, self._ints(most))
        self._roots = self._ints(most)
        self._passes: dict[tuple[int, int, int], _Rows] = {}

    # --- running ------------------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def stage_forest(
        self,
        slots: Seq[int],
        drafted: Seq[int],
        params: Seq[SamplingParams],
        *,
        budget: int,
        fan_out: FanOut,
    ) -> StagedBranches:
        """Inputs of `grow`, as `stage_branches`."""
        reads = self.shapes.reads
        shape = self.shapes.of(len(slots), reads, params, fan_out, budget)._replace(fan_out=None)
        self._upload(slots, drafted, shape)
        staged = StagedBranches(list(slots), shape, now(self.device))
        self.restage_forest(staged)
        return staged

    @torch.inference_mode()
    def restage_forest(self, staged: StagedBranches) -> None:
        """Copies them out of the SequenceState, once more if drafts have changed."""
        n = staged.shape.sequences
        self.graphs.launch(("stage forest", n), lambda: self._stage_forest(n))
        staged.at = now(self.device)

    @torch.inference_mode()
    def grow(self, staged: StagedBranches, levels: int, *, overlap: bool = False) -> DraftRun:
        """Prepares trees of so many levels; `overlap`: see `branch`."""
        shape, n = staged.shape, staged.shape.sequences
        slots = self.buffers.inputs(branches=True).slots(n).long()
        self.buffers.computed[slots] = self._computed[slots]
        with self.beside(staged.at) if overlap else nullcontext():
            began = now(self.device)
            self.graphs.launch(*self._forest_piece(shape, levels))
            tokens, after = (each[: shape.rows].view(-1, shape.width) for each in self._outcomes[:2])
            results = HostCopy(tokens.reshape(-1, 1), after)
            return DraftRun(list(staged.slots), shape.width, levels, began, results)

    @torch.inference_mode()
    def look_up_trees(self, run: DraftRun) -> None:
        """Makes the trees that were prepared for the last verification's outcomes the sequences' drafts, see
        `look_up`; a sibling is another token behind the same node."""
        self.join()
        n, width, levels = self.shapes.bucket(len(run.slots)), run.width, run.depth
        self.graphs.launch(("look up trees", n, width, levels), lambda: self._look_up_trees(n, width, levels))
        self._origins = HostCopy(self.state.origin)

    def trees_of(self, run: DraftRun, place: int) -> list[tuple[int, ...]]:
        """By outcome, the tokens of the tree that the last run has prepared for a sequence, those of the best nodes
        first. Waits for the device."""
        run.ended.wait()
        n, trees = self.shapes.bucket(len(run.slots)), [list[tuple[float, int]]() for _ in range(run.width)]
        found = (each[place].tolist() for each in self._results(n, run.width, run.depth))
        for token, score, _, root in zip(*found, strict=True):
            if score > -torch.inf:
                trees[root].append((-score, token))
        return [tuple(token for _, token in sorted(tree)[: self.shapes.nodes]) for tree in trees]

    @torch.inference_mode()
    def rehearse(self, sequences: Seq[int], fan_out: FanOut) -> None:
        super().rehearse(sequences, fan_out)
        with self.decoder.distinct_layers(), self.state.sampling.tables():
            for shape in self._forest_shapes(sequences, fan_out):
                self._upload([self.state.padding] * shape.sequences, [0] * shape.sequences, shape)
                self._stage_forest(shape.sequences)
                for needs in ALL_NEEDS if compiling() else [Needs()]:
                    self._grow_forest(shape._replace(needs=needs), 1)
                self._look_up_trees(shape.sequences, shape.width, 1)

    @torch.inference_mode()
    def capture(self, sequences: Seq[int], fan_out: FanOut) -> None:
        super().capture(sequences, fan_out)
        for shape in self._forest_shapes(sequences, fan_out):
            self.graphs.capture(*self._forest_piece(shape, self._levels))

    def _forest_shapes(self, sequences: Seq[int], fan_out: FanOut) -> list[RunShape]:
        usual = self.shapes.usual(sequences, fan_out)
        return [each._replace(fan_out=None) for each in usual if each.branches and each.reads == self.shapes.reads]

    # --- a run --------------------------------------------------------------------------------------------------------

    def _ints(self, *shape: int) -> torch.Tensor:
        return torch.zeros(shape, dtype=torch.int32, device=self.device)

    def _stage_forest(self, n: int) -> None:
        """Copies the inputs of a run for n sequences out of the SequenceState."""
        state, buffers = self.state, self.buffers
        assert state.tree is not None
        self._computed.copy_(buffers.computed)  # which changes when the run is launched: drafts may be written before
        buffers.stage(n, branches=True, decided_after=self._computed)
        slots = buffers.inputs(branches=True).slots(n).long()
        self._nodes[:n].copy_(state.drafts[slots])
        self._parents[:n].copy_(state.tree.parents[slots])

    def _forest_piece(self, shape: RunShape, levels: int) -> tuple[Hashable, Callable[[], None]]:
        """The key of a run, and what it launches."""
        self.buffers.indices(shape)  # before a capture, see `_piece`
        for level in range(-1, levels):
            self._pass(shape, level)
        return ("forest", shape, levels), functools.partial(self._grow_forest, shape, levels)

    def _grow_forest(self, shape: RunShape, levels: int) -> None:
        with torch.inference_mode():
            n, width, inputs = shape.sequences, shape.width, self.buffers.inputs(branches=True)
            length = inputs.first[:n, None] + inputs.count[:n, None].clamp(max=shape.reads)
            read = self._structure(n, length)
            logits = self._read_trees(shape, read, length)
            slots = _each_times(inputs.slots(n)[:, None], read.depth.shape[1]).flatten()
            node, tokens, scores = self._likeliest(logits, Rows(slots, _positions(length, read.depth)), shape, read)
            depth, paths = read.depth.gather(1, node), _of_rows(read.paths, node)
            self._keep_outcomes(node - 1, depth, tokens, scores)
            row = self._sequences[:n] * width + torch.arange(width, device=self.device)
            slots = _each_times(inputs.slots(n)[:, None], width).flatten()
            root, chosen = row - self._sequences[:n] * width, torch.full_like(row, -1)
            found: list[tuple[torch.Tensor, ...]] = []  # of each level: tokens, scores, above, outcomes
            for level in range(levels):
                own, fixed = row * self._levels + level, self._pass(shape, level)
                paths, depth = paths.scatter(2, depth[:, :, None], own[:, :, None]), depth + 1
                fixed.fill(self._known(tokens), length - 1 + depth, self._slots[own], length, paths)
                logits, rows = self._forward_paths(shape, fixed, None), Rows(slots, _positions(length, depth))
                tokens, own_scores = self._ranked(logits, rows, shape.needs, MOST_BEAMS)
                tokens = tokens[:, : self._children].reshape(n, -1)
                scores = (own_scores[:, : self._children].view(n, width, -1) + scores[:, :, None]).flatten(1)
                found.append((tokens, scores, *(_each_times(each, self._children) for each in (chosen, root))))
                scores, best = scores.topk(width, dim=1)
                tokens, above = tokens.gather(1, best), best // self._children
                chosen = best + level * width * self._children
                root, depth, paths = root.gather(1, above), depth.gather(1, above), _of_rows(paths, above)
            together = (torch.cat(parts, 1) for parts in zip(*found, strict=True))
            for kept, each in zip(self._results(n, width, levels), together, strict=True):
                kept.copy_(each)

    def _structure(self, n: int, length: torch.Tensor) -> _Read:
        """Where the nodes are in their trees. What is no node of a tree is a path of its own, of which nothing is
        used."""
        place, drafted = self._place, self.buffers.inputs(branches=True).drafted(n)[:, None]
        parents = self._parents[:n].long()
        whole = there = (place < drafted) & (parents >= -1) & (parents < place)
        parents = torch.where(there, parents, -1)
        climbed = [place.expand_as(parents)]
        for _ in range(self._levels):
            above = climbed[-1].clamp(min=0)
            there = there & ((climbed[-1] < 0) | whole.gather(1, above))
            climbed.append(torch.where(climbed[-1] < 0, -1, parents.gather(1, above)))
        there = there & (climbed.pop() < 0)
        nodes = torch.stack(climbed, 2)
        depth = (nodes >= 0).sum(2)
        column = torch.arange(self._levels, device=self.device)
        paths = nodes.gather(2, (depth[:, :, None] - 1 - column).clamp(min=0))
        paths += self._first_node + self._sequences[:n, :, None] * len(place)
        pad = torch.nn.functional.pad
        return _Read(
            there=pad(there, (1, 0), value=True),
            depth=pad(depth, (1, 0)),
            paths=pad(paths, (0, self._levels, 1, 0)),
            parents=torch.where(there, parents, -2),
        )

    def _read_trees(self, shape: RunShape, read: _Read, length: torch.Tensor) -> torch.Tensor:
        """Reads what was decided and the trees; logits after the last decided token of each sequence and its nodes."""
        n, reads, nodes, fixed = shape.sequences, shape.reads, len(self._place), self._pass(shape, -1)
        inputs, pad = self.buffers.inputs(branches=True), torch.nn.functional.pad
        reading = self.buffers.read_rows(shape, self._tables(shape))
        tokens, positions, slots = (each.view(n, reads) for each in reading[:3])
        own = self._first_node + self._sequences[:n] * nodes + self._place
        fixed.fill(
            torch.cat((tokens, self._known(self._nodes[:n])), 1),
            torch.cat((torch.minimum(positions, length - 1), (length - 1 + read.depth)[:, 1:]), 1),
            torch.cat((slots, self._slots[own]), 1),
            length,
            pad(read.paths[:, 1:], (0, 0, reads, 0)),
        )
        last = inputs.count[:n, None].long().clamp(max=reads) - 1
        rows = torch.cat((last, (reads + self._place).expand(n, -1)), 1) + self._sequences[:n] * (reads + nodes)
        return self._forward_paths(shape, fixed, rows.flatten())

    def _likeliest(
        self, logits: torch.Tensor, rows: Rows, shape: RunShape, read: _Read
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The likeliest outcomes: their nodes (0: none, i + 1: node i), tokens and scores, each [sequences, width]."""
        n, nodes = shape.sequences, len(self._place)
        ranked = self._ranked(logits, rows, shape.needs, RANKS)
        tokens, scores = (each.view(n, 1 + nodes, RANKS) for each in ranked)
        child = read.parents[:, None, :] == torch.arange(-1, nodes, device=self.device)[:, None]
        accepted = ((tokens[..., None] == self._nodes[:n, None, None, :]) & child[:, :, None, :]).any(-1)
        scores_of = (scores + self._reached(tokens, scores, read)[:, :, None]).masked_fill(accepted, -torch.inf)
        best, chosen = scores_of.flatten(1).topk(shape.width, dim=1)
        return chosen // RANKS, tokens.flatten(1).gather(1, chosen), best

    def _reached(self, tokens: torch.Tensor, scores: torch.Tensor, read: _Read) -> torch.Tensor:
        """The score of each row's node: the sum over its path. A token that is not among the best ones of the row
        before it has the score of the last of them."""
        n, above = len(tokens), (read.parents + 1).clamp(min=0)
        same = _of_rows(tokens, above) == self._nodes[:n, :, None]
        before = _of_rows(scores, above)
        own = torch.where(same, before, before[:, :, -1:]).amax(2)
        path = read.paths[:, 1:, : self._levels] - self._first_node - self._sequences[:n, :, None] * len(self._place)
        along = own.gather(1, path.flatten(1)).view(path.shape)
        column = torch.arange(self._levels, device=self.device)
        reached = along.masked_fill(column >= read.depth[:, 1:, None], 0.0).sum(2)
        return torch.nn.functional.pad(reached, (1, 0)).masked_fill(~read.there, -torch.inf)

    def _ranked(self, logits: torch.Tensor, rows: Rows, needs: Needs, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The best tokens that may follow each row, int32, and the logarithms of a softmax of their scores."""
        tokens, scores = self.choice.best(logits, rows, needs, count)
        greedy = self.choice.sampler.columns.temperature[rows.slots.clamp(min=0)] == 0
        scores = (scores * torch.where(greedy, SHARPNESS, 1.0)[:, None]).log_softmax(-1)
        # Rows of padding, and those of kernels that are only compiled, may have anything.
        return tokens.clamp(min=0, max=self.state.vocab_size - 1), torch.where(scores.isnan(), -torch.inf, scores)

    def _keep_outcomes(
        self, node: torch.Tensor, depth: torch.Tensor, tokens: torch.Tensor, scores: torch.Tensor
    ) -> None:
        """Stores the outcomes; there is none where the score is -inf."""
        real = scores > -torch.inf
        found = torch.where(real, tokens, -1), depth, torch.where(real, node, -2)
        for kept, each in zip(self._outcomes, found, strict=True):
            kept[: each.numel()].copy_(each.flatten())

    def _known(self, tokens: torch.Tensor) -> torch.Tensor:
        """Tokens that the draft model does not have become its last one."""
        return tokens.clamp(min=0, max=self.model_runner.vocab_size - 1)

    def _forward_paths(self, shape: RunShape, fixed: _Rows, logit_rows: torch.Tensor | None) -> torch.Tensor:
        tables = self._tables(shape)
        batch = DeviceBatch(
            token_ids=fixed.tokens,
            positions=fixed.positions,
            slot_mapping=fixed.slot_mapping,
            query_start=fixed.query_start,
            context_len=fixed.positions,  # not used
            logit_rows=logit_rows,
            tiles=fixed.tiles,
            prefill_tiles=None,
            tree=TreePaths(fixed.paths, fixed.decided, self._slots),
            block_tables=tables.blocks[:, 1:],
            table_rows=tables.rows,
        )
        return self._forward(shape, batch)

    def _pass(self, shape: RunShape, depth: int) -> _Rows:
        """Of the reading (-1), or of a level."""
        n, queries = shape.sequences, shape.width if depth >= 0 else shape.reads + len(self._place)
        key = n, queries, depth
        if key not in self._passes:
            tokens, positions, slots, decided = (self._ints(n * queries) for _ in range(4))
            start = torch.arange(n + 1, dtype=torch.int32, device=self.device) * queries
            paths = self._ints(n * queries, 2 * self._levels)
            self._passes[key] = _Rows(tokens, positions, slots, decided, paths, start, self.buffers.tiles(n, queries))
        return self._passes[key]

    def _look_up_trees(self, n: int, width: int, levels: int) -> None:
        state, slots = self.state, self.buffers.inputs(branches=True).slots(n).long()
        assert state.tree is not None
        outcome, _, behind = (each[: n * width].view(n, width) for each in self._outcomes)
        last = (state.num_accepted[slots].long() - 1)[:, None]
        node = torch.where(last < 0, -1, state.tree.path[slots].gather(1, last.clamp(min=0)))
        same = behind == node
        exact = same & (outcome == state.token_ids[slots, (state.length[slots] - 1).long()][:, None])
        hit = exact.any(1, keepdim=True)
        found = torch.where(hit, exact, same)
        root = found.int().argmax(1, keepdim=True)  # the first one: the likeliest
        tokens, scores, above, roots = self._results(n, width, levels)
        own = (roots == root) & found.any(1, keepdim=True)
        candidates = Candidates(tokens, torch.where(own, scores, -torch.inf), above)
        kernels(self.device).trees.keep(
            candidates, slots, state.tree.parents, state.drafts, state.origin, origin=Origin.SIBLING
        )
        state.origin.index_copy_(0, slots, torch.where(hit[:, 0], int(Origin.HIT), int(Origin.SIBLING)).int())

    def _results(self, n: int, width: int, levels: int) -> tuple[torch.Tensor, ...]:
        """Of all candidates: tokens, scores, the candidate that each is behind, and the outcome: [sequences, …]."""
        count = n * width * self._children * levels
        return tuple(each[:count].view(n, -1) for each in (*self._candidates, self._roots))


def _positions(length: torch.Tensor, depth: torch.Tensor) -> torch.Tensor:
    """The position that each row decides."""
    return (length + depth).flatten().int()


def _of_rows(values: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """values[i, rows[i, j]]: [sequences, rows, columns]."""
    return values.gather(1, rows[:, :, None].expand(-1, -1, values.shape[2]))


def _each_times(values: torch.Tensor, count: int) -> torch.Tensor:
    """Each of the values [rows, columns] so many times, one after the other: [rows, columns * count]."""
    return values.repeat_interleave(count, dim=1)
