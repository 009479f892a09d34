"""Grafts in the layouts of AWQ and GPTQ, as published checkpoints of 4 bits have them, for other engines, too."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from typing import Any, Final, Literal, TypeGuard, cast, get_args

from ssd.errors import ConfigError
from ssd.kernels.codes import TargetFormat
from ssd.layers.formats import DENSE, FormatOf, WeightFormat
from ssd.layers.formats.awq import AWQ
from ssd.layers.formats.gptq import GPTQ
from ssd.layers.formats.packed import Packed
from ssd.layers.formats.rounded import is_around

Published = Literal["awq", "gptq"]
GraftFormat = TargetFormat | Published  # what a graft's weights can be rounded to
GRAFT_FORMATS: Final[tuple[str, ...]] = (*get_args(TargetFormat), *get_args(Published))
Shapes = Mapping[str, tuple[int, ...]]  # of all tensors, by name

_TENSORS: Final = frozenset(("qweight", "qzeros", "scales"))
_GROUP: Final = 128  # weights of one scale, or fewer where that does not divide all depths
_LEAST_GROUP: Final = 16
_WORD: Final = 8  # integers


def is_published(form: GraftFormat | None) -> TypeGuard[Published]:
    return form in _METHODS


def published_formats(form: Published, shapes: Shapes, stored: FormatOf) -> FormatOf:
    """The formats of a graft whose layers would be `stored` if it were not rounded."""
    layers = {name.removesuffix(".weight"): shape for name, shape in shapes.items() if len(shape) == 2}
    packed = {name: shape for name, shape in layers.items() if not is_around(name)}
    taken = next((name for name in packed if stored(name) is not DENSE), None)
    if taken is not None:
        raise ConfigError(f"shape: {taken} is {stored(taken).name} already, not floats: use another shape")
    own = _METHODS[form][0](_group_size(form, [*packed.values()]))
    return lambda name: own if name in packed else DENSE


def published_json(form: Published, formats: FormatOf) -> dict[str, Any]:
    """`quantization_config` of config.json for `published_formats`."""
    own = cast(Packed, formats("model.layers.0.self_attn.q_proj"))
    return {"quant_method": form, "bits": 4, "group_size": own.group, **_METHODS[form][1]}


def _group_size(form: Published, shapes: Seq[tuple[int, ...]]) -> int:
    size = math.gcd(_GROUP, *(depth for _, depth in shapes))
    if size < _LEAST_GROUP or any(rows % _WORD for rows, _ in shapes):
        raise ConfigError(
            f"shape: {form} has groups of {_LEAST_GROUP} inputs or more and words of {_WORD} outputs, which do not "
            "divide all of its layers: use another shape or format"
        )
    return size


_METHODS: Final[Mapping[Published, tuple[Callable[[int], WeightFormat], Mapping[str, Any]]]] = {
    "awq": (lambda group: AWQ("int4", group, _TENSORS), {"zero_point": True, "version": "gemm"}),
    "gptq": (
        lambda group: GPTQ("int4", group, _TENSORS | {"g_idx"}),
        {"desc_act": False, "sym": True, "lm_head": False, "checkpoint_format": "gptq"},
    ),
}
