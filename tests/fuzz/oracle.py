"""What every request must be answered: by plain decoding, alone, in an engine of the same model and dtypes."""

from __future__ import annotations

import tempfile
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from conftest import TestModel, save_model
from random_requests import MAX_LEN, Models, make_models

from fuzz.case import BUNDLED, Call, Case
from ssd import LLM, RequestOutput
from ssd.core import Delta, Sample


class Oracle:
    """Makes the models, opens a plain engine for each, and remembers what it answered. To be closed."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory()
        self._kinds: dict[str, TestModel] = {}
        self._models: dict[str, Models] = {}
        self._engines: dict[tuple[str | None, ...], LLM] = {}
        self._answers: dict[tuple[str | None, ...], RequestOutput] = {}

    def __enter__(self) -> Oracle:
        return self

    def __exit__(self, *_: object) -> None:
        for llm in self._engines.values():
            llm.close()
        self._folder.cleanup()

    def paths(self, model: str) -> Models:
        """Of a model, and of its drafts by name."""
        if model in BUNDLED:
            return Models(model, {})
        if model not in self._models:
            self._models[model] = make_models(self._make, Path(self._folder.name) / f"{model}-noisy", model)
        return self._models[model]

    def _make(self, kind: str) -> TestModel:
        if kind not in self._kinds:
            self._kinds[kind] = save_model(kind, Path(self._folder.name) / kind)
        return self._kinds[kind]

    def answer(self, case: Case, call: Call) -> RequestOutput:
        """One sequence at a time, no drafts, no prefix cache, nothing in flight."""
        quantization = case.options.get("quantization")
        kv_cache_dtype = case.options.get("kv_cache_dtype", "auto")
        engine = case.model, case.dtype, quantization, kv_cache_dtype
        key = *engine, repr((call.prompt, call.params))
        if key not in self._answers:
            if engine not in self._engines:
                self._engines[engine] = LLM(
                    self.paths(case.model).target,
                    device="cpu",
                    dtype=case.dtype,
                    quantization=quantization,
                    kv_cache_dtype=kv_cache_dtype,
                    max_model_len=MAX_LEN,
                    max_num_seqs=1,
                    prefix_caching=False,
                )
            self._answers[key] = self._engines[engine].generate([call.prompt], call.params)[0]
        return self._answers[key]


def check_answer(output: RequestOutput, whole: RequestOutput, *, left: bool, lost: bool) -> None:
    """The output is the oracle's, or the beginning of it.

    `left`: the request was aborted before its end; `lost`: one of its rounds was made to fail.
    """
    assert output.prompt_token_ids == whole.prompt_token_ids
    reasons = {sample.finish_reason for sample in output.samples}
    assert (output.error is not None) == ("error" in reasons)
    assert output.error == whole.error or left or lost, output.error
    failed = lost or (output.error is not None and output.error == whole.error)  # perhaps before it was aborted
    assert ("abort" in reasons) == left or (left and failed), f"aborted: {left}, but it ended with {reasons}"
    check_prompt(output, whole, ended=not left and not lost)
    for sample, full in zip(output.samples, whole.samples, strict=True):
        what, end = f"sample {sample.index}", len(sample.token_ids)
        assert sample.token_ids == full.token_ids[:end], f"{what}: {sample.token_ids} is not {full.token_ids}"
        assert sample.logprobs == (None if full.logprobs is None else full.logprobs[:end]), f"{what}: log-probabilities"
        if sample.finish_reason == "abort" or (lost and sample.finish_reason == "error"):
            complete = end == len(full.token_ids) and full.finish_reason != "error"
            assert not complete, f"{what} was complete, and yet it ended with {sample.finish_reason!r}"
        else:
            assert sample.token_ids == full.token_ids, f"{what} ended too early: {sample.token_ids}"
            got, wanted = ((s.text, s.finish_reason) for s in (sample, full))
            assert got == wanted, f"{what}: {got} is not {wanted}"


def check_prompt(output: RequestOutput, whole: RequestOutput, *, ended: bool) -> None:
    """What was read of the prompt is the oracle's; all of it, unless the request may have ended before."""
    read, expected = output.prompt_logprobs or [], whole.prompt_logprobs or []
    assert read == expected[: len(read)], "log-probabilities of the prompt"
    assert len(read) == len(expected) or not ended, "the prompt was not read to its end"
    if ended and whole.embedding is not None:
        difference = np.array(output.embedding) - np.array(whole.embedding)
        assert np.abs(difference).max() < 1e-12, "the embedding is another one"


def check_deltas(deltas: Iterable[Delta], samples: Iterable[Sample]) -> None:
    """Deltas make up the answer: tokens, text and log-probabilities."""
    own: defaultdict[int, list[Delta]] = defaultdict(list)
    for delta in deltas:
        own[delta.index].append(delta)
    for sample in samples:
        parts = own[sample.index]
        joined: tuple[Any, ...] = (
            [token for delta in parts for token in delta.token_ids],
            "".join(delta.text for delta in parts),
            [entry for delta in parts for entry in delta.logprobs],
        )
        assert joined == (sample.token_ids, sample.text, sample.logprobs or []), "deltas do not make up the answer"
        assert [d.finish_reason for d in parts] == [None] * (len(parts) - 1) + [sample.finish_reason]
