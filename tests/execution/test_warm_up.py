"""Rehearsals before the first request: passes over padding, which leave nothing behind."""

from __future__ import annotations

import bisect
from collections.abc import Callable

import pytest
import torch
from conftest import TestModel
from reference_ops import ReferenceOps

from ssd.assembly.draft_runners import make_fan_out
from ssd.assembly.open import open_checkpoint
from ssd.config import SpeculationConfig
from ssd.decoding.rejection import RejectionTarget
from ssd.drafting.runner import DraftRunner
from ssd.drafting.shapes import RunShapes
from ssd.execution.runner import _EAGER_SIZES, ModelRunner
from ssd.execution.state import SequenceState
from ssd.execution.target import Target
from ssd.kernels.ops import DeviceBatch
from ssd.layers.parameter import Build
from ssd.models.decoder import Decoder, KVCache

CPU = torch.device("cpu")
K = 2
SHAPES = RunShapes(lookahead=K, max_sequences=4, max_rows=16, widths=(2, 4))


@pytest.fixture
def runner(make_model: Callable[[str], TestModel]) -> ModelRunner:
    checkpoint = open_checkpoint(make_model("qwen3").path)
    decoder = Decoder(checkpoint.config, Build(ReferenceOps(), CPU, torch.float32), max_positions=128)
    decoder.load(checkpoint.weights(CPU, torch.float32))
    state = SequenceState(4, max_len=64, lookahead=K, vocab_size=checkpoint.config.vocab_size, device=CPU)
    slots = SHAPES.scratch_slots
    made = ModelRunner(decoder, state, num_blocks=8, block_size=16, max_decode_rows=16, scratch_slots=slots)
    for pair in made.kv:
        for tensor in pair:
            tensor.fill_(7.0)
    return made


def check_untouched(runner: ModelRunner) -> None:
    """No KV of a block, no sequence and no parameter has changed."""
    state = runner.state
    assert len(runner.kv) == len(runner.decoder.layers)
    assert all((tensor[: runner.num_blocks] == 7.0).all() for pair in runner.kv for tensor in pair)
    assert (state.length[: state.num_slots] == 1).all()
    assert not state.token_ids[: state.num_slots].any()
    assert state.sampling.counts is None
    assert state.sampling.bias is None


@pytest.mark.parametrize("kind", [Target, RejectionTarget])
def test_a_rehearsal_of_the_target_leaves_nothing_behind(runner: ModelRunner, kind: type[Target]) -> None:
    runner.rehearse(48)
    kind(runner, runner.state).rehearse()
    check_untouched(runner)


def test_a_rehearsal_of_the_draft_leaves_nothing_behind(runner: ModelRunner) -> None:
    draft = DraftRunner(runner, SHAPES)
    runner.rehearse(48)
    draft.rehearse((1, 3, 4), make_fan_out(SpeculationConfig(mode="ssd", draft="any", k=K)))
    check_untouched(runner)


def test_a_batch_of_more_tokens_than_a_sequence_has_can_be_rehearsed(
    runner: ModelRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Positions beyond the tables would be read from somebody else's memory on a GPU."""
    sizes, forward = [], Decoder.__call__

    def watched(decoder: Decoder, batch: DeviceBatch, kv: KVCache) -> torch.Tensor:
        sizes.append((len(batch.positions), int(batch.positions.max())))
        return forward(decoder, batch, kv)

    monkeypatch.setattr(Decoder, "__call__", watched)
    runner.rehearse(512)
    assert max(rows for rows, _ in sizes) == 512
    assert max(position for _, position in sizes) < runner.state.token_ids.shape[1]


def test_sizes_of_eager_batches_have_every_bucket_of_the_library_s_products() -> None:
    """Catches a prompt that waits for the comparison of products of its number of rows."""
    cublaslt = pytest.importorskip("ssd.kernels.cuda.cublaslt")
    buckets = cublaslt._BUCKETS
    assert {buckets[min(bisect.bisect_left(buckets, n), len(buckets) - 1)] for n in _EAGER_SIZES} == {*buckets}
