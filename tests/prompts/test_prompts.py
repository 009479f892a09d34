"""The prompt sets: ours are what they claim to be, a folder of the user's wins, and what is wrong is named."""

from __future__ import annotations

import ast
import doctest
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ssd.errors import DataNotFound, InvalidData, SSDError
from ssd.prompts import OWN_SETS, PromptSet, load_prompts

SOLUTIONS = Path(__file__).parents[1] / "data" / "humaneval_solutions.py"
REAL = os.environ.get("SSD_DATASET_DIR")  # a folder with the real sets, if the developer has one


@pytest.fixture(autouse=True)
def no_folder_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SSD_DATASET_DIR", raising=False)


def write(file: Path, *lines: str) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return file


def entry(text: str) -> str:
    return json.dumps({"text": text}, ensure_ascii=False)


def own_prompts() -> list[str]:
    return [prompt for name in OWN_SETS for prompt in load_prompts(name).prompts]


# --- our own sets -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "title"), OWN_SETS.items())
def test_own_sets_load(name: str, title: str) -> None:
    """Catches a set that is missing, too small to measure with, or padded with nothing."""
    own = load_prompts(name)
    assert own == PromptSet(name, own.prompts, f"written for ssd, in the style of {title}")
    assert len(own.prompts) >= 32
    assert all(prompt.strip() and prompt.isprintable() for prompt in (p.replace("\n", " ") for p in own.prompts))


def test_no_prompt_is_there_twice() -> None:
    """Catches duplicates within a set and between sets, also those that differ in case or white space only."""
    folded = [" ".join(prompt.casefold().split()) for prompt in own_prompts()]
    assert len(set(folded)) == len(folded)


def function_of(prompt: str) -> ast.FunctionDef:
    function = ast.parse(prompt + "    pass\n").body[-1]
    assert isinstance(function, ast.FunctionDef)
    return function


def solutions() -> tuple[dict[str, ast.FunctionDef], dict[str, Any]]:
    """The reference solutions as syntax, by name, and as the names that examples run with."""
    module = ast.parse(SOLUTIONS.read_text(encoding="utf-8"))
    names: dict[str, Any] = {}
    exec(compile(module, str(SOLUTIONS), "exec"), names)
    return {node.name: node for node in module.body if isinstance(node, ast.FunctionDef)}, names


def test_every_function_has_one_prompt_and_one_solution() -> None:
    """Catches a solution to another signature than the prompt's, and functions that lack either of the two."""
    functions = [function_of(prompt) for prompt in load_prompts("humaneval").prompts]
    references, _ = solutions()
    assert sorted(f.name for f in functions) == sorted(references)
    for function in functions:
        reference = references[function.name]
        assert ast.dump(function.args) == ast.dump(reference.args), function.name
        assert function.returns is not None
        assert all(argument.annotation for argument in function.args.args)


@pytest.mark.parametrize("name", solutions()[0])
def test_examples_of_functions_are_true(name: str) -> None:
    """Catches an example that a right solution would fail, and examples that a constant would pass."""
    [prompt] = [p for p in load_prompts("humaneval").prompts if function_of(p).name == name]
    assert prompt.endswith('"""\n')
    docstring = ast.get_docstring(function_of(prompt))
    assert docstring
    test = doctest.DocTestParser().get_doctest(docstring, solutions()[1], name, None, None)
    assert len(test.examples) >= 2
    assert all(f"{name}(" in example.source and example.want for example in test.examples)
    assert len({example.want for example in test.examples}) > 1
    assert doctest.DocTestRunner().run(test, clear_globs=False).failed == 0


@pytest.mark.skipif(not REAL, reason="needs the real sets: set SSD_DATASET_DIR to their folder")
def test_no_own_prompt_is_in_the_real_sets() -> None:
    """Catches a prompt of ours that was copied: contained in a real one, or containing one."""
    assert REAL
    folders = [folder.name for folder in sorted(Path(REAL).iterdir()) if any(folder.glob("*.jsonl"))]
    assert folders
    real = [" ".join(p.casefold().split()) for name in folders for p in load_prompts(name, Path(REAL)).prompts]
    for prompt in own_prompts():
        folded = " ".join(prompt.casefold().split())
        assert not [text for text in real if folded in text or (len(text) >= 20 and text in folded)], prompt


# --- a folder of the user's -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["humaneval", "mt_bench", "my own set"])
def test_a_folder_wins(name: str, tmp_path: Path) -> None:
    """Catches our own set being measured where the user named another one; also sets that only a folder has."""
    file = write(tmp_path / name / f"{name}.jsonl", entry("one"), "", entry("zwei\u2028drei\n"))
    assert load_prompts(name, tmp_path) == PromptSet(name, ("one", "zwei\u2028drei\n"), str(file))


