"""This engine's own contenders: plain, speculative and speculative speculative decoding over the same weights."""

from __future__ import annotations

import time
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from ssd.assembly.device import resolve_device
from ssd.assembly.drafters import drafter_of
from ssd.assembly.open import feature_draft_kind, open_feature_draft
from ssd.assembly.placement import deepened, placed
from ssd.bench.answers import Answer, Prompt, RequestSettings
from ssd.config import MTP, SUFFIX, SpeculationConfig
from ssd.core import Outcome, RequestOutput, SamplingParams, Work
from ssd.decoding.drafter import Drafter
from ssd.decoding.observer import RoundObserver
from ssd.drafting.block import BlockModel
from ssd.drafting.controller import DepthController
from ssd.drafting.head import HeadModel
from ssd.drafting.model import DraftSource, ModelDrafter
from ssd.drafting.process import ProcessDrafter
from ssd.drafting.ssd import SSDDrafter
from ssd.drafting.suffix import SuffixDrafter
from ssd.engine.driver import Asked, Driver
from ssd.engine.engine import Engine
from ssd.engine.metrics import EngineMetrics
from ssd.engine.submission import Submission
from ssd.errors import ConfigError, ServerError
from ssd.execution.target import Target
from ssd.llm import LLM, check_served, measure_modes
from ssd.models.block import BlockCheckpoint
from ssd.models.feature_draft import FeatureCheckpoint
from ssd.options import options_of
from ssd.sampling.rates import rates_of

TREE, SSD_TREE = "tree", "ssd-tree"  # draft trees of SD, and of SSD


@dataclass(frozen=True)
class Method:
    """A decoding method: `ar`, `sd`, `sd:4`, `ssd:auto`, `suffix:16`, `tree`, `tree:16:4`, `ssd-tree:16:4`; without k
    that of an engine."""

    name: str
    speculation: SpeculationConfig

    @classmethod
    def parse(
        cls,
        text: str,
        draft: str | None,
        k: int | str | None,
        options: Mapping[str, Any],
        opened: FeatureCheckpoint | None = None,
    ) -> Method:
        """`options` are those of mode="ssd", of the acceptance rule, or of the draft model; with `draft_url` a draft
        server drafts for `ssd`. `opened`: the draft, if it is one on the target's features."""
        mode, _, number = text.partition(":")
        if mode not in ("ar", "sd", "ssd", "auto", SUFFIX, TREE, SSD_TREE) or (mode == "ar" and number):
            raise ConfigError(
                f"method {text!r}: must be ar, sd, ssd, auto, {SUFFIX}, {TREE} or {SSD_TREE}, with a number of tokens "
                f"if need be: ssd:6; trees with their number of nodes, too: {TREE}:16:6"
            )
        if mode == "ar":
            return cls("ar", SpeculationConfig())
        known, name = options_of(SpeculationConfig), mode
        remote = mode == "ssd" and "draft_url" in options
        chosen: dict[str, Any] = {"mode": mode, "draft": None if remote else draft}
        if mode == SUFFIX:
            chosen = {"mode": "sd", "draft": SUFFIX}
        elif mode in (TREE, SSD_TREE):
            nodes, _, number = number.partition(":")
            nodes = nodes or "auto"
            chosen |= {"mode": "sd" if mode == TREE else "ssd", "tree": known["tree"].parse(nodes)}
            name = f"{mode} {nodes}"
        chosen["k"] = known["k"].parse(number) if number else k
        if chosen["draft"] is None and not remote:
            raise ConfigError(f"method {text!r} needs a draft: name one with --draft")
        look_up, server = {"suffix", "suffix_cache_tokens"}, {"draft_url", "draft_token"}
        of_sd = {"k_max", "acceptance", "saguaro_c", "draft_quantization"} | look_up
        of_ssd = options.keys() - look_up
        kept = {
            **{SUFFIX: {"k_max", "suffix_cache_tokens"}, "sd": of_sd, TREE: of_sd, "ssd": of_ssd},
            SSD_TREE: of_ssd - server - {"fan_out", "fan_out_hit", "fan_out_miss"},
            "auto": (options.keys() if options.get("suffix") else of_ssd) - server,
        }[mode]
        chosen |= {each: options[each] for each in options if each in kept}
        speculation = SpeculationConfig.of(chosen)
        speculation = deepened(speculation, opened if speculation.draft_model is not None else None)
        return cls(f"{name} k={speculation.k}", speculation)


