"""Packed weights in the user's cache have the bits of fresh ones, and nothing but what is wanted is ever used."""

from __future__ import annotations

import itertools
import json
import multiprocessing
import os
import struct
import sys
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from bits import same_bits
from conftest import TestModel, mostly_slow
from gguf_files import write_models
from quantized_checkpoints import FORMATS, write_checkpoint
from weight_caches import CPU, build_apart, empty_decoder, load, use_cache

from ssd import LLM, SamplingParams
from ssd.errors import ConfigError
from ssd.kernels import cache
from ssd.kernels.cpu.kernels import Kernels
from ssd.models import weight_cache, weight_file, weight_folder
from ssd.models.checkpoint import Weights
from ssd.models.decoder import Decoder
from ssd.models.weight_cache import WeightCache


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with all types of GGUF's blocks, some of them fused: 0.7 MB."""
    return write_models(tmp_path_factory.mktemp("gguf"))["packed"]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    use_cache(tmp_path / "cache", monkeypatch)
    return tmp_path / "cache"


def is_kept(path: Path | str, **options: Any) -> bool:
    return load(path, **options)[1]


def check_same(one: Any, other: Any) -> int:
    """Every tensor to the bit, and everything else; returns the number of tensors."""
    assert type(one) is type(other)
    if isinstance(one, torch.Tensor):
        assert same_bits(one, other)
        return 1
    if isinstance(one, tuple):
        assert len(one) == len(other)
        return sum(check_same(*each) for each in zip(one, other, strict=True))
    if is_dataclass(one):
        return sum(check_same(getattr(one, own.name), getattr(other, own.name)) for own in fields(one))
    assert one is other if isinstance(one, Kernels) else one == other
    return 0


def check_weights(one: Decoder, other: Decoder) -> None:
    found, expected = (weight_cache._loadable(each) for each in (one, other))
    assert found.keys() == expected.keys()
    for name, each in found.items():
        tensors = sum(check_same(getattr(each, own), getattr(expected[name], own)) for own in each.loaded)
        assert tensors or name.endswith("_scale")


def check_bits(path: Path | str, **options: Any) -> None:
    """Those of weights that are packed, written and mapped are the same."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(weight_folder.LIMIT, "0")
        fresh, _ = load(path, **options)
    (written, first), (mapped, second) = load(path, **options), load(path, **options)
    assert (first, second) == (False, True)
    check_weights(written, fresh)
    check_weights(mapped, fresh)


# --- bits -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gguf_weights_have_the_same_bits(folder: Path, packed: Path, dtype: torch.dtype) -> None:
    check_bits(packed, dtype=dtype)


@pytest.mark.parametrize(
    ("kind", "form"),
    mostly_slow(
        itertools.product(
            ("llama-biased", "qwen3", "gpt-oss", "qwen3-moe", "deepseek-v3"), (None, "int8+bf16", "int4")
        ),
        fast={
            *[("llama-biased", None), ("qwen3", "int8+bf16"), ("gpt-oss", "int4")],
            *[("qwen3-moe", None), ("deepseek-v3", "int8+bf16")],
        },
    ),
)
def test_weights_of_all_layers_have_the_same_bits(
    folder: Path, make_model: Callable[[str], TestModel], kind: str, form: str | None
) -> None:
    """Biases, norms of heads, sinks, experts; floats and rounded ones."""
    check_bits(make_model(kind).path, form=form)


@pytest.mark.parametrize("name", mostly_slow(FORMATS, fast=list(FORMATS)[::6]))
def test_published_formats_have_the_same_bits(folder: Path, tmp_path: Path, name: str) -> None:
    """Catches a class of weights that is not among those that are written (orders of columns, static scales)."""
    write_checkpoint(tmp_path, FORMATS[name])
    check_bits(tmp_path)


def test_texts_are_the_same(folder: Path, packed: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Of target and draft, whose weights are other ones of the same file."""

    def write() -> list[int]:
        draft = {"mode": "sd", "draft": str(packed), "k": 2, "draft_quantization": "dequantized"}
        with LLM(str(packed), device="cpu", max_model_len=64, speculation=draft) as llm:
            return llm.generate([[5, 6, 7]], SamplingParams(max_new_tokens=24, ignore_eos=True))[0].token_ids

    caplog.set_level("INFO", "ssd")
    first = write()
    assert "mapped" not in caplog.text
    assert len(list(folder.iterdir())) == 2
    assert write() == first
    assert caplog.text.count("mapped from the cache") == 2


# --- what is used -----------------------------------------------------------------------------------------------------


def test_a_changed_checkpoint_is_packed_anew(folder: Path, packed: Path, tmp_path: Path) -> None:
    """One that was touched, and one that was edited within the time of change. Its old weights are replaced."""
    path = tmp_path / "model.gguf"
    path.write_bytes(packed.read_bytes())
    assert [is_kept(path), is_kept(path)] == [False, True]
    os.utime(path, ns=(0, 1))
    assert [is_kept(path), is_kept(path)] == [False, True]
    data = bytearray(path.read_bytes())
    data[-100] ^= 1
    path.write_bytes(data)
    os.utime(path, ns=(0, 1))
    before, [file] = load(packed)[0], folder.glob("model*")
    decoder, kept = load(path)
    assert not kept
    with pytest.raises(AssertionError):
        check_weights(decoder, before)
    assert list(folder.glob("model*")) == [file]
    assert is_kept(path)


