"""Decoding speed, with the command lines of the public research code. `ssd bench` is the same with clean names.

    python bench.py --size 8 --numseqs 8 --output_len 128                                      # autoregressive
    python bench.py --size 8 --draft 1 --spec --k 6 --b 1 --numseqs 8                          # speculative (SD)
    python bench.py --qwen --size 32 --spec --async --k 6 --f 3 --all                          # SSD
    python bench.py --size 8 --eagle --async --k 6 --f 3 --numseqs 8                           # with an EAGLE-3 head
    python bench.py --qwen --size 32 --graft --compare ar,sd:6,ssd:6 --numseqs 4 --plot r.html # without its weights
    python bench.py --model llama-3-8b --method ssd --numseqs 128

--numseqs counts for every data set. Drafted tokens are drawn at the target's temperature (--temp).
"""

from __future__ import annotations

import argparse
import copy
import json
import logging
import re
import sys
from pathlib import Path
from typing import Any

from arguments import GPUs, add_model_flags, add_options, given, options_of_ssd, pair_of, use_cuda_arch
from rich.console import Console

from ssd.bench.config import BenchConfig
from ssd.bench.workload import EXAMPLE, RANDOM
from ssd.cli.bench import benchmark
from ssd.config import K_DEFAULT, EngineConfig, SpeculationConfig
from ssd.core import SamplingParams
from ssd.errors import ConfigError, SSDError
from ssd.prompts import OWN_SETS

SETS = {"humaneval": "humaneval", "alpaca": "alpaca", "gsm": "gsm8k", "c4": "c4", "ultrafeedback": "ultrafeedback"}
DEFAULT_SIZE = "8"


def config_of(args: argparse.Namespace) -> BenchConfig:
    """What the flags ask for, in the library's words."""
    temperature = args.temperature or SamplingParams.temperature
    if args.dtemp is not None and args.dtemp != temperature:
        raise ConfigError(
            f"--dtemp {args.dtemp:g}: drafts are drawn at the target's temperature, with its noise, because then they "
            "are right most often; leave it out"
        )
    methods = args.compare or method_of(args)
    peers = tuple(filter(None, (args.peer or "").split(",")))
    drafted = any(method.split(":")[0] in ("sd", "ssd") for method in methods.split(","))
    drafted = drafted or any(re.fullmatch(r"\w+:\d+", peer) for peer in peers)
    size = args.size or (None if args.model else DEFAULT_SIZE)
    model, draft = pair_of(args, size=size, drafted=drafted, eagle=args.eagle)
    gpus = GPUs.of(args.gpus, args.device or EngineConfig.device, ahead="ssd" in methods, head=args.eagle)
    return BenchConfig(
        model,
        draft,
        methods=methods,
        peers=peers,
        k=args.k or K_DEFAULT,
        speculation=speculation_of(args, methods) | gpus.placement,
        sets=sets_of(args),
        num_prompts=args.numseqs,
        prompt_offset=args.prompt_offset,
        input_len=args.input_len,
        output_len=args.output_len,
        chat=args.chat_template,
        batch=args.b,
        temperature=temperature,
        repeats=args.repeats,
        max_rounds=args.max_steps,
        engine=given(args, EngineConfig) | ({"tensor_parallel_size": gpus.ranks} if gpus.ranks > 1 else {}),
        notes=(gpus.note,) if gpus.note else (),
    )


def method_of(args: argparse.Namespace) -> str:
    if args.method is not None:
        return str(args.method)
    speculates = args.spec or args.eagle
    if args.run_ahead and not speculates:
        raise ConfigError("--async is a way of speculating: add --spec, or --eagle")
    return "ssd" if args.run_ahead else "sd" if speculates else "ar"


def speculation_of(args: argparse.Namespace, methods: str) -> dict[str, Any]:
    """`--x` is for the rejection rule, which it chooses."""
    hit, miss = args.flh or args.fl, args.flm or args.fl
    rule: dict[str, Any] = {"acceptance": "rejection", "saguaro_c": args.x} if args.x is not None else {}
    rule |= {"draft_quantization": args.draft_quantization} if args.draft_quantization else {}
    options = options_of_ssd(args.k or K_DEFAULT, f=args.f, hit=hit, miss=miss, backup=args.backup, **rule)
    unused = set(options) - set(rule)
    if unused and "ssd" not in methods:
        raise ConfigError("--f, --fl, --flh, --flm and --backup are for SSD: add --spec --async, or leave them out")
    if rule and methods == "ar":
        raise ConfigError("--x and --draft_quantization are for drafts: add --spec, or leave them out")
    return options


def sets_of(args: argparse.Namespace) -> tuple[str, ...]:
    """GSM8K unless others are named."""
    named = [name for flag, name in SETS.items() if getattr(args, flag)]
    named += list(OWN_SETS) if args.all else []
    named += [EXAMPLE] if args.example else []
    named += [RANDOM] if args.random else []
    return tuple(dict.fromkeys(named)) or ("gsm8k",)


