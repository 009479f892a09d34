"""A draft model with its KV blocks and prefix cache. `ModelDrafter` is speculative decoding (SD).

To *read* tokens is to compute their KV in the draft model. What is kept of a sequence can be dropped at any time and is
rebuilt from its tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from contextlib import nullcontext
from dataclasses import dataclass, field

from ssd.core import Origin, Outcome, Proposal, Sequence, Work
from ssd.decoding.drafter import Drafter, never
from ssd.drafting.runner import DraftRun, DraftRunner
from ssd.execution.batch import Batch
from ssd.kv.blocks import BlockPool, BlockTable

_CATCH_UP_TOKENS = 256  # read in a round of another drafter


@dataclass(eq=False)
class DraftSequence:
    """The draft model's state of a sequence. `kv.num_computed`: committed tokens with KV in the draft model."""

    slot: int
    kv: BlockTable = field(default_factory=BlockTable)
    num_checked: int = 0  # leading tokens known to be in the draft's vocabulary
    last_read: Work | None = None  # the last round at whose launch all tokens decided before it were read
    last_branched: Work | None = None  # the same for the draft under verification: the last round with a preparation


Able = tuple[Work, DraftSequence]  # a work that the draft model can draft for, with its state of the sequence


class DraftSource:
    """What drafters need of a draft model or head: its runs, and whether a work can have them.

    The defaults are for one whose KV is in the target's blocks.
    """

    most_drafted: int | None = None  # tokens of a draft; None: as many as are asked for

    def __init__(self, runner: DraftRunner) -> None:
        self.runner, self.model_runner = runner, runner.model_runner

    def state_of(self, work: Work, works: Seq[Work]) -> DraftSequence | None:
        """Its state of a work's sequence; None: it cannot draft for it now.

        What has its KV in the target's blocks cannot before the feature that a draft begins with is there: for prompts,
        and for the first token of a text.
        """
        if not work.is_decode or work.sequence.least_len < 2:
            return None
        self.model_runner.tables.update([(work.slot, work.sequence.kv.blocks)])
        return DraftSequence(work.slot)

    def slots(self, k: int) -> int:
        """KV slots that a sequence needs for drafts of k tokens on average."""
        return k

    def write(
        self, able: Seq[Able], origin: Origin = Origin.DRAFT, k: int | None = None, levels: int = 0
    ) -> tuple[list[Proposal], DraftRun]:
        """Writes drafts that the target waits for, of up to k tokens; None: as many as there are slots for.

        `levels`: of trees; 0: chains. So are drafts of more sequences than a run can write trees for.
        """
        runner, most = self.runner, max(work.lookahead for work, _ in able)
        reads, works = self.num_unread(able), [work for work, _ in able]
        slots, params = [work.slot for work in works], [work.sequence.params for work in works]
        if levels and runner.writes_trees(len(able)):
            run = runner.write_trees(slots, params, levels, reads, origin)
            return [Proposal(num_on_device=work.lookahead, origin=origin, parents=()) for work in works], run
        count = min(most, k or most, runner.shapes.lookahead, self.most_drafted or most)
        run = runner.write(slots, params, count, reads, origin)
        if not runner.rejection:
            return [Proposal(num_on_device=min(work.lookahead, count), origin=origin) for work in works], run
        proposals = []
        for row, work in enumerate(works):
            tokens = tuple(run.tokens[row][: work.lookahead])
            proposals.append(Proposal(tokens, runner.distributions(row, 0, len(tokens)), origin))
        return proposals, run

    def num_unread(self, able: Seq[Able]) -> int:
        """Upper bound of the tokens that a run has to read of each of these sequences."""
        return 1

    def branching(self, able: Seq[Able]) -> list[Work]:
        """The works for which branches can be prepared while they are verified."""
        return [work for work, _ in able]

    def mark_read(self, work: Work, *, branched: bool) -> None:
        """Records that the round of this work reads all tokens decided before it; `branched`: and its draft."""

    def read_prompts(self, able: Seq[Able]) -> None:
        """Reads the tokens of prefill chunks, except for a sequence's last one."""

    def catch_up(self, works: Seq[Work]) -> bool:
        """Reads a chunk of what it has not read of these sequences; False: there is more."""
        return True

    def observe(self, work: Work, outcome: Outcome | None, branched: bool) -> None:
        """What a committed round decided."""

    def forget(self, sequence: Sequence) -> None:
        """Drops all state of a sequence."""


