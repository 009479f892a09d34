"""Draft servers for tests: in this process, or as `ssd draft-server` in one of their own; and an engine that speaks the
protocol by itself."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from collections.abc import Sequence as Seq
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from serve_process import DRAFT, MODEL

from ssd import LLM, SamplingParams
from ssd.assembly.draft_server import SharedDraft
from ssd.core import Request, Sequence
from ssd.draft_server.options import DraftServerOptions
from ssd.draft_server.server import DraftServer
from ssd.drafting.wire import Draft, Entry, Hello, Kind, PreparedDrafts, decode_prepared, decode_proposals, encode_round
from ssd.kernels.cpu.threads import use_threads
from ssd.models.checkpoint import HFCheckpoint
from ssd.parallel.address import Address
from ssd.parallel.process import setup_message
from ssd.parallel.transport import READY, Channel, Message

SMALL: dict[str, Any] = {"max_sequences": 8, "k": 6, "budget": 16, "max_model_len": 512, "device": "cpu"}
TEXTS = ["Once upon a time", "The sea", "One day a little boy", "It was a dark night and", "She said that"]


@contextmanager
def draft_server(folder: Path, draft: str = DRAFT, **options: Any) -> Iterator[DraftServer]:
    """In threads of this process; at `unix:FOLDER/socket` unless the options say otherwise."""
    chosen = DraftServerOptions(**{**SMALL, "listen": (f"unix:{folder}/socket",), **options})
    sockets = [address.listen() for address in chosen.addresses]
    with use_threads(1):  # the thread of a test keeps its number
        server = DraftServer(SharedDraft(chosen.config(draft), chosen.max_engines), chosen, sockets)
    thread = threading.Thread(target=server.serve)
    thread.start()
    try:
        yield server
    finally:
        server.drain()
        thread.join()


@contextmanager
def server_process(*arguments: str) -> Iterator[subprocess.Popen[bytes]]:
    """`ssd draft-server DRAFT ARGUMENTS`, once it listens; killed at the end if it still runs."""
    command = [sys.executable, "-m", "ssd", "draft-server", DRAFT, "--device", "cpu", "--max-model-len", "512"]
    process = subprocess.Popen([*command, *arguments], stderr=subprocess.PIPE, start_new_session=True)
    try:
        assert process.stderr is not None
        for line in process.stderr:
            if line.startswith(b"drafts of"):
                break
        yield process
    finally:
        process.kill()
        process.wait()
        process.stderr.close()


def engine(url: str, **options: Any) -> LLM:
    speculation = {"draft_url": url, "k": 4, "budget": 8, **options.pop("speculation", {})}
    return LLM(MODEL, device="cpu", max_num_seqs=4, max_model_len=256, speculation=speculation, **options)


def params(count: int = 12) -> list[SamplingParams]:
    """Greedy and sampled, one for each of TEXTS."""
    return [
        SamplingParams(max_new_tokens=count, temperature=0.7 * (i % 2), seed=i, ignore_eos=True)
        for i in range(len(TEXTS))
    ]


def plain_texts(count: int = 12) -> list[str]:
    """What plain decoding writes."""
    with LLM(MODEL, device="cpu", max_num_seqs=4, max_model_len=256) as llm:
        return texts(llm, count)


def texts(llm: LLM, count: int = 12) -> list[str]:
    return [output.text for output in llm.generate(TEXTS, params(count))]


@dataclass
class Scripted:
    """An engine without a model: it says what a test wants."""

    channel: Channel
    hello: Hello
    round: int = 0

    def ask(self, entries: Seq[Entry], forgotten: Seq[int] = (), *, budget: int = 4) -> None:
        """Sends a round."""
        self.round += 1
        payload = encode_round(forgotten, entries, budget=budget)
        self.channel.send(Message(Kind.ROUND, self.round, payload, (1000, 0)))

    def drafts(self, count: int) -> list[tuple[int, ...]]:
        """The proposals for a round that asked for `count`."""
        message = self.channel.expect(Kind.PROPOSALS, timeout=20)
        return [each.token_ids for each in decode_proposals(message.payload, count, self.hello.vocab_size)]

    def prepared(self) -> dict[int, PreparedDrafts]:
        message = self.channel.expect(Kind.PREPARED, timeout=20)
        return decode_prepared(message.payload, self.hello.vocab_size)


def greeting(**changes: Any) -> Hello:
    """Of an engine with the bundled target."""
    vocabulary, tokenizer = HFCheckpoint.open(Path(_bundle() / MODEL)).tokenizer().hashes
    known = {"vocab_size": 1024, "k": 4, "budget": 8, "max_sequences": 4, "max_len": 256, "backup": "jit", "token": ""}
    return Hello(**{**known, "vocabulary": vocabulary, "tokenizer": tokenizer, **changes})


def _bundle() -> Path:
    from ssd.assembly.open import BUNDLE

    return BUNDLE


def scripted(url: str, hello: Hello | None = None) -> Scripted:
    hello = hello or greeting()
    channel = Channel(Address.of(url).connect(5.0))
    channel.send(Message(Kind.HELLO, payload=hello.encode()))
    channel.expect(Kind.WELCOME, timeout=20)
    channel.send(setup_message({}))
    channel.expect(READY, timeout=20)
    return Scripted(channel, hello)


def new_entry(number: int, tokens: Seq[int], k: int = 4, draft: Draft | None = None) -> Entry:
    """A sequence that the server does not know, whose last token is output."""
    request = Request(str(number), tuple(tokens[:-1]), SamplingParams(temperature=0.0, max_new_tokens=200))
    sequence = Sequence(number, request, 0, 0, frozenset(), 200, tokens=list(tokens))
    return Entry(number, 0, list(tokens), k, draft, sequence)


def until(met: Any, seconds: float = 20.0) -> None:
    end = time.monotonic() + seconds
    while not met():
        assert time.monotonic() < end, "it does not happen"
        time.sleep(0.01)
