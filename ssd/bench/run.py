"""Runs a benchmark: its settings, and the report."""

from __future__ import annotations

import contextlib
import dataclasses
import platform
from collections.abc import Callable
from collections.abc import Sequence as Seq
from pathlib import Path
from typing import Any

import torch

from ssd.assembly.device import resolve_device
from ssd.assembly.open import open_checkpoint
from ssd.bench import tracing
from ssd.bench.answers import NO_PROGRESS, Contender, Progress, RequestSettings
from ssd.bench.config import BenchConfig, is_url
from ssd.bench.floor import Floor, bandwidth, streamed_bytes
from ssd.bench.measure import MEAN, Measured, figures, measure, same_text, warnings
from ssd.bench.ours import OurContender, methods_of, our_contenders
from ssd.bench.record import origin
from ssd.bench.report import Report, Row
from ssd.bench.workload import Workload, load_workload
from ssd.execution.target import Target
from ssd.execution.threads import num_cores
from ssd.models.checkpoint import rounding_note
from ssd.text.tokenizer import Tokenizer
from ssd.version import VERSION


def run(config: BenchConfig, progress: Progress = NO_PROGRESS, traces: Seq[Path] = ()) -> Report:
    """Loads the contenders, measures them in turns, writes traces of this engine's methods, closes everything."""
    peers = [_peer(config, peer) for peer in config.peers]
    checkpoint = open_checkpoint(config.model)
    workloads = workloads_of(config, checkpoint.tokenizer())
    asked = RequestSettings(
        config.output_len, config.temperature, config.seed, config.batch, max_rounds=config.max_rounds
    )
    device = resolve_device(str(config.engine.get("device", "auto")))
    speed = bandwidth(device) if config.batch == 1 else None  # before models take the memory
    with contextlib.ExitStack() as stack:
        contenders = _contenders(config, workloads, peers, stack)
        found = measure(contenders, workloads, asked, config.repeats, progress)
        if traces:
            ours = [contender for contender in contenders if isinstance(contender, OurContender)]
            recorded = [tracing.record(contender, workloads[0].prompts, asked) for contender in ours]
            for file in traces:
                tracing.write(recorded, file)
        exact = config.speculation.get("acceptance", "coupled") == "coupled" or config.temperature == 0
        exact = exact and config.accept is None
        same = same_text(found) if exact and config.max_rounds is None else None
        notes = [*config.notes, *([checkpoint.note] if checkpoint.note else [])]
        if rounding := rounding_note(config.engine.get("quantization")):
            notes.append(f"ssd: {rounding}")
        if config.accept is not None:
            notes.append(f"acceptance is drawn (--accept {config.accept}): the texts are not the model's")
        notes += [f"{c.name}: {c.note}" for c in contenders if c.note]
        notes += [f"{w.name}: {w.origin}" for w in workloads]
        notes += _threads(found)
        rows = figures(found)
        floor = None if speed is None else _floor(contenders, rows, speed)
        notes += [*([str(floor)] if floor else []), *slower(rows)]
        answers = [a for turn in found[0].turns[workloads[0].name] if turn.repeat == 0 for a in turn.answers]
        texts = [answer.text for answer in answers]
        header = _header(config) | {"floor": floor.as_dict() if floor else None}
        return Report(header, rows, notes, same, texts, warnings(found))


def _floor(contenders: Seq[Contender], rows: Seq[Row], speed: float) -> Floor | None:
    """Of this engine's plain decoding, if that was measured; `speed`: the memory's, bytes/s."""
    for contender in contenders:
        if isinstance(contender, OurContender) and contender.name == "ar":
            target = contender.llm.engine.round.target
            assert isinstance(target, Target)
            decoder = target.runner.decoder
            decoded = next(row for row in rows if (row["contender"], row["set"]) == ("ar", MEAN))
            size = streamed_bytes(decoder) / decoder.tp.size
            return Floor(size, speed, decoded["decode_tokens_per_second"])
    return None


