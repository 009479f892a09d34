"""Writing grafts, as directories that ssd and transformers load like any other checkpoint, and EAGLE heads and block
drafts, in the layout of their authors, which other engines load, too. Rounded grafts are in the layout of
compressed-tensors (weights only, activations stay as they are), AWQ or GPTQ.

Tensors of grafts are made and written one by one; a directory appears under its name only when it is whole. Knows
nothing of the engine or the console.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable, Iterable, Iterator
from collections.abc import Sequence as Seq
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, cast
from uuid import uuid4

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from ssd.errors import ConfigError, SSDError
from ssd.grafts.graft import GraftCheckpoint, host, host_attention
from ssd.grafts.published import GraftFormat, is_published, published_json
from ssd.kernels.codes import Codes, Format, TargetFormat, bits_of, group_size, quantize
from ssd.layers.formats.mxfp4 import MXFP4
from ssd.layers.formats.rounded import Rounded
from ssd.layers.spec import ExpertsSpec, LatentSpec, MLPSpec, RopeConfig
from ssd.models.block import SELECTOR_FIELDS, BlockConfig
from ssd.models.checkpoint import all_weights
from ssd.models.config import DecoderConfig
from ssd.models.decoder import Decoder, outline, parameter_shapes
from ssd.models.eagle import EagleConfig, authors_name
from ssd.models.feature_draft import FeatureCheckpoint, FeatureConfig
from ssd.models.fused_experts import all_experts
from ssd.models.repository import INDEX

SHARD_BYTES: Final = 4 * 10**9

_ARCHITECTURES: Final = {
    "gpt_oss": "GptOssForCausalLM",
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
}
_UNPACKED: Final = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
_TEXT_FILES: Final = (
    "generation_config.json",
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.*",
    "merges.txt",
    "*.jinja",
)


def stored_bytes(graft: GraftCheckpoint, dtype: torch.dtype) -> int:
    return Decoder(graft.config, outline(dtype, graft.formats), max_positions=1).num_bytes()


def write_graft(
    graft: GraftCheckpoint,
    out: Path,
    dtype: torch.dtype,
    device: torch.device,
    advance: Callable[[int], object] = lambda _: None,
) -> None:
    """Make the graft on `device` and write it; `advance(bytes)` is called for every tensor."""
    if not graft.path.is_dir():
        raise ConfigError(
            f"{graft.path} is one file, without the tokenizer files that a directory needs: use it in memory"
        )
    with _new_directory(out, stored_bytes(graft, dtype)) as folder:
        _write_shards(all_experts(_stored(graft, device, dtype), graft.config), folder, advance)
        _copy_text_files(graft.path, folder)
        write_json(folder / "config.json", _graft_json(graft, dtype))


def write_draft(draft: FeatureCheckpoint, out: Path, dtype: torch.dtype, device: torch.device) -> None:
    """Writes an EAGLE head or a block draft, which may be in another layout, or a graft."""
    config = draft.config
    size = sum(map(math.prod, config.shapes().values())) * dtype.itemsize
    with _new_directory(out, size) as folder:
        name_of = authors_name if isinstance(config, EagleConfig) else str
        weights = {name_of(name): each.cpu().contiguous() for name, each in all_weights(draft, device, dtype).items()}
        ids = draft.target_ids()
        if ids is not None:
            weights["d2t"] = ids - torch.arange(len(ids), device=ids.device)
            weights["t2d"] = torch.zeros(config.vocab_size, dtype=torch.bool, device=ids.device).index_fill(
                0, ids, True
            )
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
        write_json(folder / "config.json", draft_json(config, dtype))


@contextmanager
def _new_directory(out: Path, size: int) -> Iterator[Path]:
    """A directory to write `size` bytes to, which gets its name when it is whole."""
    out = out.resolve()
    _check_place(out, size)
    partial = out.with_name(f".{out.name}.{uuid4().hex}.partial")
    try:
        partial.mkdir(parents=True)
        yield partial
        partial.rename(out)
    except (OSError, SafetensorError) as error:
        raise SSDError(f"out={out} cannot be written ({error}): choose another place") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _check_place(out: Path, size: int) -> None:
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError(f"out={out} exists and is not an empty directory: name another one, or remove it")
    existing = next(parent for parent in out.parents if parent.exists())
    free = shutil.disk_usage(existing).free
    if free < size:
        raise ConfigError(
            f"out={out}: {size / 1e9:.1f} GB are to be written, {free / 1e9:.1f} GB are free: name a directory on "
            "another disk, or use the graft in memory"
        )


def _stored(graft: GraftCheckpoint, device: torch.device, dtype: torch.dtype) -> Iterator[tuple[str, torch.Tensor]]:
    """The graft's tensors; of a weight that is rounded its codes and scales."""
    for name, tensor in graft.weights(device, dtype):
        form = _form(graft, name, tuple(tensor.shape))
        if form is None:
            yield name, tensor
        else:
            part = name.removesuffix("weight")
            yield from ((part + own, each) for own, each in _compressed(quantize(tensor, form)).items())


