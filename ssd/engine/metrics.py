"""What the engine counts. Names follow what the field has settled on."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class EngineMetrics:
    """Totals since the engine started. Work done again after a preemption is not counted again."""

    num_requests: int = 0
    num_finished: int = 0  # aborted ones included
    num_aborted: int = 0
    num_refused: int = 0
    num_rounds: int = 0
    num_preemptions: int = 0
    prompt_tokens: int = 0
    cached_prompt_tokens: int = 0
    output_tokens: int = 0
    spec_decode_num_drafts: int = 0  # verifications with at least one drafted token
    spec_decode_num_draft_tokens: int = 0
    spec_decode_num_accepted_tokens: int = 0
    spec_decode_num_accepted_tokens_per_pos: list[int] = field(default_factory=list)

    def count_draft(self, drafted: int, accepted: int) -> None:
        self.spec_decode_num_drafts += 1
        self.spec_decode_num_draft_tokens += drafted
        self.spec_decode_num_accepted_tokens += accepted
        count_positions(self.spec_decode_num_accepted_tokens_per_pos, drafted, accepted)


def count_positions(counts: list[int], drafted: int, accepted: int) -> None:
    """Counts the drafted tokens that stood, by their place in the draft."""
    counts += [0] * (drafted - len(counts))
    for place in range(accepted):
        counts[place] += 1
