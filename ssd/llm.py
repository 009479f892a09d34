"""LLM: the library's main class."""

from __future__ import annotations

import asyncio
import gc
import itertools
import logging
import os
import time
from collections.abc import AsyncIterator, Iterator, Mapping
from collections.abc import Sequence as Seq
from contextlib import aclosing
from types import TracebackType
from typing import Any, Literal, cast

import torch

from ssd.assembly.build import build_engine
from ssd.assembly.device import make_current
from ssd.assembly.open import open_checkpoint
from ssd.assembly.torchrun import join
from ssd.config import EngineConfig
from ssd.core import BINARY, Delta, RequestOutput, SamplingParams
from ssd.drafting.controller import DepthController
from ssd.engine.driver import Driver
from ssd.engine.engine import Engine
from ssd.engine.outputs import refused
from ssd.engine.submission import AsyncSubmission, Submission
from ssd.engine.validation import CheckedRequest
from ssd.errors import ALL_FORBIDDEN, STRUCTURED_FAILED, EngineClosed, ParametersFailed, RequestError, RequestFailed
from ssd.execution.threads import ThreadController
from ssd.models.checkpoint import rounding_note
from ssd.options import build, is_int, plain
from ssd.text.tokenizer import Tokenizer, check_messages

log = logging.getLogger("ssd")
loading = logging.getLogger("ssd.loading")

_MEASURING_SECONDS, _MEASURING_TOKENS = 3.0, 256  # at the start with mode="auto", at most
_LONG_TEXT = 1 << 16  # characters; shorter ones are tokenized in milliseconds

Message = dict[str, Any]
Prompt = str | Seq[int] | Seq[Message]  # text, token ids, or chat messages


