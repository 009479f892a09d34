"""The one decoder: every family is this, with the switches of its `DecoderConfig`.

A batch of query tokens in, logits out. Knows nothing of requests, schedulers or files.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Protocol

import numpy as np
import torch

from ssd.errors import ConfigError, UnsupportedModel
from ssd.kernels.ops import DeviceBatch, HeadShape, Ops, Rope
from ssd.kernels.persistent import PersistentStep
from ssd.kernels.reference import ReferenceOps
from ssd.layers.linear import ColumnLinear, Embedding, Linear, RowLinear
from ssd.models.config import DecoderConfig
from ssd.models.rotary import rope_tables
from ssd.parallel.tensor import TensorParallel


class LazyTensor(Protocol):
    """A tensor in a file, of which only what is indexed is read."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    def __getitem__(self, index: tuple[slice, ...]) -> torch.Tensor: ...


KVCache = list[tuple[torch.Tensor, torch.Tensor]]  # per layer: keys and values [blocks, block_size, kv_heads, dim]


class Vector:
    """A norm's weight."""

    def __init__(self, width: int) -> None:
        self.width = width
        self.value: torch.Tensor = torch.empty(0, dtype=torch.float32, device="cpu")

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {"weight": (self.width,)}

    def index(self, name: str) -> tuple[slice, ...]:
        """Every rank has all of it."""
        return (slice(None),)

    def load(self, name: str, tensor: torch.Tensor) -> None:
        self.value = tensor


