"""`ssd chat` and `bench/chat.py`: in a real terminal, over a pipe, and the conversation by itself."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from io import StringIO
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from conftest import TestModel, mostly_slow
from fakes import paused_at, wait_until_idle
from server.scripted import Forced, harmony_checkpoint
from typer.testing import CliRunner, Result

from ssd.cli.chat import EngineBackend, typed
from ssd.cli.conversation import SPARE_ANSWERS, Answer, Conversation, Message, Write, report
from ssd.cli.explain import tinted
from ssd.cli.main import app
from ssd.cli.replies import read_tools
from ssd.cli.trace import record
from ssd.core import RequestMetrics, SamplingParams
from ssd.errors import ConfigError, RequestError
from ssd.llm import LLM

pexpect = pytest.importorskip("pexpect", reason="a terminal to type in needs pexpect")

ROOT = Path(__file__).parents[2]
SSD = [str(Path(sys.executable).with_name("ssd")), "chat", "--device", "cpu", "--dtype", "float32"]
BENCH = [sys.executable, "-O", str(ROOT / "bench" / "chat.py")]
HELLO = [{"role": "user", "content": "Who wrote Hamlet?"}]
STORY = [{"role": "user", "content": "Tell me a story about the sea and an old captain."}]
ESCAPE = r"\x1b\[[?0-9;]*[A-Za-z]"
ENDLESS = SamplingParams(temperature=50.0, seed=2, max_new_tokens=3000)  # nearly uniform: so no stop token comes soon


# --- the conversation by itself ---------------------------------------------------------------------------------------


@dataclass
class Parrot:
    """Repeats what it hears. So many messages fit."""

    room: int = 1000
    name: str = "parrot"
    unit: str = "words"
    params: SamplingParams = field(default_factory=SamplingParams)
    heard: list[list[Message]] = field(default_factory=list)

    def fits(self, messages: list[Message], answers: int) -> bool:
        if messages[-1]["content"] == "stop at once":
            raise KeyboardInterrupt
        return len(messages) + answers <= self.room

    def answer(self, messages: list[Message], write: Write) -> Answer:
        text = messages[-1]["content"]
        if len(text) > 20:
            raise RequestError("too long")
        self.heard.append(messages)
        write(text, False)
        return Answer(text, "abort" if text == "stop" else "stop", RequestMetrics(output_tokens=1), self.params)


def spoken(backend: Parrot, lines: Iterable[str | type[BaseException]], **options: Any) -> Conversation:
    """A conversation in which these lines are typed (or keys that raise are pressed)."""
    typed = iter(lines)

    def read(prompt: str) -> str:
        line = next(typed, EOFError)
        if not isinstance(line, str):
            raise line
        return line

    conversation = Conversation(backend, read=read, **options)
    conversation.run()
    return conversation


def questions(backend: Parrot) -> list[str]:
    return [messages[-1]["content"] for messages in backend.heard]


@pytest.mark.parametrize(
    ("lines", "heard"),
    [
        (["one", "", "   ", "two"], ["one", "two"]),
        (["one\\", "two\\", "three"], ["one\ntwo\nthree"]),
        (["one\\"], ["one"]),
        (['"""', "one", "", "/two", '"""', "three"], ["one\n\n/two", "three"]),
        (['"""', "/one", "two\\"], ["/one\ntwo\\"]),
        ([" /one"], [" /one"]),
        (["one", " /exit", "/exit", "two"], ["one", " /exit"]),
        (["one\ntwo\n", "three"], ["one\ntwo", "three"]),  # pasted
        (["/one\ntwo", "three"], ["/one\ntwo", "three"]),
        (["one\ntwo\\", "three\nfour"], ["one\ntwo\nthree\nfour"]),
        (['"""\none\n"""', "two"], ["one", "two"]),
        (['"""', 'one\ntwo\n"""', "three"], ["one\ntwo", "three"]),
    ],
)
@pytest.mark.parametrize("interactive", [True, False])
def test_what_is_one_message(lines: list[str], heard: list[str], interactive: bool) -> None:
    backend = Parrot()
    spoken(backend, lines, interactive=interactive)
    assert questions(backend) == heard


