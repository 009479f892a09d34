"""Every command line that users of the public research code know does what it says, on the bundled models."""

from __future__ import annotations

import argparse
import importlib.util
import io
import json
import shlex
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import sizes
from arguments import GPUs, pair_of
from conftest import mostly_slow
from eagle_heads import make_tiny_head

from ssd.errors import ConfigError, ModelNotFound

BENCH = Path(__file__).parents[2] / "bench"
COMMANDS = [line for line in (BENCH / "commands.txt").read_text().splitlines() if line.startswith("python")]
BENCH_COMMANDS = [c for c in COMMANDS if "bench.py" in c and "--eagle" not in c]
EAGLE_COMMANDS = [c for c in COMMANDS if "--eagle" in c]
SHORT = ["--numseqs", "1", "--output_len", "10"]  # the last one counts
FIELDS = {
    "decode_tokens_per_second",
    "ratio",
    "ttft_ms",
    "gap_ms",
    "ms_per_token",
    "prompt_tokens_per_second",
    "output_tokens",
    "acceptance",
    "hit_rate",
    "tokens_per_round",
}


def door(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"door_{name}", BENCH / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class FakeWandb(ModuleType):
    """Writes down what it is told."""

    def __init__(self) -> None:
        super().__init__("wandb")
        self.__spec__ = importlib.util.spec_from_loader("wandb", None)
        self.started: dict[str, Any] = {}
        self.logged: dict[str, float] = {}
        self.finished = False

    def init(self, **options: Any) -> FakeWandb:
        self.started = options
        return self

    def log(self, figures: dict[str, float]) -> None:
        self.logged |= figures

    def finish(self) -> None:
        self.finished = True


@pytest.fixture(autouse=True)
def settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SSD_TINY_MODELS", "1")
    for name in ("SSD_DATASET_DIR", "HF_DATASETS_CACHE", "SSD_TARGET_MODEL", "SSD_DRAFT_MODEL", "SSD_EAGLE3_SPECFORGE"):
        monkeypatch.delenv(name, raising=False)
    for name in ("SSD_VLLM_PYTHON", "SSD_SGLANG_PYTHON"):
        monkeypatch.delenv(name, raising=False)


def bench(monkeypatch: pytest.MonkeyPatch, *flags: str) -> int:
    monkeypatch.setattr(sys, "argv", ["bench.py", *flags])
    return int(door("bench").main())


def program_and_flags(command: str) -> tuple[str, list[str]]:
    words = [word for word in shlex.split(command)[1:] if word != "-O"]
    return words[0], words[1:]


def starts_a_process(command: str) -> bool:
    return "--async" in command or "--method ssd" in command


@pytest.mark.parametrize(
    "command",
    mostly_slow(
        BENCH_COMMANDS, fast=[c for c in BENCH_COMMANDS if ("--spec --k" in c and "--all" not in c) or "--wandb" in c]
    ),
)
def test_bench(command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    _, flags = program_and_flags(command)
    wandb = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    file = tmp_path / "report.json"
    extra = ["--k", "3"] if "--k" in flags and "--flh" not in flags else []
    assert bench(monkeypatch, *flags, *SHORT, *extra, "--json", str(file)) == 0
    report = json.loads(file.read_text())
    sets = 4 if "--all" in flags else 1
    assert len(report["results"]) == sets + 1
    method = "ssd" if "--async" in flags or "ssd" in flags else "sd" if "--spec" in flags else "ar"
    for row in report["results"]:
        assert row["contender"].startswith(method)
        assert set(row) >= FIELDS
        assert row["output_tokens"] == row["requests"] * 10
        assert row["decode_tokens_per_second"] > 0
        assert row["drafter_failures"] == 0
        assert (row["acceptance"] is not None) == (method != "ar")
    family = "tiny-qwen3" if "--qwen" in flags else "tiny-llama"
    assert report["settings"]["model"] == family
    assert report["settings"]["draft"] == (f"{family}-draft" if method != "ar" else None)
    assert any("written for ssd" in note or "examples" in note for note in report["notes"])
    assert ("--gpus" in flags) == any("so everything runs on one device" in note for note in report["notes"])
    shown = capsys.readouterr().out
    assert "tokens/s" in shown
    assert wandb.finished == ("--wandb" in flags)
    if "--wandb" in flags:
        assert wandb.started["group"] == "myexp"
        assert wandb.logged["ar/decode_tokens_per_second"] > 0
    if "--example" in flags:
        assert len(report["settings"]["sets"]) == 1


@pytest.mark.parametrize("command", mostly_slow(EAGLE_COMMANDS, fast=EAGLE_COMMANDS[:1]))
def test_bench_with_an_eagle_head(command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    head, file = make_tiny_head(tmp_path / "head").path, tmp_path / "report.json"
    monkeypatch.setenv("SSD_EAGLE3_SPECFORGE", str(head))
    assert bench(monkeypatch, *program_and_flags(command)[1], *SHORT, "--json", str(file)) == 0
    report = json.loads(file.read_text())
    assert report["settings"]["draft"] == str(head)
    for row in report["results"]:
        assert row["contender"].startswith("ssd")
        assert row["output_tokens"] == row["requests"] * 10
        assert row["drafter_failures"] == 0
        assert row["hit_rate"] is not None


def test_heads_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    def head(size: str | None, **given: Any) -> str | None:
        args = argparse.Namespace(**{"qwen": False, "model": None, "draft": None, "graft": False} | given)
        return pair_of(args, size=size, drafted=True, eagle=True)[1]

    assert head("8") == "tiny-llama-eagle"
    assert head("32", qwen=True, graft=True) == "graft:tiny-qwen3-eagle@qwen3-32b"
    assert head("70", draft="here") == "here"
    with pytest.raises(ConfigError, match="name the EAGLE-3 head of here with --draft, or in SSD_EAGLE3_SPECFORGE"):
        head(None, model="here")
    monkeypatch.delenv("SSD_TINY_MODELS")
    monkeypatch.setenv("SSD_HF_CACHE", str(tmp_path))
    with pytest.raises(ModelNotFound, match=r"lmsys/SGLang-EAGLE3-Llama-3\.3-70B-Instruct-SpecForge"):
        sizes.find_head("llama", "70")
    with pytest.raises(ConfigError, match="qwen EAGLE-3 heads come in 32"):
        sizes.find_head("qwen", "8")


@pytest.mark.parametrize(
    "command",
    [pytest.param(c, marks=pytest.mark.slow if starts_a_process(c) else []) for c in COMMANDS if "chat.py --ssd" in c],
)
def test_chat(command: str, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    _, flags = program_and_flags(command)
    monkeypatch.setattr(sys, "argv", ["chat.py", *flags, "--max_tokens", "6"])
    monkeypatch.setattr(sys, "stdin", io.StringIO("Hello.\n"))
    door("chat").main()
    captured = capsys.readouterr()
    assert captured.out.strip()
    assert "so everything runs on one device" in captured.err.replace("\n", " ")
    assert ("tokens/s" in captured.err) == ("--metrics" in flags)


@pytest.mark.parametrize("command", [c for c in COMMANDS if "chat.py --ssd" not in c and "chat.py" in c])
def test_chat_with_a_server_that_is_not_installed(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["chat.py", *program_and_flags(command)[1]])
    with pytest.raises(SystemExit, match="environment of its own"):
        door("chat").main()


def config(monkeypatch: pytest.MonkeyPatch, flags: str) -> Any:
    module = door("bench")
    monkeypatch.setattr(sys, "argv", ["bench.py", *shlex.split(flags)])
    return module.config_of(module.arguments())


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("--method ar", {"methods": "ar", "draft": None, "sets": ("gsm8k",), "num_prompts": 128, "output_len": 512}),
        ("--spec", {"methods": "sd", "k": 4}),
        ("--compare ar,sd:2,ssd:3", {"methods": "ar,sd:2,ssd:3", "draft": "tiny-llama-draft"}),
        ("--method ssd --f 2 --k 4", {"speculation": {"fan_out": 2, "budget": 10}}),
        (
            "--method ssd --k 2 --flh 1 2 3 --flm 3 1 0",
            {"speculation": {"fan_out_hit": [1, 2, 3], "fan_out_miss": [3, 1, 0], "budget": 6}},
        ),
        ("--method ssd --k 1 --fl 2 2", {"speculation": {"fan_out_hit": [2, 2], "fan_out_miss": [2, 2], "budget": 4}}),
        ("--method sd --x 0.25", {"speculation": {"acceptance": "rejection", "saguaro_c": 0.25}}),
        ("--spec --draft_quantization int8", {"speculation": {"draft_quantization": "int8"}}),
        ("--method ssd --backup fast", {"speculation": {"backup": "fast"}}),
        ("--humaneval --c4 --random", {"sets": ("humaneval", "c4", "random")}),
        ("--alpaca --ultrafeedback --gsm", {"sets": ("alpaca", "gsm8k", "ultrafeedback")}),
        ("--b 4 --temp 0.7 --dtemp 0.7 --input_len 9", {"batch": 4, "temperature": 0.7, "input_len": 9}),
        ("--eager --block_sz 8 --device cpu", {"engine": {"eager": True, "block_size": 8, "device": "cpu"}}),
        ("--max_model_len 64", {"engine": {"max_model_len": 64}}),
        ("--size 70 --graft --quantization fp8", {"engine": {"quantization": "fp8"}}),
        ("--prompt_offset 3 --chat_template --max-steps 5", {"prompt_offset": 3, "chat": True, "max_rounds": 5}),
        ("--peer hf,http://127.0.0.1:1 --repeats 3", {"peers": ("hf", "http://127.0.0.1:1"), "repeats": 3}),
        ("--peer vllm:4", {"methods": "ar", "draft": "tiny-llama-draft"}),
        ("--qwen --size 32 --graft --spec", {"model": "graft:tiny-qwen3@qwen3-32b"}),
        ("--size 8 --graft --spec --draft 3", {"draft": "graft:tiny-llama-draft@llama-3.2-3b"}),
        ("--model tiny-qwen3 --spec --draft tiny-qwen3-draft", {"model": "tiny-qwen3", "draft": "tiny-qwen3-draft"}),
    ],
)
def test_flags_arrive(flags: str, expected: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    found = config(monkeypatch, flags)
    assert {name: getattr(found, name) for name in expected} == expected


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("--async", "add --spec"),
        ("--f 3", "for SSD"),
        ("--x 0.5", "add --spec"),
        ("--temp 0.7 --dtemp 0.1", "target's temperature"),
        ("--qwen --size 70", "qwen models come in"),
        ("--size 32", "llama models come in"),
        ("--numseqs 0", "num_prompts=0"),
        ("--prompt_offset -1", "prompt_offset=-1"),
        ("--peer nobody", "'nobody'"),
        ("--sweep nonsense", "JSON list"),
        ("--sweep '[1]'", "list of objects"),
        ("--sweep '[{\"kk\": 1}]'", "'kk'"),
        ('--sweep \'[{"k": 1}, {"k": 2}]\' --plot a.png', "one report"),
        ("--plot report.gif", ".png"),
        ("--plot /no/such/folder/a.png", "no folder"),
        ("--json /no/such/folder/a.json", "no folder"),
        ("--c4", "get_data_from_hf.py"),
        ("--compare ar,xx", "'xx'"),
        ("--compare ar,ar", "twice"),
        ("--prompt_offset 1000", "lower the offset"),
    ],
)
def test_what_makes_no_sense_is_refused(flags: str, said: str, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    assert bench(monkeypatch, *shlex.split(flags)) == 1
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "ranks", "speculation"),
    [
        ("--gpus 4", 4, {}),
        ("--gpus 4 --spec --k 6", 4, {}),
        ("--gpus 5 --spec --async --k 6", 4, {"placement": "process"}),
        ("--gpus 1 --spec --async --k 6", 1, {}),
        ("--gpus 6", 1, {}),
    ],
)
def test_the_target_is_split_over_the_gpus(
    monkeypatch: pytest.MonkeyPatch, flags: str, ranks: int, speculation: dict[str, str]
) -> None:
    """On a machine with five: SSD's draft has the last one."""
    monkeypatch.setattr("torch.cuda.device_count", lambda: 5)
    found = config(monkeypatch, f"--model tiny-llama {flags}")
    assert (found.engine.get("tensor_parallel_size", 1), found.speculation) == (ranks, speculation)
    assert bool(found.notes) == (flags == "--gpus 6")
    ranks, placement, note = GPUs.of(5, "auto", ahead=True, head=True)
    assert (ranks, placement) == (4, {})
    assert "an EAGLE head is on the target's first GPU" in note


