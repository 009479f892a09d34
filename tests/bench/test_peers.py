"""The peers of a benchmark: servers by URL, servers that are started here, and transformers."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import fake_server
import pytest
from fake_server import PIECES, PROMPT_TOKENS, TOKENS_A_PIECE, serving

from ssd import LLM, SamplingParams
from ssd.bench import servers
from ssd.bench.answers import Answer, Prompt, RequestSettings, Speed
from ssd.bench.openai import ServerContender
from ssd.bench.servers import LaunchedContender, launch
from ssd.bench.transformers_peer import HFContender
from ssd.errors import ConfigError, ServerError

CHAT = [{"role": "user", "content": "Hello!"}]
PROMPTS: list[Prompt] = ["Once upon a time", "The sea is", CHAT]


@pytest.fixture(autouse=True)
def _no_settings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))  # where logs are kept
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    for name in ("OPENAI_API_KEY", "SSD_VLLM_PYTHON", "SSD_SGLANG_PYTHON", "SSD_LLAMA_SERVER"):
        monkeypatch.delenv(name, raising=False)


# --- a server by URL --------------------------------------------------------------------------------------------------


def test_tokens_are_counted_by_the_servers_usage() -> None:
    """Catches counting chunks, of which every one holds several tokens here."""
    with serving() as server:
        (answer,) = ServerContender(server.url).answer(["Once"], RequestSettings(12))
    written = TOKENS_A_PIECE * len(PIECES)
    assert answer.output_tokens == written
    assert answer.prompt_tokens == PROMPT_TOKENS
    assert answer.text == "".join(PIECES)
    times, counts = zip(*answer.deliveries, strict=True)
    assert len(times) == len(PIECES)
    assert counts == (1, *[(written - 1) / (len(PIECES) - 1)] * (len(PIECES) - 1))
    assert answer.began < times[0]
    assert list(times) == sorted(times)
    assert Speed.of([answer]).decode_tokens == pytest.approx(written - 1)


def test_every_kind_of_prompt_goes_where_it_belongs() -> None:
    """A chat is opened by a chunk without text, which is no delivery."""
    with serving() as server:
        contender = ServerContender(f"{server.url}/v1/", name="fake")
        answers = contender.answer(["Once", [5, 6, 7], CHAT], RequestSettings(12, temperature=0.5, seed=3))
        assert server.paths == ["/v1/completions", "/v1/completions", "/v1/chat/completions"]
        text, ids, chat = server.bodies
    assert (contender.name, contender.note, contender.model) == ("fake", "", "fake-model")
    assert (text["prompt"], ids["prompt"], chat["messages"]) == ("Once", [5, 6, 7], CHAT)
    for body in (text, ids, chat):
        assert (body["max_tokens"], body["temperature"], body["seed"], body["ignore_eos"]) == (12, 0.5, 3, True)
        assert body["stream_options"] == {"include_usage": True}
    assert [len(a.deliveries) for a in answers] == [len(PIECES)] * 3
    assert {a.text for a in answers} == {"".join(PIECES)}


def test_as_many_requests_are_under_way_as_asked_for() -> None:
    with serving() as server:
        answers = ServerContender(server.url).answer(["Once"] * 6, RequestSettings(12, batch=3))
        assert server.most_under_way == 3
        ServerContender(server.url).answer(["Once"] * 2, RequestSettings(12, ignore_eos=False))
        assert "ignore_eos" not in server.bodies[-1]
    assert len(answers) == 6
    assert Speed.of(answers).output_tokens == 6 * TOKENS_A_PIECE * len(PIECES)


def test_fields_that_a_server_does_not_know_are_left_out_and_noted() -> None:
    with serving("strict") as server:
        contender = ServerContender(server.url)
        assert [a.output_tokens for a in contender.answer(["Once", "Twice"], RequestSettings(12))] == [12, 12]
        sent = [{"ignore_eos", "seed"} & set(body) for body in server.bodies]
    assert sent == [{"ignore_eos", "seed"}, {"seed"}, set(), set()]  # refused once, and never sent again
    assert contender.note == "the server refuses ignore_eos and seed: sent without"


@pytest.mark.parametrize(
    ("behaviour", "said"),
    [
        ("no-usage", "sent no usage"),
        ("dies", "closed the connection within"),
        ("unfinished", r"without \[DONE\]"),
        ("garbled", "not json"),
        ("fails", "out of memory"),
        ("refuses", "400.*the prompt is too long"),
    ],
)
def test_unusable_answers_are_explained(behaviour: str, said: str) -> None:
    with serving(behaviour) as server:
        contender = ServerContender(server.url)
        with pytest.raises(ServerError, match=said):
            contender.answer(["Once", "Twice"], RequestSettings(12, batch=2))
        assert contender.note == ""


def test_servers_that_are_not_there_or_say_no_are_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    with serving(api_key="secret") as server:
        with pytest.raises(ServerError, match=r"401.*OPENAI_API_KEY"):
            ServerContender(server.url).answer(["Once"], RequestSettings(12))
        monkeypatch.setenv("SSD_API_KEY", "secret another")  # the server of `ssd serve` takes several
        assert ServerContender(server.url).answer(["Once"], RequestSettings(12))
        monkeypatch.setenv("OPENAI_API_KEY", "secret")
        monkeypatch.setenv("SSD_API_KEY", "another")
        assert ServerContender(server.url).answer(["Once"], RequestSettings(12))
        with pytest.raises(ServerError, match=r"404.*model='absent'.*/v1/models"):
            ServerContender(server.url, "absent").answer(["Once"], RequestSettings(12))
    with pytest.raises(ServerError, match="no server answers at"):
        ServerContender(server.url)
    for wrong in ("127.0.0.1:8000", "http://", "http://localhost:port"):
        with pytest.raises(ConfigError, match="such as http://"):
            ServerContender(wrong)


def test_a_chat_streams_and_an_early_end_reaches_the_server() -> None:
    with serving("slow") as server:
        stream = ServerContender(server.url).stream_chat(CHAT, {"temperature": 0.5, "max_tokens": 100})
        assert next(stream) == PIECES[0]
        stream.close()
        assert server.hung_up.wait(5)
    with serving() as server:
        contender = ServerContender(server.url)
        assert list(contender.stream_chat(CHAT, {"max_tokens": 100})) == PIECES
        with pytest.raises(ServerError, match="404"):
            list(ServerContender(server.url, "absent").stream_chat(CHAT, {"max_tokens": 100}))


# --- servers that are started here ------------------------------------------------------------------------------------


def program(folder: Path, script: str) -> str:
    """An executable that poses as an interpreter or a server; $SERVE makes it answer."""
    file = folder / "program"
    serve = f"exec {sys.executable} {fake_server.__file__} "
    file.write_text(f'#!/bin/sh\necho arguments "$@"\n{textwrap.dedent(script).replace("SERVE", serve)}\n')
    file.chmod(0o755)
    return str(file)


def logged(contender: LaunchedContender, word: str) -> str:
    return next(line for line in contender.log.read_text().splitlines() if line.startswith(word)).removeprefix(word)


def alive(pid: int) -> bool:
    """Whether a process is there and not a mere entry of the dead."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


