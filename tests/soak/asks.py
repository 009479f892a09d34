"""Random requests to chats and completions, and their answers in one shape, streamed or not."""

from __future__ import annotations

import json
import random
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from serve_process import MODEL

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
PROMPTS = ("Mr. Holmes sat by the fire, and", "A pull request is", "Once upon a time", "The sea was", "def main():")
STRUCTURED: tuple[dict[str, Any], ...] = (
    {"structured_outputs": {"choice": ["yes", "no", "perhaps"]}},
    {"structured_outputs": {"regex": "[a-z]{2,6} [0-9]{1,3}"}},
    {
        "response_format": {
            "type": "json_schema",
            "json_schema": {
                "name": "fact",
                "schema": {"type": "object", "properties": {"sure": {"type": "boolean"}}, "required": ["sure"]},
            },
        }
    },
)


@dataclass(frozen=True)
class Ask:
    path: str
    body: dict[str, Any]  # without `stream`


@dataclass
class Choice:
    """One sample of an answer."""

    text: str = ""
    finish_reason: str | None = None
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[Any] = field(default_factory=list)  # one entry per token

    def add(self, choice: dict[str, Any]) -> None:
        """Adds a choice of an answer, or of a chunk of it."""
        message = choice.get("message") or choice.get("delta") or {}
        self.text += choice.get("text") or message.get("content") or ""
        self.finish_reason = choice["finish_reason"] or self.finish_reason
        self.token_ids += choice.get("token_ids") or []
        self.logprobs += _entries(choice.get("logprobs") or {})


def _entries(logprobs: dict[str, Any]) -> list[Any]:
    """Of a chat as they are, of a completion as tuples."""
    if "content" in logprobs:
        return list(logprobs["content"])
    return [list(entry) for entry in zip(*logprobs.values(), strict=True)]


def read_answer(answer: dict[str, Any]) -> list[Choice]:
    return _merged(answer["choices"])


def read_stream(lines: Iterable[str]) -> list[Choice]:
    """Of server-sent events. ValueError if the stream has an error or no end."""
    events = [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]
    if not events or events[-1] != "[DONE]":
        raise ValueError(f"the stream is cut: {events[-1:]}")
    chunks = [json.loads(event) for event in events[:-1]]
    if errors := [chunk["error"] for chunk in chunks if "error" in chunk]:
        raise ValueError(f"error in a stream: {errors[0]}")
    return _merged(choice for chunk in chunks for choice in chunk["choices"])


def _merged(choices: Iterable[dict[str, Any]]) -> list[Choice]:
    found: dict[int, Choice] = {}
    for choice in choices:
        found.setdefault(choice["index"], Choice()).add(choice)
    return [found[index] for index in sorted(found)]


def random_ask(draw: random.Random) -> Ask:
    """A request with a short answer."""
    chat, prompt = draw.random() < 0.5, " ".join(draw.choices(PROMPTS, k=draw.randint(1, 4)))
    body: dict[str, Any] = {
        "model": MODEL,
        "max_tokens": draw.randint(1, 8),
        "temperature": draw.choice([0, 1]),
        "seed": draw.randrange(2**31),
        "n": draw.choice([1, 1, 1, 1, 1, 1, 2, 3]),
        "return_token_ids": True,
    }
    body |= {"messages": [{"role": "user", "content": prompt}]} if chat else {"prompt": prompt}
    if draw.random() < 0.2:
        body["stop"] = draw.choice([[" the"], ["\n", "."], "a"])
    if draw.random() < 0.2:
        body |= {"top_p": 0.9, "top_k": 40, "presence_penalty": 0.5}
    if draw.random() < 0.2:
        body |= {"logprobs": True, "top_logprobs": 3} if chat else {"logprobs": 3}
    if draw.random() < 0.05:
        body |= draw.choice(STRUCTURED)
    return Ask(CHAT if chat else COMPLETIONS, body)


def long_ask(draw: random.Random) -> Ask:
    """A completion that goes on for some seconds, with large chunks: for clients that vanish or read slowly."""
    body = {"model": MODEL, "prompt": draw.choice(PROMPTS), "max_tokens": 64, "ignore_eos": True, "logprobs": 20}
    return Ask(COMPLETIONS, body | {"temperature": 0, "return_token_ids": True})
