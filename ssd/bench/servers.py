"""Other engines as contenders: vLLM, SGLang and llama.cpp's `llama-server`, started and stopped here.

A server runs in a process group of its own, on a free port of this machine, without prefix caching and without sampling
defaults of its own.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import weakref
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import httpx

from ssd.bench.answers import Answer, Prompt, RequestSettings
from ssd.bench.openai import ServerContender
from ssd.bench.transformers_peer import files_of
from ssd.config import K_DEFAULT
from ssd.errors import ConfigError, ServerError

READY_SECONDS: Final = 1200.0  # for loading weights and compiling kernels
GRACE_SECONDS: Final = 15.0  # for a server to exit by itself
_POLL_SECONDS: Final = 0.1
_HOST: Final = "127.0.0.1"
_LAST_LINES: Final = 15
_VERSIONS: Final[Mapping[str, tuple[str, str]]] = {  # path and key of each server's version
    "vllm": ("version", "version"),
    "sglang": ("get_server_info", "version"),
    "llamacpp": ("props", "build_info"),
}


@dataclass(frozen=True)
class Setup:
    """Settings of a server."""

    model: Path
    draft: Path | None
    k: int  # draft tokens per round
    batch: int  # concurrent requests
    max_model_len: int
    gpus: int
    port: int


def launch(
    kind: str,
    model: str,
    *,
    draft: str | None = None,
    k: int = K_DEFAULT,
    batch: int = 1,
    max_model_len: int = 4096,
    gpus: int = 1,
    ready_seconds: float = READY_SECONDS,
) -> LaunchedContender:
    """Starts a server and waits until it is ready. `model` and `draft`: anything that ssd opens from files.

    With a draft it runs speculative decoding, and is called `vllm sd:4`.
    """
    if kind not in COMMANDS:
        raise ConfigError(f"server={kind!r} is not known: use one of {', '.join(COMMANDS)}")
    checkpoint = files_of(model)
    longest = min(max_model_len, checkpoint.config.max_position)
    small = files_of(draft, "draft").path if draft else None
    setup = Setup(checkpoint.path, small, k, batch, longest, gpus, _free_port())
    url = f"http://{_HOST}:{setup.port}"
    server = ServerProcess(kind, COMMANDS[kind](setup))
    try:
        server.wait_ready(f"{url}/health", ready_seconds)
        contender = LaunchedContender(server, url, f"{kind} sd:{k}" if draft else kind)
        contender.note = "; ".join(filter(None, [_version(kind, url), checkpoint.note]))
        return contender
    except BaseException:  # Ctrl-C as well
        server.stop()
        raise


def check(kind: str, model: str, draft: str | None = None) -> None:
    """Raises what keeps a server from being started: it is not installed, or it cannot read the model."""
    small = files_of(draft).path if draft else None
    COMMANDS[kind](Setup(files_of(model).path, small, k=1, batch=1, max_model_len=1, gpus=1, port=0))


class LaunchedContender(ServerContender):
    """A server that is stopped with this object; `command` is its command line, `log` its log file."""

    def __init__(self, server: ServerProcess, url: str, name: str) -> None:
        super().__init__(url, name=name)
        self.command, self.log = server.command, server.log
        self._server = server

    def answer(self, prompts: Seq[Prompt], asked: RequestSettings) -> list[Answer]:
        try:
            return super().answer(prompts, asked)
        except ServerError as error:
            raise ServerError(f"{error}\n{self._server.log_tail()}") from error

    def close(self) -> None:
        self._server.stop()


class ServerProcess:
    """A process with all of its children, which is stopped with this object."""

    def __init__(self, name: str, command: Seq[str]) -> None:
        self.command = list(command)
        environment = {**os.environ, "PYTHONSAFEPATH": "1"}  # no modules of the current directory
        with tempfile.NamedTemporaryFile(prefix=f"ssd-{name}-", suffix=".log", delete=False) as log:
            self.log = Path(log.name)
            try:
                self._process = subprocess.Popen(
                    self.command,
                    env=environment,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                )
            except OSError as error:
                raise ServerError(f"{self.command[0]} cannot be started: {error}") from error
        self._end = weakref.finalize(self, _stop, self._process)  # also when Python exits

    def wait_ready(self, url: str, seconds: float) -> None:
        """Waits until the URL responds; ServerError if the process exits before, or on timeout."""
        deadline = time.monotonic() + seconds
        with httpx.Client(timeout=2.0, trust_env=False) as client:
            while time.monotonic() < deadline:
                if self._process.poll() is not None:
                    raise ServerError(f"the server ended with {self._process.returncode} at once\n{self.log_tail()}")
                with suppress(httpx.TransportError):
                    if client.get(url).status_code == httpx.codes.OK:
                        return
                time.sleep(_POLL_SECONDS)
        raise ServerError(f"the server was not ready after {seconds:.0f} s\n{self.log_tail()}")

    def log_tail(self) -> str:
        lines = self.log.read_text(errors="replace").splitlines()[-_LAST_LINES:]
        return "\n".join([f"the end of its log ({self.log}):", *(f"  {line}" for line in lines)])

    def stop(self) -> None:
        """Terminates the process group, then kills it. Idempotent."""
        self._end()


def _stop(process: subprocess.Popen[bytes]) -> None:
    """Signals go to the process group that was started here; its id is that of the process."""
    with suppress(ProcessLookupError, PermissionError):  # the latter if only zombies are left
        os.killpg(process.pid, signal.SIGTERM)
    with suppress(subprocess.TimeoutExpired):
        process.wait(GRACE_SECONDS)
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)  # children that outlived it, too
    process.wait()


def _version(kind: str, url: str) -> str:
    """The server's version, if it has one."""
    path, key = _VERSIONS[kind]
    try:
        return f"{kind} {httpx.get(f'{url}/{path}', timeout=5.0, trust_env=False).json()[key]}"
    except (httpx.HTTPError, ValueError, LookupError, TypeError):
        return ""


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind((_HOST, 0))
        return int(probe.getsockname()[1])


