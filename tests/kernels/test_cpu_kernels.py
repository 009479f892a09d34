"""CPU kernels against plain torch, and the promise that a row's bits never depend on its company, chunks or threads."""

from __future__ import annotations

import functools
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from bits import same_bits
from conftest import mostly_slow
from reference_noise import gumbel_reference
from torch import Tensor

from ssd.kernels.cpu import build, library, variants
from ssd.kernels.cpu.kernels import Kernels
from ssd.kernels.cpu.pack import PackedWeight
from ssd.kernels.cpu.sampling import Sampling
from ssd.kernels.cpu.threads import use_threads
from ssd.kernels.ops import UNSCALED, KVScales
from ssd.sampling import noise
from ssd.sampling.sampler import Needs, Rows, Sampler, SamplingColumns

CPU = torch.device("cpu")
DTYPES = [torch.float32, torch.bfloat16]
BLOCK = 16


@pytest.fixture(scope="module")
def kernels() -> Kernels:
    return library.load()


@pytest.fixture(autouse=True)
def seeded() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.manual_seed(0)
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(threads)


def close(actual: Tensor, expected: Tensor, dtype: torch.dtype, scale: float = 1.0) -> None:
    tolerance = (1e-5 if dtype is torch.float32 else 1.2e-2) * scale
    torch.testing.assert_close(actual.double(), expected.double(), atol=tolerance, rtol=tolerance)


def rms_reference(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    normed = x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + eps)
    return weight * normed.to(x.dtype)


# ------------------------------------------------------------------------------------------------ linear


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("n", "k"), [(1, 1), (7, 5), (8, 4), (64, 64), (131, 63), (100, 577), (37, 1536)])
def test_linear(kernels: Kernels, dtype: torch.dtype, n: int, k: int) -> None:
    weight, bias = torch.randn(n, k).to(dtype), torch.randn(n).to(dtype)
    packed = kernels.pack_linear(weight)
    assert (packed.n, packed.k, packed.dtype) == (n, k, dtype)
    for m in (1, 3, 8, 21):
        x = torch.randn(m, k).to(dtype)
        exact = x.double() @ weight.double().T
        close(kernels.linear(x, packed), exact, dtype, scale=k**0.5)
        close(kernels.linear(x, packed, bias), exact + bias.double(), dtype, scale=k**0.5)


@pytest.mark.parametrize("dtype", DTYPES)
def test_embedding(kernels: Kernels, dtype: torch.dtype) -> None:
    weight, ids = torch.randn(101, 37).to(dtype), torch.tensor([0, 100, 7, 8, 63, 7])
    packed = kernels.pack_linear(weight)
    for given in (ids, ids.int(), ids[:1]):
        assert same_bits(kernels.embedding(packed, given), weight[given.long()])


@pytest.mark.parametrize("token", [-1, 101, 1 << 40])
def test_embedding_of_no_token(kernels: Kernels, token: int) -> None:
    """The last panel has room for more rows than the weight: those are no tokens either."""
    with pytest.raises(IndexError, match="vocabulary"):
        kernels.embedding(kernels.pack_linear(torch.randn(101, 37)), torch.tensor([3, token]))


def test_linear_strided_rows(kernels: Kernels) -> None:
    x, weight = torch.randn(9, 100)[:, 20:84], torch.randn(50, 80)[:, :64]
    out = kernels.linear(x, kernels.pack_linear(weight))
    assert same_bits(out, kernels.linear(x.contiguous(), kernels.pack_linear(weight.contiguous())))


def test_linear_can_leave_its_sums_in_float32(kernels: Kernels) -> None:
    x, packed = torch.randn(5, 64).bfloat16(), kernels.pack_linear(torch.randn(50, 64).bfloat16())
    wide = kernels.linear(x, packed, float32=True)
    assert wide.dtype is torch.float32
    assert same_bits(wide.bfloat16(), kernels.linear(x, packed))
    assert not torch.equal(wide.bfloat16().float(), wide)