def _form(graft: GraftCheckpoint, name: str, shape: tuple[int, ...]) -> Format | None:
    """What a tensor is rounded to."""
    found = graft.formats(name.removesuffix(".weight")) if len(shape) == 2 else None
    return found.form if isinstance(found, Rounded) else None


def _compressed(codes: Codes) -> dict[str, torch.Tensor]:
    """Codes as compressed-tensors stores them: `float-quantized`, or `pack-quantized` in 32-bit words, the first weight
    in the lowest bits. Scales stay in float32; those of int4 may be negative."""
    if codes.type == "fp8":
        return {"weight": codes.values.view(torch.float8_e4m3fn), "weight_scale": codes.scales}
    values = codes.values ^ 128 if codes.type == "int8" else codes.values[:, ::2] | codes.values[:, 1::2] << 4
    shape = torch.tensor([len(values), codes.depth], dtype=torch.int64, device="cpu")
    return {"weight_packed": values.contiguous().view(torch.int32), "weight_scale": codes.scales, "weight_shape": shape}


def _quantization_json(graft: GraftCheckpoint, chosen: GraftFormat) -> dict[str, Any]:
    """`quantization_config`; of compressed-tensors with a group for each size of the groups that have one scale."""
    if is_published(chosen):
        return published_json(chosen, graft.formats)
    rounding = Rounded(cast(TargetFormat, chosen))
    form = rounding.form
    rows = {"num_bits": 8, "type": "float", "symmetric": True, "dynamic": True, "strategy": "token"}
    parts: dict[int | None, set[str]] = {}  # by weights of one scale; None: a whole output channel
    for name, shape in parameter_shapes(graft.config).items():
        if _form(graft, name, shape) is not None:
            size = group_size(shape[1], form) if form == "int4" else None
            parts.setdefault(size, set()).add(name.split(".")[-2])
    kind = {"num_bits": bits_of(form), "type": "float" if form == "fp8" else "int", "symmetric": True, "dynamic": False}
    groups = {
        f"group_{i}": {
            "targets": ["Linear"] if len(parts) == 1 else [f"re:.*{name}$" for name in sorted(names)],
            "weights": {**kind, "strategy": "channel" if size is None else "group", "group_size": size},
            "input_activations": None if rounding.rows is None else rows,
            "output_activations": None,
        }
        for i, (size, names) in enumerate(parts.items())
    }
    return {
        "quant_method": "compressed-tensors",
        "format": "float-quantized" if form == "fp8" else "pack-quantized",
        "quantization_status": "compressed",
        "config_groups": groups,
        "ignore": ["lm_head", *(["re:.*mlp\\.gate$"] if isinstance(host(graft.config).mlp, ExpertsSpec) else [])],
    }


def _write_shards(weights: Iterable[tuple[str, torch.Tensor]], folder: Path, advance: Callable[[int], object]) -> None:
    shards: list[list[str]] = []
    pending: dict[str, torch.Tensor] = {}

    def flush() -> None:
        save_file(pending, folder / f"{len(shards)}.safetensors", metadata={"format": "pt"})
        shards.append(list(pending))
        pending.clear()

    total = 0
    for name, tensor in weights:
        if pending and sum(t.nbytes for t in pending.values()) + tensor.nbytes > SHARD_BYTES:
            flush()
        pending[name] = tensor.cpu()
        total += tensor.nbytes
        advance(tensor.nbytes)
    flush()
    _name_shards(shards, folder, total)


def _name_shards(shards: list[list[str]], folder: Path, total: int) -> None:
    """One file is the model; several need their number in their names, and an index."""
    if len(shards) == 1:
        (folder / "0.safetensors").rename(folder / "model.safetensors")
        return
    weight_map: dict[str, str] = {}
    for i, names in enumerate(shards):
        file = f"model-{i + 1:05}-of-{len(shards):05}.safetensors"
        (folder / f"{i}.safetensors").rename(folder / file)
        weight_map |= dict.fromkeys(names, file)
    write_json(folder / INDEX, {"metadata": {"total_size": total}, "weight_map": weight_map})