def test_the_history_goes_along_until_it_is_reset() -> None:
    backend = Parrot()
    spoken(backend, ["one", "two", "/reset", "three", "/system Be brief.", "four", "/system", "five"], system="Hi.")
    head = {"role": "system", "content": "Hi."}
    one = [{"role": role, "content": "one"} for role in ("user", "assistant")]
    assert backend.heard[1] == [head, *one, {"role": "user", "content": "two"}]
    assert backend.heard[2] == [head, {"role": "user", "content": "three"}]
    assert backend.heard[3] == [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "four"}]
    assert backend.heard[4] == [{"role": "user", "content": "five"}]


def test_old_turns_make_way_and_the_system_prompt_stays(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Catches a system prompt that is dropped, room that is made one turn at a time, and a file without old turns."""
    backend = Parrot(room=10)
    file = tmp_path / "chat.json"
    spoken(backend, [*"abcde", f"/save {file}"], system="Hi.")
    sizes = [len(messages) for messages in backend.heard]
    assert sizes == [2, 4, 6, 8, 10 - SPARE_ANSWERS]
    assert all(messages[0]["content"] == "Hi." for messages in backend.heard)
    assert [m["content"] for m in backend.heard[-1]] == ["Hi.", "c", "c", "d", "d", "e"]
    assert "does not see the 2 oldest turns" in capsys.readouterr().err
    assert len(json.loads(file.read_text())["messages"]) == 11


def test_a_mistake_costs_one_message(capsys: pytest.CaptureFixture[str]) -> None:
    """Catches an overlong message that pushes the history out before it is refused."""
    backend = Parrot(room=5)
    conversation = spoken(backend, ["one", "x" * 21, "two"])
    assert "error: too long" in capsys.readouterr().err
    assert [m["content"] for m in backend.heard[-1]] == ["one", "one", "two"]
    assert conversation.num_unsent == 0


def test_commands_that_make_no_sense_are_explained(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    taken = tmp_path / "taken.json"
    taken.write_text("mine")
    backend = Parrot()
    spoken(backend, ["/frobnicate", "/save", f"/save {taken}", f"/save {tmp_path}/no/such", "/help"])
    said = " ".join(capsys.readouterr().err.split())
    for part in ("/frobnicate is no command", "/save FILE", "stays as it is", "cannot be written", "/system TEXT"):
        assert part in said
    assert taken.read_text() == "mine"
    assert not backend.heard


def test_a_saved_conversation_goes_on_after_it_is_loaded(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Catches turns or a system prompt that are lost, and what each answer was sampled with."""
    file, copy = tmp_path / "chat.json", tmp_path / "copy.json"
    spoken(Parrot(), ["one", "/set seed 7", "/set top_p 0.5", "two", f"/save {file}"], system="Hi.")
    saved = json.loads(file.read_text())
    assert [(each["seed"], each["top_p"]) for each in saved["sampling"]] == [(None, 1.0), (7, 0.5)]
    backend = Parrot()
    spoken(backend, ["zero", f"/load {file}", f"/save {copy}", "three"])
    assert json.loads(copy.read_text()) == saved
    assert backend.heard[-1] == [*saved["messages"], {"role": "user", "content": "three"}]


@pytest.mark.parametrize(
    "text", ["", "[]", '{"messages": 3}', '{"messages": [{"role": "user", "content": "one"}]}', '{"messages": ["x"]}']
)
def test_a_file_that_is_no_conversation_changes_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str
) -> None:
    file = tmp_path / "other.json"
    file.write_text(text)
    conversation = spoken(Parrot(), ["one", f"/load {file}", f"/load {tmp_path / 'absent'}", "/load"])
    assert len(conversation.turns) == 1
    said = " ".join(capsys.readouterr().err.split())
    assert "is no conversation that /save has written" in said
    assert "cannot be read" in said
    assert "/load FILE" in said