def sweep_of(args: argparse.Namespace) -> list[argparse.Namespace]:
    """The flags, or several times the flags with some of them changed."""
    if args.sweep is None:
        return [args]
    try:
        text = Path(args.sweep[1:]).read_text(encoding="utf-8") if args.sweep.startswith("@") else args.sweep
        changes = json.loads(text)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f'--sweep {args.sweep}: {error}; write a JSON list such as \'[{{"k": 4}}, {{"k": 6}}]\''
        ) from None
    if not isinstance(changes, list) or not changes or any(not isinstance(change, dict) for change in changes):
        raise ConfigError("--sweep: must be a JSON list of objects, each the flags that change: '[{\"k\": 4}]'")
    names = {"async": "run_ahead", "max-steps": "max_steps", "block_sz": "block_size", "temp": "temperature"}
    runs = []
    for change in changes:
        one = copy.copy(args)
        for flag, value in change.items():
            name = names.get(flag, flag)
            if not hasattr(args, name) or name in ("sweep", "json", "plot"):
                raise ConfigError(f"--sweep: {flag!r} is no flag that can change from run to run")
            setattr(one, name, value)
        runs.append(one)
    return runs


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    models = parser.add_argument_group(f"models (default: size {DEFAULT_SIZE})")
    add_model_flags(models, sizes=["0.6", "1.7", "4", "8", "14", "32", "1", "3", "70"])
    models.add_argument("--gpus", type=int, default=1, help="the target is split over them, SSD's draft has one")
    add_options(models, EngineConfig, "device", "quantization", "eager", "max_model_len", block_size="--block_sz")

    how = parser.add_argument_group("how to decode (default: autoregressive)")
    how.add_argument("--spec", action="store_true", help="a draft proposes, the target waits for it (SD)")
    how.add_argument("--async", dest="run_ahead", action="store_true", help="the draft runs ahead (SSD)")
    how.add_argument("--eagle", action="store_true", help="drafts by an EAGLE-3 head: that of the size, or --draft")
    how.add_argument("--method", choices=["ar", "sd", "ssd"], help="the same in one word")
    how.add_argument("--compare", metavar="METHODS", help="several in turns, such as ar,sd:4,ssd:6,suffix:16")
    add_options(how, SpeculationConfig, "k", "backup", "draft_quantization")
    how.add_argument("--f", type=int, help="SSD: branches per draft position (default: adaptive)")
    how.add_argument("--fl", type=int, nargs="+", help="SSD: branches at each of the k + 1 draft positions")
    how.add_argument("--flh", type=int, nargs="+", help="SSD: the same, for drafts that were hits")
    how.add_argument("--flm", type=int, nargs="+", help="SSD: the same, for drafts that were misses")
    add_options(how, SamplingParams, temperature="--temp")
    how.add_argument("--dtemp", type=float, help="temperature of the draft: must be the target's")
    how.add_argument("--x", type=float, help="Saguaro's C, 0 to 1: tokens are accepted by the rejection rule")

    work = parser.add_argument_group("what to answer")
    for flag in (*SETS, RANDOM):
        work.add_argument(f"--{flag}", action="store_true")
    work.add_argument("--all", action="store_true", help=f"{', '.join(OWN_SETS)}")
    work.add_argument("--example", action="store_true", help="a few examples, whose answers are printed")
    work.add_argument("--numseqs", type=int, default=128, help="prompts of each set")
    work.add_argument("--prompt_offset", type=int, default=0, help="skip this number of prompts of a set")
    work.add_argument("--input_len", type=int, help="truncate prompts to this number of tokens; length of random ones")
    work.add_argument("--output_len", type=int, default=512, help="tokens of each answer")
    work.add_argument("--chat_template", action="store_true", help="put questions through the chat template")
    work.add_argument("--b", type=int, default=1, help="requests at the same time")
    work.add_argument("--max-steps", dest="max_steps", type=int, help="stop every set after this number of rounds")
    work.add_argument("--repeats", type=int, default=1, help="turns of every contender on every set")

    out = parser.add_argument_group("what to do with it")
    out.add_argument("--peer", metavar="NAMES", help="others too: hf, vllm, sglang, llamacpp (vllm:4: drafting), URLs")
    out.add_argument("--json", type=Path, help="write all figures here")
    out.add_argument("--plot", type=Path, action="append", default=[], help="draw: a .png, .svg or .html file")
    out.add_argument("--verbose", action="store_true", help="log what the engine does, print the first set's answers")
    out.add_argument("--wandb", action="store_true", help="log to Weights & Biases")
    out.add_argument("--group", help="group of the wandb run")
    out.add_argument("--name", help="name of the wandb run")
    out.add_argument("--sweep", metavar="JSON", help="several runs: a list of the flags that change, or @FILE")
    return parser.parse_args()


def main() -> int:
    args = arguments()
    logging.basicConfig(level=logging.INFO if args.verbose else logging.WARNING, format="%(levelname)s %(message)s")
    use_cuda_arch()
    reports = []
    try:
        runs = sweep_of(args)
        if len(runs) > 1 and args.plot:
            raise ConfigError("--plot draws one report: leave out --sweep, or compare the methods with --compare")
        for run in [(one, config_of(one)) for one in runs]:
            reports.append(one_run(*run, alone=len(runs) == 1))
    except SSDError as error:
        Console(stderr=True).print(f"error: {error}", markup=False, highlight=False, soft_wrap=True)
        return 1
    except KeyboardInterrupt:
        return 130
    if args.json and len(reports) > 1:
        args.json.write_text(json.dumps([report.as_dict() for report in reports], indent=1) + "\n", encoding="utf-8")
    return int(any(report.same_text is False for report in reports))


def one_run(args: argparse.Namespace, config: BenchConfig, *, alone: bool) -> Any:
    json_file = args.json if alone else None
    report = benchmark(config, json_file, args.plot, wandb=args.wandb, group=args.group, name=args.name)
    if args.example or args.verbose:
        for text in report.texts:
            Console().print(text, "\n", markup=False, highlight=False)
    return report


if __name__ == "__main__":
    sys.exit(main())
