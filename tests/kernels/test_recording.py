"""Recorded C calls: the same bits as the calls themselves, for changed inputs too."""

from __future__ import annotations

import pytest
import torch
from bits import same_bits
from chains import HIDDEN, quantized_layer

from ssd.kernels.cpu import library, recording
from ssd.kernels.cpu.pack import PackedWeight
from ssd.kernels.cpu.recording import Arena, Calls, Recordings
from ssd.kernels.cpu.threads import use_threads

kernels = library.load()


def run(recordings: Recordings, x: torch.Tensor, weight: PackedWeight, norm: torch.Tensor) -> torch.Tensor:
    def chain() -> torch.Tensor:
        y = kernels.rms_norm(kernels.linear(x, weight), norm, 1e-5)
        return kernels.linear(kernels.rms_norm(y, norm, 1e-5), weight)

    return recordings.run("key", chain, None)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_repeats_with_the_numbers_and_the_threads_of_now(dtype: torch.dtype) -> None:
    weight, norm = kernels.pack_linear(torch.randn(64, 64, dtype=dtype)), torch.ones(64, dtype=dtype)
    recordings, x = Recordings(kernels.repeat), torch.empty(3, 64, dtype=dtype)
    for threads in (1, 2, 1, 2):
        x.copy_(torch.randn(3, 64))
        expected = run(Recordings(kernels.repeat), x, weight, norm)
        with use_threads(threads):
            assert same_bits(run(recordings, x, weight, norm), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("group", "coarse"), [(32, True), (128, True), (128, False)])
def test_rows_that_are_packed_by_the_call_before(dtype: torch.dtype, group: int, coarse: bool) -> None:
    layer = quantized_layer(kernels, dtype, group, coarse=coarse)
    for rows in (1, 3, 16, 64, 65):
        recordings, x = Recordings(kernels.repeat), torch.empty(rows, HIDDEN, dtype=dtype)
        for threads in (1, 1, 1, 2, 5, 16):
            x.copy_(torch.randn(rows, HIDDEN))
            expected = layer(x)
            with use_threads(threads):
                found = recordings.run("key", lambda x=x: layer(x), None)
            assert same_bits(found, expected), (rows, threads)


def test_what_torch_computes_is_not_recorded() -> None:
    recordings, x = Recordings(kernels.repeat), torch.ones(2, 2)
    for value in range(4):
        x.fill_(value)
        assert same_bits(recordings.run("key", lambda: x + 1, None), x + 1)


def test_copies_are_not_recorded() -> None:
    """Catches `contiguous` that is taken for harmless where it copies: the calls behind it would be repeated with the
    numbers of the copy that was recorded. Of a tensor that is contiguous it is recorded."""
    repeated: list[Calls] = []

    def repeat(calls: Calls) -> None:
        repeated.append(calls)
        kernels.repeat(calls)

    x, norm = torch.empty(4, 4), torch.ones(4)
    for key, rows in (("copy", x.t()), ("same", x)):
        recordings = Recordings(repeat)
        for value in range(1, 4):
            x.copy_(torch.arange(16).view(4, 4) * value + value**2)
            found = recordings.run(key, lambda rows=rows: kernels.rms_norm(rows.contiguous(), norm, 1e-5), None)
            assert same_bits(found, kernels.rms_norm(rows.contiguous(), norm, 1e-5)), (key, value)
        assert len(repeated) == (key == "same")


def test_repeated_indices_are_checked() -> None:
    weight, ids = kernels.pack_linear(torch.randn(8, 4)), torch.zeros(1, dtype=torch.int32)
    recordings, look_up = Recordings(kernels.repeat), lambda: kernels.embedding(weight, ids)
    for _ in range(3):
        recordings.run("key", look_up, None)
    ids.fill_(8)
    with pytest.raises(IndexError):
        recordings.run("key", look_up, None)


def test_memory_is_used_again_when_its_last_view_is_gone() -> None:
    arena = Arena()
    first = arena.empty((4, 8), torch.bfloat16)
    view, address = first.view(-1), first.data_ptr()
    del first
    assert arena.empty((4, 8), torch.bfloat16).data_ptr() != address
    del view
    assert arena.empty((16,), torch.float32).data_ptr() == address
    assert address % 64 == 0


def test_old_recordings_are_forgotten() -> None:
    repeated: list[Calls] = []
    recordings = Recordings(repeated.append)
    for key in (*range(200), *range(200)):
        recordings.run(key, lambda: torch.zeros(1), None)
    assert not repeated


def test_results_of_recordings_take_limited_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recording, "_MOST_BYTES", 1024)
    repeated: list[Calls] = []
    recordings, x, norm = Recordings(repeated.append), torch.ones(1, 128), torch.ones(128)
    for key in (*"aabb", *"bbb", *"ccdd", "b"):  # two results of 512 bytes are kept, b's not
        recordings.run(key, lambda: kernels.rms_norm(x, norm, 1e-5), None)
    assert len(repeated) == 3
