"""The engine's thread: many callers at once, dropped and aborted requests, failing rounds, asyncio, closing, Ctrl-C."""

from __future__ import annotations

import asyncio
import collections
import gc
import os
import random
import signal
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from conftest import TestModel
from fakes import VOCAB, Harness, ScriptedDrafter, SeenBatch, StateDrafter, make_harness, naive, wait_until_idle

from ssd import LLM, SamplingParams
from ssd.core import Delta
from ssd.engine.driver import Driver
from ssd.engine.engine import Engine
from ssd.engine.submission import AsyncSubmission, Submission
from ssd.errors import EngineClosed, EngineFailed, RequestError

LONG = SamplingParams(max_new_tokens=60, temperature=0.8, seed=3)
SHORT = SamplingParams(max_new_tokens=5)
MAX_LEN = 64


@pytest.fixture(params=[False, True], ids=["synchronous", "run-ahead"])
def harness(request: pytest.FixtureRequest) -> Harness:
    drafter = StateDrafter(3, "mixed") if request.param else ScriptedDrafter(3, "mixed")
    return make_harness(drafter=drafter, num_blocks=48, max_model_len=MAX_LEN, run_ahead=request.param)


@pytest.fixture
def driver(harness: Harness) -> Iterator[Driver]:
    driver = Driver(harness.engine)
    yield driver
    driver.close(30)
    assert not driver._thread.is_alive()


def held(harness: Harness) -> tuple[threading.Event, threading.Event]:
    """Rounds that wait: the first event says that one has begun, the second lets it and all others go on."""
    begun, free = threading.Event(), threading.Event()

    def wait(batch: SeenBatch) -> None:
        begun.set()
        assert free.wait(30)

    harness.decoder.before = wait
    return begun, free


def expected(prompt: list[int], params: SamplingParams) -> list[int]:
    return naive(prompt, params, max_model_len=MAX_LEN).token_ids


# --- many callers -----------------------------------------------------------------------------------------------------


def test_eight_threads_at_once(driver: Driver) -> None:
    """Catches answers that are mixed up, lost or changed by who else is served."""

    def user(number: int) -> None:
        dice = random.Random(number)
        for turn in range(6):
            prompt = [dice.randrange(VOCAB) for _ in range(dice.randint(1, 20))]
            params = SamplingParams(max_new_tokens=dice.randint(1, 20), temperature=turn % 2, seed=number, logprobs=1)
            submission = driver.submit(prompt, params, stream=turn % 3 > 0)
            if turn % 3 == 1:
                next(submission)
                submission.abort()
                output = submission.result()
                wanted = expected(prompt, params)
                assert output.token_ids == wanted[: len(output.token_ids)]
                assert output.finish_reason in ("abort", "length")
            else:
                deltas = list(submission)
                tokens = [token for delta in deltas for token in delta.token_ids]
                assert tokens == submission.result().token_ids == expected(prompt, params)
                assert (len(deltas) > 1) <= (turn % 3 == 2)

    with ThreadPoolExecutor(8) as threads:
        list(threads.map(user, range(8)))
    wait_until_idle(driver)
    assert driver.engine.metrics.num_finished == 8 * 6


def test_an_llm_for_eight_threads(make_model: Callable[[str], TestModel]) -> None:
    """The same with text, prompts of every kind, `generate` and `stream`, over a model."""
    prompts = ["hello", [1, 2, 3], "a longer prompt, which is not the same", [300, 200]]
    params = [SamplingParams(max_new_tokens=6, temperature=i % 2, seed=i, ignore_eos=True) for i in range(4)]
    with LLM(make_model("llama-tied").path, device="cpu", max_model_len=64, max_num_seqs=4) as llm:
        alone = [llm.generate(prompt, p)[0] for prompt, p in zip(prompts, params, strict=True)]

        def user(number: int) -> None:
            outputs = llm.generate(prompts, params)
            assert [output.token_ids for output in outputs] == [output.token_ids for output in alone]
            i = number % 4
            assert "".join(llm.stream(prompts[i], params[i])) == alone[i].text

        with ThreadPoolExecutor(8) as threads:
            list(threads.map(user, range(8)))
        wait_until_idle(llm.driver)


