"""Tensor parallelism: AR, SD and SSD write the same tokens at every degree, and a rank that is lost ends the engine."""

from __future__ import annotations

import itertools
import os
import random
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from conftest import VOCAB, TestModel
from draft_workers import HONEST, LIAR, LIES
from fakes import paused_at
from random_requests import (
    MAX_LEN,
    Asked,
    Models,
    check_answers,
    check_empty,
    check_idle,
    make_models,
    play,
    random_requests,
)
from serve_process import ServeProcess, serve

from ssd import LLM, SamplingParams
from ssd.assembly import draft_workers
from ssd.assembly.device import rank_device, resolve_device
from ssd.assembly.drafters import drafter_of
from ssd.assembly.placement import placed
from ssd.assembly.ranks import Place, Ranks
from ssd.config import EngineConfig, SpeculationConfig
from ssd.core import Outcome, RequestOutput, Work
from ssd.decoding.observer import RoundObserver
from ssd.drafting.process import ProcessDrafter
from ssd.drafting.ssd import SSDDrafter
from ssd.engine.engine import Engine
from ssd.errors import ConfigError, EngineFailed, RequestFailed
from ssd.execution.state import SequenceState
from ssd.parallel.process import Worker
from ssd.parallel.tensor import TensorParallel
from ssd.parallel.transport import Channel

SMALL: dict[str, Any] = {"max_num_seqs": 16, "block_size": 4, "num_kv_blocks": 60, "max_num_batched_tokens": 24}
AHEAD = {"mode": "ssd", "draft": "noisy", "k": 3, "placement": "inline"}


@pytest.fixture(scope="module")
def models(make_model: Callable[[str], TestModel], tmp_path_factory: pytest.TempPathFactory) -> Models:
    return make_models(make_model, tmp_path_factory.mktemp("noisy"), "qwen3")


@contextmanager
def split(models: Models, size: int, **options: Any) -> Iterator[LLM]:
    """An engine with little memory, whose drafter can be changed."""
    speculation = AHEAD | {"draft": models.drafts["noisy"]}
    options = {"max_model_len": MAX_LEN, "speculation": speculation} | SMALL | options
    with LLM(models.target, device="cpu", tensor_parallel_size=size, **options) as llm:
        yield llm


@pytest.fixture(scope="module")
def two(models: Models) -> Iterator[LLM]:
    with split(models, 2) as llm:
        yield llm


@contextmanager
def mode(llm: LLM, name: str) -> Iterator[None]:
    """The engine in another mode."""
    built = llm.engine.round.drafter
    assert isinstance(built, SSDDrafter)
    options = {"mode": name, "draft": "noisy", "k": 3} if name != "ar" else {"mode": name}
    speculation = SpeculationConfig(**options)  # type: ignore[arg-type]
    drafter = built if name == "ssd" else drafter_of(built.model, speculation, llm.engine.round.target.state)
    llm.driver.call(lambda engine: engine.round.use(drafter))
    yield
    llm.driver.call(lambda engine: engine.round.use(built))


def one_by_one(llm: LLM, requests: list[Asked]) -> list[RequestOutput]:
    """What plain decoding writes for each request alone, on the same ranks."""
    with mode(llm, "ar"):
        alone = [Asked(asked.prompt, asked.params) for asked in requests]
        return [llm.driver.call(lambda engine, a=each: play(engine, [a])[0]) for each in alone]


def check_modes(llm: LLM, count: int, seed: int) -> None:
    requests = random_requests(count, seed)
    expected = one_by_one(llm, requests)
    for name in ("ar", "sd", "ssd"):
        with mode(llm, name):
            outputs = llm.driver.call(lambda engine: play(engine, requests, preempt=0.05, seed=seed))
            check_answers(requests, outputs, expected)


class Drafts(RoundObserver):
    """All drafts that are verified."""

    def __init__(self) -> None:
        self.found: list[tuple[int, ...]] = []

    def decided(self, works: Seq[Work], outcomes: Seq[Outcome | None], seconds: float) -> None:
        self.found.extend(outcome.draft for outcome in outcomes if outcome is not None)


