"""ModelRunner: a `Batch` in, logits out. Owns the KV tensors; knows nothing of requests or text."""

from __future__ import annotations

import functools

import torch

from ssd.core import Batch
from ssd.execution.graphs import PREFILL_BUCKETS, BatchGraphs, row_buckets
from ssd.execution.pack import to_device
from ssd.models.decoder import Decoder

FEW_QUERIES = 16  # query tokens per sequence up to which a batch counts as decoding or verification


class ModelRunner:
    """Runs one decoder over its paged KV."""

    def __init__(
        self, decoder: Decoder, *, num_blocks: int, block_size: int, max_decode_rows: int, scratch_slots: int = 0
    ) -> None:
        self.decoder = decoder
        self.block_size = block_size
        self.vocab_size = decoder.config.vocab_size
        self.num_blocks = num_blocks
        self.max_decode_rows = max_decode_rows
        self.scratch_slot = num_blocks * block_size  # the first of the slots that belong to no block of the pool
        self.kv = decoder.make_kv_cache(num_blocks - (-scratch_slots // block_size), block_size)
        self.graphs: BatchGraphs | None = None  # of decode-size batches
        self.prefill_graphs: BatchGraphs | None = None

    def warm_up(self, max_tokens: int) -> None:
        """Compiles the kernels of every prefill size now, so that nobody's first request waits for it."""
        for rows in sorted({min(n, max_tokens) for n in (20, 40, 100, 300, max_tokens)}):
            span = list(range(rows))  # one sequence in the first blocks, which nobody uses yet
            table = list(range(-(-rows // self.block_size)))
            self.forward(Batch([0] * rows, span, span, [0, rows], [rows], [table], [rows - 1]))

    def capture_graphs(self, max_context: int, *, prefill_only: bool = False) -> None:
        """Records decode-size batches and short prompts as CUDA graphs; or prompts only, one at a time."""
        make = functools.partial(BatchGraphs, self.decoder, self.kv, max_blocks=-(-max_context // self.block_size))
        if not prefill_only:
            self.graphs = make(row_buckets(self.max_decode_rows), most=self.max_decode_rows, split_kv=True)
        most = 1 if prefill_only else self.max_decode_rows
        self.prefill_graphs = make(PREFILL_BUCKETS, most=most, split_kv=False, share=self.graphs)

    @torch.inference_mode()
    def forward(self, batch: Batch) -> torch.Tensor:
        """Float32 logits, one row for each of the batch's `logit_rows`."""
        decode_size = batch.max_query_len <= FEW_QUERIES and batch.num_tokens <= self.max_decode_rows
        graphs = self.graphs if decode_size and self.graphs is not None else self.prefill_graphs
        if graphs is not None and graphs.takes(batch):
            return graphs.replay(batch)
        decoder = self.decoder
        tile_tokens = decoder.ops.tile_tokens(decoder.layers[0].heads, decode_size)
        return decoder(to_device(batch, decoder.device, tile_tokens=tile_tokens, split_kv=decode_size), self.kv)
