"""`PYTHONPATH=tests python -m clients.record`: writes what the clients send to `tests/data/clients`."""

from __future__ import annotations

import json
import subprocess
import tempfile
from pathlib import Path
from typing import Annotated, Any

import conftest  # noqa: F401  (first: it sets the environment that torch is loaded in)
import typer
from live_server import MODEL, serving
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from clients.environment import SESSIONS, build
from ssd import LLM

_MOST_CHARACTERS = 200  # of a text
DATA = Path(__file__).parents[1] / "data" / "clients"


class Recorder:
    """Keeps path and body of every request; of those with the same fields, the first."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self.requests: dict[str, dict[str, Any]] = {}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        body = b""

        async def recorded() -> Message:
            nonlocal body
            message = await receive()
            body += message.get("body", b"")
            return message

        await self._app(scope, recorded, send)
        if body:
            request = {"path": scope["path"], "body": _cut(json.loads(body))}
            self.requests.setdefault(f"{request['path']} {_shape(request['body'])}", request)


def _cut(value: Any) -> Any:
    """Without the rest of long texts."""
    if isinstance(value, dict):
        return {name: _cut(item) for name, item in value.items()}
    if isinstance(value, list):
        return [_cut(item) for item in value]
    return value[:_MOST_CHARACTERS] if isinstance(value, str) else value


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
    environment: Annotated[Path | None, typer.Option(help="Of the clients; built if it is not there.")] = None,
) -> None:
    """Runs the clients' sessions against a bundled model."""
    with tempfile.TemporaryDirectory() as folder, LLM(MODEL, device="cpu") as llm:
        python = build(environment or Path(folder) / "clients")
        for name in clients or SESSIONS:
            with serving(llm) as served:
                config = served.server.config
                recorder = config.loaded_app = Recorder(config.loaded_app)
                subprocess.run([python, Path(__file__).with_name("sessions.py"), name, served.url, MODEL], check=True)
            DATA.mkdir(exist_ok=True)
            lines = ",\n".join(json.dumps(request, ensure_ascii=False) for request in recorder.requests.values())
            (DATA / f"{name}.json").write_text(f"[\n{lines}\n]\n", encoding="utf-8")


if __name__ == "__main__":
    typer.run(main)