def pids(llm: LLM) -> list[int]:
    ranks = llm.engine.round.target.runner.followers  # type: ignore[attr-defined]
    assert isinstance(ranks, Ranks)
    return [worker.pid for worker in ranks._workers]


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def runs(pid: int) -> bool:
    """Whether a process is there (one that has ended and is not reaped is not)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def wait_for_end(pid: int, seconds: float = 10.0) -> None:
    deadline = time.monotonic() + seconds
    while runs(pid):
        assert time.monotonic() < deadline, "the process is still there"
        time.sleep(0.02)


# --- the same text ----------------------------------------------------------------------------------------------------


def test_all_modes_write_what_plain_decoding_writes_alone(two: LLM) -> None:
    """Sampled and greedy requests in changing batches, with chunked prompts, preemptions and aborts.

    Catches a sum whose order depends on the batch, and block tables or inputs that do not reach the other rank.
    """
    check_modes(two, 4, seed=1)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [2, 3])
def test_many_requests_at_degree_two(two: LLM, seed: int) -> None:
    """Also with a round in flight, as on a GPU."""
    two.driver.call(lambda engine: setattr(engine.round, "run_ahead", seed % 2 == 1))
    check_modes(two, 16, seed)
    two.driver.call(lambda engine: setattr(engine.round, "run_ahead", False))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["sd", "ssd"])
def test_eagle_heads_of_a_split_target(two: LLM, models: Models, name: str) -> None:
    """The head is on rank 0, with the whole embedding and the features of complete sums."""
    requests = random_requests(6, 1)
    expected = one_by_one(two, requests)
    head = {"mode": name, "draft": models.drafts["head"], "k": 3}
    with split(models, 2, speculation=head) as llm:
        outputs = llm.driver.call(lambda engine: play(engine, requests, preempt=0.05))
    check_answers(requests, outputs, expected)


@pytest.mark.slow
def test_a_head_drafts_at_degree_two_what_it_drafts_at_one(models: Models) -> None:
    """Catches a head that gets a share of the embedding, or features of partial sums: its text would still be right."""
    drafts: list[list[tuple[int, ...]]] = []
    for size in (1, 2):
        with split(models, size, speculation={"mode": "sd", "draft": models.drafts["head"], "k": 3}) as llm:
            seen = Drafts()
            with llm.driver.observing(seen):
                llm.generate([[5, 6, 7, 8], [9, 10, 11]], SamplingParams(max_new_tokens=20, temperature=0.0))
            drafts.append(seen.found)
    assert any(drafts[0])
    assert drafts[0] == drafts[1]


@pytest.mark.slow
def test_layers_with_windows_on_two_ranks(make_model: Callable[[str], TestModel], tmp_path: Path) -> None:
    """Catches entries of one group's block tables that the other rank writes to another's."""
    with split(make_models(make_model, tmp_path, "qwen3-windows"), 2, num_kv_blocks=100) as llm:
        assert [group.window for group in llm.engine.round.target.runner.decoder.kv_groups] == [None, 21]
        check_modes(llm, 6, seed=1)


@pytest.mark.slow
def test_latents_and_shared_experts_on_two_ranks(make_model: Callable[[str], TestModel], tmp_path: Path) -> None:
    """Catches a rank that keeps other latents, and a routing that depends on the batch."""
    with split(make_models(make_model, tmp_path, "deepseek-v3"), 2) as llm:
        check_modes(llm, 5, seed=1)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["llama-tied", "llama-biased"])
def test_degree_four(make_model: Callable[[str], TestModel], kind: str, tmp_path: Path) -> None:
    """llama-tied has 2 KV heads: each is on two ranks."""
    with split(make_models(make_model, tmp_path, kind), 4) as llm:
        check_modes(llm, 4, seed=1)


@pytest.mark.slow
def test_two_ranks_and_a_draft_in_a_process_of_its_own() -> None:
    """The bundled pair. Greedy and sampled requests in a batch of 8 and, of plain decoding, alone."""
    prompts = ["def fib(n):\n", "import os\n", "class Stack:\n", "for i in range("] * 2
    params = [SamplingParams(max_new_tokens=24, temperature=0.8 * (i % 2), seed=i) for i in range(8)]
    options: dict[str, Any] = {"device": "cpu", "tensor_parallel_size": 2}
    with LLM("tiny-llama", **options) as llm:
        plain = [llm.generate(prompt, each)[0].token_ids for prompt, each in zip(prompts, params, strict=True)]
    speculation = {"mode": "ssd", "draft": "tiny-llama-draft", "placement": "process"}
    with LLM("tiny-llama", **options, speculation=speculation) as llm:
        outputs = llm.generate(prompts, params)
    assert [output.token_ids for output in outputs] == plain
    assert sum(output.metrics.accepted for output in outputs) > 0


def test_text_of_two_ranks_is_that_of_one(two: LLM, models: Models) -> None:
    """The sums are others, the model is the same. Catches what is wrong alike in all modes and batches.

    Random weights are decisive: no two logits are as close as the sums, which differ by about 1e-6.
    """
    prompts = [[(7 * i + j) % 320 for j in range(3 + 9 * i)] for i in range(6)]
    params = [SamplingParams(max_new_tokens=12, temperature=0.8 * (i % 2), seed=i, logprobs=1) for i in range(6)]
    with LLM(models.target, device="cpu") as one:
        expected = one.generate(prompts, params)
    for found, whole in zip(two.generate(prompts, params), expected, strict=True):
        assert found.token_ids == whole.token_ids
        for token, same in zip(found.logprobs or [], whole.logprobs or [], strict=True):
            assert token.logprob == pytest.approx(same.logprob, abs=1e-3)


def test_ranks_agree_on_the_least_number_of_kv_blocks() -> None:
    """Catches a rank that writes beyond its KV because another one has more memory."""
    pairs = [socket.socketpair() for _ in range(2)]
    first = Place(TensorParallel(0, 3), [Channel(ours) for ours, _ in pairs])
    others = [Place(TensorParallel(rank, 3), [Channel(theirs)]) for rank, (_, theirs) in enumerate(pairs, 1)]
    with ThreadPoolExecutor(3) as pool:
        agreed = list(pool.map(lambda place, own: place.agree(own), [first, *others], [9, 7, 8]))
    assert agreed == [7, 7, 7]
    for channel in (*first.channels, *(place.channels[0] for place in others)):
        channel.close()


# --- refused ----------------------------------------------------------------------------------------------------------


def test_what_cannot_be_split_is_refused_at_once(models: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ssd.assembly.build.Ranks", lambda *_: pytest.fail("a process was started"))
    with pytest.raises(ConfigError, match="tensor_parallel_size=4 cannot split a model with num_heads=6"):
        LLM(models.target, device="cpu", tensor_parallel_size=4)
    with pytest.raises(ConfigError, match="tensor_parallel_size=0: must be an integer of at least 1"):
        LLM(models.target, device="cpu", tensor_parallel_size=0)


def test_a_draft_is_split_in_processes_of_its_own_only(models: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    for wrong in (0, True, "1", None):
        with pytest.raises(ConfigError, match=r"draft_tensor_parallel_size=.*: must be an integer of at least 1"):
            SpeculationConfig(mode="sd", draft="x", draft_tensor_parallel_size=wrong)  # type: ignore[arg-type]
    for given in ({"mode": "sd"}, {"mode": "ssd"}, {"mode": "ssd", "placement": "inline"}):
        with pytest.raises(ConfigError, match=r'draft_tensor_parallel_size=2 is for .* use placement="process"'):
            SpeculationConfig(draft="x", draft_tensor_parallel_size=2, **given)  # type: ignore[arg-type]
    monkeypatch.setattr(draft_workers, "Worker", lambda *_: pytest.fail("a process was started"))
    speculation = AHEAD | {"draft": models.drafts["noisy"], "placement": "process", "draft_tensor_parallel_size": 4}
    with pytest.raises(ConfigError, match="draft_tensor_parallel_size=4 cannot split a model with num_heads=6"):
        LLM(models.target, device="cpu", speculation=speculation)


def test_a_gpu_can_be_chosen_by_its_index(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank r has the r-th GPU from the chosen one on, and a draft in a process of its own the one after them."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 5)
    first = resolve_device(EngineConfig("x", device="cuda:1").device)
    assert [str(rank_device(first, rank)) for rank in range(3)] == ["cuda:1", "cuda:2", "cuda:3"]
    assert [str(rank_device(torch.device("cuda"), rank)) for rank in range(2)] == ["cuda", "cuda:1"]
    speculation = SpeculationConfig(mode="ssd", draft="x", placement="process")
    assert placed(speculation, first, ranks=3) == replace(speculation, draft_device="cuda:4")
    named = replace(speculation, draft_device="cuda:4")
    assert placed(named, first, ranks=2) == named
    with pytest.raises(ConfigError, match='draft_device="cuda:4" is a GPU of the target'):
        placed(named, first, ranks=4)
    with pytest.raises(ConfigError, match="needs another GPU for the draft"):
        placed(speculation, first, ranks=4)
    with pytest.raises(ConfigError, match="draft_replicas=2 and draft_tensor_parallel_size=1 need 2 more GPUs"):
        placed(replace(speculation, draft_replicas=2), first, ranks=3)
    with pytest.raises(ConfigError, match="draft_replicas=2 and draft_tensor_parallel_size=2 need 4 more GPUs"):
        placed(replace(speculation, draft_replicas=2, draft_tensor_parallel_size=2), first, ranks=1)
    with pytest.raises(ConfigError, match="tensor_parallel_size=5 from device='cuda:1' on needs more GPUs than the 5"):
        Ranks(EngineConfig("x", device="cuda:1", tensor_parallel_size=5), first)
    with pytest.raises(ConfigError, match="device='cuda:5', but torch sees 5 GPUs"):
        resolve_device("cuda:5")


def test_the_draft_s_process_gets_the_gpu_after_those_of_the_target(monkeypatch: pytest.MonkeyPatch) -> None:
    setups: list[Any] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 5)
    ready = SimpleNamespace(wait_ready=lambda _: True)
    monkeypatch.setattr(
        draft_workers, "ProcessDrafter", lambda starts, *_, **__: [start() for start in starts] and ready
    )
    monkeypatch.setattr(draft_workers, "Worker", setups.append)
    speculation = SpeculationConfig(mode="ssd", draft="x", placement="process")
    state = SequenceState(1, max_len=8, lookahead=2, vocab_size=10, device=torch.device("cpu"))

    def start(ranks: int, speculation: SpeculationConfig) -> None:
        found = placed(speculation, torch.device("cuda"), ranks=ranks)
        config = EngineConfig("x", device="cuda", tensor_parallel_size=ranks, speculation=found)
        draft_workers.start_workers(config, state)

    start(4, speculation)
    assert setups[0]["config"]["device"] == "cuda:4"
    start(2, replace(speculation, draft_replicas=3))
    assert [setup["config"]["device"] for setup in setups[1:]] == ["cuda:2", "cuda:3", "cuda:4"]
    assert [setup["replica"] for setup in setups[1:]] == [0, 1, 2]
    split = replace(speculation, draft_replicas=2, draft_tensor_parallel_size=2)
    start(1, split)
    assert [setup["config"]["device"] for setup in setups[4:]] == ["cuda:1", "cuda:3"]


# --- faults -----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_rank_that_dies_while_idle_is_noticed(models: Models) -> None:
    with split(models, 2, speculation=None) as llm:
        os.kill(pids(llm)[0], signal.SIGKILL)
        deadline = time.monotonic() + 10
        while llm.driver.failure is None:
            assert time.monotonic() < deadline
            time.sleep(0.02)


@pytest.mark.slow
def test_a_forward_pass_that_raises_ends_the_engine(models: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 1 waits for its part of a sum that never comes; to go on would add it to another one."""
    with split(models, 2, speculation=None) as llm:
        [pid] = pids(llm)
        decoder = llm.engine.round.target.runner.decoder  # type: ignore[attr-defined]
        monkeypatch.setattr(decoder.head, "logits", lambda _: 1 / 0)
        with pytest.raises(RequestFailed, match="a forward pass failed, and with it all ranks"):
            llm.generate([1, 2, 3])
        wait_for_end(pid)
        assert llm.driver.failure is not None


