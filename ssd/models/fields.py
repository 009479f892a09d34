"""What a checkpoint's fields may hold: a type and a range for each, checked before anything is built from them.

Knows nothing of files; `config.json` and the metadata of GGUF files are checked by the same rules.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from ssd.errors import UnsupportedModel
from ssd.layers.spec import MAX_HEAD_DIM
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
HEAD_DIM: Final = size(MAX_HEAD_DIM)
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
    """Refuse what the kernels cannot compute, in any layer."""
    check_field("number of positions", config.max_position, POSITIONS, "the config")
    for attention in dict.fromkeys(layer.attention for layer in config.layers):
        attention.check()
