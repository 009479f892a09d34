"""The front door: prompts of every kind, streams, refusals, closing, and a start that does not keep people waiting."""

from __future__ import annotations

import asyncio
import dataclasses
import gc
import json
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import TestModel
from fakes import wait_until_idle

from ssd import LLM, ConfigError, ModelNotFound, RequestError, SamplingParams, UnsupportedModel
from ssd.config import EngineConfig
from ssd.core import Delta, RequestOutput
from ssd.engine.submission import Submission
from ssd.errors import EngineClosed, RequestFailed
from ssd.llm import TextStream

SHORT = SamplingParams(max_new_tokens=8, ignore_eos=True)


@pytest.fixture(scope="module")
def path(make_model: Callable[[str], TestModel]) -> str:
    return make_model("llama-tied").path


@pytest.fixture(scope="module")
def llm(path: str) -> Iterator[LLM]:
    with LLM(path, device="cpu", max_model_len=64, max_num_seqs=4) as llm:
        yield llm


def test_text_and_token_ids_are_the_same_prompt(llm: LLM) -> None:
    [by_text] = llm.generate("hello", SHORT)
    [by_ids] = llm.generate(by_text.prompt_token_ids, SHORT)
    assert len(by_text.prompt_token_ids) == len("hello")
    assert by_text.token_ids == by_ids.token_ids
    assert by_text.text == by_ids.text
    assert by_text.finish_reason == "length"


def test_several_prompts_each_with_their_own_parameters(llm: LLM) -> None:
    long, short = llm.generate(["one", [1, 2, 3]], [SamplingParams(max_new_tokens=9, ignore_eos=True), SHORT])
    assert (len(long.token_ids), len(short.token_ids)) == (9, 8)
    with pytest.raises(RequestError, match="1 SamplingParams for 2 prompts"):
        llm.generate(["one", "two"], [SHORT])
    assert llm.generate([]) == []


def test_streamed_pieces_make_up_the_text(llm: LLM) -> None:
    stream = llm.stream("hello", SHORT)
    pieces = list(stream)
    assert stream.output is not None
    assert "".join(pieces) == stream.output.text == llm.generate("hello", SHORT)[0].text


def test_several_samples_are_streamed(llm: LLM) -> None:
    """Catches samples that are mixed up, or text that is not that of the whole answer."""
    params = SamplingParams(n=3, temperature=1.0, seed=5, max_new_tokens=8, ignore_eos=True)
    with pytest.raises(RequestError, match="n=3"):
        llm.stream("hello", params)
    stream = llm.stream_deltas("hello", params)
    texts = ["", "", ""]
    for delta in stream:
        texts[delta.index] += delta.text
    [whole] = llm.generate("hello", params)
    assert texts == [sample.text for sample in whole.samples]
    assert len(set(texts)) == 3
    assert stream.output is not None
    assert [sample.token_ids for sample in stream.output.samples] == [sample.token_ids for sample in whole.samples]


def test_dropping_a_stream_ends_the_request(llm: LLM) -> None:
    """Catches blocks that stay with an abandoned request."""
    stream = llm.stream("hello", SamplingParams(max_new_tokens=50, ignore_eos=True))
    next(stream)
    del stream
    assert llm.generate("next", SHORT)[0].finish_reason == "length"
    wait_until_idle(llm.driver)


class Holder:
    """Keeps itself and a stream alive until the cyclic collector comes by."""

    def __init__(self, stream: TextStream) -> None:
        self.me = self
        self.stream = stream


def test_a_stream_collected_in_the_middle_of_a_round_harms_nobody(llm: LLM) -> None:
    """Catches a garbage collector that releases a sequence's blocks while they are being computed."""
    holder = Holder(llm.stream("hello", SamplingParams(max_new_tokens=50, ignore_eos=True)))
    next(holder.stream)
    forward = llm.engine.round.target.forward

    def collecting(*arguments: Any, **options: Any) -> Any:
        gc.collect()
        return forward(*arguments, **options)

    del holder
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(llm.engine.round.target, "forward", collecting)
        assert len(llm.generate("other", SHORT)[0].token_ids) == 8
    wait_until_idle(llm.driver)