def test_sampling_parameters_can_be_set(capsys: pytest.CaptureFixture[str]) -> None:
    backend = Parrot()
    lines = ["/set top_k 5", "/set max_tokens 9", "/set stop END", '/set stop ["\\n", "x"]', "/set seed 3"]
    spoken(backend, [*lines, "/set seed none", "/set top_p 2", "/set temperature hot", "/set n 3", "/set"])
    assert backend.params == SamplingParams(top_k=5, max_new_tokens=9, stop=("\n", "x"))
    said = " ".join(capsys.readouterr().err.split())
    assert "top_p=2: must be" in said
    assert "temperature='hot': must be" in said
    assert "The names: temperature" in said
    assert "max_tokens 9" in said


def test_history_goes_on_in_the_next_chat(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches entries of several lines that come back as several, and a file that others can read."""
    lines = iter(["one", "", "two\nthree"])
    monkeypatch.setattr("builtins.input", lambda prompt: next(lines))
    remembered: list[str] = []
    monkeypatch.setitem(sys.modules, "readline", SimpleNamespace(add_history=remembered.append))
    monkeypatch.setattr("ssd.cli.chat.interactive", lambda: True)
    file = tmp_path / "history"
    read = typed(file)
    assert [read("> "), read("> "), read("> ")] == ["one", "", "two\nthree"]
    typed(file)
    assert remembered == ["one", "two\nthree"]
    assert file.stat().st_mode & 0o077 == 0
    with pytest.raises(ConfigError, match="--history"):
        typed(tmp_path / "absent" / "history")


def test_ctrl_c_twice_in_a_row_ends_and_once_does_not(capsys: pytest.CaptureFixture[str]) -> None:
    ctrl_c = KeyboardInterrupt
    backend = Parrot()
    typed = [ctrl_c, "one", "stop", "stop at once", ctrl_c, "/reset", '"""', "lost", ctrl_c, "two", ctrl_c, ctrl_c, "?"]
    spoken(backend, typed)
    assert questions(backend) == ["one", "stop", "two"]
    said = capsys.readouterr().err
    assert said.count("Ctrl-C once more") == 4
    assert said.count("(stopped)") == 2


def test_over_a_pipe_ctrl_c_ends_at_once() -> None:
    for lines in ([KeyboardInterrupt], ["stop", "never"]):
        with pytest.raises(KeyboardInterrupt):
            spoken(Parrot(), lines, interactive=False)


def test_a_report_adds_up() -> None:
    one = RequestMetrics(arrival=1.0, first_token=2.0, finished=3.0, prompt_tokens=8, cached_tokens=2, output_tokens=11)
    two = RequestMetrics(arrival=0.0, first_token=2.0, finished=5.0, prompt_tokens=8, output_tokens=31)
    two.rounds, two.drafted, two.accepted, two.look_ups, two.hits = 6, 40, 20, 5, 4
    assert report([one], "tokens") == "11 tokens, 10.0 tokens/s, first after 1.000 s; 2 of 8 prompt tokens cached"
    both = report([one, two], "tokens")
    assert "42 tokens, 10.0 tokens/s, first after 1.500 s; 2 of 16 prompt tokens cached" in both
    assert "20 of 40 drafted tokens accepted (50%), 7.00 tokens a round, 4 of 5 drafts prepared" in both
    assert report([RequestMetrics()], "pieces") == "0 pieces, - pieces/s, first after - s"


# --- the engine answers -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    speculation = {"mode": "sd", "draft": "tiny-llama-draft", "k": 3}
    with LLM("tiny-llama-draft", device="cpu", dtype="float32", max_num_seqs=1, speculation=speculation) as llm:
        yield llm


@pytest.mark.parametrize("stop", [(), (" the",)])
def test_colours_are_those_of_explain(llm: LLM, stop: tuple[str, ...]) -> None:
    """Catches pieces that are lost, shifted or credited to the wrong model; with a stop string, text is held back."""
    params = SamplingParams(max_new_tokens=40, stop=stop)
    pieces: list[tuple[str, bool]] = []
    answer = EngineBackend(llm, params, colour=True).answer(
        STORY, lambda piece, drafted, _: pieces.append((piece, drafted))
    )
    output, steps = record(llm, STORY, params)
    expected = tinted(steps, llm.engine.tokenizer, output)
    assert "".join(text for text, _ in pieces) == answer.text == expected.plain == output.text
    shown = "".join(("1" if drafted else "0") * len(text) for text, drafted in pieces)
    green = {i for span in expected.spans if span.style == "green" for i in range(span.start, span.end)}
    assert {i for i, flag in enumerate(shown) if flag == "1"} == green != set()


def test_ctrl_c_ends_the_request_and_keeps_what_was_written(llm: LLM) -> None:
    """Catches an answer that is lost, blocks that are never freed, an engine that cannot go on."""
    backend = EngineBackend(llm, ENDLESS)
    pieces: list[str] = []

    def write(piece: str, drafted: bool, reasoning: bool) -> None:
        pieces.append(piece)
        if len(pieces) in (5, 6):
            os.kill(os.getpid(), signal.SIGINT)

    with paused_at(llm.driver, 50):
        answer = backend.answer(STORY, write)
    assert answer.finish_reason == "abort"
    assert answer.text == "".join(pieces)
    assert 5 <= answer.metrics.output_tokens < 100
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    wait_until_idle(llm.driver)
    told = {"role": "assistant", "content": answer.text}
    after = EngineBackend(llm, SamplingParams(max_new_tokens=4)).answer([*STORY, told, *HELLO], lambda *_: None)
    assert after.metrics.cached_tokens > 0


def test_an_answer_that_cannot_be_written_is_ended(llm: LLM) -> None:
    def write(piece: str, drafted: bool, reasoning: bool) -> None:
        raise BrokenPipeError

    with pytest.raises(BrokenPipeError):
        EngineBackend(llm, ENDLESS).answer(HELLO, write)
    wait_until_idle(llm.driver)


def test_the_reported_seed_writes_the_same_answer(llm: LLM) -> None:
    backend = EngineBackend(llm, SamplingParams(temperature=1.5, max_new_tokens=12))
    first = backend.answer(HELLO, lambda *_: None)
    assert first.params.seed is not None
    again = EngineBackend(llm, first.params).answer(HELLO, lambda *_: None)
    other = backend.answer(HELLO, lambda *_: None)
    assert again.text == first.text
    assert other.params.seed != first.params.seed


TOOL = {"type": "function", "function": {"name": "get_weather", "parameters": {"type": "object", "properties": {}}}}
THOUGHT = "<|channel|>analysis<|message|>Rome, then.<|end|><|start|>assistant"
CALL = f'{THOUGHT}<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>{{"city":"Rome"}}<|call|>'
SUNNY = f"{THOUGHT}<|channel|>final<|message|>It is sunny.<|return|>"


@pytest.mark.parametrize("interactive", mostly_slow([True, False], fast={True}))
def test_a_chat_in_harmony_with_a_tool_call(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], interactive: bool
) -> None:
    """GPT-OSS's format, by an engine whose tokens are forced: what is typed after a call is its result, reasoning is
    for the terminal only, and a conversation that was saved goes on with its calls."""
    path = harmony_checkpoint(tmp_path / "model")
    with LLM(path, device="cpu", dtype="float32", max_num_seqs=1) as llm:
        forced = Forced(llm.tokenizer, CALL, SUNNY, SUNNY, CALL)
        backend = EngineBackend(llm, SamplingParams(max_new_tokens=100, logits_processor=forced), tools=[TOOL])
        lines = iter(["Weather?", '{"sunny": true}', "And now?", f"/save {tmp_path / 'chat.json'}"])

        def read(prompt: str) -> str:
            return next(lines, "/exit")

        spoken = Conversation(backend, interactive=interactive, read=read)
        spoken.run()
        shown = capsys.readouterr()
        again = Conversation(backend, interactive=interactive)
        again.command(f"/load {tmp_path / 'chat.json'}")
        again.ask("Once more?")
        prompt = llm.render_chat(spoken._messages(0, {"role": "user", "content": "?"}), {"tools": [TOOL]})
    assert plain(shown.out).count("It is sunny.") == 2
    assert ("Rome, then." in plain(shown.out)) == interactive
    assert 'get_weather {"city":"Rome"} is called' in " ".join(shown.err.split())
    assert [turn.question["role"] for turn in spoken.turns] == ["user", "tool", "user"]
    assert '<|constrain|>json<|message|>{"city":"Rome"}<|call|><|start|>functions.get_weather to=assistant' in prompt
    assert "analysis<|message|>" not in prompt
    assert [turn.messages for turn in again.turns[:3]] == [turn.messages for turn in spoken.turns]
    assert again.turns[-1].call is not None


