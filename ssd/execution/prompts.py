"""What is read of a prompt beside its last logits: log-probabilities of its tokens, and its pooled hidden state.

Both come from the hidden states of all its positions, which the forward pass keeps for such requests. The head runs
over some rows at a time: the logits of a whole batch would take gigabytes.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

import torch

from ssd.core import PromptPart, TokenLogprobs, Work
from ssd.execution.host_copy import HostCopy
from ssd.execution.runner import Forward, Keep
from ssd.execution.state import SequenceState
from ssd.sampling.sampler import top_logprobs


@dataclass
class PromptReads:
    """The works of a round whose prompts are read, and what was read so far, being copied to the host."""

    works: dict[int, tuple[Work, int]]  # by index in the round: the work, and its first row of the batch
    state: SequenceState
    logprobs: list[HostCopy] = field(default_factory=list)  # of parts of the rows, in order
    pooled: dict[int, HostCopy] = field(default_factory=dict)  # by index in the round: float64 [hidden]

    @classmethod
    def of(cls, works: Seq[Work], state: SequenceState) -> PromptReads | None:
        found, row = {}, 0
        for i, work in enumerate(works):
            if work.prompt_tokens and work.sequence.reads_prompt:
                found[i] = work, row
            row += work.num_queries
        return cls(found, state) if found else None

    @property
    def keep(self) -> Keep:
        """What the forward pass has to keep for them."""
        return Keep.LOGITS if self._count is not None else Keep.STATES

    @property
    def _count(self) -> int | None:
        counts = (work.sequence.params.prompt_logprobs for work, _ in self.works.values())
        return max((count for count in counts if count is not None), default=None)

    def read_logits(self, forward: Forward, first: int, logits: torch.Tensor) -> None:
        """Reads the logits of some rows, from `first` on: the next token of each is known."""
        inputs, rows = forward.inputs, slice(first, first + len(logits))
        slots = inputs["slots"][inputs["row_work"][rows].long()].long()
        following = self.state.token_ids[slots, inputs.positions[rows].long() + 1]
        self.logprobs.append(HostCopy(*top_logprobs(logits, following, self._count or 0)))

    def read_states(self, states: torch.Tensor) -> None:
        """Pools the hidden states [rows, hidden] of a forward pass."""
        for i, (work, first) in self.works.items():
            own, pooling = states[first : first + work.prompt_tokens], work.sequence.params.pooling
            if pooling is not None:
                self.pooled[i] = HostCopy(own.double().sum(0) if pooling == "mean" else own[-1].double())

    def parts(self) -> dict[int, PromptPart]:
        """What was read, by index in the round. Waits for it."""
        values = [torch.cat(each).tolist() for each in zip(*(part.wait() for part in self.logprobs), strict=True)]
        return {i: self._part(i, work, first, values) for i, (work, first) in self.works.items()}

    def _part(self, i: int, work: Work, first: int, values: Seq[list]) -> PromptPart:  # type: ignore[type-arg]
        sequence, start = work.sequence, work.start or 0
        pooled = self.pooled[i].wait()[0].numpy() if i in self.pooled else None
        entries: list[TokenLogprobs] = []
        count = sequence.params.prompt_logprobs
        if count is not None:
            tokens = sequence.request.prompt_token_ids[start + 1 : start + 1 + work.prompt_tokens]
            for token, own, ids, best in zip(tokens, *(each[first:] for each in values), strict=False):
                entries.append(TokenLogprobs(token, own, dict(zip(ids[:count], best[:count], strict=True))))
        return PromptPart(start, start + work.prompt_tokens, tuple(entries), pooled)
