"""`ssd serve`: an OpenAI-compatible HTTP server."""

from __future__ import annotations

import functools
import logging
import os
import socket
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from ssd.cli.console import errors, follow, print_note, stages
from ssd.cli.imports import import_llm
from ssd.cli.options import MODEL, PANELS, Flags, Given, command, flag_of
from ssd.cli.server_file import ServerFile, flat, in_folder, served_models
from ssd.config import EngineConfig
from ssd.errors import ConfigError, EngineFailed, install_extra
from ssd.parallel.launch import Launch
from ssd.server.models.options import CatalogOptions, ServedModel
from ssd.server.options import ServerOptions, is_loopback

if TYPE_CHECKING:
    from fastapi import FastAPI

HELP: Final = """\
Serve a model over HTTP, as OpenAI's API does: [bold]chats, completions, streaming, log-probabilities, seeds[/].

The text of a request is that of [cyan]LLM.generate[/] with the same parameters and seed, whatever else is being \
served and however it is drafted. Ctrl-C or SIGTERM ends the server when running requests have ended; a second one \
ends it at once. Needs the extra [cyan]serve[/].

[bold]Try[/]

  ssd serve tiny-llama --draft tiny-llama-draft --mode ssd

  ssd serve MODEL --host 0.0.0.0 --api-key KEY

  ssd serve MODEL --replicas 8

  ssd serve --models-dir ~/models   (each is loaded when a request names it; --config FILE has their options)

  curl http://127.0.0.1:8000/v1/completions -H 'Content-Type: application/json' \
-d '{"model": "tiny-llama", "prompt": "Once upon a time"}'
"""
Run = Callable[["FastAPI", list[str]], None]  # serves an application until a signal ends it, with notes for the start
REPLICAS: Final = "Replicas, on Ray Serve"
SEVERAL: Final = PANELS[CatalogOptions]


@command
def serve(
    model: Annotated[str | None, MODEL] = None,
    host: Annotated[str | None, typer.Option(help="Address to listen on.", show_default="127.0.0.1")] = None,
    port: Annotated[int | None, typer.Option(min=1, max=65535, help="Port to listen on.", show_default="8000")] = None,
    models_dir: Annotated[
        Path | None,
        typer.Option(
            help="Serve all models of this folder: its .gguf files, and its folders with a config.json. Each is loaded "
            "when a request names it.",
            rich_help_panel=SEVERAL,
        ),
    ] = None,
    config: Annotated[
        Path | None,
        typer.Option(
            help="Serve the models of this TOML file, with their options. Every flag has a key there.",
            rich_help_panel=SEVERAL,
        ),
    ] = None,
    replicas: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Number of engines, each on GPUs (or cores) of its own. Needs the extra ray.",
            show_default="one, without Ray",
            rich_help_panel=REPLICAS,
        ),
    ] = None,
    ray_address: Annotated[
        str | None,
        typer.Option(
            help="Join this Ray cluster: HOST:PORT, or auto.",
            show_default="RAY_ADDRESS, or a new one on this machine",
            rich_help_panel=REPLICAS,
        ),
    ] = None,
    *,
    catalog: Annotated[Given, Flags(CatalogOptions)],
    server: Annotated[Given, Flags(ServerOptions)],
    engine: Annotated[Given, Flags(EngineConfig)],
) -> None:
    several = models_dir is not None or config is not None
    if several and (model is not None or replicas is not None or (models_dir is not None and config is not None)):
        raise ConfigError("--config, --models-dir, --replicas and a MODEL are ways to say what is served: use one")
    if catalog and not several:
        raise ConfigError(f"{flag_of(next(iter(catalog)))}: only with --config or --models-dir")
    if several and (single := [name for name in ("served_model_name", "aliases") if name in server]):
        raise ConfigError(f"{flag_of(single[0])}: is for one MODEL; --config has names and aliases of several")
    file = ServerFile.read(config) if config is not None else ServerFile()
    host, port = host or file.place.get("host", "127.0.0.1"), port or file.place.get("port", 8000)
    model = model or "tiny-llama"
    options = ServerOptions(**{"served_model_name": model, **_as_flags(file.server), **server})
    if ray_address is not None and replicas is None:
        raise ConfigError("--ray-address: only with --replicas")
    if replicas is not None and Launch.found() is not None:
        raise ConfigError("--replicas: not with torchrun: Ray starts the engines")
    if not options.api_keys and not is_loopback(host):
        errors.print(f"[yellow]no --api-key: whoever reaches {host}:{port} is served[/]", highlight=False)
    elif not options.api_keys and not options.allowed_hosts:
        options = replace(options, allowed_hosts=("localhost",))
    follow(engine)
    sockets = _listen(host, port)  # first: a model may take minutes to load
    run = functools.partial(_run, sockets, _addresses(None if several else options.served_model_name, host, port))
    if several:
        limits = CatalogOptions(**{**file.catalog, **catalog})
        tables = file.models if models_dir is None else in_folder(models_dir)
        models = served_models(tables, {**file.engine, **flat(engine)}, limits, options)
        _serve_models(models, limits, options, run)
    elif replicas is None:
        _serve_engine(model, engine, options, run)
    else:
        cluster = ray_address or os.environ.get("RAY_ADDRESS")
        _serve_replicas(EngineConfig(model, **engine), options, replicas, cluster, run)


