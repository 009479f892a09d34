"""The ranks of a model that is split by tensor parallelism.

Rank 0 is the engine, which schedules and samples. Each other rank is a process that follows it: a message names the
forward pass to launch, whose inputs rank 0 broadcasts inside of it, and a message has the new entries of the block
tables. The ranks live and die together: one that is lost ends the engine, and rank 0 takes the others with it.
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
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np
import torch

from ssd.assembly.device import make_current, num_cores, rank_device, resolve_device
from ssd.assembly.torchrun import Remote, join
from ssd.config import EngineConfig, build
from ssd.drafting.supervisor import FOLLOWER_COMMAND, Worker
from ssd.drafting.wire import Channel, Kind, Message, WireError, decode_setup
from ssd.errors import ConfigError, EngineFailed, one_line
from ssd.execution.runner import ModelRunner
from ssd.execution.threads import ThreadController
from ssd.models.open import absolute_path
from ssd.parallel.group import HANG_SECONDS, LOOPBACK, listener, make_group
from ssd.parallel.launch import local_rank, local_size
from ssd.parallel.tensor import TensorParallel

log = logging.getLogger("ssd")
_HANG_UP = getattr(select, "POLLRDHUP", select.POLLHUP)  # the former where there is one, as on Linux
_NOTICE_SECONDS = 1.0  # within which a process that has ended is noticed


@dataclass(frozen=True)
class Place:
    """A rank's place: its share of the layers, and how it agrees with the others on a number of KV blocks."""

    tp: TensorParallel = field(default_factory=TensorParallel)
    channels: Seq[Channel] = ()  # on rank 0: to the others; elsewhere: to rank 0

    def agree(self, num_blocks: int) -> int:
        """The least of all ranks' numbers."""
        if self.tp.rank:
            _send(self.channels[0], Message(Kind.READY, payload=_words([num_blocks])))
            return int(_receive(self.channels[0], Kind.READY).payload[0])
        for rank, channel in enumerate(self.channels, 1):
            with _explained(rank):
                num_blocks = min(num_blocks, int(_receive(channel, Kind.READY).payload[0]))
        for channel in self.channels:
            _send(channel, Message(Kind.READY, payload=_words([num_blocks])))
        return num_blocks


