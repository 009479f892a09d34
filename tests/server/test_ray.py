"""`ssd serve --replicas 2` in a Ray cluster of this machine: answers are those of one server, whatever is killed."""

from __future__ import annotations

import asyncio
import os
import random
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("fastapi", reason="the extra `serve` is not installed")
pytest.importorskip("ray.serve", reason="the extra `ray` is not installed")

import httpx
from live_server import until
from serve_process import MODEL, ServeProcess, serve
from soak.asks import COMPLETIONS, Ask, Choice, long_ask, random_ask
from soak.clients import plain, vanishing
from soak.run import answers_alone

from ssd import LLM

pytestmark = pytest.mark.slow

START_SECONDS = 120.0  # until a replica that was killed is replaced
OPTIONS = ("--replicas", "2", "--max-model-len", "512")


def descendants(pid: int) -> dict[int, str]:
    """The processes below one that have not ended, and their command lines."""
    found: dict[int, str] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            child, _, rest = stat.read_text().partition(" (")
            state, parent = rest.rpartition(") ")[2].split()[:2]
            if int(parent) == pid and state != "Z":
                command = (stat.parent / "cmdline").read_text().replace("\0", " ")
                found |= {int(child): command, **descendants(int(child))}
    return found


def engines(served: ServeProcess) -> list[int]:
    """The processes of the replicas."""
    return [pid for pid, command in descendants(served.process.pid).items() if "ServeReplica" in command]


def ranks(served: ServeProcess) -> list[int]:
    """The processes of ranks above 0."""
    return [
        pid for engine in engines(served) for pid, command in descendants(engine).items() if "ssd.worker" in command
    ]


def metric(served: ServeProcess, name: str, labels: str = "") -> dict[str, float]:
    """By replica; "" for a metric without that label."""
    found: dict[str, float] = {}
    for line in httpx.get(f"{served.url}/metrics").text.splitlines():
        if re.match(rf"ssd_{name}[ {{]", line) and labels in line:
            label = re.search(r'replica="(\d+)"', line)
            found[label[1] if label else ""] = float(line.rsplit(" ", 1)[1])
    return found


def replicas_run(served: ServeProcess) -> bool:
    with suppress(httpx.HTTPError):
        return metric(served, "replicas") == {"": 2.0}
    return False


async def answers(served: ServeProcess, asks: list[Ask], after: Callable[[], object], stream: bool) -> list[Any]:
    """All at once; `after` is called when some of them have ended. A stream may raise ValueError."""
    limits = httpx.Limits(max_connections=len(asks))
    async with httpx.AsyncClient(base_url=served.url, timeout=90, limits=limits) as client:
        tasks = [asyncio.create_task(plain(client, ask, stream=stream)) for ask in asks]
        while sum(task.done() for task in tasks) < len(asks) // 8:
            await asyncio.sleep(0.01)
        await asyncio.to_thread(after)
        return await asyncio.gather(*tasks, return_exceptions=True)


@pytest.fixture(scope="module")
def served_by_two() -> Iterator[ServeProcess]:
    with serve(*OPTIONS) as served:
        yield served


@pytest.fixture(scope="module")
def asks() -> list[Ask]:
    draw = random.Random(5)
    return [random_ask(draw) for _ in range(48)] + [long_ask(draw) for _ in range(8)]


@pytest.fixture(scope="module")
def expected(llm: LLM, asks: list[Ask]) -> list[list[Choice]]:
    return list(asyncio.run(answers_alone(llm, asks)).values())


@pytest.mark.parametrize("stream", [False, True])
def test_answers_are_those_of_one_engine_and_both_replicas_give_some(
    served_by_two: ServeProcess, asks: list[Ask], expected: list[list[Choice]], stream: bool
) -> None:
    before = metric(served_by_two, "generation_tokens_total")
    found = asyncio.run(answers(served_by_two, asks, lambda: None, stream))
    assert found == expected
    after = metric(served_by_two, "generation_tokens_total")
    assert sorted(after) == ["0", "1"]
    shares = [after[replica] - before[replica] for replica in after]
    assert min(shares) > sum(shares) / 4, "requests that come at once are shared"


