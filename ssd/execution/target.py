"""The target model: verifies drafts, samples and accepts, all on the device.

A verification is `stage` → `forward` → `decide`, which do not wait for the device; `Verification.collect` does, and
returns one outcome per work.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch

from ssd.core import Origin, Outcome, PromptPart, Sequence, TokenLogprobs, Work
from ssd.errors import ConfigError
from ssd.execution.batch import Batch, BatchInputs
from ssd.execution.clock import Clock, now
from ssd.execution.graphs import BatchGraph, capture
from ssd.execution.host_copy import HostCopy
from ssd.execution.prompts import PromptReads
from ssd.execution.runner import Forward, Keep, ModelRunner, Staged
from ssd.execution.state import SequenceState
from ssd.execution.tree import DraftTree
from ssd.kernels.cpu import recording
from ssd.kernels.transfers import to_device
from ssd.kernels.triton.compile import compiling
from ssd.sampling.pinned import PinnedAcceptance
from ssd.sampling.sampler import ALL_NEEDS, Needs, Sampler, top_logprobs


@dataclass(frozen=True)
class StagedWorks:
    """Works whose batch was uploaded."""

    works: Seq[Work]
    batch: Staged
    reads: PromptReads | None  # what is read of prompts


@dataclass(frozen=True)
class WorkLogits:
    """The logits of works, whose forward pass was launched."""

    works: Seq[Work]
    forward: Forward
    on_host: HostLogits | None  # those that are processed on the host
    reads: PromptReads | None
    began: Clock


class Verification(Protocol):
    """A verification that was launched."""

    @property
    def began(self) -> Clock:
        """When the forward pass began."""

    @property
    def ended(self) -> Clock:
        """When the outcomes are on the host."""

    def collect(self) -> list[Outcome | None]:
        """Waits for the outcomes; None for a work that decides nothing (a prefill chunk)."""

    def prompt_parts(self) -> Mapping[int, PromptPart]:
        """What was read of prompts, by index of the work; after `collect`."""


class Target:
    """Verifies by the coupled rule: draft tokens are accepted as long as they equal the token the target samples.

    That token is a function of the tokens before it, the request's parameters and its seed, so the output is the same
    as without drafts.
    """

    synchronous = False

    def __init__(self, runner: ModelRunner, state: SequenceState) -> None:
        self.runner = runner
        self.state = state
        self.sampler = Sampler(state.sampling)
        self.vocab_size = runner.vocab_size
        self._width = 3 + (2 if state.tree is None else 3) * state.drafts.shape[1]
        self._pinned: PinnedAcceptance | None = None
        self._pool: Any = None  # memory shared by the graphs of decisions
        self._decisions: dict[tuple[int, Needs], tuple[torch.cuda.CUDAGraph, torch.Tensor]] = {}

    @torch.inference_mode()
    def rehearse(self) -> None:
        """Decisions on padding, of all sizes that have kernels of their own."""
        inputs = [inputs for graphs in self.runner.all_graphs() for inputs in graphs.inputs.values()]
        tiles, device = self.runner.tile_sizes(), self.state.device
        for n, depth in itertools.product((1, self.runner.max_decode_rows), {0, self.runner.tree_depth}):  # no graphs
            inputs.append(BatchInputs(n, n, works=n, tiles=tiles, gather=True, device=device, tree_depth=depth))
        with self.state.sampling.tables():
            for each in inputs:
                logits = torch.zeros((each.logits, self.vocab_size), dtype=torch.float32, device=self.state.device)
                for needs in ALL_NEEDS if compiling() else [Needs()]:
                    self._rehearse(Forward(each, logits), needs)
            words = torch.zeros((1, -(-self.vocab_size // 32)), dtype=torch.int32, device=self.state.device)
            self.sampler.mask(logits, torch.zeros(1, dtype=torch.int64, device=self.state.device), words)

    def _rehearse(self, forward: Forward, needs: Needs) -> None:
        self._compute(forward, needs)

    def capture(self) -> None:
        """Captures the graphs of the usual decisions, so that no request waits for them."""
        for graphs in self.runner.all_graphs():
            for rows in graphs.buckets:
                found = graphs.of(rows)
                found.inputs.clear()
                for needs in (Needs(), Needs(truncated=True)):
                    self._capture(Forward(found.inputs, found.logits, found), needs)

    def pin(self, rates: Seq[float]) -> None:
        """Draws from now on how many draft tokens are accepted, see `PinnedAcceptance`; while no round is in flight."""
        state = self.state
        if state.tree is not None:
            raise ConfigError("acceptance is drawn for chains only: leave trees out")
        if self._pinned is None:
            empty = torch.zeros(state.drafts.shape[1], dtype=torch.float32, device=state.device)
            self._pinned = PinnedAcceptance(empty, self.vocab_size)
            self._decisions.clear()  # captured without it
            self._pool = None  # which ends with its last graph
        given = torch.zeros(len(self._pinned.rates))
        given[: len(rates)] = torch.tensor(rates[: len(given)])
        self._pinned.rates.copy_(given)

    def probe(self) -> None:
        """A forward pass of padding, which raises if the device cannot compute."""
        self.runner.forward(Batch([self.state.padding], [0], [1], [1]))
        self.runner.wait(now(self.state.device))

    @property
    def failure(self) -> str | None:
        """Why it can compute no longer, if another rank was lost."""
        return self.runner.followers.failure if self.runner.followers is not None else None

    def close(self) -> None:
        """Ends the other ranks."""
        self.runner.close()

    def admit(self, sequence: Sequence) -> None:
        """Writes a sequence, which has just got a slot, to the SequenceState."""
        self.state.admit(sequence.slot, sequence)
        self.runner.tables.reset(sequence.slot)
        if self.runner.features is not None:
            self.runner.features.admit(sequence.slot, sequence.kv.num_computed)

    def stage(self, works: Seq[Work]) -> StagedWorks:
        """Uploads what the host knows of a round; drafts in the SequenceState may change until `forward`."""
        reads = PromptReads.of(works, self.state)
        upload_drafts(self.state, works)
        self.runner.tables.update([(work.slot, work.sequence.kv.blocks) for work in works])
        return StagedWorks(works, self.runner.stage(Batch.of(works), reads.keep if reads else Keep.NOTHING), reads)

    def forward(self, staged: StagedWorks, *, in_part: bool = False) -> WorkLogits:
        """Launches the forward pass; `in_part`: in the target's part of the GPU, if there is a graph for that."""
        reads, on_host = staged.reads, HostLogits.of(staged.works, self.state)
        began = now(self.state.device)
        forward = self.runner.run(staged.batch, in_part=in_part, read=reads.read_logits if reads else None)
        if reads is not None and forward.states is not None:
            reads.read_states(forward.states)
        return WorkLogits(staged.works, forward, on_host, reads, began)

    def decide(self, logits: WorkLogits) -> Verification:
        """Launches sampling and acceptance."""
        works, raw = logits.works, self._process(logits)
        out = self._accept(logits.forward, Needs.of([work.sequence.params for work in works if work.decides]))
        logprobs = None
        if raw is not None:
            tokens = torch.cat([out[i, 2 : 2 + len(rows)] for i, rows in raw.rows.items()])
            logprobs = raw.fetch(tokens, None if self.state.tree is None else self._chosen_rows(raw, out))
        width = self.state.drafts.shape[1]
        return _Launched(self.runner, works, HostCopy(out), width, logprobs, logits.reads, logits.began)

    def _chosen_rows(self, raw: RawLogits, out: torch.Tensor) -> torch.Tensor:
        """Of each work in turn: the rows of its raw logits in the order in which its tokens were chosen."""
        nodes = out[:, 3 + 2 * self.state.drafts.shape[1] :].long()
        found = [
            torch.nn.functional.pad(nodes[i, : len(rows) - 1] + 1, (1, 0)).clamp(max=len(rows) - 1) + rows.start
            for i, rows in raw.rows.items()
        ]
        return torch.cat(found)

    def _process(self, logits: WorkLogits) -> RawLogits | None:
        """Processes and masks logits; returns those before that, where they are needed.

        Masks are computed on the host, while the device computes the logits.
        """
        works, forward = logits.works, logits.forward
        raw = RawLogits.of(works, forward)
        if logits.on_host is not None:
            starts = first_logit_rows(works, gather=forward.inputs.gather)
            logits.on_host.apply(forward.logits, starts, self.sampler)
        return raw

    def _accept(self, forward: Forward, needs: Needs) -> torch.Tensor:
        """Samples and accepts, after the first times as a graph, or a recording: one row per work, see
        `kernels.rounds.accept`."""
        if forward.graph is None:
            recordings, inputs = self.runner.decoder.recordings, forward.inputs
            if recordings is None or self._pinned is not None:
                return self._compute(forward, needs)
            where = "decision", id(inputs), forward.logits.data_ptr(), needs
            return recordings.run(where, lambda: self._compute(forward, needs), (self, inputs))
        key = id(forward.graph), needs
        if key not in self._decisions:
            out = self._compute(forward, needs)  # eagerly the first time
            self._capture(forward, needs)
            return out
        graph, out = self._decisions[key]
        graph.replay()
        return out

    def _capture(self, forward: Forward, needs: Needs) -> None:
        graph, _ = found = capture(lambda: self._compute(forward, needs), self._pool)
        self._decisions[id(forward.graph), needs] = found
        self._pool = graph.pool()

    def replay_decision(self, graph: BatchGraph, needs: Needs) -> None:
        """Repeats the decision of a graph's last forward pass: for timing it, when no sequence is running."""
        self._accept(Forward(graph.inputs, graph.logits, graph), needs)

    def _compute(self, forward: Forward, needs: Needs) -> torch.Tensor:
        inputs, state = forward.inputs, self.state
        shape = inputs.works, self._width
        if not len(forward.logits) or state.device.type != "cpu":
            out = torch.zeros(shape, dtype=torch.int32, device=state.device)
        else:  # `accept` writes all of it
            out = recording.empty(shape, torch.int32)
        if not len(forward.logits):
            return out
        rows = inputs.decided(state)
        chosen = self.sampler.choose(forward.logits, rows, needs)
        if self._pinned is not None:
            chosen = self._pinned.choices(chosen, rows)
        inputs.accept(chosen, state, out)
        if inputs.tree is not None:
            self.runner.move_accepted(inputs)
        if needs.adjusted:
            width = state.drafts.shape[1] + 1
            slots, new = inputs["slots"].repeat_interleave(width), out[:, 2 : 2 + width]
            valid = torch.arange(width, device=state.device) < out[:, :1]
            state.sampling.count(slots, new.flatten(), valid.flatten())
        return out