def test_the_environment_names_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches an ignored SSD_DATASET_DIR, and one that overrules the argument."""
    write(tmp_path / "env" / "c4" / "c4.jsonl", entry("from the environment"))
    write(tmp_path / "argument" / "c4" / "c4.jsonl", entry("from the argument"))
    monkeypatch.setenv("SSD_DATASET_DIR", str(tmp_path / "env"))
    assert load_prompts("c4").prompts == ("from the environment",)
    assert load_prompts("c4", tmp_path / "argument").prompts == ("from the argument",)


def test_files_by_other_names(tmp_path: Path) -> None:
    """Catches a choice of file that depends on the order of a directory."""
    write(tmp_path / "gsm8k" / "gsm8k_data_500.jsonl", entry("second"))
    write(tmp_path / "gsm8k" / "gsm8k_data_10000.jsonl", entry("first"))
    write(tmp_path / "gsm8k" / "a_note.txt", "not a set")
    assert load_prompts("gsm8k", tmp_path).prompts == ("first",)
    write(tmp_path / "gsm8k" / "gsm8k.jsonl", entry("by its own name"))
    assert load_prompts("gsm8k", tmp_path).prompts == ("by its own name",)


def test_own_set_where_the_folder_lacks_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a folder with some sets hiding our own ones, and an empty variable taken for the current directory."""
    write(tmp_path / "c4" / "c4.jsonl", entry("text"))
    (tmp_path / "alpaca").mkdir()
    assert load_prompts("alpaca", tmp_path) == load_prompts("alpaca")
    monkeypatch.setenv("SSD_DATASET_DIR", "")
    write(tmp_path / "alpaca" / "alpaca.jsonl", entry("text"))
    monkeypatch.chdir(tmp_path)
    assert "written for ssd" in load_prompts("alpaca").origin


# --- errors -----------------------------------------------------------------------------------------------------------


def test_a_missing_set_names_the_places_and_the_remedy(tmp_path: Path) -> None:
    with pytest.raises(DataNotFound) as without_folder:
        load_prompts("c4")
    assert all(part in str(without_folder.value) for part in ("'c4'", "SSD_DATASET_DIR (not set)", "c4/c4.jsonl"))
    with pytest.raises(DataNotFound) as with_folder:
        load_prompts("c4", tmp_path)
    assert all(part in str(with_folder.value) for part in (f"{tmp_path}/c4", "humaneval, alpaca", "c4/c4.jsonl"))


def test_a_missing_folder_is_no_silent_fallback(tmp_path: Path) -> None:
    """Catches a mistyped folder that would report our prompts as the user's."""
    with pytest.raises(DataNotFound, match=r"typo: no such directory.*SSD_DATASET_DIR"):
        load_prompts("humaneval", tmp_path / "typo")


@pytest.mark.parametrize("name", ["", ".", "..", "../secrets", "/etc", "a/b"])
def test_a_name_is_no_path(name: str, tmp_path: Path) -> None:
    with pytest.raises(DataNotFound, match="plain name"):
        load_prompts(name, tmp_path)


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("{text: 1}", "not JSON"),
        ('{"prompt": "x"}', "field 'text' is None"),
        ('{"text": 7}', "field 'text' is 7"),
        ('{"text": "  "}', "field 'text' is '  '"),
        ('["x"]', "field 'text' is None"),
    ],
)
def test_a_bad_line_is_named(line: str, complaint: str, tmp_path: Path) -> None:
    file = write(tmp_path / "c4" / "c4.jsonl", entry("good"), "", line)
    with pytest.raises(InvalidData) as error:
        load_prompts("c4", tmp_path)
    assert f"{file}:3: {complaint}" in str(error.value)
    assert isinstance(error.value, SSDError)


def test_files_without_prompts(tmp_path: Path) -> None:
    write(tmp_path / "c4" / "c4.jsonl", "", " ")
    with pytest.raises(InvalidData, match="holds no prompts"):
        load_prompts("c4", tmp_path)
    (tmp_path / "c4" / "c4.jsonl").write_bytes(b'{"text": "\xff"}\n')
    with pytest.raises(InvalidData, match="cannot be read as UTF-8"):
        load_prompts("c4", tmp_path)


def test_prompts_need_no_torch() -> None:
    """Catches an import that would make listing prompts as slow as starting an engine."""
    code = "import sys; from ssd.prompts import load_prompts; load_prompts('alpaca'); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
