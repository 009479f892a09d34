"""The answer of `/v1/messages`: content blocks and why they ended, and the events of a stream."""

from __future__ import annotations

import json
import uuid

from ssd.core import RequestOutput
from ssd.server.answers import usage
from ssd.server.errors import ApiError
from ssd.server.ignored import current
from ssd.server.protocol import Json
from ssd.text.detokenizer import IncrementalDecoder
from ssd.text.events import CallArguments, CallBegin, CallEnd, Event, Reasoning, Text
from ssd.text.tokenizer import Tokenizer


class AnthropicMessageWriter:
    """Turns the events of one message into those of the Messages API, and keeps the message."""

    def __init__(self, model: str, request_id: str, num_prompt_tokens: int, tokenizer: Tokenizer) -> None:
        self.content: list[Json] = []
        self._warnings = current().answer
        self.answer: Json = {
            "id": f"msg_{uuid.uuid4().hex}",
            "type": "message",
            "role": "assistant",
            "model": model,
            "content": self.content,
            "stop_reason": None,
            "stop_sequence": None,
            "usage": {"input_tokens": num_prompt_tokens, "output_tokens": 0},
            **self._warnings,
        }
        self._request_id, self._tokenizer = request_id, tokenizer
        self._arguments = ""  # JSON text of the last tool_use block
        self._open = False  # whether the last block is open

    def begin(self) -> list[Json]:
        return [{"type": "message_start", "message": {**self.answer, "content": []}}]

    def pause(self) -> list[Json]:
        return [{"type": "ping"}]

    def add(self, event: Event) -> list[Json]:
        match event:
            case Text(text):
                return self._add_text("text", text)
            case Reasoning(text):
                return self._add_text("thinking", text)
            case CallBegin(_, id_, name):
                self._arguments = ""
                return [*self._close(), self._open_block({"type": "tool_use", "id": id_, "name": name, "input": {}})]
            case CallArguments(_, text):
                self._arguments += text
                return [self._delta("input_json_delta", partial_json=text)]
            case CallEnd():
                closed = self._close()
                if not event.complete:
                    self.content.pop()  # there is no input to call the tool with
                elif event.broken is None:
                    self.content[-1]["input"] = json.loads(self._arguments)
                return closed

    def end(self, output: RequestOutput) -> list[Json]:
        events = self._close()
        stop, counts = self._stop(output), self._usage(output)
        self.answer |= {**stop, "usage": counts}
        delta = {"type": "message_delta", "delta": stop, "usage": counts, **self._warnings}
        return [*events, delta, {"type": "message_stop"}]

    def fail(self, error: ApiError) -> list[Json]:
        return [error.messages_body(self._request_id)]

    def _close(self) -> list[Json]:
        """Ends the last block if it is open."""
        if not self._open:
            return []
        self._open = False
        return [{"type": "content_block_stop", "index": len(self.content) - 1}]

    def _add_text(self, kind: str, text: str) -> list[Json]:
        events: list[Json] = []
        if not self._open or self.content[-1]["type"] != kind:
            block = {"type": kind, kind: ""} | ({"signature": ""} if kind == "thinking" else {})
            events = [*self._close(), self._open_block(block)]
        self.content[-1][kind] += text
        return [*events, self._delta(f"{kind}_delta", **{kind: text})]

    def _open_block(self, block: Json) -> Json:
        self.content.append(block)
        self._open = True
        return {"type": "content_block_start", "index": len(self.content) - 1, "content_block": dict(block)}

    def _delta(self, kind: str, **fields: str) -> Json:
        return {"type": "content_block_delta", "index": len(self.content) - 1, "delta": {"type": kind, **fields}}

    def _usage(self, output: RequestOutput) -> Json:
        counts = usage([output])
        cached = counts["prompt_tokens_details"]["cached_tokens"]
        thinking = "".join(block["thinking"] for block in self.content if block["type"] == "thinking")
        num_thinking = len(self._tokenizer.encode(thinking, add_special_tokens=False))
        return {
            "input_tokens": counts["prompt_tokens"] - cached,  # the total is the sum of both
            "cache_read_input_tokens": cached,
            "cache_creation_input_tokens": 0,
            "output_tokens": counts["completion_tokens"],
            "output_tokens_details": {"thinking_tokens": num_thinking, **counts["completion_tokens_details"]},
        }

    def _stop(self, output: RequestOutput) -> Json:
        """Why the message ended."""
        sequence = stop_sequence(output, self._tokenizer) if output.finish_reason == "stop" else None
        if output.finish_reason == "length":
            reason = "max_tokens"
        elif sequence is not None:
            reason = "stop_sequence"
        else:
            reason = "tool_use" if any(block["type"] == "tool_use" for block in self.content) else "end_turn"
        return {"stop_reason": reason, "stop_sequence": sequence}


def stop_sequence(output: RequestOutput, tokenizer: Tokenizer) -> str | None:
    """The stop string that ended the text: the tokens' text continues with it after the output's."""
    if not output.params.stop:
        return None
    shown = output.params.shown_token_ids
    decoder = IncrementalDecoder(tokenizer, output.prompt_token_ids, shown_token_ids=shown)
    rest = (decoder.push(*output.token_ids) + decoder.flush())[len(output.text) :]
    return min((stop for stop in output.params.stop if rest.startswith(stop)), key=len, default=None)