class LLM:
    """A loaded model with its engine.

    `model` is a bundled model, a Hugging Face directory, a `.gguf` file or a hub id (`org/name`, or `org/name:Q4_K_M`
    for one of its GGUF files), or `graft:BASE@SHAPE`: one of them in the shape of a published model. Every other
    keyword is a field of `ssd.config.EngineConfig` (device, dtype, max_model_len, max_num_seqs, …).
    `LLM(EngineConfig(…))` is the same, and checked by editors and type checkers. `config`: the options, with what was
    chosen for those left out. `path`: the model's directory or file. `note`: a caveat to print with every measurement
    of the model, or "".

    In processes of torchrun other than rank 0 it does not return: they compute for rank 0, and exit when it does.
    """

    def __init__(self, model: str | os.PathLike[str] | EngineConfig, **options: Any) -> None:
        given = vars(model) if isinstance(model, EngineConfig) else {"model": model}
        self.config = build(EngineConfig, {**given, **options})
        join(self.config.tensor_parallel_size)
        checkpoint, before = open_checkpoint(self.config.model), torch.get_num_threads()
        controller = ThreadController()  # measures the load of the machine while the model is loaded
        self.path = checkpoint.path
        self.note = "; ".join(filter(None, [checkpoint.note, rounding_note(self.config.quantization)]))
        engine, self.config = build_engine(self.config, checkpoint)
        threads = torch.get_num_threads()  # fewer than before if the model is split over processes
        self._driver: Driver | None = Driver(engine, controller if self.config.device == "cpu" else None)
        self.driver.call(lambda _: _set_num_threads(threads))
        self.driver.call(lambda _: make_current(torch.device(self.config.device)))
        torch.set_num_threads(before)
        self._refusals = itertools.count()
        drafter = engine.round.drafter
        auto = self.config.speculation.mode == "auto" and engine.max_model_len > 1
        if auto and isinstance(drafter, DepthController) and not drafter.timed:
            measure_modes(self.driver, drafter)

    @property
    def driver(self) -> Driver:
        """The engine's thread: for deltas, asyncio and calls between two rounds."""
        if self._driver is None:
            raise EngineClosed("this LLM was closed: create a new one")
        return self._driver

    @property
    def engine(self) -> Engine:
        """For reading (metrics, tokenizer); everything else goes through `driver.call`."""
        return self.driver.engine

    @property
    def tokenizer(self) -> Tokenizer:
        """The checkpoint's tokenizer; RequestError if it has none."""
        if self.engine.tokenizer is None:
            raise RequestError("this checkpoint has no tokenizer: use token ids in place of text")
        return self.engine.tokenizer

    def generate(
        self,
        prompts: Prompt | Seq[Prompt],
        params: SamplingParams | Seq[SamplingParams] | None = None,
        chat_options: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Generates for one prompt or a list of them; outputs are in the order of the prompts.

        `params`: one for all prompts, or one per prompt. In a list, a prompt that cannot be served does not affect the
        others: its output has `error` set and the finish reason "abort". A sample that fails ends with the finish
        reason "error", and the output's `error` says why; the other samples go on. A single prompt that cannot be
        served raises RequestError, and RequestFailed if all of its samples fail. Thread-safe.
        `chat_options` are variables for the chat template (`enable_thinking`, `tools`, `date_string`, …), and the name
        of one under `chat_template` (or, with the option `trust_request_chat_template`, a template itself).
        """
        single, batch = _listed(prompts)
        outputs: dict[int, RequestOutput] = {}
        texts: dict[int, str | None] = {}
        asked: dict[int, CheckedRequest] = {}  # not submitted yet
        submissions: dict[int, Submission] = {}

        def submit(asked: dict[int, CheckedRequest]) -> None:
            group = next((submission.request_id for submission in submissions.values()), "")
            new = self.driver.submit_many(list(asked.values()), group=group)
            submissions.update(zip(asked, new, strict=True))

        try:
            num_tokens = 0
            for i, (prompt, p) in enumerate(zip(batch, _per_prompt(params, len(batch)), strict=True)):
                read = self._check(prompt, p, chat_options, single)
                if isinstance(read, RequestOutput):
                    outputs[i] = read
                    continue
                texts[i], asked[i] = read
                num_tokens += len(asked[i].prompt_token_ids)
                if num_tokens >= self.engine.scheduler.max_num_batched_tokens:  # computed while the others are read
                    submit(asked)
                    asked, num_tokens = {}, 0
                    time.sleep(0)  # gives the engine's thread the interpreter
            submit(asked)
            outputs |= {i: submission.result() for i, submission in submissions.items()}
        finally:
            for submission in submissions.values():
                submission.abort()  # those that are left after Ctrl-C
        for i, text in texts.items():
            outputs[i].prompt = text
        if single:
            check_served(outputs[0])
        return [outputs[i] for i in range(len(batch))]

    async def agenerate(
        self,
        prompts: Prompt | Seq[Prompt],
        params: SamplingParams | Seq[SamplingParams] | None = None,
        chat_options: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """`generate` for asyncio. Cancelling it (a task, a timeout) aborts its requests."""
        single, batch = _listed(prompts)
        outputs: dict[int, RequestOutput] = {}
        submissions: dict[int, tuple[str | None, AsyncSubmission]] = {}
        group = ""
        try:
            for i, (prompt, p) in enumerate(zip(batch, _per_prompt(params, len(batch)), strict=True)):
                read = await asyncio.to_thread(self._check, prompt, p, chat_options, single)
                if isinstance(read, RequestOutput):
                    outputs[i] = read
                    continue
                text, checked = read
                submissions[i] = text, self.driver.submit_checked(checked, group=group)
                group = group or submissions[i][1].request_id
            for i, (text, submission) in submissions.items():
                outputs[i] = await submission.result()
                outputs[i].prompt = text
        finally:
            for _, submission in submissions.values():
                submission.abort()
        if single:
            check_served(outputs[0])
        return [outputs[i] for i in range(len(batch))]

    def chat(
        self,
        messages: Seq[Message] | Seq[Seq[Message]],
        params: SamplingParams | Seq[SamplingParams] | None = None,
        chat_options: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Answers one conversation or a list of them, through the model's chat template; otherwise as `generate`."""
        for conversation in [messages] if _is_single(messages) else messages:
            check_messages(conversation)
        return self.generate(messages, params, chat_options)

    def embed(self, prompts: Prompt | Seq[Prompt], pooling: Literal["mean", "last"] = "mean") -> list[list[float]]:
        """Embeddings of one prompt or a list of them: the pooled hidden states after the last layer, of length 1.

        `pooling`: the mean over all tokens of a prompt, or the state of its last token, which embedding models with
        this architecture are trained for. RequestError if one of the prompts cannot be served.
        """
        outputs = self.generate(prompts, SamplingParams(max_new_tokens=1, pooling=pooling))
        return [embedding_of(output) for output in outputs]

    def stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        chat_options: Mapping[str, Any] | None = None,
    ) -> TextStream:
        """Iterates over the text as it is generated. Dropping the stream aborts the request."""
        [params] = _per_prompt(params, 1)
        _check_one_sample(params, "stream_deltas() or generate()")
        text, tokens = self._read(prompt, chat_options)
        return TextStream(self.driver.submit(tokens, params, stream=True), text)

    def stream_deltas(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        chat_options: Mapping[str, Any] | None = None,
    ) -> Submission:
        """Iterates over the deltas of all `n` samples: new tokens, text, log-probabilities, finish reason."""
        return self.driver.submit(self.encode(prompt, chat_options), *_per_prompt(params, 1), stream=True)

    async def astream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        chat_options: Mapping[str, Any] | None = None,
    ) -> AsyncIterator[str]:
        """`stream` for asyncio: `async for piece in llm.astream(prompt)`. Cancelling the task aborts the request."""
        [params] = _per_prompt(params, 1)
        _check_one_sample(params, "astream_deltas() or agenerate()")
        async with aclosing(self.astream_deltas(prompt, params, chat_options)) as deltas:  # type: ignore[type-var]
            async for delta in deltas:
                if delta.text:
                    yield delta.text
        if delta.output is not None:
            check_served(delta.output)

    async def astream_deltas(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        chat_options: Mapping[str, Any] | None = None,
    ) -> AsyncIterator[Delta]:
        """`stream_deltas` for asyncio; the last delta has the complete `output`. Cancelling aborts the request."""
        [params] = _per_prompt(params, 1)
        read = await asyncio.to_thread(self._check, prompt, params, chat_options, True)
        text, checked = cast("tuple[str | None, CheckedRequest]", read)
        submission = self.driver.submit_checked(checked, stream=True)
        try:
            async for delta in submission:
                if delta.output is not None:
                    delta.output.prompt = text
                yield delta
        finally:
            submission.abort()

    def close(self) -> None:
        """Frees the model, the KV and everything else. Safe to call twice."""
        if self._driver is not None:
            self._driver.close()
            self._driver = None
            gc.collect()
            if torch.cuda.is_available():
                torch.cuda.empty_cache()

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def render_chat(self, messages: Seq[Message], chat_options: Mapping[str, Any] | None = None) -> str:
        """The prompt text of a chat, by the model's template; encode it with `add_special_tokens=False`."""
        return self.tokenizer.apply_chat_template(messages, **self._checked_options(chat_options or {}))

    def encode(
        self, prompt: Prompt, chat_options: Mapping[str, Any] | None = None, *, bounded: bool = False
    ) -> list[int]:
        """Token ids of a prompt; a chat is rendered by the model's template. `bounded`: as in `encode_text`."""
        if bounded and isinstance(prompt, list) and prompt and isinstance(prompt[0], int):
            self.driver.check_length(len(prompt))
        return self._read(prompt, chat_options, bounded)[1]

    def encode_text(self, text: str, *, add_special_tokens: bool = True, bounded: bool = False) -> list[int]:
        """Token ids of a text.

        `bounded`: raises PromptTooLong if its length shows that it exceeds the model's context; megabytes would take
        seconds to tokenize.
        """
        if bounded and len(text) > _LONG_TEXT:
            self.driver.check_length(self.tokenizer.least_tokens(text), more=True)
        return self.tokenizer.encode(text, add_special_tokens)

    def decode(self, token_ids: Seq[int], skip_special_tokens: bool = True) -> str:
        """The text of token ids."""
        if isinstance(token_ids, BINARY):
            raise RequestError(f"token_ids={token_ids!r}: must be a list of token ids")
        return self.tokenizer.decode(token_ids, skip_special_tokens)

    def _read(
        self, prompt: Prompt, chat_options: Mapping[str, Any] | None, bounded: bool = False
    ) -> tuple[str | None, list[int]]:
        """Text (None if it was given as ids) and token ids of a prompt."""
        kind = _kind(prompt)
        if kind == "ids":
            return None, list(map(int, cast("Seq[int]", prompt)))
        if kind == "text":
            return cast(str, prompt), self.encode_text(cast(str, prompt), bounded=bounded)
        text = self.render_chat(cast("Seq[Message]", prompt), chat_options)
        return text, self.encode_text(text, add_special_tokens=False, bounded=bounded)

    def _check(
        self, prompt: Prompt, params: SamplingParams, chat_options: Mapping[str, Any] | None, single: bool
    ) -> tuple[str | None, CheckedRequest] | RequestOutput:
        """The text and tokens of a prompt that can be served; otherwise RequestError if `single`, or an output."""
        text: str | None = None
        tokens: list[int] = []
        try:
            text, tokens = self._read(prompt, chat_options)
            return text, self.driver.check(tokens, params)
        except RequestError as error:
            if single:
                raise
            log.warning("a request was refused: %s", error)
            output = refused(f"refused-{next(self._refusals)}", tokens, params, str(error))
            output.prompt = text
            return output

    def _checked_options(self, options: Mapping[str, Any]) -> dict[str, Any]:
        """Variables for the chat template; a template of the request's own is a program, and needs permission."""
        if not isinstance(options, Mapping) or not all(isinstance(name, str) for name in options):
            raise RequestError(f"chat_options={options!r:.60}: expected a dict with names as keys")
        if reserved := {"self", "messages"} & set(options):
            raise RequestError(f"chat_options: {reserved.pop()!r} is not an option of a chat template")
        template = options.get("chat_template")
        named = self.engine.tokenizer is not None and template in self.engine.tokenizer.chat_template_names
        if template is not None and not named and not self.config.trust_request_chat_template:
            raise RequestError(
                "chat_options: chat_template is none of the checkpoint's templates; to run templates of requests, "
                "create the LLM with trust_request_chat_template=True"
            )
        return dict(options)


