"""The file of chosen products. The products themselves need a GPU: `tests/gpu/test_gpu_linear.py`."""

from __future__ import annotations

import ctypes
from pathlib import Path

import pytest

cublaslt = pytest.importorskip("ssd.kernels.cuda.cublaslt", reason="triton is not installed")


def test_choices_are_read_back(tmp_path: Path) -> None:
    algorithm = (ctypes.c_uint64 * 8)(1, 2**64 - 1, 3)
    first = cublaslt.Choices(tmp_path / "choices")
    first.set("a", algorithm)
    first.set("b", None)
    for choices in (first, cublaslt.Choices(tmp_path / "choices")):
        assert "a" in choices
        assert "b" in choices
        assert "c" not in choices
        assert list(choices["a"]) == list(algorithm)
        assert choices["b"] is None


@pytest.mark.parametrize(
    "line", ["", "{", "[]", "[1]", '["x", 5]', '["x", ["y"]]', '["x", [1, 2, 3, 4, 5, 6, 7, 8, 9]]', "\xff"]
)
def test_a_broken_line_is_left_out(tmp_path: Path, line: str) -> None:
    path = tmp_path / "choices"
    path.write_text(line + "\n" + '["good", []]\n', encoding="latin-1")
    choices = cublaslt.Choices(path)
    assert "x" not in choices
    assert ("good" in choices) == line.isascii()


def test_a_file_that_cannot_be_written_is_done_without(tmp_path: Path) -> None:
    choices = cublaslt.Choices(tmp_path / "missing" / "choices")
    choices.set("a", None)
    assert "a" in choices


def test_a_warning_is_repeated_by_the_next_process(tmp_path: Path) -> None:
    """Catches a GPU whose bits differ, and that says so only once."""
    choices = cublaslt.Choices(tmp_path / "choices")
    choices.set("a", None, keep=False)
    assert "a" in choices
    assert "a" not in cublaslt.Choices(tmp_path / "choices")