def test_a_request_whose_round_fails_says_so(llm: LLM) -> None:
    """Catches a text that ends early without a word; the next request must be served."""

    def failing(*arguments: Any) -> None:
        raise MemoryError("out of memory")

    for ask in (lambda: llm.generate("hello", SHORT), lambda: list(llm.stream("hello", SHORT))):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(llm.engine.round.target, "stage", failing)
            with pytest.raises(RequestFailed, match="out of memory"):
                ask()
        assert llm.generate("hello", SHORT)[0].finish_reason == "length"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(llm.engine.round.target, "stage", failing)
        outputs = llm.generate(["one", "two"], SHORT)
    assert [output.finish_reason for output in outputs] == ["error", "error"]
    assert all("out of memory" in (output.error or "") for output in outputs)
    assert llm.generate("hello", SHORT)[0].error is None


ODD_PROMPTS: list[Any] = [
    ["ok", 5],
    {"role": "user"},
    torch.tensor([1, 2]),
    ["ok", "\ud800"],
    [torch.tensor([1])],
    5,
    [True],
    b"abc",
    bytearray(b""),
    memoryview(b"abc"),
    ["ok", b"abc"],
]


@pytest.mark.parametrize(
    "prompts", ODD_PROMPTS, ids=lambda p: ascii(p) if not isinstance(p, memoryview) else "memoryview"
)
def test_odd_prompts_are_refused_by_name(llm: LLM, prompts: Any) -> None:
    """Catches raw TypeErrors, and one odd prompt that takes the others with it."""
    try:
        outs = llm.generate(prompts, SHORT)
    except RequestError as error:
        assert "read" in str(error)  # noqa: PT017
    else:
        assert [out.error is None for out in outs] == [isinstance(p, str) and p == "ok" for p in prompts]
    with pytest.raises(RequestError, match="pass SamplingParams"):
        llm.generate("ok", {"temperature": 1.0})  # type: ignore[arg-type]


def test_numpy_integers_are_token_ids(llm: LLM) -> None:
    """Catches ids of an array's elements that are taken for prompts, or refused as outside of the vocabulary."""
    ids = np.array([1, 2, 3])
    assert llm.generate(list(ids), SHORT)[0].token_ids == llm.generate([1, 2, 3], SHORT)[0].token_ids
    assert llm.generate([list(ids)], SHORT)[0].prompt_token_ids == [1, 2, 3]
    with pytest.raises(RequestError, match=r"\.tolist\(\)"):
        llm.encode(ids)  # type: ignore[arg-type]


def test_token_ids_are_decoded(llm: LLM) -> None:
    ids = llm.encode("hello")
    assert llm.decode(ids) == llm.tokenizer.decode(ids) == "hello"
    for odd in ([-1], ["x"], 5, b"abc"):
        with pytest.raises(RequestError, match="token_ids="):
            llm.decode(odd)  # type: ignore[arg-type]


def test_log_probabilities_have_the_text_of_their_tokens(llm: LLM) -> None:
    [out] = llm.generate("hello", replace(SHORT, logprobs=2))
    for entry in out.logprobs or []:
        assert entry.decoded == {token: llm.tokenizer.token_text(token) for token in {entry.token_id, *entry.top}}
    assert llm.tokenizer.token_text(llm.encode("h")[0]) == "h"


def test_an_output_knows_its_prompt_and_params(llm: LLM) -> None:
    """Catches outputs of which nobody knows what was asked, refused ones included."""
    text, ids, long = llm.generate(["hello", [1, 2], "x" * 100], SHORT)
    assert [out.prompt for out in (text, ids, long)] == ["hello", None, "x" * 100]
    assert text.params == replace(SHORT, seed=text.params.seed)
    assert (long.params, long.samples[0].seed) == (SHORT, None)
    stream = llm.stream("hello", SHORT)
    list(stream)
    assert stream.output is not None
    assert (stream.output.prompt, stream.output.text) == ("hello", text.text)


def test_the_config_has_what_was_chosen(path: str) -> None:
    """Catches an "auto" or None that is left after the engine has decided; a Path is a model, too."""
    speculation = {"mode": "ssd", "draft": Path(path), "k": 2, "placement": "inline"}
    with LLM(Path(path), max_num_seqs=2, speculation=speculation) as llm:
        chosen = dataclasses.asdict(llm.config)
        assert (llm.config.device, llm.config.dtype) in (("cpu", "float32"), ("cuda", "bfloat16"))
        assert (chosen["model"], chosen["speculation"]["draft"]) == (path, path)
        left = {name for name, value in chosen.items() if value in (None, "auto")}
        assert left == {"quantization", "kv_cache_dtype"}  # none, and as the activations


