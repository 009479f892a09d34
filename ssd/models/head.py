"""Heads: drafts of one decoder layer that read the target's hidden states, what EAGLE and MTP heads share.

The input at position p is the token there and the fused feature of p - 1, so position 0 has none. After its first token
a head reads its own hidden states in their place. Knows nothing of sequences, KV blocks or drafting.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from ssd.kernels.ops import DeviceBatch
from ssd.kernels.weights import Rows
from ssd.layers.norm import RMSNorm
from ssd.models.decoder import DecoderLayer, KVCache
from ssd.models.feature_draft import FeatureDraft


class Head(FeatureDraft):
    """`load` it, and give it `hidden`, before use.

    A call takes the hidden states before its tokens from the first rows of `hidden`, and leaves its own there.
    """

    hidden: torch.Tensor  # [rows, hidden_size]
    layer: DecoderLayer
    norm: RMSNorm
    norm_output: bool  # the hidden states that it goes on from are those after its last norm
    adds: bool  # a step adds to the hidden states that it reads, so a difference stays in those after it

    def inputs(self, token_ids: torch.Tensor, hidden: torch.Tensor) -> tuple[Rows, torch.Tensor]:
        """What q, k and v of tokens are computed from, with the hidden states before them; and the residual stream."""
        raise NotImplementedError

    def store(self, batch: DeviceBatch, hidden: torch.Tensor, kv: KVCache) -> None:
        """Writes K and V of tokens with the hidden states before them, and computes nothing else."""
        rows, _ = self.inputs(batch.token_ids, hidden)
        [own] = kv
        self.layer.attention.store(rows, batch, own)

    def __call__(
        self,
        batch: DeviceBatch,
        kv: KVCache,
        features: Mapping[int, torch.Tensor] | None = None,
        states: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Float32 logits of all rows, over the draft's vocabulary."""
        hidden = self.hidden[: len(batch.token_ids)]
        rows, residual = self.inputs(batch.token_ids, hidden)
        [own] = kv
        x = self.norm(self.layer.after_norm(rows, residual, batch, own), residual)  # residual: now its hidden states
        left = x if self.norm_output else residual
        if left is not hidden:
            hidden.copy_(left)
        return self.head.logits(x)
