"""Trains the small models that the package carries: a target and a draft for each family, from text to checkpoint.

    python scripts/train_tiny.py corpus --data DIR --work WORK                  # text -> tokenizer -> token ids
    python scripts/train_tiny.py target --work WORK                             # trained on that text
    python scripts/train_tiny.py draft --work WORK                              # distilled on what the target writes
    python scripts/train_tiny.py export --work WORK --out ssd/bundle
    python scripts/train_tiny.py picture --work WORK --out docs/pictures        # loss curves

`--data` holds `NAME.jsonl.xz` files, one `{"text"}` or `{"prompt", "response"}` a line, named as in SOURCES of
tiny_corpus.py. A training that was stopped goes on from its last checkpoint in WORK when it is started again. The
defaults are those of the shipped models, trained on one H200 (only tiny-qwen3 had 1900 steps); see docs/tiny-models.md.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn, track
from safetensors.torch import save_file
from tiny_corpus import FAMILIES, MAX_POSITION, VOCAB, Documents, Windows, existing, make_corpus, write_tokenizer
from torch import nn


@dataclass(frozen=True)
class Shape:
    """Sizes of one model. Widths divide those of the published models, so that each can be grafted into them."""

    width: int
    mlp: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int = 32


SHAPES = {"target": Shape(256, 896, 12, 8, 4), "draft": Shape(128, 640, 3, 4, 2)}
SHARPNESS = 1.5  # factor on a target's logits: chat models are surer of themselves than the text they learnt from


# --- the model, with the parameter names of a Hugging Face checkpoint -------------------------------------------------

Past = tuple[torch.Tensor, torch.Tensor]  # keys and values of a layer: [batch, kv_heads, positions, head_dim]


class Norm(nn.Module):
    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(width)), eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x.float(), (x.shape[-1],), self.weight.float(), self.eps).to(x.dtype)


class Attention(nn.Module):
    def __init__(self, s: Shape, family: str) -> None:
        super().__init__()
        self.s = s
        self.q_proj = nn.Linear(s.width, s.heads * s.head_dim, bias=False)
        self.k_proj = nn.Linear(s.width, s.kv_heads * s.head_dim, bias=False)
        self.v_proj = nn.Linear(s.width, s.kv_heads * s.head_dim, bias=False)
        self.o_proj = nn.Linear(s.heads * s.head_dim, s.width, bias=False)
        normed = family == "qwen3"
        self.q_norm, self.k_norm = (Norm(s.head_dim, FAMILIES[family].eps) if normed else nn.Identity() for _ in "qk")

    def forward(self, x: torch.Tensor, rope: torch.Tensor, past: Past | None, start: int) -> torch.Tensor:
        b, n, _ = x.shape
        q, k, v = (p(x).view(b, n, -1, self.s.head_dim) for p in (self.q_proj, self.k_proj, self.v_proj))
        q, k = (rotate(norm(t).transpose(1, 2), rope) for norm, t in ((self.q_norm, q), (self.k_norm, k)))
        v = v.transpose(1, 2)
        if past is not None:
            for cache, new in zip(past, (k, v), strict=True):
                cache[:, :, start : start + n] = new
            k, v = (cache[:, :, : start + n] for cache in past)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=n > 1, enable_gqa=True)
        return self.o_proj(y.transpose(1, 2).reshape(b, n, -1))


def rotate(x: torch.Tensor, rope: torch.Tensor) -> torch.Tensor:
    cos, sin = rope  # [positions, head_dim]
    left, right = x.float().chunk(2, -1)
    return (x * cos + torch.cat((-right, left), -1) * sin).to(x.dtype)


class MLP(nn.Module):
    def __init__(self, s: Shape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(s.width, s.mlp, bias=False)
        self.up_proj = nn.Linear(s.width, s.mlp, bias=False)
        self.down_proj = nn.Linear(s.mlp, s.width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    def __init__(self, s: Shape, family: str) -> None:
        super().__init__()
        self.input_layernorm = Norm(s.width, FAMILIES[family].eps)
        self.self_attn = Attention(s, family)
        self.post_attention_layernorm = Norm(s.width, FAMILIES[family].eps)
        self.mlp = MLP(s)

    def forward(self, x: torch.Tensor, rope: torch.Tensor, past: Past | None, start: int) -> torch.Tensor:
        x = x + self.self_attn(self.input_layernorm(x), rope, past, start)
        return x + self.mlp(self.post_attention_layernorm(x))


class Model(nn.Module):
    """Hidden states behind the final norm; the embedding is the head too."""

    def __init__(self, s: Shape, family: str) -> None:
        super().__init__()
        self.shape, self.family = s, family
        self.embed_tokens = nn.Embedding(VOCAB, s.width)
        self.layers = nn.ModuleList(Layer(s, family) for _ in range(s.layers))
        self.norm = Norm(s.width, FAMILIES[family].eps)
        frequencies = FAMILIES[family].theta ** (-torch.arange(0, s.head_dim, 2) / s.head_dim)
        angles = torch.outer(torch.arange(MAX_POSITION), frequencies).repeat(1, 2)
        self.register_buffer("rope", torch.stack((angles.cos(), angles.sin())), persistent=False)
        for name, p in self.named_parameters():
            if p.dim() == 2:
                out = name.endswith(("o_proj.weight", "down_proj.weight"))
                nn.init.normal_(p, std=0.02 / math.sqrt(2 * s.layers) if out else 0.02)

    def forward(self, ids: torch.Tensor, past: list[Past] | None = None, start: int = 0) -> torch.Tensor:
        x = self.embed_tokens(ids)
        if torch.is_autocast_enabled(x.device.type):
            x = x.bfloat16()
        rope = self.rope[:, start : start + ids.shape[1]]
        for i, layer in enumerate(self.layers):
            x = layer(x, rope, past[i] if past else None, start)
        return self.norm(x)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return F.linear(hidden, self.embed_tokens.weight)


# --- training ---------------------------------------------------------------------------------------------------------


class Muon(torch.optim.Optimizer):
    """Momentum whose update is orthogonalised (Jordan et al., 2024), for all matrices of one shape at a time."""

    def __init__(self, matrices: list[nn.Parameter], lr: float, momentum: float = 0.95, decay: float = 0.1) -> None:
        shapes = sorted({tuple(p.shape) for p in matrices})
        groups = [{"params": [p for p in matrices if tuple(p.shape) == shape]} for shape in shapes]
        super().__init__(groups, {"lr": lr, "momentum": momentum, "decay": decay})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            params, momentum = group["params"], group["momentum"]
            gradient = torch.stack([p.grad for p in params])
            state = self.state[params[0]]
            average = state.setdefault("average", torch.zeros_like(gradient))
            average.lerp_(gradient, 1 - momentum)
            update = orthogonal(gradient.lerp_(average, momentum))
            size = 0.2 * math.sqrt(max(gradient.shape[1:]))  # the size of an AdamW update, so both share one rate
            torch._foreach_mul_(params, 1 - group["lr"] * group["decay"])
            torch._foreach_add_(params, list(update.to(gradient.dtype)), alpha=-group["lr"] * size)


def orthogonal(matrices: torch.Tensor) -> torch.Tensor:
    """Roughly U V^T of each matrix's singular value decomposition, by five Newton-Schulz steps."""
    x = matrices.bfloat16() if matrices.is_cuda else matrices
    wide = x.shape[-2] <= x.shape[-1]
    x = x if wide else x.mT
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(5):
        a = x @ x.mT
        x = 3.4445 * x + (-4.775 * a + 2.0315 * a @ a) @ x
    return x if wide else x.mT


