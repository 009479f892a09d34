"""Debian's Chromium, driven by playwright. Importing this skips a test file where playwright is not installed."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
_CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
MARKS = [
    pytest.mark.slow,
    pytest.mark.skipif(_CHROMIUM is None, reason="there is no Chromium: apt-get install chromium"),
]


@contextmanager
def launched() -> Iterator[Any]:
    """A browser."""
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=_CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()
