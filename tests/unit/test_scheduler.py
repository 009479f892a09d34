"""The scheduler: who runs, in which order, over how many tokens, and who makes way."""

from __future__ import annotations

import pytest
from fakes import make_sequence
from hypothesis import given, settings
from hypothesis import strategies as st

from ssd.core import Batch, Sequence, Status, Work
from ssd.engine.blocks import BlockPool
from ssd.engine.scheduler import Scheduler

SIZE = 4


def make_scheduler(
    num_blocks: int = 64, *, seqs: int = 8, tokens: int = 64, lookahead: int = 0, caching: bool = False
) -> Scheduler:
    pool = BlockPool(num_blocks, SIZE, prefix_caching=caching)
    return Scheduler(pool, max_num_seqs=seqs, max_num_batched_tokens=tokens, lookahead=lookahead)


def arrive(scheduler: Scheduler, *lengths: int, max_tokens: int = 32) -> list[Sequence]:
    """New sequences with all-different tokens, so that nothing is shared by accident."""
    first = len(scheduler.waiting) + len(scheduler.running)
    sequences = [
        make_sequence(range(1000 * (first + i), 1000 * (first + i) + n), id=first + i, max_tokens=max_tokens)
        for i, n in enumerate(lengths)
    ]
    for sequence in sequences:
        scheduler.add(sequence)
    return sequences


def commit(scheduler: Scheduler, works: list[Work]) -> None:
    """What the engine does after a round without drafts: KV, one new token where one was decided, finish when full."""
    for work in works:
        sequence, decides = work.sequence, work.decides
        sequence.num_computed += work.num_tokens
        if decides:
            sequence.tokens.append(len(sequence.tokens))
        scheduler.pool.commit(sequence)
        if sequence.room <= 0:
            scheduler.finish(sequence)


def play(scheduler: Scheduler) -> list[Work]:
    """One round; checks what must hold in every round."""
    works = scheduler.schedule()
    check_plan(scheduler, works)
    commit(scheduler, works)
    scheduler.pool.check(scheduler.running)
    return works


def check_plan(scheduler: Scheduler, works: list[Work]) -> None:
    assert len({work.sequence.id for work in works}) == len(works), "a sequence is in the batch twice"
    assert len(scheduler.running) <= scheduler.max_num_seqs
    assert sum(work.num_tokens + work.lookahead for work in works) <= scheduler.max_num_batched_tokens
    for work in works:
        sequence = work.sequence
        assert sequence.status is Status.RUNNING
        assert sequence in scheduler.running
        assert 0 < work.num_tokens <= sequence.num_pending
        assert 0 <= work.lookahead <= (min(scheduler.lookahead, sequence.room - 1) if work.decides else 0)
        slots = sequence.num_computed + work.num_tokens + work.lookahead
        assert len(sequence.blocks) * SIZE >= slots, "too few slots"
    Batch.build(works, SIZE)


def shares(works: list[Work]) -> dict[int, int]:
    return {work.sequence.id: work.num_tokens for work in works}


# --- admission --------------------------------------------------------------------------------------------------------


def test_max_num_seqs_is_honoured() -> None:
    """Catches more sequences at a time than the device has rows for; a leaver makes room at once."""
    scheduler = make_scheduler(seqs=2)
    a, *_ = arrive(scheduler, 3, 3, 3)
    assert shares(play(scheduler)) == {0: 3, 1: 3}
    scheduler.finish(a)
    assert shares(play(scheduler)) == {1: 1, 2: 3}


def test_the_token_budget_cuts_prompts_into_chunks() -> None:
    """Catches batches beyond max_num_batched_tokens, and chunks that lose or repeat tokens."""
    scheduler = make_scheduler(tokens=8)
    arrive(scheduler, 5, 10)
    seen = [shares(play(scheduler)) for _ in range(3)]
    assert seen == [{0: 5, 1: 3}, {0: 1, 1: 7}, {0: 1, 1: 1}]


def test_arrival_order_is_admission_order() -> None:
    """Catches short prompts that overtake a long one for ever."""
    scheduler = make_scheduler(num_blocks=6, seqs=4)
    a, *_ = arrive(scheduler, 12, 16, 2)
    assert shares(play(scheduler)) == {0: 12}, "16 tokens do not fit beside 12, and 2 must wait behind them"
    scheduler.finish(a)
    assert list(shares(play(scheduler))) == [1, 2]


