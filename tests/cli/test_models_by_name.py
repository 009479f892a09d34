"""`ssd pull`, `ssd list` and `ssd run`, with a stand-in of the hub."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import gguf_files
import pytest
import typer
from conftest import save_model
from safetensors import safe_open
from stand_in_hub import StandInHub
from typer.testing import CliRunner, Result

from ssd import LLM, SamplingParams
from ssd.assembly.inventory import suggested_draft
from ssd.cli.main import app
from ssd.cli.pull import download_shown
from ssd.models.hub import HubName

LIGHT = """
import sys
from ssd.cli.main import app
try: app()
finally: print([name for name in ("torch", "httpx", "httpx2") if name in sys.modules], file=sys.stderr)
"""


def ssd(*arguments: str, text: str | None = None) -> Result:
    return CliRunner().invoke(app, arguments, input=text)


def in_a_process(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", LIGHT, *arguments]
    return subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=120, env={**os.environ, **environment}
    )


def two_ggufs(folder: Path) -> dict[str, bytes]:
    arrays, kinds = gguf_files.stored_model()
    path = gguf_files.write(folder / "tiny.gguf", "llama", gguf_files.VALUES, arrays, kinds)
    return {"tiny-Q4_K_M.gguf": path.read_bytes(), "tiny-Q8_0.gguf": b"not a model", "README.md": b"# tiny"}


# --- ssd pull ---------------------------------------------------------------------------------------------------------


def test_pull_prints_the_path_and_what_was_chosen(hub: StandInHub, tmp_path: Path) -> None:
    hub.add("org/tiny", two_ggufs(tmp_path))
    done = ssd("pull", "org/tiny")
    assert done.exit_code == 0, done.output
    assert Path(done.stdout.strip()).name == "tiny-Q4_K_M.gguf"
    assert "org/tiny: tiny-Q4_K_M.gguf (Q4_K_M unless you name another), " in done.stderr
    assert "ssd run org/tiny" in done.stderr
    asked = len(hub.asked)
    again = ssd("pull", "org/tiny:Q4_K_M")
    assert (again.exit_code, again.stdout, len(hub.asked)) == (0, done.stdout, asked)
    assert "org/tiny:Q4_K_M is there" in again.stderr
    other = ssd("pull", "org/tiny", "--file", "*q8*.gguf")
    assert other.stdout.strip().endswith("tiny-Q8_0.gguf")
    assert "unless you name another" not in other.stderr


def test_wrong_names_and_unclear_files_end_with_1(hub: StandInHub, tmp_path: Path) -> None:
    hub.add("org/tiny", two_ggufs(tmp_path))
    for arguments, said in (
        (["tiny-llama"], "must be the name of a model on the hub"),
        (["org/tiny:Q8_0", "--file", "Q4_K_M"], "leave one of them out"),
        (["org/tiny", "--file", "*"], "tiny-Q8_0.gguf\n"),
        (["org/none"], "there is no"),
        (["org/tiny", "--revision", "v9"], "no such revision"),
    ):
        done = ssd("pull", *arguments)
        assert (done.exit_code, done.stdout) == (1, "")
        assert said in done.stderr


def test_pull_of_what_is_there_needs_no_network_and_nothing_heavy(hub: StandInHub, llama: Path) -> None:
    """Also: HF_ENDPOINT, HF_HOME and HF_TOKEN of the environment are used."""
    hub.add("org/tiny", llama, gated=True, token="hf_right")
    done = in_a_process("pull", "org/tiny", HF_TOKEN="hf_right")
    assert done.returncode == 0, done.stderr
    asked = len(hub.asked)
    again = in_a_process("pull", "org/tiny")
    assert (again.returncode, again.stdout, len(hub.asked)) == (0, done.stdout, asked)
    assert again.stderr.splitlines() == ["org/tiny is there", "[]"]


@pytest.mark.slow
def test_a_pull_that_is_not_allowed(hub: StandInHub, llama: Path) -> None:
    hub.add("org/tiny", llama, gated=True, token="hf_right")
    refused = in_a_process("pull", "org/tiny")
    assert refused.returncode == 1
    assert "org/tiny is gated: accept its licence at" in refused.stderr
    offline = in_a_process("pull", "org/other", HF_HUB_OFFLINE="1")
    assert offline.returncode == 1
    assert "HF_HUB_OFFLINE is set: unset it to download" in offline.stderr


def test_ctrl_c_leaves_what_the_next_pull_goes_on_with(hub: StandInHub, tmp_path: Path) -> None:
    content = bytes(range(256)) * 20_000
    hub.add("org/tiny", {"tiny.gguf": content})
    hub.delay = 0.02
    process = subprocess.Popen(
        [sys.executable, "-c", LIGHT, "pull", "org/tiny"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    blobs = tmp_path / "home" / "hub" / "models--org--tiny" / "blobs"
    deadline = time.monotonic() + 60
    while not any(file.stat().st_size > 200_000 for file in blobs.glob("*.incomplete")):
        assert time.monotonic() < deadline, process.poll()
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "Interrupted: what was downloaded is kept" in said
    assert "Traceback" not in said
    [partial] = blobs.glob("*.incomplete")
    begun = partial.stat().st_size
    hub.delay = 0.0
    done = ssd("pull", "org/tiny")
    assert done.exit_code == 0, done.output
    assert hub.ranges()[-1] == f"bytes={begun}-"
    assert Path(done.stdout.strip()).read_bytes() == content


# --- ssd list ---------------------------------------------------------------------------------------------------------


def test_list_has_what_can_be_run_and_all_has_the_rest(hub: StandInHub, llama: Path, tmp_path: Path) -> None:
    hub.add("org/llama", llama)
    hub.add("org/tiny", two_ggufs(tmp_path))
    config = json.loads((llama / "config.json").read_text())
    other = {**{file.name: file.read_bytes() for file in llama.iterdir()}}
    other["config.json"] = json.dumps({**config, "architectures": ["OtherForCausalLM"], "model_type": "other"}).encode()
    hub.add("org/other", other)
    for name in ("org/llama", "org/tiny", "org/tiny:Q8_0", "org/other"):
        assert ssd("pull", name).exit_code == 0
    (tmp_path / "home" / "hub" / "models--org--begun" / "snapshots" / ("a" * 40)).mkdir(parents=True)
    models = {each["name"]: each for each in json.loads(ssd("list", "--json").stdout)}
    assert {"tiny-llama", "tiny-llama-draft", "org/llama", "org/tiny:Q4_K_M"} <= models.keys()
    assert not {"org/other", "org/tiny:Q8_0", "org/begun", "tiny-llama-eagle"} & models.keys()
    assert models["org/tiny:Q4_K_M"]["format"] == "GGUF Q4_K_M"
    assert models["org/llama"]["format"] == "float32"
    assert models["org/llama"]["size"] == sum(file.stat().st_size for file in llama.glob("*.safetensors"))
    stored = [safe_open(file, "pt") for file in llama.glob("*.safetensors")]
    counts = [math.prod(file.get_slice(name).get_shape()) for file in stored for name in file.keys()]  # noqa: SIM118
    assert models["org/llama"]["parameters"] == sum(counts)
    text = ssd("list").stdout
    assert "org/llama" in text
    assert "12.7 M" in text
    assert "cannot be run" not in text
    everything = {each["name"]: each["obstacle"] for each in json.loads(ssd("list", "--all", "--json").stdout)}
    assert "not a whole GGUF file" in everything["org/tiny:Q8_0"]
    assert "OtherForCausalLM" in everything["org/other"]
    assert "ssd pull org/begun" in everything["org/begun"]
    assert "cannot be run" in ssd("list", "--all").stdout


# --- ssd run ----------------------------------------------------------------------------------------------------------

QUICK = ("--device", "cpu", "-m", "6")


def test_run_downloads_answers_once_and_exits(hub: StandInHub, llama: Path) -> None:
    hub.add("org/tiny", llama)
    done = ssd("run", "org/tiny", "Hello", *QUICK)
    assert done.exit_code == 0, done.output
    assert "org/tiny: " in done.stderr
    assert "cut off after 6 tokens" in done.stderr
    assert done.stdout.endswith("\n")
    asked = len(hub.asked)
    again = ssd("run", "org/tiny", "-", *QUICK, text="Hello")
    assert (again.stdout, len(hub.asked)) == (done.stdout, asked)


def test_a_person_is_asked_before_a_large_download(hub: StandInHub, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.add("org/tiny", {"tiny.gguf": b"x" * 2000})
    monkeypatch.setattr("sys.stdin", SimpleNamespace(isatty=lambda: True))
    asked: list[str] = []
    monkeypatch.setattr("typer.confirm", lambda text, **_: asked.append(text))
    with pytest.raises(typer.Exit) as ended:
        download_shown(HubName("org/tiny"), ask_beyond=1999)
    assert (ended.value.exit_code, asked, hub.fetched()) == (1, ["Download 0.0 MB?"], [])
    download_shown(HubName("org/tiny"), ask_beyond=2000)
    assert len(asked) == 1


def test_run_without_a_prompt_is_a_conversation(hub: StandInHub, llama: Path) -> None:
    hub.add("org/tiny", llama)
    done = ssd("run", "org/tiny", *QUICK, "--metrics", text="Hello\nAnd then?\n")
    assert done.exit_code == 0, done.output
    assert "the whole chat: 12 tokens" in done.stderr


def test_every_command_takes_the_name_of_a_gguf_file(hub: StandInHub, tmp_path: Path) -> None:
    hub.add("org/tiny", two_ggufs(tmp_path))
    done = ssd("generate", "org/tiny:Q5_K", "x", *QUICK)
    assert done.exit_code == 1
    assert "model='org/tiny:Q5_K' was found as a whole in none of these places" in done.stderr
    assert "tiny-Q4_K_M.gguf\n" in done.stderr
    with LLM("org/tiny:Q4_K_M", device="cpu") as llm:
        [output] = llm.generate([[1, 2, 3]], SamplingParams(max_new_tokens=4, ignore_eos=True))
        assert len(output.token_ids) == 4
        assert llm.path.name == "tiny-Q4_K_M.gguf"
    missing = ssd("run", "org/missing", "x", *QUICK)
    assert missing.exit_code == 1
    assert "there is no" in missing.stderr


def test_a_smaller_model_of_the_same_tokenizer_is_suggested(
    hub: StandInHub, llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches a draft of another tokenizer, one that is too large, and an answer that a draft has changed."""
    import conftest

    hub.add("org/small", llama)
    monkeypatch.setattr(conftest, "SHAPE", {**conftest.SHAPE, "intermediate_size": 2048, "num_hidden_layers": 4})
    save_model("llama-tied", tmp_path / "large")
    hub.add("org/large", tmp_path / "large")
    plain = ssd("run", "org/large", "Hello", *QUICK)
    assert plain.exit_code == 0, plain.output
    assert "--draft" not in plain.stderr  # the bundled drafts have another tokenizer
    assert ssd("pull", "org/small").exit_code == 0
    assert suggested_draft("org/large") == "org/small"
    assert suggested_draft("org/small") is None
    told = ssd("run", "org/large", "Hello", *QUICK)
    assert "--draft org/small may make it faster" in told.stderr
    drafted = ssd("run", "org/large", "Hello", "--draft", "auto", "--metrics", *QUICK)
    assert drafted.exit_code == 0, drafted.output
    assert drafted.stdout == told.stdout == plain.stdout
    alone = ssd("run", "org/small", "Hello", "--draft", "auto", *QUICK)
    assert alone.exit_code == 0, alone.output
    assert "No model of this machine can be its draft" in alone.stderr