def num_threads(config: EngineConfig) -> int:
    """A rank's share of the CPU's cores; drafts in processes of their own have others."""
    return max(1, (num_cores() - config.speculation.draft_ranks) // local_size(config.tensor_parallel_size))


# --- rank 0 -----------------------------------------------------------------------------------------------------------


class Ranks:
    """The processes of all ranks but the first (`Followers`); `place` is that of rank 0."""

    def __init__(self, config: EngineConfig, device: torch.device, draft: Mapping[str, Any] | None = None) -> None:
        """Returns when all of them are there; they load their shares of the model meanwhile.

        `draft`: what the ranks of a draft model need to know besides the config.
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
        self._workers: list[Worker | Remote] = []
        self._thread = threading.Thread(target=self._watch, name="ssd-ranks", daemon=True)
        try:
            if self._hosts is not None:
                self._workers += self._hosts.start(setup)
            else:
                own = draft is None  # those of a draft are killed together with its first rank
                self._workers += (Worker({**setup, "rank": r}, FOLLOWER_COMMAND, own_group=own) for r in range(1, size))
            self._channels = [worker.channel for worker in self._workers]
            for rank, channel in enumerate(self._channels, 1):
                with _explained(rank):
                    _receive(channel, Kind.READY)
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
        """From now on they follow this runner."""
        runner.followers = self
        runner.tables.on_write = self.write_tables

    @contextmanager
    def launching(self, key: Seq[int], *, draft: bool = False) -> Iterator[None]:
        self._check()
        try:
            self._post(Message(Kind.DRAFT if draft else Kind.FORWARD, payload=_words(key)))
            yield
        except Exception as error:  # the ranks are no longer at the same place
            raise self._failed(error) from error

    @contextmanager
    def awaited(self) -> Iterator[None]:
        self._awaited = time.monotonic()
        try:
            yield
        finally:
            self._awaited = None
        self._check()

    def write_tables(self, places: Seq[int], values: Seq[int]) -> None:
        self._check()
        try:
            self._post(Message(Kind.TABLES, payload=_words([*places, *values])))
        except (OSError, WireError) as error:
            raise self._failed(error) from error

    def close(self) -> None:
        """Ends the processes. Safe to call twice."""
        self._wake.close()
        self._thread.join(_NOTICE_SECONDS)
        if self._on_cuda and self.failure is None:
            self._group.abort()  # alone: to end it in order would take the other ranks
        hosts, self._hosts = self._hosts, None
        if hosts is not None and self.failure is None:
            hosts.engine_closed()
        self._end()
        torch.set_num_threads(self._threads)

    def _end(self) -> None:
        for worker in self._workers:
            worker.channel.close()  # of all of them first: each takes a moment to end
        for worker in self._workers:
            worker.close()
        self._wake.close()
        self._woken.close()

    def _post(self, message: Message) -> None:
        for channel in self._channels:
            channel.post(message)
        for channel in self._channels:
            channel.flush()

    def _check(self) -> None:
        if self.failure is not None:
            raise EngineFailed(self.failure)

    def _failed(self, error: Exception) -> EngineFailed:
        self._lost.wait(_NOTICE_SECONDS)
        self._give_up(f"a forward pass failed, and with it all ranks ({one_line(error)})")
        return EngineFailed(self.failure)

    def _watch(self) -> None:
        """Gives up when a process ends, or when the GPU waits for too long. Makes no call of CUDA: this thread would
        disturb a graph that is being captured."""
        poller = select.poll()
        ranks = {channel.fileno(): rank for rank, channel in enumerate(self._channels, 1)}
        if self._hosts is not None:
            ranks |= {channel.fileno(): rank for rank, channel in enumerate(self._hosts.channels, 1)}
        for end in (*ranks, self._woken.fileno()):
            poller.register(end, _HANG_UP)
        while self.failure is None:
            found = poller.poll(500)
            if any(end == self._woken.fileno() for end, _ in found):
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
        for worker in self._workers:
            worker.kill()
        if self._on_cuda:
            self._group.abort()  # else rank 0's GPU would wait for ever


@contextmanager
def _explained(rank: int) -> Iterator[None]:
    """A process that ends while it starts."""
    try:
        yield
    except (OSError, WireError) as error:
        raise EngineFailed(f"rank {rank} of the model could not be started: its own output says why") from error


# --- the others -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Follower:
    """What a rank is built from."""

    config: EngineConfig
    device: torch.device
    place: Place
    channel: Channel
    draft: Mapping[str, Any] | None  # of the ranks of a draft model
    threads: ThreadController | None  # on a CPU

    @classmethod
    def at(cls, fd: int) -> Follower:
        """Receives its setup over the socket `fd`, and joins the group. The process ends when that socket does."""
        channel = Channel(socket.socket(fileno=fd))
        threading.Thread(target=_exit_with, args=(fd,), daemon=True).start()
        setup = decode_setup(_receive(channel, Kind.SETUP).payload)
        _send(channel, Message(Kind.READY))
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
        """Launches what rank 0 says, until the socket closes; `draft` launches the pieces of draft runs."""
        while True:
            message = self.channel.receive()
            if message is None:
                continue
            if message.kind is Kind.TABLES:
                places, values = message.payload.reshape(2, -1).tolist()
                runner.tables.write(places, values)
            elif message.kind is Kind.FORWARD:
                with self.threads.adapted() if self.threads is not None else nullcontext():
                    runner.run(runner.staged(tuple(message.payload.tolist())))
            elif message.kind is Kind.DRAFT and draft is not None:
                draft(tuple(message.payload.tolist()))
            else:
                raise WireError(f"a message of kind {message.kind.name} is not for a rank")


def _take_cores(rank: int, count: int) -> None:
    """The cores of a rank: the first ones are left to rank 0."""
    torch.set_num_threads(count)
    if hasattr(os, "sched_setaffinity"):
        cores = sorted(os.sched_getaffinity(0))
        with suppress(OSError):
            os.sched_setaffinity(0, {cores[(rank * count + i) % len(cores)] for i in range(count)})


def _exit_with(fd: int) -> None:
    """Ends this process with the other end of its socket, whatever it is computing or waiting for."""
    poller = select.poll()
    poller.register(fd, _HANG_UP)
    poller.poll()
    os._exit(0)


def _receive(channel: Channel, kind: Kind) -> Message:
    message = channel.receive()
    if message is None or message.kind is not kind:
        raise WireError(f"a message of kind {kind.name} was due")
    return message


def _send(channel: Channel, message: Message) -> None:
    channel.post(message)
    channel.flush()


def _words(numbers: Seq[int]) -> np.ndarray:
    return np.array(numbers, dtype=np.int64)
