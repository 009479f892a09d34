"""The two scripts that fetch from the Hugging Face hub, with a hub of our own: no network, no `datasets` library."""

from __future__ import annotations

import errno
import importlib
import os
import subprocess
import sys
from collections import namedtuple
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import httpx
import pytest
from huggingface_hub import constants
from huggingface_hub.errors import GatedRepoError, LocalEntryNotFoundError

from ssd.assembly.open import BUNDLE, open_checkpoint
from ssd.models.repository import UNWANTED, WANTED
from ssd.prompts import load_prompts

SCRIPTS = Path(__file__).parents[2] / "scripts"
LLAMA_1B = "meta-llama/Llama-3.2-1B-Instruct"


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for variable in ("SSD_DATASET_DIR", "HF_DATASETS_CACHE", "SSD_HF_CACHE"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.syspath_prepend(str(SCRIPTS))
    monkeypatch.chdir(tmp_path)


# --- prompt sets ------------------------------------------------------------------------------------------------------


ROWS: dict[str, list[dict[str, str]]] = {
    "openai/openai_humaneval": [{"prompt": f"def f{i}():\n"} for i in range(6)],
    "tatsu-lab/alpaca": [
        {"instruction": "Name a river.", "input": ""},
        {"instruction": "Translate.", "input": "über \u2028 日本"},
        *({"instruction": f"Do {i}.", "input": " "} for i in range(10)),
    ],
    "openai/gsm8k": [{"question": f"{i} + {i}?"} for i in range(9, 0, -1)],
    "HuggingFaceH4/ultrafeedback_binarized": [{"prompt": f"Why {i}?"} for i in range(12)],
    "allenai/c4": [{"text": f"Page {i}."} for i in range(100)],
}
ALL = ["humaneval", "alpaca", "gsm8k", "ultrafeedback", "c4"]


class Hub(ModuleType):
    """Stands in for `datasets`: remembers what it was asked for, and fails when told to."""

    def __init__(self) -> None:
        super().__init__("datasets")
        self.rows = {repository: list(rows) for repository, rows in ROWS.items()}
        self.asked: list[tuple[str, str | None, str, bool]] = []
        self.failures: dict[str, tuple[int, BaseException]] = {}  # after so many rows

    def load_dataset(self, repository: str, config: str | None, *, split: str, streaming: bool) -> Any:
        self.asked.append((repository, config, split, streaming))
        return Stream(self, repository) if streaming else Table(self, repository)

    def fetched(self) -> list[str]:
        return [repository for repository, *_ in self.asked]


class Stream:
    def __init__(self, hub: Hub, repository: str) -> None:
        self.rows, self.failure = hub.rows[repository], hub.failures.get(repository)

    def __iter__(self) -> Iterator[dict[str, str]]:
        for number, row in enumerate(self.rows):
            if self.failure and number == self.failure[0]:
                raise self.failure[1]
            yield row


class Table(Stream):
    def __len__(self) -> int:
        return len(self.rows)


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Hub:
    hub = Hub()
    monkeypatch.setitem(sys.modules, "datasets", hub)
    return hub


def get_data(*args: object) -> int:
    return int(importlib.import_module("get_data_from_hf").main([str(arg) for arg in args]))


def files(folder: Path) -> list[str]:
    return sorted(str(file.relative_to(folder)) for file in folder.rglob("*") if file.is_file())


def test_every_set_is_where_load_prompts_finds_it(hub: Hub, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Catches a wrong repository, field, layout or encoding; and a run that does not say where the sets are."""
    assert get_data("--num-samples", 4, "--output-dir", tmp_path) == 0
    assert hub.asked == [
        ("openai/openai_humaneval", None, "test", False),
        ("tatsu-lab/alpaca", None, "train", False),
        ("openai/gsm8k", "main", "test", False),
        ("HuggingFaceH4/ultrafeedback_binarized", None, "train_prefs", False),
        ("allenai/c4", "en", "train", True),
    ]
    assert files(tmp_path) == sorted(f"{name}/{name}_data_4.jsonl" for name in ALL)
    prompts = {name: load_prompts(name, tmp_path).prompts for name in ALL}
    assert prompts["humaneval"] == tuple(f"def f{i}():\n" for i in range(4))
    assert prompts["alpaca"] == ("Name a river.", "Translate.\n\nüber \u2028 日本", "Do 0.", "Do 1.")
    assert prompts["gsm8k"] == ("9 + 9?", "8 + 8?", "7 + 7?", "6 + 6?")
    assert prompts["ultrafeedback"] == tuple(f"Why {i}?" for i in range(4))
    assert prompts["c4"] == tuple(f"Page {i}." for i in range(4))
    assert f"export SSD_DATASET_DIR={tmp_path}" in capsys.readouterr().out


def test_chosen_sets_only_and_always_the_same_bytes(hub: Hub, tmp_path: Path) -> None:
    assert get_data("--num-samples", 9, "--datasets", "c4", "gsm8k", "c4", "--output-dir", tmp_path) == 0
    assert hub.fetched() == ["allenai/c4", "openai/gsm8k"]
    first = {name: (tmp_path / name).read_bytes() for name in files(tmp_path)}
    assert get_data("--num-samples", 9, "--datasets", "c4", "gsm8k", "--force", "--output-dir", tmp_path) == 0
    assert len(hub.asked) == 4
    assert {name: (tmp_path / name).read_bytes() for name in files(tmp_path)} == first


@pytest.mark.parametrize(
    ("environment", "folder"),
    [
        ({}, "processed_datasets"),
        ({"HF_DATASETS_CACHE": "cache"}, "cache/processed_datasets"),
        ({"HF_DATASETS_CACHE": "cache", "SSD_DATASET_DIR": "prompts"}, "prompts"),
        ({"HF_DATASETS_CACHE": "", "SSD_DATASET_DIR": ""}, "processed_datasets"),
    ],
)
def test_default_folder(
    hub: Hub, environment: dict[str, str], folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for variable, value in environment.items():
        monkeypatch.setenv(variable, value)
    assert get_data("--num-samples", 1, "--datasets", "gsm8k") == 0
    assert files(tmp_path) == [f"{folder}/gsm8k/gsm8k_data_1.jsonl"]


def test_a_small_set_is_taken_whole_and_known_to_be_whole(hub: Hub, tmp_path: Path) -> None:
    """Catches padding, and fetching a whole set again because its name says fewer than are asked for now."""
    for count in (8, 10_000):
        assert get_data("--num-samples", count, "--datasets", "humaneval", "--output-dir", tmp_path) == 0
    assert files(tmp_path) == ["humaneval/humaneval_data_8.jsonl"]
    assert len(load_prompts("humaneval", tmp_path).prompts) == 6
    assert len(hub.asked) == 1


def test_one_file_a_set_whatever_was_asked_before(hub: Hub, tmp_path: Path) -> None:
    """Catches an older file that `load_prompts` would read instead, by the order of names."""
    c4 = ("--datasets", "c4", "--output-dir", tmp_path, "--num-samples")
    kept = []
    for arguments in ((*c4, 20), (*c4, 3), (*c4, 20), (*c4, 100), (*c4, 30, "--force")):
        assert get_data(*arguments) == 0
        kept.append((files(tmp_path), len(load_prompts("c4", tmp_path).prompts), len(hub.asked)))
    twenty = (["c4/c4_data_20.jsonl"], 20, 1)
    assert kept[:3] == [twenty] * 3  # a bigger file serves as well
    assert kept[3:] == [(["c4/c4_data_100.jsonl"], 100, 2), (["c4/c4_data_30.jsonl"], 30, 3)]


def test_files_of_others_stay_and_are_pointed_out(hub: Hub, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    theirs = tmp_path / "gsm8k" / "gsm8k.jsonl"
    theirs.parent.mkdir()
    theirs.write_text('{"text": "mine"}\n')
    assert get_data("--num-samples", 2, "--datasets", "gsm8k", "--output-dir", tmp_path) == 0
    assert load_prompts("gsm8k", tmp_path).prompts == ("mine",)
    assert "hides" in capsys.readouterr().err


def test_resumes_after_an_interruption_in_the_middle_of_a_set(
    hub: Hub, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Catches a half-written set that looks finished, a lost older file, and finished sets fetched twice."""
    command = ("--datasets", "gsm8k", "alpaca", "c4", "--output-dir", tmp_path, "--num-samples", 9)
    assert get_data("--datasets", "alpaca", "--output-dir", tmp_path, "--num-samples", 2) == 0
    hub.asked.clear()
    hub.failures["tatsu-lab/alpaca"] = (5, KeyboardInterrupt())
    assert get_data(*command) == 130
    assert "again" in capsys.readouterr().err
    assert files(tmp_path) == ["alpaca/alpaca_data_2.jsonl", "gsm8k/gsm8k_data_9.jsonl"]
    assert hub.fetched() == ["openai/gsm8k", "tatsu-lab/alpaca"]

    hub.asked.clear()
    hub.failures.clear()
    assert get_data(*command) == 0
    assert hub.fetched() == ["tatsu-lab/alpaca", "allenai/c4"]
    assert [len(load_prompts(name, tmp_path).prompts) for name in ("gsm8k", "alpaca", "c4")] == [9, 9, 9]


def test_what_a_killed_run_left_is_no_set(hub: Hub, tmp_path: Path) -> None:
    part = tmp_path / "gsm8k" / "unfinished.part"
    part.parent.mkdir()
    part.write_text('{"text": "ha')
    assert get_data("--num-samples", 5, "--datasets", "gsm8k", "--output-dir", tmp_path) == 0
    assert files(tmp_path) == ["gsm8k/gsm8k_data_5.jsonl"]
    assert len(load_prompts("gsm8k", tmp_path).prompts) == 5


def test_a_failing_set_does_not_stop_the_others(hub: Hub, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    hub.failures["openai/openai_humaneval"] = (0, ConnectionError("Couldn't reach the Hub\nand more"))
    hub.failures["allenai/c4"] = (2, KeyError("text"))
    assert get_data("--num-samples", 5, "--output-dir", tmp_path) == 1
    assert files(tmp_path) == [f"{name}/{name}_data_5.jsonl" for name in ("alpaca", "gsm8k", "ultrafeedback")]
    said = capsys.readouterr().err
    assert "(ConnectionError: Couldn't reach the Hub)" in said
    for remedy in ("Offline?", "https://huggingface.co/datasets/openai/openai_humaneval", "hf auth login", "HF_TOKEN"):
        assert remedy in said
    assert "Not provided: humaneval, c4." in said


def test_a_failed_force_keeps_what_was_there(hub: Hub, tmp_path: Path) -> None:
    command = ("--num-samples", 5, "--datasets", "gsm8k", "--output-dir", tmp_path)
    assert get_data(*command) == 0
    hub.failures["openai/gsm8k"] = (2, TimeoutError())
    assert get_data(*command, "--force") == 1
    assert len(load_prompts("gsm8k", tmp_path).prompts) == 5


def test_blank_prompts_are_left_out_and_an_empty_set_is_a_failure(
    hub: Hub, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    hub.rows["openai/gsm8k"] = [{"question": text} for text in ("", "1 + 1?", " \n", "2 + 2?", "3 + 3?")]
    hub.rows["allenai/c4"] = [{"text": " "}]
    assert get_data("--num-samples", 2, "--datasets", "gsm8k", "c4", "--output-dir", tmp_path) == 1
    assert load_prompts("gsm8k", tmp_path).prompts == ("1 + 1?", "2 + 2?")
    assert files(tmp_path) == ["gsm8k/gsm8k_data_2.jsonl"]
    assert "no prompts" in capsys.readouterr().err


def test_without_the_library(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    """It is asked for only when something must be fetched."""
    command = ("--num-samples", 5, "--output-dir", tmp_path, "--datasets")
    assert get_data(*command, "gsm8k") == 0
    monkeypatch.setitem(sys.modules, "datasets", None)
    assert get_data(*command, "gsm8k") == 0
    assert get_data(*command, "gsm8k", "c4") == 1
    assert "pip install '.[scripts]'" in capsys.readouterr().err


def test_a_folder_that_cannot_be_written(hub: Hub, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "taken").touch()
    assert get_data("--num-samples", 5, "--datasets", "gsm8k", "--output-dir", tmp_path / "taken") == 1
    assert "--output-dir" in capsys.readouterr().err


def test_a_finished_file_that_was_spoilt(hub: Hub, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    spoilt = tmp_path / "gsm8k" / "gsm8k_data_5.jsonl"
    spoilt.parent.mkdir()
    spoilt.write_text("{\n")
    command = ("--num-samples", 5, "--datasets", "gsm8k", "--output-dir", tmp_path)
    assert get_data(*command) == 1
    assert f"{spoilt}:1" in capsys.readouterr().err
    assert get_data(*command, "--force") == 0


@pytest.mark.parametrize("wrong", [("--num-samples", "0"), ("--num-samples", "many"), ("--datasets", "imagenet")])
def test_wrong_arguments_to_get_data(hub: Hub, wrong: tuple[str, str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        get_data(*wrong)
    assert stopped.value.code == 2
    assert not hub.asked


def test_a_real_ctrl_c(tmp_path: Path) -> None:
    """The signal itself, in a process of its own: the exit code is the shell's for it."""
    (tmp_path / "datasets.py").write_text(
        "import os, signal\n"
        "def load_dataset(*args, **options):\n"
        "    yield {'text': 'first'}\n"
        "    os.kill(os.getpid(), signal.SIGINT)\n"
        "    yield from ({'text': str(i)} for i in range(10**9))\n"
    )
    command = [sys.executable, f"{SCRIPTS}/get_data_from_hf.py", "--datasets", "c4", "--output-dir", f"{tmp_path}/out"]
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    run = subprocess.run(
        [*command, "--num-samples", "1000000000"], env=environment, capture_output=True, text=True, timeout=60
    )
    assert run.returncode == 130, run.stderr
    assert "Traceback" not in run.stderr
    assert files(tmp_path / "out") == []


# --- checkpoints ------------------------------------------------------------------------------------------------------


class Downloads:
    """Stands in for `snapshot_download`: every checkpoint is a bundled one, unless it is to fail."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.options: list[dict[str, Any]] = []
        self.failures: dict[str, BaseException] = {}
        self.files = [file for file in (BUNDLE / "tiny-llama").iterdir() if file.is_file()]

    def __call__(self, name: str, **options: Any) -> str:
        self.asked.append(name)
        self.options.append(options)
        if name in self.failures:
            raise self.failures[name]
        snapshot = options["cache_dir"] / f"models--{name.replace('/', '--')}" / "snapshots" / "0123"
        snapshot.mkdir(parents=True)
        for file in self.files:
            (snapshot / file.name).symlink_to(file)
        return str(snapshot)


@pytest.fixture
def downloads(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Downloads:
    downloads = Downloads()
    monkeypatch.setattr(importlib.import_module("download_from_hf"), "snapshot_download", downloads)
    monkeypatch.setenv("SSD_HF_CACHE", str(tmp_path / "cache"))
    have_room(monkeypatch, 10_000)
    return downloads


def have_room(monkeypatch: pytest.MonkeyPatch, gigabytes: float) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr("shutil.disk_usage", lambda _: usage(0, 0, int(gigabytes * 1e9)))


def download(*args: str) -> int:
    return int(importlib.import_module("download_from_hf").main(list(args)))


def gated(name: str) -> GatedRepoError:
    request = httpx.Request("GET", f"https://huggingface.co/api/models/{name}")
    return GatedRepoError("403 Client Error.\nAccess is restricted.", response=httpx.Response(403, request=request))


def test_the_engine_finds_what_was_downloaded(downloads: Downloads, tmp_path: Path) -> None:
    assert download("llama", "--sizes", "1") == 0
    assert open_checkpoint(LLAMA_1B).path == tmp_path / "cache/models--meta-llama--Llama-3.2-1B-Instruct/snapshots/0123"
    patterns = {"allow_patterns": list(WANTED), "ignore_patterns": list(UNWANTED)}
    assert downloads.options == [{"cache_dir": tmp_path / "cache", **patterns}]


def test_the_usual_cache_without_one_of_our_own(
    downloads: Downloads, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SSD_HF_CACHE")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "usual"))
    assert download("qwen", "--sizes", "0.6") == 0
    assert downloads.options[0]["cache_dir"] == tmp_path / "usual"


@pytest.mark.parametrize(
    ("args", "ends"),
    [
        ("llama", ["3.2-1B-Instruct", "3.2-3B-Instruct", "3.1-8B-Instruct", "3.1-70B-Instruct", "3.3-70B-Instruct"]),
        ("llama --sizes 1 8", ["3.2-1B-Instruct", "3.1-8B-Instruct"]),
        ("llama --sizes 70B", ["3.1-70B-Instruct", "3.3-70B-Instruct"]),
        ("qwen", ["0.6B", "1.7B", "4B", "8B", "14B", "32B"]),
        ("qwen --sizes 32b 0.6", ["0.6B", "32B"]),
        ("eagle", ["3.1-8B-Instruct-SpecForge", "3.3-70B-Instruct-SpecForge", "Qwen3-32B-speculator.eagle3"]),
        ("all --sizes 8", ["Llama-3.1-8B-Instruct", "Qwen3-8B", "3.1-8B-Instruct-SpecForge"]),
    ],
)
def test_what_is_chosen(downloads: Downloads, args: str, ends: list[str]) -> None:
    assert download(*args.split()) == 0
    assert [name.endswith(end) for name, end in zip(downloads.asked, ends, strict=True)] == [True] * len(ends)


@pytest.mark.parametrize("args", ["llama --sizes 1 99", "qwen --sizes 70", "llama --sizes", "mistral", ""])
def test_wrong_arguments_to_download(downloads: Downloads, args: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        download(*args.split())
    assert stopped.value.code == 2
    assert not downloads.asked
    if "99" in args:
        assert "llama has no 99; choose from 1, 3, 8, 70" in capsys.readouterr().err


def test_dry_run(
    downloads: Downloads, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    have_room(monkeypatch, 20)
    assert download("llama", "--sizes", "1", "8", "--dry-run") == 0
    out, err = capsys.readouterr()
    for part in (LLAMA_1B, "2.5 GB", "16.1 GB", str(tmp_path / "cache"), "about 18.6 GB", "Free there: 20.0 GB"):
        assert part in out
    assert not err
    assert not downloads.asked
    assert files(tmp_path) == []


def test_no_room(downloads: Downloads, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    have_room(monkeypatch, 18)
    assert download("llama", "--sizes", "1", "8") == 1
    assert "SSD_HF_CACHE" in capsys.readouterr().err
    assert not downloads.asked
    assert download("llama", "--sizes", "1", "8", "--dry-run") == 0  # a list is a list
    assert "Not enough room" in capsys.readouterr().err


def test_what_is_there_already_needs_no_room(
    downloads: Downloads, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches a second run that is refused because the first one filled the disk."""
    blob = tmp_path / "cache" / "models--meta-llama--Llama-3.1-8B-Instruct" / "blobs" / "abc.incomplete"
    blob.parent.mkdir(parents=True)
    with blob.open("wb") as file:
        file.truncate(16 * 10**9)  # takes no room itself
    link = blob.parents[1] / "snapshots" / "0" / "model.safetensors"
    link.parent.mkdir(parents=True)
    link.symlink_to(blob)  # must not count twice
    have_room(monkeypatch, 0.2)
    assert download("llama", "--sizes", "8") == 0
    assert download("llama", "--sizes", "1", "8") == 1


def test_a_gated_repository_says_what_to_do(downloads: Downloads, capsys: pytest.CaptureFixture[str]) -> None:
    downloads.failures[LLAMA_1B] = gated(LLAMA_1B)
    assert download("llama", "--sizes", "1", "3") == 1
    said = capsys.readouterr().err
    for part in (f"Accept the licence on https://huggingface.co/{LLAMA_1B}", "hf auth login", "HF_TOKEN"):
        assert part in said
    assert "Access is restricted" not in said
    assert f"Not downloaded: {LLAMA_1B}." in said
    assert len(downloads.asked) == 2


@pytest.mark.parametrize(
    ("failure", "remedy"),
    [
        (LocalEntryNotFoundError("Got: ConnectError"), "Check the network"),
        (OSError(errno.ENOSPC, "No space left on device"), "set SSD_HF_CACHE to a folder on a bigger disk"),
    ],
)
def test_other_failures(
    downloads: Downloads, failure: Exception, remedy: str, capsys: pytest.CaptureFixture[str]
) -> None:
    downloads.failures["Qwen/Qwen3-0.6B"] = failure
    assert download("qwen", "--sizes", "0.6", "1.7") == 1
    assert remedy in capsys.readouterr().err
    assert downloads.asked == ["Qwen/Qwen3-0.6B", "Qwen/Qwen3-1.7B"]


def test_a_part_of_a_checkpoint_is_none(downloads: Downloads, capsys: pytest.CaptureFixture[str]) -> None:
    """Without network `snapshot_download` may return what is cached: here a config without weights."""
    downloads.files = [BUNDLE / "tiny-llama" / "config.json"]
    assert download("qwen", "--sizes", "0.6") == 1
    said = capsys.readouterr().err
    assert "no *.safetensors" in said
    assert "Check the network" in said


def test_ctrl_c_while_downloading(downloads: Downloads, capsys: pytest.CaptureFixture[str]) -> None:
    downloads.failures["Qwen/Qwen3-1.7B"] = KeyboardInterrupt()
    assert download("qwen") == 130
    assert downloads.asked == ["Qwen/Qwen3-0.6B", "Qwen/Qwen3-1.7B"]
    assert "continues" in capsys.readouterr().err


@pytest.mark.parametrize("family", ["llama", "qwen"])
def test_what_a_benchmark_misses_can_be_downloaded(family: str) -> None:
    """Catches a size whose weights the benchmark looks for under a name that nothing fetches."""
    import sizes

    fetched = importlib.import_module("download_from_hf").GROUPS[family]
    wanted = {(name, size) for size, names in sizes._HUB[family].items() for name in names}  # type: ignore[index]
    assert wanted == {(repository.name, repository.size) for repository in fetched}
