"""From tokens to outputs: incremental detokenization, stop strings, finish reasons, deltas."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

import numpy as np

from ssd.core import (
    Delta,
    FinishReason,
    Outcome,
    PromptPart,
    Request,
    RequestMetrics,
    RequestOutput,
    Sample,
    SamplingParams,
    Sequence,
    Status,
    TokenLogprobs,
)
from ssd.errors import ALL_FORBIDDEN, NO_CHOICE, STRUCTURED_FAILED
from ssd.text.detokenizer import IncrementalDecoder
from ssd.text.tokenizer import Tokenizer

_LEAST_NORM: Final = 1e-12  # of a hidden state, so that zeros stay zeros


class StopStrings:
    """Finds stop strings in a growing text. A thousand of them cost little more than one."""

    def __init__(self, strings: Iterable[str]) -> None:
        self._strings = frozenset(strings)
        self._sorted = sorted(self._strings)
        self._lengths = sorted({len(string) for string in self._strings})
        self._first = frozenset(string[0] for string in self._strings)

    def __bool__(self) -> bool:
        return bool(self._strings)

    def start(self, text: str, before: int) -> int | None:
        """Start of the first stop string that ends behind the first `before` characters."""
        ends = range(before + 1, len(text) + 1)
        found = (end - n for end in ends for n in self._lengths if n <= end and text[end - n : end] in self._strings)
        return min(found, default=None)

    def held_back(self, text: str) -> int:
        """Length of the longest end of the text that begins a stop string."""
        longest = self._lengths[-1] - 1 if self._lengths else 0
        for start in range(max(0, len(text) - longest), len(text)):
            if text[start] in self._first:
                end = text[start:]
                at = bisect_right(self._sorted, end)  # longer strings with this beginning come next
                if at < len(self._sorted) and self._sorted[at].startswith(end):
                    return len(end)
        return 0


class OutputProcessor:
    """Appends decided tokens to one sequence, finds its stop, and detokenizes it.

    A round appends several tokens at once; those after a stop are dropped. Without stop strings, text is only decoded
    when a delta or the sample is built.
    """

    def __init__(
        self, sequence: Sequence, tokenizer: Tokenizer | None, vocab_size: int, *, stream: bool = False
    ) -> None:
        self.sequence = sequence
        self._vocab_size = vocab_size  # of the model
        self.stream = stream  # a delta after every round, not only at the end
        self.text = ""
        self.error: str | None = None  # why the sample failed
        self._tokenizer = tokenizer
        shown = sequence.params.shown_token_ids
        self._decoder = IncrementalDecoder(tokenizer, sequence.tokens, shown_token_ids=shown) if tokenizer else None
        self._undecoded: list[int] = []  # tokens that are not in the text yet
        self._cut = False  # a stop string has ended the text
        self._num_characters_sent = 0  # by `new_text`
        self._num_sent = 0  # tokens sent by `delta`
        self._num_accepted = 0  # accepted draft tokens among those not sent yet
        self._outcomes: list[Outcome] = []  # not sent yet; none unless `stream`
        self._stops = StopStrings(sequence.params.stop)
        self._prompt_logprobs: list[TokenLogprobs] = []  # of its tokens from the second on
        self._pooled: np.ndarray | None = None  # of the hidden states of its tokens

    def append(self, outcome: Outcome) -> FinishReason | None:
        """Appends an outcome's tokens to the sequence up to the first stop; returns why it ended, if it did.

        Where the target could choose no token, the sample fails after the accepted tokens, unless it has ended there.
        """
        if self.stream:
            self._outcomes.append(outcome)
        for i, token in enumerate(outcome.token_ids):
            if token < 0:
                self.error = self._no_choice()
                return "error"
            self.sequence.tokens.append(token)
            self._num_accepted += i < outcome.num_accepted
            if outcome.logprobs:
                self.sequence.logprobs.append(self._decoded(outcome.logprobs[i]))
            reason = self._step(token)
            if reason is not None:
                return reason
        return None

    def read_prompt(self, part: PromptPart) -> None:
        """Takes what was read of the prompt. After a preemption it is read from the beginning."""
        self.sequence.num_prompt_read = part.end
        self._prompt_logprobs[part.start :] = part.logprobs
        goes_on = self._pooled is not None and part.start and self.sequence.params.pooling == "mean"
        self._pooled = self._pooled + part.pooled if goes_on else part.pooled

    @property
    def prompt_logprobs(self) -> list[TokenLogprobs | None] | None:
        wanted = self.sequence.params.prompt_logprobs is not None
        return [None, *map(self._decoded, self._prompt_logprobs)] if wanted else None

    @property
    def embedding(self) -> list[float] | None:
        """The pooled hidden state, of length 1; the factor 1 / number of tokens of a mean makes no difference."""
        if self._pooled is None:
            return None
        vector: list[float] = (self._pooled / max(np.linalg.norm(self._pooled), _LEAST_NORM)).tolist()
        return vector

    def new_text(self) -> str:
        """Text that was not sent yet, except for an end that may be the beginning of a stop string."""
        self._decode_pending()
        end = len(self.text) if self.sequence.finish_reason else len(self.text) - self._stops.held_back(self.text)
        piece = self.text[self._num_characters_sent : end]
        self._num_characters_sent = max(self._num_characters_sent, end)
        return piece

    def finish(self) -> None:
        """Completes the text, with what the decoder still holds back (such as an incomplete character)."""
        self._decode_pending()
        if self._decoder is not None and not self._cut:
            self._append_text(self._decoder.flush())

    def delta(self) -> Delta:
        """Everything that was not sent yet."""
        s, start = self.sequence, self._num_sent
        tokens, logprobs = s.tokens[s.num_prompt + start :], s.logprobs[start:]
        delta = Delta(s.request.id, s.index, tokens, self.new_text(), logprobs, self._num_accepted, s.finish_reason)
        delta.outcomes, self._outcomes = self._outcomes, []
        self._num_sent, self._num_accepted = start + len(tokens), 0
        return delta

    def sample(self) -> Sample:
        s = self.sequence
        wanted = s.params.logprobs is not None
        logprobs = s.logprobs if wanted else None
        return Sample(s.index, self.text, s.output_token_ids, s.finish_reason, logprobs, s.metrics, s.seed)

    def _decoded(self, entry: TokenLogprobs) -> TokenLogprobs:
        """With the text of its tokens."""
        if self._tokenizer is not None:
            entry.decoded = {token: self._tokenizer.token_text(token) for token in (entry.token_id, *entry.top)}
        return entry

    def _no_choice(self) -> str:
        """Why there is no token to choose after those of the sequence."""
        constraint, processor = self.sequence.constraint, self.sequence.processor
        if processor is not None and processor.error is not None:
            return f"logits_processor failed: {processor.error}"
        if constraint is not None:
            constraint.masks([])  # a limit that was reached after draft tokens is reached again, and then known
            if constraint.error is not None:
                return f"{STRUCTURED_FAILED}: {constraint.error}"
        return NO_CHOICE if self._allowed_tokens() else ALL_FORBIDDEN

    def _allowed_tokens(self) -> set[int]:
        """Those that the request's parameters allow after the tokens of the sequence."""
        params, allowed = self.sequence.params, set(range(self._vocab_size))
        if self.sequence.constraint is not None:
            [mask] = self.sequence.constraint.masks([])
            allowed &= set(np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist())
        if self.sequence.num_output < params.min_tokens:
            allowed -= self.sequence.stop_token_ids
        return allowed - {token for token, bias in params.logit_bias.items() if bias == -math.inf}

    def _step(self, token: int) -> FinishReason | None:
        sequence, params = self.sequence, self.sequence.params
        if token in sequence.stop_token_ids and sequence.num_output > params.min_tokens:
            return "stop"
        self._undecoded.append(token)
        if self._stops:
            self._decode_pending()
        if self._cut or self._completes(token):
            return "stop"
        return "length" if sequence.num_remaining <= 0 else None

    def _completes(self, token: int) -> bool:
        """Whether the token completes a structured output: nothing can follow."""
        constraint = self.sequence.constraint
        if constraint is None:
            return False
        constraint.advance(token)
        return constraint.complete

    def _decode_pending(self) -> None:
        if self._decoder is not None and self._undecoded:
            self._append_text(self._decoder.push(*self._undecoded))
        self._undecoded = []

    def _append_text(self, piece: str) -> None:
        """Appends to the text, and cuts it at the first stop string that the new characters complete."""
        before = len(self.text)
        self.text += piece
        if not piece or self.sequence.num_output < self.sequence.params.min_tokens:
            return
        start = self._stops.start(self.text, before) if self._stops else None
        if start is not None:
            self.text = self.text[:start]
            self._cut = True


@dataclass
class RunningRequest:
    """A request and the outputs of its sequences, until all of them have finished."""

    request: Request
    processors: list[OutputProcessor]  # one per sample
    failed_rounds: int = 0  # failed rounds that it was in

    @property
    def finished(self) -> bool:
        return all(processor.sequence.status is Status.FINISHED for processor in self.processors)

    def output(self) -> RequestOutput:
        samples, request = [processor.sample() for processor in self.processors], self.request
        error = next((processor.error for processor in self.processors if processor.error is not None), None)
        output = RequestOutput(request.id, list(request.prompt_token_ids), samples, error, request.params)
        output.prompt_logprobs, output.embedding = self.processors[0].prompt_logprobs, self.processors[0].embedding
        return output


def refused(request_id: str, prompt_token_ids: list[int], params: SamplingParams, error: str) -> RequestOutput:
    """The output of a request that was refused."""
    sample = Sample(0, "", [], "abort", None, RequestMetrics())
    return RequestOutput(request_id, prompt_token_ids, [sample], error, params)