def slower(rows: Seq[Row]) -> list[str]:
    """A note on methods whose drafts did not pay."""
    first = rows[0]["contender"]
    drafting = [row for row in rows if row["set"] == MEAN and row.get("acceptance") is not None]
    names = [row["contender"] for row in drafting if (row["ratio_interval"] or [0.0, row["ratio"]])[1] < 1]
    why = "drafts pay where the target is much slower than its draft model, those of SSD where that has a core or GPU"
    return [f"slower than {first}: {', '.join(names)}; {why} to spare: docs/benchmarks.md"] if names else []


def _threads(found: Seq[Measured]) -> list[str]:
    """A note: how many threads each method may use on a CPU. It uses fewer while other processes are busy."""
    used = []
    for contender in (measured.contender for measured in found):
        if isinstance(contender, OurContender) and contender.on_cpu:
            draft = f" + {contender.draft_processes} for the draft" if contender.draft_processes else ""
            used.append(f"{contender.name} {contender.threads}{draft}")
    return [f"threads: {', '.join(used)}"] if used else []


def workloads_of(config: BenchConfig, tokenizer: Tokenizer) -> list[Workload]:
    return [
        load_workload(
            name,
            tokenizer,
            count=config.num_prompts,
            offset=config.prompt_offset,
            input_len=config.input_len,
            chat=config.chat,
            folder=config.folder,
            seed=config.seed,
        )
        for name in config.sets
    ]


def _contenders(
    config: BenchConfig,
    workloads: list[Workload],
    peers: Seq[Callable[[int], Contender]],
    stack: contextlib.ExitStack,
) -> list[Contender]:
    """Contenders, closed with the stack. Prefix caching is off, because prompts are repeated."""
    longest = max(workload.longest for workload in workloads)
    fitting = -(-(longest + config.output_len) // 64) * 64
    engine = {"prefix_caching": False, "max_model_len": fitting} | config.engine
    methods = methods_of(config.methods, config.draft, config.k, config.speculation)
    contenders: list[Contender] = []
    for ours in our_contenders(
        config.model, methods, batch=config.batch, accept=config.accepted, hits=config.hits, **engine
    ):
        stack.callback(ours.close)
        contenders.append(ours)
    for start in peers:
        contenders.append(start(int(engine["max_model_len"])))
        stack.callback(contenders[-1].close)
    return contenders


def _peer(config: BenchConfig, peer: str) -> Callable[[int], Contender]:
    """What starts a peer for sequences of a length; with the draft if it has a number of draft tokens.

    Raises what would keep it from starting: a server that does not answer, a program that is not installed.
    """
    from ssd.bench import openai, servers, transformers_peer

    if is_url(peer):
        server = openai.ServerContender(peer)
        return lambda _: server
    name, _, k = peer.partition(":")
    drafting: dict[str, Any] = {"draft": config.draft, "k": int(k)} if k else {}
    if name == "hf":
        transformers_peer.check(config.model, drafting.get("draft"), config.batch)
        device, dtype = str(config.engine.get("device", "auto")), str(config.engine.get("dtype", "auto"))
        return lambda _: transformers_peer.HFContender(config.model, device=device, dtype=dtype, **drafting)
    servers.check(name, config.model, drafting.get("draft"))
    return lambda longest: servers.launch(name, config.model, batch=config.batch, max_model_len=longest, **drafting)


def _draft_in_use(config: BenchConfig) -> str | None:
    """The draft model, if a method or a peer drafts with it, else the draft server, if there is one."""
    methods = methods_of(config.methods, config.draft, config.k, config.speculation)
    drafting = any(method.speculation.draft_model or method.speculation.draft_url for method in methods)
    named = config.draft or config.speculation.get("draft_url")
    return named if drafting or any(":" in peer for peer in config.peers if not is_url(peer)) else None


def _header(config: BenchConfig) -> dict[str, Any]:
    """Versions, machine and settings."""
    speculation = {name: value for name, value in config.speculation.items() if name != "draft_token"}
    settings = dataclasses.asdict(dataclasses.replace(config, speculation=speculation))
    cuda = torch.cuda.is_available() and config.engine.get("device", "auto") != "cpu"
    machine = torch.cuda.get_device_name(0) if cuda else f"{platform.machine()} CPU, {num_cores()} cores"
    return {
        "ssd": VERSION,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "device": machine,
        **origin(),
        "settings": settings | {"draft": _draft_in_use(config)},
    }
