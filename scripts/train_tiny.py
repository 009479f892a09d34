"""Trains the small models that the package carries: a target and a draft for each family, from text to checkpoint.

    python scripts/train_tiny.py corpus --data DIR --work WORK                  # text -> tokenizer -> token ids
    python scripts/train_tiny.py target --work WORK --family llama              # trained on that text
    python scripts/train_tiny.py draft  --work WORK --family llama              # distilled on what the target writes
    python scripts/train_tiny.py export --work WORK --family llama --out ssd/bundle
    python scripts/train_tiny.py picture --work WORK --out docs/pictures        # loss curves

`--data` holds `NAME.jsonl.xz` files, one `{"text"}` or `{"prompt", "response"}` a line, named as in SOURCES. Every
stage can be stopped and started again: a training run goes on from its last checkpoint in WORK (`--minutes` stops it by
itself). The defaults are what the shipped models were trained with, on one H200; see docs/tiny-models.md.
"""

from __future__ import annotations

import argparse
import copy
import json
import lzma
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn, track
from safetensors.torch import save_file
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from torch import nn

# --- what is trained, on what -----------------------------------------------------------------------------------------

SOURCES = {  # file -> how often it is repeated in one epoch
    "python_libraries": 1,
    "gutenberg": 1,
    "github_docs": 1,
    "kubernetes_docs": 1,
    "leetcode_python": 1,
    "thealgorithms_python": 2,
    "flan_cot": 1,
    "gsm8k_train": 2,
    "mbpp_train": 3,
    "self_instruct_seed": 3,
    "llms_from_scratch_instr": 3,
}
HELD_OUT = 100  # every 100th document of a source is kept for the held-out loss
VOCAB = 8192
SPECIALS = {  # the last ids of the vocabulary; the first is the end of a document, the second begins one (if any)
    "llama": ["<|end_of_text|>", "<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"],
    "qwen3": ["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
}
RESERVED = 8  # ids kept for special tokens
# A space belongs to the word, the digit or the sign after it. Digits stand alone, so that arithmetic is regular. Line
# ends are words of their own: a prompt that ends with one is cut as it would be in the middle of a text.
WORDS = r" ?\p{L}+| ?\p{N}| ?[^\s\p{L}\p{N}]+|\s*\n|\s+(?!\S)|\s+"
TEMPLATES = {
    "llama": (
        "{{ bos_token }}{% for message in messages %}"
        "<|start_header_id|>{{ message['role'] }}<|end_header_id|>\n\n{{ message['content'] | trim }}<|eot_id|>"
        "{% endfor %}{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
    ),
    "qwen3": (
        "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] | trim }}<|im_end|>\n"
        "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    ),
}
CHAT = {  # what the templates put before and behind the content of a message
    "llama": ("<|start_header_id|>{}<|end_header_id|>\n\n", "<|eot_id|>"),
    "qwen3": ("<|im_start|>{}\n", "<|im_end|>\n"),
}
MAX_POSITION = 4096


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
SHARPNESS = (
    1.5  # factor on a trained target's logits: chat models are surer of themselves than the text they learnt from
)
THETA = {"llama": 500000.0, "qwen3": 1000000.0}
EPS = {"llama": 1e-5, "qwen3": 1e-6}


# --- text to token ids ------------------------------------------------------------------------------------------------


def read_source(data: Path, name: str) -> list[list[str]]:
    """Documents: [text], or [prompt, response]."""
    with lzma.open(data / f"{name}.jsonl.xz", "rt", encoding="utf-8") as lines:
        rows = [json.loads(line) for line in lines]
    if "text" in rows[0]:
        return [[row["text"]] for row in rows]
    return [[row["prompt"].replace("\\n", "\n").strip(), row["response"].strip()] for row in rows]


def train_tokenizer(sources: dict[str, list[list[str]]]) -> Tokenizer:
    """Byte-level BPE without special tokens, from an even share of every source."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(WORDS), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=VOCAB - RESERVED, initial_alphabet=alphabet, show_progress=False)
    share = 6_000_000  # characters
    texts = (text for documents in sources.values() for text in _first(documents, share))
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def _first(documents: list[list[str]], characters: int) -> Iterator[str]:
    for document in documents:
        yield from document
        characters -= sum(map(len, document))
        if characters < 0:
            return


def with_specials(plain: Tokenizer, family: str) -> Tokenizer:
    """The family's tokenizer: the same words, its own special tokens at the end of the vocabulary."""
    tokenizer = Tokenizer.from_str(plain.to_str())
    spare = [f"<|reserved_{i}|>" for i in range(VOCAB - tokenizer.get_vocab_size() - len(SPECIALS[family]))]
    tokens = [AddedToken(token, special=True, normalized=False) for token in (*spare, *SPECIALS[family])]
    tokenizer.add_special_tokens(tokens)
    if family == "llama":
        bos = "<|begin_of_text|>"
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", special_tokens=[(bos, tokenizer.token_to_id(bos))]
        )
    return tokenizer


def corpus(args: argparse.Namespace) -> None:
    """tokenizer.json, and corpus.npz: the token ids of every text of every source, without special tokens."""
    sources = {name: read_source(args.data, name) for name in SOURCES}
    tokenizer = train_tokenizer(sources)
    tokenizer.save(str(args.work / "tokenizer.json"))
    arrays = {}
    for name, documents in track(sources.items(), "encoding"):
        ids = [encoding.ids for encoding in tokenizer.encode_batch_fast([*chain(*documents)])]
        arrays[name] = np.array([*chain(*ids)], np.uint16)
        arrays[f"{name}.lengths"] = np.array([len(i) for i in ids], np.int32)
        arrays[f"{name}.turns"] = np.array(len(documents[0]))
        print(f"{name}: {len(documents)} documents, {len(arrays[name]) / 1e6:.2f}M tokens")
    np.savez_compressed(args.work / "corpus.npz", **arrays)


class Documents:
    """The corpus in the dress of one family: special tokens around texts and chats, as its chat template puts them."""

    def __init__(self, work: Path, family: str) -> None:
        plain = Tokenizer.from_file(str(work / "tokenizer.json"))
        full = with_specials(plain, family)
        self.end, *begin = [full.token_to_id(token) for token in SPECIALS[family]]
        self.begin = begin[:1] if family == "llama" else []
        rendered = {}
        for role in ("user", "assistant"):
            head, tail = CHAT[family]
            rendered[role] = [full.encode(text, add_special_tokens=False).ids for text in (head.format(role), tail)]
        self.rendered = rendered
        self.arrays = np.load(work / "corpus.npz")

    def training(self) -> np.ndarray:
        """All sources, repeated as SOURCES says, in a random order of documents."""
        documents = []
        for name, repeat in SOURCES.items():
            pieces = self._pieces(name)
            documents += self._dress([piece for i, piece in enumerate(pieces) if i % HELD_OUT]) * repeat
        order = np.random.default_rng(0).permutation(len(documents))
        return np.concatenate([documents[i] for i in order])

    def held_out(self) -> dict[str, np.ndarray]:
        return {name: np.concatenate(self._dress(self._pieces(name)[::HELD_OUT])) for name in SOURCES}

    def _pieces(self, name: str) -> list[list[np.ndarray]]:
        """Documents of a source: [text], or [prompt, response]."""
        texts = np.split(self.arrays[name], np.cumsum(self.arrays[f"{name}.lengths"])[:-1])
        turns = int(self.arrays[f"{name}.turns"])
        return [texts[i : i + turns] for i in range(0, len(texts), turns)]

    def _dress(self, pieces: list[list[np.ndarray]]) -> list[np.ndarray]:
        """Questions and answers become chats of one to three of them."""
        if len(pieces[0]) == 1:
            return [self._document(piece) for piece in pieces]
        chats = [[*self._turn("user", question), *self._turn("assistant", answer)] for question, answer in pieces]
        ends = np.cumsum(np.random.default_rng(0).choice([1, 1, 1, 2, 3], len(chats)))
        starts = np.array([0, *ends[:-1]])
        return [self._document([*chain(*chats[i:j])]) for i, j in zip(starts, ends, strict=True) if i < len(chats)]

    def _turn(self, role: str, content: np.ndarray) -> list[np.ndarray]:
        head, tail = (np.array(ids, np.uint16) for ids in self.rendered[role])
        return [head, content, tail]

    def _document(self, parts: list[np.ndarray]) -> np.ndarray:
        return np.concatenate([np.array(self.begin, np.uint16), *parts, np.array([self.end], np.uint16)])


# --- the model, with the parameter names of a Hugging Face checkpoint -------------------------------------------------

Cache = list[tuple[torch.Tensor, torch.Tensor]]  # per layer: keys and values [batch, kv_heads, positions, head_dim]


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
        self.q_norm = Norm(s.head_dim, EPS[family]) if normed else nn.Identity()
        self.k_norm = Norm(s.head_dim, EPS[family]) if normed else nn.Identity()

    def forward(
        self, x: torch.Tensor, rope: torch.Tensor, past: tuple[torch.Tensor, torch.Tensor] | None, start: int
    ) -> torch.Tensor:
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
        self.input_layernorm = Norm(s.width, EPS[family])
        self.self_attn = Attention(s, family)
        self.post_attention_layernorm = Norm(s.width, EPS[family])
        self.mlp = MLP(s)

    def forward(
        self,
        x: torch.Tensor,
        rope: torch.Tensor,
        past: tuple[torch.Tensor, torch.Tensor] | None = None,
        start: int = 0,
    ) -> torch.Tensor:
        x = x + self.self_attn(self.input_layernorm(x), rope, past, start)
        return x + self.mlp(self.post_attention_layernorm(x))


class Model(nn.Module):
    """Hidden states behind the final norm; the embedding is the head too."""

    def __init__(self, s: Shape, family: str) -> None:
        super().__init__()
        self.shape, self.family = s, family
        self.embed_tokens = nn.Embedding(VOCAB, s.width)
        self.layers = nn.ModuleList(Layer(s, family) for _ in range(s.layers))
        self.norm = Norm(s.width, EPS[family])
        frequencies = THETA[family] ** (-torch.arange(0, s.head_dim, 2) / s.head_dim)
        angles = torch.outer(torch.arange(MAX_POSITION), frequencies).repeat(1, 2)
        self.register_buffer("rope", torch.stack((angles.cos(), angles.sin())), persistent=False)
        for name, p in self.named_parameters():
            if p.dim() == 2:
                out = name.endswith(("o_proj.weight", "down_proj.weight"))
                nn.init.normal_(p, std=0.02 / math.sqrt(2 * s.layers) if out else 0.02)

    def forward(self, ids: torch.Tensor, past: Cache | None = None, start: int = 0) -> torch.Tensor:
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
    model: Model
    steps: int
    rate: float
    step: int = 0

    def __post_init__(self) -> None:
        matrices = [p for n, p in self.model.named_parameters() if p.dim() == 2 and "embed" not in n]
        others = [p for n, p in self.model.named_parameters() if p.dim() == 1 or "embed" in n]
        self.optimizers: list[torch.optim.Optimizer] = [
            Muon(matrices, self.rate),
            torch.optim.AdamW(others, lr=self.rate, betas=(0.9, 0.95), weight_decay=0.0, fused=True),
        ]
        self.losses: list[tuple[int, float]] = []
        if self.file.is_file():
            state = torch.load(self.file, map_location=self.model.rope.device, weights_only=True)
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


class Windows:
    """Training windows from a token array, in a fresh random order every epoch, the same for the same step."""

    def __init__(self, tokens: np.ndarray, length: int, batch: int, device: torch.device) -> None:
        whole = len(tokens) // length * length
        self.rows = torch.from_numpy(tokens[:whole].astype(np.int32)).view(-1, length).to(device)
        self.batch = batch
        self.epoch, self.order = -1, torch.empty(0)

    def __call__(self, step: int) -> torch.Tensor:
        picks = [self._pick(i) for i in range(step * self.batch, (step + 1) * self.batch)]
        return self.rows[torch.tensor(picks, device=self.rows.device)].long()

    def _pick(self, index: int) -> int:
        epoch, place = divmod(index, len(self.rows))
        if epoch != self.epoch:
            self.epoch = epoch
            self.order = torch.randperm(len(self.rows), generator=torch.Generator().manual_seed(epoch))
        return int(self.order[place])


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


def compiled(function: Any, device: torch.device) -> Any:
    return torch.compile(function, dynamic=False) if device.type == "cuda" else function


def new_model(kind: str, family: str, device: torch.device) -> Model:
    torch.manual_seed(0)
    return Model(SHAPES[kind], family).to(device)


def compile_layers(model: Model) -> None:
    """One compilation (for each size of a batch) serves all layers, since they are alike."""
    if model.rope.is_cuda:
        for layer in model.layers:
            layer.compile(dynamic=False)


def cross_entropy(hidden: torch.Tensor, head: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(F.linear(hidden, head).float().flatten(0, 1), targets.flatten())


def kl_divergence(
    hidden: torch.Tensor, head: torch.Tensor, wanted_hidden: torch.Tensor, wanted_head: torch.Tensor
) -> torch.Tensor:
    """KL from the target's law to the draft's, in nats a token."""
    p = F.linear(wanted_hidden, wanted_head).float().log_softmax(-1)
    q = F.linear(hidden, head).float().log_softmax(-1)
    return (p.exp() * (p - q)).sum(-1).mean()


def train_target(args: argparse.Namespace, family: str) -> None:
    model = new_model("target", family, args.device)
    compile_layers(model)
    windows = Windows(Documents(args.work, family).training(), args.context + 1, args.batch, args.device)
    loss = compiled(cross_entropy, args.device)

    def loss_of(step: int) -> torch.Tensor:
        rows = windows(step)
        with autocast(args.device):
            return loss(model(rows[:, :-1]), model.embed_tokens.weight, rows[:, 1:])

    if train(Run(args.work / f"{family}-target.pt", model, args.steps, args.rate), loss_of, args.minutes):
        report(args, family, "target", model)


def train_draft(args: argparse.Namespace, family: str) -> None:
    """Half of every batch the target wrote, half is training text; on both, the draft learns the target's law."""
    teacher = load_model(args, family, "target")
    tokens = Documents(args.work, family).training()
    written = args.work / f"{family}-written.npy"
    if not written.is_file():
        np.save(written, write_text(teacher, torch.from_numpy(tokens.astype(np.int32)), args))
    model = new_model("draft", family, args.device)
    compile_layers(teacher)
    compile_layers(model)
    half = args.batch // 2
    own = Windows(np.load(written).flatten(), args.written, half * args.context // args.written, args.device)
    given = Windows(tokens, args.context, half, args.device)
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


@torch.inference_mode()
def write_text(teacher: Model, tokens: torch.Tensor, args: argparse.Namespace) -> np.ndarray:
    """Rows that the target wrote: 64 tokens of training text, then its own, at several temperatures."""
    device, s, rows, prompt = args.device, teacher.shape, args.writers, args.written // 8
    model = copy.deepcopy(teacher).to(torch.bfloat16 if device.type == "cuda" else torch.float32)
    model.rope = teacher.rope
    ends = (tokens[: -2 * prompt] == VOCAB - len(SPECIALS[teacher.family])).nonzero().flatten()
    random = torch.Generator().manual_seed(0)
    temperature = torch.tensor([0.0, 0.7, 1.0, 1.0], device=device).repeat_interleave(rows // 4)[:, None]
    size = (rows, s.kv_heads, args.written, s.head_dim)
    past = [tuple(torch.zeros(size, device=device, dtype=model.norm.weight.dtype) for _ in "kv") for _ in model.layers]
    batches = []
    for _ in track(range(args.write_batches), "the target writes"):
        begin = ends[torch.randint(len(ends), (rows,), generator=random)] + 1  # a document's first token
        begin[::2] = torch.randint(len(tokens) - prompt, (rows // 2,), generator=random)  # or any
        last = tokens[begin[:, None] + torch.arange(prompt)].to(device).long()
        out, start = [last], 0
        while start + last.shape[1] < args.written:
            logits = model.logits(model(last, past, start)[:, -1]).float()
            gumbel = -torch.empty_like(logits).exponential_().log_()
            start += last.shape[1]
            last = (logits + temperature * gumbel).argmax(-1, keepdim=True)
            out.append(last)
        batches.append(torch.cat(out, 1).cpu().numpy().astype(np.uint16))
    return np.concatenate(batches)


def load_model(args: argparse.Namespace, family: str, kind: str) -> Model:
    """A trained model, and a target sharpened."""
    model = new_model(kind, family, args.device)
    file = args.work / f"{family}-{kind}.pt"
    model.load_state_dict(torch.load(file, map_location=args.device, weights_only=True)["model"])
    if kind == "target":
        model.norm.weight.data *= SHARPNESS
    return model.requires_grad_(False)


@torch.inference_mode()
@torch.compiler.set_stance("force_eager")
def report(args: argparse.Namespace, family: str, kind: str, model: Model) -> None:
    """Held-out loss of every source, in nats a token, into the table that the docs show."""
    losses: dict[str, float] = {}
    for name, held in Documents(args.work, family).held_out().items():
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
        out = args.out / name
        out.mkdir(parents=True, exist_ok=True)
        weights = load_model(args, family, kind).state_dict()
        tensors = {f"model.{n}": w.bfloat16().contiguous().cpu() for n, w in weights.items()}
        save_file(tensors, out / "model.safetensors", {"format": "pt"})
        write_descriptions(out, family, SHAPES[kind], Tokenizer.from_file(str(args.work / "tokenizer.json")))


def write_descriptions(out: Path, family: str, s: Shape, plain: Tokenizer) -> None:
    tokenizer = with_specials(plain, family)
    tokenizer.save(str(out / "tokenizer.json"))
    ids = {token: tokenizer.token_to_id(token) for token in SPECIALS[family]}
    llama = family == "llama"
    bos = "<|begin_of_text|>" if llama else None
    stop = ["<|end_of_text|>", "<|eot_id|>"] if llama else ["<|im_end|>", "<|endoftext|>"]
    config = {
        "architectures": ["LlamaForCausalLM" if llama else "Qwen3ForCausalLM"],
        "model_type": family,
        "vocab_size": VOCAB,
        "hidden_size": s.width,
        "intermediate_size": s.mlp,
        "num_hidden_layers": s.layers,
        "num_attention_heads": s.heads,
        "num_key_value_heads": s.kv_heads,
        "head_dim": s.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": MAX_POSITION,
        "rms_norm_eps": EPS[family],
        "rope_parameters": {"rope_type": "default", "rope_theta": THETA[family]},
        "tie_word_embeddings": True,
        "attention_bias": False,
        "dtype": "bfloat16",
        "bos_token_id": ids[bos] if bos else None,
        "eos_token_id": [ids[token] for token in stop],
    }
    generation = {key: config[key] for key in ("bos_token_id", "eos_token_id")} | {"pad_token_id": ids[stop[0]]}
    words = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": bos, "eos_token": stop[-1 if llama else 0]}
    words |= {"model_max_length": MAX_POSITION, "clean_up_tokenization_spaces": False}
    words |= {"pad_token": stop[0] if llama else stop[1]}
    for file, content in (("config", config), ("generation_config", generation), ("tokenizer_config", words)):
        (out / f"{file}.json").write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    (out / "chat_template.jinja").write_text(TEMPLATES[family], encoding="utf-8")


COLOURS = {"llama-target": "#1f6feb", "qwen3-target": "#bf5af2", "llama-draft": "#1f6feb", "qwen3-draft": "#bf5af2"}


def picture(args: argparse.Namespace) -> None:
    """Loss curves as one SVG: the targets' cross entropy on the left, the drafts' divergence on the right."""
    args.out.mkdir(parents=True, exist_ok=True)
    panels = [_panel(args.work, "target", "targets: cross entropy, nats a token", 0)]
    panels += [_panel(args.work, "draft", "drafts: KL from the target, nats a token", 400)]
    style = "text{font:13px system-ui,sans-serif;fill:#57606a}path{fill:none;stroke-width:1.5}line{stroke:#d0d7de}"
    svg = '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 800 300" role="img" aria-label="Training losses">'
    (args.out / "tiny-losses.svg").write_text(f"{svg}<style>{style}</style>{''.join(panels)}</svg>\n")


def _panel(work: Path, kind: str, title: str, left: int) -> str:
    curves = {
        f.name.removesuffix("-losses.json"): json.loads(f.read_text()) for f in work.glob(f"*-{kind}-losses.json")
    }
    steps = max(step for curve in curves.values() for step, _ in curve)
    floor = min(loss for curve in curves.values() for _, loss in curve)
    low, high = floor * 0.9, floor * 2.2

    def place(step: int, loss: float) -> str:
        return f"{left + 50 + 320 * step / steps:.1f},{260 - 220 * (min(loss, high) - low) / (high - low):.1f}"

    parts = [f'<text x="{left + 50}" y="24">{title}</text>']
    for i in range(5):
        loss = low + (high - low) * i / 4
        y = 260 - 55 * i
        parts.append(f'<line x1="{left + 50}" x2="{left + 370}" y1="{y}" y2="{y}"/>')
        parts.append(f'<text x="{left + 44}" y="{y + 4}" text-anchor="end">{loss:.2f}</text>')
    for i, (name, curve) in enumerate(curves.items()):
        path = " L".join(place(step, loss) for step, loss in curve)
        parts.append(f'<path d="M{path}" stroke="{COLOURS[name]}"/>')
        label = f"{name.replace('-', ' ')}: {curve[-1][1]:.3f}"
        parts.append(
            f'<text x="{left + 370}" y="{52 + 18 * i}" text-anchor="end" style="fill:{COLOURS[name]}">{label}</text>'
        )
    parts.append(f'<text x="{left + 370}" y="282" text-anchor="end">{steps} steps</text>')
    return "".join(parts)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("stage", choices=["corpus", "target", "draft", "export", "picture"])
    parser.add_argument("--work", type=Path, required=True, help="folder for everything in between")
    parser.add_argument("--data", type=Path, help="folder of the .jsonl.xz files (corpus)")
    parser.add_argument("--out", type=Path, help="folder for the models (export) or the picture")
    parser.add_argument("--family", nargs="+", choices=["llama", "qwen3"], default=["llama", "qwen3"])
    parser.add_argument("--device", type=torch.device, default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--minutes", type=float, default=0, help="stop each training after so long; 0: never")
    parser.add_argument("--steps", type=int, default=1500, help="of the target's training")
    parser.add_argument("--draft-steps", type=int, default=800)
    parser.add_argument("--batch", type=int, default=128, help="windows a step")
    parser.add_argument("--context", type=int, default=2048, help="tokens a window")
    parser.add_argument("--rate", type=float, default=3e-3, help="peak learning rate")
    parser.add_argument("--writers", type=int, default=4096, help="rows that the target writes at a time")
    parser.add_argument("--write-batches", type=int, default=16)
    parser.add_argument("--written", type=int, default=512, help="tokens a row")
    args = parser.parse_args()
    for stage, needed in (("corpus", "data"), ("export", "out"), ("picture", "out")):
        if args.stage == stage and getattr(args, needed) is None:
            parser.error(f"{stage} needs --{needed}")
    return args


def main() -> None:
    args = arguments()
    args.work.mkdir(parents=True, exist_ok=True)
    if args.stage in ("corpus", "picture"):
        {"corpus": corpus, "picture": picture}[args.stage](args)
        return
    for family in args.family:
        {"target": train_target, "draft": train_draft, "export": export}[args.stage](args, family)


if __name__ == "__main__":
    main()
