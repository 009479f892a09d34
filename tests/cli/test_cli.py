"""The `ssd` command, run as a user would."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from inspect import getdoc
from pathlib import Path

import pytest
import typer.main
from conftest import TestModel, mostly_slow
from typer.testing import CliRunner

from ssd.cli.main import app
from ssd.version import VERSION


@pytest.fixture(scope="module")
def path(make_model: Callable[[str], TestModel]) -> str:
    return make_model("llama-tied").path


def ssd(*arguments: str, text: str = "") -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "ssd", *arguments]
    return subprocess.run(command, capture_output=True, text=True, input=text, check=False, timeout=120)


def test_help_teaches() -> None:
    done = ssd("--help")
    assert done.returncode == 0
    assert "generate" in done.stdout
    assert "ssd generate MODEL" in done.stdout
    assert "ssd demo" in done.stdout
    assert "ssd explain" in done.stdout
    flags = CliRunner().invoke(app, ["generate", "--help"]).stdout
    for flag in ("--temperature", "--mode", "--draft", "--k", "--fan-out", "--budget", "--backup", "--placement"):
        assert flag in flags
    assert "--draft-replicas" in flags
    for command in ("generate", "chat", "bench", "explain"):
        assert "--draft-quantization" in CliRunner().invoke(app, [command, "--help"]).stdout


@pytest.mark.parametrize("name", ["", *typer.main.get_command(app).commands])  # type: ignore[attr-defined]
def test_help_has_whole_names_on_a_narrow_terminal(name: str) -> None:
    """Catches `--max-num-…`: a name that cannot be typed."""
    main = typer.main.get_command(app)
    command = main.commands[name] if name else main  # type: ignore[attr-defined]
    shown = CliRunner(env={"COLUMNS": "80"}).invoke(app, [*name.split(), "--help"]).stdout
    assert {len(line) for line in shown.splitlines()} <= {0, 80}
    words = {word for line in shown.splitlines() for word in re.split(r"[\s,/]+", line)}
    names = {option for each in command.params for option in (*each.opts, *each.secondary_opts) if option[0] == "-"}
    assert {"--help", *names} <= words
    assert not re.search(r"-[\w-]*…", shown)


def test_the_version_has_what_a_bug_report_needs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Catches a report from which nobody sees the machine, or that its CPU kernels are not the exact ones."""
    said = CliRunner().invoke(app, ["version"]).stdout
    for part in (f"ssd: {VERSION}\n", "Python: 3.", "torch 2.", " cores\n", ", compiled with ", "GPUs: "):
        assert part in said
    monkeypatch.setattr("ssd.kernels.cpu.build.find_compiler", lambda: None)
    monkeypatch.setattr("ssd.kernels.cpu.build.FOLDER", tmp_path)  # no kernels of the package beside it
    said = CliRunner().invoke(app, ["version"]).stdout
    assert "CPU kernels: there are no CPU kernels: no C compiler found, and the package was" in said


def test_the_version_is_an_option_too() -> None:
    done = CliRunner().invoke(app, ["--version"])
    assert (done.exit_code, done.stdout) == (0, f"ssd {VERSION}\n")


def test_help_and_version_do_not_wait_for_torch() -> None:
    """Torch's import takes seconds."""
    code = "import sys, ssd.cli.main; print({'torch', 'numpy', 'transformers', 'fastapi'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout == "set()\n", done.stdout + done.stderr


@pytest.mark.parametrize("command", [[], ["generate"], ["serve"], ["bench"], ["bench", "serve"]])
def test_help_shows_no_type_of_flags_without_a_value(command: list[str]) -> None:
    shown = CliRunner().invoke(app, [*command, "--help"]).stdout
    assert "--help" in shown
    assert "<bool>" not in shown
    assert "<int>" in shown or not command


def test_metrics_are_one_line_in_a_pipe(path: str) -> None:
    done = CliRunner().invoke(app, ["generate", path, "hello", "-m", "4", "-t", "1", "--metrics"])
    [line] = [line for line in done.stderr.splitlines() if "prompt tokens" in line]
    assert "seed" in line


def test_help_has_no_line_breaks_inside_a_paragraph() -> None:
    """They would be kept, whatever the width of the terminal."""
    texts = [app.info.help, *(command.help or getdoc(command.callback) for command in app.registered_commands)]
    for text in texts:
        assert isinstance(text, str)
        assert not [part for part in text.split("\n\n") if "\n" in part.strip()]


