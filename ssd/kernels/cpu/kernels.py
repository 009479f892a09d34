"""The compiled CPU kernels, called through ctypes.

Why: torch's CPU matrix products change algorithm, hence bits, with the number of rows. These kernels are row-invariant
(see `ssd.c`), near memory bandwidth for one row and near the FMA peak for eight and more.

Knows nothing of models, layers, schedulers or cache management. All tensors are on the CPU, fp32 or bf16, with
contiguous last dimensions; the tensors of one call share a dtype unless stated otherwise. That and shapes, which a
model decides once, are not checked. Token ids, positions, slots and blocks, which requests decide, are: IndexError.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ssd.kernels.codes import Codes, CodeType, bits_of, doubled_fp4
from ssd.kernels.cpu import recording
from ssd.kernels.cpu.build import BuildError
from ssd.kernels.cpu.threads import num_threads
from ssd.kernels.ops import UNSCALED, KVScales
from ssd.kernels.weights import GLU, SWIGLU, Routing

_CPU = torch.device("cpu")  # every tensor states its dtype and device: torch's defaults are the user's
_PACKED = 1 << 21  # weights packed at a time


@dataclass(frozen=True)
class PackedWeight:
    """A weight in the kernels' panel layout. `n` and `k` are the original shape; a gated one has gate and up rows."""

    data: Tensor
    n: int
    k: int
    dtype: torch.dtype  # of inputs and outputs, and of the weight itself unless it is quantised
    gated: bool = False
    form: int = 0  # a quantised weight's, as `codes.h` numbers them
    scales: Tensor | None = None  # a quantised weight's (and offsets), as `codes.h` has them
    group: int = 0  # weights of one scale
    flags: int = 0  # a quantised weight's, see below

    @functools.cached_property
    def address(self) -> int:
        return self.data.data_ptr()


class Noise(NamedTuple):
    """Where the seeds and temperatures of rows are: `ssd.sampling.sampler.SamplingColumns`. All int32, contiguous."""

    slots: Tensor  # [R], -1: padding
    positions: Tensor  # [R], of the tokens to choose
    columns: Tensor  # [slots, words]: words 0 and 1 are the seed's key, word 2 the temperature (float32)
    constants: tuple[int, int, int]  # the generator's, as signed int64


@dataclass(frozen=True)
class PackedExperts:
    """Weights of experts, which differ in nothing but numbers."""

    each: tuple[PackedWeight, ...]

    @functools.cached_property
    def addresses(self) -> tuple[Tensor, Tensor | None]:
        """Those of the weights and of their scales."""
        scales = [each.scales.data_ptr() for each in self.each if each.scales is not None]
        made = [
            torch.tensor(found, dtype=torch.int64, device=_CPU) for found in ([e.address for e in self.each], scales)
        ]
        return made[0], made[1] if scales else None


