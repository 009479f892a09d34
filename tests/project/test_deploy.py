"""The files in deploy/: what can be checked of them without Docker and systemd."""

from __future__ import annotations

import configparser
import json
import re
import shlex
from pathlib import Path

import pytest
import typer.main

from ssd.cli.main import app

DEPLOY = Path(__file__).parents[2] / "deploy"


def check_serve_command(command: list[str]) -> dict[str, str]:
    """Every option of an `ssd serve` exists; returns their values."""
    assert Path(command[0]).name == "ssd"
    assert command[1] == "serve"
    parameters = typer.main.get_command(app).commands["serve"].params  # type: ignore[attr-defined]
    known = {option for parameter in parameters for option in parameter.opts}
    given = {command[i]: command[i + 1] for i, word in enumerate(command) if word.startswith("--")}
    assert given
    assert set(given) <= known
    return given


@pytest.fixture(scope="module")
def unit() -> configparser.ConfigParser:
    parser = configparser.ConfigParser(interpolation=None)
    parser.optionxform = str  # type: ignore[assignment,method-assign]
    parser.read(DEPLOY / "ssd.service")
    return parser


def test_the_unit_runs_the_server_as_a_user_of_its_own(unit: configparser.ConfigParser) -> None:
    assert unit.sections() == ["Unit", "Service", "Install"]
    service = unit["Service"]
    assert service["User"] == "ssd"
    given = check_serve_command(shlex.split(service["ExecStart"]))
    assert int(service["TimeoutStopSec"]) > float(given["--drain-timeout"]), "a drain is not cut off"
    assert service["ExecStartPost"].endswith(f"http://{given['--host']}:{given['--port']}/health/ready")
    assert unit["Install"]["WantedBy"] == "multi-user.target"


@pytest.fixture(scope="module")
def dockerfile() -> list[tuple[str, str]]:
    """Instructions and their arguments."""
    text = re.sub(r"^#.*\n", "", (DEPLOY / "Dockerfile").read_text(), flags=re.MULTILINE).replace("\\\n", " ")
    return [(line.split()[0], line.split(maxsplit=1)[1]) for line in text.splitlines() if line.strip()]


def test_the_image_runs_the_server_as_a_user_of_its_own(dockerfile: list[tuple[str, str]]) -> None:
    names = [name for name, _ in dockerfile]
    last = dict(dockerfile)
    assert names[0] == "FROM"
    assert re.fullmatch(r"nvidia/cuda:[\w.-]+", last["FROM"])
    assert last["USER"] == "ssd"
    assert names.index("USER") < names.index("ENTRYPOINT")
    given = check_serve_command(json.loads(last["ENTRYPOINT"]) + json.loads(last["CMD"]))
    assert given["--port"] == last["EXPOSE"]
    assert f"http://127.0.0.1:{given['--port']}/health'" in last["HEALTHCHECK"]
    assert f"HF_HOME={last['VOLUME']}" in [arguments for name, arguments in dockerfile if name == "ENV"]


def test_the_image_s_packages_are_extras(dockerfile: list[tuple[str, str]]) -> None:
    """And nothing of the working copy gets into it that is not the project's."""
    [extras] = [m[1] for _, arguments in dockerfile if (m := re.search(r"'/src\[(.*?)\]'", arguments))]
    project = (DEPLOY.parent / "pyproject.toml").read_text()
    assert all(re.search(rf"^{extra} = \[", project, re.MULTILINE) for extra in extras.split(","))
    assert {".git", ".venv"} <= set((DEPLOY / "Dockerfile.dockerignore").read_text().split())
