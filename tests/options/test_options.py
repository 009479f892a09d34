"""An option is one field of a config: its check, its flag and its help are derived."""

from __future__ import annotations

import functools
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
import typer
from typer.main import get_command
from typer.testing import CliRunner

from ssd.cli.main import app
from ssd.cli.options import Flags, Given, command
from ssd.config import EngineConfig, SpeculationConfig
from ssd.core import SamplingParams
from ssd.errors import ConfigError
from ssd.options import Option, option, options_of, validate
from ssd.server.options import ServerOptions
from ssd.text.tool_formats import PARSERS

ROOT = Path(__file__).parents[2]
CONFIGS = (EngineConfig, SpeculationConfig, ServerOptions, SamplingParams)


@dataclass(frozen=True)
class Config:
    """A config with a field of every kind."""

    warmth: float = option(0.5, "How warm the text is.", least=0, most=2)
    size: int | Literal["auto"] = option("auto", "How large it is.", least=1)
    kind: Literal["plain", "fancy"] = option("plain", "What it looks like.")
    fast: bool = option(False, "Whether it hurries.")
    cached: bool = option(True, "Whether it remembers.")
    name: str | None = option(None, "What it is called.", flags=("--name", "-x"))
    tags: tuple[str, ...] = option((), "What it is about.")
    counts: tuple[int, ...] = option((), "How often.")

    def __post_init__(self) -> None:
        validate(self)


def run(*arguments: str) -> tuple[Any, Given]:
    """What a command of these flags prints, and the options that it is called with."""
    seen: Given = {}

    @command
    def write(place: str = "here", *, config: Annotated[Given, Flags(Config)]) -> None:
        seen.update(config)
        Config(**config)

    program = typer.Typer()
    program.command()(write)
    return CliRunner().invoke(program, arguments), seen


@functools.cache
def flags_of(name: str) -> dict[str, Any]:
    """The parameters of a command of `ssd`, by every spelling of their flags."""
    parameters = get_command(app).commands[name].params  # type: ignore[attr-defined]
    return {flag: each for each in parameters for flag in (*each.opts, *each.secondary_opts)}


def flag_of(option: Option) -> str:
    return (option.description.flags or (f"--{option.name.replace('_', '-')}",))[0]


def test_a_field_is_a_flag_with_its_help() -> None:
    """Catches an option that must be spelled anywhere else than at its field."""
    done, seen = run("--help")
    assert not seen
    for each in options_of(Config).values():
        assert flag_of(each) in done.output
        assert all(word in done.output for word in each.description.help.split())
    for word in ("--no-cached", "-x", "<plain|fancy>", "N|auto", "(0.5)"):
        assert word in done.output


def test_values_arrive_by_the_names_of_their_fields() -> None:
    """Catches a value of the wrong type, and an option that was not given in place of the config's default."""
    assert run()[1] == {}
    given = ["--warmth", "1", "--size", "3", "--kind", "fancy", "--fast", "--no-cached", "-x", "it"]
    given += ["--tags", "a", "--tags", "b", "--counts", "1,2"]
    expected = {"warmth": 1.0, "size": 3, "kind": "fancy", "fast": True, "cached": False, "name": "it"}
    assert run(*given)[1] == expected | {"tags": ("a", "b"), "counts": (1, 2)}
    assert run("--size", "auto")[1] == {"size": "auto"}


@pytest.mark.parametrize(
    ("flags", "code", "message"),
    [
        (("--warmth", "3"), 1, "warmth=3.0: must be a number from 0 to 2"),
        (("--size", "0"), 1, "size=0: must be an integer of at least 1, or 'auto'"),
        (("--size", "x"), 1, "size='x': must be an integer of at least 1, or 'auto'"),
        (("--name", ""), 1, "name='': must be a text that is not empty, or None"),
        (("--kind", "ugly"), 2, "'plain', 'fancy'"),
    ],
)
def test_a_wrong_value_is_explained(flags: tuple[str, ...], code: int, message: str) -> None:
    done, _ = run(*flags)
    assert done.exit_code == code
    assert message in " ".join(re.sub("[│╭╰─╮╯]", " ", done.stderr).split())


@pytest.mark.parametrize("config", CONFIGS)
def test_every_option_is_described(config: type) -> None:
    for each in options_of(config).values():
        assert re.fullmatch(r"[A-Za-z0-9].{10,}\.", each.description.help), each.name
        assert not each.description.help.startswith("Of "), each.name


