"""`ssd explain`: one text, round by round: what was drafted, what was prepared, what the target decided.

The command and what it prints; `trace` records, `paths` draws.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer
from rich.cells import set_cell_size
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ssd.cli import paths
from ssd.cli.console import bundled_draft, load, print_note
from ssd.cli.options import MODEL, Flags, Given, command
from ssd.cli.paths import visible
from ssd.config import EngineConfig, SpeculationConfig
from ssd.core import Origin, RequestMetrics, RequestOutput, SamplingParams
from ssd.errors import ConfigError
from ssd.text.byte_level import BYTES

if TYPE_CHECKING:
    from ssd.cli.trace import Branch, Step
    from ssd.llm import LLM
    from ssd.text.tokenizer import Tokenizer

Spelling = Callable[[int], str]  # the text of a token

HELP: Final = """\
Write one text with speculative speculative decoding, and [bold]show every round of it[/].

While the target verifies a draft, the draft model prepares the next one for every likely outcome: the number of \
accepted tokens, and the token that the target adds. If the outcome was prepared, the next draft is ready (a hit); if \
not, it has to be written (a miss). With --tree drafts are trees: accepted are the tokens of a path, and rejected all \
others. Target and draft take turns here, so that every branch can be shown: what you see is the order of events, not \
the speed.

[bold]Try[/]

  ssd explain

  ssd explain tiny-qwen3 "Who are you?" --k 3 --budget 6 --out paths.html

  ssd explain tiny-llama "def add(a, b):" -t 0.8 --seed 11 --fan-out 2

  ssd explain tiny-llama --tree 8
"""
LEGEND: Final = """\
Each round: the [green]accepted draft tokens[/], after ✗ [red strike]the rejected ones[/], after → [bold]the \
target's own token[/]. The draft was prepared in the round before (a hit), or made after a miss: drafted, while the \
target waited; or borrowed from a sibling branch at once. Below it the branches: the tokens \
prepared for after 0, 1, … accepted tokens, likeliest first, [bold green]\\[in brackets][/] the one that was \
used; +N: N more were prepared. · is a space, ↵ a new line, \\xe5 a byte of a character."""
INCOMPLETE: Final = "\ufffd"  # how bytes are decoded that are no whole character
BYTE: Final = re.compile("<0x([0-9A-F]{2})>")
SOURCES: Final = {
    Origin.HIT: "prepared",
    Origin.JIT: "drafted",
    Origin.SUFFIX: "looked up",
    Origin.SIBLING: "borrowed",
    Origin.DRAFT: "drafted",
    Origin.NONE: "",
}


@command
def explain(
    model: Annotated[str, MODEL] = "tiny-llama",
    prompt: Annotated[str, typer.Argument(help="The text to continue.")] = "There was once a poor woodcutter who",
    out: Annotated[
        Path | None, typer.Option(help="Draw the forking paths into this .svg or .html file.", show_default=False)
    ] = None,
    *,
    sampling: Annotated[
        Given,
        Flags(
            SamplingParams,
            only={"temperature", "seed", "max_new_tokens"},
            defaults={"seed": 0, "max_new_tokens": 40},
        ),
    ],
    speculation: Annotated[
        Given, Flags(SpeculationConfig, only={"draft", "k", "tree", "draft_quantization", "fan_out", "budget"})
    ],
    engine: Annotated[Given, Flags(EngineConfig, only={"device", "dtype", "quantization"})],
) -> None:
    from ssd.cli.trace import record

    if out is not None:
        paths.check(out)
    params = SamplingParams(**sampling)
    draft = speculation.get("draft") or bundled_draft(model)
    if draft is None:
        _check_name(model)
        raise ConfigError(f"{model} has no draft of its own: name a small model of its tokenizer with --draft")
    wanted = {**speculation, "draft": draft, "mode": "ssd", "placement": "inline"}
    with load(model, {**engine, "speculation": wanted}) as llm:
        console = Console(highlight=False)
        _print_heading(llm, params, console)
        output, steps = record(llm, prompt, params)
        spell = spelling(llm.engine.tokenizer)
        console.print(rounds(steps, spell, console.width))
        console.print(Text.assemble("\n", (prompt, "dim"), tinted(steps, llm.engine.tokenizer, output), "\n"))
        console.print(summary(output.metrics))
        if out is not None:
            title = f"“{set_cell_size(visible(prompt, ' '), 60).strip()}…”: {model} writes, {draft} drafts"
            paths.write(out, steps, spell, title, ". ".join(filter(None, [summary(output.metrics), llm.note])))
            console.print(Text(f"the forking paths are drawn in {out}", style="dim"), soft_wrap=True)


def _check_name(model: str) -> None:
    """ModelNotFound for a misspelt name, without a download."""
    from ssd.assembly.open import open_checkpoint
    from ssd.models.hub import is_hub_id

    if not is_hub_id(model):
        open_checkpoint(model)


def spelling(tokenizer: Tokenizer | None) -> Spelling:
    """A function that decodes single tokens, as in the middle of a text; their ids without a tokenizer."""
    from ssd.text.detokenizer import IncrementalDecoder

    def spell(token: int) -> str:
        if tokenizer is None:
            return f"{token} "
        decoder = IncrementalDecoder(tokenizer, [token], skip_special_tokens=False)
        text = decoder.push(token) + decoder.flush()
        return _escaped(tokenizer.backend.id_to_token(token) or "") or text if INCOMPLETE in text else text

    return spell


