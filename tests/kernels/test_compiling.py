"""Runs the cases in new processes: after Triton's interpreter has run in one, it cannot compile there."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")


def run(cases: str, *, passed: int) -> None:
    path = Path(__file__).with_name(cases)
    command = [sys.executable, "-m", "pytest", "-n", "0", "--noconftest", "-p", "no:cacheprovider", str(path)]
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=1500, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{passed} passed" in done.stdout


@pytest.mark.slow
def test_kernels_are_compiled_ahead() -> None:
    run("compiling_cases.py", passed=4)


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="on a GPU the other tests compile the kernels")
def test_kernels_compile_for_several_architectures() -> None:
    """sm_80, sm_89 and sm_90: whatever rows, types and heads a model has."""
    run("architecture_cases.py", passed=102)
