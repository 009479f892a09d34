"""A KV cache in fp8: what is stored and read back, in all three kernels, against torch's own conversions."""

from __future__ import annotations

import itertools

import pytest
import torch
from bits import same_bits
from conftest import mostly_slow
from device_batches import make_device_batch
from reference_ops import ReferenceOps

from ssd.kernels.cpu import library
from ssd.kernels.cpu.ops import CpuOps
from ssd.kernels.ops import DeviceBatch, HeadShape, KVScales, Ops, Rope

FP8 = torch.float8_e4m3fn
CUDA = torch.cuda.is_available()
HEADS, WIDE = HeadShape(1, 1, 16), HeadShape(8, 8, 512)  # the latter for few programs in the interpreter
BLOCK_SIZE, ROW = 16, WIDE.num_kv_heads * WIDE.head_dim
CODES = torch.arange(256, dtype=torch.int32).to(torch.uint8).view(FP8)


KERNELS = ("reference", "C", "triton")
EACH = list(itertools.product(KERNELS, (torch.float32, torch.bfloat16, torch.float16)))
FEW = [each for each in EACH if CUDA or each[0] != "triton" or each[1] is torch.float32]  # the interpreter is slow
in_every_type = pytest.mark.parametrize(("ops", "dtype"), mostly_slow(EACH, fast=FEW), indirect=["ops"], ids=str)


@pytest.fixture(params=KERNELS)
def ops(request: pytest.FixtureRequest) -> Ops:
    if request.param == "reference":
        return ReferenceOps()
    if request.param == "C":
        return CpuOps(library.load())
    made: Ops = pytest.importorskip("ssd.kernels.triton.ops", reason="triton is not installed").TritonOps()
    made.reserve([HEADS], device_of(made))
    return made


def device_of(ops: Ops) -> torch.device:
    return torch.device("cuda" if CUDA and not isinstance(ops, (CpuOps, ReferenceOps)) else "cpu")


def alone(ops: Ops, count: int) -> DeviceBatch:
    """So many sequences of one token."""
    ones, tile = [1] * count, ops.tile_tokens([HEADS], prefill=False)
    tables, slots = [[i] for i in range(count)], [i * BLOCK_SIZE for i in range(count)]
    return make_device_batch(
        [0] * count, slots, list(range(count + 1)), ones, tables, tile_tokens=tile, device=device_of(ops)
    )


def caches(count: int, device: torch.device, heads: HeadShape = HEADS) -> tuple[torch.Tensor, torch.Tensor]:
    shape = (count, BLOCK_SIZE, heads.num_kv_heads, heads.head_dim)
    return torch.zeros(shape, dtype=FP8, device=device), torch.zeros(shape, dtype=FP8, device=device)


