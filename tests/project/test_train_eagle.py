"""The training of the EAGLE heads: it trains what a draft computes, and what is exported runs in the engine."""

from __future__ import annotations

import importlib
import json
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from eagle_heads import Head
from toy_training import check_draft, train_twice

ROOT = Path(__file__).parents[2]
SIZES = "--steps 10 --batch 2 --unroll 3 --writers 40 --write-batches 1 --written 16 --draft-vocab 900"


@pytest.fixture(scope="module")
def script() -> Iterator[ModuleType]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ROOT / "scripts")
        yield importlib.import_module("train_eagle")


def test_unrolled_steps_are_what_a_draft_computes(script: ModuleType) -> None:
    """Catches a key that a step must not see, or sees at another position, and hidden states of another row."""
    torch.manual_seed(3)
    teacher = script.Model(script.Shape(32, 48, 12, 4, 2, 8), "llama").requires_grad_(False)
    for p in teacher.parameters():
        p.data.normal_(1.0 if p.dim() == 1 else 0.0, 0.3)
    head = script.Head(teacher, torch.arange(50))
    for p in head.parameters():
        p.data.normal_(1.0 if p.dim() == 1 else 0.0, 0.3)
    ids = torch.randint(0, 8000, (2, 12))
    features, _ = script.teach(teacher, ids, script.FEATURE_LAYERS)
    with torch.no_grad():
        unrolled = list(head(teacher.embed_tokens(ids[:, 1:]), features[:, :-1], 4))
    weights = dict(head.named_parameters())
    target: Any = SimpleNamespace(get_input_embeddings=lambda: teacher.embed_tokens)
    plain = Head("", weights, target, (), 4, 2, 500000.0, 1e-5, norm_before_residual=False)
    for row, last in ((0, 0), (1, 4), (1, 7)):  # the last row with a feature of the target
        tokens = ids[row, 1:].tolist()
        with torch.no_grad():
            hidden = head.fc(features[row, : last + 1])
            for step in range(4):
                out = plain._layer(tokens[: last + 1 + step], hidden)
                logits = F.linear(F.rms_norm(out[-1], (32,), weights["norm.weight"], 1e-5), weights["lm_head.weight"])
                torch.testing.assert_close(unrolled[step][row, last + step], logits, rtol=1e-4, atol=1e-4)
                hidden = torch.cat((hidden, out[-1:]))


@pytest.mark.slow
def test_a_trained_head_runs_with_its_target(
    script: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """From text to drafts, with toy numbers; a second start has nothing left to train."""
    train_twice(script, tmp_path, SIZES)
    printed = capsys.readouterr().out
    assert "acceptance by position" in printed
    losses = json.loads((tmp_path / "llama-eagle-losses.json").read_text())
    assert len(losses) == 1
    check_draft(tmp_path / "tiny-llama-eagle")


def test_without_text_the_script_says_what_to_do(script: ModuleType, tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=r"holds no \*\.jsonl\.xz"):
        script.main(["--data", str(tmp_path), "--work", str(tmp_path), "--out", str(tmp_path), "--device", "cpu"])
