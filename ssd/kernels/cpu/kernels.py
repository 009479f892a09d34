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
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ssd.kernels.cpu import recording
from ssd.kernels.cpu.build import BuildError
from ssd.kernels.cpu.calls import LAYOUTS
from ssd.kernels.cpu.pack import PackedExperts, PackedWeight, Packer
from ssd.kernels.cpu.threads import num_threads
from ssd.kernels.ops import UNSCALED, KVScales, TreePaths
from ssd.kernels.weights import GLU, SWIGLU, Routing, RoutingRule

_STORAGE = {torch.float32: 0, torch.bfloat16: 1, torch.float8_e4m3fn: 2}  # as `dtypes.h` numbers them


class Kernels:
    """The compiled kernels. The number of threads (`num_threads`) never changes a result's bits."""

    def __init__(self, library: ctypes.CDLL, variant: str) -> None:
        if library.ssd_enable():
            raise BuildError(f"the operating system does not let processes use {variant}")
        self.variant = variant  # name of the instruction set, see `ssd.kernels.cpu.variants`
        self.build = Path(library._name).stem.rpartition("-")[2]  # hash of the machine code, see `ssd.kernels.cache`
        self._library, packer = library, Packer(library)
        self.pack_linear, self.pack_codes = packer.pack_linear, packer.pack_codes
        self._embedding = self.function("embedding", "a token id is not in the vocabulary")
        self._linear, self._expert_linear = self.function("linear"), self.function("expert_linear")
        self._head_linear = self.function("head_linear")
        self._route, self._combine = self.function("route"), self.function("combine")
        self._rms_norm = self.function("rms_norm")
        refused = "a token's position is not in the rotary tables, or its slot is not in the KV cache"
        self._rope_and_store = self.function("rope_and_store", refused)
        self._latent_rope_and_store = self.function("latent_rope_and_store", refused)
        self._paged_attention = self.function(
            "paged_attention", "a query is not in the batch, or sees what is not in its block table or in the KV cache"
        )
        self._repeat = self.function("repeat", "a token id, position, slot or block is out of range")

    def function(self, name: str, refused: str = "") -> Callable[..., None]:
        """The C function `ssd_NAME`, called with the fields of `struct NAME`. Calls are recorded if there is a tape.

        `refused`: what is said if an index is out of range.
        """
        function = getattr(self._library, f"ssd_{name}")
        function.argtypes, function.restype = [ctypes.c_void_p, ctypes.c_int], ctypes.c_int
        place = ctypes.cast(function, ctypes.c_void_p).value or 0

        def run(call: bytes) -> None:
            status = function(call, num_threads())
            tape = recording.current()
            if tape is not None:
                tape.add(place, call)
            if status:
                raise IndexError(refused)

        return LAYOUTS[name].caller(run)

    def repeat(self, calls: recording.Calls) -> None:
        """Repeats recorded calls, with the number of threads of now."""
        self._repeat(calls=calls.address, count=len(calls))

    def embedding(self, packed: PackedWeight, token_ids: Tensor) -> Tensor:
        """Rows `token_ids` [T] (int32 or int64) of a weight -> [T, K], those of a quantised one widened.

        A model with tied embeddings needs no second, unpacked copy of its largest weight.
        """
        if packed.gated or token_ids.dtype not in (torch.int32, torch.int64):
            raise TypeError(f"{token_ids.dtype}: int32 or int64 token ids are looked up in a weight that is not gated")
        out = recording.empty((token_ids.shape[0], packed.k), packed.dtype)
        self._embedding(
            weight=packed.fields,
            ids=token_ids.data_ptr(),
            ids64=token_ids.dtype is torch.int64,
            out=out.data_ptr(),
            tokens=token_ids.shape[0],
        )
        return out

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
        y = recording.empty((x.shape[0], packed.columns), torch.float32 if float32 else packed.dtype)
        self._linear(**_product(x, packed, bias, y, glu, float32, row_scales))
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
        if len(weight.each) != routing.num_experts:
            raise TypeError(f"rows were routed to {routing.num_experts} experts, not {len(weight.each)}")
        y = recording.empty((pairs, packed.columns), torch.float32 if float32 else packed.dtype)
        row_scales = None if row_scales is None else row_scales.contiguous()
        product = _product(x, packed, bias, y, glu or SWIGLU, float32, row_scales)
        self._expert_linear(
            linear=LAYOUTS["linear"].pack(**product),
            order=routing.order.data_ptr(),
            starts=routing.starts.data_ptr(),
            experts=routing.num_experts,
            repeats=pairs // len(x),
            weights=weights.data_ptr(),
            all_scales=address(scales),
        )
        return y

    def head_linear(self, x: Tensor, weight: PackedExperts, y: Tensor | None = None) -> Tensor:
        """See `Weight.head_linear`."""
        if y is None:
            y = recording.empty((*x.shape[:2], weight.each[0].columns), x.dtype)
        self._head_linear(
            linear=LAYOUTS["linear"].pack(**_product(x[:, 0], weight.each[0], None, y, SWIGLU, False, None)),
            heads=x.shape[1],
            x_head=x.stride(1),
            y_head=y.stride(1),
            ldy=y.stride(0),
            weights=weight.addresses[0].data_ptr(),
        )
        return y

    def route(self, logits: Tensor, count: int, rule: RoutingRule, correction: Tensor | None = None) -> Routing:
        """See `Ops.route`."""
        (rows, experts), each = logits.shape, count + rule.shared
        ids, order = (recording.empty((rows * each,), torch.int32) for _ in range(2))
        weights = recording.empty((rows, each), torch.float32)
        starts = recording.empty((experts + rule.shared + 1,), torch.int32)
        outputs = {"ids": ids, "weights": weights, "order": order, "starts": starts}
        sizes = {"rows": rows, "experts": experts, "count": count}
        given = addresses(logits=logits.contiguous(), **outputs)
        self._route(**given, correction=address(correction), **sizes, **rule._asdict())
        return Routing(ids.view(rows, each), weights, order, starts)

    def combine(self, x: Tensor, routing: Routing, shared: Tensor | None = None, *, float32: bool = False) -> Tensor:
        """See `Ops.combine`."""
        (rows, count), n = routing.weights.shape, x.shape[1]
        y = recording.empty((rows, n), torch.float32 if float32 else x.dtype)
        sizes = {"rows": rows, "count": count, "n": n, "bf16": x.dtype is torch.bfloat16, "wide": float32}
        self._combine(**addresses(x=x, weights=routing.weights, y=y), shared=address(shared), **sizes)
        return y

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None) -> Tensor:
        """Norm of `x` [M, D] times `weight`; with a contiguous residual, that of their sum, which it becomes."""
        m, d = x.shape
        out = recording.empty((m, d), x.dtype)
        self._rms_norm(
            x=x.data_ptr(),
            ldx=x.stride(0),
            residual=address(residual),
            w=weight.data_ptr(),
            out=out.data_ptr(),
            m=m,
            d=d,
            eps=eps,
            bf16=x.dtype is torch.bfloat16,
            w_bf16=weight.dtype is torch.bfloat16,
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
        tokens = qkv.shape[0]
        q = recording.empty((tokens, num_heads, k_cache.shape[3]), qkv.dtype)
        self._rope_and_store(
            cache=_cache(k_cache, v_cache, scales),
            qkv=qkv.data_ptr(),
            ldqkv=qkv.stride(0),
            positions=positions.data_ptr(),
            slots=slots.data_ptr(),
            positions64=positions.dtype is torch.int64,
            slots64=slots.dtype is torch.int64,
            cos=cos.data_ptr(),
            sin=sin.data_ptr(),
            q_weight=address(q_norm),
            k_weight=address(k_norm),
            eps=eps,
            q_out=q.data_ptr(),
            tokens=tokens,
            heads=num_heads,
            max_position=cos.shape[0],
            bf16=qkv.dtype is torch.bfloat16,
        )
        return q

    def latent_rope_and_store(
        self,
        q: Tensor,
        kv: Tensor,
        positions: Tensor,
        cos: Tensor,
        sin: Tensor,
        slots: Tensor,
        cache: Tensor,
        norm: Tensor,
        eps: float,
    ) -> Tensor:
        """See `Ops.latent_rope_and_store`. `cos`, `sin`: fp32, contiguous; positions and slots are int32."""
        (tokens, heads, q_dim), dim = q.shape, cache.shape[3]
        out = recording.empty((tokens, heads, dim), q.dtype)
        self._latent_rope_and_store(
            cache=_cache(cache, cache, UNSCALED, dim - 2 * cos.shape[1]),
            **addresses(q=q, keys=kv, positions=positions, slots=slots, cos=cos, sin=sin, norm=norm, q_out=out),
            ldq=q.stride(0),
            ldkeys=kv.stride(0),
            q_d=q_dim,
            eps=eps,
            tokens=tokens,
            heads=heads,
            max_position=cos.shape[0],
            bf16=q.dtype is torch.bfloat16,
        )
        return out

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
        branches: tuple[Tensor, Tensor, int | Tensor] | None = None,
        first: int = 0,
        window: int = 0,
        scales: KVScales = UNSCALED,
        sinks: Tensor | None = None,
        value_dim: int | None = None,
        tree: tuple[Tensor, TreePaths] | None = None,
    ) -> Tensor:
        """Causal attention of `q` [T, H, D] over paged caches -> [T, H, D], or `value_dim` columns in place of D: then
        both caches are the same, and values are the first columns of keys.

        `query_start` [S+1], `context_len` [S], `block_tables` [rows, blocks] and `table_rows` [S] (each sequence's row
        of them) are int32. The queries of a sequence are its last positions; `context_len` counts them. Heads of a row
        of `q` must be contiguous.

        `branches`: positions and slots (int32 [T]; slot < 0: padding) of queries that are the newest tokens of
        branches, and how many tokens each branch has before it (int32 [T] where they differ). A query sees its
        sequence up to the branch, then the branch; `context_len` is not used. `tree`: positions of all queries, and
        the paths of those that are nodes of trees. `first`: positions of a sequence before it are not
        seen. `window`: positions that a query sees, its own included; 0: all. `sinks`: see `Ops.attention`.
        """
        if sinks is not None and (sinks.dtype is not torch.float32 or sinks.shape != q.shape[1:2]):
            raise TypeError(f"sinks are {sinks.dtype} {tuple(sinks.shape)}, not a float32 for each head")
        tokens, heads, d = q.shape
        out = recording.empty((tokens, heads, value_dim or d), q.dtype)
        positions, slots, depth = branches or (None, None, 0)
        paths, decided = None, None
        if tree is not None:
            positions, (paths, decided, slots) = tree
        self._paged_attention(
            cache=_cache(k_cache, v_cache, scales, value_dim),
            q=q.data_ptr(),
            ldq=q.stride(0),
            out=out.data_ptr(),
            query_start=query_start.data_ptr(),
            context_len=context_len.data_ptr(),
            block_tables=block_tables.data_ptr(),
            table_rows=table_rows.data_ptr(),
            table_stride=block_tables.stride(0),
            tokens=tokens,
            sequences=table_rows.shape[0],
            tables=block_tables.shape[0],
            columns=block_tables.shape[1],
            heads=heads,
            scale=scale * scales.k,
            sinks=address(sinks),
            positions=address(positions),
            slots=address(slots),
            depth=depth if isinstance(depth, int) else 0,
            depths=address(None if isinstance(depth, int) else depth),
            paths=address(paths),
            decided=address(decided),
            path_columns=0 if paths is None else paths.shape[1],
            path_rows=0 if slots is None else len(slots),
            first=first,
            window=window,
            bf16=q.dtype is torch.bfloat16,
        )
        return out


