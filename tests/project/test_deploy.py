"""The files in deploy/: what can be checked of them without Docker, and without systemd as the first process."""

from __future__ import annotations

import configparser
import json
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer.main
import yaml

from ssd.cli.main import app
from ssd.draft_server.server import _DRAIN_SECONDS

DEPLOY = Path(__file__).parents[2] / "deploy"
ARGS = "--draft tiny-llama-draft --mode ssd"


def check_serve_command(command: list[str], name: str = "serve") -> dict[str, str]:
    """Every option of an `ssd serve`, or another command, exists; returns their values."""
    assert Path(command[0]).name == "ssd"
    assert command[1] == name
    parameters = typer.main.get_command(app).commands[name].params  # type: ignore[attr-defined]
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
    given = check_serve_command(expanded(service["ExecStart"], {"SSD_MODEL": "tiny-llama", "SSD_ARGS": ARGS}))
    assert (given["--draft"], given["--mode"]) == ("tiny-llama-draft", "ssd")
    check_serve_command(expanded(service["ExecStart"], {"SSD_MODEL": "tiny-llama"}))
    assert int(service["TimeoutStopSec"]) > float(given["--drain-timeout"]), "a drain is not cut off"
    assert service["ExecStartPost"].endswith(f"http://{given['--host']}:{given['--port']}/health/ready")
    assert unit["Install"]["WantedBy"] == "multi-user.target"


def expanded(command: str, environment: dict[str, str]) -> list[str]:
    """As systemd does: $NAME as a word of its own is split at blanks, ${NAME} is one word."""
    words: list[str] = []
    for word in shlex.split(command):
        if re.fullmatch(r"\$\w+", word):
            words += environment.get(word[1:], "").split()
        else:
            words.append(re.sub(r"\$\{(\w+)\}", lambda name: environment[name[1]], word))
    return words


def test_the_unit_of_a_draft_server() -> None:
    parser = configparser.ConfigParser(interpolation=None)
    parser.read(DEPLOY / "ssd-draft.service")
    service = parser["Service"]
    command = expanded(service["ExecStart"], {"SSD_DRAFT": "tiny-llama-draft", "SSD_ARGS": "--http-port 8101"})
    given = check_serve_command(command, "draft-server")
    assert given["--listen"] == f"unix:/run/{service['RuntimeDirectory']}/socket"
    assert int(service["TimeoutStopSec"]) > _DRAIN_SECONDS, "a drain is not cut off"


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd is not installed")
@pytest.mark.parametrize("name", ["ssd.service", "ssd-draft.service"])
def test_systemd_accepts_the_unit(tmp_path: Path, name: str) -> None:
    """Catches a misspelled setting. The programs that it starts are not on this machine."""
    text = re.sub(r"(?<==)/opt/ssd/bin/ssd|(?<==)/usr/bin/curl", sys.executable, (DEPLOY / name).read_text())
    file = tmp_path / name
    file.write_text(text)
    done = subprocess.run(["systemd-analyze", "verify", str(file)], capture_output=True, text=True, check=False)
    assert (done.returncode, [line for line in done.stderr.splitlines() if name in line]) == (0, [])


@pytest.fixture(scope="module")
def dockerfile() -> list[tuple[str, str]]:
    """Instructions and their arguments."""
    text = re.sub(r"^#.*\n", "", (DEPLOY / "Dockerfile").read_text(), flags=re.MULTILINE).replace("\\\n", " ")
    return [(line.split()[0], line.split(maxsplit=1)[1]) for line in text.splitlines() if line.strip()]


