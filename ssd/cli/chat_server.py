"""The backend of a chat whose answers come from a server."""

from __future__ import annotations

import time
from contextlib import closing
from typing import TYPE_CHECKING

from ssd.cli.conversation import Answer, Message, Write, sampling
from ssd.core import FinishReason, RequestMetrics, SamplingParams

if TYPE_CHECKING:
    from ssd.bench.openai import ServerContender


class ServerBackend:
    """A server answers. It does not say how many tokens a piece of text holds."""

    unit = "pieces"

    def __init__(self, server: ServerContender, params: SamplingParams) -> None:
        self.name = f"{server.name} ({server.model})"
        self.params = params
        self._server = server

    def fits(self, messages: list[Message], answers: int) -> bool:
        return True  # else it says so itself

    def answer(self, messages: list[Message], write: Write) -> Answer:
        metrics, text = RequestMetrics(arrival=time.perf_counter()), ""
        reason: FinishReason | None = None
        params, usual = self.params, sampling(SamplingParams())
        asked = {name: value for name, value in sampling(params).items() if value != usual[name]}
        asked |= {"temperature": params.temperature, "max_tokens": params.max_new_tokens}
        try:
            with closing(self._server.stream_chat(messages, asked)) as pieces:
                for piece in pieces:
                    metrics.first_token = metrics.first_token or time.perf_counter()
                    metrics.output_tokens += 1
                    text += piece
                    write(piece, False)
            reason = "length" if self._server.finish_reason == "length" else None
        except KeyboardInterrupt:
            reason = "abort"
        metrics.finished = time.perf_counter()
        return Answer(text, reason, metrics, params)
