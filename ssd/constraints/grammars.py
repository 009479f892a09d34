"""Compiles structured outputs for one tokenizer, and follows a text through them. Built on `llguidance`.

A `Constraint` belongs to one sequence: it has consumed the sequence's output so far, and computes which tokens may come
next, as bit masks over the vocabulary. Knows nothing of models, devices or the engine.
"""

from __future__ import annotations

import importlib
import json
import threading
import time
import weakref
from collections import OrderedDict
from collections.abc import Iterable
from collections.abc import Sequence as Seq
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import tokenizers

from ssd.constraints.compiling import CompilePool
from ssd.constraints.structured import StructuredOutput
from ssd.errors import RequestError

Masks = npt.NDArray[np.int32]  # [positions, words]: bit t % 32 of word t // 32 is set if token t is allowed

# Between the tokens of a JSON text: nothing, a space, or a new line and its indentation. Bounded, so that a model
# cannot write white space for ever.
_WHITESPACE: Final = r"(\n[ \t]{0,24}| )?"
# CPU time that the masks of a sequence may take: so much for each, and once so much beside it. It stops a grammar that
# slows the engine down for everybody; ordinary masks take a hundredth of it.
_SECONDS_PER_MASK: Final = 0.02
_MASK_SECONDS: Final = 1.0
_SLOW: Final = f"its masks take more than {_MASK_SECONDS:g} s, and {_SECONDS_PER_MASK:g} s each: simplify it"
_MOST_COMPILED: Final = 256  # grammars that are kept
_MOST_CHARACTERS: Final = 1 << 20  # of their definitions; compiled, a character takes 100 bytes, of some grammars 400


