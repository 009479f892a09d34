"""The training data of the tiny models: sources, tokenizers, chat templates, documents as token ids, windows of them.

Knows nothing of models or training, which are in train_tiny.py.
"""

from __future__ import annotations

import json
import lzma
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import numpy as np
import torch
from rich.progress import track
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

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
RESERVED = 8  # ids kept for special tokens
SHARE = 6_000_000  # characters of each source that the tokenizer learns from
MAX_POSITION = 4096
# Tools of a chat, and an assistant's calls, in the format of Hermes. The models have not learned it: they call a tool
# when a grammar makes them (`tool_choice="required"`).
TOOLS = """\
You can call these functions:
<tools>
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}</tools>
Write a call as
<tool_call>
{"name": "...", "arguments": {...}}
</tool_call>"""
CALLS = """\
{% for call in message['tool_calls'] or [] %}
{% if not loop.first or message['content'] %}{{ '\\n' }}{% endif %}<tool_call>
{"name": {{ call['function']['name'] | tojson }}, "arguments": {{ call['function']['arguments'] | tojson }}}
</tool_call>{% endfor %}"""
# A space belongs to the word, the digit or the sign after it. Digits stand alone, so that arithmetic is regular. Line
# ends are words of their own: a prompt that ends with one is cut as it would be in the middle of a text.
WORDS = r" ?\p{L}+| ?\p{N}| ?[^\s\p{L}\p{N}]+|\s*\n|\s+(?!\S)|\s+"


@dataclass(frozen=True)
class Family:
    """Special tokens and chat format of one family. The first special token ends a document, the last an answer."""

    architecture: str
    theta: float
    eps: float
    specials: tuple[str, ...]  # the last ids of the vocabulary
    stop: tuple[str, ...]
    begin: str | None  # of a document
    head: str  # before the content of a chat's message; {} is who speaks
    tail: str  # behind it

    def token_id(self, special: str) -> int:
        return VOCAB - len(self.specials) + self.specials.index(special)

    @property
    def chat_template(self) -> str:
        tools = "{% if tools %}" + self.head.format("system") + TOOLS + self.tail + "{% endif %}"
        content = "{{ (message['content'] or '') | trim }}" + CALLS
        message = self.head.format("{{ message['role'] }}") + content + self.tail
        chat = "{% for message in messages %}" + message + "{% endfor %}"
        prompt = "{% if add_generation_prompt %}" + self.head.format("assistant") + "{% endif %}"
        return ("{{ bos_token }}" if self.begin else "") + tools + chat + prompt


FAMILIES = {
    "llama": Family(
        *("LlamaForCausalLM", 500000.0, 1e-5),
        specials=("<|end_of_text|>", "<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
        stop=("<|end_of_text|>", "<|eot_id|>"),
        begin="<|begin_of_text|>",
        head="<|start_header_id|>{}<|end_header_id|>\n\n",
        tail="<|eot_id|>",
    ),
    "qwen3": Family(
        *("Qwen3ForCausalLM", 1000000.0, 1e-6),
        specials=("<|endoftext|>", "<|im_start|>", "<|im_end|>"),
        stop=("<|im_end|>", "<|endoftext|>"),
        begin=None,
        head="<|im_start|>{}\n",
        tail="<|im_end|>\n",
    ),
}


def existing(file: Path, remedy: str) -> Path:
    """The file; exits with a message on how to get it if it is missing."""
    if not file.is_file():
        raise SystemExit(f"{file} is missing: {remedy}")
    return file


# --- tokenizers -------------------------------------------------------------------------------------------------------


def train_tokenizer(sources: dict[str, list[list[str]]]) -> Tokenizer:
    """Byte-level BPE without special tokens, from an even share of every source."""
    tokenizer = Tokenizer(models.BPE())
    split = pre_tokenizers.Split(Regex(WORDS), "isolated")
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, to_bytes])
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=VOCAB - RESERVED, initial_alphabet=alphabet, show_progress=False)
    texts = (text for documents in sources.values() for text in _first(documents, SHARE))
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def _first(documents: list[list[str]], characters: int) -> Iterator[str]:
    for document in documents:
        yield from document
        characters -= sum(map(len, document))
        if characters < 0:
            return


