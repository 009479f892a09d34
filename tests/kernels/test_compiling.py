"""Runs `compiling_cases.py` in a new process: after Triton's interpreter has run in one, it cannot compile there."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="triton is not installed")


@pytest.mark.slow
def test_kernels_are_compiled_ahead() -> None:
    cases = Path(__file__).with_name("compiling_cases.py")
    command = [sys.executable, "-m", "pytest", "-n", "0", "-p", "no:cacheprovider", "--noconftest", str(cases)]
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "3 passed" in done.stdout
