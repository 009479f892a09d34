"""The errors that ssd raises. Each message names the field, the value and the remedy."""

from __future__ import annotations


class SSDError(Exception):
    """Root of all errors raised by ssd."""


class ConfigError(SSDError, ValueError):
    """An engine option is invalid or contradicts another one."""


class NotEnoughMemory(ConfigError):
    """A model does not fit into the memory that is free."""


class RequestError(SSDError, ValueError):
    """One request cannot be served; every other request goes on."""


class PromptTooLong(RequestError):
    """The prompt leaves no room for a token in the model's context."""


class RequestFailed(SSDError, RuntimeError):
    """All samples of a request failed (out of memory, no token to choose); every other request goes on."""


class ParametersFailed(RequestFailed, RequestError):
    """All samples of a request failed by its own parameters: they forbid every token, or its grammar is at a limit."""


class ModelNotFound(SSDError):
    """No checkpoint was found under the given name."""


class UnsupportedModel(SSDError):
    """The checkpoint was found, but describes something this engine does not run."""


class DataNotFound(SSDError):
    """No data set was found under the given name."""


class InvalidData(SSDError, ValueError):
    """A data set was found, but its file is invalid."""


class EngineClosed(SSDError, RuntimeError):
    """The engine was used after `close()`."""


class EngineFailed(SSDError, RuntimeError):
    """Several rounds in a row failed, or a rank was lost: the engine has ended all requests and accepts no more."""


class ServerError(SSDError, RuntimeError):
    """A server that is measured could not be started or reached, or gave an answer that cannot be used."""


def install_extra(name: str) -> str:
    """The remedy for a package that is missing: the command that installs an extra of ssd, which is on no index."""
    return f"pip install '.[{name}]' in a checkout of ssd"


NO_CHOICE = (
    "there is no token to choose: the model's logits are NaN or infinite (check its weights, or try another dtype)"
)
ALL_FORBIDDEN = "there is no token to choose: logit_bias, min_tokens and structured output together forbid every token"
STRUCTURED_FAILED = "structured output failed"  # at a limit that a request's own grammar has reached


def one_line(error: Exception) -> str:
    """An error's type and the first line of its text."""
    text = str(error).strip()
    return f"{type(error).__name__}: {text.splitlines()[0]}" if text else type(error).__name__
