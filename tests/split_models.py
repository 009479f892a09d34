"""Models on several ranks, which are threads of one process, and their logits."""

from __future__ import annotations

import threading
from collections.abc import Callable

import torch
from random_weights import RandomCheckpoint

from ssd.execution.runner import ModelRunner
from ssd.execution.state import SequenceState
from ssd.kernels.device import kernels
from ssd.layers.parameter import Build
from ssd.models.checkpoint import Checkpoint, HFCheckpoint
from ssd.models.decoder import Decoder
from ssd.parallel.group import listener, make_group
from ssd.parallel.tensor import TensorParallel

TOKENS = torch.randint(0, 320, (40,), generator=torch.Generator().manual_seed(1)).tolist()
CPU = torch.device("cpu")


def on_ranks(size: int, run: Callable[[TensorParallel], torch.Tensor]) -> list[torch.Tensor]:
    """What each rank computes."""
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


def loaded(
    checkpoint: Checkpoint | RandomCheckpoint, tp: TensorParallel, kv_cache_dtype: torch.dtype | None = None
) -> Decoder:
    build = Build(kernels(CPU).ops(), CPU, torch.float32, tp, checkpoint.formats, kv_cache_dtype)
    decoder = Decoder(checkpoint.config, build, max_positions=64)
    lazily = tp.size > 1 and isinstance(checkpoint, HFCheckpoint)
    decoder.load(checkpoint.stored() if lazily else checkpoint.weights(CPU, torch.float32))
    decoder.ops.reserve(decoder.heads, CPU)
    return decoder


def logits(checkpoint: Checkpoint | RandomCheckpoint, tp: TensorParallel, tokens: list[int] = TOKENS) -> torch.Tensor:
    """After every token, on rank 0."""
    return logits_of(loaded(checkpoint, tp), tokens)


def logits_of(decoder: Decoder, tokens: list[int] = TOKENS) -> torch.Tensor:
    state = SequenceState(1, max_len=48, lookahead=0, vocab_size=decoder.config.vocab_size, device=CPU)
    runner = ModelRunner(decoder, state, num_blocks=3, block_size=16, max_decode_rows=8)
    return runner.logits_of(tokens, len(tokens))
