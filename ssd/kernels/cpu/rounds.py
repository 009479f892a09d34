"""The functions of `ssd.kernels.triton.rounds` in C: the arguments are fields of the calls, beside sizes."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ssd.kernels.cpu.kernels import Kernels
from ssd.kernels.state import StateView


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

    def prepare_rows(self, state: StateView, **given: Any) -> None:
        sizes = {"rows": len(given["row_work"]), "works": len(given["slots"]), "logits": len(given["logit_rows"])}
        self._prepare_rows(**numbers(given), state=state.fields, **sizes, table_columns=given["tables"].shape[1])

    def accept(self, state: StateView, **given: Any) -> None:
        self._accept(**numbers(given), state=state.fields, rows=len(given["chosen"]), works=len(given["slots"]))

    def place_nodes(self, state: StateView, **given: Any) -> None:
        rows, depth = given["paths"].shape
        sizes = {"rows": rows, "works": len(given["slots"]), "logits": len(given["logit_rows"]), "depth": depth}
        self._place_nodes(**numbers(given), state=state.fields, **sizes)

    def accept_node(self, state: StateView, **given: Any) -> None:
        self._accept_node(**numbers(given), state=state.fields, rows=len(given["chosen"]), works=len(given["slots"]))

    def move_accepted(self, state: StateView, **given: Any) -> None:
        sizes = {"works": len(given["slots"]), "table_columns": given["tables"].shape[1]}
        self._move_accepted(**numbers(given), state=state.fields, **sizes, num_caches=len(given["caches"]))


def numbers(given: dict[str, Any]) -> dict[str, Any]:
    """With the addresses of tensors."""
    return {
        name: value.data_ptr() if type(value) is Tensor else 0 if value is None else value
        for name, value in given.items()
    }
