"""The one decoder: every family is this, with the layers of its `DecoderConfig`.

A batch of query tokens in, logits out. Knows nothing of requests, schedulers or files.
"""

from __future__ import annotations

import functools
import math
import mmap
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from collections.abc import Sequence as Seq
from contextlib import contextmanager
from dataclasses import replace
from typing import cast

import torch

from ssd.errors import ConfigError, UnsupportedModel
from ssd.kernels.ops import DeviceBatch, ExpertOutputs, HeadShape, Ops, SharedOps
from ssd.kernels.weights import Rows
from ssd.layers.attention import GQA, LayerKV
from ssd.layers.experts import Experts
from ssd.layers.formats import DENSE, FormatOf, dense
from ssd.layers.latent import LatentAttention
from ssd.layers.linear import Embedding, Linear
from ssd.layers.mlp import MLP
from ssd.layers.norm import RMSNorm
from ssd.layers.parameter import Build, LazyTensor, Parameter
from ssd.layers.rotary import RopeTables
from ssd.layers.spec import ExpertsSpec, KVLayout, LatentSpec, LayerSpec
from ssd.models.config import DecoderConfig

KVCache = Seq[LayerKV]  # one entry per layer
_MOST_RECORDED = 64  # rows: with more, kernels take far longer than their calls


class DecoderLayer:
    """Attention and MLP or experts, each behind an RMS norm and added to the residual stream.

    `width`: of what q, k and v are computed from, where that is not the residual stream.
    """

    def __init__(
        self,
        build: Build,
        name: str,
        spec: LayerSpec,
        config: DecoderConfig,
        tables: RopeTables,
        width: int | None = None,
    ) -> None:
        size, eps, wide = config.hidden_size, config.rms_eps, config.float32_norms
        self.spec = spec
        own = f"{name}.self_attn"
        self.attention: GQA | LatentAttention
        if isinstance(spec.attention, LatentSpec):
            self.attention = LatentAttention(build, own, spec.attention, size, tables)
        else:
            self.attention = GQA(build, own, spec.attention, size, eps, tables, width)
        self.mlp: MLP | Experts
        if isinstance(spec.mlp, ExpertsSpec):
            self.mlp = Experts(build, name, spec.mlp, size)
        else:
            self.mlp = MLP(build, f"{name}.mlp", spec.mlp, size)
        reads, gate_up = self.attention.reads, None if isinstance(self.mlp, Experts) else self.mlp.gate_up
        self.input_norm = RMSNorm(build, f"{name}.input_layernorm", size, eps, float32=wide, feeds=reads)
        self.mlp_norm = RMSNorm(build, f"{name}.post_attention_layernorm", size, eps, float32=wide, feeds=gate_up)

    def parameters(self) -> Iterator[Parameter]:
        yield from (self.input_norm, *self.attention.parameters(), self.mlp_norm, *self.mlp.parameters())

    @property
    def kernels(self) -> tuple[object, ...]:
        """What decides which kernels the layer launches: its description, and the formats of its weights."""
        return (self.spec, *(each.format for each in self.parameters() if isinstance(each, Linear)))

    def __call__(
        self, x: torch.Tensor | ExpertOutputs, residual: torch.Tensor | None, batch: DeviceBatch, kv: LayerKV
    ) -> tuple[torch.Tensor | ExpertOutputs, torch.Tensor]:
        """Takes and returns the last product and the residual stream without it (None before the first layer).

        They are added by the RMS norm that follows, in the same kernel.
        """
        normed = self.input_norm.rows(x, residual)
        if residual is None:
            assert isinstance(x, torch.Tensor)
            residual = x
        return self.after_norm(normed, residual, batch, kv), residual

    def after_norm(
        self, normed: Rows, residual: torch.Tensor, batch: DeviceBatch, kv: LayerKV
    ) -> torch.Tensor | ExpertOutputs:
        """The layer after its first norm; adds the attention's output to `residual` and returns the MLP's."""
        out = self.attention(normed, batch, kv)
        if isinstance(self.mlp, Experts):
            return self.mlp(self.mlp_norm(out, residual))
        return self.mlp(self.mlp_norm.rows(out, residual))


