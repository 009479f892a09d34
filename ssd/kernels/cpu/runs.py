"""The functions of `ssd.kernels.triton.runs` in C, as those of `rounds`."""

from __future__ import annotations

from typing import Any

from ssd.kernels.cpu.kernels import Kernels
from ssd.kernels.cpu.rounds import numbers
from ssd.kernels.state import StateView

_NO_SLOT = "a run names a slot that is not there, or more tokens than a draft can have"


class Runs:
    """Their numbers are checked, unlike a GPU's: IndexError."""

    def __init__(self, kernels: Kernels) -> None:
        self._follow_rows = kernels.function("follow_rows", "a row follows one that is not there")
        self._stage, self._read_rows, self._look_up, self._store, self._block_rows = (
            kernels.function(name, _NO_SLOT) for name in ("stage", "read_rows", "look_up", "store", "block_rows")
        )
        self._extend_rows, self._keep_best = kernels.function("extend_rows"), kernels.function("keep_best")

    def follow_rows(self, **given: Any) -> None:
        states, sequences = given["states"], len(given["above"]) // given["beams"]
        state_size = 0 if states is None else states.shape[1] * states.itemsize
        sizes = {"sequences": sequences, "num_caches": len(given["caches"]), "state_size": state_size}
        self._follow_rows(**numbers(given), **sizes)

    def stage(self, state: StateView, **given: Any) -> None:
        sequences, tokens = given["tokens"].shape
        self._stage(**numbers(given), state=state.fields, sequences=sequences, reads=tokens - 1)

    def read_rows(self, **given: Any) -> None:
        sequences, tables, beams = len(given["slots"]), given["tables"], given["beams"]
        self._read_rows(
            **numbers(given),
            sequences=sequences,
            reads=len(given["tokens"]) // sequences,
            ld_given=given["given"].stride(0),
            ld_tables=tables.stride(0),
            table_columns=tables.shape[1],
            width=0 if beams is None else beams.shape[2] // sequences,
            depths=0 if beams is None else len(beams),
        )

    def look_up(self, state: StateView, **given: Any) -> None:
        (sequences, branches), ld_after = given["after"].shape, given["after"].stride(0)
        sizes = {"sequences": sequences, "branches": branches, "ld_after": ld_after, "ld": given["chain"].shape[1]}
        self._look_up(**numbers(given), state=state.fields, **sizes)

    def store(self, state: StateView, **given: Any) -> None:
        self._store(**numbers(given), state=state.fields, sequences=len(given["slots"]), ld=given["chain"].shape[1])

    def extend_rows(self, **given: Any) -> None:
        after, rows, ld = given["after"], len(given["tokens"]), given["chain"].shape[1]
        branches, ld_after = (1, 0) if after is None else (after.shape[1], after.stride(0))
        self._extend_rows(**numbers(given), rows=rows, branches=branches, ld_after=ld_after, ld=ld)

    def block_rows(self, state: StateView, **given: Any) -> None:
        sequences, count = given["decided"].shape
        ld_sequence, ld_place = given["decided"].stride()
        self._block_rows(
            **numbers(given),
            state=state.fields,
            sequences=sequences,
            queries=len(given["tokens"]) // sequences,
            count=count,
            ld_sequence=ld_sequence,
            ld_place=ld_place,
            table_columns=given["tables"].shape[1],
        )

    def keep_best(self, **given: Any) -> None:
        rows, found = given["best"].shape
        self._keep_best(**numbers(given), rows=rows, found=found, ld=given["chain"].shape[1])
