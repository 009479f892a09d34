"""The real openai client against every endpoint it knows, and the shapes of answers and errors."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from typing import Any

import httpx
import pytest
from live_server import MODEL, Served, openai

from ssd import SamplingParams

CHAT: Any = [{"role": "user", "content": "Who wrote Hamlet?"}]
PROMPT = "Mr. Holmes sat by the fire, and"
DRAWN: Any = {"temperature": 0.9, "seed": 7, "max_tokens": 24}
PARAMS = SamplingParams(temperature=0.9, seed=7, max_tokens=24)


def test_models(served: Served) -> None:
    client = served.client()
    assert [model.id for model in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).max_model_len == 4096
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("gpt")


def test_a_chat_is_what_the_library_says(served: Served) -> None:
    answer = served.client().chat.completions.create(model=MODEL, messages=CHAT, **DRAWN)
    [expected] = served.llm.chat(CHAT, PARAMS)
    assert answer.choices[0].message.content == expected.text
    assert answer.choices[0].finish_reason == expected.finish_reason
    assert answer.usage.prompt_tokens == len(expected.prompt_token_ids)
    assert answer.usage.completion_tokens == len(expected.token_ids)
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    assert answer.usage.completion_tokens_details.accepted_prediction_tokens == 0
    assert answer.usage.prompt_tokens_details.cached_tokens >= 0


def test_streams_of_four_samples_are_the_samples(served: Served) -> None:
    options = DRAWN | {"n": 4, "logprobs": True, "top_logprobs": 2, "stream": True}
    stream = served.client().chat.completions.create(
        model=MODEL, messages=CHAT, stream_options={"include_usage": True}, **options
    )
    [expected] = served.llm.chat(CHAT, SamplingParams(temperature=0.9, seed=7, max_tokens=24, n=4, logprobs=2))
    texts: dict[int, str] = defaultdict(str)
    logprobs: dict[int, list[Any]] = defaultdict(list)
    reasons, usage = {}, None
    for chunk in stream:
        usage = chunk.usage or usage
        for choice in chunk.choices:
            assert chunk.usage is None
            texts[choice.index] += choice.delta.content
            logprobs[choice.index] += choice.logprobs.content if choice.logprobs else []
            reasons[choice.index] = choice.finish_reason
    assert usage is not None
    assert usage.completion_tokens == sum(len(sample.token_ids) for sample in expected.samples)
    for sample in expected.samples:
        assert texts[sample.index] == sample.text
        assert reasons[sample.index] == sample.finish_reason
        assert sample.logprobs is not None
        assert [entry.logprob for entry in logprobs[sample.index]] == [entry.logprob for entry in sample.logprobs]
        assert all(len(entry.top_logprobs) == 2 for entry in logprobs[sample.index])


def test_logprobs_of_a_chat_spell_its_tokens(served: Served) -> None:
    answer = served.client().chat.completions.create(model=MODEL, messages=CHAT, logprobs=True, **DRAWN)
    entries = answer.choices[0].logprobs.content
    assert len(entries) == answer.usage.completion_tokens
    assert all(bytes(entry.bytes).decode() == entry.token for entry in entries if entry.bytes is not None)
    assert answer.choices[0].message.content.startswith("".join(entry.token for entry in entries[:-1])[:10])


def test_completions_of_several_prompts(served: Served) -> None:
    """Catches answers that are mixed up, in a stream and without."""
    prompts, client = [PROMPT, "A pull request is", "Once upon a time"], served.client()
    expected = [
        sample.text
        for output in served.llm.generate(prompts, SamplingParams(temperature=0.9, seed=7, max_tokens=24, n=2))
        for sample in output.samples
    ]
    answer = client.completions.create(model=MODEL, prompt=prompts, n=2, **DRAWN)
    assert [choice.text for choice in answer.choices] == expected
    assert [choice.index for choice in answer.choices] == list(range(6))
    texts = [""] * 6
    for chunk in client.completions.create(model=MODEL, prompt=prompts, n=2, stream=True, **DRAWN):
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert texts == expected


def test_token_id_prompts_and_returned_token_ids(served: Served) -> None:
    ids, client = served.llm.encode(PROMPT), served.client()
    [expected] = served.llm.generate(PROMPT, PARAMS)
    one = client.completions.create(model=MODEL, prompt=ids, extra_body={"return_token_ids": True}, **DRAWN)
    assert (one.choices[0].token_ids, one.choices[0].prompt_token_ids) == (expected.token_ids, ids)
    two = client.completions.create(model=MODEL, prompt=[ids, ids], **DRAWN)
    assert [choice.text for choice in two.choices] == [expected.text] * 2


def test_logprobs_of_a_completion(served: Served) -> None:
    answer = served.client().completions.create(model=MODEL, prompt=PROMPT, logprobs=3, max_tokens=6, temperature=0)
    found = answer.choices[0].logprobs
    assert "".join(found.tokens) == answer.choices[0].text
    assert found.text_offset == [len("".join(found.tokens[:i])) for i in range(6)]
    assert all(top[token] == max(top.values()) for token, top in zip(found.tokens, found.top_logprobs, strict=True))


def test_echo_and_stop(served: Served) -> None:
    client = served.client()
    plain = client.completions.create(model=MODEL, prompt=PROMPT, max_tokens=20, temperature=0).choices[0].text
    stop = plain[len(plain) // 2 :][:4]
    options: Any = {"model": MODEL, "prompt": PROMPT, "max_tokens": 20, "temperature": 0, "echo": True, "stop": [stop]}
    answer = client.completions.create(**options).choices[0]
    assert answer.finish_reason == "stop"
    assert answer.text == PROMPT + plain[: plain.index(stop)]
    streamed = "".join(chunk.choices[0].text for chunk in client.completions.create(stream=True, **options))
    assert streamed == answer.text


def test_sampling_parameters_reach_the_engine(served: Served) -> None:
    """Catches a parameter that is accepted and dropped."""
    given: dict[str, Any] = {
        "temperature": 1.1,
        "seed": 3,
        "max_tokens": 30,
        "top_p": 0.95,
        "presence_penalty": 0.5,
        "frequency_penalty": 0.4,
    }
    more: dict[str, Any] = {
        "top_k": 40,
        "min_p": 0.01,
        "repetition_penalty": 1.2,
        "min_tokens": 10,
        "ignore_eos": True,
        "stop_token_ids": [13],
    }
    bias = {"11": -2.5, "262": 1.5}
    [expected] = served.llm.generate(PROMPT, SamplingParams(**given, **more, logit_bias=bias))  # type: ignore[arg-type]
    answer = served.client().completions.create(model=MODEL, prompt=PROMPT, logit_bias=bias, extra_body=more, **given)
    assert answer.choices[0].text == expected.text
    for name in (*given, *more):
        without = {key: value for key, value in (given | more).items() if key != name}
        changed = SamplingParams(**({"temperature": 1.0, "max_tokens": 16} | without))
        assert changed != SamplingParams(**given, **more), name


def test_a_message_is_continued(served: Served) -> None:
    messages = [*CHAT, {"role": "assistant", "content": "Hamlet was written by"}]
    rendered = served.llm.render_chat(messages, {"add_generation_prompt": False})
    end = rendered.rindex("written by") + len("written by")
    ids = served.llm.tokenizer.encode(rendered[:end], add_special_tokens=False)
    [expected] = served.llm.generate(ids, PARAMS)
    more = {"continue_final_message": True, "return_token_ids": True}
    answer = served.client().chat.completions.create(model=MODEL, messages=messages, extra_body=more, **DRAWN)
    assert answer.prompt_token_ids == ids
    assert answer.choices[0].message.content == expected.text


def test_the_async_client(served: Served) -> None:
    [expected] = served.llm.generate(PROMPT, PARAMS)

    async def ask() -> tuple[str, str]:
        async with served.async_client() as client:
            answer = await client.completions.create(model=MODEL, prompt=PROMPT, **DRAWN)
            stream = await client.completions.create(model=MODEL, prompt=PROMPT, stream=True, **DRAWN)
            return answer.choices[0].text, "".join([chunk.choices[0].text async for chunk in stream])

    assert asyncio.run(ask()) == (expected.text, expected.text)


def test_tokens_there_and_back(served: Served) -> None:
    found = httpx.post(f"{served.url}/tokenize", json={"prompt": PROMPT}).json()
    assert found["tokens"] == served.llm.encode(PROMPT)
    assert found["count"] == len(found["tokens"])
    back = httpx.post(f"{served.url}/detokenize", json={"tokens": found["tokens"], "skip_special_tokens": True})
    assert back.json() == {"prompt": PROMPT}
    chat = httpx.post(f"{served.url}/tokenize", json={"messages": CHAT}).json()
    assert chat["tokens"] == served.llm.encode(CHAT)
    for path, body in (("tokenize", {}), ("detokenize", {"tokens": [10**6]}), ("detokenize", {"tokens": ["a"]})):
        assert httpx.post(f"{served.url}/{path}", json=body).status_code == 400


def test_head_is_get_without_a_body(served: Served) -> None:
    """Agents ask so whether a server is there."""
    for path, status in (("/", 200), ("/v1/models", 200), ("/v1/nothing", 404), ("/v1/completions", 405)):
        head, whole = httpx.head(served.url + path), httpx.get(served.url + path)
        assert (head.status_code, head.content) == (status, b"")
        assert head.headers["content-length"] == whole.headers["content-length"]


def test_health_version_and_request_ids(served: Served) -> None:
    assert httpx.get(f"{served.url}/health").json() == {"status": "ok"}
    assert httpx.get(f"{served.url}/version").json().keys() == {"version"}
    ready = httpx.get(f"{served.url}/health/ready", headers={"x-request-id": "mine-1"})
    assert (ready.status_code, ready.headers["x-request-id"]) == (200, "mine-1")
    assert httpx.get(f"{served.url}/health", headers={"x-request-id": "a b/c"}).headers["x-request-id"] != "a b/c"


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"nonsense": 1}, "nonsense"),
        ({"temperature": "hot"}, "temperature"),
        ({"temperature": -1}, "temperature"),
        ({"temperature": True}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_completion_tokens": 3, "max_tokens": 4}, "max_completion_tokens"),
        ({"max_completion_tokens": 0, "max_tokens": None}, "max_completion_tokens"),
        ({"n": 0}, "n"),
        ({"n": 65}, "n"),
        ({"seed": 1.5}, "seed"),
        ({"stop": [""]}, "stop"),
        ({"logit_bias": {"a": 1}}, "logit_bias"),
        ({"logit_bias": {"999999": 1}}, "logit_bias"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream": True, "stream_options": {"more": True}}, "stream_options.more"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content[0]"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role"),
        ({"messages": "hello"}, "messages"),
        ({"response_format": {"type": "yaml"}}, "response_format.type"),
        ({"reasoning_effort": "huge"}, "reasoning_effort"),
        ({"tool_choice": "some"}, "tool_choice"),
        ({"chat_template": "{{ messages }}"}, "chat_template_kwargs"),
        ({"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message"),
    ],
)
def test_what_is_not_honoured_is_refused_by_name(strict: Served, change: dict[str, Any], param: str) -> None:
    body = {"model": MODEL, "messages": CHAT, "max_tokens": 4, **change}
    answer = httpx.post(f"{strict.url}/v1/chat/completions", json=body)
    error = answer.json()["error"]
    assert (answer.status_code, error["type"], error["param"]) == (400, "invalid_request_error", param), error
    assert param.partition(".")[0] in error["message"]


def test_errors_of_the_client(served: Served) -> None:
    client = served.client()
    with pytest.raises(openai.NotFoundError, match="is not served here"):
        client.completions.create(model="gpt", prompt="x")
    with pytest.raises(openai.BadRequestError, match="leave out stream, echo or logprobs"):
        client.completions.create(model=MODEL, prompt="x", echo=True, logprobs=1, stream=True)
    with pytest.raises(openai.BadRequestError, match="max_tokens"):
        client.completions.create(model=MODEL, prompt="x", max_tokens=0)
    with pytest.raises(openai.BadRequestError, match="max_model_len"):
        client.completions.create(model=MODEL, prompt=[5] * 5000)
    with pytest.raises(openai.BadRequestError, match="token ids outside"):
        client.completions.create(model=MODEL, prompt=[10**6])


@pytest.mark.parametrize(
    "body", [b"", b"{", b"[]", b"null", b"\xff\xfe", b"[" * 100_000, b'{"model": 1e999}', b'{"seed": ' + b"9" * 5000]
)
def test_bodies_that_are_no_requests(served: Served, body: bytes) -> None:
    for path in ("/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"):
        answer = httpx.post(served.url + path, content=body, headers={"content-type": "application/json"})
        assert answer.status_code == 400
        assert answer.json()["error"]["message"]
    assert httpx.get(f"{served.url}/v1/nothing").json()["error"]["message"] == "Not Found"
    assert httpx.get(f"{served.url}/v1/completions").status_code == 405
