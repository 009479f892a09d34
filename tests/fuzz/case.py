"""A case: an engine's configuration, its requests and a schedule of faults. Plain data that JSON can hold.

Knows nothing of how a case is run.
"""

from __future__ import annotations

import functools
import json
import random
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import tokenizers
from conftest import KINDS, WINDOWED, WITH_EXPERTS, WITH_LATENTS
from random_requests import MAX_LEN, Asked, random_requests

import ssd
from ssd import SamplingParams
from ssd.config import BUDGETS

BUNDLE = Path(ssd.__file__).parent / "bundle"
BUNDLED = {"tiny-llama": "tiny-llama-draft", "tiny-qwen3": "tiny-qwen3-draft"}
TWO_GROUPS = [*WINDOWED, "gpt-oss"]  # of layers, perhaps: with blocks of their own
DRAFTS = ("noisy", "self", "stranger")  # of the random models
_OF_SD = "mode", "draft", "k", "acceptance"  # options of SD, among those that are drawn
MOST_FAILURES = 2  # rounds that fail in one case: an engine gives up after three in a row
EXTREMES: list[dict[str, Any]] = [  # parameters that `random_requests` leaves out
    {"ignore_eos": True},
    {"temperature": 0.01},
    {"temperature": 100.0},
    {"temperature": 1.0, "top_k": 1},
    {"temperature": 1.0, "top_p": 1e-9},
    {"temperature": 1.0, "min_p": 1.0},
    {"temperature": 1.0, "seed": -1},
    {"temperature": 1.0, "seed": 2**64 + 5},
    {"presence_penalty": -2.0},
    {"frequency_penalty": -1.0},
    {"repetition_penalty": 0.5},
    {"logit_bias": {5: 1000.0}},
    {"logit_bias": {t: float("-inf") for t in range(0, 300, 2)}},
    {"logprobs": 100},
    {"stop": ["a", "ab", "\n"]},
    {"temperature": 1.0, "logit_bias": {64: 100.0, 65: 100.0}, "stop": ["aab", "bbba"]},  # a text of a and b
    {"temperature": 1.0, "logit_bias": {64: 100.0, 102: 100.0, 127: 100.0}},  # of a and the two bytes of é
    {"temperature": 1.0, "logit_bias": {64: 100.0, 102: 100.0, 127: 100.0}, "stop": ["éa"]},
    {"n": 6},
    {"prompt_logprobs": 2},
    {"prompt_logprobs": 0, "pooling": "mean", "n": 3},
    {"pooling": "last"},
]


STRUCTURED: list[dict[str, Any]] = [
    {"regex": "[ab]{3,30}c"},
    {"regex": r"\d{1,3}(, \d{1,3})*"},
    {"choice": ["yes", "no", "no, never", "né"]},
    {"json_object": True},
    {"json_schema": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"enum": ["x", "yy"]}}}},
    {"json_schema": {"type": "array", "items": {"type": "boolean"}, "maxItems": 5}},
    {"grammar": 'start: "(" start ")" | "x"+'},
]

DEAD_ENDS = [  # where "!" is forbidden, some texts come to their end and others have no next token
    r"(the( old){3}!|(a|one|my)( man){2,30}\.)",
    r"(la ){9}!|(lo ){5}\.|(li ){3,7}!",
    r"[A-M][a-z ,']{1,40}!|[N-Z][a-z ,']{1,20}\.",
]


@dataclass(frozen=True)
class Call(Asked):
    """A request; with `drop` its stream is dropped where it would be aborted."""

    drop: bool = False


@dataclass(frozen=True)
class Event:
    """What happens after a round. `choice` selects a variant, or is a seed."""

    round: int
    kind: str  # "interrupt", or a method of `faults.Faults`
    choice: int = 0


