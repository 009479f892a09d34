"""The benchmark's arithmetic, its contenders and its reports."""

from __future__ import annotations

import contextlib
import importlib
import io
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
from conftest import mostly_slow
from draft_servers import draft_server, until
from eagle_heads import make_tiny_head
from fake_server import PIECES, TOKENS_A_PIECE, serving
from random_weights import RandomCheckpoint
from rich.console import Console
from sizes import spelled
from typer.testing import CliRunner

from ssd import LLM
from ssd.assembly.open import open_checkpoint
from ssd.bench import load
from ssd.bench.answers import Answer, Progress, RequestSettings, Speed
from ssd.bench.config import BenchConfig
from ssd.bench.measure import MEAN, Measured, Turn, figures, measure, same_text, warnings
from ssd.bench.ours import Method, OurContender, methods_of, our_contenders
from ssd.bench.pictures import _fonts, _legible, write_picture
from ssd.bench.report import Report
from ssd.bench.run import _header, run, slower
from ssd.bench.workload import Workload, encode, load_workload
from ssd.cli import console
from ssd.cli.main import app
from ssd.config import SpeculationConfig
from ssd.core import Work
from ssd.drafting.controller import DepthController
from ssd.drafting.process import ProcessDrafter
from ssd.errors import ConfigError, ServerError, SSDError
from ssd.grafts.shapes import SHAPES

TINY = ("tiny-llama", "tiny-llama-draft")


def answer(began: float, *deliveries: tuple[float, float]) -> Answer:
    return Answer(began, 5, "", list(deliveries))


def test_one_request_after_the_other() -> None:
    """The first token is the prompt's: neither it nor its time counts as decoding."""
    speed = Speed.of([answer(0, (2, 1), (3, 2), (5, 4)), answer(5, (6, 1), (7, 1))])
    assert (speed.prefill_seconds, speed.decode_seconds, speed.seconds) == (3, 4, 7)
    assert (speed.decode_tokens, speed.output_tokens) == (7, 9)
    assert speed.decode_rate == 7 / 4


def test_a_prompt_read_beside_others_stops_their_clock() -> None:
    """Catches decoding that is timed while somebody's prompt is read, and tokens of that time that count."""
    speed = Speed.of([answer(0, (1, 1), (2, 1), (3, 1), (4, 1)), answer(2, (3, 1), (4, 1))])
    assert (speed.prefill_seconds, speed.decode_seconds) == (2, 2)
    assert speed.decode_tokens == 3  # at 2, and two at 4


def test_pauses_between_requests_do_not_count() -> None:
    speed = Speed.of([answer(0, (1, 1), (2, 1)), answer(100, (101, 1), (102, 1)), answer(200)])
    assert (speed.seconds, speed.decode_seconds, speed.decode_tokens) == (4, 2, 2)
    assert Speed.of([]).decode_rate == 0.0


class Clockwork:
    """A contender that delivers every `steps[prompt]` seconds; all are twice as slow in their first turn."""

    note = ""

    def __init__(self, name: str, steps: dict[str, float], log: list[str] | None = None) -> None:
        self.name, self._steps, self._turns = name, steps, 0
        self._log: list[str] = [] if log is None else log

    def answer(self, prompts: Any, asked: RequestSettings) -> list[Answer]:
        self._turns += 1
        self._log.append(f"{self.name} {''.join(prompts)}")
        steps = [self._steps[prompt] * (2 if self._turns == 2 else 1) for prompt in prompts]  # the first one warms up
        return [Answer(9.0, 3, "", [(10 + i * step, 1.0) for i in range(asked.max_new_tokens)]) for step in steps]

    def close(self) -> None: ...


def compared(slow: dict[str, float], fast: dict[str, float], repeats: int, batch: int = 1) -> list[dict[str, Any]]:
    """Rows of the second of two contenders on sets `a` and `b`, which have the prompts `x`, `y` and `z`."""
    sets = {"a": [p for p in slow if p != "z"], "b": [p for p in slow if p == "z"]}
    workloads = [Workload(name, list(prompts), "", 1) for name, prompts in sets.items() if prompts]
    found = measure(
        [Clockwork("slow", slow), Clockwork("fast", fast)], workloads, RequestSettings(11, batch=batch), repeats
    )
    assert same_text(found) is None
    return [row for row in figures(found) if row["contender"] == "fast"]


