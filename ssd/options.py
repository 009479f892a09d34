"""Options described once: the field of a dataclass has the help text and the range, its type says the rest.

Checks, command-line flags and error messages are derived from these descriptions. Knows nothing of what options mean.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import math
import os
import re
import sys
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import MISSING, dataclass, field
from types import NoneType, UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from ssd.errors import ConfigError, SSDError

T = TypeVar("T")


@dataclass(frozen=True)
class Description:
    """What the metadata of a field says about an option."""

    help: str
    least: float = -math.inf
    above: float = -math.inf  # in place of `least`: a bound that is not allowed itself
    most: float = math.inf
    pattern: str = ""  # regular expression of texts
    expects: str = ""  # what error messages ask for; "": derived
    flags: tuple[str, ...] = ()  # names on the command line; (): derived
    env: str = ""  # environment variable that stands for the flag
    listed: bool = False  # texts of a list are separated by commas on the command line, not given one by one


def described(help: str, **others: Any) -> dict[str, Any]:
    """The metadata of a field. The keywords are those of `Description`."""
    return {"option": Description(help, **others)}


def option(default: T, help: str, **others: Any) -> T:
    """A field with a default and a description. The keywords are those of `Description`."""
    return field(default=default, metadata=described(help, **others))


@dataclass(frozen=True)
class Option:
    """A described field with what its type allows."""

    name: str
    default: Any  # MISSING: the option is required
    description: Description
    number: type[int] | type[float] | None
    words: tuple[str, ...]  # those of a Literal
    text: bool  # any str
    switch: bool
    optional: bool  # None is allowed
    items: type | None  # of a list
    pairs: bool  # a mapping of token ids to numbers
    nested: Any  # a dataclass with options of its own, or None

    @property
    def simple(self) -> bool:
        """Whether the type says all: a number, a word, a text or a truth value."""
        return self.items is None and (self.switch or self.text or self.number is not None or bool(self.words))

    @property
    def expected(self) -> str:
        """What an error message asks for."""
        if self.description.expects:
            return self.description.expects
        parts = ["True or False"] if self.switch else ["a text that is not empty"] if self.text else []
        if self.number is not None:
            parts.append(f"{'an integer' if self.number is int else 'a number'}{self._range}")
        if self.words:
            parts.append(f"one of {', '.join(self.words)}" if self.words[1:] else repr(self.words[0]))
        return ", or ".join([*parts, *(["None"] if self.optional else [])])

    @property
    def _range(self) -> str:
        least, above, most = self.description.least, self.description.above, self.description.most
        if math.isfinite(least):
            return f" from {least} to {most}" if math.isfinite(most) else f" of at least {least}"
        low = f" above {above}" if math.isfinite(above) else ""
        return low + (f" and at most {most}" if math.isfinite(most) else "")

    def accepts(self, value: Any) -> bool:
        known = self.description
        if value is None or isinstance(value, bool):
            return self.optional if value is None else self.switch
        if isinstance(value, str):
            matches = re.fullmatch(known.pattern or "(?s).+", value) is not None
            return value in self.words or (self.text and matches)
        right = is_int(value) if self.number is int else self.number is float and isinstance(value, (int, float))
        return right and known.least <= value <= known.most and value > known.above

    def parse(self, text: str) -> Any:
        """The value that a text spells; the text itself if it spells none, which a check then refuses."""
        try:
            if self.items is int:
                return tuple(int(part) for part in text.split(","))
            if self.items is str:
                return tuple(filter(None, (part.strip() for part in text.split(","))))
            if self.number is not None and text not in self.words:
                return self.number(text)
        except ValueError:
            pass
        return text


def options_of(config: type) -> dict[str, Option]:
    """The options of a dataclass, by name: its fields that have a description."""
    return _options_of(config)


@functools.cache
def _options_of(config: Any) -> dict[str, Option]:
    hints = get_type_hints(config)
    return {each.name: _option(each, hints[each.name]) for each in dataclasses.fields(config) if each.metadata}


def _option(each: dataclasses.Field[Any], hint: Any) -> Option:
    members = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    words = [word for member in members if get_origin(member) is Literal for word in get_args(member)]
    listed = [get_args(member)[0] for member in members if get_origin(member) in (Seq, tuple)]
    default = each.default_factory() if each.default_factory is not MISSING else each.default
    return Option(
        each.name,
        default,
        each.metadata["option"],
        number=next((member for member in members if member in (int, float)), None),
        words=tuple(words),
        text=str in members,
        switch=bool in members,
        optional=NoneType in members,
        items=listed[0] if listed else None,
        pairs=any(get_origin(member) is Mapping and get_args(member)[0] is int for member in members),
        nested=hint if dataclasses.is_dataclass(hint) else None,
    )


def validate(config: Any, error: type[SSDError] = ConfigError, owner: str = "") -> None:
    """Checks the fields of a config against their descriptions; numpy's numbers and paths become Python's own types.

    `owner` precedes a field's name in messages. Fields of other types (lists, mappings) are left to the config.
    """
    for name, each in options_of(type(config)).items():
        given = getattr(config, name)
        if given is each.default or not each.simple:
            continue
        value = os.fspath(given) if each.text and isinstance(given, os.PathLike) else plain(given)
        if not each.accepts(value):
            raise error(f"{owner}{name}={given!r}: must be {each.expected}")
        if each.number is not None and not isinstance(value, (str, NoneType)):
            value = each.number(value)
        object.__setattr__(config, name, value)


def build(config: type[T], options: Mapping[str, Any]) -> T:
    """Builds a config from named options; an unknown one raises ConfigError with the nearest known name."""
    known = options_of(config)
    for name in options:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"known options: {', '.join(known)}"
            raise ConfigError(f"{name!r} is not an option of {config.__name__}: {hint}")
    for name, each in known.items():
        if each.default is MISSING and name not in options:
            raise ConfigError(f"{name} is missing: {config.__name__} cannot do without it")
    return config(**options)


def is_int(value: object) -> bool:
    """Whether a value is an int and not a bool."""
    return isinstance(value, int) and not isinstance(value, bool)


def plain(value: Any) -> Any:
    """A numpy scalar as Python's own number; anything else as it is."""
    numpy = sys.modules.get("numpy")
    return value.item() if numpy is not None and isinstance(value, numpy.generic) else value
