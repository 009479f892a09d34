"""`/api/version`, `/api/tags`, `/api/ps` and `/api/show`: the models of a server, as Ollama describes them."""

from __future__ import annotations

import functools
import hashlib
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final

from fastapi import APIRouter, Request

from ssd.assembly.memory import format_names
from ssd.assembly.open import is_local, open_checkpoint
from ssd.errors import SSDError
from ssd.models.content import checksum
from ssd.models.decoder import num_parameters
from ssd.models.repository import quantization
from ssd.server.errors import OLLAMA_ERROR_RESPONSES, invalid, no_model
from ssd.server.http.bodies import JsonRoute, on_thread
from ssd.server.ignored import current
from ssd.server.models.served import Served
from ssd.server.ollama.protocol import ShowRequest
from ssd.server.ollama.writer import timestamp
from ssd.server.protocol import Json
from ssd.text.harmony import is_harmony
from ssd.text.reasoning import marks_reasoning
from ssd.text.tool_formats import has_tools, parser_for
from ssd.version import VERSION

router = APIRouter(route_class=JsonRoute, responses=OLLAMA_ERROR_RESPONSES)
API_VERSION: Final = "0.12.6"  # the version of Ollama whose API this is: some clients want a least one
_FLOATS: Final = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}
_NEVER: Final = datetime(9999, 12, 31, tzinfo=UTC)
_UNKNOWN_TIME: Final = datetime(1970, 1, 1, tzinfo=UTC)


@dataclass(frozen=True)
class Description:
    """What a checkpoint's header and tokenizer tell. The defaults: it is not on this machine, or cannot be read."""

    family: str = ""
    format: str = ""
    parameters: int = 0
    quantization: str = ""
    size: int = 0  # bytes of its weight files
    digest: str = "0" * 64  # changes with these files
    modified: datetime = _UNKNOWN_TIME
    template: str = ""  # of chats
    shape: tuple[tuple[str, int], ...] = ()  # numbers in the shape of the model, by GGUF's names

    @property
    def details(self) -> Json:
        millions = self.parameters / 1e6
        return {
            "parent_model": "",
            "format": self.format,
            "family": self.family,
            "families": [self.family] if self.family else [],
            "parameter_size": f"{millions:.0f}M" if millions < 1000 else f"{millions / 1000:.1f}B",
            "quantization_level": _FLOATS.get(self.quantization, self.quantization),
        }

    @property
    def capabilities(self) -> list[str]:
        harmony = is_harmony(self.template)
        found = {
            "completion": True,
            "tools": has_tools(self.template) or parser_for(self.template) is not None,
            "thinking": harmony or marks_reasoning(self.template),
        }
        return [name for name, has in found.items() if has]


@router.get("/api/version")
async def version() -> dict[str, str]:
    return {"version": API_VERSION, "ssd": VERSION}


@router.get("/api/tags")
async def tags(request: Request) -> dict[str, Any]:
    """All models, loaded or not."""
    return {"models": [_listed(each, await _description(each)) for each in _served(request)]}


@router.get("/api/ps")
async def running(request: Request) -> dict[str, Any]:
    """The models that are loaded."""
    models = []
    for each in _served(request):
        if each.llm is None:
            continue
        found, config = await _description(each), each.llm.config
        expires = _NEVER if each.expires is None else datetime.fromtimestamp(each.expires, UTC)
        more = {
            "expires_at": timestamp(expires),
            "size_vram": 0 if config.device == "cpu" else found.size,
            "context_length": config.max_model_len,
        }
        models.append(_listed(each, found) | more)
    return {"models": models}


@router.post("/api/show")
async def show(body: ShowRequest, request: Request) -> dict[str, Any]:
    """What a model is. It is not loaded for this."""
    name = body.model or body.name
    if name is None:
        raise invalid("model", "is missing: name a model")
    served = _served(request)
    each = next((each for each in served if each.options.is_called(name)), None)
    if each is None:
        raise no_model(name, [each.name for each in served])
    found = await _description(each)
    context = {} if each.llm is None else {"context_length": each.llm.config.max_model_len}
    shape = {f"{found.family}.{key}": number for key, number in {**dict(found.shape), **context}.items()}
    return {
        "modified_at": timestamp(found.modified),
        "details": found.details,
        "model_info": {
            "general.architecture": found.family,
            "general.parameter_count": found.parameters,
            **shape,
        },
        "template": found.template,
        "capabilities": found.capabilities,
        **current().answer,
    }


def _served(request: Request) -> list[Served]:
    found: list[Served] = request.app.state.server.served
    return found


def _listed(served: Served, found: Description) -> Json:
    return {
        "name": served.name,
        "model": served.name,
        "modified_at": timestamp(found.modified),
        "size": found.size,
        "digest": found.digest,
        "details": found.details,
    }


async def _description(served: Served) -> Description:
    try:
        return await on_thread(False, describe, served.model)
    except (SSDError, OSError):  # a load of it tells why
        return Description()


@functools.lru_cache(maxsize=256)
def describe(model: str) -> Description:
    """Reads no weights, and downloads nothing."""
    if not is_local(model):
        raise SSDError(f"{model} is not on this machine")
    checkpoint = open_checkpoint(model)
    config, tokenizer, files = checkpoint.config, checkpoint.tokenizer(), checkpoint.sources
    status = [path.stat() for path in files]
    return Description(
        family=config.family,
        format="gguf" if checkpoint.path.is_file() else "safetensors",
        parameters=num_parameters(config),
        quantization=quantization(checkpoint.path.name) or format_names(config, checkpoint.formats) or config.dtype,
        size=sum(each.st_size for each in status),
        digest=checksum(files) if files else hashlib.sha256(model.encode()).hexdigest(),
        modified=datetime.fromtimestamp(max((each.st_mtime for each in status), default=0.0), UTC),
        template=tokenizer.template_source() if tokenizer.chat_template_names else "",
        shape=(
            ("context_length", config.max_position),
            ("embedding_length", config.hidden_size),
            ("block_count", config.num_layers),
            ("vocab_size", config.vocab_size),
        ),
    )