@dataclass(frozen=True)
class Case:
    """One life of an engine. The fields' defaults are the simplest ones."""

    calls: list[Call]
    events: list[Event] = field(default_factory=list)
    model: str = "llama-tied"
    dtype: str = "float32"
    options: dict[str, Any] = field(default_factory=dict)  # of the engine
    speculation: dict[str, Any] = field(default_factory=dict)
    run_ahead: bool = False

    @property
    def mode(self) -> str:
        """For people: AR, SD or SSD, and with what."""
        speculation = self.speculation
        if not speculation:
            return "ar"
        detail = "suffix" if speculation["draft"] == "suffix" else speculation.get("placement", "draft")
        more = (f" + {name}" for name in ("suffix", "tree") if name in speculation)
        return f"{speculation['mode']} {detail}{''.join(more)}"

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=1)

    @classmethod
    def from_json(cls, text: str) -> Case:
        fields = json.loads(text)
        calls = [Call(**{**call, "params": _params(call["params"])}) for call in fields.pop("calls")]
        return cls(calls, [Event(**event) for event in fields.pop("events")], **fields)


def _params(fields: dict[str, Any]) -> SamplingParams:
    """JSON's keys are strings."""
    return SamplingParams(**{**fields, "logit_bias": {int(t): bias for t, bias in fields["logit_bias"].items()}})


def random_case(seed: int, *, processes: bool = True) -> Case:
    """`processes`: whether a draft may be in a process of its own, which takes seconds to start."""
    dice = random.Random(seed)
    plain = [kind for kind in KINDS if kind not in (*WINDOWED, *WITH_EXPERTS, *WITH_LATENTS)]
    model = _of_another_kind(dice.choice([*plain, *plain, *BUNDLED]), seed)
    speculation = _with_replicas(_with_head(_speculation(dice, model, processes), model, seed), seed)
    speculation = _with_tree(_with_suffix(_with_auto(speculation, seed, processes), seed), model, seed)
    speculation = _with_prepared_tree(speculation, seed)
    calls = [_call(dice, asked) for asked in random_requests(dice.randint(1, 10), dice.randrange(1 << 30))]
    calls = [_with_dead_end(_with_order_and_form(call, model), model) for call in calls]
    if speculation.get("acceptance") == "rejection":  # at T > 0 the text is another sample
        calls = [replace(call, params=replace(call.params, temperature=0.0)) for call in calls]
    return Case(
        calls=calls,
        events=_events(dice, speculation),
        model=model,
        dtype=dice.choice(["float32", "float32", "bfloat16"]),
        options=_options(dice, model) | _rounding(seed) | _kv_cache(seed, model),
        speculation=speculation,
        run_ahead=dice.random() < 0.5,
    )


def _of_another_kind(model: str, seed: int) -> str:
    """Perhaps another model, with sliding windows, experts or latent attention. Other seeds give the same case as
    before these were known."""
    for kind, models in (("windows", WINDOWED), ("experts", WITH_EXPERTS), ("latents", WITH_LATENTS)):
        own = random.Random(f"{kind} {seed}")
        if model not in BUNDLED and own.random() < 0.3:
            return own.choice(models)
    return model


def _rounding(seed: int) -> dict[str, Any]:
    """Perhaps rounded weights. A seed gives the same case, those aside, as before they were known."""
    own = random.Random(f"quantization {seed}")
    return {"quantization": own.choice(["fp8", "int8", "int4"])} if own.random() < 0.3 else {}


def _kv_cache(seed: int, model: str) -> dict[str, Any]:
    """Perhaps a KV cache in fp8. A seed gives the same case as before it was known, but for that."""
    narrow = random.Random(f"kv cache {seed}").random() < 0.25 and model not in WITH_LATENTS
    return {"kv_cache_dtype": "fp8"} if narrow else {}


