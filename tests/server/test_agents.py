"""Coding agents, their real programs: each finishes a task with a server whose model writes a script, and ends by
itself with a model that cannot do it, or whose context is too short.

The programs are installed into the folder that `SSD_TEST_CLIENTS` names, or a temporary one. `test_clients.py` replays
what they send.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

pytest.importorskip("fastapi", reason="needs the extras serve and dev")

from clients import coding_agents as agents
from clients.record import Recorder
from live_server import MODEL, Served, serving

from server.scripted import long_checkpoint, writing
from ssd import LLM

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    folder = Path(os.environ.get("SSD_TEST_CLIENTS") or tmp_path_factory.mktemp("agents"))

    def install(name: str) -> Path:
        try:
            return agents.install(name, folder)
        except (subprocess.CalledProcessError, OSError) as error:
            pytest.skip(f"{name} cannot be installed: {getattr(error, 'stderr', None) or error!s:.300}")

    return install


@pytest.fixture(scope="module")
def long(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    path = long_checkpoint(tmp_path_factory.mktemp("long"))
    with LLM(path, device="cpu", max_model_len=32768) as llm:
        yield llm


@pytest.mark.parametrize("name", agents.VERSIONS)
def test_an_agent_finishes_its_task(long: LLM, name: str, program: Callable[[str], Path], tmp_path: Path) -> None:
    """Catches a request that is refused, and an answer that the program reads in another way than it was meant."""
    executable, folder = program(name), agents.prepare(tmp_path / "home")
    with serving(long) as served, writing(*agents.SCRIPTS[name](folder)):
        config = served.server.config
        recorder = config.loaded_app = Recorder(config.loaded_app)
        done = agents.run(name, executable, served.url, MODEL, tmp_path / "home")
    assert done.returncode == 0, done.stdout + done.stderr
    assert (folder / "greeting.py").read_text() == agents.AFTER
    assert {status for _, status in recorder.answers} == {200}, recorder.answers
    assert agents.END in done.stdout or name == "aider"


@pytest.mark.parametrize("name", agents.VERSIONS)
def test_an_agent_with_a_model_that_cannot_do_it(
    long: LLM, name: str, program: Callable[[str], Path], tmp_path: Path
) -> None:
    """Its text is no edit, and may end anywhere. Catches a conversation that is not served, or that does not end."""
    executable = program(name)
    agents.prepare(tmp_path / "home")
    with serving(long) as served, writing():
        config = served.server.config
        recorder = config.loaded_app = Recorder(config.loaded_app)
        agents.run(name, executable, served.url, MODEL, tmp_path / "home")
    assert {status for _, status in recorder.answers} == {200}, recorder.answers


@pytest.mark.parametrize(
    ("name", "said"),
    [("codex", "ran out of room in the model's context window"), ("claude-code", "Prompt is too long")],
)
def test_an_agent_whose_prompt_does_not_fit(
    served: Served, name: str, said: str, program: Callable[[str], Path], tmp_path: Path
) -> None:
    """They recognise the error by its words or its code, and say what to do in their own."""
    executable = program(name)
    agents.prepare(tmp_path / "home")
    done = agents.run(name, executable, served.url, MODEL, tmp_path / "home")
    assert done.returncode != 0
    assert said in done.stdout + done.stderr