def measure_modes(driver: Driver, controller: DepthController) -> None:
    """Decodes any text until the times of all modes are known, so that requests need not try them.

    On a GPU in batches of 1, 2, 4, … sequences; on a CPU, where that would take long, with one.
    """
    loading.info("measuring the speed of the modes")
    end, limits = time.monotonic() + _MEASURING_SECONDS, driver.limits
    most = driver.call(lambda engine: engine.scheduler.max_num_seqs if engine.round.run_ahead else 1)
    params = SamplingParams(max_new_tokens=min(_MEASURING_TOKENS, limits.max_model_len - 1), ignore_eos=True)
    batch = 1
    while batch <= most and time.monotonic() < end:
        submissions = driver.submit_many([([i % limits.vocab_size], params) for i in range(batch)])
        _await_times(driver, controller, batch, end)
        for submission in submissions:
            driver.abort(submission.request_id)
        for submission in submissions:
            submission.result()
        batch *= 2
    driver.call(lambda engine: engine.use(controller, engine.scheduler.max_num_seqs))
    driver.call(lambda _: controller.forget_text())


def _await_times(driver: Driver, controller: DepthController, batch: int, end: float) -> None:
    """Waits until all modes were measured with the batch that runs, until `end` at most."""
    measured = driver.call(lambda _: controller.measure(batch))
    while driver.call(lambda engine: engine.has_work) and not measured() and time.monotonic() < end:
        pass


