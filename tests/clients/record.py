"""`PYTHONPATH=tests python -m clients.record`: writes what the clients send to `tests/data/clients`."""

from __future__ import annotations

import json
import re
import subprocess
import tempfile
from pathlib import Path
from typing import Annotated, Any

import conftest  # noqa: F401  (first: it sets the environment that torch is loaded in)
import typer
from live_server import MODEL, serving
from server.scripted import long_checkpoint, writing
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from clients import coding_agents as agents
from clients.environment import PACKAGES, SESSIONS, build
from ssd import LLM

_MOST_CHARACTERS = 200  # of a text
_MOST_OF_AGENTS = 60  # their prompts are long, and their makers' own: of a longer text the first word is kept
_ID = re.compile(r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}|[0-9a-f]{24,}")
DATA = Path(__file__).parents[1] / "data" / "clients"


def _cut(value: Any) -> Any:
    """Without the rest of long texts."""
    if isinstance(value, dict):
        return {name: _cut(item) for name, item in value.items()}
    if isinstance(value, list):
        return [_cut(item) for item in value]
    return value[:_MOST_CHARACTERS] if isinstance(value, str) else value


def _cut_of_agent(home: Path, value: Any, name: str = "") -> Any:
    """Without the texts of an agent's prompt and of its tools, and without what differs from run to run."""
    if isinstance(value, dict):
        return {key: _cut_of_agent(home, item, key) for key, item in value.items()}
    if isinstance(value, list):
        return [_cut_of_agent(home, item) for item in value]
    if not isinstance(value, str):
        return value
    if name == "description":
        return "What it does."
    text = _ID.sub(lambda found: "0" * len(found[0]), value.replace(str(home), "/home/me"))
    if len(text) <= _MOST_OF_AGENTS or name in ("arguments", "pattern"):
        return text
    return f"{text.split(maxsplit=1)[0]:.40} … ({len(value)} characters)"


class Recorder:
    """Keeps path and body of every request; of those with the same fields, the first. Also all answers' statuses.

    `agent`: the home directory of an agent. It repeats its conversation with every request: the last one is kept.
    """

    def __init__(self, app: ASGIApp, agent: Path | None = None) -> None:
        self._app, self._agent = app, agent
        self.requests: dict[str, dict[str, Any]] = {}
        self.answers: list[tuple[str, int]] = []  # paths and statuses

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        body = b""

        async def recorded() -> Message:
            nonlocal body
            message = await receive()
            body += message.get("body", b"")
            return message

        async def noted(message: Message) -> None:
            if message["type"] == "http.response.start":
                self.answers.append((scope["path"], message["status"]))
            await send(message)

        await self._app(scope, recorded, noted)
        if body:
            self._keep(scope["path"], json.loads(body))

    def _keep(self, path: str, body: dict[str, Any]) -> None:
        if self._agent is None:
            body = _cut(body)
            self.requests.setdefault(f"{path} {_shape(body)}", {"path": path, "body": body})
        else:
            fields = " ".join(sorted(body))
            self.requests[f"{path} {fields}"] = {"path": path, "body": _cut_of_agent(self._agent, body)}


def _shape(value: Any, depth: int = 3) -> str:
    """The names and choices in a value, without its texts and numbers."""
    if isinstance(value, dict) and depth:
        return (
            "{"
            + ",".join(f"{k}:{v if k in ('type', 'role') else _shape(v, depth - 1)}" for k, v in value.items())
            + "}"
        )
    if isinstance(value, list) and depth:
        return "[" + ",".join(_shape(item, depth - 1) for item in value) + "]"
    return type(value).__name__


def main(
    clients: Annotated[list[str] | None, typer.Argument(help="All of them without a name.")] = None,
    folder: Annotated[Path | None, typer.Option(help="With the clients; they are installed if it has none.")] = None,
) -> None:
    """Runs the clients' sessions, and the agents' tasks, against a bundled model."""
    names = clients or [*SESSIONS, *agents.VERSIONS]
    with tempfile.TemporaryDirectory() as temporary:
        installed = folder or Path(temporary) / "clients"
        _record_sessions([name for name in names if name in SESSIONS], installed)
        _record_agents([name for name in names if name in agents.VERSIONS], installed, Path(temporary))


def _record_sessions(names: list[str], installed: Path) -> None:
    if not names:
        return
    python = build(installed / "environment", *PACKAGES)
    with LLM(MODEL, device="cpu") as llm:
        for name in names:
            with serving(llm) as served:
                config = served.server.config
                recorder = config.loaded_app = Recorder(config.loaded_app)
                subprocess.run([python, Path(__file__).with_name("sessions.py"), name, served.url, MODEL], check=True)
            _write(name, recorder)


def _record_agents(names: list[str], installed: Path, temporary: Path) -> None:
    if not names:
        return
    with LLM(long_checkpoint(temporary / "model"), device="cpu", max_model_len=32768) as llm:
        for name in names:
            program, home = agents.install(name, installed), temporary / name
            texts = agents.SCRIPTS[name](agents.prepare(home))
            with serving(llm) as served, writing(*texts):
                config = served.server.config
                recorder = config.loaded_app = Recorder(config.loaded_app, agent=home)
                done = agents.run(name, program, served.url, MODEL, home)
            if done.returncode or any(status != 200 for _, status in recorder.answers):
                raise SystemExit(f"{name} has failed: {recorder.answers}\n{done.stdout}{done.stderr}")
            _write(name, recorder)


def _write(name: str, recorder: Recorder) -> None:
    DATA.mkdir(exist_ok=True)
    lines = ",\n".join(json.dumps(request, ensure_ascii=False) for request in recorder.requests.values())
    (DATA / f"{name}.json").write_text(f"[\n{lines}\n]\n", encoding="utf-8")


if __name__ == "__main__":
    typer.run(main)
