"""`/v1/messages` with the real anthropic client and the bundled model."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

pytest.importorskip("fastapi", reason="needs the extras serve and dev")

from live_server import MODEL, Lazy, Served, serving

from ssd import LLM, SamplingParams

anthropic: Any = Lazy("anthropic")
BAD = {"type": "objekt"}
GREEDY = {"temperature": 0.0}  # newer clients have no such argument
ASK: Any = [{"role": "user", "content": "Tell me a story."}]


def client_of(served: Served, key: str = "none") -> Any:
    return anthropic.Anthropic(base_url=served.url, api_key=key, max_retries=0)


def test_text_equals_the_library_s(served: Served) -> None:
    """The same seed gives the same text, streamed or not, sync or async; usage and stop reason fit it."""
    options: Any = {"model": MODEL, "messages": ASK, "max_tokens": 40, "extra_body": {"seed": 7}}
    [output] = served.llm.chat(ASK, SamplingParams(temperature=1.0, seed=7, max_tokens=40))
    client = client_of(served).messages
    answer = client.create(**options)
    assert [block.text for block in answer.content] == [output.text]
    usage = answer.usage
    assert usage.input_tokens + (usage.cache_read_input_tokens or 0) == len(output.prompt_token_ids)
    assert usage.output_tokens == len(output.token_ids)
    assert answer.stop_reason == {"stop": "end_turn", "length": "max_tokens"}[output.finish_reason]

    with client.stream(**options) as stream:
        assert "".join(stream.text_stream) == output.text
        final = stream.get_final_message()
    assert final.content[0].text == output.text
    assert final.stop_reason == answer.stop_reason
    assert final.usage.output_tokens == usage.output_tokens

    async def asked() -> str:
        async with anthropic.AsyncAnthropic(base_url=served.url, api_key="none", max_retries=0) as asynchronous:
            assert (await asynchronous.messages.create(**options)).content == answer.content
            async with asynchronous.messages.stream(**options) as stream:
                return "".join([text async for text in stream.text_stream])

    assert asyncio.run(asked()) == output.text


def test_order_of_events(served: Served) -> None:
    options: Any = {"model": MODEL, "messages": ASK, "max_tokens": 5, "extra_body": GREEDY}
    kinds = [event.type for event in client_of(served).messages.create(**options, stream=True)]
    deltas = kinds.count("content_block_delta")
    assert deltas
    assert kinds == [
        *("message_start", "content_block_start"),
        *(["content_block_delta"] * deltas),
        *("content_block_stop", "message_delta", "message_stop"),
    ]


def test_stop_sequences(served: Served) -> None:
    """The answer ends before the sequence, and names it."""
    options: Any = {"model": MODEL, "messages": ASK, "max_tokens": 60, "extra_body": GREEDY}
    client = client_of(served).messages
    whole = client.create(**options).content[0].text
    word = whole.split()[4]
    answer = client.create(**options, stop_sequences=["never this", word])
    assert (answer.stop_reason, answer.stop_sequence) == ("stop_sequence", word)
    assert answer.content[0].text == whole[: whole.index(word)]
    with client.stream(**options, stop_sequences=[word]) as stream:
        assert stream.get_final_message().stop_sequence == word


def test_system_blocks_and_prefill(served: Served) -> None:
    """System text, content blocks, and a last message of the assistant that is continued."""
    messages: Any = [
        {
            "role": "user",
            "content": [{"type": "text", "text": "Tell me a story.", "cache_control": {"type": "ephemeral"}}],
        },
        {"role": "assistant", "content": "Once upon"},
    ]
    answer = client_of(served).messages.create(
        model=MODEL, max_tokens=20, extra_body=GREEDY, system=[{"type": "text", "text": "Be brief."}], messages=messages
    )
    chat = [{"role": "system", "content": "Be brief."}, *ASK, messages[1]]
    prompt, _, _ = served.llm.render_chat(chat, {"add_generation_prompt": False}).rpartition("<|eot_id|>")
    ids = served.llm.tokenizer.encode(prompt, add_special_tokens=False)
    [output] = served.llm.generate(ids, SamplingParams(max_tokens=20))
    assert answer.content[0].text == output.text


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"system": "Be brief."},
        {"messages": [*ASK, {"role": "assistant", "content": "Once upon"}]},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "é"}]}], "thinking": {"type": "disabled"}},
    ],
)
def test_count_tokens(served: Served, more: dict[str, Any]) -> None:
    """The count is what `usage` says, cached tokens included; nothing is generated."""
    client, options = client_of(served).messages, {"model": MODEL, "messages": ASK, **more}
    before = served.llm.engine.metrics.num_requests
    count = client.count_tokens(**options).input_tokens
    assert served.llm.engine.metrics.num_requests == before
    usage = client.create(**options, max_tokens=1).usage
    assert count == usage.input_tokens + (usage.cache_read_input_tokens or 0)


def test_count_tokens_refusals(strict: Served) -> None:
    """As those of a message, in this API's shape; sampling parameters are none of its fields."""
    client = client_of(strict).messages
    with pytest.raises(anthropic.BadRequestError, match=r"messages\[0\].role"):
        client.count_tokens(model=MODEL, messages=[{"role": "robot", "content": "x"}])  # type: ignore[typeddict-item]
    with pytest.raises(anthropic.BadRequestError, match="max_tokens") as caught:
        client.count_tokens(model=MODEL, messages=ASK, extra_body={"max_tokens": 5})
    assert caught.value.body["type"] == "error"  # type: ignore[index]
    with pytest.raises(anthropic.NotFoundError):
        client.count_tokens(model="other", messages=ASK)


