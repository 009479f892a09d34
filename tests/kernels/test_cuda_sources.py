"""CUDA sources compile for sm_90a with every set of macros that the host side asks for, without a GPU."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from stored_codes import NUMBERS, numbered_codes

from ssd.kernels.codes import CodeType
from ssd.kernels.cuda import nvrtc
from ssd.kernels.ops import HeadShape
from ssd.kernels.triton.packing import pack

expert_rows = pytest.importorskip("ssd.kernels.cuda.expert_rows", reason="triton is not installed")
from ssd.kernels.cuda import few_rows, fp8_attention, fp8_linear, grouped_rows, latent_attention, persistent  # noqa: E402

CPU = torch.device("cpu")
EXPERTS: list[tuple[CodeType, int, int, int]] = [  # type, group, bytes of a scale, depth
    ("fp4", 32, 1, 256),
    ("fp4", 32, 1, 2880),
    ("int4", 32, 2, 7168),
    ("int4", 128, 4, 768),
    ("int4", 32, 4, 256),
    ("fp8", 128, 4, 2048),
    ("fp8", 32, 4, 704),
]
NVCC = shutil.which("nvcc")


def nvrtc_is_there() -> bool:
    try:
        nvrtc._library()
    except nvrtc.BuildError:
        return False
    return True


def variants() -> list[grouped_rows.Variant]:
    """Of weights in groups, as `packing` makes them."""
    cases = [numbered_codes(*case[:1], 16, case[4], *case[1:4], CPU) for case in NUMBERS]
    return list(dict.fromkeys(grouped_rows.Variant.of(pack(codes, torch.bfloat16)) for codes in cases))


def persistent_step(head_dim: int, *, qk_norm: bool, bias: bool) -> None:
    """Of two layers."""
    hidden, inter, kv_heads = 1024, 3072, 8

    def empty(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=torch.bfloat16, device="meta")

    weights = {name: empty(1) for name in ("qkv", "output", "gate_up", "input_norm", "mlp_norm")}
    norm, cache = empty(1) if qk_norm else None, empty(4, 64, kv_heads, head_dim)
    layer = persistent.StepLayer(
        **weights,
        **{"down": empty(hidden, inter), "k_cache": cache, "v_cache": cache},
        **{"q_norm": norm, "k_norm": norm, "qkv_bias": empty(1) if bias else None},
    )
    tables = {"embedding": empty(2048, hidden), "norm": empty(hidden), "head": empty(2048, hidden)}
    angles = {"cos": empty(1), "sin": empty(1)}
    with contextlib.suppress(nvrtc.BuildError):
        persistent.PersistentStep([layer] * 2, HeadShape(16, kv_heads, head_dim), **tables, **angles, eps=1e-6)


def asked() -> list[tuple[Path, dict[str, int]]]:
    """Sources, and the macros that the host side has for them."""
    found: list[tuple[Path, dict[str, int]]] = []

    def record_all(path: Path, macros: Sequence[Mapping[str, int]], *_: object) -> list[nvrtc.Kernel]:
        found.extend((path, dict(each)) for each in macros)
        return []

    def record(path: Path, macros: Mapping[str, int], _: torch.device) -> bytes:
        found.append((path, dict(macros)))
        return b""

    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(torch.cuda, "get_device_capability", return_value=(9, 0)))
        for module in (few_rows, grouped_rows, expert_rows, fp8_linear, fp8_attention, latent_attention):
            stack.enter_context(mock.patch.object(module, "kernels", record_all))
        stack.enter_context(mock.patch.object(persistent, "compiled", record))
        stack.enter_context(mock.patch.object(persistent, "Kernel", side_effect=nvrtc.BuildError))
        for kind in ("fp8", "int8"):
            for block in (32, 64):
                few_rows._kernels.__wrapped__(CPU, kind, block)
        for variant in variants():
            grouped_rows._kernels.__wrapped__(CPU, variant)
        for kind, group, size, depth in EXPERTS:
            expert_rows._kernels.__wrapped__(CPU, expert_rows.Variant(kind, group, size, depth))
        fp8_linear._kernels.__wrapped__(CPU)
        for group in (1, 4, 8, 16):
            fp8_attention._kernel.__wrapped__(CPU, group)
        for parts, group in ((1, 8), (1, 16), (1, 20), (4, 32)):
            latent_attention._kernel.__wrapped__(CPU, latent_attention.Tile(parts, group, group))
        persistent_step(64, qk_norm=False, bias=True)
        persistent_step(128, qk_norm=True, bias=False)
    return found


def cases() -> Iterator[Any]:
    """A few by the short run, all by the long one."""
    for path, macros in asked():
        fast = path == few_rows.SOURCE and macros == {**macros, "FORMAT": 0, "WORDS": 64, "TILES": 2, "AHEAD": 0}
        name = "-".join([path.stem, *(f"{name}={value}" for name, value in macros.items())])
        yield pytest.param(path, macros, id=name, marks=[] if fast else pytest.mark.slow)


@pytest.mark.skipif(not NVCC and not nvrtc_is_there(), reason="needs NVRTC or nvcc")
@pytest.mark.parametrize(("path", "macros"), cases())
def test_a_source_compiles(path: Path, macros: dict[str, int], tmp_path: Path) -> None:
    if nvrtc_is_there():
        assert nvrtc.compile_source(path, macros, "sm_90a")
        return
    (tmp_path / "source.cu").write_bytes(nvrtc.source_of(path))
    options = ["-cubin", "-arch=sm_90a", "-std=c++17", "-o", "made", *(f"-D{name}={n}" for name, n in macros.items())]
    done = subprocess.run([str(NVCC), *options, "source.cu"], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "C7510" not in done.stderr, "products of the tensor cores wait for each other"
