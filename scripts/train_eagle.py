"""Trains the EAGLE-3 heads of the bundled targets on what these write, and exports them in the EAGLE authors' layout.

    python scripts/train_eagle.py --data DIR --work WORK --out ssd/bundle    # both families; --family llama: one

`--data` (else SSD_DATASET_DIR) holds `*.jsonl.xz` files, one `{"text"}` or `{"prompt", "response"}` a line: the targets
continue pieces of them. The head is trained as it is used (training-time test of EAGLE-3): after the first step it
reads its own hidden states, for `--unroll` steps. At the end the acceptance of each position of a draft is printed, on
text that was kept out of the training. A training that was stopped goes on when it is started again.
"""

from __future__ import annotations

import argparse
import json
import lzma
import os
from collections.abc import Collection, Iterator
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from tiny_corpus import FAMILIES, MAX_POSITION, VOCAB, Family, Windows
from tokenizers import Tokenizer
from torch import nn
from train_tiny import MLP, SHAPES, Model, Norm, Run, Shape, add_training_flags, autocast, rotate, train, written

from ssd.assembly.open import BUNDLE
from ssd.grafts.export import draft_json, write_json
from ssd.layers.spec import GQASpec, LayerSpec, MLPSpec, RopeConfig
from ssd.models.eagle import EagleConfig

FEATURE_LAYERS = (2, 6, 9)  # of 12: EAGLE-3's choice
SHARE = 400_000  # characters of each file that prompts are taken from
DECAY = 0.8  # of the loss, from one unrolled step to the next
HELD_OUT = 16  # rows of greedy text, which are the first, and as many that were sampled at temperature 1: the last
Past = list[tuple[torch.Tensor, torch.Tensor]]  # keys and values of every unrolled step: [batch, heads, rows, head_dim]

Shares = tuple[float, float]  # of equal likeliest tokens, and sum(min(p, q))


# --- the head, with the parameter names of the EAGLE authors ----------------------------------------------------------