def _set_num_threads(count: int) -> None:
    """Sets the calling thread's number of threads, for torch's operators and for our CPU kernels."""
    torch.get_num_threads()  # a thread's first call, of whatever needs the number, sets it to that of the process
    torch.set_num_threads(count)


class TextStream(Iterator[str]):
    """The text of one request in pieces; `output` is the complete output, once it has ended."""

    def __init__(self, submission: Submission, prompt: str | None) -> None:
        self._submission = submission
        self._prompt = prompt
        self._closed = False

    @property
    def output(self) -> RequestOutput | None:
        return self._submission.output

    def __next__(self) -> str:
        if self._closed:
            raise StopIteration
        for delta in self._submission:
            if delta.text:
                return delta.text
        self._closed = True
        output = self._submission.result()
        output.prompt = self._prompt
        check_served(output)
        raise StopIteration

    def close(self) -> None:
        """Aborts the request if it is still running; the stream then ends."""
        self._closed = True
        self._submission.abort()


def check_served(output: RequestOutput) -> None:
    """Raises RequestFailed if all samples of a request failed: ParametersFailed if by its own parameters."""
    if all(sample.finish_reason == "error" for sample in output.samples):
        by_parameters = (output.error or "").startswith((ALL_FORBIDDEN, STRUCTURED_FAILED))
        raise (ParametersFailed if by_parameters else RequestFailed)(output.error)


