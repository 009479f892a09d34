"""The training of the block drafts: it trains what the engine computes, and what is exported runs in it."""

from __future__ import annotations

import importlib
import json
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch
import torch.nn.functional as F
from block_drafts import first_draft
from toy_training import check_draft, train_twice

ROOT = Path(__file__).parents[2]
SIZES = "--steps 12 --batch 2 --anchors 3 --writers 40 --write-batches 1 --written 16 --report 5"


@pytest.fixture(scope="module")
def script() -> Iterator[ModuleType]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ROOT / "scripts")
        yield importlib.import_module("train_block")


def test_the_trained_function_is_what_the_engine_computes(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Logits of a block after 21 tokens, each after the token that was drafted before it. Catches a key that a query
    must not see, a wrong position, and a tensor or field that the export loses."""
    target = script.load_target("llama", torch.device("cpu"))
    draft = script.Draft(target)
    for p in draft.parameters():
        p.data.normal_(1.0 if p.dim() == 1 else 0.0, 0.1)
        p.data.copy_(p.data.bfloat16())
    script.export(draft, "llama", tmp_path)
    tokens = torch.randint(0, 8000, (22,), generator=torch.Generator().manual_seed(5)).tolist()
    drafted, seen, _ = first_draft("tiny-llama", str(tmp_path), tokens, 7, monkeypatch)
    ids = torch.tensor([tokens + drafted])
    blocks = script.Blocks.at(torch.tensor([4, 21]), ids.shape[1])  # another block, which must change nothing
    features, _ = script.teach(target, ids, script.FEATURE_LAYERS)
    with torch.no_grad():
        logits = F.linear(*draft(ids, features, blocks))[0, 1]
    for ours, theirs in zip(seen, logits, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=2e-4)


def test_rounds_are_counted_as_an_engine_has_them(script: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """Drafts that are always right but for every fourth token make rounds of four tokens."""
    vocabulary, row = 16, torch.arange(60)
    wanted = F.one_hot(row[1:] % 4, vocabulary).float() * 50
    wanted = torch.cat((wanted, wanted[-1:]))[None]
    guesses = torch.where(row % 4 == 3, 9, (row + 1) % 4)
    monkeypatch.setattr(script, "teach", lambda *_: (torch.empty(0), wanted))
    draft = lambda ids, features, blocks: (  # noqa: E731
        F.one_hot(guesses[blocks.places], vocabulary)[None].float() * 50,
        torch.eye(vocabulary),
    )
    for temperature in (0, 1):
        rates, length = script.acceptance(None, draft, row[None], temperature)
        assert length == pytest.approx(4, rel=0.1)
        assert rates[:3] == pytest.approx([1, 1, 1], abs=0.1)
        assert rates[3] == pytest.approx(0, abs=0.1)


@pytest.mark.slow
def test_a_trained_draft_runs_with_its_target(
    script: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """From text to drafts, with toy numbers; a second start has nothing left to train."""
    train_twice(script, tmp_path, SIZES)
    printed = capsys.readouterr().out
    assert "acceptance by position" in printed
    assert [line for line in printed.splitlines() if "llama, step" in line][-1].startswith("llama, step 10: loss")
    losses = json.loads((tmp_path / "llama-block-losses.json").read_text())
    assert [step for step, _ in losses] == [10, 12]
    check_draft(tmp_path / "tiny-llama-block")
