"""Text to token ids and back, and chats to text.

Loads `tokenizer.json` directly and renders chat templates the way Hugging Face does, without importing transformers
(which takes seconds). Knows nothing of models, requests or the engine.
"""

from __future__ import annotations

import functools
import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from datetime import date
from pathlib import Path
from typing import Any, Final

import jinja2
import tokenizers

from ssd.errors import RequestError, SSDError, install_extra
from ssd.text import harmony
from ssd.text.chat_template import compile_template, render
from ssd.text.coverage import chars_per_token
from ssd.text.growth import check_growth
from ssd.text.harmony import is_harmony
from ssd.text.json_file import read_json, read_text
from ssd.text.tiktoken_file import FILE as TIKTOKEN
from ssd.text.tiktoken_file import load_tiktoken

_NAMED_TOKENS: Final = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_SLOW_FILES: Final = ("tokenizer.model", "vocab.json", "tekken.json")
REPLACEMENT: Final = "\ufffd"  # what bytes decode to that are no whole character
_LONG: Final = 4096  # characters or tokens; longer ones are converted as a batch, which lets other threads run


class Tokenizer:
    """A `tokenizers.Tokenizer` with the chat templates and special tokens that belong to it.

    Without a backend it represents a checkpoint that has no tokenizer: methods that need one raise SSDError.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer | None,
        *,
        chat_templates: Mapping[str, str] | None = None,
        special_tokens: Mapping[str, str] | None = None,
    ) -> None:
        """`special_tokens` maps names such as `eos_token` to the tokens; chat templates see them under these names."""
        self._backend = backend
        self._chat_templates = dict(chat_templates or {})
        self._special_tokens = dict(special_tokens or {})
        self._compiled: dict[str, jinja2.Template] = {}  # the checkpoint's own templates, by name
        self._loaded = date.today().isoformat()  # Harmony's current date: one process keeps it, and so its prefix cache
        self._token_texts: dict[int, str] = {}
        added = backend.get_added_tokens_decoder() if backend is not None else {}
        self._special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        self._whole: dict[int, bool] = {}  # see `is_whole`
        if backend is not None:
            backend.no_truncation()  # a limit baked into the file must not shorten prompts silently
            backend.no_padding()

    @property
    def available(self) -> bool:
        """False for a checkpoint without a tokenizer, which can be served by token ids only."""
        return self._backend is not None

    @property
    def backend(self) -> tokenizers.Tokenizer:
        """The wrapped tokenizer, for those who need its whole vocabulary (grammars, token strings)."""
        if self._backend is None:
            raise SSDError(
                "the checkpoint has no tokenizer: pass token ids instead of text, or put tokenizer.json and "
                "tokenizer_config.json into the model's directory"
            )
        return self._backend

    @property
    def vocab_size(self) -> int:
        """Tokens in the vocabulary, added ones included; 0 without a tokenizer."""
        return self._backend.get_vocab_size(with_added_tokens=True) if self._backend is not None else 0

    def difference(self, other: Tokenizer) -> str | None:
        """How token ids of the other one mean something else here; None if they do not. It may know fewer tokens."""
        if self._backend is None or other._backend is None:
            return None
        mine, theirs = (t._backend.get_vocab(with_added_tokens=True) for t in (self, other))  # type: ignore[union-attr]
        wrong = next((token for token, i in theirs.items() if i < len(mine) and mine.get(token) != i), None)
        return None if wrong is None else f"{wrong!r} is token {theirs[wrong]} there, {mine.get(wrong)} here"

    @functools.cached_property
    def hashes(self) -> tuple[str, str]:
        """Of the tokens and their ids without added ones, and of how texts become tokens; "" without a tokenizer."""
        if self._backend is None:
            return "", ""
        rules = json.loads(self._backend.to_str())
        vocabulary = sorted(self._backend.get_vocab(with_added_tokens=False).items(), key=lambda pair: pair[1])
        others = [rules.get(name) for name in ("normalizer", "pre_tokenizer", "added_tokens")]
        return _hash(vocabulary), _hash(others)

    @property
    def chat_template_names(self) -> list[str]:
        return list(self._chat_templates)

    def use_chat_template(self, source: str) -> None:
        """Replaces all templates of the checkpoint."""
        self._chat_templates, self._compiled = {"default": source}, {}

    @property
    def bos_token(self) -> str | None:
        return self._special_tokens.get("bos_token")

    @property
    def eos_token(self) -> str | None:
        return self._special_tokens.get("eos_token")

    @property
    def eos_token_id(self) -> int | None:
        return self.token_id(self.eos_token)

    def token_id(self, token: str | None) -> int | None:
        """The id of one token given as text; None for a token that is not in the vocabulary."""
        return None if token is None or self._backend is None else self._backend.token_to_id(token)

    def is_special(self, token_id: int) -> bool:
        """Whether `decode(skip_special_tokens=True)` leaves this token out."""
        return token_id in self._special_ids

    def is_whole(self, token_id: int) -> bool:
        """Whether the token is whole characters: not invalid bytes, nor part of a character, nor nothing."""
        whole = self._whole.get(token_id)
        if whole is None:
            text = self.decode([token_id], skip_special_tokens=False)
            whole = self._whole[token_id] = bool(text) and REPLACEMENT not in text
        return whole

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text; with special tokens, the tokenizer's own BOS (if it has one) comes first."""
        if not isinstance(text, str):
            raise RequestError(f"prompt={text!r}: expected text, got {type(text).__name__}")
        try:
            if len(text) < _LONG:
                return self.backend.encode(text, add_special_tokens=add_special_tokens).ids
            [encoding] = self.backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
            return encoding.ids
        except (TypeError, UnicodeError) as error:  # a lone surrogate, say
            raise RequestError(f"prompt: the text is not valid Unicode ({error})") from error

    def least_tokens(self, text: str) -> int:
        """Lower bound of the tokens of a text, by its length; 0 for a tokenizer that may leave out characters."""
        return 0 if self._chars_per_token is None else math.ceil(len(text) / self._chars_per_token)

    @functools.cached_property
    def _chars_per_token(self) -> float | None:
        """Takes tenths of a second for a large vocabulary: computed when it is first asked for."""
        return chars_per_token(self.backend)

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text of token ids, exactly as the tokens spell it (no clean-up of spaces)."""
        try:
            if len(ids) < _LONG:
                return self.backend.decode(ids, skip_special_tokens=skip_special_tokens)
            [text] = self.backend.decode_batch([ids], skip_special_tokens=skip_special_tokens)
            return text
        except (TypeError, OverflowError):
            raise RequestError(f"token_ids={ids!r}: must be a list of token ids (integers of at least 0)") from None

    def token_text(self, token_id: int) -> str:
        """The text of one token, special ones included; a part of a character is U+FFFD."""
        if token_id not in self._token_texts:
            self._token_texts[token_id] = self.decode([token_id], skip_special_tokens=False)
        return self._token_texts[token_id]

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        *,
        chat_template: str | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        **kwargs: Any,
    ) -> str:
        """Render a chat as the prompt text the model was trained on; encode it with `add_special_tokens=False`.

        `chat_template` is the name of one of the checkpoint's templates, or a template itself. Further keywords
        (`enable_thinking`, `date_string` ...) are the template's own. That of GPT-OSS is not run: `harmony` renders its
        chats, with the keywords `reasoning_effort`, `current_date` and `model_identity`.
        """
        if chat_template is not None and not isinstance(chat_template, str):
            raise RequestError(f"chat_template={chat_template!r:.60}: expected text")
        check_messages(messages)
        messages = [_plain(index, message) for index, message in enumerate(messages)]
        given = {"messages": messages, "tools": tools, "documents": documents}
        variables = {**self._special_tokens, **kwargs, **given, "add_generation_prompt": add_generation_prompt}
        try:
            own = chat_template is None or chat_template in self._chat_templates
            if own and is_harmony(self.template_source(chat_template, tools)):
                return harmony.render(**{"current_date": self._loaded, **variables})
            return render(self._template(chat_template, tools), variables)
        except RequestError:
            raise
        except Exception as error:  # a template is a program, which can fail in any way
            reason = str(error) or type(error).__name__
            raise RequestError(f"messages: the model's chat template refuses this chat ({reason})") from error

    def template_source(self, wanted: str | None = None, tools: object = None) -> str:
        """The template by name, else literally, else the one for tools when tools are given, else the default."""
        if wanted is not None and wanted not in self._chat_templates:
            return wanted
        return self._chat_templates[wanted or self._default_template(tools)]

    def _template(self, wanted: str | None, tools: object) -> jinja2.Template:
        if wanted is not None and wanted not in self._chat_templates:
            return compile_template(wanted)
        name = wanted or self._default_template(tools)
        if name not in self._compiled:
            self._compiled[name] = compile_template(self._chat_templates[name])
        return self._compiled[name]

    def _default_template(self, tools: object) -> str:
        templates = self._chat_templates
        name = "tool_use" if tools is not None and "tool_use" in templates else "default"
        if name in templates:
            return name
        if templates:
            names = ", ".join(sorted(templates))
            raise RequestError(f"chat_template: the checkpoint has no default one; name one of {names}")
        raise RequestError(
            "messages: the checkpoint has no chat template (a base model, perhaps): send a plain prompt, or put a "
            "chat_template.jinja into the model's directory"
        )


def _hash(value: object) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def check_messages(messages: object) -> None:
    """A chat is a list of dicts with `role` and `content`; say which field of which message is not so."""
    if isinstance(messages, (str, bytes)) or not isinstance(messages, Sequence):
        raise RequestError(f"messages: expected a list of messages, got {type(messages).__name__}")
    if not messages:
        raise RequestError("messages: the list is empty; send at least one message")
    for index, message in enumerate(messages):
        if not isinstance(message, Mapping):
            raise RequestError(f"messages[{index}]: expected a dict with role and content, got {message!r}")
        role = message.get("role")
        if not isinstance(role, str) or not role:
            raise RequestError(f"messages[{index}].role={role!r}: expected text such as 'user'")
        _check_content(index, message)


def _check_content(index: int, message: Mapping[str, Any]) -> None:
    """Text, or a list of parts; only a message that calls tools may go without."""
    content = message.get("content")
    if content is None and message.get("tool_calls"):
        return
    if not isinstance(content, (str, list)):
        raise RequestError(f"messages[{index}].content={content!r}: expected text or a list of content parts")


def _plain(index: int, message: Mapping[str, Any]) -> dict[str, Any]:
    """A message whose content is text: text parts are joined, any other part is refused."""
    content = message.get("content")
    if not isinstance(content, list):
        return dict(message)
    for j, part in enumerate(content):
        if not isinstance(part, Mapping) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise RequestError(f"messages[{index}].content[{j}]={part!r}: only parts of type 'text' can be read")
    return {**message, "content": "".join(part["text"] for part in content)}


# --- loading ----------------------------------------------------------------------------------------------------------


def load_tokenizer(path: Path) -> Tokenizer:
    """The tokenizer of a Hugging Face directory; one without a backend when there are no tokenizer files.

    tokenizer.json decides which tokens `encode` adds; `add_bos_token` in tokenizer_config.json is ignored, as in
    transformers.
    """
    config = {**_optional_json(path / "special_tokens_map.json"), **_optional_json(path / "tokenizer_config.json")}
    special = {name: text for name in _NAMED_TOKENS if (text := _token_text(config.get(name))) is not None}
    try:
        backend = _load_backend(path, config)
        if backend is not None:
            _add_missing_specials(backend, config, special)
        templates = _chat_templates(path, config)
    except (AttributeError, LookupError, TypeError, ValueError) as error:  # a value of another type than all files have
        raise SSDError(f"{path / 'tokenizer_config.json'}: a field has an unknown form ({error})") from error
    return Tokenizer(backend, chat_templates=templates, special_tokens=special)


def _load_backend(path: Path, config: Mapping[str, Any]) -> tokenizers.Tokenizer | None:
    """tokenizer.json if there is one; else tiktoken's ranks, or whatever transformers can convert; else nothing."""
    file = path / "tokenizer.json"
    if file.is_file():
        check_growth(file)
        try:
            return tokenizers.Tokenizer.from_file(str(file))
        except Exception as error:  # the library raises bare Exception
            raise SSDError(f"{file} cannot be read ({error}): download the checkpoint again") from error
    if (path / TIKTOKEN).is_file():
        return load_tiktoken(path, config)
    if any((path / name).is_file() for name in _SLOW_FILES):
        return transformers_backend(path)
    return None


