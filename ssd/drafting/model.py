"""Drafting with a small model: it reads what was decided, then writes a few tokens ahead, one forward each.

The draft has KV, blocks and a prefix cache of its own, and a mirror of every sequence it drafts for. A mirror knows how
much of the decided text has draft KV; nothing that is wrong about a draft can reach the text.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace

import torch

from ssd.core import Batch, Outcome, Proposal, Sequence, Work
from ssd.decoding.law import Row, choose, probabilities, reweighted, sample
from ssd.decoding.noise import Stream
from ssd.engine.blocks import BlockPool
from ssd.execution.runner import ModelRunner


@dataclass
class _Mirror:
    """A sequence as the draft sees it: `text` holds the decided tokens, and counts those with draft KV."""

    text: Sequence
    drafted: list[int] = field(default_factory=list)  # in the last round, behind the decided tokens

    @classmethod
    def of(cls, sequence: Sequence) -> _Mirror:
        return cls(replace(sequence, tokens=[], num_computed=0, blocks=[], prefix_entries=[]))

    def update(self, decided: Seq[int]) -> None:
        """Takes what was decided since: drafted tokens that stand keep their KV (the last one never had any)."""
        known = len(self.text.tokens)
        new = decided[known:]
        fed = self.drafted[:-1]
        standing = next((i for i, (a, b) in enumerate(zip(fed, new, strict=False)) if a != b), min(len(fed), len(new)))
        self.text.num_computed = min(self.text.num_computed + standing, len(decided) - 1)
        self.text.tokens += new
        self.drafted = []


class ModelDrafter:
    """Drafts with `runner`'s model, as many tokens as a work has room for.

    With `laws`, tokens are drawn from the draft's own law, which the proposals carry (the rejection rule); without,
    they are chosen with the target's noise (coupled sampling, and greedy decoding). A `saguaro_c` below one draws the
    `fan_out` likeliest tokens less often: the law that they are drawn from, and carry, is then the re-weighted one.
    """

    def __init__(
        self,
        runner: ModelRunner,
        *,
        lookahead: int,
        max_len: int,
        vocab_size: int,
        max_num_batched_tokens: int,
        prefix_caching: bool = True,
        laws: bool = False,
        saguaro_c: float = 1.0,
        fan_out: int = 3,
    ) -> None:
        self.runner = runner
        self.lookahead = lookahead
        self.max_len = max_len  # positions that the draft knows
        self.vocab_size = vocab_size  # the target's
        self.max_num_batched_tokens = max_num_batched_tokens
        self.laws = laws
        self.saguaro_c = saguaro_c
        self.fan_out = fan_out
        self.pool = BlockPool(runner.num_blocks, runner.block_size, prefix_caching=prefix_caching)
        self._mirrors: dict[int, _Mirror] = {}  # by sequence id, the longest unused first
        self._side = torch.cuda.Stream() if runner.decoder.device.type == "cuda" else None  # type: ignore[no-untyped-call]

    # --- the seam -----------------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def propose(self, works: Seq[Work]) -> list[Proposal]:
        """Nothing for a sequence without output: its first token is not to wait for a draft."""
        self._join()
        wanted = [w for w in works if w.lookahead and w.sequence.num_output]
        able = [(work, mirror) for work in wanted if (mirror := self._ready(work, works))]
        proposals = dict(zip((id(work) for work, _ in able), self._draft(able), strict=True))
        return [proposals.get(id(work), Proposal()) for work in works]

    @torch.inference_mode()
    def anticipate(self, works: Seq[Work]) -> None:
        """Reads prompts while the target does: on a GPU beside it, elsewhere before it."""
        prompts = [work for work in works if work.num_tokens > 1 and work.sequence.params.speculate]
        if not prompts:
            return
        with self._beside():
            for work in prompts:
                mirror = self._mirror(work.sequence)
                end = min(work.sequence.num_computed + work.num_tokens, self.max_len)
                if self._knows(mirror) and self._grow(mirror, end, works):
                    self._read(mirror.text, end)

    def observe(self, works: Seq[Work], outcomes: Seq[Outcome | None]) -> None:
        return  # mirrors take over what was decided when they are used next

    def forget(self, sequence: Sequence) -> None:
        mirror = self._mirrors.pop(sequence.id, None)
        if mirror is not None:
            self._drop(mirror)

    # --- mirrors ------------------------------------------------------------------------------------------------------

    def _mirror(self, sequence: Sequence) -> _Mirror:
        """The sequence's mirror, up to date, with the longest prefix that the draft's cache has."""
        mirror = self._mirrors.pop(sequence.id, None) or _Mirror.of(sequence)
        self._mirrors[sequence.id] = mirror
        mirror.update(sequence.tokens)
        if not mirror.text.blocks:
            self.pool.attach_prefix(mirror.text)
        self.pool.commit(mirror.text)
        return mirror

    def _ready(self, work: Work, works: Seq[Work]) -> _Mirror | None:
        """A mirror with KV slots for the whole draft; None where the draft cannot follow."""
        mirror = self._mirror(work.sequence)
        length = len(work.sequence.tokens) + work.lookahead
        able = length <= self.max_len and self._knows(mirror) and self._grow(mirror, length, works)
        return mirror if able else None

    def _knows(self, mirror: _Mirror) -> bool:
        """A draft's vocabulary may be smaller than the target's."""
        return self.runner.vocab_size >= self.vocab_size or max(mirror.text.tokens) < self.runner.vocab_size

    def _grow(self, mirror: _Mirror, num_tokens: int, works: Seq[Work]) -> bool:
        """Gets KV blocks, if need be from sequences that are not at work now, the longest unused first."""
        while not self.pool.grow(mirror.text, num_tokens):
            busy = {work.sequence.id for work in works}
            idle = next((m for i, m in self._mirrors.items() if i not in busy and m.text.blocks), None)
            if idle is None:
                return False
            self._drop(idle)
        return True

    def _drop(self, mirror: _Mirror) -> None:
        """Takes its KV away; it can be computed again."""
        self.pool.release(mirror.text)
        mirror.drafted = []

    # --- forwards -----------------------------------------------------------------------------------------------------

    def _draft(self, able: Seq[tuple[Work, _Mirror]]) -> list[Proposal]:
        """The first token comes from a forward over what is new in the text, every further one from its predecessor."""
        if not able:
            return []
        laws: list[list[torch.Tensor]] = [[] for _ in able]  # stay empty unless they are wanted
        logits = self._catch_up([mirror for _, mirror in able])
        active = list(range(len(able)))
        for depth in range(max(work.lookahead for work, _ in able)):
            rows = [Row(able[i][0].sequence, tuple(able[i][1].drafted)) for i in active]
            logits = self._of_target_width(logits)
            drawn_from = self._laws(logits, rows) if self.laws else None
            tokens = choose(logits, rows) if drawn_from is None else sample(drawn_from, rows, Stream.DRAFT)
            for n, (i, token) in enumerate(zip(active, tokens, strict=True)):
                able[i][1].drafted.append(token)
                laws[i] += [] if drawn_from is None else [drawn_from[n]]
            active = [i for i in active if self._goes_on(*able[i], depth + 1)]
            if not active:
                break
            logits = self.runner.forward(self._step([able[i][1] for i in active]))
        return [
            Proposal(tuple(mirror.drafted), torch.stack(law) if self.laws else None)
            for (_, mirror), law in zip(able, laws, strict=True)
        ]

    def _laws(self, logits: torch.Tensor, rows: Seq[Row]) -> torch.Tensor:
        return reweighted(probabilities(logits, rows), self.saguaro_c, self.fan_out)

    def _goes_on(self, work: Work, mirror: _Mirror, depth: int) -> bool:
        return depth < work.lookahead and mirror.drafted[-1] not in work.sequence.stop_token_ids

    def _of_target_width(self, logits: torch.Tensor) -> torch.Tensor:
        missing = self.vocab_size - logits.shape[-1]
        if missing > 0:
            return torch.nn.functional.pad(logits, (0, missing), value=-torch.inf)
        return logits[:, : self.vocab_size]

    def _catch_up(self, mirrors: Seq[_Mirror]) -> torch.Tensor:
        """Reads all decided tokens; logits after the last one of each."""
        while sum(mirror.text.num_pending for mirror in mirrors) > max(self.max_num_batched_tokens, len(mirrors)):
            longest = max(mirrors, key=lambda mirror: mirror.text.num_pending)
            self._read(longest.text, len(longest.text.tokens) - 1)
        works = [Work(mirror.text, mirror.text.num_pending) for mirror in mirrors]
        logits = self.runner.forward(Batch.build(works, self.runner.block_size))
        for mirror in mirrors:
            mirror.text.num_computed = len(mirror.text.tokens)
        return logits

    def _read(self, text: Sequence, end: int) -> None:
        """Computes the KV of decided tokens up to `end`, in chunks."""
        while text.num_computed < end:
            count = min(end - text.num_computed, self.max_num_batched_tokens)
            self.runner.forward(Batch.build([Work(text, count)], self.runner.block_size))
            text.num_computed += count

    def _step(self, mirrors: Seq[_Mirror]) -> Batch:
        """One more token for each: its last drafted one."""
        positions = [len(mirror.text.tokens) + len(mirror.drafted) - 1 for mirror in mirrors]
        size, tables = self.runner.block_size, [mirror.text.blocks for mirror in mirrors]
        return Batch(
            token_ids=[mirror.drafted[-1] for mirror in mirrors],
            positions=positions,
            slots=[table[p // size] * size + p % size for table, p in zip(tables, positions, strict=True)],
            query_start=list(range(len(mirrors) + 1)),
            context_len=[p + 1 for p in positions],
            block_tables=tables,
            logit_rows=list(range(len(mirrors))),
        )

    # --- streams ------------------------------------------------------------------------------------------------------

    def _beside(self) -> AbstractContextManager[object]:
        if self._side is None:
            return nullcontext()
        self._side.wait_stream(torch.cuda.current_stream())
        return torch.cuda.stream(self._side)

    def _join(self) -> None:
        if self._side is not None:
            torch.cuda.current_stream().wait_stream(self._side)
