"""One engine at a draft server: its greeting, its rounds, and its end."""

from __future__ import annotations

import hmac
import logging
import os
import socket
import threading
from collections.abc import Callable, Set
from contextlib import suppress
from typing import Final

from ssd.assembly.draft_server import SharedDraft
from ssd.draft_server.options import DraftServerOptions
from ssd.drafting.wire import MOST_HELLO_WORDS, PROTOCOL, Entry, Hello, Kind, RoundMessage, decode_round
from ssd.drafting.worker import WorkerDrafter, serve_round
from ssd.errors import ConfigError, one_line
from ssd.execution.state import SequenceState
from ssd.parallel.transport import (
    READY,
    SETUP,
    Channel,
    ChannelClosed,
    Message,
    WireError,
    encode_json,
    refusal,
)

log = logging.getLogger("ssd")

_GREETING_SECONDS: Final = 5.0  # that an engine has to say HELLO, and then SETUP
_READING_SECONDS: Final = 5.0  # that an engine may take to read an answer
_OTHER_WORDS: Final = 1024  # of a sequence in a message, beside its tokens and biases
_MOST_VOCABULARY: Final = 1 << 18  # tokens; a target's may be padded to several times the draft's
_BACKUPS: Final = ("jit", "fast", "auto")


class Refusal(WireError):
    """Why an engine is not served. `reason`: a word, for counts."""

    def __init__(self, reason: str, text: str) -> None:
        super().__init__(text)
        self.reason = reason


class _Posting(Channel):
    """A channel of which nothing waits for the other end inside of a round: others wait for the turn."""

    def send(self, message: Message) -> None:
        self.post(message)


class Session:
    """Serves one engine in a thread of its own, until it goes, sends nonsense, or the server drains."""

    def __init__(
        self,
        number: int,
        end: socket.socket,
        draft: SharedDraft,
        options: DraftServerOptions,
        on_end: Callable[[Session], None],
    ) -> None:
        self.number = number  # of the connection, for the log
        self.tenant: int | None = None  # index of its token, once it is served; 0 without tokens
        self.rounds = 0
        self.sequences = 0
        self.refusal = ""  # why it was refused: a word, for counts
        self._draft, self._options, self._on_end = draft, options, on_end
        end.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        if end.family != socket.AF_UNIX:
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._channel = _Posting(end)
        self._draining = False
        self.thread = threading.Thread(target=self._run, name=f"engine {number}", daemon=True)

    def drain(self) -> None:
        """Ends it after its round, if it is in one."""
        self._draining = True
        self._channel.end()

    def _run(self) -> None:
        try:
            hello = self._greet()
            log.info("engine %d: k=%d, up to %d sequences", self.number, hello.k, hello.max_sequences)
            self._draft.enter_thread()
            worker, place = self._draft.open(hello, str(self.tenant))
            try:
                self._serve(worker, hello)
            finally:
                with self._draft.turns.round():
                    self._draft.close(worker, place)
        except ChannelClosed:
            if self._draining:
                self._say("the draft server is stopping")
            log.info("engine %d is gone", self.number)
        except Refusal as error:
            self._refuse(error.reason, str(error))
        except ConfigError as error:
            self._refuse("no place", str(error))
        except WireError as error:
            self._refuse("bad message", str(error))
        except Exception as error:  # a fault of one engine's rounds is not that of others
            log.exception("engine %d: its round has failed", self.number)
            self._refuse("failure", one_line(error))
        finally:
            self._channel.close()
            self._on_end(self)

    # --- greeting -----------------------------------------------------------------------------------------------------

    def _greet(self) -> Hello:
        hello = Hello.decode(self._channel.expect(Kind.HELLO, MOST_HELLO_WORDS, _GREETING_SECONDS).payload)
        tenant = self._check(hello)
        self._channel.post(
            Message(Kind.WELCOME, payload=encode_json({"pid": os.getpid(), "threads": self._draft.threads}))
        )
        self._channel.expect(SETUP, MOST_HELLO_WORDS, _GREETING_SECONDS)
        self.tenant = tenant
        return hello

    def _check(self, hello: Hello) -> int:
        """The tenant; Refusal names what does not fit."""
        draft, options = self._draft, self._options
        if hello.protocol != PROTOCOL:
            raise Refusal(
                "protocol", f"protocol {hello.protocol} is spoken, and here {PROTOCOL}: use the same version of ssd"
            )
        tenant = self._tenant(hello.token)
        for name, theirs, ours in (
            ("vocabulary", hello.vocabulary, draft.vocabulary),
            ("tokenizer", hello.tokenizer, draft.tokenizer),
        ):
            if theirs and ours and theirs != ours:
                raise Refusal(
                    name, f"the target has another {name} than the draft model {draft.name}: use one of its family"
                )
        for name, value, most, remedy in (
            (
                "vocab_size",
                hello.vocab_size,
                max(_MOST_VOCABULARY, draft.vocab_size),
                "use a draft of the target's family",
            ),
            ("k", hello.k, options.k, "lower k, or start the server with a larger --k"),
            ("budget", hello.budget, options.budget, "lower budget, or start the server with a larger --budget"),
            ("max_num_seqs", hello.max_sequences, options.max_sequences, "lower it, or raise --max-sequences there"),
            ("max_model_len", hello.max_len, draft.max_len, "lower it, or raise --max-model-len there"),
        ):
            if not 1 <= value <= most:
                raise Refusal(name, f"{name}={value}: the draft server takes 1 to {most}: {remedy}")
        if hello.backup not in _BACKUPS:
            raise Refusal("backup", f"backup={hello.backup!r}: must be one of {', '.join(_BACKUPS)}")
        if not draft.free_places:
            raise Refusal("no place", "all places for engines are taken: raise --max-engines there")
        return tenant

    def _tenant(self, token: str) -> int:
        known = self._options.tokens or ("",)
        given = token.encode() if self._options.tokens else b""
        found = [i for i, each in enumerate(known) if hmac.compare_digest(given, each.encode())]
        if not found:
            raise Refusal("token", "draft_token is missing or wrong: set it to one of the server's tokens")
        return found[0]

    # --- rounds -------------------------------------------------------------------------------------------------------

    def _serve(self, worker: WorkerDrafter, hello: Hello) -> None:
        channel = self._channel
        channel.send(Message(READY))
        limit = hello.max_sequences * (hello.max_len + 2 * hello.vocab_size + _OTHER_WORDS)
        while True:
            message = channel.expect(Kind.ROUND, limit)
            round_ = decode_round(message.payload)
            check_round(round_, hello, worker.sequences.keys())
            with self._draft.turns.round():
                serve_round(worker, channel, message, round_)
            self.rounds += 1
            self.sequences = len(worker.sequences)
            channel.flush(_READING_SECONDS)

    # --- the end ------------------------------------------------------------------------------------------------------

    def _refuse(self, reason: str, text: str) -> None:
        self.refusal = reason
        log.warning("engine %d is refused: %s", self.number, text)
        self._say(text)

    def _say(self, text: str) -> None:
        with suppress(WireError, OSError):
            self._channel.post(refusal(text))
            self._channel.flush(_READING_SECONDS)


