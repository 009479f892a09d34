"""The user's cache of compiled kernels: what is damaged or can be written by others is not loaded, whatever it is."""

from __future__ import annotations

import errno
import functools
import logging
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from ssd.kernels import cache
from ssd.kernels.cpu import build, variants

CONTENTS = b"\x7fELF" + bytes(range(256)) * 64


@pytest.fixture
def no_home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Temporary files are in a folder of the test, and the cache is one of them; answers with its place."""

    def home() -> Path:
        raise RuntimeError

    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", home)
    monkeypatch.setattr(cache.tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(cache, "_process_directory", functools.cache(cache._process_directory.__wrapped__))
    return tmp_path / f"ssd-{os.getuid()}"


def test_a_cache_without_a_home_is_private(no_home: Path) -> None:
    assert cache.directory() == no_home
    assert no_home.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("trick", ["writable", "link", "file", "stranger"])
def test_a_cache_that_others_could_have_made_is_not_used(
    trick: str, no_home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "theirs").mkdir(mode=0o700)
    if trick == "link":
        no_home.symlink_to(tmp_path / "theirs")
    elif trick == "file":
        no_home.touch()
    else:
        no_home.mkdir(mode=0o700)
        no_home.chmod(0o777 if trick == "writable" else 0o700)
    if trick == "stranger":
        monkeypatch.setattr(os, "geteuid", lambda: no_home.stat().st_uid + 1)
    used = cache.directory()
    assert used not in (no_home, tmp_path / "theirs")
    assert used.stat().st_mode & 0o777 == 0o700
    assert cache.directory() == used


@pytest.fixture
def folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The cache, where a compiler writes CONTENTS; temporary files are in a folder of the test, too."""
    (tmp_path / "temporary").mkdir()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(cache.tempfile, "tempdir", str(tmp_path / "temporary"))
    monkeypatch.setattr(cache, "_process_directory", functools.cache(cache._process_directory.__wrapped__))
    monkeypatch.setattr(build, "_run", lambda command: Path(command[command.index("-o") + 1]).write_bytes(CONTENTS))
    return tmp_path / "ssd"


def compiled() -> Path:
    return build._compiled([sys.executable], variants.Variant("any"))


def warnings(caplog: pytest.LogCaptureFixture) -> list[logging.LogRecord]:
    """Of the cache: without those that something is compiled."""
    return [record for record in caplog.records if record.name == "ssd"]