class DraftModel(DraftSource):
    """Runs a draft model for works, and does its KV bookkeeping."""

    def __init__(
        self,
        runner: DraftRunner,
        *,
        max_len: int,
        max_num_batched_tokens: int,
        prefix_caching: bool = True,
        pool: BlockPool | None = None,
        owner: str = "",
    ) -> None:
        """`pool`: one that several engines share, whose prefixes are shared among those of an `owner`."""
        super().__init__(runner)
        self.max_len = max_len  # positions of the draft model
        self.max_num_batched_tokens = max_num_batched_tokens
        num_blocks, block_size = self.model_runner.num_blocks, self.model_runner.block_size
        self.pool = pool or BlockPool(num_blocks, block_size, prefix_caching=prefix_caching)
        self._owner = owner
        self._computed = runner.buffers.computed
        self._sequences: dict[int, DraftSequence] = {}  # by sequence id, least recently used first

    def state_of(self, work: Work, works: Seq[Work]) -> DraftSequence | None:
        """The draft model's state of a work's sequence, with KV blocks for its tokens and a draft.

        None: the draft model cannot draft for it (out of KV blocks, positions or vocabulary).
        """
        sequence, tables = work.sequence, self.model_runner.tables
        own = self._sequences.pop(sequence.id, None)
        if own is None:
            own = DraftSequence(work.slot, BlockTable(owner=self._owner))
            self.pool.attach_prefix(own.kv, sequence.tokens)
            tables.reset(work.slot)
            self._computed[work.slot].fill_(own.kv.num_computed)
        self._sequences[sequence.id] = own
        length = sequence.most_len + work.lookahead
        if not self._in_vocabulary(own, sequence) or length > self.max_len or not self._grow(own, length, works):
            return None
        tables.update([(work.slot, own.kv.blocks)])
        return own

    def num_unread(self, able: Seq[Able]) -> int:
        """Tokens beyond those that a run can read are read now: of a tree, no more than a path are accepted."""
        most, behind, reads = 0, list[Able](), self.runner.shapes.reads
        for work, own in able:
            deciding = undecided(work)
            if deciding is not None and deciding is own.last_read:
                most = max(most, deciding.num_logits)
            else:
                behind.append((work, own))
        self._read([(o, len(w.sequence.tokens) - (0 if undecided(w) else reads)) for w, o in behind])
        return min(reads, max([most, *(work.sequence.most_len - own.kv.num_computed for work, own in behind)]))

    def branching(self, able: Seq[Able]) -> list[Work]:
        """Those whose decided tokens but the last have draft KV, as branches behind chains need it; reads them if they
        are known."""
        found, unread = list[Work](), list[tuple[DraftSequence, int]]()
        for work, own in able:
            deciding = undecided(work)
            if work.proposal.origin not in (Origin.DRAFT, Origin.JIT):
                if deciding is not None and deciding is not own.last_branched:
                    continue
                if deciding is None:
                    unread.append((own, len(work.sequence.tokens) - 1))
            found.append(work)
        self._read(unread)
        return found

    def mark_read(self, work: Work, *, branched: bool) -> None:
        own = self._sequences.get(work.sequence.id)
        if own is not None:
            own.last_read = work
            if branched:
                own.last_branched = work

    def read_prompts(self, able: Seq[Able]) -> None:
        written = Origin.DRAFT  # after all tokens of its sequence
        chunks = [(work, own) for work, own in able if work.num_tokens > 1 and work.proposal.origin is not written]
        self._read([(own, min(work.end, len(work.sequence.tokens) - 1)) for work, own in chunks])

    def catch_up(self, works: Seq[Work]) -> bool:
        left, chunks = _CATCH_UP_TOKENS, list[tuple[DraftSequence, int]]()
        for work in works:
            own = self.state_of(work, works) if work.sequence.params.speculate else None
            unread = len(work.sequence.tokens) - 1 - own.kv.num_computed if own is not None else 0
            if own is not None and unread > 0 and left > 0:
                chunks.append((own, own.kv.num_computed + min(unread, left)))
            left -= max(0, unread)
        self._read(chunks)
        return left >= 0

    def observe(self, work: Work, outcome: Outcome | None, branched: bool) -> None:
        """Updates the KV count after a committed round: tokens it read, rejected ones left out, and those of trees."""
        own, sequence = self._sequences.get(work.sequence.id), work.sequence
        if own is None or outcome is None:
            return
        if branched and work.proposal.parents is None:
            own.kv.num_computed = max(own.kv.num_computed, len(sequence.tokens) - 1)
        # A draft that was written may have been replaced by a suffix's.
        elif branched or {outcome.origin, work.proposal.origin} & {Origin.DRAFT, Origin.JIT}:
            own.kv.num_computed = max(own.kv.num_computed, len(sequence.tokens) - len(outcome.token_ids))
        self.pool.commit(own.kv, sequence.tokens)

    def forget(self, sequence: Sequence) -> None:
        own = self._sequences.pop(sequence.id, None)
        if own is not None:
            self.pool.release(own.kv)

    def check(self) -> None:
        """Raises AssertionError when KV blocks are leaked or shared wrongly."""
        self.pool.check([own.kv for own in self._sequences.values()])

    @property
    def num_sequences(self) -> int:
        return len(self._sequences)

    def _read(self, ends: Seq[tuple[DraftSequence, int]]) -> None:
        """Reads committed tokens of each sequence up to a position, in as few forward passes as they fit in.

        On a GPU on the draft's own stream. Also corrects the device's KV counts, which may include a rejected draft.
        """
        unread = [(own, end) for own, end in ends if own.kv.num_computed < end]
        with self.runner.beside() if unread else nullcontext():
            while unread:
                chunks, left = list[tuple[int, int, int]](), self.max_num_batched_tokens
                for own, end in unread:
                    if count := min(end - own.kv.num_computed, left):
                        chunks.append((own.slot, own.kv.num_computed, count))
                        own.kv.num_computed += count
                        left -= count
                slots, starts, counts = map(list, zip(*chunks, strict=True))
                self.model_runner.forward(Batch(slots, starts, counts, [0] * len(chunks)))
                self.runner.let_others()
                unread = [(own, end) for own, end in unread if own.kv.num_computed < end]
        for own, _ in ends:
            self._computed[own.slot].fill_(own.kv.num_computed)

    def _in_vocabulary(self, own: DraftSequence, sequence: Sequence) -> bool:
        """Whether all committed tokens are in the draft's vocabulary."""
        new = sequence.tokens[own.num_checked :]
        if all(token < self.model_runner.vocab_size for token in new):
            own.num_checked += len(new)
            return True
        return False

    def _grow(self, own: DraftSequence, num_tokens: int, works: Seq[Work]) -> bool:
        """Allocates blocks; if need be, evicts sequences that are not in this round, least recently used first."""
        busy = {work.sequence.id for work in works}
        while not self.pool.grow(own.kv, num_tokens):
            idle = next((i for i, other in self._sequences.items() if i not in busy and other.kv.blocks), None)
            if idle is None:
                return False
            self.pool.release(self._sequences.pop(idle).kv)
        return True


