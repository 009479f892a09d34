"""The application: endpoints, errors and middleware around one `LLM`."""

from __future__ import annotations

from fastapi import FastAPI

from ssd.llm import LLM
from ssd.server import chat, completions, embeddings, errors, info, messages, metrics, middleware, playground, responses
from ssd.server.admission import Admission
from ssd.server.generation import ServerState
from ssd.server.metrics import Metrics
from ssd.server.options import ServerOptions
from ssd.server.tracing import Tracer
from ssd.version import VERSION


def create_app(llm: LLM, options: ServerOptions) -> FastAPI:
    """The server's ASGI application. It does not close the LLM."""
    if llm.driver.limits.grammars is not None:
        llm.driver.limits.grammars.warm_up()  # before the server is ready: no request waits for it
    # no pages of the API's documentation: they load scripts from outside
    app = FastAPI(title="ssd", version=VERSION, responses=errors.ERROR_RESPONSES, docs_url=None, redoc_url=None)
    admission = Admission(llm.config.max_num_seqs, options.max_queue, options.max_tokens_in_flight)
    endpoint = options.otlp_traces_endpoint
    tracer = Tracer(endpoint, options.served_model_name) if endpoint is not None else None
    app.state.server = ServerState(llm, options, admission, Metrics(llm, options.served_model_name), tracer)
    errors.install(app)
    for module in (info, metrics, chat, completions, embeddings, responses, messages):
        app.include_router(module.router)
    app.include_router(playground.router(llm))
    middleware.install(app, options)
    return app
