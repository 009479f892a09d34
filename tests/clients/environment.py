"""The clients' environment: a virtual environment with their newest versions, apart from ours."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

SESSIONS = (  # of `sessions.py`
    "openai",
    "openai-agents",
    "anthropic",
    "langchain-openai",
    "langchain-anthropic",
    "pydantic-ai",
    "instructor",
    "litellm",
    "ollama",
    "langchain-ollama",
    "llm-ollama",  # a plugin of the command `llm`
)
PACKAGES = ["llm", *(name.replace("pydantic-ai", "pydantic-ai-slim[openai,anthropic]") for name in SESSIONS)]


def build(folder: Path, *packages: str) -> Path:
    """The interpreter of an environment with these packages, built if it is not there.

    CalledProcessError, with the reason on standard error, if it cannot be built.
    """
    python = folder / "bin" / "python"
    if not python.exists():
        for command in (
            [sys.executable, "-m", "venv", folder],
            [python, "-m", "pip", "install", "--quiet", "uv"],  # pip takes minutes to find versions that fit together
            [python, "-m", "uv", "pip", "install", "--quiet", "--native-tls", "--python", python, *packages],
        ):
            subprocess.run(command, check=True, capture_output=True, text=True)
    return python
