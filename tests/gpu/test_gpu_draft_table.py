"""The kernels that look up drafts in pinned host memory, against their reference; and workers that go meanwhile."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import reference_tables
import torch
from bits import same_bits
from conftest import TestModel

from ssd import LLM, SamplingParams
from ssd.core import Origin
from ssd.drafting.late import LateBindingDrafter
from ssd.kernels.state import StateView

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
SLOTS, K, WIDTH, VOCAB = 9, 5, 6, 4


def random_state(seed: int) -> dict[str, torch.Tensor]:
    torch.manual_seed(seed)
    return {
        "length": torch.randint(1, 8, (SLOTS,), dtype=torch.int32),
        "token_ids": torch.randint(0, VOCAB, (SLOTS, 16), dtype=torch.int32),
        "num_accepted": torch.randint(0, 3, (SLOTS,), dtype=torch.int32),
        "drafts": torch.zeros((SLOTS, K), dtype=torch.int32),
        "confidence": torch.zeros((SLOTS, K)),
        "origin": torch.zeros(SLOTS, dtype=torch.int32),
    }


def random_tables(replicas: int) -> torch.Tensor:
    tables = torch.randint(-1, 3, (replicas, SLOTS, 2 + WIDTH * (2 + 2 * K)), dtype=torch.int32)
    tables[..., 0] = torch.randint(6, 8, (replicas, SLOTS))
    tables[..., 1] = torch.randint(0, WIDTH + 1, (replicas, SLOTS))
    return tables


@pytest.mark.parametrize("replicas", [1, 3])
def test_look_ups_are_those_of_the_reference(replicas: int) -> None:
    from ssd.kernels.triton import draft_table

    origins: set[int] = set()
    for seed in range(8):
        state, tables = random_state(seed), random_tables(replicas)
        slots = torch.randperm(SLOTS)[: 1 + seed % SLOTS]
        wanted = torch.stack((slots.int(), torch.full((len(slots),), 7, dtype=torch.int32)))
        record = torch.zeros((SLOTS, 1 + 2 * K), dtype=torch.int32)
        on_gpu = {name: tensor.cuda() for name, tensor in state.items()}
        pinned = [tensor.clone().pin_memory() for tensor in (wanted, tables, record)]
        numbers = {"hit": int(Origin.HIT), "miss": int(Origin.SIBLING), "limit": 1000}
        draft_table.look_up(StateView(**on_gpu), *pinned, **numbers)
        reference_tables.look_up(StateView(**state), wanted, tables, record, **numbers)
        torch.cuda.synchronize()
        for name, tensor in state.items():
            assert same_bits(on_gpu[name].cpu(), tensor), name
        assert torch.equal(pinned[2], record)
        origins |= {int(state["origin"][slot]) for slot in slots}
    assert origins == {0, int(Origin.HIT), int(Origin.SIBLING)}


@pytest.mark.parametrize("answered", [True, False])
def test_a_wait_ends_with_the_answer_or_at_its_limit(answered: bool) -> None:
    """Catches a kernel that hangs without an answer, or does not see one that comes while it waits."""
    from ssd.kernels.triton import draft_table

    state = StateView(**{name: tensor.cuda() for name, tensor in random_state(0).items()})
    slots = torch.tensor([2, 3], dtype=torch.int32, device="cuda")
    answers = torch.full((SLOTS, 2 + 2 * K), -1, dtype=torch.int32).pin_memory()
    state.origin[3] = int(Origin.HIT)
    limits = {"round_": 5, "limit": 1_000_000_000, "hit": int(Origin.HIT), "written": int(Origin.JIT)}
    draft_table.await_answers(state, slots, answers, **(limits | {"limit": 1}))  # compiles it
    torch.cuda.synchronize()

    def answer() -> None:
        time.sleep(0.02)
        answers[2, 2:5] = torch.tensor([1, 2, 3], dtype=torch.int32)
        answers[2, 1] = 3
        answers[2, 0] = 5

    thread = threading.Thread(target=answer)
    began = time.perf_counter()
    draft_table.await_answers(state, slots, answers, **limits)
    if answered:
        thread.start()
    torch.cuda.synchronize()
    waited = time.perf_counter() - began
    assert (0.015 < waited < 0.8) if answered else (0.8 < waited < 5)
    assert state.drafts[2].tolist() == ([1, 2, 3, 0, 0] if answered else [0] * K)
    assert state.origin.tolist()[2:4] == [int(Origin.JIT) if answered else 0, int(Origin.HIT)]


@pytest.mark.parametrize("sign", [signal.SIGKILL, signal.SIGSTOP])
@pytest.mark.parametrize("backup", ["jit", "fast"])
def test_a_worker_that_goes_costs_no_text(make_model: Callable[[str], TestModel], sign: Any, backup: str) -> None:
    """Catches a GPU that waits for a worker that is gone, and texts that depend on it."""
    model = make_model("llama-tied").path
    prompts, params = [[5, 6, 7, i] for i in range(6)], SamplingParams(max_new_tokens=60, ignore_eos=True)
    with LLM(model, device="cuda", max_model_len=128, max_num_seqs=4) as llm:
        expected = [output.token_ids for output in llm.generate(prompts, params)]
    speculation = {"mode": "ssd", "draft": model, "k": 3, "draft_device": "cpu", "backup": backup}
    with LLM(model, device="cuda", max_model_len=128, max_num_seqs=4, speculation=speculation) as llm:
        drafter = llm.engine.round.drafter
        assert isinstance(drafter, LateBindingDrafter)
        assert [output.token_ids for output in llm.generate(prompts, params)] == expected
        for each in drafter.replicas:
            each.supervisor.hang_limit = 0.5
            assert each.supervisor.pid is not None
            os.kill(each.supervisor.pid, sign)
        began = time.perf_counter()
        assert [output.token_ids for output in llm.generate(prompts, params)] == expected
        assert time.perf_counter() - began < 20
        assert sum(each.supervisor.failures for each in drafter.replicas) >= (sign == signal.SIGKILL)


def test_torn_tables_cost_no_text(make_model: Callable[[str], TestModel]) -> None:
    """Catches a look-up that relies on what it reads: the rows of all slots change while the GPU reads them."""
    model = make_model("llama-tied").path
    prompts, params = [[5, 6, 7, i] for i in range(8)], SamplingParams(max_new_tokens=100, ignore_eos=True)
    with LLM(model, device="cuda", max_model_len=128, max_num_seqs=4) as llm:
        expected = [output.token_ids for output in llm.generate(prompts, params)]
    speculation = {"mode": "ssd", "draft": model, "k": 3, "draft_device": "cpu"}
    with LLM(model, device="cuda", max_model_len=128, max_num_seqs=4, speculation=speculation) as llm:
        drafter = llm.engine.round.drafter
        assert isinstance(drafter, LateBindingDrafter)
        rows, done = drafter.tables._tables.numpy(), threading.Event()

        def tear() -> None:
            source = np.random.default_rng(0)
            while not done.is_set():
                torn = rows[..., 2:]
                torn[...] = np.where(source.random(torn.shape) < 0.3, source.integers(0, 100, torn.shape), torn)

        thread = threading.Thread(target=tear)
        thread.start()
        try:
            assert [output.token_ids for output in llm.generate(prompts, params)] == expected
        finally:
            done.set()
            thread.join()
        assert llm.engine.round.stats.drafter_failures == 0