@dataclass
class OurContender:
    """A drafter of an engine. Several contenders can share an engine: each installs its drafter for its turns."""

    name: str
    llm: LLM
    drafter: Drafter
    threads: int  # of the target, at most; on a CPU
    draft_processes: int = 0  # cores of drafts in other processes
    server_cores: int = 0  # those among them that are a draft server's, which this process has not started
    note: str = ""
    rates: list[float] | None = None  # of acceptance by position, which is drawn; None: the models decide
    metrics: EngineMetrics = field(default_factory=EngineMetrics)  # of the last answers

    @property
    def on_cpu(self) -> bool:
        return self.llm.config.device == "cpu"

    @property
    def cores(self) -> int:
        """CPU cores that it keeps busy; on a GPU those of the engine's thread and of drafts in other processes."""
        return (self.threads if self.on_cpu else 1) + self.draft_processes

    def answer(self, prompts: Seq[Prompt], asked: RequestSettings) -> list[Answer]:
        driver = self.llm.driver
        driver.call(lambda engine: self.take_over(engine, asked.batch))
        params = SamplingParams(
            temperature=asked.temperature,
            seed=asked.seed,
            max_new_tokens=asked.max_new_tokens,
            ignore_eos=asked.ignore_eos,
        )
        began = time.perf_counter()
        requests = [(self.llm.encode(prompt), params) for prompt in prompts]
        if asked.max_rounds is None:
            outputs = [submission.result() for submission in driver.submit_many(requests)]
        else:
            few = _FewRounds(driver, asked.max_rounds)
            with driver.observing(few):
                outputs = [submission.result() for submission in driver.call(lambda _: few.submit(requests))]
        for output in outputs:
            check_served(output)
        self.metrics = driver.call(lambda engine: engine.metrics)
        return [answer_of(output, began) for output in outputs]

    def take_over(self, engine: Engine, batch: int) -> None:
        """Installs this contender's drafter and resets all counters."""
        engine.use(self.drafter, batch)
        if self.rates is not None:
            target = engine.round.target
            assert isinstance(target, Target)
            target.pin(self.rates)
        torch.set_num_threads(self.threads)  # of the engine's thread

    def close(self) -> None:
        self.llm.close()


class _FewRounds(RoundObserver):
    """Aborts requests after a number of rounds."""

    def __init__(self, driver: Driver, rounds: int) -> None:
        self._driver, self._left = driver, rounds
        self._submitted: list[Submission] = []

    def submit(self, requests: Seq[Asked]) -> list[Submission]:
        """On the engine's thread: no round passes before the requests are known."""
        self._submitted = self._driver.submit_many(requests)
        return self._submitted

    def decided(self, works: Seq[Work], outcomes: Seq[Outcome | None], seconds: float) -> None:
        self._left -= 1
        for submission in self._submitted if self._left == 0 else ():
            self._driver.abort(submission.request_id)


def answer_of(output: RequestOutput, began: float) -> Answer:
    """`began`: when it was submitted, if that is not known."""
    metrics = output.metrics
    deliveries = [(when, float(count)) for when, count in metrics.deliveries]
    began = began if metrics.first_scheduled is None else metrics.first_scheduled
    logprobs = None
    if output.logprobs is not None:
        logprobs = [(each.decoded.get(each.token_id, ""), each.logprob) for each in output.logprobs]
    return Answer(began, metrics.prompt_tokens, output.text, deliveries, list(output.token_ids), logprobs)


