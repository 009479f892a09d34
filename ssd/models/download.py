"""Downloads a model from the Hugging Face hub into the hub's cache: only the files that running it needs.

Every file goes to the cache's `blobs/HASH.incomplete`, is checked against its size and hash, becomes `blobs/HASH`, and
is linked into the snapshot. So a download that was interrupted goes on where it stopped, by a later process, too: the
hub's library itself throws such a part away. `refs/REVISION` is written last: what it names is complete.

Endpoint, token, offline mode and time limits are those of the hub's library (HF_ENDPOINT, HF_TOKEN, ...).
"""

from __future__ import annotations

import errno
import hashlib
import logging
import os
import re
import shutil
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from threading import Event
from typing import IO, Any, Final
from uuid import uuid4

from ssd.errors import ModelNotFound, SSDError, one_line
from ssd.models.hub import HubName, cache_entry, cache_places, download_folder, local_model
from ssd.models.repository import CONFIG, INDEX, checkpoint_names, chosen_gguf, gguf_names, gigabytes

loading = logging.getLogger("ssd.loading")

Advance = Callable[[int], object]  # takes bytes that were downloaded; fewer than 0: those are downloaded again
_THREADS: Final = 4  # files at the same time
_ATTEMPTS: Final = 5  # connections in a row that bring nothing
_LOCK_SECONDS: Final = 0.5  # between two looks whether the download was stopped
_LARGEST: Final = 50_000_000_000  # bytes of a file that the hub sends by plain HTTP
_COMMIT: Final = re.compile(r"[0-9a-f]{40}")
_HASH: Final = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")  # of git, or SHA-256


@dataclass(frozen=True)
class RemoteFile:
    """A file on the hub. `hash`: SHA-256 of a large file, git's of a small one."""

    name: str
    size: int
    hash: str

    @classmethod
    def of(cls, sibling: Any) -> RemoteFile:
        """What the hub says of a file; SSDError if that is no file of a cache."""
        lfs = sibling.lfs
        size, own_hash = (lfs.size, lfs.sha256) if lfs else (sibling.size, sibling.blob_id)
        name = PurePosixPath(sibling.rfilename)
        if name.is_absolute() or ".." in name.parts or not name.parts or "\\" in str(name):
            raise SSDError(
                f"the hub lists {str(name)[:100]!r}, which is no file of a repository: nothing was downloaded"
            )
        if type(size) is not int or size < 0 or not _HASH.fullmatch(str(own_hash)):
            raise SSDError(f"the hub says no size or no hash of {str(name)[:100]!r}: check HF_ENDPOINT")
        return cls(sibling.rfilename, size, own_hash)


@dataclass(frozen=True)
class Snapshot:
    """A commit of a repository, and its entry in the cache."""

    repository: str
    commit: str
    entry: Path

    def blob(self, file: RemoteFile) -> Path:
        return self.entry / "blobs" / file.hash

    def partial(self, file: RemoteFile) -> Path:
        """What is there of a file until it is complete."""
        return self.entry / "blobs" / f"{file.hash}.incomplete"

    def present(self, file: RemoteFile) -> int:
        """Bytes of a file that are there."""
        for path in (self.blob(file), self.partial(file), self.blob(file)):  # again: it may be complete by now
            with suppress(FileNotFoundError):
                return min(file.size, path.stat().st_size)
        return 0

    def link(self, file: RemoteFile) -> Path:
        """Adds a file whose blob is there."""
        path = self.entry / "snapshots" / self.commit / file.name
        if not path.is_file():
            path.parent.mkdir(parents=True, exist_ok=True)
            unfinished = _beside(path)
            try:
                unfinished.symlink_to(os.path.relpath(self.blob(file), path.parent))
            except OSError:  # a file system without links
                shutil.copyfile(self.blob(file), unfinished)
            unfinished.replace(path)
        return path


@dataclass(frozen=True)
class Plan:
    """What is to be downloaded.

    `gguf`: the file that was chosen, None for a checkpoint in safetensors; `is_default`: from several, without a wish.
    """

    name: HubName
    revision: str
    snapshot: Snapshot
    files: tuple[RemoteFile, ...]
    gguf: str | None
    is_default: bool

    @property
    def size(self) -> int:
        return sum(file.size for file in self.files)

    @property
    def present(self) -> int:
        """Bytes that are there already, those of unfinished files counted."""
        return sum(map(self.snapshot.present, self.files))


def find_or_download(model: str, field: str = "model") -> Path:
    """The snapshot or GGUF file of a hub name: from a local cache if one has it, else downloaded."""
    name = HubName.of(model)
    assert name is not None, model
    found = local_model(name)
    if found is not None:
        return found
    loading.info("%s is in no local cache: asking the Hugging Face hub", model)
    try:
        planned = plan(name)
        return download(planned, _Logged(planned).advance)
    except SSDError as error:
        looked = "\n  ".join(str(place) for place in cache_places(name.repository))
        raise type(error)(
            f"{field}={model!r} was found as a whole in none of these places:\n  {looked}\n"
            f"and could not be downloaded: {error}\n"
            f"Run `ssd pull {model}` on a machine with network access, set SSD_HF_CACHE to the folder that holds "
            f"{cache_entry(name.repository)}, or pass the model's path."
        ) from error


