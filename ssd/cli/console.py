"""Shared by the commands: error messages, loading a model, summaries of metrics."""

from __future__ import annotations

import json
import logging
import secrets
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import typer
from rich import progress as bars
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from ssd.bench.answers import Progress
from ssd.cli.imports import import_llm
from ssd.config import EngineConfig
from ssd.core import RequestMetrics, SamplingParams
from ssd.errors import ConfigError, SSDError
from ssd.parallel.launch import Launch

if TYPE_CHECKING:
    from ssd.llm import LLM

errors = Console(stderr=True)
JSON_FILE: Final = typer.Option("--json", help="Write all figures here; -: to stdout.")
# What `ssd demo` and `ssd bench` take if no model is named: the bundled pair, in a size in which drafts pay on a CPU.
DEMO_MODEL: Final = "graft:tiny-llama@cpu-75m"
_DEMO_DRAFT: Final = "tiny-llama-draft"
_STDOUT: Final = Path("-")


@contextmanager
def explained(code: int = 1) -> Iterator[None]:
    """Prints an SSDError as one line and exits with `code`; with 130 on Ctrl-C."""
    try:
        yield
    except SSDError as error:
        print_error(str(error))
        raise typer.Exit(code) from None
    except KeyboardInterrupt:
        raise typer.Exit(130) from None


def print_error(message: str) -> None:
    errors.print(f"[bold red]error:[/] {escape(message)}", highlight=False, soft_wrap=True)


def follow(engine: Mapping[str, Any]) -> None:
    """In processes of torchrun other than rank 0: computes for rank 0, and exits when it does."""
    if Launch.found() is not None:  # else not worth the import of torch
        from ssd.assembly.torchrun import join

        join(engine.get("tensor_parallel_size", EngineConfig.tensor_parallel_size))


def load(model: str, engine: Mapping[str, Any]) -> LLM:
    """Loads a model, with a spinner. `engine`: options of EngineConfig."""
    follow(engine)
    with stages(f"loading {model}"):
        return import_llm()(model, **engine)


class _Stages(logging.Handler):
    """Shows what takes time until a model is loaded. A warning (it takes long) is always a line, and stays."""

    def __init__(self, show: Callable[[str], object]) -> None:
        super().__init__()
        self._show = show

    def emit(self, record: logging.LogRecord) -> None:
        show = print_line if record.levelno >= logging.WARNING else self._show
        show(record.getMessage())


def print_line(text: str) -> None:
    errors.print(escape(text), highlight=False, soft_wrap=True)


@contextmanager
def stages(title: str, *, lines: bool = False) -> Iterator[None]:
    """Shows what is being done: beside a spinner on a terminal; elsewhere, with `lines`, in a line each."""

    def show(text: str) -> None:
        if errors.is_terminal:
            status.update(escape(f"{title}: {text}"))
        elif lines:
            print_line(text)

    with errors.status(escape(title)) as status:
        if lines and not errors.is_terminal:
            print_line(title)
        with _following(show):
            yield


@contextmanager
def _following(show: Callable[[str], object]) -> Iterator[None]:
    """Passes on what the loggers say of loading."""
    logger = logging.getLogger("ssd.loading")
    if logger.isEnabledFor(logging.INFO):  # --verbose: the log has it
        yield
        return
    handler = _Stages(show)
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    logger.propagate = False
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(logging.NOTSET)
        logger.propagate = True


def seeded(params: SamplingParams) -> SamplingParams:
    """The parameters, with a seed drawn at random if they have none: known, it can be reported and used again."""
    return params if params.seed is not None else replace(params, seed=secrets.randbits(32))


def bundled_draft(model: str) -> str | None:
    """The draft of a bundled model, or of the demo's. Imports torch."""
    from ssd.assembly.open import bundled_draft as draft_of

    return _DEMO_DRAFT if model == DEMO_MODEL else draft_of(model)


def speed_summary(metrics: RequestMetrics) -> str:
    first, speed = metrics.time_to_first_token, metrics.decode_tokens_per_second
    return (
        f"first after {'-' if first is None else f'{first:.3f} s'}, "
        f"then {'-' if speed is None else f'{speed:.1f} tokens/s'}"
    )


def total(metrics: Iterable[RequestMetrics]) -> RequestMetrics:
    """The sums of all counts; times are left out."""
    counts = ("prompt_tokens", "cached_tokens", "output_tokens", "rounds", "drafted", "accepted", "look_ups", "hits")
    found = list(metrics)
    return RequestMetrics(**{name: sum(getattr(each, name) for each in found) for name in counts})


def draft_summary(metrics: RequestMetrics) -> str:
    """Acceptance and hits; "" without drafts."""
    if not metrics.drafted:
        return ""
    share = metrics.accepted / metrics.drafted
    per_round = metrics.output_tokens / max(1, metrics.rounds)
    kept = f"{metrics.accepted} of {metrics.drafted} drafted tokens accepted ({share:.0%})"
    hits = f", {metrics.hits} of {metrics.look_ups} drafts prepared in time" if metrics.look_ups else ""
    return f"{kept}, {per_round:.2f} tokens a round{hits}"


def print_note(note: str, console: Console = errors) -> None:
    """Prints a model's caveat, if it has one."""
    if note:
        console.print(f"[dim]{escape(note)}[/]", highlight=False, soft_wrap=True)


# --- reports of benchmarks --------------------------------------------------------------------------------------------


def report_console(json_file: Path | None) -> Console:
    """Where a report is printed: to standard error if its JSON goes to standard output. Checks the file's folder."""
    if json_file is not None and not json_file.parent.is_dir():
        raise ConfigError(f"json {json_file}: there is no folder {json_file.parent}")
    stream = sys.stderr if json_file == _STDOUT else sys.stdout
    return Console(file=stream, width=None if stream.isatty() else 160)


def write_json(report: Mapping[str, Any], json_file: Path | None) -> None:
    text = json.dumps(report, indent=1) + "\n"
    if json_file == _STDOUT:
        typer.echo(text, nl=False)
    elif json_file is not None:
        json_file.write_text(text, encoding="utf-8")


@contextmanager
def measuring(title: str, out: Console) -> Iterator[Progress]:
    """Displays measurements whose report goes to `out`: bars on a terminal, else a line as soon as one is made.

    `title`: what is done before the first one.
    """
    if not out.is_terminal:
        print_line(title)
        with _following(print_line):
            yield _Lines(out)
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with bars.Progress(*columns, TextColumn("left"), TimeRemainingColumn(), console=errors, transient=True) as shown:
        before = shown.add_task(escape(title), total=None)
        with _following(lambda text: shown.update(before, description=escape(f"{title}: {text}"))):
            yield _Bars(shown, before)


class _Lines(Progress):
    def __init__(self, out: Console) -> None:
        self._out = out

    def tell(self, line: str) -> None:
        self._out.print(escape(line), highlight=False, soft_wrap=True)


class _Bars(Progress):
    def __init__(self, shown: bars.Progress, before: bars.TaskID) -> None:
        self._shown, self._before = shown, before

    def begin(self, name: str, count: int) -> Callable[..., object]:
        self._shown.update(self._before, visible=False)
        task = self._shown.add_task(escape(name), total=count)
        return lambda name=name: self._shown.update(task, advance=1, description=escape(name))
