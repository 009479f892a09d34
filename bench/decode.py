"""How fast is plain decoding? Against `transformers` on the same machine, and on a GPU against the memory's floor.

    python bench/decode.py                          # the CPU, a 135M Llama shape
    python bench/decode.py --device cuda            # one GPU, the Llama-3.1-8B shape
    python bench/decode.py --shape qwen3-8b --device cuda --json out.json
    python bench/decode.py --model graft:tiny-llama@llama-3.1-8b --device cuda
    python bench/decode.py --device cuda --prompt-len 16384 --kv-cache-dtype fp8 --no-transformers

Weights are random, since only the shape counts, unless a model is named: then there is no comparison with
`transformers`. Runs alternate and medians are taken, so ratios hold on a noisy machine; a row warns of a busy one.
"""

from __future__ import annotations

import argparse
import functools
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import get_args

import torch
from random_weights import DISTINCT, PUBLISHED, RandomCheckpoint, experts_in

from ssd.assembly.build import build_engine
from ssd.assembly.open import open_checkpoint
from ssd.bench.floor import bandwidth, device_seconds, streamed_bytes
from ssd.bench.load import LoadMeter
from ssd.bench.record import HELP, Figure, record, spread, text
from ssd.config import EngineConfig
from ssd.core import SamplingParams
from ssd.engine.driver import Driver
from ssd.execution.batch import Batch
from ssd.execution.runner import ModelRunner
from ssd.execution.target import Target
from ssd.grafts.export import config_json
from ssd.grafts.shapes import SHAPES, shape_of
from ssd.kernels.codes import TargetFormat
from ssd.layers.formats import dense
from ssd.models.checkpoint import Checkpoint
from ssd.models.config import DecoderConfig

Row = tuple[str, str | dict[str, Figure]]  # a note, or figures by their units


def main() -> None:
    args = _arguments()
    device = torch.device(args.device)
    shape = args.shape or ("llama-3.1-8b" if device.type == "cuda" else "smollm2-135m")
    meter = LoadMeter()
    if device.type == "cuda":
        rows = bench_gpu(shape, args)
    else:
        rows = bench_cpu_model(args) if args.model else bench_cpu(shape, args)
    warning = meter.warning(1 if device.type == "cuda" else torch.get_num_threads())
    rows += [("warning", warning)] if warning else []
    width = max(len(name) for name, _ in rows)
    for name, value in rows:
        parts = value if isinstance(value, str) else ", ".join(f"{text(each)} {unit}" for unit, each in value.items())
        print(f"{name:<{width}}  {parts}")
    notes = [f"{name}: {value}" for name, value in rows if isinstance(value, str)]
    record(args.json, {name: value for name, value in rows if not isinstance(value, str)}, notes)


def bench_cpu(shape: str, args: argparse.Namespace) -> list[Row]:
    """Tokens per second of ssd and of `transformers.generate`, on the same checkpoint."""
    from ssd import LLM

    with tempfile.TemporaryDirectory() as folder:
        model = hf_model(shape_of(shape), torch.float32, torch.device("cpu"))
        model.save_pretrained(folder)
        start = time.perf_counter()
        llm = LLM(folder, device="cpu", dtype="float32", kv_cache_dtype=args.kv_cache_dtype)
        rows: list[Row] = [("shape", shape), ("threads", str(torch.get_num_threads()))]
        rows.append(("ssd ready after", {"s": round(time.perf_counter() - start, 2)}))
        half = LLM(folder, device="cpu", dtype="bfloat16", kv_cache_dtype=args.kv_cache_dtype)
        for batch in (1, 8):
            prompts = random_prompts(batch, args.prompt_len, shape_of(shape).vocab_size)
            contenders = {
                "ssd": lambda p=prompts: engine_decode(llm.driver, p, args.new_tokens),
                "transformers": lambda p=prompts: hf_decode(model, p, args.new_tokens),
                "ssd, bfloat16 weights": lambda p=prompts: engine_decode(half.driver, p, args.new_tokens),
            }
            speeds = alternate(contenders, args.repeats)
            rows += compared(f"batch {batch}", speeds)
        jobs = ragged_jobs(24, shape_of(shape).vocab_size)
        eight = LLM(folder, device="cpu", dtype="float32", max_num_seqs=8, kv_cache_dtype=args.kv_cache_dtype)
        speeds = alternate(
            {"ssd": lambda: engine_serve(eight.driver, jobs), "transformers": lambda: hf_serve(model, jobs, 8)}, 1
        )
        rows += compared("24 ragged requests, 8 at a time, prefill included", speeds)
    return rows


