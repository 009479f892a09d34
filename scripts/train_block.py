"""Trains block drafts (DSpark) of the bundled targets on what these write, and exports them in the layout of DeepSpec.

    python scripts/train_block.py --data DIR --work WORK --out ssd/bundle    # both families; --family llama: one

`--data` (else SSD_DATASET_DIR) and WORK are those of train_eagle.py: what a target has written is written once for
both. A draft begins at many places of every row, its anchors. As published, the target's tokens are given to the
Markov head, and the loss of a token is 0.1 of the cross entropy and 0.9 of the L1 distance of the distributions, with
weights that fall along the block. Every `--report` steps the tokens per round are printed that K = 7 would have on text
that was kept out of the training. A draft that was stopped by `--minutes` is exported, too, and its training goes on
when it is started again.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from tiny_corpus import FAMILIES, MAX_POSITION, VOCAB, Windows
from torch import nn
from train_eagle import HELD_OUT, data_arguments, load_target, read_tokens, teach
from train_tiny import MLP, Model, Norm, Run, Shape, autocast, compiled, rotate, train, written

from ssd.grafts.export import draft_json, write_json
from ssd.layers.spec import GQASpec, LayerSpec, MLPSpec, RopeConfig
from ssd.models.block import BlockConfig

SHAPE = Shape(256, 512, 2, 8, 4)
RANK = 32  # of the Markov head
SIZE = 7  # queries of a block, as published; each predicts the next token
FEATURE_LAYERS = (2, 4, 6, 8, 10)  # of 12: the DFlash authors' choice
MASK = VOCAB - 8  # a reserved token, which no text has
FADE = 4  # tokens along the block in which the weight of the loss falls by a factor of e
ENTROPY = 0.1  # share of the cross entropy in the loss
FEW = 4  # of the rows that are kept out: those of the reports in between


# --- the draft, with the parameter names of a checkpoint --------------------------------------------------------------


class Blocks(NamedTuple):
    """Which blocks are computed; the same ones in all rows of text."""

    places: torch.Tensor  # [blocks, SIZE]: positions of the queries
    seen: torch.Tensor  # [queries, positions + queries]: the positions before the block, and the block itself

    @classmethod
    def at(cls, anchors: torch.Tensor, length: int) -> Blocks:
        places = anchors[:, None] + torch.arange(SIZE, device=anchors.device)
        before = torch.arange(length, device=anchors.device) < anchors.repeat_interleave(SIZE)[:, None]
        block = torch.arange(len(anchors), device=anchors.device).repeat_interleave(SIZE)
        return cls(places, torch.cat((before, block[:, None] == block), 1))


class Attention(nn.Module):
    def __init__(self, s: Shape, eps: float) -> None:
        super().__init__()
        self.s = s
        self.q_proj = nn.Linear(s.width, s.heads * s.head_dim, bias=False)
        self.k_proj = nn.Linear(s.width, s.kv_heads * s.head_dim, bias=False)
        self.v_proj = nn.Linear(s.width, s.kv_heads * s.head_dim, bias=False)
        self.o_proj = nn.Linear(s.heads * s.head_dim, s.width, bias=False)
        self.q_norm, self.k_norm = (Norm(s.head_dim, eps) for _ in "qk")

    def forward(self, x: torch.Tensor, context: torch.Tensor, rope: torch.Tensor, blocks: Blocks) -> torch.Tensor:
        own, before = rope[:, blocks.places.flatten()], rope[:, : context.shape[1]]
        q = rotate(self.q_norm(self._heads(self.q_proj(x))), own)
        k, v = (self._heads(p(torch.cat((context, x), 1))) for p in (self.k_proj, self.v_proj))
        k = rotate(self.k_norm(k), torch.cat((before, own), 1))
        k, v = (t.repeat_interleave(self.s.heads // self.s.kv_heads, 1) for t in (k, v))
        y = F.scaled_dot_product_attention(q, k, v, blocks.seen)
        return self.o_proj(y.transpose(1, 2).flatten(2))

    def _heads(self, x: torch.Tensor) -> torch.Tensor:
        return x.unflatten(2, (-1, self.s.head_dim)).transpose(1, 2)


class Layer(nn.Module):
    def __init__(self, s: Shape, eps: float) -> None:
        super().__init__()
        self.input_layernorm, self.post_attention_layernorm = (Norm(s.width, eps) for _ in range(2))
        self.self_attn = Attention(s, eps)
        self.mlp = MLP(s)

    def forward(self, x: torch.Tensor, context: torch.Tensor, rope: torch.Tensor, blocks: Blocks) -> torch.Tensor:
        x = x + self.self_attn(self.input_layernorm(x), context, rope, blocks)
        return x + self.mlp(self.post_attention_layernorm(x))


class MarkovHead(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.markov_w1 = nn.Embedding(VOCAB, RANK)
        self.markov_w2 = nn.Linear(RANK, VOCAB, bias=False)
        nn.init.normal_(self.markov_w1.weight, std=0.2)
        nn.init.zeros_(self.markov_w2.weight)


class Draft(nn.Module):
    """A draft that uses its target's embedding and head."""

    def __init__(self, teacher: Model) -> None:
        super().__init__()
        s, eps = SHAPE, FAMILIES[teacher.family].eps
        torch.manual_seed(0)
        self.fc = nn.Linear(len(FEATURE_LAYERS) * s.width, s.width, bias=False)
        self.hidden_norm, self.norm = (Norm(s.width, eps) for _ in range(2))
        self.layers = nn.ModuleList(Layer(s, eps) for _ in range(s.layers))
        self.markov_head = MarkovHead()
        self.to(teacher.rope.device)
        self.register_buffer("rope", teacher.rope, persistent=False)
        self.register_buffer("words", teacher.embed_tokens.weight, persistent=False)
        for name, p in self.layers.named_parameters():
            if p.dim() == 2:
                nn.init.normal_(p, std=0.002 if name.endswith(("o_proj.weight", "down_proj.weight")) else 0.02)
        self.norm.weight.data.copy_(teacher.norm.weight)

    def forward(self, ids: torch.Tensor, features: torch.Tensor, blocks: Blocks) -> tuple[torch.Tensor, torch.Tensor]:
        """[rows, blocks, SIZE, …]: what `head` makes the logits of, and that matrix. The token before each is known."""
        tokens = ids[:, blocks.places]
        shown = torch.full_like(tokens, MASK)
        shown[:, :, 0] = tokens[:, :, 0]
        x, context = F.embedding(shown.flatten(1), self.words), self.hidden_norm(self.fc(features))
        for layer in self.layers:
            x = layer(x, context, self.rope, blocks)
        states = self.norm(x).unflatten(1, blocks.places.shape)
        head = torch.cat((self.words, self.markov_head.markov_w2.weight), 1)
        return torch.cat((states, self.markov_head.markov_w1(tokens)), -1), head


