"""The commands import the engine without garbage collections, and have them from then on."""

from __future__ import annotations

import subprocess
import sys

import pytest

AFTER = """
import gc
from ssd.cli.imports import import_llm
import_llm()
print(gc.isenabled(), gc.get_freeze_count() > 100_000)
import_llm()
print(gc.isenabled())
"""


@pytest.mark.slow
def test_garbage_is_collected_once_the_engine_is_imported() -> None:
    done = subprocess.run([sys.executable, "-c", AFTER], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["True True", "True"]
