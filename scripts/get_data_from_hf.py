"""Fetches prompt sets from the Hugging Face hub and writes them where `ssd.prompts.load_prompts` finds them.

    HF_DATASETS_CACHE=/path/to python scripts/get_data_from_hf.py --num-samples 10000
    python scripts/get_data_from_hf.py --datasets humaneval gsm8k --output-dir prompts

The first N prompts of each set, in its own order, become SET/SET_data_N.jsonl with one {"text": prompt} a line; all of
them where the set is smaller. Only one such file is kept: a bigger one than asked for is left as it is (it begins with
the prompts asked for), a smaller one is replaced. Run it again after a failure or Ctrl-C: finished sets are not fetched
again, and an unfinished one is never taken for a set.

Needs the `datasets` library: pip install '.[scripts]' in a checkout of ssd. It keeps its own downloads in
$HF_DATASETS_CACHE.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from operator import itemgetter
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import track

from ssd.errors import SSDError, install_extra
from ssd.prompts import FOLDER_VARIABLE, load_prompts

CACHE_VARIABLE = "HF_DATASETS_CACHE"
FOLDER = "processed_datasets"  # in the cache, else here; not `datasets`, which Python could import


class NotFetched(Exception):
    """Fetching from the hub failed."""


@dataclass(frozen=True)
class Source:
    """Where on the hub a set is, and what of a row is its prompt."""

    repository: str
    config: str | None
    split: str
    prompt: Callable[[Mapping[str, Any]], str]
    streaming: bool = False  # for a set that is too large to download completely


def instruction_and_input(row: Mapping[str, Any]) -> str:
    return f"{row['instruction']}\n\n{row['input']}" if row["input"].strip() else str(row["instruction"])


SOURCES = {
    "humaneval": Source("openai/openai_humaneval", None, "test", itemgetter("prompt")),
    "alpaca": Source("tatsu-lab/alpaca", None, "train", instruction_and_input),
    "gsm8k": Source("openai/gsm8k", "main", "test", itemgetter("question")),  # our tiny models learned from `train`
    "ultrafeedback": Source("HuggingFaceH4/ultrafeedback_binarized", None, "train_prefs", itemgetter("prompt")),
    "c4": Source("allenai/c4", "en", "train", itemgetter("text"), streaming=True),
}


def main(argv: list[str] | None = None) -> int:
    args = arguments(argv)
    folder: Path = args.output_dir
    names = list(dict.fromkeys(args.datasets))
    try:
        failed = [name for name in names if not provide(name, folder, args.num_samples, args.force)]
    except ImportError as error:
        print(f"The `datasets` library is missing ({error}): {install_extra('scripts')}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("Interrupted. Finished sets are kept: run the same command again for the others.", file=sys.stderr)
        return 130
    if len(failed) < len(names):
        print(f"To measure with them: export {FOLDER_VARIABLE}={shlex.quote(str(folder.absolute()))}")
    if failed:
        print(f"Not provided: {', '.join(failed)}. Run the same command again to retry only these.", file=sys.stderr)
    return 1 if failed else 0


def provide(name: str, folder: Path, count: int, force: bool) -> bool:
    """See to it that the set is in the folder, and say what the engine will read there; False if that failed."""
    try:
        file = None if force else finished_file(folder / name, name, count)
        file = file or fetch(name, folder / name / f"{name}_data_{count}.jsonl", count)
        for other in own_files(folder / name, name).keys() - {file}:
            other.unlink()
        found = load_prompts(name, folder)
    except NotFetched as error:
        print(f"{name}: {error}", file=sys.stderr)
    except OSError as error:
        print(f"{name}: cannot be read or written ({error}); make room, or change --output-dir", file=sys.stderr)
    except SSDError as error:
        print(f"{name}: {error}; mend or remove that file, or fetch it again with --force", file=sys.stderr)
    else:
        print(f"{name}: {len(found.prompts)} prompts in {found.origin}")
        if found.origin != str(file):
            print(f"{name}: that file hides {file}; remove it to use the fetched prompts", file=sys.stderr)
        return True
    return False


# --- files ------------------------------------------------------------------------------------------------------------


def own_files(directory: Path, name: str) -> dict[Path, int]:
    """The finished files of a set, and how many prompts were asked for when they were written."""
    named = ((file, re.fullmatch(rf"{name}_data_(\d+)\.jsonl", file.name)) for file in directory.glob("*.jsonl"))
    return {file: int(match[1]) for file, match in named if match}


def finished_file(directory: Path, name: str, count: int) -> Path | None:
    """The biggest file that holds the first `count` prompts, or the whole set: fewer prompts than were asked for."""
    files = own_files(directory, name)
    enough = (file for file, asked in files.items() if asked >= count or lines(file) < asked)
    return max(enough, key=files.__getitem__, default=None)


def lines(file: Path) -> int:
    with file.open("rb") as stream:
        return sum(1 for _ in stream)


def write(file: Path, prompts: Iterable[str]) -> None:
    """Writes atomically: the file gets its name when it is complete."""
    file.parent.mkdir(parents=True, exist_ok=True)
    part = file.with_name("unfinished.part")  # the same for every count: what a killed run left is overwritten
    try:
        with part.open("w", encoding="utf-8", newline="\n") as stream:
            for prompt in prompts:
                stream.write(json.dumps({"text": prompt}, ensure_ascii=False) + "\n")
        part.replace(file)
    finally:
        part.unlink(missing_ok=True)


# --- the hub ----------------------------------------------------------------------------------------------------------


def fetch(name: str, file: Path, count: int) -> Path:
    from datasets import load_dataset  # type: ignore[import-untyped, import-not-found]  # an optional extra

    source = SOURCES[name]
    with failures_named(source):
        rows = load_dataset(source.repository, source.config, split=source.split, streaming=source.streaming)
        total = count if source.streaming else min(count, len(rows))
    prompts = islice(prompts_of(rows, source), count)
    write(file, track(prompts, name, total=total, console=Console(stderr=True)))
    return file


def prompts_of(rows: Iterable[Mapping[str, Any]], source: Source) -> Iterator[str]:
    """The prompts in the set's own order, without blank ones: `load_prompts` refuses those."""
    empty = True
    with failures_named(source):
        for row in rows:
            prompt = source.prompt(row)
            if prompt.strip():
                empty = False
                yield prompt
    if empty:
        raise NotFetched(f"{source.repository} holds no prompts any more; look at {page(source)}")


