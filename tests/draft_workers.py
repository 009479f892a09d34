"""Processes in the place of a drafter's: programs that end with the file descriptor of their socket."""

from __future__ import annotations

from fakes import VOCAB

# Knows texts and proposes how they go on. `sleeps`: seconds before the first, second, … proposals.
HONEST = """
import sys, time
from ssd.core import Origin, Proposal
from ssd.decoding.drafter import Drafter
from ssd.drafting.worker import WorkerDrafter, run

class Honest(Drafter):
    lookahead = 4

    def __init__(self, setup):
        super().__init__()
        self.texts, self.sleeps, self.manner = setup["texts"], setup.get("sleeps", []), setup.get("prepare")
        self.shift = setup.get("shift", 0)  # of all tokens: wrong ones
        self.ahead, (self.replica, self.replicas) = setup.get("ahead"), setup.get("share", (0, 1))

    def propose(self, works):
        self.stats.busy_seconds += 0.125
        if self.sleeps:
            time.sleep(self.sleeps.pop(0))
        return [Proposal(self.after(w.sequence.tokens)[: w.lookahead], origin=Origin.SIBLING) for w in works]

    def after(self, tokens):
        found = next((t[len(tokens) :] for t in self.texts if t[: len(tokens)] == tokens), ())
        return tuple(abs(token - self.shift) for token in found)

    def prepare(self, works, interrupted):
        self.drafted = {w.sequence.id: len(w.proposal.token_ids) for w in works}
        while self.manner == "until interrupted" and not interrupted():
            time.sleep(0.001)
        time.sleep(self.manner if isinstance(self.manner, float) else 0)

    def prepared(self, sequence):
        rest = self.after(sequence.tokens)[: self.drafted[sequence.id] + 1 if self.ahead else 0]
        mine = [(i, t) for i, t in enumerate(rest) if i % self.replicas == self.replica]
        return {(i, token): self.after([*sequence.tokens, *rest[: i + 1]])[:4] for i, token in mine}

run(int(sys.argv[1]), lambda setup: WorkerDrafter(Honest(setup)))
"""

# Speaks the wire by itself, and not always the truth.
LIAR = """
import os, socket, struct, sys, time
end = socket.socket(fileno=int(sys.argv[1]))
MAGIC = 0x5353445700000006

def send(kind, number, *words):
    end.sendall(struct.pack(f"={6 + len(words)}q", MAGIC, kind, number, 7, 5, len(words), *words))

def receive():
    magic, kind, number, _, _, length = struct.unpack("=6q", end.recv(48, socket.MSG_WAITALL))
    end.recv(8 * length, socket.MSG_WAITALL)
    return number

receive()
READY
while True:
    number = receive()
    ROUND
"""
GOOD = "send(4, number, 1, 0, 2, 0, 7, 8)"  # one proposal of two tokens
LIES = {
    "noise": "end.sendall(bytes(range(100)))",
    "noise after a reply": f"{GOOD}; end.sendall(bytes(100))",
    "two replies": f"{GOOD}; {GOOD}",
    "another kind": "send(2, number)",
    "an unknown kind": "send(99, number)",
    "the round before": "send(4, number - 1, 1, 0, 0, 0)",
    "no proposals": "send(4, number, 0)",
    "too many proposals": "send(4, number, 2, 0, 0, 0, 0, 0, 0)",
    "an id too high": f"send(4, number, 1, 0, 2, 0, 7, {VOCAB})",
    "an id below zero": "send(4, number, 1, 0, 2, 0, 7, -1)",
    "an unknown origin": "send(4, number, 1, 99, 0, 0)",
    "words too many": "send(4, number, 1, 0, 0, 0, 0)",
    "tokens too many": f"send(4, number, 1, 0, 3000, 0, {'1, ' * 3000})",
    "distributions too narrow": "send(4, number, 1, 0, 1, 1, 7, 0)",
    "distributions of nothing": f"send(4, number, 1, 0, 1, {VOCAB}, 7, {'0, ' * VOCAB})",
    "distributions that are no numbers": f"send(4, number, 1, 0, 1, {VOCAB}, 7, {'0x7ff8000000000000, ' * VOCAB})",
    "an absurd length": "end.sendall(struct.pack('=6q', MAGIC, 4, number, 0, 0, 1 << 60))",
    "a length below zero": "end.sendall(struct.pack('=6q', MAGIC, 4, number, 0, 0, -1))",
    "half a reply, then nothing": "end.sendall(struct.pack('=7q', MAGIC, 4, number, 0, 0, 4, 1)); time.sleep(60)",
    "half a reply, then the end": "end.sendall(struct.pack('=7q', MAGIC, 4, number, 0, 0, 4, 1)); sys.exit()",
    "the end": "sys.exit()",
    "no reply": "time.sleep(60)",
    "prepared twice": f"{GOOD}; send(5, number, 0); send(5, number, 0)",
    "prepared for a round to come": f"{GOOD}; send(5, number + 1, 0)",
    "prepared long ago": f"{GOOD}; send(5, number - 3, 0)",
    "prepared an id too high": f"{GOOD}; send(5, number, 1, 0, 0, 0, 1, {VOCAB} << 32)",
    "prepared for an outcome below zero": f"{GOOD}; send(5, number, 1, 0, 0, 0, 1, -1 << 32)",
    "prepared a draft that is not there": f"{GOOD}; send(5, number, 1, 0, 0, 1, 1, 7 << 32)",
    "prepared for more than was drafted": f"{GOOD}; send(5, number, 1, 0, 1, 0, 1, 7, 7 << 32 | 2)",
    "prepared far too much": f"{GOOD}; send(5, number, 1, 0, 0, 0, 30000, *[7 << 32] * 30000)",
}
