"""`/v1/responses` with the real openai client and the bundled model."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

pytest.importorskip("fastapi", reason="needs the extras serve and dev")

from live_server import MODEL, Served, openai

from ssd import SamplingParams

QUESTION = "Tell me a story."
BAD = {"type": "objekt"}
FORCED = {"tool_choice": "required"}
CHAT = [{"role": "user", "content": QUESTION}]


def expected(served: Served, messages: list[dict[str, str]] = CHAT, **params: Any) -> Any:
    [output] = served.llm.chat(messages, SamplingParams(temperature=1.0, **params))
    return output


def test_text_equals_the_library_s(served: Served) -> None:
    """The same seed gives the same text, streamed or not, sync or async; usage and status fit it."""
    options: Any = {"model": MODEL, "input": QUESTION, "max_output_tokens": 40, "extra_body": {"seed": 7}}
    output = expected(served, seed=7, max_tokens=40)
    client = served.client().responses
    answer = client.create(**options)
    assert answer.output_text == output.text
    assert answer.usage.input_tokens == len(output.prompt_token_ids)
    assert answer.usage.output_tokens == len(output.token_ids)
    assert answer.usage.input_tokens_details.cached_tokens >= 0
    assert answer.status == ("incomplete" if output.finish_reason == "length" else "completed")

    with client.stream(**options) as stream:
        events = list(stream)
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == output.text
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert events[-1].response.output_text == output.text

    async def streamed() -> list[Any]:
        client = served.async_client().responses
        assert (await client.create(**options)).output_text == output.text
        return [event async for event in await client.create(**options, stream=True)]

    # How many deltas there are depends on how fast they are read.
    assert [*dict.fromkeys(e.type for e in asyncio.run(streamed()))] == [*dict.fromkeys(e.type for e in events)]


def test_order_of_events(served: Served) -> None:
    """The events of a text, as the API documents them."""
    options: Any = {"model": MODEL, "input": QUESTION, "max_output_tokens": 5, "temperature": 0.0}
    kinds = [event.type for event in served.client().responses.create(**options, stream=True)]
    deltas = [kind for kind in kinds if kind == "response.output_text.delta"]
    assert deltas
    assert kinds == [
        *("response.created", "response.in_progress", "response.output_item.added", "response.content_part.added"),
        *deltas,
        *("response.output_text.done", "response.content_part.done", "response.output_item.done"),
        "response.incomplete",
    ]


def test_items_and_instructions(served: Served) -> None:
    """A conversation as items is the chat that it means."""
    items: Any = [
        {"role": "user", "content": [{"type": "input_text", "text": "Hello"}, {"type": "input_text", "text": "!"}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Hi."}]},
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": QUESTION},
    ]
    chat = [
        {"role": "system", "content": "You write stories."},
        {"role": "user", "content": "Hello!"},
        {"role": "assistant", "content": "Hi."},
        {"role": "system", "content": "Be brief."},
        *CHAT,
    ]
    answer = served.client().responses.create(
        model=MODEL,
        input=items,
        instructions="You write stories.",
        max_output_tokens=20,
        metadata={"k": "v"},
        store=False,
        extra_body={"seed": 1},
    )
    assert answer.output_text == expected(served, chat, seed=1, max_tokens=20).text
    assert answer.metadata == {"k": "v"}


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"background": True}, "background"),
        ({"truncation": "auto"}, "truncation"),
        ({"reasoning": {"effort": "huge"}}, "reasoning.effort"),
        ({"reasoning": {"mode": "pro"}}, "reasoning.mode"),
        ({"include": ["message.output_text.logprobs"]}, "include"),
        ({"extra_body": {"n": 2}}, "n"),
        ({"text": {"format": {"type": "xml"}}}, "text.format.type"),
        ({"text": {"format": {"type": "json_schema", "name": "x", "schema": BAD}}}, "text.format.schema"),
        ({"tools": [{"type": "function", "name": "f", "parameters": BAD}], **FORCED}, "tools[0].parameters"),
        ({"text": {"verbosity": "low"}}, "text.verbosity"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0]"),
        ({"input": [{"role": "user", "content": "", "stage": "commentary"}]}, "input[0].stage"),
        ({"input": [{"role": "robot", "content": ""}]}, "input[0].role"),
        ({"input": []}, "input"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"temperature": -1.0}, "temperature"),
    ],
)
def test_refusals_name_the_field(strict: Served, more: dict[str, Any], param: str) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        strict.client().responses.create(**{"model": MODEL, "input": QUESTION, **more})
    assert caught.value.param == param
