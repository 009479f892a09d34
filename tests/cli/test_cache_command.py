"""`ssd cache`: what is kept for later starts, and how it is removed."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from ssd.cli.main import app
from ssd.models import weight_folder
from ssd.models.weight_file import SUFFIX, Writer


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv(weight_folder.LIMIT, "2.5")
    return tmp_path / "ssd" / "weights"


def keep(folder: Path, model: str, size: int, hours: float) -> Path:
    weight_folder.folder()
    writer, path = Writer(folder), folder / f"{Path(model).name}-0{SUFFIX}"
    writer.add(memoryview(bytes(size)))
    writer.publish(path, {"key": "", "model": model, "weights": "Q4_K for float32"})
    writer.close()
    used = time.time() - 3600 * hours - 1
    os.utime(path, (used, used))
    return path


def run(*arguments: str, fails: bool = False) -> str:
    done = CliRunner(env={"COLUMNS": "100"}).invoke(app, ["cache", *arguments])
    assert done.exit_code == fails
    return done.stdout + done.stderr


def test_models_are_listed_the_last_used_first(folder: Path) -> None:
    assert run() == f"{folder}: 0.0 MiB of at most 2.5 GiB\n"
    keep(folder, "small.gguf", 3 << 20, 50)
    keep(folder, "org/large", 9 << 20, 3)
    (folder / f"broken{SUFFIX}").touch()
    said = [" ".join(line.split()) for line in run().splitlines()]
    assert said == [
        f"{folder}: 12.1 MiB of at most 2.5 GiB",
        "model weights size last used",
        "broken.weights damaged 0.0 MiB 0 seconds ago",
        "org/large Q4_K for float32 9.1 MiB 3 hours ago",
        "small.gguf Q4_K for float32 3.1 MiB 2 days ago",
    ]


def test_one_model_is_cleared_or_all(folder: Path) -> None:
    """A name that is not there removes nothing, and says which there are."""
    small, large = keep(folder, "small.gguf", 3 << 20, 50), keep(folder, "large.gguf", 9 << 20, 3)
    said = run("clear", "smal.gguf", fails=True)
    assert "NAME='smal.gguf' is not in the cache: use one of the models there (small.gguf, large.gguf)" in said
    assert run("clear", "small.gguf") == "removed 3.1 MiB in 1 file\n"
    assert large.exists()
    assert not small.exists()
    (folder / f"broken{SUFFIX}").touch()
    assert run("clear") == "removed 9.1 MiB in 2 files\n"
    assert not list(folder.iterdir())


def test_a_place_that_others_can_write_to_is_an_error(folder: Path) -> None:
    folder.parent.mkdir(mode=0o777)
    folder.parent.chmod(0o777)
    assert "it must be a directory of yours" in run(fails=True)