_P, _L, _I, _F = ctypes.c_void_p, ctypes.c_long, ctypes.c_int, ctypes.c_float
_Q = ctypes.c_int64
_SIGNATURES: dict[str, list[type]] = {
    "ssd_packed_bytes": [_L, _L, _I, _I],
    "ssd_panel_columns": [],
    "ssd_flipped_bits": [_I],
    "ssd_enable": [],
    "ssd_use_huge_pages": [_P, _L],
    "ssd_pack": [_P, _L, _P, _L, _L, _I, _I, _I],
    "ssd_embedding": [_P, _P, _I, _P, _L, _L, _L, _I],
    "ssd_codes_embedding": [_P, _P, _P, _I, _P, _L, _L, _L, _I, _L, _I, _I],
    "ssd_linear": [_P, _L, _P, _P, _P, _L, _L, _L, _I, _I, _F, _F, _F, _I, _I, _P, _L, _I, _P, _L, _I],
    "ssd_expert_linear": [
        *[_P, _L, _P, _P, _L, _L, _P, _P, _P, _P, _L, _L],
        *[_I, _I, _F, _F, _F, _I, _I, _L, _I, _P, _L, _I],
    ],
    "ssd_route": [_P, _L, _L, _L, _I, _P, _P, _P, _P],
    "ssd_combine": [_P, _P, _P, _L, _L, _L, _I, _I, _I],
    "ssd_rms_norm": [_P, _L, _P, _P, _P, _L, _L, _F, _I, _I, _I],
    "ssd_rope_and_store": [
        *[_P, _L, _P, _I, _P, _I, _P, _P, _P, _P, _F],
        *[_P, _P, _P, _L, _L, _L, _L, _L, _L, _I, _I, _F, _F, _I],
    ],
    "ssd_paged_attention": [*[_P, _L], *[_P] * 7, *[_L] * 10, *[_F, _F, _P, _P, _P, _L, _L, _L, _I, _I, _I]],
    "ssd_gumbel": [_P, _P, _L, _L, _Q, _Q, _Q, _I],
    "ssd_best": [_P, _L, _P, _P, _P, _L, _L, _L, _P, _P, _P, _L, _Q, _Q, _Q, _I],
    "ssd_prepare_rows": [*[_P] * 17, *[_L] * 8],
    "ssd_accept": [*[_P] * 10, *[_L] * 6],
    "ssd_stage": [*[_P] * 13, *[_L] * 7, _I],
    "ssd_look_up": [*[_P] * 11, *[_L] * 10],
    "ssd_store": [*[_P] * 6, *[_L] * 6],
    "ssd_extend_rows": [*[_P] * 10, *[_L] * 9],
    "ssd_keep_best": [*[_P] * 4, *[_L] * 4, _F],
    "ssd_repeat": [_P, _L, _I],
}
_RECORDED = (  # as `ssd_repeat` numbers them
    *("ssd_embedding", "ssd_codes_embedding", "ssd_linear", "ssd_expert_linear", "ssd_route", "ssd_combine"),
    *("ssd_rms_norm", "ssd_rope_and_store", "ssd_paged_attention", "ssd_best"),
    *("ssd_stage", "ssd_look_up", "ssd_store", "ssd_extend_rows", "ssd_keep_best", "ssd_accept"),
)
_OFFSETS, _HALF, _FACTORED, _COARSE = 1, 2, 4, 8  # flags of a quantised weight, as in `codes.h`
_CODES: tuple[CodeType, ...] = ("fp8", "int8", "int4", "uint4")  # as `codes.h` numbers them, from 1
_STORAGE = {torch.float32: 0, torch.bfloat16: 1, torch.float8_e4m3fn: 2}  # likewise
_SIZES = ("ssd_packed_bytes", "ssd_panel_columns", "ssd_flipped_bits")  # what they return; others status or nothing
_STATUS = (
    *("ssd_enable", "ssd_embedding", "ssd_codes_embedding", "ssd_rope_and_store", "ssd_paged_attention"),
    *("ssd_prepare_rows", "ssd_accept", "ssd_stage", "ssd_look_up", "ssd_store", "ssd_repeat"),
)


