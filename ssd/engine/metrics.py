"""The engine's counters. Names follow vLLM where it has them."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from ssd.core import LOOKED_UP, Origin, Outcome, Sequence
from ssd.decoding.drafter import DrafterStats
from ssd.decoding.round import RoundStats


@dataclass
class EngineMetrics:
    """Totals since the engine started. Tokens recomputed after a preemption are not counted again."""

    num_requests: int = 0
    num_finished: int = 0  # aborted and failed ones included
    num_aborted: int = 0
    num_failed: int = 0  # requests with a sample that failed
    num_refused: int = 0
    num_rounds: int = 0
    num_sequence_rounds: int = 0  # rounds times the sequences that decided in them
    num_preemptions: int = 0
    prompt_tokens: int = 0
    cached_prompt_tokens: int = 0
    output_tokens: int = 0
    spec_decode_num_drafts: int = 0  # verifications of at least one draft token
    spec_decode_num_draft_tokens: int = 0
    spec_decode_num_accepted_tokens: int = 0
    spec_decode_num_accepted_tokens_per_pos: list[int] = field(default_factory=list)
    ssd_look_ups_after: list[int] = field(default_factory=list)  # look-ups, by accepted tokens of the round before
    ssd_hits_after: list[int] = field(default_factory=list)  # hits among them
    ssd_rounds: Counter[str] = field(default_factory=Counter)  # by origin of the draft: hit, jit, sibling
    ssd_tokens: Counter[str] = field(default_factory=Counter)  # new tokens of those rounds
    mode_rounds: Counter[str] = field(default_factory=Counter)  # by mode, where it is chosen in every round
    target_wait_seconds: float = 0.0  # the target waited for drafts
    verify_seconds: float = 0.0  # from the forward pass to the decision
    host_wait_seconds: float = 0.0  # from a decision to what the device computes next: it waits for the host
    round_seconds: float = 0.0  # from a decision to the next, while there are requests
    draft_busy_seconds: float = 0.0  # the draft model computed
    hand_over_seconds: float = 0.0  # waiting for messages of a drafter in another process, its computing left out
    drafter_failures: int = 0  # exceptions of the drafter, and restarts of its process

    @property
    def ssd_hit_rate(self) -> float:
        return sum(self.ssd_hits_after) / max(1, sum(self.ssd_look_ups_after))

    @property
    def host_share(self) -> float:
        """Share of the rounds' time in which the device waits for the host."""
        return self.host_wait_seconds / max(self.round_seconds, 1e-9)

    def count_round(self, round_: RoundStats, drafter: DrafterStats, num_preemptions: int) -> None:
        self.num_rounds += 1
        self.num_preemptions = num_preemptions
        self.target_wait_seconds, self.verify_seconds = round_.target_wait_seconds, round_.verify_seconds
        self.host_wait_seconds, self.round_seconds = round_.host_wait_seconds, round_.round_seconds
        self.draft_busy_seconds, self.hand_over_seconds = drafter.busy_seconds, drafter.hand_over_seconds
        self.drafter_failures = round_.drafter_failures + drafter.failures
        self.mode_rounds = drafter.rounds

    def count_outcome(self, sequence: Sequence, outcome: Outcome, num_new: int, now: float) -> None:
        """Counts an outcome, of which `num_new` tokens were committed, here and in the sequence's own metrics."""
        drafted, accepted, metrics = len(outcome.draft), min(outcome.num_accepted, num_new), sequence.metrics
        metrics.rounds += 1
        metrics.output_tokens += num_new
        if num_new:
            metrics.deliveries.append((now, num_new))
            metrics.first_token = now if metrics.first_token is None else metrics.first_token
        self.output_tokens += num_new
        self.num_sequence_rounds += 1
        if drafted:
            metrics.drafted += drafted
            metrics.accepted += accepted
            _count_positions(metrics.accepted_per_position, drafted, accepted)
            self._count_draft(drafted, accepted)
        if outcome.origin in LOOKED_UP:
            metrics.look_ups += 1
            metrics.hits += outcome.origin is Origin.HIT
            self._count_look_up(outcome.origin, sequence.last_accepted, num_new)

    def _count_draft(self, drafted: int, accepted: int) -> None:
        self.spec_decode_num_drafts += 1
        self.spec_decode_num_draft_tokens += drafted
        self.spec_decode_num_accepted_tokens += accepted
        _count_positions(self.spec_decode_num_accepted_tokens_per_pos, drafted, accepted)

    def _count_look_up(self, origin: Origin, after: int, num_new: int) -> None:
        """`after`: accepted tokens of the round before; `num_new`: new tokens of this one."""
        for counts, one in ((self.ssd_look_ups_after, 1), (self.ssd_hits_after, int(origin is Origin.HIT))):
            counts += [0] * (after + 1 - len(counts))
            counts[after] += one
        self.ssd_rounds[origin.name.lower()] += 1
        self.ssd_tokens[origin.name.lower()] += num_new


def _count_positions(counts: list[int], drafted: int, accepted: int) -> None:
    """Counts accepted draft tokens by their position in the draft."""
    counts += [0] * (drafted - len(counts))
    for place in range(accepted):
        counts[place] += 1
