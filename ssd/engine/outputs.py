"""From tokens to what the user sees: text as it completes, stop strings, finish reasons."""

from __future__ import annotations

from ssd.core import Delta, FinishReason, Outcome, RequestMetrics, RequestOutput, Sample, Sequence
from ssd.text.tokenizer import IncrementalDecoder, Tokenizer


class Writer:
    """Writes one sequence's text. Tokens may land several at a time; nothing is written after a stop.

    Where no stop string is looked for, text is decoded when a delta or the sample is asked for.
    """

    def __init__(self, sequence: Sequence, tokenizer: Tokenizer | None, *, stream: bool = False) -> None:
        self.sequence = sequence
        self.stream = stream  # a delta is wanted after every round, and not only at the end
        self.text = ""
        self._decoder = IncrementalDecoder(tokenizer, sequence.tokens) if tokenizer else None
        self._unwritten: list[int] = []  # tokens
        self._cut = False  # a stop string has ended the text
        self._delivered = 0  # characters already handed out by `new_text`
        self._num_sent = 0  # tokens already handed out by `delta`
        self._num_accepted = 0  # drafted tokens among those not handed out
        self._stops: tuple[str, ...] = tuple(sequence.params.stop)

    def append(self, outcome: Outcome) -> FinishReason | None:
        """Appends an outcome's tokens to the sequence up to the first stop; returns why it ended, if it did."""
        for i, token in enumerate(outcome.token_ids):
            self.sequence.tokens.append(token)
            self._num_accepted += i < outcome.num_accepted
            if outcome.logprobs:
                self.sequence.logprobs.append(outcome.logprobs[i])
            reason = self._step(token)
            if reason is not None:
                return reason
        return None

    def new_text(self) -> str:
        """Text not handed out yet, less what might still turn out to be the beginning of a stop string."""
        self._catch_up()
        end = len(self.text) if self.sequence.finish_reason else len(self.text) - self._held_back()
        piece = self.text[self._delivered : end]
        self._delivered = max(self._delivered, end)
        return piece

    def finish(self) -> None:
        """Writes what is left, and what the decoder still holds back (an incomplete character, say)."""
        self._catch_up()
        if self._decoder is not None and not self._cut:
            self._write(self._decoder.flush())

    def delta(self) -> Delta:
        """What was not handed out yet."""
        s, start = self.sequence, self._num_sent
        tokens, logprobs = s.tokens[s.num_prompt + start :], s.logprobs[start:]
        delta = Delta(s.request.id, s.index, tokens, self.new_text(), logprobs, self._num_accepted, s.finish_reason)
        self._num_sent, self._num_accepted = start + len(tokens), 0
        return delta

    def sample(self) -> Sample:
        s = self.sequence
        wanted = s.params.logprobs is not None
        return Sample(
            s.index, self.text, s.output_token_ids, s.finish_reason, s.logprobs if wanted else None, s.metrics
        )

    def _step(self, token: int) -> FinishReason | None:
        sequence, params = self.sequence, self.sequence.params
        if token in sequence.stop_token_ids and sequence.num_output > params.min_tokens:
            return "stop"
        self._unwritten.append(token)
        if self._stops:
            self._catch_up()
        if self._cut:
            return "stop"
        return "length" if sequence.room <= 0 else None

    def _catch_up(self) -> None:
        if self._decoder is not None and self._unwritten:
            self._write(self._decoder.push(*self._unwritten))
        self._unwritten = []

    def _write(self, piece: str) -> None:
        """Appends to the text, and cuts it at the first stop string that the new characters complete."""
        before = len(self.text)
        self.text += piece
        if not piece or self.sequence.num_output < self.sequence.params.min_tokens:
            return
        found = [self.text.find(stop, max(0, before - len(stop) + 1)) for stop in self._stops]
        found = [at for at in found if at >= 0]
        if found:
            self.text = self.text[: min(found)]
            self._cut = True

    def _held_back(self) -> int:
        """Length of the longest end of the text that begins a stop string."""
        longest = 0
        for stop in self._stops:
            for n in range(min(len(stop) - 1, len(self.text)), longest, -1):
                if self.text.endswith(stop[:n]):
                    longest = n
                    break
        return longest


def refused(request_id: str, prompt_token_ids: list[int], error: str) -> RequestOutput:
    """The output of a request that could not be served."""
    sample = Sample(0, "", [], "abort", None, RequestMetrics())
    return RequestOutput(request_id, prompt_token_ids, [sample], error)
