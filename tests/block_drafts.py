"""Random block drafts on disk, and the same function in plain torch: no KV cache, no batches, nothing of ssd."""

from __future__ import annotations

import json
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
import torch.nn.functional as F
from conftest import TestModel
from first_drafts import write_draft
from safetensors.torch import save_file

from ssd import LLM
from ssd.drafting.choice import TokenChoice

Layout = Literal["dflash", "deepspec", "speculators"]
TAPS, GROUP, CANDIDATES = 3, 8, 5  # of DFlash 2
Markov = Literal["", "vanilla", "gated", "rnn"]
EPS, THETA, HEADS, KV_HEADS, DIM = 1e-6, 5000.0, 4, 2, 32


@dataclass(frozen=True)
class Block:
    """A block draft in plain torch, and where it is stored."""

    path: str
    weights: dict[str, torch.Tensor]
    target: Any  # transformers' model
    layers: tuple[int, ...]  # of the target, by their number from 1
    mask: int
    anchored: bool
    markov: Markov
    second: bool = False  # DFlash 2
    softcap: float = 0.0
    num_layers: int = 2
    windows: tuple[int | None, ...] = (None, None)  # of the layers
    causal: tuple[bool, ...] = (False, False)
    block_size: int = 6

    def draft(
        self,
        tokens: Seq[int],
        count: int,
        allowed: Seq[int] | None = None,
        forced: Seq[int] = (),
        chances: list[float] | None = None,
    ) -> tuple[list[int], list[torch.Tensor]]:
        """The greedy draft after some tokens, and the logits (of the target's vocabulary) of each of its tokens.

        `allowed`: the only tokens that may be written. `forced`: the first ones, whatever the draft says. `chances`
        gets what a confidence head says of each.
        """
        w, queries = self.weights, count + (not self.anchored)
        context = _norm(F.linear(self._features(tokens[:-1]), w["fc.weight"]), w["hidden_norm.weight"])
        embedding = self.target.get_input_embeddings().weight.detach()
        x = embedding[[tokens[-1], *[self.mask] * (queries - 1)]]
        for i in range(self.num_layers):
            x = self._layer(i, x, context)
        states = _norm(x, w["norm.weight"])[queries - count :]
        head = w.get("lm_head.weight", self.target.get_output_embeddings().weight.detach())
        written, found, before = [], [], tokens[-1]
        state = torch.zeros(w["markov_head.markov_w1.weight"].shape[1] if self.markov else 0)
        for h in states:
            if chances is not None:
                e = w["markov_head.markov_w1.weight"][before]
                score = F.linear(torch.cat((h, e)), w["confidence_head.proj.weight"], w["confidence_head.proj.bias"])
                chances.append(float(score.sigmoid()))
            logits = F.linear(h, head)
            if self.second:
                logits = self._selected(self.softcap * (logits / self.softcap).tanh(), before, h)
            if self.markov:
                bias, state = self._bias(before, h, state)
                logits = logits + bias
            if "d2t" in w:
                ids = torch.arange(len(logits)) + w["d2t"]
                logits = torch.full((len(embedding),), -torch.inf).index_copy(0, ids, logits)
            found.append(logits)
            best = int(logits.argmax()) if allowed is None else max(allowed, key=logits.tolist().__getitem__)
            before = forced[len(written)] if len(written) < len(forced) else best
            written.append(before)
        return written, found

    def _selected(self, logits: torch.Tensor, before: int, h: torch.Tensor) -> torch.Tensor:
        w, p = self.weights, "candidate_selector."
        wanted = w[p + "predecessor_codebook.weight"][before] * F.linear(h, w[p + "hidden_projection.weight"])
        values, found = logits.topk(CANDIDATES)
        scores = values + w[p + "successor_codebook.weight"][found] @ wanted
        return torch.full_like(logits, -torch.inf).index_copy(0, found, scores)

    def _convolved(self, name: str, x: torch.Tensor, of: torch.Tensor, place: int) -> torch.Tensor:
        """`of`: the sublayer's normed input, which says how the taps change."""
        if not self.second:
            return x
        base = self.weights[f"{name}.base_kernel"][place]
        change = F.linear(of, self.weights[f"{name}.kernel_projection.weight"]).view(len(x), 2, TAPS, -1)[:, place]
        out = torch.zeros_like(x)
        for i in range(len(x)):
            for t in range(min(TAPS, i + 1)):
                out[i] += (base[t] + change[i, t].repeat_interleave(GROUP)) * x[i - t]
        return out

    def _bias(self, before: int, h: torch.Tensor, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        w, p = self.weights, "markov_head."
        e, after = w[p + "markov_w1.weight"][before], w[p + "markov_w2.weight"]
        if self.markov == "vanilla":
            return F.linear(e, after), state
        if self.markov == "gated":
            gate = F.linear(torch.cat((h, e)), w[p + "gate_proj.weight"], w[p + "gate_proj.bias"])
            return F.linear(gate.sigmoid() * e, after), state
        joint = F.linear(torch.cat((state, e, h)), w[p + "joint_proj.weight"], w[p + "joint_proj.bias"])
        g, c, o = joint.chunk(3)
        state = g.sigmoid() * state + (1 - g.sigmoid()) * c.tanh()
        return F.linear(o.tanh(), after), state

    def _features(self, tokens: Seq[int]) -> torch.Tensor:
        """Hidden states of the target after each of the layers, side by side."""
        with torch.no_grad():
            out = self.target(torch.tensor([list(tokens)]), output_hidden_states=True)
        return torch.cat([out.hidden_states[n][0] for n in self.layers], dim=1)

    def _seen(self, layer: int, begin: int, queries: int) -> torch.Tensor:
        """Which positions each query sees. A window ends at the query, or is that of a whole block and before it."""
        query, key, window = torch.arange(begin, begin + queries)[:, None], torch.arange(begin + queries), 1 << 20
        if self.causal[layer]:
            return (key <= query) & (key > query - (self.windows[layer] or window))
        return (key >= begin + queries - self.block_size - (self.windows[layer] or window)).expand(queries, -1)

    def _layer(self, i: int, x: torch.Tensor, context: torch.Tensor) -> torch.Tensor:
        """Queries of the block; keys and values of the context, which no norm precedes, and of the block."""
        w, begin, p = self.weights, len(context), f"layers.{i}."
        before = _norm(x, w[p + "input_layernorm.weight"])
        normed = self._convolved(p + "attention_conv", before, before, 0)
        q = F.linear(normed, w[p + "self_attn.q_proj.weight"])
        k, v = (F.linear(torch.cat((context, normed)), w[f"{p}self_attn.{each}_proj.weight"]) for each in "kv")
        q, k, v = (part.view(len(part), -1, DIM).transpose(0, 1) for part in (q, k, v))
        q = _rotate(_norm(q, w[p + "self_attn.q_norm.weight"]), begin)
        k = _rotate(_norm(k, w[p + "self_attn.k_norm.weight"]), 0)
        k, v = (part.repeat_interleave(HEADS // KV_HEADS, dim=0) for part in (k, v))
        mask = self._seen(i, begin, len(x))
        seen = F.scaled_dot_product_attention(q[None], k[None], v[None], attn_mask=mask)[0]
        out = F.linear(seen.transpose(0, 1).flatten(1), w[p + "self_attn.o_proj.weight"])
        x = x + self._convolved(p + "attention_conv", out, before, 1)
        before = _norm(x, w[p + "post_attention_layernorm.weight"])
        normed = self._convolved(p + "mlp_conv", before, before, 0)
        gate, up = (F.linear(normed, w[f"{p}mlp.{each}_proj.weight"]) for each in ("gate", "up"))
        out = F.linear(F.silu(gate) * up, w[p + "mlp.down_proj.weight"])
        return x + self._convolved(p + "mlp_conv", out, before, 1)


def first_draft(
    model: str, draft: str, tokens: Seq[int], count: int, patch: pytest.MonkeyPatch
) -> tuple[list[int], list[torch.Tensor], list[float]]:
    """The greedy draft that the engine writes after some tokens, which one forward pass of the target has read, and the
    logits and the confidence of each of its tokens."""
    seen: list[torch.Tensor] = []
    keep = TokenChoice._keep

    def spy(self: TokenChoice, found: torch.Tensor, *others: Any) -> None:
        seen.extend(found.clone())
        keep(self, found, *others)

    speculation = {"mode": "sd", "draft": draft, "k": count}
    with patch.context() as context, LLM(model, device="cpu", dtype="float32", speculation=speculation) as llm:
        context.setattr(TokenChoice, "_keep", spy)
        written = write_draft(llm, tokens, count)
        return written, seen, llm.engine.round.drafter.model.runner.state.confidence[0].tolist()  # type: ignore[attr-defined]


def _rotate(x: torch.Tensor, first: int) -> torch.Tensor:
    half = x.shape[-1] // 2
    positions = first + torch.arange(x.shape[1])
    angles = positions[:, None] / THETA ** (torch.arange(half) / half)
    low, high = x.chunk(2, dim=-1)
    return torch.cat((low * angles.cos() - high * angles.sin(), high * angles.cos() + low * angles.sin()), dim=-1)


def _norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return weight * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS)


def make_block(
    target: TestModel,
    path: Path,
    layout: Layout = "dflash",
    *,
    block_size: int = 6,
    markov: Markov = "",
    draft_vocab: int | None = None,
    anchored: bool | None = None,
    second: bool = False,
    windows: tuple[int | None, ...] = (None, None),
    causal: tuple[bool, ...] = (False, False),
    changes: dict[str, Any] | None = None,
) -> Block:
    """Writes a random block draft for a target of three layers or more; `changes`: to its config.json."""
    model = target.reference.config
    width, mlp, layers, rank = model.hidden_size, 80, (1, 2), 32
    generator = torch.Generator().manual_seed(2)

    def randn(*shape: int, around: float = 0.0) -> torch.Tensor:
        return around + 0.2 * torch.randn(shape, generator=generator)

    weights = {"fc.weight": randn(width, len(layers) * width)}
    weights |= {f"{name}.weight": randn(width, around=1.0) for name in ("hidden_norm", "norm")}
    for i in range(Block.num_layers):
        p = f"layers.{i}."
        weights |= {
            p + "self_attn.q_proj.weight": randn(HEADS * DIM, width),
            p + "self_attn.k_proj.weight": randn(KV_HEADS * DIM, width),
            p + "self_attn.v_proj.weight": randn(KV_HEADS * DIM, width),
            p + "self_attn.o_proj.weight": randn(width, HEADS * DIM),
            p + "self_attn.q_norm.weight": randn(DIM, around=1.0),
            p + "self_attn.k_norm.weight": randn(DIM, around=1.0),
            p + "mlp.gate_proj.weight": randn(mlp, width),
            p + "mlp.up_proj.weight": randn(mlp, width),
            p + "mlp.down_proj.weight": randn(width, mlp),
            p + "input_layernorm.weight": randn(width, around=1.0),
            p + "post_attention_layernorm.weight": randn(width, around=1.0),
        }
    vocab, rows = model.vocab_size, draft_vocab or model.vocab_size
    if draft_vocab is not None:
        ids = torch.randperm(vocab, generator=generator)[:draft_vocab].sort().values
        weights |= {"d2t": ids - torch.arange(draft_vocab), "lm_head.weight": randn(draft_vocab, width)}
    if markov:
        weights |= {f"markov_head.markov_w{i}.weight": randn(size, rank) for i, size in ((1, vocab), (2, rows))}
    if markov in ("gated", "rnn"):
        name, out, into = ("gate", rank, rank + width) if markov == "gated" else ("joint", 3 * rank, 2 * rank + width)
        weights |= {f"markov_head.{name}_proj.weight": randn(out, into), f"markov_head.{name}_proj.bias": randn(out)}
    if second:
        p = "candidate_selector."
        weights |= {
            p + "predecessor_codebook.weight": randn(vocab, rank),
            p + "hidden_projection.weight": randn(rank, width),
        }
        weights |= {p + "successor_codebook.weight": randn(vocab, rank)}
        for name in (f"layers.{i}.{part}_conv" for i in range(Block.num_layers) for part in ("attention", "mlp")):
            weights[f"{name}.base_kernel"] = randn(2, TAPS, width, around=0.3)
            weights[f"{name}.kernel_projection.weight"] = 0.2 * randn(2 * TAPS * width // GROUP, width)
    if markov and layout == "deepspec":
        weights["confidence_head.proj.weight"] = randn(1, width + rank)
        weights["confidence_head.proj.bias"] = randn(1)
    follows = layout == "deepspec" or bool(markov) if anchored is None else anchored
    block = Block(str(path), weights, target.reference, layers, vocab - 1, follows, markov, second, 30.0)
    block = replace(block, windows=windows, causal=causal, block_size=block_size)
    _write(block, layout, block_size, mlp, rank, changes or {})
    return block


def _write(block: Block, layout: Layout, size: int, mlp: int, rank: int, changes: dict[str, Any]) -> None:
    model, weights = block.target.config, dict(block.weights)
    layer = {
        "model_type": "qwen3",
        "hidden_size": model.hidden_size,
        "intermediate_size": mlp,
        "num_hidden_layers": block.num_layers,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": DIM,
        "vocab_size": model.vocab_size,
        "max_position_embeddings": 64,
        "rms_norm_eps": EPS,
        "rope_theta": THETA,
        "layer_types": ["full_attention" if window is None else "sliding_attention" for window in block.windows],
        "sliding_window": next(filter(None, block.windows), None),
    }
    markov = {"markov_rank": rank, "markov_head_type": block.markov} if block.markov else {}
    outputs = [n - 1 for n in block.layers]
    config: dict[str, Any]
    if layout == "dflash":
        own = {"mask_token_id": block.mask, "target_layer_ids": outputs}
        own |= _second(block, rank) if block.second else {}
        name = "DFlash2DraftModel" if block.second else "DFlashDraftModel"
        config = layer | {"architectures": [name], "dflash_config": own}
        (own if block.second else config)["block_size"] = size
        config["num_target_layers"] = model.num_hidden_layers
    elif layout == "deepspec":
        config = layer | {"architectures": ["Qwen3DSparkModel"], "block_size": size, "target_layer_ids": outputs}
        config |= {"mask_token_id": block.mask, "enable_confidence_head": bool(markov), **markov}
        weights["embed_tokens.weight"] = block.target.get_input_embeddings().weight.detach().clone()
        weights["lm_head.weight"] = block.target.get_output_embeddings().weight.detach().clone()
    else:
        kind = "dspark" if block.markov else "dflash2" if block.second else "dflash"
        config = {
            "architectures": ["Speculator"],
            "speculators_model_type": kind,
            "transformer_layer_config": layer,
            "aux_hidden_state_layer_ids": list(block.layers),
            "mask_token_id": block.mask,
            "block_size": size,
            "sample_from_anchor": block.anchored,
            "draft_vocab_size": len(weights["d2t"]) if "d2t" in weights else model.vocab_size,
            **markov,
            **(_second(block, rank) if block.second else {}),
        }
    path = Path(block.path)
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(config | changes), encoding="utf-8")
    save_file({name: tensor.contiguous() for name, tensor in weights.items()}, path / "model.safetensors")


def _second(block: Block, rank: int) -> dict[str, Any]:
    sizes = {"conv_kernel_size": TAPS, "conv_group_size": GROUP, "selector_rank": rank, "selector_top_k": CANDIDATES}
    return sizes | {"final_logit_softcapping": block.softcap}