@dataclass
class Run:
    """One training run that can be taken up again: weights, optimizers, step and losses are in one file."""

    file: Path
    model: nn.Module
    steps: int
    rate: float
    step: int = 0

    def __post_init__(self) -> None:
        words = ("embed_tokens.weight", "lm_head.weight", "markov_w1.weight", "markov_w2.weight")  # a row of each token
        matrices = [p for n, p in self.model.named_parameters() if p.dim() == 2 and not n.endswith(words)]
        others = [p for n, p in self.model.named_parameters() if p.dim() == 1 or n.endswith(words)]
        self.optimizers: list[torch.optim.Optimizer] = [
            Muon(matrices, self.rate),
            torch.optim.AdamW(others, lr=self.rate, betas=(0.9, 0.95), weight_decay=0.0, fused=True),
        ]
        self.losses: list[tuple[int, float]] = []
        if self.file.is_file():
            device = next(self.model.parameters()).device
            state = torch.load(self.file, map_location=device, weights_only=True)
            self.model.load_state_dict(state["model"])
            for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
                optimizer.load_state_dict(saved)
            self.step, self.losses = state["step"], [tuple(pair) for pair in state["losses"]]

    def save(self) -> None:
        state = {
            "model": self.model.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
            "step": self.step,
            "losses": self.losses,
        }
        torch.save(state, self.file.with_suffix(".part"))
        self.file.with_suffix(".part").rename(self.file)
        self.file.with_name(f"{self.file.stem}-losses.json").write_text(json.dumps(self.losses))

    def update(self, loss: torch.Tensor) -> None:
        """One step: a short warm-up, then a cosine down to a fiftieth of the rate."""
        warm_up = max(1, self.steps // 50)
        cosine = 0.5 + 0.5 * math.cos(math.pi * max(0, self.step - warm_up) / max(1, self.steps - warm_up))
        factor = min(1.0, (self.step + 1) / warm_up) * (0.02 + 0.98 * cosine)
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = self.rate * factor
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        self.step += 1


def train(run: Run, loss_of: Callable[[int], torch.Tensor], minutes: float) -> bool:
    """Runs to the last step (True), or until the minutes are over (False); the state is on disk either way."""
    began = saved = time.monotonic()
    columns = [TextColumn("{task.description}"), BarColumn(), TextColumn("{task.completed}/{task.total}")]
    with Progress(*columns, TimeRemainingColumn(), TextColumn("loss {task.fields[loss]:.3f}")) as bar:
        task = bar.add_task(run.file.stem, total=run.steps, completed=run.step, loss=math.nan)
        while run.step < run.steps and not (minutes and time.monotonic() - began > 60 * minutes):
            loss = loss_of(run.step)
            run.update(loss)
            if run.step % 10 == 0 or run.step == run.steps:
                value = float(loss.detach())
                run.losses.append((run.step, value))
                bar.update(task, completed=run.step, loss=value)
            if time.monotonic() - saved > 120:
                run.save()
                saved = time.monotonic()
    run.save()
    print(f"{run.file.stem}: {run.step} of {run.steps} steps, the last ones in {time.monotonic() - began:.0f} s")
    return run.step == run.steps


def autocast(device: torch.device) -> torch.autocast:
    return torch.autocast(device.type, dtype=torch.bfloat16, enabled=device.type == "cuda")


def compiled(function: Callable[..., torch.Tensor], device: torch.device) -> Callable[..., torch.Tensor]:
    return torch.compile(function, dynamic=False) if device.type == "cuda" else function


def compile_layers(*models: Model) -> None:
    """One compilation (for each size of a batch) serves all layers, since they are alike."""
    for layer in (layer for model in models if model.rope.is_cuda for layer in model.layers):
        layer.compile(dynamic=False)


def cross_entropy(hidden: torch.Tensor, head: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(F.linear(hidden, head).float().flatten(0, 1), targets.flatten())


def kl_divergence(
    hidden: torch.Tensor, head: torch.Tensor, wanted_hidden: torch.Tensor, wanted_head: torch.Tensor
) -> torch.Tensor:
    """KL divergence of the draft's distribution from the target's, in nats per token."""
    p = F.linear(wanted_hidden, wanted_head).float().log_softmax(-1)
    q = F.linear(hidden, head).float().log_softmax(-1)
    return (p.exp() * (p - q)).sum(-1).mean()


def train_target(args: argparse.Namespace, family: str) -> None:
    tokens = Documents(args.work, FAMILIES[family]).training()
    windows = Windows(tokens, args.context + 1, args.batch, args.device)
    model = new_model("target", family, args.device)
    compile_layers(model)
    loss = compiled(cross_entropy, args.device)

    def loss_of(step: int) -> torch.Tensor:
        rows = windows(step)
        with autocast(args.device):
            return loss(model(rows[:, :-1]), model.embed_tokens.weight, rows[:, 1:])

    if train(Run(args.work / f"{family}-target.pt", model, args.steps, args.rate), loss_of, args.minutes):
        report(args, family, "target", model)


def train_draft(args: argparse.Namespace, family: str) -> None:
    """Half of every batch is text of the target, half training text; on both the loss is the KL from the target."""
    teacher = load_model(args, family, "target")
    tokens = Documents(args.work, FAMILIES[family]).training()
    half = args.batch // 2
    own = Windows(written(args, teacher, tokens), args.written, half * args.context // args.written, args.device)
    given = Windows(tokens, args.context, half, args.device)
    model = new_model("draft", family, args.device)
    compile_layers(teacher, model)
    divergence = compiled(kl_divergence, args.device)

    def loss_on(rows: torch.Tensor) -> torch.Tensor:
        with autocast(args.device):
            with torch.no_grad():
                wanted = teacher(rows)
            return divergence(model(rows), model.embed_tokens.weight, wanted, teacher.embed_tokens.weight)

    def loss_of(step: int) -> torch.Tensor:
        return (loss_on(own(step)) + loss_on(given(step))) / 2

    if train(Run(args.work / f"{family}-draft.pt", model, args.draft_steps, args.rate), loss_of, args.minutes):
        report(args, family, "draft", model)


def written(args: argparse.Namespace, teacher: Model, tokens: np.ndarray) -> np.ndarray:
    """Text generated by the target, as rows of tokens; cached on disk."""
    file = args.work / f"{teacher.family}-written.npy"
    if not file.is_file():
        part = file.with_suffix(".part.npy")
        np.save(part, write_text(teacher, torch.from_numpy(tokens.astype(np.int32)), args))
        part.rename(file)
    return np.load(file).flatten()


@torch.inference_mode()
def write_text(teacher: Model, tokens: torch.Tensor, args: argparse.Namespace) -> np.ndarray:
    """Rows of which the first eighth is training text and the rest generated by the target, at several temperatures."""
    device, rows, length, prompt = args.device, args.writers, args.written, args.written // 8
    s, family = teacher.shape, FAMILIES[teacher.family]
    model = copy.deepcopy(teacher).to(torch.bfloat16 if device.type == "cuda" else torch.float32)
    model.rope = teacher.rope
    ends = (tokens[: -2 * prompt] == family.token_id(family.specials[0])).nonzero().flatten()
    random = torch.Generator().manual_seed(0)
    temperature = torch.tensor([0.0, 0.7, 1.0, 1.0], device=device).repeat_interleave(rows // 4)[:, None]
    keys = torch.zeros((rows, s.kv_heads, length, s.head_dim), device=device, dtype=model.norm.weight.dtype)
    past = [(keys.clone(), keys.clone()) for _ in model.layers]
    batches = []
    for _ in track(range(args.write_batches), "the target writes"):
        begin = ends[torch.randint(len(ends), (rows,), generator=random)] + 1  # a document's first token
        begin[::2] = torch.randint(len(tokens) - prompt, (rows // 2,), generator=random)  # or any
        last = tokens[begin[:, None] + torch.arange(prompt)].to(device).long()
        out, start = [last], 0
        while start + last.shape[1] < length:
            logits = model.logits(model(last, past, start)[:, -1]).float()
            gumbel = -torch.empty_like(logits).exponential_().log_()
            start += last.shape[1]
            last = (logits + temperature * gumbel).argmax(-1, keepdim=True)
            out.append(last)
        batches.append(torch.cat(out, 1).cpu().numpy().astype(np.uint16))
    return np.concatenate(batches)


def new_model(kind: str, family: str, device: torch.device) -> Model:
    torch.manual_seed(0)
    return Model(SHAPES[kind], family).to(device)


def load_model(args: argparse.Namespace, family: str, kind: str) -> Model:
    """A model whose training is over; a target is sharpened."""
    existing(args.work / f"{family}-{kind}-held.json", f"run the stage {kind} --family {family} to its last step first")
    state = torch.load(args.work / f"{family}-{kind}.pt", map_location=args.device, weights_only=True)
    model = new_model(kind, family, args.device)
    model.load_state_dict(state["model"])
    if kind == "target":
        model.norm.weight.data *= SHARPNESS
    return model.requires_grad_(False)


@torch.inference_mode()
@torch.compiler.set_stance("force_eager")
def report(args: argparse.Namespace, family: str, kind: str, model: Model) -> None:
    """Held-out loss of every source, in nats per token, as the table of the docs."""
    losses: dict[str, float] = {}
    for name, held in Documents(args.work, FAMILIES[family]).held_out().items():
        tokens = torch.from_numpy(held.astype(np.int64)).to(args.device)
        rows = [tokens[i : i + args.context + 1] for i in range(0, len(tokens) - 1, args.context)][:100]
        with autocast(args.device):
            sums = [F.cross_entropy(model.logits(model(r[None, :-1]))[0].float(), r[1:], reduction="sum") for r in rows]
        losses[name] = float(sum(sums)) / sum(len(r) - 1 for r in rows)
    (args.work / f"{family}-{kind}-held.json").write_text(json.dumps(losses, indent=1))
    print(f"{family} {kind}, held-out loss: " + ", ".join(f"{name} {loss:.3f}" for name, loss in losses.items()))


# --- results ----------------------------------------------------------------------------------------------------------


def export(args: argparse.Namespace, family: str) -> None:
    """Hugging Face directories: what transformers loads, and ssd."""
    for kind, name in (("target", f"tiny-{family}"), ("draft", f"tiny-{family}-draft")):
        weights = load_model(args, family, kind).state_dict()
        out = args.out / name
        out.mkdir(parents=True, exist_ok=True)
        tensors = {f"model.{n}": w.bfloat16().contiguous().cpu() for n, w in weights.items()}
        save_file(tensors, out / "model.safetensors", {"format": "pt"})
        write_tokenizer(args.work, FAMILIES[family], out)
        write_config(out, family, SHAPES[kind])


def write_config(out: Path, name: str, s: Shape) -> None:
    family = FAMILIES[name]
    ends = {
        "bos_token_id": family.token_id(family.begin) if family.begin else None,
        "eos_token_id": [family.token_id(token) for token in family.stop],
    }
    config = {
        "architectures": [family.architecture],
        "model_type": name,
        "vocab_size": VOCAB,
        "hidden_size": s.width,
        "intermediate_size": s.mlp,
        "num_hidden_layers": s.layers,
        "num_attention_heads": s.heads,
        "num_key_value_heads": s.kv_heads,
        "head_dim": s.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": MAX_POSITION,
        "rms_norm_eps": family.eps,
        "rope_parameters": {"rope_type": "default", "rope_theta": family.theta},
        "tie_word_embeddings": True,
        "attention_bias": False,
        "dtype": "bfloat16",
        **ends,
    }
    generation = {**ends, "pad_token_id": ends["eos_token_id"][0]}
    for file, content in (("config", config), ("generation_config", generation)):
        (out / f"{file}.json").write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


COLOURS = {"llama": "#1f6feb", "qwen3": "#bf5af2"}
SVG = """<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 800 310" role="img" aria-label="Training losses"><style>
text{font:13px system-ui,sans-serif;fill:#57606a;text-anchor:middle} path{fill:none;stroke-width:1.5}
</style>"""


def picture(args: argparse.Namespace) -> None:
    left = panel(args.work, "target", "targets: cross entropy, nats a token")
    right = panel(args.work, "draft", "drafts: KL from the target, nats a token")
    args.out.mkdir(parents=True, exist_ok=True)
    svg = f'{SVG}{left}<g transform="translate(400)">{right}</g></svg>'
    (args.out / "tiny-losses.svg").write_text(svg + "\n", encoding="utf-8")


def panel(work: Path, kind: str, title: str) -> str:
    """A curve for each family, between (50, 260) and (370, 50), below its legend."""
    curves = {family: curve for family in FAMILIES if (curve := losses(work / f"{family}-{kind}-losses.json"))}
    if not curves:
        raise SystemExit(f"{work} holds no losses of a {kind}: run the stage {kind} first, for ten steps at least")
    return drawn(curves, title)


def drawn(curves: dict[str, list[tuple[int, float]]], title: str) -> str:
    steps = max(step for curve in curves.values() for step, _ in curve)
    found = [loss for curve in curves.values() for _, loss in curve]
    apart = next(d for d in (0.1, 0.2, 0.5, 1.0, 2.0, 5.0) if d == 5.0 or (max(found) - min(found)) / d <= 5)
    low, high = np.floor(min(found) / apart), max(np.ceil(max(found) / apart), np.floor(min(found) / apart) + 1)

    def y(loss: float) -> int:
        return round(260 - 210 * (loss / apart - low) / (high - low))

    parts = [f'<text x="210" y="18">{title}</text>', '<text x="210" y="300">training step</text>']
    for tick in np.arange(low, high + 1) * apart:
        parts.append(f'<path d="M50,{y(tick)}H370" stroke="#d0d7de"/>')
        parts.append(f'<text x="44" y="{y(tick) + 4}" style="text-anchor:end">{tick:.1f}</text>')
    parts += [f'<text x="{50 + 160 * i}" y="280">{steps * i // 2}</text>' for i in range(3)]
    for i, (family, curve) in enumerate(curves.items()):
        line = " ".join(f"{50 + 320 * step / steps:.1f},{y(loss)}" for step, loss in curve)
        parts.append(f'<path d="M{line}" stroke="{COLOURS[family]}"/>')
        label = f"{family}: {curve[-1][1]:.3f} at last"
        parts.append(f'<text x="{130 + 160 * i}" y="38" style="fill:{COLOURS[family]}">{label}</text>')
    return "".join(parts)


def losses(file: Path) -> list[tuple[int, float]]:
    return [(step, loss) for step, loss in json.loads(file.read_text())] if file.is_file() else []


# --- command line -----------------------------------------------------------------------------------------------------

NUMBERS: list[tuple[str, type, float, str]] = [
    ("--steps", int, 2300, "of a target's training"),
    ("--draft-steps", int, 1000, "of a draft's training"),
    ("--batch", int, 64, "windows a step"),
    ("--context", int, 2048, "tokens a window"),
    ("--rate", float, 8e-3, "peak learning rate"),
    ("--writers", int, 4096, "rows that a target writes at a time, a multiple of 4"),
    ("--write-batches", int, 4, "how often it does so"),
    ("--written", int, 512, "tokens a row"),
    ("--minutes", float, 0, "a training stops after so long, and goes on when started again; 0: never"),
]


def add_training_flags(parser: argparse.ArgumentParser, numbers: list[tuple[str, type, float, str]]) -> None:
    """What every training script takes; `numbers`: flag, type, default and help."""
    parser.add_argument("--work", type=Path, required=True, help="folder for everything in between")
    parser.add_argument("--family", nargs="+", choices=[*FAMILIES], default=[*FAMILIES], help="default: both")
    parser.add_argument("--device", type=torch.device, default="cuda" if torch.cuda.is_available() else "cpu")
    for flag, kind, default, text in numbers:
        parser.add_argument(flag, type=kind, default=default, help=f"{text} (default: {default:g})")


def arguments(command: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("stage", choices=["corpus", "target", "draft", "export", "picture"])
    parser.add_argument("--data", type=Path, help="folder of the .jsonl.xz files (corpus)")
    parser.add_argument("--out", type=Path, help="folder for the models (export) or the picture")
    add_training_flags(parser, NUMBERS)
    args = parser.parse_args(command)
    needed = {"corpus": "data", "export": "out", "picture": "out"}.get(args.stage, "work")
    if getattr(args, needed) is None:
        parser.error(f"{args.stage} needs --{needed}")
    return args


def main(command: list[str] | None = None) -> None:
    args = arguments(command)
    args.work.mkdir(parents=True, exist_ok=True)
    if args.stage == "corpus":
        make_corpus(args.data, args.work)
    elif args.stage == "picture":
        picture(args)
    else:
        for family in args.family:
            {"target": train_target, "draft": train_draft, "export": export}[args.stage](args, family)


if __name__ == "__main__":
    main()