def check_round(round_: RoundMessage, hello: Hello, known: Set[int]) -> None:
    """WireError for what an engine with this greeting and these sequences cannot have asked for."""
    entries = round_.entries
    if len({entry.id for entry in entries}) < len(entries):
        raise WireError("a sequence is twice in a round")
    if len(entries) > hello.max_sequences:
        raise WireError(f"{len(entries)} sequences in a round, where {hello.max_sequences} are possible")
    if round_.budget > hello.budget:
        raise WireError(f"{round_.budget} branches are asked for, where {hello.budget} are possible")
    for entry in entries:
        if entry.sequence is not None and entry.id in known - set(round_.forgotten):
            raise WireError(f"sequence {entry.id} is new, and known")
        _check_entry(entry, hello)


def _check_entry(entry: Entry, hello: Hello) -> None:
    drafted = entry.draft.token_ids if entry.draft is not None else ()
    if max((*entry.new_tokens, *drafted), default=0) >= hello.vocab_size:
        raise WireError(f"sequence {entry.id}: a token is not in 0..{hello.vocab_size - 1}")
    most = hello.max_len + SequenceState.slack(hello.k)
    if entry.known + len(entry.new_tokens) > most:
        raise WireError(f"sequence {entry.id} has more than {most} tokens")
    if max(entry.lookahead, len(drafted)) > hello.k:
        raise WireError(f"sequence {entry.id}: a draft of more than k={hello.k} tokens")
    if not entry.new_tokens and not entry.known:
        raise WireError(f"sequence {entry.id} has no tokens")
    if entry.sequence is not None and max(entry.sequence.params.logit_bias, default=0) >= hello.vocab_size:
        raise WireError(f"sequence {entry.id}: a bias of a token that is not in 0..{hello.vocab_size - 1}")
