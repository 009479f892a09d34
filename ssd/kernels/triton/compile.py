"""Compiles Triton kernels ahead of their use, many at a time.

Triton compiles a kernel when it is first launched, and the launch waits for it. Here a thread launches all kernels that
it will need without running them, while a pool of threads compiles (or reads from Triton's cache) and loads them.
"""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from typing import Any

import torch

_this_thread = threading.local()
_one_at_a_time = threading.Lock()


def compiling() -> bool:
    """Whether kernels that this thread launches are not run: what they would write is undefined then."""
    return getattr(_this_thread, "compiling", False)


@functools.cache
def prepare() -> threading.Thread:
    """Starts, once, what Triton does before it compiles first: it hashes its own files and builds its driver."""

    def run() -> None:
        from triton.runtime import driver
        from triton.runtime.cache import triton_key

        with suppress(Exception):  # raised again where it is needed
            triton_key()
            driver.active.get_current_target()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread


@contextmanager
def compile_only() -> Iterator[None]:
    """Triton kernels that this thread launches inside are compiled and loaded, not run. In the end, all of them are.

    One that cannot be compiled is left out: to launch it raises the error.
    """
    from triton import AsyncCompileMode, FutureKernel
    from triton.runtime.jit import JITFunction

    def run(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        kernel = launch(self, *args, grid=grid, warmup=warmup or compiling(), **kwargs)
        if isinstance(kernel, FutureKernel) and kernel.future.done():
            kernel.result(ignore_errors=True)  # enters it in Triton's table, where the next launch finds it
        return kernel

    prepare().join()
    with _one_at_a_time, _Pool() as pool, AsyncCompileMode(pool, ignore_errors=True):
        launch, JITFunction.run = JITFunction.run, run
        _this_thread.compiling = True
        try:
            yield
        finally:
            _this_thread.compiling = False
            JITFunction.run = launch


class _Pool(ThreadPoolExecutor):
    """Compiles kernels, and loads them to the current device."""

    def __init__(self) -> None:
        device = torch.cuda.current_device()
        super().__init__(min(32, os.cpu_count() or 1), initializer=lambda: torch.cuda.set_device(device))

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        return super().submit(lambda: _loaded(fn(*args, **kwargs)))


def _loaded(kernel: Any) -> Any:
    assert kernel.run is not None  # reading the attribute loads the kernel
    return kernel