def bench_cpu_model(args: argparse.Namespace) -> list[Row]:
    """Tokens per second of one checkpoint."""
    from ssd import LLM

    checkpoint = open_checkpoint(args.model)
    rows: list[Row] = [("model", described(args.model, checkpoint)), ("threads", str(torch.get_num_threads()))]
    for dtype in ("float32", "bfloat16"):
        with LLM(args.model, device="cpu", dtype=dtype, kv_cache_dtype=args.kv_cache_dtype) as llm:
            for batch in (1, 8):
                prompts = random_prompts(batch, args.prompt_len, known_tokens(checkpoint))
                run = functools.partial(engine_decode, llm.driver, prompts, args.new_tokens)
                speeds = alternate({"ssd": run}, args.repeats)["ssd"]
                rows.append((f"batch {batch}, {dtype}", {"tokens/s": spread(speeds)}))
    return rows


def described(model: str, checkpoint: Checkpoint) -> str:
    return f"{model} ({checkpoint.note})" if checkpoint.note else model


def known_tokens(checkpoint: Checkpoint) -> int:
    """Tokens that prompts may hold: a graft knows its base's only."""
    return checkpoint.tokenizer().vocab_size or checkpoint.config.vocab_size


def compared(label: str, speeds: dict[str, list[float]]) -> list[Row]:
    rows: list[Row] = []
    for name, values in speeds.items():
        ratio = statistics.median(a / b for a, b in zip(values, speeds["transformers"], strict=True))
        rows.append((f"{label}, {name}", {"tokens/s": spread(values), "x transformers": round(ratio, 2)}))
    return rows