def test_what_is_submitted_together_begins_together(harness: Harness, driver: Driver) -> None:
    """Catches a thread that is off with the first request while the others are still being posted."""
    for _ in range(20):
        first = len(harness.decoder.batches)
        for submission in driver.submit_many([([i, 2], SHORT) for i in range(4)]):
            submission.result()
        assert len(harness.decoder.batches[first].sequences) == 4


def test_a_submission_does_not_depend_on_the_callers_list(harness: Harness, driver: Driver) -> None:
    begun, free = held(harness)
    first = driver.submit([1], SHORT)
    assert begun.wait(30)
    prompt = [1, 2, 3]
    second = driver.submit(prompt, SHORT)
    prompt.clear()
    free.set()
    assert second.result().token_ids == expected([1, 2, 3], SHORT)
    assert first.result().metrics.arrival < second.result().metrics.arrival


def test_a_refused_request_is_refused_where_it_is_made(driver: Driver) -> None:
    """Catches a refusal that arrives late, that takes others with it, or that is not counted."""
    with pytest.raises(RequestError, match="token ids"):
        driver.submit([VOCAB], SHORT)
    with pytest.raises(RequestError, match="empty"):
        driver.submit_many([([1], SHORT), ([], SHORT)])
    assert driver.call(lambda engine: engine.metrics.num_refused) == 2
    assert driver.call(lambda engine: engine.metrics.num_requests) == 0


# --- requests that nobody wants any more ------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_thousand_streams_that_are_dropped_or_aborted(harness: Harness, driver: Driver) -> None:
    """Catches blocks, records or threads that stay behind, wherever a request was when it was left."""
    dice = random.Random(0)
    kept: list[Submission] = []
    for _ in range(1000):
        stream = driver.submit([dice.randrange(VOCAB)] * dice.randint(1, 30), LONG, stream=dice.random() < 0.8)
        way = dice.random()
        if way < 0.2:
            next(stream)
        if way < 0.5:
            stream.abort()
        elif way < 0.6:
            kept.append(stream)
    del stream
    kept.clear()
    wait_until_idle(driver)
    engine = driver.engine
    assert engine.metrics.num_finished == engine.metrics.num_requests == 1000
    assert engine.metrics.num_aborted > 500
    assert driver.submit([1, 2], SHORT).result().token_ids == expected([1, 2], SHORT)
    wait_until_idle(driver)  # which checks that nothing is left
    assert engine.num_unfinished_requests == 0
    assert isinstance(harness.engine.round.drafter, ScriptedDrafter)
    assert not harness.engine.round.drafter.known


def test_nothing_keeps_a_dropped_submission_alive(harness: Harness, driver: Driver) -> None:
    """Catches an engine's thread that holds on to the last thing it did for somebody."""
    begun, free = held(harness)
    submission = driver.submit([1, 2], LONG)
    assert begun.wait(30)
    gone = weakref.ref(submission)
    del submission
    assert gone() is None
    free.set()
    wait_until_idle(driver)
    submission = driver.submit([1, 2], SHORT)
    submission.result()
    driver.call(lambda engine, held=submission: held)
    gone = weakref.ref(submission)
    del submission
    gc.collect()
    assert gone() is None


def test_an_abort_ends_within_a_round(harness: Harness, driver: Driver) -> None:
    begun, free = held(harness)
    submission = driver.submit([1, 2], LONG, stream=True)
    assert begun.wait(30)
    submission.abort()
    free.set()
    output = submission.result()
    assert output.finish_reason == "abort"
    assert output.token_ids == expected([1, 2], LONG)[: len(output.token_ids)]
    assert len(harness.decoder.batches) == 1
    submission.abort()
    assert list(submission) == []


