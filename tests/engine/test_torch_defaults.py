"""Whatever torch's global defaults are, before loading or after it, the tokens are the same."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from bits import same_bits
from conftest import TestModel

from ssd import LLM, SamplingParams
from ssd.layers.rotary import rope_tables
from ssd.layers.spec import RopeConfig
from ssd.sampling.sampler import Needs, Rows, Sampler, SamplingColumns

PROMPTS = [[5, 6, 7, 8], [300, 2, 9]]
PARAMS = [
    SamplingParams(temperature=1.0, seed=1, max_new_tokens=12),
    SamplingParams(temperature=0.8, seed=2, top_p=0.9, frequency_penalty=0.3, logit_bias={7: 1.0}, max_new_tokens=12),
]
DEFAULTS = (torch.bfloat16, torch.float16, torch.float64, "meta")


@contextmanager
def defaults(value: torch.dtype | str | None) -> Iterator[None]:
    """torch's default dtype, or its default device."""
    dtype = torch.get_default_dtype()
    try:
        if isinstance(value, torch.dtype):
            torch.set_default_dtype(value)
        elif value is not None:
            torch.set_default_device(value)
        yield
    finally:
        torch.set_default_dtype(dtype)
        torch.set_default_device(None)


def tokens(llm: LLM) -> list[list[int]]:
    together = [output.token_ids for output in llm.generate(PROMPTS, PARAMS)]
    greedy = SamplingParams(max_new_tokens=8)
    return together + [output.token_ids for output in llm.generate(PROMPTS, [greedy, PARAMS[0]])]


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["ar", "sd", "ssd"])
def test_torchs_defaults_change_no_token(make_model: Callable[[str], TestModel], mode: str) -> None:
    path = make_model("llama3-scaled").path
    options: dict[str, Any] = {"device": "cpu", "dtype": "float32", "max_num_seqs": 2}
    draft = {} if mode == "ar" else {"draft": make_model("llama-tied").path, "k": 3}
    if mode == "ssd":
        draft |= {"placement": "inline", "budget": 4}
    options["speculation"] = {"mode": mode, **draft}
    with LLM(path, **options) as llm:
        expected = tokens(llm)
        for value in DEFAULTS:
            with defaults(value):
                assert tokens(llm) == expected, f"{value} after loading"
    for value in DEFAULTS:
        with defaults(value), LLM(path, **options) as llm:
            assert tokens(llm) == expected, f"{value} before loading"


@pytest.mark.parametrize("default", DEFAULTS)
def test_torchs_defaults_change_no_sampling(default: torch.dtype | str) -> None:
    device = torch.device("cpu")
    logits = torch.randn(2, 50_000, generator=torch.Generator().manual_seed(0))
    rows = Rows(torch.tensor([0, 1], dtype=torch.int32), torch.tensor([4, 5], dtype=torch.int32))

    def chosen() -> list[Any]:
        columns = SamplingColumns(2, logits.shape[1], device)
        columns.set(0, SamplingParams(temperature=1.0, presence_penalty=0.3), 1, [1, 2], [3], ())
        columns.set(1, SamplingParams(top_k=2**62), 2, [1, 2], [3], ())
        needs = Needs(adjusted=True, truncated=True)
        return [part.tolist() for part in Sampler(columns).best(logits.clone(), rows, needs, 3)]

    expected = chosen()
    with defaults(default):
        assert chosen() == expected


@pytest.mark.parametrize("default", DEFAULTS)
def test_torchs_defaults_change_no_rotation(default: torch.dtype | str) -> None:
    rope = RopeConfig(theta=1e6, scaling="yarn", factor=4.0, original_max_position=4096)
    expected = rope_tables(rope, 64, 100)
    with defaults(default):
        found = rope_tables(rope, 64, 100)
    assert all(same_bits(table, wanted) for table, wanted in zip(found, expected, strict=True))


@pytest.mark.slow
def test_torchs_defaults_change_no_rejection(make_model: Callable[[str], TestModel]) -> None:
    path = make_model("llama-tied").path
    speculation = {"mode": "sd", "draft": make_model("qwen3").path, "k": 3, "acceptance": "rejection"}
    with LLM(path, device="cpu", dtype="float32", max_num_seqs=2, speculation=speculation) as llm:
        expected = tokens(llm)
        for value in DEFAULTS:
            with defaults(value):
                assert tokens(llm) == expected, value
