"""`ssd draft-server`: drafts for several engines from one process."""

from __future__ import annotations

from typing import Annotated, Final

from ssd.cli.console import errors, stages
from ssd.cli.options import MODEL, Flags, Given, command
from ssd.draft_server.options import DraftServerOptions

HELP: Final = """\
Draft for several engines from one process: [bold]one draft model, on hardware of its own[/].

An engine names the server by [cyan]--draft-url[/] and has no draft model itself. While it verifies, the server \
prepares its next draft, as the draft process of a single engine does; the rows of all engines are one forward pass, \
and a round that comes begins with the next step. Every text is that of plain decoding, whatever the server sends; \
without it an engine decodes without drafts until it is back. Engines and server need the same tokenizer.

SIGTERM or Ctrl-C ends the server after the rounds under way (exit code 0).

[bold]Try[/]

  ssd draft-server tiny-llama-draft

  ssd generate tiny-llama "Once upon a time" --draft-url unix:ssd-draft.sock     (in the same directory)

  SSD_DRAFT_TOKEN=SECRET ssd draft-server DRAFT --listen tcp://127.0.0.1:8100 --http-port 8101

  SSD_DRAFT_TOKEN=SECRET ssd serve MODEL --draft-url tcp://127.0.0.1:8100

  curl http://127.0.0.1:8101/metrics
"""


@command
def draft_server(
    draft: Annotated[str, MODEL] = "tiny-llama-draft", *, options: Annotated[Given, Flags(DraftServerOptions)]
) -> None:
    chosen = DraftServerOptions(**options)
    sockets = [address.listen() for address in chosen.addresses]  # first: a model may take minutes to load
    with stages(f"loading {draft}", lines=True):
        from ssd.assembly.draft_server import SharedDraft
        from ssd.draft_server.health import health_server
        from ssd.draft_server.server import DraftServer, ended_by_signals

        server = DraftServer(SharedDraft(chosen.config(draft), chosen.max_engines), chosen, sockets)
    with ended_by_signals(server), health_server(server):
        for address in server.addresses:
            errors.print(f"drafts of {draft} at {address}", highlight=False)
        server.serve()