def test_tools_that_cannot_be_used_are_explained(tmp_path: Path) -> None:
    file = tmp_path / "tools.json"
    for text in ("{", "[]", '[{"type": "function"}]', '[{"type": "web_search"}]'):
        file.write_text(text)
        with pytest.raises(ConfigError, match=r"--tools .*tools\.json: cannot be used"):
            read_tools(file)
    file.write_text(json.dumps([TOOL]))
    assert read_tools(file) == [TOOL]


def chat(text: str, *arguments: str) -> Result:
    return CliRunner().invoke(app, ["chat", "--device", "cpu", *arguments], input=text)


def test_a_conversation_may_outgrow_the_context() -> None:
    lines = ["Tell me a story."] * 8 + ["x " * 200, "Who wrote Hamlet?"]
    done = chat("\n".join(lines), "--mode", "ar", "--max-model-len", "128", "-m", "16", "--system", "Be brief.")
    assert done.exit_code == 0, done.output
    said = " ".join(done.stderr.split())
    assert "the model does not see" in said
    assert "maximum context length is 128" in said  # the long one is refused, and the chat goes on
    assert said.count("error:") == 1


def test_flags_are_the_parameters_of_every_answer(tmp_path: Path) -> None:
    """Catches a flag that is accepted and ignored, and an answer that cannot be had again from the file."""
    used: dict[str, Any] = {"temperature": 0.9, "top_k": 50, "top_p": 0.95, "min_p": 0.01, "repetition_penalty": 1.1}
    used |= {"presence_penalty": 0.2, "frequency_penalty": 0.3, "max_tokens": 6, "stop": ["zzz"]}
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in used.items() if name != "stop"]
    file = tmp_path / "chat.json"
    done = chat(f"Who wrote Hamlet?\n/save {file}\n", "--mode", "ar", "--stop", "zzz", *flags)
    assert done.exit_code == 0, done.output
    saved = json.loads(file.read_text())
    [sampling] = saved["sampling"]
    assert {name: sampling[name] for name in used} == used
    again = chat("Who wrote Hamlet?\n", "--mode", "ar", "--stop", "zzz", *flags, "--seed", str(sampling["seed"]))
    assert again.stdout.strip() == saved["messages"][1]["content"].strip()


