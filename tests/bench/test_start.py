"""`bench/start.py`: what it measures of a process."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from start import answering  # bench/start.py

PROGRAM = """
import mmap, sys, time
own = bytearray(b"x") * 30_000_000
with open(sys.argv[1], "rb") as file:
    mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
mapped.find(b"x")
time.sleep(0.2)
print("a", flush=True)
time.sleep(60)
"""


def test_memory_is_that_of_the_process_alone_or_of_files(tmp_path: Path) -> None:
    file = tmp_path / "weights"
    file.write_bytes(bytes(50_000_000))
    command = [sys.executable, "-c", PROGRAM, str(file)]
    with answering(command) as first, answering(command) as second:
        assert 30 < first.in_no_file < 50
        assert first.peak > 80 < second.peak
        assert first.alone > 80
        assert 30 < second.alone < 50
        assert second.s > 0.2
        assert second.cpu_s < second.s


def test_a_process_without_an_answer_is_an_error() -> None:
    with pytest.raises(SystemExit, match="no answer"), answering([sys.executable, "-c", ""]):
        pass
