"""`ssd serve --config FILE`: a TOML file with the models of a server and their options.

    [server]                  # flags of `ssd serve`
    port = 8080
    keep_alive = 600

    [engine]                  # of all models
    max_num_seqs = 8

    [[models]]
    model = "qwen2.5-coder-1.5b-q4_k_m.gguf"
    name = "coder"
    aliases = ["gpt-4o"]
    draft = "qwen2.5-coder-0.5b-q4_k_m.gguf"
    mode = "auto"

Keys are those of the flags, with underscores. Files and folders are looked up beside this file first.
"""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

from ssd.cli.options import Given
from ssd.config import EngineConfig, SpeculationConfig
from ssd.errors import ConfigError, SSDError
from ssd.options import options_of
from ssd.server.models.options import CatalogOptions, ServedModel
from ssd.server.options import ServerOptions

_PLACE: Final = {"host": str, "port": int}  # where the server listens
_OF_MODELS: Final = frozenset({"served_model_name", "aliases"})  # options of a server that are a model's here
# options of a server that a model may have of its own
_OWN: Final = frozenset(
    {
        *("chat_template", "generation_config", "override_generation_config", "tool_parser", "additional_properties"),
        *("strict_parameters", "max_n", "max_queue", "max_tokens_in_flight", "request_timeout"),
    }
)
_PATHS: Final = frozenset({"model", "draft", "chat_template"})


@dataclass
class ServerFile:
    """What a file says."""

    place: Given = field(default_factory=dict)
    server: Given = field(default_factory=dict)
    catalog: Given = field(default_factory=dict)
    engine: Given = field(default_factory=dict)  # flat, as flags are
    models: list[Given] = field(default_factory=list)  # likewise

    @classmethod
    def read(cls, path: Path) -> ServerFile:
        """ConfigError, with the name of the key, if something in it is wrong."""
        try:
            tables = tomllib.loads(path.read_text(encoding="utf-8"))
        except (OSError, UnicodeError) as error:
            raise ConfigError(f"--config {path}: cannot be read ({error}): name a TOML file") from error
        except tomllib.TOMLDecodeError as error:
            raise ConfigError(f"--config {path}: is not TOML: {error}") from error
        _check_keys(path, "", tables, ("server", "engine", "models"))
        server, engine, models = tables.get("server", {}), tables.get("engine", {}), tables.get("models", [])
        for name, value in (("server", server), ("engine", engine)):
            if not isinstance(value, dict):
                raise ConfigError(f"--config {path}: {name}: must be a table, [{name}]")
        if not isinstance(models, list) or not models or not all(isinstance(each, dict) for each in models):
            raise ConfigError(f"--config {path}: models: must be one or more tables, each below a line [[models]]")
        found = cls(engine=_located(path, engine))
        _check_keys(path, "engine.", engine, (*_engine_keys(), *_OWN))
        _check_keys(path, "server.", server, (*_PLACE, *_server_keys(), *options_of(CatalogOptions)))
        for key, value in server.items():
            part = found.place if key in _PLACE else found.server if key in _server_keys() else found.catalog
            part[key] = value
        for key, kind in _PLACE.items():
            if key in found.place and not isinstance(found.place[key], kind):
                raise ConfigError(f"--config {path}: server.{key}={found.place[key]!r}: must be {kind.__name__}")
        for i, each in enumerate(models):
            _check_keys(path, f"models[{i}].", each, (*_MODEL_KEYS, *_engine_keys(), *_OWN))
            if not isinstance(each.get("model"), str):
                raise ConfigError(f"--config {path}: models[{i}].model: is missing: name a file, a folder or a hub id")
            found.models.append(_located(path, each))
        return found


_MODEL_KEYS: Final = ("model", "name", "aliases", "pinned", "keep_alive")


def in_folder(folder: Path) -> list[Given]:
    """The models of a folder: its GGUF files, and its folders with a config.json."""
    if not folder.is_dir():
        raise ConfigError(f"--models-dir {folder}: is no folder")
    files = sorted(folder.glob("*.gguf"))
    found = [{"model": str(file), "name": file.stem} for file in files if not file.name.startswith("mmproj")]
    found += [{"model": str(each.parent), "name": each.parent.name} for each in sorted(folder.glob("*/config.json"))]
    if not found:
        raise ConfigError(f"--models-dir {folder}: has neither .gguf files nor folders with a config.json")
    return found


def served_models(
    models: Iterable[Given], common: Given, catalog: CatalogOptions, server: ServerOptions
) -> list[ServedModel]:
    """`models`: tables of a file or a folder; `common`, `server`: options of all of them, where they have none of their
    own. Keys and names of hosts are checked before a request gets to a model."""
    made = []
    inner = replace(server, api_keys=(), cors_origins=(), allowed_hosts=(), access_log=False)
    for i, own in enumerate(models):
        each = {**common, **own}
        model = each.pop("model")
        name = each.pop("name", Path(model).stem if model.endswith(".gguf") else Path(model).name)
        pinned, keep_alive = each.pop("pinned", False), each.pop("keep_alive", catalog.keep_alive)
        if not isinstance(pinned, bool) or isinstance(keep_alive, bool) or not isinstance(keep_alive, int | float):
            raise ConfigError(f"models[{i}]: pinned must be true or false, keep_alive a number of seconds")
        options = {key: each.pop(key) for key in _OWN & each.keys()}
        aliases = each.pop("aliases", [])
        if not isinstance(aliases, list) or not all(isinstance(alias, str) for alias in aliases):
            raise ConfigError(f"models[{i}].aliases={aliases!r}: must be a list of names")
        try:
            config = EngineConfig(model, **nested(each))
            own_server = replace(inner, served_model_name=name, aliases=tuple(aliases), **options)
        except SSDError as error:
            raise ConfigError(f"models[{i}] ({model}): {error}") from error
        made.append(ServedModel(config, own_server, float(keep_alive), pinned))
    return made


def nested(flat: Mapping[str, Any]) -> Given:
    """Options of an engine from those of its flags: options of speculation are in a mapping of their own."""
    speculation = {key: value for key, value in flat.items() if key in options_of(SpeculationConfig)}
    found = {key: value for key, value in flat.items() if key not in speculation}
    return found | ({"speculation": {"mode": "sd", **speculation}} if speculation else {})


def flat(engine: Given) -> Given:
    """The reverse."""
    return {**{key: value for key, value in engine.items() if key != "speculation"}, **engine.get("speculation", {})}


def _engine_keys() -> list[str]:
    return [*(set(options_of(EngineConfig)) - {"model", "speculation"}), *options_of(SpeculationConfig)]


def _server_keys() -> set[str]:
    return set(options_of(ServerOptions)) - _OF_MODELS


def _check_keys(path: Path, where: str, table: Mapping[str, Any], known: Iterable[str]) -> None:
    for key in table:
        if key not in known:
            near = difflib.get_close_matches(key, known, n=1)
            hint = f"did you mean {near[0]!r}?" if near else "the flags of `ssd serve --help`, with underscores, are"
            raise ConfigError(f"--config {path}: {where}{key}: is not a key; {hint}")


def _located(path: Path, table: Mapping[str, Any]) -> Given:
    """With the paths of what is beside the file."""
    found = dict(table)
    for key in _PATHS & found.keys():
        beside = path.parent / found[key] if isinstance(found[key], str) else None
        if beside is not None and beside.exists():
            found[key] = str(beside.absolute())
    return found
