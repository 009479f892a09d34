"""Choices that fail: the others are answered; an answer is an error only if all of its choices fail."""

from __future__ import annotations

import json
from typing import Any

import pytest
from live_server import MODEL, Served

httpx = pytest.importorskip("httpx")

# Nothing can follow one of the beginnings: some texts come to an end, and others fail.
GRAMMAR = r"""
start: "the old old old" NOTHING | /(a|one|my)( man){2,30}\./
NOTHING: /[^\s\S]/
"""
CHAT = [{"role": "user", "content": "Tell me a story."}]
PATHS = ["/v1/completions", "/v1/chat/completions"]


def body(path: str, **fields: Any) -> dict[str, Any]:
    """A request some of whose samples fail."""
    prompt = {"messages": CHAT} if "chat" in path else {"prompt": "Once upon a time"}
    shape = {"structured_outputs": {"grammar": GRAMMAR}, "max_tokens": 64}
    return {"model": MODEL, **prompt, **shape, "temperature": 1.5, "seed": 5, "n": 4, **fields}


def post(served: Served, path: str, fields: dict[str, Any]) -> Any:
    return httpx.post(served.url + path, json=fields, timeout=60)


def whole(served: Served, path: str, fields: dict[str, Any]) -> list[tuple[str, str]]:
    """Text and finish reason of every choice."""
    answer = post(served, path, fields)
    assert answer.status_code == 200, answer.text
    choices = answer.json()["choices"]
    return [((c["message"]["content"] if "chat" in path else c["text"]) or "", c["finish_reason"]) for c in choices]


def events(served: Served, path: str, fields: dict[str, Any]) -> list[dict[str, Any]]:
    answer = post(served, path, {**fields, "stream": True})
    assert answer.status_code == 200
    lines = [line.removeprefix("data: ") for line in answer.text.splitlines() if line.startswith("data: ")]
    return [json.loads(line) for line in lines if line != "[DONE]"]


def streamed(served: Served, path: str, fields: dict[str, Any], count: int) -> list[tuple[str, str]]:
    texts, reasons = [""] * count, [""] * count
    for event in events(served, path, fields):
        for choice in event["choices"]:
            texts[choice["index"]] += (choice["delta"].get("content") if "chat" in path else choice["text"]) or ""
            reasons[choice["index"]] += choice["finish_reason"] or ""
    return list(zip(texts, reasons, strict=True))


@pytest.mark.parametrize("path", PATHS)
def test_the_other_choices_are_answered(served: Served, path: str) -> None:
    """Catches an error in place of all choices, and choices that end with one that fails."""
    pytest.importorskip("llguidance")
    fields = body(path)
    choices = whole(served, path, fields)
    assert {reason for _, reason in choices} == {"stop", "error"}
    for text, reason in choices:
        assert (text == "the old old old") if reason == "error" else text.endswith(" man.")
    assert streamed(served, path, fields, 4) == choices


def test_the_other_prompts_are_answered(served: Served) -> None:
    """Catches a prompt whose only choice fails, and that takes the answers to the other prompts with it."""
    pytest.importorskip("llguidance")
    prompts = ["Once upon a time"] * 2 + ["The cat", "He was"]
    path, alone = PATHS[0], []
    for prompt in prompts:
        answer = post(served, path, body(path, prompt=prompt, n=1))
        alone.append("error" if answer.status_code == 400 else answer.json()["choices"][0]["finish_reason"])
    assert set(alone) == {"stop", "error"}
    fields = body(path, prompt=prompts, n=1)
    choices = whole(served, path, fields)
    assert [reason for _, reason in choices] == alone
    assert streamed(served, path, fields, len(prompts)) == choices


NOTHING: dict[str, dict[str, Any]] = {  # requests of the other endpoints
    "/v1/responses": {"input": "Hello", "max_output_tokens": 9},
    "/v1/messages": {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 9},
}


@pytest.mark.parametrize("path", [*PATHS, *NOTHING])
def test_an_answer_without_a_choice_is_an_error_of_the_client(served: Served, path: str) -> None:
    """Catches an empty answer that passes for a complete one, and a 500 for what the request itself forbids."""
    everything = {"stop_token_ids": list(range(served.llm.engine.limits.vocab_size)), "min_tokens": 1}
    several = {"n": 2, "prompt": ["a", "b"]} if path == PATHS[0] else {"n": 2, "messages": CHAT}
    fields = {"model": MODEL, **NOTHING.get(path, several), **everything}
    answer = post(served, path, fields)
    assert answer.status_code == 400
    assert "there is no token to choose" in answer.json()["error"]["message"]
    assert answer.json()["error"]["type"] == "invalid_request_error"
    last = events(served, path, fields)[-1]
    error = last["response"]["error"] if path == "/v1/responses" else last["error"]
    assert "there is no token to choose" in error["message"]
    assert ("invalid_prompt" if path == "/v1/responses" else "invalid_request_error") in error.values()