def test_compiling_is_announced_before_it_begins(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Catches half a minute in which nothing is said: a warning is shown to whoever has not set up logging, too."""
    said: list[tuple[str, ...]] = []
    run = build._run
    monkeypatch.setattr(build, "_run", lambda command: (said.append(tuple(caplog.messages)), run(command)))
    for _ in range(2):
        build._compiled([sys.executable], variants.Variant("avx2"))
    assert said == [("compiling CPU kernels (avx2), once for this machine: takes up to half a minute",)]
    assert [record.levelno for record in caplog.records] == [logging.WARNING]


def damage(path: Path, kind: str) -> None:
    if kind == "others can write":
        path.chmod(0o777)
        return
    path.unlink()
    if kind == "directory":
        path.mkdir()
    elif kind == "link":
        path.symlink_to(path.with_suffix(".other"))
        path.with_suffix(".other").write_bytes(CONTENTS)
    else:
        foreign = {"text": b"#!/bin/sh\n", "library": Path(sys.executable).read_bytes(), "empty": b""}
        path.write_bytes(foreign.get(kind, CONTENTS[:4096]))


def test_what_was_compiled_is_kept(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = compiled()
    assert (path.parent, path.read_bytes(), path.stat().st_mode & 0o777) == (folder, CONTENTS, 0o600)
    before = path.stat()
    assert compiled() == path
    assert path.stat().st_ino == before.st_ino
    assert list(folder.iterdir()) == [path]
    assert not warnings(caplog)


@pytest.mark.parametrize("kind", ["cut off", "empty", "text", "library", "link", "others can write"])
def test_a_damaged_file_is_compiled_anew(folder: Path, caplog: pytest.LogCaptureFixture, kind: str) -> None:
    """Loading it would end the process (SIGBUS), fail, or run what others wrote; the user is told once."""
    path = compiled()
    damage(path, kind)
    with caplog.at_level(logging.WARNING, logger="ssd"):
        found = compiled()
        assert (found.read_bytes(), found.is_symlink(), found.stat().st_mode & 0o777) == (CONTENTS, False, 0o600)
        assert compiled() == found
    assert len(warnings(caplog)) == 1
    assert f"{path} is damaged" in caplog.text


def test_a_directory_in_its_place(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    """It may be somebody's: it stays, and what was compiled serves this process."""
    path = compiled()
    damage(path, "directory")
    with caplog.at_level(logging.WARNING, logger="ssd"):
        found = compiled()
    assert found.read_bytes() == CONTENTS
    assert found.parent.parent == folder.parent / "temporary"
    assert list(folder.iterdir()) == [path]
    assert str(path) in caplog.text


@pytest.mark.parametrize("function", ["fsync", "replace"])
def test_a_disk_that_is_full_in_the_middle_of_a_file(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, function: str
) -> None:
    """Nothing stays behind there, and what was compiled serves this process."""
    once = [OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))]
    real = getattr(os, function)

    def full(*arguments: object) -> None:
        if once:
            raise once.pop()
        real(*arguments)

    monkeypatch.setattr(os, function, full)
    with caplog.at_level(logging.WARNING, logger="ssd"):
        assert compiled().read_bytes() == CONTENTS
    assert not list(folder.iterdir())
    assert len(warnings(caplog)) == 1
    assert f"cannot be kept in {folder}: [Errno 28] No space left" in caplog.text


# --- a process that starts with such a cache, and loads the library ---------------------------------------------------


def start(tmp_path: Path, *before: str) -> str:
    """What a process logs that loads the kernels, with a "compiler" that copies a library; `before`: its command."""
    compiler = build.find_compiler()
    if compiler is None:
        pytest.skip("no C compiler")
    compiled = build._compiled(compiler, variants.usable()[0])
    copies = tmp_path / "copies"
    if not copies.exists():  # a compiler that was changed is another one
        copies.write_text(f'#!/bin/sh\nwhile [ "$1" != -o ]; do shift; done\nexec cp {compiled} "$2"\n')
        copies.chmod(0o755)
    code = "from ssd.kernels.cpu import library; library.load()"
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path), "CC": str(copies)}
    done = subprocess.run(
        [*before, sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stderr


@pytest.mark.slow
def test_a_library_that_was_cut_off_does_not_end_the_process(tmp_path: Path) -> None:
    """Mapped beyond its end, it would: SIGBUS, without a word."""
    [line] = start(tmp_path).splitlines()
    assert line.startswith("compiling CPU kernels (")
    [path] = (tmp_path / "ssd").iterdir()
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    assert f"{path} is damaged" in start(tmp_path)
    assert path.read_bytes() == whole


@pytest.mark.slow
@pytest.mark.parametrize(("options", "reason"), [("size=16k", "No space left"), ("ro", "Read-only file system")])
def test_a_cache_that_cannot_be_written_to(tmp_path: Path, options: str, reason: str) -> None:
    """A real file system, in a name space of the process: kernels are loaded from a temporary folder."""
    apart = ("unshare", "--map-root-user", "--mount")
    if not shutil.which("unshare") or subprocess.run([*apart, "true"], capture_output=True, check=False).returncode:
        pytest.skip("no name spaces of one's own here")
    (tmp_path / "ssd").mkdir(mode=0o700)
    script = f'mount -t tmpfs -o mode=700,{options} none {tmp_path}/ssd && exec "$@"'
    said = start(tmp_path, *apart, "sh", "-c", script, "sh")
    assert f"cannot be kept in {tmp_path}/ssd" in said
    assert reason in said
