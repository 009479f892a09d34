"""`ssd chat URL` and `ssd bench --peer URL` against a server of `ssd serve`, with an API key."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from live_server import MODEL, Served, serving
from typer.testing import CliRunner

from ssd import LLM, SamplingParams
from ssd.cli.main import app


@pytest.fixture(scope="module")
def guarded(llm: LLM) -> Iterator[Served]:
    with serving(llm, api_keys=("secret",)) as served:
        yield served


@pytest.fixture(autouse=True)
def key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    monkeypatch.setenv("SSD_API_KEY", "secret")


def test_a_chat_with_a_server_is_that_with_the_model(guarded: Served) -> None:
    """Every parameter arrives, and the conversation is remembered."""
    flags = ["--system", "Be brief.", "-m", "12", "-t", "0.8", "--top-k", "40", "--top-p", "0.9", "--min-p", "0.01"]
    flags += ["--repetition-penalty", "1.1", "--presence-penalty", "0.1", "--frequency-penalty", "0.1", "--seed", "5"]
    done = CliRunner().invoke(app, ["chat", guarded.url, *flags, "--stop", "zzz"], input="Who are you?\nWhy?\n")
    assert done.exit_code == 0, done.stderr
    params = SamplingParams(
        **{"temperature": 0.8, "top_k": 40, "top_p": 0.9, "min_p": 0.01, "repetition_penalty": 1.1, "seed": 5},
        **{"presence_penalty": 0.1, "frequency_penalty": 0.1, "max_tokens": 12, "stop": ["zzz"]},
    )
    messages, texts = [{"role": "system", "content": "Be brief."}], []
    for question in ("Who are you?", "Why?"):
        messages.append({"role": "user", "content": question})
        texts.append(guarded.llm.chat(messages, params)[0].text)
        messages.append({"role": "assistant", "content": texts[-1]})
    assert done.stdout == "".join(f"{text}\n" for text in texts)


def test_a_chat_says_that_an_answer_was_cut_off(guarded: Served) -> None:
    done = CliRunner().invoke(app, ["chat", guarded.url, "-m", "3"], input="Tell me a story.\n")
    assert "(cut off: the length limit)" in done.stderr


def test_a_chat_needs_the_server_s_key(guarded: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SSD_API_KEY", "wrong")
    done = CliRunner().invoke(app, ["chat", guarded.url], input="Hello\n")
    assert done.exit_code == 1
    assert "401" in done.stderr
    assert "OPENAI_API_KEY" in done.stderr
    assert "wrong" not in done.stderr


@pytest.mark.parametrize(
    "flags",
    [["--draft", "tiny-llama-draft"], ["--k", "auto"], ["--device", "cpu"], ["--eager"], ["--colour"]],
)
def test_options_of_the_engine_are_refused_with_a_server(guarded: Served, flags: list[str]) -> None:
    done = CliRunner().invoke(app, ["chat", guarded.url, *flags], input="Hello\n")
    assert done.exit_code == 1
    assert f"{flags[0]}: a server answers" in done.stderr


def test_a_benchmark_beside_a_server(guarded: Served, tmp_path: Path) -> None:
    file = tmp_path / "report.json"
    flags = ["--compare", "ar", "--sets", "gsm8k", "--prompts", "1", "-m", "6", "--repeats", "1", "--device", "cpu"]
    done = CliRunner().invoke(app, ["bench", MODEL, *flags, "--peer", guarded.url, "--json", str(file)])
    assert done.exit_code == 0, done.stderr
    report = json.loads(file.read_text())
    assert "secret" not in file.read_text() + done.output
    peer = guarded.url.removeprefix("http://")
    assert peer in done.stdout
    assert peer in json.dumps(report)
    assert "refuses" not in done.output, "the server knows all fields of the requests"
