"""Instruction sets of the CPU kernels: those of x86 run everywhere with emulated intrinsics.

Sums of integers are exact, so all of them have the bits of the native kernels for quantised weights; products of floats
are added in an order of their own. What this cannot catch: a processor that does not do what its manual says.
"""

from __future__ import annotations

import ctypes
import hashlib
import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from bits import same_bits
from chains import HIDDEN, quantized_layer
from conftest import mostly_slow
from gguf_files import SIZES, random_blocks
from stored_codes import CODES, some_codes
from tree_batches import Tree, check_tree

from ssd.kernels import cache
from ssd.kernels.cpu import build, library, variants
from ssd.kernels.cpu.kernels import Kernels
from ssd.kernels.cpu.ops import CpuOps
from ssd.kernels.cpu.recording import Recordings
from ssd.kernels.cpu.threads import use_threads
from ssd.kernels.cpu.variants import Variant
from ssd.kernels.ops import HeadShape
from ssd.layers.formats.gguf import BLOCKS

EMULATED = Path(__file__).with_name("emulated_x86")
MACROS = {
    "amx": ("__AVX512F__", "__AVX512VNNI__", "__AMX_INT8__", "__AMX_BF16__"),
    "avx512-vnni": ("__AVX512F__", "__AVX512VNNI__"),
    "avx512": ("__AVX512F__",),
    "avx-vnni": ("__AVX2__", "__FMA__", "__AVXVNNI__"),
    "avx2": ("__AVX2__", "__FMA__"),
}
QUICKLY = ("-O0", "-Dalways_inline=unused")  # compiles in a second, where inlining everything takes a minute
OWN = [each.name for each in variants.usable()[1:] if each.name not in (*MACROS, "sse2")]  # sse2 rounds products
ROWS = (1, 4, 5, 16, 17, 35)


@pytest.fixture(scope="module")
def native() -> Kernels:
    return library.load()


@pytest.fixture(scope="module", params=mostly_slow([*MACROS, *OWN], fast={"amx", "avx512", "avx-vnni"}))
def other(request: pytest.FixtureRequest, native: Kernels) -> Kernels:
    name = request.param
    if name not in MACROS:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("SSD_CPU_VARIANT", name)
            return library.build()
    compiler = build.find_compiler() or []
    emulated = Variant(name, flags=(*QUICKLY, f"-I{EMULATED}", *(f"-D{macro}" for macro in MACROS[name])))
    intrinsics = hashlib.sha256(b"".join(file.read_bytes() for file in sorted(EMULATED.iterdir())))
    stem = f"emulated-{build._key(compiler, emulated)}-{intrinsics.hexdigest()[:20]}"
    path = cache.compiled(stem, ".so", lambda: build._compile(compiler, emulated))
    return Kernels(ctypes.CDLL(str(path)), name)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_integer_codes_have_the_same_bits_in_every_variant(native: Kernels, other: Kernels, dtype: torch.dtype) -> None:
    """And rows have them in any company. Depths that are no multiple of a tile's, groups that are, gate and scales."""
    cases = [(code, group, offsets, 512) for code, group, offsets in CODES if code != "fp8"]
    cases += [("int4", 0, False, 200), ("int8", 0, True, 37), ("uint4", 96, True, 576)]
    for i, (code, group, offsets, depth) in enumerate(cases):
        codes = some_codes(code, 70, depth, group or depth, offsets=offsets, device=torch.device("cpu"))
        if i % 2:  # scales in float16
            rounded = [None if each is None else each.half().float() for each in (codes.scales, codes.offsets)]
            codes = replace(codes, scales=rounded[0], offsets=rounded[1])
        x, tokens = torch.randn(ROWS[-1], depth).to(dtype), torch.tensor([3, 69])
        scales = torch.rand(ROWS[-1], 1) + 0.5
        for gated in (False, True):
            ours, theirs = (each.pack_codes(codes, dtype, gated, coarse=i % 3 == 0) for each in (native, other))
            expected = native.linear(x, ours, float32=True, row_scales=scales)
            for rows in ROWS:
                found = other.linear(x[:rows], theirs, float32=True, row_scales=scales[:rows])
                if gated:  # an exponential has the machine's own vectors
                    torch.testing.assert_close(found, expected[:rows], rtol=1e-5, atol=1e-4)
                else:
                    assert same_bits(found, expected[:rows]), (code, group, depth, rows)
                    assert same_bits(native.embedding(ours, tokens), other.embedding(theirs, tokens))