def _copy_text_files(source: Path, folder: Path) -> None:
    for file in (file for pattern in _TEXT_FILES for file in source.glob(pattern)):
        shutil.copyfile(file, folder / file.name)


def write_json(file: Path, content: dict[str, Any]) -> None:
    file.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def _graft_json(graft: GraftCheckpoint, dtype: torch.dtype) -> dict[str, Any]:
    """config.json in the spelling of transformers 5, with where the weights come from."""
    config, form = graft.config, graft.quantization
    rounding = {} if form is None else {"quantization_config": _quantization_json(graft, form)}
    if graft.formats("model.layers.0.mlp.experts.0.down_proj") == MXFP4():
        rounding = {"quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": _UNPACKED}}
    origin = {"base": graft.base_name, "shape": graft.shape_name} | ({} if form is None else {"quantization": form})
    return config_json(config, dtype) | {
        "architectures": [_ARCHITECTURES[config.family]],
        "model_type": config.family,
        "rope_parameters": _rope_parameters(host_attention(config).rope),
        "eos_token_id": list(graft.stop_token_ids) or None,
        "bos_token_id": None,
        "ssd_graft": origin,
        **rounding,
    }


def draft_json(config: FeatureConfig, dtype: torch.dtype) -> dict[str, Any]:
    """The config.json of a draft on features, in the spelling of transformers 4."""
    equal = config.with_layers(window=None)  # for what all layers have in common
    attention, rope = equal.attention, _rope_parameters(equal.attention.rope)
    scaling = {name: value for name, value in rope.items() if name != "rope_theta"}
    assert isinstance(config, EagleConfig | BlockConfig)
    return config_json(equal, dtype) | {
        "model_type": "qwen3" if attention.qk_norm else "llama",
        "draft_vocab_size": config.draft_vocab_size,
        "rope_theta": rope["rope_theta"],
        "rope_scaling": scaling if attention.rope.scaling != "default" else None,
        **(_eagle_json(config) if isinstance(config, EagleConfig) else _block_json(config)),
    }


def _eagle_json(config: EagleConfig) -> dict[str, Any]:
    """Without feature layers where they are the default ones."""
    layers = {"eagle_aux_hidden_state_layer_ids": [n - 1 for n in config.feature_layers]}
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        "target_hidden_size": config.target_hidden_size,
        "mlp_bias": config.mlp.bias,
        "norm_before_residual": config.norm_before_residual,
        **({"eagle_config": layers} if config.feature_layers else {}),
    }


def _block_json(config: BlockConfig) -> dict[str, Any]:
    """DSpark in the layout of DeepSpec, the others in that of the DFlash authors."""
    names = {"dflash": "DFlashDraftModel", "dflash2": "DFlash2DraftModel", "dspark": "Qwen3DSparkModel"}
    own: dict[str, Any] = {
        "mask_token_id": config.mask_token,
        "target_layer_ids": [n - 1 for n in config.feature_layers],
    }
    if config.selector is not None:
        own |= dict(zip(SELECTOR_FIELDS, vars(config.selector).values(), strict=True))
    if config.markov is not None:
        own |= {"markov_rank": config.markov_rank, "markov_head_type": config.markov}
    if config.confidence_inputs:
        reads_token = config.confidence_inputs > config.hidden_size
        own |= {"enable_confidence_head": True, "confidence_head_with_markov": reads_token}
    return {
        "architectures": [names[config.family]],
        "block_size": config.block_size,
        "sample_from_anchor": config.anchored,
        **(own if config.family == "dspark" else {"dflash_config": own}),
        **_block_windows_json(config),
    }


def _block_windows_json(config: BlockConfig) -> dict[str, Any]:
    """Where layers with windows are causal, and no others, that is not stated."""
    windows = [layer.attention.window for layer in config.layers]
    causal = [i in config.causal_layers for i in range(config.num_layers)]
    if not any(windows) and not any(causal):
        return {}
    sizes = (w - (0 if own else config.block_size) for w, own in zip(windows, causal, strict=True) if w is not None)
    return {
        "layer_types": ["full_attention" if window is None else "sliding_attention" for window in windows],
        "sliding_window": next(sizes, None),
        **({"is_causal": causal[0]} if len(set(causal)) == 1 else {}),
    }


