"""Quantised weights as checkpoints store them: each format turns its tensors into `Codes` and states its arithmetic.

Products are those of the codes, widened in registers, with float32 sums. A scale is applied to the sum of its group
before the groups are added up, one after the other, so that a row's bits are the same in any company.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from typing import Final, NamedTuple

import torch

from ssd.errors import ConfigError, UnsupportedModel
from ssd.kernels.codes import Codes, CodeType, dequantize, fused_codes
from ssd.kernels.ops import Ops
from ssd.kernels.weights import GLU, Routing, RowRounding, Rows, RowType, Weight
from ssd.layers.formats import DENSE, Use, WeightFormat, wrong_type

_FINE: Final = 128  # weights of a group of a channel that has one offset: kernels know no larger groups with offsets


@dataclass(frozen=True)
class Activations:
    """How rows are rounded to e4m3 or integers before a product.

    `group`: columns of one scale, which is computed for each row; None: all columns. `static`: the scale is stored
    instead (`input_scale`). `powers`: scales are rounded up to powers of two.
    """

    kind: RowType = "fp8"
    group: int | None = None
    static: bool = False
    powers: bool = False


class Coded(WeightFormat):
    """A format whose tensors are codes and scales. `activations`: None if products take rows as they are. `coarse`:
    rows may be rounded to 8 bits, see `Ops.prepare_codes`."""

    activations: Activations | None = None
    coarse = False
    floats = False

    def types(self, tensor: str) -> tuple[torch.dtype, ...]:
        """What a stored tensor may be; empty: anything."""
        return ()

    def codes(self, stored: Mapping[str, torch.Tensor]) -> Codes:
        """The codes of one part of a weight."""
        raise NotImplementedError

    def order(self, stored: Mapping[str, torch.Tensor]) -> torch.Tensor | None:
        """Which column of the weight each column of the codes is, where the groups of a scale are no neighbours."""
        return None

    def fault(self, tensor: str, share: torch.Tensor) -> str:
        if fault := wrong_type(share, self.types(tensor) or (share.dtype,)):
            return fault
        if share.is_floating_point() and share.itemsize > 1 and not bool(share.isfinite().all()):
            return "has numbers that are not finite: download the checkpoint again"
        if tensor == "input_scale" and not bool((share > 0).all()):
            return f"is {share.flatten()[0]:g}, expected a positive number: download the checkpoint again"
        return ""

    def widened(self, stored: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
        weight, order = dequantize(self.codes(stored), torch.float32), self.order(stored)
        others = {name: tensor for name, tensor in stored.items() if name == "bias"}
        return {"weight": weight if order is None else weight[:, order.argsort()], **others}

    def prepare(self, parts: Seq[Mapping[str, torch.Tensor]], ops: Ops, dtype: torch.dtype, use: Use) -> Weight:
        """One weight fused from the parts; one for each part if their codes or orders differ in kind."""
        codes, orders = [self.codes(part) for part in parts], [self.order(part) for part in parts]
        if not all(_alike(codes[0], each) for each in codes) or not all(_equal(orders[0], each) for each in orders):
            each = [Run(self, [part], [rows]) for part, rows in zip(parts, use.rows, strict=True)]
            return MixedWeight.of(each, ops, dtype, use)
        scales = [part["input_scale"].float().reshape(1, 1) for part in parts if "input_scale" in part]
        scale, how = torch.cat(scales).amax(0, keepdim=True) if scales else None, self.activations
        prepared = ops.prepare_codes(
            *(fused_codes(codes), dtype),
            gated=use.gated,
            experts=use.experts,
            rows=None if how is None else RowRounding(how.kind, how.group, scale, how.powers),
            coarse=self.coarse,
        )
        return prepared if orders[0] is None else OrderedWeight(prepared, orders[0])


@dataclass(frozen=True)
class OrderedWeight(Weight):
    """A weight that takes the columns of its input in another order."""

    weight: Weight
    order: torch.Tensor

    def linear(self, x: Rows, bias: torch.Tensor | None = None, *, float32: bool = False) -> torch.Tensor:
        assert isinstance(x, torch.Tensor)
        return self.weight.linear(x[:, self.order], bias, float32=float32)

    def expert_linear(
        self,
        x: Rows,
        routing: Routing,
        bias: torch.Tensor | None = None,
        *,
        glu: GLU | None = None,
        float32: bool = False,
    ) -> torch.Tensor:
        assert isinstance(x, torch.Tensor)
        return self.weight.expert_linear(x[:, self.order], routing, bias, glu=glu, float32=float32)


def codes_of(
    values: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor | None, kind: CodeType, group: int | None
) -> Codes:
    """Codes from values [rows, depth] as `Codes` has them, with scales and zero points [rows, groups] of any type.

    `zeros`: the codes that stand for zero; 0 everywhere is the same as none. `group`: None for whole rows.
    """
    depth, scales, offsets = values.shape[1], scales.float(), None
    if zeros is not None and bool(zeros.any()):
        offsets = -scales * zeros.float()
        if group is None:
            group = _FINE
            scales, offsets = (each.expand(-1, -(-depth // group)) for each in (scales, offsets))
        offsets = offsets.contiguous()
    if group is not None:
        values = torch.nn.functional.pad(values, (0, -depth % group), value=8 if kind == "int4" else 0)
    return Codes(values.contiguous(), scales.contiguous(), kind, depth, offsets)


def _alike(one: Codes, other: Codes) -> bool:
    """Whether they can be rows of one weight."""
    return (one.type, one.group, one.offsets is None) == (other.type, other.group, other.offsets is None)


def _equal(one: torch.Tensor | None, other: torch.Tensor | None) -> bool:
    return one is other or (one is not None and other is not None and torch.equal(one, other))


class Mixed(WeightFormat):
    """A weight whose parts have different formats."""

    name = "mixed"

    def __init__(self, formats: Seq[WeightFormat]) -> None:
        self.formats = tuple(formats)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Mixed) and self.formats == other.formats

    def __hash__(self) -> int:
        return hash(self.formats)

    def prepare(self, parts: Seq[Mapping[str, torch.Tensor]], ops: Ops, dtype: torch.dtype, use: Use) -> Weight:
        """Neighbours of one format are one weight; floats are, whatever they were made of."""
        if all(form.floats for form in self.formats):
            wide = [form.widened(part) for form, part in zip(self.formats, parts, strict=True)]
            return DENSE.prepare(wide, ops, dtype, use)
        runs: list[Run] = []
        for form, part, rows in zip(self.formats, parts, use.rows, strict=True):
            if not runs or runs[-1].format != form:
                runs.append(Run(form, [], []))
            runs[-1].parts.append(part)
            runs[-1].rows.append(rows)
        return MixedWeight.of(runs, ops, dtype, use)


class Run(NamedTuple):
    """Parts of a weight that are one after the other and have one format."""

    format: WeightFormat
    parts: list[Mapping[str, torch.Tensor]]
    rows: list[int]  # of each


@dataclass(frozen=True)
class MixedWeight(Weight):
    """One product for each run of parts."""

    parts: tuple[Weight, ...]
    rows: tuple[int, ...]  # of each of them
    gated: bool

    @classmethod
    def of(cls, runs: Seq[Run], ops: Ops, dtype: torch.dtype, use: Use) -> MixedWeight:
        if use.experts:
            raise UnsupportedModel("experts in different formats (or orders of columns) are not supported")
        uses = [replace(use, gated=False, rows=tuple(run.rows)) for run in runs]
        each = [run.format.prepare(run.parts, ops, dtype, alone) for run, alone in zip(runs, uses, strict=True)]
        return cls(tuple(each), tuple(sum(run.rows) for run in runs), use.gated)

    def linear(self, x: Rows, bias: torch.Tensor | None = None, *, float32: bool = False) -> torch.Tensor:
        assert isinstance(x, torch.Tensor)
        biases = [None] * len(self.rows) if bias is None else torch.split(bias, list(self.rows))
        each = zip(self.parts, biases, strict=True)
        y = torch.cat([part.linear(x, own, float32=float32 and not self.gated) for part, own in each], 1)
        if not self.gated:
            return y
        gate, up = y.chunk(2, 1)
        return torch.nn.functional.silu(gate) * up


@dataclass(frozen=True)
class Dequantized(WeightFormat):
    """Stored as another format, multiplied as floats."""

    stored: WeightFormat

    def shapes(self, rows: int, depth: int) -> dict[str, tuple[int, ...]]:
        return self.stored.shapes(rows, depth)

    def share(self, tensor: str, rows: slice, columns: slice) -> tuple[slice, ...]:
        return self.stored.share(tensor, rows, columns)

    def fault(self, tensor: str, share: torch.Tensor) -> str:
        return self.stored.fault(tensor, share)

    def widened(self, stored: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
        return self.stored.widened(stored)

    def prepare(self, parts: Seq[Mapping[str, torch.Tensor]], ops: Ops, dtype: torch.dtype, use: Use) -> Weight:
        return DENSE.prepare([self.widened(part) for part in parts], ops, dtype, use)


def cut(part: slice, unit: int, what: str) -> slice:
    """A slice of weights as a slice of units (groups of a scale, packed words); refuses one that cuts through them."""
    if part == slice(None):
        return part
    if part.start % unit or part.stop % unit:
        raise ConfigError(
            f"tensor_parallel_size: {what} of {unit} weights would be cut by a rank's share "
            f"({part.stop - part.start} weights): use fewer ranks"
        )
    return slice(part.start // unit, part.stop // unit)