def _options(dice: random.Random, model: str) -> dict[str, Any]:
    block_size = dice.choice([1, 2, 4, 5, 16])
    max_num_seqs = dice.choice([1, 2, 4, 4, 8, 8])
    fewest = -(-MAX_LEN // block_size)
    return {
        "block_size": block_size,
        "num_kv_blocks": (fewest + dice.choice([0, 0, 1, fewest // 2, 2 * fewest])) * (1 + (model in TWO_GROUPS)),
        "max_num_seqs": max_num_seqs,
        "max_num_batched_tokens": max_num_seqs + dice.choice([0, 3, 20, 200]),
        "prefix_caching": dice.random() < 0.7,
    }


def _speculation(dice: random.Random, model: str, processes: bool) -> dict[str, Any]:
    mode = dice.choice(["ar", "sd", "sd", "ssd", "ssd", "ssd"])
    if mode == "ar":
        return {}
    draft = BUNDLED[model] if model in BUNDLED else dice.choice(DRAFTS)
    k: int | str = dice.choice([1, 2, 3, 4, 7, "auto"])
    rule = dice.choice([{}, {}, {}, {}, {"acceptance": "rejection"}])
    if mode == "sd":
        return {"mode": "sd", "draft": dice.choice([draft, draft, "suffix"]), "k": k, **rule}
    placement = "process" if processes and dice.random() < 0.05 else "inline"
    fan_out: dict[str, Any] = {"fan_out": dice.choice(["adaptive", "geometric", 1, 3])}
    if k != "auto" and dice.random() < 0.3:
        lists = ([dice.randint(0, 3) for _ in range(k)] + [1] for _ in range(2))
        fan_out = dict(zip(("fan_out_hit", "fan_out_miss"), lists, strict=True))
    budget = dice.choice([1, 2, 6, BUDGETS[-1], *(["auto"] if placement == "inline" else [])])
    backup = dice.choice(["jit", "fast", "auto"])
    return (
        {"mode": "ssd", "draft": draft, "k": k, "placement": placement}
        | fan_out
        | {
            "budget": budget,
            "backup": backup,
            **rule,
        }
    )


def _with_head(speculation: dict[str, Any], model: str, seed: int) -> dict[str, Any]:
    """Perhaps with a head or a block draft in place of the draft model. Other seeds give the same case as before these
    were known."""
    if speculation.get("draft", "suffix") == "suffix" or model == "mistral-windows":  # which keeps no KV for a head
        return speculation
    if random.Random(f"head {seed}").random() < 0.7:
        return speculation
    plain = speculation["mode"] == "sd" and "acceptance" not in speculation and model not in BUNDLED
    if plain and random.Random(f"block {seed}").random() < 0.5:
        return speculation | {"draft": "block"}
    head = f"{model}-eagle" if model in BUNDLED else "head"
    if model not in BUNDLED and random.Random(f"mtp {seed}").random() < 0.5:
        head = "mtp-head"
    return speculation | {"draft": head} | ({"placement": "inline"} if "placement" in speculation else {})


def _with_replicas(speculation: dict[str, Any], seed: int) -> dict[str, Any]:
    """Perhaps with several draft models. A seed gives the same case as before they were known."""
    if speculation.get("placement") != "process" or "acceptance" in speculation:
        return speculation
    return speculation | {"draft_replicas": random.Random(f"replicas {seed}").choice([1, 2, 3])}


def _with_auto(speculation: dict[str, Any], seed: int, processes: bool) -> dict[str, Any]:
    """Perhaps with the mode left to the engine. A seed gives the same case as before that was known."""
    if not speculation or random.Random(f"auto {seed}").random() < 0.7:
        return speculation
    inline = {"placement": "inline"} if not processes and speculation["draft"] in DRAFTS else {}
    return inline | speculation | {"mode": "auto"}


def _with_suffix(speculation: dict[str, Any], seed: int) -> dict[str, Any]:
    """Perhaps with suffix look-up beside the draft, and with earlier answers. A seed gives the same case, those aside,
    as before they were known."""
    own = random.Random(f"suffix {seed}")
    if speculation.get("mode") == "auto" and speculation["draft"] != "suffix" and own.random() < 0.5:
        return {name: speculation[name] for name in _OF_SD if name in speculation} | {"suffix": True}
    beside = speculation.get("mode") == "sd" and speculation["draft"] != "suffix" and own.random() < 0.5
    if not beside and speculation.get("draft") != "suffix":
        return speculation
    cached = own.choice([0, 0, 20, 1000])
    return speculation | ({"suffix": True} if beside else {}) | ({"suffix_cache_tokens": cached} if cached else {})


def _with_tree(speculation: dict[str, Any], model: str, seed: int) -> dict[str, Any]:
    """Perhaps with trees, and a draft that writes them. Other seeds give the same case as before they were known."""
    own = random.Random(f"tree {seed}")
    chains = speculation.keys() & {"acceptance", "suffix"} or speculation.get("k") == "auto"
    if speculation.get("mode") != "sd" or speculation["draft"] == "suffix" or chains or model == "mistral-windows":
        return speculation
    if own.random() < 0.5:
        return speculation
    draft = f"{model}-eagle" if model in BUNDLED else own.choice(["head", "mtp-head", "block"])
    nodes = max(2, speculation["k"] * own.choice([1, 2, 3]) + own.choice([0, 1]))
    draft = speculation["draft"] if own.random() < 0.3 else draft
    return speculation | {"draft": draft, "tree": nodes if own.random() < 0.7 else "auto"}


def _with_prepared_tree(speculation: dict[str, Any], seed: int) -> dict[str, Any]:
    """Perhaps with trees that are prepared. Other seeds give the same case as before these were known."""
    own = random.Random(f"prepared tree {seed}")
    model = speculation.get("draft") in (*DRAFTS, *BUNDLED.values()) and speculation.get("placement") == "inline"
    chains = "acceptance" in speculation or "auto" in (speculation.get("k"), speculation.get("budget"))
    if speculation.get("mode") != "ssd" or not model or chains or own.random() < 0.5:
        return speculation
    kept = {name: value for name, value in speculation.items() if not name.startswith("fan_out")}
    return kept | {"tree": max(2, speculation["k"] * own.choice([1, 2, 3]) + own.choice([0, 1]))}


def _call(dice: random.Random, asked: Asked) -> Call:
    extreme = dice.choice(EXTREMES) if dice.random() < 0.3 else {}
    fields = vars(asked) | {"params": replace(asked.params, **extreme)}
    return Call(**fields, drop=asked.abort is not None and dice.random() < 0.5)


def _with_order_and_form(call: Call, model: str) -> Call:
    """With a priority and, where the model has a token that ends a text, perhaps a structured output.

    Drawn by the prompt: a seed gives the same case as before these were known.
    """
    dice = random.Random(str(call.prompt))
    params = replace(call.params, priority=dice.choice([0, 0, 0, -1, 2]))
    if model in BUNDLED and dice.random() < 0.5:
        free = {"ignore_eos": False, "min_tokens": 0, "logit_bias": {}}
        params = replace(params, **free, structured=dice.choice(STRUCTURED))
    return replace(call, params=params)


def _with_dead_end(call: Call, model: str) -> Call:
    """With a structured output perhaps one of DEAD_ENDS, where some samples, or all, come to a point without a token.

    Drawn by the prompt: a seed gives the same case as before these were known.
    """
    dice, params = random.Random(f"dead end {call.prompt}"), call.params
    if params.structured is None or dice.random() > 0.5:
        return call
    changes: dict[str, Any] = {
        "n": dice.choice([1, 2, 4]),
        "temperature": dice.choice([0.0, 0.7, 1.5]),
        "structured": {"regex": dice.choice(DEAD_ENDS)},
        "max_new_tokens": dice.randint(4, 40),
        "logit_bias": {token: float("-inf") for token in _tokens_with(model, "!")},
    }
    return replace(call, params=replace(params, **changes))


@functools.cache
def _tokens_with(model: str, character: str) -> tuple[int, ...]:
    """The tokens of a bundled model whose text has an ASCII character."""
    vocabulary = tokenizers.Tokenizer.from_file(str(BUNDLE / model / "tokenizer.json")).get_vocab()
    return tuple(sorted(token for text, token in vocabulary.items() if character in text))


def _events(dice: random.Random, speculation: dict[str, Any]) -> list[Event]:
    kinds = ["preempt", "forget_prefixes", "interrupt"]
    if speculation:
        kinds += ["drafter_raises", "drafter_lies"]
    if speculation.get("placement") == "process":
        kinds += ["drafter_killed"] * 4
    if speculation.get("mode") == "auto":
        kinds += ["arm_changes"] * 6
    chosen = dice.choices(kinds, k=dice.choice([0, 1, 3, 6]))
    chosen += dice.choices(["launch_fails", "collect_fails"], k=dice.choice([0, 0, 0, 0, 1, MOST_FAILURES]))
    return sorted((Event(dice.randint(0, 40), kind, dice.randrange(1000)) for kind in chosen), key=lambda e: e.round)