def test_a_model_without_a_chat_template_is_asked_in_plain_text(make_model: Callable[[str], TestModel]) -> None:
    done = chat("hello\nagain\n", make_model("llama-tied").path, "-m", "4", "--metrics")
    assert done.exit_code == 0, done.output
    assert "no chat template" in done.stderr
    assert f"0 of {len('User: hello|Assistant:')} prompt tokens cached" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (("tiny-lama",), 1, "bundled model (tiny-llama"),
        (("-t", "-1"), 1, "temperature=-1.0"),
        (("--mode", "turbo"), 1, "must be one of ar, sd, ssd, auto"),
        (("--k", "2", "--speculation", "{}"), 1, "leave out --k"),
    ],
)
def test_mistakes_are_explained(arguments: tuple[str, ...], code: int, message: str) -> None:
    done = chat("", *arguments)
    assert done.exit_code == code
    assert message in done.stderr


# --- in a terminal ----------------------------------------------------------------------------------------------------


@contextmanager
def terminal(command: list[str]) -> Iterator[Any]:
    environment = {**os.environ, "TERM": "xterm-256color", "INPUTRC": os.devnull}
    session = pexpect.spawn(
        command[0], command[1:], env=environment, encoding="utf-8", timeout=60, dimensions=(40, 100), cwd=ROOT
    )
    session.delaybeforesend = None
    session.logfile_read = StringIO()
    try:
        session.expect_exact("/help lists the commands")
        session.expect_exact("> ")
        yield session
    finally:
        session.close(force=True)