def here(*arguments: str, text: str = "") -> subprocess.CompletedProcess[str]:
    done = CliRunner().invoke(app, arguments, input=text)
    return subprocess.CompletedProcess(arguments, done.exit_code, done.stdout, done.stderr)


@pytest.mark.parametrize("run", mostly_slow([here, ssd], fast={here}))
def test_generate_prints_the_text_and_nothing_else(
    path: str, run: Callable[..., subprocess.CompletedProcess[str]]
) -> None:
    done = run("generate", path, "hello", "-m", "12", "--ignore-eos", "--metrics", "--device", "cpu")
    assert done.returncode == 0, done.stderr
    assert "12 new" in done.stderr.replace("\n", " ")
    flags = ["generate", path, "-", "-m", "12", "--ignore-eos", "--device", "cpu"]
    piped = CliRunner().invoke(app, flags, input="hello")
    assert piped.stdout == done.stdout != ""
    assert "INFO" not in done.stderr + piped.stderr


@pytest.mark.slow
def test_verbose_logs_what_the_engine_does_on_stderr(path: str) -> None:
    """Catches a log in the text, and one without device, dtype, kernels, memory, KV blocks or drafter."""
    done = ssd("-v", "generate", path, "hello", "-m", "4", "--ignore-eos", "--device", "cpu", "--draft", "suffix")
    assert done.returncode == 0, done.stderr
    lines = [line.removeprefix("INFO ") for line in done.stderr.splitlines() if line.startswith("INFO ")]
    wanted = (
        ["reading the weights of"],
        ["MiB of weights in float32 on cpu", "kernels, loaded in"],
        ["KV: num_kv_blocks="],
        ["mode=sd, draft=suffix"],
    )
    for line, words in zip(lines, wanted, strict=True):
        assert all(word in line for word in words)
    assert "INFO" not in done.stdout


def test_json_holds_everything(path: str) -> None:
    flags = ["-m", "4", "-n", "2", "-t", "1.0", "--seed", "5", "--json", "--device", "cpu"]
    done = CliRunner().invoke(app, ["generate", path, "hello", *flags])
    answer = json.loads(done.stdout)
    assert len(answer["samples"]) == 2
    assert answer["samples"][0]["metrics"]["prompt_tokens"] == 5
    assert answer["prompt"] == "hello"


def test_a_sample_can_be_had_again_from_the_json_alone(path: str) -> None:
    """Without --seed a seed is drawn. Catches one that is not reported, or not the one that was used."""
    flags = ["-m", "8", "-t", "1.5", "--top-k", "40", "--logit-bias", "3=-inf", "--json", "--device", "cpu"]
    first = json.loads(CliRunner().invoke(app, ["generate", path, "hello", *flags, "-n", "2"]).stdout)
    params = first["params"]
    assert (params["temperature"], params["top_k"], params["logit_bias"]) == (1.5, 40, {"3": "-inf"})
    assert first["samples"][0]["seed"] == params["seed"]
    for sample in first["samples"]:
        again = CliRunner().invoke(app, ["generate", path, "hello", *flags, "--seed", str(sample["seed"])])
        assert json.loads(again.stdout)["samples"][0]["token_ids"] == sample["token_ids"]


def test_a_bias_and_penalties_reach_the_sampler(path: str) -> None:
    def tokens(*flags: str) -> list[int]:
        done = CliRunner().invoke(app, ["generate", path, "hi", "-m", "8", "--ignore-eos", "--json", *flags])
        return list(json.loads(done.stdout)["samples"][0]["token_ids"])

    assert tokens("--logit-bias", "7=1000", "--logit-bias", "9=-inf") == [7] * 8
    assert len(set(tokens("--logit-bias", "7=1000", "--presence-penalty", "100"))) == 1
    assert len(set(tokens("--logit-bias", "7=90", "--presence-penalty", "100"))) > 1
    assert len(set(tokens("--logit-bias", "7=190", "--frequency-penalty", "100"))) > 1


@pytest.mark.parametrize("text", ["7", "7=", "x=1", "=1"])
def test_a_bias_that_makes_no_sense_is_explained(path: str, text: str) -> None:
    done = CliRunner().invoke(app, ["generate", path, "hi", "--logit-bias", text])
    assert done.exit_code == 2
    assert "must be ID=VALUE" in done.stderr


