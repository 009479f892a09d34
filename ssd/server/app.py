"""The application: endpoints, errors and middleware around one `LLM`."""

from __future__ import annotations

import logging
from typing import Final

from fastapi import FastAPI
from starlette.routing import Route

from ssd.llm import LLM
from ssd.server import api_docs, errors, info, metrics
from ssd.server.admission import Admission
from ssd.server.anthropic import messages
from ssd.server.fingerprint import system_fingerprint
from ssd.server.generation import ServerState
from ssd.server.http import middleware
from ssd.server.metrics import HttpRequests, Metrics
from ssd.server.ollama import chat as ollama_chat
from ssd.server.ollama import models as ollama_models
from ssd.server.openai import chat, completions, embeddings, responses
from ssd.server.options import ServerOptions
from ssd.server.playground import endpoints as playground
from ssd.server.sampling_defaults import sampling_defaults
from ssd.server.tracing import Tracer
from ssd.version import VERSION

loading = logging.getLogger("ssd.loading")

ENDPOINTS: Final = (
    *(info, metrics, api_docs, chat, completions, embeddings, responses, messages),
    *(ollama_chat, ollama_models),
)
PATHS: Final = frozenset(  # of all routes; templates where they have parameters
    {route.path for module in ENDPOINTS for route in module.router.routes if isinstance(route, Route)}
    | {"/openapi.json", *playground.PAGE, "/playground/chat", "/playground/state"}
)


def create_app(llm: LLM, options: ServerOptions) -> FastAPI:
    """The server's ASGI application. It does not close the LLM."""
    if llm.driver.limits.grammars is not None:
        loading.info("preparing grammars")
        llm.driver.limits.grammars.warm_up()  # before the server is ready: no request waits for it
    if (template := options.read_chat_template()) is not None:
        llm.tokenizer.use_chat_template(template)
    app = FastAPI(
        title="ssd",
        version=VERSION,
        responses=errors.ERROR_RESPONSES,
        docs_url=None,  # FastAPI's pages load scripts from outside; `/docs` is in `api_docs`
        redoc_url=None,
        redirect_slashes=False,  # to the host that the client has named, which may be another one
    )
    admission = Admission(llm.config.max_num_seqs, options.max_queue, options.max_tokens_in_flight)
    endpoint = options.otlp_traces_endpoint
    tracer = Tracer(endpoint, options.served_model_name) if endpoint is not None else None
    name, defaults = options.served_model_name, sampling_defaults(llm.path, options)
    fingerprint = system_fingerprint(llm, template, defaults)
    app.state.server = ServerState(
        llm,
        options,
        admission,
        Metrics(llm, name, fingerprint),
        HttpRequests(PATHS, name),
        sampling_defaults=defaults,
        fingerprint=fingerprint,
        tracer=tracer,
    )
    errors.install(app)
    for module in ENDPOINTS:
        app.include_router(module.router)
    app.include_router(playground.router(llm))
    middleware.install(app, options)
    return app