def test_missing_weights_are_looked_for_and_explained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setenv("SSD_TINY_MODELS", "0")
    monkeypatch.setenv("SSD_HF_CACHE", str(tmp_path))
    _, flags = program_and_flags(next(c for c in COMMANDS if "--gpus 5 --spec --async --k 7" in c and "-O" in c))
    assert bench(monkeypatch, *flags) == 1
    said = capsys.readouterr().err
    assert str(tmp_path / "models--meta-llama--Llama-3.3-70B-Instruct") in said
    assert "scripts/download_from_hf.py llama --sizes 70" in said


def test_weights_are_found_in_the_cache_and_by_variables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    snapshot = tmp_path / "models--meta-llama--Llama-3.1-8B-Instruct" / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text("{}")
    monkeypatch.setenv("SSD_TINY_MODELS", "0")
    monkeypatch.setenv("SSD_HF_CACHE", str(tmp_path))
    assert config(monkeypatch, "--size 8").model == str(snapshot)
    monkeypatch.setenv("SSD_TARGET_MODEL", "tiny-llama")
    monkeypatch.setenv("SSD_DRAFT_MODEL", "tiny-llama-draft")
    found = config(monkeypatch, "--size 70 --spec")
    assert (found.model, found.draft) == ("tiny-llama", "tiny-llama-draft")


