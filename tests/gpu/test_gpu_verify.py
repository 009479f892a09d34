"""`ssd verify` on a GPU, in bfloat16: tokens equal, and log-probabilities to the bit, with rounds in flight."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from conftest import mostly_slow
from typer.testing import CliRunner

from ssd.cli.main import app

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("draft", mostly_slow(["tiny-llama-draft", "tiny-llama-eagle"], fast={"tiny-llama-draft"}))
def test_every_way_writes_the_same(draft: str, tmp_path: Path) -> None:
    file = tmp_path / "verified.json"
    options = ("--dtype", "bfloat16", "--num-kv-blocks", "256", "--max-tokens", "96", "--json", str(file))
    done = CliRunner().invoke(app, ["verify", "tiny-llama", "--draft", draft, "--sets", "gsm8k,humaneval", *options])
    assert done.exit_code == 0, done.output
    report = json.loads(file.read_text())
    assert {each["way"].partition(",")[0] for each in report["comparisons"]} == {"ar", "sd", "ssd", "auto"}
    assert any(each["counts"].get("preemptions") for each in report["comparisons"])
