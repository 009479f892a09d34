"""The functions of `ssd.kernels.triton.rounds` in C: the arguments are fields of the calls, beside sizes."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ssd.kernels.cpu.kernels import Kernels
from ssd.kernels.state import StateView

_NO_SLOT = "a run names a slot that is not there, or more tokens than a draft can have"


class Rounds:
    """Their numbers are checked, unlike a GPU's: IndexError."""

    def __init__(self, kernels: Kernels) -> None:
        self._prepare_rows = kernels.function(
            "prepare_rows", "a batch names a work, a slot, a row or a position that is not there"
        )
        self._accept = kernels.function("accept", "a decision names a slot, a row or a draft token that is not there")
        self._place_nodes = kernels.function("place_nodes", "a batch names a work or a slot that is not there")
        self._accept_node = kernels.function(
            "accept_node", "a decision names a slot, a row or a draft token that is not there"
        )
        self._move_accepted = kernels.function("move_accepted")
        self._follow_rows = kernels.function("follow_rows", "a row follows one that is not there")
        self._stage, self._read_rows, self._look_up, self._store, self._block_rows = (
            kernels.function(name, _NO_SLOT) for name in ("stage", "read_rows", "look_up", "store", "block_rows")
        )
        self._extend_rows, self._keep_best = kernels.function("extend_rows"), kernels.function("keep_best")

    def prepare_rows(self, state: StateView, **given: Any) -> None:
        sizes = {"rows": len(given["row_work"]), "works": len(given["slots"]), "logits": len(given["logit_rows"])}
        self._prepare_rows(**_numbers(given), state=state.fields, **sizes, table_columns=given["tables"].shape[1])

    def accept(self, state: StateView, **given: Any) -> None:
        self._accept(**_numbers(given), state=state.fields, rows=len(given["chosen"]), works=len(given["slots"]))

    def place_nodes(self, state: StateView, **given: Any) -> None:
        rows, depth = given["paths"].shape
        sizes = {"rows": rows, "works": len(given["slots"]), "logits": len(given["logit_rows"]), "depth": depth}
        self._place_nodes(**_numbers(given), state=state.fields, **sizes)

    def accept_node(self, state: StateView, **given: Any) -> None:
        self._accept_node(**_numbers(given), state=state.fields, rows=len(given["chosen"]), works=len(given["slots"]))

    def move_accepted(self, state: StateView, **given: Any) -> None:
        sizes = {"works": len(given["slots"]), "table_columns": given["tables"].shape[1]}
        self._move_accepted(**_numbers(given), state=state.fields, **sizes, num_caches=len(given["caches"]))

    def follow_rows(self, **given: Any) -> None:
        states, sequences = given["states"], len(given["above"]) // given["beams"]
        state_size = 0 if states is None else states.shape[1] * states.itemsize
        sizes = {"sequences": sequences, "num_caches": len(given["caches"]), "state_size": state_size}
        self._follow_rows(**_numbers(given), **sizes)

    def stage(self, state: StateView, **given: Any) -> None:
        sequences, tokens = given["tokens"].shape
        self._stage(**_numbers(given), state=state.fields, sequences=sequences, reads=tokens - 1)

    def read_rows(self, **given: Any) -> None:
        sequences, tables, beams = len(given["slots"]), given["tables"], given["beams"]
        self._read_rows(
            **_numbers(given),
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
        self._look_up(**_numbers(given), state=state.fields, **sizes)

    def store(self, state: StateView, **given: Any) -> None:
        self._store(**_numbers(given), state=state.fields, sequences=len(given["slots"]), ld=given["chain"].shape[1])

    def extend_rows(self, **given: Any) -> None:
        after, rows, ld = given["after"], len(given["tokens"]), given["chain"].shape[1]
        branches, ld_after = (1, 0) if after is None else (after.shape[1], after.stride(0))
        self._extend_rows(**_numbers(given), rows=rows, branches=branches, ld_after=ld_after, ld=ld)

    def block_rows(self, state: StateView, **given: Any) -> None:
        sequences, count = given["decided"].shape
        ld_sequence, ld_place = given["decided"].stride()
        self._block_rows(
            **_numbers(given),
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
        self._keep_best(**_numbers(given), rows=rows, found=found, ld=given["chain"].shape[1])


def _numbers(given: dict[str, Any]) -> dict[str, Any]:
    """With the addresses of tensors."""
    return {
        name: value.data_ptr() if type(value) is Tensor else 0 if value is None else value
        for name, value in given.items()
    }
