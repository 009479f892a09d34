"""The persistent kernel on a CPU, in an emulator (`emulated_ptx.h`): logits and KV against plain torch."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from reference_ops import ReferenceOps

from ssd.kernels.cuda import persistent as kernel
from ssd.kernels.ops import Branches, DeviceBatch
from ssd.layers.parameter import Build
from ssd.models.config import DecoderConfig, equal_layers
from ssd.models.decoder import Decoder, KVCache, parameter_shapes
from tests.device_batches import make_device_batch
from tests.kernels.emulation import COMPILER, addresses, constant, emulated_kernel

CPU, BLOCK, BLOCKS = torch.device("cpu"), 16, 40
pytestmark = pytest.mark.skipif(COMPILER is None, reason="needs a C++ compiler")

LLAMA = equal_layers("llama", 128, 64, 128, 3, 4, 1, 64, 512, tie_embeddings=True)
QWEN3 = equal_layers("qwen3", 96, 96, 160, 2, 2, 2, 128, 512, qk_norm=True)
DEEP = equal_layers("qwen2", 128, 64, 3104, 2, 6, 1, 64, 512, qkv_bias=True)  # an MLP whose x is read in pieces
SMALL_RING = {"CHUNK": 64, "STAGES": 3, "IN_FLIGHT": 2}


class Emulated:
    """`PersistentStep` of a decoder with random weights."""

    def __init__(self, config: DecoderConfig, blocks: int, tuning: dict[str, int]) -> None:
        self.config, self.blocks, self.tuning = config, blocks, tuning
        generator = torch.Generator("cpu").manual_seed(0)

        def random(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=generator, dtype=torch.float32, device=CPU).bfloat16()

        self.decoder = Decoder(config, Build(ReferenceOps(), CPU, torch.float32), max_positions=512)
        self.decoder.load(
            (name, random(*shape) * shape[-1] ** -0.5 if len(shape) > 1 else 1 + random(*shape) / 10)
            for name, shape in parameter_shapes(config).items()
        )
        shape = (BLOCKS, BLOCK, config.attention.num_kv_heads, config.attention.head_dim)
        self.kv = [(random(*shape), random(*shape)) for _ in range(config.num_layers)]
        self.buffers = torch.full((constant(self.library(1), "buffer_bytes"),), 255, dtype=torch.uint8, device=CPU)

    def library(self, halves: int) -> Any:
        c, a = self.config, self.config.attention
        macros = {
            "HIDDEN": c.hidden_size,
            "INTER": c.mlp.intermediate_size,
            "LAYERS": c.num_layers,
            "VOCAB": c.vocab_size,
        }
        macros |= {"HEADS": a.num_heads, "KV_HEADS": a.num_kv_heads, "DIM": a.head_dim, "BLOCK_SIZE": BLOCK}
        macros |= {"QK_NORM": int(a.qk_norm), "QKV_BIAS": int(a.qkv_bias), **kernel._TUNING, "MAX_POLLS": 1 << 20}
        return emulated_kernel(kernel.SOURCE, "step", macros | self.tuning | {"HALVES": halves})

    def __call__(self, batch: DeviceBatch, seed: int) -> tuple[torch.Tensor, KVCache]:
        """Logits, and the KV afterwards."""
        decoder, kv = self.decoder, [(k.clone(), v.clone()) for k, v in self.kv]
        kept: list[torch.Tensor] = []

        def at(tensor: torch.Tensor | None) -> int | None:
            if tensor is None:
                return None
            kept.append(tensor.bfloat16() if tensor.dtype is torch.float32 else tensor)
            return kept[-1].data_ptr()

        rows = []
        for layer, caches in zip(decoder.layers, kv, strict=True):
            attention, mlp = layer.attention, layer.mlp
            gate, up = mlp.gate_up.weight.dense.chunk(2)
            weights = (
                attention.qkv.weight.dense,
                attention.output.weight.dense,
                torch.stack((gate, up), dim=1).flatten(0, 1),
            )
            norms = (attention.rope.q_norm, attention.rope.k_norm)
            vectors = (layer.input_norm.weight, layer.mlp_norm.weight, *norms, attention.qkv.bias)
            rows.append([at(tensor) or 0 for tensor in (*weights, mlp.down.weight.dense, *vectors, *caches)])
        count = len(batch.token_ids) if batch.logit_rows is None else len(batch.logit_rows)
        logits = torch.zeros((count, self.config.vocab_size), dtype=torch.float32, device=CPU)
        [(cos, sin)] = decoder.rope_tables.values()
        params = kernel.Params(
            layers=at(torch.tensor(rows, dtype=torch.int64, device=CPU)),
            **{"embedding": at(decoder.embedding.weight.dense), "norm": at(decoder.norm.weight)},
            **{"head": at(decoder.head.weight.dense), "cos": cos.data_ptr(), "sin": sin.data_ptr()},
            **{"token_ids": at(batch.token_ids), "positions": at(batch.positions), "slots": at(batch.slot_mapping)},
            **{"query_start": at(batch.query_start), "tables": at(batch.block_tables), "tiles": at(batch.tiles)},
            **{"table_rows": at(batch.table_rows), "logit_rows": at(batch.logit_rows), "logits": logits.data_ptr()},
            **{"buffers": self.buffers.data_ptr(), "rows": len(batch.token_ids), "logit_count": count},
            **{"num_tiles": batch.tiles.shape[1], "sequences": len(batch.table_rows)},
            **{"table_stride": batch.block_tables.stride(0), "eps": self.config.rms_eps},
            depth=-1 if batch.branches is None else batch.branches.depth,
            scale=decoder.heads[0].scale * 1.4426950408889634,
        )
        library = self.library(1 if len(batch.token_ids) <= 8 else 2)
        threads, shared = 32 * (kernel._TUNING["WARPS"] + 1), constant(library, "shared_bytes")
        assert library.launch(addresses(params), self.blocks, threads, shared, seed), "a value never came"
        return logits, kv

    def batch(self, lengths: list[int], queries: int, branches: Branches | None = None) -> DeviceBatch:
        """The last tokens of texts, or branches after some of their last tokens; the last branch is padding."""
        each, count = BLOCKS // len(lengths) // 2, len(lengths)
        tables = [list(range(i * each, (i + 1) * each)) for i in range(count)]
        rows = [(i, j) for i in range(count) for j in range(queries)]
        if branches is None:
            positions = [lengths[i] - queries + j for i, j in rows]
            slots = [tables[i][at // BLOCK] * BLOCK + at % BLOCK for (i, _), at in zip(rows, positions, strict=True)]
        else:
            positions = [lengths[i] - j % 3 + branches.depth for i, j in rows]
            slots = [BLOCKS // 2 * BLOCK + row * 16 + branches.depth for row in range(len(rows) - 1)] + [-1]
        batch = make_device_batch(
            *(positions, slots, [i * queries for i in range(count + 1)], lengths, tables),
            tile_tokens=16 // self.decoder.heads[0].group_size,
            device=CPU,
            branches=branches,
        )
        return replace(batch, token_ids=batch.positions * 7 % self.config.vocab_size)


def check(emulated: Emulated, batch: DeviceBatch, seed: int) -> None:
    logits, caches = emulated(batch, seed)
    wanted_caches = [(k.float(), v.float()) for k, v in emulated.kv]
    with torch.inference_mode():
        wanted = emulated.decoder(batch, wanted_caches)
    real = batch.slot_mapping >= 0 if batch.logit_rows is None else slice(None)
    assert (logits - wanted)[real].norm() < 0.02 * wanted[real].norm()
    for found, expected in zip(caches, wanted_caches, strict=True):
        for a, b in zip(found, expected, strict=True):
            assert (a.float() - b).norm() < 2e-3 * b.norm()
    passed_on = len(emulated.buffers) - 2 * 16 * emulated.config.hidden_size  # without the x after the last layer
    assert bool((emulated.buffers[:passed_on] == 255).all()), "buffers are not empty for the next launch"


def test_a_step_agrees_with_plain_torch() -> None:
    emulated = Emulated(LLAMA, 2, {})
    check(emulated, emulated.batch([150], 1), 0)
    check(emulated, emulated.batch([20], 3, Branches(2, 16)), 1)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("config", "blocks", "tuning"),
    [(LLAMA, 4, {}), (QWEN3, 5, {}), (DEEP, 2, {}), (LLAMA, 3, SMALL_RING)],
    ids=["llama", "qwen3", "deep", "small ring"],
)
def test_all_kinds_of_steps_agree_with_plain_torch(config: DecoderConfig, blocks: int, tuning: dict[str, int]) -> None:
    emulated = Emulated(config, blocks, tuning)
    read = emulated.batch([20, 40, 17], 3)
    batches = [
        emulated.batch([1], 1),
        emulated.batch([300], 1),  # split
        emulated.batch([150], 10),
        replace(read, logit_rows=torch.tensor([2, 4, 8], device=CPU)),
        emulated.batch([100], 5, Branches(3, 16)),
        emulated.batch([60, 70], 8, Branches(9, 16)),
    ]
    for seed, batch in enumerate(batches):
        check(emulated, batch, seed)
