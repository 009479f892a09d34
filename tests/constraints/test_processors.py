"""Logits processors: the same text with and without drafts, alone and in company, and failures that stay alone."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from conftest import TestModel, mostly_slow

from ssd import LLM, RequestError, RequestFailed, SamplingParams

PROMPTS = [[1, 2, 3], [7, 8, 9, 7, 8], [40] * 20]


def rising(token_ids: list[int], logits: np.ndarray) -> np.ndarray:
    """Only tokens above the last one, or any if that was above 250: a function of the tokens before."""
    if token_ids[-1] <= 250:
        logits[: token_ids[-1] + 1] = -np.inf
    return logits


def params(processor: Any = rising, **others: Any) -> SamplingParams:
    return SamplingParams(max_new_tokens=12, ignore_eos=True, logits_processor=processor, **others)


ALL = [params(), params(temperature=1.0, seed=3), params(frequency_penalty=1.0, logprobs=2)]


@pytest.fixture(scope="module")
def path(make_model: Callable[[str], TestModel]) -> str:
    return make_model("llama-tied").path


@pytest.fixture(scope="module")
def plain(path: str) -> Iterator[LLM]:
    with LLM(path, device="cpu") as llm:
        yield llm


def texts(llm: LLM) -> list[list[int]]:
    return [output.token_ids for each in ALL for output in llm.generate(PROMPTS, each)]


@pytest.mark.parametrize(
    ("mode", "run_ahead"),
    mostly_slow(itertools.product(("suffix", "sd", "ssd"), (False, True)), fast={("ssd", True)}),
)
def test_a_logits_processor_writes_the_same_text_in_every_mode(
    path: str, plain: LLM, mode: str, run_ahead: bool
) -> None:
    """Catches rows that are processed with other tokens than those before them, and rounds that come too early."""
    options: dict[str, Any] = {"mode": "sd", "draft": "suffix"} if mode == "suffix" else {"mode": mode, "draft": path}
    expected = texts(plain)
    for text in expected:
        assert all(later > earlier or earlier > 250 for earlier, later in itertools.pairwise(text))
    with LLM(path, device="cpu", speculation=options | ({"placement": "inline"} if mode == "ssd" else {})) as llm:
        llm.engine.round.run_ahead = run_ahead
        assert texts(llm) == expected


def rising_there(token_ids: list[int], logits: np.ndarray) -> np.ndarray:
    """As `rising`, but fails behind texts that end with a multiple of 13: not only on the way that is taken."""
    if token_ids[-1] % 13 == 0:
        raise ValueError("unlucky")
    return rising(token_ids, logits)


def test_a_logits_processor_and_draft_trees() -> None:
    """Catches rows of nodes that are processed with the tokens of other nodes, and failures of nodes that are not
    taken."""
    prompts = ["Mr. Holmes sat", "There was once", "The king"]
    options: dict[str, Any] = {"mode": "sd", "draft": "tiny-llama-eagle", "k": 3, "tree": 10}
    every = [*ALL, params(rising_there, temperature=1.0, seed=2)]
    found = []
    for speculation in (None, options):
        with LLM("tiny-llama", device="cpu", speculation=speculation) as llm:
            outputs = [output for each in every for output in llm.generate(prompts, each)]
            found.append([(o.token_ids, o.finish_reason, o.error, o.logprobs) for o in outputs])
            accepted = sum(output.metrics.accepted for output in outputs)
    assert found[0] == found[1]
    assert accepted > 0


def test_a_logits_processor_leaves_the_company_as_it_is(plain: LLM) -> None:
    others = SamplingParams(max_new_tokens=12, ignore_eos=True)
    before = [output.token_ids for output in plain.generate(PROMPTS, others)]
    mixed = plain.generate([*PROMPTS, *PROMPTS], [others, others, others, *ALL])
    assert [output.token_ids for output in mixed[:3]] == before


def fails(token_ids: list[int], logits: np.ndarray) -> np.ndarray:
    if len(token_ids) > 8:
        raise ValueError("no more")
    return logits


@pytest.mark.parametrize(
    ("processor", "message"),
    [(fails, "logits_processor failed: ValueError: no more"), (lambda tokens, logits: logits[:5], r"shape \(5,\)")],
)
def test_a_logits_processor_that_fails_ends_its_own_request_only(plain: LLM, processor: Any, message: str) -> None:
    before = plain.engine.metrics.num_preemptions
    good, bad = plain.generate([PROMPTS[0], PROMPTS[0]], [params(), params(processor)])
    assert good.error is None
    assert len(good.token_ids) == 12
    assert bad.finish_reason == "error"
    with pytest.raises(RequestFailed, match=message):
        plain.generate(PROMPTS[0], params(processor))
    assert plain.engine.metrics.num_preemptions == before  # no round failed


def test_a_logits_processor_and_structured_output(llm: LLM) -> None:
    """Whatever a processor prefers, the text is valid."""

    def prefers_zero(token_ids: list[int], logits: np.ndarray) -> np.ndarray:
        logits[0] = 1000.0
        return logits

    structured = {"regex": "[a-c]{5}"}
    [output] = llm.generate("x", SamplingParams(structured=structured, logits_processor=prefers_zero))
    assert len(output.text) == 5
    assert set(output.text) <= set("abc")


def test_a_logits_processor_must_be_a_function() -> None:
    with pytest.raises(RequestError, match="logits_processor=3: must be a function"):
        SamplingParams(logits_processor=3)  # type: ignore[arg-type]