def test_figures_are_medians_and_ratios_of_one_turn() -> None:
    """Both are slower in their first turn: catches ratios of one contender's speed now to another's speed then."""
    row, mean = compared({"x": 1.0}, {"x": 0.5}, repeats=2)
    assert row["decode_tokens_per_second_range"] == pytest.approx([1.0, 2.0])
    assert row["decode_tokens_per_second"] == pytest.approx(1.5)
    assert (mean["set"], mean["ratio"]) == (MEAN, pytest.approx(2.0))
    assert mean["ratio_interval"] == pytest.approx([2.0, 2.0])  # of the repeats
    assert row["ttft_ms"]["p50"] == pytest.approx(1000.0)
    assert row["gap_ms"]["p99"] == pytest.approx(1000.0)
    assert row["ms_per_token"] == pytest.approx(750.0)


def test_intervals_are_those_of_the_prompts() -> None:
    """Catches intervals of repeats, which are narrow however much prompts differ, and repeats that count as prompts."""
    slow, fast = {"x": 1.0, "y": 1.0, "z": 1.0}, {"x": 1.0, "y": 0.5, "z": 0.25}
    one, _, mean = compared(slow, fast, repeats=5)
    assert one["ratio"] == pytest.approx(2**0.5)
    low, high = mean["ratio_interval"]
    assert mean["ratio"] == pytest.approx(2.0)
    assert high / 2 == pytest.approx(2 / low)
    assert high / 2 == pytest.approx(2 ** (4.303 / 3**0.5))  # logs 0, 1, 2: their deviation is 1
    *_, again = compared(slow, fast, repeats=1)
    assert again["ratio_interval"] == pytest.approx([low, high])


def test_one_turn_has_no_interval() -> None:
    assert compared({"x": 1.0}, {"x": 0.5}, repeats=1)[0]["ratio_interval"] is None
    batched = compared({"x": 1.0, "y": 1.0}, {"x": 1.0, "y": 0.5}, repeats=1, batch=2)
    assert batched[0]["ratio_interval"] is None
    [*_, nothing] = compared({"x": 0.0}, {"x": 0.5}, repeats=2)  # all tokens at once: there is no decoding
    assert (nothing["ratio"], nothing["ratio_interval"]) == (0.0, None)


def test_contenders_alternate_prompt_by_prompt() -> None:
    """Catches one that always runs first, or first over a whole set while the machine changes."""
    log: list[str] = []
    steps = {"x": 1.0, "y": 1.0}
    found = [Clockwork(name, steps, log) for name in "AB"]
    measure(found, [Workload("a", ["x", "y"], "", 1)], RequestSettings(3), repeats=2)
    assert log == ["A xy", "B xy", *("A x", "B x", "B y", "A y"), *("B x", "A x", "A y", "B y")]
    log.clear()
    measure(found, [Workload("a", ["x", "y"], "", 1)], RequestSettings(3, batch=2), repeats=2)
    assert log == ["A xy", "B xy", "A xy", "B xy", "B xy", "A xy"]


class Told(Progress):
    """Notes what is told, beside what contenders note."""

    def __init__(self, log: list[str]) -> None:
        self._log = log

    def tell(self, line: str) -> None:
        self._log.append(line)


def test_a_method_is_told_of_as_soon_as_it_has_done_a_set() -> None:
    """Catches a benchmark that is silent until its end. How long it takes is told after the warm-up."""
    log: list[str] = []
    found = [Clockwork(name, {"x": 1.0, "y": 1.0}, log) for name in "AB"]
    measure(found, [Workload("a", ["x", "y"], "", 1)], RequestSettings(3), repeats=2, progress=Told(log))
    first, again = ([f"{name}, a, {which} tokens/s" for name in "AB"] for which in ("1 of 2: 0.7", "2 of 2: 1.0"))
    assert log[:3] == ["A xy", "B xy", "turns of each method: 4, about 0.0 minutes in all"]
    assert log[3:8] == ["A x", "B x", "B y", first[1], "A y"]
    assert log[8:] == [first[0], "B x", "A x", "A y", again[0], "B y", again[1]]