def say(session: Any, *lines: str) -> str:
    """What is shown up to the next prompt."""
    for line in lines[:-1]:
        session.sendline(line)
        session.expect_exact("… ")
    session.sendline(lines[-1])
    return prompted(session)


def prompted(session: Any) -> str:
    session.expect(rf"\n(?:{ESCAPE})*> ")
    return plain(session.before)


def plain(shown: str) -> str:
    """In one line, and without colours."""
    return " ".join(re.sub(ESCAPE, "", shown).split())


def ended(session: Any) -> int:
    session.expect(pexpect.EOF)
    session.wait()
    return int(session.exitstatus)


def children(pid: int) -> list[int]:
    listed = subprocess.run(["ps", "-A", "-o", "pid=,ppid="], capture_output=True, text=True, check=True).stdout
    return [int(child) for child, parent in map(str.split, listed.splitlines()) if int(parent) == pid]


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.mark.slow
def test_a_chat_in_a_terminal(tmp_path: Path) -> None:
    """Greeting, turns that find the last one in the cache, messages of several lines, commands, and a clean end."""
    file = tmp_path / "chat.json"
    flags = ["--mode", "ssd", "--placement", "process", "--k", "2", "-m", "24", "--seed", "4", "--metrics", "--colour"]
    with terminal([*SSD, *flags]) as session:
        drafters = children(session.pid)
        assert drafters
        first = say(session, "Who wrote Hamlet?")
        assert "0 of 19 prompt tokens cached" in first
        second = say(session, "Tell me\\", "a story.")
        cached = re.search(r"(\d+) of (\d+) prompt tokens cached", second)
        assert cached is not None
        assert 0 < int(cached[1]) < int(cached[2])
        say(session, '"""', "one", "two", '"""')
        assert "is no command" in say(session, "/frobnicate")
        assert "saved in" in say(session, f"/save {file}")
        saved = json.loads(file.read_text())
        assert saved["model"] == "tiny-llama"
        asked = [m["content"] for m in saved["messages"] if m["role"] == "user"]
        assert asked == ["Who wrote Hamlet?", "Tell me\na story.", "one\ntwo"]
        assert [m["role"] for m in saved["messages"]] == ["user", "assistant"] * 3
        assert "forgotten" in say(session, "/reset")
        assert "16 of 19 prompt tokens cached" in say(session, "Who wrote Hamlet?")  # and nothing before it
        assert "Be brief" in say(session, "/system Be brief.")
        say(session, "Hello!")
        session.sendeof()
        assert ended(session) == 0
        assert "drafts prepared" in plain(session.before)
        assert "\x1b[32m" in session.logfile_read.getvalue()  # green: drafted
        assert not [pid for pid in drafters if alive(pid)]


def test_pasted_lines_are_one_message(tmp_path: Path) -> None:
    """Catches a terminal that is not told to mark what is pasted. Without a model, which would take seconds to load."""
    program = """
from ssd.cli.chat import converse
from ssd.cli.conversation import Answer
from ssd.core import RequestMetrics, SamplingParams

class Backend:
    name, unit, params = "one word", "words", SamplingParams()

    def fits(self, messages, answers):
        return True

    def answer(self, messages, write):
        return Answer("yes", "stop", RequestMetrics(output_tokens=1), self.params)

converse(Backend(), None, False)
"""
    file = tmp_path / "chat.json"
    with terminal([sys.executable, "-c", program]) as session:
        session.send("\x1b[200~one\ntwo\n/three\x1b[201~")
        say(session, " four")
        assert "saved in" in say(session, f"/save {file}")
        assert json.loads(file.read_text())["messages"][0]["content"] == "one\ntwo\n/three four"
        assert "\x1b[?2004h" in session.logfile_read.getvalue()


def stop_answer(session: Any, question: str) -> None:
    session.sendline(question)
    session.expect_exact(f"{question}\r\n")
    session.expect(r"[^\x1b]{40}")  # it is writing
    session.sendintr()
    session.expect_exact("(stopped)")
    prompted(session)