@pytest.mark.parametrize(
    ("flags", "pair"),
    [
        ("--size 70 --spec", ("T", "D")),
        ("--size 70 --spec --draft 1", ("T", "D")),
        ("--model llama-3-8b --spec --draft 3", ("T", "D")),
        ("--size 8 --spec --draft 1 --graft", ("T", "D")),
        ("--model M --spec", ("M", "D")),
        ("--size 8 --spec --draft P", ("T", "P")),
        ("--model M --spec --draft P", ("M", "P")),
        ("--size 8", ("T", None)),
    ],
)
def test_variables_stand_for_any_size(flags: str, pair: tuple[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """For target and draft alike; a model that is named goes before them."""
    monkeypatch.setenv("SSD_TARGET_MODEL", "T")
    monkeypatch.setenv("SSD_DRAFT_MODEL", "D")
    found = config(monkeypatch, flags)
    assert (found.model, found.draft) == pair


def test_a_sweep_is_several_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "reports.json"
    sweep = json.dumps([{"k": 2, "spec": True}, {"max-steps": 4}])
    assert bench(monkeypatch, "--sweep", sweep, *SHORT, "--json", str(file)) == 0
    first, second = json.loads(file.read_text())
    assert (first["settings"]["methods"], first["settings"]["k"]) == ("sd", 2)
    assert second["results"][0]["rounds"] == 4
    assert second["results"][0]["output_tokens"] < 10


def test_the_architecture_to_compile_for(monkeypatch: pytest.MonkeyPatch) -> None:
    import os

    from arguments import use_cuda_arch

    monkeypatch.setenv("SSD_CUDA_ARCH", "9.0")
    monkeypatch.delenv("TORCH_CUDA_ARCH_LIST", raising=False)
    use_cuda_arch()
    assert os.environ["TORCH_CUDA_ARCH_LIST"] == "9.0"
