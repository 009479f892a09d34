"""Compiles structured outputs for one tokenizer, and follows a text through them. Built on `llguidance`.

A `Constraint` belongs to one sequence: it has consumed the sequence's output so far, and computes which tokens may come
next, as bit masks over the vocabulary. Knows nothing of models, devices or the engine.
"""

from __future__ import annotations

import importlib
import json
import threading
from collections import OrderedDict
from collections.abc import Iterable
from collections.abc import Sequence as Seq
from contextlib import suppress
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import tokenizers

from ssd.constraints.structured import StructuredOutput
from ssd.errors import RequestError

Masks = npt.NDArray[np.int32]  # [positions, words]: bit t % 32 of word t // 32 is set if token t is allowed

# Between the tokens of a JSON text: nothing, a space, or a new line and its indentation. Bounded, so that a model
# cannot write white space for ever.
_WHITESPACE: Final = r"(\n[ \t]{0,24}| )?"
_MOST_COMPILED: Final = 256  # grammars that are kept
_MOST_CHARACTERS: Final = 1 << 20  # of their definitions; compiled, a character takes 100 bytes, of some grammars 400


class Grammars:
    """The grammars of a model's requests. Compiled once, by the thread that asks first; safe on any thread."""

    def __init__(self, backend: tokenizers.Tokenizer, vocab_size: int, stop_token_ids: Iterable[int]) -> None:
        self._backend = backend
        self._vocab_size = max(vocab_size, backend.get_vocab_size(with_added_tokens=True))
        self._words = -(-vocab_size // 32)
        self._stop_token_ids = sorted(stop_token_ids)
        self._tokenizer: Any = None  # llguidance's, built by `warm_up` or for the first request
        # least recently used first: the compiled grammar and the characters of its definition
        self._compiled: OrderedDict[StructuredOutput, tuple[Any, int]] = OrderedDict()
        self._lock = threading.Lock()

    def warm_up(self) -> None:
        """Builds the library's tokenizer, which takes a second or two for large vocabularies.

        Where there can be no structured output, the requests that ask for it are told why.
        """
        with suppress(RequestError), self._lock:
            self._loaded_tokenizer()

    def check(self, wanted: StructuredOutput) -> None:
        """Raises RequestError for a schema, regex or grammar that cannot be compiled."""
        self._matcher(wanted)

    def constraint(self, wanted: StructuredOutput) -> Constraint:
        """For a new sequence."""
        return Constraint(self._matcher(wanted), self._words, -(-self._vocab_size // 32))

    def _matcher(self, wanted: StructuredOutput) -> Any:
        """The compiled grammar, in its initial state."""
        with self._lock:
            if wanted in self._compiled:
                self._compiled.move_to_end(wanted)
                return self._compiled[wanted][0]
            tokenizer = self._loaded_tokenizer()
        matcher, characters = _compile(wanted, tokenizer)  # without the GIL
        self._check_beginning(wanted, matcher)
        with self._lock:
            self._compiled[wanted] = matcher, characters
            while len(self._compiled) > 1 and self._too_much_is_kept():
                self._compiled.popitem(last=False)
        return matcher

    def _too_much_is_kept(self) -> bool:
        characters = sum(characters for _, characters in self._compiled.values())
        return len(self._compiled) > _MOST_COMPILED or characters > _MOST_CHARACTERS

    def _check_beginning(self, wanted: StructuredOutput, matcher: Any) -> None:
        """Raises RequestError if no text can begin: the grammar is empty, or endless."""
        constraint = Constraint(matcher, self._words, -(-self._vocab_size // 32))
        if not constraint.masks([]).any():
            raise RequestError(f"structured.{wanted.kind}: {constraint.error or 'no text is valid'}")

    def _loaded_tokenizer(self) -> Any:
        llguidance = _library()
        if not self._stop_token_ids:
            raise RequestError("structured: the checkpoint names no end-of-sequence token, which a complete text needs")
        if self._tokenizer is None:
            try:
                self._tokenizer = llguidance.LLTokenizer(
                    self._backend.to_str(), n_vocab=self._vocab_size, eos_token=self._stop_token_ids
                )
            except Exception as error:  # a kind of tokenizer that the library does not know
                raise RequestError(f"structured: llguidance cannot read this model's tokenizer ({error})") from error
        return self._tokenizer


class Constraint:
    """What the text of one sequence may still be."""

    def __init__(self, start: Any, words: int, computed_words: int) -> None:
        """`words` of a mask are used of the `computed_words` that the library computes."""
        self._start = start  # shared, never advanced
        self._matcher = start.deep_copy()
        self._consumed: list[int] = []
        self._words, self._computed_words = words, computed_words

    @property
    def complete(self) -> bool:
        """Whether the text is valid and nothing can follow."""
        return bool(self._matcher.is_stopped() and not self._matcher.is_error())

    @property
    def error(self) -> str | None:
        """Why there are no masks any more (a limit of the library), if so. The library adds its state, line by line."""
        return self._matcher.get_error().partition("\n")[0] if self._matcher.is_error() else None

    def advance(self, token: int) -> None:
        """Consumes a decided token."""
        self._consumed.append(token)
        self._matcher.consume_token(token)

    def num_valid(self, draft: Seq[int]) -> int:
        """How many tokens of a draft may follow."""
        if self._matcher.is_error():
            return 0
        return int(self._matcher.validate_tokens(list(draft)))

    def masks(self, draft: Seq[int]) -> Masks:
        """The masks of the position after the consumed tokens and after every token of a draft.

        Positions after a draft token that is not allowed are of no use, and not masked. Where the library reaches a
        limit, nothing is allowed: the sequence fails if it gets there.
        """
        masks = np.full((len(draft) + 1, self._computed_words), -1, dtype=np.int32)
        consumed = 0
        for row, token in zip(masks, [*draft, None], strict=True):
            self._matcher.unsafe_compute_mask_ptr(row.ctypes.data, row.nbytes)
            if self._matcher.is_error():
                row[:] = 0
                break
            if token is None or not self._matcher.try_consume_tokens([token]):
                break
            consumed += 1
        if consumed and self._matcher.is_error():  # perhaps on a way that is not taken
            self._matcher = self._start.deep_copy()
            self._matcher.consume_tokens(self._consumed)
        elif consumed:
            self._matcher.rollback(consumed)
        return masks[:, : self._words]


def _compile(wanted: StructuredOutput, tokenizer: Any) -> tuple[Any, int]:
    """With the number of characters of its definition."""
    llguidance = _library()
    try:
        definition = _definition(wanted, llguidance)
        matcher = llguidance.LLMatcher(tokenizer, definition, log_level=0)
    except ValueError as error:
        raise RequestError(f"structured.{wanted.kind}: {error}") from error
    if matcher.is_error():
        raise RequestError(f"structured.{wanted.kind}: {matcher.get_error()}")
    return matcher, len(definition)


def _definition(wanted: StructuredOutput, llguidance: Any) -> str:
    """The grammar as llguidance takes it."""
    make = llguidance.LLMatcher
    if wanted.regex is not None:
        return str(make.grammar_from_regex(wanted.regex))
    if wanted.grammar is not None:
        return str(llguidance.grammar_from("grammar", wanted.grammar))
    if wanted.choice is not None:
        return str(make.grammar_from_lark("start: " + " | ".join(map(json.dumps, wanted.choice))))
    schema = wanted.json_schema or '{"type": "object"}'
    options = {"whitespace_pattern": _WHITESPACE, "lenient": False, "coerce_one_of": False}
    return str(make.grammar_from_json_schema(schema, overrides=options))


def _library() -> Any:
    try:
        return importlib.import_module("llguidance")
    except ImportError as error:
        raise RequestError("structured: needs the package llguidance: pip install llguidance") from error
