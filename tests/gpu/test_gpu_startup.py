"""Everything is compiled, checked and loaded when an engine has started: no request waits for it, whatever it asks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from eagle_heads import make_tiny_head
from fakes import wait_until_idle

from ssd import LLM, SamplingParams

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.gpu_memory(18),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

LENGTHS = (1, 2, 3, 7, 15, 16, 17, 31, 33, 50, 64, 65, 77, 100, 129, 200, 300, 400, 511, 513, 777, 1001, 1600, 2047)
LENGTHS += (2049, 3001, 4000)
BATCHES = (1, 2, 3, 5, 8, 13, 16, 17, 24)
PARAMS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 1.0},
    {"temperature": 0.7, "top_p": 0.9},
    {"temperature": 0.7, "top_k": 20, "presence_penalty": 0.5},
    {"temperature": 0.0, "repetition_penalty": 1.2},
    {"temperature": 1.0, "min_p": 0.1, "logit_bias": {5: 1.0}, "logprobs": 2},
]
WAYS: list[dict[str, Any]] = [
    {},
    {"mode": "sd", "k": 3},
    {"mode": "sd", "k": 3, "acceptance": "rejection"},
    {"mode": "ssd", "k": 4, "backup": "jit"},
    {"mode": "ssd", "k": "auto", "budget": "auto"},
]


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What has been compiled or checked since it was last cleared."""
    from triton import knobs

    from ssd.kernels.cuda import cublaslt

    found: list[str] = []
    library = cublaslt.load()
    assert library is not None
    ask = library._library.cublasLtMatmulAlgoGetHeuristic

    def asked(*args: Any) -> Any:
        found.append("a product of cuBLASLt")
        return ask(*args)

    monkeypatch.setattr(library._library, "cublasLtMatmulAlgoGetHeuristic", asked)
    monkeypatch.setattr(knobs.runtime, "jit_cache_hook", lambda *, repr, **_: found.append(repr))
    return found


@pytest.mark.parametrize("eager", [False, True])
@pytest.mark.parametrize("way", WAYS, ids=str)
def test_nothing_is_compiled_for_a_request(compiled: list[str], way: dict[str, Any], eager: bool) -> None:
    target, draft = "graft:tiny-llama@llama-3.2-1b", "graft:tiny-llama-draft@llama-3.2-1b"
    options: dict[str, Any] = {"speculation": {"draft": draft, **way}} if way else {}
    with LLM(target, device="cuda", max_model_len=4096, max_num_seqs=24, eager=eager, **options) as llm:
        ask_everything(llm, compiled)


@pytest.mark.parametrize("mode", ["sd", "ssd"])
def test_nothing_is_compiled_for_a_request_with_a_head(compiled: list[str], mode: str, tmp_path: Path) -> None:
    head = make_tiny_head(tmp_path / "head")
    speculation = {"mode": mode, "draft": f"graft:{head.path}@llama-3.2-1b", "k": 4}
    target = "graft:tiny-llama@llama-3.2-1b"
    with LLM(target, device="cuda", max_model_len=4096, max_num_seqs=24, speculation=speculation) as llm:
        ask_everything(llm, compiled)


def ask_everything(llm: LLM, compiled: list[str]) -> None:
    """Requests of all lengths, in batches of all sizes, with parameters of all kinds."""
    compiled.clear()
    for i, length in enumerate(LENGTHS):
        params = SamplingParams(max_new_tokens=6, ignore_eos=True, seed=i, **PARAMS[i % len(PARAMS)])
        llm.generate([[7 + i % 50] * length], params)
        assert compiled == [], f"{length} tokens, {params}"
    for i, batch in enumerate(BATCHES):
        each = [PARAMS[(i * j) % len(PARAMS)] for j in range(batch)]
        params_of = [SamplingParams(max_new_tokens=12, ignore_eos=True, seed=j, **p) for j, p in enumerate(each)]
        llm.generate([[11 + j] * LENGTHS[(i + 5 * j) % len(LENGTHS)] for j in range(batch)], params_of)
        assert compiled == [], f"a batch of {batch}"
    wait_until_idle(llm.driver)
    assert llm.engine.metrics.drafter_failures == 0


def test_compilations_and_checks_are_seen(compiled: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from ssd.kernels.cuda import cublaslt
    from ssd.kernels.triton.linear import Tile, linear

    x, weight = (torch.zeros(shape, dtype=torch.bfloat16, device="cuda") for shape in ((100, 72), (40, 72)))
    linear(x, weight, tile=Tile(16, 16, 16, 1, 1))
    assert len(compiled) == 1
    library = cublaslt.load()
    assert library is not None
    monkeypatch.setattr(library, "_choices", cublaslt.Choices(tmp_path / "choices"))
    library.linear(x, weight, None, torch.bfloat16)
    assert "a product of cuBLASLt" in compiled