def transformers_backend(path: Path, **kwargs: Any) -> tokenizers.Tokenizer:
    """Let transformers convert what is not in tokenizer.json form. Slow to import, hence only when needed."""
    try:
        from transformers import AutoTokenizer

        loaded: Any = AutoTokenizer.from_pretrained(str(path), use_fast=True, **kwargs)
        backend = loaded.backend_tokenizer
    except Exception as error:  # missing packages, unknown formats
        raise SSDError(
            f"the tokenizer in {path} cannot be converted by transformers ({type(error).__name__}: {error}): "
            f"install what it needs ({install_extra('hf')}), put a tokenizer.json beside it, or pass token ids"
        ) from error
    if not isinstance(backend, tokenizers.Tokenizer):
        raise SSDError(
            f"transformers converts the tokenizer in {path} to {type(backend).__name__}: put a tokenizer.json there"
        )
    return backend


def _add_missing_specials(backend: tokenizers.Tokenizer, config: Mapping[str, Any], special: Mapping[str, str]) -> None:
    """Special tokens that only the configuration names must be one token in prompts, and left out of the text."""
    extra = config.get("additional_special_tokens") or config.get("extra_special_tokens") or []
    listed = [_token_text(token) for token in (extra.values() if isinstance(extra, Mapping) else extra)]
    declared = sorted((config.get("added_tokens_decoder") or {}).items(), key=lambda item: int(item[0]))
    present = {token.content for token in backend.get_added_tokens_decoder().values()}
    for _, entry in declared:
        if entry["content"] not in present:
            backend.add_tokens([tokenizers.AddedToken(**{key: entry[key] for key in _ADDED_FIELDS if key in entry})])
    marked = {token.content for token in backend.get_added_tokens_decoder().values() if token.special}
    for token in (*special.values(), *listed):
        if token is not None and token not in marked:
            backend.add_special_tokens([tokenizers.AddedToken(token, special=True, normalized=False)])


_ADDED_FIELDS: Final = ("content", "single_word", "lstrip", "rstrip", "normalized", "special")


def _chat_templates(path: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """Templates by name: from .jinja files if there are any, else from tokenizer_config.json."""
    files = {file.stem: file for file in sorted(path.glob("additional_chat_templates/*.jinja"))}
    if (path / "chat_template.jinja").is_file():
        files["default"] = path / "chat_template.jinja"
    if files:
        return {name: read_text(file) for name, file in files.items()}
    stated = config.get("chat_template") or []
    named = {"default": stated} if isinstance(stated, str) else {entry["name"]: entry["template"] for entry in stated}
    if not all(isinstance(text, str) for pair in named.items() for text in pair):
        raise TypeError("chat_template: expected text")
    return named


def _token_text(token: Any) -> str | None:
    """Configurations write a token as text, or as a dict that describes how it is matched."""
    text = token.get("content") if isinstance(token, Mapping) else token
    return text if isinstance(text, str) else None


def _optional_json(file: Path) -> dict[str, Any]:
    return read_json(file) if file.exists() else {}
