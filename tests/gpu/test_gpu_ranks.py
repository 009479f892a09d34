"""Tensor parallelism on GPUs: what one GPU can show of it, and all of it where there are two."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from collections.abc import Sequence as Seq
from pathlib import Path
from typing import Any

import pytest
import torch
from bits import same_bits
from conftest import TestModel
from one_gpu import share_the_gpu
from random_requests import MAX_LEN, Asked, Models, check_answers, make_models, play, random_requests

from ssd import LLM, SamplingParams
from ssd.assembly.ranks import Ranks
from ssd.errors import EngineFailed, RequestFailed
from ssd.execution.graphs import capture
from ssd.execution.runner import ModelRunner
from ssd.execution.state import SequenceState
from ssd.kernels.device import kernels
from ssd.layers.parameter import Build
from ssd.models.checkpoint import HFCheckpoint
from ssd.models.decoder import Decoder
from ssd.parallel import tensor
from ssd.parallel.group import listener, make_group
from ssd.parallel.tensor import TensorParallel, _to_first

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
DEVICE = torch.device("cuda")
several = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")


class ThreadGroup:
    """Ranks that are threads and share one GPU: the calls that `TensorParallel` makes, without NCCL."""

    def __init__(self, size: int) -> None:
        self._barrier = threading.Barrier(size, timeout=60)
        self._parts: list[torch.Tensor] = [torch.empty(0)] * size
        self._local = threading.local()

    def join(self, rank: int) -> TensorParallel:
        self._local.rank = rank
        return TensorParallel(rank, len(self._parts), self)

    def wait(self) -> None:
        """What was called is complete."""

    def broadcast(self, tensor: torch.Tensor, root: int) -> ThreadGroup:
        return self._exchange(tensor, lambda parts: tensor.copy_(parts[root]))

    def _allgather_base(self, out: torch.Tensor, part: torch.Tensor) -> ThreadGroup:
        return self._exchange(part, lambda parts: out.copy_(torch.cat(parts)))

    def alltoall_base(self, out: torch.Tensor, part: torch.Tensor, *_: list[int]) -> ThreadGroup:
        size, rank = len(self._parts), self._local.rank
        return self._exchange(part, lambda parts: out.copy_(torch.cat([each.chunk(size)[rank] for each in parts])))

    def gather(self, out: list[list[torch.Tensor]], part: list[torch.Tensor], options: Any) -> ThreadGroup:
        mine = out[0] if out else [torch.empty_like(part[0]) for _ in self._parts]
        return self._exchange(part[0], lambda parts: [a.copy_(b) for a, b in zip(mine, parts, strict=True)])

    def _exchange(self, part: torch.Tensor, take: Callable[[list[torch.Tensor]], object]) -> ThreadGroup:
        self._parts[self._local.rank] = part.clone()
        self._barrier.wait()
        take(self._parts)
        self._barrier.wait()
        return self


@pytest.mark.parametrize(("kind", "size"), [("qwen3", 2), ("llama-tied", 4), ("llama-biased", 2)])
def test_bits_of_a_row_do_not_depend_on_the_batch_when_split(
    make_model: Callable[[str], TestModel], monkeypatch: pytest.MonkeyPatch, kind: str, size: int
) -> None:
    """Shares of the layers in bfloat16 by the kernels of a GPU; as close to the whole model as to another order.

    Sums of 40 rows are added by shares, those of fewer are not.
    """
    checkpoint = HFCheckpoint.open(Path(make_model(kind).path))
    most = torch.empty(40, checkpoint.config.hidden_size)
    monkeypatch.setattr(tensor, "MESSAGE_BYTES", TensorParallel(0, size)._saved_by_shares(most, torch.bfloat16))
    tokens = list(range(40))

    def logits(tp: TensorParallel, lengths: Seq[int]) -> list[torch.Tensor]:
        ops = kernels(DEVICE).ops()
        decoder = Decoder(checkpoint.config, Build(ops, DEVICE, torch.bfloat16, tp), max_positions=64)
        decoder.load(checkpoint.stored())
        ops.reserve(decoder.heads, DEVICE)
        state = SequenceState(1, max_len=48, lookahead=0, vocab_size=decoder.config.vocab_size, device=DEVICE)
        runner = ModelRunner(decoder, state, num_blocks=1, block_size=64, max_decode_rows=8)
        return [runner.logits_of(tokens[:length], length).clone() for length in lengths]

    group, found = ThreadGroup(size), dict[int, list[torch.Tensor]]()
    threads = [
        threading.Thread(target=lambda rank=rank: found.update({rank: logits(group.join(rank), (40, 7, 1))}))
        for rank in range(size)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    whole, few, one = found[0]
    assert same_bits(few, whole[:7])
    assert same_bits(one, whole[:1])
    [alone] = logits(TensorParallel(), (40,))
    assert float((whole - alone).norm() / alone.norm()) < 0.1


def test_sums_gathers_and_broadcasts_of_nccl_can_be_captured() -> None:
    """The calls that `TensorParallel` makes, eagerly and in a graph, in a group of one."""
    device, listening = DEVICE, listener()
    group = make_group(0, 1, device, port=listening.getsockname()[1], listening=listening)
    x, parts = torch.arange(6.0, device=device).view(2, 3), torch.empty((2, 3), device=device)
    shares = torch.empty(6, device=device)
    ints, found = torch.arange(5, dtype=torch.int32, device=device), [torch.empty((2, 3), device=device)]

    def calls() -> torch.Tensor:
        group.broadcast(ints, 0).wait()
        group._allgather_base(parts, x).wait()
        group.alltoall_base(shares, x.flatten(), [], []).wait()
        group.gather([found], [x], _to_first()).wait()
        return parts + shares.view(2, 3) + found[0]

    assert torch.equal(calls(), 3 * x)
    graph, total = capture(calls, None)
    x.add_(1)
    graph.replay()
    assert torch.equal(total, 3 * x)
    del graph  # before the group
    group.abort()


SPECULATIONS: list[dict[str, Any] | None] = [
    None,
    {"mode": "sd", "draft": "noisy", "k": 3},
    {"mode": "ssd", "draft": "noisy", "k": 3, "backup": "fast", "budget": 6},
    {"mode": "sd", "draft": "head", "k": 3},
]


def check_text_is_that_of_each_request_alone(
    models: Models, speculation: dict[str, Any] | None, *, eager: bool
) -> None:
    """In bfloat16, with rounds in flight, preemptions and aborts."""
    requests = random_requests(16, 0)
    options: dict[str, Any] = {"device": "cuda", "max_model_len": MAX_LEN, "tensor_parallel_size": 2}
    with LLM(models.target, max_num_seqs=1, eager=True, num_kv_blocks=64, **options) as llm:
        alone = [Asked(asked.prompt, asked.params) for asked in requests]
        expected = [llm.driver.call(lambda engine, a=each: play(engine, [a])[0]) for each in alone]
    if speculation is not None:
        speculation = speculation | {"draft": models.drafts[speculation["draft"]]}
    with LLM(models.target, max_num_seqs=8, eager=eager, num_kv_blocks=64, speculation=speculation, **options) as llm:
        outputs = llm.driver.call(lambda engine: play(engine, requests, preempt=0.03))
    check_answers(requests, outputs, expected)


@several
@pytest.mark.parametrize("eager", [False, True])
@pytest.mark.parametrize("speculation", SPECULATIONS)
def test_two_gpus_write_what_plain_decoding_writes_alone(
    make_model: Callable[[str], TestModel], tmp_path: Path, speculation: dict[str, Any] | None, eager: bool
) -> None:
    check_text_is_that_of_each_request_alone(make_models(make_model, tmp_path), speculation, eager=eager)


@pytest.mark.parametrize("speculation", SPECULATIONS)
def test_two_ranks_on_one_gpu_write_what_plain_decoding_writes_alone(
    make_model: Callable[[str], TestModel],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    speculation: dict[str, Any] | None,
) -> None:
    """Without graphs: a sum through the host cannot be captured."""
    share_the_gpu(monkeypatch.setattr)
    check_text_is_that_of_each_request_alone(make_models(make_model, tmp_path), speculation, eager=True)


@several
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_a_lost_gpu_ends_all_requests_in_time(make_model: Callable[[str], TestModel], how: signal.Signals) -> None:
    with LLM(make_model("llama-tied").path, device="cuda", tensor_parallel_size=2, num_kv_blocks=64) as llm:
        submission = llm.driver.submit([1, 2], SamplingParams(max_new_tokens=400, ignore_eos=True), stream=True)
        next(submission)
        ranks = llm.engine.round.target.runner.followers  # type: ignore[attr-defined]
        assert isinstance(ranks, Ranks)
        began = time.monotonic()
        os.kill(ranks._workers[0].pid, how)
        assert submission.result().error is not None
        assert time.monotonic() - began < 10
        with pytest.raises((EngineFailed, RequestFailed)):
            llm.generate([1, 2])
