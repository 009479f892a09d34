"""Coding agents: their programs, how each is pointed at a server, and a task. Imports nothing of ssd.

The task is in a folder with `greeting.py`, whose greeting is to be changed, and a picture. What the model writes is in
`SCRIPTS`, one text a request: it looks at the folder in several ways, changes the file and says so.
"""

from __future__ import annotations

import base64
import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from clients.environment import build

VERSIONS: Final = {"codex": "0.169.0", "claude-code": "2.1.197", "aider": "0.86.2"}
_NPM: Final = {"codex": "@openai/codex", "claude-code": "@anthropic-ai/claude-code"}
_PROGRAMS: Final = {"codex": "codex", "claude-code": "claude", "aider": "aider"}
_SECONDS: Final = 300.0  # of a run
TASK: Final = "Change the greeting in greeting.py to hello."
BEFORE, AFTER = 'print("helo")\n', 'print("hello")\n'
END: Final = "It is done."
_PICTURE: Final = (  # a red pixel, PNG
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAIAAACQd1PeAAAADElEQVR4nGP4z8AAAAMBAQDJ/pLvAAAAAElFTkSuQmCC"
)


def install(name: str, folder: Path) -> Path:
    """The agent's program; CalledProcessError or OSError if it cannot be installed."""
    version, folder = VERSIONS[name], folder / name
    if name not in _NPM:
        return build(folder, f"{name}-chat=={version}").with_name(_PROGRAMS[name])
    program = folder / "node_modules" / ".bin" / _PROGRAMS[name]
    if not program.exists():
        package = f"{_NPM[name]}@{version}"
        command = ["npm", "install", "--no-fund", "--no-audit", "--prefix", folder, package]
        subprocess.run(command, check=True, capture_output=True, text=True)
    return program


def prepare(home: Path) -> Path:
    """Makes an empty folder a home directory; returns the folder of the task in it."""
    folder = home / "task"
    folder.mkdir(parents=True)
    (folder / "greeting.py").write_text(BEFORE)
    (folder / "picture.png").write_bytes(base64.b64decode(_PICTURE))
    return folder


def run(
    name: str, program: Path, url: str, model: str, home: Path, task: str = TASK
) -> subprocess.CompletedProcess[str]:
    """Runs the agent until it ends by itself, without a person who could answer it."""
    command, variables = _COMMANDS[name](url, model, home)
    environment = {"PATH": os.environ["PATH"], "HOME": str(home), "TERM": "dumb", **_GIT, **variables}
    return subprocess.run(
        [program, *command, task],
        cwd=home / "task",
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=_SECONDS,
    )


# --- how each is pointed at a server ----------------------------------------------------------------------------------

Command = tuple[list[str], dict[str, str]]  # arguments and variables of the environment
_GIT: Final = {
    f"GIT_{who}_{what}": value
    for who in ("AUTHOR", "COMMITTER")
    for what, value in (("NAME", "Me"), ("EMAIL", "me@example.com"))
}


def _codex(url: str, model: str, home: Path) -> Command:
    (home / ".codex").mkdir(exist_ok=True)
    (home / ".codex" / "config.toml").write_text(
        f"""\
model = "{model}"
model_provider = "ssd"
model_context_window = 32768

[model_providers.ssd]
name = "ssd"
base_url = "{url}/v1"
wire_api = "responses"
request_max_retries = 0
stream_max_retries = 0

[analytics]
enabled = false
"""
    )
    return ["exec", "--skip-git-repo-check", "--sandbox", "danger-full-access"], {}


def _claude_code(url: str, model: str, home: Path) -> Command:
    tools = ["Read", "Edit", "Bash(ls:*)"]
    return ["--model", model, "--permission-mode", "acceptEdits", "--allowedTools", ",".join(tools), "-p"], {
        "ANTHROPIC_BASE_URL": url,
        "ANTHROPIC_AUTH_TOKEN": "none",
        "ANTHROPIC_DEFAULT_HAIKU_MODEL": model,
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        "ENABLE_TOOL_SEARCH": "true",
    }


def _aider(url: str, model: str, home: Path) -> Command:
    quiet = ["--no-check-update", "--analytics-disable", "--no-show-model-warnings", "--no-pretty", "--no-detect-urls"]
    edits = ["--yes-always", "--edit-format", "diff", "greeting.py", "--message"]
    return ["--model", f"openai/{model}", *quiet, *edits], {
        "OPENAI_API_BASE": f"{url}/v1",
        "OPENAI_API_KEY": "none",
    }


_COMMANDS: Final[dict[str, Callable[[str, str, Path], Command]]] = {
    "codex": _codex,
    "claude-code": _claude_code,
    "aider": _aider,
}


# --- what the model writes --------------------------------------------------------------------------------------------


def _call(name: str, **arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


_THOUGHT: Final = "<think>\nI look at it.\n</think>\n\n"
_PATCH: Final = """\
apply_patch <<'END'
*** Begin Patch
*** Update File: greeting.py
@@
-print("helo")
+print("hello")
*** End Patch
END
"""


def _codex_script(folder: Path) -> list[str]:
    return [
        f"{_THOUGHT}I look. {_call('exec_command', cmd='cat greeting.py')}{_call('exec_command', cmd='ls nothing')}",
        _call("view_image", path=str(folder / "picture.png")),
        _call("exec_command", cmd=_PATCH),
        END,
    ]


def _claude_code_script(folder: Path) -> list[str]:
    file = str(folder / "greeting.py")
    return [
        f"{_THOUGHT}I look. {_call('Read', file_path=file)}{_call('Bash', command='ls nothing')}",
        _call("Read", file_path=str(folder / "picture.png")),
        _call("ToolSearch", query="select:CronList"),
        _call("Edit", file_path=file, old_string="helo", new_string="hello"),
        END,
    ]


def _aider_script(folder: Path) -> list[str]:
    edit = f"<<<<<<< SEARCH\n{BEFORE}=======\n{AFTER}>>>>>>> REPLACE"
    messages = ["chore: Add the greeting", "fix: Correct the greeting"]  # of two commits
    return [f"I change it.\n\ngreeting.py\n```python\n{edit}\n```\n", *messages]


SCRIPTS: Final[dict[str, Callable[[Path], list[str]]]] = {
    "codex": _codex_script,
    "claude-code": _claude_code_script,
    "aider": _aider_script,
}
