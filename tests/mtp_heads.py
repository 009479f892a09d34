"""Random MTP heads on disk, and the same function in plain torch around a layer of transformers: no KV cache, no
batches, nothing of ssd."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from conftest import TestModel, randomise_vectors
from safetensors.torch import load_file, save_file

Layout = Literal["deepseek", "qwen", "nextn", "speculators"]  # the first two in the target's own checkpoint
_PARTS = ("enorm", "hnorm", "eh_proj", "shared_head.norm")
_NAMES: dict[Layout, tuple[str, ...]] = {  # of the layer, and of the parts around it
    "deepseek": ("model.layers.3", *(f"model.layers.3.{part}" for part in _PARTS)),
    "nextn": ("model.layers.0", *(f"model.layers.0.{part}" for part in _PARTS)),
    "qwen": ("mtp.layers.0", "mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden", "mtp.fc", "mtp.norm"),
    "speculators": (
        "mtp_layers.0",
        *(f"mtp_layers.0.{part}" for part in ("token_layernorm", "hidden_layernorm", "input_proj", "final_layernorm")),
    ),
}


@dataclass(frozen=True)
class MTP:
    """A head in plain torch, and where it is stored: in the checkpoint `model` of its target, or apart."""

    carried: ClassVar[float] = 0.0  # see `eagle_heads.Head`

    model: str
    path: str  # the speculation's `draft`: a directory, or "mtp"
    target: Any  # transformers' model
    layer: Any  # transformers' model of one layer, with the head's last norm
    around: dict[str, torch.Tensor]
    normed: bool
    known: dict[tuple[int, ...], torch.Tensor] = field(default_factory=dict)  # by the tokens: a target takes its time

    @property
    def file(self) -> Path:
        """The one with the head's tensors."""
        return Path(self.model if self.path == "mtp" else self.path) / "mtp.safetensors"

    def fused(self, tokens: Seq[int]) -> torch.Tensor:
        """The target's last hidden states."""
        if (found := self.known.get(tuple(tokens))) is None:
            kept: list[torch.Tensor] = []
            norm = self.target.model.norm
            hook = norm.register_forward_hook(lambda _, inputs, out: kept.append(out if self.normed else inputs[0]))
            with torch.no_grad():
                self.target(torch.tensor([list(tokens)]))
            hook.remove()
            found = self.known[tuple(tokens)] = kept[0][0]
        return found

    def draft(
        self,
        tokens: Seq[int],
        count: int,
        allowed: Seq[int] | None = None,
        forced: Seq[int] = (),
        given: Seq[torch.Tensor] = (),
    ) -> tuple[list[int], list[torch.Tensor], list[torch.Tensor]]:
        """The greedy draft after some tokens, and the head's logits and states; see `eagle_heads.Head.draft`."""
        written: list[int] = []
        hidden, logits, states = self.fused(tokens[:-1]), [], []
        for _ in range(count):
            states.append(self._states([*tokens, *written][1:], hidden)[-1])
            logits.append(F.linear(states[-1], self.target.get_output_embeddings().weight.detach()))
            best = int(logits[-1].argmax()) if allowed is None else max(allowed, key=logits[-1].tolist().__getitem__)
            written.append(forced[len(written)] if len(written) < len(forced) else best)
            own = states[-1] if len(written) > len(given) else given[len(written) - 1]
            hidden = torch.cat((hidden, own[None]))
        return written, logits, states

    def _states(self, tokens: Seq[int], hidden: torch.Tensor) -> torch.Tensor:
        """After its last norm, of tokens from position 1 on with the hidden states before them."""
        embedded = self.target.get_input_embeddings().weight.detach()[list(tokens)]
        both = torch.cat((self._norm("enorm", embedded), self._norm("hnorm", hidden)), dim=1)
        x, positions = F.linear(both, self.around["eh_proj"])[None], torch.arange(1, 1 + len(tokens))[None]
        with torch.no_grad():
            states: torch.Tensor = self.layer.model(inputs_embeds=x, position_ids=positions).last_hidden_state[0]
        return states

    def _norm(self, part: str, x: torch.Tensor) -> torch.Tensor:
        eps = self.target.config.rms_norm_eps
        return self.around[part] * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)


def make_mtp(
    target: TestModel, path: Path, layout: Layout = "deepseek", *, changes: dict[str, Any] | None = None
) -> MTP:
    """Writes a random head, in the target's layouts into a copy of its checkpoint; `changes`: to the config.json."""
    reference = target.reference
    config = reference.config
    own = {"num_hidden_layers": 1, "layer_types": ["full_attention"], "mlp_only_layers": []}
    own |= {"first_k_dense_replace": 0, "mlp_layer_types": ["sparse"]}
    torch.manual_seed(4)
    layer = type(reference)(type(config)(**{**config.to_dict(), **own})).float().eval()
    randomise_vectors(layer)
    layer.save_pretrained(path / "layer", max_shard_size="1GB")
    stored = load_file(path / "layer" / "model.safetensors")
    shutil.rmtree(path / "layer")
    size = config.hidden_size
    around = {"enorm": 1 + 0.2 * torch.randn(size), "hnorm": 1 + 0.2 * torch.randn(size)}
    around |= {"eh_proj": 0.2 * torch.randn(size, 2 * size), "shared_head.norm": layer.model.norm.weight.detach()}
    name, *parts = _NAMES[layout]
    weights = {f"{part}.weight": around[key].clone() for part, key in zip(parts, _PARTS, strict=True)}
    weights |= {
        key.replace("model.layers.0", name): tensor
        for key, tensor in stored.items()
        if key.startswith("model.layers.0.")
    }
    within = layout in ("deepseek", "qwen")
    if layout in ("deepseek", "nextn"):  # whose copies nobody reads
        weights[f"{name}.embed_tokens.weight"] = reference.get_input_embeddings().weight.detach().clone()
        weights[f"{name}.shared_head.head.weight"] = reference.get_output_embeddings().weight.detach().clone()
    raw = json.loads((Path(target.path) / "config.json").read_text(encoding="utf-8"))
    if within:
        shutil.copytree(target.path, path, dirs_exist_ok=True)
        index = path / "model.safetensors.index.json"
        described = json.loads(index.read_text(encoding="utf-8"))
        described["weight_map"] |= dict.fromkeys(weights, "mtp.safetensors")
        index.write_text(json.dumps(described), encoding="utf-8")
        raw["num_nextn_predict_layers"] = 1
    elif layout == "nextn":
        raw |= {"architectures": [f"{raw['architectures'][0]}NextN"], "num_hidden_layers": 1}
        raw |= {"layer_types": None, "mlp_layer_types": None}
    else:
        raw = {"architectures": ["MTPDraftModel"], "speculators_model_type": "mtp", "transformer_layer_config": raw}
    (path / "config.json").write_text(json.dumps(raw | (changes or {})), encoding="utf-8")
    save_file({key: tensor.contiguous() for key, tensor in weights.items()}, path / "mtp.safetensors")
    model, draft = (str(path), "mtp") if within else (target.path, str(path))
    return MTP(model, draft, reference, layer, around, normed=layout != "speculators")
