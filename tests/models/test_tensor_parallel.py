"""The layers split over several ranks give the logits of one, and a row's bits do not depend on the batch."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch

from ssd.assembly.device import make_ops
from ssd.errors import ConfigError
from ssd.execution.runner import ModelRunner
from ssd.execution.state import SequenceState
from ssd.models.checkpoint import FileTensor, HFCheckpoint
from ssd.models.config import DecoderConfig
from ssd.models.decoder import Decoder, check_split, parameter_shapes
from ssd.models.random_weights import RandomCheckpoint
from ssd.parallel.group import listener, make_group
from ssd.parallel.tensor import TensorParallel

if TYPE_CHECKING:
    from conftest import TestModel

TOKENS = torch.randint(0, 320, (40,), generator=torch.Generator().manual_seed(1)).tolist()
CPU = torch.device("cpu")
ODD = DecoderConfig("llama", 1003, 48, 60, 2, 6, 2, 8, 64)  # 6 heads of 2 KV heads, a vocabulary that nothing divides


def on_ranks(size: int, run: Callable[[TensorParallel], torch.Tensor]) -> list[torch.Tensor]:
    """What each rank computes. Ranks are threads here."""
    results: list[torch.Tensor | None] = [None] * size
    listening = listener()
    port = listening.getsockname()[1]

    def rank(index: int) -> None:
        group = make_group(index, size, CPU, port=port, listening=None if index else listening)
        results[index] = run(TensorParallel(index, size, group)).clone()

    threads = [threading.Thread(target=rank, args=(i,), daemon=True) for i in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return [result for result in results if result is not None]


def loaded(checkpoint: HFCheckpoint | RandomCheckpoint, tp: TensorParallel) -> Decoder:
    decoder = Decoder(checkpoint.config, make_ops(CPU), device=CPU, dtype=torch.float32, max_positions=64, tp=tp)
    lazily = tp.size > 1 and isinstance(checkpoint, HFCheckpoint)
    decoder.load(checkpoint.stored() if lazily else checkpoint.weights(CPU, torch.float32))
    decoder.ops.reserve(decoder.layers[0].heads, CPU)
    return decoder


def logits(checkpoint: HFCheckpoint | RandomCheckpoint, tp: TensorParallel, tokens: list[int] = TOKENS) -> torch.Tensor:
    """After every token, on rank 0."""
    decoder = loaded(checkpoint, tp)
    state = SequenceState(1, max_len=48, lookahead=0, vocab_size=decoder.config.vocab_size, device=CPU)
    runner = ModelRunner(decoder, state, num_blocks=3, block_size=16, max_decode_rows=8)
    return runner.logits_of(tokens, len(tokens))


def opened(make_model: Callable[[str], TestModel], kind: str) -> HFCheckpoint:
    return HFCheckpoint.open(Path(make_model(kind).path))


@pytest.mark.parametrize(
    ("kind", "size"),
    [("llama-biased", 2), ("qwen3", 2), ("llama-tied", 4), pytest.param("llama3-scaled", 8, marks=pytest.mark.slow)],
)
def test_ranks_equal_one(make_model: Callable[[str], TestModel], kind: str, size: int) -> None:
    """Catches a wrong slice, a bias added twice, a residual added per rank, a vocabulary split or gathered wrongly, and
    KV heads that are fewer than ranks (llama-tied: 2 on 4 ranks) given to the wrong one."""
    checkpoint = opened(make_model, kind)
    split = on_ranks(size, lambda tp: logits(checkpoint, tp))[0]
    assert (split - logits(checkpoint, TensorParallel())).abs().max() < 1e-4


@pytest.mark.parametrize("size", [2, 3])
def test_a_vocabulary_that_does_not_divide_is_padded(size: int) -> None:
    config = ODD if size == 2 else replace(ODD, num_kv_heads=3, tie_embeddings=True)
    checkpoint = RandomCheckpoint(config)
    tokens = [0, 1002, 501, 502, 334, 335, 668, 669]  # at the borders of the shares
    split = on_ranks(size, lambda tp: logits(checkpoint, tp, tokens))[0]
    assert split.shape == (8, 1003)
    assert (split - logits(checkpoint, TensorParallel(), tokens)).abs().max() < 1e-4


def test_partial_sums_are_added_in_order_of_rank_whatever_the_batch() -> None:
    """Any other order, or a rounding before the last, gives another number: (2^24 + 1) - 2^24 is 0 in float32."""
    values = [2.0**24, 1.0, -(2.0**24), 3.0]

    def total(tp: TensorParallel) -> torch.Tensor:
        sums = [tp.sum(torch.full((rows, 5), values[tp.rank]), torch.float32) for rows in (1, 2, 700)]
        close = [1.0 + 2.0**-8, -1.0, 0.0, 0.0]  # the first is 1 in bfloat16
        assert float(tp.sum(torch.full((1, 1), close[tp.rank]), torch.bfloat16)) == 2.0**-8
        return torch.cat(sums)

    for found in on_ranks(4, total):
        assert found.unique().tolist() == [3.0]


def test_bits_of_a_row_do_not_depend_on_the_batch_when_split(make_model: Callable[[str], TestModel]) -> None:
    checkpoint = opened(make_model, "qwen3")
    whole = on_ranks(2, lambda tp: logits(checkpoint, tp))[0]
    part = on_ranks(2, lambda tp: logits(checkpoint, tp, TOKENS[:7]))[0]
    assert torch.equal(part, whole[:7])


def test_a_rank_reads_its_share_only(make_model: Callable[[str], TestModel], monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[int] = []
    take = FileTensor.__getitem__

    def counted(self: FileTensor, index: tuple[slice, ...]) -> torch.Tensor:
        part = take(self, index)
        read.append(part.numel())
        return part

    monkeypatch.setattr(FileTensor, "__getitem__", counted)
    checkpoint = opened(make_model, "llama3-scaled")
    sizes = []
    for rank in range(2):
        read.clear()
        loaded(checkpoint, TensorParallel(rank, 2))
        sizes.append(sum(read))
    whole = sum(math.prod(shape) for shape in parameter_shapes(checkpoint.config).values())
    vectors = sum(math.prod(shape) for shape in parameter_shapes(checkpoint.config).values() if len(shape) == 1)
    assert sizes == [(whole + vectors) // 2] * 2


@pytest.mark.parametrize(("size", "possible"), [(4, "1, 2, 6"), (3, "1, 2, 6"), (5, "1, 2, 6")])
def test_heads_that_cannot_be_split_are_refused_with_the_numbers(size: int, possible: str) -> None:
    with pytest.raises(
        ConfigError,
        match=f"tensor_parallel_size={size} cannot split a model with num_heads=6, num_kv_heads=2, "
        f"intermediate_size=60: use one of {possible}$",
    ):
        check_split(ODD, size)
