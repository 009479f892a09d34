"""The user's cache directory, for what is compiled or measured once per machine."""

from __future__ import annotations

import functools
import logging
import os
import stat
import tempfile
from pathlib import Path

log = logging.getLogger("ssd")


def directory() -> Path:
    """The user's cache; without a home (a container, say) a folder among temporary files.

    Libraries are loaded from it, so nobody else may write to it: if it is not ours, it is a new one for this process.
    """
    try:
        found = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "ssd"
    except RuntimeError:
        found = Path(tempfile.gettempdir()) / f"ssd-{os.getuid()}"
    try:
        found.mkdir(mode=0o700, parents=True, exist_ok=True)
        if is_private(found, stat.S_IFDIR):
            return found
        reason = f"it must be a directory of yours that nobody else can write to (`chmod 700 {found}`)"
    except OSError as error:
        reason = str(error)
    log.warning("kernels are compiled anew, since they cannot be kept in %s: %s", found, reason)
    return Path(_process_directory().name)


@functools.cache
def _process_directory() -> tempfile.TemporaryDirectory[str]:
    """Removed when the process ends."""
    return tempfile.TemporaryDirectory(prefix="ssd-")


def is_private(path: Path, kind: int) -> bool:
    """Whether it is a file or directory (not a link to one) of this user's, and nobody else can write to it."""
    try:
        found = path.lstat()
    except FileNotFoundError:
        return False
    return stat.S_IFMT(found.st_mode) == kind and found.st_uid == os.geteuid() and not found.st_mode & 0o022
