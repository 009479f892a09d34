"""What a contributor meets first: workflows, hooks, templates."""

from __future__ import annotations

import re
import shutil
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest

yaml: Any = pytest.importorskip("yaml")
ROOT = Path(__file__).parents[2]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
CONFIGURATION = [*sorted((ROOT / ".github").rglob("*.yml")), ROOT / ".pre-commit-config.yaml"]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


@pytest.mark.skipif(shutil.which("actionlint") is None, reason="actionlint is not installed")
def test_actionlint_finds_nothing_in_the_workflows() -> None:
    done = subprocess.run(["actionlint", *map(str, WORKFLOWS)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("file", CONFIGURATION, ids=lambda file: file.name)
def test_configuration_can_be_read_and_names_no_other_host(file: Path) -> None:
    assert isinstance(yaml.safe_load(file.read_text()), dict)
    assert "://" not in file.read_text()


def test_ci_is_what_ci_run_does_on_every_python_that_is_supported() -> None:
    """Catches a workflow with steps of its own, and a Python that is promised and not tested."""
    job = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text())["jobs"]["test"]
    assert [step["run"] for step in job["steps"] if "run" in step] == [".ci/run"]
    promised = re.findall(r"Python :: (3\.\d+)", "\n".join(PROJECT["project"]["classifiers"]))
    assert job["strategy"]["matrix"]["python"] == promised
    assert {"-arm" in machine for machine in job["strategy"]["matrix"]["machine"]} == {True, False}


def test_hooks_run_what_make_check_runs() -> None:
    """From .venv, so that their versions are those that pyproject.toml pins."""
    [repository] = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    assert repository["repo"] == "local"
    tools = [hook["entry"].removeprefix(".venv/bin/").split()[:2] for hook in repository["hooks"]]
    assert tools == [["ruff", "check"], ["ruff", "format"], ["mypy"]]
    pinned = [name.split("==")[0] for name in PROJECT["project"]["optional-dependencies"]["dev"] if "==" in name]
    assert {"ruff", "mypy"} <= set(pinned)
    makefile = (ROOT / "Makefile").read_text()
    assert all(f"$(BIN)/{' '.join(tool)}" in makefile for tool in tools)


def test_reports_of_bugs_ask_for_the_versions() -> None:
    for name in ("bug", "speed"):
        form = yaml.safe_load((ROOT / ".github" / "ISSUE_TEMPLATE" / f"{name}.yml").read_text())
        [versions] = [part for part in form["body"] if part.get("id") == "versions"]
        assert versions["attributes"]["label"] == "ssd version"
        assert versions["validations"]["required"]
