"""Runs a draft's small batches as one kernel (`ssd.kernels.persistent`), where it can be built and agrees."""

from __future__ import annotations

import logging

import torch

from ssd.kernels.ops import DeviceBatch
from ssd.kernels.persistent import MAX_ROWS, BuildError, PersistentStep, StepLayer
from ssd.models.decoder import Decoder, KVCache

log = logging.getLogger("ssd")
_MAX_DIFFERENCE = 0.1  # of the logits, relative; that of two orders of bfloat16 sums is about 0.03
_CHECKED_TOKENS = 15  # all kernels are checked: one is for up to 8 rows, one for up to 16


def use_persistent_step(decoder: Decoder, kv: KVCache) -> None:
    """`decoder` must be a draft's, since the kernel has other bits, and `kv` unused: the check writes to it."""
    try:
        step = _build(decoder, kv)
        difference = _difference(decoder, step, kv)
    except (BuildError, OSError) as error:
        log.info("the draft's steps are several kernels each, not one: %s", error)
        return
    if difference < _MAX_DIFFERENCE:
        decoder.step = step
        log.info("the draft's steps of up to %d rows are one kernel each", MAX_ROWS)
    else:
        log.warning(
            "the draft's steps are several kernels each, which is slower: the logits of the kernel for whole steps "
            "differ by %.2g on this GPU",
            difference,
        )


def _build(decoder: Decoder, kv: KVCache) -> PersistentStep:
    config = decoder.config
    if config.output_bias or config.mlp_bias or decoder.embedding.tp.size > 1:
        raise BuildError("it is for one GPU, and has no biases of the output projection and the MLP")
    products = [part for layer in decoder.layers for part in (layer.qkv, layer.output, layer.gate_up, layer.down)]
    if not all(isinstance(part.weight, torch.Tensor) for part in (decoder.embedding, decoder.head, *products)):
        raise BuildError("it is for weights that are not quantised")
    layers = [
        StepLayer(
            qkv=layer.qkv.weight,
            output=layer.output.weight,
            gate_up=layer.gate_up.weight,
            down=layer.down.weight,
            input_norm=layer.input_norm.value,
            mlp_norm=layer.mlp_norm.value,
            q_norm=None if layer.q_norm is None else layer.q_norm.value,
            k_norm=None if layer.k_norm is None else layer.k_norm.value,
            qkv_bias=layer.qkv.bias,
            k_cache=k_cache,
            v_cache=v_cache,
        )
        for layer, (k_cache, v_cache) in zip(decoder.layers, kv, strict=True)
    ]
    return PersistentStep(
        layers,
        decoder.layers[0].heads,
        embedding=decoder.embedding.weight,
        norm=decoder.norm.value,
        head=decoder.head.weight,
        cos=decoder.cos,
        sin=decoder.sin,
        eps=config.rms_eps,
    )


@torch.inference_mode()
def _difference(decoder: Decoder, step: PersistentStep, kv: KVCache) -> float:
    """Of the logits after the first tokens of a text, read together, and after one more."""
    largest = 0.0
    for first, count in ((0, _CHECKED_TOKENS), (_CHECKED_TOKENS, 1)):
        batch = _batch(decoder, kv[0][0].shape[1], first, count)
        expected, found = decoder(batch, kv), step(batch)
        difference = float((found - expected).norm() / expected.norm())
        largest = max(largest, difference if difference == difference else torch.inf)
    return largest


def _batch(decoder: Decoder, block_size: int, first: int, count: int) -> DeviceBatch:
    """Tokens at positions first..first + count - 1 of a sequence in the first blocks."""
    tile = decoder.ops.tile_tokens(decoder.layers[0].heads, False)

    def ints(*values: int) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=decoder.device)

    positions, starts = ints(*range(first, first + count)), range(0, count, tile)
    return DeviceBatch(
        token_ids=positions + 1,
        positions=positions,
        slot_mapping=positions,
        query_start=ints(0, count),
        context_len=ints(first + count),
        block_tables=ints(*range(-(-(first + count) // block_size)))[None],
        table_rows=ints(0),
        tiles=torch.stack((ints(*(0 for _ in starts)), ints(*starts))),
        prefill_tiles=None,
        logit_rows=None,
    )
