"""How much longer the rules of a tokenizer.json can make a text: a few lines of them can ask for terabytes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from ssd.errors import SSDError
from ssd.text.json_file import read_json

_MAX_GROWTH: Final = 64  # times the characters of a text; published tokenizers have 1 to 4
_TEXT: Final = 1024  # characters of the text that is assumed, beside which a prefix counts little
_STEPS: Final = ("normalizer", "pre_tokenizer", "decoder")


def check_growth(file: Path) -> None:
    """Raises SSDError if the rules of a step could make a text more than _MAX_GROWTH times as long.

    Before the file is loaded, which applies the normalizer to added tokens.
    """
    content = read_json(file)
    for step in _STEPS:
        length = float(_TEXT)
        for rule in _rules(content.get(step)):
            length = _longest(rule, length)
            if length > _MAX_GROWTH * _TEXT:
                raise SSDError(
                    f"{file}: the rules of {step!r} can make a text more than {_MAX_GROWTH} times as long, which would "
                    "take all memory: download the checkpoint again, from a source that you trust"
                )


def _rules(step: object) -> Iterator[Mapping[str, Any]]:
    """The rules of a step in order. One of the type Sequence has a list of rules."""
    left = [step]
    while left:
        item = left.pop()
        if isinstance(item, Mapping):
            yield item
            left += reversed(list(item.values()))
        elif isinstance(item, list):
            left += reversed(item)


def _longest(rule: Mapping[str, Any], length: float) -> float:
    """Upper bound of the characters of a text of `length` after a rule."""
    if rule.get("type") == "Prepend":
        return length + len(str(rule.get("prepend")))
    if rule.get("type") != "Replace":
        return length
    pattern, added = rule.get("pattern"), len(str(rule.get("content")))
    text = pattern.get("String") if isinstance(pattern, Mapping) else None
    if not isinstance(text, str) or not text:  # a regex, which may match between any two characters
        return length * (1 + added)
    return length * max(1.0, added / len(text))
