"""A contender behind a URL: any OpenAI-compatible server.

Tokens are counted by the `usage` that a server sends last, not by the chunks of its stream: a chunk may hold several
tokens, or none. Knows nothing of how the server was started.
"""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import Generator, Iterable, Iterator, Mapping
from collections.abc import Sequence as Seq
from contextlib import contextmanager
from typing import Any, Final

import httpx

from ssd.bench.answers import Answer, Message, Prompt, RequestSettings
from ssd.errors import ConfigError, ServerError

CONNECT_SECONDS: Final = 5.0
SILENCE_SECONDS: Final = 600.0  # a long prompt behind a long queue
_EXTRAS: Final = ("logprobs", "ignore_eos", "seed")  # fields that not every server knows, in the order of leaving out
_LOOPBACK: Final = ("127.0.0.1", "localhost", "::1")

Arrival = tuple[float, bytes]  # when, and what came


class ServerContender:
    """Sends requests to the server at `url`, with or without its `/v1`.

    `model` is the first one that the server offers unless it is named. The API key is what OPENAI_API_KEY holds, or
    else SSD_API_KEY, the variable of `ssd serve`.
    """

    def __init__(self, url: str, model: str | None = None, name: str = "") -> None:
        self.url = url.rstrip("/").removesuffix("/v1")
        place = _place(self.url)
        self.name = name or place.netloc.decode()
        self.note = ""
        key = os.environ.get("OPENAI_API_KEY") or next(iter(os.environ.get("SSD_API_KEY", "").split()), None)
        self._connection: dict[str, Any] = {
            "base_url": f"{self.url}/v1/",
            "headers": {"Authorization": f"Bearer {key}"} if key else {},
            "timeout": httpx.Timeout(SILENCE_SECONDS, connect=CONNECT_SECONDS),
            "limits": httpx.Limits(),  # none: `RequestSettings.batch` says how many
            "trust_env": place.host not in _LOOPBACK,  # no proxy for this machine
        }
        self.refused: list[str] = []  # the fields that this server does not know
        self.finish_reason: str | None = None  # the last `stream_chat`'s, if the server sent one
        self.model = model or ""  # "" while the server is asked
        self.model = self.model or self._first_model()

    def answer(self, prompts: Seq[Prompt], asked: RequestSettings) -> list[Answer]:
        """In the order of the prompts, `asked.batch` at a time. The first failure ends all of them."""
        return asyncio.run(self._answer_all(prompts, asked))

    def stream_chat(self, messages: Seq[Message], sampling: Mapping[str, Any]) -> Generator[str, None, None]:
        """Text of one answer in pieces. Closing the iterator early closes the connection, so that the server stops.

        `sampling`: fields of the request, such as temperature and max_tokens.
        """
        body = {"messages": list(messages), **sampling, "stream": True}
        self.finish_reason = None
        with (
            self._explained(),
            httpx.Client(**self._connection) as client,
            client.stream("POST", "chat/completions", json={"model": self.model, **body}) as response,
        ):
            if response.status_code != httpx.codes.OK:
                raise self._refusal(response.status_code, response.read())
            for _, event in self._events((time.perf_counter(), piece) for piece in response.iter_bytes()):
                yield from filter(None, _pieces(event))
                for choice in event.get("choices") or []:
                    self.finish_reason = choice.get("finish_reason") or self.finish_reason

    def close(self) -> None:
        """Does nothing: the server was not started here."""

    def _first_model(self) -> str:
        with self._explained(), httpx.Client(**self._connection) as client:
            response = client.get("models", timeout=CONNECT_SECONDS)
        if response.status_code != httpx.codes.OK:
            raise self._refusal(response.status_code, response.content)
        try:
            return str(response.json()["data"][0]["id"])
        except (ValueError, LookupError, TypeError):
            raise ServerError(f"{self.url} does not say which models it has: name one") from None

    # --- asking -------------------------------------------------------------------------------------------------------

    async def _answer_all(self, prompts: Seq[Prompt], asked: RequestSettings) -> list[Answer]:
        places = asyncio.Semaphore(asked.batch)
        async with self.connect() as client:

            async def one(prompt: Prompt) -> Answer:
                async with places:
                    return await self.ask(client, prompt, asked)

            return list(await asyncio.gather(*map(one, prompts)))

    def connect(self) -> httpx.AsyncClient:
        """A client for `ask`, which many requests share."""
        return httpx.AsyncClient(**self._connection)

    async def ask(self, client: httpx.AsyncClient, prompt: Prompt, asked: RequestSettings) -> Answer:
        """One answer; ServerError for a request that failed.

        Repeats a request that is refused as malformed without the fields that not every server knows, one by one.
        """
        path, body = self._request(prompt, asked)
        extras = [field for field in _EXTRAS if field in body]
        refused: list[str] = []
        while True:
            try:
                answer = await self._stream(client, path, body)
                break
            except _Refusal as refusal:
                if not extras or refusal.status not in (httpx.codes.BAD_REQUEST, httpx.codes.UNPROCESSABLE_ENTITY):
                    raise
            refused.append(extras.pop(0))
            del body[refused[-1]]
        new = [field for field in refused if field not in self.refused]
        if new:
            self.refused += new
            said = f"the server refuses {' and '.join(new)}: sent without"
            self.note = f"{self.note}; {said}" if self.note else said
        return answer

    def _request(self, prompt: Prompt, asked: RequestSettings) -> tuple[str, dict[str, Any]]:
        chat = any(isinstance(part, dict) for part in prompt)
        body: dict[str, Any] = {
            "model": self.model,
            "messages" if chat else "prompt": prompt,
            "max_tokens": asked.max_new_tokens,
            "temperature": asked.temperature,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        extras: dict[str, Any] = {"seed": asked.seed}
        if asked.ignore_eos:
            extras["ignore_eos"] = True
        if asked.logprobs:
            extras["logprobs"] = True if chat else 1
        body |= {field: value for field, value in extras.items() if field not in self.refused}
        return "chat/completions" if chat else "completions", body

    async def _stream(self, client: httpx.AsyncClient, path: str, body: dict[str, Any]) -> Answer:
        """Stores bytes with their times; they are parsed afterwards, so that parsing is not measured."""
        began = time.perf_counter()
        arrivals: list[Arrival] = []
        with self._explained():
            async with client.stream("POST", path, json=body) as response:
                if response.status_code != httpx.codes.OK:
                    raise self._refusal(response.status_code, await response.aread())
                async for piece in response.aiter_bytes():
                    arrivals.append((time.perf_counter(), piece))
        return self._read(began, arrivals)

    # --- reading ------------------------------------------------------------------------------------------------------

    def _read(self, began: float, arrivals: Iterable[Arrival]) -> Answer:
        text, times = "", []
        usage: dict[str, Any] = {}
        logprobs: list[tuple[str, float]] = []
        for when, event in self._events(arrivals):
            usage = event.get("usage") or usage
            logprobs += _logprobs(event)
            for piece in _pieces(event):
                text += piece
                times.append(when)
        try:
            written, read = int(usage["completion_tokens"]), int(usage["prompt_tokens"])
        except (LookupError, TypeError, ValueError):
            raise ServerError(
                f"{self.url} sent no usage with its answer, so its tokens cannot be counted: use a server that "
                "honours stream_options.include_usage"
            ) from None
        if written and not times:
            raise ServerError(f"{self.url} claims {written} tokens, but sent none of them")
        return Answer(began, read, text, _spread(times, written) if written else [], logprobs=logprobs or None)

    def _events(self, arrivals: Iterable[Arrival]) -> Iterator[tuple[float, dict[str, Any]]]:
        """The chunks of a stream up to its `[DONE]`, and when each was complete."""
        for when, line in _lines(arrivals):
            if not line or line.startswith((b":", b"event:", b"id:", b"retry:")):
                continue
            if line.removeprefix(b"data:").strip() == b"[DONE]":
                return
            try:
                event = json.loads(line.removeprefix(b"data:"))
            except ValueError:
                event = None
            if not line.startswith(b"data:") or not isinstance(event, dict):
                raise ServerError(f"{self.url} does not stream as OpenAI does; it sent {_shown(line)}")
            if event.get("error"):
                raise ServerError(f"{self.url} failed in the middle of an answer: {_shown(line)}")
            yield when, event
        raise ServerError(f"{self.url} ended its stream without [DONE]: it was probably stopped; look at its log")

    # --- errors -------------------------------------------------------------------------------------------------------

    @contextmanager
    def _explained(self) -> Iterator[None]:
        """Turns connection errors into ServerError."""
        try:
            yield
        except (httpx.ConnectError, httpx.ConnectTimeout) as error:
            raise ServerError(f"no server answers at {self.url} ({error}): start it, or correct the URL") from error
        except httpx.TimeoutException as error:
            raise ServerError(f"{self.url} sent nothing for too long ({error}): look at its log") from error
        except httpx.TransportError as error:
            raise ServerError(
                f"{self.url} closed the connection within an answer ({error}): look at its log"
            ) from error

    def _refusal(self, status: int, content: bytes) -> _Refusal:
        remedies: dict[int, str] = {
            httpx.codes.UNAUTHORIZED: "set OPENAI_API_KEY to its API key",
            httpx.codes.FORBIDDEN: "set OPENAI_API_KEY to another API key",
            httpx.codes.NOT_FOUND: "ask its /v1/models for the models it has, and see that the URL is right",
        }
        asked = f" (model={self.model!r})" if self.model else ""
        remedy = remedies.get(status, "look at its log")
        return _Refusal(f"{self.url} refused with {status}{asked}: {_shown(content)}; {remedy}", status)


class _Refusal(ServerError):
    """An answer with another status than 200."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


def _place(url: str) -> httpx.URL:
    try:
        place = httpx.URL(url)
    except httpx.InvalidURL as error:
        raise ConfigError(f"url={url!r}: {error}; write one such as http://127.0.0.1:8000") from error
    if place.scheme not in ("http", "https") or not place.host:
        raise ConfigError(f"url={url!r}: must begin with http:// or https://, such as http://127.0.0.1:8000")
    return place


def _lines(arrivals: Iterable[Arrival]) -> Iterator[Arrival]:
    """Lines that end with a line feed; str.splitlines would also split at other characters in texts."""
    rest = b""
    for when, piece in arrivals:
        *lines, rest = (rest + piece).split(b"\n")
        yield from ((when, line.strip(b"\r")) for line in lines)
    yield from [(when, rest)] if rest else []


def _pieces(event: dict[str, Any]) -> list[str]:
    """The texts of a chunk, which may be empty though there was a token; none for the chunk that opens a chat."""
    pieces = []
    for choice in event.get("choices") or []:
        delta = choice.get("delta")
        if delta is None:
            pieces.append(choice.get("text") or "")
            continue
        piece = delta.get("content") or delta.get("reasoning_content") or ""
        if piece or not delta.get("role") or choice.get("finish_reason"):
            pieces.append(piece)
    return pieces


def _logprobs(event: dict[str, Any]) -> list[tuple[str, float]]:
    """The tokens of a chunk with their log-probabilities, if it has them; of a completion in lists of their own."""
    found: list[tuple[str, float]] = []
    for choice in event.get("choices") or []:
        given = choice.get("logprobs") or {}
        found += zip(given.get("tokens") or (), given.get("token_logprobs") or (), strict=False)
        found += [(each.get("token"), each.get("logprob")) for each in given.get("content") or ()]
    return found


def _spread(times: Seq[float], tokens: int) -> list[tuple[float, float]]:
    """Distributes the tokens over the chunks: one with the first, the others evenly over the rest."""
    if len(times) == 1:
        return [(times[0], tokens)]
    share = (tokens - 1) / (len(times) - 1)
    return [(times[0], 1.0), *((when, share) for when in times[1:])]


def _shown(content: bytes) -> str:
    """A server's message, shortened."""
    text = content.decode(errors="replace").strip()
    return repr(text[:300] + "…" if len(text) > 300 else text)
