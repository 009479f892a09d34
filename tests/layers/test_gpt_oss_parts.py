"""What is GPT-OSS's own beside its experts, against `transformers`: attention (sinks, biases, windows, YaRN), norms."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from device_batches import make_device_batch
from reference_ops import ReferenceOps
from transformers import GptOssConfig
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssAttention, GptOssRMSNorm, GptOssRotaryEmbedding

from ssd.kernels.cpu import library
from ssd.kernels.cpu.ops import CpuOps
from ssd.kernels.ops import DeviceBatch, Ops
from ssd.layers.attention import GQA
from ssd.layers.norm import RMSNorm
from ssd.layers.parameter import Build
from ssd.layers.rotary import RopeTables
from ssd.models.families import gpt_oss
from ssd.parallel.tensor import TensorParallel

CPU, LENGTH, BLOCK = torch.device("cpu"), 300, 16
SHAPE: dict[str, Any] = {
    **{"hidden_size": 48, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 16, "num_hidden_layers": 2},
    **{"sliding_window": 40, "vocab_size": 32, "intermediate_size": 48, "max_position_embeddings": 1024},
}
YARN = {"rope_type": "yarn", "factor": 16.0, "truncate": False, "original_max_position_embeddings": 64}
CONFIG = GptOssConfig(**SHAPE, rope_parameters={**YARN, "rope_theta": 150000.0}, attn_implementation="eager")


def theirs(layer: int) -> GptOssAttention:
    module = GptOssAttention(CONFIG, layer)
    generator = torch.Generator().manual_seed(layer)
    for parameter in module.parameters():
        scale = 2.0 if parameter.shape == module.sinks.shape else 0.15
        parameter.data = torch.randn(parameter.shape, generator=generator) * scale
    return module


def expected(module: GptOssAttention, x: torch.Tensor) -> torch.Tensor:
    distance = torch.arange(LENGTH)[:, None] - torch.arange(LENGTH)
    seen = (distance >= 0) & (distance < (module.sliding_window or LENGTH))
    mask = torch.zeros(LENGTH, LENGTH).masked_fill(~seen, -torch.inf)[None, None]
    rotary = GptOssRotaryEmbedding(CONFIG)(x, torch.arange(LENGTH)[None])
    with torch.no_grad():
        return module(x[None], rotary, mask)[0][0]


def ours(module: GptOssAttention, ops: Ops, tp: TensorParallel = TensorParallel()) -> GQA:  # noqa: B008
    spec = gpt_oss(CONFIG.to_dict()).layers[module.layer_idx].attention
    tables = RopeTables(LENGTH, CPU)
    layer = GQA(Build(ops, CPU, torch.float32, tp), "a", spec, CONFIG.hidden_size, 1e-5, tables)
    stored = {f"a.{name}": tensor for name, tensor in module.state_dict().items()}
    for parameter in layer.parameters():
        for name, shape in parameter.shapes().items():
            assert stored[name].shape == shape
            parameter.load(name, stored.pop(name))
    assert not stored, "a tensor that the layer does not know"
    return layer


def run(layer: GQA, x: torch.Tensor, *lengths: int) -> torch.Tensor:
    """Of a text that is read in chunks of these lengths."""
    shape = (-(-LENGTH // BLOCK), BLOCK, layer.heads.num_kv_heads, layer.heads.head_dim)
    kv, found, done = (torch.zeros(shape), torch.zeros(shape)), [], 0
    for count in lengths:
        found.append(layer(x[done : done + count], batch(done, count), kv))
        done += count
    return torch.cat(found)


def batch(first: int, count: int) -> DeviceBatch:
    positions, table = list(range(first, first + count)), list(range(-(-LENGTH // BLOCK)))
    return make_device_batch(
        positions, positions, [0, count], [first + count], [table], tile_tokens=1 << 30, device=CPU
    )


@pytest.fixture(params=["reference", "C"])
def ops(request: pytest.FixtureRequest) -> Ops:
    return ReferenceOps() if request.param == "reference" else CpuOps(library.load())


@pytest.mark.parametrize("layer", [0, 1], ids=["window", "full"])
def test_attention_is_that_of_transformers(ops: Ops, layer: int) -> None:
    """Windows crossed, sinks active, beyond YaRN's original length, attention wider than the hidden size."""
    module, x = theirs(layer), torch.randn(LENGTH, CONFIG.hidden_size, generator=torch.Generator().manual_seed(7))
    wanted, attention = expected(module, x), ours(module, ops)
    torch.testing.assert_close(run(attention, x, LENGTH), wanted, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(run(attention, x, 120, 1, 7, 172), wanted, atol=1e-5, rtol=1e-5)
    module.sinks.data.fill_(-torch.inf)
    assert (expected(module, x) - wanted).abs().max() > 1e-2, "the sinks of this test change nothing"


@pytest.mark.parametrize(
    ("kernels", "dtype"),
    [("reference", torch.bfloat16), ("C", torch.bfloat16), ("triton", torch.float16)],  # its interpreter cuts bfloat16
    ids=str,
)
def test_norms_are_rounded_once(kernels: str, dtype: torch.dtype) -> None:
    """The weight is multiplied in float32. Nearly all numbers are those of transformers (a sum in another
    order may round another way), and many are not those of a norm that is rounded twice."""
    made: Ops = ReferenceOps() if kernels == "reference" else CpuOps(library.load())
    if kernels == "triton":
        made = pytest.importorskip("ssd.kernels.triton.ops", reason="triton is not installed").TritonOps()
    generator = torch.Generator().manual_seed(0)
    x, weight = torch.randn(20, 192, generator=generator).to(dtype), torch.rand(192, generator=generator).to(dtype)
    norm = GptOssRMSNorm(192, 1e-5)
    norm.weight.data = weight
    layer = RMSNorm(Build(made, CPU, dtype), "n", 192, 1e-5, float32=True)
    layer.load("n.weight", weight)
    wanted = norm(x)
    assert (layer(x) != wanted).float().mean() < 0.01
    assert (ReferenceOps().rms_norm(x, weight, 1e-5) != wanted).float().mean() > 0.1


@pytest.mark.parametrize("size", [2, 4])
def test_ranks_have_the_sinks_of_their_heads(size: int) -> None:
    """The ranks' outputs add up to that of one rank; KV heads are fewer than four ranks."""
    module, x = theirs(1), torch.randn(LENGTH, CONFIG.hidden_size, generator=torch.Generator().manual_seed(7))
    parts = []
    for rank in range(size):
        layer = ours(module, ReferenceOps(), TensorParallel(rank, size))
        if rank:
            layer.output.bias = None  # added by the first rank alone
        parts.append(run(layer, x, LENGTH))
    torch.testing.assert_close(torch.stack(parts).sum(0), expected(module, x), atol=1e-5, rtol=1e-5)
