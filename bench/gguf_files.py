"""GGUF files of random weights, where only the shape counts, with the tokenizer of another file.

    python bench/gguf_files.py SmolLM2-135M-Instruct.Q4_1.gguf folder   # folder/q4_1.gguf, q8_0.gguf, q4_k.gguf

The first two have the shape of SmolLM2-135M; rows of Q4_K are multiples of 256, so the third has the layers of
Qwen3-0.6B (without its norms of queries and keys) and the vocabulary of the given file.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFReader, GGUFValueType, GGUFWriter

Q4_1, Q8_0 = GGMLQuantizationType.Q4_1, GGMLQuantizationType.Q8_0
Q4_K, Q6_K = GGMLQuantizationType.Q4_K, GGMLQuantizationType.Q6_K


class Shape(NamedTuple):
    layers: int
    hidden: int
    inner: int
    heads: int
    kv_heads: int
    head_dim: int


SMALL, WIDE = Shape(30, 576, 1536, 9, 3, 64), Shape(28, 1024, 3072, 16, 8, 128)
FILES: Final = {"q4_1": (SMALL, Q4_1, Q8_0), "q8_0": (SMALL, Q8_0, Q8_0), "q4_k": (WIDE, Q4_K, Q6_K)}
# Bytes of a block that hold a float16, and its value for weights of a deviation of about 1.
NUMBERS: Final = {
    Q4_1: {0: 1 / 4.6, 2: -7.5 / 4.6},
    Q8_0: {0: 1 / 74},
    Q4_K: {0: 1 / 150, 2: 7.5 / 150},
    Q6_K: {208: 1 / 1150},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("like", help="a GGUF file of a Llama")
    parser.add_argument("folder", type=Path)
    args = parser.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    for name, (shape, kind, embedding) in FILES.items():
        write(args.folder / f"{name}.gguf", GGUFReader(args.like), shape, kind, embedding)


def write(
    path: Path, like: GGUFReader, shape: Shape, kind: GGMLQuantizationType, embedding: GGMLQuantizationType
) -> None:
    """`kind`: of the layers' weights; `embedding`: of the embedding, which is the head as well."""
    writer, dice = GGUFWriter(path, "llama"), np.random.default_rng(0)
    layers, hidden, inner, heads, kv_heads, dim = shape
    changed = {
        **{"block_count": layers, "embedding_length": hidden, "feed_forward_length": inner},
        **{"attention.head_count": heads, "attention.head_count_kv": kv_heads},
        **{"attention.key_length": dim, "attention.value_length": dim, "rope.dimension_count": dim},
    }
    for name, value in changed.items():
        writer.add_uint32(f"llama.{name}", value)
    for name, field in like.fields.items():
        if not name.startswith("GGUF.") and name not in ("general.architecture", *(f"llama.{key}" for key in changed)):
            part = field.types[-1] if field.types[0] == GGUFValueType.ARRAY else None
            writer.add_key_value(name, field.contents(), field.types[0], sub_type=part)
    attention, kv = heads * dim, kv_heads * dim
    products = {
        **{"attn_q": (attention, hidden), "attn_k": (kv, hidden), "attn_v": (kv, hidden)},
        **{"attn_output": (hidden, attention), "ffn_gate": (inner, hidden), "ffn_up": (inner, hidden)},
        "ffn_down": (hidden, inner),
    }
    vocabulary = len(like.fields["tokenizer.ggml.tokens"].data)
    writer.add_tensor("token_embd.weight", blocks(embedding, vocabulary, hidden, dice), raw_dtype=embedding)
    writer.add_tensor("output_norm.weight", np.ones(hidden, np.float32))
    for layer in range(layers):
        for norm in ("attn_norm", "ffn_norm"):
            writer.add_tensor(f"blk.{layer}.{norm}.weight", np.ones(hidden, np.float32))
        for name, (rows, depth) in products.items():
            writer.add_tensor(f"blk.{layer}.{name}.weight", blocks(kind, rows, depth, dice), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def blocks(kind: GGMLQuantizationType, rows: int, depth: int, dice: np.random.Generator) -> np.ndarray:
    """Random bytes, with scales for weights of a deviation of about 0.6 / sqrt(depth)."""
    size, stored = GGML_QUANT_SIZES[kind]
    made = dice.integers(0, 256, (rows * depth // size, stored), dtype=np.uint8)
    for at, value in NUMBERS[kind].items():
        made[:, at : at + 2] = np.array([value * 0.6 / depth**0.5], np.float16).view(np.uint8)
    return made.reshape(rows, -1)


if __name__ == "__main__":
    main()