def test_ctrl_c_while_waiting_ends_the_request(harness: Harness, driver: Driver) -> None:
    """Catches a wait that cannot be interrupted, and a request that goes on although its caller left."""
    harness.decoder.before = lambda batch: time.sleep(0.01)
    submission = driver.submit([1, 2], LONG)
    main = threading.main_thread().ident
    assert main is not None
    threading.Timer(0.1, lambda: signal.pthread_kill(main, signal.SIGINT)).start()
    with pytest.raises(KeyboardInterrupt):
        submission.result()
    assert submission.result().finish_reason == "abort"
    wait_until_idle(driver)


def test_ctrl_c_at_any_moment_leaves_the_engine_as_it_was(harness: Harness, driver: Driver) -> None:
    """Catches an interrupt that reaches the bookkeeping: the engine's thread takes none."""
    main, dice, interrupted = threading.main_thread().ident, random.Random(2), 0
    for turn in range(60):
        params = SamplingParams(max_new_tokens=12, temperature=0.7, seed=turn)
        timer = threading.Timer(dice.random() * 0.02, lambda: signal.pthread_kill(main or 0, signal.SIGINT))
        try:
            timer.start()
            submissions = driver.submit_many([([1, 2, turn % 5, i], params) for i in range(4)])
            for i, submission in enumerate(submissions):
                assert submission.result().token_ids == expected([1, 2, turn % 5, i], params)
            timer.join()
            time.sleep(0.001)
        except KeyboardInterrupt:
            interrupted += 1
        timer.join()
        driver.call(lambda engine: engine.check())
    assert interrupted > 10
    del submissions, submission
    wait_until_idle(driver)


# --- failures ---------------------------------------------------------------------------------------------------------


def test_failing_rounds_cost_no_request_that_was_not_alone_in_one(harness: Harness, driver: Driver) -> None:
    """Catches a failure that reaches a request that waits, that leaks blocks, or that makes a later answer wrong."""
    dice, lost, repeated = random.Random(1), set(), collections.Counter[str]()

    def fail(batch: SeenBatch) -> None:
        if dice.random() < 0.05:
            involved = {sequence.request.id for sequence in batch.sequences}
            repeated.update(involved)
            lost.update(name for name in involved if len(involved) == 1 or repeated[name] == 3)
            raise torch.OutOfMemoryError("no memory left")

    harness.decoder.before = fail

    def user(number: int) -> int:
        failed = 0
        for turn in range(10):
            prompt, params = [number, turn], SamplingParams(max_new_tokens=8, temperature=0.7, seed=turn)
            submission = driver.submit(prompt, params)
            output = submission.result()
            if output.error is not None:
                assert submission.request_id in lost
                assert output.finish_reason == "error"
                assert "OutOfMemoryError: no memory left" in output.error
                failed += 1
            else:
                assert (output.error, output.token_ids) == (None, expected(prompt, params))
        return failed

    with ThreadPoolExecutor(8) as threads:
        failed = sum(threads.map(user, range(8)))
    assert failed == driver.engine.metrics.num_failed <= len(lost) < len(repeated) < 80
    wait_until_idle(driver)


def test_an_engine_that_keeps_failing_refuses(harness: Harness, driver: Driver) -> None:
    """Catches callers that wait for ever for a device that is gone."""

    def fail(batch: SeenBatch) -> None:
        raise RuntimeError("device lost")

    harness.decoder.before = fail
    submissions = driver.submit_many([([1, 2], LONG)] * 20)
    assert {submission.result().finish_reason for submission in submissions} == {"error"}
    for _ in range(2):
        with pytest.raises(EngineFailed, match="device lost"):
            driver.submit([1], SHORT).result()
    wait_until_idle(driver)


