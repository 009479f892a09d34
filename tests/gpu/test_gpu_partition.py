"""A GPU in two parts: what is captured in a part runs there, and has the same bits as on the whole GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from bits import same_bits
from conftest import TestModel, ragged_prompts
from fakes import wait_until_idle

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

import triton
import triton.language as tl

from ssd import LLM, SamplingParams
from ssd.assembly import sharing
from ssd.drafting.ssd import SSDDrafter
from ssd.engine.engine import Engine
from ssd.execution.batch import Batch
from ssd.execution.graphs import capture
from ssd.execution.target import Target
from ssd.kernels.cuda.driver import DriverError
from ssd.kernels.cuda.partition import Partition, split

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda")
SIZE, PROGRAMS = 16, 20_000
PROMPTS = ragged_prompts(12, longest=200)
PARAMS = [SamplingParams(temperature=0.8 * (i % 2), seed=i, max_new_tokens=40, ignore_eos=True) for i in range(12)]


@pytest.fixture(scope="module")
def parts() -> Partition:
    try:
        return split(CUDA, SIZE)
    except DriverError as error:
        pytest.skip(f"cannot be split: {error}")


@triton.jit
def _processors_kernel(out_ptr):
    program = tl.program_id(0)
    number = tl.inline_asm_elementwise("mov.u32 $0, %smid;", "=r,r", [program], tl.int32, is_pure=False, pack=1)
    tl.store(out_ptr + program, number)


def test_parts_are_disjoint_and_graphs_keep_theirs(parts: Partition) -> None:
    """On whatever stream they are replayed: the engine replays them on its own streams."""
    out = torch.zeros(PROGRAMS, dtype=torch.int32, device=CUDA)

    def run() -> None:
        _processors_kernel[(PROGRAMS,)](out)

    def used(launch: Callable[[], None], stream: torch.cuda.Stream) -> set[int]:
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            launch()
        torch.cuda.synchronize()
        return set(out.tolist())

    main = torch.cuda.default_stream()
    whole, small, large = (used(run, s) for s in (main, parts.small.stream, parts.large.stream))
    assert not small & large
    assert small | large == whole
    assert (len(small), len(large)) == (parts.small.processors, parts.large.processors)
    for part, own in ((parts.small, small), (parts.large, large)):
        graph, _ = capture(run, None, stream=part.stream)
        for stream in (main, parts.small.stream, parts.large.stream):
            assert used(graph.replay, stream) == own
    graph, _ = capture(run, None)
    assert used(graph.replay, parts.small.stream) == whole


def force_parts(engine: Engine) -> None:
    """Whatever is the fastest for models as small as these."""
    target, drafter = engine.round.target, engine.round.drafter
    assert isinstance(target, Target)
    assert isinstance(drafter, SSDDrafter)
    sharing._split(target.runner, drafter.model.runner, SIZE)


@pytest.fixture(scope="module")
def pair(make_model: Callable[[str], TestModel]) -> tuple[str, str]:
    return make_model("llama3-scaled").path, make_model("llama-tied").path


@pytest.fixture(scope="module")
def expected(pair: tuple[str, str]) -> Iterator[list[list[int]]]:
    with LLM(pair[0], device="cuda", num_kv_blocks=512) as llm:
        yield [out.token_ids for out in llm.generate(PROMPTS, PARAMS)]


@pytest.mark.parametrize(
    ("batch", "options"),
    [
        (1, {"k": 4, "backup": "jit"}),
        (1, {"k": 6, "backup": "fast", "draft_quantization": "int8"}),
        (3, {"k": 3, "budget": 8}),  # the last sequence is alone, and then in a part
        (3, {"k": 3, "budget": 8, "acceptance": "rejection"}),
    ],
    ids=str,
)
def test_parts_change_no_text(
    parts: Partition, pair: tuple[str, str], expected: list[list[int]], batch: int, options: dict[str, Any]
) -> None:
    path, draft = pair
    speculation = {"mode": "ssd", "draft": draft, **options}
    rejection = options.get("acceptance") == "rejection"
    with LLM(path, device="cuda", num_kv_blocks=512, max_num_seqs=batch, speculation=speculation) as llm:
        llm.driver.call(force_parts)
        found = [out.token_ids for out in llm.generate(PROMPTS, PARAMS)]
        wait_until_idle(llm.driver)
        assert llm.engine.metrics.drafter_failures == 0
        assert rejection or sum(llm.engine.metrics.ssd_hits_after) > 0
    same = [i for i in range(len(PROMPTS)) if not rejection or PARAMS[i].greedy]
    assert [found[i] for i in same] == [expected[i] for i in same]


def test_a_verification_in_its_part_has_the_same_bits(parts: Partition, pair: tuple[str, str]) -> None:
    path, draft = pair
    options: dict[str, Any] = {"speculation": {"mode": "ssd", "draft": draft, "k": 7}, "max_num_seqs": 1}
    with LLM(path, device="cuda", num_kv_blocks=64, **options) as llm:
        llm.driver.call(force_parts)

        @torch.inference_mode()
        def logits(engine: Engine, in_part: bool) -> torch.Tensor:
            runner = engine.round.target.runner  # type: ignore[attr-defined]
            prompt = max(PROMPTS, key=len)
            runner.logits_of(prompt, 1)
            staged = runner.stage(Batch([0], [len(prompt) - 8], [8], [8]))
            assert staged.graph.in_part is not None
            staged.graph.logits.fill_(torch.nan)
            return runner.run(staged, in_part=in_part).logits[:8].clone()

        whole, part = (
            llm.driver.call(lambda engine, in_part=in_part: logits(engine, in_part)) for in_part in (False, True)
        )
        assert bool(whole.isfinite().all())
        assert same_bits(whole, part)
