"""Linear layers with tensor parallelism, whose weights are fused from the parts of a checkpoint.

`ColumnLinear` splits the outputs over the ranks, `RowLinear` the inputs (and then adds up), `Embedding` the vocabulary,
`ReplicatedLinear` nothing.
How a weight is stored is its format's business (`ssd.layers.formats`). Whether a model can be split is
checked before (`ssd.models.decoder.check_split`).
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import replace
from typing import ClassVar

import torch

from ssd.errors import UnsupportedModel
from ssd.kernels.weights import Rows, Weight
from ssd.layers.formats import DENSE, Use
from ssd.layers.formats.coded import Mixed
from ssd.layers.parameter import Build, LazyTensor, share_of

_ALL = slice(None)


class Linear:
    """A weight (and bias) fused from named parts; their format prepares it once it is complete."""

    loaded: ClassVar[tuple[str, ...]] = ("weight", "bias")

    def __init__(
        self,
        build: Build,
        parts: Mapping[str, int],
        in_features: int,
        *,
        bias: bool = False,
        use: Use = Use(),  # noqa: B008 (frozen)
        unit: int = 1,
    ) -> None:
        """`parts`: checkpoint name -> output features, in the order they are fused. `unit`: consecutive outputs that
        belong together, such as those of a head."""
        self.ops, self.tp = build.ops, build.tp
        self.parts = dict(parts)
        self.in_features = in_features
        self.unit = unit
        self.has_bias = bias
        self.use = use
        self.formats = {part: build.format_of(part) for part in parts}
        first, *others = self.formats.values()
        self.format = first if all(other == first for other in others) else Mixed((first, *others))
        self.weight: Weight = Weight()  # until it is complete
        self.bias: torch.Tensor | None = None
        self._device, self._dtype = build.device, build.dtype
        self._pending: dict[str, torch.Tensor] = {}

    def shapes(self) -> dict[str, tuple[int, ...]]:
        shapes: dict[str, tuple[int, ...]] = {}
        for part, rows in self.parts.items():
            stored = self.formats[part].shapes(rows, self.in_features)
            shapes |= {f"{part}.{name}": shape for name, shape in stored.items()}
        if self.has_bias:
            shapes |= {f"{part}.bias": (rows,) for part, rows in self.parts.items()}
        return shapes

    def num_bytes(self) -> int:
        rows = sum(self.parts.values())
        biases = rows * self._dtype.itemsize if self.has_bias else 0
        return biases + sum(
            self.formats[part].num_bytes(rows, self.in_features, self._dtype, self.use)
            for part, rows in self.parts.items()
        )

    def load(self, name: str, tensor: torch.Tensor | LazyTensor) -> None:
        part, _, own = name.rpartition(".")
        rows, columns = self.cut(self.parts[part]) if self.tp.size > 1 else (_ALL, _ALL)
        form = DENSE if own == "bias" else self.formats[part]
        index = (rows,) if own == "bias" else form.share(own, rows, columns)
        share = share_of(tensor, index, self._device)
        if fault := form.fault(own, share):
            raise UnsupportedModel(f"{name} {fault}")
        self._pending[name] = share
        if len(self._pending) == self._num_tensors:
            self._complete()

    @functools.cached_property
    def _num_tensors(self) -> int:
        return len(self.shapes())

    def cut(self, rows: int) -> tuple[slice, slice]:
        """This rank's rows and columns of a part, where there are several ranks."""
        raise NotImplementedError

    def _complete(self) -> None:
        tensors, stored = self._pending, []
        for part, rows in self.parts.items():
            names = self.formats[part].shapes(rows, self.in_features)
            stored.append({own: self._padded(tensors[f"{part}.{own}"]) for own in names})
        shares = [self.cut(rows) if self.tp.size > 1 else (_ALL, _ALL) for rows in self.parts.values()]
        counts = tuple(len(range(rows)[share]) for rows, (share, _) in zip(self.parts.values(), shares, strict=True))
        use = replace(self.use, rows=counts, columns=shares[0][1])
        try:
            self._prepare(stored, use)
        except UnsupportedModel as error:
            raise UnsupportedModel(f"{', '.join(self.parts)}: {error}") from None
        if self.has_bias:
            self.bias = torch.cat([tensors[f"{part}.bias"].to(self._dtype) for part in self.parts])
        self._pending = {}

    def _prepare(self, stored: Seq[Mapping[str, torch.Tensor]], use: Use) -> None:
        """Makes the weight of the parts' stored tensors."""
        self.weight = self.format.prepare(stored, self.ops, self._dtype, use)

    def _padded(self, share: torch.Tensor) -> torch.Tensor:
        return share

    def _product(self, x: Rows, bias: torch.Tensor | None, *, float32: bool = False) -> torch.Tensor:
        return self.weight.linear(x, bias, float32=float32)


class ColumnLinear(Linear):
    """Outputs split over the ranks; each part on its own, so that every rank gets its share of every part."""

    def cut(self, rows: int) -> tuple[slice, slice]:
        return self.tp.share(rows, self.unit), _ALL

    def __call__(self, x: Rows) -> torch.Tensor:
        return self._product(x, self.bias)


class ReplicatedLinear(Linear):
    """The whole weight on every rank."""

    def cut(self, rows: int) -> tuple[slice, slice]:
        return _ALL, _ALL

    def __call__(self, x: Rows) -> torch.Tensor:
        return self._product(x, self.bias)


class RowLinear(Linear):
    """Inputs split over the ranks; the partial sums are added up. Only the first rank adds the bias."""

    def cut(self, rows: int) -> tuple[slice, slice]:
        return _ALL, self.tp.share(self.in_features)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if self.tp.group is None:
            return self._product(x, self.bias)
        return self.tp.sum(self.partial_sums(x), x.dtype)

    def partial_sums(self, x: torch.Tensor) -> torch.Tensor:
        """What this rank adds to the sum, in float32."""
        return self._product(x, self.bias if self.tp.rank == 0 else None, float32=True)


class Embedding(Linear):
    """Token embedding or output head, split by vocabulary; the same weight may be both.

    All ranks have as many rows: those after the last token's are zeros, and their logits are dropped.
    """

    def __init__(
        self,
        build: Build,
        name: str,
        vocab_size: int,
        in_features: int,
        *,
        embedding: bool = False,
        head: bool = False,
    ) -> None:
        super().__init__(build, {name: vocab_size}, in_features, use=Use(embedding=embedding, product=head))
        self.vocab_size = vocab_size
        self.rows = -(-vocab_size // build.tp.size)  # per rank

    def cut(self, rows: int) -> tuple[slice, slice]:
        first = min(rows, self.tp.rank * self.rows)
        return slice(first, min(rows, first + self.rows)), _ALL

    def _padded(self, share: torch.Tensor) -> torch.Tensor:
        rows, _ = self.cut(self.vocab_size)
        missing = self.rows - (rows.stop - rows.start)
        return torch.nn.functional.pad(share, (0, 0, 0, missing)) if missing else share

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        if self.tp.group is None:
            return self.weight.embedding(token_ids)
        index = token_ids - self.tp.rank * self.rows
        mine = (index >= 0) & (index < self.rows)
        x = self.weight.embedding(index.clamp(0, self.rows - 1))
        return self.tp.sum(torch.where(mine[:, None], x, 0).float(), x.dtype)

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        """Those of the whole vocabulary on the first rank, which samples; of its own rows on the others."""
        return self.tp.gather(self._product(x, None, float32=True), self.vocab_size)