@pytest.mark.slow
def test_ctrl_c_in_a_terminal(tmp_path: Path) -> None:
    """Stops an answer, not the chat; hints at an empty prompt; twice in a row it ends the chat."""
    file = tmp_path / "chat.json"
    flags = ["--mode", "ssd", "--placement", "process", "-t", "50", "--seed", "2", "-m", "3500"]
    with terminal([*SSD, *flags]) as session:
        drafters = children(session.pid)
        stop_answer(session, "one")
        say(session, f"/save {file}")
        [question, answer] = json.loads(file.read_text())["messages"]
        assert question["content"] == "one"
        assert len(answer["content"]) > 30
        say(session, "/reset")  # else how this answer ends is a matter of when the one before was stopped
        stop_answer(session, "two")
        session.sendintr()
        session.expect_exact("Ctrl-C once more")
        prompted(session)
        session.sendintr()
        assert ended(session) == 0
        assert drafters
        assert not [pid for pid in drafters if alive(pid)]


@pytest.mark.slow
def test_a_chat_over_a_pipe() -> None:
    """Answers alone on standard output, as plain text."""
    flags = ["--mode", "sd", "--k", "2", "-m", "8", "--colour", "--metrics"]
    text = "Who wrote Hamlet?\n/frobnicate\nWhy?"
    done = subprocess.run([*SSD, *flags], input=text, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) == 2
    assert "\x1b" not in done.stdout + done.stderr
    assert "is no command" in done.stderr
    assert "16 of " in done.stderr  # prompt tokens cached


# --- the same through bench/chat.py -----------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_bench_door_in_a_terminal() -> None:
    flags = ["--ssd", "--spec", "--k", "2", "--max_tokens", "8", "--metrics", "--device", "cpu"]
    with terminal([*BENCH, *flags]) as session:
        shown = say(session, "Tell me a story.")
        assert "(cut off: the length limit) 8 tokens," in shown
        assert "drafted tokens accepted" in shown
        session.sendeof()
        assert ended(session) == 0


class FakeServer(BaseHTTPRequestHandler):
    """Speaks OpenAI's protocol: says how many messages there were, or goes on for ever."""

    hung_up = threading.Event()

    def do_GET(self) -> None:
        self._begin("application/json")
        self.wfile.write(json.dumps({"data": [{"id": "fake"}]}).encode())

    def do_POST(self) -> None:
        messages = json.loads(self.rfile.read(int(self.headers["Content-Length"])))["messages"]
        self._begin("text/event-stream")
        try:
            while messages[-1]["content"] == "forever":
                self._send(" and on")
        except OSError:
            self.hung_up.set()
            return
        self._send(f"heard {len(messages)}")
        self.wfile.write(b"data: [DONE]\n\n")

    def _begin(self, kind: str) -> None:
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.end_headers()

    def _send(self, text: str) -> None:
        self.wfile.write(b"data: " + json.dumps({"choices": [{"delta": {"content": text}}]}).encode() + b"\n\n")
        time.sleep(0.01)

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture
def url() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), FakeServer)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


@pytest.mark.parametrize(
    "command",
    [
        pytest.param([*BENCH, "--url"], id="bench", marks=pytest.mark.slow),
        pytest.param([sys.executable, "-m", "ssd", "chat"], id="ssd", marks=pytest.mark.slow),
    ],
)
def test_a_server_answers(url: str, command: list[str]) -> None:
    """Ctrl-C hangs up, what had come stays in the history, and the chat goes on."""
    FakeServer.hung_up.clear()
    with terminal([*command, url, "--metrics"]) as session:
        assert "heard 1" in say(session, "Hello!")
        session.sendline("forever")
        for _ in range(2):
            session.expect_exact("and on")  # each piece may come with codes of its own
        session.sendintr()
        session.expect_exact("(stopped)")
        assert "pieces/s" in prompted(session)
        assert FakeServer.hung_up.wait(10)
        assert "heard 5" in say(session, "Well?")
        session.sendline("/exit")
        assert ended(session) == 0


@pytest.fixture(scope="module")
def bench() -> ModuleType:
    spec = importlib.util.spec_from_file_location("bench_chat", BENCH[-1])
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def parsed(bench: ModuleType, monkeypatch: pytest.MonkeyPatch, flags: str) -> Any:
    monkeypatch.setattr(sys, "argv", ["chat.py", *flags.split()])
    return bench.arguments()