def addresses(**tensors: Tensor) -> dict[str, int]:
    return {name: tensor.data_ptr() for name, tensor in tensors.items()}


def address(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


def _product(
    x: Tensor, packed: PackedWeight, bias: Tensor | None, y: Tensor, glu: GLU, float32: bool, row_scales: Tensor | None
) -> dict[str, Any]:
    """The fields of a `linear`."""
    if x.dtype is not packed.dtype or x.shape[1] != packed.k:
        shape = f"{packed.dtype} and {packed.k} wide"
        raise TypeError(f"the input is {x.dtype} and {x.shape[1]} wide, the weight {shape}")
    return {
        "weight": packed.fields,
        "x": x.data_ptr(),
        "ldx": x.stride(0),
        "bias": address(bias),
        "y": y.data_ptr(),
        "m": x.shape[0],
        "glu": _glu(glu),
        "wide": float32,
        "row_scales": address(row_scales),
        "row_groups": 0 if row_scales is None else row_scales.shape[1],
    }


@functools.cache
def _glu(glu: GLU) -> bytes:
    return LAYOUTS["glu"].pack(**glu._asdict())


def _cache(k: Tensor, v: Tensor, scales: KVScales, value_dim: int | None = None) -> bytes:
    blocks, block_size, kv_heads, d = k.shape
    return LAYOUTS["cache"].pack(
        k_cache=k.data_ptr(),
        v_cache=v.data_ptr(),
        cache_blocks=blocks,
        block_size=block_size,
        kv_heads=kv_heads,
        d=d,
        value_d=value_dim or d,
        kv=_STORAGE[k.dtype],
        k_scale=scales.k,
        v_scale=scales.v,
    )


def trim_heap() -> None:
    """Gives freed memory back to the system, which glibc keeps otherwise: after a model was loaded."""
    with suppress(OSError, AttributeError, TypeError):  # other systems do not have it
        ctypes.CDLL(None).malloc_trim(0)
