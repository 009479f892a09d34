"""What a generated message consists of, in the order in which it is generated."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Text:
    text: str


@dataclass(frozen=True)
class Reasoning:
    text: str


@dataclass(frozen=True)
class CallBegin:
    index: int
    id: str
    name: str


@dataclass(frozen=True)
class CallArguments:
    """A piece of the arguments' JSON text."""

    index: int
    text: str


@dataclass(frozen=True)
class CallEnd:
    """`broken`: for a call that began and then is not valid JSON, its text in the message. `complete` False: the
    message was cut inside of the call."""

    index: int
    broken: str | None = None
    complete: bool = True


Event = Reasoning | Text | CallBegin | CallArguments | CallEnd