@contextmanager
def ended(process: subprocess.Popen[bytes]) -> Iterator[None]:
    try:
        yield
    finally:
        process.kill()


def gone(pid: int) -> bool:
    deadline = time.monotonic() + 5
    while alive(pid) and time.monotonic() < deadline:
        time.sleep(0.01)
    return not alive(pid)


linux_only = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks at processes in /proc")


@linux_only
def test_a_server_is_started_asked_and_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It goes with its children, and nobody else does."""
    monkeypatch.setenv("SSD_VLLM_PYTHON", program(tmp_path, 'sleep 300 &\necho child $!\nSERVE "$@"'))
    with subprocess.Popen(["sleep", "300"]) as bystander, ended(bystander):
        with closing(launch("vllm", "tiny-llama", draft="tiny-llama-draft", k=5, batch=8, max_model_len=512)) as vllm:
            assert vllm.answer(["Once"], RequestSettings(12))[0].output_tokens == 12
            assert (vllm.name, vllm.note) == ("vllm sd:5", "vllm 1.2.3")
            child, server = int(logged(vllm, "child")), vllm._server._process.pid
            assert alive(child)
            assert alive(server)
        assert gone(child)
        assert gone(server)
        vllm.close()
        assert bystander.poll() is None
    assert logged(vllm, "arguments").split("-m ", 1)[1] == " ".join(vllm.command[2:])


@linux_only
def test_a_server_that_will_not_end_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(servers, "GRACE_SECONDS", 0.2)
    monkeypatch.setenv("SSD_VLLM_PYTHON", program(tmp_path, "trap '' TERM INT\nSERVE \"$@\""))
    vllm = launch("vllm", "tiny-llama")
    server = vllm._server._process.pid
    vllm.close()
    assert vllm._server._process.returncode == -signal.SIGKILL
    assert gone(server)


def test_a_server_that_ends_early_leaves_its_last_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SSD_SGLANG_PYTHON", program(tmp_path, "echo CUDA out of memory >&2\nexit 3"))
    with pytest.raises(ServerError, match=r"(?s)ended with 3.*ssd-sglang-.*\.log.*CUDA out of memory"):
        launch("sglang", "tiny-llama")


def test_a_server_that_dies_later_leaves_them_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SSD_VLLM_PYTHON", program(tmp_path, 'echo illegal memory access\nSERVE "$@"'))
    with closing(launch("vllm", "tiny-llama")) as vllm:
        os.kill(vllm._server._process.pid, signal.SIGKILL)
        with pytest.raises(ServerError, match=r"(?s)(no server answers|closed the connection).*illegal memory access"):
            vllm.answer(["Once"], RequestSettings(12))


@linux_only
def test_a_server_that_never_gets_ready_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SSD_VLLM_PYTHON", program(tmp_path, "sleep 300"))
    started, popen = list[subprocess.Popen[bytes]](), subprocess.Popen

    def start(*arguments: Any, **options: Any) -> subprocess.Popen[bytes]:
        started.append(popen(*arguments, **options))
        return started[-1]

    monkeypatch.setattr(subprocess, "Popen", start)
    with pytest.raises(ServerError, match="not ready after 1 s"):
        launch("vllm", "tiny-llama", ready_seconds=0.7)
    [server] = started
    assert gone(server.pid)


@linux_only
@pytest.mark.slow
def test_a_server_ends_with_the_program_that_started_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C is for the program only: the server is in another process group."""
    monkeypatch.setenv("SSD_VLLM_PYTHON", program(tmp_path, 'SERVE "$@"'))
    script = """
        from ssd.bench.servers import launch
        kept = launch("vllm", "tiny-llama")
        print(kept._server._process.pid, flush=True)
        raise KeyboardInterrupt
    """
    found = subprocess.run([sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, check=False)
    assert gone(int(found.stdout))


def test_command_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SSD_VLLM_PYTHON", sys.executable)
    monkeypatch.setenv("SSD_SGLANG_PYTHON", sys.executable)
    monkeypatch.setenv("SSD_LLAMA_SERVER", sys.executable)
    model, draft = tmp_path / "model.gguf", tmp_path / "draft.gguf"
    alone = servers.Setup(model, None, k=5, batch=8, max_model_len=512, gpus=2, port=1234)
    both = servers.Setup(model, draft, k=5, batch=8, max_model_len=512, gpus=2, port=1234)

    vllm = " ".join(servers.COMMANDS["vllm"](alone))
    assert f"{sys.executable} -m vllm.entrypoints.openai.api_server --model {model}" in vllm
    assert "--port 1234 --max-num-seqs 8 --max-model-len 512 --tensor-parallel-size 2" in vllm
    assert "--no-enable-prefix-caching" in vllm
    assert "speculative" not in vllm
    settings = json.loads(servers.COMMANDS["vllm"](both)[-1])
    assert settings == {"model": str(draft), "num_speculative_tokens": 5, "method": "draft_model"}

    sglang = " ".join(servers.COMMANDS["sglang"](both))
    assert f"-m sglang.launch_server --model-path {model}" in sglang
    assert "--max-running-requests 8 --context-length 512 --tp-size 2 --disable-radix-cache" in sglang
    assert f"--speculative-algorithm STANDALONE --speculative-draft-model-path {draft}" in sglang
    assert "--speculative-num-steps 5 --speculative-eagle-topk 1 --speculative-num-draft-tokens 6" in sglang

    llama = " ".join(servers.COMMANDS["llamacpp"](both))
    assert f"--model {model}" in llama
    assert "--parallel 8 --ctx-size 4096" in llama  # shared out: 512 for each
    assert f"-md {draft}" in llama
    assert "--spec-draft-n-max 5" in llama


def test_what_cannot_be_started_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="vllm, sglang, llamacpp"):
        launch("tgi", "tiny-llama")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    for kind in ("vllm", "sglang"):
        with pytest.raises(ConfigError, match=f"pip install {kind}.*SSD_{kind.upper()}_PYTHON="):
            launch(kind, "tiny-llama")
    monkeypatch.setenv("SSD_VLLM_PYTHON", "/nowhere/python")
    with pytest.raises(ConfigError, match="SSD_VLLM_PYTHON=/nowhere/python"):
        launch("vllm", "tiny-llama")
    with pytest.raises(ConfigError, match="gguf files only"):
        launch("llamacpp", "tiny-llama")
    with pytest.raises(ConfigError, match="ssd graft tiny-llama --shape llama"):
        launch("vllm", "graft:tiny-llama@llama-3.1-8b")


