"""Small random checkpoints in the formats that quantised models are published in.

The packers are written from the descriptions of the formats, number by number, and share nothing with the package.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from conftest import SHAPE, byte_tokenizer, randomise_vectors
from safetensors.torch import save_file

Weight = np.ndarray[Any, np.dtype[np.float32]]
Packed = tuple[dict[str, torch.Tensor], Weight]  # what is stored, and the weight that it stands for
FUSED = {"q_proj": "qkv", "k_proj": "qkv", "v_proj": "qkv", "gate_proj": "gate_up", "up_proj": "gate_up"}
LAYERS = ("self_attn", "mlp")


def dice(name: str) -> np.random.Generator:
    return np.random.default_rng(sum(name.encode()))


# --- packers ----------------------------------------------------------------------------------------------------------


def to_words(integers: Any, bits: int, order: tuple[int, ...] | None = None) -> torch.Tensor:
    """Integers of consecutive columns in one word, the first (or that of `order`) in its lowest bits."""
    per = 32 // bits
    words = np.zeros((len(integers), integers.shape[1] // per), np.uint64)
    for place, column in enumerate(order or range(per)):
        words |= integers[:, column::per].astype(np.uint64) << np.uint64(bits * place)
    return torch.from_numpy(words.astype(np.uint32).view(np.int32))


def to_integers(weight: Weight, bits: int, groups: Any, symmetric: bool) -> tuple[Any, Any, Any, Weight]:
    """Integers [rows, depth], scales (float16) and zero points [rows, groups], and the weight that they stand for."""
    count, top = int(groups.max()) + 1, 2**bits - 1
    integers, wide = np.zeros(weight.shape, np.int64), np.zeros_like(weight)
    scales, zeros = np.zeros((len(weight), count), np.float16), np.zeros((len(weight), count), np.int64)
    for g in range(count):
        part = weight[:, groups == g]
        if symmetric:
            scale, zero = np.abs(part).max(1) / (top // 2), np.full(len(weight), (top + 1) // 2)
        else:
            low, high = part.min(1), part.max(1)
            scale = (high - low) / top
            zero = np.clip(np.round(-low / scale), 1, top).astype(np.int64)
        scales[:, g], zeros[:, g] = scale, zero
        half = scales[:, g : g + 1].astype(np.float32)
        codes = np.clip(np.round(part / half) + zero[:, None], 0, top).astype(np.int64)
        integers[:, groups == g], wide[:, groups == g] = codes, half * (codes - zero[:, None])
    return integers, scales, zeros, wide


def in_groups(depth: int, size: int) -> Any:
    return np.arange(depth) // (depth if size == -1 else size)


def pack_ct(
    weight: Weight, name: str, *, bits: int = 4, group: int, symmetric: bool = True, act: bool = False
) -> Packed:
    groups = in_groups(weight.shape[1], group)
    if act:
        groups = dice(name).permutation(groups)
    integers, scales, zeros, wide = to_integers(weight, bits, groups, symmetric)
    stored = {
        "weight_packed": to_words(integers, bits),
        "weight_scale": torch.from_numpy(scales).bfloat16() if symmetric else torch.from_numpy(scales),
        "weight_shape": torch.tensor(weight.shape),
    }
    if symmetric:
        wide = stored["weight_scale"].float().numpy()[:, groups] * (integers - 2 ** (bits - 1)).astype(np.float32)
    else:
        stored["weight_zero_point"] = to_words(zeros.T, bits).T.contiguous()
    if act:
        stored["weight_g_idx"] = torch.from_numpy(groups).int()
    return stored, wide


def pack_gptq(
    weight: Weight, name: str, *, bits: int = 4, group: int, symmetric: bool = True, act: str = "", minus: int = 1
) -> Packed:
    """`act`: one order for the parts of a fused weight ("shared"), or for each ("own"); GPTQ writes shared ones."""
    groups = in_groups(weight.shape[1], group)
    if act:
        prefix, _, last = name.rpartition(".")
        groups = dice(f"{prefix}.{FUSED.get(last, last)}" if act == "shared" else name).permutation(groups)
    integers, scales, zeros, wide = to_integers(weight, bits, groups, symmetric)
    stored = {
        "qweight": to_words(integers, bits).T.contiguous(),
        "qzeros": to_words(zeros.T - minus, bits),
        "scales": torch.from_numpy(scales.T.copy()),
        "g_idx": torch.from_numpy(groups).int(),
    }
    return stored, wide


def pack_awq(weight: Weight, name: str, *, group: int) -> Packed:
    integers, scales, zeros, wide = to_integers(weight, 4, in_groups(weight.shape[1], group), symmetric=False)
    order = (0, 2, 4, 6, 1, 3, 5, 7)
    stored = {
        "qweight": to_words(integers.T, 4, order),
        "qzeros": to_words(zeros.T, 4, order),
        "scales": torch.from_numpy(scales.T.copy()),
    }
    return stored, wide


def pack_bytes(
    weight: Weight,
    name: str,
    *,
    kind: str = "fp8",
    block: tuple[int, int] | None = None,
    scale: str = "weight_scale",
    static: bool = False,
    zero: bool = False,
    scalar: bool = False,
    powers: torch.dtype | None = None,
) -> Packed:
    """`block`: rows and columns of one scale, -1 for all; None: one number, `scalar` if of no dimension. `powers`: the
    type of scales that are powers of two."""
    rows, depth = weight.shape
    high, wide_columns = (rows, depth) if block is None else (block[0], depth if block[1] == -1 else block[1])
    top = 448.0 if kind == "fp8" else 127.0
    scales = np.zeros((-(-rows // high), depth // wide_columns), np.float32)
    zeros = dice(name).integers(-9, 9, scales.shape) * zero
    codes, wide = torch.zeros(rows, depth), torch.zeros(rows, depth)
    for i in range(scales.shape[0]):
        for j in range(scales.shape[1]):
            place = slice(i * high, (i + 1) * high), slice(j * wide_columns, (j + 1) * wide_columns)
            part = torch.from_numpy(weight[place])
            scales[i, j] = np.float16(float(part.abs().max()) / (top - 16 * zero))
            scales[i, j] = scales[i, j] if powers is None else 2.0 ** math.ceil(math.log2(scales[i, j]))
            near = (part / float(scales[i, j]) + int(zeros[i, j])).clamp(-top, top)
            codes[place] = near.to(torch.float8_e4m3fn).float() if kind == "fp8" else near.round()
            wide[place] = (codes[place] - int(zeros[i, j])) * float(scales[i, j])
    stored = {
        "weight": codes.to(torch.float8_e4m3fn if kind == "fp8" else torch.int8),
        scale: torch.from_numpy(scales.reshape(() if scalar else (1,)) if block is None else scales),
    }
    stored[scale] = stored[scale] if powers is None else stored[scale].to(powers)
    if zero:
        stored["weight_zero_point"] = torch.from_numpy(zeros.reshape(stored[scale].shape)).to(torch.int8)
    if static:
        stored["input_scale"] = torch.tensor([0.02 + 0.02 * dice(name).random()])
    return stored, wide.numpy()


def pack_mxfp4(weight: Weight, name: str) -> Packed:
    """The numbers of e2m1 in their order of bits, times a power of two for each 32 weights of a row."""
    numbers = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
    numbers += [-each for each in numbers]
    groups = weight.reshape(len(weight), -1, 32)
    exponents = np.ceil(np.log2(np.abs(groups).max(2) / 6.0)).astype(np.int64)
    scale = 2.0 ** exponents[:, :, None]
    places = np.abs(groups[..., None] / scale[..., None] - np.array(numbers)).argmin(3)
    wide = (np.array(numbers)[places] * scale).reshape(weight.shape).astype(np.float32)
    flat = places.reshape(weight.shape)
    packed = torch.from_numpy(flat[:, 0::2] + 16 * flat[:, 1::2]).to(torch.uint8)
    return {"weight_packed": packed, "weight_scale": torch.from_numpy(exponents + 127).to(torch.uint8)}, wide


# --- how inputs are rounded -------------------------------------------------------------------------------------------


def rounded_input(
    x: torch.Tensor, kind: str, group: int | None = None, scale: float | None = None, powers: bool = False
) -> torch.Tensor:
    """x as the product sees it: to e4m3 or integers, with a scale per row (and group), or a stored one. `powers`: the
    power of two that is not below it."""
    top, flat = (448.0 if kind == "fp8" else 127.0), x.reshape(-1, group or x.shape[-1])
    scales = flat.abs().amax(1, keepdim=True) / top if scale is None else torch.tensor(scale)
    scales = torch.exp2(torch.log2(scales).ceil()) if powers else scales
    low = -128.0 if kind == "int8" else -top
    near = (flat / scales).clamp(low, top)
    near = near.to(torch.float8_e4m3fn).float() if kind == "fp8" else near.round()
    return (near * scales).reshape(x.shape)


# --- formats ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PublishedFormat:
    """`config`: the quantization_config. `pack`: stores a weight of a layer. `inputs`: how inputs are rounded."""

    config: dict[str, Any]
    pack: Callable[..., Packed]
    options: Mapping[str, Any] = field(default_factory=dict)
    inputs: Mapping[str, Any] | None = None
    dtype: str = "bfloat16"


def compressed(form: str, weights: dict[str, Any], inputs: dict[str, Any] | None = None) -> dict[str, Any]:
    """A config as llm-compressor writes it."""
    shared = {"symmetric": True, "dynamic": False, "group_size": None, "block_structure": None, "actorder": None}
    shared |= {"observer": "minmax", "observer_kwargs": {}}
    group = {
        "targets": ["Linear"],
        "weights": {**shared, **weights},
        "input_activations": None if inputs is None else {**shared, "observer": None, **inputs},
        "output_activations": None,
    }
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "quantization_status": "compressed",
        "global_compression_ratio": 1.5,
        "kv_cache_scheme": None,
        "ignore": ["lm_head"],
        "config_groups": {"group_0": group},
    }


def gptq(bits: int, group: int, **changes: Any) -> dict[str, Any]:
    return {
        **{"quant_method": "gptq", "bits": bits, "group_size": group, "desc_act": False, "sym": True, "lm_head": False},
        **{"damp_percent": 0.01, "true_sequential": True, "static_groups": False},
        **changes,
    }


def awq(group: int) -> dict[str, Any]:
    shared = {"bits": 4, "zero_point": True, "version": "gemm", "modules_to_not_convert": None}
    return {"quant_method": "awq", "group_size": group, **shared}


FP8, INT8, INT4 = ({"num_bits": bits, "type": kind} for bits, kind in ((8, "float"), (8, "int"), (4, "int")))
TOKEN = {"strategy": "token", "dynamic": True}
BLOCKS = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
GROUPS_32 = {**INT4, "strategy": "group", "group_size": 32}
FORMATS: dict[str, PublishedFormat] = {
    "ct-fp8-channel": PublishedFormat(
        compressed("float-quantized", {**FP8, "strategy": "channel"}, {**FP8, **TOKEN}),
        *(pack_bytes, {"block": (1, -1)}, {"kind": "fp8"}),
    ),
    "ct-fp8-tensor-static": PublishedFormat(
        compressed("float-quantized", {**FP8, "strategy": "tensor"}, {**FP8, "strategy": "tensor"}),
        *(pack_bytes, {"static": True}, {"kind": "fp8"}),
    ),
    "ct-fp8-weight-only": PublishedFormat(
        compressed("naive-quantized", {**FP8, "strategy": "channel"}), pack_bytes, {"block": (1, -1)}
    ),
    "ct-fp8-block": PublishedFormat(
        compressed(
            "float-quantized",
            {**FP8, "strategy": "block", "block_structure": [32, 64]},
            {**FP8, "strategy": "group", "group_size": 64, "dynamic": True},
        ),
        *(pack_bytes, {"block": (32, 64)}, {"kind": "fp8", "group": 64}),
    ),
    "fp8-block": PublishedFormat(
        BLOCKS, pack_bytes, {"block": (128, 128), "scale": "weight_scale_inv"}, {"kind": "fp8", "group": 128}
    ),
    "fp8-tensor": PublishedFormat(
        {"quant_method": "fp8", "activation_scheme": "dynamic"}, pack_bytes, {"scalar": True}, {"kind": "fp8"}
    ),
    "fp8-tensor-static": PublishedFormat(
        {"quant_method": "fp8", "activation_scheme": "static", "ignored_layers": ["lm_head"]},
        *(pack_bytes, {"static": True}, {"kind": "fp8"}),
    ),
    "ct-int4": PublishedFormat(
        compressed("pack-quantized", {**INT4, "strategy": "group", "group_size": 128}), pack_ct, {"group": 128}
    ),
    "ct-int4-zero-point": PublishedFormat(
        compressed("pack-quantized", {**GROUPS_32, "symmetric": False}), pack_ct, {"group": 32, "symmetric": False}
    ),
    "ct-int4-channel": PublishedFormat(
        compressed("pack-quantized", {**INT4, "strategy": "channel"}), pack_ct, {"group": -1}
    ),
    "ct-int4-act-order": PublishedFormat(
        compressed("pack-quantized", {**GROUPS_32, "actorder": "group"}), pack_ct, {"group": 32, "act": True}
    ),
    "ct-int8": PublishedFormat(
        compressed("pack-quantized", {**INT8, "strategy": "channel"}), pack_ct, {"bits": 8, "group": -1}
    ),
    "ct-w8a8": PublishedFormat(
        compressed("int-quantized", {**INT8, "strategy": "channel"}, {**INT8, **TOKEN}),
        *(pack_bytes, {"kind": "int8", "block": (1, -1)}, {"kind": "int8"}),
    ),
    "ct-w8a8-static": PublishedFormat(
        compressed("int-quantized", {**INT8, "strategy": "tensor"}, {**INT8, "strategy": "tensor"}),
        *(pack_bytes, {"kind": "int8", "static": True}, {"kind": "int8"}),
    ),
    "ct-w8a8-zero-point": PublishedFormat(
        compressed("int-quantized", {**INT8, "strategy": "channel", "symmetric": False}, {**INT8, **TOKEN}),
        *(pack_bytes, {"kind": "int8", "block": (1, -1), "zero": True}, {"kind": "int8"}),
    ),
    "ct-mxfp4": PublishedFormat(
        compressed(
            "mxfp4-pack-quantized",
            {"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32, "scale_dtype": "torch.uint8"},
        ),
        pack_mxfp4,
    ),
    "gptq": PublishedFormat(gptq(4, 128), pack_gptq, {"group": 128}, dtype="float16"),
    "gptq-act-order": PublishedFormat(gptq(4, 32, desc_act=True), pack_gptq, {"group": 32, "act": "shared"}),
    "gptq-own-orders": PublishedFormat(gptq(4, 32, desc_act=True), pack_gptq, {"group": 32, "act": "own"}),
    "gptq-zero-point": PublishedFormat(gptq(4, 64, sym=False), pack_gptq, {"group": 64, "symmetric": False}),
    "gptq-v2": PublishedFormat(
        gptq(4, 64, sym=False, checkpoint_format="gptq_v2"), pack_gptq, {"group": 64, "symmetric": False, "minus": 0}
    ),
    "gptq-channel": PublishedFormat(gptq(4, -1), pack_gptq, {"group": -1}),
    "gptq-channel-zero-point": PublishedFormat(gptq(4, -1, sym=False), pack_gptq, {"group": -1, "symmetric": False}),
    "gptq-int8": PublishedFormat(gptq(8, 32), pack_gptq, {"bits": 8, "group": 32}),
    "gptq-int8-zero-point": PublishedFormat(
        gptq(8, -1, sym=False), pack_gptq, {"bits": 8, "group": -1, "symmetric": False}
    ),
    "awq": PublishedFormat(awq(128), pack_awq, {"group": 128}, dtype="float16"),
    "awq-32": PublishedFormat(awq(32), pack_awq, {"group": 32}, dtype="float16"),
    **{
        f"fp8-block-{name}": PublishedFormat(
            {**BLOCKS, "scale_fmt": "ue8m0"},
            *(pack_bytes, {"block": (128, 128), "scale": "weight_scale_inv", "powers": stored}),
            {"kind": "fp8", "group": 128, "powers": True},
        )
        for name, stored in (("ue8m0", torch.float8_e8m0fnu), ("ue8m0-float32", torch.float32))
    },
}


# --- checkpoints ------------------------------------------------------------------------------------------------------

SIZES = {**SHAPE, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "initializer_range": 0.15}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 4}


def new_model(seed: int = 0) -> Any:
    """transformers' model of random weights."""
    torch.manual_seed(seed)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES, **HEADS)).float().eval()
    randomise_vectors(model)
    model.generation_config.eos_token_id = None
    return model