def test_linear_non_finite(kernels: Kernels) -> None:
    for dtype in DTYPES:
        x = torch.tensor([[float("nan"), 1.0], [float("inf"), 1.0], [1.0, 2.0]]).to(dtype)
        y = kernels.linear(x, kernels.pack_linear(torch.ones(3, 2, dtype=dtype)))
        assert y[0].isnan().all()
        assert y[1].isinf().all()
        assert torch.equal(y[2], torch.full((3,), 3.0, dtype=dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("n", "k"), [(75, 129), (576, 64)])
def test_linear_rows_keep_their_bits(kernels: Kernels, dtype: torch.dtype, n: int, k: int) -> None:
    packed = kernels.pack_linear(torch.randn(n, k).to(dtype))
    gated = kernels.pack_linear(torch.randn(2 * (n // 2), k).to(dtype), gated=True)
    x = torch.randn(300, k).to(dtype)
    alone = torch.cat([kernels.linear(x[i : i + 1], packed) for i in range(300)])
    alone_gated = torch.cat([kernels.linear(x[i : i + 1], gated) for i in range(300)])
    for m in [*range(1, 41), 100, 300]:
        start = 300 - m if m % 2 else 0
        assert same_bits(kernels.linear(x[start : start + m], packed), alone[start : start + m]), m
        assert same_bits(kernels.linear(x[start : start + m], gated), alone_gated[start : start + m]), m


def test_linear_blocks_of_rows(kernels: Kernels) -> None:
    """Enough rows for several L2 blocks, at a depth that leaves few rows to a block."""
    packed, x = kernels.pack_linear(torch.randn(24, 4100)), torch.randn(70, 4100)
    whole = kernels.linear(x, packed)
    close(whole, x.double() @ unpacked(kernels, packed).double(), torch.float32, scale=64)
    assert same_bits(whole, torch.cat([kernels.linear(row[None], packed) for row in x]))


def unpacked(kernels: Kernels, packed: PackedWeight) -> Tensor:
    return kernels.linear(torch.eye(packed.k, dtype=packed.dtype), packed)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("inner", [5, 48, 77])
def test_linear_gated(kernels: Kernels, dtype: torch.dtype, inner: int) -> None:
    weight, bias = torch.randn(2 * inner, 60).to(dtype) * 0.3, torch.randn(2 * inner).to(dtype)
    packed = kernels.pack_linear(weight, gated=True)
    plain = kernels.pack_linear(weight)
    for m in (1, 4, 13):
        x = torch.randn(m, 60).to(dtype)
        for given in (None, bias):
            gate, up = kernels.linear(x, plain, given).chunk(2, dim=-1)
            close(kernels.linear(x, packed, given), F.silu(gate) * up, dtype)


def test_silu_at_the_extremes(kernels: Kernels) -> None:
    gate = torch.cat([torch.linspace(-120, 120, 4001), torch.tensor([-1e30, 1e30, 0.0, -0.0])])
    packed = kernels.pack_linear(torch.stack([gate, torch.ones_like(gate)], 0).reshape(-1, 1), gated=True)
    expected = F.silu(gate.double())
    torch.testing.assert_close(kernels.linear(torch.ones(1, 1), packed)[0].double(), expected, rtol=1e-6, atol=1e-36)


def test_pack_refuses(kernels: Kernels) -> None:
    refused = [(torch.ones(4), False), (torch.ones(4, 4).half(), False), (torch.ones(4, 0), False)]
    for weight, gated in [*refused, (torch.ones(3, 4), True)]:
        with pytest.raises(ValueError, match=r"pack|even"):
            kernels.pack_linear(weight, gated)


# ------------------------------------------------------------------------------------------------ rms_norm


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("d", [1, 13, 64, 576, 2051])
def test_rms_norm(kernels: Kernels, dtype: torch.dtype, d: int) -> None:
    x, weight = torch.randn(33, d).to(dtype), torch.rand(d).to(dtype)
    out = kernels.rms_norm(x, weight, 1e-5)
    close(out, rms_reference(x, weight, 1e-5), dtype)
    assert same_bits(out, torch.cat([kernels.rms_norm(x[i : i + 1], weight, 1e-5) for i in range(33)]))


@pytest.mark.parametrize("dtype", DTYPES)
def test_rms_norm_adds_to_the_residual_stream(kernels: Kernels, dtype: torch.dtype) -> None:
    """The sum is rounded once, and kept; its norm has the bits of the norm of that sum."""
    x, residual, weight = (torch.randn(*shape).to(dtype) for shape in ((33, 2000), (33, 1000), (1000,)))
    x = x[:, :1000]
    total = residual + x
    assert same_bits(kernels.rms_norm(x, weight, 1e-5, residual), kernels.rms_norm(total, weight, 1e-5))
    assert same_bits(residual, total)


# ------------------------------------------------------------------------------------------------ rope_and_store


def rope_tables(d: int, length: int = 512) -> tuple[Tensor, Tensor]:
    angles = torch.arange(length)[:, None] * 10000.0 ** (-torch.arange(0, d, 2) / d)
    return angles.cos().contiguous(), angles.sin().contiguous()


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    cos, sin = torch.cat([cos, cos], -1)[:, None], torch.cat([sin, sin], -1)[:, None]
    first, second = x.float().chunk(2, dim=-1)
    return (x.float() * cos + torch.cat([-second, first], -1) * sin).to(x.dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("h", "hkv", "d"), [(3, 3, 32), (9, 3, 64), (8, 2, 128)])
@pytest.mark.parametrize("norm", [False, True])
def test_rope_and_store(kernels: Kernels, dtype: torch.dtype, h: int, hkv: int, d: int, norm: bool) -> None:
    t, blocks = 21, 5
    cos, sin = rope_tables(d)
    qkv = torch.randn(t, (h + 2 * hkv) * d + 16).to(dtype)[:, 16:]
    positions = torch.randint(0, 512, (t,))
    slots = torch.randperm(blocks * BLOCK)[:t].int()
    slots[4] = -1
    q_norm, k_norm = (torch.rand(d).to(dtype), torch.rand(d).to(dtype)) if norm else (None, None)
    k_cache, v_cache = torch.zeros(2, blocks, BLOCK, hkv, d, dtype=dtype)
    q_out = kernels.rope_and_store(qkv, positions, cos, sin, slots, k_cache, v_cache, h, q_norm, k_norm, 1e-6)

    heads = qkv.reshape(t, -1, d)
    q, k, v = heads[:, :h], heads[:, h : h + hkv], heads[:, h + hkv :]
    if q_norm is not None and k_norm is not None:
        q, k = rms_reference(q, q_norm, 1e-6), rms_reference(k, k_norm, 1e-6)
    q, k = rotated(q, cos[positions], sin[positions]), rotated(k, cos[positions], sin[positions])
    k_expected, v_expected = torch.zeros(2, blocks * BLOCK, hkv, d, dtype=dtype)
    kept = slots >= 0
    k_expected[slots[kept].long()], v_expected[slots[kept].long()] = k[kept], v[kept]
    close(q_out, q, dtype)
    close(k_cache.flatten(0, 1), k_expected, dtype)
    assert same_bits(v_cache.flatten(0, 1), v_expected)

    k_again, v_again = torch.zeros_like(k_cache), torch.zeros_like(v_cache)
    for i in range(t):
        row = slice(i, i + 1)
        place = (positions[row].int(), cos, sin, slots[row].long())
        one = kernels.rope_and_store(qkv[row], *place, k_again, v_again, h, q_norm, k_norm, 1e-6)
        assert same_bits(one[0], q_out[i])
    assert same_bits(k_again, k_cache)
    assert same_bits(v_again, v_cache)


@pytest.mark.parametrize(("position", "slot"), [(512, 0), (-1, 0), (0, 2 * BLOCK), (0, 1 << 30)])
def test_rope_outside_of_its_tables(kernels: Kernels, position: int, slot: int) -> None:
    """Refused before anything is written."""
    k_cache, v_cache = torch.zeros(2, 2, BLOCK, 1, 32)
    places = torch.tensor([3, position]), *rope_tables(32), torch.tensor([5, slot])
    with pytest.raises(IndexError):
        kernels.rope_and_store(torch.randn(2, 4 * 32), *places, k_cache, v_cache, 2)
    assert not k_cache.any()


# ------------------------------------------------------------------------------------------------ paged_attention


class Paged:
    """Sequences with full keys and values in a shuffled paged cache, which may be in fp8; unused slots hold NaN."""

    def __init__(
        self,
        lengths: list[int],
        h: int,
        hkv: int,
        d: int,
        dtype: torch.dtype,
        window: int = 0,
        *,
        fp8: bool = False,
        sinks: bool = False,
    ) -> None:
        self.sinks = torch.linspace(-4, 6, h) if sinks else None
        self.lengths, self.h, self.hkv, self.d, self.dtype = lengths, h, hkv, d, dtype
        self.scale, self.window = d**-0.5, window
        width = max(-(-length // BLOCK) for length in lengths)
        self.tables = torch.randperm(len(lengths) * width).int().reshape(len(lengths), width)
        self.q = [torch.randn(n, h, d).to(dtype) for n in lengths]
        self.k = [torch.randn(n, hkv, d).to(dtype) for n in lengths]
        self.v = [torch.randn(n, hkv, d).to(dtype) for n in lengths]
        self.scales = KVScales(k=0.7, v=1.3) if fp8 else UNSCALED
        stored = torch.float8_e4m3fn if fp8 else dtype
        self.k_cache = torch.full((self.tables.numel(), BLOCK, hkv, d), float("nan"), dtype=stored)
        self.v_cache = self.k_cache.clone()
        for s, n in enumerate(lengths):
            slots = self.tables[s].long()[torch.arange(n) // BLOCK] * BLOCK + torch.arange(n) % BLOCK
            self.k_cache.flatten(0, 1)[slots] = self.k[s].to(stored)
            self.v_cache.flatten(0, 1)[slots] = self.v[s].to(stored)

    def run(self, kernels: Kernels, spans: list[tuple[int, int, int]]) -> list[Tensor]:
        """One call with query positions [begin, end) of each (sequence, begin, end)."""
        q = torch.cat([self.q[s][begin:end] for s, begin, end in spans])
        counts = [end - begin for _, begin, end in spans]
        starts = torch.tensor([0, *counts]).cumsum(0).int()
        context = torch.tensor([end for _, _, end in spans]).int()
        rows, tables = torch.tensor([s for s, _, _ in spans]).int(), self.tables.clone()
        for s, begin, _ in spans if self.window else ():
            tables[s, : max(0, begin + 1 - self.window) // BLOCK] = -1  # freed
        given = q, self.k_cache, self.v_cache, starts, context, tables, rows, self.scale
        out = kernels.paged_attention(*given, window=self.window, scales=self.scales, sinks=self.sinks)
        return [out[starts[i] : starts[i + 1]] for i in range(len(counts))]

    def reference(self, s: int) -> Tensor:
        group = self.h // self.hkv
        k, v = self.k[s].to(self.k_cache.dtype).double(), self.v[s].to(self.v_cache.dtype).double()
        q, k, v = (x.transpose(0, 1) for x in (self.q[s].double(), k * self.scales.k, v * self.scales.v))
        k, v = k.repeat_interleave(group, 0), v.repeat_interleave(group, 0)
        n = self.lengths[s]
        seen = torch.ones(n, n, dtype=torch.bool).tril().triu(1 - self.window if self.window else -n)
        scores = (q @ k.mT * self.scale).masked_fill(~seen, -torch.inf)
        if self.sinks is not None:
            scores = torch.cat((scores, self.sinks.double()[:, None, None].expand(-1, n, 1)), dim=-1)
        return (scores.softmax(-1)[..., :n] @ v).transpose(0, 1)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("h", "hkv", "d", "window", "fp8"),
    mostly_slow(
        [
            *[(2, 2, 32, 0, False), (9, 3, 64, 0, False), (8, 2, 128, 0, False)],
            *[(4, 1, 20, 0, False), (5, 1, 64, 0, False)],
            *[(2, 2, 32, 1, False), (5, 1, 20, 7, False), (4, 2, 32, 64, False), (6, 2, 32, 97, False)],
            *[(8, 2, 64, 0, True), (5, 1, 20, 0, True), (6, 2, 32, 97, True)],
        ],
        fast={(9, 3, 64, 0, False), (4, 1, 20, 0, False), (4, 2, 32, 64, False), (6, 2, 32, 97, True)},
    ),
)
def test_attention(kernels: Kernels, dtype: torch.dtype, h: int, hkv: int, d: int, window: int, fp8: bool) -> None:
    """Against dense attention; and a row has the same bits whatever rows are computed with it. Half of the cases have
    sinks."""
    paged = Paged([130, 1, 64, 65, 17, 143], h, hkv, d, dtype, window, fp8=fp8, sinks=h > 2 * hkv)
    whole = paged.run(kernels, [(s, 0, n) for s, n in enumerate(paged.lengths)])
    for s, out in enumerate(whole):
        close(out, paged.reference(s), dtype)
    for s, n in enumerate(paged.lengths):  # every prompt row by row, then in uneven chunks
        step = torch.cat([paged.run(kernels, [(s, i, i + 1)])[0] for i in range(n)])
        assert same_bits(step, whole[s])
        for size in (3, 31, 64, 100):
            chunks = [paged.run(kernels, [(s, i, min(n, i + size))])[0] for i in range(0, n, size)]
            assert same_bits(torch.cat(chunks), whole[s]), size
    mixed = paged.run(kernels, [(5, 140, 143), (0, 129, 130), (2, 13, 13), (3, 1, 65), (1, 0, 1)])
    parts = [whole[5][140:], whole[0][129:], whole[2][:0], whole[3][1:], whole[1]]
    for out, expected in zip(mixed, parts, strict=True):
        assert same_bits(out, expected)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *[("tables", -1), ("tables", 6), ("rows", 2), ("rows", -1), ("context", 3 * BLOCK + 1)],
        *[("starts", 3), ("starts", -1), ("slots", 6 * BLOCK), ("slots", 1)],
    ],
)
def test_attention_to_what_is_not_there(kernels: Kernels, name: str, value: int) -> None:
    """Blocks outside of the cache, rows and columns outside of the tables, queries outside of the batch; branches."""
    paged = Paged([40, 33], 2, 1, 32, torch.float32)
    given = {
        "starts": torch.tensor([0, 1, 2]).int(),
        "context": torch.tensor([40, 33]).int(),
        "tables": paged.tables,
        "rows": torch.tensor([0, 1]).int(),
        "slots": torch.tensor([2, 3]).int(),
    }
    branches = (torch.tensor([10, 10]).int(), given["slots"], 2) if name == "slots" else None
    places = (given["starts"], given["context"], given["tables"], given["rows"], paged.scale, branches)
    kernels.paged_attention(torch.randn(2, 2, 32), paged.k_cache, paged.v_cache, *places)
    given[name].view(-1)[-1] = value
    with pytest.raises(IndexError):
        kernels.paged_attention(torch.randn(2, 2, 32), paged.k_cache, paged.v_cache, *places)


@pytest.mark.parametrize("sink", [None, -3000.0, 300.0, 3000.0])
def test_attention_with_large_scores(kernels: Kernels, sink: float | None) -> None:
    """Sinks far below and far above the scores, too: no overflow."""
    paged = Paged([140], 2, 1, 32, torch.float32)
    paged.scale = 40.0
    paged.sinks = None if sink is None else torch.full((2,), sink)
    close(paged.run(kernels, [(0, 0, 140)])[0], paged.reference(0), torch.float32, scale=20)


# ------------------------------------------------------------------------------------------------ gumbel


def noise_keys(rows: int) -> Tensor:
    return torch.randint(-(2**63), 2**63 - 1, (rows,))


@pytest.mark.parametrize("vocab", [1, 2, 3, 7, 8, 9, 31, 32, 33, 100, 2047, 2048, 2049, 8192, 40_003])
def test_gumbel(kernels: Kernels, vocab: int) -> None:
    """Against plain torch; and a row alone, or cut short, keeps its bits whatever the vectors and chunks."""
    keys = noise_keys(5)
    gumbel = Sampling(kernels).gumbel
    whole = gumbel(keys, vocab, *noise.constants())
    assert whole.dtype is torch.float32
    torch.testing.assert_close(whole, gumbel_reference(keys, vocab), rtol=1.2e-7, atol=1e-9)
    for i, row in enumerate(whole):
        assert same_bits(gumbel(keys[i : i + 1], vocab, *noise.constants())[0], row)
    for n in {1, vocab // 3, vocab - 1} - {0}:
        assert same_bits(gumbel(keys, n, *noise.constants()), whole[:, :n])


def test_gumbel_speed(kernels: Kernels) -> None:
    """Asserts nothing (a machine may be busy): `pytest -s` shows what the kernel gains."""
    constants = dict(zip(("golden", "mix1", "mix2"), noise.constants(), strict=True))
    for rows, threads in ((rows, threads) for threads in (1, 2) for rows in (1, 5, 24)):
        torch.set_num_threads(threads)
        keys, best = noise_keys(rows), []
        ours = functools.partial(Sampling(kernels).gumbel, vocab_size=8192, **constants)
        for draw in (functools.partial(gumbel_reference, vocab_size=8192), ours):
            times = []
            for _ in range(6):
                start = time.perf_counter()
                draw(keys)
                times.append(time.perf_counter() - start)
            best.append(min(times) * 1e3)
        sys.stdout.write(f"\n[{rows}, 8192], {threads} threads: torch {best[0]:.3f} ms, kernel {best[1]:.3f} ms")


# ------------------------------------------------------------------------------------------------ threads, building


@pytest.mark.parametrize("dtype", DTYPES)
def test_threads_keep_the_bits(kernels: Kernels, dtype: torch.dtype) -> None:
    packed, x = kernels.pack_linear(torch.randn(300, 256).to(dtype)), torch.randn(200, 256).to(dtype)
    gated = kernels.pack_linear(torch.randn(300, 256).to(dtype), gated=True)
    weight, paged = torch.rand(256).to(dtype), Paged([200, 90], 6, 2, 64, dtype)
    cos, sin = rope_tables(64)
    keys = noise_keys(6)
    results = []
    for threads in (1, 2, 3, 16):
        torch.set_num_threads(threads)
        k_cache, v_cache = torch.zeros(2, 13, BLOCK, 2, 64, dtype=dtype)
        heads = torch.cat([x, x, x, x], -1)[:, : 10 * 64]
        q = kernels.rope_and_store(heads, torch.arange(200), cos, sin, torch.arange(200), k_cache, v_cache, 6)
        attention = paged.run(kernels, [(0, 0, 200), (1, 60, 90)]) + paged.run(kernels, [(0, 199, 200)])
        linear = [kernels.linear(x, packed), kernels.linear(x[:1], packed), kernels.linear(x, gated)]
        noises = [Sampling(kernels).gumbel(keys, vocab, *noise.constants()) for vocab in (5, 8192, 9001)]
        results.append([*linear, kernels.rms_norm(x, weight, 1e-6), q, k_cache, v_cache, *attention, *noises])
    for other in results[1:]:
        assert all(same_bits(a, b) for a, b in zip(results[0], other, strict=True))


def test_a_thread_that_ends_leaves_no_scratch(kernels: Kernels) -> None:
    """An engine's workers end whenever it is idle: catches 16 MB that each of 32 threads keeps."""
    packed, x = kernels.pack_linear(torch.randn(8, 8192)), torch.randn(512, 8192)
    before = resident_bytes()
    for _ in range(32):
        thread = threading.Thread(target=kernels.linear, args=(x, packed))
        thread.start()
        thread.join()
    assert resident_bytes() - before < 400e6  # of 537; a sanitizer keeps 256 of what is freed


def resident_bytes() -> int:
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        pytest.skip("needs /proc")


def test_many_threads_compute_what_one_computes(kernels: Kernels) -> None:
    """More threads than cores, loops that follow each other at once or after a pause, callers at the same time."""
    packed, x = kernels.pack_linear(torch.randn(300, 200)), torch.randn(3, 200)
    with use_threads(1):
        expected = kernels.linear(x, packed)
    failures: list[int] = []

    def call(number: int) -> None:
        for i in range(300):
            with use_threads(2 + (number + i) % 7):
                if not same_bits(kernels.linear(x, packed), expected):
                    failures.append(i)
            if i % 50 == number:
                time.sleep(0.002)  # the workers sleep

    callers = [threading.Thread(target=call, args=(i,)) for i in range(3)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join(60)
    assert not any(caller.is_alive() for caller in callers)
    assert not failures


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="needs /proc")
def test_the_workers_of_a_thread_end_with_it_and_take_no_signals(kernels: Kernels) -> None:
    packed, x = kernels.pack_linear(torch.randn(300, 200)), torch.randn(8, 200)
    tasks = Path("/proc/self/task")
    before, during, blocked = {task.name for task in tasks.iterdir()}, set[str](), list[int]()

    def call() -> None:
        with use_threads(4):
            kernels.linear(x, packed)
        during.update(task.name for task in tasks.iterdir())
        for new in during - before - {str(threading.get_native_id())}:
            status = (tasks / new / "status").read_text()
            [mask] = [int(line.split()[1], 16) for line in status.splitlines() if line.startswith("SigBlk")]
            blocked.append(mask >> (signal.SIGINT - 1) & 1)

    caller = threading.Thread(target=call)
    caller.start()
    caller.join()
    assert len(during - before) >= 4
    assert len(blocked) >= 3
    assert all(blocked)
    deadline = time.monotonic() + 10
    while {task.name for task in tasks.iterdir()} & (during - before) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not {task.name for task in tasks.iterdir()} & (during - before)


@pytest.mark.skipif(not Path("/proc/self/schedstat").exists(), reason="needs /proc")
def test_workers_that_a_smaller_number_leaves_out_use_no_core(kernels: Kernels) -> None:
    """The others look for the next loop in between. On all cores, they took those of a draft model's process."""
    packed, x = kernels.pack_linear(torch.randn(300, 200)), torch.randn(8, 200)
    tasks = Path("/proc/self/task")
    before, busy = {task.name for task in tasks.iterdir()}, dict[str, float]()

    def seconds(task: str) -> float:
        return int((tasks / task / "schedstat").read_text().split()[0]) / 1e9

    def call() -> None:
        with use_threads(6):
            kernels.linear(x, packed)
        own = {task.name for task in tasks.iterdir()} - before - {str(threading.get_native_id())}
        with use_threads(2):
            kernels.linear(x, packed)
            began, end = {task: seconds(task) for task in own}, time.perf_counter() + 0.1
            while time.perf_counter() < end:
                kernels.linear(x, packed)
        busy.update({task: seconds(task) - began[task] for task in own})

    caller = threading.Thread(target=call)
    caller.start()
    caller.join()
    assert len(busy) == 5
    assert sum(each > 2e-3 for each in busy.values()) <= 1, busy


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*:DeprecationWarning")
def test_a_forked_process_computes_without_the_workers_of_its_parent(kernels: Kernels) -> None:
    packed, x = kernels.pack_linear(torch.randn(300, 200)), torch.randn(8, 200)
    with use_threads(2):
        expected = kernels.linear(x, packed)
        child = os.fork()
        if child == 0:
            os._exit(0 if same_bits(kernels.linear(x, packed), expected) else 1)
    deadline = time.monotonic() + 20
    while (done := os.waitpid(child, os.WNOHANG)) == (0, 0) and time.monotonic() < deadline:
        time.sleep(0.01)
    if done == (0, 0):
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    assert done == (child, 0)


def test_a_cached_load_compiles_nothing(kernels: Kernels, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "_run", lambda command: pytest.fail("it is compiled again"))
    assert isinstance(library.build(), Kernels)


@pytest.mark.slow
def test_without_a_compiler_the_kernels_of_the_package_are_used(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Catches a wheel whose kernels are never loaded, and that fewer of them than this processor could use stop it."""
    compiler, slowest = build.find_compiler(), variants.usable()[-1]
    if compiler is None:
        pytest.skip("no C compiler")
    (tmp_path / f"{slowest.library}.abi3.so").write_bytes(build._compile(compiler, slowest))
    monkeypatch.setattr(build, "FOLDER", tmp_path)
    monkeypatch.setattr(build, "find_compiler", lambda: None)
    found = library.build()
    assert found.variant == slowest.name
    packed, x = found.pack_linear(torch.randn(70, 96)), torch.randn(9, 96)
    together = found.linear(x, packed)
    assert all(same_bits(found.linear(x[i : i + 1], packed)[0], together[i]) for i in range(9))


@pytest.mark.parametrize(
    ("flags", "best"),
    [
        ("fpu sse4_2 avx", "sse2"),
        ("avx2 fma bmi2 f16c", "avx2"),
        ("avx2 fma bmi2 f16c avx512f avx512bw avx512cd avx512dq avx512vl", "avx512"),
        ("avx2 fma bmi2 f16c avx512f avx512bw avx512cd avx512dq avx512vl avx512_vnni amx_tile", "avx512-vnni"),
    ],
)
def test_a_processor_gets_no_instructions_that_it_does_not_have(
    monkeypatch: pytest.MonkeyPatch, flags: str, best: str
) -> None:
    monkeypatch.setattr(variants.platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(variants, "features", lambda: frozenset(flags.split()))
    assert variants.usable()[0].name == best


def test_a_variant_that_this_processor_does_not_have_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SSD_CPU_VARIANT", "altivec")
    with pytest.raises(build.BuildError, match=f"'altivec'.*{variants.usable()[-1].name}"):
        library.build()


def test_a_change_of_any_source_is_compiled(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Catches a header that the key of the cache leaves out, and one that nothing includes."""
    shutil.copytree(build.SOURCE.parent, tmp_path / "csrc")
    monkeypatch.setattr(build, "SOURCE", tmp_path / "csrc" / "ssd.c")
    files = [file for file in build.SOURCE.parent.rglob("*") if file.is_file()]
    named = {
        (file.parent / name).resolve()
        for file in files
        for name in re.findall(r'#(?:include|define ISA) "(.+)"', file.read_text())
    }
    roots = {build.SOURCE.resolve(), build.SOURCE.with_name(variants.SUFFIX.source).resolve()}
    assert named | roots == {file.resolve() for file in files}
    keys = [build._key([sys.executable], variants.PLAIN)]
    for file in files:
        file.write_text("/* another */")
        keys.append(build._key([sys.executable], variants.PLAIN))
    assert len(set(keys)) == len(keys)


def test_compiling_needs_no_package() -> None:
    """`make` compiles while it installs packages."""
    code = "import sys, ssd.kernels.cpu.build; assert not {'numpy', 'torch'} & sys.modules.keys()"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_no_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(build, "find_compiler", lambda: None)
    monkeypatch.setattr(build, "FOLDER", tmp_path)  # no kernels of the package beside it
    with pytest.raises(build.BuildError, match=r"no C compiler found.* gcc or clang, set CC .*wheel"):
        library.build()


def test_broken_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CC", "false")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(build.BuildError, match=r"false .*failed.* gcc or clang"):
        library.build()
    assert not list((tmp_path / "ssd").iterdir())


def test_find_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    assert build.find_compiler() is None
    fake = tmp_path / "mycc"
    fake.write_text("#!/bin/sh\n")
    fake.chmod(0o755)
    monkeypatch.setenv("CC", "mycc -m64")
    assert build.find_compiler() == [str(fake), "-m64"]


def test_wrong_dtypes_are_refused_instead_of_read_as_bytes(kernels: Kernels) -> None:
    packed, columns, zero = kernels.pack_linear(torch.ones(4, 8)), SamplingColumns(1, 8, CPU), torch.zeros(1).int()
    for call in (
        lambda: kernels.linear(torch.ones(1, 8, dtype=torch.bfloat16), packed),
        lambda: kernels.linear(torch.ones(1, 12), packed),
        lambda: kernels.embedding(kernels.pack_linear(torch.ones(4, 8), gated=True), torch.zeros(1, dtype=torch.int32)),
        lambda: kernels.embedding(packed, torch.zeros(1, dtype=torch.int16)),
        lambda: Sampling(kernels).gumbel(torch.zeros(1, dtype=torch.int32), 8, 1, 2, 3),
        lambda: Sampler(columns).best(torch.zeros(1, 8, dtype=torch.float64), Rows(zero, zero), Needs(), 2),
        lambda: Sampler(columns).best(torch.zeros(1, 8), Rows(zero.long(), zero), Needs(), 2),
    ):
        with pytest.raises(TypeError):
            call()