@pytest.mark.slow
def test_a_rank_that_hangs_ends_the_engine(models: Models) -> None:
    with split(models, 2, speculation=None) as llm:
        [pid] = pids(llm)
        os.kill(pid, signal.SIGSTOP)
        began = time.monotonic()
        with pytest.raises((EngineFailed, RequestFailed)):
            llm.generate([1, 2, 3], SamplingParams(max_new_tokens=20))
        assert time.monotonic() - began < 10
    wait_for_end(pid)


@pytest.mark.slow
def test_a_server_that_loses_a_rank_exits_with_an_error() -> None:
    with serve("--tensor-parallel-size", "2") as served:
        [pid] = served.drafters()
        os.kill(pid, signal.SIGKILL)
        assert served.process.wait(10) == 1
        assert "error: the engine has failed: load the model again (EngineFailed: rank 1" in served.log


@pytest.mark.slow
@pytest.mark.parametrize("how", ["killed", "interrupted"])
def test_generate_exits_with_an_error_and_leaves_no_rank(how: str) -> None:
    command = [sys.executable, "-m", "ssd", "generate", "tiny-llama", "x", "--device", "cpu", "-m", "2000"]
    with subprocess.Popen([*command, "--tensor-parallel-size", "2"], stdout=subprocess.PIPE, text=True) as engine:
        assert engine.stdout is not None
        engine.stdout.read(1)  # it has begun
        [pid] = ServeProcess(engine, "", Path()).drafters()  # type: ignore[arg-type]
        if how == "killed":
            os.kill(pid, signal.SIGKILL)
        else:
            engine.send_signal(signal.SIGINT)
        assert engine.wait(10) == (1 if how == "killed" else 130)
    wait_for_end(pid)


