"""LLM: the front door of the library."""

from __future__ import annotations

import gc
import itertools
import logging
from collections import deque
from collections.abc import Iterator, Mapping
from collections.abc import Sequence as Seq
from types import TracebackType
from typing import Any, Literal, cast

import torch

from ssd.assembly import build_engine
from ssd.config import EngineConfig, build
from ssd.core import RequestOutput, SamplingParams, is_int
from ssd.engine.engine import Engine
from ssd.engine.outputs import refused
from ssd.errors import EngineClosed, RequestError, SSDError
from ssd.models.open import open_checkpoint

log = logging.getLogger("ssd")

Message = dict[str, Any]
Prompt = str | Seq[int] | Seq[Message]  # text, token ids, or chat messages


class LLM:
    """A loaded model that answers prompts.

    `model` is a bundled model, a Hugging Face directory, a `.gguf` file or a hub id, or `graft:BASE@SHAPE`: one of them
    in the shape of a published model. Every other keyword is a field of `ssd.config.EngineConfig` (device, dtype,
    max_model_len, max_num_seqs, …). `note` is what every report about the model must say, if anything.
    """

    def __init__(self, model: str, **options: Any) -> None:
        self.config = build(EngineConfig, {"model": model, **options})
        checkpoint = open_checkpoint(self.config.model)
        self.note = checkpoint.note
        self._engine: Engine | None = build_engine(self.config, checkpoint)
        self._finished: dict[str, RequestOutput] = {}  # not yet collected by whoever asked for them
        self._abandoned: deque[str] = deque()  # requests whose streams were garbage-collected
        self._refusals = itertools.count()

    @property
    def engine(self) -> Engine:
        if self._engine is None:
            raise EngineClosed("this LLM was closed: create a new one")
        return self._engine

    def generate(
        self,
        prompts: Prompt | Seq[Prompt],
        params: SamplingParams | Seq[SamplingParams] | None = None,
        chat_options: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Answers one prompt or a list of them; outputs come in the order of the prompts.

        Several prompts may each have their own parameters. One that cannot be served does not harm the others: its
        output has `error` set and the finish reason "abort". A single prompt raises RequestError instead.
        `chat_options` are variables for the chat template (`enable_thinking`, `tools`, `date_string`, …).
        """
        single = _is_single(prompts)
        batch: list[Prompt] = [cast(Prompt, prompts)] if single else list(cast("Seq[Prompt]", prompts))
        ids: list[str] = []
        try:
            for prompt, p in zip(batch, _per_prompt(params, len(batch)), strict=True):
                ids.append(self._add(prompt, p, chat_options, strict=single))
            while missing := [i for i in ids if i not in self._finished]:
                self._step(missing[0])
            return [self._finished[i] for i in ids]
        finally:
            for request_id in ids:
                self._drop(request_id)

    def stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        chat_options: Mapping[str, Any] | None = None,
    ) -> TextStream:
        """Text as it comes. Dropping the stream early ends the request."""
        params = params or SamplingParams()
        if params.n != 1:
            raise RequestError(f"n={params.n}: a stream carries one sample; use generate() for several")
        return TextStream(self, self.engine.add(self.encode(prompt, chat_options), params))

    def _step(self, waiting_for: str) -> None:
        """One round for everybody: finished outputs are kept for whoever waits for them."""
        while self._abandoned:
            self._drop(self._abandoned.popleft())
        engine = self.engine
        gone = not engine.knows(waiting_for)
        self._finished |= {output.request_id: output for output in engine.step()}
        if gone and waiting_for not in self._finished:
            raise SSDError(f"{waiting_for} was aborted, or a direct call of the engine's step() took its output")

    def _drop(self, request_id: str) -> None:
        """Forgets a request: ends it if it still runs."""
        if self._engine is not None:
            self._engine.abort(request_id)
        self._finished.pop(request_id, None)

    def close(self) -> None:
        """Frees the model, the KV and everything else. Safe to call twice."""
        if self._engine is not None:
            self._engine.close()
            self._engine = None
            self._finished.clear()
            self._abandoned.clear()
            gc.collect()
            if torch.cuda.is_available():
                torch.cuda.empty_cache()

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _add(
        self, prompt: Prompt, params: SamplingParams, chat_options: Mapping[str, Any] | None, *, strict: bool
    ) -> str:
        tokens: list[int] = []
        try:
            tokens = self.encode(prompt, chat_options)
            return self.engine.add(tokens, params)
        except RequestError as error:
            if strict:
                raise
            log.warning("a request was refused: %s", error)
            request_id = f"refused-{next(self._refusals)}"
            self._finished[request_id] = refused(request_id, tokens, str(error))
            return request_id

    def encode(self, prompt: Prompt, chat_options: Mapping[str, Any] | None = None) -> list[int]:
        kind = _kind(prompt)
        if kind == "ids":
            return list(cast("Seq[int]", prompt))
        if self.engine.tokenizer is None:
            raise RequestError("this checkpoint has no tokenizer: pass token ids instead of text")
        if kind == "text":
            return self.engine.tokenizer.encode(cast(str, prompt))
        text = self.engine.tokenizer.apply_chat_template(cast("Seq[Message]", prompt), **(chat_options or {}))
        return self.engine.tokenizer.encode(text, add_special_tokens=False)


class TextStream(Iterator[str]):
    """The pieces of one answer; `output` is the whole of it once the pieces have ended."""

    def __init__(self, llm: LLM, request_id: str) -> None:
        self.output: RequestOutput | None = None
        self._llm: LLM | None = llm
        self._request_id = request_id
        self._sent = 0

    def __next__(self) -> str:
        while self._llm is not None:
            piece, self.output = self._llm.engine.new_text(self._request_id), self._llm._finished.get(self._request_id)
            if self.output is None and not piece:
                self._llm._step(self._request_id)
                continue
            if self.output is not None:
                piece = self.output.text[self._sent :]
                self.close()
            self._sent += len(piece)
            if piece:
                return piece
        raise StopIteration

    def close(self) -> None:
        """Ends the request if it is still running; the stream has no more pieces."""
        if self._llm is not None:
            self._llm._drop(self._request_id)
            self._llm = None

    def __del__(self) -> None:
        # May run anywhere, in the middle of a round too: leave a note instead of touching the engine.
        if self._llm is not None:
            self._llm._abandoned.append(self._request_id)


def _kind(prompt: object) -> Literal["text", "ids", "chat"]:
    """What one prompt is; RequestError when it is none of the three."""
    if isinstance(prompt, str):
        return "text"
    items = list(prompt) if isinstance(prompt, Seq) else None
    if items == []:
        raise RequestError("the prompt is empty: pass text, token ids or chat messages")
    if items is not None and all(map(is_int, items)):
        return "ids"
    if items is not None and all(isinstance(m, Mapping) for m in items):
        return "chat"
    raise RequestError(
        f"a prompt of type {type(prompt).__name__} cannot be read: pass a str, a list of token ids or a list of chat "
        "messages (for arrays and tensors, their .tolist())"
    )


def _is_single(prompts: object) -> bool:
    """A string, a list of ids, or a list of messages is one prompt; any other list is a list of prompts."""
    if isinstance(prompts, str):
        return True
    if not isinstance(prompts, Seq):
        raise RequestError(f"prompts of type {type(prompts).__name__} cannot be read: pass one or a list of them")
    return len(prompts) > 0 and isinstance(prompts[0], (int, Mapping))


def _per_prompt(params: SamplingParams | Seq[SamplingParams] | None, count: int) -> list[SamplingParams]:
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * count
    if not isinstance(params, Seq) or any(not isinstance(p, SamplingParams) for p in params):
        raise RequestError(f"params={params!r}: pass SamplingParams(…), or a list of them, one a prompt")
    if len(params) != count:
        raise RequestError(f"{len(params)} SamplingParams for {count} prompts: pass one, or one a prompt")
    return list(params)