def test_a_bug_outside_of_the_rounds_is_told_to_everybody(
    harness: Harness, driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches a thread that dies silently."""

    def broken() -> list[Delta]:
        raise AssertionError("the books do not balance")

    monkeypatch.setattr(harness.engine, "step", broken)
    for _ in range(2):
        with pytest.raises(EngineFailed, match="the books do not balance"):
            driver.submit([1], SHORT).result()
    assert driver.call(lambda engine: engine.metrics.num_requests) == 1


# --- calls ------------------------------------------------------------------------------------------------------------


def test_calls_run_on_the_engines_thread_between_rounds(harness: Harness, driver: Driver) -> None:
    inside = False

    def pause(batch: SeenBatch) -> None:
        nonlocal inside
        inside = True
        time.sleep(0.001)
        inside = False

    def look(engine: Engine) -> str:
        assert not inside, "half a round is visible"
        assert driver.call(lambda same: same) is engine
        return threading.current_thread().name

    harness.decoder.before = pause
    for _ in driver.submit([1, 2], LONG, stream=True):
        assert driver.call(look) == "ssd-engine"
    with pytest.raises(ZeroDivisionError):
        driver.call(lambda engine: 1 // 0)
    assert driver.submit([1], SHORT).result().finish_reason == "length"


# --- asyncio ----------------------------------------------------------------------------------------------------------


def test_listeners_hear_of_every_request(harness: Harness, driver: Driver) -> None:
    """Also of those that nobody reads, that are aborted, or whose earlier listener fails."""
    ended: list[tuple[str, str | None]] = []

    def fails(_: object) -> None:
        raise ValueError("a bug of the listener")

    driver.on_end(fails)
    driver.on_end(lambda output: ended.append((output.request_id, output.finish_reason)))
    begun, free = held(harness)
    read, unread, aborted = (driver.submit([1, 2, number], SHORT) for number in range(3))
    assert begun.wait(30)
    aborted.abort()
    free.set()
    read.result()
    names = {handle.request_id for handle in (read, unread, aborted)}
    wait_until_idle(driver)
    assert {name for name, _ in ended} == names
    assert len(ended) == 3
    assert (aborted.request_id, "abort") in ended


def test_streamed_deltas_hold_the_outcomes_of_their_rounds(driver: Driver) -> None:
    """All tokens in order, the last outcome perhaps with tokens behind the end; none without `stream`."""
    deltas = list(driver.submit([1, 2, 3], LONG, stream=True))
    outcomes = [outcome for delta in deltas for outcome in delta.outcomes]
    written = [token for outcome in outcomes for token in outcome.token_ids]
    output = deltas[-1].output
    assert output is not None
    assert written[: len(output.token_ids)] == output.token_ids
    assert len(outcomes) == output.metrics.rounds
    assert sum(len(outcome.draft) for outcome in outcomes) == output.metrics.drafted
    assert all(not delta.outcomes for delta in driver.submit([1, 2, 3], LONG))


def test_asyncio(driver: Driver) -> None:
    """Catches deltas that come on the wrong thread or to the wrong task, and a reader who left."""
    params = [SamplingParams(max_new_tokens=6 + i, temperature=0.5, seed=i) for i in range(6)]

    async def read(i: int) -> list[int]:
        tokens: list[int] = []
        async for delta in driver.submit_async([i, 1], params[i], stream=True):
            assert threading.current_thread() is threading.main_thread()
            tokens += delta.token_ids
        return tokens

    async def leave(stream: AsyncSubmission) -> None:
        async for _ in stream:
            break

    async def everything() -> None:
        tasks = [asyncio.create_task(read(i)) for i in range(6)]
        await leave(driver.submit_async([9], LONG, stream=True))
        endless = asyncio.create_task(driver.submit_async([8], LONG).result())
        await asyncio.sleep(0)
        endless.cancel()
        assert await asyncio.gather(*tasks) == [expected([i, 1], params[i]) for i in range(6)]
        assert (await driver.submit_async([7], SHORT).result()).token_ids == expected([7], SHORT)
        with pytest.raises(RequestError):
            driver.submit_async([], SHORT)

    asyncio.run(everything())
    wait_until_idle(driver)
    assert driver.engine.metrics.num_finished == driver.engine.metrics.num_requests


def test_deltas_that_nobody_reads_in_time_become_one(driver: Driver) -> None:
    """Catches a slow reader whose deltas pile up, and a last delta that overtakes others."""
    params = SamplingParams(max_new_tokens=20, temperature=0.5, seed=3, n=2)

    async def read_late() -> list[Delta]:
        submission = driver.submit_async([5, 1], params, stream=True)
        await submission.done
        assert not submission.ended
        return [delta async for delta in submission]

    deltas = asyncio.run(read_late())
    output = deltas[-1].output
    assert output is not None
    assert sorted(delta.index for delta in deltas) == [0, 1]
    for delta in deltas:
        assert (delta.token_ids, delta.finish_reason) == (output.samples[delta.index].token_ids, "length")


def test_an_event_loop_that_has_ended(harness: Harness, driver: Driver) -> None:
    """Catches a reader whose event loop is gone, and who takes the engine's thread with it."""
    begun, free = held(harness)

    async def submit() -> AsyncSubmission:
        return driver.submit_async([1, 2], LONG, stream=True)

    left = asyncio.run(submit())
    assert begun.wait(30)
    free.set()
    assert driver.submit([1, 2], SHORT).result().token_ids == expected([1, 2], SHORT)
    wait_until_idle(driver)
    assert driver.engine.metrics.num_aborted == 1
    assert left.output is None


# --- the end ----------------------------------------------------------------------------------------------------------


def test_closing_ends_what_is_running(harness: Harness) -> None:
    """Catches readers that wait for ever, and a second close that hangs."""
    driver = Driver(harness.engine)
    begun, free = held(harness)
    ended: list[type[Exception]] = []

    def read() -> None:
        try:
            driver.submit([1, 2], LONG).result()
        except EngineClosed as error:
            ended.append(type(error))

    waiting = [threading.Thread(target=read) for _ in range(3)]
    for thread in waiting:
        thread.start()
    submission = driver.submit([3], LONG, stream=True)
    assert begun.wait(30)
    closing = [threading.Thread(target=driver.close) for _ in range(3)]
    for thread in closing:
        thread.start()
    free.set()
    for thread in (*closing, *waiting):
        thread.join(30)
        assert not thread.is_alive()
    assert len(ended) == 3
    with pytest.raises(EngineClosed):
        list(submission)
    with pytest.raises(EngineClosed):
        submission.result()
    submission.abort()
    driver.close()
    for use in (lambda: driver.submit([1], SHORT), lambda: driver.call(lambda engine: None), lambda: driver.engine):
        with pytest.raises(EngineClosed):
            use()


def test_a_forgotten_driver_ends_its_thread(harness: Harness) -> None:
    """Catches a model that stays in memory because its thread holds its owner; a stream in use keeps it."""
    driver = Driver(harness.engine)
    thread, stream = driver._thread, driver.submit([1, 2], SHORT, stream=True)
    del driver
    gc.collect()
    assert stream.result().token_ids == expected([1, 2], SHORT)
    del stream
    gc.collect()
    thread.join(30)
    assert not thread.is_alive()


def test_a_forked_process_is_told_at_once_that_it_has_no_engine(driver: Driver, harness: Harness) -> None:
    """It has no engine's thread, and would wait for ever: for new requests, old ones and calls."""
    begun, free = held(harness)
    running = driver.submit([1, 2], SHORT)
    assert begun.wait(30)
    child = os.fork()
    if child == 0:
        told = 0
        for ask in (lambda: driver.submit([1], SHORT), running.result, lambda: driver.call(lambda engine: engine)):
            try:
                ask()
            except EngineClosed as error:
                told += "spawn" in str(error)
        driver.close()
        os._exit(told)
    free.set()
    end = time.monotonic() + 30
    while (ended := os.waitpid(child, os.WNOHANG)) == (0, 0) and time.monotonic() < end:
        time.sleep(0.01)
    if ended == (0, 0):
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(ended[1]) == 3
    assert running.result().token_ids == expected([1, 2], SHORT)
