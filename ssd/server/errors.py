"""Errors of the HTTP interface, in the shape of OpenAI's API ({"error": {"message", "type", "param", "code"}}),
Anthropic's or Ollama's."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from http import HTTPStatus
from typing import Any, Final, Literal

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import BaseModel, ValidationError
from starlette.exceptions import HTTPException
from starlette.types import Scope

from ssd.errors import (
    STRUCTURED_FAILED,
    EngineClosed,
    EngineFailed,
    ParametersFailed,
    PromptTooLong,
    RequestError,
    RequestFailed,
    SSDError,
)

log = logging.getLogger("ssd")

_TYPES: Final = {
    400: "invalid_request_error",
    401: "authentication_error",
    413: "invalid_request_error",
    429: "rate_limit_error",
    503: "unavailable_error",
    504: "timeout_error",
}
_MESSAGES_TYPES: Final = {
    401: "authentication_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}
GONE: Final = 499  # nginx's: the client went away before it was answered
_INDEX: Final = re.compile(r"\[\d+\]")
# what a RequestError's message begins with: the path of a value, or a name
_PARAM: Final = re.compile(r"[a-z_]+(?:\[\d+\]|\.[a-z_]+)*(?=[=:])|[a-z]+_[a-z_]+")
_UNION_TAG: Final = re.compile(r"str|int|float|bool|.*\[.*")  # pydantic's name of an alternative in a path
_MOST_CHARS: Final = 1000  # longest message
_INTERNAL: Final = "internal error: the server's log has the details"


# --- the shapes, for the OpenAPI schema ------------------------------------------------------------------------------


class ErrorFields(BaseModel):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorAnswer(BaseModel):
    error: ErrorFields


class MessagesErrorFields(BaseModel):
    type: str
    message: str


class MessagesErrorAnswer(BaseModel):
    type: Literal["error"]
    error: MessagesErrorFields
    request_id: str


class OllamaErrorAnswer(BaseModel):
    error: str


def _responses(model: type[BaseModel]) -> dict[int | str, dict[str, Any]]:
    return {
        "4XX": {"model": model, "description": "The request cannot be served"},
        "5XX": {"model": model, "description": "The server cannot serve it"},
    }


ERROR_RESPONSES: Final = _responses(ErrorAnswer)
MESSAGES_ERROR_RESPONSES: Final = _responses(MessagesErrorAnswer)
OLLAMA_ERROR_RESPONSES: Final = _responses(OllamaErrorAnswer)


# ----------------------------------------------------------------------------------------------------------------------


class AsciiJSON(JSONResponse):
    """JSON with escapes for everything beyond ASCII: lone surrogates of a request can be quoted, too."""

    def render(self, content: Any) -> bytes:
        return json.dumps(content, allow_nan=False, separators=(",", ":")).encode("ascii")


class ApiError(Exception):
    """An answer that is an error."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        if len(message) > _MOST_CHARS:  # it quotes a long value
            message = f"{message[: _MOST_CHARS // 2]} … {message[-_MOST_CHARS // 2 :]}"
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code
        self.headers = dict(headers or {})

    def body(self) -> dict[str, Any]:
        kind = _TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    def messages_body(self, request_id: str) -> dict[str, Any]:
        """In the shape of `/v1/messages`."""
        kind = _MESSAGES_TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "api_error")
        return {"type": "error", "error": {"type": kind, "message": self.message}, "request_id": request_id}

    def ollama_body(self) -> dict[str, Any]:
        """In the shape of `/api/`."""
        return {"error": self.message}

    def renamed(self, names: Mapping[str, str]) -> ApiError:
        """The same error under the path that a value has for this client. `[]` in `names` is any index."""
        at = re.match(r"\w+\[\d+\]", self.param or "")
        if self.param is not None and at is not None and at[0] in names:
            return self._named(names[at[0]] + self.param[at.end() :])
        path = _INDEX.sub("[]", self.param or "")
        name = max((name for name in names if re.match(rf"{re.escape(name)}(?![a-z_])", path)), key=len, default=None)
        if self.param is None or name is None:
            return self
        indices = iter(_INDEX.findall(self.param))
        return self._named(re.sub(r"\[\]", lambda _: next(indices), names[name] + path[len(name) :]))

    def _named(self, param: str) -> ApiError:
        before = self.param or ""
        message = param + self.message[len(before) :] if self.message.startswith(before) else self.message
        return ApiError(self.status, message, param=param, code=self.code, headers=self.headers)

    def response(self, scope: Scope) -> AsciiJSON:
        """In the shape that the client of this path expects."""
        return AsciiJSON(self.body_for(scope["path"], scope["state"]["request_id"]), self.status, self.headers)

    def body_for(self, path: str, request_id: str) -> dict[str, Any]:
        """In the shape of the API that this path belongs to."""
        if path.startswith("/v1/messages"):
            return self.messages_body(request_id)
        return self.ollama_body() if path.startswith("/api/") else self.body()