def family_tokenizer(work: Path, family: Family) -> Tokenizer:
    """The words that all families share, and the family's special tokens at the end of the vocabulary."""
    tokenizer = Tokenizer.from_file(str(existing(work / "tokenizer.json", "run the stage corpus first")))
    spare = [f"<|reserved_{i}|>" for i in range(VOCAB - tokenizer.get_vocab_size() - len(family.specials))]
    tokens = [AddedToken(token, special=True, normalized=False) for token in (*spare, *family.specials)]
    tokenizer.add_special_tokens(tokens)
    if family.begin:
        begin = (family.begin, family.token_id(family.begin))
        tokenizer.post_processor = processors.TemplateProcessing(single=f"{family.begin} $A", special_tokens=[begin])
    return tokenizer


def write_tokenizer(work: Path, family: Family, out: Path) -> None:
    """The tokenizer's three files of a Hugging Face directory."""
    family_tokenizer(work, family).save(str(out / "tokenizer.json"))
    (out / "chat_template.jinja").write_text(family.chat_template, encoding="utf-8")
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": family.begin,
        "eos_token": family.specials[-1],
        "model_max_length": MAX_POSITION,
        "clean_up_tokenization_spaces": False,
        "pad_token": family.specials[0],
    }
    (out / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


# --- text to token ids ------------------------------------------------------------------------------------------------


def read_source(data: Path, name: str) -> list[list[str]]:
    """Documents: [text], or [prompt, response]."""
    file = existing(data / f"{name}.jsonl.xz", f"put it into {data}, or take {name} out of SOURCES")
    with lzma.open(file, "rt", encoding="utf-8") as lines:
        rows = [json.loads(line) for line in lines]
    if "text" in rows[0]:
        return [[row["text"]] for row in rows]
    return [[row["prompt"].replace("\\n", "\n").strip(), row["response"].strip()] for row in rows]


def make_corpus(data: Path, work: Path) -> None:
    """tokenizer.json, and corpus.npz: the token ids of every text of every source, without special tokens."""
    sources = {name: read_source(data, name) for name in SOURCES}
    tokenizer = train_tokenizer(sources)
    tokenizer.save(str(work / "tokenizer.json"))
    arrays = {}
    for name, documents in track(sources.items(), "encoding"):
        ids = [encoding.ids for encoding in tokenizer.encode_batch_fast([*chain(*documents)])]
        arrays[name] = np.array([*chain(*ids)], np.uint16)
        arrays[f"{name}.lengths"] = np.array([len(i) for i in ids], np.int32)
        arrays[f"{name}.turns"] = np.array(len(documents[0]))
        print(f"{name}: {len(documents)} documents, {len(arrays[name]) / 1e6:.2f}M tokens")
    np.savez_compressed(work / "corpus.npz", **arrays)


class Documents:
    """The corpus of one family, with special tokens around texts and chats as in its chat template."""

    def __init__(self, work: Path, family: Family) -> None:
        tokenizer = family_tokenizer(work, family)

        def ids(text: str) -> np.ndarray:
            return np.array(tokenizer.encode(text, add_special_tokens=False).ids, np.uint16)

        self.begin, self.end = ids(family.begin or ""), ids(family.specials[0])
        self.heads = {role: ids(family.head.format(role)) for role in ("user", "assistant")}
        self.tail = ids(family.tail)
        self.arrays = np.load(existing(work / "corpus.npz", "run the stage corpus first"))

    def training(self) -> np.ndarray:
        """All sources, repeated as SOURCES says, in a random order of documents."""
        documents = []
        for name, repeat in SOURCES.items():
            documents += self._dress([piece for i, piece in enumerate(self._pieces(name)) if i % HELD_OUT]) * repeat
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
        ends = np.cumsum(np.random.default_rng(0).choice([1, 1, 1, 2, 3], len(pieces)))
        starts = np.array([0, *ends[:-1]])
        chats = [pieces[i:j] for i, j in zip(starts, ends, strict=True) if i < len(pieces)]
        return [self._document([*chain(*(self._turns(*pair) for pair in chat))]) for chat in chats]

    def _turns(self, question: np.ndarray, answer: np.ndarray) -> list[np.ndarray]:
        return [self.heads["user"], question, self.tail, self.heads["assistant"], answer, self.tail]

    def _document(self, parts: list[np.ndarray]) -> np.ndarray:
        return np.concatenate([self.begin, *parts, self.end])


class Windows:
    """Training windows from a token array, in a fresh random order every epoch, the same for the same step."""

    def __init__(self, tokens: np.ndarray, length: int, batch: int, device: torch.device) -> None:
        whole = len(tokens) // length * length
        if not whole:
            raise SystemExit(f"{len(tokens)} tokens are less than one window of {length}: add text or lower --context")
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