@pytest.mark.parametrize("dtype", mostly_slow([torch.float32, torch.bfloat16], fast={torch.bfloat16}))
def test_gguf_blocks_have_the_same_bits_in_every_variant(native: Kernels, other: Kernels, dtype: torch.dtype) -> None:
    """With rows rounded to 8 bits. All numbers of rows that a tile has of its own."""
    x = torch.randn(35, 512).to(dtype)
    for kind, form in BLOCKS.items():
        codes = form.codes(
            {"weight": torch.from_numpy(random_blocks(kind, 70, 512, sizes=SIZES.get(kind, (1e-2, -0.07))))}
        )
        ours, theirs = (each.pack_codes(codes, dtype, coarse=True) for each in (native, other))
        expected = native.linear(x, ours, float32=True)
        for rows in (1, 2, 3, 4, 5, 7, 8, 9, 17, 35):
            assert same_bits(native.linear(x[:rows], ours, float32=True), expected[:rows]), (kind, rows)
            assert same_bits(other.linear(x[:rows], theirs, float32=True), expected[:rows]), (kind, rows)


@pytest.mark.parametrize("dtype", mostly_slow([torch.float32, torch.bfloat16], fast={torch.bfloat16}))
@pytest.mark.parametrize(("n", "k"), mostly_slow([(131, 63), (70, 577), (64, 64)], fast={(70, 577)}))
def test_products_of_every_variant(other: Kernels, dtype: torch.dtype, n: int, k: int) -> None:
    """Against sums in double precision; a row's bits in any company; rows that are looked up."""
    torch.manual_seed(0)
    weight, x = torch.randn(n, k).to(dtype), torch.randn(50, k).to(dtype)
    packed = other.pack_linear(weight)
    whole, exact = other.linear(x, packed, float32=True), x.double() @ weight.double().T
    assert (whole - exact).norm() < 1e-6 * exact.norm()
    for rows in (*ROWS, 33, 48):
        assert same_bits(other.linear(x[:rows], packed, float32=True), whole[:rows])
    assert same_bits(other.embedding(packed, torch.tensor([0, n - 1])), weight[[0, n - 1]])