def undecided(work: Work) -> Work | None:
    """The sequence's work in flight, if it decides tokens."""
    in_flight = work.sequence.in_flight
    return in_flight if in_flight is not None and in_flight.decides else None


def wants_draft(work: Work) -> bool:
    """Whether to draft for a work: not for a sequence without output, so that its first token is not delayed."""
    return work.lookahead > 0 and work.sequence.least_len > work.sequence.num_prompt


class ModelDrafter(Drafter):
    """The drafter of SD: the draft model writes in `propose`, while the target waits.

    `levels`: of trees of `lookahead` nodes; 0: chains.
    """

    def __init__(self, model: DraftSource, lookahead: int, levels: int = 0) -> None:
        super().__init__()
        self.model = model
        self.lookahead, self.levels = lookahead, levels
        self._runs: list[DraftRun] = []  # not in `stats` yet

    def slots(self, k: int) -> int:
        return self.model.slots(k)

    def propose(self, works: Seq[Work]) -> list[Proposal]:
        able = [(w, own) for w in works if wants_draft(w) and (own := self.model.state_of(w, works))]
        if not able:
            return super().propose(works)
        written, run = self.model.write(able, k=self.k, levels=self.levels)
        self._runs.append(run)
        proposals = {id(work): proposal for (work, _), proposal in zip(able, written, strict=True)}
        return [proposals.get(id(work), Proposal()) for work in works]

    def prepare(self, works: Seq[Work], interrupted: Callable[[], bool] = never) -> None:
        """Reads prompts: on a GPU concurrently with the target, elsewhere after it."""
        for work in works:
            if work.proposal.origin is Origin.DRAFT:
                self.model.mark_read(work, branched=False)
        prompts = [work for work in works if work.num_tokens > 1 and work.sequence.params.speculate]
        self.model.read_prompts([(work, own) for work in prompts if (own := self.model.state_of(work, works))])

    def catch_up(self, works: Seq[Work]) -> bool:
        return self.model.catch_up(works)

    def observe(self, works: Seq[Work], outcomes: Seq[Outcome | None], seconds: float) -> None:
        for work, outcome in zip(works, outcomes, strict=True):
            self.model.observe(work, outcome, branched=False)
        ended = [run for run in self._runs if run.ended.reached]
        self.stats.busy_seconds += sum(run.seconds for run in ended)
        self._runs = self._runs[len(ended) :]

    def forget(self, sequence: Sequence) -> None:
        self.model.forget(sequence)