def test_a_config_stands_for_its_options(path: str) -> None:
    """Catches a config whose options are dropped, and keywords beside it that are ignored."""
    with LLM(EngineConfig(path, max_num_seqs=2, device="cpu"), max_model_len=64) as llm:
        assert (llm.config.max_num_seqs, llm.config.max_model_len) == (2, 64)


@pytest.fixture(scope="module")
def chat_llm(path: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    copy = tmp_path_factory.mktemp("chat") / "model"
    shutil.copytree(path, copy)
    (copy / "chat_template.jinja").write_text("{% for m in messages %}{{ m.role }}: {{ m.content }};{% endfor %}")
    with LLM(copy, device="cpu", max_model_len=64, max_num_seqs=4) as llm:
        yield llm


def test_chat_answers_one_conversation_or_several(chat_llm: LLM) -> None:
    one, two = [{"role": "user", "content": "hi"}], [{"role": "user", "content": "ho"}]
    [alone] = chat_llm.chat(one, SHORT)
    first, second = chat_llm.chat([one, two], [SHORT, replace(SHORT, max_new_tokens=3)])
    assert alone.prompt == "user: hi;"
    assert alone.token_ids == first.token_ids == chat_llm.generate("user: hi;", SHORT)[0].token_ids
    assert (second.prompt, len(second.token_ids)) == ("user: ho;", 3)
    for odd in ("hi", ["hi"], [[]], [1, 2], [one, "hi"], b"hi"):
        with pytest.raises(RequestError):
            chat_llm.chat(odd, SHORT)  # type: ignore[arg-type]


def test_odd_params_are_refused_by_every_method(llm: LLM) -> None:
    for ask in (llm.generate, llm.stream, llm.stream_deltas, llm.chat):
        prompt: Any = [{"role": "user", "content": "hi"}] if ask == llm.chat else "hi"
        with pytest.raises(RequestError, match="pass SamplingParams"):
            ask(prompt, {"temperature": 1.0})  # type: ignore[operator]


def test_leftover_weights_are_refused(make_model: Callable[[str], TestModel], tmp_path_factory: Any) -> None:
    """A bias that the config does not mention would otherwise be dropped, and the text be wrong."""
    copy = tmp_path_factory.mktemp("leftover") / "model"
    shutil.copytree(make_model("llama-biased").path, copy)
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps({**config, "attention_bias": False}))
    with pytest.raises(UnsupportedModel, match=r"holds model\.layers\.\d\.self_attn\.\w+\.bias"):
        LLM(str(copy), device="cpu")


def test_up_to_exactly_the_maximum_length(llm: LLM) -> None:
    """63 + 1 and 1 + 63 tokens fit in 64; a prompt of 64 leaves no room and is refused."""
    unlimited = SamplingParams(max_new_tokens=1000, ignore_eos=True)
    for length in (63, 40, 1):
        [out] = llm.generate([5] * length, unlimited)
        assert len(out.token_ids) == 64 - length
        assert out.finish_reason == "length"
    with pytest.raises(RequestError, match="maximum context length is 64"):
        llm.generate([5] * 64, unlimited)


def test_the_remedy_for_a_long_prompt_works(path: str, llm: LLM) -> None:
    """Catches advice that the next error contradicts: a model of 512 positions cannot be asked for more."""

    def advice(llm: LLM, num_tokens: int) -> str:
        with pytest.raises(RequestError, match=f"has {num_tokens} tokens") as caught:
            llm.generate([5] * num_tokens, SHORT)
        return str(caught.value)

    assert advice(llm, 511).endswith("shorten the prompt or raise max_model_len")
    assert advice(llm, 512).endswith("shorten the prompt (max_model_len can be raised to 512, which is too little)")
    with LLM(path, device="cpu", max_num_seqs=1) as longest:
        assert advice(longest, 512).endswith("shorten the prompt (max_model_len cannot be raised)")
        assert len(longest.generate([5] * 511, SHORT)[0].token_ids) == 1
    with LLM(path, device="cpu", max_num_seqs=1, num_kv_blocks=2) as small:
        assert advice(small, 32).endswith("shorten the prompt (max_model_len cannot be raised)")
    with pytest.raises(ConfigError, match="beyond the model's positions: use at most 512"):
        LLM(path, device="cpu", max_model_len=513)