def plan(name: HubName, revision: str | None = None) -> Plan:
    """Asks the hub which files there are, and chooses."""
    from huggingface_hub import HfApi, constants

    with _explained(name):
        info = HfApi(endpoint=constants.ENDPOINT).model_info(
            name.repository, revision=revision, files_metadata=True, timeout=constants.HF_HUB_ETAG_TIMEOUT
        )
        if not _COMMIT.fullmatch(str(info.sha)):
            raise SSDError(f"the hub answered with the commit {str(info.sha)[:50]!r}: check HF_ENDPOINT")
        snapshot = Snapshot(name.repository, str(info.sha), download_folder() / cache_entry(name.repository))
        files = {file.name: file for file in map(RemoteFile.of, info.siblings or ())}
        ggufs = gguf_names(files)
        tensors = CONFIG in files and any("/" not in each and each.endswith(".safetensors") for each in files)
        gguf, index = None, None
        if name.file is not None or (ggufs and not tensors):
            gguf = chosen_gguf(name.repository, {file.name: file.size for file in files.values()}, name.file)
        elif INDEX in files:
            _fetch(snapshot, files[INDEX], lambda size: None, Event())
            index = snapshot.link(files[INDEX])
        wanted = [gguf] if gguf else checkpoint_names(name.repository, files, index)
    is_default = gguf is not None and name.file is None and len(ggufs) > 1
    return Plan(name, revision or "main", snapshot, tuple(files[each] for each in wanted), gguf, is_default)


def download(plan: Plan, advance: Advance) -> Path:
    """Downloads what is missing, and returns the snapshot or the GGUF file."""
    _check_room(plan)
    stopped, snapshot = Event(), plan.snapshot
    with _explained(plan.name):
        with ThreadPoolExecutor(_THREADS) as pool:
            running = [pool.submit(_fetch, snapshot, file, advance, stopped) for file in plan.files]
            try:
                for each in as_completed(running):
                    each.result()
            except BaseException:  # Ctrl-C, too
                stopped.set()
                pool.shutdown(cancel_futures=True)
                raise
        paths = [snapshot.link(file) for file in sorted(plan.files, key=lambda file: file.name == CONFIG)]
        if plan.revision != snapshot.commit:
            _write(snapshot.entry / "refs" / plan.revision, snapshot.commit)
    return paths[0] if plan.gguf else paths[-1].parent


# --- one file ---------------------------------------------------------------------------------------------------------


def _fetch(snapshot: Snapshot, file: RemoteFile, advance: Advance, stopped: Event) -> None:
    """Makes the blob of a file, beginning with what an earlier run has left of it."""
    from huggingface_hub import constants, hf_hub_url
    from huggingface_hub.errors import HfHubHTTPError, HTTPError

    blob, partial = snapshot.blob(file), snapshot.partial(file)
    lock = snapshot.entry.parent / ".locks" / snapshot.entry.name / f"{file.hash}.lock"
    for folder in (blob.parent, lock.parent):
        folder.mkdir(parents=True, exist_ok=True)
    with _locked(lock, stopped):
        if blob.is_file():
            return
        url = hf_hub_url(snapshot.repository, file.name, revision=snapshot.commit, endpoint=constants.ENDPOINT)
        with partial.open("ab") as out:
            if out.tell() > file.size:
                _empty(out)
            failures = 0
            while out.tell() < file.size:
                before = out.tell()
                try:
                    _receive(url, out, file, advance, stopped)
                except HTTPError as error:  # of the connection; what the server itself refuses is an HfHubHTTPError
                    failures = 0 if out.tell() > before else failures + 1
                    if isinstance(error, HfHubHTTPError) or failures > _ATTEMPTS or stopped.wait(1.0):
                        raise
        if _hash(partial, file) != file.hash:
            partial.unlink()
            raise SSDError(f"what was downloaded of {file.name} is not what the hub describes (hash {file.hash[:12]}…)")
        partial.rename(blob)


@contextmanager
def _locked(lock: Path, stopped: Event) -> Iterator[None]:
    """Holds a lock, unless the download is stopped while another process holds it, perhaps for hours."""
    from huggingface_hub.utils import WeakFileLock

    with ExitStack() as held:
        while True:
            try:
                held.enter_context(WeakFileLock(lock, timeout=_LOCK_SECONDS))
                break
            except TimeoutError:
                if stopped.is_set():
                    raise SSDError("the download was stopped") from None
        yield


