"""GGUF's quantised weights stay packed: the weights of every block, the logits and memory of a model, and its text."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from bits import same_bits
from conftest import mostly_slow
from gguf_files import SHAPES, SIZES, random_blocks, widened, write_models
from split_models import logits, on_ranks

from ssd import LLM, SamplingParams
from ssd.assembly.open import open_checkpoint
from ssd.errors import ConfigError, UnsupportedModel
from ssd.kernels.codes import dequantize, rounded_rows
from ssd.kernels.cpu import library
from ssd.kernels.device import kernels
from ssd.kernels.weights import RowRounding
from ssd.layers.formats.gguf import BLOCKS, Blocks
from ssd.layers.formats.rounded import rounded
from ssd.layers.parameter import Build
from ssd.models.checkpoint import all_weights
from ssd.models.decoder import Decoder
from ssd.models.gguf import GGUFCheckpoint
from ssd.parallel.tensor import TensorParallel

CPU = torch.device("cpu")
TOKENS = np.random.default_rng(1).integers(0, 320, 40).tolist()


# --- blocks -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", BLOCKS)
def test_every_weight_equals_the_gguf_packages(kind: str) -> None:
    """To the bit, of a quarter of a million; and so do the columns that a rank reads."""
    form, blocks = BLOCKS[kind], random_blocks(kind, 64, 4096)
    expected = widened(kind, blocks)
    codes = form.codes({"weight": torch.from_numpy(blocks)})
    found = dequantize(codes, torch.float32).numpy()
    assert np.array_equal(found.view(np.int32), expected.view(np.int32))
    index = form.share("weight", slice(16, 32), slice(1024, 3072))
    share = dequantize(form.codes({"weight": torch.from_numpy(blocks)[index].clone()}), torch.float32)
    assert np.array_equal(share.numpy(), expected[16:32, 1024:3072])


@pytest.mark.parametrize("kind", BLOCKS)
def test_blocks_are_not_cut(kind: str) -> None:
    form = BLOCKS[kind]
    assert form.shapes(8, 512) == {"weight": (8, 512 // form.weights * form.num_stored)}
    with pytest.raises(ConfigError, match=f"{kind} block of {form.weights} weights would be cut"):
        form.share("weight", slice(None), slice(0, 272))
    with pytest.raises(UnsupportedModel, match=f"{kind}, in blocks of {form.weights}, but its rows have 272"):
        form.shapes(8, 272)


@pytest.mark.parametrize("kind", BLOCKS)
def test_products_on_a_cpu_take_rows_of_8_bits(kind: str) -> None:
    """Each row as `rounded_rows` has it, with a scale for each group of the weight; the same bits in any company, and
    rows that are looked up are the weights themselves."""
    loaded = library.load()
    torch.manual_seed(0)  # a number halfway between two integers may be rounded to either
    blocks = torch.from_numpy(random_blocks(kind, 70, 512, sizes=SIZES.get(kind, (0.01, -0.07))))
    codes, x = BLOCKS[kind].codes({"weight": blocks}), torch.randn(21, 512)
    packed, wide = loaded.pack_codes(codes, torch.float32, coarse=True), dequantize(codes, torch.float32)
    integers, scales = rounded_rows(x, RowRounding("int8", codes.group))
    rows = integers.view(21, -1, codes.group).double() * scales[:, :, None].double()
    found, expected = loaded.linear(x, packed), rows.flatten(1) @ wide.double().T
    assert (found - expected).norm() < 1e-6 * expected.norm()
    assert (found - x.double() @ wide.double().T).norm() < 0.008 * expected.norm()
    for few in (1, 2, 3, 4, 6, 8, 9):
        assert same_bits(loaded.linear(x[:few], packed), found[:few])
    assert same_bits(loaded.embedding(packed, torch.tensor([3, 69])), wide[[3, 69]])


# --- a model with all types, some of them fused -----------------------------------------------------------------------


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return write_models(tmp_path_factory.mktemp("gguf"))


def opened(path: Path) -> GGUFCheckpoint:
    checkpoint = open_checkpoint(path)
    assert isinstance(checkpoint, GGUFCheckpoint)
    return checkpoint


@pytest.mark.parametrize(("coarse", "error"), [(False, 1e-5), (True, 0.05)])
def test_logits_are_those_of_the_widened_weights(
    files: dict[str, Path], coarse: bool, error: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches weights of a fused part in the wrong place (all of them are mixed), q and k rows that are left permuted,
    and a packed embedding that looks up other rows; float32, the other tests have bfloat16. Rows of 8 bits cost 2.4 %
    in this model of random weights."""
    monkeypatch.setattr(Blocks, "coarse", coarse)
    packed, wide = (logits(opened(files[name]), TensorParallel(), TOKENS) for name in ("packed", "wide"))
    assert (packed - wide).norm() < error * wide.norm()
    assert wide.std() > 0.5


