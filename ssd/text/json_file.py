"""The JSON files of a checkpoint: objects of a bounded size, or an error that names the file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

from ssd.errors import SSDError

_MAX_BYTES: Final = 1 << 28


def read_json(file: Path) -> dict[str, Any]:
    """A JSON object of a regular file."""
    text = read_text(file)
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise SSDError(f"{file} cannot be read as JSON ({error}): download the checkpoint again") from error
    if not isinstance(content, dict):
        raise SSDError(f"{file} holds a JSON {type(content).__name__}, expected an object: download it again")
    return content


def read_text(file: Path) -> str:
    """The text of a regular file: a device or a pipe might never end."""
    if not file.is_file():
        raise SSDError(f"{file} is not a regular file: download the checkpoint again")
    try:
        if file.stat().st_size > _MAX_BYTES:
            raise SSDError(f"{file} has {file.stat().st_size} bytes, expected {_MAX_BYTES} at most: download it again")
        return file.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise SSDError(f"{file} cannot be read ({error}): download the checkpoint again") from error
