"""The folder of packed weights in the user's cache: what is in it, and how large it may become."""

from __future__ import annotations

import os
import shutil
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from ssd.errors import ConfigError
from ssd.kernels import cache
from ssd.models.weight_file import SCRATCH, SUFFIX

LIMIT: Final = "SSD_WEIGHT_CACHE"
_GIB: Final = 1 << 30
_MOST: Final = 50 * _GIB  # unless the limit is given
_ABANDONED: Final = 24 * 3600  # seconds after which an unfinished file is one of a process that was killed


@dataclass(frozen=True)
class Entry:
    path: Path
    size: int  # bytes
    used: float  # when, as `time.time` counts


def folder() -> Path:
    """Made if need be; OSError if there is no lasting place for it."""
    found = cache.lasting() / "weights"
    found.mkdir(mode=0o700, exist_ok=True)
    return found


def entries(place: Path) -> list[Entry]:
    """The least recently used first."""
    found = []
    for path in place.glob(f"*{SUFFIX}"):
        try:
            status = path.stat()
        except FileNotFoundError:  # another process has removed it
            continue
        found.append(Entry(path, status.st_size, status.st_mtime))
    return sorted(found, key=lambda entry: entry.used)


def limit(place: Path) -> int:
    """Bytes that all files may take: as $SSD_WEIGHT_CACHE says in GiB, else a fifth of the disk space that is free or
    theirs, and 50 GiB at most."""
    given = os.environ.get(LIMIT, "").strip()
    if not given:
        own = sum(entry.size for entry in entries(place))
        return min(_MOST, (shutil.disk_usage(place).free + own) // 5)
    try:
        number = float(given)
        if not 0 <= number < float("inf"):
            raise ValueError
    except ValueError:
        raise ConfigError(f"{LIMIT}={given!r}: expected a number of GiB, or 0 for no cache") from None
    return int(number * _GIB)


def make_room(place: Path, size: int, own: Path) -> bool:
    """Removes the least recently used files until one of `size` bytes in place of `own` is within the limit; False,
    and nothing is removed, if that or the disk is too small for it."""
    most, others = limit(place), [entry for entry in entries(place) if entry.path != own]
    for path in place.glob(f"{SCRATCH}*"):
        with suppress(FileNotFoundError):  # another process has completed or removed it
            if path.stat().st_mtime < time.time() - _ABANDONED:
                path.unlink()
    gone = []
    total = sum(entry.size for entry in others) + size
    for entry in others:
        if total > most:
            gone.append(entry)
            total -= entry.size
    if size > most or size > shutil.disk_usage(place).free + sum(entry.size for entry in gone):
        return False
    for entry in gone:
        entry.path.unlink(missing_ok=True)
    return True