@contextmanager
def failures_named(source: Source) -> Iterator[None]:
    """An error message with a remedy for whatever the library raises."""
    try:
        yield
    except Exception as error:
        reason = str(error).strip().partition("\n")[0]
        raise NotFetched(
            f"{source.repository} could not be fetched ({type(error).__name__}: {reason}).\n"
            "  Offline? Check the network, a proxy (HTTPS_PROXY), and that HF_HUB_OFFLINE and HF_DATASETS_OFFLINE are "
            f"not set.\n  Gated, private or rate limited? Accept the terms on {page(source)}, then run "
            "`hf auth login` or set HF_TOKEN."
        ) from error


def page(source: Source) -> str:
    return f"https://huggingface.co/datasets/{source.repository}"


# --- the command line -------------------------------------------------------------------------------------------------


def default_folder() -> Path:
    folder = os.environ.get(FOLDER_VARIABLE)
    return Path(folder) if folder else Path(os.environ.get(CACHE_VARIABLE) or ".") / FOLDER


def positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is not a positive number")
    return value


def arguments(argv: list[str] | None) -> argparse.Namespace:
    sets = f"which ones; default all: {', '.join(SOURCES)}"
    folder = f"default ${FOLDER_VARIABLE}, else ${CACHE_VARIABLE}/{FOLDER}, else ./{FOLDER}"
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num-samples", type=positive, default=10_000, metavar="N", help="of each set; default 10000")
    parser.add_argument("--datasets", nargs="+", choices=SOURCES, default=list(SOURCES), metavar="SET", help=sets)
    parser.add_argument("--output-dir", type=Path, default=default_folder(), metavar="FOLDER", help=folder)
    parser.add_argument("--force", action="store_true", help="fetch anew what is there, and replace a bigger file too")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
