"""How fast is a GGUF file on this machine's CPU, against llama.cpp's own benchmarks? They take turns.

    python bench/llama_cpp.py q4_1.gguf q8_0.gguf q4_k.gguf --llama llama.cpp/build/bin --threads 2
    python bench/llama_cpp.py q4_1.gguf --threads 16 --llama-threads 15    # llama.cpp of the package xllamacpp

`--llama`: the folder with llama-bench and llama-batched-bench, built for this machine (GGML_NATIVE); without it the
server of xllamacpp (`pip install xllamacpp`), by the difference of two answers' times. Tokens per second: decoding at
batch 1, 8 and 32, and prompts. A turn counts only if other processes used less than 0.12 cores; it is repeated up to 8
times. `bench/gguf_files.py` makes files.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import torch
from decode import engine_decode, random_prompts  # bench/decode.py

from ssd import LLM
from ssd.bench.record import HELP, Figure, Rows, record, spread, text
from ssd.core import SamplingParams

DISTURBED = 0.12  # cores
_SERVE = "--serve"  # the first argument of a process that runs xllamacpp
PROMPT, NEW, BATCH_PROMPT = 256, 64, 16  # tokens of a prompt, of an answer, and of each prompt of a batch


def main() -> None:
    args = _arguments()
    torch.set_num_threads(args.threads)
    rows: Rows = {}
    for path in args.files:
        with LLM(str(path), device="cpu", dtype=args.dtype, max_model_len=1024, max_num_seqs=32) as llm:
            turns = {"prompt": (partial(prompt, llm), partial(theirs, args, path, 0, PROMPT))}
            for batch in (1, 8, 32):
                sizes = batch, NEW if batch == 1 else NEW // 2
                turns[f"batch {batch}"] = partial(decode, llm, *sizes), partial(theirs, args, path, *sizes)
            for name, (ours, other) in turns.items():
                ours()  # threads start, memory is touched, steps are recorded
                pairs = [(undisturbed(ours), undisturbed(other)) for _ in range(args.repeats)]
                row = rows[f"{path.stem}, {name}"] = _row([(a, b) for a, b in pairs if a and b])
                shown = "  ".join(f"{column} {text(figure)}" for column, figure in row.items())
                print(f"{path.name:<14} {name:<9} {shown or 'no turn was undisturbed'}", flush=True)
    record(args.json, rows, ["tokens/s"])


def _row(pairs: list[tuple[float, float]]) -> dict[str, Figure]:
    """Tokens per second, and the median of the turns' ratios; empty if no turn was undisturbed."""
    if not pairs:
        return {}
    ours, theirs = (spread(each) for each in zip(*pairs, strict=True))
    return {"ssd": ours, "llama.cpp": theirs, "ratio": round(statistics.median(a / b for a, b in pairs), 2)}


def decode(llm: LLM, batch: int, tokens: int) -> float:
    return engine_decode(llm.driver, random_prompts(batch, BATCH_PROMPT, 40_000), tokens)


def prompt(llm: LLM) -> float:
    [tokens] = random_prompts(1, PROMPT, 40_000)
    began = time.perf_counter()
    llm.generate([tokens], SamplingParams(max_new_tokens=1, temperature=0))
    seconds = time.perf_counter() - began
    llm.driver.call(lambda engine: engine.scheduler.pool.clear_prefix_cache())
    return len(tokens) / seconds


def theirs(args: argparse.Namespace, path: Path, batch: int, tokens: int) -> float:
    """Tokens per second of so many sequences that get so many tokens each; batch 0: of a prompt."""
    threads = args.llama_threads or args.threads
    if args.llama is None:
        return float(_output(sys.executable, __file__, _SERVE, path, threads, batch, tokens).splitlines()[-1])
    if batch > 1:
        sizes = ("-npp", BATCH_PROMPT, "-ntg", tokens, "-npl", batch, "-c", batch * 128)
        threads_of = ("-t", threads, "-tb", threads)
        found = _output(args.llama / "llama-batched-bench", "-m", path, *threads_of, *sizes, "--output-format", "jsonl")
        return float(json.loads(next(line for line in found.splitlines() if line.startswith("{")))["speed_tg"])
    read, new = (tokens, 0) if batch == 0 else (0, tokens)
    options = ("-m", path, "-t", threads, "-r", "1", "-o", "json")
    found = _output(args.llama / "llama-bench", *options, "-p", read, "-n", new)
    return float(json.loads(found)[0]["avg_ts"])


def serve(path: str, threads: int, batch: int, tokens: int) -> float:
    """The same by xllamacpp's server, in this process."""
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path, params.n_gpu_layers, params.n_parallel = path, 0, max(1, batch)
    params.n_ctx = max(1, batch) * 512
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = threads
    server = xllamacpp.Server(params)

    def seconds(length: int, new: int) -> float:
        """Of all answers."""
        asked = [
            {"prompt": ids, "max_tokens": new, "ignore_eos": True, "temperature": 0, "cache_prompt": False}
            for ids in random_prompts(max(1, batch), length, 40_000)
        ]
        began = time.perf_counter()
        with ThreadPoolExecutor(len(asked)) as pool:
            list(pool.map(server.handle_completions, asked))
        return time.perf_counter() - began

    seconds(BATCH_PROMPT, 8)  # memory is touched
    if batch == 0:
        return tokens / seconds(tokens, 1)
    return batch * tokens / (seconds(BATCH_PROMPT, 8 + tokens) - seconds(BATCH_PROMPT, 8))


def _output(*command: object) -> str:
    return subprocess.run([str(each) for each in command], capture_output=True, text=True, check=True).stdout


def undisturbed(run: Callable[[], float]) -> float | None:
    for _ in range(8):
        began, busy, own = time.perf_counter(), _busy(), _own()
        found = run()
        if (_busy() - busy - (_own() - own)) / (time.perf_counter() - began) < DISTURBED:
            return found
        time.sleep(2)
    return None


def _busy() -> float:
    """CPU time of all processes of the machine, in seconds. Those of a lower priority count, too: threads that wait for
    each other by spinning lose most to them."""
    user, nice, system, _, _, *others = map(int, Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:])
    return (user + nice + system + sum(others[:3])) / os.sysconf("SC_CLK_TCK")  # irq, softirq, steal


def _own() -> float:
    """CPU time of this process and of its child processes that have ended, in seconds."""
    return sum(os.times()[:4])


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--llama", type=Path, help="folder of llama.cpp's programs; default: the package xllamacpp")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--llama-threads", type=int, help="llama.cpp's; default: the same")
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=Path, help=HELP)
    return parser.parse_args()


if __name__ == "__main__":
    if sys.argv[1:2] == [_SERVE]:
        print(serve(sys.argv[2], *map(int, sys.argv[3:])), flush=True)
        os._exit(0)  # the server's threads would wait for requests
    main()