class Attention(nn.Module):
    def __init__(self, s: Shape) -> None:
        super().__init__()
        self.s = s
        self.q_proj = nn.Linear(2 * s.width, s.heads * s.head_dim, bias=False)
        self.k_proj = nn.Linear(2 * s.width, s.kv_heads * s.head_dim, bias=False)
        self.v_proj = nn.Linear(2 * s.width, s.kv_heads * s.head_dim, bias=False)
        self.o_proj = nn.Linear(s.heads * s.head_dim, s.width, bias=False)

    def forward(self, x: torch.Tensor, rope: torch.Tensor, past: Past) -> torch.Tensor:
        """Step j = len(past) of a draft: row p sees rows up to p - j of step 0, then row p - j + i of each step i."""
        b, n, _ = x.shape
        q, k, v = (
            p(x).view(b, n, -1, self.s.head_dim).transpose(1, 2) for p in (self.q_proj, self.k_proj, self.v_proj)
        )
        q, k = rotate(q, rope), rotate(k, rope)
        past.append(tuple(t.repeat_interleave(self.s.heads // self.s.kv_heads, 1) for t in (k, v)))  # type: ignore[arg-type]
        step = len(past) - 1
        (first_k, first_v), own = past[0], past[1:]
        seen = torch.ones((n, n), dtype=torch.bool, device=x.device).tril(-step)
        scores = [(q @ first_k.mT).float().masked_fill(~seen, -torch.inf)]
        later = [(k.roll(step - i, 2), v.roll(step - i, 2)) for i, (k, v) in enumerate(own, 1)]
        scores += [(q * k).sum(-1, keepdim=True).float() for k, _ in later]
        weights = (torch.cat(scores, -1) * self.s.head_dim**-0.5).softmax(-1).to(v.dtype)
        y = weights[..., :n] @ first_v
        for i, (_, v) in enumerate(later):
            y = y + weights[..., n + i, None] * v
        return self.o_proj(y.transpose(1, 2).reshape(b, n, -1))


class MidLayer(nn.Module):
    def __init__(self, s: Shape, eps: float) -> None:
        super().__init__()
        self.input_layernorm, self.hidden_norm, self.post_attention_layernorm = (Norm(s.width, eps) for _ in range(3))
        self.self_attn = Attention(s)
        self.mlp = MLP(s)

    def forward(self, embedded: torch.Tensor, hidden: torch.Tensor, rope: torch.Tensor, past: Past) -> torch.Tensor:
        both = torch.cat((self.input_layernorm(embedded), self.hidden_norm(hidden)), -1)
        x = hidden + self.self_attn(both, rope, past)
        return x + self.mlp(self.post_attention_layernorm(x))


class Head(nn.Module):
    """A head whose output layer begins as the target's, for the tokens `target_ids` of its vocabulary."""

    def __init__(self, teacher: Model, target_ids: torch.Tensor) -> None:
        super().__init__()
        s, eps = teacher.shape, FAMILIES[teacher.family].eps
        torch.manual_seed(0)
        self.fc = nn.Linear(len(FEATURE_LAYERS) * s.width, s.width, bias=False)
        self.midlayer = MidLayer(s, eps)
        self.norm = Norm(s.width, eps)
        self.lm_head = nn.Linear(s.width, len(target_ids), bias=False)
        self.register_buffer("rope", torch.empty(0), persistent=False)
        self.to(teacher.rope.device)
        self.rope = teacher.rope
        for name, p in self.midlayer.named_parameters():
            if p.dim() == 2:
                nn.init.normal_(p, std=0.002 if name.endswith(("o_proj.weight", "down_proj.weight")) else 0.02)
        self.norm.weight.data.copy_(teacher.norm.weight)
        self.lm_head.weight.data.copy_(teacher.embed_tokens.weight[target_ids])

    def forward(self, embedded: torch.Tensor, features: torch.Tensor, steps: int) -> Iterator[torch.Tensor]:
        """Logits of each unrolled step, whose first rows have no sense; `embedded`: the tokens after the features."""
        rope, past = self.rope[:, : embedded.shape[1]], Past()
        hidden = self.fc(features)
        for _ in range(steps):
            out = self.midlayer(embedded, hidden, rope, past)
            yield self.lm_head(self.norm(out))
            hidden = out.roll(1, 1)  # the first row's is nobody's


@torch.no_grad()
def teach(teacher: Model, ids: torch.Tensor, feature_layers: Collection[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Features of all tokens, and the target's logits after them."""
    x = teacher.embed_tokens(ids)
    found = []
    for i, layer in enumerate(teacher.layers, 1):
        x = layer(x, teacher.rope[:, : ids.shape[1]], None, 0)
        found += [x] if i in feature_layers else []
    return torch.cat(found, -1), teacher.logits(teacher.norm(x))


# --- training ---------------------------------------------------------------------------------------------------------


def load_target(family: str, device: torch.device) -> Model:
    """The bundled target: what is trained for it must fit what is shipped."""
    model = Model(SHAPES["target"], family)
    weights = load_file(BUNDLE / f"tiny-{family}" / "model.safetensors")
    model.load_state_dict({name.removeprefix("model."): w.float() for name, w in weights.items()})
    return model.to(device).requires_grad_(False)


def read_tokens(data: Path, name: str) -> np.ndarray:
    """The first part of every file, in the family's form of documents and chats."""
    tokenizer, family = Tokenizer.from_file(str(BUNDLE / f"tiny-{name}" / "tokenizer.json")), FAMILIES[name]
    files = sorted(data.glob("*.jsonl.xz"))
    if not files:
        raise SystemExit(f"{data} holds no *.jsonl.xz: name a folder of training text with --data")
    texts = [text for file in files for text in documents(file, family)]
    return np.array([i for e in tokenizer.encode_batch(texts, add_special_tokens=False) for i in e.ids], np.uint16)


def documents(file: Path, family: Family) -> Iterator[str]:
    left = SHARE
    with lzma.open(file, "rt", encoding="utf-8") as lines:
        for line in lines:
            row = json.loads(line)
            turns = [("user", row["prompt"]), ("assistant", row["response"])] if "prompt" in row else []
            chat = "".join(family.head.format(role) + text.strip() + family.tail for role, text in turns)
            text = (family.begin or "") + (chat or row["text"]) + family.specials[0]
            yield text
            left -= len(text)
            if left < 0:
                return


def draft_vocabulary(tokens: np.ndarray, size: int) -> torch.Tensor:
    """Ids of the most frequent tokens, in order."""
    counts = np.bincount(tokens, minlength=VOCAB)
    ids = np.sort(np.argsort(-counts, kind="stable")[:size])
    print(f"draft vocabulary: {size} of {VOCAB} tokens, {counts[ids].sum() / counts.sum():.1%} of the text")
    return torch.from_numpy(ids)


def train_head(args: argparse.Namespace, family: str) -> None:
    teacher = load_target(family, args.device)
    rows = written(args, teacher, read_tokens(args.data, family)).reshape(-1, args.written)
    greedy, text, sampled = rows[:HELD_OUT], rows[HELD_OUT:-HELD_OUT].flatten(), rows[-HELD_OUT:]
    ids = draft_vocabulary(text, args.draft_vocab).to(args.device)
    windows, head = Windows(text, args.written, args.batch, args.device), Head(teacher, ids)
    shares = torch.tensor([DECAY**i for i in range(args.unroll)])
    shares = (shares / shares.sum()).tolist()

    def loss_of(step: int) -> torch.Tensor:
        rows = windows(step)
        with autocast(args.device):
            features, wanted = teach(teacher, rows, FEATURE_LAYERS)
            p = wanted[:, 1:, ids].float().log_softmax(-1)
            embedded = teacher.embed_tokens(rows[:, 1:])
            losses = [
                divergence(p[:, i:], logits[:, i:]) * share
                for (i, logits), share in zip(
                    enumerate(head(embedded, features[:, :-1], args.unroll)), shares, strict=True
                )
            ]
            return torch.stack(losses).sum()

    if train(Run(args.work / f"{family}-eagle.pt", head, args.steps, args.rate), loss_of, args.minutes):
        held = (torch.from_numpy(part.astype(np.int64)).to(args.device) for part in (greedy, sampled))
        report(family, *(acceptance(teacher, head, part, ids, args.unroll) for part in held))
        export(head, ids.cpu(), teacher.shape, family, args.out / f"tiny-{family}-eagle")


def divergence(p: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
    """KL divergence of the head's distribution from the target's over the draft vocabulary, in nats per token."""
    return (p.exp() * (p - logits.float().log_softmax(-1))).sum(-1).mean()


@torch.inference_mode()
def acceptance(
    teacher: Model, head: Head, rows: torch.Tensor, ids: torch.Tensor, steps: int
) -> tuple[list[Shares], float]:
    """By position in drafts that were right so far: the share of equal likeliest tokens, and mean sum(min(p, q)); then
    the tokens per round of greedy drafts."""
    with autocast(rows.device):
        features, wanted = teach(teacher, rows, FEATURE_LAYERS)
        p = wanted[:, 1:].float().softmax(-1)
        right = torch.ones_like(rows[:, 1:], dtype=torch.bool)  # all tokens of the draft so far, by its last row
        found: list[Shares] = []
        drafts = []
        for step, logits in enumerate(head(teacher.embed_tokens(rows[:, 1:]), features[:, :-1], steps)):
            q = torch.zeros_like(p).index_copy_(2, ids, logits.float().softmax(-1))
            before, equal = right.roll(1, 1)[:, step:], p.argmax(-1)[:, step:] == q.argmax(-1)[:, step:]
            overlap = torch.minimum(p, q).sum(-1)[:, step:]
            found.append(tuple(float((x * before).sum() / before.sum().clamp(min=1)) for x in (equal, overlap)))
            right[:, step:] = equal & before
            drafts.append(right.tolist())
    return found, tokens_per_round(drafts)


def tokens_per_round(drafts: list[list[list[bool]]]) -> float:
    """`drafts`: by step and row of text, whether a draft that ends there is right."""
    rounds = 0
    for row in range(len(drafts[0])):
        length, place = len(drafts[0][row]), 0
        while place < length:
            ends = enumerate(drafts[: length - place])
            place += 1 + next((step for step, right in ends if not right[row][place + step]), len(drafts))
            rounds += 1
    return len(drafts[0]) * len(drafts[0][0]) / rounds


def report(family: str, greedy: tuple[list[Shares], float], sampled: tuple[list[Shares], float]) -> None:
    (found, length), (found_sampled, _) = greedy, sampled
    print(f"tiny-{family}-eagle, acceptance by position of the draft, held-out text:")
    print("  temperature 0: " + " ".join(f"{equal:.3f}" for equal, _ in found))
    print("  temperature 1: " + " ".join(f"{overlap:.3f}" for _, overlap in found_sampled))
    print(f"  tokens per round at temperature 0, K = {len(found)}: {length:.2f}")


def export(head: Head, ids: torch.Tensor, s: Shape, family: str, out: Path) -> None:
    out.mkdir(parents=True, exist_ok=True)
    tensors = {name: w.detach().bfloat16().contiguous().cpu() for name, w in head.named_parameters()}
    tensors["d2t"] = ids - torch.arange(len(ids))
    tensors["t2d"] = torch.zeros(VOCAB, dtype=torch.bool).index_fill(0, ids, True)
    save_file(tensors, out / "model.safetensors", {"format": "pt"})
    rope = RopeConfig(FAMILIES[family].theta)
    attention = GQASpec(s.heads, s.kv_heads, s.head_dim, rope, first_position=1)
    config = EagleConfig(
        family="eagle3",
        vocab_size=VOCAB,
        hidden_size=s.width,
        layers=(LayerSpec(attention, MLPSpec(s.mlp)),),
        max_position=MAX_POSITION,
        rms_eps=FAMILIES[family].eps,
        draft_vocab_size=len(ids),
        target_hidden_size=s.width,
        feature_layers=FEATURE_LAYERS,
    )
    write_json(out / "config.json", draft_json(config, torch.bfloat16))


# --- command line -----------------------------------------------------------------------------------------------------

NUMBERS: list[tuple[str, type, float, str]] = [
    ("--steps", int, 1200, "of the training"),
    ("--batch", int, 32, "rows a step"),
    ("--unroll", int, 5, "steps of a draft"),
    ("--draft-vocab", int, 4096, "tokens of the draft vocabulary"),
    ("--rate", float, 8e-3, "peak learning rate"),
    ("--writers", int, 4096, "rows that a target writes at a time, a multiple of 4"),
    ("--write-batches", int, 3, "how often it does so"),
    ("--written", int, 512, "tokens a row"),
    ("--minutes", float, 0, "a training stops after so long, and goes on when started again; 0: never"),
]


def data_arguments(
    command: list[str] | None, description: str, numbers: list[tuple[str, type, float, str]]
) -> argparse.Namespace:
    """Of a training on what the bundled targets write; its folder of work is there afterwards."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--data", type=Path, default=os.environ.get("SSD_DATASET_DIR"), help="folder of .jsonl.xz files"
    )
    parser.add_argument("--out", type=Path, required=True, help="folder for what is trained")
    add_training_flags(parser, numbers)
    args = parser.parse_args(command)
    if args.data is None:
        parser.error("--data, or SSD_DATASET_DIR, is needed: a folder of .jsonl.xz files")
    args.work.mkdir(parents=True, exist_ok=True)
    return args


def main(command: list[str] | None = None) -> None:
    args = data_arguments(command, str(__doc__), NUMBERS)
    for family in args.family:
        train_head(args, family)


if __name__ == "__main__":
    main()