def test_log_probabilities_are_shown(path: str) -> None:
    arguments = ["generate", path, "hello", "-m", "3", "--ignore-eos", "--logprobs", "2", "--device", "cpu"]
    done = CliRunner().invoke(app, arguments)
    found = json.loads(CliRunner().invoke(app, [*arguments, "--json"]).stdout)["samples"][0]["logprobs"]
    assert [len(token["top"]) for token in found] == [2, 2, 2]
    assert "log-probability" in done.stderr
    assert all(f"{token['logprob']:.2f}" in done.stderr for token in found)
    assert "log-probability" not in done.stdout


@pytest.mark.parametrize("command", ["generate", "chat", "explain", "bench", "demo"])
def test_every_command_calls_it_max_tokens(command: str) -> None:
    shown = CliRunner().invoke(app, [command, "--help"]).stdout
    assert "--max-tokens" in shown
    assert "--tokens" not in shown


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("no/such-model", "hi"), "no/such-model"),
        (("/no/[red]such[/x]", "hi"), "/no/[red]such[/x]"),
        (("PATH", "hi", "-t", "-1"), "temperature=-1.0"),
        (("PATH", "hi", "--chat"), "chat template"),
        (("PATH", "hi", "--device", "tpu"), "device='tpu'"),
    ],
)
def test_mistakes_are_explained_and_exit_with_one(path: str, arguments: tuple[str, ...], message: str) -> None:
    done = CliRunner().invoke(app, ["generate", *(path if a == "PATH" else a for a in arguments)])
    assert done.exit_code == 1
    assert isinstance(done.exception, SystemExit)
    assert message in " ".join(done.stderr.split())


def test_a_mistake_shows_no_traceback() -> None:
    done = ssd("generate", "tiny-llama", "hi", "-t", "-1")
    assert done.returncode == 1
    assert "temperature=-1.0" in done.stderr
    assert "Traceback" not in done.stderr


def test_usage_errors_exit_with_two() -> None:
    for arguments in (["generate"], ["frobnicate"]):
        assert CliRunner().invoke(app, arguments).exit_code == 2


def test_speculation_changes_the_speed_and_nothing_else() -> None:
    arguments = ("tiny-llama", "Once upon a time", "-m", "24", "-t", "0.8", "--seed", "4", "--device", "cpu")
    flags = ("--draft", "tiny-llama-draft", "--mode", "ssd", "--k", "3", "--fan-out", "2", "--placement", "inline")
    flags = (*flags, "--draft-quantization", "int8")
    plain = CliRunner().invoke(app, ["generate", *arguments])
    drafted = CliRunner().invoke(app, ["generate", *arguments, *flags, "--metrics"])
    assert drafted.exit_code == 0, drafted.output
    assert plain.stdout == drafted.stdout != ""
    assert "drafts prepared" in drafted.stderr.replace("\n", " ")


@pytest.mark.parametrize(
    ("flags", "code", "message"),
    [
        (("--mode", "turbo"), 1, "must be one of ar, sd, ssd, auto"),
        (("--mode", "suffix"), 1, "mode='sd' with draft='suffix'"),
        (("--mode", "eagle3"), 1, "an EAGLE-3 head is a draft"),
        (("--draft", "tiny-llama-eagel"), 1, "did you mean tiny-llama-eagle?"),
        (("--mode", "ssd"), 1, "needs a draft"),
        (("--draft", "tiny-llama-draft", "--draft-quantization", "int3"), 2, "'int4'"),
        (("--draft", "tiny-llama-draft", "--budget", "8"), 1, 'use mode="ssd"'),
        (("--draft", "suffix", "--budget", "8"), 1, "leave it out"),
    ],
)
def test_wrong_flags_are_explained(flags: tuple[str, ...], code: int, message: str) -> None:
    done = CliRunner().invoke(app, ["generate", "tiny-llama", "hi", *flags])
    assert done.exit_code == code
    assert message in done.stderr.replace("\n", " ")


def test_ctrl_c_ends_cleanly(path: str) -> None:
    """And what was written until then is the text."""
    command = [
        sys.executable,
        "-m",
        "ssd",
        "generate",
        path,
        "hello",
        "-m",
        "100000",
        "--ignore-eos",
        "--device",
        "cpu",
    ]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    begun = os.read(process.stdout.fileno(), 1).decode()  # it is writing
    time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    rest, errors = process.communicate(timeout=30)
    assert process.returncode in (0, 130)  # 0: a small model reaches its maximum length before the signal
    expected = here("generate", path, "hello", "-m", "12", "--ignore-eos", "--device", "cpu").stdout.rstrip("\n")
    written = (begun + rest).rstrip("\n")
    assert begun
    assert written.startswith(expected[: len(written)])
    assert "Traceback" not in errors