def test_options_have_files_of_their_own(folder: Path, packed: Path) -> None:
    """And so do the kernels of other instruction sets."""
    for options in ({}, {"dtype": torch.bfloat16}, {"form": "dequantized"}):
        assert [is_kept(packed, **options), is_kept(packed, **options)] == [False, True]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(empty_decoder(packed)[1].ops.kernels, "variant", "another")
        assert [is_kept(packed), is_kept(packed)] == [False, True]
    assert is_kept(packed)
    assert len(list(folder.iterdir())) == 4


@pytest.mark.parametrize("changed", ["code", "build", "version"])
def test_other_code_packs_anew(folder: Path, packed: Path, changed: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert [is_kept(packed), is_kept(packed)] == [False, True]
    if changed == "code":
        monkeypatch.setattr(weight_cache, "_code", lambda: "another")
    elif changed == "build":
        monkeypatch.setattr(empty_decoder(packed)[1].ops.kernels, "build", "another")
    else:
        monkeypatch.setattr(weight_file, "_VERSION", 2)
    assert [is_kept(packed), is_kept(packed)] == [False, True]
    assert len(list(folder.iterdir())) == 1


DAMAGE: dict[str, Callable[[bytes], bytes]] = {
    "nothing in it": lambda data: b"",
    "a start only": lambda data: data[:20],
    "half of it": lambda data: data[: len(data) // 2],
    "one byte less": lambda data: data[:-1],
    "one byte more": lambda data: data + b"x",
    "a bit of the data": lambda data: data[:400_000] + bytes([data[400_000] ^ 4]) + data[400_001:],
    "a bit of the header": lambda data: data[:-9] + bytes([data[-9] ^ 4]) + data[-8:],
    "zeros": lambda data: bytes(len(data)),
    "another program's": lambda data: b"GGUF" + data[4:],
    "a place beyond the end": lambda data: data[:16] + struct.pack("<Q", 1 << 60) + data[24:],
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_file_is_packed_anew(
    folder: Path, packed: Path, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    fresh, _ = load(packed)
    [file] = folder.iterdir()
    data = file.read_bytes()
    file.unlink()  # `fresh` is a map of it
    file.write_bytes(DAMAGE[damage](data))
    decoder, kept = load(packed)
    assert not kept
    check_weights(decoder, fresh)
    assert [record.message.count("is damaged") for record in caplog.records] == [1]
    assert is_kept(packed)


def test_a_file_of_something_else_is_packed_anew(folder: Path, packed: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Whole, with the right key, but without the tensors: no user has that, and it is no error either."""
    load(packed)
    [file] = folder.iterdir()
    key = weight_file.read_header(file)["key"]
    for loaded in ({}, {"model.norm.weight": [{"place": 1 << 40, "type": "float32", "shape": [256]}]}):
        writer = weight_file.Writer(folder)
        writer.add(memoryview(bytes(100)))
        writer.publish(file, {"key": key, "loaded": loaded})
        writer.close()
        assert not is_kept(packed)
        assert is_kept(packed)
    assert caplog.text.count("is damaged") == 2


def test_weights_cannot_be_written_to(folder: Path, packed: Path) -> None:
    """They belong to all processes: a defect ends one of them, and leaves the others' weights as they are."""
    load(packed)
    [file] = folder.iterdir()
    _, mapped = weight_file.map_file(file)
    with pytest.raises(TypeError):
        mapped[0] = 1


# --- disks ------------------------------------------------------------------------------------------------------------


def test_without_a_place_nothing_is_kept(packed: Path, monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    """One warning, whatever is loaded."""

    def refused() -> Path:
        raise OSError(30, "Read-only file system")

    empty_decoder(packed)  # whose kernels are in the cache, too
    monkeypatch.setattr(cache, "lasting", refused)
    monkeypatch.setattr(weight_cache, "LEAST", 0)
    monkeypatch.setattr(weight_cache, "_warned", set())
    monkeypatch.setenv(weight_folder.LIMIT, "1")
    assert [is_kept(packed), is_kept(packed)] == [False, False]
    assert [record.message for record in caplog.records] == [
        "packed weights are not kept for later starts: [Errno 30] Read-only file system"
    ]


@pytest.mark.parametrize("calls", [0, 1, 30])
def test_a_full_disk_keeps_nothing(
    folder: Path, packed: Path, calls: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Whenever it becomes full: the weights that were mapped stay so, the others stay in memory."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(weight_folder.LIMIT, "0")
        fresh, _ = load(packed)
    write, left = weight_file.Writer._write, iter(range(calls))

    def limited(self: Any, data: Any) -> None:
        if next(left, None) is None:
            raise OSError(28, "No space left on device")
        write(self, data)

    monkeypatch.setattr(weight_file.Writer, "_write", limited)
    decoder, _ = load(packed)
    check_weights(decoder, fresh)
    assert not list(folder.iterdir())
    assert len(caplog.records) == 1


def test_a_checkpoint_that_fails_leaves_nothing(folder: Path, packed: Path) -> None:
    checkpoint, decoder = empty_decoder(packed)
    kept = WeightCache.of(checkpoint, decoder, {})
    assert kept is not None

    def failing() -> Weights:
        yield from islice(checkpoint.weights(CPU, torch.float32), 9)
        raise OSError("of the checkpoint")

    with pytest.raises(OSError, match="of the checkpoint"), kept.filling() as complete:
        decoder.load(failing(), complete)
    assert not list(folder.iterdir())


def test_the_least_recently_used_go(folder: Path, packed: Path, tmp_path: Path, monkeypatch: Any) -> None:
    """Where the limit is reached; using one keeps it. What a killed process left goes, too."""
    paths = [tmp_path / f"{name}.gguf" for name in "abc"]
    for i, path in enumerate(paths):
        path.write_bytes(packed.read_bytes())
        if i < 2:
            load(path)
    size = max(entry.size for entry in weight_folder.entries(folder))
    for i, entry in enumerate(weight_folder.entries(folder)):
        os.utime(entry.path, (1000 + i, 1000 + i))
    (folder / f"{weight_file.SCRATCH}x").touch()
    os.utime(folder / f"{weight_file.SCRATCH}x", (1000, 1000))
    assert is_kept(paths[0])
    monkeypatch.setenv(weight_folder.LIMIT, str(2.5 * size / (1 << 30)))
    assert not is_kept(paths[2])
    assert sorted(file.name[0] for file in folder.iterdir()) == ["a", "c"]


def test_files_that_another_process_completes_meanwhile_are_passed_over(
    folder: Path, packed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches weights that are not kept because the file of another process got its name between two looks."""
    place, look = weight_folder.folder(), Path.glob
    gone = place / f"{weight_file.SCRATCH}x"
    monkeypatch.setattr(Path, "glob", lambda path, pattern: [*look(path, pattern), gone])
    assert weight_folder.make_room(place, 1, place / "own")


def test_what_is_larger_than_the_limit_is_not_kept(folder: Path, packed: Path, monkeypatch: Any, caplog: Any) -> None:
    monkeypatch.setenv(weight_folder.LIMIT, "0.0001")
    assert [is_kept(packed), is_kept(packed)] == [False, False]
    assert "not kept" in caplog.text
    monkeypatch.setenv(weight_folder.LIMIT, "much")
    with pytest.raises(ConfigError, match="SSD_WEIGHT_CACHE='much': expected a number of GiB"):
        is_kept(packed)


def test_a_disk_limits_the_cache(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(weight_folder.LIMIT)
    place = weight_folder.folder()
    monkeypatch.setattr(weight_folder.shutil, "disk_usage", lambda _: type("", (), {"free": 100 << 30}))
    assert weight_folder.limit(place) == 20 << 30
    monkeypatch.setattr(weight_folder.shutil, "disk_usage", lambda _: type("", (), {"free": 1000 << 30}))
    assert weight_folder.limit(place) == 50 << 30


# --- several processes ------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_processes_that_build_at_once_do_not_harm_each_other(folder: Path, packed: Path) -> None:
    context = multiprocessing.get_context("spawn")
    start, results = context.Barrier(2), context.Queue()
    processes = [context.Process(target=build_apart, args=(packed, folder, start, results)) for _ in range(2)]
    for process in processes:
        process.start()
    found = [results.get(timeout=120) for _ in processes]
    for process in processes:
        process.join(60)
    decoder, kept = load(packed)
    assert kept
    assert found == 2 * [float(decoder.head.logits(torch.ones(1, 256)).double().sum())]
    assert len(list(folder.iterdir())) == 1


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_processes_share_the_memory(folder: Path, packed: Path) -> None:
    """Weights are maps of the file from the first time on, that nobody can write to and all share."""
    for _ in range(2):
        decoder, _ = load(packed)
        [file] = folder.iterdir()
        maps = [line.split() for line in Path("/proc/self/maps").read_text().splitlines()]
        places = [
            range(*(int(end, 16) for end in line[0].split("-")))
            for line in maps
            if line[1] == "r--s" and int(line[4]) == file.stat().st_ino
        ]
        weight = decoder.layers[0].mlp.gate_up.weight
        assert any(weight.packed.data.data_ptr() in place for place in places)
        assert weight.packed.data.data_ptr() % 64 == 0


def test_the_header_says_what_it_is(folder: Path, packed: Path) -> None:
    load(packed)
    [file] = folder.iterdir()
    header = weight_file.read_header(file)
    assert header["model"] == "packed.gguf"
    assert header["weights"].endswith("for float32")
    assert json.dumps(header).isascii()
    assert file.stat().st_mode & 0o777 == 0o600
