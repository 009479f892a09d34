"""Incremental detokenization: a stream of tokens to a stream of text."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import Final

from ssd.text.tokenizer import REPLACEMENT, Tokenizer


class IncrementalDecoder:
    """Returns text as soon as it is final; the pieces together are the text of all tokens.

    However tokens are grouped, the text is the same: each is decoded by itself, except for tokens of whole characters.
    A character may be spread over several tokens; until it is complete it decodes to U+FFFD and is held back. Each
    piece is decoded behind the tokens of the piece before, because the first token of a text is decoded differently
    (sentencepiece drops its leading space). Both lists stay short, so a token costs the same however long the text.
    """

    _SETTLE: Final = 4  # tokens: more than one incomplete character can have
    _LIMIT: Final = 16  # maximum number of tokens held back

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_ids: Sequence[int] = (),
        skip_special_tokens: bool = True,
        shown_token_ids: Sequence[int] = (),
    ) -> None:
        """`prompt_ids`: what precedes the text; the end of it is context, and is never returned.

        `shown_token_ids`: special tokens that are not skipped.
        """
        self._tokenizer = tokenizer
        self._skip_special = skip_special_tokens
        self._shown = shown_token_ids
        self._context = self._visible(prompt_ids[-2 * self._SETTLE :])
        self._context_text = self._decode(self._context)
        self._pending: list[int] = []

    def push(self, *token_ids: int) -> str:
        """Add tokens; returns the text that they complete, which may be empty."""
        visible = self._visible(token_ids)
        if len(visible) == 1:
            return self._push(visible[0])
        runs = itertools.groupby(visible, self._tokenizer.is_whole)
        return "".join(self._push_whole(list(run)) if whole else self._push_each(run) for whole, run in runs)

    def _push_whole(self, ids: list[int]) -> str:
        """Tokens of whole characters, together: the text and the context are those of one after the other."""
        if len(ids) == 1 or self._pending or self._context_text.endswith(REPLACEMENT):
            return self._push_each(ids)
        text, self._context = self._new_text(ids), ids[-1:]
        self._context_text = self._decode(self._context)
        return text

    def _push_each(self, ids: Iterable[int]) -> str:
        return "".join(map(self._push, ids))

    def _push(self, token_id: int) -> str:
        self._pending.append(token_id)
        text = self._new_text(self._pending)
        if not text.endswith(REPLACEMENT):
            return self._commit(len(self._pending), text)
        if len(self._pending) < self._SETTLE:
            return ""
        return self._settle(text)

    def flush(self) -> str:
        """The text that is still held back; incomplete characters become U+FFFD."""
        return self._commit(len(self._pending), self._new_text(self._pending)) if self._pending else ""

    def _visible(self, ids: Iterable[int]) -> list[int]:
        """The tokens that have text at all: not special ones, nor ids beyond the vocabulary."""
        if not self._tokenizer.available:
            return []
        skip, shown, known = self._skip_special, self._shown, self._tokenizer.backend.id_to_token
        return [
            i for i in ids if not (skip and self._tokenizer.is_special(i) and i not in shown) and known(i) is not None
        ]

    def _decode(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(ids, self._skip_special and not self._shown) if ids else ""

    def _new_text(self, ids: list[int]) -> str:
        """The text that these tokens add behind the context."""
        text = self._decode(self._context + ids)
        if text.startswith(self._context_text):
            return text[len(self._context_text) :]
        return self._decode(ids)  # they change the text of the context, which was returned already

    def _settle(self, text: str) -> str:
        """Invalid bytes: return all but the last few tokens, which may still begin a character."""
        for count in range(len(self._pending) - 1, 0, -1):
            head, tail = self._new_text(self._pending[:count]), self._decode(self._pending[count:])
            if head + tail == text:
                return self._commit(count, head)
        return self._commit(len(self._pending), text) if len(self._pending) >= self._LIMIT else ""

    def _commit(self, count: int, text: str) -> str:
        """Moves the first pending tokens to the context (replacing it, if they have text)."""
        done, self._pending = self._pending[:count], self._pending[count:]
        self._context = (done if text else self._context + done)[-self._LIMIT :]
        self._context_text = self._decode(self._context)
        return text