def hook(inputs: Mapping[str, Any], scale: float | None) -> Callable[..., Any]:
    return lambda module, given: (rounded_input(given[0], scale=scale, **inputs),)


def write_checkpoint(
    path: Path, formats: Mapping[str, PublishedFormat] | PublishedFormat, config: dict[str, Any] | None = None
) -> Any:
    """Writes a quantised checkpoint, and returns transformers' model of the same weights and roundings of inputs.

    `formats`: of all linear layers, or by the last part of their names; others are left as they are.
    """
    model, tensors, scales = new_model(), {}, {}
    first = formats if isinstance(formats, PublishedFormat) else next(iter(formats.values()))
    for name, module in model.named_modules():
        if not isinstance(module, torch.nn.Linear) or not any(part in name for part in LAYERS):
            continue
        form = formats if isinstance(formats, PublishedFormat) else formats.get(name.rpartition(".")[2])
        if form is None:
            continue
        stored, wide = form.pack(module.weight.detach().numpy(), name, **form.options)
        tensors |= {f"{name}.{own}": tensor for own, tensor in stored.items()}
        module.weight.data = torch.from_numpy(wide)
        if "input_scale" in stored:
            prefix, _, last = name.rpartition(".")
            key = f"{prefix}.{FUSED.get(last, last)}"
            scales[key] = max(scales.get(key, 0.0), float(stored["input_scale"]))
    quantized = [name for name, _ in model.named_modules() if any(each.startswith(f"{name}.") for each in tensors)]
    for name in (name for name in quantized if isinstance(model.get_submodule(name), torch.nn.Linear)):
        prefix, _, last = name.rpartition(".")
        form = formats if isinstance(formats, PublishedFormat) else formats[last]
        if form.inputs is not None:
            scale = scales.get(f"{prefix}.{FUSED.get(last, last)}")
            model.get_submodule(name).register_forward_pre_hook(hook(form.inputs, scale))
    packed = {name.rpartition(".")[0] for name in tensors}
    plain = {name: value for name, value in model.state_dict().items() if name.rpartition(".")[0] not in packed}
    path.mkdir(parents=True, exist_ok=True)
    save_file({**plain, **tensors}, path / "model.safetensors")
    raw = {**model.config.to_dict(), "architectures": ["LlamaForCausalLM"], "dtype": first.dtype}
    raw |= {"quantization_config": config or first.config, "eos_token_id": None}
    (path / "config.json").write_text(json.dumps(raw))
    byte_tokenizer().save(str(path / "tokenizer.json"))
    return model
