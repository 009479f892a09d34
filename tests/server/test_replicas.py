"""A replica without Ray: its answers are the server's, its requests end with its calls; what replicas need."""

from __future__ import annotations

import asyncio
import json
import re
import sys
from collections.abc import AsyncGenerator, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("fastapi", reason="the extra `serve` is not installed")

from fakes import paused_at
from live_server import MODEL, SMALL
from serve_process import free_port
from typer.testing import CliRunner

import ssd
from ssd import LLM, SamplingParams
from ssd.cli.main import app
from ssd.config import EngineConfig
from ssd.errors import ConfigError, EngineFailed
from ssd.parallel.launch import Launch
from ssd.server.options import ServerOptions
from ssd.server.replicas.prefixes import Route
from ssd.server.replicas.ray_serve import needs, with_device
from ssd.server.replicas.replica import FAILED, ServerReplica

STARTED = 1_700_000_000
SCOPE = {"type": "http", "asgi": {"version": "3.0", "spec_version": "2.3"}, "http_version": "1.1", "scheme": "http"}
NODE = {"CPU": 8.0, "GPU": 4.0}
APART = {"mode": "ssd", "draft": "d", "placement": "process"}  # a draft has GPUs of its own


@pytest.fixture
def replica(monkeypatch: pytest.MonkeyPatch) -> Iterator[ServerReplica]:
    context = SimpleNamespace(replica_id=SimpleNamespace(unique_id="abc"), rank=SimpleNamespace(rank=1), world_size=2)
    ray, serve = ModuleType("ray"), ModuleType("ray.serve")
    serve.get_replica_context = lambda: context  # type: ignore[attr-defined]
    ray.serve = serve  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "ray", ray)
    monkeypatch.setitem(sys.modules, "ray.serve", serve)
    options = ServerOptions(served_model_name=MODEL, access_log=False)
    made = ServerReplica(EngineConfig(SMALL, device="cpu", max_model_len=256), options, STARTED, 30)
    yield made
    made.__del__()


def call(replica: ServerReplica, path: str, body: dict[str, Any] | None = None) -> AsyncGenerator[list[Any]]:
    method = "POST" if body is not None else "GET"
    headers = [(b"content-type", b"application/json"), (b"x-request-id", b"r1")]
    scope = {
        **SCOPE,
        "method": method,
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "headers": headers,
    }
    return replica.answer(scope, json.dumps(body).encode() if body else b"", Route(1, [], []))


def answer(replica: ServerReplica, path: str, body: dict[str, Any] | None = None) -> list[Any]:
    async def run() -> list[Any]:
        return [message async for messages in call(replica, path, body) for message in messages]

    return asyncio.run(run())


def test_a_replica_answers_as_the_server_does(replica: ServerReplica, llm: LLM) -> None:
    """Under the proxy's request id, and with its start time."""
    start, *bodies = answer(replica, "/v1/completions", {"model": MODEL, "prompt": "The sea", "seed": 3, "user": "me"})
    assert (start["status"], start["user"]) == (200, "me")
    assert (b"x-request-id", b"r1") in start["headers"]
    content = json.loads(b"".join(body["body"] for body in bodies))
    right = llm.generate("The sea", SamplingParams(temperature=1, seed=3, max_tokens=16))[0]
    assert content["choices"][0]["text"] == right.text
    _, models, *_ = answer(replica, "/v1/models")
    assert json.loads(models["body"])["data"][0]["created"] == STARTED
    name, metrics = asyncio.run(replica.metrics())
    assert name == "1"
    assert "ssd_generation_tokens" in {metric.name for metric in metrics}
    assert asyncio.run(replica.state())["output_tokens"] == 16


def test_a_call_that_is_cancelled_ends_its_request(replica: ServerReplica) -> None:
    async def run() -> None:
        body = {"model": MODEL, "prompt": "x", "max_tokens": 240, "ignore_eos": True, "stream": True}
        with paused_at(replica._llm.driver, 20):
            stream = call(replica, "/v1/completions", body)
            await anext(stream)
            assert replica._state.admission.sequences == 1
            waiting = asyncio.create_task(_read(stream))
            await asyncio.sleep(0.01)
            waiting.cancel()
            while replica._state.admission.sequences:
                await asyncio.sleep(0.005)
        assert replica._llm.engine.metrics.output_tokens < 240

    asyncio.run(asyncio.wait_for(run(), 20))


def test_parts_of_a_stream_gather_while_the_proxy_is_busy(replica: ServerReplica) -> None:
    """The proxy could not keep up with a message for every token of many streams. Nothing is lost or reordered."""
    body = {"model": MODEL, "prompt": "x", "max_tokens": 30, "ignore_eos": True, "stream": True, "seed": 1}

    async def run() -> list[list[Any]]:
        return [messages async for messages in call(replica, "/v1/completions", body)]

    singly: list[list[Any]] = []
    gathered: list[list[Any]] = []
    for pause, parts in ((0.0, singly), (0.2, gathered)):
        replica._pause = pause
        parts += asyncio.run(run())
    assert len(gathered) < len(singly) / 2
    texts = [
        re.findall(r'"text":"(.*?)"', "".join(message.get("body", b"").decode() for part in parts for message in part))
        for parts in (singly, gathered)
    ]
    assert len(texts[0]) >= 15
    assert "".join(texts[0]) == "".join(texts[1])


