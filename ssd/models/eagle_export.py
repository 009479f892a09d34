"""Writing an EAGLE head to disk in the layout of its authors, which SGLang, vLLM and SpecForge load, too."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from ssd.models.checkpoint import all_weights
from ssd.models.eagle import EagleCheckpoint, EagleConfig, authors_name, eagle_shapes
from ssd.models.export import config_json, new_directory, rope_parameters, tensor_bytes, write_json


def write_eagle(head: EagleCheckpoint, out: Path, dtype: torch.dtype, device: torch.device) -> None:
    """Writes a head, which may be in another layout, or a graft."""
    config = head.config
    with new_directory(out, tensor_bytes(eagle_shapes(config), dtype)) as folder:
        weights = {
            authors_name(name): tensor.cpu().contiguous() for name, tensor in all_weights(head, device, dtype).items()
        }
        ids = head.target_ids()
        if ids is not None:
            weights["d2t"] = ids - torch.arange(len(ids), device=ids.device)
            weights["t2d"] = torch.zeros(config.vocab_size, dtype=torch.bool, device=ids.device).index_fill(
                0, ids, True
            )
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
        write_json(folder / "config.json", eagle_json(config, dtype))


def eagle_json(config: EagleConfig, dtype: torch.dtype) -> dict[str, Any]:
    """A head's config.json; without feature layers where they are the default ones."""
    spec = config.attention
    rope = rope_parameters(spec.rope)
    scaling = {name: value for name, value in rope.items() if name != "rope_theta"}
    layers = {"eagle_aux_hidden_state_layer_ids": [n - 1 for n in config.feature_layers]}
    return config_json(config, dtype) | {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "qwen3" if spec.qk_norm else "llama",
        "draft_vocab_size": config.draft_vocab_size,
        "target_hidden_size": config.target_hidden_size,
        "rope_theta": spec.rope.theta,
        "rope_scaling": scaling if spec.rope.scaling != "default" else None,
        "mlp_bias": config.mlp.bias,
        "norm_before_residual": config.norm_before_residual,
        **({"eagle_config": layers} if config.feature_layers else {}),
    }