# --- the command lines ------------------------------------------------------------------------------------------------


def _vllm(setup: Setup) -> list[str]:
    command = [_python_with("vllm", "SSD_VLLM_PYTHON"), "-m", "vllm.entrypoints.openai.api_server"]
    command += ["--model", str(setup.model), "--host", _HOST, "--port", str(setup.port)]
    command += ["--max-num-seqs", str(setup.batch), "--max-model-len", str(setup.max_model_len)]
    command += ["--tensor-parallel-size", str(setup.gpus), "--no-enable-prefix-caching", "--generation-config", "vllm"]
    if setup.draft is not None:
        draft = {"model": str(setup.draft), "num_speculative_tokens": setup.k, "method": "draft_model"}
        command += ["--speculative-config", json.dumps(draft)]
    return command


def _sglang(setup: Setup) -> list[str]:
    command = [_python_with("sglang", "SSD_SGLANG_PYTHON"), "-m", "sglang.launch_server"]
    command += ["--model-path", str(setup.model), "--host", _HOST, "--port", str(setup.port)]
    command += ["--max-running-requests", str(setup.batch), "--context-length", str(setup.max_model_len)]
    command += ["--tp-size", str(setup.gpus), "--disable-radix-cache", "--sampling-defaults", "openai"]
    if setup.draft is not None:
        command += ["--speculative-algorithm", "STANDALONE", "--speculative-draft-model-path", str(setup.draft)]
        command += ["--speculative-num-steps", str(setup.k), "--speculative-eagle-topk", "1"]
        command += ["--speculative-num-draft-tokens", str(setup.k + 1)]
    return command


def _llama_cpp(setup: Setup) -> list[str]:
    """Its context is divided among concurrent requests. Without GPUs no layers are offloaded."""
    for path in filter(None, (setup.model, setup.draft)):
        if path.suffix.lower() != ".gguf":
            raise ConfigError(f"model={path}: llama.cpp reads .gguf files only; pass one, or measure another engine")
    layers = "999" if setup.gpus else "0"
    missing = "llama-server is not on the PATH: build llama.cpp, and set SSD_LLAMA_SERVER to its server"
    command = [_program("SSD_LLAMA_SERVER", shutil.which("llama-server"), missing), "--model", str(setup.model)]
    command += ["--host", _HOST, "--port", str(setup.port)]
    command += ["--parallel", str(setup.batch), "--ctx-size", str(setup.batch * setup.max_model_len)]
    command += ["--n-gpu-layers", layers, "--no-cache-prompt", "--top-k", "0", "--top-p", "1", "--min-p", "0"]
    if setup.draft is not None:
        command += ["-md", str(setup.draft), "-ngld", layers]
        command += ["--spec-type", "draft-simple", "--spec-draft-n-max", str(setup.k)]
    return command


COMMANDS: Final[Mapping[str, Callable[[Setup], list[str]]]] = {"vllm": _vllm, "sglang": _sglang, "llamacpp": _llama_cpp}


def _python_with(package: str, variable: str) -> str:
    """An interpreter that has the package: the environment variable's, else this one."""
    installed = importlib.util.find_spec(package) is not None
    return _program(
        variable,
        sys.executable if installed else None,
        f"{package} is not installed here: give it an environment of its own "
        f"(`python -m venv {package}-env && {package}-env/bin/pip install {package}`) "
        f"and set {variable}={package}-env/bin/python",
    )


def _program(variable: str, default: str | None, missing: str) -> str:
    """The program that an environment variable names, else the default; `missing`: the error if there is neither."""
    chosen = os.environ.get(variable)
    if chosen and shutil.which(chosen) is None:
        raise ConfigError(f"{variable}={chosen}: there is no such program; correct the variable, or unset it")
    if not chosen and default is None:
        raise ConfigError(missing)
    return chosen or str(default)