# --- training ---------------------------------------------------------------------------------------------------------


def train_block(args: argparse.Namespace, family: str) -> None:
    teacher = load_target(family, args.device)
    rows = written(args, teacher, read_tokens(args.data, family)).reshape(-1, args.written)
    held = [torch.from_numpy(part.astype(np.int64)).to(args.device) for part in (rows[:HELD_OUT], rows[-HELD_OUT:])]
    windows = Windows(rows[HELD_OUT:-HELD_OUT].flatten(), args.written, args.batch, args.device)
    draft, distance = Draft(teacher), compiled(divergence, args.device)
    beginnings = args.written - SIZE - 1

    def loss_of(step: int) -> torch.Tensor:
        random = torch.Generator().manual_seed(step)
        anchors = 1 + torch.randperm(beginnings, generator=random)[: args.anchors].to(args.device)
        ids, blocks = windows(step), Blocks.at(anchors, args.written)
        with autocast(args.device):
            features, wanted = teach(teacher, ids, FEATURE_LAYERS)
            loss = distance(*draft(ids, features, blocks), wanted, ids, blocks.places)
        if step % args.report == 0:
            found = (acceptance(teacher, draft, rows[:FEW], t)[1] for t, rows in enumerate(held))
            lengths = ", ".join(f"{length:.2f} at T = {t}" for t, length in enumerate(found))
            print(f"{family}, step {step}: loss {float(loss.detach()):.3f}, tokens per round {lengths}")
        return loss

    train(Run(args.work / f"{family}-block.pt", draft, args.steps, args.rate), loss_of, args.minutes)
    print(f"tiny-{family}-block, held-out text, K = {SIZE}, acceptance by position and tokens per round:")
    for t, rows in enumerate(held):
        rates, length = acceptance(teacher, draft, rows, t)
        print(f"  T = {t}: {' '.join(f'{rate:.3f}' for rate in rates)}; {length:.2f}")
    export(draft, family, args.out / f"tiny-{family}-block")