def _receive(url: str, out: IO[bytes], file: RemoteFile, advance: Advance, stopped: Event) -> None:
    """Appends what is missing of a file: all that one connection sends."""
    from huggingface_hub import constants
    from huggingface_hub.utils import build_hf_headers, get_session, hf_raise_for_status

    start = out.tell()
    headers = {**build_hf_headers(), "Accept-Encoding": "identity", "Range": f"bytes={start}-"}
    with get_session().stream("GET", url, headers=headers, timeout=constants.HF_HUB_DOWNLOAD_TIMEOUT) as response:
        hf_raise_for_status(response)
        if response.status_code != 206 and start:  # the server sends all of it again
            _empty(out)
            advance(-start)
        for piece in response.iter_bytes():
            if stopped.is_set():
                raise SSDError("the download was stopped")
            if out.tell() + len(piece) > file.size:
                raise SSDError(f"the server sends more of {file.name} than its {file.size} bytes")
            out.write(piece)
            advance(len(piece))
    if out.tell() < file.size:
        raise SSDError(f"the server sends {out.tell()} bytes of {file.name} only, not {file.size}")


def _empty(file: IO[bytes]) -> None:
    file.seek(0)
    file.truncate()


def _hash(path: Path, file: RemoteFile) -> str:
    with path.open("rb") as content:
        if len(file.hash) == 64:
            return hashlib.file_digest(content, "sha256").hexdigest()
        return hashlib.sha1(b"blob %d\0" % file.size + content.read(), usedforsecurity=False).hexdigest()


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = _beside(path)
    unfinished.write_text(text, encoding="utf-8")
    unfinished.replace(path)


def _beside(path: Path) -> Path:
    """A name that no other writer has, in this process or another, for what replaces a file at once."""
    return path.with_name(f".{path.name}.{uuid4().hex}")


def _check_room(plan: Plan) -> None:
    missing, cache = plan.size - plan.present, plan.snapshot.entry.parent
    free = shutil.disk_usage(next(folder for folder in (cache, *cache.parents) if folder.exists())).free
    if missing > free:
        raise SSDError(
            f"{plan.name} needs {gigabytes(missing)} more in {cache}, where {gigabytes(free)} are free: make room, or "
            "set SSD_HF_CACHE to a folder on a larger disk"
        )
    for file in plan.files:
        if file.size > _LARGEST:
            raise SSDError(
                f"{file.name} has {gigabytes(file.size)}, and the hub sends files of {gigabytes(_LARGEST)} at most in "
                f"this way: run `hf download {plan.name.repository} {file.name}`, and ssd finds it"
            )


class _Logged:
    """Says how far a download is, once a second at most."""

    def __init__(self, plan: Plan) -> None:
        self._name, self._size, self._done, self._next = str(plan.name), plan.size, plan.present, 0.0

    def advance(self, size: int) -> None:
        self._done += size
        if time.monotonic() >= self._next:
            self._next = time.monotonic() + 1.0
            loading.info("downloading %s: %s of %s", self._name, gigabytes(self._done), gigabytes(self._size))


# --- errors -----------------------------------------------------------------------------------------------------------


@contextmanager
def _explained(name: HubName) -> Iterator[None]:
    """Turns what the hub's library raises into an SSDError that says what to do."""
    try:
        yield
    except SSDError:
        raise
    except Exception as error:  # the classes of the HTTP client differ between versions of the library
        raise _explanation(error, name) from error


def _explanation(error: Exception, name: HubName) -> SSDError:
    from huggingface_hub import constants, errors

    if isinstance(error, errors.LocalEntryNotFoundError) and isinstance(error.__cause__, Exception):
        error = error.__cause__  # what the library has met before it looked into the cache
    page = f"{constants.ENDPOINT}/{name.repository}"
    again = "what was downloaded is kept, and the same command goes on with it"
    status = error.response.status_code if isinstance(error, errors.HfHubHTTPError) else None
    match error:
        case errors.OfflineModeIsEnabled():
            return ModelNotFound(f"{name} is not on this machine, and HF_HUB_OFFLINE is set: unset it to download")
        case errors.GatedRepoError():
            return ModelNotFound(
                f"{name.repository} is gated: accept its licence at {page}, then set HF_TOKEN to a token of your "
                "account (or run `hf auth login`)"
            )
        case errors.RepositoryNotFoundError():
            return ModelNotFound(
                f"there is no {page}, or it is private: check the name; a private one needs HF_TOKEN (or "
                "`hf auth login`)"
            )
        case errors.RevisionNotFoundError():
            return ModelNotFound(f"{name.repository} has no such revision: see {page}/tree/main")
        case errors.HFValidationError():
            return ModelNotFound(f"{name.repository!r} cannot be a name on the hub ({one_line(error)})")
        case OSError(errno=errno.ENOSPC | errno.EDQUOT):
            return SSDError(f"the disk is full: make room, or set SSD_HF_CACHE to a folder on a larger disk; {again}")
        case OSError(errno=errno.EACCES | errno.EROFS | errno.EPERM):
            return SSDError(f"the cache cannot be written ({error}): set SSD_HF_CACHE to a folder that can")
        case _ if status in (401, 403):
            return ModelNotFound(f"{page} refuses access ({status}): check HF_TOKEN (or run `hf auth login`)")
        case _ if status is not None:
            return ModelNotFound(f"the hub answered with status {status}: try again later; {again}")
    return ModelNotFound(
        f"{constants.ENDPOINT} could not be reached, or the connection broke ({one_line(error)}): check the network, "
        f"HTTPS_PROXY and HF_ENDPOINT, then run `ssd pull {name}`; {again}"
    )