def numbers(dtype: torch.dtype) -> torch.Tensor:
    """All finite bfloat16 or float16 numbers; as float32, also the ties between two codes and their neighbours."""
    if dtype is not torch.float32:
        every = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(dtype)
    else:
        known = CODES.float()[CODES.float().isfinite()].sort().values
        ties = (known[1:] + known[:-1]) / 2
        beside = [torch.nextafter(ties, torch.full_like(ties, end)) for end in (-torch.inf, torch.inf)]
        bits = torch.arange(0, 1 << 16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
        every = torch.cat((known, ties, *beside, bits.float(), torch.tensor([463.9, 464.0, 465.0, 1e38])))
    every = every[every.isfinite()]
    return torch.nn.functional.pad(every, (0, -len(every) % ROW)).view(-1, ROW)


def store(ops: Ops, values: torch.Tensor, scales: KVScales) -> tuple[torch.Tensor, torch.Tensor]:
    """What rows of keys, which are values as well, are stored as."""
    device, count = device_of(ops), len(values)
    ones = torch.ones((1, WIDE.head_dim // 2), dtype=torch.float32, device=device)
    k, v = caches(count, device, WIDE)
    values = values.to(device)
    qkv = torch.cat((torch.zeros_like(values), values, values), dim=1)
    ops.rope_and_store(qkv, alone(ops, count), Rope(ones, torch.zeros_like(ones)), WIDE, k, v, scales)
    assert not k[:, 1:].float().any()
    return k[:, 0].flatten(1).cpu(), v[:, 0].flatten(1).cpu()


@pytest.mark.filterwarnings("ignore:overflow encountered in divide")
@in_every_type
def test_every_number_is_stored_as_the_nearest_code(ops: Ops, dtype: torch.dtype) -> None:
    """Catches another rounding of ties, a scale that multiplies, and overflow that becomes NaN."""
    if dtype is torch.float16 and isinstance(ops, CpuOps):
        pytest.skip("float16 is for GPUs")
    values, scales = numbers(dtype), KVScales(k=1.0, v=0.37)
    wanted_k, wanted_v = ((values.float() / torch.tensor(s)).clamp(-448, 448).to(FP8) for s in (scales.k, scales.v))
    k, v = store(ops, values, scales)
    assert torch.equal(k.float(), wanted_k.float())  # values: the rotation may make 0.0 of -0.0
    assert same_bits(v, wanted_v)


def test_infinities_are_the_largest_and_nan_stays(ops: Ops) -> None:
    """Values on a GPU are stored as 0 then, as in caches of other types."""
    if not isinstance(ops, (CpuOps, ReferenceOps)):
        pytest.skip("a GPU's kernel stores finite values only")
    values = torch.zeros(1, ROW)
    values[0, :3] = torch.tensor([torch.inf, -torch.inf, torch.nan])
    found = store(ops, values, KVScales())[1].float()[0]
    assert found[:2].tolist() == [448.0, -448.0]
    assert found[2].isnan()
    assert not found[3:].any()


@pytest.mark.filterwarnings("ignore:invalid value encountered in divide")  # rows of padding, never stored
@in_every_type
def test_every_code_is_read_as_its_number(ops: Ops, dtype: torch.dtype) -> None:
    """One token sees itself alone: the result is its value. Catches wrong subnormals, signs and scales."""
    on_cpu, reference = device_of(ops).type == "cpu", isinstance(ops, ReferenceOps)
    if on_cpu and not reference and dtype is (torch.float16 if isinstance(ops, CpuOps) else torch.bfloat16):
        pytest.skip("float16 is for GPUs, and the interpreter's bfloat16 dot is wrong")
    codes = torch.where(CODES.float().isnan(), 0, CODES.view(torch.uint8)).view(FP8).view(-1, HEADS.head_dim)
    k, v = caches(len(codes), device_of(ops))
    v[:, 0, 0] = codes.to(v.device)
    q = torch.randn(len(codes), 1, HEADS.head_dim).to(v.device, dtype)
    out = ops.attention(q, alone(ops, len(codes)), HEADS, k, v, KVScales(k=3.0, v=0.37))
    assert torch.equal(out.cpu(), (codes.float() * 0.37).to(dtype))  # values: a sum that begins with 0.0 is not -0.0


@pytest.mark.filterwarnings("ignore:invalid value encountered in divide")
def test_scores_have_the_scale_of_the_keys(ops: Ops) -> None:
    """Two positions whose keys differ: against the softmax of the scaled products, in float64."""
    device, scales = device_of(ops), KVScales(k=0.7, v=2.5)
    tile = ops.tile_tokens([HEADS], prefill=False)
    batch = make_device_batch([1], [1], [0, 1], [2], [[0]], tile_tokens=tile, device=device)
    generator = torch.Generator().manual_seed(0)
    k, v, q = (torch.randn(n, HEADS.head_dim, generator=generator) for n in (2, 2, 1))
    k_cache, v_cache = caches(1, device)
    k_cache[0, :2, 0], v_cache[0, :2, 0] = k.to(FP8).to(device), v.to(FP8).to(device)
    weights = ((k.to(FP8).double() * scales.k) @ q[0].double() * HEADS.scale).softmax(0)
    expected = weights @ (v.to(FP8).double() * scales.v)
    found = ops.attention(q[:, None].to(device), batch, HEADS, k_cache, v_cache, scales)
    torch.testing.assert_close(found[0].cpu().double(), expected, rtol=1e-5, atol=1e-6)
