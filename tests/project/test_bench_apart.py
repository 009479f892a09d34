"""`bench/apart.py`: the comparison runs, and tells where the drafts came from."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "bench" / "apart.py"


@pytest.mark.slow
def test_it_runs_on_a_cpu(tmp_path: Path) -> None:
    """Catches texts that differ, a worker that is never asked, and figures that are left out."""
    out = tmp_path / "rows.json"
    done = subprocess.run(
        [sys.executable, SCRIPT, "--smoke", "--delays", "1", "--out", out],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    rows = json.loads(out.read_text())
    assert [(row["method"], row["differing"]) for row in rows] == [("ar", 0), ("sd", 0), ("ssd", 0)]
    assert rows[-1]["hits"] > 0
    assert rows[-1]["draft_ms"] > 1