def test_lines_reach_a_pipe_at_once_and_a_terminal_has_bars(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(console, "errors", Console(file=io.StringIO(), force_terminal=True))
    pipe = io.BytesIO()
    with console.measuring("loading", Console(file=io.TextIOWrapper(pipe), force_terminal=False)) as progress:
        progress.begin("warm-up", 3)
        progress.tell("ar, [a], 1 of 2: 9.0 tokens/s")
        assert pipe.getvalue() == b"ar, [a], 1 of 2: 9.0 tokens/s\n"
    terminal = io.StringIO()
    with console.measuring("loading", Console(file=terminal, force_terminal=True)) as progress:
        progress.begin("warm-up", 3)("ar warms up")
        progress.tell("a line")
    assert "ar warms up" in console.errors.file.getvalue()  # type: ignore[attr-defined]
    assert terminal.getvalue() == ""


def contender_with(name: str, others: float, threads: int, draft_processes: int = 0, device: str = "cpu") -> Measured:
    """A measurement of one turn beside other processes."""
    llm: Any = SimpleNamespace(config=SimpleNamespace(device=device))
    drafter: Any = None
    turn = Turn(0, 0, [], Speed.of([]), others)
    return Measured(OurContender(name, llm, drafter, threads, draft_processes), {"a": [turn]})


def test_a_busy_machine_and_unequal_cores_are_warned_of(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a comparison in which one method waits for a core that another one does not need."""
    monkeypatch.setattr("ssd.bench.load.own_cores", lambda: frozenset(range(4)))
    fair = [contender_with("ar", 0.1, 4), contender_with("ssd", 0.2, 3, 1)]
    assert warnings(fair) == []
    [busy] = warnings([*fair, contender_with("sd", 0.6, 4), contender_with("sd:2", 0.4, 4)])
    assert busy.startswith("the machine was busy: other processes used 0.6 of its 4 cores")
    assert warnings([contender_with("ar", 1.2, 3)]) == []  # one core was free for the others
    [unequal] = warnings([contender_with("ar", 0.0, 1), contender_with("ssd", 0.0, 1, 1)])
    assert "(ar 1, ssd 2)" in unequal
    gpu = [contender_with("ar", 2.5, 4, device="cuda:0"), contender_with("ssd", 2.0, 4, 1, device="cuda:0")]
    assert warnings(gpu) == []
    [busy] = warnings([*gpu, contender_with("sd", 3.5, 4, device="cuda:0")])
    assert "3.5 of its 4 cores" in busy


def test_own_children_are_no_load() -> None:
    """Catches a draft's process that counts as somebody else's."""
    burn = "import time\nwhile time.process_time() < 0.3: pass\nprint(flush=True)\ninput()"
    before = load.own_seconds()
    with subprocess.Popen([sys.executable, "-c", burn], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        child.stdout.readline()
        running = load.own_seconds()
        child.communicate(b"\n")
    assert running - before > 0.25
    assert load.own_seconds() - before > 0.25  # after its end, too


def test_warnings_are_everywhere(tmp_path: Path) -> None:
    rows = [row | {"contender": "ar"} for row in compared({"x": 1.0, "y": 1.0}, {"x": 0.5, "y": 0.4}, repeats=1)]
    report = Report(_header(BenchConfig(*TINY)), rows, [], None, [], ["the machine was busy: <others>"])
    assert report.as_dict()["warnings"] == report.warnings
    out = io.StringIO()
    report.show(Console(file=out, width=160))
    assert "warning: the machine was busy: <others>" in out.getvalue()
    pytest.importorskip("matplotlib")
    write_picture(report, tmp_path / "report.html")
    page = (tmp_path / "report.html").read_text()
    assert "Warning: the machine was busy: &lt;others&gt;" in page
    assert "<!-- warning: the machine was busy -->" in page  # the title of the drawing


def test_a_report_says_why_drafts_did_not_pay() -> None:
    """Catches a speed-up below 1 that is left without a reason, and a reason that is given for noise."""
    rows: list[dict[str, Any]] = [{"contender": "ar", "set": MEAN, "ratio": 1.0, "ratio_interval": [1.0, 1.0]}]
    rows += [
        {"contender": name, "set": MEAN, "ratio": 0.9, "ratio_interval": interval, "acceptance": 0.5}
        for name, interval in (("sd", [0.8, 1.1]), ("ssd", [0.8, 0.95]), ("auto", None))
    ]
    [note] = slower(rows)
    assert note.startswith("slower than ar: ssd, auto; drafts pay where")
    assert slower(rows[:2]) == []


def test_methods_are_spelled() -> None:
    draft, options = "tiny-llama-draft", {"budget": 8, "acceptance": "rejection"}
    found = methods_of("ar, sd:2,ssd:auto,suffix", draft, 5, options)
    assert [method.name for method in found] == ["ar", "sd k=2", "ssd k=auto", "suffix k=5"]
    assert [method.speculation for method in found] == [
        SpeculationConfig(),
        SpeculationConfig(mode="sd", draft=draft, k=2, acceptance="rejection"),
        SpeculationConfig(mode="ssd", draft=draft, k="auto", k_max=8, budget=8, acceptance="rejection"),
        SpeculationConfig(mode="sd", draft="suffix", k=5),
    ]
    chains = {"acceptance": "coupled"}
    assert [(method.name, method.speculation) for method in methods_of("tree:16,tree:8:2", draft, 5, chains)] == [
        ("tree 16 k=5", SpeculationConfig(mode="sd", draft=draft, tree=16, k=5)),
        ("tree 8 k=2", SpeculationConfig(mode="sd", draft=draft, tree=8, k=2)),
    ]
    [ahead] = methods_of("ssd-tree:16:6", draft, 5, {"budget": 8, "fan_out": 3, "suffix_cache_tokens": 5})
    assert ahead.name == "ssd-tree 16 k=6"
    assert ahead.speculation == SpeculationConfig(mode="ssd", draft=draft, tree=16, k=6, budget=8)
    with pytest.raises(ConfigError, match="tree=16: a tree is a method of its own here: name tree:16"):
        methods_of("sd", draft, 4, {"tree": 16})
    for wrong in ("", "fast", "ar:3", "ar,ar", "sd,sd:4"):
        with pytest.raises(ConfigError):
            methods_of(wrong, draft, None, {})
    with pytest.raises(ConfigError, match="needs a draft"):
        Method.parse("sd", None, 4, {})


@pytest.mark.parametrize(
    "draft",
    mostly_slow(
        ["tiny-llama-draft", "tiny-llama-eagle", "tiny-llama-block", "suffix"], fast={"tiny-llama-block", "suffix"}
    ),
)
def test_methods_without_a_number_have_the_k_of_an_engine(draft: str) -> None:
    """Catches a block draft that is measured with a part of its tokens."""
    chosen = {"mode": "sd", "draft": draft}
    options: dict[str, Any] = {"device": "cpu", "max_num_seqs": 1, "max_model_len": 128}
    with LLM("tiny-llama", speculation=chosen, **options) as llm:
        k = llm.config.speculation.k
    [sd, auto, suffix] = methods_of("sd,auto,suffix", draft, None, {})
    assert [method.speculation.k for method in (sd, auto, suffix)] == [k, k, 16]
    assert (sd.name, suffix.name) == (f"sd k={k}", "suffix k=16")
    [deepest] = methods_of("sd:auto", draft, None, {})
    with LLM("tiny-llama", speculation={**chosen, "k": "auto"}, **options) as llm:
        assert deepest.speculation.lookahead == llm.config.speculation.lookahead


def test_a_block_draft_shares_an_engine_with_longer_look_up() -> None:
    methods = methods_of("ar,sd,auto,suffix", "tiny-llama-block", None, {})
    ours = our_contenders("tiny-llama", methods, batch=1, device="cpu", max_model_len=128)
    with contextlib.closing(ours[0]):
        assert len({id(contender.llm) for contender in ours}) == 1
        plain, block, auto, look_up = (contender.drafter for contender in ours)
        assert [drafter.lookahead for drafter in (plain, block, look_up)] == [0, 7, 16]
        assert isinstance(auto, DepthController)
        assert max(arm.k for arm in auto._arms) == 7
        workload = load_workload("gsm8k", open_checkpoint("tiny-llama").tokenizer(), count=1)
        assert same_text(measure(ours, [workload], RequestSettings(6), repeats=1))
    with pytest.raises(ConfigError, match=r"look-up of 20 tokens .* room for 16: name suffix:16"):
        our_contenders("tiny-llama", [*methods[:2], *methods_of("suffix:20", None, None, {})], batch=1, device="cpu")


def test_the_deepest_draft_of_k_auto_is_an_option_of_every_method() -> None:
    options = {"device": "cpu", "max_model_len": 128}
    methods = methods_of("sd:auto", "tiny-llama-draft", 4, {"k_max": 3})
    [contender] = our_contenders("tiny-llama", methods, batch=1, **options)
    with contextlib.closing(contender):
        assert isinstance(contender.drafter, DepthController)
        assert {arm.k for arm in contender.drafter._arms} == {0, 1, 2, 3}
    with pytest.raises(ConfigError, match='k_max=3 is for k="auto"'):
        methods_of("sd:2", "tiny-llama-draft", 4, {"k_max": 3})


def test_sizes_are_spelled() -> None:
    assert spelled("llama-3-8b") == ("llama", "8")
    assert spelled("Llama-3.2-1B-Instruct") == ("llama", "1")
    assert spelled("qwen3-0.6b") == ("qwen", "0.6")
    assert spelled("llama-3-9b") is None
    assert spelled("tiny-llama") is None


def test_all_methods_share_an_engine_and_write_the_same() -> None:
    """Catches a draft that is swapped in and loses text, counts or its own number of tokens."""
    options = {"placement": "inline", "budget": 6, "fan_out": 2, "draft_quantization": "int8"}
    methods = methods_of("ar,sd:2,ssd:3,ssd:auto,sd:auto,suffix:3", "tiny-llama-draft", 4, options)
    ours = our_contenders("tiny-llama", methods, batch=2, device="cpu", prefix_caching=False, max_model_len=128)
    assert len({id(contender.llm) for contender in ours}) == 1
    tokenizer = open_checkpoint("tiny-llama").tokenizer()
    workload = load_workload("gsm8k", tokenizer, count=2)
    found = measure(ours, [workload], RequestSettings(8, batch=2), repeats=1)
    assert same_text(found)
    rows = {row["contender"]: row for row in figures(found) if row["set"] == MEAN}
    assert rows["ar"]["acceptance"] is None
    assert rows["ar"]["tokens_per_round"] == 1.0
    assert 0 < rows["sd k=2"]["acceptance"] <= 1
    assert rows["sd k=2"]["tokens_per_round"] <= 3
    assert rows["sd k=2"]["hit_rate"] is None
    assert 0 < rows["ssd k=3"]["hit_rate"] <= 1
    assert all(row["output_tokens"] == 16 and row["drafter_failures"] == 0 for row in rows.values())
    found[1].turns["gsm8k"][0].answers[0].token_ids = [1]
    assert same_text(found) is False
    for contender in ours:
        contender.close()


def test_methods_with_an_eagle_head_share_an_engine(tmp_path: Path) -> None:
    """Catches a head that is sent to a process of its own, where it has no features."""
    methods = methods_of("ar,sd:2,ssd:3", make_tiny_head(tmp_path / "head").path, 4, {"budget": 4})
    ours = our_contenders("tiny-llama", methods, batch=1, device="cpu", max_model_len=128)
    assert len({id(contender.llm) for contender in ours}) == 1
    workload = load_workload("gsm8k", open_checkpoint("tiny-llama").tokenizer(), count=1)
    found = measure(ours, [workload], RequestSettings(8, batch=1), repeats=1)
    assert same_text(found)
    assert all(row["drafter_failures"] == 0 for row in figures(found))
    ours[0].close()


@pytest.mark.parametrize("draft", mostly_slow(["tiny-llama-draft", "tiny-llama-eagle"], fast={"tiny-llama-eagle"}))
def test_trees_share_an_engine_with_chains(draft: str) -> None:
    """Catches a chain that is verified as a tree, and a tree that is no better than a chain of its length."""
    ahead = "" if draft.endswith("eagle") else ",ssd:4,ssd-tree:16:4"
    methods = methods_of(f"ar,tree:3:2,sd:4,tree:16:4{ahead}", draft, 4, {"placement": "inline", "backup": "jit"})
    ours = our_contenders("tiny-llama", methods, batch=2, device="cpu", prefix_caching=False, max_model_len=256)
    assert len({id(contender.llm) for contender in ours}) == 1
    workload = load_workload("gsm8k", open_checkpoint("tiny-llama").tokenizer(), count=2)
    found = measure(ours, [workload], RequestSettings(16, batch=2), repeats=1)
    assert same_text(found)
    rows = {row["contender"]: row for row in figures(found) if row["set"] == MEAN}
    assert all(row["drafter_failures"] == 0 for row in rows.values())
    accepted = {name: row["tokens_per_round"] for name, row in rows.items()}
    assert accepted["ar"] == 1.0
    assert 1.0 < accepted["tree 3 k=2"] <= 3.0
    assert accepted["sd k=4"] < accepted["tree 16 k=4"] <= 5.0
    if ahead:
        assert accepted["ssd k=4"] < accepted["ssd-tree 16 k=4"] <= 5.0
        assert rows["ssd-tree 16 k=4"]["hit_rate"] > 0.4
    ours[0].close()
    for other in ("auto", "ssd")[: 1 if ahead else 2]:
        wrong = methods_of(f"tree:8,{other}", draft, 4, {"placement": "inline"})
        with pytest.raises(ConfigError, match=r"trees and .* have no engine in common"):
            our_contenders("tiny-llama", wrong, batch=1, device="cpu")


def test_prompts_are_cut_and_chosen() -> None:
    tokenizer = open_checkpoint("tiny-llama").tokenizer()
    whole = load_workload("alpaca", tokenizer, count=2, chat=False)
    later = load_workload("alpaca", tokenizer, count=1, offset=1, chat=False)
    assert later.prompts == whole.prompts[1:]
    cut = load_workload("alpaca", tokenizer, count=2, input_len=4, chat=False)
    assert [len(encode(tokenizer, prompt)) for prompt in cut.prompts] == [4, 4]
    assert cut.longest == 4
    random = load_workload("random", tokenizer, count=2, input_len=7, seed=1)
    assert random == load_workload("random", tokenizer, count=2, input_len=7, seed=1)
    assert [len(prompt) for prompt in random.prompts] == [7, 7]
    chat = load_workload("example", tokenizer, count=9)
    assert all(isinstance(prompt[0], dict) for prompt in chat.prompts)
    function = load_workload("humaneval", tokenizer, count=1)
    assert isinstance(function.prompts[0], str)


def test_the_report_says_how_many_prompts_were_measured() -> None:
    """Catches the size of a set in their place, and a set that is smaller than asked for without a word."""
    tokenizer = open_checkpoint("tiny-llama").tokenizer()
    assert load_workload("gsm8k", tokenizer, count=2).origin.startswith("2 of 40 prompts, written for ssd")
    few = load_workload("gsm8k", tokenizer, count=9, offset=38)
    assert few.origin.startswith(f"{len(few.prompts)} of 40 prompts (9 were asked for), ")
    assert len(few.prompts) == 2
    assert load_workload("random", tokenizer, count=3).origin == "3 prompts of random tokens, 128 each"


@pytest.mark.parametrize(
    ("methods", "peers", "draft"),
    [
        ("ar,suffix:3", ("hf", "http://127.0.0.1:8000"), None),
        ("ar,sd:2", (), "tiny-llama-draft"),
        ("ar", ("hf:2",), "tiny-llama-draft"),
    ],
)
def test_the_title_has_a_draft_only_if_one_ran(methods: str, peers: tuple[str, ...], draft: str | None) -> None:
    config = BenchConfig(*TINY, methods=methods, peers=peers)
    title = Report(_header(config), [], [], None, []).title
    assert title.startswith("tiny-llama, " if draft is None else f"tiny-llama + {draft}, ")
    rounded = Report(_header(replace(config, engine={"quantization": "fp8"})), [], [], None, []).title
    assert ", quantization=fp8, batch" in rounded


@pytest.mark.parametrize(
    ("peers", "message"),
    [
        (("hf", "http://127.0.0.1:9"), "no server answers"),
        (("hf", "vllm"), "vllm is not installed"),
        (("hf", "llamacpp"), "gguf files only"),
        (("hf:2",), "batch=2"),
    ],
)
def test_peers_are_checked_before_a_model_is_loaded(
    monkeypatch: pytest.MonkeyPatch, peers: tuple[str, ...], message: str
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    monkeypatch.setattr("ssd.bench.run.our_contenders", lambda *_, **__: pytest.fail("a model is loaded"))
    with pytest.raises(SSDError, match=message):
        run(BenchConfig(*TINY, peers=peers, batch=2))


@pytest.mark.slow
def test_a_report_with_peers(tmp_path: Path) -> None:
    """transformers and a server beside the engine, in one table, as JSON, as a picture and as a page."""
    files = {kind: tmp_path / f"report.{kind}" for kind in ("json", "png", "svg", "html")}
    flags = [
        "bench",
        *TINY[:1],
        "--compare",
        "ar,sd:2",
        "--sets",
        "gsm8k,alpaca",
        "--prompts",
        "1",
        "--max-tokens",
        "8",
    ]
    flags += ["--repeats", "1", "--device", "cpu", "--json", str(files["json"])]
    flags += [part for kind in ("png", "svg", "html") for part in ("--plot", str(files[kind]))]
    with serving() as server:
        result = CliRunner().invoke(app, [*flags, "--peer", f"hf,hf:3,{server.url}"])
    assert result.exit_code == 0, result.output
    report = json.loads(files["json"].read_text())
    rows = {row["contender"]: row for row in report["results"] if row["set"] == MEAN}
    name = server.url.removeprefix("http://")
    assert list(rows) == ["ar", "sd k=2", "transformers", "transformers sd:3", name]
    assert rows[name]["output_tokens"] == 2 * len(PIECES) * TOKENS_A_PIECE
    assert rows["transformers"]["output_tokens"] == 16
    assert report["same_text"] is True
    assert any(note.startswith("transformers: transformers ") for note in report["notes"])
    assert files["png"].read_bytes().startswith(b"\x89PNG")
    page = files["html"].read_text()
    for part in ("<svg", "sd k=2", name, "written for ssd", "tokens/s", "<th>first token</th>"):
        assert part in page
    assert "http" not in page.split("<svg")[0].replace("http://www.w3.org", "").replace(server.url, "")
    assert "every method wrote the same tokens" in result.output


def test_characters_without_a_font_are_escaped() -> None:
    """Catches boxes in pictures: every character is in one of the fonts, or spelt out."""
    fonts = ["DejaVu Sans"]
    assert _legible("tiny é 東", fonts) == r"tiny é \u6771"
    assert _fonts()[0] == fonts[0]


def test_the_picture_of_hit_rates_has_axis_titles_and_a_legend_above_its_panels() -> None:
    hits = importlib.import_module("hits")
    rates = dict.fromkeys(hits.POLICIES, [0.5] * len(hits.BUDGETS))
    drawn = ElementTree.fromstring(hits.picture({0.0: rates, 1.0: rates}, 4))
    svg = "{http://www.w3.org/2000/svg}"
    legend, panels = drawn.findall(f"{svg}text"), drawn.findall(f"{svg}g")
    assert [(text.text or "").split(":")[0] for text in legend] == list(hits.POLICIES)
    assert all(float(text.get("y", "")) < 34 for text in legend)
    for panel in panels:
        said = [text.text for text in panel.findall(f"{svg}text")]
        assert {"hit rate", "prepared branches"} <= set(said)


@pytest.mark.slow
def test_a_draft_in_a_process_is_a_contender_too() -> None:
    methods = methods_of("ar,ssd:2", "tiny-llama-draft", 2, {"budget": 4})
    ours = our_contenders("tiny-llama", methods, batch=1, device="cpu", max_model_len=128)
    try:
        assert len({id(contender.llm) for contender in ours}) == 2
        workload = load_workload("gsm8k", open_checkpoint("tiny-llama").tokenizer(), count=1)
        assert same_text(measure(ours, [workload], RequestSettings(12), repeats=1))
        assert isinstance(ours[1], OurContender)
        assert ours[1].metrics.draft_busy_seconds > 0  # a reply that is at hand takes no time to hand over
        assert ours[1].metrics.draft_busy_seconds > 0
    finally:
        for contender in ours:
            contender.close()


def test_a_draft_server_is_measured_beside_the_other_methods(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches the server's draft in a method that has another one, and a token in a report."""
    propose = ProcessDrafter.propose

    def patient(self: ProcessDrafter, works: list[Work]) -> Any:
        """However busy the machine is, drafts are prepared in time."""
        until(lambda: all(each.available() and not each.preparing for each in self.replicas))
        return propose(self, works)

    monkeypatch.setattr(ProcessDrafter, "propose", patient)
    flags = ["bench", *TINY[:1], "--sets", "example", "--prompts", "1", "--max-tokens", "12", "--repeats", "1"]
    flags += ["--device", "cpu", "--compare", "ar,sd:2,ssd:4", "--draft-token", "a-secret", "--json", "-"]
    monkeypatch.setattr("sys.argv", ["ssd", *flags])
    with draft_server(tmp_path, tokens=("a-secret",), listen=("tcp://127.0.0.1:0",)) as server:
        url = f"tcp://127.0.0.1:{server.addresses[0].port}"
        result = CliRunner().invoke(app, [*flags, "--draft-url", url])
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    assert report["same_text"] is True
    rows = {row["contender"]: row for row in report["results"] if row["set"] == MEAN}
    assert list(rows) == ["ar", "sd k=2", "ssd k=4"]
    assert rows["sd k=2"]["hit_rate"] is None
    assert rows["ssd k=4"]["hit_rate"] > 0
    assert rows["ssd k=4"]["tokens_per_round"] > 1
    assert rows["ssd k=4"]["drafter_failures"] == 0
    assert report["settings"]["speculation"]["draft_url"] == url
    assert "--draft-token … --json" in report["command"]
    assert "a-secret" not in result.stdout


def test_a_draft_server_that_is_not_there_is_no_method() -> None:
    nowhere = {"draft_url": "tcp://127.0.0.1:9"}
    for k in (4, "auto"):
        methods = methods_of("ssd", None, k, nowhere)
        with pytest.raises(ServerError, match=r"draft_url=.*no draft server is ready: start one with ssd draft-server"):
            our_contenders("tiny-llama", methods, batch=1, device="cpu", max_model_len=128)
    with pytest.raises(ConfigError, match="a draft server drafts for the method ssd: name it, too"):
        methods_of("ar,sd", "tiny-llama-draft", 4, nowhere)
    [ssd, auto] = methods_of("ssd,auto", "tiny-llama-draft", 4, nowhere)
    assert ssd.speculation == SpeculationConfig(mode="ssd", k=4, **nowhere)
    assert auto.speculation == SpeculationConfig(mode="auto", draft="tiny-llama-draft", k=4)
    assert methods_of("ssd", None, None, nowhere)[0].speculation.k == 4
    with pytest.raises(ConfigError, match="has no option fan_out"):
        methods_of("ssd", None, 4, {**nowhere, "fan_out": 2})


@pytest.mark.slow
def test_different_texts_are_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    """The exit code says so: catches a check that cannot fail."""
    import ssd.bench.run as module

    monkeypatch.setattr(module, "same_text", lambda found: False)
    flags = ["bench", "--compare", "ar,suffix:2", "--sets", "example", "--prompts", "1", "--max-tokens", "4"]
    result = CliRunner().invoke(app, [*flags, "--repeats", "1", "--device", "cpu"])
    assert result.exit_code == 1
    assert "this is a bug" in result.output


def test_json_alone_goes_to_stdout() -> None:
    flags = ["--compare", "ar", "--sets", "random", "--prompts", "1", "--max-tokens", "4", "--input-len", "8"]
    flags += ["--repeats", "1", "--quantization", "int8", "--json", "-"]
    result = CliRunner().invoke(app, ["bench", "tiny-llama-draft", *flags])
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    assert report["results"][0]["prompt_tokens"] == 8
    assert "ssd: weights rounded to int8 when loaded" in report["notes"]
    assert "ar, random, 1 of 1: " in result.stderr


def test_a_pipe_has_a_line_for_every_method_before_the_report() -> None:
    flags = ["--compare", "ar,suffix:2", "--sets", "example", "--prompts", "1", "--max-tokens", "4", "--repeats", "1"]
    result = CliRunner().invoke(app, ["bench", "tiny-llama", *flags])
    told, *lines = [line.partition(": ")[0].strip() for line in result.stdout.splitlines()[:4]]
    assert told == "turns of each method"
    assert lines[:2] == ["ar, example, 1 of 1", "suffix k=2, example, 1 of 1"]
    assert lines[2].startswith("tiny-llama, batch 1")
    assert result.stderr.startswith("loading tiny-llama\n")


def test_the_rejection_rule_writes_other_tokens_and_is_not_compared() -> None:
    config = BenchConfig(
        *TINY,
        methods="ar,sd:2",
        speculation={"acceptance": "rejection", "saguaro_c": 0.5},
        sets=("example",),
        num_prompts=1,
        output_len=8,
        temperature=1.0,
        repeats=1,
        engine={"device": "cpu"},
    )
    assert run(config).same_text is None


@pytest.mark.slow
def test_every_product_of_a_model_is_timed() -> None:
    lab = Path(__file__).parents[2] / "bench" / "linear.py"
    command = [sys.executable, str(lab), "--shape", "cpu-7m", "--rows", "1", "3"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    rows = [line.split() for line in done.stdout.splitlines()[2:]]
    shape = SHAPES["cpu-7m"]
    products = {row[0]: int(row[1]) * int(row[2]) for row in rows}
    assert [row[3] for row in rows] == ["1", "3"] * 5
    assert all(float(row[6]) > 0 for row in rows)
    layer = products["qkv"] + products["output"] + products["gate/up"] + products["down"]
    weights = RandomCheckpoint(shape).weights(torch.device("cpu"), torch.float32)
    matrices = {name: tensor.numel() for name, tensor in weights if tensor.dim() == 2}
    assert sum(matrices.values()) == layer * shape.num_layers + products["head"]  # the embedding is the head


def test_a_trace_prints_nothing_of_the_profiler(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Its library writes to the process's own standard error."""
    file = tmp_path / "rounds.json"
    arguments = ["bench", "tiny-llama-draft", "--compare", "ar", "--prompts", "1", "--sets", "humaneval", "-m", "12"]
    arguments += ["--repeats", "1"]
    done = CliRunner().invoke(app, [*arguments, "--trace", str(file), "--device", "cpu"])
    assert done.exit_code == 0, done.output
    assert capfd.readouterr().err == ""
    assert json.loads(file.read_text())["traceEvents"]
