"""Runs a draft's small batches as one kernel (`ssd.kernels.cuda.persistent`), where it can be built and agrees."""

from __future__ import annotations

import logging
from typing import Any

import torch

from ssd.kernels.cuda.driver import DriverError
from ssd.kernels.cuda.nvrtc import BuildError
from ssd.kernels.cuda.persistent import MAX_ROWS, PersistentStep, StepLayer
from ssd.kernels.ops import DeviceBatch
from ssd.layers.linear import Linear
from ssd.layers.spec import LatentSpec, MLPSpec
from ssd.models.decoder import Decoder, KVCache

log = logging.getLogger("ssd")
_MAX_DIFFERENCE = 0.1  # of the logits, relative; that of two orders of bfloat16 sums is about 0.03
_CHECKED_TOKENS = 15  # all kernels are checked: one is for up to 8 rows, one for up to 16


def persistent_step(decoder: Decoder, kv: KVCache) -> PersistentStep | None:
    """None where there is no such kernel, or it differs from the others.

    `decoder` must be a draft's, since the kernel has other bits, and `kv` unused: the check writes to it.
    """
    try:
        step = _build(decoder, kv)
        difference = _difference(decoder, step, kv)
    except (BuildError, DriverError, OSError) as error:
        log.info("the draft's steps are several kernels each, not one: %s", error)
        return None
    if difference < _MAX_DIFFERENCE:
        log.info("the draft's steps of up to %d rows are one kernel each, if it has the GPU to itself", MAX_ROWS)
        return step
    log.warning(
        "the draft's steps are several kernels each, which is slower: the logits of the kernel for whole steps "
        "differ by %.2g on this GPU",
        difference,
    )
    return None


def _accept(decoder: Decoder) -> None:
    """BuildError for layers and weight formats that the kernel does not have."""
    if decoder.tp.size > 1:
        raise BuildError("it is for one GPU")
    if decoder.config.float32_norms:
        raise BuildError("it multiplies the weights of norms in their type")
    if decoder.kv_dtype != decoder.dtype:
        raise BuildError("it has no KV cache of another type than the model's")
    if len(kinds := set(decoder.config.layers)) > 1:
        raise BuildError("it is for models whose layers are all equal")
    for spec in kinds:
        if not isinstance(spec.mlp, MLPSpec):
            raise BuildError("it has no experts")
        attention = spec.attention
        if isinstance(attention, LatentSpec):
            raise BuildError("it has no latent attention")
        if attention.output_bias or spec.mlp.bias or attention.window is not None or attention.sinks:
            raise BuildError("it has no biases of the output projection and the MLP, no windows and no sinks")
    if any(_weight(each) is None for each in decoder.parameters() if isinstance(each, Linear)):
        raise BuildError("it is for weights that are not quantised")


def _weight(linear: Linear) -> Any:
    return linear.weight.dense


def _build(decoder: Decoder, kv: KVCache) -> PersistentStep:
    _accept(decoder)
    layers = [
        StepLayer(
            qkv=_weight(layer.attention.qkv),
            output=_weight(layer.attention.output),
            gate_up=_weight(layer.mlp.gate_up),
            down=_weight(layer.mlp.down),
            input_norm=layer.input_norm.weight,
            mlp_norm=layer.mlp_norm.weight,
            q_norm=layer.attention.rope.q_norm,
            k_norm=layer.attention.rope.k_norm,
            qkv_bias=layer.attention.qkv.bias,
            k_cache=k_cache,
            v_cache=v_cache,
        )
        for layer, (k_cache, v_cache) in zip(decoder.layers, kv, strict=True)
    ]
    [(cos, sin)], [heads] = decoder.rope_tables.values(), decoder.heads
    return PersistentStep(
        layers,
        heads,
        embedding=_weight(decoder.embedding),
        norm=decoder.norm.weight,
        head=_weight(decoder.head),
        cos=cos,
        sin=sin,
        eps=decoder.config.rms_eps,
    )


@torch.inference_mode()
def _difference(decoder: Decoder, step: PersistentStep, kv: KVCache) -> float:
    """Relative difference of the logits after the first tokens of a text, read together, and after one more."""
    largest = 0.0
    for first, count in ((0, _CHECKED_TOKENS), (_CHECKED_TOKENS, 1)):
        batch = _batch(decoder, kv[0][0].shape[1], first, count)
        expected, found = decoder(batch, kv), step(batch)
        difference = float((found - expected).norm() / expected.norm())
        largest = max(largest, difference if difference == difference else torch.inf)
    return largest


def _batch(decoder: Decoder, block_size: int, first: int, count: int) -> DeviceBatch:
    """Tokens at positions first..first + count - 1 of a sequence in the first blocks."""
    tile = decoder.ops.tile_tokens(decoder.heads, False)

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
