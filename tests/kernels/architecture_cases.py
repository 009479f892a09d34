"""Kernels of all sizes, compiled for GPUs that need not be there. Run by `test_compiling.py`, in its own process.

Tensors have no memory (torch's device `meta`), and no kernel is run.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from compiling_cases import FakeDriver
from triton import knobs
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from ssd.kernels.codes import Codes, CodeType, bits_of
from ssd.kernels.ops import Branches, DeviceBatch, ExpertOutputs, HeadShape, Rope, TreePaths
from ssd.kernels.state import Candidates, LastRows, StateView, TreeRows
from ssd.kernels.triton import (
    attention,
    elementwise,
    experts,
    features,
    latent,
    linear,
    packing,
    rounds,
    row_codes,
    runs,
    sampling,
    trees,
)
from ssd.kernels.triton import codes_linear as codes_linear
from ssd.kernels.weights import GLU, RoutingRule, RowRounding
from ssd.sampling import noise
from ssd.sampling.sampler import SamplingColumns

META = torch.device("meta")
HEADS = [HeadShape(32, 8, 128), HeadShape(14, 2, 64)]
SHARED = {80: 163 << 10, 89: 99 << 10, 90: 227 << 10}  # bytes, by architecture
SHAPES = [(6144, 4096, False), (4096, 4096, False), (28672, 4096, True), (4096, 14336, False), (32000, 896, False)]
ROWS = (1, 17, 33, 64, 100, 128, 300, 600)


@pytest.fixture(params=SHARED)
def architecture(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[int]:
    """Launches compile, and fail where a program needs more shared memory than the GPU has, or where its products do
    not take the depth in order: Triton orders it by the width of what was loaded (`kWidth`), on some GPUs in some
    kernels only, and then decoding and prefill have different bits."""
    limit = SHARED[request.param]
    launch = JITFunction.run

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        kernel = launch(self, *args, grid=grid, warmup=True, **kwargs)
        assert kernel.metadata.shared <= limit, f"{self.__name__} needs {kernel.metadata.shared} bytes of shared memory"
        assert not re.search(r"kWidth = [48]", kernel.asm["ttgir"]), f"{self.__name__} sums in another order"
        return kernel

    monkeypatch.setattr(knobs.cache, "dir", str(tmp_path))
    for module in (linear, codes_linear, experts):
        monkeypatch.setattr(module, "shared_memory", lambda device: limit)
    if request.param >= 90:
        for module in (attention, elementwise, experts, latent, linear, row_codes):
            monkeypatch.setattr(module, "early_launch", early_launch)
    monkeypatch.setattr(JITFunction, "run", compile_only)
    before = driver._active
    # A device each: Triton keeps what a function was compiled for by device.
    driver.set_active(FakeDriver(request.param, device=request.param))  # type: ignore[arg-type]
    yield request.param
    driver._active = before


def early_launch(device: torch.device, wanted: bool = True) -> dict[str, bool]:
    """As on a GPU."""
    return {"EARLY": True, "launch_pdl": True} if wanted else {"EARLY": False}


def empty(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device=META)


def ints(*shape: int) -> torch.Tensor:
    return empty(*shape, dtype=torch.int32)


def batch(*, prefill: bool = False, branches: Branches | None = None, tree: TreePaths | None = None) -> DeviceBatch:
    return DeviceBatch(
        token_ids=ints(8),
        positions=ints(8),
        slot_mapping=ints(8),
        query_start=ints(2),
        context_len=ints(1),
        block_tables=ints(1, 64),
        table_rows=ints(1),
        tiles=ints(2, 0 if prefill else 2),
        prefill_tiles=ints(2, 2) if prefill else None,
        logit_rows=None,
        branches=branches,
        tree=tree,
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_products(architecture: int, dtype: torch.dtype) -> None:
    for columns, depth, gated in SHAPES:
        for rows in ROWS:
            out = torch.float32 if columns == 32000 else None
            linear.linear(
                empty(rows, depth, dtype=dtype), empty(columns, depth, dtype=dtype), gated=gated, out_dtype=out
            )


def scales_of(rows: int, depth: int, group: int) -> torch.Tensor:
    """With memory: `packing` looks at them. Those of small groups are bfloat16 numbers."""
    return torch.ones(rows, depth // group) + (0.001 if group > 32 else 0)


def grouped(
    kind: CodeType, columns: int, depth: int, group: int, numbers: packing.NumberKind, dtype: torch.dtype, strips: bool
) -> packing.PackedCodes:
    """As `packing.pack` makes it; K types and zero points have offsets."""
    parts = 32 // bits_of(kind)
    block = (256 if strips else 128) // parts
    words = ints(depth // 256, columns // 16, 32 // parts, 32, 4) if strips else ints(columns, depth // parts)
    data = packing.GroupNumbers(
        empty(1, columns // 16, 64, dtype=torch.uint8), numbers, numbers in ("factors", "zeros")
    )
    return packing.PackedCodes(words, None, data, None, kind, dtype, columns, depth, block, group, False)


@pytest.mark.parametrize(
    ("kind", "group", "dtype"),
    [
        ("fp8", 4096, torch.bfloat16),
        ("int8", 4096, torch.float16),
        ("int4", 128, torch.bfloat16),
        ("fp4", 32, torch.bfloat16),
    ],
)
def test_quantized_products(architecture: int, kind: CodeType, group: int, dtype: torch.dtype) -> None:
    depth, columns = 4096, 8192
    scales = scales_of(columns, depth, group)
    weight = packing.pack(Codes(empty(columns, depth, dtype=torch.uint8), scales, kind, depth), dtype)
    for rows in (1, 64):
        x, row_scales = empty(rows, depth, dtype=dtype), empty(rows, 1, dtype=torch.float32)
        codes_linear.codes_linear(x, weight)
        codes_linear.codes_linear(x, weight, gated=True, row_scales=row_scales)
    codes_linear.widened(weight, dtype, index=empty(5, dtype=torch.int64))


@pytest.mark.parametrize(
    ("kind", "group", "numbers", "dtype"),
    [
        ("fp8", 128, "float32", torch.float16),
        ("int8", 16, "factors", torch.bfloat16),
        ("uint4", 128, "zeros", torch.bfloat16),
        ("uint4", 32, "zeros", torch.float32),
        ("uint4", 32, "factors", torch.bfloat16),
    ],
)
def test_products_of_weights_in_groups(
    architecture: int, kind: CodeType, group: int, numbers: packing.NumberKind, dtype: torch.dtype
) -> None:
    depth, columns = 4096, 8192
    weight = grouped(kind, columns, depth, group, numbers, dtype, strips=False)
    for rows in (1, 64):
        codes_linear.codes_linear(empty(rows, depth, dtype=dtype), weight, gated=rows == 64)
    codes_linear.widened(weight, dtype, outputs=slice(16, 40))
    codes_linear.widened(grouped(kind, columns, depth, group, numbers, dtype, strips=True), dtype, outputs=slice(0, 40))


@pytest.mark.parametrize(
    ("kind", "group", "dtype"),
    [
        (None, 0, torch.bfloat16),
        (None, 0, torch.float32),
        ("fp8", 0, torch.bfloat16),
        ("fp4", 32, torch.bfloat16),
        ("int4", 128, torch.bfloat16),
        ("int4", 32, torch.bfloat16),
        ("fp8", 128, torch.bfloat16),
        ("uint4", 128, torch.bfloat16),
    ],
)
def test_experts(architecture: int, kind: CodeType | None, group: int, dtype: torch.dtype) -> None:
    """Products of 32 experts with 1024 inner dimensions, from 1 row on to those of a prompt."""
    for rows in (1, 64, 200, 2000):
        logits = experts.router(empty(rows, 2048, dtype=dtype), empty(32, 2048, dtype=dtype), empty(32, dtype=dtype))
        routing = experts.route(logits, 4, RoutingRule(rows == 1))
        for columns, depth, inputs, glu in ((2048, 2048, rows, GLU(1.702, 7.0, 1.0)), (2048, 1024, 4 * rows, None)):
            weight: torch.Tensor | packing.PackedCodes = empty(32 * columns, depth, dtype=dtype)
            if kind == "uint4":
                weight = grouped(kind, 32 * columns, depth, group, "zeros", dtype, strips=False)
            elif kind is not None:
                scales = scales_of(32 * columns, depth, group or depth)
                codes = Codes(weight.to(torch.uint8), scales, kind, depth)
                weight = packing.pack(codes, dtype, strips=group > 0, weights=False)
            x, bias = empty(inputs, depth, dtype=dtype), empty(32 * columns, dtype=dtype)
            experts.expert_linear(x, weight, routing, bias, glu=glu)
        outputs = ExpertOutputs(empty(4 * rows, 2048, dtype=dtype), routing)
        experts.combine(*outputs)
        elementwise.combine_and_norm(outputs, empty(2048, dtype=dtype), 1e-5, empty(rows, 2048, dtype=dtype))


@pytest.mark.parametrize(
    ("dtype", "heads", "fp8"),
    [
        *((dtype, heads, False) for dtype in (torch.bfloat16, torch.float16) for heads in HEADS),
        *((dtype, heads, True) for dtype, heads in zip((torch.bfloat16, torch.float16), HEADS, strict=True)),
    ],
    ids=str,
)
def test_attention(architecture: int, dtype: torch.dtype, heads: HeadShape, fp8: bool) -> None:
    """KV in fp8 is a target's, which has no branches; some models have sinks."""
    sinks = empty(heads.num_heads, dtype=torch.float32) if dtype is torch.bfloat16 and heads.head_dim == 64 else None
    workspace = attention.Workspace([heads], META)
    workspace.capability = divmod(architecture, 10)
    q = empty(8, heads.num_heads, heads.head_dim, dtype=dtype)
    for block_size in (16, 64):
        kv = empty(64, block_size, heads.num_kv_heads, heads.head_dim, dtype=torch.float8_e4m3fn if fp8 else dtype)
        for own in (heads, replace(heads, window=4096)):
            attention.paged_attention(q, batch(prefill=True), own, kv, kv, workspace, sinks=sinks)
            attention.paged_attention(q, batch(), own, kv, kv, workspace, sinks=sinks)
            paths = TreePaths(ints(8, 5), ints(8), ints(8))
            attention.paged_attention(q, batch(tree=paths), own, kv, kv, workspace, sinks=sinks)
        for own in (heads, replace(heads, first_position=1), replace(heads, window=4096)) if not fp8 else ():
            attention.paged_attention(q, batch(branches=Branches(3, 8)), own, kv, kv, workspace, sinks=sinks)
        if not fp8:
            attention.paged_attention(q, batch(), replace(heads, first_position=1), kv, kv, workspace)
            planned = batch()
            workspace.items(planned, heads, before_pass=True)
            attention.paged_attention(q, planned, heads, kv, kv, workspace, sinks=sinks, lets_next=True)
    if architecture == 90 and not fp8:
        from ssd.kernels.triton.prefill import prefill_attention

        prefill_attention(q, q.flatten(1), batch(prefill=True), heads, kv, kv, 1.0, sinks)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("num_heads", [20, 64, 128])
