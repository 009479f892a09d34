"""Flags of the commands, derived from the fields of configs: names, types, choices, defaults and help texts.

    @command
    def serve(model: str, *, engine: Annotated[Given, Flags(EngineConfig)]) -> None: ...

In place of `engine` the command has a flag for every field; the function receives the options that were given.
"""

from __future__ import annotations

import functools
import inspect
import json
from collections.abc import Callable, Iterator, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import MISSING, dataclass, field
from pathlib import Path
from typing import Annotated, Any, Final, Literal

import typer

from ssd.cli.console import explained
from ssd.config import EngineConfig, SpeculationConfig
from ssd.core import SamplingParams
from ssd.draft_server.options import DraftServerOptions
from ssd.errors import ConfigError
from ssd.options import Option, options_of
from ssd.server.models.options import CatalogOptions
from ssd.server.options import ServerOptions
from ssd.simulation.config import SimulationConfig

Given = dict[str, Any]  # options by the names of their fields, without those that were not given

PANELS: Final[Mapping[type, str]] = {
    SamplingParams: "Sampling",
    SpeculationConfig: "Speculation: the same text, faster",
    EngineConfig: "Engine",
    ServerOptions: "Server",
    CatalogOptions: "Several models",
    SimulationConfig: "Models, hardware, load",
    DraftServerOptions: "Draft server",
}
DEFAULTS: Final = {
    "mode": "sd with a draft, else ar",
    "served_model_name": "MODEL",
    "seed": "drawn at random",
    "folder": "$SSD_DATASET_DIR",
}
MODEL: Final = typer.Argument(help="Any MODEL, as `ssd --help` describes them.")


@dataclass(frozen=True)
class Flags:
    """The flags of a config. A field that is a config itself has its own flags, and one for all of it as JSON."""

    config: type
    only: AbstractSet[str] = frozenset()  # fields that have flags; empty: all
    without: AbstractSet[str] = frozenset()  # fields that have none
    defaults: Given = field(default_factory=dict)  # where they are not those of the config

    @property
    def options(self) -> list[Option]:
        wanted = [option for name, option in options_of(self.config).items() if not self.only or name in self.only]
        return [option for option in wanted if option.name not in {"model", *self.without}]

    def parameters(self) -> Iterator[inspect.Parameter]:
        for option in self.options:
            if option.nested:
                yield from Flags(option.nested).parameters()
            annotation: Any = Annotated[_type(option) | None, self._flag(option)]
            yield inspect.Parameter(option.name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)

    def given(self, values: Given) -> Given:
        """The options among the values of a command's parameters."""
        found = dict(self.defaults)
        for option in self.options:
            value = values[option.name]
            if option.nested:
                found |= _nested(option, value, Flags(option.nested).given(values))
            elif value not in (None, []):
                found[option.name] = _value(option, value)
        return found

    def _flag(self, option: Option) -> Any:
        return typer.Option(
            *(option.description.flags or _names(option)),
            help=option.description.help + (" May be repeated." if _type(option) == list[str] else ""),
            metavar=_metavar(option),
            show_default=self._shown_default(option) or False,
            envvar=option.description.env or None,
            rich_help_panel=PANELS.get(option.nested or self.config),
        )

    def _shown_default(self, option: Option) -> str:
        if option.name in self.defaults or option.name in DEFAULTS:
            return str(self.defaults.get(option.name, DEFAULTS.get(option.name)))
        if option.nested or option.default in (MISSING, None, (), {}) or option.default is False:
            return ""
        if option.items is str:
            return ",".join(option.default)
        return "on" if option.default is True else str(option.default)


def command(function: Callable[..., None], error_code: int = 1) -> Callable[..., None]:
    """A command: its parameters of type `Flags` become flags, and its errors are printed."""
    own = inspect.signature(function, eval_str=True).parameters.values()
    groups = {each.name: flags for each in own for flags in _metadata(each.annotation) if isinstance(flags, Flags)}
    derived = [parameter for flags in groups.values() for parameter in flags.parameters()]
    parameters = [each.replace(kind=each.KEYWORD_ONLY) for each in own if each.name not in groups] + derived

    @functools.wraps(function)
    def run(**values: Any) -> None:
        with explained(error_code):
            given = {name: flags.given(values) for name, flags in groups.items()}
            names = {each.name for each in derived}
            function(**given, **{name: value for name, value in values.items() if name not in names})

    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {each.name: each.annotation for each in parameters}
    return run


def flag_of(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _metadata(annotation: Any) -> tuple[Any, ...]:
    return getattr(annotation, "__metadata__", ())


def _names(option: Option) -> tuple[str, ...]:
    flag = flag_of(option.name)
    return (f"{flag}/--no-{flag[2:]}" if option.switch and option.default is True else flag,)


def _type(option: Option) -> Any:
    """The type that the command line parses; str where an option is parsed here."""
    if (option.items is str and not option.description.listed) or option.pairs:
        return list[str]
    if option.switch or (option.number is not None and not option.words):
        return bool if option.switch else option.number
    checked_here = option.words and option.number is None and not option.description.hints
    return Literal[option.words] if checked_here else str


def _metavar(option: Option) -> str | None:
    if option.words and (option.number is not None or option.description.hints):
        return "|".join(("N", *option.words) if option.number is not None else option.words)
    if option.items is int:
        return "N,N,…"
    if option.pairs:
        return "ID=VALUE"
    return "JSON|@FILE" if option.nested or not (option.simple or option.items) else None


def _value(option: Option, value: Any) -> Any:
    if option.pairs:
        return dict(map(_pair, value))
    if not isinstance(value, str):
        return tuple(value) if isinstance(value, list) else value
    return option.parse(value) if option.simple or option.items else _parsed(flag_of(option.name), value)


def _nested(option: Option, text: str | None, flags: Given) -> Given:
    """The options of a nested config, from its flags or from its JSON; nothing if neither was given."""
    if text is None:
        usual = "ssd" if "draft_url" in flags else "sd"
        return {option.name: {**flags, "mode": flags.get("mode", usual)}} if flags else {}
    if flags:
        names = ", ".join(map(flag_of, flags))
        raise ConfigError(f"{flag_of(option.name)} says it all: leave out {names}, or put it into the JSON")
    return {option.name: _parsed(flag_of(option.name), text)}


def _pair(text: str) -> tuple[int, float]:
    token, _, value = text.partition("=")
    try:
        return int(token), float(value)
    except ValueError:
        raise typer.BadParameter(f"--logit-bias {text}: must be ID=VALUE, such as 42=-5 or 42=-inf") from None


def _parsed(flag: str, text: str) -> Given:
    """The JSON object of a text, or of the file that @FILE names."""
    try:
        value = json.loads(Path(text[1:]).read_text(encoding="utf-8") if text.startswith("@") else text)
    except OSError as error:
        raise ConfigError(f"{flag} {text}: cannot be read ({error}): name a JSON file") from error
    except ValueError as error:
        raise ConfigError(f"{flag} {text!r}: is not JSON ({error})") from error
    if not isinstance(value, dict):
        raise ConfigError(f'{flag} {text!r}: must be a JSON object, such as {{"name": "value"}}')
    return value
