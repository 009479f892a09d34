"""Requests of the OpenAI-compatible endpoints. What becomes of fields that are not listed here is in `fields.py`.

Types and choices are checked here, ranges by `SamplingParams`; `GenerationRequest.sampling_params` is the one way from
a request to those.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Annotated, Any, ClassVar, Final, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    NonNegativeInt,
    ValidatorFunctionWrapHandler,
    WrapValidator,
    model_validator,
)
from pydantic.annotated_handlers import GetJsonSchemaHandler
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema

from ssd.constraints.structured import StructuredOutput
from ssd.core import SamplingParams
from ssd.server import parameters
from ssd.server.errors import unsupported
from ssd.server.fields import EMPTY, NONE, Published, Table, known_fields

MAX_TOP_LOGPROBS: Final = 20
MAX_STOPS: Final = 1000
_PIECE: Final = 1 << 14  # items
_STRUCTURED: Final = ("json", "json_object", "regex", "choice", "grammar", "additional_properties")
_FORMATS: Final = ("text", "json_schema", "json_object", "regex", "choice", "grammar")
SCHEMA: Final = ("name", "description", "schema", "strict")  # fields of a `response_format` of the type json_schema
TopLogprobs = Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)]


def one_invalid(*types: type) -> BeforeValidator:
    """`fail_fast` for a dict: drops all values of other types but the first."""

    def checked(value: Any) -> Any:
        items = value.items() if isinstance(value, dict) else ()
        return next(({key: item} for key, item in items if type(item) not in types), value)

    return BeforeValidator(checked)


def unless(is_valid: Callable[[Any], bool]) -> WrapValidator:
    """Leaves out pydantic's validation, which copies item by item, of values that are known to be valid."""

    def checked(value: Any, validate: ValidatorFunctionWrapHandler) -> Any:
        return value if is_valid(value) else validate(value)

    return WrapValidator(checked)


def _is_ids(value: Any) -> bool:
    if type(value) is not list or not value:
        return False
    return all(set(map(type, piece)) == {int} and min(piece) >= 0 for piece in _pieces(value))


def _is_texts(value: list[Any]) -> bool:
    return all(set(map(type, piece)) == {str} for piece in _pieces(value))


def _pieces(value: list[Any]) -> Iterator[list[Any]]:
    """Parts of a list that C looks at in less than a millisecond: other threads can run in between."""
    return (value[i : i + _PIECE] for i in range(0, len(value), _PIECE))


def _is_prompts(value: Any) -> bool:
    if type(value) is not list or not value:
        return False
    return all(map(_is_ids, value)) if type(value[0]) is list else _is_ids(value) or _is_texts(value)


# A body may have a million invalid items. pydantic would report all of them, which takes gigabytes: it ends at one.
Json = dict[str, Any]
Jsons = Annotated[list[Json], Field(fail_fast=True)]
Texts = Annotated[list[str], Field(fail_fast=True)]
Stops = Annotated[Texts, Field(max_length=MAX_STOPS)]
Ids = Annotated[list[NonNegativeInt], Field(fail_fast=True), unless(_is_ids)]
TokenIds = Annotated[list[NonNegativeInt], Field(fail_fast=True, min_length=1), unless(_is_ids)]
Prompts = Annotated[
    str
    | TokenIds
    | Annotated[Texts, Field(min_length=1)]
    | Annotated[list[TokenIds], Field(fail_fast=True, min_length=1)],
    unless(_is_prompts),
]


class Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    @model_validator(mode="before")
    @classmethod
    def _known(cls, fields: Any) -> Any:
        """Drops all unknown fields but the first, for the same reason."""
        unknown = [name for name in fields if name not in cls.model_fields] if isinstance(fields, dict) else []
        dropped = set(unknown[1:])
        return {name: value for name, value in fields.items() if name not in dropped} if dropped else fields


