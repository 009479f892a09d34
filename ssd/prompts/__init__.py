"""Sets of prompts to measure with: the project's own, or those of a folder of the user's.

Knows nothing of models, tokenizers or chat templates: a prompt is plain text.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

from ssd.errors import DataNotFound, InvalidData

FOLDER_VARIABLE = "SSD_DATASET_DIR"
OWN_SETS = {"humaneval": "HumanEval", "alpaca": "Alpaca", "gsm8k": "GSM8K", "ultrafeedback": "UltraFeedback"}


@dataclass(frozen=True)
class PromptSet:
    name: str
    prompts: tuple[str, ...]
    origin: str  # where the prompts come from, in words for a report

    def asked(self, count: int | None = None) -> list[str | list[dict[str, str]]]:
        """The first prompts as they are put to a model: a function to be completed is no question, all others are."""
        plain = self.name == "humaneval"
        return [text if plain else [{"role": "user", "content": text}] for text in self.prompts[:count]]


def load_prompts(name: str, folder: str | os.PathLike[str] | None = None) -> PromptSet:
    """The set `name` of `folder` (else of $SSD_DATASET_DIR) if it is there, otherwise the project's own one.

    A folder holds one folder per set: `NAME/NAME.jsonl`, or any other `*.jsonl`, with one `{"text": prompt}` a line.
    """
    if name in ("", ".", "..") or Path(name).name != name:
        raise DataNotFound(f"prompt set {name!r}: must be the plain name of a set, such as {', '.join(OWN_SETS)}")
    folder = Path(folder) if folder else _folder_of_environment()
    if folder is not None and not folder.is_dir():
        raise DataNotFound(
            f"prompts folder {folder}: no such directory; name an existing one, or leave out the argument and "
            f"{FOLDER_VARIABLE} to use the sets that come with ssd"
        )
    file = _file_of(folder / name, name) if folder else None
    if file is not None:
        return PromptSet(name, _parse(_read(file), str(file)), str(file))
    if name in OWN_SETS:
        return own_set(name)
    raise DataNotFound(_nowhere(name, folder))


def _folder_of_environment() -> Path | None:
    """The one that is named, or the one in which the fetched sets are put beside the cache of `datasets`."""
    value, cache = os.environ.get(FOLDER_VARIABLE), os.environ.get("HF_DATASETS_CACHE")
    if value:
        return Path(value)
    fetched = Path(cache, "processed_datasets") if cache else None
    return fetched if fetched is not None and fetched.is_dir() else None


def _file_of(directory: Path, name: str) -> Path | None:
    exact = directory / f"{name}.jsonl"
    return exact if exact.is_file() else min((f for f in directory.glob("*.jsonl") if f.is_file()), default=None)


def own_set(name: str) -> PromptSet:
    """A set that comes with ssd."""
    file = resources.files(__name__) / f"{name}.jsonl"
    prompts = _parse(file.read_text(encoding="utf-8"), str(file))
    return PromptSet(name, prompts, f"written for ssd, in the style of {OWN_SETS[name]}")


def _read(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidData(f"{file}: cannot be read as UTF-8 text ({error})") from error


def _parse(text: str, file: str) -> tuple[str, ...]:
    lines = enumerate(text.split("\n"), 1)  # not splitlines(): JSON strings may hold other line separators
    prompts = tuple(_prompt(line, f"{file}:{number}") for number, line in lines if line.strip())
    if not prompts:
        raise InvalidData(f'{file}: holds no prompts; write one {{"text": prompt}} on each line')
    return prompts


def _prompt(line: str, where: str) -> str:
    try:
        entry = json.loads(line)
    except ValueError as error:
        raise InvalidData(f'{where}: not JSON ({error}); write one {{"text": prompt}} on each line') from error
    text = entry.get("text") if isinstance(entry, dict) else None
    if not isinstance(text, str) or not text.strip():
        raise InvalidData(f"{where}: field 'text' is {text!r}; it must be a non-empty string")
    return text


def _nowhere(name: str, folder: Path | None) -> str:
    places = [f"{folder / name}/*.jsonl"] if folder else [f"{FOLDER_VARIABLE} (not set)"]
    return (
        f"prompt set {name!r} was found in none of these places:\n  "
        + "\n  ".join([*places, f"the sets that come with ssd ({', '.join(OWN_SETS)})"])
        + f'\nWrite one {{"text": prompt}} on each line of {name}/{name}.jsonl and pass the folder above it, '
        f"or set {FOLDER_VARIABLE} to it (scripts/get_data_from_hf.py fetches the well-known sets), or choose one of "
        "the sets that come with ssd."
    )