@pytest.mark.parametrize(
    ("more", "named"),
    [
        ({"thinking": {"type": "adaptive", "display": "omitted"}}, "thinking.display"),
        ({"thinking": {"type": "sometimes"}}, "thinking.type"),
        ({"output_config": {"format": {"type": "json_schema", "schema": BAD}}}, "output_config.format.schema"),
        ({"output_config": {"effort": "huge"}}, "output_config.effort"),
        ({"tools": [{"name": "f", "input_schema": BAD}], "tool_choice": {"type": "any"}}, "tools\\[0\\].input_schema"),
        ({"extra_body": {"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}}}, "context_manag"),
        ({"extra_body": {"n": 2}}, "n: "),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages\\[0\\].role"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "messages\\[0\\].content\\[0\\].type"),
        ({"messages": []}, "messages"),
        ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, "tools\\[0\\].type"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"metadata": {"other": "x"}}, "metadata.other"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"stop_sequences": [""]}, "stop_sequences"),
    ],
)
def test_refusals_name_the_field(strict: Served, more: dict[str, Any], named: str) -> None:
    """In this API's shape of errors."""
    with pytest.raises(anthropic.BadRequestError, match=named) as caught:
        client_of(strict).messages.create(**{"model": MODEL, "messages": ASK, "max_tokens": 5, **more})
    body: Any = caught.value.body
    assert body["type"] == "error"
    assert body["error"]["type"] == "invalid_request_error"
    assert body["request_id"]


def test_errors_by_status(llm: LLM, served: Served) -> None:
    """An unknown model and a wrong key raise the client's own exceptions."""
    with pytest.raises(anthropic.NotFoundError):
        client_of(served).messages.create(model="other", messages=ASK, max_tokens=5)
    with serving(llm, api_keys=("right",)) as guarded:
        with pytest.raises(anthropic.AuthenticationError) as caught:
            client_of(guarded, "wrong").messages.create(model=MODEL, messages=ASK, max_tokens=5)
        assert caught.value.body["error"]["type"] == "authentication_error"  # type: ignore[index]
        assert client_of(guarded, "right").messages.create(model=MODEL, messages=ASK, max_tokens=5).content