@pytest.mark.parametrize(
    ("flags", "model", "options"),
    [
        ("", "tiny-llama", None),
        ("--qwen --spec", "tiny-qwen3", {"mode": "sd", "draft": "tiny-qwen3-draft"}),
        ("--size 8", "llama-8", None),
        ("--size 70 --spec --async", "llama-70", {"mode": "ssd", "draft": "llama-1"}),
        ("--qwen --size 32 --draft 4 --spec", "qwen-32", {"mode": "sd", "draft": "qwen-4"}),
        ("--size 8 --draft ./own --spec", "llama-8", {"mode": "sd", "draft": "./own"}),
        ("--model ./m --draft ./d --spec", "./m", {"mode": "sd", "draft": "./d"}),
        ("--size 8 --graft --spec", "graft llama-8", {"mode": "sd", "draft": "graft llama-1 draft"}),
        (
            "--spec --async --k 7 --f 3 --backup fast",
            "tiny-llama",
            {"mode": "ssd", "draft": "tiny-llama-draft", "k": 7, "fan_out": 3, "budget": 24, "backup": "fast"},
        ),
    ],
)
def test_bench_flags_name_models_and_a_draft(
    bench: ModuleType, monkeypatch: pytest.MonkeyPatch, flags: str, model: str, options: dict[str, Any] | None
) -> None:
    monkeypatch.setattr("sizes.find", lambda family, size: f"{family}-{size}")
    grafted = "graft {}-{}{}".format
    monkeypatch.setattr("sizes.graft", lambda family, size, draft: grafted(family, size, " draft" if draft else ""))
    talks: list[tuple[str, Any]] = []
    monkeypatch.setattr(bench, "talk", lambda model, params, **given: talks.append((model, given["speculation"])))
    bench.with_engine(parsed(bench, monkeypatch, f"--ssd {flags}"))
    assert talks == [(model, options and {"k": 4, **options})]


def test_the_model_is_split_over_the_gpus_that_there_are(
    bench: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    talks: list[Any] = []
    monkeypatch.setattr(bench, "talk", lambda *_, **given: talks.append(given))
    monkeypatch.setattr("torch.cuda.device_count", lambda: 3)
    bench.with_engine(parsed(bench, monkeypatch, "--ssd --gpus 3"))
    bench.with_engine(parsed(bench, monkeypatch, "--ssd --gpus 3 --spec --async"))
    assert [given["tensor_parallel_size"] for given in talks] == [3, 2]
    assert talks[1]["speculation"]["placement"] == "process"
    assert not capsys.readouterr().err
    bench.with_engine(parsed(bench, monkeypatch, "--ssd --gpus 4"))
    assert talks[2]["tensor_parallel_size"] == 1
    assert "--gpus 4: there are 3 here" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "asked"),
    [
        ("--vllm --ar --model m", ("vllm", "m", {"draft": None, "gpus": 1})),
        ("--sglang --tp 2 --k 5", ("sglang", "tiny-llama", {"draft": "tiny-llama-draft", "gpus": 2, "k": 5})),
    ],
)
def test_bench_flags_start_a_server(
    bench: ModuleType, monkeypatch: pytest.MonkeyPatch, flags: str, asked: tuple[str, str, dict[str, Any]]
) -> None:
    monkeypatch.setattr("ssd.bench.servers.launch", lambda kind, model, **options: (kind, model, options))
    assert bench.connect(parsed(bench, monkeypatch, flags)) == asked


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("", "who answers"),
        ("--ssd --url http://x", "leave one out"),
        ("--ssd --k 7", "add --spec"),
        ("--ssd --async", "add --spec"),
        ("--ssd --graft", "needs a --size"),
    ],
)
def test_bench_flags_that_make_no_sense_are_refused(
    bench: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], flags: str, message: str
) -> None:
    with pytest.raises(SystemExit, match="2"):
        parsed(bench, monkeypatch, flags)
    assert message in capsys.readouterr().err
