"""What the persistent kernel's host side promises, without a GPU."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
from bits import same_bits
from random_weights import RandomCheckpoint
from reference_ops import ReferenceOps

from ssd.kernels.cuda import nvrtc
from ssd.kernels.cuda import persistent as kernel
from ssd.kernels.ops import DeviceBatch, HeadShape
from ssd.layers.formats import FormatOf, dense
from ssd.layers.formats.rounded import rounded
from ssd.layers.linear import Linear
from ssd.layers.parameter import Build
from ssd.models import persistent
from ssd.models.config import equal_layers
from ssd.models.decoder import Decoder, KVCache

CPU = torch.device("cpu")


def source_fields(struct: str) -> list[str]:
    body = re.search(rf"struct {struct} {{(.*?)\n}};", kernel.SOURCE.read_text(), re.DOTALL)
    assert body is not None
    code = re.sub(r"//[^\n]*", "", body[1])
    return [name for line in code.split(";") for name in re.findall(r"(\w+)\s*(?:,|$)", line.strip())]


def test_structures_have_the_sources_fields_in_its_order() -> None:
    assert source_fields("Layer") == [field.name for field in fields(kernel.StepLayer)]
    assert source_fields("Params") == [name for name, _ in kernel.Params._fields_]


def test_the_source_is_package_data() -> None:
    project = (Path(kernel.__file__).parents[3] / "pyproject.toml").read_text(encoding="utf-8")
    assert '"kernels/cuda/csrc/*"' in project
    assert kernel.SOURCE.parent.name == "csrc"


def make_decoder(format_of: FormatOf = dense) -> tuple[Decoder, KVCache]:
    config = equal_layers("llama", 64, 32, 64, 2, 4, 2, 8, 64)
    decoder = Decoder(config, Build(ReferenceOps(), CPU, torch.float32, format_of=format_of), max_positions=64)
    decoder.load(RandomCheckpoint(config).weights(CPU, torch.float32))
    return decoder, decoder.make_kv_cache(2, 16)


class FakeStep:
    """The decoder's own logits, a little off."""

    def __init__(self, decoder: Decoder, kv: KVCache, error: float) -> None:
        self.decoder, self.kv, self.error, self.calls = decoder, kv, error, 0

    def __call__(self, batch: DeviceBatch) -> torch.Tensor:
        self.calls += 1
        return self.decoder(batch, self.kv) * (1 + self.error)


def test_a_step_that_agrees_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    decoder, kv = make_decoder()
    step = FakeStep(decoder, kv, 0.01)
    monkeypatch.setattr(persistent, "_build", lambda *_: step)
    assert persistent.persistent_step(decoder, kv) is step  # type: ignore[comparison-overlap]
    assert step.calls == 2


@pytest.mark.parametrize("error", [0.5, float("nan")])
def test_a_step_that_differs_is_not_used(
    error: float, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    decoder, kv = make_decoder()
    monkeypatch.setattr(persistent, "_build", lambda *_: FakeStep(decoder, kv, error))
    assert persistent.persistent_step(decoder, kv) is None
    assert "differ" in caplog.text


def test_a_model_without_a_kernel_keeps_its_own(caplog: pytest.LogCaptureFixture) -> None:
    decoder, kv = make_decoder()  # float32
    with caplog.at_level("INFO", logger="ssd"):
        assert persistent.persistent_step(decoder, kv) is None
    assert "bfloat16" in caplog.text


def test_a_quantised_model_keeps_its_own(caplog: pytest.LogCaptureFixture) -> None:
    decoder, kv = make_decoder(rounded("int8"))
    with caplog.at_level("INFO", logger="ssd"):
        assert persistent.persistent_step(decoder, kv) is None
    assert "quantised" in caplog.text


def test_a_quantised_model_that_keeps_its_weights_has_one() -> None:
    decoder, _ = make_decoder(rounded("int8+bf16"))
    persistent._accept(decoder)
    plain, _ = make_decoder()
    pairs = zip(decoder.parameters(), plain.parameters(), strict=True)
    assert all(same_bits(persistent._weight(a), b.weight.dense) for a, b in pairs if isinstance(b, Linear))


@pytest.mark.parametrize(
    ("hidden", "inter", "heads"),
    [(4096, 8192, HeadShape(32, 8, 128)), (2048, 8200, HeadShape(32, 8, 64)), (2048, 8192, HeadShape(32, 8, 96))],
)
def test_shapes_that_the_kernel_does_not_have(
    hidden: int, inter: int, heads: HeadShape, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    embedding = torch.empty((1024, hidden), dtype=torch.bfloat16, device=CPU)
    with pytest.raises(nvrtc.BuildError, match="shape"):
        kernel._check(embedding, heads, hidden, inter)
    kernel._check(embedding[:, :2048], HeadShape(32, 8, 64), 2048, 8192)


def test_a_library_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", "99.0")
    with pytest.raises(nvrtc.BuildError, match="libnvrtc"):
        nvrtc._library.__wrapped__()


def test_a_source_that_does_not_compile_is_named_with_its_macros(monkeypatch: pytest.MonkeyPatch) -> None:
    class Library:
        """Says that the program has an error."""

        def nvrtcCompileProgram(self, *_: object) -> int:  # noqa: N802
            return 6

        def nvrtcGetProgramLogSize(self, _: object, size: Any) -> None:  # noqa: N802
            size._obj.value = 64

        def nvrtcGetProgramLog(self, _: object, text: Any) -> None:  # noqa: N802
            text.value = b"no such overload"

        def __getattr__(self, _: str) -> Any:
            return lambda *_: 0

    monkeypatch.setattr(nvrtc, "_library", Library)
    with pytest.raises(nvrtc.BuildError, match=r"persistent\.cu .*sm_90a.*-DHIDDEN=64 -DHALVES=2: no such overload"):
        nvrtc.compile_source(kernel.SOURCE, {"HIDDEN": 64, "HALVES": 2}, "sm_90a")


def test_a_cubin_is_compiled_once_per_shape(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    compiled: list[int] = []

    class Library:
        def nvrtcVersion(self, *_: object) -> None:  # noqa: N802
            return

    def fake(path: Path, macros: dict[str, int], architecture: str) -> bytes:
        assert (path, architecture) == (kernel.SOURCE, "sm_90a")
        compiled.append(macros["HIDDEN"])
        return b"cubin %d" % macros["HIDDEN"]

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    monkeypatch.setattr(nvrtc, "_library", Library)
    monkeypatch.setattr(nvrtc, "compile_source", fake)
    for hidden in (1024, 2048, 1024):
        assert nvrtc.compiled(kernel.SOURCE, {"HIDDEN": hidden}, CPU) == b"cubin %d" % hidden
    assert compiled == [1024, 2048]
    for path in (tmp_path / "ssd").iterdir():
        path.write_bytes(b"cubin")  # cut off: the driver does not know how much is there
    assert nvrtc.compiled(kernel.SOURCE, {"HIDDEN": 1024}, CPU) == b"cubin 1024"
    assert compiled == [1024, 2048, 1024]
