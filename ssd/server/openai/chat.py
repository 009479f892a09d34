"""`/v1/chat/completions`."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from typing import Any, Final, Protocol

from fastapi import APIRouter, Request
from fastapi.responses import Response

from ssd.core import Delta, RequestOutput, Sample, SamplingParams
from ssd.errors import RequestError
from ssd.llm import LLM, Prompt
from ssd.server.answers import STREAMED, chat_logprobs, check_common, event_stream, usage, worth_sending
from ssd.server.chat_messages import template_message
from ssd.server.effort import effort_options
from ssd.server.errors import ApiError, AsciiJSON, api_error, invalid, renaming
from ssd.server.generation import Generation, ServerState, start
from ssd.server.harmony_answers import in_harmony
from ssd.server.http.bodies import JsonRoute, on_thread
from ssd.server.ignored import current
from ssd.server.protocol import ChatRequest
from ssd.server.tool_prompt import as_text, with_tools
from ssd.server.tool_use import ToolUse, message_format, read_tools
from ssd.text.events import Event, message_delta, message_fields
from ssd.text.harmony import is_harmony
from ssd.text.message_format import PROMPT_END, MessageFormat, parse, shown_tokens, stop_tokens
from ssd.text.tool_formats import PARSERS, FencedParser, has_tools, parser_for

router = APIRouter(route_class=JsonRoute)
_END: Final = "\x00end of the message\x00"  # marks where a message to be continued ends in the rendered chat


@router.post("/v1/chat/completions", responses=STREAMED)
async def chat_completions(body: ChatRequest, request: Request) -> Response:
    state = ServerState.of(request)
    generation, form = await start_chat(state, body, request)
    head = {
        "id": f"chatcmpl-{request.state.request_id}",
        "created": int(time.time()),
        "model": state.options.served_model_name,
        "system_fingerprint": state.fingerprint,
    }
    if body.stream:
        return event_stream(_chunks(head, body, generation, form, current().answer))
    output = await generation.finish()
    events = [parse(sample.text, form, cut=sample.finish_reason != "stop") for sample in output.samples]
    messages = [message_fields(each) for each in events]
    choices = [
        _choice(body, sample, {"message": {"role": "assistant", **fields}}, called="tool_calls" in fields)
        for sample, fields in zip(output.samples, messages, strict=True)
    ]
    answer = {**head, "object": "chat.completion", "choices": choices, "usage": usage([output]), **current().answer}
    return AsciiJSON(answer | ({"prompt_token_ids": generation.prompt_token_ids} if body.return_token_ids else {}))


async def start_chat(state: ServerState, body: ChatRequest, request: Request) -> tuple[Generation, MessageFormat]:
    """Submits a chat; also returns how its messages are parsed. Other endpoints translate their requests to chats."""
    check_common(request, body)
    with renaming(body.field_names):
        given, params, prompt, options, template, tools = await on_thread(request.state.large, _read_all, state, body)
        stream = bool(body.stream)
        try:
            [generation] = await start(state, [prompt], params, request=request, stream=stream, chat_options=options)
        except RequestError:
            if tools is not None and params.structured is not None:
                await on_thread(request.state.large, tools.check_schemas, given, state.llm.driver.limits)
            raise
    prompt_end = state.llm.decode(generation.prompt_token_ids[-PROMPT_END:], skip_special_tokens=False)
    return generation, message_format(template, prompt_end, tools)


async def prompt_tokens(state: ServerState, body: ChatRequest, request: Request) -> list[int]:
    """The tokens of a chat's prompt."""
    check_common(request, body)
    prompt, options, _, _ = await on_thread(request.state.large, _read, state, body, bounded=False)
    return await on_thread(request.state.large, state.llm.encode, prompt, options)