_KILLED = """
import os, signal, sys, time
from ssd import LLM, SamplingParams
llm = LLM(sys.argv[1], device="cpu", tensor_parallel_size=2)
runner = llm.engine.round.target.runner
print(*(worker.pid for worker in runner.followers._workers), flush=True)
time.sleep(60) if sys.argv[2] == "idle" else llm.generate([1, 2], SamplingParams(max_new_tokens=500, ignore_eos=True))
"""


@pytest.mark.slow
@pytest.mark.parametrize("moment", ["busy", "idle"])
def test_no_rank_outlives_a_killed_engine(models: Models, moment: str) -> None:
    """kill -9 of rank 0: nothing of it runs any more."""
    command = [sys.executable, "-c", _KILLED, models.target, moment]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as engine:
        assert engine.stdout is not None
        pid = int(engine.stdout.readline())
        assert runs(pid)
        engine.kill()
    wait_for_end(pid)


def test_a_rank_that_cannot_start_is_an_error_and_leaves_nothing(
    models: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads = torch.get_num_threads()
    monkeypatch.setattr("ssd.assembly.ranks.FOLLOWER_COMMAND", (sys.executable, "-c", "raise SystemExit(3)"))
    with pytest.raises(EngineFailed, match="rank 1 of the model could not be started"):
        LLM(models.target, device="cpu", tensor_parallel_size=2)
    assert torch.get_num_threads() == threads


def test_a_watch_that_comes_late_takes_the_end_for_no_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine sockets may be closed before the thread that watches them is told to end."""
    ranks = object.__new__(Ranks)
    ranks._wake, ranks._woken = socket.socketpair()
    ours, theirs = socket.socketpair()
    ranks._channels, ranks._hosts, ranks.failure, ranks._awaited = [Channel(ours)], None, None, None
    poller = select.poll()

    def close_before(milliseconds: int) -> list[tuple[int, int]]:
        for end in (ranks._wake, ranks._woken, ours, theirs):
            end.close()
        return sorted(poller.poll(milliseconds), reverse=True)

    late = SimpleNamespace(register=poller.register, poll=close_before)
    monkeypatch.setattr(select, "poll", lambda: late)
    ranks._watch()
    assert ranks.failure is None


@pytest.mark.slow
def test_nothing_is_left_of_a_closed_engine(models: Models) -> None:
    files, threads = len(os.listdir("/proc/self/fd")), threading.active_count()
    for _ in range(2):
        with split(models, 2) as llm:
            llm.generate([1, 2, 3])
            llm.driver.call(check_idle)
            [pid] = pids(llm)
            assert runs(pid)
        assert not runs(pid)
    assert threading.active_count() == threads
    assert len(os.listdir("/proc/self/fd")) <= files + 1


# --- faults of the draft's processes ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Load:
    """Many requests, and what plain decoding writes for each alone, on the same ranks."""

    prompts: list[list[int]]
    params: list[SamplingParams]
    answers: list[list[int]]

    @property
    def texts(self) -> list[list[int]]:
        return [prompt + answer for prompt, answer in zip(self.prompts, self.answers, strict=True)]


@pytest.fixture(scope="module")
def load(two: LLM) -> Load:
    prompts = [[(11 * i + 3 * j) % VOCAB for j in range(2 + i)] for i in range(20)]  # 4 of them wait
    params = [SamplingParams(max_new_tokens=24, temperature=0.8 * (i % 2), seed=i, ignore_eos=True) for i in range(20)]
    with mode(two, "ar"):
        outputs = [two.generate([prompt], each)[0] for prompt, each in zip(prompts, params, strict=True)]
    return Load(prompts, params, [output.token_ids for output in outputs])


def held() -> tuple[int, set[str]]:
    """Open files of this process, and shared memory, without that of browsers, whose names begin with a dot."""
    return len(os.listdir("/proc/self/fd")), {name for name in os.listdir("/dev/shm") if not name.startswith(".")}


def check_no_more(before: tuple[int, set[str]]) -> None:
    """Others may close files or free memory meanwhile."""
    files, shared = held()
    assert files <= before[0]
    assert shared <= before[1]


@contextmanager
def drafting_with(llm: LLM, *workers: tuple[str, dict[str, Any]]) -> Iterator[ProcessDrafter]:
    """The engine with a drafter in such processes; of them nothing may be left in the end."""
    before, started = held(), list[int]()

    def start(code: str, setup: dict[str, Any]) -> Worker:
        worker = Worker(setup, [sys.executable, "-c", code])
        started.append(worker.pid)
        return worker

    starts = [partial(start, *each) for each in workers]
    drafter, built = ProcessDrafter(starts, 3, VOCAB, patience=0.1, hang_limit=0.2), llm.engine.round.drafter
    assert drafter.wait_ready(30)
    llm.driver.call(lambda engine: engine.round.use(drafter))
    yield drafter
    llm.driver.call(lambda engine: engine.round.use(built))
    drafter.close()
    assert not [pid for pid in started if Path(f"/proc/{pid}").exists()]
    check_no_more(before)


class Faults(RoundObserver):
    """Something happens before the drafter is asked, by the number of the round."""

    def __init__(self) -> None:
        self.by_round: dict[int, Callable[[], None]] = {}
        self._rounds = itertools.count()

    def part(self, name: str) -> None:
        if name == "propose":
            self.by_round.get(next(self._rounds), lambda: None)()


@pytest.mark.slow
@pytest.mark.parametrize("replicas", [pytest.param(1, marks=pytest.mark.slow), 2])
@pytest.mark.parametrize(
    "fault", ["killed", "wrong", *(pytest.param(fault, marks=pytest.mark.slow) for fault in ("stopped", "malformed"))]
)
def test_faults_of_a_draft_s_process_under_load_cost_no_text(two: LLM, load: Load, fault: str, replicas: int) -> None:
    """Two ranks, 20 requests, and a draft's process that dies, hangs or lies, alone or beside another one.

    Catches a text that changes, a request that is lost, and processes or memory that are left.
    """
    honest = {"texts": load.texts, "ahead": True}
    workers = [(HONEST, honest | {"share": (i, replicas)}) for i in range(replicas)]
    if fault == "wrong":
        workers[0] = HONEST, honest | {"shift": 1}
    elif fault == "malformed":
        workers[0] = LIAR.replace("READY", "send(2, 0)").replace("ROUND", LIES["noise"]), {}
    faults = Faults()
    with drafting_with(two, *workers) as drafter, two.driver.observing(faults):
        victim = drafter.replicas[0].supervisor
        if fault in ("killed", "stopped"):
            pid = victim.pid or 0
            faults.by_round[6] = lambda: os.kill(pid, signal.SIGKILL if fault == "killed" else signal.SIGSTOP)
            faults.by_round[9] = lambda: time.sleep(0.3)  # beyond the hang limit
        outputs = two.generate(load.prompts, load.params)
        assert [output.token_ids for output in outputs] == load.answers
        assert all(output.finish_reason == "length" for output in outputs)
        assert (victim.failures > 0) == (fault != "wrong")
        assert sum(each.supervisor.failures for each in drafter.replicas[1:]) == 0
        assert sum(output.metrics.accepted for output in outputs) > 0 or replicas == 1
        two.driver.call(check_empty)


@pytest.mark.slow
@pytest.mark.parametrize("replicas", [1, 2])
def test_draft_models_that_die_and_hang_again_and_again(two: LLM, models: Models, load: Load, replicas: int) -> None:
    """Real draft models beside two ranks. Every few rounds one of them is killed or stopped; their successors draft."""
    speculation = AHEAD | {"draft": models.drafts["noisy"], "placement": "process", "draft_replicas": replicas}
    before = held()
    dice, hit = random.Random(1), set[int]()
    with split(models, 2, speculation=speculation) as llm:
        drafter = llm.engine.round.drafter
        assert isinstance(drafter, ProcessDrafter)

        def strike(engine: Engine) -> bool:
            """Between any two rounds; pauses of a lost worker are tested elsewhere."""
            for each in drafter.replicas:
                supervisor = each.supervisor
                supervisor.hang_limit, supervisor._restart_at = 0.2, 0.0
                if supervisor.ready and supervisor.pid not in hit and dice.random() < 0.1:
                    hit.add(supervisor.pid or 0)
                    os.kill(supervisor.pid or 0, dice.choice([signal.SIGKILL, signal.SIGSTOP]))
            return engine.has_work

        deadline = time.monotonic() + 60
        while len(hit) < 6:
            assert time.monotonic() < deadline
            submissions = llm.driver.submit_many(list(zip(load.prompts, load.params, strict=True)))
            while llm.driver.call(strike):
                pass
            assert [submission.result().token_ids for submission in submissions] == load.answers
        llm.driver.call(check_empty)
        assert llm.engine.metrics.drafter_failures >= 5
        assert llm.engine.metrics.spec_decode_num_accepted_tokens > 0
    for pid in hit:
        wait_for_end(pid)
    check_no_more(before)


@pytest.mark.slow
def test_a_draft_model_on_two_ranks_beside_a_target_on_two(models: Models, load: Load) -> None:
    """The same text. A rank of the draft that is killed or stopped takes the others along; then they are back."""
    speculation = AHEAD | {"draft": models.drafts["noisy"], "placement": "process", "draft_tensor_parallel_size": 2}
    with split(models, 2, speculation=speculation) as llm:
        drafter = llm.engine.round.drafter
        assert isinstance(drafter, ProcessDrafter)
        [supervisor] = [each.supervisor for each in drafter.replicas]
        started = list[int]()
        for fault in (None, signal.SIGKILL, signal.SIGSTOP):
            assert drafter.wait_ready(30)
            started += [supervisor.pid or 0, *(ranks := children(supervisor.pid or 0))]
            assert len(ranks) == 1
            if fault is not None:
                supervisor.hang_limit, supervisor._restart_at = 1.0, 0.0
                os.kill(ranks[0], fault)
            before, lost = llm.engine.metrics.spec_decode_num_accepted_tokens, supervisor.failures
            outputs = llm.generate(load.prompts, load.params)
            assert [output.token_ids for output in outputs] == load.answers
            if fault is None:
                assert llm.engine.metrics.spec_decode_num_accepted_tokens > before
                continue
            deadline = time.monotonic() + 20
            while supervisor.failures == lost or supervisor.pid is None:
                assert time.monotonic() < deadline
                llm.generate(load.prompts[:1], load.params[:1])
            for pid in started:
                wait_for_end(pid)
        assert drafter.wait_ready(30)
        started += [supervisor.pid or 0, *children(supervisor.pid or 0)]
    for pid in started:
        wait_for_end(pid)


def test_a_rank_that_dies_ends_all_requests_with_the_reason(models: Models) -> None:
    """Not with the engine of the other tests, which may come after this one."""
    params = SamplingParams(max_new_tokens=60, ignore_eos=True)
    with split(models, 2, speculation=None) as llm:
        with paused_at(llm.driver, 8):
            submissions = [llm.driver.submit([1, 2, i], params, stream=True) for i in range(20)]  # 4 of them wait
            next(submissions[0])
            [pid] = pids(llm)
            began = time.monotonic()
            os.kill(pid, signal.SIGKILL)
        for submission in submissions:
            assert "rank 1 of the model has ended" in str(submission.result().error)
        assert time.monotonic() - began < 10
        assert "rank 1 of the model has ended" in str(llm.driver.failure)
        with pytest.raises((EngineFailed, RequestFailed), match="rank 1 of the model has ended"):
            llm.generate([1, 2, 3])