def embedding_of(output: RequestOutput) -> list[float]:
    """The embedding of a request that asked for one; RequestError or RequestFailed if there is none."""
    check_served(output)
    if output.embedding is None:
        raise RequestError(output.error)
    return output.embedding


def _kind(prompt: object) -> Literal["text", "ids", "chat"]:
    """The type of a prompt; RequestError for anything else."""
    if isinstance(prompt, str):
        return "text"
    if isinstance(prompt, BINARY):
        raise RequestError(
            f"a prompt of type {type(prompt).__name__} cannot be read: pass text, bytes(prompt).decode(), or token "
            "ids, list(prompt)"
        )
    if isinstance(prompt, list) and set(map(type, prompt)) == {int}:  # the usual case, which may be long
        return "ids"
    items = list(map(plain, prompt)) if isinstance(prompt, Seq) else None
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
    if isinstance(prompts, (str, *BINARY)):
        return True
    if not isinstance(prompts, Seq):
        raise RequestError(f"prompts of type {type(prompts).__name__} cannot be read: pass one or a list of them")
    return len(prompts) > 0 and isinstance(plain(prompts[0]), (int, Mapping))


def _listed(prompts: Prompt | Seq[Prompt]) -> tuple[bool, list[Prompt]]:
    """Whether it is a single prompt, and the list of all."""
    single = _is_single(prompts)
    return single, [cast(Prompt, prompts)] if single else list(cast("Seq[Prompt]", prompts))


def _check_one_sample(params: SamplingParams, others: str) -> None:
    if params.n != 1:
        raise RequestError(f"n={params.n}: a text is one sample; use {others} for several")


def _per_prompt(params: SamplingParams | Seq[SamplingParams] | None, count: int) -> list[SamplingParams]:
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * count
    if not isinstance(params, Seq) or any(not isinstance(p, SamplingParams) for p in params):
        raise RequestError(f"params={params!r}: pass SamplingParams(…), or a list of them, one a prompt")
    if len(params) != count:
        raise RequestError(f"{len(params)} SamplingParams for {count} prompts: pass one, or one a prompt")
    return list(params)