class Grammars:
    """The grammars of a model's requests. Each is compiled once, by a pool of its own; safe on any thread."""

    def __init__(self, backend: tokenizers.Tokenizer, vocab_size: int, stop_token_ids: Iterable[int]) -> None:
        self._backend = backend
        self._vocab_size = max(vocab_size, backend.get_vocab_size(with_added_tokens=True))
        self._words = -(-vocab_size // 32)
        self._stop_token_ids = sorted(stop_token_ids)
        self._tokenizer: Any = None  # llguidance's, built by `warm_up` or for the first request
        self._pool = CompilePool()
        self._compiled: OrderedDict[StructuredOutput, Future[Grammar]] = OrderedDict()  # least recently used first
        self._lock = threading.Lock()
        self._loading = threading.Lock()  # of the tokenizer
        self.close = weakref.finalize(self, self._pool.close)

    def warm_up(self) -> None:
        """Builds the library's tokenizer, which takes a second or two for large vocabularies.

        Where there can be no structured output, the requests that ask for it are told why.
        """
        with suppress(RequestError):
            self.compiled(StructuredOutput(json_object=True)).result()

    def compiled(self, wanted: StructuredOutput) -> Future[Grammar]:
        """The compiled grammar; RequestError for a schema, regex or grammar that cannot be compiled.

        All that ask for one grammar get one future. It is kept unless it fails, or later ones need its place.
        """
        with self._lock:
            future = self._compiled.get(wanted)
            if future is None or _has_failed(future):
                name = f"structured.{wanted.kind}"
                define, compile_ = partial(_definition, wanted), partial(self._compile, name)
                future = self._compiled[wanted] = self._pool.submit(name, wanted.size, define, compile_)
            self._compiled.move_to_end(wanted)
            while len(self._compiled) > 1 and self._too_much_is_kept():
                self._compiled.popitem(last=False)
        return future

    def _too_much_is_kept(self) -> bool:
        characters = sum(wanted.size for wanted in self._compiled)
        return len(self._compiled) > _MOST_COMPILED or characters > _MOST_CHARACTERS

    def _compile(self, name: str, definition: str) -> Grammar:
        """Without the GIL. Raises RequestError also if no text can begin: the grammar is empty, or endless."""
        matcher = _library().LLMatcher(self._loaded_tokenizer(), definition, log_level=0)
        if matcher.is_error():
            raise RequestError(f"{name}: {matcher.get_error()}")
        grammar = Grammar(matcher, self._words, -(-self._vocab_size // 32))
        constraint = Constraint(grammar)
        if not constraint.masks([]).any():
            raise RequestError(f"{name}: {constraint.error or 'no text is valid'}")
        return grammar

    def _loaded_tokenizer(self) -> Any:
        llguidance = _library()
        if not self._stop_token_ids:
            raise RequestError("structured: the checkpoint names no end-of-sequence token, which a complete text needs")
        with self._loading:
            if self._tokenizer is None:
                try:
                    self._tokenizer = llguidance.LLTokenizer(
                        self._backend.to_str(), n_vocab=self._vocab_size, eos_token=self._stop_token_ids
                    )
                except Exception as error:  # a kind of tokenizer that the library does not know
                    raise RequestError(
                        f"structured: llguidance cannot read this model's tokenizer ({error})"
                    ) from error
            return self._tokenizer


@dataclass
class Grammar:
    """A compiled grammar. `words` of a mask are used of the `computed_words` that the library computes."""

    matcher: Any  # in its initial state, never advanced; copies share what they compute, and the limits of that
    words: int
    computed_words: int
    exhausted: bool = False  # a limit was reached: copies reach it at any token from now on


class Constraint:
    """What the text of one sequence may still be."""

    def __init__(self, grammar: Grammar) -> None:
        self._grammar = grammar
        self._matcher = grammar.matcher.deep_copy()
        self._consumed: list[int] = []
        self._seconds_left = _MASK_SECONDS

    @property
    def complete(self) -> bool:
        """Whether the text is valid and nothing can follow."""
        return bool(self._matcher.is_stopped() and not self._matcher.is_error())

    @property
    def error(self) -> str | None:
        """Why there are no masks any more (a limit was reached), if so."""
        if self._matcher.is_error():
            return str(self._matcher.get_error()).partition("\n")[0]  # the library adds its state, line by line
        return _SLOW if self._seconds_left < 0 else None

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
        grammar, begin = self._grammar, time.thread_time()
        masks = np.full((len(draft) + 1, grammar.computed_words), -1, dtype=np.int32)
        if self._seconds_left < 0:
            masks[0] = 0
            return masks[:, : grammar.words]
        consumed = 0
        for row, token in zip(masks, [*draft, None], strict=True):
            self._matcher.unsafe_compute_mask_ptr(row.ctypes.data, row.nbytes)
            if self._matcher.is_error():
                row[:] = 0
                break
            if token is None or not self._matcher.try_consume_tokens([token]):
                break
            consumed += 1
        grammar.exhausted |= self._matcher.is_error()
        if consumed and self._matcher.is_error():  # perhaps on a way that is not taken
            self._matcher = grammar.matcher.deep_copy()
            self._matcher.consume_tokens(self._consumed)
        elif consumed:
            self._matcher.rollback(consumed)
        allowed = self._seconds_left + (consumed + 1) * _SECONDS_PER_MASK
        self._seconds_left = min(_MASK_SECONDS, allowed) - (time.thread_time() - begin)
        return masks[:, : grammar.words]


def _has_failed(future: Future[Grammar]) -> bool:
    return future.done() and (future.exception() is not None or future.result().exhausted)


def _definition(wanted: StructuredOutput) -> str:
    """The grammar as llguidance takes it."""
    answer = _unframed(wanted)
    if wanted.frame is None:
        return answer
    inner = json.loads(answer)["grammars"][0] if answer.startswith("{") else {"lark_grammar": answer}
    return json.dumps({"grammars": [{"lark_grammar": wanted.frame}, {**inner, "name": "answer"}]})


def _unframed(wanted: StructuredOutput) -> str:
    llguidance = _library()
    make = llguidance.LLMatcher
    try:
        if wanted.regex is not None:
            return str(make.grammar_from_regex(wanted.regex))
        if wanted.grammar is not None:
            return str(llguidance.grammar_from("grammar", wanted.grammar))
        if wanted.choice is not None:
            return str(make.grammar_from_lark("start: " + " | ".join(map(json.dumps, wanted.choice))))
        options = {"whitespace_pattern": _WHITESPACE, "lenient": False, "coerce_one_of": False}
        return str(make.grammar_from_json_schema(json.dumps(wanted.schema), overrides=options))
    except ValueError as error:
        raise RequestError(f"structured.{wanted.kind}: {error}") from error


def _library() -> Any:
    try:
        return importlib.import_module("llguidance")
    except ImportError as error:
        raise RequestError("structured: needs the package llguidance: pip install llguidance") from error
