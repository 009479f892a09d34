"""Memory: what does not fit is refused before anything is loaded, in one line that says what would fit."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from conftest import mostly_slow
from random_weights import RandomCheckpoint

from ssd import LLM, ConfigError
from ssd.assembly import fit, memory
from ssd.assembly.device import resolve_dtype
from ssd.assembly.fit import check_fits
from ssd.assembly.memory import weight_bytes
from ssd.assembly.open import open_checkpoint
from ssd.config import EngineConfig
from ssd.grafts.shapes import SHAPES
from ssd.layers.formats.rounded import rounded
from ssd.layers.spec import KVGroup
from ssd.models.decoder import Decoder

GIB = 1 << 30
CPU, CUDA = torch.device("cpu"), torch.device("cuda")
SD = {"mode": "sd", "draft": "tiny-qwen3-draft"}


@pytest.fixture
def free(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Sets the free memory of the CPU; loading anything is an error."""

    def load(*arguments: Any) -> None:
        raise AssertionError("weights are loaded")

    def set_free(gibibytes: float) -> None:
        monkeypatch.setattr(fit, "available_bytes", lambda *_: int(gibibytes * GIB))

    monkeypatch.setattr(Decoder, "load", load)
    return set_free


def refusal(model: str, **options: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        LLM(model, device="cpu", **options)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_weights_beyond_the_memory_are_refused_with_a_shape_that_fits(free: Any) -> None:
    free(22)
    text = refusal("graft:tiny-qwen3@qwen3-32b")
    assert "needs 122.0 GiB for the weights in float32, but 22.0 GiB of memory are free: use the shape qwen3-4b" in text
    assert "use the shape qwen3-8b" in refusal("graft:tiny-qwen3@qwen3-32b", dtype="bfloat16")
    free(70)
    assert "use dtype='bfloat16' (61.0 GiB) or the shape qwen3-14b" in refusal("graft:tiny-qwen3@qwen3-32b")
    free(0.001)
    assert refusal("tiny-qwen3").endswith("use a smaller model")


def test_rounding_is_suggested_where_nothing_exact_fits(free: Any) -> None:
    """Not where bfloat16 would do, which is exact, nor for weights that are rounded already."""
    model = "graft:tiny-qwen3@qwen3-32b"
    free(40)
    assert "use quantization='fp8' (32.0 GiB) or the shape" in refusal(model, dtype="bfloat16")
    free(70)
    assert "fp8" not in refusal(model)
    free(25)
    assert "fp8" not in refusal(model, dtype="bfloat16")
    for options in ({"quantization": "fp8"}, {"model": f"{model}:fp8"}):
        text = refusal(**{"model": model, "dtype": "bfloat16", **options})
        assert "needs 32.0 GiB for the weights in fp8" in text
        assert "quantization='fp8'" not in text
        assert text.endswith("use the shape qwen3-14b")


def test_the_draft_is_counted_too(free: Any) -> None:
    """Catches a draft that is forgotten, in this process and in its own."""
    target = weight_bytes(open_checkpoint("tiny-qwen3").config, torch.float32)
    free((target + 1000) / GIB)
    for speculation in (SD, {**SD, "mode": "ssd", "placement": "process"}):
        assert "and its draft need" in refusal("tiny-qwen3", speculation=speculation)


def test_a_draft_in_two_processes_is_counted_twice(free: Any) -> None:
    """mode="auto" on a CPU: SD's draft is in the engine's process, SSD's in a worker."""
    free(4.6)
    draft = {"draft": "graft:tiny-qwen3-draft@qwen3-0.6b", "placement": "process"}
    model = "graft:tiny-qwen3@qwen3-0.6b"
    with pytest.raises(AssertionError, match="weights are loaded"):
        LLM(model, device="cpu", speculation={"mode": "ssd", **draft})
    assert "and its draft need 6.7 GiB" in refusal(model, speculation={"mode": "auto", **draft})


@pytest.mark.parametrize("form", mostly_slow(["fp8", "int8", "int4"], fast={"int4"}))
def test_a_quantized_draft_needs_less(free: Any, form: str) -> None:
    """Catches an estimate for weights that are not there: a pair that fits only with a smaller draft is not refused."""
    target, draft = (open_checkpoint(name).config for name in ("tiny-qwen3", "tiny-qwen3-draft"))
    weights = weight_bytes(target, torch.float32) + weight_bytes(draft, torch.float32)
    free((weights - 1000) / GIB)
    assert "and its draft need" in refusal("tiny-qwen3", speculation=SD)
    with pytest.raises(AssertionError, match="weights are loaded"):
        LLM("tiny-qwen3", device="cpu", max_num_seqs=1, max_model_len=64, speculation=SD | {"draft_quantization": form})


@pytest.mark.parametrize(
    ("name", "form", "gigabytes"),
    [
        *(("llama-3.2-1b", "int8", 1.76), ("llama-3.2-1b", "int8+bf16", 3.71), ("llama-3.2-1b", "int4", 1.18)),
        *(("llama-3.1-8b", "fp8", 8.56), ("deepseek-v3", None, 2 * 671.03), ("glm-4.7-flash", None, 2 * 29.94)),
    ],
)
def test_bytes_of_quantized_weights(name: str, form: Any, gigabytes: float) -> None:
    """The embedding is kept as it is; a tied head (the 1B's) is a quantised copy of it."""
    assert weight_bytes(SHAPES[name], torch.bfloat16, rounded(form)) == pytest.approx(gigabytes * 1e9, rel=0.01)


@pytest.mark.parametrize(("name", "value", "step"), [("num_kv_blocks", 10**6, 1), ("max_model_len", 4096, 16)])
def test_kv_beyond_the_memory_is_refused_with_what_fits(free: Any, name: str, value: int, step: int) -> None:
    """The number in the message is the largest that is not refused."""
    free(0.3)
    model = RandomCheckpoint(SHAPES["cpu-75m"])

    def check(value: int) -> None:
        check_fits(EngineConfig("random", max_num_seqs=1, **{name: value}), [model], CPU)  # type: ignore[arg-type]

    with pytest.raises(ConfigError, match=rf"{name}=\d+ needs .* left beside the weights: use at most") as caught:
        check(value)
    most = int(str(caught.value).split("use at most ")[1].split(",")[0])
    check(most)
    with pytest.raises(ConfigError):
        check(most + 2 * step)


def test_kv_in_fp8_needs_a_quarter_of_float32_and_that_of_a_draft_does_not(free: Any) -> None:
    """Catches an estimate by the model's type, and one that takes the draft's for fp8, too."""
    free(0.6)
    model = RandomCheckpoint(SHAPES["cpu-75m"])

    def most_blocks(count: int, kv_cache_dtype: Any) -> int:
        config = EngineConfig("random", max_num_seqs=1, num_kv_blocks=10**6, kv_cache_dtype=kv_cache_dtype)
        with pytest.raises(ConfigError, match="use at most") as caught:
            check_fits(config, [model] * count, CPU)
        return int(str(caught.value).split("use at most ")[1].split(",")[0])

    assert most_blocks(1, "fp8") == pytest.approx(4 * most_blocks(1, "auto"), abs=4)
    assert most_blocks(2, "fp8") == pytest.approx(most_blocks(2, "auto") * 2 / 1.25, abs=2)


def test_too_many_sequences_for_the_memory_are_refused(free: Any) -> None:
    """Unless it is the weights that leave no room: fewer sequences would not help then."""
    weights = weight_bytes(open_checkpoint("tiny-qwen3").config, torch.float32)
    free((weights + 1000) / GIB)
    assert "for the weights" in refusal("tiny-qwen3", max_num_seqs=10**7)
    free(8)
    assert "lower max_num_seqs or max_model_len" in refusal("tiny-qwen3", max_num_seqs=10**7)


def test_a_gpu_too_small_for_the_weights_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """24 GiB, of which 4 are in use by others."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda *_: (20 * GIB, 24 * GIB))
    monkeypatch.setattr("ssd.assembly.device.shared_memory", lambda device: 163 << 10)
    model = RandomCheckpoint(SHAPES["llama-3.1-8b"])
    check_fits(EngineConfig("random"), [model], CUDA)
    for options, remedy in (
        ({"dtype": "float32"}, r"29.9 GiB .* float32, but 17.6 GiB of GPU .* dtype='bfloat16' \(15.0 GiB\)"),
        ({"gpu_memory_utilization": 0.5}, "use a higher gpu_memory_utilization or a smaller model"),
        ({"num_kv_blocks": 10**5}, "use at most"),
    ):
        with pytest.raises(ConfigError, match=remedy):
            check_fits(EngineConfig("random", **options), [model], CUDA)  # type: ignore[arg-type]


def test_the_free_memory_respects_the_limits_of_control_groups(tmp_path: Path) -> None:
    """Catches an engine in a container that fills the memory of its host; file caches are free memory."""
    groups = tmp_path / "cgroup"
    groups.write_text("5:cpu:/\n4:memory:/old\n0::/outer/inner\n")

    def write(folder: str, names: tuple[str, str, str], limit: str, used: int, cache: int) -> None:
        (tmp_path / folder).mkdir(parents=True, exist_ok=True)
        (tmp_path / folder / names[0]).write_text(f"{limit}\n")
        (tmp_path / folder / names[1]).write_text(f"{used}\n")
        (tmp_path / folder / "memory.stat").write_text(f"anon 1\n{names[2]} {cache}\n")

    v2 = ("memory.max", "memory.current", "inactive_file")
    write("outer", v2, "1000", 700, 100)
    write("outer/inner", v2, "max", 700, 100)
    write("memory/old", ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"), "900", 1000, 0)
    assert list(memory._cgroup_memory(groups, tmp_path)) == [0, 400]
    assert list(memory._cgroup_memory(tmp_path / "none", tmp_path)) == []
    assert 0 < memory.available_bytes(EngineConfig("m"), CPU) < 1 << 50


def test_a_machine_without_limits_of_control_groups_has_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """As most machines are, outside of containers."""
    monkeypatch.setattr(memory, "_cgroup_memory", lambda: iter(()))
    assert memory.available_bytes(EngineConfig("m"), CPU) > 0


@pytest.mark.parametrize(
    ("options", "num_blocks", "said"),
    [
        ({"max_model_len": 100, "num_kv_blocks": 2}, 2, "lower it to that, or raise num_kv_blocks to at least 7"),
        ({"max_model_len": 100}, 2, "lower it to that, or raise gpu_memory_utilization"),
        ({}, 0, "no memory is left for KV .* raise gpu_memory_utilization"),
    ],
)
def test_a_kv_pool_too_small_for_a_sequence_names_the_option_that_helps(
    options: Any, num_blocks: int, said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        memory.fitting_length(EngineConfig("m", **options), 100, num_blocks, lambda tokens: -(-tokens // 16))


def test_the_kv_pool_of_a_cpu_holds_a_sequence_of_the_wanted_length(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a pool of the default size that refuses a max_model_len for which there is memory."""
    decoder: Any = SimpleNamespace(device=CPU, kv_bytes_per_token=1 << 20, kv_groups=[KVGroup(None, ())])
    models = [memory.Loaded(decoder, 8192, 1)]
    for free, default in ((100, 256), (2, 64)):  # blocks of 16 MiB: 4 GiB at most, and half of what is free
        monkeypatch.setattr(memory, "available_bytes", lambda *_, free=free: free * GIB)
        assert memory.kv_blocks(EngineConfig("m"), models, 8192) == default
        assert memory.kv_blocks(EngineConfig("m", max_model_len=8192), models, 8192) == 512


def test_a_gpu_needs_memory_for_its_share_of_a_split_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """A 70B in bfloat16 is 131 GiB: 33 on each of four GPUs, and 2 KV heads of 8. A CPU has all ranks."""
    monkeypatch.setattr(fit, "available_bytes", lambda *_: 40 * GIB)
    monkeypatch.setattr(fit.torch.cuda, "mem_get_info", lambda _: (40 * GIB, 80 * GIB))
    monkeypatch.setattr(fit.torch.cuda, "device_count", lambda: 5)
    monkeypatch.setattr(fit, "resolve_dtype", lambda *_: torch.bfloat16)
    checkpoint = RandomCheckpoint(SHAPES["llama-3.1-70b"])
    config = EngineConfig("random", tensor_parallel_size=4, num_kv_blocks=1)
    check_fits(config, [checkpoint], CUDA)
    with pytest.raises(ConfigError, match=r"needs 131\.4 GiB for the weights"):
        check_fits(config, [checkpoint], CPU)
    with pytest.raises(ConfigError, match=r"needs 65\.7 GiB for the weights.*: use tensor_parallel_size=4$"):
        check_fits(replace(config, tensor_parallel_size=2), [checkpoint], CUDA)
    one, four, sixteen = (checkpoint.config.kv_bytes_per_token(torch.bfloat16, ranks) for ranks in (1, 4, 16))
    assert (one, four, sixteen) == (2 * 80 * 8 * 128 * 2, one // 4, one // 8)


def test_windows_need_memory_for_a_window() -> None:
    """Catches an estimate by the whole length: 8 layers, half of them with a window of 1,024 tokens, or all."""
    plain = RandomCheckpoint(SHAPES["llama-3.2-1b"]).config.with_layers(8)
    windowed = plain.with_layers(window=1024)
    mixed = replace(plain, layers=(*plain.layers[:4], *windowed.layers[:4]))
    whole = plain.kv_bytes_per_token(torch.bfloat16)
    config = EngineConfig("m", block_size=16, max_num_batched_tokens=512)
    # A window, the round in flight and the next touch 129 blocks at most.
    cases = (plain, whole, 300 * 16), (mixed, whole // 2, (300 - 129) * 16), (windowed, whole, 1 << 17)
    for model, bytes_per_token, longest in cases:
        assert model.kv_bytes_per_token(torch.bfloat16, windowed=True) == bytes_per_token
        assert model.kv_bytes_per_token(torch.bfloat16) == whole, "a draft keeps everything"
        needed = memory.blocks_for(config, model.kv_groups(windowed=True), CPU)
        assert memory.longest_sequence(300, needed, 1 << 17) == longest
        assert needed(longest) <= 300 < needed(longest + 1) or longest == 1 << 17


def test_float32_is_refused_where_attention_does_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    config, cuda = EngineConfig("any", dtype="float32"), torch.device("cuda")
    monkeypatch.setattr("ssd.assembly.device.shared_memory", lambda device: 99 << 10)
    with pytest.raises(ConfigError, match=r"heads of 128 dimensions.*use bfloat16"):
        resolve_dtype(config, SHAPES["llama-3.1-8b"], cuda)
    assert resolve_dtype(config, SHAPES["llama-3.2-1b"], cuda) is torch.float32
    monkeypatch.setattr("ssd.assembly.device.shared_memory", lambda device: 163 << 10)
    assert resolve_dtype(config, SHAPES["llama-3.1-8b"], cuda) is torch.float32
