"""cuBLASLt's products against our kernel, bit by bit."""

from __future__ import annotations

import ctypes
from pathlib import Path

import pytest
import torch
from bits import same_bits

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from ssd.kernels.cuda import cublaslt
from ssd.kernels.triton import elementwise
from ssd.kernels.triton import linear as linear_module
from ssd.kernels.triton.linear import linear
from ssd.kernels.triton.ops import TritonOps

ROWS = (1, 5, 16, 40, 64, 65, 77, 96, 128, 200, 256, 300, 512, 700, 1000, 2048, 2500)
pytestmark = [pytest.mark.gpu, pytest.mark.gpu_memory(10)]
SHAPES = ((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336), (896, 1536), (151936, 1024), (1000, 264))


def random(*shape: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(shape, generator=generator, device="cuda").to(dtype)


@pytest.fixture
def library(tmp_path: Path) -> cublaslt.CublasLt:
    """Nothing is chosen yet."""
    found = cublaslt.load()
    assert found is not None
    return cublaslt.CublasLt(found._library, cublaslt.Choices(tmp_path / "choices.json"))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("columns", "depth"), SHAPES)
def test_products_have_our_bits(library: cublaslt.CublasLt, columns: int, depth: int, dtype: torch.dtype) -> None:
    """Of every number of rows, whichever kernel is chosen."""
    weight, bias = random(columns, depth, dtype=dtype), random(columns, dtype=dtype, seed=1)
    for rows in ROWS:
        x = random(rows, depth + 8, dtype=dtype, seed=rows)[:, :depth]  # rows may be strided
        for out_dtype in (dtype, torch.float32):
            for added in (None, bias) if out_dtype is dtype else (None,):
                y = library.linear(x, weight, added, out_dtype)
                assert y is not None or rows <= 64, f"{rows} rows are not computed by the library"
                assert y is None or same_bits(y, linear(x, weight, added, out_dtype=out_dtype))


def test_gates_have_our_bits() -> None:
    ops = TritonOps()
    x, weight = random(200, 1024, dtype=torch.bfloat16), random(2 * 1536, 1024, dtype=torch.bfloat16, seed=1)
    prepared = ops.prepare(weight, gated=True)
    expected = linear(x, prepared.dense, gated=True)
    assert same_bits(prepared.linear(x), expected)
    assert same_bits(elementwise.silu_and_mul(linear(x, prepared.dense)), expected)


def test_other_bits_are_noticed_and_not_used(
    library: cublaslt.CublasLt, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Catches a check that cannot fail."""
    monkeypatch.setattr(library, "_one", ctypes.c_float(1.001))
    x, weight = random(100, 512, dtype=torch.bfloat16), random(256, 512, dtype=torch.bfloat16)
    assert library.linear(x, weight, None, torch.bfloat16) is None
    assert "no product of 256 x 512 weights with our bits" in caplog.text


def test_a_choice_is_measured_once_per_machine(
    library: cublaslt.CublasLt, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, weight = random(100, 512, dtype=torch.bfloat16), random(256, 512, dtype=torch.bfloat16)
    before = library.linear(x, weight, None, torch.bfloat16)
    monkeypatch.setattr(cublaslt.own, "linear", None)  # what a check would call
    later = cublaslt.CublasLt(library._library, cublaslt.Choices(tmp_path / "choices.json"))
    assert before is not None
    assert same_bits(before, later.linear(x, weight, None, torch.bfloat16))


def test_kernels_that_are_launched_early_wait_for_what_they_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a kernel that reads the product before it is written: chains of them, with and without early launches."""
    weights = [0.02 * random(4096, 4096, dtype=torch.bfloat16, seed=seed) for seed in range(8)]
    norm = random(4096, dtype=torch.bfloat16)

    def chain(rows: int) -> torch.Tensor:
        x, residual = random(rows, 4096, dtype=torch.bfloat16, seed=rows), random(rows, 4096, dtype=torch.bfloat16)
        for weight in weights * 4:
            x = linear(elementwise.rms_norm(x, norm, 1e-5, residual), weight)
        return torch.cat((x, residual))

    for rows in (1, 7, 16):
        found = [chain(rows) for _ in range(3)]
        with monkeypatch.context() as patch:
            for module in (elementwise, linear_module):
                patch.setattr(module, "early_launch", lambda *_: {"EARLY": False})
            expected = chain(rows)
        assert all(same_bits(each, expected) for each in found)
