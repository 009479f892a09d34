"""Grafts: the function of a small model in the shape, and so at the cost, of a published one.

Logits over the small vocabulary stay the small model's, and no other token is ever chosen. That holds in bfloat16 too:
all factors are powers of two, except the square root of the ratio of head sizes where that is none.

* The residual stream holds scaled copies of the small one whose squares add up to the same mean, so that RMS norms
  divide by the same number. The first copy is read, through the norms' weights; those are zero everywhere else.
* Real heads hold the small ones at the front of their two halves, and the base of the rotary frequencies is raised so
  that these turn as before; other dimensions are zero. The q and k norms see copies again.
* Additional heads, MLP rows and layers compute on random weights, and nothing of it is added to the stream.
* Experts hold copies of the small MLP, or of parts of it (`ssd.grafts.expert_graft`): the same function up to rounding.
* Biases, sinks and sliding windows of a shape are there and change nothing: sinks are far below all logits, and the
  base's layers are in layers that see the whole context.
* Additional tokens have a logit far below all others, from a tiny constant that every embedding carries.

The largest weight of a row with the base's weights is one of them. So where all factors are powers of two, codes with
one scale per output channel (fp8, int8) are the base's codes, too, and the graft's text is that of the rounded base.

Knows nothing of files or the engine.
"""

from __future__ import annotations

import functools
import math
import re
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Final, cast

import torch

from ssd.errors import ConfigError, UnsupportedModel
from ssd.grafts.expert_graft import ROUTERS, HeldMLP, add_codes, expert_obstacles, expert_part
from ssd.grafts.published import GRAFT_FORMATS, GraftFormat, is_published, published_formats
from ssd.grafts.shapes import SHAPES, shape_of
from ssd.layers.formats import DENSE, FormatOf, WeightFormat
from ssd.layers.formats.mxfp4 import GROUP, MXFP4
from ssd.layers.formats.rounded import rounded
from ssd.layers.spec import ExpertsSpec, GQASpec, LatentSpec, LayerSpec, RopeConfig
from ssd.models.checkpoint import Checkpoint, all_weights, graft_note
from ssd.models.config import DecoderConfig
from ssd.models.content import Sources
from ssd.models.decoder import parameter_shapes
from ssd.text.tokenizer import Tokenizer

# One dimension of the stream holds a constant whose square vanishes beside the others'. Through the final norm and the
# head it becomes -2^20 / rms on additional tokens, and nothing (or 2^-30 / rms on all, if tied) on real ones.
_CONSTANT: Final = 2.0**-20
CONSTANT_NORM: Final = 2.0**10
CONSTANT_HEAD: Final = -(2.0**30)
_SINK: Final = -(2.0**13)

_EMBEDDING, _HEAD, _FINAL_NORM = "model.embed_tokens", "lm_head", "model.norm"
_LAYER: Final = re.compile(r"model\.layers\.(\d+)\.(.+)\.weight")
_BASES: Final = {"qwen2": "llama", "qwen3_moe": "qwen3", "gpt_oss": "llama"}  # families of bases, where not their own
_PACKED: Final = ("gpt_oss",)  # families whose experts are stored in MXFP4
READERS: Final = (  # tensors that read the normed stream; where the stream is zero, their weights do not matter
    "self_attn.q_proj",
    "self_attn.k_proj",
    "self_attn.v_proj",
    "mlp.gate_proj",
    "mlp.up_proj",
    _HEAD,
)


