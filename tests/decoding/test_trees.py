"""Token trees: whatever tree is proposed, the text is that of plain decoding.

Over a suspicious decoder, which reads the KV of every node and, in later rounds, that of what was accepted.
"""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
from conftest import mostly_slow
from engine_machine import EngineMachine
from hypothesis import HealthCheck, settings
from random_requests import MAX_LEN, Alone, Models, answers_alone, check_answers, play, random_requests

from ssd import LLM, SamplingParams
from ssd.drafting.arms import Arm, ArmTimes
from ssd.drafting.controller import DepthController
from ssd.errors import ConfigError
from ssd.execution.tree import DraftTree

_CHECKS = list(HealthCheck)


class TreeMachine(EngineMachine):
    """The random life of an engine whose drafts are trees."""

    trees = True


class InFlightTreeMachine(TreeMachine):
    """The same with a round always in flight."""

    run_ahead = True


TreeMachine.TestCase.settings = settings(stateful_step_count=20, suppress_health_check=_CHECKS)
TestTreeMachine = pytest.mark.slow(TreeMachine.TestCase)  # the next one has all of its rules
InFlightTreeMachine.TestCase.settings = settings(stateful_step_count=20, suppress_health_check=_CHECKS)
TestInFlightTreeMachine = InFlightTreeMachine.TestCase


class LongTreeMachine(InFlightTreeMachine):
    """More of them, and longer ones."""


LongTreeMachine.TestCase.settings = settings(
    max_examples=300, stateful_step_count=50, deadline=None, suppress_health_check=_CHECKS
)
TestLongTreeMachine = pytest.mark.slow(LongTreeMachine.TestCase)


def test_what_is_no_node_is_behind_the_last_decided_token() -> None:
    """On the host, too, where masks and logits are made for every row: catches a parent that is not there."""
    assert DraftTree([7, 8, 9], [-1, 0, 3]).before == [[], [7], [7, 8], [9]]


# --- over the bundled models -----------------------------------------------------------------------------------------

TEXTS = ["There was once a poor woodcutter who", "def add(a, b):", "Mr. Holmes sat by the fire, and", "import os\n"] * 2


@pytest.mark.parametrize(("batch", "count"), mostly_slow([(1, 2), (8, 8)], fast={(1, 2)}))
def test_prepared_trees_are_worth_it(batch: int, count: int) -> None:
    """SSD with trees: the text of plain decoding, drafts that had been prepared, and more tokens a round than with
    chains."""
    params = [
        SamplingParams(temperature=float(i % 2), seed=i, max_new_tokens=16, ignore_eos=True) for i in range(count)
    ]
    texts, rounds = [], []
    chains = {"mode": "ssd", "draft": "tiny-llama-draft", "k": 4, "placement": "inline", "backup": "jit"}
    for speculation in (None, chains, chains | {"tree": 16}):
        with LLM("tiny-llama", device="cpu", max_num_seqs=batch, speculation=speculation) as llm:
            outputs = llm.generate(TEXTS[:count], params)
            texts.append([output.token_ids for output in outputs])
            rounds.append(sum(output.metrics.rounds for output in outputs))
            assert llm.engine.metrics.drafter_failures == 0
            assert speculation is None or llm.engine.metrics.ssd_hit_rate > 0.3
            if speculation is not None and "tree" in speculation:
                with pytest.raises(ConfigError, match="hits are drawn for chains only"):
                    llm.engine.round.drafter.pin_hits(0.5)
    assert texts[1] == texts[0]
    assert texts[2] == texts[0]
    assert rounds[2] < rounds[1] < rounds[0]


# --- over models ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def alone(models: Models) -> Iterator[Alone]:
    """What the requests of a seed are answered by plain decoding."""
    with answers_alone(models) as answer:
        yield answer


MEMORY: dict[str, dict[str, Any]] = {
    "little": {"max_num_seqs": 4, "block_size": 4, "num_kv_blocks": 40, "max_num_batched_tokens": 24},
    "none to spare": {"max_num_seqs": 8, "block_size": 4, "num_kv_blocks": 18, "max_num_batched_tokens": 60},
    "one at a time": {"max_num_seqs": 1, "block_size": 4, "num_kv_blocks": 40, "max_num_batched_tokens": 30},
    "large blocks": {"max_num_seqs": 16, "block_size": 16, "max_num_batched_tokens": 512},
}


@pytest.mark.parametrize(
    ("draft", "run_ahead"),
    mostly_slow(
        list(itertools.product(("noisy", "head", "mtp-head", "block"), (False, True))),
        fast={("head", True)},
    ),
)
def test_chains_and_trees_take_turns(models: Models, alone: Alone, draft: str, run_ahead: bool) -> None:
    """As with tree="auto", in any order, from round to round: features, KV and paths are those of the last round."""
    speculation = {"mode": "sd", "draft": models.drafts[draft], "k": 3, "tree": "auto"}
    options = MEMORY["little"] | {"device": "cpu", "max_model_len": MAX_LEN, "max_num_batched_tokens": 64}
    with LLM(models.target, speculation=speculation, **options) as llm:
        assert isinstance(llm.engine.round.drafter, DepthController)
        modes, dice = Counter[str](), random.Random(1)

        def shuffled(times: ArmTimes) -> Arm:
            mode = dice.choice(["ar", "sd", "tree"])
            modes[mode] += 1
            return dice.choice([arm for arm in times.arms if arm.mode == mode])

        llm.driver.call(lambda engine: setattr(engine.round, "run_ahead", run_ahead))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(ArmTimes, "choose", shuffled)
            for seed in range(2):
                requests = random_requests(10, seed)
                outputs = llm.driver.call(lambda engine, r=requests, s=seed: play(engine, r, preempt=0.03, seed=s))
                check_answers(requests, outputs, alone(10, seed))
        assert min(modes.values()) > 8
        assert llm.engine.metrics.drafter_failures == 0


@pytest.mark.parametrize(
    ("mode", "draft", "memory", "run_ahead"),
    mostly_slow(
        [
            *itertools.product(("sd",), ("noisy", "stranger", "head", "mtp-head", "block"), MEMORY, (False, True)),
            *itertools.product(("ssd",), ("noisy", "stranger"), MEMORY, (False, True)),
        ],
        fast={
            ("sd", "head", "little", True),
            ("sd", "mtp-head", "one at a time", False),
            ("sd", "block", "large blocks", False),
            ("ssd", "noisy", "none to spare", True),
        },
    ),
)
def test_everything_at_once(models: Models, alone: Alone, mode: str, draft: str, memory: str, run_ahead: bool) -> None:
    """Random requests with all parameters, aborts, preemptions and a prefix cache: the texts of plain decoding."""
    speculation = {"mode": mode, "draft": models.drafts[draft], "k": 3, "tree": 7}
    options = MEMORY[memory] | {"device": "cpu", "max_model_len": MAX_LEN}
    with LLM(models.target, speculation=speculation, **options) as llm:
        llm.driver.call(lambda engine: setattr(engine.round, "run_ahead", run_ahead))
        for seed in range(1):
            requests = random_requests(10, seed)
            outputs = llm.driver.call(lambda engine, r=requests, s=seed: play(engine, r, preempt=0.03, seed=s))
            check_answers(requests, outputs, alone(10, seed))
        assert llm.engine.metrics.drafter_failures == 0
        assert mode == "sd" or draft == "stranger" or llm.engine.metrics.ssd_rounds["hit"] > 5