def test_every_endpoint_answers_as_one_server_does(served_by_two: ServeProcess, served: Any) -> None:
    chat = {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 5, "seed": 1}
    cases: list[tuple[str, str, Any]] = [
        ("GET", "/v1/models", None),
        ("GET", "/version", None),
        ("GET", "/openapi.json", None),
        ("GET", "/", None),
        ("GET", "/playground/app.js", None),
        ("GET", "/nowhere", None),
        ("POST", "/health", None),
        ("POST", "/tokenize", {"model": MODEL, "prompt": "Once upon a time"}),
        ("POST", "/detokenize", {"model": MODEL, "tokens": [1, 2, 3]}),
        ("POST", "/v1/chat/completions", chat),
        ("POST", "/v1/chat/completions", chat | {"stream": True}),
        ("POST", "/v1/messages", chat),
        ("POST", "/v1/messages", chat | {"stream": True}),
        ("POST", "/v1/messages/count_tokens", {name: chat[name] for name in ("model", "messages")}),
        ("POST", "/v1/responses", {"model": MODEL, "input": "Hi", "max_output_tokens": 5, "seed": 1}),
        ("POST", "/v1/responses", {"model": MODEL, "input": "Hi", "max_output_tokens": 5, "seed": 1, "stream": True}),
        ("POST", "/v1/completions", {"model": MODEL, "prompt": "x", "no_such_field": 1}),
        ("POST", "/v1/completions", {"model": "another", "prompt": "x"}),
    ]
    for method, path, body in cases:
        ours, theirs = (httpx.request(method, url + path, json=body) for url in (served_by_two.url, served.url))
        assert ours.status_code == theirs.status_code, path
        assert ours.headers["content-type"] == theirs.headers["content-type"], path
        assert _comparable(ours.text) == _comparable(theirs.text), path


def _comparable(text: str) -> str:
    """Without ids and times, and what the prefix caches have had."""
    text = re.sub(r"\b(cmpl|chatcmpl|msg|resp|rs|fc)[-_][0-9a-f]+", "ID", text)
    text = re.sub(r'"max_model_len":\d+', "", text)
    return re.sub(r'"(created|created_at|cached_tokens|cache_read_input_tokens|input_tokens)":\d+', "", text)


def test_turns_of_a_conversation_meet_the_replica_that_has_their_beginning(served_by_two: ServeProcess) -> None:
    """Without routing by prefixes half of them would not."""
    before = metric(served_by_two, "prompt_tokens_total")
    conversations = [[{"role": "user", "content": f"{i} is a number. " * 12}] for i in range(6)]
    with httpx.Client(base_url=served_by_two.url, timeout=60) as client:
        for turn in range(4):
            for messages in conversations:
                body = {"model": MODEL, "messages": messages, "max_tokens": 4, "seed": turn}
                answer = client.post("/v1/chat/completions", json=body).json()
                usage = answer["usage"]
                cached = usage["prompt_tokens_details"]["cached_tokens"]
                assert cached >= usage["prompt_tokens"] * 0.7 or turn == 0, (turn, usage)
                messages.append(answer["choices"][0]["message"])
                messages.append({"role": "user", "content": "Go on."})
    after = metric(served_by_two, "prompt_tokens_total")
    assert all(after[replica] > before[replica] for replica in after), "both have had conversations"


def test_a_client_that_goes_away_ends_its_request(served_by_two: ServeProcess) -> None:
    before = _aborted(served_by_two)
    ask = Ask(COMPLETIONS, {"model": MODEL, "prompt": "x", "max_tokens": 480, "ignore_eos": True})

    async def vanish() -> None:
        async with httpx.AsyncClient(base_url=served_by_two.url, timeout=60) as client:
            await vanishing(client, ask, random.Random(0))

    asyncio.run(vanish())
    until(lambda: _aborted(served_by_two) == before + 1)
    assert set(metric(served_by_two, "num_requests_running").values()) == {0.0}


def _aborted(served: ServeProcess) -> float:
    return sum(metric(served, "request_success_total", 'finished_reason="abort"').values())


@pytest.mark.parametrize("stream", [False, True])
def test_a_replica_that_is_killed_is_replaced_and_no_text_is_lost(
    served_by_two: ServeProcess, asks: list[Ask], expected: list[list[Choice]], stream: bool
) -> None:
    """A stream that has begun ends with an error; whatever else was in flight is computed by the other replica."""
    until(lambda: replicas_run(served_by_two), START_SECONDS)
    victim = engines(served_by_two)[0]
    found = asyncio.run(answers(served_by_two, asks, lambda: os.kill(victim, signal.SIGKILL), stream))
    cut = [answer for answer in found if isinstance(answer, BaseException)]
    assert [answer for answer in found if answer not in cut] == [
        right for right, answer in zip(expected, found, strict=True) if answer not in cut
    ]
    assert all("replica_lost" in str(error) for error in cut)
    assert not cut or stream
    assert len(cut) < len(found)
    until(lambda: replicas_run(served_by_two), START_SECONDS)
    assert victim not in engines(served_by_two)
    again = re.search("the replica that computed this request has ended: request .* another one", served_by_two.log)
    assert again or cut, "it had requests"
    assert served_by_two.process.poll() is None