@dataclass(frozen=True)
class HostLogits:
    """The works of a round whose logits are masked or processed on the host, and their drafts."""

    works: dict[int, Work]  # by index in the round
    fetched: HostCopy  # their drafts in the SequenceState, and the parents of trees

    @classmethod
    def of(cls, works: Seq[Work], state: SequenceState) -> HostLogits | None:
        """Copies drafts that only the device knows. Called before the forward pass is launched, so as not to wait for
        it."""
        found = {i: work for i, work in enumerate(works) if work.decides and work.sequence.has_host_logits}
        if not found:
            return None
        slots = to_device(np.array([work.slot for work in found.values()]), state.device)
        tree = state.tree if Batch.of(works).trees else None
        return cls(found, HostCopy(state.drafts[slots], *([] if tree is None else [tree.parents[slots]])))

    def apply(self, logits: torch.Tensor, starts: Seq[int], sampler: Sampler) -> None:
        """Changes their logits in place, first by the processors; `starts`: the first logit row of every work."""
        drafts, *parents = (copied.tolist() for copied in self.fetched.wait())
        rows: list[int] = []
        masks: list[np.ndarray] = []
        for place, (i, work) in enumerate(self.works.items()):
            sequence, count, first = work.sequence, work.proposal.num_tokens, starts[i]
            draft = DraftTree(drafts[place][:count], parents[0][place][:count] if parents else range(-1, count - 1))
            if sequence.constraint is not None:  # while the device computes the logits
                masks.append(draft.masks(sequence.constraint.masks))
                rows += range(first, first + work.num_logits)
            if sequence.processor is not None:
                own = logits[first : first + work.num_logits]
                host = own.to("cpu", copy=True)  # waits for the device
                sequence.processor.process(sequence.tokens, draft.before, host.numpy())
                own.copy_(host)
        if masks:
            device = logits.device
            sampler.mask(logits, to_device(np.array(rows), device), to_device(np.concatenate(masks), device))


