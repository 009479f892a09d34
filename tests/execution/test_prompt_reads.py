"""Log-probabilities and embeddings of prompts: those of transformers, whatever the mode, the chunks and the company."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from conftest import TestModel

from ssd import LLM, RequestError, RequestOutput, SamplingParams
from ssd.engine.engine import Engine
from ssd.models.decoder import Decoder

PROMPT = [(7 * i) % 300 for i in range(150)]
SHORT = [[5], [3, 4], PROMPT[:40]]
SCORED = SamplingParams(prompt_logprobs=3, max_new_tokens=4, ignore_eos=True)


@pytest.fixture(scope="module")
def model(make_model: Callable[[str], TestModel]) -> TestModel:
    return make_model("llama-tied")


def values(output: RequestOutput) -> list[Any]:
    """Everything that must not depend on anything, without the text of tokens."""
    assert output.prompt_logprobs is not None
    assert output.prompt_logprobs[0] is None
    entries = [entry for entry in output.prompt_logprobs if entry is not None]
    assert [entry.token_id for entry in entries] == output.prompt_token_ids[1:]
    return [(entry.logprob, entry.top) for entry in entries]


@pytest.fixture(scope="module")
def plain(model: TestModel) -> list[list[Any]]:
    """Of `PROMPT` and `SHORT`, each alone."""
    with LLM(model.path, device="cpu") as llm:
        return [values(*llm.generate(prompt, SCORED)) for prompt in (PROMPT, *SHORT)]


def test_log_probabilities_of_a_prompt_are_those_of_transformers(model: TestModel, plain: list[list[Any]]) -> None:
    with torch.no_grad():
        expected = model.reference(torch.tensor([PROMPT])).logits[0].double().log_softmax(-1)
    for i, (own, top) in enumerate(plain[0]):
        assert own == pytest.approx(float(expected[i, PROMPT[i + 1]]), abs=2e-4)
        best, ids = expected[i].topk(3)
        assert list(top) == ids.tolist()
        assert list(top.values()) == pytest.approx(best.tolist(), abs=2e-4)


@pytest.mark.parametrize(
    "options",
    [
        {"max_num_batched_tokens": 64},
        {"max_num_batched_tokens": 7, "max_num_seqs": 4},
        {"num_kv_blocks": 12, "block_size": 16, "max_model_len": 180},
        {"prefix_caching": False},
        {"speculation": {"mode": "sd", "draft": "suffix"}},
        {"speculation": {"mode": "sd", "draft": "suffix", "acceptance": "rejection"}},
        {"speculation": {"mode": "ssd", "draft": "itself", "placement": "inline"}},
    ],
    ids=str,
)
def test_log_probabilities_of_a_prompt_depend_on_nothing_else(
    model: TestModel, plain: list[list[Any]], options: dict[str, Any]
) -> None:
    """Not on chunks, mode, company, preemptions or what the prefix cache holds: bit by bit."""
    if options.get("speculation", {}).get("draft") == "itself":
        options = {"speculation": {**options["speculation"], "draft": model.path}}
    plain_text = SamplingParams(max_new_tokens=30, ignore_eos=True)
    with LLM(model.path, device="cpu", **options) as llm:
        llm.engine.round.run_ahead = True
        llm.generate(PROMPT, plain_text)  # now in the prefix cache
        prompts = [PROMPT, *SHORT, PROMPT[:90], [9] * 20]
        outputs = llm.generate(prompts, [SCORED] * 4 + [plain_text] * 2)
        assert [values(output) for output in outputs[:4]] == plain
        assert [output.prompt_logprobs for output in outputs[4:]] == [None, None]
        assert outputs[0].metrics.cached_tokens == 0
        [again] = llm.generate(PROMPT, plain_text)
        assert (again.metrics.cached_tokens > 0) == llm.config.prefix_caching


@pytest.mark.slow
def test_log_probabilities_of_a_prompt_on_a_split_model(model: TestModel, plain: list[list[Any]]) -> None:
    """The ranks launch the same products; their sums are rounded otherwise than one rank's."""
    with LLM(model.path, device="cpu", tensor_parallel_size=2) as llm:
        for _ in range(2):
            outputs = llm.generate([PROMPT, *SHORT], SCORED)
        vectors = llm.embed([PROMPT, *SHORT])
    for output, expected in zip(outputs, plain, strict=True):
        assert [own for own, _ in values(output)] == pytest.approx([own for own, _ in expected], abs=2e-4)
    assert len(vectors) == 4