def bench_gpu(shape: str, args: argparse.Namespace) -> list[Row]:
    """Decode time against the floor: bytes of weights over the copy bandwidth measured in this run."""
    device = torch.device(args.device)
    speed = bandwidth(device)
    start = time.perf_counter()
    formats = experts_in(args.experts) if args.experts else dense
    plain = RandomCheckpoint(shape_of(shape), embedding=DISTINCT, formats=formats)
    checkpoint = open_checkpoint(args.model) if args.model else plain
    longest = min(max(4096, args.prompt_len + args.new_tokens), checkpoint.config.max_position)
    config = EngineConfig(
        args.model or shape,
        device=args.device,
        max_model_len=longest,
        max_num_seqs=64,
        kv_cache_dtype=args.kv_cache_dtype,
        quantization=args.quantization,
    )
    engine, config = build_engine(config, checkpoint)
    driver = Driver(engine)
    torch.cuda.synchronize()
    started = {"s": round(time.perf_counter() - start, 1)}
    assert isinstance(engine.round.target, Target)
    runner = engine.round.target.runner
    named = f"{shape}, {runner.decoder.quantized or 'bfloat16'}, random weights"
    rows: list[Row] = [
        ("device", torch.cuda.get_device_name(device)),
        ("model", described(args.model, checkpoint) if args.model else named),
        ("KV cache", config.kv_dtype),
        ("start-up (weights, kernels, graphs)", started),
    ]
    floors = {n: streamed_bytes(runner.decoder, n) / speed for n in (1, 8, 16, 64)}  # seconds, by rows
    floor = {"ms": round(floors[1] * 1e3, 3), "GB": round(floors[1] * speed / 1e9, 2)}
    rows.append(("copy bandwidth", {"TB/s": round(speed / 1e12, 2)}))
    rows.append(("floor: one pass over the weights", floor))
    one = 0.0
    sizes = ((1, 1, 512), (1, 8, 512), (8, 1, 512), (16, 1, 512), (64, 1, 512), (1, 1, 4000), (8, 1, 16384))
    for sequences, queries, context in sizes:
        if context > longest:
            continue
        measured = functools.partial(graph_seconds, runner, sequences, queries, context)
        seconds = driver.call(lambda _, measured=measured: measured())
        one = one or seconds
        label = f"model, {sequences} x {queries} tokens at context {context}"
        shares = {"of the floor": floors[sequences * queries] / seconds, "x one token": seconds / one}
        rows.append((label, {"ms": round(1e3 * seconds, 3)} | {unit: round(s, 3) for unit, s in shares.items()}))
    for batch in (1, 8, 16, 64):
        prompts = random_prompts(batch, args.prompt_len, known_tokens(checkpoint))
        speeds = alternate({"ssd": lambda p=prompts: engine_decode(driver, p, args.new_tokens)}, args.repeats)["ssd"]
        step = batch / statistics.median(speeds)
        share = round(floors[batch] / step, 3)
        rows.append((f"engine, batch {batch}", {"tokens/s": spread(speeds), "of the floor": share}))
        if batch == 1:
            ours = statistics.median(speeds)
    driver.close()
    engine = runner = measured = None  # type: ignore[assignment]
    torch.cuda.empty_cache()
    if not args.no_transformers and not args.model:
        model = hf_model(shape_of(shape), torch.bfloat16, device)
        prompts = random_prompts(1, args.prompt_len, shape_of(shape).vocab_size)
        theirs = alternate({"hf": lambda: hf_decode(model, prompts, 32)}, 2)["hf"]
        ratio = round(ours / statistics.median(theirs), 1)
        rows.append(("transformers (eager), batch 1", {"tokens/s": spread(theirs)}))
        rows.append(("ssd, batch 1", {"x transformers": ratio}))
    return rows


def engine_decode(driver: Driver, prompts: list[list[int]], new_tokens: int) -> float:
    """Decode speed: tokens that came after the last sequence's first one, over the time from then on."""
    params = SamplingParams(max_new_tokens=new_tokens, ignore_eos=True)
    submissions = driver.submit_many([(prompt, params) for prompt in prompts])
    deliveries = [submission.result().metrics.deliveries for submission in submissions]
    driver.call(lambda engine: engine.scheduler.pool.clear_prefix_cache())
    start = max(first for (first, _), *_ in deliveries)
    tokens = sum(count for each in deliveries for when, count in each if when > start)
    return tokens / (max(each[-1][0] for each in deliveries) - start)


def hf_decode(model: torch.nn.Module, prompts: list[list[int]], new_tokens: int) -> float:
    """The same for `transformers.generate`: the time of one token (the prefill) is taken off."""
    inputs = torch.tensor(prompts, device=next(model.parameters()).device)

    def seconds(count: int) -> float:
        start = time.perf_counter()
        model.generate(  # type: ignore[operator]
            inputs, attention_mask=torch.ones_like(inputs), do_sample=False, max_new_tokens=count, min_new_tokens=count
        )
        if inputs.is_cuda:
            torch.cuda.synchronize()
        return time.perf_counter() - start

    first = seconds(1)
    return len(prompts) * (new_tokens - 1) / (seconds(new_tokens) - first)


def ragged_jobs(count: int, vocab_size: int) -> list[tuple[list[int], int]]:
    """Prompts of 8 to 64 tokens, each with its own number of new tokens (16 to 96)."""
    source = random.Random(count)
    sizes = [(source.randint(8, 64), source.randint(16, 96)) for _ in range(count)]
    return [([source.randrange(vocab_size) for _ in range(length)], new) for length, new in sizes]


