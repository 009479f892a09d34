"""Calls of the CUDA driver, for what torch has no function for."""

from __future__ import annotations

import ctypes
import functools


class DriverError(Exception):
    """A call of the driver failed, or this driver does not have it; the text says which."""


@functools.cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


def call(name: str, *arguments: object) -> None:
    """Calls a function of the driver that returns a CUresult."""
    try:
        function = getattr(_driver(), name)
    except (OSError, AttributeError) as error:
        raise DriverError(f"{name}: {error}") from error
    if status := function(*arguments):
        text = ctypes.c_char_p()
        _driver().cuGetErrorString(status, ctypes.byref(text))
        raise DriverError(f"{name}: {(text.value or b'').decode()}")