class MessageWriter(Protocol):
    """Turns the events of one message into those of another API. Each method returns what a stream sends then.

    `pause`: what it sends while there is nothing to send.
    """

    @property
    def answer(self) -> dict[str, Any]:
        """The whole answer, after `end`."""

    def begin(self) -> list[dict[str, Any]]: ...
    def pause(self) -> list[dict[str, Any]]: ...
    def add(self, event: Event) -> list[dict[str, Any]]: ...
    def end(self, output: RequestOutput) -> list[dict[str, Any]]: ...
    def fail(self, error: ApiError) -> list[dict[str, Any]]: ...


async def respond(
    generation: Generation,
    form: MessageFormat,
    writer: MessageWriter,
    stream: Callable[[AsyncIterator[dict[str, Any]]], Response] | None,
) -> Response:
    """The answer to a chat with one sample, in the shape of another API. `stream`: how its events are sent."""
    if stream is not None:
        return stream(_written(generation, form, writer))
    output = await generation.finish()
    for event in parse(output.text, form, cut=output.finish_reason != "stop"):
        writer.add(event)
    writer.end(output)
    return AsciiJSON(writer.answer)


async def _written(generation: Generation, form: MessageFormat, writer: MessageWriter) -> AsyncIterator[dict[str, Any]]:
    for sent in writer.begin():
        yield sent
    try:
        async for _ in generation.pauses():
            for sent in writer.pause():
                yield sent
        async for event in _parsed(generation, form):
            for sent in writer.add(event):
                yield sent
    except Exception as error:
        for sent in writer.fail(api_error(error)):
            yield sent
        return
    for sent in writer.end(generation.output):
        yield sent


async def _parsed(generation: Generation, form: MessageFormat) -> AsyncIterator[Event]:
    parser = form.parser()
    async for delta in generation.deltas():
        for event in parser.feed(delta.text):
            yield event
    for event in parser.finish(cut=generation.output.finish_reason != "stop"):
        yield event


def _params(body: ChatRequest, state: ServerState) -> SamplingParams:
    given = {limit for limit in (body.max_tokens, body.max_completion_tokens) if limit is not None}
    if len(given) > 1:
        raise invalid("max_completion_tokens", "differs from max_tokens")
    if body.top_logprobs and not body.logprobs:
        raise invalid("top_logprobs", "only with logprobs=true")
    logprobs = (body.top_logprobs or 0) if body.logprobs else None
    max_tokens = next(iter(given), state.llm.driver.limits.max_model_len)
    opened = state.options.additional_properties
    return body.sampling_params(state.sampling_defaults, max_tokens, logprobs, additional_properties=opened)


def _read_all(
    state: ServerState, body: ChatRequest
) -> tuple[SamplingParams, SamplingParams, Prompt, dict[str, Any], str, ToolUse | None]:
    """The sampling parameters, those with the tools' grammar, and what `_read` returns."""
    given = _params(body, state)
    prompt, options, template, tools = _read(state, body, bounded=True)
    params = given if tools is None else tools.constrained(given)
    if is_harmony(template):
        params = in_harmony(params, tools, continued=bool(body.continue_final_message))
    tokenizer = state.llm.tokenizer
    stops = () if params.ignore_eos else stop_tokens(template, tokenizer)
    params = replace(
        params,
        shown_token_ids=shown_tokens(template, None if tools is None else tools.parser, tokenizer),
        stop_token_ids=(*params.stop_token_ids, *stops),
    )
    return given, params, prompt, options, template, tools