class PublishedRequest(Strict):
    """A request, or a part of one, of a published API: what is null or empty counts as left out."""

    published: ClassVar[Table] = NONE
    path: ClassVar[str] = ""  # of the part in the request
    left_out: ClassVar[tuple[object, ...]] = EMPTY  # values that count as left out

    @model_validator(mode="before")
    @classmethod
    def _known(cls, fields: Any) -> Any:
        """Drops what is left out or ignored, and gives fields the values that they have under other names."""
        if not isinstance(fields, dict):
            return fields
        known = known_fields(cls.path, fields, cls.model_fields, cls.published)
        required = {name for name, field in cls.model_fields.items() if field.is_required()}
        return {name: value for name, value in known.items() if name in required or value not in cls.left_out}

    @classmethod
    def __get_pydantic_json_schema__(cls, core: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        """With the parameters of the published API; others are allowed, too."""
        schema = handler.resolve_ref_schema(handler(core))
        schema.pop("additionalProperties", None)
        for name, parameter in cls.published.items():
            if isinstance(parameter, Published):
                any_value = parameter.values is None or parameter.ignored
                values = {} if any_value else {"enum": list(parameter.values or ())}
                schema["properties"].setdefault(name, {"description": "changes nothing", **values})
        return schema


class StreamOptions(PublishedRequest):
    published = parameters.STREAM_OPTIONS
    path = "stream_options"
    include_usage: bool | None = None  # a last chunk with the usage


class SamplingRequest(PublishedRequest):
    """What all endpoints that generate share. None: the default, as if the field were left out."""

    model: str
    stream: bool | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: Annotated[int, Field(ge=-1)] | None = None  # 0 and -1: all tokens
    min_p: float | None = None
    seed: int | None = None
    stop: str | Stops | None = None
    stop_token_ids: Ids | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    logit_bias: Annotated[dict[str, float], one_invalid(int, float)] | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    speculate: bool | None = None  # False: no drafts for this request
    priority: int | None = None  # lower is served earlier
    structured_outputs: Json | None = None  # json, json_object, regex, choice or grammar
    user: str | None = None  # for the access log


class GenerationRequest(SamplingRequest):
    """What chats and completions share."""

    n: int | None = None
    stream_options: StreamOptions | None = None
    max_tokens: int | None = None
    return_token_ids: bool | None = None  # the token ids beside the text
    response_format: Json | None = None

    def sampling_params(
        self, defaults: Json, max_tokens: int, logprobs: int | None, additional_properties: bool = False
    ) -> SamplingParams:
        """`defaults`, `additional_properties`: the server's; `max_tokens`: the default of the endpoint; `logprobs`: how
        many per token."""
        same = SamplingParams.__dataclass_fields__.keys() & GenerationRequest.model_fields
        given = {name: value for name in same if (value := getattr(self, name)) is not None}
        given = {**defaults, "max_tokens": max_tokens, **given}
        given["top_k"] = max(0, given.get("top_k", 0))
        structured = self._structured()
        if structured is not None and additional_properties:
            structured = replace(structured, additional_properties=True)
        return SamplingParams(**given, logprobs=logprobs, structured=structured)

    @property
    def field_names(self) -> dict[str, str]:
        """The client's names of parameters that the library calls otherwise."""
        if self.structured_outputs is not None:
            return {"structured": "structured_outputs", "structured.json_schema": "structured_outputs.json"}
        nested = "json_schema" in (self.response_format or {})
        schema = "response_format.json_schema.schema" if nested else "response_format.schema"
        return {"structured": "response_format", "structured.json_schema": schema}

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    def _structured(self) -> StructuredOutput | None:
        given = self.structured_outputs
        if given is None:
            return StructuredOutput.of(_response_format(self.response_format))
        if self.response_format is not None:
            raise unsupported("structured_outputs", "cannot be combined with response_format: give one of them")
        given = known_fields("structured_outputs", given, _STRUCTURED, parameters.STRUCTURED_OUTPUTS)
        kinds = {kind: text for kind, text in given.items() if text is not None}
        return StructuredOutput.of({"json_schema" if kind == "json" else kind: text for kind, text in kinds.items()})


def _response_format(form: Json | None) -> Json | None:
    """What `StructuredOutput.of` takes, which has no other fields."""
    if form is None or form.get("type") not in _FORMATS:
        return form
    if form["type"] != "json_schema":
        return known_fields("response_format", form, ("type", form["type"]))
    if "json_schema" not in form:
        return known_fields("response_format", form, ("type", *SCHEMA))
    form = known_fields("response_format", form, ("type", "json_schema"))
    if isinstance(form["json_schema"], dict):
        form["json_schema"] = known_fields("response_format.json_schema", form["json_schema"], SCHEMA)
    return form


def schema_format(path: str, form: Json) -> Json:
    """The `response_format` of a chat, from that of an API that has the schema's fields beside the type."""
    known = known_fields(path, form, ("type", *SCHEMA))
    return {"type": "json_schema", "json_schema": {name: value for name, value in known.items() if name != "type"}}


class ChatRequest(GenerationRequest):
    published = parameters.CHAT
    messages: Jsons
    max_completion_tokens: int | None = None  # another name of max_tokens
    logprobs: bool | None = None
    top_logprobs: TopLogprobs | None = None
    chat_template: str | None = None  # the name of one of the checkpoint's
    chat_template_kwargs: Json | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    tools: Jsons | None = None
    tool_choice: str | Json | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: str | None = None  # a variable of the chat template

    @property
    def field_names(self) -> dict[str, str]:
        names = {**super().field_names, "prompt": "messages"}
        if self.max_tokens is None:
            names["max_tokens"] = "max_completion_tokens"
        if self.tools:
            names["structured.grammar"] = "tools"
        if self.response_format is None and self.structured_outputs is None:
            names["structured"] = "tools"  # the grammar of forced and strict calls
        return names


class CompletionRequest(GenerationRequest):
    published = parameters.COMPLETIONS
    prompt: Prompts | None  # null: an empty text
    logprobs: TopLogprobs | None = None
    echo: bool | None = None

    @property
    def prompts(self) -> list[str | list[int]]:
        return listed("" if self.prompt is None else self.prompt)


class EmbeddingRequest(PublishedRequest):
    published = parameters.EMBEDDINGS
    model: str
    input: Prompts
    encoding_format: Literal["float", "base64"] | None = None
    pooling: Literal["mean", "last"] | None = None
    user: str | None = None  # for the access log


def listed(prompts: str | list[int] | list[str] | list[list[int]]) -> list[str | list[int]]:
    """One or several prompts as a list."""
    if isinstance(prompts, str) or isinstance(prompts[0], int):
        return [prompts]  # type: ignore[list-item]
    return prompts  # type: ignore[return-value]


class TokenizeRequest(PublishedRequest):
    published = parameters.TOKENIZE
    left_out = (None,)
    model: str | None = None
    prompt: str | None = None
    messages: Jsons | None = None  # in place of a prompt
    add_special_tokens: bool | None = None  # to a prompt, unless False; a chat template writes its own
    add_generation_prompt: bool | None = None  # to messages, unless False
    chat_template_kwargs: Json | None = None


class DetokenizeRequest(PublishedRequest):
    left_out = (None,)
    model: str | None = None
    tokens: Ids
    skip_special_tokens: bool | None = None
