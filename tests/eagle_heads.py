"""Random EAGLE-3 heads on disk, and the same function in plain torch: no KV cache, no batches, nothing of ssd."""

from __future__ import annotations

import json
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from conftest import TestModel
from safetensors.torch import save_file

from ssd.drafting.head import CARRIED

Layout = Literal["eagle", "speculators"]


@dataclass(frozen=True)
class Head:
    """A head in plain torch, and where it is stored."""

    carried: ClassVar[float] = CARRIED  # of a difference in its states, by each step

    path: str
    weights: dict[str, torch.Tensor]
    target: Any  # transformers' model
    layers: tuple[int, ...]
    num_heads: int
    num_kv_heads: int
    theta: float
    eps: float
    norm_before_residual: bool
    norm_output: bool = False
    known: dict[tuple[int, ...], torch.Tensor] = field(default_factory=dict)  # by the tokens: a target takes its time

    def features(self, tokens: Seq[int]) -> torch.Tensor:
        """Hidden states of the target after each of the layers, side by side: [tokens, ...]."""
        found: dict[int, torch.Tensor] = {}
        hooks = [
            self.target.model.layers[n - 1].register_forward_hook(
                lambda _, __, out, n=n: found.__setitem__(n, (out[0] if isinstance(out, tuple) else out)[-1])
            )
            for n in self.layers
        ]
        with torch.no_grad():
            self.target(torch.tensor([list(tokens)]))
        for hook in hooks:
            hook.remove()
        return torch.cat([found[n].view(len(tokens), -1) for n in self.layers], dim=1)

    def fused(self, tokens: Seq[int]) -> torch.Tensor:
        if (found := self.known.get(tuple(tokens))) is None:
            found = F.linear(
                self._normed(self.features(tokens)), self.weights["fc.weight"], self.weights.get("fc.bias")
            )
            self.known[tuple(tokens)] = found
        return found

    def _normed(self, features: torch.Tensor) -> torch.Tensor:
        if (weight := self.weights.get("input_norm.weight")) is not None:
            return _norm(features, weight, self.eps)
        if "fc_norm.0.weight" not in self.weights:
            return features
        parts = enumerate(features.chunk(3, dim=1))
        return torch.cat([_norm(part, self.weights[f"fc_norm.{i}.weight"], self.eps) for i, part in parts], dim=1)

    def draft(
        self,
        tokens: Seq[int],
        count: int,
        allowed: Seq[int] | None = None,
        forced: Seq[int] = (),
        given: Seq[torch.Tensor] = (),
    ) -> tuple[list[int], list[torch.Tensor], list[torch.Tensor]]:
        """The greedy draft after some tokens, and the head's logits (of the target's vocabulary) and states.

        `allowed`: the only tokens that may be written. `forced`: the first tokens of the draft, whatever the head says.
        `given`: states that it reads with these in place of its own.
        """
        w, written = self.weights, list[int]()
        hidden = self.fused(tokens[:-1])
        logits, states = [], []
        for _ in range(count):
            out = self._layer([*tokens, *written][1:], hidden)[-1]
            normed = _norm(out, w["norm.weight"], self.eps)
            states.append(normed if self.norm_output else out)
            small = F.linear(normed, w["lm_head.weight"])
            full = torch.full((w["t2d"].numel(),), -torch.inf)
            full[torch.arange(len(small)) + w["d2t"]] = small
            logits.append(full)
            best = int(full.argmax()) if allowed is None else max(allowed, key=full.tolist().__getitem__)
            written.append(forced[len(written)] if len(written) < len(forced) else best)
            own = states[-1] if len(written) > len(given) else given[len(written) - 1]
            hidden = torch.cat((hidden, own[None]))
        return written, logits, states

    def _layer(self, tokens: Seq[int], hidden: torch.Tensor) -> torch.Tensor:
        w, p = self.weights, "midlayer."
        embedding = w.get("embed_tokens.weight", self.target.get_input_embeddings().weight.detach())
        embedded = _norm(embedding[list(tokens)], w[p + "input_layernorm.weight"], self.eps)
        normed = _norm(hidden, w[p + "hidden_norm.weight"], self.eps)
        residual = normed if self.norm_before_residual else hidden
        both = torch.cat((embedded, normed), dim=-1)
        q, k, v = (F.linear(both, w[f"{p}self_attn.{each}_proj.weight"]) for each in "qkv")
        q, k, v = (x.view(len(tokens), -1, q.shape[1] // self.num_heads).transpose(0, 1) for x in (q, k, v))
        q, k = self._rotate(q), self._rotate(k)
        k, v = (x.repeat_interleave(self.num_heads // self.num_kv_heads, dim=0) for x in (k, v))
        seen = F.scaled_dot_product_attention(q[None], k[None], v[None], is_causal=True)[0]
        residual = residual + F.linear(seen.transpose(0, 1).flatten(1), w[p + "self_attn.o_proj.weight"])
        x = _norm(residual, w[p + "post_attention_layernorm.weight"], self.eps)
        gate, up = (F.linear(x, w[f"{p}mlp.{each}_proj.weight"]) for each in ("gate", "up"))
        return residual + F.linear(F.silu(gate) * up, w[p + "mlp.down_proj.weight"])

    def _rotate(self, x: torch.Tensor) -> torch.Tensor:
        half = x.shape[-1] // 2
        angles = torch.arange(x.shape[1])[:, None] / self.theta ** (torch.arange(half) / half)
        low, high = x.chunk(2, dim=-1)
        return torch.cat((low * angles.cos() - high * angles.sin(), high * angles.cos() + low * angles.sin()), dim=-1)


def _norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return weight * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)


def make_head(
    target: TestModel,
    path: Path,
    layout: Layout = "eagle",
    *,
    hidden_size: int | None = None,
    draft_vocab: int = 200,
    head_dim: int = 24,
    norm_before_residual: bool = False,
    fc_bias: bool = False,
    own_embedding: bool = False,
    norms: Literal["", "norm_before_fc", "fc_norm"] = "",
    norm_output: bool = False,
    changes: dict[str, Any] | None = None,
) -> Head:
    """Writes a random head for a target of three layers or more; `changes`: to its config.json."""
    model = target.reference.config
    width, heads, kv_heads, dim, mlp, layers = hidden_size or model.hidden_size, 4, 2, head_dim, 80, (1, 2, 3)
    generator = torch.Generator().manual_seed(1)

    def randn(*shape: int, around: float = 0.0) -> torch.Tensor:
        return around + 0.2 * torch.randn(shape, generator=generator)

    p = "midlayer."
    weights = {
        "fc.weight": randn(width, 3 * model.hidden_size),
        p + "self_attn.q_proj.weight": randn(heads * dim, 2 * width),
        p + "self_attn.k_proj.weight": randn(kv_heads * dim, 2 * width),
        p + "self_attn.v_proj.weight": randn(kv_heads * dim, 2 * width),
        p + "self_attn.o_proj.weight": randn(width, heads * dim),
        p + "mlp.gate_proj.weight": randn(mlp, width),
        p + "mlp.up_proj.weight": randn(mlp, width),
        p + "mlp.down_proj.weight": randn(width, mlp),
        "lm_head.weight": randn(draft_vocab, width),
        **{p + f"{name}.weight": randn(width, around=1.0) for name in ("input_layernorm", "hidden_norm")},
        p + "post_attention_layernorm.weight": randn(width, around=1.0),
        "norm.weight": randn(width, around=1.0),
    }
    if fc_bias:
        weights["fc.bias"] = randn(width)
    if norms == "norm_before_fc":
        weights["input_norm.weight"] = randn(3 * model.hidden_size, around=1.0)
    if norms == "fc_norm":
        weights |= {f"fc_norm.{i}.weight": randn(model.hidden_size, around=1.0) for i in range(3)}
    if own_embedding:
        weights["embed_tokens.weight"] = randn(model.vocab_size, width)
    ids = torch.randperm(model.vocab_size, generator=generator)[:draft_vocab].sort().values
    weights["d2t"] = ids - torch.arange(draft_vocab)
    weights["t2d"] = torch.zeros(model.vocab_size, dtype=torch.bool).index_fill(0, ids, True)
    flags = norm_before_residual, norm_output
    head = Head(str(path), weights, target.reference, layers, heads, kv_heads, 5000.0, 1e-5, *flags)
    own = dict.fromkeys([norms] if norms else [], True) | ({"norm_output": True} if norm_output else {})
    return _write(head, layout, mlp, dim, own | (changes or {}))


def make_tiny_head(path: Path) -> Head:
    """A random head of the bundled targets, which can be grafted."""
    sizes = SimpleNamespace(hidden_size=256, vocab_size=8192)
    return make_head(TestModel("", SimpleNamespace(config=sizes)), path, head_dim=32)


def _write(head: Head, layout: Layout, mlp: int, dim: int, changes: dict[str, Any]) -> Head:
    model, weights = head.target.config, dict(head.weights)
    layer = {
        "model_type": "llama",
        "hidden_size": len(weights["norm.weight"]),
        "intermediate_size": mlp,
        "num_hidden_layers": 1,
        "num_attention_heads": head.num_heads,
        "num_key_value_heads": head.num_kv_heads,
        "head_dim": dim,
        "vocab_size": model.vocab_size,
        "max_position_embeddings": 64,  # published heads state less than they are used for
        "rms_norm_eps": head.eps,
        "rope_theta": head.theta,
    }
    config: dict[str, Any] = {"draft_vocab_size": len(weights["d2t"])}
    if layout == "eagle":
        config |= layer | {
            "architectures": ["LlamaForCausalLMEagle3"],
            "eagle_config": {"eagle_aux_hidden_state_layer_ids": [n - 1 for n in head.layers]},
        }
        if head.norm_before_residual:
            config["norm_before_residual"] = True
    else:
        weights = {name.replace("midlayer.", "layers.0."): tensor for name, tensor in weights.items()}
        config |= {
            "architectures": ["Eagle3Speculator"],
            "speculators_model_type": "eagle3",
            "speculators_config": {"algorithm": "eagle3"},
            "transformer_layer_config": layer,
            "eagle_aux_hidden_state_layer_ids": list(head.layers),
            "norm_before_residual": head.norm_before_residual,
            "target_hidden_size": model.hidden_size,
        }
    path = Path(head.path)
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(config | changes), encoding="utf-8")
    save_file({name: tensor.contiguous() for name, tensor in weights.items()}, path / "model.safetensors")
    return replace(head, path=str(path))