def test_the_image_runs_the_server_as_a_user_of_its_own(dockerfile: list[tuple[str, str]], tmp_path: Path) -> None:
    names = [name for name, _ in dockerfile]
    last = dict(dockerfile)
    assert names[:2] == ["ARG", "FROM"]
    assert re.fullmatch(r"BASE=nvidia/cuda:[\w.-]+", last["ARG"])
    assert last["FROM"] == "${BASE}"
    assert last["USER"] == "ssd"
    assert names.index("USER") < names.index("ENTRYPOINT")
    given = check_serve_command(started(last, tmp_path, json.loads(last["CMD"])))
    assert given["--port"] == last["EXPOSE"]
    assert f"http://127.0.0.1:{given['--port']}/health'" in last["HEALTHCHECK"]
    assert f"HF_HOME={last['VOLUME']}" in [arguments for name, arguments in dockerfile if name == "ENV"]


def started(instructions: dict[str, str], folder: Path, command: list[str], args: str = "") -> list[str]:
    """Runs the image's entry point; returns how it starts the server."""
    stub = folder / "ssd"
    stub.write_text('#!/bin/sh\nprintf "%s\\n" ssd "$@"\n')
    stub.chmod(0o755)
    environment = {"PATH": f"{folder}:/usr/bin:/bin", "SSD_ARGS": args}
    entry = json.loads(instructions["ENTRYPOINT"])
    done = subprocess.run([*entry, *command], env=environment, cwd="/", capture_output=True, text=True, check=True)
    return done.stdout.splitlines()


def test_the_image_takes_options_as_arguments_and_in_ssd_args(
    dockerfile: list[tuple[str, str]], tmp_path: Path
) -> None:
    command = started(dict(dockerfile), tmp_path, ["org/a model", "--k", "3"], f"{ARGS} --cors-origin *")
    given = check_serve_command(command)
    assert "org/a model" in command
    assert (given["--k"], given["--draft"], given["--mode"]) == ("3", "tiny-llama-draft", "ssd")
    assert given["--cors-origin"] == "*", "no pattern of files"
    assert started(dict(dockerfile), tmp_path, ["m"]) == ["ssd", "serve", "--host", "0.0.0.0", "--port", "8000", "m"]


def test_the_compose_file_runs_the_image_on_a_cpu(dockerfile: list[tuple[str, str]], tmp_path: Path) -> None:
    """Its variables have defaults, it names what the Dockerfile knows, and only this machine reaches the port."""
    last = dict(dockerfile)
    compose: dict[str, Any] = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
    assert set(compose) == {"services", "volumes"}
    service = compose["services"]["ssd"]
    build = service["build"]
    assert (DEPLOY / build["context"] / build["dockerfile"]).resolve() == DEPLOY / "Dockerfile"
    assert set(build["args"]) == {"BASE"}
    values = [re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", text) for text in service["command"]]
    given = check_serve_command(started(last, tmp_path, values))
    assert given["--device"] == "cpu"
    assert service["ports"] == [f"127.0.0.1:8000:{last['EXPOSE']}"]
    assert service["volumes"] == [f"models:{last['VOLUME']}"]
    assert set(compose["volumes"]) == {"models"}
    assert set(service["environment"]) == {"SSD_ARGS", "SSD_API_KEY", "SSD_ALLOWED_HOSTS"}
    assert service["environment"]["SSD_ALLOWED_HOSTS"] == "${SSD_ALLOWED_HOSTS:-localhost}"


def test_files_that_were_never_run_say_so() -> None:
    for name in ("Dockerfile", "compose.yaml", "ssd.service", "ssd-draft.service"):
        assert "Untested:" in (DEPLOY / name).read_text().split("\n\n")[0], name


def test_the_image_s_packages_are_extras(dockerfile: list[tuple[str, str]]) -> None:
    """And nothing of the working copy gets into it that is not the project's."""
    [extras] = [m[1] for _, arguments in dockerfile if (m := re.search(r"'/src\[(.*?)\]'", arguments))]
    project = (DEPLOY.parent / "pyproject.toml").read_text()
    assert all(re.search(rf"^{extra} = \[", project, re.MULTILINE) for extra in extras.split(","))
    assert {".git", ".venv"} <= set((DEPLOY / "Dockerfile.dockerignore").read_text().split())