@dataclass(frozen=True)
class GraftCheckpoint:
    """`base` in `shape`. What does not fit is refused on construction.

    `quantization`: what its weights are rounded to as they are loaded, one after the other.
    """

    base: Checkpoint
    base_name: str
    shape: DecoderConfig
    shape_name: str
    quantization: GraftFormat | None = None

    @classmethod
    def of(cls, base: Checkpoint, shape: str, base_name: str = "") -> GraftCheckpoint:
        """In one of the published shapes; `shape` may end with a format: llama-3.1-70b:fp8."""
        shape_name, form = name_and_format(shape)
        found = shape_of(shape_name)
        if form is not None and form not in GRAFT_FORMATS:
            known = ", :".join(GRAFT_FORMATS)
            raise ConfigError(f"shape={shape!r} ends with no format: use :{known}, or none")
        return cls(base, base_name or base.path.resolve().name, found, shape_name, cast("GraftFormat | None", form))

    def __post_init__(self) -> None:
        obstacle = next(obstacles(self.base.config, self.shape), None)
        if obstacle is not None:
            fitting = [name for name, shape in SHAPES.items() if not any(obstacles(self.base.config, shape))]
            remedy = f"use a shape that fits: {', '.join(fitting)}" if fitting else "use another base: no shape fits it"
            raise ConfigError(
                f"{self.base_name} cannot be grafted in the shape of {self.shape_name}: {obstacle}; {remedy}"
            )

    @cached_property
    def config(self) -> DecoderConfig:
        base = self.base.config
        return replace(
            self.shape.with_layers(rope=grafted_rope(base, self.shape)),
            rms_eps=base.rms_eps,
            max_position=base.max_position,
            dtype="bfloat16" if base.dtype == "float16" else base.dtype,
        )

    @property
    def path(self) -> Path:
        return self.base.path

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        return self.base.stop_token_ids

    @property
    def sources(self) -> Sources:
        return {}

    @cached_property
    def formats(self) -> FormatOf:
        packed = self.shape.family in _PACKED

        def published(name: str) -> WeightFormat:
            return MXFP4() if packed and ".experts." in name else DENSE

        form = self.quantization
        if is_published(form):
            return published_formats(form, parameter_shapes(self.config), published)
        return rounded(form, published, exact=True)

    @property
    def note(self) -> str:
        return graft_note(self.base_name, self.shape_name, self.quantization)

    def tokenizer(self) -> Tokenizer:
        return self.base.tokenizer()

    def weights(self, device: torch.device, dtype: torch.dtype) -> Iterator[tuple[str, torch.Tensor]]:
        """Made on the device: only the base's tensors travel there."""
        if dtype == torch.float16:
            raise ConfigError("dtype='float16' cannot hold a graft's factors: use bfloat16 or float32")
        base, mlp = self._base_weights(device), held_mlp(self.base.config, self.shape)
        held = functools.cache(lambda own, origin, part: mlp.held(own, base[origin], part))
        blocks = blocks_of(self.base.config, self.config, mlp)
        for name, shape in parameter_shapes(self.config).items():
            tensor = torch.zeros(shape, dtype=dtype, device=device)
            layer, _, own = name.rpartition(".")
            if own == "weight":
                self._fill(name, tensor, held, blocks, mlp.parts)
            elif own == "sinks":
                tensor.fill_(_SINK)
            elif layer.endswith("up_proj"):  # its bias; all others are zero
                tensor.fill_(-mlp.glu.shift)
            if own == "weight" and tensor.dim() == 2:
                stored = self.formats(layer).tensors_of(tensor)
                yield from ((f"{layer}.{each}", part) for each, part in stored.items())
            else:
                yield name, tensor

    def _fill(
        self,
        name: str,
        tensor: torch.Tensor,
        held: Callable[[str, str, int], torch.Tensor],
        blocks: Mapping[str, tuple[Axis, Axis]],
        parts: int,
    ) -> None:
        """One weight: random numbers, the base's, those of additional tokens, and what routers need."""
        part, origin = self._origin(name)
        own, expert = expert_part(part)
        if own in READERS or (origin is None and tensor.dim() == 2):
            fill_random(tensor, name)
        if origin is not None:
            place(held(own, origin, expert % parts), tensor, *blocks[own])
            self._add_vocabulary(part, tensor)
        if isinstance(host(self.shape).mlp, ExpertsSpec):
            add_codes(part, tensor, seeded(name, tensor.device), parts)

    def _base_weights(self, device: torch.device) -> dict[str, torch.Tensor]:
        weights = all_weights(self.base, device, torch.float32)
        shapes = parameter_shapes(self.base.config)
        wrong = [name for name, shape in shapes.items() if name not in weights or weights[name].shape != shape]
        if wrong:
            raise UnsupportedModel(f"{self.base.path} lacks or misshapes {len(wrong)} tensors, among them {wrong[:4]}")
        return weights

    def _origin(self, name: str) -> tuple[str, str | None]:
        """Which part of a model a tensor is, and the base's tensor in it; None in an additional layer."""
        match = _LAYER.fullmatch(name)
        if match is None:
            part = name.removesuffix(".weight")
            tied = part == _HEAD and self.base.config.tie_embeddings
            return part, f"{_EMBEDDING}.weight" if tied else name
        layer, part = int(match.group(1)), match.group(2)
        hosts, base_count = self.shape.full_layers, self.base.config.num_layers
        hosted = {hosts[i * len(hosts) // base_count]: i for i in range(base_count)}
        if layer not in hosted or part in ROUTERS:
            return part, None
        return part, f"model.layers.{hosted[layer]}.{expert_part(part)[0]}.weight"

    def _add_vocabulary(self, part: str, tensor: torch.Tensor) -> None:
        """Tokens beyond the base's, which can never be chosen."""
        real = self.base.config.vocab_size
        if real == self.config.vocab_size:
            return
        if part == _FINAL_NORM:
            tensor[-1] = CONSTANT_NORM
        if part == _EMBEDDING:
            fill_random(tensor[real:], part)
            tensor[:, -1] = _CONSTANT
        if part == _HEAD:
            tensor[:real, -1] = 0.0
        if part == _HEAD or (part == _EMBEDDING and self.config.tie_embeddings):
            tensor[real:, -1] = CONSTANT_HEAD


def name_and_format(shape: str) -> tuple[str, str | None]:
    """Of NAME, NAME:FORMAT or NAME:layers=N:FORMAT."""
    name, given, form = shape.rpartition(":")
    return (name, form) if given and not form.startswith("layers=") else (shape, None)


# --- what fits --------------------------------------------------------------------------------------------------------


def obstacles(small: DecoderConfig, big: DecoderConfig) -> Iterator[str]:
    """Why `small` cannot be grafted into `big`."""
    if isinstance(host(big).attention, LatentSpec):
        yield "it has latent attention, whose one rotated key cannot be those of the base's KV heads"
        return
    if small.family not in (big.family, _BASES.get(big.family)):
        yield f"the shape's family is {big.family}, the base's is {small.family}"
    own, wide = small.attention, host_attention(big)
    biases = {"qkv_bias": own.qkv_bias, "output_bias": own.output_bias, "mlp_bias": small.mlp.bias}
    yield from (f"the base's {name} is true, and a graft holds no biases" for name, there in biases.items() if there)
    if own.window is not None:
        yield f"the base has a sliding window of {own.window} tokens, and a graft has none"
    if own.rope.scaling == "yarn":
        yield "the base's rope scaling is yarn, which depends on the head size"
    scales = copy_scales(big.hidden_size, small.hidden_size)
    if not 0 < len(scales) * small.hidden_size <= big.hidden_size:
        yield (
            f"the shape's hidden_size={big.hidden_size} is no multiple of the base's {small.hidden_size}, nor does it "
            "hold scaled copies whose squares have the same mean"
        )
    if big.family in _PACKED and small.hidden_size % GROUP:
        yield f"the base's hidden_size={small.hidden_size} is no multiple of {GROUP}, the weights of a scale in MXFP4"
    if wide.head_dim % own.head_dim:
        yield f"the shape's head_dim={wide.head_dim} is no multiple of the base's {own.head_dim}"
    if wide.head_dim // own.head_dim * math.log(own.rope.theta) > math.log(torch.finfo(torch.float32).max):
        yield f"the shape's head_dim={wide.head_dim} is too large for the base's {own.head_dim}: its rope overflows"
    mlp, size = host(big).mlp, small.mlp.intermediate_size
    if isinstance(mlp, ExpertsSpec):
        yield from expert_obstacles(size, mlp)
    least = {
        "intermediate_size": (size if isinstance(mlp, ExpertsSpec) else mlp.intermediate_size, size),
        "num_layers": (len(big.full_layers), small.num_layers),
        "vocab_size": (big.vocab_size, small.vocab_size),
    }
    for name, (shape, base) in least.items():
        if shape < base:
            yield f"the shape's {name}={shape} is below the base's {base}"
    if wide.num_kv_heads < (needed := len(_seats(own, wide)[1])):
        yield f"the shape's num_kv_heads={wide.num_kv_heads} is below the {needed} that the base's heads need in it"
    if big.tie_embeddings and not small.tie_embeddings:
        yield "the shape's tie_embeddings is true, and the base's head is not its embedding"
    if big.hidden_size < 4 * small.hidden_size and (isinstance(mlp, ExpertsSpec) or big.vocab_size > small.vocab_size):
        yield (
            f"the shape has experts, or its vocab_size={big.vocab_size} is above the base's {small.vocab_size}, which "
            f"needs spare dimensions: its hidden_size={big.hidden_size} must be at least four times the base's "
            f"{small.hidden_size}"
        )


def host(shape: DecoderConfig) -> LayerSpec:
    """The description of the layers that can hold one of the base's."""
    return shape.layers[shape.full_layers[0]]


def host_attention(shape: DecoderConfig) -> GQASpec:
    """That of `host`, in shapes that can be those of a graft."""
    return replace(shape, layers=(host(shape),)).attention


def held_mlp(small: DecoderConfig, big: DecoderConfig) -> HeldMLP:
    copies = len(copy_scales(big.hidden_size, small.hidden_size))
    return HeldMLP.of(small.mlp.intermediate_size, host(big).mlp, copies, packed=big.family in _PACKED)


def grafted_rope(small: DecoderConfig, big: DecoderConfig) -> RopeConfig:
    """The base's rotary embedding, in the big head: its dimensions turn as they do in the small one.

    YaRN remains YaRN, with a factor of one, since other engines know no other one for GPT-OSS.
    """
    rope, attention = small.attention.rope, host_attention(big)
    turning = replace(rope, theta=rope.theta ** (attention.head_dim // small.attention.head_dim))
    if (rope.scaling, attention.rope.scaling) != ("default", "yarn"):
        return turning
    return replace(attention.rope, theta=turning.theta, factor=1.0, original_max_position=small.max_position)


def fill_random(tensor: torch.Tensor, name: str) -> torch.Tensor:
    """Small normal numbers, in place: a function of the name, whatever was made before."""
    return tensor.normal_(std=0.02, generator=seeded(name, tensor.device))


def seeded(name: str, device: torch.device) -> torch.Generator:
    return torch.Generator(device).manual_seed(zlib.crc32(name.encode()))


# --- layout -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Axis:
    """Maps an axis of a small tensor to the big one: entry `source[i]`, times `scale[i]`, is at `target[i]`."""

    target: torch.Tensor
    source: torch.Tensor
    scale: torch.Tensor

    def times(self, factor: float) -> Axis:
        return replace(self, scale=self.scale * factor)


def place(small: torch.Tensor, big: torch.Tensor, rows: Axis, columns: Axis) -> None:
    """Computed in float32, rounded once. A vector is one row. Nothing else in these rows is larger afterwards."""
    small, big = small.view(-1, small.shape[-1]), big.view(-1, big.shape[-1])
    device = big.device
    block = small[rows.source.to(device)][:, columns.source.to(device)]
    block = (block * rows.scale.to(device)[:, None] * columns.scale.to(device)).to(big.dtype)
    index, largest = rows.target.to(device), block.abs().amax(1, keepdim=True)
    big[index] = big[index].clamp(-largest, largest)
    big[index[:, None], columns.target.to(device)] = block


def blocks_of(
    small: DecoderConfig, big: DecoderConfig, mlp: HeldMLP, attended: Axis | None = None
) -> dict[str, tuple[Axis, Axis]]:
    """Rows and columns of the base's tensor in each part of the graft; `attended`: columns of q, k and v, where they do
    not read the normed stream."""
    scales = copy_scales(big.hidden_size, small.hidden_size)
    read, written = same(small.hidden_size), copies(small.hidden_size, scales)
    norm = read.times(1 / scales[0])
    vocabulary, one = same(small.vocab_size), same(1)
    units = repeated(mlp.size // mlp.parts, mlp.units, mlp.down_digits)
    read_by_mlp = same(small.hidden_size * mlp.digits)
    return {
        **_attention_blocks(small.attention, host_attention(big), attended or read, written),
        "input_layernorm": (one, norm),
        "post_attention_layernorm": (one, copies(small.hidden_size, [1 / each for each in scales[: mlp.digits]])),
        "mlp.gate_proj": (units, read_by_mlp),
        "mlp.up_proj": (units, read_by_mlp),
        "mlp.down_proj": (written, same(mlp.units * mlp.down_digits)),
        _EMBEDDING: (vocabulary, written),
        _FINAL_NORM: (one, norm.times(1 / scales[0]) if big.tie_embeddings else norm),  # a tied head is scaled as well
        _HEAD: (vocabulary, read),
    }


def _attention_blocks(small: GQASpec, big: GQASpec, read: Axis, written: Axis) -> dict[str, tuple[Axis, Axis]]:
    ratio = big.head_dim // small.head_dim
    sharper = math.sqrt(ratio)  # attention divides by the square root of the head size
    scales = copy_scales(ratio) if small.qk_norm else [1.0]
    positions = _head_positions(small.head_dim, big.head_dim)
    head, value = _head(positions, scales, small.head_dim), same(small.head_dim)
    norm = Axis(positions[: small.head_dim], value.source, value.scale / scales[0])
    heads, kv_heads = _seats(small, big)

    def q(inner: Axis) -> Axis:
        return _in_heads(heads, range(small.num_heads), inner, big.head_dim, small.head_dim)

    def kv(inner: Axis) -> Axis:
        return _in_heads(range(len(kv_heads)), kv_heads, inner, big.head_dim, small.head_dim)

    return {
        "self_attn.q_proj": (q(head if small.qk_norm else head.times(sharper)), read),
        "self_attn.k_proj": (kv(head), read),
        "self_attn.v_proj": (kv(value), read),
        "self_attn.o_proj": (written, q(value)),
        "self_attn.q_norm": (same(1), norm.times(sharper)),
        "self_attn.k_norm": (same(1), norm),
    }


def copy_scales(wide: int, narrow: int = 1) -> list[float]:
    """Powers of two whose squares add up to wide / narrow, the largest first: its digits to the base four. None if
    these never end."""
    scale, scales = 1.0, []
    while wide % narrow and wide % 2 ** narrow.bit_length():
        wide, scale = wide * 4, scale / 2
    ratio = 0 if wide % narrow else wide // narrow
    while ratio:
        scales += [scale] * (ratio % 4)
        ratio, scale = ratio // 4, scale * 2
    return scales[::-1]


def _index(values: Iterable[int]) -> torch.Tensor:
    return torch.tensor(list(values), dtype=torch.int64, device="cpu")


def _arange(length: int) -> torch.Tensor:
    return torch.arange(length, dtype=torch.int64, device="cpu")


def same(length: int) -> Axis:
    index = _arange(length)
    return Axis(index, index, torch.ones(length, dtype=torch.float32, device="cpu"))


def side_by_side(axes: Seq[Axis], length: int, wide: int) -> Axis:
    """Axes of several streams in one, each of them `length` long in the base and `wide` in the graft."""
    return Axis(
        torch.cat([axis.target + i * wide for i, axis in enumerate(axes)]),
        torch.cat([axis.source + i * length for i, axis in enumerate(axes)]),
        torch.cat([axis.scale for axis in axes]),
    )


def repeated(length: int, stride: int, count: int) -> Axis:
    """The same several times, each `stride` behind the one before it."""
    target = _arange(count)[:, None] * stride + _arange(length)
    ones = torch.ones(target.numel(), dtype=torch.float32, device="cpu")
    return Axis(target.flatten(), _arange(length).repeat(count), ones)


def copies(length: int, scales: list[float]) -> Axis:
    """Scaled copies, one behind the other."""
    index = _arange(length * len(scales))
    scale = torch.tensor(scales, dtype=torch.float32, device="cpu")
    return Axis(index, index % length, scale.repeat_interleave(length))


def _head_positions(small_dim: int, big_dim: int) -> torch.Tensor:
    """The positions of a big head: those that turn like the small head's dimensions, then the others.

    Both halves stay in one piece: sums over a head are then taken in the same order, zeros aside.
    """
    index, half = _arange(small_dim), small_dim // 2
    turning = index % half + index // half * (big_dim // 2)
    free = torch.ones(big_dim, dtype=torch.bool, device=index.device).index_fill(0, turning, False)
    return torch.cat((turning, free.nonzero().flatten()))


def _head(positions: torch.Tensor, scales: list[float], small_dim: int) -> Axis:
    """A whole q or k head: scaled copies at the first positions, and nothing at the others."""
    real = copies(small_dim, scales)
    source, scale = torch.zeros_like(positions), torch.zeros_like(positions, dtype=torch.float32)
    source[: len(real.source)], scale[: len(real.scale)] = real.source, real.scale
    return Axis(positions, source, scale)


def _seats(small: GQASpec, big: GQASpec) -> tuple[list[int], list[int]]:
    """The big head of every small one; and the small KV head in each of the first big ones."""
    small_group, group = small.num_heads // small.num_kv_heads, big.num_heads // big.num_kv_heads
    seats: list[int] = []
    kv_seats: list[int] = []
    for kv_head in range(small.num_kv_heads):
        for first in range(0, small_group, group):
            seats += [len(kv_seats) * group + i for i in range(min(group, small_group - first))]
            kv_seats.append(kv_head)
    return seats, kv_seats


def _in_heads(targets: Seq[int], sources: Seq[int], inner: Axis, big_dim: int, small_dim: int) -> Axis:
    """`inner` in every head."""
    target = _index(targets)[:, None] * big_dim + inner.target
    source = _index(sources)[:, None] * small_dim + inner.source
    return Axis(target.flatten(), source.flatten(), inner.scale.repeat(len(targets)))
