"""The ranks of a model that is split by tensor parallelism.

Rank 0 is the engine, which schedules and samples. Each other rank is a process, a follower: a message names the forward
pass to launch, whose inputs rank 0 broadcasts inside of it, and a message has the new entries of the block tables. If
one rank is lost, all of them end.
"""

from __future__ import annotations

import logging
import os
import select
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from collections.abc import Sequence as Seq
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import asdict, dataclass, field, replace
from enum import IntEnum
from typing import Any

import torch

from ssd.assembly.device import make_current, rank_device, resolve_device
from ssd.assembly.open import absolute_path
from ssd.assembly.torchrun import join
from ssd.config import EngineConfig
from ssd.errors import ConfigError, EngineFailed, one_line
from ssd.execution.runner import ModelRunner
from ssd.execution.threads import ThreadController, num_cores
from ssd.options import build
from ssd.parallel.group import HANG_SECONDS, LOOPBACK, listener, make_group
from ssd.parallel.launch import local_rank, local_size
from ssd.parallel.process import FOLLOWER_COMMAND, HANG_UP, Worker, connect, exit_with
from ssd.parallel.tensor import TensorParallel
from ssd.parallel.transport import READY, Channel, Message, Reader, WireError, words

log = logging.getLogger("ssd")
_NOTICE_SECONDS = 1.0  # within which a process that has ended is noticed


class Kind(IntEnum):
    """Messages after SETUP and READY."""

    BLOCKS = 3  # to rank 0: the number of KV blocks that a rank has memory for; from rank 0: the least of all
    TABLES = 4  # from rank 0: new entries of the block tables, first their places, then their values
    FORWARD = 5  # from rank 0: the forward pass to launch
    DRAFT = 6  # from rank 0 of a draft model: the piece of a draft run to launch


@dataclass(frozen=True)
class Place:
    """A rank's place: its share of the layers, and how it agrees with the others on a number of KV blocks."""

    tp: TensorParallel = field(default_factory=TensorParallel)
    channels: Seq[Channel] = ()  # on rank 0: to the others; elsewhere: to rank 0

    def agree(self, num_blocks: int) -> int:
        """The least of all ranks' numbers."""
        if self.tp.rank:
            self._send_blocks(num_blocks)
            return _receive_blocks(self.channels[0])
        for rank, channel in enumerate(self.channels, 1):
            with _explained(rank):
                num_blocks = min(num_blocks, _receive_blocks(channel))
        self._send_blocks(num_blocks)
        return num_blocks

    def _send_blocks(self, num_blocks: int) -> None:
        for channel in self.channels:
            channel.send(Message(Kind.BLOCKS, payload=words([num_blocks])))


def _receive_blocks(channel: Channel) -> int:
    return Reader(channel.expect(Kind.BLOCKS, limit=1).payload).number(0)


