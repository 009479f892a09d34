"""Ranks that torchrun has started on several hosts: the text is that of ranks on one, and all of them end together."""

from __future__ import annotations

import json
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from serve_process import free_port
from torchrun_nodes import ROOT, Node, two_nodes

from ssd import LLM, SamplingParams
from ssd.assembly import draft_workers, placement, torchrun
from ssd.assembly.ranks import Follower
from ssd.assembly.torchrun import Hosts, Kind
from ssd.config import EngineConfig, SpeculationConfig
from ssd.errors import ConfigError, EngineFailed
from ssd.execution.state import SequenceState
from ssd.parallel.launch import Launch, local_size
from ssd.parallel.process import Worker
from ssd.parallel.transport import Channel, ChannelClosed, Message, words

SERVE = ("-m", "ssd", "serve", "tiny-llama", "--device", "cpu", "--tensor-parallel-size", "2", "--port")
SCRIPT = """
import json, sys
from ssd import LLM, SamplingParams
asked = json.loads(sys.argv[1])
params = [SamplingParams(**each) for each in asked["params"]]
for speculation in asked["speculation"]:
    with LLM("tiny-llama", device="cpu", tensor_parallel_size=asked["size"], speculation=speculation) as llm:
        outputs = llm.generate(asked["prompts"], params)
        print("WRITTEN", json.dumps([output.token_ids for output in outputs]), flush=True)
"""
PROMPTS = ["def fib(n):\n", "import os\n", "class Stack:\n"]
PARAMS: list[dict[str, Any]] = [{"max_new_tokens": 16, "temperature": 0.8 * (i % 2), "seed": i} for i in range(3)]
DRAFT = {"draft": "tiny-llama-draft", "k": 3}


def launch(monkeypatch: pytest.MonkeyPatch, **wanted: object) -> dict[str, str]:
    """Sets torchrun's variables: rank 0 of two, each on a host of its own."""
    variables = {"RANK": 0, "WORLD_SIZE": 2, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1, "MASTER_ADDR": "127.0.0.1"}
    found = {name: str(value) for name, value in (variables | {"MASTER_PORT": 1} | wanted).items()}
    for name, value in found.items():
        monkeypatch.setenv(name, value)
    return found


def written(text: str) -> list[list[list[int]]]:
    lines = [line.removeprefix("WRITTEN ") for line in text.splitlines() if line.startswith("WRITTEN ")]
    return [json.loads(line) for line in lines]


# --- the environment --------------------------------------------------------------------------------------------------


def test_a_process_knows_its_place_by_the_variables_of_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    launch(monkeypatch, RANK=5, WORLD_SIZE=8, LOCAL_RANK=1, LOCAL_WORLD_SIZE=4, MASTER_ADDR="first")
    assert Launch.found() == Launch(5, 8, 1, 4, "first")
    monkeypatch.delenv("LOCAL_RANK")  # another launcher's variables
    assert Launch.found() is None
    launch(monkeypatch, WORLD_SIZE=1)
    assert Launch.found() is None
    launch(monkeypatch, WORLD_SIZE="two")
    with pytest.raises(ConfigError, match=r"WORLD_SIZE=two, .*: must be numbers but for MASTER_ADDR"):
        Launch.found()


@pytest.mark.parametrize("rank", [0, 1])
def test_a_degree_that_does_not_fit_is_refused_on_all_ranks(monkeypatch: pytest.MonkeyPatch, rank: int) -> None:
    launch(monkeypatch, RANK=rank, WORLD_SIZE=4)
    for size in (1, 2):
        with pytest.raises(ConfigError, match=f"tensor_parallel_size={size}, but torchrun has started WORLD_SIZE=4"):
            LLM("tiny-llama", tensor_parallel_size=size)