class DecoderLayer:
    """Attention and gated MLP, each behind an RMS norm and added to the residual stream.

    `width`: of what q, k and v are computed from, where that is not the residual stream.
    """

    def __init__(self, config: DecoderConfig, ops: Ops, tp: TensorParallel, width: int | None = None) -> None:
        c = config
        self.ops = ops
        self.eps = c.rms_eps
        self.heads = HeadShape(c.num_heads // tp.size, max(1, c.num_kv_heads // tp.size), c.head_dim)
        q, kv = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
        self.input_norm = Vector(c.hidden_size)
        parts = {"q_proj": q, "k_proj": kv, "v_proj": kv}
        self.qkv = ColumnLinear(ops, tp, parts, width or c.hidden_size, bias=c.qkv_bias, unit=c.head_dim)
        self.q_norm = Vector(c.head_dim) if c.qk_norm else None
        self.k_norm = Vector(c.head_dim) if c.qk_norm else None
        self.output = RowLinear(ops, tp, {"o_proj": c.hidden_size}, q, bias=c.output_bias)
        self.mlp_norm = Vector(c.hidden_size)
        gate_up = {"gate_proj": c.intermediate_size, "up_proj": c.intermediate_size}
        self.gate_up = ColumnLinear(ops, tp, gate_up, c.hidden_size, bias=c.mlp_bias, gated=True)
        self.down = RowLinear(ops, tp, {"down_proj": c.hidden_size}, c.intermediate_size, bias=c.mlp_bias)

    def modules(self) -> Iterator[tuple[str, Linear | Vector]]:
        """Checkpoint prefix of every parameter holder."""
        yield "input_layernorm", self.input_norm
        yield "self_attn", self.qkv
        yield "self_attn", self.output
        if self.q_norm is not None and self.k_norm is not None:
            yield "self_attn.q_norm", self.q_norm
            yield "self_attn.k_norm", self.k_norm
        yield "post_attention_layernorm", self.mlp_norm
        yield "mlp", self.gate_up
        yield "mlp", self.down

    def rope(self, cos: torch.Tensor, sin: torch.Tensor) -> Rope:
        if self.q_norm is None or self.k_norm is None:
            return Rope(cos, sin)
        return Rope(cos, sin, self.q_norm.value, self.k_norm.value, self.eps)

    def __call__(
        self,
        x: torch.Tensor,
        residual: torch.Tensor | None,
        batch: DeviceBatch,
        rope: Rope,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Takes and returns the last product and the residual stream without it (None before the first layer).

        They are added by the RMS norm that follows, in the same kernel.
        """
        normed = self.ops.rms_norm(x, self.input_norm.value, self.eps, residual)
        residual = x if residual is None else residual
        return self.after_norm(normed, residual, batch, rope, k_cache, v_cache), residual

    def after_norm(
        self,
        normed: torch.Tensor,
        residual: torch.Tensor,
        batch: DeviceBatch,
        rope: Rope,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
    ) -> torch.Tensor:
        """The layer after its first norm; adds the attention's output to `residual` and returns the MLP's."""
        q = self.ops.rope_and_store(self.qkv(normed), batch, rope, self.heads, k_cache, v_cache)
        x = self.output(self.ops.attention(q, batch, self.heads, k_cache, v_cache))
        return self.down(self.gate_up(self.ops.rms_norm(x, self.mlp_norm.value, self.eps, residual)))


class Decoder:
    """Embedding, layers, final norm, head. `load` it before use."""

    def __init__(
        self,
        config: DecoderConfig,
        ops: Ops,
        *,
        device: torch.device,
        dtype: torch.dtype,
        max_positions: int,
        tp: TensorParallel = TensorParallel(),  # noqa: B008 (frozen)
    ) -> None:
        check_split(config, tp.size)
        self.config = config
        self.ops = ops
        self.device = device
        self.dtype = dtype
        self.tp = tp
        self.layers = [DecoderLayer(config, ops, tp) for _ in range(config.num_layers)]
        vocabulary, width, tied = config.vocab_size, config.hidden_size, config.tie_embeddings
        self.embedding = Embedding(ops, tp, {"model.embed_tokens": vocabulary}, width, embedding=True, head=tied)
        self.norm = Vector(config.hidden_size)
        self.head = self.embedding
        if not tied:
            self.head = Embedding(ops, tp, {"lm_head": vocabulary}, width, head=True)
        cos, sin = rope_tables(config.rope, config.head_dim, max_positions)
        self.cos, self.sin = cos.to(device), sin.to(device)
        self._ropes: list[Rope] = []
        self.step: PersistentStep | None = None  # of a draft, for small batches

    def holders(self) -> Iterator[tuple[str, Linear | Vector]]:
        """Checkpoint prefix of every parameter holder."""
        yield from (("", self.embedding), ("model.norm", self.norm))
        for i, layer in enumerate(self.layers):
            yield from ((f"model.layers.{i}.{prefix}", holder) for prefix, holder in layer.modules())
        if self.head is not self.embedding:
            yield "", self.head

    def parameters(self) -> dict[str, tuple[tuple[int, ...], Linear | Vector, str]]:
        """Every checkpoint tensor of this decoder: its full shape, the layer that loads it, and its name there."""
        wanted: dict[str, tuple[tuple[int, ...], Linear | Vector, str]] = {}
        for prefix, holder in self.holders():
            for name, shape in holder.shapes().items():
                wanted[f"{prefix}.{name}" if prefix else name] = (shape, holder, name)
        return wanted

    def load(self, weights: Iterable[tuple[str, torch.Tensor | LazyTensor]]) -> None:
        """Loads this rank's share of the tensors, in any order; raises for missing ones and wrong shapes."""
        wanted = self.parameters()
        for name, tensor in weights:
            if name not in wanted:
                self._check_needless(name)
                continue
            shape, holder, own = wanted.pop(name)
            if tuple(tensor.shape) != shape:
                raise UnsupportedModel(f"{name} has shape {tuple(tensor.shape)}, the config says {shape}")
            share = tensor[holder.index(own)].to(device=self.device, dtype=self.dtype)
            holder.load(own, share if share.shape == shape else share.clone())  # a view would keep the whole tensor
        if wanted:
            raise UnsupportedModel(f"the checkpoint lacks {len(wanted)} tensors, among them {sorted(wanted)[:4]}")
        self._ropes = [layer.rope(self.cos, self.sin) for layer in self.layers]

    def _check_needless(self, name: str) -> None:
        """Ignores a tied head and rotary tables; any other unknown tensor would change the output, and is refused."""
        tied = name == "lm_head.weight" and self.config.tie_embeddings
        if not tied and not name.endswith("rotary_emb.inv_freq"):
            raise UnsupportedModel(
                f"the checkpoint holds {name}, which its {self.config.family} config does not mention"
            )

    def make_kv_cache(self, num_blocks: int, block_size: int) -> KVCache:
        heads = self.layers[0].heads
        shape = (num_blocks, block_size, heads.num_kv_heads, heads.head_dim)

        def zeros() -> torch.Tensor:  # not `empty`: attention multiplies values of positions that it does not see by 0
            if self.device.type != "cpu":
                return torch.zeros(shape, dtype=self.dtype, device=self.device)
            return _lazy_zeros(shape, self.dtype)

        return [(zeros(), zeros()) for _ in self.layers]

    @property
    def kv_bytes_per_token(self) -> int:
        heads = self.layers[0].heads
        return 2 * len(self.layers) * heads.num_kv_heads * heads.head_dim * self.dtype.itemsize

    def __call__(
        self, batch: DeviceBatch, kv: KVCache, features: Mapping[int, torch.Tensor] | None = None
    ) -> torch.Tensor:
        """Float32 logits of the batch's logit rows. Runs as many layers as `kv` has.

        `features`: by number of layers, where to write the hidden states after so many of them.
        """
        if features is None and self.step is not None and self.step.takes(batch):
            return self.step(batch)
        wanted = features or {}
        x, residual = self.embedding.embed(batch.token_ids), None
        for done, (layer, rope, (k_cache, v_cache)) in enumerate(zip(self.layers, self._ropes, kv, strict=False), 1):
            x, residual = layer(x, residual, batch, rope, k_cache, v_cache)
            if done in wanted:
                torch.add(x, residual, out=wanted[done])
        if batch.logit_rows is not None:
            x, residual = x[batch.logit_rows], residual[batch.logit_rows] if residual is not None else None
        return self.head.logits(self.ops.rms_norm(x, self.norm.value, self.config.rms_eps, residual))


def _lazy_zeros(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Zeros on the CPU that take no time, and no memory before they are used, as numpy's do; aligned as torch's are."""
    size, alignment = math.prod(shape) * dtype.itemsize, 64
    memory = np.zeros(size + alignment, dtype=np.uint8)
    first = -memory.ctypes.data % alignment
    return torch.from_numpy(memory[first : first + size]).view(dtype).view(shape)


def parameter_shapes(config: DecoderConfig) -> dict[str, tuple[int, ...]]:
    """Every tensor that a checkpoint of this config holds, under its Hugging Face name."""
    outline = Decoder(config, ReferenceOps(), device=torch.device("cpu"), dtype=torch.float32, max_positions=1)
    return {name: shape for name, (shape, *_) in outline.parameters().items()}


def splits(config: DecoderConfig, size: int) -> bool:
    """Whether the heads and the MLP can be split over so many ranks.

    KV heads may be fewer than ranks: several ranks then have the same one, and their own of its query heads.
    """
    fewer, more = sorted((size, config.num_kv_heads))
    return not (config.num_heads % size or config.intermediate_size % size or more % fewer)


def check_split(config: DecoderConfig, size: int, option: str = "tensor_parallel_size") -> None:
    """ConfigError, with the degrees that are possible, for a model that cannot be split over so many ranks."""
    if not splits(config, size):
        possible = [str(n) for n in range(1, config.num_heads + 1) if splits(config, n)]
        raise ConfigError(
            f"{option}={size} cannot split a model with num_heads={config.num_heads}, num_kv_heads="
            f"{config.num_kv_heads}, intermediate_size={config.intermediate_size}: use one of {', '.join(possible)}"
        )


def check_fits(config: DecoderConfig, num_stored: int) -> None:
    """Refuses a config of more parameters than files can hold (`num_stored`), before layers are built from it."""
    none, one = (
        sum(map(math.prod, parameter_shapes(replace(config, num_layers=layers)).values())) for layers in (0, 1)
    )
    count = none + config.num_layers * (one - none)
    if count > num_stored:
        raise UnsupportedModel(
            f"num_layers={config.num_layers}, hidden_size={config.hidden_size}, vocab_size={config.vocab_size}, …: "
            f"the config describes {count} parameters, the files hold {num_stored} at most; download them again"
        )