def _serve_engine(model: str, engine: Given, options: ServerOptions, run: Run) -> None:
    with ExitStack() as stack:
        with stages(f"loading {model}", lines=True):
            LLM = import_llm()
            from ssd.server.app import create_app

            llm = stack.enter_context(LLM(model, **engine))
            app = create_app(llm, options)
        print_note(llm.note)
        run(app, _summary(llm.config))
        if llm.driver.failure is not None:
            raise EngineFailed(llm.driver.failure)


def _serve_models(models: list[ServedModel], limits: CatalogOptions, options: ServerOptions, run: Run) -> None:
    from ssd.server.models.catalog import Catalog
    from ssd.server.models.front import create_front

    catalog = Catalog(models, limits)
    try:
        for model in (each for each in models if each.pinned):
            with stages(f"loading {model.name}", lines=True):
                catalog.preload(model)
        run(create_front(catalog, options), [f"models      {', '.join(catalog.slots)}"])
    finally:
        catalog.close()


def _as_flags(table: Given) -> Given:
    """Options of a server from a file, whose lists are tuples here."""
    return {name: tuple(value) if isinstance(value, list) else value for name, value in table.items()}


def _serve_replicas(config: EngineConfig, options: ServerOptions, count: int, cluster: str | None, run: Run) -> None:
    with ExitStack() as stack:
        with stages(f"starting {count} replicas of {config.model}", lines=True):
            from ssd.server.replicas.proxy import create_proxy
            from ssd.server.replicas.ray_serve import LOCAL, RayReplicas

            replicas = stack.enter_context(RayReplicas(config, options, count, cluster or LOCAL))
            app = create_proxy(replicas, options)
        run(app, [f"replicas    {count}"])
        if replicas.lost is not None:
            raise EngineFailed(replicas.lost)


def _listen(host: str, port: int) -> list[socket.socket]:
    try:
        from ssd.server.run import listen
    except ModuleNotFoundError as error:
        raise ConfigError(f"ssd serve needs the package {error.name}: {install_extra('serve')}") from error
    return listen(host, port)


def _summary(config: EngineConfig) -> list[str]:
    """What was chosen for an engine."""
    import torch

    device, speculation = config.device, config.speculation
    if device != "cpu":
        device = f"{device} ({torch.cuda.get_device_name(device)})"
    tokens = (config.num_kv_blocks or 0) * (config.block_size or 0)
    draft = f"draft {speculation.draft or speculation.draft_url}, k {speculation.k}"
    sequences = f"{config.max_num_seqs} sequences of up to {config.max_model_len:,} tokens"
    return [
        f"device      {device}, {config.dtype}{f', weights in {config.quantization}' if config.quantization else ''}",
        f"KV cache    {tokens:,} tokens in {config.kv_dtype}; {sequences}",
        f"mode        {speculation.mode}, {'no draft' if speculation.mode == 'ar' else draft}",
    ]


def _addresses(model: str | None, host: str, port: int) -> list[str]:
    name = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    address = f"http://{f'[{name}]' if ':' in name else name}:{port}"
    served = "GET /v1/models lists the models" if model is None else f"model {model}"
    return [f"API         {address}/v1, {served}", f"playground  {address}/"]


def _run(sockets: list[socket.socket], addresses: list[str], app: FastAPI, notes: list[str]) -> None:
    from ssd.server.run import Server

    logging.getLogger("ssd.access").setLevel(logging.INFO)
    text = "\n".join([*notes, *addresses])
    Server(app, ready=lambda: errors.print(text, highlight=False, markup=False, soft_wrap=True)).run(sockets)