class Decoder:
    """Embedding, layers, final norm, head. `load` it before use.

    `windowed`: KV behind the windows of its layers is freed (`DecoderConfig.kv_groups`).
    """

    target_ids: torch.Tensor | None = None  # int32: of the tokens that logits are of, if these are a draft's own

    def __init__(self, config: DecoderConfig, build: Build, *, max_positions: int, windowed: bool = False) -> None:
        check_split(config, build.tp.size)
        self.config = config
        self.ops, self.device, self.tp = build.ops, build.device, build.tp
        self.dtype, self.kv_dtype = build.dtype, build.kv_dtype
        self.rope_tables = RopeTables(max_positions, build.device)
        self.layers = self._make_layers(build)
        size, tied = config.hidden_size, config.tie_embeddings
        self.embedding = Embedding(build, "model.embed_tokens", config.vocab_size, size, embedding=True, head=tied)
        self.norm = RMSNorm(build, "model.norm", size, config.rms_eps, float32=config.float32_norms)
        self.head = self.embedding if tied else Embedding(build, "lm_head", config.vocab_size, size, head=True)
        self.kv_groups, self._windowed = config.kv_groups(windowed=windowed), windowed
        self._group_of = {i: g for g, group in enumerate(self.kv_groups) for i in group.layers}  # by layer
        self._batch_of = self._group_of  # by layer: which of a batch and its `others` it computes
        self._run: Seq[int] = range(len(self.layers))  # the layers of a forward pass
        self.recordings = build.ops.recordings() if self.tp.group is None else None  # of forward passes on a CPU

    def _make_layers(self, build: Build) -> Seq[DecoderLayer]:
        return [
            DecoderLayer(build, f"model.layers.{i}", spec, self.config, self.rope_tables)
            for i, spec in enumerate(self.config.layers)
        ]

    @functools.cached_property
    def heads(self) -> list[HeadShape]:
        """The heads of this rank's layers, each kind once, whatever the window."""
        return list(dict.fromkeys(replace(layer.attention.heads, window=0) for layer in self.layers))

    @functools.cached_property
    def _planned(self) -> list[int]:
        """A layer of each kind of attention: batch and heads."""
        kinds = {(self._batch_of[i], layer.attention.heads): i for i, layer in enumerate(self.layers)}
        return list(kinds.values())

    def parameters(self) -> Iterator[Parameter]:
        yield from (self.embedding, self.norm)
        for layer in self.layers:
            yield from layer.parameters()
        if self.head is not self.embedding:
            yield self.head

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Every tensor that a checkpoint of this decoder holds."""
        return {name: shape for parameter in self.parameters() for name, shape in parameter.shapes().items()}

    @property
    def formats(self) -> set[str]:
        """Names of the weights' formats."""
        linear = (each for each in self.parameters() if isinstance(each, Linear))
        return {form.name for each in linear for form in each.formats.values()}

    @property
    def quantized(self) -> str:
        """Names of the formats that are not dense; "" if all are."""
        return ", ".join(sorted(self.formats - {DENSE.name}))

    def num_bytes(self) -> int:
        """Memory of the weights, on all ranks together."""
        return sum(parameter.num_bytes() for parameter in self.parameters())

    def load(
        self,
        weights: Iterable[tuple[str, torch.Tensor | LazyTensor]],
        complete: Callable[[Parameter], None] = lambda _: None,
    ) -> None:
        """Loads this rank's share of the tensors, in any order; raises for missing ones and wrong shapes.

        Scales of the KV cache are optional. `complete`: called with each parameter when it has all of its tensors.
        """
        if self.recordings is not None:
            self.recordings.clear()
        wanted = {
            name: (shape, parameter) for parameter in self.parameters() for name, shape in parameter.shapes().items()
        }
        missing = Counter(parameter for _, parameter in wanted.values())  # tensors
        optional = {
            name: layer.attention.kv_scales for layer in self.layers for name in layer.attention.kv_scales.names
        }
        for name, tensor in weights:
            if name in optional:
                optional[name].load(name, tensor)
                continue
            if name not in wanted:
                self._check_needless(name, tensor)
                continue
            shape, parameter = wanted.pop(name)
            if (tuple(tensor.shape) or (1,)) != shape:  # one number may be stored either way
                raise UnsupportedModel(f"{name} has shape {tuple(tensor.shape)}, the config says {shape}")
            parameter.load(name, tensor)
            missing[parameter] -= 1
            if not missing[parameter]:
                complete(parameter)
        if wanted:
            raise UnsupportedModel(f"the checkpoint lacks {len(wanted)} tensors, among them {sorted(wanted)[:4]}")

    def _check_needless(self, name: str, tensor: torch.Tensor | LazyTensor) -> None:
        """Ignores a tied head, rotary tables and biases of zeros (of GPTQ files); any other unknown tensor would change
        the output, and is refused."""
        tied = name == "lm_head.weight" and self.config.tie_embeddings
        zeros = name.endswith(".bias") and not bool(tensor[()].float().any())
        if not tied and not zeros and not name.endswith("rotary_emb.inv_freq"):
            raise UnsupportedModel(
                f"the checkpoint holds {name}, which its {self.config.family} config does not mention"
            )

    @property
    def kv_layouts(self) -> list[KVLayout]:
        """What each layer keeps of a token on this rank."""
        return [spec.attention.kv_layout(self.kv_dtype, self.tp.size) for spec in self.config.layers]

    @property
    def kv_bytes_per_token(self) -> int:
        return self.config.kv_bytes_per_token(self.kv_dtype, self.tp.size, windowed=self._windowed)

    def make_kv_cache(self, num_blocks: int, block_size: int) -> KVCache:
        """A block belongs to one group, so the n-th layers of a layout in all groups share their tensors.

        Zeros, not `empty`: attention multiplies values of positions that it does not see by 0.
        """

        def zeros(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
            shape = (num_blocks, block_size, *shape)
            if self.device.type != "cpu":
                return torch.zeros(shape, dtype=dtype, device=self.device)
            return _lazy_zeros(shape, dtype)

        made: dict[tuple[KVLayout, int], LayerKV] = {}
        seen: Counter[tuple[int, KVLayout]] = Counter()  # layers of a layout in a group
        cache = []
        for i, layout in enumerate(self.kv_layouts):
            group = self._group_of[i]
            place = layout, seen[group, layout]
            seen[group, layout] += 1
            if place not in made:
                made[place] = tuple(zeros(shape, layout.dtype) for shape in layout.shapes)
            cache.append(made[place])
        return cache

    @contextmanager
    def distinct_layers(self) -> Iterator[None]:
        """Forward passes inside run the first layer, which has no residual yet, and one of each kind of the others:
        they launch all kernels of a whole pass."""
        kinds = {layer.kernels: i for i, layer in reversed(list(enumerate(self.layers))[1:])}
        self._run = [0, *sorted(kinds.values())]
        try:
            yield
        finally:
            self._run = range(len(self.layers))

    def __call__(
        self,
        batch: DeviceBatch,
        kv: KVCache,
        features: Mapping[int, torch.Tensor] | None = None,
        states: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Float32 logits of the batch's logit rows.

        `features`: by number of layers, where to write the hidden states after so many of them. `states`: where to
        write those of all rows that the head reads, after the last norm.
        """
        few = len(batch.token_ids) <= _MOST_RECORDED and len(self._run) == len(self.layers)
        if self.recordings is None or not few or features or states is not None:
            return self._compute(batch, kv, features or {}, states)
        key = id(kv), batch.logit_rows is None, batch.memory, *(each.memory for each in batch.others)
        if batch.logit_rows is None:
            return self.recordings.run(key, lambda: self._compute(batch, kv, {}, None), kv)
        normed = self.recordings.run(key, lambda: self.norm(*self._hidden(batch, kv, {})), kv)
        return self.head.logits(normed[batch.logit_rows])

    def _compute(
        self, batch: DeviceBatch, kv: KVCache, features: Mapping[int, torch.Tensor], states: torch.Tensor | None
    ) -> torch.Tensor:
        x, residual = self._hidden(batch, kv, features)
        if states is not None:
            states.copy_(self.norm(x, residual))
            return self.head.logits(states if batch.logit_rows is None else states[batch.logit_rows])
        if batch.logit_rows is not None:
            x, residual = x[batch.logit_rows], residual[batch.logit_rows] if residual is not None else None
        return self.head.logits(self.norm(x, residual))

    def _hidden(
        self, batch: DeviceBatch, kv: KVCache, features: Mapping[int, torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The last product and the residual stream without it, of all rows."""
        batches, residual = (batch, *batch.others), None
        for i in self._planned:
            self.layers[i].attention.plan(batches[self._batch_of[i]], kv[i])
        x: torch.Tensor | ExpertOutputs = self.embedding.embed(batch.token_ids)
        for i in self._run:
            x, residual = self.layers[i](x, residual, batches[self._batch_of[i]], kv[i])
            if i + 1 in features:
                x = self._combined(x)
                torch.add(x, residual, out=features[i + 1])
        return self._combined(x), residual

    def _combined(self, x: torch.Tensor | ExpertOutputs) -> torch.Tensor:
        return self.ops.combine(*x) if isinstance(x, ExpertOutputs) else x


def _lazy_zeros(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Zeros on the CPU that take no time, and no memory before they are used. Not numpy's, which take huge pages: the
    first token would take one in each tensor."""
    size = math.prod(shape) * dtype.itemsize
    memory = mmap.mmap(-1, max(1, size), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(memory, dtype=torch.uint8)[:size].view(dtype).view(shape)


def outline(dtype: torch.dtype = torch.float32, format_of: FormatOf = dense) -> Build:
    """For a decoder that is never loaded: its tensors' names, shapes and bytes are what is asked for."""
    return Build(cast(Ops, SharedOps()), torch.device("cpu"), dtype, format_of=format_of)


def parameter_shapes(config: DecoderConfig) -> dict[str, tuple[int, ...]]:
    """Every tensor that a checkpoint of this config holds, under its Hugging Face name."""
    return Decoder(config, outline(), max_positions=1).shapes()


def check_split(config: DecoderConfig, size: int, option: str = "tensor_parallel_size") -> None:
    """ConfigError, with the degrees that are possible, for a model that cannot be split over so many ranks."""
    if not config.splits(size):
        kinds = dict.fromkeys(config.layers)
        most = max(value for layer in kinds for value in layer.split_sizes.values())
        possible = [str(n) for n in range(1, most + 1) if all(layer.splits(n) for layer in kinds)]
        shapes = " or ".join(", ".join(f"{k}={v}" for k, v in layer.split_sizes.items()) for layer in kinds)
        raise ConfigError(f"{option}={size} cannot split a model with {shapes}: use one of {', '.join(possible)}")


def num_parameters(config: DecoderConfig) -> int:
    """Numbers in all tensors of a checkpoint of this config; only one layer of each kind is looked at."""

    def count(layers: tuple[LayerSpec, ...]) -> int:
        return sum(map(math.prod, parameter_shapes(replace(config, layers=layers)).values()))

    around = count(())
    return around + sum(times * (count((spec,)) - around) for spec, times in Counter(config.layers).items())


def check_fits(config: DecoderConfig, num_stored: int) -> None:
    """Refuses a config of more parameters than files can hold (`num_stored`), before layers are built from it."""
    total = num_parameters(config)
    if total > num_stored:
        raise UnsupportedModel(
            f"num_layers={config.num_layers}, hidden_size={config.hidden_size}, vocab_size={config.vocab_size}, …: "
            f"the config describes {total} parameters, the files hold {num_stored} at most; download them again"
        )