def divergence(
    states: torch.Tensor, head: torch.Tensor, wanted: torch.Tensor, ids: torch.Tensor, places: torch.Tensor
) -> torch.Tensor:
    """The mean loss of a token; `wanted`: the target's logits at all positions."""
    log_q = F.linear(states, head).float().log_softmax(-1)
    p = wanted[:, places].float().softmax(-1)
    entropy = -log_q.gather(-1, ids[:, places + 1, None])[..., 0]
    losses = ENTROPY * entropy + (1 - ENTROPY) * (log_q.exp() - p).abs().sum(-1)
    weights = (-torch.arange(SIZE, device=ids.device) / FADE).softmax(0)
    return (losses.mean((0, 1)) * weights).sum()


@torch.inference_mode()
@torch.compiler.set_stance("force_eager")
def acceptance(teacher: Model, draft: Draft, rows: torch.Tensor, temperature: int) -> tuple[list[float], float]:
    """By position in drafts whose tokens before were accepted, and tokens per round, of rounds that write these rows.

    At temperature 0 a token is accepted if it is the likeliest one of both, at 1 with the probability sum(min(p, q)).
    """
    reached, number = np.zeros(SIZE + 1), 0.0
    for row in rows:
        with autocast(rows.device):
            features, wanted = teach(teacher, row[None], FEATURE_LAYERS)
            blocks = Blocks.at(torch.arange(1, len(row) - SIZE, device=row.device), len(row))
            states, head = draft(row[None], features, blocks)
            q = F.linear(states, head)[0].float().softmax(-1)
            p = wanted[0, blocks.places].float().softmax(-1)
        accepted = torch.minimum(p, q).sum(-1) if temperature else p.argmax(-1) == q.argmax(-1)
        survival = F.pad(accepted.float().cumprod(-1), (1, 1), value=1.0).cpu().numpy()
        survival[:, -1] = 0.0
        begins = np.zeros(len(survival) + SIZE + 1)  # the probability that a round begins at a place
        begins[0] = 1.0
        for place, alive in enumerate(survival):
            begins[place + 1 : place + SIZE + 2] += begins[place] * (alive[:-1] - alive[1:])
        reached += begins[: len(survival)] @ survival[:, :-1]
        number += len(survival)
    return (reached[1:] / reached[:-1].clip(1e-9)).tolist(), number / reached[0]


def export(draft: Draft, family: str, out: Path) -> None:
    """Without copies of the target's embedding and head."""
    out.mkdir(parents=True, exist_ok=True)
    tensors = {name: w.detach().bfloat16().contiguous().cpu() for name, w in draft.named_parameters()}
    save_file(tensors, out / "model.safetensors", {"format": "pt"})
    s, own = SHAPE, FAMILIES[family]
    attention = GQASpec(s.heads, s.kv_heads, s.head_dim, RopeConfig(own.theta), qk_norm=True)
    config = BlockConfig(
        family="dspark",
        vocab_size=VOCAB,
        hidden_size=s.width,
        layers=(LayerSpec(attention, MLPSpec(s.mlp)),) * s.layers,
        max_position=MAX_POSITION,
        rms_eps=own.eps,
        draft_vocab_size=VOCAB,
        target_hidden_size=s.width,
        feature_layers=FEATURE_LAYERS,
        block_size=SIZE,
        mask_token=MASK,
        anchored=True,
        markov="vanilla",
        markov_rank=RANK,
    )
    write_json(out / "config.json", draft_json(config, torch.bfloat16))


# --- command line -----------------------------------------------------------------------------------------------------

NUMBERS: list[tuple[str, type, float, str]] = [
    ("--steps", int, 3000, "of the training"),
    ("--batch", int, 64, "rows a step"),
    ("--anchors", int, 128, "blocks a row"),
    ("--rate", float, 8e-3, "peak learning rate"),
    ("--writers", int, 4096, "rows that a target writes at a time, a multiple of 4"),
    ("--write-batches", int, 6, "how often it does so"),
    ("--written", int, 512, "tokens a row"),
    ("--report", int, 250, "steps from one print of the tokens per round to the next"),
    ("--minutes", float, 0, "a training stops after so long, and goes on when started again; 0: never"),
]


def main(command: list[str] | None = None) -> None:
    args = data_arguments(command, __doc__, NUMBERS)
    for family in args.family:
        train_block(args, family)


if __name__ == "__main__":
    main()
