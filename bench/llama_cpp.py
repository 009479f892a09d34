"""How fast is a GGUF file on this machine's CPU, against llama.cpp's own benchmarks? They take turns.

    python bench/llama_cpp.py q4_1.gguf q8_0.gguf q4_k.gguf --llama llama.cpp/build/bin --threads 2

`--llama`: the folder with llama-bench and llama-batched-bench, built for this machine (GGML_NATIVE). Tokens per second:
decoding at batch 1, 8 and 32 (llama.cpp without its server around it), and prompts. A turn counts only if other
processes used less than 0.12 cores; it is repeated up to 8 times. `bench/gguf_files.py` makes files.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import torch
from decode import engine_decode, random_prompts  # bench/decode.py

from ssd import LLM
from ssd.core import SamplingParams

DISTURBED = 0.12  # cores
PROMPT, NEW, BATCH_PROMPT = 256, 64, 16  # tokens of a prompt, of an answer, and of each prompt of a batch


def main() -> None:
    args = _arguments()
    torch.set_num_threads(args.threads)
    for path in args.files:
        with LLM(str(path), device="cpu", dtype=args.dtype, max_model_len=1024, max_num_seqs=32) as llm:
            turns: dict[str, tuple[Callable[[], float], Callable[[], float]]] = {
                "prompt": (lambda llm=llm: prompt(llm), lambda path=path: llama_bench(args, path, PROMPT, 0))
            }
            for batch in (1, 8, 32):
                tokens = NEW if batch == 1 else NEW // 2
                turns[f"batch {batch}"] = (
                    lambda llm=llm, batch=batch, tokens=tokens: decode(llm, batch, tokens),
                    (lambda path=path: llama_bench(args, path, 0, NEW))
                    if batch == 1
                    else (lambda path=path, batch=batch, tokens=tokens: batched_bench(args, path, batch, tokens)),
                )
            for name, (ours, theirs) in turns.items():
                ours()  # threads start, memory is touched, steps are recorded
                pairs = [(undisturbed(ours), undisturbed(theirs)) for _ in range(args.repeats)]
                print(f"{path.name:<14} {name:<9} {_row([(a, b) for a, b in pairs if a and b])}", flush=True)


def _row(pairs: list[tuple[float, float]]) -> str:
    if not pairs:
        return "no turn was undisturbed"
    ours, theirs = (statistics.median(each) for each in zip(*pairs, strict=True))
    ratio = statistics.median(a / b for a, b in pairs)
    return f"ssd {ours:7.1f}  llama.cpp {theirs:7.1f}  ratio {ratio:.2f}  ({len(pairs)} turns)"


def decode(llm: LLM, batch: int, tokens: int) -> float:
    return engine_decode(llm.driver, random_prompts(batch, BATCH_PROMPT, 40_000), tokens)


def prompt(llm: LLM) -> float:
    [tokens] = random_prompts(1, PROMPT, 40_000)
    began = time.perf_counter()
    llm.generate([tokens], SamplingParams(max_new_tokens=1, temperature=0))
    seconds = time.perf_counter() - began
    llm.driver.call(lambda engine: engine.scheduler.pool.clear_prefix_cache())
    return len(tokens) / seconds


def llama_bench(args: argparse.Namespace, path: Path, num_prompt: int, num_new: int) -> float:
    sizes = ("-p", str(num_prompt), "-n", str(num_new), "-t", str(args.threads), "-r", "1", "-o", "json")
    return float(json.loads(_output(args.llama / "llama-bench", "-m", str(path), *sizes))[0]["avg_ts"])


def batched_bench(args: argparse.Namespace, path: Path, batch: int, tokens: int) -> float:
    threads = ("-t", str(args.threads), "-tb", str(args.threads), "-c", str(batch * 128))
    sizes = ("-npp", str(BATCH_PROMPT), "-ntg", str(tokens), "-npl", str(batch), "--output-format", "jsonl")
    lines = _output(args.llama / "llama-batched-bench", "-m", str(path), *threads, *sizes).splitlines()
    return float(json.loads(next(line for line in lines if line.startswith("{")))["speed_tg"])


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
    parser.add_argument("--llama", type=Path, required=True, help="folder of llama.cpp's programs")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    parser.add_argument("--repeats", type=int, default=3)
    return parser.parse_args()


if __name__ == "__main__":
    main()
