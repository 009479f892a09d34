"""The speculation options of every command: as flags, as one JSON object, or as a file that holds one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from ssd.core import RequestMetrics
from ssd.errors import ConfigError

Draft = Annotated[
    str | None,
    typer.Option(help="Speculate: a small MODEL of the same tokenizer that drafts, or 'ngram'. Same text, faster."),
]
K = Annotated[int | None, typer.Option("--k", help="Drafted tokens a round (with --draft).", show_default="4")]
Acceptance = Annotated[
    str | None, typer.Option(help="coupled (the text of plain decoding) or rejection.", show_default="coupled")
]
Speculation = Annotated[
    str | None,
    typer.Option(
        "--speculation", help="""All of it as JSON: '{"mode": "sd", "draft": "tiny-llama-draft", "k": 4}', or @FILE."""
    ),
]


def options(text: str | None, draft: str | None, k: int | None, acceptance: str | None) -> dict[str, Any] | None:
    """What `LLM(speculation=…)` takes; None for plain decoding."""
    given = {"draft": draft, "k": k, "acceptance": acceptance}
    flags = {name: value for name, value in given.items() if value is not None}
    if text is None:
        return {"mode": "sd", **flags} if flags else None
    if flags:
        raise ConfigError(f"--speculation says it all: leave out --{', --'.join(flags)}, or put it into the JSON")
    return _parsed(_contents(text[1:]) if text.startswith("@") else text)


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
    """How well the drafts did, in words; nothing if there were none."""
    if not metrics.drafted:
        return ""
    share = metrics.accepted / metrics.drafted
    per_round = metrics.output_tokens / max(1, metrics.rounds)
    kept = f"{metrics.accepted} of {metrics.drafted} drafted tokens accepted ({share:.0%})"
    return f"{kept}, {per_round:.2f} tokens a round"