def test_a_replica_whose_engine_has_failed_is_replaced_and_no_text_is_lost(asks: list[Ask]) -> None:
    """Its process lives on, and would refuse requests."""
    with serve(*OPTIONS, "--tensor-parallel-size", "2") as served:
        alone = asyncio.run(answers(served, asks[40:], lambda: None, False))
        before = engines(served)
        found = asyncio.run(answers(served, asks[40:], lambda: os.kill(ranks(served)[0], signal.SIGKILL), False))
        assert found == alone
        assert re.search(r"rank 1 of the model .*: request .* is sent to another one", served.log), "it had requests"
        until(lambda: replicas_run(served) and engines(served) != before, START_SECONDS)
        below = descendants(served.process.pid)
        assert served.stop() == 0
        assert not still_run(below)
        assert "Traceback" not in served.log


def test_a_server_that_loses_ray_s_node_exits_with_an_error() -> None:
    """Catches a proxy whose requests wait for ever."""
    with serve(*OPTIONS) as served:
        below = descendants(served.process.pid)
        os.kill(next(pid for pid, command in below.items() if "raylet/raylet" in command), signal.SIGKILL)
        assert served.process.wait(60) == 1
        assert "error: the Ray cluster has lost the node of this machine" in served.log


def test_ctrl_c_lets_requests_end_and_leaves_nothing_behind() -> None:
    """A terminal sends it to every process of the command."""
    shared = set(os.listdir("/dev/shm"))
    ask = Ask(COMPLETIONS, {"model": MODEL, "prompt": "x", "max_tokens": 400, "ignore_eos": True})
    with serve(*OPTIONS) as served:
        group, below = os.getpgid(served.process.pid), descendants(served.process.pid)

        def interrupt() -> None:
            until(lambda: sum(metric(served, "num_requests_running").values()) == 1)
            for pid in (served.process.pid, *below):
                if os.getpgid(pid) == group:
                    os.kill(pid, signal.SIGINT)

        [[choice]] = asyncio.run(answers(served, [ask], interrupt, False))
        assert len(choice.text) > 400
        assert served.process.wait(60) == 0
        assert not still_run(below)
        assert "Traceback" not in served.log
    assert set(os.listdir("/dev/shm")) <= shared


CLUSTER = """
import sys
from ray.cluster_utils import Cluster
node = {"num_cpus": 1, "object_store_memory": 80 << 20, "include_dashboard": False}
cluster = Cluster(initialize_head=True, head_node_args=node)
cluster.add_node(num_cpus=1, object_store_memory=80 << 20)
print(cluster.address, flush=True)
sys.stdin.read()
cluster.shutdown()
"""  # two nodes on this machine


def test_a_cluster_of_two_nodes_is_joined_and_left_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    """A replica has all that it needs on one node."""
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    monkeypatch.setenv("RAY_AUTH_TOKEN", "0" * 64)
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", CLUSTER], stdin=pipe, stdout=pipe, text=True) as cluster:
        assert cluster.stdout is not None
        address = next(line.strip() for line in cluster.stdout if re.fullmatch(r"[\d.]+:\d+\n", line))

        def replicas() -> list[str]:
            return [command for command in descendants(cluster.pid).values() if "ServeReplica" in command]

        with serve(*OPTIONS, "--ray-address", address) as served:
            assert len(replicas()) == 2
            body = {"model": MODEL, "prompt": "The sea", "max_tokens": 3}
            assert httpx.post(f"{served.url}/v1/completions", json=body).status_code == 200
            assert served.stop() == 0
        until(lambda: not replicas())
        assert sum("raylet/raylet" in command for command in descendants(cluster.pid).values()) == 2
        cluster.communicate("")


def test_a_command_that_is_killed_leaves_no_engine_behind() -> None:
    shared = set(os.listdir("/dev/shm"))
    with serve(*OPTIONS) as served:
        below = descendants(served.process.pid)
        assert len(engines(served)) == 2
        served.process.kill()
        agents = ("ray::DashboardAgent", "ray::RuntimeEnvAgent")  # end half a minute later
        until(lambda: all(command.startswith(agents) for command in still_run(below)), 30)
    assert set(os.listdir("/dev/shm")) <= shared


def still_run(processes: dict[int, str]) -> list[str]:
    """The command lines of those that have not ended."""
    found = []
    for pid, command in processes.items():
        with suppress(OSError):
            if (Path("/proc") / str(pid) / "cmdline").read_text().replace("\0", " ") == command != "":
                found.append(command)
    return found
