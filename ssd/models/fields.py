"""What a checkpoint's fields may hold: a type and a range for each, checked before anything is built from them.

Knows nothing of files; `config.json` and the metadata of GGUF files are checked by the same rules.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

from ssd.errors import UnsupportedModel
from ssd.layers.spec import AttentionSpec
from ssd.models.config import DecoderConfig

_SHOWN: Final = 60  # characters of a value in an error message


@dataclass(frozen=True)
class Field:
    """Type and range of one field; null is the same as absent."""

    what: str
    types: tuple[type, ...]
    least: float = -math.inf
    most: float = math.inf

    def accepts(self, value: Any) -> bool:
        if not isinstance(value, self.types) or (isinstance(value, bool) and bool not in self.types):
            return False
        return not isinstance(value, (int, float)) or self.least <= value <= self.most  # NaN is in no range

    def __str__(self) -> str:
        bounded = math.isfinite(self.least) and math.isfinite(self.most)
        return f"{self.what} from {self.least:g} to {self.most:g}" if bounded else self.what


def size(most: int) -> Field:
    return Field("an integer", (int,), 1, most)


def number(least: float, most: float) -> Field:
    return Field("a number", (int, float), least, most)


FLAG: Final = Field("true or false", (bool,))
TEXT: Final = Field("text", (str,))
OBJECT: Final = Field("an object", (dict,))
LIST: Final = Field("a list", (list,))
LAYERS: Final = size(1 << 16)
WIDTH: Final = size(1 << 24)  # of the stream or the MLP
HEADS: Final = size(1 << 16)
EXPERTS: Final = size(1 << 12)
HEAD_DIM: Final = size(1 << 14)
VOCABULARY: Final = size(1 << 28)
POSITIONS: Final = size(1 << 23)
TOKEN_ID: Final = Field("a token id", (int,), 0, (1 << 31) - 1)
EPSILON: Final = number(1e-20, 1.0)
THETA: Final = number(1.5, 1e100)
FACTOR: Final = number(1e-6, 1e6)


def shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"


def check_field(key: str, value: object, field: Field, where: str) -> None:
    """Raises UnsupportedModel for a value of another type or out of range."""
    if value is not None and not field.accepts(value):
        raise UnsupportedModel(f"{key}={shown(value)} in {where}: expected {field}")


def check_fields(values: Mapping[str, Any], fields: Mapping[str, Field], where: str) -> None:
    for key, field in fields.items():
        check_field(key, values.get(key), field, where)


def check_shape(config: DecoderConfig) -> None:
    """Refuse what the kernels cannot compute: see `_check_attention`; and heads that differ from layer to layer."""
    check_field("number of positions", config.max_position, POSITIONS, "the config")
    kinds = dict.fromkeys(layer.attention for layer in config.layers)
    for attention in kinds:
        _check_attention(attention)
    if len(found := {replace(attention.heads(), window=0) for attention in kinds}) > 1:
        raise UnsupportedModel(f"layers with different heads ({', '.join(map(str, found))}): ssd needs equal ones")


def _check_attention(spec: AttentionSpec) -> None:
    """Refuse head counts that grouped-query attention and the rotary embedding cannot use, and impossible scalings."""
    if spec.num_heads % spec.num_kv_heads:
        raise UnsupportedModel(
            f"num_key_value_heads={spec.num_kv_heads} does not divide num_attention_heads={spec.num_heads}"
        )
    check_field("head_dim", spec.head_dim, HEAD_DIM, "the config")
    if spec.head_dim % 2:
        raise UnsupportedModel(f"head_dim={spec.head_dim}: the rotary embedding needs an even head size")
    rope = spec.rope
    if rope.scaling == "llama3" and rope.high_freq_factor <= rope.low_freq_factor:
        raise UnsupportedModel(
            f"high_freq_factor={rope.high_freq_factor}: expected more than low_freq_factor={rope.low_freq_factor}"
        )