def test_gpus_are_counted_on_each_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 5, the second on its host, has cuda:1; the draft has the GPU after the ranks on the host of rank 0."""
    launch(monkeypatch, RANK=5, WORLD_SIZE=8, LOCAL_RANK=1, LOCAL_WORLD_SIZE=4)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 5)
    monkeypatch.setattr(torch.cuda, "set_device", lambda _: None)
    monkeypatch.setattr("ssd.assembly.ranks.make_group", lambda *_, **__: None)
    ours, theirs = socket.socketpair()
    with ours, theirs:
        setup = {"rank": 5, "size": 8, "host": "first", "port": 1, "draft": None}
        setup |= {"config": {"model": "x", "device": "cuda"}}
        assert str(Follower._of(setup, Channel(ours)).device) == "cuda:1"

    setups: list[Any] = []
    ready = SimpleNamespace(wait_ready=lambda _: True)
    monkeypatch.setattr(draft_workers, "ProcessDrafter", lambda starts, *_, **__: starts[0]() or ready)
    monkeypatch.setattr(draft_workers, "Worker", setups.append)
    speculation = SpeculationConfig(mode="ssd", draft="x", placement="process")
    found = placement.placed(speculation, torch.device("cuda"), ranks=local_size(8))
    state = SequenceState(1, max_len=8, lookahead=2, vocab_size=10, device=torch.device("cpu"))
    draft_workers.start_workers(EngineConfig("x", device="cuda", tensor_parallel_size=8, speculation=found), state)
    assert setups[0]["config"]["device"] == "cuda:4"


_TELL = "import os, socket, sys; socket.socket(fileno=int(sys.argv[1])).send(bytes([len(os.environ.get('RANK', ''))]))"


def test_a_draft_s_process_is_none_of_torchrun_s(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is started by rank 0, and would take itself for it."""
    launch(monkeypatch)
    worker = Worker({}, [sys.executable, "-S", "-c", _TELL])
    select.select([worker.channel], [], [], 10)
    assert worker.channel._socket.recv(1) == b"\0"
    worker.close()


# --- joining ----------------------------------------------------------------------------------------------------------


class FakeStore(dict[str, str]):
    def set(self, key: str, value: str) -> None:
        self[key] = value

    def delete_key(self, key: str) -> None:
        del self[key]


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> FakeStore:
    made = FakeStore()
    monkeypatch.setattr(torchrun, "_store", lambda: made)
    monkeypatch.setattr(torchrun, "_JOIN_SECONDS", 20.0)
    return made


def said(store: FakeStore) -> tuple[int, list[int]]:
    """Port and token of rank 0."""
    deadline = time.monotonic() + 10
    while "ssd" not in store:
        assert time.monotonic() < deadline
        time.sleep(0.001)
    port, *token = json.loads(store["ssd"])
    return port, token


def hello(port: int, *numbers: int) -> Channel:
    channel = Channel(socket.create_connection(("127.0.0.1", port)))
    channel.post(Message(Kind.HELLO, payload=words(numbers)))
    return channel


def test_a_connection_without_the_token_is_dropped(store: FakeStore) -> None:
    """Also one of a rank that is there already, or that there is not, and one that sends something else."""
    with ThreadPoolExecutor(1) as pool:
        joining = pool.submit(Hosts, Launch(0, 3, 0, 1, "127.0.0.1"))
        port, token = said(store)
        assert token != [0, 0]
        first = hello(port, 2, *token)
        stray = Channel(socket.create_connection(("127.0.0.1", port)))
        stray._socket.send(b"GET / HTTP/1.1\r\n" + bytes(64))
        for wrong in ([1], [1, token[0], 0], [1, 0, 0], [0, *token], [2, *token], [3, *token]):
            with pytest.raises(ChannelClosed):
                hello(port, *wrong).receive(timeout=10)
        with pytest.raises(ChannelClosed):
            stray.receive(timeout=10)
        second = hello(port, 1, *token)
        hosts = joining.result(10)
    assert not store, "the token is no longer needed"
    hosts.engine_closed()
    for channel in (first, second):
        message = channel.receive(timeout=10)
        assert message is not None
        assert message.kind == Kind.END
        channel.close()
    for _ in range(2):
        hosts.engine_closed()  # nobody hears it, which is no error
    with pytest.raises(EngineFailed, match="rank 1 of torchrun has ended: start all of them again"):
        hosts.start({})


def test_a_rank_that_does_not_come_is_named(store: FakeStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torchrun, "_JOIN_SECONDS", 0.05)
    with pytest.raises(EngineFailed, match=r"ranks \[1, 2\] of torchrun have not joined within 0.05 s"):
        Hosts(Launch(0, 3, 0, 1, "127.0.0.1"))