def invalid(path: str, why: str) -> ApiError:
    """`path`: that of a value in the request."""
    return ApiError(400, f"{path}: {why}", param=path)


def no_model(name: str, served: Sequence[str]) -> ApiError:
    message = f"model {name!r} is not served here: use {' or '.join(map(repr, served))}"
    return ApiError(404, message, param="model", code="model_not_found")


def unsupported(path: str, why: str) -> ApiError:
    return ApiError(400, f"{path}: {why}", param=path, code="unsupported_parameter")


def unknown(path: str, hint: str = "") -> ApiError:
    """`hint`: what may have been meant."""
    return ApiError(400, f"{path}: is not a known parameter{hint}", param=path, code="unknown_parameter")


@contextmanager
def renaming(names: Mapping[str, str]) -> Iterator[None]:
    """Errors of requests name the fields as the client does: `names` maps a name used here to the client's."""
    try:
        yield
    except (ApiError, RequestError, RequestValidationError) as error:
        raise api_error(error).renamed(names) from error


def api_error(error: Exception) -> ApiError:
    """Any exception as the error that a client gets."""
    match error:
        case ApiError():
            return error
        case ParametersFailed():
            structured = str(error).startswith(STRUCTURED_FAILED)
            return ApiError(400, str(error), code="structured_output_failed" if structured else "no_token_allowed")
        case PromptTooLong():
            return ApiError(400, str(error), param="prompt", code="context_length_exceeded")
        case RequestError():
            return _refused(str(error))
        case RequestFailed():
            return ApiError(500, str(error), code="request_failed")
        case EngineFailed() | EngineClosed():
            return ApiError(500, str(error), code="engine_failed")
        case RequestValidationError() | ValidationError():
            return _invalid_body(error.errors())
        case HTTPException():
            name = HTTPStatus(error.status_code).phrase
            return ApiError(error.status_code, str(error.detail or name), headers=error.headers)
    log.error("a handler failed, which is a bug", exc_info=error)
    return ApiError(500, _INTERNAL)


def _refused(message: str) -> ApiError:
    """Refused by the library, which has other names for two parameters."""
    message = message.replace("max_new_tokens", "max_tokens").replace("chat_options", "chat_template_kwargs")
    found = _PARAM.match(message)
    return ApiError(400, message, param=found[0] if found else None)


def _invalid_body(errors: Sequence[Mapping[str, Any]]) -> ApiError:
    """The first validation error; a union reports one for every alternative, of which the closest is the best."""
    error = max(errors, key=_closeness, default=None)
    if error is None or error["type"] == "json_invalid":
        reason = error["ctx"]["error"] if error is not None else "it is empty"
        return ApiError(400, f"the body is not valid JSON: {reason}", code="invalid_json")
    path = [str(part) for part in error["loc"][1:] if not _UNION_TAG.fullmatch(str(part))]
    param = path[0] if path else None
    if error["type"] == "extra_forbidden":
        return unknown(".".join(path))
    return ApiError(400, f"{'.'.join(path) or 'the body'}: {error['msg']}", param=param)


def _closeness(error: Mapping[str, Any]) -> tuple[bool, int, bool]:
    """To what the client has meant: deep inside an alternative, and of its type."""
    return error["type"] == "extra_forbidden", len(error["loc"]), not error["type"].endswith("_type")


async def _respond(request: Request, error: Exception) -> AsciiJSON:
    return api_error(error).response(request.scope)


def install(app: FastAPI) -> None:
    """Makes every error of the app's handlers an answer in this shape."""
    for kind in (ApiError, SSDError, RequestValidationError, ValidationError, HTTPException, Exception):
        app.add_exception_handler(kind, _respond)
