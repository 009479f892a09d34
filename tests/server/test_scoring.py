"""Log-probabilities of prompts as evaluation harnesses ask for them, and embeddings."""

from __future__ import annotations

from typing import Any

import httpx
import numpy as np
import pytest
from live_server import MODEL, Served, openai

from ssd import SamplingParams

CONTEXT, CONTINUATION = "Mr. Holmes sat by", " the fire"


def score(served: Served, prompt: Any, **options: Any) -> list[dict[str, Any]]:
    """The request of lm-eval's `local-completions`."""
    body = {"model": MODEL, "prompt": prompt, "temperature": 0, "max_tokens": 1, "logprobs": 1, "seed": 1234}
    answer = httpx.post(f"{served.url}/v1/completions", json={**body, "echo": True, **options})
    assert answer.status_code == 200, answer.text
    choices: list[dict[str, Any]] = answer.json()["choices"]
    return sorted(choices, key=lambda choice: int(choice["index"]))


def test_a_harness_reads_the_log_probability_of_a_continuation(served: Served) -> None:
    """lm-eval sums token_logprobs[len(context):-1], and a continuation is greedy if each is the largest of its top."""
    contexts = [served.llm.encode(CONTEXT), served.llm.encode("One")]
    [greedy] = served.llm.generate(contexts[1], SamplingParams(max_new_tokens=5))
    prompts = [served.llm.encode(CONTEXT + CONTINUATION), contexts[1] + greedy.token_ids]
    choices = score(served, prompts)
    expected = served.llm.generate(prompts, SamplingParams(max_new_tokens=1, prompt_logprobs=1))
    for choice, context, prompt, output in zip(choices, contexts, prompts, expected, strict=True):
        found = choice["logprobs"]
        assert [len(found[name]) for name in ("tokens", "token_logprobs", "top_logprobs")] == [len(prompt) + 1] * 3
        assert found["token_logprobs"][0] is found["top_logprobs"][0] is None
        own = found["token_logprobs"][len(context) : -1]
        assert output.prompt_logprobs is not None
        assert own == [entry.logprob for entry in output.prompt_logprobs[len(context) :] if entry is not None]
        tops = found["top_logprobs"][len(context) : -1]
        assert all(max(top.values()) >= value for value, top in zip(own, tops, strict=True))
        is_greedy = all(max(top.values()) == value for value, top in zip(own, tops, strict=True))
        assert is_greedy == (prompt is prompts[1])


def test_a_prompt_is_scored_without_a_new_token(served: Served) -> None:
    """OpenAI's form of it: max_tokens=0 computes nothing beside the prompt."""
    [with_one] = score(served, CONTEXT, logprobs=3)
    answer = served.client().completions.create(model=MODEL, prompt=CONTEXT, max_tokens=0, echo=True, logprobs=3)
    [choice] = answer.choices
    assert choice.text == CONTEXT
    assert choice.finish_reason == "length"
    assert answer.usage.completion_tokens == 0
    found = choice.logprobs.model_dump()
    assert {name: with_one["logprobs"][name][:-1] for name in found} == found
    assert "".join(found["tokens"]) == "<|begin_of_text|>" + CONTEXT
    for offset, token in list(zip(found["text_offset"], found["tokens"], strict=True))[1:]:
        assert CONTEXT[offset:].startswith(token)


def test_an_echo_without_log_probabilities_and_without_tokens(served: Served) -> None:
    answer = served.client().completions.create(model=MODEL, prompt=CONTEXT, max_tokens=0, echo=True)
    assert (answer.choices[0].text, answer.choices[0].logprobs) == (CONTEXT, None)


# --- embeddings -------------------------------------------------------------------------------------------------------


def test_embeddings_of_the_openai_client(served: Served) -> None:
    """It asks for base64 unless told otherwise."""
    client, texts = served.client(), ["A pull request is", "Mr. Holmes"]
    answer = client.embeddings.create(model=MODEL, input=texts)
    plain = client.embeddings.create(model=MODEL, input=texts, encoding_format="float")
    expected = served.llm.embed(texts)
    for found in (answer, plain):
        assert [each.index for each in found.data] == [0, 1]
        for each, vector in zip(found.data, expected, strict=True):
            assert each.embedding == pytest.approx(vector, abs=1e-6)
            assert np.linalg.norm(each.embedding) == pytest.approx(1.0, abs=1e-5)
    count = sum(len(served.llm.encode(text)) for text in texts)
    assert (answer.usage.prompt_tokens, answer.usage.total_tokens) == (count, count)
    ids = client.embeddings.create(model=MODEL, input=served.llm.encode(texts[0]), extra_body={"pooling": "last"})
    assert ids.data[0].embedding == pytest.approx(served.llm.embed(texts[0], "last")[0], abs=1e-6)


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"input": []}, "input"),
        ({"input": [[]]}, "input"),
        ({"encoding_format": "hex"}, "encoding_format"),
        ({"pooling": "max"}, "pooling"),
        ({"dimensions": 8}, "dimensions"),
    ],
)
def test_an_embedding_that_cannot_be_had_is_refused(served: Served, change: dict[str, Any], param: str) -> None:
    answer = httpx.post(f"{served.url}/v1/embeddings", json={"model": MODEL, "input": "x", **change})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"].startswith(param)
    with pytest.raises(openai.NotFoundError):
        served.client().embeddings.create(model="gpt", input="x")