async def _read(stream: AsyncGenerator[list[Any]]) -> None:
    async for _ in stream:
        pass


def test_a_replica_whose_engine_has_failed_says_so_in_place_of_an_answer(
    replica: ServerReplica, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray asks for its health, too, and replaces it."""
    asyncio.run(replica.check_health())
    body = {"model": MODEL, "prompt": "x"}
    monkeypatch.setattr(replica._llm.engine, "step", lambda: 1 / 0)
    messages = answer(replica, "/v1/completions", body)
    assert [(message["type"], message["replica"]) for message in messages] == [(FAILED, "abc")]
    assert answer(replica, "/v1/completions", {"model": MODEL})[0]["status"] == 400, "no replica could serve it"
    with pytest.raises(EngineFailed, match="division by zero"):
        asyncio.run(replica.check_health())


@pytest.mark.parametrize(
    ("options", "nodes", "replicas", "wanted"),
    [
        ({"device": "cpu"}, [{"CPU": 2.0}], 2, {"CPU": 1}),
        ({"device": "cpu"}, [{"CPU": 8.0}] * 3, 2, {"CPU": 8}),
        ({"device": "cpu"}, [{"CPU": 8.0}] * 3, 4, {"CPU": 4}),
        ({"device": "cuda"}, [NODE], 4, {"CPU": 1, "GPU": 1}),
        ({"device": "cuda", "tensor_parallel_size": 4}, [NODE, {"CPU": 8.0}, NODE], 2, {"CPU": 1, "GPU": 4}),
        (
            {"device": "cuda", "speculation": APART},
            [NODE],
            2,
            {"CPU": 1, "GPU": 2},
        ),
        (
            {"device": "cuda", "speculation": {**APART, "draft_replicas": 2}},
            [NODE],
            1,
            {"CPU": 1, "GPU": 3},
        ),
        ({"device": "cuda", "speculation": {"mode": "ssd", "draft": "d"}}, [NODE], 4, {"CPU": 1, "GPU": 1}),
    ],
)
def test_a_replica_needs_the_gpus_of_its_ranks_and_draft_or_its_share_of_cores(
    options: dict[str, Any], nodes: list[dict[str, float]], replicas: int, wanted: dict[str, float]
) -> None:
    assert needs(EngineConfig("m", **options), nodes, replicas) == wanted


@pytest.mark.parametrize(
    ("options", "nodes", "replicas"),
    [
        ({"device": "cpu"}, [{"CPU": 2.0}], 3),
        ({"device": "cuda", "tensor_parallel_size": 3}, [NODE], 2),
        ({"device": "cuda", "tensor_parallel_size": 8}, [NODE, NODE], 1),  # on one machine
    ],
)
def test_replicas_without_room_are_refused(
    options: dict[str, Any], nodes: list[dict[str, float]], replicas: int
) -> None:
    with pytest.raises(ConfigError, match=f"replicas={replicas}: the Ray cluster has room for [012] "):
        needs(EngineConfig("m", **options), nodes, replicas)


def test_the_device_is_that_of_the_cluster() -> None:
    assert with_device(EngineConfig("m"), [{"CPU": 1.0}, NODE]).device == "cuda"
    assert with_device(EngineConfig("m"), [{"CPU": 1.0}]).device == "cpu"
    assert with_device(EngineConfig("m", device="cpu"), [NODE]).device == "cpu"
    with pytest.raises(ConfigError, match="cuda:1"):
        with_device(EngineConfig("m", device="cuda:1"), [NODE])


def test_replicas_are_not_started_by_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Launch, "found", lambda: Launch)
    done = CliRunner().invoke(app, ["serve", MODEL, "--replicas", "2"])
    assert done.exit_code == 1
    assert "--replicas: not with torchrun" in done.stderr


def test_ray_is_imported_by_functions_only() -> None:
    """Neither `import ssd` nor a server without replicas imports it; its router is a module that only Ray imports."""
    imports = re.compile(r"^(from|import) ray\b", re.MULTILINE)
    files = Path(ssd.__file__).parent.rglob("*.py")
    assert [file.name for file in files if imports.search(file.read_text())] == ["ray_router.py"]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--ray-address", "auto"], "--ray-address: only with --replicas"),
        (["--replicas", "2", "--ray-address", "ray://host:10001"], "run this command on a node of the cluster"),
        (["--replicas", "2", "--max-num-seqs", "0"], "max_num_seqs=0"),
        (["--replicas", "2"], "pip install '.[ray]'"),
    ],
)
def test_what_cannot_be_served_is_said_before_anything_starts(
    flags: list[str], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setitem(sys.modules, "ray", None)  # as if it were not installed
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")  # and the environment stays as it is
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    done = CliRunner().invoke(app, ["serve", MODEL, "--port", str(free_port()), *flags])
    assert done.exit_code == 1
    assert message in " ".join(done.stderr.split())
