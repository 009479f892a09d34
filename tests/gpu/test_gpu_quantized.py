"""Quantised weights on a GPU: the kernel at real sizes, in bfloat16 and float16; drafts that change no text, and
targets that write the same in all modes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from bits import same_bits

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from fakes import wait_until_idle
from stored_codes import CODES, some_codes

from ssd import LLM, SamplingParams
from ssd.kernels.codes import Format, dequantize, quantize
from ssd.kernels.triton import elementwise, row_codes
from ssd.kernels.triton.codes_linear import codes_linear
from ssd.kernels.triton.ops import TritonOps
from ssd.kernels.triton.packing import pack
from ssd.kernels.triton.weights import Fp8Weight
from ssd.kernels.weights import RoundedRows, RowRounding
from ssd.prompts import load_prompts

pytestmark = pytest.mark.gpu
FORMATS: tuple[Format, ...] = ("fp8", "int8", "int4")
ROWS = (1, 2, 8, 9, 16, 17, 33, 64, 65, 300, 2048)
SHAPES = ((2048, 8192, torch.bfloat16), (32000, 896, torch.bfloat16), (1000, 264, torch.bfloat16))
SHAPES += ((896, 4864, torch.float16),)


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize(("columns", "depth", "dtype"), SHAPES)
def test_products_of_any_number_of_rows(columns: int, depth: int, dtype: torch.dtype, form: Format) -> None:
    torch.manual_seed(0)
    weight = (torch.randn(columns, depth, device="cuda") * depth**-0.5).to(dtype)
    codes = quantize(weight, form)
    packed, rounded = pack(codes, dtype), dequantize(codes, torch.float32)
    ops = TritonOps()
    gated = ops.prepare_codes(codes, dtype, gated=True)
    for rows in ROWS:
        x = torch.randn(rows, depth, device="cuda").to(dtype)
        expected = x.float() @ rounded.t()
        found = codes_linear(x, packed, out_dtype=torch.float32)
        assert (found - expected).norm() < 2e-3 * expected.norm(), rows
        gate, up = expected.chunk(2, dim=1)
        expected = torch.nn.functional.silu(gate) * up
        assert (gated.linear(x).float() - expected).norm() < 1e-2 * expected.norm(), rows


SIZES = ((6144, 4096), (4096, 14336), (28672, 4096), (2048, 4096), (1000, 512))


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("case", range(len(CODES)), ids=lambda case: "-".join(map(str, CODES[case])))
def test_a_row_has_the_same_bits_in_any_company(case: int, scaled: bool) -> None:
    """Every type of codes at one of the real sizes, in bfloat16: every tile shape, and what is widened for the library,
    against a row alone."""
    (code, group, offsets), (columns, depth) = CODES[case], SIZES[case % len(SIZES)]
    ops, device = TritonOps(), torch.device("cuda")
    codes = some_codes(code, columns, depth, group or depth, offsets=offsets, device=device)
    rounding = RowRounding(group=group or None) if scaled else None
    gated = ops.prepare_codes(codes, torch.bfloat16, gated=True, rows=rounding)
    plain = ops.prepare_codes(codes, torch.bfloat16, rows=rounding)
    x = torch.randn(2500, depth, device=device).to(torch.bfloat16)

    def chosen(index: Any) -> torch.Tensor:
        return x[index]

    wanted = [7, 0, 900, 2499]
    alone = [[weight.linear(chosen([i]))[0] for i in wanted] for weight in (plain, gated)]
    for rows in (2, 8, 9, 16, 17, 32, 33, 64, 65, 128, 200, 256, 257, 512, 1000, 2500):
        index = torch.randperm(2500, device=device)[:rows]
        index[: len(wanted)] = torch.tensor(wanted, device=device)[:rows]
        for weight, each in zip((plain, gated), alone, strict=True):
            found = weight.linear(chosen(index))
            for place in range(min(rows, len(wanted))):
                assert same_bits(found[place], each[place]), (rows, weight is gated, place)


@pytest.mark.parametrize("depth", [576, 4096, 5120, 8192, 14336])
def test_a_norm_that_rounds_has_the_bits_of_a_norm_and_a_rounding(depth: int) -> None:
    """From 4,097 numbers on a thread has more than 8 of a row: catches sums in another order."""
    ops, device = TritonOps(), torch.device("cuda")
    torch.manual_seed(0)
    x, other, size = (torch.randn(shape, device=device).bfloat16() for shape in ((70, depth), (70, depth), (depth,)))
    for residual in (None, other):
        normed = ops.rms_norm(x, size, 1e-5, None if residual is None else residual.clone())
        expected, wanted = row_codes.rounded_rows(normed, RowRounding(), narrow=True)
        found, scales = elementwise.rms_norm_and_round(x, size, 1e-5, None if residual is None else residual.clone())
        assert same_bits(found, expected)
        assert same_bits(scales, wanted)


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize(("columns", "depth"), [(6144, 4096), (4096, 14336)])
def test_rows_and_weights_in_fp8_have_the_same_bits_in_any_company(columns: int, depth: int, gated: bool) -> None:
    """Products on the tensor cores for e4m3: of few rows by our kernel, of many by the library; with a bias, too."""
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs a Hopper GPU")
    ops, device = TritonOps(), torch.device("cuda")
    torch.manual_seed(0)
    wide = torch.randn(columns, depth, device=device) * depth**-0.5
    weight = ops.prepare_codes(quantize(wide, "fp8"), torch.bfloat16, gated=gated, rows=RowRounding())
    assert isinstance(weight, Fp8Weight)
    x, bias = torch.randn(1024, depth, device=device).bfloat16(), torch.randn(columns, device=device).bfloat16()
    rows = row_codes.rounded_rows(x, RowRounding(), narrow=True)
    for added in (None, bias):
        whole = weight.linear(rows, added)
        assert torch.equal(weight.linear(x, added), whole)
        for count in (1, 7, 8, 16, 17, 32, 33, 64, 65, 128, 300, 1000):
            found = weight.linear(RoundedRows(rows.values[-count:], rows.scales[-count:]), added)
            assert same_bits(found, whole[-count:]), count
    expected, found = x.float() @ wide.t(), weight.linear(rows)
    if gated:
        gate, up = expected.chunk(2, 1)
        expected = torch.nn.functional.silu(gate) * up
    assert (found.float() - expected).norm() < 0.08 * expected.norm()


WAYS: list[dict[str, Any]] = [
    *({"mode": "sd", "k": 3, "draft_quantization": form} for form in FORMATS),
    {"mode": "ssd", "k": 4, "backup": "jit", "draft_quantization": "int8"},
    {"mode": "ssd", "k": 3, "backup": "fast", "draft_quantization": "int4"},
    {"mode": "ssd", "k": 3, "draft_quantization": "int8+bf16"},  # 1 to 16 sequences: both weights are used
]


@pytest.mark.gpu_memory(16)
def test_a_quantized_draft_changes_no_token() -> None:
    target, draft = "graft:tiny-llama@llama-3.2-1b", "graft:tiny-llama-draft@llama-3.2-1b"
    prompts = load_prompts("gsm8k").asked()[:16]
    params = [SamplingParams(temperature=float(i % 2), max_new_tokens=64, ignore_eos=True, seed=i) for i in range(16)]
    accepted: list[float] = []

    def write(**options: Any) -> list[list[int]]:
        with LLM(target, device="cuda", max_model_len=1024, max_num_seqs=16, **options) as llm:
            outputs = llm.generate(prompts, params)
            wait_until_idle(llm.driver)
            assert llm.engine.metrics.drafter_failures == 0
        drafted = sum(output.metrics.drafted for output in outputs)
        accepted.append(sum(output.metrics.accepted for output in outputs) / max(1, drafted))
        return [output.token_ids for output in outputs]

    expected = write()
    for way in WAYS:
        assert write(speculation={"draft": draft, **way}) == expected, way
    assert min(accepted[1:]) > 0.2  # catches drafts that are noise


@pytest.mark.gpu_memory(16)
@pytest.mark.parametrize("form", [*FORMATS, "fp8_dynamic"])
def test_a_quantized_target_writes_the_same_text_in_all_modes(form: str) -> None:
    """Batches of 1, 6 and 16 sequences: graphs, splits of the depth and tiles differ."""
    target, draft = f"graft:tiny-llama@llama-3.2-1b:{form}", "graft:tiny-llama-draft@llama-3.2-1b"
    prompts = load_prompts("gsm8k").asked()[:16]
    params = [SamplingParams(temperature=float(i % 2), max_new_tokens=48, ignore_eos=True, seed=i) for i in range(16)]

    def write(batch: int, **speculation: Any) -> list[list[int]]:
        with LLM(target, device="cuda", max_model_len=1024, max_num_seqs=batch, speculation=speculation or None) as llm:
            outputs = llm.generate(prompts, params)
            wait_until_idle(llm.driver)
            assert llm.engine.metrics.drafter_failures == 0
        return [output.token_ids for output in outputs]

    expected = write(1)
    assert write(16) == expected
    assert write(6, mode="sd", draft=draft, k=3) == expected
    assert write(16, mode="ssd", draft=draft, k=4) == expected


@pytest.mark.gpu_memory(18)
@pytest.mark.parametrize("form", FORMATS)
def test_a_rounded_graft_is_loaded_one_weight_at_a_time(form: Format, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches unrounded weights that stay: at no time there is more than the codes, the embedding and one fused weight
    with its copies, where all of an 8B in bfloat16 are 15 GiB. (Without those that are kept for many rows.)"""
    monkeypatch.setattr("ssd.assembly.models.wide_bytes", lambda *_: 0)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    with LLM("graft:tiny-llama@llama-3.1-8b:" + form, device="cuda", max_model_len=64, num_kv_blocks=64, eager=True):
        peak = torch.cuda.max_memory_allocated() - before
    assert peak < (8 if form == "int4" else 12) * 2**30
