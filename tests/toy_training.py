"""The trainings of drafts (`scripts/train_*.py`) with toy numbers, and their drafts in the engine."""

from __future__ import annotations

import json
import lzma
from pathlib import Path
from types import ModuleType

from ssd import LLM, SamplingParams


def train_twice(script: ModuleType, path: Path, sizes: str) -> None:
    """From text to a draft of tiny-llama, in the same folder; a second start has nothing left to train."""
    rows = [{"text": f"Page {i} of a book."} for i in range(40)] + [{"prompt": "2 + 2?", "response": "4"}]
    with lzma.open(path / "toy.jsonl.xz", "wt", encoding="utf-8") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)
    places = ["--data", str(path), "--work", str(path), "--out", str(path), "--device", "cpu"]
    for _ in range(2):
        script.main([*places, *sizes.split(), "--family", "llama"])


def check_draft(draft: Path) -> None:
    """Catches a draft that the engine does not use, or that changes the text."""
    prompt, params = "Page 3 of", SamplingParams(max_new_tokens=12, ignore_eos=True)
    with LLM("tiny-llama", device="cpu") as llm:
        expected = llm.generate(prompt, params)[0].token_ids
    with LLM("tiny-llama", device="cpu", speculation={"mode": "sd", "draft": str(draft), "k": 3}) as llm:
        output = llm.generate(prompt, params)[0]
    assert output.token_ids == expected
    assert output.metrics.drafted > 0
