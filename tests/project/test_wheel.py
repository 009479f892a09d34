"""The wheel: built from the source archive, installed apart from this checkout, and used."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

pytest.importorskip("build", reason="needs the extra dev")
pytest.importorskip("fastapi", reason="the extra `serve` is not installed")

from serve_process import serve

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that has the package; its dependencies are those of this environment."""
    out = tmp_path_factory.mktemp("wheel")
    run = [sys.executable, "-m"]
    subprocess.run([*run, "build", "--outdir", str(out / "dist"), str(ROOT)], check=True, capture_output=True)
    [wheel] = (out / "dist").glob("*.whl")
    target = out / "installed"
    subprocess.run([*run, "pip", "install", "--no-deps", "--target", str(target), str(wheel)], check=True)
    return target


@pytest.mark.slow
def test_the_wheel_runs(installed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a file that is not in the wheel: a source, a model, a page; and a wheel without compiled kernels."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(installed))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    without_compiler = {**os.environ, "CC": "", "PATH": str(Path(sys.executable).parent)}

    def ssd(*arguments: str) -> str:
        command = [sys.executable, "-m", "ssd", *arguments]
        return subprocess.run(command, env=without_compiler, check=True, capture_output=True, text=True).stdout

    assert "those of the package" in ssd("version")
    greedy = ("Mr. Holmes sat by the fire, and", "-m", "16", "-t", "0")
    texts = {ssd("generate", "tiny-llama", *greedy, "--mode", mode, *draft) for mode, draft in MODES.items()}
    assert len(texts) == 1
    with serve() as server:
        for path in ("/", "/playground/app.js", "/docs", "/api/tags"):
            assert httpx.get(f"{server.url}{path}").status_code == 200
        body = {"model": "tiny-llama", "prompt": greedy[0], "max_tokens": 16, "temperature": 0}
        answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=60).json()
        assert answer["choices"][0]["text"].strip() in texts.pop()


MODES = {"ar": (), "ssd": ("--draft", "tiny-llama-draft")}