def engine_serve(driver: Driver, jobs: list[tuple[list[int], int]]) -> float:
    """Useful tokens per second over a whole workload."""
    start = time.perf_counter()
    requests = [(prompt, SamplingParams(max_new_tokens=new, ignore_eos=True)) for prompt, new in jobs]
    for submission in driver.submit_many(requests):
        submission.result()
    seconds = time.perf_counter() - start
    driver.call(lambda engine: engine.scheduler.pool.clear_prefix_cache())
    return sum(new for _, new in jobs) / seconds


def hf_serve(model: torch.nn.Module, jobs: list[tuple[list[int], int]], batch: int) -> float:
    """The same with static batches: prompts padded on the left, every batch run to its longest answer."""
    start = time.perf_counter()
    for first in range(0, len(jobs), batch):
        part = jobs[first : first + batch]
        width, new_tokens = max(len(p) for p, _ in part), max(new for _, new in part)
        inputs = torch.tensor([[0] * (width - len(p)) + p for p, _ in part])
        mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p, _ in part])
        options = {"do_sample": False, "max_new_tokens": new_tokens, "min_new_tokens": new_tokens}
        model.generate(inputs, attention_mask=mask, **options)  # type: ignore[operator]
    return sum(new for _, new in jobs) / (time.perf_counter() - start)


def hf_model(shape: DecoderConfig, dtype: torch.dtype, device: torch.device) -> torch.nn.Module:
    """`transformers`' model of the same shape, randomly initialised."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(shape.family, **config_json(shape, dtype))
    torch.manual_seed(0)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return model


def alternate(contenders: dict[str, Callable[[], float]], repeats: int) -> dict[str, list[float]]:
    """Runs the contenders in turn, once to warm up and then `repeats` times."""
    results: dict[str, list[float]] = {name: [] for name in contenders}
    for turn in range(repeats + 1):
        for name, run in contenders.items():
            value = run()
            if turn:
                results[name].append(value)
    return results


def random_prompts(count: int, length: int, vocab_size: int) -> list[list[int]]:
    source = random.Random(count)
    return [[source.randrange(vocab_size) for _ in range(length)] for _ in range(count)]


def graph_seconds(runner: ModelRunner, sequences: int, queries: int, context: int, repeats: int = 15) -> float:
    """Median time of the model alone (one graph replay): `queries` tokens of each at the end of `context` tokens,
    which are random, since experts depend on them."""
    runner.state.token_ids.random_(0, runner.decoder.config.vocab_size)
    runner.state.length[:sequences] = context  # tokens from there on are drafts, of which there are none
    slots, blocks = range(sequences), -(-context // runner.block_size) * len(runner.decoder.kv_groups)
    for slot in slots:
        runner.tables.reset(slot)
        runner.tables.update([(slot, list(range(slot * blocks, (slot + 1) * blocks)))])
    batch = Batch([*slots], [context - queries] * sequences, [queries] * sequences, [queries] * sequences)
    graph = runner.forward(batch).graph
    assert graph is not None
    return statistics.median(device_seconds(graph.graph.replay) for _ in range(repeats))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--shape", help=f"random weights of this shape, or NAME:layers=N: {', '.join(SHAPES)}")
    which.add_argument("--model", help="a checkpoint: anything that `ssd generate` takes")
    parser.add_argument("--prompt-len", type=int, default=32)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--kv-cache-dtype", choices=["auto", "fp8"], default="auto")
    parser.add_argument("--quantization", choices=get_args(TargetFormat), help="rounds the layers' weights (GPU only)")
    parser.add_argument("--experts", choices=[*PUBLISHED], help="a published format of the experts (GPU only)")
    parser.add_argument("--no-transformers", action="store_true", help="skip the peer (GPU only)")
    parser.add_argument("--json", type=Path, help=HELP)
    return parser.parse_args()


if __name__ == "__main__":
    main()
