"""The user's cache directory, for what is compiled or measured once per machine."""

from __future__ import annotations

import atexit
import functools
import hashlib
import logging
import os
import shutil
import stat
import tempfile
from collections.abc import Callable
from pathlib import Path

log = logging.getLogger("ssd")


def directory() -> Path:
    """`lasting`; where there is none, a new folder for this process."""
    try:
        return lasting()
    except OSError as error:
        return _for_this_process(_place(), str(error))


def lasting() -> Path:
    """The user's cache; without a home (a container, say) a folder among temporary files.

    Libraries are loaded from it, so nobody else may write to it: OSError if it is not ours, or cannot be made.
    """
    found = _place()
    found.mkdir(mode=0o700, parents=True, exist_ok=True)
    if not _is_private(found, stat.S_IFDIR):
        raise OSError(f"it must be a directory of yours that nobody else can write to (`chmod 700 {found}`)")
    return found


def _place() -> Path:
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "ssd"
    except RuntimeError:
        return Path(tempfile.gettempdir()) / f"ssd-{os.getuid()}"


def compiled(stem: str, suffix: str, make: Callable[[], bytes]) -> Path:
    """A file with what `make` returns: in the cache, for later processes too, if it can be kept there.

    Between stem and suffix its name has the hash of its contents. So a file that was cut off or overwritten is found
    out before it is loaded (a library that was cut off ends the process with SIGBUS), and made anew.
    """
    folder = directory()
    found = list(folder.glob(f"{stem}-*{suffix}"))
    for path in found:
        if _is_intact(path, stem, suffix):
            return path
    if found:
        log.warning("%s is damaged, or others can write to it: it is compiled anew", found[0])
    contents = make()
    name = _name(stem, suffix, contents)
    try:
        return _write(folder / name, contents)
    except OSError as error:
        return _write(_for_this_process(folder, str(error)) / name, contents)


def _name(stem: str, suffix: str, contents: bytes) -> str:
    return f"{stem}-{hashlib.sha256(contents).hexdigest()[:20]}{suffix}"


def _is_intact(path: Path, stem: str, suffix: str) -> bool:
    try:
        return _is_private(path, stat.S_IFREG) and path.name == _name(stem, suffix, path.read_bytes())
    except OSError:
        return False


def _write(path: Path, contents: bytes) -> Path:
    """Under its name there is the whole file or none, whatever other processes do, and after a crash of the machine."""
    handle, scratch = tempfile.mkstemp(dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(contents)
            file.flush()
            os.fsync(file.fileno())
        os.replace(scratch, path)
    except BaseException:
        os.unlink(scratch)
        raise
    return path


def _for_this_process(folder: Path, reason: str) -> Path:
    log.warning("kernels are compiled for this process only, since they cannot be kept in %s: %s", folder, reason)
    return _process_directory()


@functools.cache
def _process_directory() -> Path:
    """Removed when the process ends."""
    made = tempfile.mkdtemp(prefix="ssd-")
    atexit.register(shutil.rmtree, made, ignore_errors=True)
    return Path(made)


def _is_private(path: Path, kind: int) -> bool:
    """Whether it is a file or directory (not a link to one) of this user's, and nobody else can write to it."""
    found = path.lstat()
    return stat.S_IFMT(found.st_mode) == kind and found.st_uid == os.geteuid() and not found.st_mode & 0o022