# --- transformers -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def ours() -> list[tuple[list[int], list[int], str]]:
    """What ssd writes: prompt, tokens and text."""
    with LLM("tiny-llama", device="cpu", dtype="float32", max_model_len=256) as llm:
        outs = llm.generate(PROMPTS, SamplingParams(max_new_tokens=8, ignore_eos=True))
    return [(out.prompt_token_ids, out.token_ids, out.text) for out in outs]


@pytest.fixture(scope="module")
def plain() -> Iterator[HFContender]:
    with closing(HFContender("tiny-llama", device="cpu")) as contender:
        yield contender


@pytest.fixture(scope="module")
def assisted() -> Iterator[HFContender]:
    with closing(HFContender("tiny-llama", "tiny-llama-draft", k=3, device="cpu")) as contender:
        yield contender


def test_loading_leaves_no_progress_bar_on_the_terminal(capfd: pytest.CaptureFixture[str]) -> None:
    HFContender("tiny-llama-draft", device="cpu").close()
    assert "Loading" not in capfd.readouterr().err


def check(answers: list[Answer], ours: list[tuple[list[int], list[int], str]]) -> None:
    for answer, (prompt, tokens, text) in zip(answers, ours, strict=True):
        assert (answer.prompt_tokens, answer.token_ids, answer.text) == (len(prompt), tokens, text)
        assert answer.output_tokens == len(tokens)
        times = [when for when, _ in answer.deliveries]
        assert answer.began < times[0]
        assert all(a < b for a, b in pairwise(times))