def config_json(config: DecoderConfig, dtype: torch.dtype) -> dict[str, Any]:
    """The fields of a config.json that models and drafts on features share."""
    latent = isinstance(host(config).attention, LatentSpec)
    return {
        **(_latent_json(config) if latent else _heads_json(config)),
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "num_hidden_layers": config.num_layers,
        "max_position_embeddings": config.max_position,
        "rms_norm_eps": config.rms_eps,
        "tie_word_embeddings": config.tie_embeddings,
        "hidden_act": "silu",
        "dtype": str(dtype).removeprefix("torch."),
    }


def _heads_json(config: DecoderConfig) -> dict[str, Any]:
    """The fields of attention with KV heads, and of the MLP or experts of equal layers."""
    attention, mlp = host_attention(config), host(config).mlp
    windows = [layer.attention.window for layer in config.layers]
    return {
        **(_gpt_oss_json(mlp, windows) if config.family == "gpt_oss" else _expert_json(mlp)),
        "intermediate_size": mlp.intermediate_size,
        "num_attention_heads": attention.num_heads,
        "num_key_value_heads": attention.num_kv_heads,
        "head_dim": attention.head_dim,
        "attention_bias": attention.qkv_bias,
    }


def _latent_json(config: DecoderConfig) -> dict[str, Any]:
    """The fields of latent attention, and of the dense layers and the experts after them."""
    attention = host(config).attention
    assert isinstance(attention, LatentSpec)
    dense = [layer.mlp.intermediate_size for layer in config.layers if isinstance(layer.mlp, MLPSpec)]
    fields: dict[str, Any] = {
        "num_attention_heads": attention.num_heads,
        "num_key_value_heads": attention.num_heads,
        "q_lora_rank": attention.query_rank,
        "kv_lora_rank": attention.latent_dim,
        "qk_nope_head_dim": attention.key_dim,
        "qk_rope_head_dim": attention.rope_dim,
        "v_head_dim": attention.value_dim,
        "intermediate_size": next(iter(dense), 1),
        "first_k_dense_replace": len(dense),
    }
    if isinstance(mlp := config.layers[-1].mlp, ExpertsSpec):
        fields |= {
            "n_routed_experts": mlp.num_experts,
            "num_experts_per_tok": mlp.experts_per_token,
            "moe_intermediate_size": mlp.intermediate_size,
            "n_shared_experts": mlp.shared_size // mlp.intermediate_size,
            "n_group": mlp.rule.groups,
            "topk_group": mlp.rule.kept_groups,
            "norm_topk_prob": mlp.rule.normalized,
            "routed_scaling_factor": mlp.rule.scale,
        }
    return fields


def _expert_json(mlp: MLPSpec | ExpertsSpec) -> dict[str, Any]:
    """The fields of experts in a config.json of Qwen3-MoE."""
    if not isinstance(mlp, ExpertsSpec):
        return {}
    return {
        "moe_intermediate_size": mlp.intermediate_size,
        "num_experts": mlp.num_experts,
        "num_experts_per_tok": mlp.experts_per_token,
        "norm_topk_prob": mlp.rule.normalized,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }


def _gpt_oss_json(mlp: MLPSpec | ExpertsSpec, windows: Seq[int | None]) -> dict[str, Any]:
    """The fields of experts and windows in a config.json of GPT-OSS."""
    assert isinstance(mlp, ExpertsSpec)
    return {
        "num_local_experts": mlp.num_experts,
        "num_experts_per_tok": mlp.experts_per_token,
        "swiglu_limit": mlp.glu.limit,
        "sliding_window": next(filter(None, windows), None),
        "layer_types": ["full_attention" if window is None else "sliding_attention" for window in windows],
    }


def _rope_parameters(rope: RopeConfig) -> dict[str, Any]:
    parameters: dict[str, Any] = {"rope_type": rope.scaling, "rope_theta": rope.theta}
    if rope.scaling != "default":
        parameters["factor"] = rope.factor
    if rope.scaling in ("llama3", "yarn"):
        parameters["original_max_position_embeddings"] = rope.original_max_position
    if rope.scaling == "llama3":
        parameters |= {"low_freq_factor": rope.low_freq_factor, "high_freq_factor": rope.high_freq_factor}
    if rope.scaling == "yarn":
        parameters |= {"beta_fast": rope.beta_fast, "beta_slow": rope.beta_slow, "truncate": rope.truncate}
        parameters |= {} if rope.attention_factor is None else {"attention_factor": rope.attention_factor}
    return parameters
