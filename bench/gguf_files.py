"""Writes a model as a GGUF file: what llama.cpp's converter and quantiser do, for grafts that have no other files.

    python bench/gguf_files.py graft:tiny-llama@qwen2.5-1.5b 1.5b.gguf --kv-heads 4   # and a draft that predicts it:
    python bench/gguf_files.py graft:tiny-llama-draft@qwen2.5-0.5b 0.5b.gguf
    python bench/gguf_files.py graft:tiny-llama@llama-3.1-8b 8b.gguf --device cuda
    python bench/gguf_files.py graft:tiny-llama-draft@smollm2-135m q4_1.gguf --type Q4_1

MODEL is anything that `ssd generate` takes, in float weights. Tensors have the types of llama.cpp's Q4_K_M unless
`--type` says otherwise. Scales are those of the largest weights: llama.cpp searches better ones.

`--kv-heads`: the base's KV heads, where the shape has too few for them (Qwen2.5-1.5B has 2, tiny-llama 4: the file is
14 MB larger). Numbers after a space are other tokens than the base's: `qwen2` is the nearest way of splitting text that
llama.cpp and ssd know.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Final

import numpy as np
import torch
from gguf import (
    GGML_QUANT_SIZES,
    MODEL_ARCH,
    GGMLQuantizationType,
    GGUFWriter,
    LlamaFileType,
    TokenType,
    get_tensor_name_map,
    quants,
)
from rich.progress import track

from ssd.assembly.open import GRAFT_PREFIX, open_checkpoint
from ssd.errors import UnsupportedModel
from ssd.grafts.graft import GraftCheckpoint
from ssd.grafts.shapes import SHAPES
from ssd.models.checkpoint import Checkpoint
from ssd.models.config import DecoderConfig
from ssd.models.decoder import parameter_shapes
from ssd.models.gguf import ARCHITECTURES
from ssd.text.tokenizer import Tokenizer

Kind = GGMLQuantizationType
Q4_K, Q6_K, Q8_0, BF16 = Kind.Q4_K, Kind.Q6_K, Kind.Q8_0, Kind.BF16
# Types of the layers and of the head. Q4_K_M has the head's type in some layers, too.
TYPES: Final = {"Q4_K_M": (Q4_K, Q6_K), "Q4_1": (Kind.Q4_1, Q6_K), "Q8_0": (Q8_0, Q8_0), "BF16": (BF16, BF16)}
FALLBACKS: Final = {Q4_K: Kind.Q5_0, Q6_K: Q8_0}  # where 256 does not divide the rows
CHUNK: Final = 1 << 24  # weights that are rounded at once


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", metavar="MODEL")
    parser.add_argument("file", type=Path)
    parser.add_argument("--type", choices=TYPES, default="Q4_K_M", help="default: Q4_K_M")
    parser.add_argument("--kv-heads", type=int, help="of a graft, instead of the shape's")
    parser.add_argument("--device", default="cpu", help="where weights are made and rounded (default: cpu)")
    args = parser.parse_args()
    write(open_model(args.model, args.kv_heads), args.file, args.type, torch.device(args.device))
    print(f"{args.file}: {args.file.stat().st_size / 1e6:.0f} MB")


def open_model(name: str, kv_heads: int | None = None) -> Checkpoint:
    if kv_heads is None:
        return open_checkpoint(name)
    base, _, shape = name.removeprefix(GRAFT_PREFIX).rpartition("@")
    return GraftCheckpoint(open_checkpoint(base), base, SHAPES[shape].with_layers(num_kv_heads=kv_heads), shape)


def write(checkpoint: Checkpoint, file: Path, recipe: str, device: torch.device) -> None:
    config = checkpoint.config
    if config.family not in ARCHITECTURES or config.attention.rope.scaling != "default":
        raise UnsupportedModel(f"only {', '.join(ARCHITECTURES)} without rope scaling are written")
    writer = GGUFWriter(file, config.family)
    add_config(writer, config)
    add_tokenizer(writer, checkpoint.tokenizer(), checkpoint.stop_token_ids, config.vocab_size)
    writer.add_name(checkpoint.note or checkpoint.path.name)
    writer.add_file_type(LlamaFileType[f"MOSTLY_{recipe}"])
    names = get_tensor_name_map(MODEL_ARCH[config.family.upper()], config.num_layers)
    count = len(parameter_shapes(config))
    for hf_name, stored in track(checkpoint.weights(device, torch.float32), f"rounding to {recipe}", count):
        name, weight = names.get_name(hf_name, (".weight", ".bias")), stored[()].to(device, torch.float32)
        assert name is not None, hf_name
        if isinstance(checkpoint, GraftCheckpoint) and config.vocab_size > checkpoint.base.config.vocab_size:
            weight = with_small_constants(name, weight)
        if config.family == "llama":
            weight = rotary_pairs(name, weight, config)
        if weight.dim() == 1:
            writer.add_tensor(name, weight.cpu().numpy())
        else:
            kind = type_of(name, recipe, config, weight.shape[1])
            writer.add_tensor(name, quantised(weight, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


# --- metadata ---------------------------------------------------------------------------------------------------------


def add_config(writer: GGUFWriter, config: DecoderConfig) -> None:
    attention = config.attention
    writer.add_block_count(config.num_layers)
    writer.add_context_length(config.max_position)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.mlp.intermediate_size)
    writer.add_head_count(attention.num_heads)
    writer.add_head_count_kv(attention.num_kv_heads)
    writer.add_key_length(attention.head_dim)
    writer.add_value_length(attention.head_dim)
    writer.add_rope_dimension_count(attention.head_dim)
    writer.add_rope_freq_base(attention.rope.theta)
    writer.add_layer_norm_rms_eps(config.rms_eps)


def add_tokenizer(writer: GGUFWriter, tokenizer: Tokenizer, stops: tuple[int, ...], size: int) -> None:
    """A byte-level BPE. Tokens that only the model's vocabulary has are unused, with names as llama.cpp gives them."""
    described = json.loads(tokenizer.backend.to_str())
    tokens = [f"[PAD{i}]" for i in range(size)]
    types = [TokenType.UNUSED] * size
    for token, i in described["model"]["vocab"].items():
        tokens[i], types[i] = token, TokenType.NORMAL
    for added in described["added_tokens"]:
        kind = TokenType.CONTROL if added["special"] else TokenType.USER_DEFINED
        tokens[added["id"]], types[added["id"]] = added["content"], kind
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_token_merges([" ".join(merge) for merge in described["model"]["merges"]])
    for key, token_id in zip(("eos", "eot", "eom"), stops, strict=False):
        writer.add_uint32(f"tokenizer.ggml.{key}_token_id", token_id)
    bos = tokenizer.token_id(tokenizer.bos_token)
    if bos is not None:
        writer.add_bos_token_id(bos)
    writer.add_add_bos_token(bos is not None and tokenizer.encode("")[:1] == [bos])
    if tokenizer.chat_template_names:
        writer.add_chat_template(tokenizer.template_source())


