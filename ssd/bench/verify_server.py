"""Holds an OpenAI-compatible server against itself: an answer must not depend on when and beside what it is written."""

from __future__ import annotations

import asyncio
import functools
from dataclasses import replace

from ssd.bench.answers import NO_PROGRESS, Progress, RequestSettings
from ssd.bench.comparison import Asked, Comparison, Verification
from ssd.bench.config import BenchConfig
from ssd.bench.openai import ServerContender
from ssd.bench.serve import Load, Result, answer_all
from ssd.bench.verify import TEMPERATURES, header_of
from ssd.errors import ConfigError
from ssd.prompts import load_prompts


def verify_server(server: ServerContender, config: BenchConfig, progress: Progress = NO_PROGRESS) -> Verification:
    """Asks for every prompt alone, again, and `config.batch` at a time and fewer; at each temperature by itself."""
    sets = [load_prompts(name, config.folder) for name in config.sets]
    prompts = [p for each in sets for p in (each.asked() if config.chat else each.prompts)[: config.num_prompts]]
    settings = RequestSettings(config.output_len, ignore_eos=False, logprobs=True)
    asked = [(prompt, replace(settings, seed=config.seed + i)) for i, prompt in enumerate(prompts)]
    most = min(config.batch, len(asked))
    if most < 2:
        raise ConfigError(f"batch={config.batch} and {len(asked)} prompts: both must be at least 2, for company")
    ways = {"one at a time: the reference": 1, "one at a time, again": 1}
    ways |= {f"{count} at a time": count for count in sorted({2, max(2, most // 2), most})}
    done = progress.begin(server.name, len(TEMPERATURES) * len(ways) * len(asked))
    comparisons: list[Comparison] = []
    not_compared: dict[str, str] = {}
    for temperature in TEMPERATURES:
        if temperature and "seed" in server.refused:
            not_compared[f"temperature {temperature:g}"] = "the server takes no seed"
            continue
        at: list[Asked] = [(prompt, replace(each, temperature=temperature)) for prompt, each in asked]
        reference: list[Result] = []
        for way, count in ways.items():
            name = f"temperature {temperature:g}, {way}"
            found = asyncio.run(answer_all(server, at, Load(concurrency=count), 0, functools.partial(done, name)))
            reference = reference or found
            comparisons.append(Comparison.of(name, at, reference, found))
            progress.tell(f"{name}: {comparisons[-1].verdict}")
    if any(each.unit == "characters" for each in comparisons):
        not_compared["log-probabilities"] = "the server does not send them with every answer"
    notes = [*filter(None, [server.note]), *(f"{each.name}: {each.origin}" for each in sets)]
    header = header_of(config, {"url": server.url, "model": server.model})
    return Verification(f"{server.model} at {server.url}", header, comparisons, not_compared, notes)