def num_threads(config: EngineConfig) -> int:
    """A rank's share of the CPU's cores; drafts in processes of their own have others."""
    return max(1, (num_cores() - config.speculation.draft_cores) // local_size(config.tensor_parallel_size))


# --- rank 0 -----------------------------------------------------------------------------------------------------------


class Ranks:
    """The processes of all ranks but the first (`Followers`); `place` is that of rank 0."""

    def __init__(self, config: EngineConfig, device: torch.device, draft: Mapping[str, Any] | None = None) -> None:
        """Returns when all of them have joined the group; they load their shares of the model after that.

        `draft`: for the ranks of a draft model, what `follow_draft` needs besides the config.
        """
        size = config.tensor_parallel_size
        self._hosts = join(size)
        if device.type == "cuda" and rank_device(device, local_size(size) - 1).index >= torch.cuda.device_count():
            raise ConfigError(
                f"tensor_parallel_size={size} from device={config.device!r} on needs more GPUs than the "
                f"{torch.cuda.device_count()} that torch sees: lower it, or check CUDA_VISIBLE_DEVICES"
            )
        listening = listener() if self._hosts is None else listener("")
        port = listening.getsockname()[1]
        config = replace(config, model=absolute_path(config.model))
        host = LOOPBACK if self._hosts is None else self._hosts.host
        setup = {"config": asdict(config), "size": size, "host": host, "port": port, "draft": draft}
        self.failure: str | None = None
        self._lost = threading.Event()
        self._lock = threading.Lock()
        self._awaited: float | None = None  # since when rank 0 waits for its GPU
        self._on_cuda = device.type == "cuda"
        self._threads = torch.get_num_threads()
        self._wake, self._woken = socket.socketpair()
        self._workers: list[Worker] = []  # on this host, unless torchrun has started the ranks
        self._channels: list[Channel] = []
        self._thread = threading.Thread(target=self._watch, name="ssd-ranks", daemon=True)
        try:
            if self._hosts is not None:
                self._channels = self._hosts.start(setup)
            else:
                own = draft is None  # those of a draft are killed together with its first rank
                self._workers += (Worker({**setup, "rank": r}, FOLLOWER_COMMAND, own_group=own) for r in range(1, size))
                self._channels = [worker.channel for worker in self._workers]
            for rank, channel in enumerate(self._channels, 1):
                with _explained(rank):
                    channel.expect(READY)
            address = self._channels[-1].address or LOOPBACK  # by which the last rank, on the last host, reaches it
            self._group = make_group(0, size, device, port=port, listening=listening, address=address)
        except BaseException:
            listening.close()
            self._end()
            raise
        if not self._on_cuda:
            torch.set_num_threads(min(self._threads, num_threads(config)))
        self.place = Place(TensorParallel(0, size, self._group), self._channels)
        log.info("ranks 1 to %d are there", size - 1)
        self._thread.start()

    def attach(self, runner: ModelRunner) -> None:
        """Makes them launch what this runner launches."""
        runner.followers = self
        runner.tables.on_write = self.write_tables

    def launching(self, key: Seq[int], *, draft: bool = False) -> AbstractContextManager[None]:
        return self._in_step(Kind.DRAFT if draft else Kind.FORWARD, key)

    @contextmanager
    def awaited(self) -> Iterator[None]:
        self._awaited = time.monotonic()
        try:
            yield
        finally:
            self._awaited = None
        self._check()

    def write_tables(self, places: Seq[int], values: Seq[int]) -> None:
        with self._in_step(Kind.TABLES, [*places, *values]):
            pass

    def close(self) -> None:
        """Ends the processes. Safe to call twice."""
        self._wake.close()
        self._thread.join(_NOTICE_SECONDS)
        if self._on_cuda and self.failure is None:
            self._group.abort()  # an orderly end would need the other ranks
        hosts, self._hosts = self._hosts, None
        if hosts is not None and self.failure is None:
            hosts.engine_closed()
        self._end()
        torch.set_num_threads(self._threads)

    def _end(self) -> None:
        for channel in self._channels:
            channel.close()  # all of them first: each process takes a moment to end
        for worker in self._workers:
            worker.close()
        self._wake.close()
        self._woken.close()

    @contextmanager
    def _in_step(self, kind: Kind, numbers: Seq[int]) -> Iterator[None]:
        """Sends a message to all ranks. An error of that or of the block ends them: they are no longer in step."""
        self._check()
        message = Message(kind, payload=words(numbers))
        try:
            for channel in self._channels:
                channel.post(message)
            for channel in self._channels:
                channel.flush()
            yield
        except Exception as error:
            self._lost.wait(_NOTICE_SECONDS)  # for the reason, if a process has ended
            self._give_up(f"a forward pass failed, and with it all ranks ({one_line(error)})")
            raise EngineFailed(self.failure) from error

    def _check(self) -> None:
        if self.failure is not None:
            raise EngineFailed(self.failure)

    def _watch(self) -> None:
        """Ends all ranks when a process ends, or when a wait for the GPU takes too long.

        Makes no CUDA calls: they would invalidate a graph that another thread captures.
        """
        poller = select.poll()
        ranks = {channel.fileno(): rank for rank, channel in enumerate(self._channels, 1)}
        if self._hosts is not None:
            ranks |= {channel.fileno(): rank for rank, channel in enumerate(self._hosts.channels, 1)}
        woken = self._woken.fileno()
        for end in (*ranks, woken):
            poller.register(end, HANG_UP)
        while self.failure is None:
            found = poller.poll(500)
            if any(end == woken for end, _ in found):  # which `close` may have closed meanwhile
                return
            since = self._awaited
            if found:
                self._give_up(f"rank {ranks[found[0][0]]} of the model has ended (its own output says why)")
            elif self._on_cuda and since is not None and time.monotonic() - since > HANG_SECONDS:
                self._give_up(f"a rank of the model has not computed its part for {HANG_SECONDS:g} s")

    def _give_up(self, reason: str) -> None:
        with self._lock:
            if self.failure is not None:
                return
            self.failure = reason
        self._lost.set()
        log.error("%s", reason)
        for channel in self._channels:
            channel.close()
        for worker in self._workers:
            worker.kill()
        if self._on_cuda:
            self._group.abort()  # else the kernels of rank 0 would wait without end


@contextmanager
def _explained(rank: int) -> Iterator[None]:
    """Turns the loss of a process that is starting into an error that names its rank."""
    try:
        yield
    except (OSError, WireError) as error:
        raise EngineFailed(f"rank {rank} of the model could not be started: its own output says why") from error


# --- the others -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Follower:
    """A rank besides the first: what its runner is built from, and the loop that it serves."""

    config: EngineConfig
    device: torch.device
    place: Place
    channel: Channel
    draft: Mapping[str, Any] | None  # `Ranks.draft`, for a rank of a draft model
    threads: ThreadController | None  # on a CPU

    @classmethod
    def at(cls, fd: int) -> Follower:
        """Receives its setup over the socket `fd`, and joins the group. The process ends when that socket does."""
        channel, setup = connect(fd)
        exit_with(channel)
        channel.send(Message(READY))
        return cls._of(setup, channel)

    @classmethod
    def _of(cls, setup: Mapping[str, Any], channel: Channel) -> Follower:
        config, rank, size = build(EngineConfig, dict(setup["config"])), int(setup["rank"]), int(setup["size"])
        device = resolve_device(str(rank_device(resolve_device(config.device), local_rank(rank))))
        make_current(device)
        if device.type == "cpu" and setup["draft"] is None:
            _take_cores(local_rank(rank), num_threads(config))
        elif device.type == "cpu":
            torch.set_num_threads(1)
        where = {"host": setup["host"], "port": int(setup["port"]), "address": channel.address or LOOPBACK}
        threads = ThreadController() if device.type == "cpu" else None
        place = Place(TensorParallel(rank, size, make_group(rank, size, device, **where)), [channel])
        return cls(config, device, place, channel, setup["draft"], threads)

    def serve(self, runner: ModelRunner, draft: Callable[[tuple[int, ...]], None] | None = None) -> None:
        """Launches what rank 0 launches, until the socket closes; `draft` launches the pieces of draft runs."""
        while True:
            message = self.channel.receive()
            if message is None:
                continue
            numbers = message.payload.tolist()
            if message.kind == Kind.TABLES and len(numbers) % 2 == 0:
                half = len(numbers) // 2
                runner.tables.write(numbers[:half], numbers[half:])
            elif message.kind == Kind.FORWARD:
                with self.threads.adapted() if self.threads is not None else nullcontext():
                    runner.run(runner.staged(tuple(numbers)))
            elif message.kind == Kind.DRAFT and draft is not None:
                draft(tuple(numbers))
            else:
                raise WireError(f"a message of kind {message.kind} with {len(numbers)} numbers is not for a rank")


def _take_cores(rank: int, count: int) -> None:
    """Binds a rank to its own cores; the first ones are left to rank 0."""
    torch.set_num_threads(count)
    if hasattr(os, "sched_setaffinity"):
        cores = sorted(os.sched_getaffinity(0))
        with suppress(OSError):
            os.sched_setaffinity(0, {cores[(rank * count + i) % len(cores)] for i in range(count)})