def _read(
    state: ServerState, body: ChatRequest, *, bounded: bool
) -> tuple[Prompt, dict[str, Any], str, ToolUse | None]:
    """The prompt, its chat options, the chat template and the tools. `bounded`: as in `LLM.encode`."""
    named, tokenizer = state.options.tool_parser, state.llm.tokenizer
    template = tokenizer.template_source(body.chat_template, body.tools)
    messages = [template_message(f"messages[{i}]", message, template) for i, message in enumerate(body.messages)]
    tools = read_tools(body, template, named, tokenizer, state.options.additional_properties)
    described = tools.described if tools is not None else []
    options: dict[str, Any] = {}
    if has_tools(template):
        options = {"tools": described} if described else {}
    elif (own := parser_for(template)) is not None and PARSERS.get(named, own) is own:
        messages = with_tools(messages, described, own)
    else:
        messages = as_text(messages, described, PARSERS.get(named, FencedParser))
    prompt, more = _prompt(state.llm, body, messages, options, bounded)
    return prompt, more, template, tools


def _prompt(
    llm: LLM, body: ChatRequest, messages: list[dict[str, Any]], options: dict[str, Any], bounded: bool
) -> tuple[Prompt, dict[str, Any]]:
    """The prompt and its chat options."""
    if not messages:
        raise invalid("messages", "the list is empty")
    effort = effort_options("reasoning_effort", body.reasoning_effort)
    options = {**effort, **(body.chat_template_kwargs or {}), **options}
    if "enable_thinking" in options:  # what templates of DeepSeek and Kimi call it
        options = {"thinking": options["enable_thinking"], **options}
    for name in ("chat_template", "add_generation_prompt"):
        if (value := getattr(body, name)) is not None:
            options[name] = value
    if not body.continue_final_message:
        return messages, options
    if body.add_generation_prompt:
        raise invalid("continue_final_message", "contradicts add_generation_prompt")
    return _continued(llm, messages, options, bounded), {}


def _continued(llm: LLM, messages: list[dict[str, Any]], options: dict[str, Any], bounded: bool) -> list[int]:
    """The rendered chat up to the end of its last message."""
    *before, last = messages
    if not isinstance(last.get("content"), str):
        raise RequestError("continue_final_message: the last message has no text")
    marked = [*before, {**last, "content": last["content"] + _END}]
    text, found, _ = llm.render_chat(marked, {**options, "add_generation_prompt": False}).rpartition(_END)
    if not found:
        raise RequestError("continue_final_message: the model's chat template leaves out the last message")
    return llm.encode_text(text, add_special_tokens=False, bounded=bounded)


def _choice(body: ChatRequest, sample: Sample | Delta, message: dict[str, Any], *, called: bool) -> dict[str, Any]:
    """`message`: its field in the choice; `called`: the sample has called a tool so far."""
    choice = {
        "index": sample.index,
        **message,
        "logprobs": chat_logprobs(sample.logprobs or ()) if body.logprobs else None,
        "finish_reason": "tool_calls" if called and sample.finish_reason == "stop" else sample.finish_reason,
    }
    return choice | ({"token_ids": sample.token_ids} if body.return_token_ids else {})


async def _chunks(
    head: dict[str, Any], body: ChatRequest, generation: Generation, form: MessageFormat, last: dict[str, Any]
) -> AsyncIterator[dict[str, Any]]:
    """`last`: what the last chunk has beside the others' fields."""
    head = {**head, "object": "chat.completion.chunk"}
    more = {"usage": None} if body.include_usage else {}
    role = {"delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}
    parsers, called = [form.parser() for _ in range(body.n or 1)], set[int]()
    num_open = len(parsers)
    for index in range(len(parsers)):
        yield {**head, "choices": [{"index": index, **role}], **more}
    async for delta in generation.deltas():
        if worth_sending(body, delta):
            parser = parsers[delta.index]
            ended, cut = delta.finish_reason is not None, delta.finish_reason != "stop"
            fields = message_delta(parser.feed(delta.text) + (parser.finish(cut) if ended else []))
            called |= {delta.index} if "tool_calls" in fields else set()
            num_open -= ended
            choice = _choice(body, delta, {"delta": fields}, called=delta.index in called)
            yield {**head, "choices": [choice], **(more or ({} if num_open else last))}
    if body.include_usage:
        yield {**head, "choices": [], "usage": usage([generation.output]), **last}