def _escaped(piece: str) -> str:
    """A token of a byte-level vocabulary (or such as <0xE5>), with \\xe5 for bytes that are no whole character."""
    byte = BYTE.fullmatch(piece)
    if byte is None and not all(c in BYTES for c in piece):
        return ""
    content = bytes([int(byte[1], 16)]) if byte else bytes(BYTES[c] for c in piece)
    return content.decode(errors="backslashreplace")


# --- what the reader sees ---------------------------------------------------------------------------------------------


def rounds(steps: list[Step], spell: Spelling, width: int) -> Table:
    """Two lines per round: the draft with its verdict, and the branches with hit or miss."""
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="dim", justify="right")
    grid.add_column(style="dim")
    grid.add_column(no_wrap=True)
    available = width - 22  # columns for the branches
    for number, (step, following) in enumerate(zip_longest(steps, steps[1:]), start=1):
        source = "prompt" if number == 1 else SOURCES[step.origin]
        grid.add_row(f"{number}", source, verdict(step, spell))
        if step.branches:
            grid.add_row("", "branches", branches(step, following, spell, available))
    return grid


def verdict(step: Step, spell: Spelling) -> Text:
    """The accepted and the rejected draft tokens, and the target's own token."""
    parts = [(visible(spell(token)), "green") for token in step.written[: step.accepted]]
    parts += [(visible(spell(token)), "dim") for token in step.draft[len(step.written) : step.accepted]]  # not written
    if step.accepted < len(step.draft):
        parts += [("✗", "red"), *((visible(spell(token)), "red strike") for token in step.draft[step.accepted :])]
    for token in step.own:
        parts += [("→", ""), (visible(spell(token)), "bold")]
    return Text(" ").join(Text(text, style=style) for text, style in parts)


def branches(step: Step, following: Step | None, spell: Spelling, width: int) -> Text:
    """The likeliest branches that fit the width, the one that was used, and hit or miss of the next draft."""
    hit = following is not None and following.hit
    shown = {branch for branch in step.branches if hit and step.came_true(branch)}
    for branch in step.branches:
        if _places(step, shown | {branch}, hit, spell).cell_len <= width:
            shown.add(branch)
    line = _places(step, shown, hit, spell)
    if following is not None and following.looked_up:
        line.append("  hit" if hit else "  miss", style="bold green" if hit else "bold yellow")
    return line


def _places(step: Step, shown: set[Branch], hit: bool, spell: Spelling) -> Text:
    """The branches' tokens, grouped by the number of accepted tokens before them."""
    places: dict[int, Text] = {}
    for branch in filter(shown.__contains__, sorted(step.branches, key=lambda branch: branch.accepted)):
        place = places.setdefault(branch.accepted, Text.assemble((f"{branch.accepted}:", "cyan")))
        name = visible(spell(branch.token))
        place.append(*((f" [{name}]", "bold green") if hit and step.came_true(branch) else (f" {name}",)))
    left_out = len(step.branches) - len(shown)
    return Text("  ").join([*places.values(), *([Text(f"+{left_out}", "dim")] if left_out else [])])


def tinted(steps: list[Step], tokenizer: Tokenizer | None, output: RequestOutput) -> Text:
    """The text, with accepted draft tokens in green."""
    from ssd.text.detokenizer import IncrementalDecoder

    text = Text()
    if tokenizer is None:
        return text
    decoder = IncrementalDecoder(tokenizer, output.prompt_token_ids)
    for step in steps:
        for place, token in enumerate(step.written):
            text.append(decoder.push(token), style="green" if place < step.accepted else None)
    text.append(decoder.flush())
    return text[: len(output.text)]  # a stop string ends it


def summary(metrics: RequestMetrics) -> str:
    count, rounds = metrics.output_tokens, metrics.rounds
    acceptance = _share(metrics.accepted, metrics.drafted, "drafted tokens")
    said = f"{count} tokens in {rounds} rounds, {count / rounds:.2f} a round; acceptance {acceptance}"
    return f"{said}; hit rate {_share(metrics.hits, metrics.look_ups, 'drafts')}"


def _share(part: int, whole: int, things: str) -> str:
    return f"{part / max(1, whole):.0%} ({part} of {whole} {things})"


def _print_heading(llm: LLM, params: SamplingParams, console: Console) -> None:
    from ssd.assembly.device import resolve_device
    from ssd.assembly.draft_runners import make_fan_out

    wanted = llm.config.speculation
    own, form = (f" (in {f})" if f else "" for f in (llm.config.quantization, wanted.draft_quantization))
    k = f"up to {wanted.lookahead} tokens" if wanted.k == "auto" else f"{wanted.k} tokens"
    if wanted.nodes:
        k = f"trees of {wanted.nodes} tokens, {wanted.k} on a path,"
    outcomes = make_fan_out(wanted).width(max(wanted.budgets))
    settings = f"{resolve_device(llm.config.device)}, temperature {params.temperature:g}, seed {params.seed}"
    console.print(
        Text.assemble(
            (llm.config.model, "bold"),
            f"{own} writes; {wanted.draft}{form} drafts {k} a round and prepares for up to {outcomes} outcomes "
            f"({settings})",
        )
    )
    print_note(llm.note, console)
    console.print(f"\n{LEGEND}\n")