@dataclass(frozen=True)
class RawLogits:
    """A copy of the logits of requests with `logprobs`, before penalties and temperature."""

    rows: dict[int, range]  # by index of the work: its rows of `logits`
    logits: torch.Tensor
    counts: dict[int, int]  # by index of the work: `logprobs`

    @classmethod
    def of(cls, works: Seq[Work], forward: Forward) -> RawLogits | None:
        wanted = [i for i, work in enumerate(works) if work.decides and work.sequence.params.logprobs is not None]
        if not wanted:
            return None
        starts = first_logit_rows(works, gather=forward.inputs.gather)
        rows: dict[int, range] = {}
        found: list[int] = []
        total = 0
        for i in wanted:
            found += range(starts[i], starts[i] + works[i].num_logits)
            rows[i] = range(total, total + works[i].num_logits)
            total += works[i].num_logits
        counts = {i: works[i].sequence.params.logprobs or 0 for i in wanted}
        return cls(rows, forward.logits[to_device(np.array(found), forward.logits.device)], counts)

    def fetch(self, tokens: torch.Tensor, order: torch.Tensor | None = None) -> FetchedLogprobs:
        """Log-probabilities of one token per row and of the likeliest ones, being copied to the host; `order`: of the
        rows, if it is not theirs."""
        logits = self.logits if order is None else self.logits[order]
        return FetchedLogprobs(self, HostCopy(*top_logprobs(logits, tokens, max(self.counts.values()))))


