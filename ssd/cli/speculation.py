"""The speculation options of the commands: as flags, as a JSON object, or as a JSON file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any, Final, Literal

import typer

from ssd.core import RequestMetrics
from ssd.errors import ConfigError

PANEL: Final = "Speculation: the same text, faster"

Mode = Annotated[
    Literal["ar", "sd", "ssd"] | None,
    typer.Option(
        help="sd: the draft proposes while the target waits. ssd: while the target verifies, the draft prepares for "
        "every likely outcome. ar: neither.",
        show_default="sd with a draft, else ar",
        rich_help_panel=PANEL,
    ),
]
Draft = Annotated[
    str | None,
    typer.Option(
        help="A small MODEL with the same tokenizer, an EAGLE-3 head of the model, or (sd) 'ngram': n-gram look-up.",
        rich_help_panel=PANEL,
    ),
]
K = Annotated[
    str | None,
    typer.Option("--k", metavar="N|auto", help="Draft tokens per round.", show_default="4", rich_help_panel=PANEL),
]
DraftQuantization = Annotated[
    Literal["fp8", "int8", "int4"] | None,
    typer.Option(
        help="Keep the draft's weights in 8 or 4 bits: drafts come faster, and a few more of them are wrong.",
        show_default="as the model's",
        rich_help_panel=PANEL,
    ),
]
Acceptance = Annotated[
    str | None,
    typer.Option(
        metavar="coupled|rejection",
        help="How drafted tokens are accepted. coupled: the same text as plain decoding; rejection: another sample of "
        "the same distribution.",
        show_default="coupled",
        rich_help_panel=PANEL,
    ),
]
FanOut = Annotated[
    str | None,
    typer.Option(
        metavar="N|adaptive|geometric",
        help="ssd: which outcomes are prepared. N: branches per position of the draft.",
        show_default="adaptive",
        rich_help_panel=PANEL,
    ),
]
Budget = Annotated[
    str | None,
    typer.Option(metavar="N|auto", help="ssd: branches per sequence.", show_default="16", rich_help_panel=PANEL),
]
Backup = Annotated[
    Literal["jit", "fast", "auto"] | None,
    typer.Option(
        help="ssd: the draft after a miss. jit: the draft model writes one while the target waits; fast: that of a "
        "sibling branch, at once; auto: whichever is faster.",
        show_default="auto",
        rich_help_panel=PANEL,
    ),
]
Placement = Annotated[
    Literal["auto", "inline", "stream", "process"] | None,
    typer.Option(
        help="ssd: where the draft model runs. process: on a core or GPU of its own; stream: concurrently with the "
        "target on its GPU; inline: in turns with it, which gains nothing.",
        show_default="auto",
        rich_help_panel=PANEL,
    ),
]
DraftReplicas = Annotated[
    int | None,
    typer.Option(
        metavar="N",
        help="ssd, --placement process: draft models, each on a core or GPU of its own; each prepares for other "
        "outcomes, --budget of them.",
        show_default="1",
        rich_help_panel=PANEL,
    ),
]
DraftTensorParallelSize = Annotated[
    int | None,
    typer.Option(
        metavar="N",
        help="ssd, --placement process: GPUs (or processes of a CPU) that each draft model is split over.",
        show_default="1",
        rich_help_panel=PANEL,
    ),
]
Speculation = Annotated[
    str | None,
    typer.Option(
        "--speculation",
        help="""All of it as JSON, or @FILE: '{"mode": "ssd", "draft": "tiny-llama-draft", "k": 4}'.""",
        rich_help_panel=PANEL,
    ),
]


def options(text: str | None = None, /, **flags: str | int | None) -> dict[str, Any] | None:
    """The value of `LLM(speculation=…)`, from the JSON or from the flags; None for plain decoding."""
    said = given(**flags)
    if text is None:
        return {"mode": "sd", **said} if said else None
    if said:
        names = ", ".join(f"--{name.replace('_', '-')}" for name in said)
        raise ConfigError(f"--speculation says it all: leave out {names}, or put it into the JSON")
    return _parsed(_contents(text[1:]) if text.startswith("@") else text)


def given(**flags: str | int | None) -> dict[str, Any]:
    """The flags that were given, with numbers as int."""
    return {name: _number(name, value) for name, value in flags.items() if value is not None}


def bundled_draft(model: str) -> str | None:
    """The draft of a bundled model. Imports torch."""
    from ssd.models.open import bundled_draft as draft_of

    return draft_of(model)


def _number(name: str, value: str | int) -> str | int:
    """The int of an option that takes a number or a word."""
    return int(value) if name in ("k", "fan_out", "budget") and str(value).isdecimal() else value


def _contents(file: str) -> str:
    try:
        return Path(file).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--speculation @{file}: cannot be read ({error}): name a JSON file") from error


def _parsed(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"--speculation {text!r}: is not JSON ({error})") from error
    if not isinstance(value, dict):
        raise ConfigError(f'--speculation {text!r}: must be an object such as {{"mode": "sd", "draft": "ngram"}}')
    return value


def drafting(metrics: RequestMetrics) -> str:
    """A summary of acceptance and hits; "" without drafts."""
    if not metrics.drafted:
        return ""
    share = metrics.accepted / metrics.drafted
    per_round = metrics.output_tokens / max(1, metrics.rounds)
    kept = f"{metrics.accepted} of {metrics.drafted} drafted tokens accepted ({share:.0%})"
    hits = f", {metrics.hits} of {metrics.look_ups} drafts prepared in time" if metrics.look_ups else ""
    return f"{kept}, {per_round:.2f} tokens a round{hits}"