def our_contenders(
    model: str,
    methods: Seq[Method],
    *,
    batch: int,
    accept: tuple[float, ...] | None = None,
    hits: float | None = None,
    **options: Any,
) -> list[OurContender]:
    """Contenders of all methods, on one engine, but one for every method with a draft in a worker or a draft server.

    `accept`: acceptance that is drawn, as `rates_of` takes it. `hits`: share of drafts that were prepared, likewise.
    On a CPU they all have `torch.get_num_threads()` cores: a draft in a process of its own has one of them.
    """
    device = str(options.get("device", "auto"))
    apart = [method for method in methods if method.speculation.draft_url or _in_process(method, device)]
    if apart and hits is not None:
        raise ConfigError("hits: only of a draft in the target's process, --placement stream or inline")
    together = [method for method in methods if method not in apart]
    found: dict[str, OurContender] = {}
    if together:
        wanted = [method.speculation for method in together]
        llm = LLM(model, max_num_seqs=batch, speculation=_covering(wanted), **options)
        for method, speculation in zip(together, wanted, strict=True):
            found[method.name] = OurContender(method.name, llm, _drafter(llm, speculation), _threads(llm))
    for method in apart:
        url = method.speculation.draft_url
        speculation = method.speculation if url else replace(method.speculation, placement="process")
        llm = LLM(model, max_num_seqs=batch, speculation=speculation, **options)
        drafter = llm.engine.round.drafter
        if url and not _connected(drafter):
            llm.close()
            raise ServerError(f"draft_url={url!r}: no draft server is ready: start one with ssd draft-server DRAFT")
        cores = drafter.cores if speculation.mode == "ssd" else 0  # "auto" has all of them in rounds of SD
        of_server = cores if url else 0
        found[method.name] = OurContender(method.name, llm, drafter, _threads(llm, cores), cores, of_server)
    if accept is not None:
        for method in methods:
            found[method.name].rates = _rates(method, accept)
    if hits is not None:
        for each in found.values():
            each.drafter.pin_hits(hits)
    return [found[method.name] for method in methods]


def _connected(drafter: Drafter) -> bool:
    drafter = drafter.drafters["ssd"] if isinstance(drafter, DepthController) else drafter
    return isinstance(drafter, ProcessDrafter) and drafter.wait_ready(0.0)


def _rates(method: Method, accept: tuple[float, ...]) -> list[float]:
    lookahead = method.speculation.lookahead
    try:
        return rates_of(accept, lookahead) if lookahead else []
    except ValueError as error:
        raise ConfigError(f"accept={accept[0]:g}, {method.name}: {error}") from error


def _threads(llm: LLM, draft_processes: int = 0) -> int:
    """The most threads of a target: those of its engine, or of this thread less the cores of the draft."""
    chosen = llm.driver.call(lambda _: torch.get_num_threads())
    return max(1, min(chosen, torch.get_num_threads() - draft_processes)) if llm.config.device == "cpu" else chosen


def _in_process(method: Method, device: str) -> bool:
    wanted = method.speculation
    placement = "process" if wanted.draft_device else wanted.placement
    if wanted.mode not in ("ssd", "auto") or placement not in ("auto", "process"):
        return False
    if wanted.suffix or wanted.tree:
        return False
    if placement == "auto" and wanted.draft_model is not None and feature_draft_kind(wanted.draft_model) is not None:
        return False
    return placement == "process" or device == "cpu" or (device == "auto" and not torch.cuda.is_available())