def test_two_ranks_have_the_logits_of_one(files: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks are split between ranks by rows and by columns. Rows are not rounded: sums that differ in their last bits
    would be rounded to other integers now and then."""
    monkeypatch.setattr(Blocks, "coarse", False)
    checkpoint = opened(files["packed"])
    split = on_ranks(2, lambda tp: logits(checkpoint, tp, TOKENS))[0]
    assert (split - logits(checkpoint, TensorParallel(), TOKENS)).abs().max() < 1e-4


def test_a_draft_may_be_floats(files: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """All weights are those of the same model in floats, fused parts of different types among them."""
    packed, wide = opened(files["packed"]), logits(opened(files["wide"]), TensorParallel(), TOKENS)
    floats = rounded("dequantized", packed.formats)
    monkeypatch.setattr(GGUFCheckpoint, "formats", property(lambda _: floats))
    assert same_bits(logits(packed, TensorParallel(), TOKENS), wide)


def test_every_weight_can_be_widened(files: dict[str, Path]) -> None:
    """For grafts, whose weights are made from floats."""
    packed, wide = (all_weights(opened(files[name]), CPU, torch.float32) for name in ("packed", "wide"))
    assert packed.keys() == wide.keys()
    assert all(same_bits(packed[name], wide[name]) for name in wide)


def test_formats_are_named_and_memory_is_counted(files: dict[str, Path]) -> None:
    """What is reported is no less than what the kernels hold, which depends on the device."""
    checkpoint = opened(files["packed"])
    build = Build(kernels(CPU).ops(), CPU, torch.bfloat16, format_of=checkpoint.formats)
    decoder = Decoder(checkpoint.config, build, max_positions=16)
    decoder.load(checkpoint.weights(CPU, torch.bfloat16))
    assert decoder.formats == set(BLOCKS)
    tensors = tensors_in([each for each in decoder.parameters() if hasattr(each, "format")])
    held = sum(tensor.nbytes for tensor in tensors)
    norms = sum(256 * 2 for name in decoder.shapes() if "norm" in name)
    assert 0.8 * decoder.num_bytes() < held + norms <= decoder.num_bytes()
    assert held < 0.5 * sum(2 * rows * depth for rows, depth in [(320, 256), *2 * [*SHAPES.values()]])


def tensors_in(layers: list[Any]) -> list[torch.Tensor]:
    """Tensors of prepared weights, whatever holds them."""
    found: list[torch.Tensor] = []
    pending = [layer.weight for layer in layers]
    while pending:
        each = pending.pop()
        if isinstance(each, torch.Tensor):
            found.append(each)
        elif isinstance(each, list | tuple):
            pending += each
        elif hasattr(each, "__dataclass_fields__"):
            pending += [getattr(each, name) for name in each.__dataclass_fields__]
    return found


@pytest.mark.parametrize("dtype", mostly_slow(["float32", "bfloat16"], fast={"bfloat16"}))
def test_text_is_the_same_in_all_modes(files: dict[str, Path], dtype: str) -> None:
    """AR one by one; SD and SSD together, with drafts that are partly wrong; T = 0 and 1."""
    prompts = [TOKENS[:5], TOKENS[3:20], TOKENS[:30], TOKENS[7:9]]
    params = [SamplingParams(temperature=i % 2, seed=i, max_new_tokens=24, ignore_eos=True) for i in range(4)]

    def write_texts(batch: int, speculation: dict[str, Any] | None) -> list[list[int]]:
        options: Any = {"device": "cpu", "dtype": dtype, "max_model_len": 96, "max_num_seqs": batch}
        with LLM(str(files["packed"]), **options, speculation=speculation) as llm:
            outputs = llm.generate(prompts, params)
        if speculation:
            accepted, drafted = (sum(getattr(out.metrics, key) for out in outputs) for key in ("accepted", "drafted"))
            assert 0.1 * drafted < accepted < drafted
        return [output.token_ids for output in outputs]

    expected, draft = write_texts(1, None), str(files["draft"])
    assert write_texts(4, {"mode": "sd", "draft": draft, "k": 3}) == expected
    assert write_texts(4, {"mode": "ssd", "draft": draft, "k": 3, "placement": "inline"}) == expected


def test_a_matrix_of_another_width_is_refused(files: dict[str, Path]) -> None:
    """The shape of packed rows is that of their bytes."""
    checkpoint = opened(files["packed"])
    layer = checkpoint.config.layer
    narrow = replace(checkpoint.config, layers=2 * (replace(layer, mlp=replace(layer.mlp, intermediate_size=256)),))
    build = Build(kernels(CPU).ops(), CPU, torch.float32, format_of=checkpoint.formats)
    with pytest.raises(UnsupportedModel, match=r"has shape \(512, 144\), the config says \(256, 144\)"):
        Decoder(narrow, build, max_positions=16).load(checkpoint.weights(CPU, torch.float32))
