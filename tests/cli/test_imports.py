"""The commands import torch without what its compiler needs; it is there for whoever imports more of torch."""

from __future__ import annotations

import subprocess
import sys

import pytest
from conftest import mostly_slow

AFTER = """
import gc, importlib, sys
from ssd.cli.imports import import_llm
import_llm()
import torch
print(gc.isenabled(), gc.get_freeze_count() > 100_000, "torch._meta_registrations" in sys.modules)
importlib.import_module(sys.argv[1])
print(len(torch._decomp.decomposition_table) > 500)
from torch._meta_registrations import device_hint
from torch.utils._content_store import ContentStoreReader
"""


@pytest.mark.parametrize(
    "module",
    mostly_slow(
        ["torch._decomp", "torch.utils._content_store", "torch._meta_registrations", "torch._dynamo"],
        fast={"torch._decomp"},
    ),
)
def test_the_rest_of_torch_is_imported_when_it_is_asked_for(module: str) -> None:
    """Torch's modules import each other: the compiler's fail if the first is not the one that torch begins with."""
    done = subprocess.run([sys.executable, "-c", AFTER, module], capture_output=True, text=True, check=False)
    assert done.stdout.splitlines() == ["True True False", "True"], done.stderr
