"""How the ranks of a model reach each other: gloo between CPUs, NCCL between GPUs.

A group is a backend object of its own, not torch's default process group, so a process can have several.
"""

from __future__ import annotations

import socket
from datetime import timedelta
from typing import Any

import torch

HANG_SECONDS = 6.0  # timeout of a collective operation: a rank that takes longer is lost
LOOPBACK = "127.0.0.1"
_START = timedelta(minutes=2)


def listener(address: str = LOOPBACK) -> socket.socket:
    """A socket for `make_group` of rank 0; the others connect to its port. The address "": all network interfaces."""
    made = socket.socket()
    made.bind((address, 0))
    made.listen()
    return made


def make_group(
    rank: int,
    size: int,
    device: torch.device,
    *,
    port: int,
    listening: socket.socket | None = None,
    host: str = LOOPBACK,
    address: str = LOOPBACK,
) -> Any:
    """Returns when all ranks have called it. `listening`: that of rank 0, at `port` of its `host`.

    `address`: where gloo listens on this host.
    """
    from torch import distributed

    dist: Any = distributed  # some of these names are private to torch
    master: dict[str, Any] = {"master_listen_fd": listening.detach()} if listening is not None else {}
    store = dist.TCPStore(host, port, size, listening is not None, _START, wait_for_workers=False, **master)
    if device.type == "cuda":
        return dist.ProcessGroupNCCL(store, rank, size, dist.ProcessGroupNCCL.Options())
    options = dist.ProcessGroupGloo._Options()
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=address)]
    options._timeout = _START
    group = dist.ProcessGroupGloo(store, rank, size, options)
    group._set_default_timeout(timedelta(seconds=HANG_SECONDS))
    return group
