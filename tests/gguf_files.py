"""GGUF files that are written on the spot."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ssd.layers.formats.gguf import BLOCKS

gguf = pytest.importorskip("gguf")

HEADS, KV_HEADS, HEAD_DIM, HIDDEN, FEED, VOCAB = 4, 2, 16, 32, 64, 40


def metadata(family: str, **changes: Any) -> dict[str, Any]:
    values = {
        f"{family}.block_count": 1,
        f"{family}.context_length": 128,
        f"{family}.embedding_length": HIDDEN,
        f"{family}.feed_forward_length": FEED,
        f"{family}.attention.head_count": HEADS,
        f"{family}.attention.head_count_kv": KV_HEADS,
        f"{family}.attention.key_length": HEAD_DIM,
        f"{family}.attention.value_length": HEAD_DIM,
        f"{family}.attention.layer_norm_rms_epsilon": 1e-6,
        f"{family}.rope.freq_base": 1000000.0,
    }
    return {**values, **{key.replace("__", "."): value for key, value in changes.items()}}


def write(
    path: Path, family: str, values: dict[str, Any], arrays: dict[str, np.ndarray], kind: str | dict[str, str] = "F32"
) -> Path:
    """Matrices are stored as `kind` (by name), vectors as F32, as converters do. Bytes are blocks already."""
    writer = gguf.GGUFWriter(path, family)
    adders = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
    for key, value in values.items():
        adders.get(type(value), writer.add_array)(key, value)
    for name, array in arrays.items():
        if array.ndim > 1:
            quantisation = gguf.GGMLQuantizationType[kind if isinstance(kind, str) else kind[name]]
            blocks = array if array.dtype == np.uint8 else gguf.quants.quantize(array, quantisation)
            writer.add_tensor(name, blocks, raw_dtype=quantisation)
        else:
            writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


# --- a model with all types of blocks, some of them fused -------------------------------------------------------------

SCALES = {"Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,), "Q4_1": (0, 2), "Q5_1": (0, 2)}  # others: 0
KINDS = {
    "attn_q": ("Q4_K", "Q5_0"),  # in the first and the second layer
    "attn_k": ("Q4_K", "Q5_1"),
    "attn_v": ("Q6_K", "Q4_1"),
    "attn_output": ("Q5_K", "Q4_1"),
    "ffn_gate": ("Q4_0", "Q5_K"),
    "ffn_up": ("Q4_0", "Q4_K"),
    "ffn_down": ("Q8_0", "Q6_K"),
}
SHAPES = {
    "attn_q": (512, 256),
    "attn_k": (128, 256),
    "attn_v": (128, 256),
    "attn_output": (256, 512),
    "ffn_gate": (512, 256),
    "ffn_up": (512, 256),
    "ffn_down": (256, 512),
}
SIZES = {"Q4_K": (3e-4, 2e-3), "Q5_K": (1.5e-4, 2e-3), "Q6_K": (5e-5,)}  # weights of about 0.1
VALUES = metadata(
    "llama",
    llama__block_count=2,
    llama__context_length=256,
    llama__embedding_length=256,
    llama__feed_forward_length=512,
    llama__attention__head_count=16,
    llama__attention__head_count_kv=4,
    llama__attention__key_length=32,
    llama__attention__value_length=32,
)


def matrix(kind: str, shape: tuple[int, int], seed: int) -> np.ndarray:
    if kind in SIZES:
        return random_blocks(kind, *shape, sizes=SIZES[kind])
    weights = np.random.default_rng(seed).standard_normal(shape).astype(np.float32) * 0.1
    blocks: np.ndarray = gguf.quants.quantize(weights, gguf.GGMLQuantizationType[kind])
    return blocks


def stored_model() -> tuple[dict[str, np.ndarray], dict[str, str]]:
    """Tensors and their types; the embedding is the head."""
    kinds = {"token_embd.weight": "Q6_K"}
    arrays = {"token_embd.weight": matrix("Q6_K", (320, 256), 0), "output_norm.weight": np.ones(256, np.float32)}
    for layer in range(2):
        for i, (part, shape) in enumerate(SHAPES.items()):
            name = f"blk.{layer}.{part}.weight"
            kinds[name] = KINDS[part][layer]
            arrays[name] = matrix(kinds[name], shape, 10 * layer + i)
        arrays |= {f"blk.{layer}.{norm}_norm.weight": np.ones(256, np.float32) for norm in ("attn", "ffn")}
    return arrays, kinds


def random_blocks(kind: str, rows: int, depth: int, sizes: tuple[float, ...] | None = None) -> np.ndarray:
    """All bits occur. `sizes`: the float16 numbers of every block; None: random ones, finite and of both signs."""
    source, form = np.random.default_rng(rows + depth), BLOCKS[kind]
    blocks = source.integers(0, 256, (rows, depth // form.weights, form.num_stored), dtype=np.uint8)
    for i, at in enumerate(SCALES.get(kind, (0,))):
        if sizes is None:
            blocks[..., at + 1] &= 0xBF
        else:
            blocks[..., at : at + 2] = np.array([sizes[i]], dtype=np.float16).view(np.uint8)
    return blocks.reshape(rows, -1)


def widened(kind: str, blocks: np.ndarray) -> np.ndarray:
    found: np.ndarray = gguf.quants.dequantize(blocks, gguf.GGMLQuantizationType[kind])
    return found


def write_models(folder: Path) -> dict[str, Path]:
    """The model packed, with the same weights in float32, and a draft of it: other weights, but not by much."""
    arrays, kinds = stored_model()
    wide = {name: widened(kinds[name], array) if name in kinds else array for name, array in arrays.items()}
    noise = np.random.default_rng(5)
    near = {
        name: array + (0.01 * noise.standard_normal(array.shape).astype(np.float32) if name in kinds else 0)
        for name, array in wide.items()
    }
    return {
        "packed": write(folder / "packed.gguf", "llama", VALUES, arrays, kinds),
        "wide": write(folder / "wide.gguf", "llama", VALUES, wide),
        "draft": write(folder / "draft.gguf", "llama", VALUES, near, "Q8_0"),
    }
