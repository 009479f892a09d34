"""Shapes of draft runs. They are rounded up to a few, which have graphs or recordings."""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import NamedTuple

from ssd.core import SamplingParams
from ssd.drafting.fan_out import RANKS, FanOut
from ssd.sampling.sampler import Needs

_FEW_READS = 5  # tokens: enough after a draft of 4


def widths_up_to(most: int) -> tuple[int, ...]:
    """Numbers of branches, each a third or a half more than the one before, and `most`."""
    powers = [1 << i for i in range(most.bit_length())]
    return tuple(sorted({most, *(n for power in powers for n in (power, 3 * power // 2) if n < most)}))


class RunShape(NamedTuple):
    """The shape of a run; every shape has its own graphs."""

    sequences: int
    reads: int  # tokens read per sequence, padded
    width: int  # branches per sequence; 0: `write`, one row per sequence
    needs: Needs
    fan_out: FanOut | None = None  # the policy that plans the branches

    @property
    def rows(self) -> int:
        return self.sequences * max(1, self.width)

    @property
    def branches(self) -> bool:
        return self.width > 0


@dataclass(frozen=True)
class RunShapes:
    """The shapes that runs can have: their limits.

    Branches are rounded up to one of `widths`, and the tokens that are read with them to a few numbers. `bucketed`, on
    CUDA: so are sequences, and what `write` reads.
    """

    lookahead: int  # tokens of a draft
    max_sequences: int
    max_rows: int  # one per sequence, or its branches
    widths: Seq[int] = ()  # branches per sequence
    most_written_reads: int | None = None  # tokens that `write` reads of a sequence, if fewer than `branch`
    bucketed: bool = False
    nodes: int = 0  # of the trees that are read where trees are prepared

    def __post_init__(self) -> None:
        object.__setattr__(self, "widths", sorted({min(width, RANKS * self.reads) for width in self.widths}))

    @property
    def reads(self) -> int:
        """Most tokens that a run reads of a sequence: a draft and the token before it."""
        return self.lookahead + 1

    @property
    def max_width(self) -> int:
        return max(self.widths, default=0)

    @property
    def scratch_slots(self) -> int:
        """KV slots outside of the pool's blocks: `lookahead` for every row, one for every node, and one for padding."""
        return self.max_rows * self.lookahead + self.max_sequences * self.nodes + 1

    def most_reads(self, branches: bool) -> int:
        return self.reads if branches else self.most_written_reads or self.reads

    def width_of(self, sequences: int) -> int:
        """Maximum number of branches per sequence in a batch of this size."""
        return min(self.max_width, self.max_rows // self.bucket(sequences))

    def width_within(self, most: float) -> int:
        """The largest number of branches per sequence up to a limit, or the smallest one."""
        return max((width for width in self.widths if width <= most), default=self.widths[0])

    def bucket(self, sequences: int) -> int:
        return min(self.max_sequences, 1 << (sequences - 1).bit_length()) if self.bucketed else sequences

    def of(
        self,
        sequences: int,
        reads: int,
        params: Seq[SamplingParams],
        fan_out: FanOut | None = None,
        budget: int = 0,
    ) -> RunShape:
        """The shape of `write` or, with a policy, of `branch` with at most `budget` branches per sequence."""
        width = 0
        if fan_out is not None:
            most = self.width_of(sequences)
            width = min(most, next(each for each in self.widths if each >= min(most, fan_out.width(budget))))
        return RunShape(self.bucket(sequences), self._padded(reads, width > 0), width, Needs.of(params), fan_out)

    def after_reading(self, shape: RunShape) -> RunShape:
        """The shape of a later step, which depends neither on the number of tokens read nor on the policy."""
        return shape._replace(reads=self.reads, fan_out=None)

    def usual(self, sequences: Seq[int], fan_out: FanOut) -> Iterator[RunShape]:
        """The largest first: the graphs of the others reuse its memory."""
        for count in sorted({self.bucket(n) for n in sequences}, reverse=True):
            for width in sorted({0, *(min(width, self.max_rows // count) for width in self.widths)}, reverse=True):
                for reads in sorted({self._padded(1, width > 0), self.most_reads(width > 0)}, reverse=True):
                    yield RunShape(count, reads, width, Needs(), fan_out if width else None)

    def _padded(self, reads: int, branches: bool) -> int:
        if not self.bucketed and not branches:
            return reads
        most = self.most_reads(branches)
        return min(_FEW_READS, most) if reads <= _FEW_READS else most
