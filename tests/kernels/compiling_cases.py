"""Kernels compiled ahead, for a GPU that need not be there. Run by `test_compiling.py`, in a process of their own."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import triton.language as tl
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from ssd.kernels.triton.compile import compile_only, compiling


def add_one(x_ptr, SIZE: tl.constexpr):  # type: ignore[no-untyped-def]
    i = tl.arange(0, SIZE)
    tl.store(x_ptr + i, tl.load(x_ptr + i) + 1)


def wrong(x_ptr):  # type: ignore[no-untyped-def]
    tl.store(x_ptr, tl.arange(0, 3))  # not a power of two


class FakeDriver:
    """Of one GPU, which runs nothing."""

    def __init__(self, architecture: int = 90, device: int = 0) -> None:
        self._architecture, self._device = architecture, device
        self.loaded: list[str] = []
        self.runs = 0
        self.utils = self

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self._architecture, 32)

    def get_current_device(self) -> int:
        return self._device

    def get_current_stream(self, device: int) -> int:
        return device

    def get_device_properties(self, device: int) -> dict[str, int]:
        return {"max_shared_mem": 1 << 17}

    def load_binary(self, name: str, *_: Any) -> tuple[int, ...]:
        self.loaded.append(name)
        return (1, 1, 1, 0, 1024)

    def launcher_cls(self, *_: Any) -> Any:
        return self.run

    def run(self, *_: Any) -> None:
        self.runs += 1


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[FakeDriver]:
    monkeypatch.setattr(knobs.cache, "dir", str(tmp_path))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    made = FakeDriver()
    before = driver._active
    driver.set_active(made)  # type: ignore[arg-type]
    yield made
    driver._active = before


def test_kernels_are_compiled_and_loaded_but_not_run(fake: FakeDriver) -> None:
    kernel, x = JITFunction(add_one), torch.zeros(64)
    with compile_only():
        assert compiling()
        for size in (16, 32, 16):
            kernel[(1,)](x, SIZE=size)
    assert not compiling()
    assert (fake.loaded, fake.runs) == (["add_one"] * 2, 0)
    kernel[(1,)](x, SIZE=32)
    assert (len(fake.loaded), fake.runs) == (2, 1)


def test_other_threads_go_on_running_theirs(fake: FakeDriver) -> None:
    kernel, x = JITFunction(add_one), torch.zeros(64)
    with compile_only():
        thread = threading.Thread(target=lambda: kernel[(1,)](x, SIZE=16))
        thread.start()
        thread.join()
        assert fake.runs == 1


def test_two_threads_that_compile_at_once_restore_what_they_have_replaced(
    fake: FakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock, arrived, launch = threading.Lock(), threading.Semaphore(0), JITFunction.run

    class Announced:
        def __enter__(self) -> None:
            arrived.release()
            lock.acquire()

        def __exit__(self, *_: object) -> None:
            lock.release()

    def compile_nothing() -> None:
        with compile_only():
            pass

    monkeypatch.setattr("ssd.kernels.triton.compile._one_at_a_time", Announced())
    thread = threading.Thread(target=compile_nothing)
    with compile_only():
        arrived.acquire()
        thread.start()
        arrived.acquire()  # the other one has come as far as the lock
    thread.join()
    assert JITFunction.run is launch


def test_a_kernel_that_does_not_compile_raises_when_it_is_launched(fake: FakeDriver) -> None:
    kernel, x = JITFunction(wrong), torch.zeros(64)
    with compile_only():
        kernel[(1,)](x)
    with pytest.raises(Exception, match="power of 2"):
        kernel[(1,)](x)
    assert fake.runs == 0
