"""How soon is the first token of a GGUF file there, from the start of a process, and in how much memory?

    python bench/start.py smollm2-135m.gguf 0.5b.gguf 1.5b.gguf --llama llama.cpp/build/bin/llama-simple

`--llama`: llama.cpp's example `simple`, built for this machine (GGML_NATIVE, with OpenMP, whose limit is the number of
threads here). They take turns: ours with an empty cache of packed weights (first start), with a full one (second),
llama.cpp. Files are in the page cache.

A process is stopped when the first byte of its answer is there, and asked for its CPU time, how much of it was resident
at most, and how much of it is now in no file. "alone" is what no other process has, while one of the same kind is kept:
what a second process of a model costs. Ratios are of the least times: other processes only add to them.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final, NamedTuple

from ssd.bench.record import HELP, Figure, Rows, record, spread, text
from ssd.models import weight_folder

PROMPT: Final = "The capital of France is a city that is known for its art, its food and its many"
TOKENS: Final = 8  # more than one: the process still computes when it is stopped
OURS: Final = "ssd, second start"
THEIRS: Final = "llama.cpp"


class Start(NamedTuple):
    """Until the first byte of an answer; memory in MB."""

    s: float
    cpu_s: float  # of all threads
    peak: float  # resident, pages of mapped files included
    in_no_file: float
    alone: float  # pages that no other process has


def main() -> None:
    args = _arguments()
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: args.threads])
    rows: Rows = {}
    with tempfile.TemporaryDirectory() as cache:
        os.environ |= {"XDG_CACHE_HOME": cache, "OMP_THREAD_LIMIT": str(args.threads)}
        with answering(_ours(args.files[0])):  # kernels are compiled
            pass
        for file in args.files:
            rows |= measured(file, args)
    record(args.json, rows)


def measured(file: Path, args: argparse.Namespace) -> Rows:
    """Starts of a model, as rows."""
    file.read_bytes()
    starts: dict[str, list[Start]] = defaultdict(list)
    for _ in range(args.repeats):
        shutil.rmtree(weight_folder.folder())
        with answering(_ours(file)) as start:
            starts["ssd, first start"].append(start)
        programs = {OURS: _ours(file)}
        if args.llama is not None:
            programs[THEIRS] = [str(args.llama), "-m", str(file), "-n", str(TOKENS), PROMPT]
        for name, command in programs.items():
            with answering(command), answering(command) as start:
                starts[name].append(start)
    rows: Rows = {}
    for name, each in starts.items():
        row = rows[f"{file.stem}, {name}"] = _row(each, file)
        if name != THEIRS and THEIRS in starts:
            row |= _ratios(each, starts[THEIRS])
        print(f"{file.stem}, {name}:", "  ".join(f"{column} {text(figure)}" for column, figure in row.items()))
    return rows


def _row(starts: list[Start], file: Path) -> dict[str, Figure]:
    s, cpu_s, peak, in_no_file, alone = zip(*starts, strict=True)
    return {
        "s": spread(s, 2),
        "CPU s": spread(cpu_s, 2),
        "peak, MB": round(statistics.median(peak)),
        "in no file, MB": round(statistics.median(in_no_file)),
        "alone, MB": round(statistics.median(alone)),
        "alone / file": round(statistics.median(alone) * 1e6 / file.stat().st_size, 2),
    }


def _ratios(ours: list[Start], theirs: list[Start]) -> dict[str, Figure]:
    names = {"s": "s / llama.cpp's", "cpu_s": "CPU s / llama.cpp's", "peak": "peak / llama.cpp's"}
    least = {field: [min(getattr(start, field) for start in starts) for starts in (ours, theirs)] for field in names}
    return {name: round(least[field][0] / least[field][1], 2) for field, name in names.items()}


def _ours(file: Path) -> list[str]:
    return [sys.executable, "-m", "ssd", "generate", str(file), PROMPT, "-m", str(TOKENS), "-t", "0", "--device", "cpu"]


@contextmanager
def answering(command: list[str]) -> Iterator[Start]:
    """A process that has begun its answer, stopped until the end."""
    began = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    try:
        assert process.stdout is not None
        if not os.read(process.stdout.fileno(), 1):
            raise SystemExit(f"no answer: {command}")
        seconds = time.perf_counter() - began
        process.send_signal(signal.SIGSTOP)
        yield _start(process.pid, seconds)
    finally:
        process.kill()
        process.wait()


def _start(pid: int, seconds: float) -> Start:
    place = Path("/proc", str(pid))
    status, pages = _kilobytes(place / "status"), _kilobytes(place / "smaps_rollup")
    user, system = place.joinpath("stat").read_text().rpartition(")")[2].split()[11:13]
    return Start(
        s=seconds,
        cpu_s=(int(user) + int(system)) / os.sysconf("SC_CLK_TCK"),
        peak=status["VmHWM"] / 1000,
        in_no_file=(status["RssAnon"] + status["RssShmem"]) / 1000,
        alone=(pages["Private_Clean"] + pages["Private_Dirty"]) / 1000,
    )


def _kilobytes(file: Path) -> dict[str, float]:
    """Sizes as the kernel lists them, here in multiples of 1,000 bytes."""
    return {name: int(size) * 1.024 for name, size in re.findall(r"(\w+):\s+(\d+) kB", file.read_text())}


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--llama", type=Path, help="llama.cpp's example `simple`")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", type=Path, help=HELP)
    return parser.parse_args()


if __name__ == "__main__":
    main()