# --- weights ----------------------------------------------------------------------------------------------------------


def with_small_constants(name: str, weight: torch.Tensor) -> torch.Tensor:
    """The constants that keep additional tokens from being chosen (`ssd.grafts.graft`), within float16's range."""
    if name in ("token_embd.weight", "output.weight"):
        factor = 2.0**10 if name == "token_embd.weight" else 1.0
        weight[:, -1] = (weight[:, -1] * factor).clamp(min=-(2.0**15))
    return weight


def rotary_pairs(name: str, weight: torch.Tensor, config: DecoderConfig) -> torch.Tensor:
    """Llama's q and k rows with the two halves of each head interleaved."""
    if name.split(".")[-2] not in ("attn_q", "attn_k"):
        return weight
    halves = weight.view(-1, 2, config.attention.head_dim // 2, *weight.shape[1:])
    return halves.transpose(1, 2).reshape(weight.shape)


def type_of(name: str, recipe: str, config: DecoderConfig, depth: int) -> Kind:
    """The type of a matrix, as `llama_tensor_get_type` of llama.cpp chooses it."""
    usual, better = TYPES[recipe]
    part = name.split(".")[-2]
    head = part == ("token_embd" if config.tie_embeddings else "output")
    finer = recipe == "Q4_K_M" and part in ("attn_v", "ffn_down")
    kind = better if head or (finer and use_more_bits(int(name.split(".")[1]), config.num_layers)) else usual
    return FALLBACKS.get(kind, kind) if depth % GGML_QUANT_SIZES[kind][0] else kind


def use_more_bits(layer: int, layers: int) -> bool:
    return layer < layers // 8 or layer >= 7 * layers // 8 or (layer - layers // 8) % 3 == 2


def quantised(weight: torch.Tensor, kind: Kind) -> np.ndarray:
    """Blocks: uint8 [rows, bytes of a row]."""
    parts = weight.split(max(1, CHUNK // weight.shape[1]))
    return np.concatenate([QUANTISERS[kind](part) if kind in QUANTISERS else by_gguf(part, kind) for part in parts])


def by_gguf(weight: torch.Tensor, kind: Kind) -> np.ndarray:
    blocks: np.ndarray = quants.quantize(weight.cpu().numpy(), kind)
    return blocks


def q4_k(weight: torch.Tensor) -> np.ndarray:
    """8 groups of 32: scale * 0..15 - offset, of which both are 6 bits times a float16 of the block."""
    groups = weight.reshape(-1, 8, 32)
    offset = -groups.amin(2).clamp(max=0)
    scale = (groups.amax(2) + offset) / 15
    (unit, scales), (least, offsets) = factored(scale, 63), factored(offset, 63)
    values = rounded(groups + (least * offsets)[..., None], (unit * scales)[..., None]).clamp(0, 15)
    sixes, codes = torch.stack((scales, offsets), 1).byte(), values.byte().view(-1, 4, 2, 32)
    low, high = sixes[..., :4], sixes[..., 4:]
    first, last = low | high >> 4 << 6, high[:, 0] & 15 | (high[:, 1] & 15) << 4
    return joined(weight, half(unit), half(least), first.flatten(1), last, codes[:, :, 0] | codes[:, :, 1] << 4)


def q6_k(weight: torch.Tensor) -> np.ndarray:
    """16 groups of 16: scale * -32..31, a scale being 8 bits times a float16 of the block."""
    groups = weight.reshape(-1, 16, 16)
    largest = groups.gather(2, groups.abs().argmax(2, keepdim=True))[..., 0]
    unit, scales = factored(largest / -32, 127)
    codes = (rounded(groups, (unit * scales)[..., None]).clamp(-32, 31) + 32).byte()
    low, high = (codes & 15).view(-1, 2, 2, 64), (codes >> 4).view(-1, 2, 4, 32)
    pairs = high[:, :, 0] | high[:, :, 1] << 2 | high[:, :, 2] << 4 | high[:, :, 3] << 6
    return joined(weight, low[:, :, 0] | low[:, :, 1] << 4, pairs, scales.to(torch.int8).view(torch.uint8), half(unit))


QUANTISERS: Final[dict[Kind, Callable[[torch.Tensor], np.ndarray]]] = {Q4_K: q4_k, Q6_K: q6_k}


def factored(numbers: torch.Tensor, most: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A float16 (as float32) of each row, and integers up to `most`: about these numbers, multiplied."""
    unit = (numbers.abs().amax(1, keepdim=True) / most).half().float()
    return unit, rounded(numbers, unit).clamp(-most, most)


def rounded(numbers: torch.Tensor, steps: torch.Tensor) -> torch.Tensor:
    """In steps, of which those of zeros are zero."""
    return torch.where(steps == 0, 0, numbers / steps).round()


def half(unit: torch.Tensor) -> torch.Tensor:
    return unit.half().view(torch.uint8)


def joined(weight: torch.Tensor, *parts: torch.Tensor) -> np.ndarray:
    blocks = torch.cat([part.flatten(1) for part in parts], 1)
    return blocks.view(len(weight), -1).cpu().numpy()


if __name__ == "__main__":
    main()