def test_prompts_of_one_call_do_not_preempt_each_other(path: str) -> None:
    """They are submitted in several batches, none of which waits for its share of the places."""
    with LLM(path, device="cpu", max_num_batched_tokens=64, max_num_seqs=8) as llm:
        llm.generate([[i] * 8 for i in range(24)], SamplingParams(max_new_tokens=30, ignore_eos=True))
        assert llm.engine.metrics.num_preemptions == 0


def test_a_refused_prompt_does_not_harm_the_others(llm: LLM) -> None:
    good, long, empty, alien = llm.generate([[1, 2], [3] * 100, "", [10**6]], SHORT)
    assert len(good.token_ids) == 8
    assert good.error is None
    for refused, word in ((long, "max_model_len"), (empty, "empty"), (alien, "outside")):
        assert refused.finish_reason == "abort"
        assert word in (refused.error or "")
        assert refused.token_ids == []


def test_a_full_batch_is_computed_while_other_prompts_are_read(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    params, prompts = SamplingParams(max_new_tokens=3), [[i + 1] * 20 for i in range(5)]
    with LLM(path, device="cpu", max_num_batched_tokens=40, max_num_seqs=8) as llm:
        expected = [llm.generate(prompt, params)[0].token_ids for prompt in prompts]
        submit, sizes = llm.driver.submit_many, list[int]()

        def watched(requests: Seq[tuple[Seq[int], SamplingParams]], **options: Any) -> list[Submission]:
            sizes.append(len(requests))
            return submit(requests, **options)

        monkeypatch.setattr(llm.driver, "submit_many", watched)
        outputs = llm.generate([*prompts[:3], [-1], *prompts[3:]], params)
        assert sizes == [2, 2, 1]
        assert [output.token_ids for output in outputs if output.error is None] == expected
        assert outputs[3].error is not None


def test_chat_without_a_template_says_so(llm: LLM) -> None:
    with pytest.raises(RequestError, match="chat template"):
        llm.generate([{"role": "user", "content": "hi"}], SHORT)


def test_metrics_are_filled(llm: LLM) -> None:
    [out] = llm.generate("metrics please", SHORT)
    m = out.metrics
    assert (m.prompt_tokens, m.output_tokens, m.rounds) == (14, 8, 8)
    assert 0 <= (m.time_to_first_token or -1) < 10
    assert (m.decode_tokens_per_second or 0) > 0


def test_stop_ids_of_the_generation_config_end_a_sequence(
    make_model: Callable[[str], TestModel], tmp_path_factory: pytest.TempPathFactory
) -> None:
    """All of them, not only the first."""
    copy = tmp_path_factory.mktemp("stops") / "model"
    shutil.copytree(make_model("llama-tied").path, copy)
    with LLM(str(copy), device="cpu") as llm:
        [free] = llm.generate("hello", SamplingParams(max_new_tokens=20, ignore_eos=True))
    first, second = free.token_ids[4], free.token_ids[9]
    Path(copy, "generation_config.json").write_text(json.dumps({"eos_token_id": [319, second, first]}))
    with LLM(str(copy), device="cpu") as llm:
        [out] = llm.generate("hello", SamplingParams(max_new_tokens=20))
        assert out.finish_reason == "stop"
        assert out.token_ids == free.token_ids[: free.token_ids.index(first) + 1]
        [later] = llm.generate("hello", SamplingParams(max_new_tokens=20, min_tokens=12))
        assert len(later.token_ids) > 12


def test_close_is_final_and_repeatable(path: str) -> None:
    llm = LLM(path, device="cpu")
    llm.close()
    llm.close()
    with pytest.raises(EngineClosed):
        llm.generate("hello", SHORT)


def test_options_are_checked(path: str) -> None:
    with pytest.raises(ConfigError, match="did you mean 'max_num_seqs'"):
        LLM(path, max_num_seq=4)
    with pytest.raises(ConfigError, match="beyond the model's"):
        LLM(path, device="cpu", max_model_len=10**6)
    with pytest.raises(ConfigError, match="num_kv_blocks"):
        LLM(path, device="cpu", max_model_len=512, num_kv_blocks=2)
    with pytest.raises(ConfigError, match="dtype='float16'"):
        LLM(path, device="cpu", dtype="float16")
    with pytest.raises(ConfigError, match='speculation mode="sd" needs a draft'):
        LLM(path, speculation={"mode": "sd"})
    with pytest.raises(ModelNotFound):
        LLM("no/such-model")


def test_import_is_quick_and_needs_nothing_and_the_interpreter_ends() -> None:
    """The import takes under two seconds of a core after torch's own, without transformers, triton, a GPU or an
    environment variable. Catches an exit with requests running that hangs or crashes in the middle of a kernel."""
    code = """
import torch, os, time, sys
variables = dict(os.environ)
os.environ.clear()
start = time.process_time()
from ssd import LLM, SamplingParams
seconds = time.process_time() - start
heavy = {"transformers", "triton", "gguf", "typer"} & set(sys.modules)
print("ok" if seconds < 2 and not heavy else f"{seconds:.2f} s, {heavy}")
os.environ.update(variables)
llm = LLM("tiny-llama", device="cpu", max_num_seqs=1)
stream = llm.stream("Once upon a time", SamplingParams(max_new_tokens=4000, ignore_eos=True))
print(len(next(stream)) > 0, flush=True)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=120)
    assert (done.returncode, done.stdout, done.stderr) == (0, "ok\nTrue\n", "")


@pytest.mark.slow
def test_a_tiny_model_is_ready_soon(path: str) -> None:
    """Three seconds from import to the first answer is the promise; ten here, because test machines are shared."""
    code = f"""
import torch, time
start = time.perf_counter()
from ssd import LLM, SamplingParams
LLM({path!r}, device="cpu").generate("hello", SamplingParams(max_new_tokens=4))
print(time.perf_counter() - start)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert float(done.stdout) < 10


# --- asyncio ----------------------------------------------------------------------------------------------------------


def test_agenerate_answers_as_generate_does(llm: LLM) -> None:
    """One prompt, several with one that is refused, a chat that cannot be served."""
    prompts: list[Any] = ["hello", "x" * 100, [1, 2, 3]]
    expected = llm.generate(prompts, SHORT)
    found = asyncio.run(llm.agenerate(prompts, SHORT))
    assert [output.token_ids for output in found] == [output.token_ids for output in expected]
    assert [output.prompt for output in found] == ["hello", "x" * 100, None]
    assert [output.error for output in found] == [output.error for output in expected]
    with pytest.raises(RequestError, match="100 tokens"):
        asyncio.run(llm.agenerate([5] * 100, SHORT))


def test_astream_gives_the_text_and_its_deltas(llm: LLM) -> None:
    async def read() -> tuple[list[str], list[Delta]]:
        return [piece async for piece in llm.astream("hello", SHORT)], [
            delta async for delta in llm.astream_deltas("hello", SHORT)
        ]

    pieces, deltas = asyncio.run(read())
    [expected] = llm.generate("hello", SHORT)
    assert "".join(pieces) == "".join(delta.text for delta in deltas) == expected.text
    assert deltas[-1].output is not None
    assert deltas[-1].output.prompt == "hello"
    with pytest.raises(RequestError, match=r"n=2.*astream_deltas"):
        asyncio.run(anext(llm.astream("hello", SamplingParams(n=2))))  # type: ignore[arg-type]


@pytest.mark.parametrize("method", ["agenerate", "astream"])
def test_cancelling_a_task_aborts_its_requests(llm: LLM, method: str) -> None:
    """Catches a request that goes on when nobody waits for it."""
    ended = list[RequestOutput]()
    llm.driver.on_end(ended.append)
    started = threading.Event()

    def slow(tokens: list[int], logits: Any) -> Any:
        started.set()
        time.sleep(0.01)
        return logits

    params = SamplingParams(max_new_tokens=50, ignore_eos=True, logits_processor=slow)

    async def read() -> None:
        async for _ in llm.astream("hello", params):
            pass

    async def cancelled() -> None:
        task = asyncio.create_task(read() if method == "astream" else llm.agenerate(["hello", "hi"], params))
        await asyncio.to_thread(started.wait)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(cancelled())
    wait_until_idle(llm.driver)
    assert {output.finish_reason for output in ended} == {"abort"}
