"""The layers split over two processes give the same logits as one."""

from __future__ import annotations

import socket
from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest
import torch
import torch.multiprocessing as mp

from ssd.errors import ConfigError
from ssd.execution.runner import ModelRunner
from ssd.execution.state import SequenceState
from ssd.kernels.reference import ReferenceOps
from ssd.models.decoder import Decoder
from ssd.models.open import open_checkpoint
from ssd.parallel.tensor import TensorParallel

if TYPE_CHECKING:
    from conftest import TestModel  # the ranks import this file, and do without transformers

TOKENS = torch.randint(0, 320, (40,), generator=torch.Generator().manual_seed(1)).tolist()


def logits(path: str, tp: TensorParallel) -> torch.Tensor:
    checkpoint = open_checkpoint(path)
    device = torch.device("cpu")
    decoder = Decoder(checkpoint.config, ReferenceOps(), device=device, dtype=torch.float32, max_positions=64, tp=tp)
    decoder.load(checkpoint.weights(device, torch.float32))
    vocab_size = checkpoint.config.vocab_size
    state = SequenceState(1, max_len=48, lookahead=0, vocab_size=vocab_size, device=device)
    runner = ModelRunner(decoder, state, num_blocks=3, block_size=16, max_decode_rows=8)
    return runner.logits_of(TOKENS, len(TOKENS))


def rank(index: int, size: int, port: int, path: str, results: str) -> None:
    torch.distributed.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=index, world_size=size)
    torch.save(logits(path, TensorParallel(index, size)).clone(), f"{results}/{index}.pt")
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize(
    "kind", ["llama-biased", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("qwen3", "llama-tied"))]
)
def test_two_ranks_equal_one(
    make_model: Callable[[str], TestModel], kind: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Catches a wrong slice, a bias added twice, a residual added per rank, a vocabulary split or gathered wrongly."""
    path, results = make_model(kind).path, tmp_path_factory.mktemp("ranks")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    mp.spawn(rank, args=(2, port, path, str(results)), nprocs=2)
    alone = logits(path, TensorParallel())
    for index in range(2):
        split = torch.load(results / f"{index}.pt", weights_only=True)
        assert (split - alone).abs().max() < 1e-4


def test_heads_that_cannot_be_split_are_refused(make_model: Callable[[str], TestModel]) -> None:
    config = open_checkpoint(make_model("qwen3").path).config
    with pytest.raises(ConfigError, match="num_kv_heads = 2 cannot be split over 3 ranks"):
        Decoder(
            config,
            ReferenceOps(),
            device=torch.device("cpu"),
            dtype=torch.float32,
            max_positions=8,
            tp=TensorParallel(0, 3),
        )