@pytest.mark.parametrize(
    ("name", "config", "others"),
    [
        ("serve", EngineConfig, {"model"}),
        ("serve", SpeculationConfig, set()),
        ("serve", ServerOptions, set()),
        ("generate", EngineConfig, {"model"}),
        ("generate", SpeculationConfig, set()),
        (
            "generate",
            SamplingParams,
            {"speculate", "shown_token_ids", "priority", "prompt_logprobs", "pooling"},
        ),
        ("chat", EngineConfig, {"model", "max_num_seqs"}),
        ("chat", SpeculationConfig, set()),
        ("bench", EngineConfig, {"model", "max_num_seqs", "speculation"}),
        ("bench", SpeculationConfig, {"mode"}),
    ],
)
def test_every_field_is_a_flag_of_the_commands(name: str, config: type, others: set[str]) -> None:
    """`others` are arguments of the command, or make no sense for it."""
    flags = flags_of(name)
    for each in options_of(config).values():
        assert (flag_of(each) in flags) != (each.name in others), each.name


def test_the_reference_shows_every_config() -> None:
    """`scripts/reference.py` makes a table of every option with its default and its help."""
    page = (ROOT / "docs" / "reference.md").read_text()
    for config in CONFIGS:
        assert f"<!-- options: {config.__module__}.{config.__name__} -->" in page


PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md")), ROOT / "CHANGELOG.md"]
NAMES = "|".join(("bench serve", "generate", "chat", "serve", "bench", "explain", "demo", "graft"))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_flags_in_the_docs_exist(page: Path) -> None:
    """Catches a page with a flag that was renamed or never written."""
    text = page.read_text().replace("\\\n", " ")
    for name, line in re.findall(rf"ssd ({NAMES})\b([^\n`]*)", text):
        for flag in re.findall(r"(?<![\w-])--[a-z][a-z-]*", line.split("#")[0]):
            assert flag in {"--help", *flags_of(name)}, f"ssd {name} {flag}"
    if page.name == "serving.md":
        rows = [row for row in text.split("## Options")[1].split("\n## ")[0].splitlines() if row.startswith("| `--")]
        assert rows
        for flag in re.findall(r"--[a-z][a-z-]*", " ".join(row.split("|")[1] for row in rows)):
            assert flag in flags_of("serve"), flag


def test_every_option_of_the_server_is_in_the_table_of_its_page() -> None:
    table = (ROOT / "docs" / "serving.md").read_text().split("## Options")[1].split("\n## ")[0]
    for each in options_of(ServerOptions).values():
        assert f"`{flag_of(each)}" in table, each.name


def test_the_tool_parsers_are_those_that_exist() -> None:
    assert options_of(ServerOptions)["tool_parser"].words == ("auto", *PARSERS)


# --- options of speculation: flags, or JSON ---------------------------------------------------------------------------


def engine_options(*flags: str) -> Given:
    seen: Given = {}

    @command
    def start(*, engine: Annotated[Given, Flags(EngineConfig)]) -> None:
        seen.update(engine)

    program = typer.Typer()
    program.command()(start)
    done = CliRunner().invoke(program, flags)
    if done.exit_code:
        raise ConfigError(done.stderr)
    return seen


@pytest.mark.parametrize(
    ("flags", "wanted"),
    [
        ("--draft suffix", {"mode": "sd", "draft": "suffix"}),
        ("--draft 7 --mode ssd --k 3", {"mode": "ssd", "draft": "7", "k": 3}),
        ("--draft d --mode ssd --k auto --fan-out 2", {"mode": "ssd", "draft": "d", "k": "auto", "fan_out": 2}),
        (
            "--draft d --mode ssd --k 1 --fan-out-hit 1,2 --fan-out-miss 2,0",
            {"mode": "ssd", "draft": "d", "k": 1, "fan_out_hit": (1, 2), "fan_out_miss": (2, 0)},
        ),
        ('--speculation {"mode":"sd","draft":"suffix"}', {"mode": "sd", "draft": "suffix"}),
    ],
)
def test_flags_are_options_of_the_configuration(flags: str, wanted: Given) -> None:
    found = engine_options(*flags.split())
    assert found == {"speculation": wanted}
    assert EngineConfig("m", **found).speculation == SpeculationConfig(**wanted)


def test_speculation_is_read_from_a_file(tmp_path: Path) -> None:
    file, wanted = tmp_path / "speculation.json", {"mode": "sd", "draft": "suffix", "k": 5}
    file.write_text(json.dumps(wanted))
    assert engine_options("--speculation", f"@{file}") == {"speculation": wanted}


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--speculation", '{"mode": "ssd"}', "--k", "3", "--fan-out", "2"), "leave out --k, --fan-out"),
        (("--speculation", "nonsense"), "is not JSON"),
        (("--speculation", "[1]"), "must be a JSON object"),
        (("--speculation", "@/no/such/file"), "cannot be read"),
    ],
)
def test_wrong_json_is_explained(flags: tuple[str, ...], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        engine_options(*flags)
