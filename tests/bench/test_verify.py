"""`ssd verify`: what is equal is found equal in every way that was named, and what is not is found and shown."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import mostly_slow
from fake_server import PIECES, serving
from typer.testing import CliRunner

from ssd.bench.answers import Answer, RequestSettings
from ssd.bench.comparison import Comparison, Token, Verification
from ssd.bench.serve import Result
from ssd.cli.main import app
from ssd.core import FinishReason, Outcome
from ssd.engine.outputs import OutputProcessor
from ssd.sampling.sampler import top_logprobs

SHORT = ("--sets", "alpaca", "--prompts", "1", "--max-tokens", "24", "--batch", "2")
PLAIN = (*SHORT, "--device", "cpu", "--no-chat")  # for a model without a chat template, and without a draft
ASKED = [("Once", RequestSettings(8, seed=3)), ("Twice", RequestSettings(8, 1.0, seed=4))]


def wrote(*tokens: tuple[str, float], text: str = "") -> Result:
    return Result(0.0, Answer(0.0, 1, text, token_ids=[ord(t[0]) for t in tokens], logprobs=list(tokens)))


def said(text: str) -> Result:
    return Result(0.0, Answer(0.0, 1, text))


def verified(tmp_path: Path, *arguments: str, code: int = 0) -> dict[str, Any]:
    """The JSON of a run with this exit code."""
    file = tmp_path / "verified.json"
    done = CliRunner().invoke(app, ["verify", *arguments, "--json", str(file)])
    assert done.exit_code == code, done.output
    return json.loads(file.read_text()) | {"output": done.output}  # type: ignore[no-any-return]


# --- comparing --------------------------------------------------------------------------------------------------------


def test_the_first_difference_is_shown_with_both_tokens() -> None:
    reference = [wrote(("a", -1.0), ("b", -2.0)), wrote(("c", -1.5))]
    found = [wrote(("a", -1.0), ("x", -3.0), ("b", -2.0)), wrote(("c", -1.5))]
    one = Comparison.of("sd", ASKED, reference, found)
    assert (one.requests, one.different_requests, one.compared, one.different) == (2, 1, 3, 2)
    assert one.first_difference is not None
    first = one.first_difference
    assert (first.prompt, first.temperature, first.seed, first.position) == ("Once", 0.0, 3, 1)
    assert (first.reference, first.found) == (Token("b", ord("b"), -2.0), Token("x", ord("x"), -3.0))
    assert "position 1: 'b', token 98, logprob -2.0 in the reference, 'x', token 120, logprob -3.0 here" in str(first)


@pytest.mark.parametrize(
    ("one", "other", "different"),
    [
        (-1.0, math.nextafter(-1.0, 0.0), 1),
        (0.0, -0.0, 1),
        (math.nan, -math.nan, 0),  # NaN is equal to none, also not to itself
        (-0.1, -0.1, 0),
    ],
)
def test_log_probabilities_are_compared_to_the_bit(one: float, other: float, different: int) -> None:
    assert Comparison.of("sd", ASKED[:1], [wrote(("a", one))], [wrote(("a", other))]).different == different


def test_ends_texts_and_failures_count() -> None:
    """Catches an answer that ends early, the same tokens with another text, and a failure that passes for equal."""
    shorter = Comparison.of("sd", ASKED[:1], [wrote(("a", -1.0), ("b", -1.0))], [wrote(("a", -1.0))])
    assert (shorter.different, shorter.first_difference and shorter.first_difference.found) == (1, None)
    other = Comparison.of("sd", ASKED[:1], [wrote(("a", -1.0), text="ab")], [wrote(("a", -1.0), text="ac")])
    assert (other.unit, other.different, other.compared) == ("characters", 1, 2)
    plain = Comparison.of("sd", ASKED, [said("ab"), said("cd")], [said("ab"), Result(0.0, None, "timeout")])
    assert (plain.unit, plain.requests, plain.different, plain.errors) == ("characters", 1, 0, ["timeout"])
    report = Verification("", {}, [plain, plain], {})
    assert report.equal
    assert not report.complete
    assert not Verification("", {}, [plain], {}).complete  # a reference alone


# --- a model ----------------------------------------------------------------------------------------------------------

CONDITIONS = ("one at a time", "2 at a time", "prompts from the prefix cache", "prompts in chunks, 5", "short of KV")


@pytest.mark.parametrize(
    ("model", "options"),
    mostly_slow(
        [
            (None, ("--placement", "inline", "--k", "2", "--budget", "4", "--no-chat")),
            ("tiny-llama", ("--draft", "tiny-llama-draft")),
            ("tiny-llama", ("--draft", "tiny-llama-eagle", "--dtype", "bfloat16")),
            ("tiny-qwen3", ("--draft", "tiny-qwen3-draft", "--quantization", "int4", "--kv-cache-dtype", "fp8")),
        ],
        fast={(None, ("--placement", "inline", "--k", "2", "--budget", "4", "--no-chat"))},
    ),
)
def test_a_model_writes_the_same_in_every_way(
    tmp_path: Path, llama: Path, model: str | None, options: tuple[str, ...]
) -> None:
    """And every way has shown what it is for: catches one in which nothing was drafted, cached or preempted.

    Without a name: a random model that drafts for itself.
    """
    page = tmp_path / "page.html"
    if model is None:
        model, options = str(llama), ("--draft", str(llama), *options)
    report = verified(tmp_path, model, "--device", "cpu", *SHORT, *options, "--html", str(page))
    assert report["equal"]
    assert report["complete"]
    assert report["not_compared"] == {}
    counts = {each["way"]: each["counts"] for each in report["comparisons"]}
    for mode in ("ar", "sd", "ssd", "auto"):
        names = [way for way in counts if way.startswith(f"{mode}, ")]
        assert len(names) == len(CONDITIONS)
        assert all(name.startswith(f"{mode}, {each}") for name, each in zip(names, CONDITIONS, strict=True))
        assert all(bool(counts[name].get("look_ups")) == (mode == "ssd") for name in names if mode != "auto")
        assert all(bool(counts[name].get("drafted")) == (mode != "ar") for name in names if mode != "auto")
        assert counts[names[2]]["cached_tokens"] > 0
        assert counts[names[4]]["preemptions"] > 0
    assert {each["requests"] for each in report["comparisons"]} == {2}
    assert {"ssd", "python", "command", "commit", "date", "machine", "settings", "notes"} <= report.keys()
    assert report["settings"]["engine"]["speculation"]["draft"] == options[1]
    assert "No difference." in report["output"]
    assert "No difference." in page.read_text()
    assert "short of KV blocks" in page.read_text()


def test_what_cannot_be_compared_is_said(tmp_path: Path, llama: Path) -> None:
    """N-gram look-up prepares nothing; a request of one token drafts nothing."""
    report = verified(tmp_path, str(llama), *PLAIN, "--max-tokens", "1")
    assert report["not_compared"]["ssd"] == "draft suffix prepares nothing: name a draft model or an EAGLE head"
    assert report["not_compared"]["sd, one at a time"] == "nothing was drafted"
    assert "not compared: ssd: draft suffix" in report["output"]


def test_a_token_that_a_preemption_changes_is_found(
    tmp_path: Path, llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    append = OutputProcessor.append

    def changed(self: OutputProcessor, outcome: Outcome) -> FinishReason | None:
        if self.sequence.metrics.preemptions:
            outcome = outcome._replace(token_ids=tuple(token ^ 1 for token in outcome.token_ids))
        return append(self, outcome)

    monkeypatch.setattr(OutputProcessor, "append", changed)
    report = verified(tmp_path, str(llama), *PLAIN, code=1)
    assert not report["equal"]
    ways = {each["way"]: each for each in report["comparisons"]}
    assert {way for way, each in ways.items() if each["different"]} == {
        f"{mode}, short of KV blocks" for mode in ("ar", "sd", "auto")
    }
    first = ways["ar, short of KV blocks"]["first_difference"]
    assert first["found"]["token_id"] == first["reference"]["token_id"] ^ 1
    assert first["position"] > 0
    assert "There are differences." in report["output"]


def test_a_log_probability_that_the_batch_changes_is_found(
    tmp_path: Path, llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By less than a millionth: the tokens are the same."""

    def summed_otherwise(logits: torch.Tensor, tokens: torch.Tensor, count: int) -> tuple[torch.Tensor, ...]:
        own, ids, values = top_logprobs(logits, tokens, count)
        return (own * (1 + 2**-40) if len(own) > 1 else own), ids, values

    monkeypatch.setattr("ssd.execution.target.top_logprobs", summed_otherwise)
    report = verified(tmp_path, str(llama), *PLAIN, code=1)
    reference, company = report["comparisons"][:2]
    assert (reference["different"], company["way"]) == (0, "ar, 2 at a time")
    first = company["first_difference"]
    assert first["found"]["token_id"] == first["reference"]["token_id"]
    assert first["found"]["logprob"] == pytest.approx(first["reference"]["logprob"], rel=1e-9)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("no/such-model",), "no/such-model"),
        (("tiny-llama", "--batch", "1"), "batch=1: must be at least 2"),
        (("tiny-llama", "--model", "other"), "names a model of a server"),
        (("tiny-llama", "--html", "page.pdf"), "the name must end in .html"),
        (("tiny-llama", "--bogus"), "--bogus"),
        (("http://127.0.0.1:9", "--dtype", "bfloat16", "--k", "3"), "--k, --dtype: chosen by the server"),
        (("http://127.0.0.1:9",), "no server answers"),
        (("FAKE", *SHORT), "1 prompts: both must be at least 2"),
    ],
)
def test_what_cannot_be_asked_exits_with_two(arguments: tuple[str, ...], message: str) -> None:
    """1 is kept for differences."""
    with serving() as server:
        done = CliRunner().invoke(app, ["verify", *(server.url if each == "FAKE" else each for each in arguments)])
    assert done.exit_code == 2
    assert message in done.stderr