class Kernels:
    """The compiled kernels. The number of threads (`num_threads`) never changes a result's bits."""

    def __init__(self, library: ctypes.CDLL, variant: str) -> None:
        self.variant = variant  # name of the instruction set, see `ssd.kernels.cpu.variants`
        self.build = Path(library._name).stem.rpartition("-")[2]  # hash of the machine code, see `ssd.kernels.cache`
        for name, argtypes in _SIGNATURES.items():
            function = getattr(library, name)
            function.argtypes = argtypes
            function.restype = _L if name in _SIZES else _I if name in _STATUS else None
        if library.ssd_enable():
            raise BuildError(f"the operating system does not let processes use {variant}")
        self._packed_bytes = library.ssd_packed_bytes
        self._panel_columns = int(library.ssd_panel_columns())
        self._flipped: dict[CodeType, int] = {
            kind: int(library.ssd_flipped_bits(form)) for form, kind in enumerate(_CODES, 1)
        }
        self._pack = library.ssd_pack
        self._use_huge_pages = library.ssd_use_huge_pages
        recorded = [_recorded(getattr(library, name), number) for number, name in enumerate(_RECORDED)]
        self._embedding, self._codes_embedding, self._linear, self._expert_linear, *others = recorded
        self._route, self._combine, self._rms_norm, self._rope_and_store, self._paged_attention, *others = others
        self._best, self.stage, self.look_up, self.store, self.extend_rows, self.keep_best, self.accept = others
        self._repeat = library.ssd_repeat
        self._gumbel = library.ssd_gumbel
        self.prepare_rows = library.ssd_prepare_rows  # this, and `stage` to `accept`, take addresses

    def pack_linear(self, weight: Tensor, gated: bool = False) -> PackedWeight:
        """Repack `weight` [N, K] into panels. `gated`: rows are [gate; up], for a gated `linear`."""
        known = weight.dtype in (torch.float32, torch.bfloat16) and weight.device.type == "cpu"
        if not known or weight.dim() != 2 or not weight.numel():
            raise ValueError(f"cannot pack {tuple(weight.shape)} {weight.dtype} on {weight.device}")
        n, k = weight.shape
        if gated and n % 2:
            raise ValueError(f"a gated weight needs an even number of rows, not {n}")
        if weight.stride(1) != 1:
            weight = weight.contiguous()
        bf16 = weight.dtype is torch.bfloat16
        size = int(self._packed_bytes(n, k, bf16, gated))
        data = weight.new_empty(size // weight.element_size())
        self._pack(weight.data_ptr(), weight.stride(0), data.data_ptr(), n, k, bf16, gated, num_threads())
        return PackedWeight(data, n, k, weight.dtype, gated)

    def pack_codes(
        self,
        codes: Codes,
        dtype: torch.dtype,
        gated: bool = False,
        *,
        coarse: bool = False,
        half: bool | None = None,
    ) -> PackedWeight:
        """Repack a quantised weight into panels, for a `linear` of inputs of type `dtype`.

        `coarse`: see `Ops.prepare_codes`. `half`: its scales become float16; None: if that is exact.
        """
        half = has_half_scales(codes) if half is None else half
        if codes.type == "fp8" and codes.offsets is not None:
            raise ValueError("fp8 codes have no offsets")
        if codes.type == "fp4":  # halves of integers
            values = doubled_fp4(codes.values).view(torch.uint8)
            codes = Codes(values, codes.scales / 2, "int8", codes.depth, codes.offsets)
        n, form = len(codes.values), _CODES.index(codes.type) + 1
        flags = (0 if codes.offsets is None else _OFFSETS) | (_COARSE if coarse and codes.type != "fp8" else 0)
        if coarse and codes.factors is not None:
            integers, units = (self._numbers(list(each), gated) for each in codes.factors)
            integers = integers.reshape(*units.shape[:2], -1)  # those of a block behind its units
            scales, flags = torch.cat((units.flatten(2).view(torch.int8), integers), 2), flags | _FACTORED
        else:
            numbers = [codes.scales] if codes.offsets is None else [codes.scales, codes.offsets]
            scales, flags = self._numbers(numbers, gated), flags | (_HALF if half else 0)
            scales = scales.half() if half else scales
        data = self._packed_values(codes, gated)
        return PackedWeight(data, n, codes.depth, dtype, gated, form, scales, codes.group, flags)

    def _packed_values(self, codes: Codes, gated: bool) -> Tensor:
        """[panels, depth / together, columns of a byte, together]. A few panels at a time, which takes less memory."""
        width, together, four = self._panel_columns, _together(codes.type), bits_of(codes.type) == 4
        depth, halves = codes.depth + -codes.depth % (4 * together), codes.values.chunk(2 if gated else 1)
        panels, step = -(-len(halves[0]) // width), max(1, _PACKED // (depth * width))
        data = torch.empty(
            (panels * len(halves), depth // together, width // 2 if four else width, together),
            dtype=torch.uint8,
            device=_CPU,
        )
        self._use_huge_pages(data.data_ptr(), data.nbytes)
        for first in range(0, panels, step):
            own = torch.cat([half[first * width : (first + step) * width] for half in halves])
            own = torch.nn.functional.pad(own, (0, depth - own.shape[1]))  # cuts off whole groups
            values = self._panels(own, gated)
            if four:
                low, high = values.chunk(2, 2)
                values = low | high << 4
            values = values ^ self._flipped[codes.type]
            values = values.reshape(len(values), -1, together, values.shape[2]).transpose(2, 3)
            data[first * len(halves) :][: len(values)] = values
        return data

    def _numbers(self, numbers: list[Tensor], gated: bool) -> Tensor:
        """[N, groups] of each kind -> [panels, groups, kinds, columns]"""
        return torch.stack([self._panels(each, gated) for each in numbers], dim=2).contiguous()

    def _panels(self, rows: Tensor, gated: bool) -> Tensor:
        """[N, K] -> [panels, K, columns of a panel], padded with zeros; gate and up panels alternate."""
        width, parts = self._panel_columns, []
        for part in rows.chunk(2 if gated else 1):
            padded = torch.nn.functional.pad(part, (0, 0, 0, -len(part) % width))
            parts.append(padded.view(-1, width, rows.shape[1]))
        return torch.stack(parts, dim=1).flatten(0, 1).transpose(1, 2)

    def embedding(self, packed: PackedWeight, token_ids: Tensor) -> Tensor:
        """Rows `token_ids` [T] (int32 or int64) of a weight -> [T, K].

        A model with tied embeddings needs no second, unpacked copy of its largest weight.
        """
        tokens, bf16 = token_ids.shape[0], packed.dtype is torch.bfloat16
        wide = token_ids.dtype is torch.int64
        if not (wide or token_ids.dtype is torch.int32):
            raise TypeError(f"token ids are {token_ids.dtype}, not int32 or int64")
        if packed.gated or packed.form:
            raise TypeError("rows are looked up in a weight that is neither gated nor quantised")
        out = recording.empty((tokens, packed.k), packed.dtype)
        size = (tokens, packed.n, packed.k)
        if self._embedding(packed.address, token_ids.data_ptr(), wide, out.data_ptr(), *size, bf16):
            raise IndexError(f"token ids {token_ids.tolist()} are not all in a vocabulary of {packed.n}")
        return out

    def codes_embedding(self, packed: PackedWeight, token_ids: Tensor) -> Tensor:
        """Rows `token_ids` of a quantised weight -> [T, K], widened."""
        tokens, wide, scales = token_ids.shape[0], token_ids.dtype is torch.int64, packed.scales
        if packed.gated or scales is None or not (wide or token_ids.dtype is torch.int32):
            raise TypeError("int32 or int64 token ids are looked up in a quantised weight that is not gated")
        out = recording.empty((tokens, packed.k), packed.dtype)
        if self._codes_embedding(
            *(packed.address, scales.data_ptr(), token_ids.data_ptr(), wide, out.data_ptr()),
            *(tokens, packed.n, packed.k, packed.form, packed.group, packed.flags),
            packed.dtype is torch.bfloat16,
        ):
            raise IndexError(f"token ids {token_ids.tolist()} are not all in a vocabulary of {packed.n}")
        return out

    def repeat(self, calls: np.ndarray) -> None:
        """Repeats recorded calls, with the number of threads of now."""
        if self._repeat(calls.ctypes.data, len(calls), num_threads()):
            raise IndexError("a token id, position, slot or block is out of range")

    def linear(
        self,
        x: Tensor,
        packed: PackedWeight,
        bias: Tensor | None = None,
        *,
        glu: GLU = SWIGLU,
        float32: bool = False,
        row_scales: Tensor | None = None,
    ) -> Tensor:
        """`x` [M, K] @ weight.T (+ bias [N]) -> [M, N]. Rows of `x` may be strided.

        A weight packed with `gated` gives `glu` of gate and up -> [M, I] instead (its bias is [2I]). `float32`: the
        sums as they are, not rounded to the storage type. `row_scales`: see `RoundedRows`.
        """
        (m, k), n, dtype = x.shape, packed.n // 2 if packed.gated else packed.n, packed.dtype
        if x.dtype is not dtype or k != packed.k:
            raise TypeError(f"the input is {x.dtype} and {k} wide, the weight {dtype} and {packed.k} wide")
        y = recording.empty((m, n), torch.float32 if float32 else dtype)
        self._linear(
            x.data_ptr(),
            x.stride(0),
            packed.address,
            None if bias is None else bias.data_ptr(),
            y.data_ptr(),
            *(m, n, k, dtype is torch.bfloat16, packed.gated, glu.slope, glu.limit, glu.shift, float32, packed.form),
            *(None if packed.scales is None else packed.scales.data_ptr(), packed.group, packed.flags),
            *((None, 0) if row_scales is None else (row_scales.data_ptr(), row_scales.shape[1])),
            num_threads(),
        )
        return y

    def expert_linear(
        self,
        x: Tensor,
        weight: PackedExperts,
        routing: Routing,
        bias: Tensor | None = None,
        *,
        glu: GLU | None = None,
        float32: bool = False,
        row_scales: Tensor | None = None,
    ) -> Tensor:
        """See `Weight.expert_linear`."""
        packed, (weights, scales), pairs = weight.each[0], weight.addresses, len(routing.order)
        dtype, n, gate = packed.dtype, packed.n // 2 if packed.gated else packed.n, glu or SWIGLU
        if x.dtype is not dtype or x.shape[1] != packed.k or len(weight.each) != routing.num_experts:
            raise TypeError(f"the input is {x.dtype} and {x.shape[1]} wide, the weight {dtype} and {packed.k} wide")
        y = recording.empty((pairs, n), torch.float32 if float32 else dtype)
        row_scales = None if row_scales is None else row_scales.contiguous()
        self._expert_linear(
            *(x.data_ptr(), x.stride(0), routing.order.data_ptr(), routing.starts.data_ptr(), routing.num_experts),
            *(pairs // len(x), weights.data_ptr(), None if scales is None else scales.data_ptr()),
            *(None if bias is None else bias.data_ptr(), y.data_ptr(), n, packed.k, dtype is torch.bfloat16),
            *(packed.gated, gate.slope, gate.limit, gate.shift, float32, packed.form, packed.group),
            packed.flags,
            *((None, 0) if row_scales is None else (row_scales.data_ptr(), row_scales.shape[1])),
            num_threads(),
        )
        return y

    def route(self, logits: Tensor, count: int, *, chosen: bool) -> Routing:
        """See `Ops.route`."""
        rows, experts = logits.shape
        ids, order = (recording.empty((rows * count,), torch.int32) for _ in range(2))
        weights = recording.empty((rows, count), torch.float32)
        starts = recording.empty((experts + 1,), torch.int32)
        outputs = (ids.data_ptr(), weights.data_ptr(), order.data_ptr(), starts.data_ptr())
        self._route(logits.contiguous().data_ptr(), rows, experts, count, chosen, *outputs)
        return Routing(ids.view(rows, count), weights, order, starts)

    def combine(self, x: Tensor, routing: Routing, *, float32: bool = False) -> Tensor:
        """See `Ops.combine`."""
        (rows, count), n = routing.weights.shape, x.shape[1]
        y = recording.empty((rows, n), torch.float32 if float32 else x.dtype)
        bf16 = x.dtype is torch.bfloat16
        addresses = (x.data_ptr(), routing.weights.data_ptr(), y.data_ptr())
        self._combine(*addresses, rows, count, n, bf16, float32, num_threads())
        return y

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None) -> Tensor:
        """Norm of `x` [M, D] times `weight`; with a contiguous residual, that of their sum, which it becomes."""
        m, d = x.shape
        out = recording.empty((m, d), x.dtype)
        self._rms_norm(
            *(x.data_ptr(), x.stride(0), None if residual is None else residual.data_ptr()),
            *(weight.data_ptr(), out.data_ptr()),
            *(m, d, eps, x.dtype is torch.bfloat16, weight.dtype is torch.bfloat16, num_threads()),
        )
        return out

    def rope_and_store(
        self,
        qkv: Tensor,
        positions: Tensor,
        cos: Tensor,
        sin: Tensor,
        slots: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        num_heads: int,
        q_norm: Tensor | None = None,
        k_norm: Tensor | None = None,
        eps: float = 1e-6,
        scales: KVScales = UNSCALED,
    ) -> Tensor:
        """Rotate q and k of `qkv` [T, (H + 2*Hkv)*D], write k and v to the caches, return q [T, H, D].

        `cos`, `sin`: fp32, contiguous [max_pos, D/2]. `positions`, `slots`: int32 or int64 [T]; slot < 0: no write.
        Caches: contiguous [num_blocks, block_size, Hkv, D], of the type of `qkv` or e4m3, which are divided by
        `scales`. `q_norm`, `k_norm` [D]: per-head RMS norm before the rotation (Qwen 3).
        """
        tokens, (blocks, block_size, kv_heads, d) = qkv.shape[0], k_cache.shape
        q = recording.empty((tokens, num_heads, d), qkv.dtype)
        if self._rope_and_store(
            *(qkv.data_ptr(), qkv.stride(0), positions.data_ptr(), positions.dtype is torch.int64),
            *(slots.data_ptr(), slots.dtype is torch.int64, cos.data_ptr(), sin.data_ptr()),
            *(None if q_norm is None else q_norm.data_ptr(), None if k_norm is None else k_norm.data_ptr(), eps),
            *(q.data_ptr(), k_cache.data_ptr(), v_cache.data_ptr(), tokens, num_heads, kv_heads, d),
            *(cos.shape[0], blocks * block_size, qkv.dtype is torch.bfloat16, _STORAGE[k_cache.dtype]),
            *(scales.k, scales.v, num_threads()),
        ):
            raise IndexError("a token's position is not in the rotary tables, or its slot is not in the KV cache")
        return q

    def paged_attention(
        self,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        query_start: Tensor,
        context_len: Tensor,
        block_tables: Tensor,
        table_rows: Tensor,
        scale: float,
        branches: tuple[Tensor, Tensor, int] | None = None,
        first: int = 0,
        window: int = 0,
        scales: KVScales = UNSCALED,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Causal attention of `q` [T, H, D] over paged caches -> [T, H, D].

        `query_start` [S+1], `context_len` [S], `block_tables` [rows, blocks] and `table_rows` [S] (each sequence's row
        of them) are int32. The queries of a sequence are its last positions; `context_len` counts them. Heads of a row
        of `q` must be contiguous.

        `branches`: positions and slots (int32 [T]; slot < 0: padding) of queries that are the newest tokens of
        branches, and how many tokens each branch has before it. A query sees its sequence up to the branch, then the
        branch; `context_len` is not used. `first`: positions of a sequence before it are not seen. `window`: positions
        that a query sees, its own included; 0: all. `sinks`: see `Ops.attention`.
        """
        if sinks is not None and (sinks.dtype is not torch.float32 or sinks.shape != q.shape[1:2]):
            raise TypeError(f"sinks are {sinks.dtype} {tuple(sinks.shape)}, not a float32 for each head")
        (tokens, heads, d), (blocks, block_size, kv_heads, _) = q.shape, k_cache.shape
        out = recording.empty((tokens, heads, d), q.dtype)
        positions, slots, depth = None, None, 0
        if branches is not None:
            positions, slots, depth = branches[0].data_ptr(), branches[1].data_ptr(), branches[2]
        if self._paged_attention(
            *(q.data_ptr(), q.stride(0), k_cache.data_ptr(), v_cache.data_ptr(), out.data_ptr()),
            *(query_start.data_ptr(), context_len.data_ptr(), block_tables.data_ptr(), table_rows.data_ptr()),
            *(tokens, table_rows.shape[0], *block_tables.shape, block_tables.stride(0)),
            *(blocks, block_size, heads, kv_heads, d, scale * scales.k, scales.v),
            None if sinks is None else sinks.data_ptr(),
            *(positions, slots, depth, first, window, q.dtype is torch.bfloat16, _STORAGE[k_cache.dtype]),
            num_threads(),
        ):
            raise IndexError("a query is not in the batch, or sees what is not in its block table or in the KV cache")
        return out

    def gumbel(self, keys: Tensor, vocab_size: int, golden: int, mix1: int, mix2: int) -> Tensor:
        """Rows of Gumbel noise, one for each int64 key: fp32. The constants are the generator's, as signed int64."""
        if keys.dtype is not torch.int64 or not keys.is_contiguous():
            raise TypeError(f"keys are {keys.dtype}, not contiguous int64")
        rows = keys.shape[0]
        out = torch.empty(rows, vocab_size, dtype=torch.float32, device=_CPU)
        size = (rows, vocab_size, golden, mix1, mix2)
        self._gumbel(keys.data_ptr(), out.data_ptr(), *size, num_threads())
        return out

    def best(
        self, scores: Tensor, count: int, excluded: Tensor | None = None, noise: Noise | None = None
    ) -> tuple[Tensor, Tensor]:
        """The `count` largest of each row of fp32 `scores` [R, V], in order: tokens int32, scores fp32 [R, count].

        The lower token first where scores are equal; -inf comes with token 0. `excluded` (int32 [R]; -1: none) are
        left out. The first token is -1 if a row has no choice: all are -inf, or some are NaN or +inf. `noise`: scores
        are logits, which are divided by the temperature and get noise first, in rows that have a temperature.
        """
        if scores.dtype is not torch.float32:
            raise TypeError(f"scores are {scores.dtype}, not float32")
        rows, vocab = scores.shape
        tokens, values = (recording.empty((rows, count), dtype) for dtype in (torch.int32, torch.float32))
        own: tuple[Any, ...] = (None, None, None, 0, 0, 0, 0)
        if noise is not None:
            columns = noise.columns
            own = *(each.data_ptr() for each in (noise.slots, noise.positions, columns)), columns.shape[1]
            own = *own, *noise.constants
        self._best(
            *(scores.data_ptr(), scores.stride(0), None if excluded is None else excluded.data_ptr()),
            *(tokens.data_ptr(), values.data_ptr(), rows, vocab, count, *own, num_threads()),
        )
        return tokens, values


def trim_heap() -> None:
    """Gives freed memory back to the system, which glibc keeps otherwise: after a model was loaded."""
    with suppress(OSError, AttributeError, TypeError):  # other systems do not have it
        ctypes.CDLL(None).malloc_trim(0)


def has_half_scales(codes: Codes) -> bool:
    """Whether scales and offsets are float16 numbers, as many files store them. Products of fp8 take float32."""
    numbers = [codes.scales] if codes.offsets is None else [codes.scales, codes.offsets]
    return codes.type not in ("fp8", "fp4") and all(torch.equal(each.half().float(), each) for each in numbers)


def _recorded(function: Any, number: int) -> Callable[..., int]:
    """Calls a function of the library, and writes the call to the tape if there is one."""

    def call(*arguments: Any) -> int:
        status: int = function(*arguments)
        tape = recording.current()
        if tape is not None:
            tape.add(number, arguments)
        return status

    return call


def _together(kind: CodeType) -> int:
    """Weights of a row that lie side by side in a panel."""
    return 1 if kind == "fp8" else 4