def test_latent_attention(architecture: int, dtype: torch.dtype, num_heads: int) -> None:
    """Of GLM-4.7-Flash, Kimi K2 and DeepSeek-V3, with their router."""
    if dtype is torch.float32 and architecture != 90:
        pytest.skip("an engine refuses it")
    heads, key_dim = HeadShape(num_heads, 1, 576, latent_dim=512, softmax_scale=0.1), 128
    workspace = attention.Workspace([heads], META)
    workspace.capability = divmod(architecture, 10)
    q, cache = empty(8, num_heads, 576, dtype=dtype), empty(64, 64, 1, 576, dtype=dtype)
    for own in (batch(prefill=True), batch(), batch(branches=Branches(3, 8))):
        latent.latent_attention(q, own, heads, cache, workspace)
    angles = empty(512, 32, dtype=torch.float32)
    rope = Rope(angles, angles, k_norm=empty(512, dtype=dtype), eps=1e-6)
    for rows in (1, 100):
        query = empty(rows, num_heads, key_dim + 64, dtype=dtype)
        queries = elementwise.latent_rope_and_store(query, empty(rows, 576, dtype=dtype), batch(), rope, heads, cache)
        linear.head_linear(query[:, :, :key_dim], empty(num_heads * 512, key_dim, dtype=dtype), queries[:, :, :512])
        linear.head_linear(empty(rows, num_heads, 512, dtype=dtype), empty(num_heads * key_dim, 512, dtype=dtype))
        logits, correction = empty(rows, 256, dtype=torch.float32), empty(256, dtype=torch.float32)
        for shared in (0, 1):
            routing = experts.route(logits, 8, RoutingRule(True, True, 8, 4, 2.5, shared), correction)
            beside = None if shared else empty(rows, 2048, dtype=torch.float32)
            outputs = ExpertOutputs(empty((8 + shared) * rows, 2048, dtype=dtype), routing, beside)
            experts.combine(*outputs)
            elementwise.combine_and_norm(outputs, empty(2048, dtype=dtype), 1e-5, empty(rows, 2048, dtype=dtype))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_what_is_between_products(architecture: int, dtype: torch.dtype) -> None:
    for heads, norms in zip(HEADS, (True, False), strict=True):
        dim, hidden = heads.head_dim, empty(8, 4096, dtype=dtype)
        elementwise.rms_norm(hidden, hidden[0], 1e-5, hidden)
        if architecture >= 89:
            elementwise.rms_norm_and_round(hidden, hidden[0], 1e-5, hidden)
            row_codes.rounded_rows(hidden, RowRounding(), narrow=True)
        row_codes.rounded_rows(hidden, RowRounding(group=128, powers=True))
        elementwise.silu_and_mul(hidden)
        elementwise.add_parts(empty(4 * 4096, dtype=torch.float32), 4, dtype)
        angles = empty(512, dim // 2, dtype=torch.float32)
        norm = empty(dim, dtype=dtype) if norms else None
        kv = empty(64, 64, heads.num_kv_heads, dim, dtype=dtype)
        qkv = empty(8, (heads.num_heads + 2 * heads.num_kv_heads) * dim, dtype=dtype)
        for cache in (kv, kv.to(torch.float8_e4m3fn)):
            elementwise.rope_and_store(qkv, batch(), Rope(angles, angles, norm, norm, 1e-6), heads, cache, cache)
    rows = {"row_work": ints(8), "slots": ints(4), "query_start": ints(5), "positions": ints(8)}
    kept = empty(9, 5, 4096, dtype=dtype)
    features.shift_and_keep(hidden, slot_mapping=ints(8), start=ints(9), kept=kept, **rows)
    tree = TreeRows(ints(4), ints(8), LastRows(ints(9), ints(9, 5)))
    features.shift_and_keep(hidden, slot_mapping=ints(8), start=ints(9), kept=kept, tree=tree, **rows)
    for last in (None, tree.last):
        features.before(kept, ints(4), ints(4), last, empty(4, 4096, dtype=dtype))


def test_rounds_with_trees(architecture: int) -> None:
    state = StateView(ints(9), ints(9, 500), ints(9, 12), empty(9, 12, dtype=torch.float32), ints(9), ints(9))
    parents, path, works, rows = ints(9, 12), ints(9, 12), ints(4), ints(8)
    rounds.place_nodes(
        state,
        parents=parents,
        row_work=rows,
        slots=works,
        starts=works,
        query_start=ints(5),
        slot_mapping=rows,
        logit_rows=rows,
        positions=rows,
        paths=ints(8, 5),
        shared=rows,
        before=rows,
        decided_slot=rows,
        decided=rows,
        num_drafted=rows,
        path_tokens=ints(8, 5),
    )
    rounds.accept_node(
        state,
        parents=parents,
        path=path,
        chosen=rows,
        slots=works,
        first_row=works,
        num_logits=works,
        decided_slot=rows,
        out=ints(4, 39),
        vocab_size=32000,
    )
    caches = empty(6, 2, dtype=torch.int64)
    rounds.move_accepted(
        state, path=path, slots=works, first_row=works, tables=ints(9, 40), caches=caches, block_size=64
    )
    above = empty(16, dtype=torch.int64)
    states = empty(16, 4096, dtype=torch.bfloat16)
    runs.follow_rows(above=above, caches=caches, beams=8, depth=3, first_slot=640, slots_per_branch=4, states=states)


def test_levels_of_trees(architecture: int) -> None:
    """The choice of tokens in a draft's own vocabulary, then the beams."""
    columns, n = SamplingColumns(4, 128256, META), 2
    for truncated, excluded in ((False, None), (True, ints(8 * n))):
        tokens, scores = sampling.best(
            empty(8 * n, 32000, dtype=torch.float32),
            columns,
            ints(8 * n),
            ints(8 * n),
            truncated=truncated,
            count=8,
            excluded=excluded,
            ids=ints(32000),
            constants=noise.constants(),
        )
    candidates = Candidates(ints(n, 136), empty(n, 136, dtype=torch.float32), ints(n, 136))
    own, following = (ints(n), columns.temperature), ints(8 * n, 9)
    sizes = {"children": 8, "vocab_size": 128256, "known": 128256, "sharpness": 1.2}
    _, beams = trees.grow(tokens[:n], scores[:n], *own, None, candidates, following[:, 0], first=0, **sizes)
    trees.grow(tokens, scores, *own, beams, candidates, following[:, 1], first=8, **sizes)
    slots, drafts = ints(n), ints(9, 32)
    trees.keep(candidates, slots, drafts, drafts, slots, origin=1)
