"""Our decoder against `transformers`, family by family."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from conftest import KINDS, VOCAB, WITH_EXPERTS, WITH_LATENTS, TestModel

from ssd import LLM, SamplingParams

LENGTHS = (1, 16, 17, 100, 300)


def prompt(length: int) -> list[int]:
    return torch.randint(0, VOCAB, (length,), generator=torch.Generator().manual_seed(length)).tolist()


def engine_logits(llm: LLM, tokens: list[int]) -> torch.Tensor:
    """All logits of one prompt, straight through the engine's own model runner."""
    return llm.engine.round.target.runner.logits_of(tokens, len(tokens))


@pytest.mark.parametrize("kind", KINDS)
def test_logits_and_greedy_tokens_equal_transformers(make_model: Callable[[str], TestModel], kind: str) -> None:
    """Catches any slip in a family: rotary scaling, head sizes, norms, biases, tying, sharded loading."""
    model, count = make_model(kind), 16 if kind in (*WITH_EXPERTS, *WITH_LATENTS) else 8
    with LLM(model.path, device="cpu", dtype="float32", max_num_seqs=8) as llm:
        for length in LENGTHS:
            with torch.no_grad():
                theirs = model.reference(torch.tensor([prompt(length)])).logits[0]
            assert (engine_logits(llm, prompt(length)) - theirs).abs().max() < 1e-4
        params = SamplingParams(max_new_tokens=count, ignore_eos=True)
        alone = [llm.generate(prompt(n), params)[0].token_ids for n in LENGTHS]
        together = [out.token_ids for out in llm.generate([prompt(n) for n in LENGTHS], params)]
    assert alone == together
    for length, ours in zip(LENGTHS, alone, strict=True):
        with torch.no_grad():  # all greedy tokens by one pass: each is the most likely one after those before it
            theirs = model.reference(torch.tensor([[*prompt(length), *ours]])).logits[0, length - 1 : -1].argmax(-1)
        assert ours == theirs.tolist(), f"{kind}, prompt of {length} tokens"


def test_bfloat16_on_the_cpu_is_close(make_model: Callable[[str], TestModel]) -> None:
    """Catches a wrong bfloat16 path (packing, rounding): logits must agree as far as 8 bits of mantissa allow."""
    model = make_model("qwen3")
    tokens = prompt(100)
    with torch.no_grad():
        theirs = model.reference(torch.tensor([tokens])).logits[0]
    with LLM(model.path, device="cpu", dtype="bfloat16") as llm:
        ours = engine_logits(llm, tokens)
    assert (ours - theirs).norm() / theirs.norm() < 0.05
