"""A drafter of the user's own: the same text, whatever it proposes."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import TestModel
from fakes import wait_until_idle

from ssd import LLM, ConfigError, Proposer, SamplingParams
from ssd.core import Proposal, Work
from ssd.decoding.drafter import Drafter

PROMPTS = [[1, 2, 3], [7, 8, 9, 7, 8], [40] * 20]
GREEDY = SamplingParams(max_new_tokens=12, ignore_eos=True)
DRAWN = SamplingParams(max_new_tokens=12, ignore_eos=True, temperature=1.0, seed=5)
K = 3


class Script:
    """Proposes what a function of the tokens and k says."""

    def __init__(self, draft: Callable[[list[int], int], Any]) -> None:
        self.draft = draft
        self.calls = 0

    def propose(self, sequences: Seq[list[int]], k: int) -> Seq[Seq[int]]:
        self.calls += 1
        return [self.draft(tokens, k) for tokens in sequences]


class WrongCount:
    def propose(self, sequences: Seq[list[int]], k: int) -> Seq[Seq[int]]:
        return [[1]] * (len(sequences) + 1)


class Meddler:
    """Changes what it was given."""

    def propose(self, sequences: Seq[list[int]], k: int) -> Seq[Seq[int]]:
        for tokens in sequences:
            tokens[:] = [0]
        return [[1]] * len(sequences)


def raise_error(tokens: list[int], k: int) -> Any:
    raise RuntimeError("out of order")


@pytest.fixture(scope="module")
def path(make_model: Callable[[str], TestModel]) -> str:
    return make_model("llama-tied").path


Texts = list[list[int]]


def answers(llm: LLM) -> tuple[Texts, Texts]:
    outputs = [llm.generate(PROMPTS, params) for params in (GREEDY, DRAWN)]
    assert all(output.error is None for each in outputs for output in each)
    return tuple([output.token_ids for output in each] for each in outputs)  # type: ignore[return-value]


@pytest.fixture(scope="module")
def alone(path: str) -> Iterator[tuple[Texts, Texts]]:
    with LLM(path, device="cpu") as llm:
        yield answers(llm)


@pytest.mark.parametrize(
    ("proposer", "fails"),
    [
        (Script(lambda tokens, k: np.array(tokens[-k:])), False),
        (Script(lambda tokens, k: itertools.repeat(5)), False),
        (Script(lambda tokens, k: [5, 10**9, 5]), False),
        (Script(lambda tokens, k: "abc"), True),
        (WrongCount(), True),
        (Meddler(), False),
        *[
            pytest.param(Script(draft), fails, marks=pytest.mark.slow)
            for draft, fails in (
                (lambda tokens, k: tokens[-k:], False),
                (lambda tokens, k: [], False),
                (lambda tokens, k: [5] * 100, False),
                (lambda tokens, k: [-1, 5, 5], False),
                (lambda tokens, k: [1.5, 2.0], True),
                (lambda tokens, k: None, True),
                (raise_error, True),
            )
        ],
    ],
)
def test_whatever_is_proposed_the_text_is_that_of_plain_decoding(
    path: str, alone: tuple[Texts, Texts], proposer: Proposer, fails: bool
) -> None:
    """Wrong lengths, tokens and types, exceptions, changes of its input: no request fails, and no token differs."""
    with LLM(path, device="cpu", speculation={"draft": proposer, "k": K}) as llm:
        assert answers(llm) == alone
        wait_until_idle(llm.driver)
        assert (llm.engine.metrics.drafter_failures > 0) == fails


def test_a_proposer_that_is_right_saves_rounds(path: str, alone: tuple[Texts, Texts]) -> None:
    """Catches proposals that are dropped on the way."""

    def right(tokens: list[int], k: int) -> list[int]:
        [(prompt, text)] = [pair for pair in zip(PROMPTS, alone[0], strict=True) if tokens[: len(pair[0])] == pair[0]]
        done = len(tokens) - len(prompt)
        return text[done : done + k]

    with LLM(path, device="cpu", speculation={"draft": Script(right), "k": K}) as llm:
        outputs = llm.generate(PROMPTS, GREEDY)
    assert [output.token_ids for output in outputs] == alone[0]
    assert [output.metrics.rounds for output in outputs] == [12 // (K + 1)] * 3


@pytest.mark.parametrize("options", [{"mode": "auto"}, {"k": "auto"}, {"acceptance": "rejection"}])
def test_a_proposer_with_the_other_options_of_drafts(
    path: str, alone: tuple[Texts, Texts], options: dict[str, Any]
) -> None:
    proposer = Script(lambda tokens, k: tokens[-k:])
    with LLM(path, device="cpu", speculation={"draft": proposer, **options}) as llm:
        assert [output.token_ids for output in llm.generate(PROMPTS, GREEDY)] == alone[0]
    assert proposer.calls > 0


class Repeating(Drafter):
    """The engine's own interface."""

    lookahead = 4

    def propose(self, works: Seq[Work]) -> list[Proposal]:
        return [Proposal((5,) * 4)] * len(works)


def test_a_drafter_on_an_engine_without_room_for_drafts_fails_no_request(path: str, alone: tuple[Texts, Texts]) -> None:
    with LLM(path, device="cpu") as llm:
        llm.driver.call(lambda engine: engine.use(Repeating(), 4))
        assert answers(llm) == alone


def test_a_drafter_of_the_engines_interface_is_taken_as_it_is(path: str, alone: tuple[Texts, Texts]) -> None:
    drafter = Repeating()
    with LLM(path, device="cpu", speculation={"draft": drafter}) as llm:
        assert llm.engine.round.drafter is drafter
        assert answers(llm) == alone


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"draft": 7}, "must be a model, 'suffix', or an object with a method propose"),
        ({"draft": Script}, "must be a model, 'suffix', or an object with a method propose"),
        ({"draft": WrongCount(), "mode": "ssd"}, "nothing to prepare"),
        ({"draft": WrongCount(), "draft_quantization": "int8"}, "draft_quantization is for draft models"),
    ],
)
def test_what_is_no_proposer_is_refused_by_name(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        LLM("tiny-llama", device="cpu", speculation=options)


def test_the_example_of_the_documentation_runs(capsys: pytest.CaptureFixture[str]) -> None:
    page = (Path(__file__).parents[2] / "docs" / "reference.md").read_text()
    [example] = re.findall(r"```python\n(class .*?propose.*?)```", page, re.DOTALL)
    exec(compile(example, "reference.md", "exec"), {})
    [accepted] = re.findall(r"(\d+) of (\d+) draft tokens accepted", capsys.readouterr().out)
    assert 0 < int(accepted[0]) <= int(accepted[1])