@pytest.mark.slow
def test_a_process_beside_rank_0_computes_for_it_and_exits_when_it_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 is here, without torchrun itself. Its options are those that count."""
    env = launch(monkeypatch, MASTER_PORT=free_port())
    monkeypatch.setattr(torchrun, "_hosts", None)
    command = [sys.executable, "-m", "ssd", "generate", "nowhere", "x", "--tensor-parallel-size", "2"]
    other = subprocess.Popen(command, env={**os.environ, **env, "RANK": "1", "PYTHONPATH": str(ROOT)}, cwd="/")
    with other:
        with LLM("tiny-llama", device="cpu", tensor_parallel_size=2) as llm:
            [output] = llm.generate(PROMPTS[0], SamplingParams(**PARAMS[0]))
            assert len(output.token_ids) == 16
        for channel in torchrun._hosts.channels:  # type: ignore[union-attr]
            channel.close()
        assert other.wait(10) == 0


# --- two nodes --------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("each", [1, 2])
def test_two_nodes_write_what_ranks_on_one_host_write(tmp_path: Path, each: int) -> None:
    """AR, SD and SSD (with the draft in a process of its own), one engine after the other."""
    speculation = [None, {"mode": "sd", **DRAFT}, {"mode": "ssd", "placement": "process", **DRAFT}]
    speculation = speculation if each == 1 else speculation[:1]
    asked = {"prompts": PROMPTS, "params": PARAMS, "speculation": speculation, "size": 2 * each}
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    with two_nodes(tmp_path, str(script), json.dumps(asked), each=each) as nodes:
        assert [node.torchrun.wait(80) for node in nodes] == [0, 0], [node.text() for node in nodes]
        for node in nodes:
            node.check_gone(time.monotonic() + 5)
    with LLM("tiny-llama", device="cpu", tensor_parallel_size=2 * each) as llm:
        outputs = llm.generate(PROMPTS, [SamplingParams(**each) for each in PARAMS])
    assert written(nodes[0].text()) == [[output.token_ids for output in outputs]] * len(speculation)
    assert not written(nodes[1].text())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("node", "victim"), [(0, "torchrun"), (0, "ssd serve"), (1, "torchrun"), (1, "ssd serve"), (1, "importlib")]
)
def test_nodes_end_together(tmp_path: Path, node: int, victim: str) -> None:
    """kill -9 of torchrun, of its process, or of the follower: an error on all within 10 s, and nothing is left."""
    with two_nodes(tmp_path, *SERVE, str(free_port())) as nodes:
        nodes[0].wait_for("/v1")
        pid = nodes[node].torchrun.pid if victim == "torchrun" else nodes[node].find(victim)
        deadline = time.monotonic() + 10
        os.kill(pid, signal.SIGKILL)
        for each in nodes:
            assert each.torchrun.wait(deadline - time.monotonic()) != 0
        for each in nodes:
            each.check_gone(deadline)
        if node == 1:
            assert "EngineFailed: rank 1 of the model has ended" in nodes[0].text()


@pytest.mark.slow
def test_torchrun_starts_all_of_them_again(tmp_path: Path) -> None:
    """With one restart: a process that comes back before rank 0 does must not take its former port and token."""
    with two_nodes(tmp_path, "--max-restarts", "1", *SERVE, str(free_port())) as nodes:
        nodes[0].wait_for("/v1")
        os.kill(nodes[1].find("importlib"), signal.SIGKILL)
        nodes[0].wait_for("EngineFailed: rank 1 of the model has ended", 10)
        failed = len(nodes[0].text())
        deadline = time.monotonic() + 60
        while "/v1" not in nodes[0].text()[failed:]:
            assert time.monotonic() < deadline, nodes[0].text()
            time.sleep(0.05)


@pytest.mark.slow
def test_a_signal_to_rank_0_ends_all_nodes_in_order(tmp_path: Path) -> None:
    """Torchrun passes SIGTERM on to the processes of its host: running requests end, and none of them is an error."""
    command = [*SERVE, str(free_port())]
    with two_nodes(tmp_path, command[0], "ssd", "-v", *command[2:]) as nodes:
        nodes[0].wait_for("/v1")
        time.sleep(1.0)  # until the server has its signal handlers
        nodes[0].torchrun.send_signal(signal.SIGTERM)
        assert nodes[1].torchrun.wait(20) == 0
        nodes[0].torchrun.wait(20)  # 1: it was interrupted
        assert "draining" in nodes[0].text()
        assert "EngineFailed" not in nodes[0].text()
        for each in nodes:
            each.check_gone(time.monotonic() + 5)


@pytest.mark.slow
def test_an_engine_that_cannot_be_built_ends_all_nodes(tmp_path: Path) -> None:
    command = [*SERVE[:3], "nowhere", *SERVE[4:], str(free_port())]
    with two_nodes(tmp_path, *command) as nodes:
        assert [node.torchrun.wait(60) for node in nodes] == [1, 1]
        assert "nowhere" in nodes[0].text()


# --- two network namespaces -------------------------------------------------------------------------------------------


def ip(*words: str) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(["ip", *words], capture_output=True, check=False)


@pytest.fixture
def hosts() -> Iterator[list[str]]:
    """Two network namespaces with one cable between them, 10.77.0.1 and 10.77.0.2."""
    names = [f"ssd-{os.getpid()}-{i}" for i in range(2)]
    if shutil.which("ip") is None or ip("netns", "add", names[0]).returncode:
        pytest.skip("no permission to make network namespaces")
    ip("netns", "add", names[1])
    ip("link", "add", "cable", "netns", names[0], "type", "veth", "peer", "name", "cable", "netns", names[1])
    for i, name in enumerate(names, 1):
        ip("-n", name, "address", "add", f"10.77.0.{i}/24", "dev", "cable")
        for device in ("lo", "cable"):
            ip("-n", name, "link", "set", device, "up")
    yield names
    for name in names:
        ip("netns", "delete", name)


def on_hosts(folder: Path, names: list[str], *command: str) -> AbstractContextManager[list[Node]]:
    return two_nodes(folder, *command, prefixes=[["ip", "netns", "exec", name] for name in names], host="10.77.0.1")


@pytest.mark.slow
def test_two_network_namespaces_write_the_same_text(tmp_path: Path, hosts: list[str]) -> None:
    """Hosts that reach each other over a network only: nothing goes over the loopback device or a socket pair."""
    speculation = [None, {"mode": "ssd", "placement": "process", **DRAFT}]
    asked = {"prompts": PROMPTS, "params": PARAMS, "speculation": speculation, "size": 2}
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    with on_hosts(tmp_path, hosts, str(script), json.dumps(asked)) as nodes:
        assert [node.torchrun.wait(80) for node in nodes] == [0, 0], [node.text() for node in nodes]
    with LLM("tiny-llama", device="cpu", tensor_parallel_size=2) as llm:
        outputs = llm.generate(PROMPTS, [SamplingParams(**each) for each in PARAMS])
    assert written(nodes[0].text()) == [[output.token_ids for output in outputs]] * 2


BUSY = """
from ssd import LLM, SamplingParams
llm = LLM("tiny-llama", device="cpu", tensor_parallel_size=2)
for _ in llm.stream("def fib(n):", SamplingParams(max_new_tokens=3000, ignore_eos=True)):
    print("BEGUN", flush=True)
"""


@pytest.mark.slow
@pytest.mark.parametrize("busy", [False, True])
def test_a_host_that_is_cut_off_ends_both(tmp_path: Path, hosts: list[str], busy: bool) -> None:
    """No process ends and no connection is closed: an idle engine notices by keep-alive packets."""
    script = tmp_path / "script.py"
    script.write_text(BUSY)
    with on_hosts(tmp_path, hosts, *([str(script)] if busy else [*SERVE, str(free_port())])) as nodes:
        nodes[0].wait_for("BEGUN" if busy else "/v1")
        ip("-n", hosts[0], "link", "set", "cable", "down")
        deadline = time.monotonic() + 10
        nodes[0].wait_for("EngineFailed: rank 1 of the model has ended", 10)
        nodes[1].wait_for("rank 1 ends, because rank 0 cannot be reached", deadline - time.monotonic())
        for node in nodes:
            assert node.torchrun.wait(30) != 0  # torchrun itself waits for the other host for some seconds more
            node.check_gone(time.monotonic() + 5)
