"""A draft model and what it knows of each sequence: KV, blocks and a prefix cache of its own.

A mirror follows one sequence: how much of its decided text has draft KV. Nothing that is wrong about a draft can reach
the text.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace

import torch

from ssd.core import Batch, Proposal, Sequence, Work
from ssd.decoding.drafter import Drafter
from ssd.decoding.noise import seed_key, signed
from ssd.drafting.program import Lane, Program, Run
from ssd.engine.blocks import BlockPool


@dataclass
class Mirror:
    """A sequence as the draft sees it: `text` holds the decided tokens, and counts those with draft KV."""

    text: Sequence
    seed: int
    known: bool = True  # whether the draft has all of its tokens in its vocabulary
    ahead: list[int] = field(default_factory=list)  # drafted tokens whose KV follows that of the decided ones

    @classmethod
    def of(cls, sequence: Sequence) -> Mirror:
        text = replace(sequence, tokens=[], num_computed=0, blocks=[], prefix_entries=[])
        return cls(text, signed(seed_key(sequence.seed)))

    def update(self, decided: Seq[int], vocab_size: int) -> None:
        """Takes what was decided since: drafted tokens that stand keep their KV."""
        new = decided[len(self.text.tokens) :]
        pairs = zip(self.ahead, new, strict=False)
        standing = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(self.ahead), len(new)))
        self.text.num_computed = min(self.text.num_computed + standing, len(decided) - 1)
        self.text.tokens += new
        self.known = self.known and all(token < vocab_size for token in new)
        self.ahead = []

    def lane(self, first: int, draft: Seq[int] = (), forks: Seq[tuple[int, int]] = ()) -> Lane:
        text = self.text
        return Lane(first, [*text.tokens[first:], *draft], text, self.seed, list(forks))


class DraftModel:
    """Runs a program for works, whose mirrors it keeps."""

    def __init__(
        self, program: Program, *, max_len: int, max_num_batched_tokens: int, prefix_caching: bool = True
    ) -> None:
        self.program = program
        self.runner = program.runner
        self.max_len = max_len  # positions that the draft knows
        self.max_num_batched_tokens = max_num_batched_tokens
        self.busy_seconds = 0.0  # that runs took whose results were used
        self.pool = BlockPool(self.runner.num_blocks, self.runner.block_size, prefix_caching=prefix_caching)
        self._mirrors: dict[int, Mirror] = {}  # by sequence id, the longest unused first

    def follow(self, work: Work, works: Seq[Work]) -> Mirror | None:
        """An up-to-date mirror with KV slots for its text and a draft; None where the draft cannot follow."""
        mirror = self._mirrors.pop(work.sequence.id, None) or Mirror.of(work.sequence)
        self._mirrors[work.sequence.id] = mirror
        mirror.update(work.sequence.tokens, self.runner.vocab_size)
        if not mirror.text.blocks:
            self.pool.attach_prefix(mirror.text)
        self.pool.commit(mirror.text)
        length = len(work.sequence.tokens) + work.lookahead
        return mirror if mirror.known and length <= self.max_len and self._grow(mirror, length, works) else None

    def forget(self, sequence: Sequence) -> None:
        mirror = self._mirrors.pop(sequence.id, None)
        if mirror is not None:
            self._drop(mirror)

    @torch.inference_mode()
    def write(self, mirrors: Seq[Mirror], count: int) -> Run:
        """`count` tokens ahead of each text."""
        for mirror in mirrors:
            self._read(mirror.text, len(mirror.text.tokens) - self.program.reads)
        run = self.program.write([mirror.lane(mirror.text.num_computed) for mirror in mirrors], count)
        for mirror in mirrors:
            mirror.text.num_computed = len(mirror.text.tokens)
        return run

    @torch.inference_mode()
    def branch(self, mirrors: Seq[Mirror], drafts: Seq[Seq[int]], forks: Seq[Seq[tuple[int, int]]], count: int) -> Run:
        """`count` tokens ahead of each fork of each draft."""
        for mirror in mirrors:
            self._read(mirror.text, len(mirror.text.tokens) - 1)
        together = zip(mirrors, drafts, forks, strict=True)
        lanes = [mirror.lane(len(mirror.text.tokens) - 1, draft, places) for mirror, draft, places in together]
        run = self.program.branch(lanes, count)
        for mirror, draft in zip(mirrors, drafts, strict=True):
            mirror.text.num_computed = len(mirror.text.tokens)
            mirror.ahead = list(draft)
        return run

    @torch.inference_mode()
    def read(self, work: Work, mirror: Mirror) -> None:
        """Computes the KV of as much of a prompt as the work covers; on a GPU without waiting for it."""
        self._read(mirror.text, min(work.sequence.num_computed + work.num_tokens, len(mirror.text.tokens) - 1))

    def _read(self, text: Sequence, end: int) -> None:
        with self.program.on_stream():
            while text.num_computed < end:
                count = min(end - text.num_computed, self.max_num_batched_tokens)
                self.runner.forward(Batch.build([Work(text, count)], self.runner.block_size))
                text.num_computed += count

    def _grow(self, mirror: Mirror, num_tokens: int, works: Seq[Work]) -> bool:
        """Gets KV blocks, if need be from sequences that are not at work now, the longest unused first."""
        while not self.pool.grow(mirror.text, num_tokens):
            busy = {work.sequence.id for work in works}
            idle = next((m for i, m in self._mirrors.items() if i not in busy and m.text.blocks), None)
            if idle is None:
                return False
            self._drop(idle)
        return True

    def _drop(self, mirror: Mirror) -> None:
        """Takes its KV away; it can be computed again."""
        self.pool.release(mirror.text)
        mirror.ahead = []


class ModelDrafter(Drafter):
    """Plain speculative decoding: the target waits while the draft writes, then the draft waits."""

    def __init__(self, model: DraftModel, lookahead: int) -> None:
        self.model = model
        self.lookahead = lookahead

    @property
    def busy_seconds(self) -> float:  # type: ignore[override]
        return self.model.busy_seconds

    def propose(self, works: Seq[Work]) -> list[Proposal]:
        """Nothing for a sequence without output: its first token is not to wait for a draft."""
        wanted = [work for work in works if work.lookahead and work.sequence.num_output]
        able = [(work, mirror) for work in wanted if (mirror := self.model.follow(work, works))]
        written = write_now(self.model, able)
        proposals = {id(work): proposal for (work, _), (proposal, _) in zip(able, written, strict=True)}
        return [proposals.get(id(work), Proposal()) for work in works]

    def anticipate(self, works: Seq[Work]) -> None:
        """Reads prompts while the target does: on a GPU beside it, elsewhere before it."""
        for work in works:
            if work.num_tokens > 1 and work.sequence.params.speculate and (mirror := self.model.follow(work, works)):
                self.model.read(work, mirror)

    def forget(self, sequence: Sequence) -> None:
        self.model.forget(sequence)


def write_now(
    model: DraftModel, able: Seq[tuple[Work, Mirror]], origin: str = "draft"
) -> list[tuple[Proposal, list[float]]]:
    """Drafts that the target waits for, and how sure the model was of each token."""
    if not able:
        return []
    run = model.write([mirror for _, mirror in able], max(work.lookahead for work, _ in able))
    drawn = model.program.chooser.drawn
    found = []
    for row, ((work, _), tokens, confidence) in enumerate(zip(able, run.tokens, run.confidence, strict=False)):
        usable = work.usable(tokens)
        laws = run.laws(row, 0, len(usable)) if drawn else None
        found.append((Proposal(usable, laws, origin), confidence[: len(usable)]))
    model.program.join()
    model.busy_seconds += run.seconds
    return found