def test_transformers_writes_what_ssd_writes(plain: HFContender, ours: list[tuple[list[int], list[int], str]]) -> None:
    answers = plain.answer(PROMPTS, RequestSettings(8))
    check(answers, ours)
    assert [count for _, count in answers[0].deliveries] == [1] * 8
    assert plain.note.startswith("transformers ")


def test_batches_are_padded_and_end_each_at_its_own_stop(
    plain: HFContender, ours: list[tuple[list[int], list[int], str]]
) -> None:
    check(plain.answer(PROMPTS, RequestSettings(8, batch=2)), ours)
    story, chat = plain.answer([PROMPTS[0], CHAT], RequestSettings(8, batch=2, ignore_eos=False))
    assert (story.output_tokens, chat.output_tokens) == (8, 4)
    assert story.deliveries[:4] == chat.deliveries  # the same steps


def test_sampling_follows_its_seed(plain: HFContender) -> None:
    first, again, other = (
        plain.answer([CHAT], RequestSettings(8, temperature=1.0, seed=seed))[0].token_ids for seed in (1, 1, 2)
    )
    assert first == again
    assert first != other


def test_assisted_generation_delivers_several_tokens_at_a_time(
    assisted: HFContender, ours: list[tuple[list[int], list[int], str]]
) -> None:
    answers = assisted.answer(PROMPTS[1:], RequestSettings(8))
    check(answers, ours[1:])
    counts = [count for answer in answers for _, count in answer.deliveries]
    assert max(counts) > 1
    assert max(counts) <= 4
    with pytest.raises(ConfigError, match=r"batch=2.*one request at a time"):
        assisted.answer(PROMPTS, RequestSettings(8, batch=2))


def test_without_transformers_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ConfigError, match=r"peer hf.*pip install '\.\[hf\]'"):
        HFContender("tiny-llama")


def test_what_transformers_cannot_load_says_what_to_do(make_model: Callable[[str], Any]) -> None:
    with pytest.raises(ConfigError, match="ssd graft tiny-llama --shape llama"):
        HFContender("graft:tiny-llama@llama-3.1-8b")
    with pytest.raises(ConfigError, match=r"must have the model's tokens \(320 tokens there, 8192 here\)"):
        HFContender("tiny-llama", make_model("llama-tied").path, device="cpu")


def test_a_server_runs_no_code_of_the_current_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "trap.py").touch()
    monkeypatch.chdir(tmp_path)
    server = servers.ServerProcess("trap", [sys.executable, "-c", "import trap"])
    server._process.wait(30)
    assert "No module named 'trap'" in server.log.read_text()
    server.log.unlink()