@pytest.mark.parametrize("window", mostly_slow([0, 70], fast={70}))
@pytest.mark.parametrize(
    ("heads", "kv_heads", "d"), mostly_slow([(6, 2, 64), (3, 3, 32), (4, 1, 128)], fast={(6, 2, 64)})
)
def test_attention_of_every_variant(other: Kernels, heads: int, kv_heads: int, d: int, window: int) -> None:
    """Against sums in double precision; a row's bits in any company. Rows of a sequence, and of branches."""
    torch.manual_seed(0)
    block_size, length, depth = 16, 150, 4
    k, v = (torch.randn(40, block_size, kv_heads, d).bfloat16() for _ in range(2))
    blocks = torch.randperm(30)[: -(-length // block_size)].int()[None]
    table_row, q = torch.zeros(1, dtype=torch.int32), torch.randn(20, heads, d).bfloat16()

    def ints(*values: int) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32)

    def attend(first: int, count: int, branches: bool) -> torch.Tensor:
        rows, own = q[first : first + count], None
        positions, slots = [length + depth] * count, [30 * block_size + 8 * row + depth for row in range(20)]
        if branches:
            own = ints(*positions), ints(*slots[first : first + count]), depth
        seen = length if branches else length - 20 + first + count
        places = (ints(0, count), ints(seen), blocks, table_row)
        return other.paged_attention(rows, k, v, *places, d**-0.5, own, window=window)

    for branches in (False, True):
        whole = attend(0, 20, branches)
        for first, count in ((0, 1), (19, 1), (3, 5), (7, 13)):
            assert same_bits(attend(first, count, branches), whole[first : first + count]), (first, count, branches)
        slots = [int(blocks[0, p // block_size]) * block_size + p % block_size for p in range(length)]
        for row in range(20):
            seen = [*slots, *(30 * block_size + 8 * row + i for i in range(depth + 1))] if branches else slots
            seen = seen[: None if branches else length - 19 + row][-window if window else 0 :]
            group = heads // kv_heads
            keys, values = (each.double().flatten(0, 1)[seen].repeat_interleave(group, 1) for each in (k, v))
            weights = torch.einsum("hd,phd->hp", q[row].double(), keys).mul(d**-0.5).softmax(-1)
            expected = torch.einsum("hp,phd->hd", weights, values)
            assert (whole[row] - expected).norm() < 1e-2 * expected.norm(), (row, branches)


def test_branches_of_several_depths_have_the_bits_of_those_of_one(other: Kernels) -> None:
    """As in a joined pass of several draft runs. Catches a row that sees what another one's depth says."""
    torch.manual_seed(0)
    heads, kv_heads, d, block_size, length = 6, 2, 64, 16, 70
    k, v = (torch.randn(20, block_size, kv_heads, d).bfloat16() for _ in range(2))
    blocks, q = torch.arange(5, dtype=torch.int32)[None], torch.randn(20, heads, d).bfloat16()

    def attend(depths: torch.Tensor, given: int | torch.Tensor) -> torch.Tensor:
        slots = 5 * block_size + 8 * torch.arange(20, dtype=torch.int32) + depths
        start, row = torch.tensor([0, 20], dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
        places = start, torch.zeros(1, dtype=torch.int32), blocks, row
        return other.paged_attention(q, k, v, *places, d**-0.5, (length + depths, slots.int(), given))

    several = torch.arange(20, dtype=torch.int32) * 3 % 8
    found = attend(several, several)
    for depth in range(8):
        own = several == depth
        assert same_bits(found[own], attend(torch.full_like(several, depth), depth)[own]), depth


@pytest.mark.parametrize(("decided", "window"), mostly_slow([(2, 0), (64, 0), (127, 70), (300, 0)], fast={(127, 70)}))
def test_nodes_of_trees_have_the_bits_of_chains(other: Kernels, decided: int, window: int) -> None:
    torch.manual_seed(0)
    dice = random.Random(decided)
    tree = Tree(decided, HeadShape(6, 2, 64, window=window), torch.bfloat16, torch.device("cpu"), dice)
    for threads in (1, 3):
        with use_threads(threads):
            check_tree(CpuOps(other), tree, dice)


@pytest.mark.slow
@pytest.mark.parametrize("size", [1.0, 2.0**-126])  # of values: sums of the latter are flushed to zeros of both signs
@pytest.mark.parametrize(("block_size", "depth"), [(16, 2), (16, 40), (8, 5)])
def test_attention_has_the_same_bits_in_any_company(other: Kernels, block_size: int, depth: int, size: float) -> None:
    """Queries few and many, of several sequences and branches, by one thread and several. Unused slots hold NaN."""
    torch.manual_seed(0)
    heads, kv_heads, d, lengths, forks = 6, 2, 64, (200, 48, 90), 21
    q, sinks = torch.randn(3, 30, heads, d).bfloat16(), torch.linspace(-2, 2, heads)
    k, v = torch.full((2, 4000 // block_size, block_size, kv_heads, d), torch.nan).bfloat16()
    blocks = torch.randperm(800 // block_size)[: 3 * 208 // block_size].reshape(3, -1)
    slots = (blocks[..., None] * block_size + torch.arange(block_size)).flatten(1)
    own = 800 + torch.arange(3 * 30).reshape(3, 30, 1) * 32 + torch.arange(-depth, 1) + depth  # they may overlap
    for used in (*(slots[i, :n] for i, n in enumerate(lengths)), own.flatten()):
        k.flatten(0, 1)[used] = torch.randn(len(used), kv_heads, d).bfloat16()
        v.flatten(0, 1)[used] = (torch.randn(len(used), kv_heads, d) * size).bfloat16()

    def ints(values: list[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32)

    def attend(rows: list[tuple[int, int, int]], branches: bool) -> torch.Tensor:
        """Of each sequence, rows [begin, end) of its last 30; of branches, which leave it before its last tokens."""
        starts = ints([0, *(end - begin for _, begin, end in rows)]).cumsum(0).int()
        context = ints([lengths[seq] - 30 + end for seq, _, end in rows])
        pairs = [(seq, row) for seq, begin, end in rows for row in range(begin, end)]
        positions = ints([lengths[seq] - row % forks + depth for seq, row in pairs])
        newest = ints([int(own[seq, row, -1]) for seq, row in pairs])
        places = (starts, context, blocks.int(), ints([seq for seq, _, _ in rows]), d**-0.5)
        queries = torch.stack([q[seq, row] for seq, row in pairs])
        return other.paged_attention(
            queries, k, v, *places, (positions, newest, depth) if branches else None, sinks=sinks
        ).view(torch.int16)

    for branches in (False, True):
        together = [(0, 0, 30), (1, 0, 30), (2, 0, 30)]
        whole = attend(together, branches).reshape(3, 30, heads, d)
        for threads in (1, 2, 5, 16):  # which share a task if there are few
            with use_threads(threads):
                assert same_bits(attend(together, branches).reshape(whole.shape), whole), threads
                for begin, end in ((29, 30), (2, 9)):
                    assert same_bits(attend([(0, begin, end)], branches), whole[0, begin:end]), (threads, begin)
        for seq in range(3):
            for begin, end in (*((row, row + 1) for row in range(30)), (4, 6), (1, 4), (9, 14), (13, 30)):
                assert same_bits(attend([(seq, begin, end)], branches), whole[seq, begin:end]), (seq, begin, end)
        mixed = [(2, 29, 30), (0, 12, 20), (1, 0, 3)]
        assert same_bits(attend(mixed, branches), torch.cat([whole[seq, begin:end] for seq, begin, end in mixed]))
        for seq, row in ((0, 0), (0, 29), (1, 17), (2, 5)) if size == 1.0 else ():
            count = lengths[seq] - row % forks if branches else lengths[seq] - 29 + row
            seen = torch.cat((slots[seq, :count], own[seq, row] if branches else own[0, 0, :0]))
            keys, values = (x.double().flatten(0, 1)[seen].repeat_interleave(heads // kv_heads, 1) for x in (k, v))
            scores = torch.einsum("hd,phd->hp", q[seq, row].double(), keys).mul(d**-0.5)
            weights = torch.cat((scores, sinks.double()[:, None]), 1).softmax(-1)[:, :-1]
            expected = torch.einsum("hp,phd->hd", weights, values)
            assert (whole[seq, row].view(torch.bfloat16) - expected).norm() < 1e-2 * expected.norm(), (seq, row)


@pytest.mark.slow
@pytest.mark.parametrize(("group", "coarse"), [(32, True), (128, True), (128, False)])
def test_repeated_calls_have_the_same_bits_in_every_variant(other: Kernels, group: int, coarse: bool) -> None:
    """Rows of products are packed by the call before."""
    layer = quantized_layer(other, torch.bfloat16, group, coarse=coarse)
    for rows in (1, 4, 8, 16, 17):
        recordings, x = Recordings(other.repeat), torch.empty(rows, HIDDEN, dtype=torch.bfloat16)
        for threads in (1, 1, 1, 5):
            x.copy_(torch.randn(rows, HIDDEN))
            expected = layer(x)
            with use_threads(threads):
                found = recordings.run("key", lambda x=x: layer(x), None)
            assert same_bits(found, expected), (rows, threads)