def _covering(wanted: Seq[SpeculationConfig]) -> SpeculationConfig:
    """The options of an engine that can run all of these."""
    with_model = [s for s in wanted if s.mode != "ar" and s.draft != SUFFIX]
    if not with_model:
        deepest = max(s.lookahead for s in wanted)
        return SpeculationConfig(mode="sd", draft=SUFFIX, k=deepest) if deepest else SpeculationConfig()
    ahead = [s for s in with_model if s.mode in ("ssd", "auto") and not s.suffix]
    beside = [s for s in with_model if s.mode == "auto" and s.suffix]  # whose states have room for look-up
    deepest = max(s.lookahead if s.nodes else s.draft_tokens for s in wanted)
    nodes = max(s.nodes for s in wanted)
    heads = any(feature_draft_kind(str(s.draft)) is not None for s in ahead)
    others = beside + [s for s in ahead if s.mode == "auto" or heads]
    if nodes and others:
        raise ConfigError(
            f"methods: trees and {others[0].mode} with a head, or with the mode left to the engine, have no engine in "
            "common: measure them one after the other"
        )
    longest = max(s.lookahead for s in with_model)
    block = feature_draft_kind(str(with_model[0].draft)) is BlockCheckpoint
    if (not ahead and beside) or (block and not nodes and longest < deepest):
        chosen = replace(with_model[0], mode="auto", suffix=True, k=longest, k_max=None)
        if chosen.draft_tokens < deepest:
            raise ConfigError(
                f"methods: look-up of {deepest} tokens beside this draft, which has room for {chosen.draft_tokens}: "
                f"name {SUFFIX}:{chosen.draft_tokens}, or measure them one after the other"
            )
        return chosen
    if not ahead:
        return replace(with_model[0], k=deepest, k_max=None, tree=max(nodes, deepest) if nodes else None)
    widest = max(ahead, key=lambda s: max(s.budgets))
    widest = replace(widest, fan_out="adaptive", fan_out_hit=None, fan_out_miss=None, k_max=None, k=deepest, tree=None)
    return replace(widest, tree=max(nodes, deepest), budget=max(widest.budgets)) if nodes else widest


def _drafter(llm: LLM, speculation: SpeculationConfig) -> Drafter:
    """A drafter for an existing engine and its draft model."""
    built = llm.engine.round.drafter
    inner = built.inner if isinstance(built, DepthController) else [built]
    inner = [each.learned if isinstance(each, SuffixDrafter) else each for each in inner]
    models: list[DraftSource] = [each.model for each in inner if isinstance(each, (SSDDrafter, ModelDrafter))]
    model = models[0] if models else None
    head, prepares = isinstance(model, HeadModel), not isinstance(model, BlockModel)
    speculation = placed(speculation, resolve_device(llm.config.device), head=head, prepares=prepares)
    if speculation.draft == SUFFIX:
        model = None
    drafter = drafter_of(model, speculation, llm.engine.round.target.state)
    if speculation.mode == "auto" and isinstance(drafter, DepthController):  # as an engine of its own does
        llm.driver.call(lambda engine: engine.use(drafter, engine.scheduler.max_num_seqs))
        measure_modes(llm.driver, drafter)
    return drafter


def methods_of(names: str, draft: str | None, k: int | str | None, options: Mapping[str, Any]) -> list[Method]:
    """Parses a list such as `ar,sd:4,ssd:auto`."""
    if "tree" in options:
        raise ConfigError(f"tree={options['tree']}: a tree is a method of its own here: name {TREE}:{options['tree']}")
    if "draft_url" in options and not any(each.strip().partition(":")[0] == "ssd" for each in names.split(",")):
        raise ConfigError(f"draft_url={options['draft_url']!r}: a draft server drafts for the method ssd: name it, too")
    opened = open_feature_draft(draft) if draft not in (None, SUFFIX, MTP) else None
    found = [Method.parse(name.strip(), draft, k, options, opened) for name in names.split(",") if name.strip()]
    twice = [method.name for i, method in enumerate(found) if method in found[:i]]
    if not found or twice:
        raise ConfigError(f"methods {names!r}: {'name at least one' if not found else f'{twice[0]} is there twice'}")
    return found
