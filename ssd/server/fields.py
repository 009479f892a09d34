"""What becomes of the fields of a request: kept, converted, ignored with a warning, or refused.

A table says it of the fields that an object has in a published API or with other servers, and that nothing here
computes with under this name. It is for `parameters.py` to say which.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any, Final

from ssd.server.errors import invalid, renaming, unknown, unsupported
from ssd.server.ignored import OTHER, current

EMPTY: Final[tuple[object, ...]] = (None, "", [], {})
_MOST_FIELDS: Final = 2048  # of an object: each that is not known takes some microseconds
_MOST_CHARS: Final = 60  # of a name that is not known


@dataclass(frozen=True)
class Published:
    """A parameter of the published API that is not computed with.

    `values`: those that are accepted; None: all of them, since it is a hint. Others are refused, or, with `ignored`
    (which says what is not done) and unless parameters are strict, ignored with a warning.
    """

    values: tuple[object, ...] | None = EMPTY
    remedy: str = "leave it out"
    ignored: str = ""


@dataclass(frozen=True)
class Alias:
    """A parameter of other servers that is here under another name.

    `field`: that name. `convert`: from the value to that of the field, None: nothing is asked for; an object is merged
    into the field's own.
    """

    field: str
    convert: Callable[[Any], Any] = lambda value: value


@dataclass(frozen=True)
class Foreign:
    """A parameter of other servers that is not here.

    `neutral`: values that ask for nothing; None: all of them. `ignored`: what is not done with another value, which is
    ignored with a warning, or refused with this reason.
    """

    neutral: tuple[object, ...] | None = ()
    ignored: str = "it changes nothing here"
    refused: bool = False


Table = Mapping[str, Published | Alias | Foreign]
NONE: Final[Table] = {}
INNER: Final = Alias("")  # an object whose fields count as fields of the request


def known_fields(where: str, given: Mapping[str, Any], known: Collection[str], table: Table = NONE) -> dict[str, Any]:
    """The fields of an object that are computed with: those in `known`.

    `where`: the path of the object in the request. Fields that are not known are refused where parameters are strict,
    else ignored with a warning; of objects inside a request, null counts as left out.
    """
    ignored = current()
    if not ignored.strict:
        _check_number(where or "the body", given)
    prefix = f"{where}." if where else ""
    kept: dict[str, Any] = {}
    aliases: list[tuple[str, Any, Alias]] = []
    for name, value in given.items() if ignored.strict else _flattened(given, table):
        entry = table.get(name)
        if isinstance(entry, Alias) and not ignored.strict and _stands_for(entry, name, known):
            aliases.append((name, value, entry))
        elif name in known:
            kept[name] = value
        elif isinstance(entry, Published):
            _check_published(prefix, name, value, entry)
        elif ignored.strict and (value is not None or not where):
            raise unknown(f"{prefix}{name:.{_MOST_CHARS}}", _meant(name, known))
        elif value not in EMPTY:
            _ignore(prefix, name, value, entry, known)
    for name, value, alias in sorted(aliases, key=lambda each: each[0] != each[2].field):  # the field's own name first
        if value not in EMPTY:
            _honour(kept, name, value, alias)
    return kept


def _check_number(where: str, given: Mapping[str, Any]) -> None:
    if len(given) > _MOST_FIELDS:
        raise invalid(where, f"has {len(given)} fields; the limit is {_MOST_FIELDS}")


def _stands_for(alias: Alias, name: str, known: Collection[str]) -> bool:
    """Whether an object with these fields has this one under the name: a field's own meaning goes before."""
    return alias.field in known and (name == alias.field or name not in known)


def _flattened(given: Mapping[str, Any], table: Table) -> Iterator[tuple[str, Any]]:
    for name, value in given.items():
        if table.get(name) is INNER and isinstance(value, dict):
            _check_number(name, value)
            yield from ((inner, each) for inner, each in value.items() if inner not in given)
        else:
            yield name, value


def _check_published(prefix: str, name: str, value: object, parameter: Published) -> None:
    """Refuses a value that would change the answer."""
    ignored = current()
    if parameter.values is None or value in parameter.values:
        return
    if ignored.strict or not parameter.ignored:
        raise unsupported(prefix + name, f"is not supported: {parameter.remedy}")
    ignored.add(prefix + name, parameter.ignored, name)


def _ignore(prefix: str, name: str, value: object, entry: Alias | Foreign | None, known: Collection[str]) -> None:
    ignored = current()
    if not isinstance(entry, Foreign):
        path = f"{prefix}{name:.{_MOST_CHARS}}"
        hint = "" if ignored.full else _meant(name, known)
        ignored.add(path, f"it is not a known parameter{hint}", OTHER if entry is None else name)
    elif entry.neutral is not None and value not in entry.neutral:
        if entry.refused:
            raise unsupported(prefix + name, f"is not supported: {entry.ignored}")
        ignored.add(prefix + name, entry.ignored, name)


def _honour(kept: dict[str, Any], name: str, given: Any, alias: Alias) -> None:
    """Gives a field the value that it has under another name; errors of it name the client's."""
    field, ignored = alias.field, current()
    with renaming({"reasoning_effort": name}):
        value = alias.convert(given)
    before = kept.get(field)
    if value is None:
        return
    if name != field and isinstance(value, dict):
        ignored.names |= {f"{field}.{key}": name for key in value}
    if isinstance(value, dict) and isinstance(before, dict):
        kept[field] = {**value, **before}
    elif before is None:
        kept[field] = value
        ignored.names |= {field: name} if name != field else {}
    elif before != value:
        ignored.add(name, f"{field} is given, too", name)


def _meant(name: str, known: Collection[str]) -> str:
    near = get_close_matches(name[:_MOST_CHARS], known, n=1, cutoff=0.75)
    return f": did you mean {near[0]!r}?" if near else ""