def test_admission_counts_cached_blocks_once() -> None:
    """Catches a prefix that is counted as free and as attached: admission would then promise blocks twice."""
    scheduler = make_scheduler(num_blocks=5, caching=True)
    pool = scheduler.pool
    base = list(range(12))
    scheduler.add(make_sequence([*base, 50], id=0))
    [work] = play(scheduler)
    scheduler.finish(work.sequence)
    second = make_sequence([*base, *range(60, 69)], id=1)  # needs 6 blocks, 3 of them cached: one too many
    scheduler.add(second)
    assert scheduler.schedule() == []
    assert second.blocks == []
    assert second.num_computed == 0
    pool.check([])
    scheduler.finish(second)
    third = make_sequence([*base, *range(60, 68)], id=2)
    scheduler.add(third)
    assert shares(scheduler.schedule()) == {2: 8}
    assert third.metrics.cached_tokens == 12


# --- prefill and decode together --------------------------------------------------------------------------------------


def test_decoding_is_never_starved_by_prefills() -> None:
    """Catches prefill-first scheduling: long prompts arrive all the time, yet every decoder moves each round."""
    scheduler = make_scheduler(num_blocks=200, seqs=6, tokens=6)
    decoders = arrive(scheduler, 2, 2, 2, max_tokens=40)
    play(scheduler)
    for _ in range(30):
        if len(scheduler.waiting) < 2:
            arrive(scheduler, 30, max_tokens=31)
        works = shares(play(scheduler))
        assert all(works.get(d.id) == 1 for d in decoders)
        assert sum(works.values()) == 6, "the prefill gets all that decoding leaves"


def test_an_old_prefill_does_not_starve_a_younger_decoder() -> None:
    """Catches serving in order of age alone: the decoder needs one token, the old prefill would take all of them."""
    scheduler = make_scheduler(tokens=4)
    old, young = arrive(scheduler, 2, 2, max_tokens=40)
    play(scheduler)
    scheduler.preempt(young)
    scheduler.preempt(old)
    old.tokens += range(20)
    play(scheduler)
    scheduler.running.append(young)
    scheduler.waiting.remove(young)
    young.status, young.num_computed = Status.RUNNING, young.num_computed
    assert scheduler.pool.grow(young, len(young.tokens))
    young.num_computed = len(young.tokens) - 1
    assert shares(play(scheduler)) == {young.id: 1, old.id: 3}


def test_chunks_share_batches_with_decoding() -> None:
    """Catches an engine that alternates between prefill batches and decode batches."""
    scheduler = make_scheduler(tokens=8)
    arrive(scheduler, 4, max_tokens=40)
    play(scheduler)
    arrive(scheduler, 20, max_tokens=40)
    assert [shares(play(scheduler)) for _ in range(4)] == [{0: 1, 1: 7}, {0: 1, 1: 7}, {0: 1, 1: 6}, {0: 1, 1: 1}]


@pytest.mark.parametrize("lookahead", [1, 3, 7])
def test_drafts_do_not_starve_other_decoders(lookahead: int) -> None:
    """Catches drafts of old sequences that push young decoders out of the batch, round after round.

    The budget is the smallest that the config allows beside four sequences: a token each; drafts get what is left.
    """
    scheduler = make_scheduler(seqs=4, tokens=8)
    sequences = arrive(scheduler, 2, 2, 2, 2, max_tokens=40)
    play(scheduler)
    scheduler.lookahead = lookahead
    for _ in range(4):
        assert set(shares(play(scheduler))) == {s.id for s in sequences}


# --- preemption -------------------------------------------------------------------------------------------------------


def test_the_youngest_makes_way() -> None:
    """Catches preempting an old sequence (whose work is worth most), or more of them than needed."""
    scheduler = make_scheduler(num_blocks=6)
    a, b, c = arrive(scheduler, 8, 8, 7, max_tokens=40)
    play(scheduler)  # 2 + 2 + 2 blocks, and everybody's next token but c's needs one more
    works = play(scheduler)
    assert [s.status for s in (a, b, c)] == [Status.RUNNING, Status.RUNNING, Status.WAITING]
    assert shares(works) == {0: 1, 1: 1}
    assert (c.metrics.preemptions, scheduler.num_preemptions) == (1, 1)


def test_preempted_sequences_come_back_in_order() -> None:
    """Catches a queue that turns round at each preemption, and preempted ones that queue behind newcomers."""
    scheduler = make_scheduler(num_blocks=8)
    sequences = arrive(scheduler, 8, 8, 8, 8, 1, max_tokens=40)
    play(scheduler)
    play(scheduler)
    assert [s.id for s in scheduler.running] == [0, 1]
    assert [s.id for s in scheduler.waiting] == [2, 3, 4]
    for s in sequences[:2]:
        scheduler.finish(s)
    play(scheduler)
    assert [s.id for s in scheduler.running][:2] == [2, 3]


