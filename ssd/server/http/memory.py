"""Gives freed memory back to the system.

glibc keeps what a thread has freed. A prompt of 1 MB takes 60 MB while it is tokenized, and a server would hold as much
for each of its threads from then on.
"""

from __future__ import annotations

import asyncio
import ctypes
from typing import Final

SECONDS: Final = 5  # between two calls; one takes some milliseconds, on a thread of its own

_trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # None: another C library


async def give_back() -> None:
    """Starts malloc_trim on another thread, without waiting for it."""
    if _trim is not None:
        asyncio.get_running_loop().run_in_executor(None, _trim, 0)