def test_the_head_computes_some_rows_at_a_time(model: TestModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches logits of a whole batch, which take 2 GB for 4,096 tokens of a large vocabulary."""
    with LLM(model.path, device="cpu") as llm:
        head = llm.engine.round.target.runner.decoder.head  # type: ignore[attr-defined]
        sizes, product = list[int](), head.logits
        monkeypatch.setattr(head, "logits", lambda x: sizes.append(len(x)) or product(x))
        llm.generate([PROMPT] * 3, SCORED)
    assert max(sizes) == 128
    assert sum(sizes) >= 3 * len(PROMPT)


def test_several_samples_share_the_log_probabilities_of_their_prompt(model: TestModel, plain: list[list[Any]]) -> None:
    params = SamplingParams(prompt_logprobs=3, n=3, temperature=1.0, seed=1, max_new_tokens=4)
    with LLM(model.path, device="cpu") as llm:
        [output] = llm.generate(PROMPT, params)
    assert values(output) == plain[0]
    assert len(output.samples) == 3


def test_a_prompt_that_is_preempted_while_it_is_read_is_read_again(model: TestModel, plain: list[list[Any]]) -> None:
    """Catches entries that are missing, or there twice."""
    with LLM(model.path, device="cpu", max_num_batched_tokens=16, max_num_seqs=4, block_size=16) as llm:
        preempted = list[int]()

        def preempt(engine: Engine) -> bool:
            for sequence in list(engine.scheduler.running):
                if 0 < sequence.num_prompt_read < sequence.num_prompt:
                    preempted.append(sequence.num_prompt_read)
                    engine.scheduler.preempt(sequence)
            return bool(preempted) or not engine.has_work

        submission = llm.driver.submit(PROMPT, SCORED)
        while not llm.driver.call(preempt):
            pass
        assert values(submission.result()) == plain[0]
        assert preempted


# --- embeddings -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("pooling", ["mean", "last"])
def test_an_embedding_is_the_pooled_last_hidden_state(model: TestModel, pooling: Any) -> None:
    prompts = [PROMPT, *SHORT]
    with LLM(model.path, device="cpu") as llm:
        found = llm.embed(prompts, pooling)
        assert llm.embed(PROMPT, pooling) == found[:1]
    for prompt, vector in zip(prompts, found, strict=True):
        with torch.no_grad():
            states = model.reference.model(torch.tensor([prompt])).last_hidden_state[0].double()
        pooled = states.mean(0) if pooling == "mean" else states[-1]
        assert vector == pytest.approx((pooled / pooled.norm()).tolist(), abs=1e-5)


@pytest.mark.parametrize("pooling", ["mean", "last"])
def test_an_embedding_does_not_depend_on_chunks_and_company(model: TestModel, pooling: Any) -> None:
    """Catches a sum that begins in the middle of a prompt: at a chunk, after the prefix cache, after a preemption."""
    with LLM(model.path, device="cpu") as llm:
        [alone] = llm.embed(PROMPT, pooling)
    with LLM(model.path, device="cpu", max_num_batched_tokens=32, max_num_seqs=8) as llm:
        llm.engine.round.run_ahead = True
        llm.generate(PROMPT, SCORED)
        assert llm.embed([PROMPT, *SHORT, PROMPT], pooling)[::4] == [pytest.approx(alone, rel=1e-12, abs=1e-15)] * 2


def test_prompts_that_cannot_be_embedded_are_refused(model: TestModel) -> None:
    with LLM(model.path, device="cpu", max_model_len=64) as llm:
        with pytest.raises(RequestError, match="150 tokens"):
            llm.embed([[1], PROMPT])
        with pytest.raises(RequestError, match="pooling='max': must be one of mean, last"):
            llm.embed([[1]], "max")  # type: ignore[arg-type]


def test_a_decoder_writes_the_states_of_all_rows(model: TestModel) -> None:
    """Catches states that differ from those the logits are computed from."""
    with LLM(model.path, device="cpu") as llm:
        params = SamplingParams(prompt_logprobs=0, logprobs=0, max_new_tokens=1, ignore_eos=True)
        [output] = llm.generate(PROMPT, params)
        assert isinstance(llm.engine.round.target.runner.decoder, Decoder)  # type: ignore[attr-defined]
        [more] = llm.generate([*PROMPT, *output.token_ids], params)
    assert output.logprobs is not None
    assert more.prompt_logprobs is not None
    last = more.prompt_logprobs[-1]
    assert last is not None
    assert last.logprob == output.logprobs[0].logprob
