"""Quantised checkpoints on a GPU, in bfloat16 and float16: the same model as on a CPU, exactly decoded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from conftest import ragged_prompts
from fakes import wait_until_idle
from quantized_checkpoints import FORMATS, write_checkpoint

from ssd import LLM, SamplingParams

pytestmark = pytest.mark.gpu
PROMPTS = ragged_prompts(12, longest=150)
PARAMS = [SamplingParams(temperature=float(i % 2), seed=i, max_new_tokens=32, ignore_eos=True) for i in range(12)]


def answers(path: str, batch: int, **options: Any) -> list[list[int]]:
    with LLM(path, device="cuda", num_kv_blocks=512, max_num_seqs=batch, **options) as llm:
        groups = [slice(i, i + batch) for i in range(0, len(PROMPTS), batch)]
        outputs = [output for group in groups for output in llm.generate(PROMPTS[group], PARAMS[group])]
        wait_until_idle(llm.driver)
    return [output.token_ids for output in outputs]


@pytest.mark.parametrize("name", FORMATS)
def test_the_model_of_a_cpu_and_the_same_text_by_ar_sd_and_ssd(name: str, tmp_path: Path) -> None:
    """Catches a layout or kernel of the GPU that means another weight, and products that depend on other rows.

    Logits are compared in float32, texts in the type of the checkpoint.
    """
    path, draft = tmp_path / "target", tmp_path / "draft"
    model = write_checkpoint(path, FORMATS[name])
    write_checkpoint(draft, FORMATS["ct-int4-channel"])
    with LLM(str(path), device="cuda", dtype="float32", num_kv_blocks=64) as llm:
        ours = llm.engine.round.target.runner.logits_of(PROMPTS[1], len(PROMPTS[1])).cpu()
    with torch.no_grad():
        theirs = model(torch.tensor([PROMPTS[1]])).logits[0]
    assert (ours - theirs).norm() / theirs.norm() < (1e-4 if FORMATS[name].inputs is None else 2e-2)
    alone = answers(str(path), 1, prefix_caching=False)
    assert answers(str(path), 12, speculation={"mode": "sd", "draft": str(draft), "k": 3}) == alone
    assert answers(str(path), 4, speculation={"mode": "ssd", "draft": str(draft), "k": 3}) == alone


def test_packed_gguf_weights(tmp_path: Path) -> None:
    """All types of blocks in one model: its logits are those of the widened weights, and its text is the same in AR, SD
    and SSD."""
    from gguf_files import write_models  # skips without the gguf package

    files = {name: str(path) for name, path in write_models(tmp_path).items()}
    logits = []
    for name in ("packed", "wide"):
        with LLM(files[name], device="cuda", dtype="float32", num_kv_blocks=64) as llm:
            logits.append(llm.engine.round.target.runner.logits_of(PROMPTS[1], len(PROMPTS[1])))
    packed, wide = logits
    assert (packed - wide).norm() < 1e-4 * wide.norm()
    alone = answers(files["packed"], 1, prefix_caching=False)
    assert answers(files["packed"], 12, speculation={"mode": "sd", "draft": files["draft"], "k": 3}) == alone
    assert answers(files["packed"], 4, speculation={"mode": "ssd", "draft": files["draft"], "k": 3}) == alone