@dataclass(frozen=True)
class FetchedLogprobs:
    raw: RawLogits
    values: HostCopy  # logprobs of the tokens, ids of the likeliest, their logprobs

    def of(self, work: int, tokens: Seq[int]) -> tuple[TokenLogprobs, ...]:
        """Those of a work's tokens; none if its request did not ask for them. Waits for them."""
        if work not in self.raw.rows:
            return ()
        rows, count = self.raw.rows[work][: len(tokens)], self.raw.counts[work]
        own, ids, values = (part[rows.start : rows.stop].tolist() for part in self.values.wait())
        return tuple(
            TokenLogprobs(token, value, dict(zip(best[:count], theirs[:count], strict=True)))
            for token, value, best, theirs in zip(tokens, own, ids, values, strict=True)
        )


@dataclass
class _Launched:
    runner: ModelRunner
    works: Seq[Work]
    out: HostCopy
    width: int  # most tokens of a draft
    logprobs: FetchedLogprobs | None
    reads: PromptReads | None
    began: Clock

    @property
    def ended(self) -> Clock:
        return self.out.arrived

    def prompt_parts(self) -> Mapping[int, PromptPart]:
        return {} if self.reads is None else self.reads.parts()

    def collect(self) -> list[Outcome | None]:
        self.runner.wait(self.ended)
        rows = self.out.wait()[0].tolist()
        return [self._outcome(i, work, row) for i, (work, row) in enumerate(zip(self.works, rows, strict=False))]

    def _outcome(self, i: int, work: Work, row: list[int]) -> Outcome | None:
        if not work.decides:
            return None
        count, drafted = row[0], work.proposal.num_tokens
        tokens = tuple(row[2 : 2 + count])
        first, is_tree = 3 + self.width, work.proposal.parents is not None
        nodes = tuple(row[first + self.width :][: count - 1]) if is_tree else ()
        draft = row[first : first + drafted]
        if nodes:
            draft = [*(draft[i] for i in nodes), *(token for i, token in enumerate(draft) if i not in nodes)]
        origin = Origin(row[1]) if work.proposal.num_on_device else work.proposal.origin
        details = self.logprobs.of(i, tokens) if self.logprobs is not None else ()
        return Outcome(tokens, details, tuple(draft), origin, nodes)


def upload_drafts(state: SequenceState, works: Seq[Work]) -> None:
    """Uploads drafts that were made on the host."""
    own = [work for work in works if work.proposal.token_ids]
    if not own:
        return
    slots, drafts = [work.slot for work in own], [work.proposal for work in own]
    state.set_drafts(slots, [draft.token_ids for draft in drafts])
    if state.tree is not None:
        chain = range(-1, state.drafts.shape[1])
        state.set_parents(slots, [chain[: d.num_tokens] if d.parents is None else d.parents for d in drafts])


def first_logit_rows(works: Seq[Work], *, gather: bool) -> list[int]:
    """The first logit row of every work."""
    starts, total = [], 0
    for work in works:
        rows = work.num_logits if gather else work.num_queries
        starts.append(total + rows - work.num_logits)
        total += rows
    return starts
