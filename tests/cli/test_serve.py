"""What `ssd serve` says while it loads a model, and when it is ready."""

from __future__ import annotations

import io
import logging
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import mostly_slow
from rich.console import Console
from typer.testing import CliRunner

from ssd.assembly.models import _reported
from ssd.cli import console, serve
from ssd.cli.main import app
from ssd.config import EngineConfig
from ssd.kernels import device
from ssd.kernels.cpu import build, library, variants
from ssd.kernels.cpu.kernels import Kernels

loading = logging.getLogger("ssd.loading")


def shown(monkeypatch: pytest.MonkeyPatch, *, terminal: bool, lines: bool) -> str:
    """What is written while a model is loaded in two stages."""
    text = io.StringIO()
    monkeypatch.setattr(console, "errors", Console(file=text, force_terminal=terminal, width=200))
    with console.stages("loading m", lines=lines):
        loading.info("reading the weights of %s: %d %%", "m", 40)
        loading.info("capturing [CUDA] graphs")
    loading.info("not shown")
    return text.getvalue()


def test_stages_are_plain_lines_on_a_pipe(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = "loading m\nreading the weights of m: 40 %\ncapturing [CUDA] graphs\n"
    assert shown(monkeypatch, terminal=False, lines=True) == expected


@pytest.mark.parametrize("terminal", [False, True])
def test_what_takes_long_is_a_line_that_stays(monkeypatch: pytest.MonkeyPatch, terminal: bool) -> None:
    """Also in a pipe of a command that has no lines for its stages, and below a spinner's last state."""
    text = io.StringIO()
    monkeypatch.setattr(console, "errors", Console(file=text, force_terminal=terminal, width=200))
    with console.stages("loading m"):
        loading.info("reading")
        loading.warning("compiling (%s)", "avx2")
        assert "compiling (avx2)\n" in text.getvalue(), "at once"


COMMANDS = {
    "generate": ["tiny-llama", "hi", "-m", "1"],
    "chat": ["tiny-llama", "-m", "1"],
    "serve": ["tiny-llama"],
    "bench": ["tiny-llama", "--compare", "ar", "--sets", "example", "--prompts", "1", "--repeats", "1", "-m", "2"],
    "demo": ["-m", "2"],
    "explain": ["-m", "2"],
}


@pytest.mark.parametrize("command", mostly_slow(list(COMMANDS), fast={"generate", "serve"}))
def test_every_command_says_that_kernels_are_compiled_before_the_wait(
    monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    """Catches half a minute of silence at the first command on a machine, in a pipe."""
    kernels, said = library.load(), list[str]()

    def load() -> Kernels:
        if not said:
            build._compile(["cc"], variants.usable()[0])
        return kernels

    def compiler(words: list[str]) -> None:
        said.append(sys.stderr.buffer.getvalue().decode())  # type: ignore[attr-defined]
        Path(words[words.index("-o") + 1]).touch()

    monkeypatch.setattr(library, "load", load)
    monkeypatch.setattr(device, "_cpu_kernels", device._cpu_kernels.__wrapped__)  # as in a process that has just begun
    monkeypatch.setattr(build, "_run", compiler)
    monkeypatch.setattr(serve, "_listen", lambda *_: [])
    monkeypatch.setattr(serve, "_run", lambda *_: None)
    ended = CliRunner().invoke(app, [command, *COMMANDS[command], "--device", "cpu"], input="hi\n")
    assert ended.exit_code == 0, ended.output
    line = f"compiling CPU kernels ({variants.usable()[0].name}), once for this machine: takes up to half a minute\n"
    assert said[0].endswith(line)
    assert "WARNING" not in said[0]


def test_stages_are_beside_a_spinner_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    text = shown(monkeypatch, terminal=True, lines=True)
    assert "loading m: capturing [CUDA] graphs" in text
    assert "not shown" not in text


def test_other_commands_write_no_lines_to_a_pipe(monkeypatch: pytest.MonkeyPatch) -> None:
    assert shown(monkeypatch, terminal=False, lines=False) == ""


def test_progress_of_weights_is_reported_every_tenth_at_most(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    seconds: Iterator[int] = iter(range(1000))
    monkeypatch.setattr("ssd.assembly.models.time.monotonic", lambda: 2 * next(seconds))
    tensors: Any = iter([(str(i), None) for i in range(40)])
    with caplog.at_level(logging.INFO, "ssd.loading"):
        assert len(list(_reported("m", tensors, 40))) == 40
    assert caplog.messages == [
        "reading the weights of m",
        *(f"reading the weights of m: {10 * i} %" for i in range(1, 11)),
    ]


def test_a_server_says_what_it_serves_and_where(monkeypatch: pytest.MonkeyPatch) -> None:
    """Device, dtype, rounding, KV tokens, mode, draft, and the playground's address, once it is loaded."""
    ready: list[str] = []
    monkeypatch.setattr(serve, "_listen", lambda *_: [])
    monkeypatch.setattr(serve, "_run", lambda _, addresses, __, notes: ready.extend([*notes, *addresses]))
    flags = ["--draft", "tiny-llama-draft", "--mode", "sd", "--k", "3", "--device", "cpu", "--max-model-len", "512"]
    flags += ["--quantization", "fp8"]
    ended = CliRunner().invoke(app, ["serve", "tiny-llama", *flags, "--num-kv-blocks", "100", "--port", "8010"])
    assert ended.exit_code == 0, ended.stderr
    assert [" ".join(line.split()) for line in ready] == [
        "device cpu, float32, weights in fp8",
        "KV cache 1,600 tokens in float32; 64 sequences of up to 512 tokens",
        "mode sd, draft tiny-llama-draft, k 3",
        "API http://127.0.0.1:8010/v1, model tiny-llama",
        "playground http://127.0.0.1:8010/",
    ]
    stages = ["tiny-llama in fp8", "tiny-llama-draft"]
    slow = "compiling CPU kernels", "reading the weights of tiny-llama in fp8: "  # on a busy machine
    said = [line for line in ended.stderr.splitlines() if not line.startswith(slow)]
    assert said[:3] == ["loading tiny-llama", *(f"reading the weights of {s}" for s in stages)]
    assert "weights rounded to fp8 when loaded" in ended.stderr


@pytest.mark.parametrize(
    ("host", "address"),
    [("0.0.0.0", "127.0.0.1"), ("::", "[::1]"), ("::1", "[::1]"), ("host.example", "host.example")],
)
def test_the_playground_s_address_can_be_opened(host: str, address: str) -> None:
    options = serve.ServerOptions(served_model_name="m")
    assert serve._addresses(options, host, 80)[-1].split() == ["playground", f"http://{address}:80/"]


def test_the_summary_of_an_engine_without_drafts() -> None:
    config = EngineConfig("m", device="cpu", num_kv_blocks=2, block_size=16, max_model_len=32)
    assert serve._summary(config)[-1].split(maxsplit=1) == ["mode", "ar, no draft"]