# --- a server ---------------------------------------------------------------------------------------------------------


def test_a_server_of_ssd_is_equal_to_itself(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    """Completions and chats, with log-probabilities."""
    pytest.importorskip("fastapi", reason="the extra `serve` is not installed")
    url = request.getfixturevalue("served").url
    report = verified(tmp_path, f"{url}/v1", *SHORT, "--sets", "alpaca,humaneval", "--prompts", "2", "--batch", "4")
    assert report["equal"]
    assert report["complete"]
    assert report["not_compared"] == {}
    assert {each["unit"] for each in report["comparisons"]} == {"tokens"}
    assert [each["way"] for each in report["comparisons"] if "1," in each["way"]] == [
        f"temperature 1, {way}"
        for way in ("one at a time: the reference", "one at a time, again", "2 at a time", "4 at a time")
    ]
    assert {each["requests"] for each in report["comparisons"]} == {4}
    assert report["settings"]["url"] == url


def test_a_server_that_answers_otherwise_in_company_is_found(tmp_path: Path) -> None:
    """It gives no log-probabilities: characters are compared."""
    with serving("sociable") as server:
        report = verified(tmp_path, server.url, *SHORT, "--prompts", "4", "--batch", "4", code=1)
    ways = {each["way"].partition(", ")[2]: each for each in report["comparisons"]}
    assert ways["one at a time, again"]["different"] == 0
    for company in (ways["2 at a time"], ways["4 at a time"]):
        assert company["unit"] == "characters"
        assert company["different_requests"] >= 2
        first = company["first_difference"]
        assert first["position"] >= len("".join(PIECES[:-1]))
        assert first["found"]["text"] == first["reference"]["text"].upper()
    assert "log-probabilities" in report["not_compared"]


def test_fields_that_a_server_refuses_are_no_failure(tmp_path: Path) -> None:
    with serving("strict") as server:
        report = verified(tmp_path, server.url, *SHORT, "--prompts", "2")
    assert report["complete"]
    assert report["not_compared"]["temperature 1"] == "the server takes no seed"
    assert "the server refuses logprobs and seed: sent without" in report["notes"]


@pytest.mark.parametrize("behaviour", ["refuses", "dies"])
def test_requests_that_fail_are_reported_one_by_one(tmp_path: Path, behaviour: str) -> None:
    with serving(behaviour) as server:
        report = verified(tmp_path, server.url, *SHORT, "--prompts", "2", code=2)
    assert report["equal"]
    assert not report["complete"]
    assert all(len(each["errors"]) == 2 for each in report["comparisons"])
    assert "failed: " in report["output"]


def test_help_teaches() -> None:
    assert "ssd verify MODEL --draft DRAFT" in CliRunner().invoke(app, ["--help"]).stdout
    shown = CliRunner().invoke(app, ["verify", "--help"]).stdout
    assert all(word in shown for word in ("ssd verify tiny-llama", "--draft", "--html", "preempted", "URL"))
