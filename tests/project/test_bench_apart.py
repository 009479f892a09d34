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
        [sys.executable, SCRIPT, "--smoke", "--delays", "1", "--json", out],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    rows = json.loads(out.read_text())["rows"]
    ssd = "batch 1, ssd, K = 3, 16 branches, 1 ms delay"
    assert {name: row["differing"] for name, row in rows.items()} == {"batch 1, ar": 0, "batch 1, sd, K = 3": 0, ssd: 0}
    assert rows[ssd]["hits"] > 0
    assert rows[ssd]["draft_ms"] > 1
