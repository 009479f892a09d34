"""What the engine counts. Names follow what the field has settled on."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from ssd.core import Origin


@dataclass
class EngineMetrics:
    """Totals since the engine started. Work done again after a preemption is not counted again."""

    num_requests: int = 0
    num_finished: int = 0  # aborted and failed ones included
    num_aborted: int = 0
    num_failed: int = 0  # a round that computed them failed
    num_refused: int = 0
    num_rounds: int = 0
    num_sequence_rounds: int = 0  # verifications of single sequences
    num_preemptions: int = 0
    prompt_tokens: int = 0
    cached_prompt_tokens: int = 0
    output_tokens: int = 0
    spec_decode_num_drafts: int = 0  # verifications with at least one drafted token
    spec_decode_num_draft_tokens: int = 0
    spec_decode_num_accepted_tokens: int = 0
    spec_decode_num_accepted_tokens_per_pos: list[int] = field(default_factory=list)
    ssd_look_ups_after: list[int] = field(default_factory=list)  # drafts wanted after 0, 1, … accepted tokens
    ssd_hits_after: list[int] = field(default_factory=list)  # those that had been prepared
    ssd_rounds: Counter[str] = field(default_factory=Counter)  # by the draft's origin: hit, jit, sibling
    ssd_tokens: Counter[str] = field(default_factory=Counter)  # that those rounds yielded
    target_wait_seconds: float = 0.0  # for drafts
    verify_seconds: float = 0.0  # from the forward pass to the decision
    draft_busy_seconds: float = 0.0  # of the draft; what is left of the rounds it was idle
    hand_over_seconds: float = 0.0  # of the wait, messages to and from a draft in another process
    drafter_failures: int = 0  # times that it was given up for a while, or started again

    @property
    def ssd_hit_rate(self) -> float:
        return sum(self.ssd_hits_after) / max(1, sum(self.ssd_look_ups_after))

    def count_draft(self, drafted: int, accepted: int) -> None:
        self.spec_decode_num_drafts += 1
        self.spec_decode_num_draft_tokens += drafted
        self.spec_decode_num_accepted_tokens += accepted
        count_positions(self.spec_decode_num_accepted_tokens_per_pos, drafted, accepted)

    def count_look_up(self, origin: Origin, after: int, num_new: int) -> None:
        """A draft was wanted after a round with `after` accepted tokens; it came from `origin` and gave `num_new`."""
        for counts, one in ((self.ssd_look_ups_after, 1), (self.ssd_hits_after, int(origin is Origin.HIT))):
            counts += [0] * (after + 1 - len(counts))
            counts[after] += one
        self.ssd_rounds[origin.name.lower()] += 1
        self.ssd_tokens[origin.name.lower()] += num_new


def count_positions(counts: list[int], drafted: int, accepted: int) -> None:
    """Counts the drafted tokens that stood, by their place in the draft."""
    counts += [0] * (drafted - len(counts))
    for place in range(accepted):
        counts[place] += 1