def test_preemption_loses_no_token() -> None:
    """Catches dropping the output: the KV is computed again over prompt and output, and the next token follows."""
    scheduler = make_scheduler()
    [a] = arrive(scheduler, 5, max_tokens=40)
    for _ in range(4):
        play(scheduler)
    tokens = a.tokens.copy()
    scheduler.preempt(a)
    assert (a.tokens, a.num_computed, a.blocks, a.status) == (tokens, 0, [], Status.WAITING)
    [work] = scheduler.schedule()
    assert work.decides
    assert work.query_tokens == tokens


def test_preempted_kv_is_found_again() -> None:
    """Catches a preemption that throws away KV nobody else needed; what it cost at first admission stays on record."""
    scheduler = make_scheduler(caching=True)
    [a] = arrive(scheduler, 9, max_tokens=40)
    play(scheduler)
    scheduler.preempt(a)
    [work] = scheduler.schedule()
    assert work.num_tokens == 2
    assert a.num_computed == 8
    assert a.metrics.cached_tokens == 0


@pytest.mark.parametrize("state", ["waiting", "running", "preempted"])
def test_finish_works_anywhere(state: str) -> None:
    """Catches an abort that leaves the sequence in a queue or keeps its blocks."""
    scheduler = make_scheduler()
    [a] = arrive(scheduler, 5)
    if state != "waiting":
        play(scheduler)
    if state == "preempted":
        scheduler.preempt(a)
    scheduler.finish(a)
    assert not scheduler.has_work
    assert a.status is Status.FINISHED
    assert scheduler.pool.num_free == 64
    assert scheduler.schedule() == []


# --- lookahead --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lookahead", [1, 3, 7, 20])
def test_lookahead_is_reserved_but_not_counted(lookahead: int) -> None:
    """Catches drafts without slots (they would write into a neighbour's block) and slots taken for tokens."""
    scheduler = make_scheduler(lookahead=lookahead, caching=True)
    [a] = arrive(scheduler, 8, max_tokens=32)
    while a.status is not Status.FINISHED:
        [work] = scheduler.schedule()
        room = min(lookahead, a.room - 1)
        assert len(a.blocks) == scheduler.pool.blocks_for(a.num_computed + work.num_tokens + room)
        assert (work.num_tokens, a.num_pending) == (len(a.tokens) - a.num_computed,) * 2
        commit(scheduler, [work])
        assert len(a.prefix_entries) == a.num_computed // SIZE
    assert len(a.tokens) == 32


@pytest.mark.parametrize("lookahead", [0, 1, 3, 7])
@pytest.mark.parametrize("prompt", [1, 3, 4, 5, 15])
def test_the_last_token_needs_no_slot_beyond_the_maximum(lookahead: int, prompt: int) -> None:
    """Catches off-by-ones at max length: a pool of exactly max_model_len tokens must do, however long the lookahead."""
    scheduler = make_scheduler(num_blocks=4, lookahead=lookahead)
    [a] = arrive(scheduler, prompt, max_tokens=4 * SIZE)
    rounds = 0
    while a.status is not Status.FINISHED:
        play(scheduler)
        rounds += 1
    assert rounds == 16 - prompt
    assert scheduler.num_preemptions == 0


def test_a_prefill_chunk_reserves_no_lookahead() -> None:
    """Catches scratch slots for rows that decide nothing."""
    scheduler = make_scheduler(tokens=8, lookahead=7)
    [a] = arrive(scheduler, 20, max_tokens=40)
    [work] = scheduler.schedule()
    assert not work.decides
    assert len(a.blocks) == 2


# --- progress ---------------------------------------------------------------------------------------------------------


@settings(max_examples=150, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 23), min_size=1, max_size=6),
    extra=st.integers(0, 4),
    seqs=st.integers(1, 4),
    budget=st.integers(0, 12),
    lookahead=st.sampled_from([0, 1, 3, 7]),
    caching=st.booleans(),
)
def test_everybody_finishes(
    lengths: list[int], extra: int, seqs: int, budget: int, lookahead: int, caching: bool
) -> None:
    """Catches livelock (two sequences that preempt each other for ever) in a pool just big enough for one sequence."""
    scheduler = make_scheduler(6 + extra, seqs=seqs, tokens=seqs + budget, lookahead=lookahead, caching=caching)
    sequences = arrive(scheduler, *lengths, max_tokens=24)
    for _ in range(24 * 24 * len(lengths)):
        if not scheduler.has_work:
            break
        oldest = (scheduler.running or scheduler.waiting)[0]
        before = oldest.num_computed, oldest.num_output
        play(scheduler)
        assert (oldest.num_computed, oldest.num_output) > before or oldest.status is Status.FINISHED
    assert all(s.status is Status.FINISHED and len(s.tokens) == 24 for s in sequences)
    assert scheduler.pool.num_free == 6 + extra
