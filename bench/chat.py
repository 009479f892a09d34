"""Talk to a model: this engine's, or one behind a server.

    python -O chat.py --ssd                                       # the models that come with ssd, here and now
    python -O chat.py --ssd --spec --async --k 7 --f 3 --metrics --llama --size 70
    python -O chat.py --ssd --spec --qwen --size 32 --graft --colour  # that size's speed without its weights
    python -O chat.py --vllm --ar --llama --size 8
    python -O chat.py --url http://127.0.0.1:8000

`ssd chat` is the same conversation with all of the engine's options.
"""

from __future__ import annotations

import argparse
import sys
from contextlib import closing
from typing import TYPE_CHECKING, Any

from arguments import GPUs, add_model_flags, add_options, given, options_of_ssd, pair_of

from ssd.cli.chat import talk, talk_to_server
from ssd.cli.conversation import note
from ssd.config import K_DEFAULT, EngineConfig, SpeculationConfig
from ssd.core import SamplingParams
from ssd.errors import SSDError

if TYPE_CHECKING:
    from ssd.bench.openai import ServerContender


def with_engine(args: argparse.Namespace) -> None:
    gpus = GPUs.of(args.gpus, args.device or EngineConfig.device, ahead=args.run_ahead)
    if gpus.note:
        note(gpus.note)
    model, draft = pair_of(args, size=args.size, drafted=args.spec)
    options = given(args, EngineConfig) | {"tensor_parallel_size": gpus.ranks}
    wanted = drafting(args, draft)
    wanted = None if wanted is None else wanted | gpus.placement
    shown = {"system": args.system, "metrics": args.metrics, "colour": args.colour}
    talk(model, sampling_of(args), speculation=wanted, **shown, **options)


def with_server(args: argparse.Namespace) -> None:
    server = connect(args)
    with closing(server):
        talk_to_server(server, sampling_of(args), system=args.system, metrics=args.metrics)


def sampling_of(args: argparse.Namespace) -> SamplingParams:
    return SamplingParams(**{"max_new_tokens": 512, **given(args, SamplingParams)})


def connect(args: argparse.Namespace) -> ServerContender:
    """The server at the URL, or one that is started here and ends with the chat."""
    if args.url:
        from ssd.bench.openai import ServerContender

        return ServerContender(args.url, model=args.model)
    from ssd.bench.servers import launch

    kind = "sglang" if args.sglang else "vllm"
    model, draft = pair_of(args, size=args.size, drafted=not args.ar)
    sizes = {name: value for name in ("k", "max_model_len") if (value := getattr(args, name)) is not None}
    note(f"starting {kind}: this takes a while")
    return launch(kind, model, draft=draft, gpus=args.gpus, **sizes)


def drafting(args: argparse.Namespace, draft: str | None) -> dict[str, Any] | None:
    """The engine's options of speculation."""
    if not args.spec:
        return None
    k = args.k or K_DEFAULT
    ahead = options_of_ssd(k, f=args.f, backup=args.backup)
    return {"mode": "ssd" if args.run_ahead else "sd", "draft": draft, "k": k, **ahead}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    answering = parser.add_argument_group("who answers")
    who = answering.add_mutually_exclusive_group()
    who.add_argument("--ssd", action="store_true", help="this engine")
    who.add_argument("--sglang", action="store_true", help="SGLang, started here (or found at --url)")
    who.add_argument("--vllm", action="store_true", help="vLLM, started here (or found at --url)")
    answering.add_argument("--url", help="any server that speaks OpenAI's protocol; --model names one of its models")

    models = parser.add_argument_group("models (without any of these: the small ones that come with ssd)")
    add_model_flags(models)

    drafts = parser.add_argument_group("speculation (this engine)")
    drafts.add_argument("--spec", action="store_true", help="a draft model proposes tokens (SD)")
    drafts.add_argument("--async", dest="run_ahead", action="store_true", help="and runs ahead of the target (SSD)")
    add_options(drafts, SpeculationConfig, "k", "backup")
    drafts.add_argument("--f", type=int, help="branches per draft position (default: adaptive)")
    drafts.add_argument("--ar", action="store_true", help="servers: no draft model")

    add_options(parser, SamplingParams, "seed", temperature="--temp", max_new_tokens="--max_tokens --output_len")
    add_options(parser, EngineConfig, "device", "quantization", "eager", "max_model_len")
    parser.add_argument("--system", metavar="TEXT", help="system message")
    parser.add_argument("--gpus", "--tp", type=int, default=1, help="the model is split over them, SSD's draft has one")
    parser.add_argument("--metrics", action="store_true", help="times and speed after every answer")
    parser.add_argument("--colour", action="store_true", help="in green what the draft had guessed")
    args = parser.parse_args()

    if not (args.ssd or args.sglang or args.vllm or args.url):
        parser.error("who answers? Pass --ssd, --sglang, --vllm or --url URL")
    if args.ssd and args.url:
        parser.error("--ssd and --url are two answers to the same question: leave one out")
    if args.ssd and not args.spec and (args.run_ahead or any(o is not None for o in (args.k, args.f, args.backup))):
        parser.error("--async, --k, --f and --backup say how to speculate: add --spec, or leave them out")
    if args.graft and not args.size:
        parser.error("--graft needs a --size, whose speed it has")
    return args


def main() -> None:
    args = arguments()
    try:
        (with_engine if args.ssd else with_server)(args)
    except SSDError as error:
        sys.exit(f"error: {error}")
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
