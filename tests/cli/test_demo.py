"""`ssd demo`: what it shows, and that its comparison of texts is a real one."""

from __future__ import annotations

import json
import re
import shutil
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from inspect import signature
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import TestModel, mostly_slow
from rich.console import Console
from typer.testing import CliRunner, Result

from ssd.assembly.memory import weight_bytes
from ssd.assembly.open import BUNDLE, open_checkpoint
from ssd.cli import demo as demo_command
from ssd.cli.bench import bench
from ssd.cli.console import DEMO_MODEL, bundled_draft
from ssd.cli.demo import QUESTIONS, Asked, Question, Run, activation, conclude, difference, write
from ssd.cli.main import app
from ssd.core import RequestMetrics, RequestOutput, Sample, SamplingParams
from ssd.llm import LLM

SHORT = ("--device", "cpu", "--max-tokens", "8")
METHODS = ("with a draft (SD)", "draft prepared ahead (SSD)")


@pytest.fixture
def one_core(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ssd.assembly.placement.num_cores", lambda: 1)


def demo(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["demo", *SHORT, *arguments])


def written(*answers: Sequence[int], method: str = "somehow", seconds: float = 1.0) -> Run:
    samples = [Sample(0, "", list(ids), "length", None, RequestMetrics()) for ids in answers]
    return Run(method, [RequestOutput(f"{i}", [], [sample]) for i, sample in enumerate(samples)], seconds)


def asked(*titles: str) -> list[Asked]:
    return [Asked(Question(title, "?"), "?", SamplingParams()) for title in titles]


@pytest.mark.parametrize("command", [demo_command.demo, bench])
def test_what_runs_without_arguments_is_a_pair_in_which_drafts_pay(command: Callable[..., None]) -> None:
    """Catches a first impression of drafts that cost more than they save: the draft has a thirtieth of the weights."""
    model = signature(command).parameters["model"].default
    draft = bundled_draft(model)
    assert draft is not None
    target, small = (open_checkpoint(name).config for name in (model, draft))
    assert weight_bytes(target, torch.float32) > 30 * weight_bytes(small, torch.float32)


@pytest.mark.parametrize(
    ("model", "cores"),  # with several, drafts come from a process
    mostly_slow([("tiny-llama", 1), ("tiny-llama", 4), (DEMO_MODEL, 4)], fast={("tiny-llama", 1)}),
)
def test_it_shows_texts_speeds_and_what_they_mean(model: str, cores: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a section that is lost, and control characters in a pipe."""
    monkeypatch.setattr("ssd.assembly.placement.num_cores", lambda: cores)
    done = demo("--model", model)
    assert done.exit_code == 0, done.output
    assert all(question.title in done.stdout for question in QUESTIONS)
    assert done.stdout.count("tokens/s") == len(QUESTIONS) + len(METHODS) + 1
    said = " ".join(done.stdout.split())
    for part in ("a demo, not an oracle", "token for token", "nothing else", "rough measure", "What to try next"):
        assert part in said
    assert not [c for c in done.stdout if ord(c) < 32 and c != "\n"]
    lines = done.stdout.splitlines()
    rows = {method: row for row in lines for method in METHODS if f" {method} " in row and "%" in row}
    assert [row.count("%") for row in rows.values()] == [1, 2]  # accepted; and hits
    assert all(row.rstrip().endswith("yes") for row in rows.values())


@pytest.mark.parametrize(
    ("prefix", "found", "script"),
    [
        (".venv", None, ".venv/bin/activate"),
        (".venv", "/usr/bin/ssd", ".venv/bin/activate"),  # another one
        (".venv", ".venv/bin/ssd", None),  # activated
        ("/elsewhere/venv", None, "/elsewhere/venv/bin/activate"),
        (sys.base_prefix, None, None),
    ],
)
def test_it_says_how_to_get_the_command(
    prefix: str, found: str | None, script: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "prefix", str(tmp_path / prefix))
    monkeypatch.setattr(shutil, "which", lambda _: found and str(tmp_path / found))
    assert activation() == script
    console = Console(width=100)
    with console.capture() as shown:
        conclude("other", asked("first"), [written([1]), written([1])], console)
    assert "pip install ." in shown.get()
    assert (f"source {script}" in shown.get()) == (script is not None)


def test_without_a_draft_model_nothing_runs_ahead() -> None:
    done = demo("--model", "tiny-llama-draft")
    assert done.exit_code == 0, done.output
    assert "SSD needs a draft model" in done.stdout
    assert "(SSD)" not in done.stdout


def test_speeds_are_compared_with_the_first() -> None:
    console = Console(width=100)
    with console.capture() as shown:
        conclude("other", asked("first"), [written([1, 2], seconds=2.0), written([1, 2], seconds=4.0)], console)
    assert re.search(r"0\.5 +0\.50 +yes", shown.get())


@pytest.mark.slow
def test_the_same_seed_writes_the_same_texts_and_another_one_others() -> None:
    def answers(seed: int) -> list[str]:
        lines = demo("--model", "tiny-llama-draft", "--seed", str(seed)).stdout.splitlines()
        written = lines[1 : lines.index(next(line for line in lines if "(SD)" in line))]
        return [line for line in written if "tokens/s" not in line]

    assert answers(1) == answers(1) != answers(2)


def test_own_prompts_are_asked_first_as_chats(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    stream = LLM.stream_deltas
    monkeypatch.setattr(
        LLM, "stream_deltas", lambda llm, prompt, params: seen.append(prompt) or stream(llm, prompt, params)
    )
    done = demo("--model", "tiny-llama-draft", "--prompt", "Why?", "--prompt", "How?")
    assert done.exit_code == 0, done.output
    assert "\nWhy?\n" in done.stdout
    assert seen[:2] == [[{"role": "user", "content": text}] for text in ("Why?", "How?")]
    assert seen[2:4] == [QUESTIONS[0].text, QUESTIONS[1].text]


def test_texts_are_shown_as_they_are() -> None:
    """Catches square brackets swallowed as colours, indentation that is lost, and text that is not the output's."""
    console, text = Console(width=60), "def f(a):\n    a[i] = b[bold]\n"
    with LLM("tiny-llama-draft", device="cpu") as llm, console.capture() as shown:
        question = Question("", text, chat=False)
        output = write(llm, Asked(question, text, SamplingParams(max_new_tokens=8)), console, "somehow")
    assert text + output.text in shown.get()


def test_a_model_without_chats_is_asked_in_plain_text(make_model: Callable[[str], TestModel]) -> None:
    done = demo("--model", make_model("llama-tied").path)
    assert done.exit_code == 0, done.output
    assert "no chat template" in done.stdout
    assert "not an oracle" not in done.stdout


def test_a_report_about_a_graft_says_so(tmp_path: Path) -> None:
    graft = shutil.copytree(BUNDLE / "tiny-llama-draft", tmp_path / "graft")
    config = json.loads((graft / "config.json").read_text())
    (graft / "config.json").write_text(json.dumps(config | {"ssd_graft": {"base": "small", "shape": "large"}}))
    done = demo("--model", str(graft))
    assert done.exit_code == 0, done.output
    assert "graft of small in the shape of large" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--model", "tiny-lama"), "bundled model (tiny-llama"),
        (("--temperature", "-1"), "temperature=-1.0"),
    ],
)
def test_mistakes_are_explained_and_exit_with_one(arguments: tuple[str, ...], message: str) -> None:
    done = demo(*arguments)
    assert done.exit_code == 1
    assert message in done.stderr


def test_ctrl_c_exits_with_130(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(LLM, "stream_deltas", interrupted)
    assert demo("--model", "tiny-llama").exit_code == 130


@pytest.mark.parametrize("mode", mostly_slow(["ar", "sd", "ssd"], fast={"ssd"}))
def test_one_other_token_fails_the_demo(monkeypatch: pytest.MonkeyPatch, one_core: None, mode: str) -> None:
    """Catches a demo that claims equality without looking, and a further run that asks for something else."""
    generate = LLM.generate

    def altered(llm: LLM, prompts: Any, params: Any) -> list[RequestOutput]:
        outputs = generate(llm, prompts, params)
        assert {p.seed for p in (params if isinstance(params, list) else [params])} == {4}
        for output in outputs:
            if QUESTIONS[2].text in str(llm.engine.tokenizer.decode(output.prompt_token_ids)) and (
                llm.config.speculation.mode == mode
            ):
                sample = output.samples[0]
                output.samples[0] = replace(sample, token_ids=[*sample.token_ids[:-1], sample.token_ids[-1] + 1])
        return outputs

    monkeypatch.setattr(LLM, "generate", altered)
    done = demo("--model", "tiny-llama")
    assert done.exit_code == 1
    assert f"{QUESTIONS[2].title}: from token 8 on" in done.stderr
    assert "gave the same text" not in done.stdout


@pytest.mark.parametrize(
    ("other", "found"),
    [
        (([1, 2, 3], [4, 5]), None),
        (([1, 2, 3], [4, 6]), "second: from token 2 on"),
        (([1, 2, 3], [4]), "second: from token 2 on"),
        (([1, 2, 3], [4, 5, 6]), "second: from token 3 on"),
        (([0, 2, 3], [4, 6]), "first: from token 1 on"),
        (([], [4, 5]), "first: from token 1 on"),
    ],
)
def test_difference_names_the_first_token_that_is_not_the_same(other: tuple[list[int], ...], found: str | None) -> None:
    told = difference(asked("first", "second"), written([1, 2, 3], [4, 5]), written(*other))
    assert told is None if found is None else told is not None and told.startswith(found)
