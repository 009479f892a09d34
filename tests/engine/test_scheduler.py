"""The scheduler: who runs, in which order, over how many tokens, and who makes way."""

from __future__ import annotations

import pytest
from fakes import make_sequence
from hypothesis import given
from hypothesis import strategies as st

from ssd.core import Proposal, Request, SamplingParams, Sequence, Status, Work
from ssd.engine.scheduler import Scheduler
from ssd.kv.blocks import BlockPool

SIZE = 4


def make_scheduler(
    num_blocks: int = 64, *, seqs: int = 8, tokens: int = 64, lookahead: int = 0, caching: bool = False
) -> Scheduler:
    pool = BlockPool(num_blocks, SIZE, prefix_caching=caching)
    scheduler = Scheduler(pool, max_num_seqs=seqs, max_num_batched_tokens=tokens)
    scheduler.lookahead = lookahead
    return scheduler


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


def schedule(scheduler: Scheduler) -> list[Work]:
    """The next round, while none is in flight."""
    works = scheduler.schedule()
    assert works is not None
    return works


def commit(scheduler: Scheduler, works: list[Work], num_accepted: int = 0) -> None:
    """What the engine does after a round: KV, new tokens where some were decided, finish when full."""
    for work in works:
        sequence = work.sequence
        if sequence.in_flight is work:
            sequence.in_flight = None
        if sequence.status is not Status.RUNNING:
            continue
        sequence.kv.num_computed += work.num_tokens
        if work.decides:
            accepted = min(num_accepted, work.proposal.num_tokens, sequence.num_remaining - 1)
            sequence.kv.num_computed += accepted
            sequence.tokens += range(len(sequence.tokens), len(sequence.tokens) + accepted + 1)
        scheduler.pool.commit(sequence.kv, sequence.tokens)
        if sequence.num_remaining <= 0:
            scheduler.finish(sequence)
    scheduler.released()


def leave(scheduler: Scheduler, sequence: Sequence) -> None:
    """A sequence finishes while no round is in flight."""
    scheduler.finish(sequence)
    scheduler.released()


def play(scheduler: Scheduler) -> list[Work]:
    """One round; checks what must hold in every round."""
    works = schedule(scheduler)
    check_plan(scheduler, works)
    commit(scheduler, works)
    check_blocks(scheduler)
    return works


def check_blocks(scheduler: Scheduler) -> None:
    scheduler.pool.check([sequence.kv for sequence in (*scheduler.running, *scheduler.leaving)])


def check_plan(scheduler: Scheduler, works: list[Work]) -> None:
    assert len({work.sequence.id for work in works}) == len(works), "a sequence is in the batch twice"
    assert len({work.slot for work in works}) == len(works), "two sequences have the same slot"
    assert len(scheduler.running) <= scheduler.max_num_seqs
    assert sum(work.cost for work in works) <= scheduler.max_num_batched_tokens
    slots = [s.slot for s in (*scheduler.running, *scheduler.leaving)]
    assert len(set(slots)) == len(slots)
    assert min(slots, default=0) >= 0
    for work in works:
        sequence, before = work.sequence, work.sequence.in_flight
        assert sequence.status is Status.RUNNING
        assert sequence in scheduler.running
        assert work.slot == sequence.slot
        assert 0 < work.num_tokens <= sequence.next_pending
        assert 0 <= work.lookahead <= (min(scheduler.lookahead, sequence.num_remaining - 1) if work.decides else 0)
        if before is None:
            assert work.start == sequence.kv.num_computed
        elif before.decides:
            assert (work.start, work.num_tokens) == (None, 1)
            assert len(sequence.tokens) + 1 < sequence.max_tokens, "the round in flight is sure to finish it"
        else:
            assert work.start == before.end
        end = sequence.most_len if work.start is None else work.end
        slots_needed = min(end + work.lookahead, sequence.max_tokens)
        assert len(sequence.kv.blocks) * SIZE >= slots_needed, "too few slots"


def shares(works: list[Work]) -> dict[int, int]:
    return {work.sequence.id: work.num_tokens for work in works}


# --- admission --------------------------------------------------------------------------------------------------------


def test_max_num_seqs_is_honoured() -> None:
    """Catches more sequences at a time than the device has rows for; a leaver makes room at once."""
    scheduler = make_scheduler(seqs=2)
    a, *_ = arrive(scheduler, 3, 3, 3)
    assert shares(play(scheduler)) == {0: 3, 1: 3}
    leave(scheduler, a)
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
    leave(scheduler, a)
    assert list(shares(play(scheduler))) == [1, 2]


def test_admission_counts_cached_blocks_once() -> None:
    """Catches a prefix that is counted as free and as attached: admission would then promise blocks twice."""
    scheduler = make_scheduler(num_blocks=5, caching=True)
    pool = scheduler.pool
    base = list(range(12))
    scheduler.add(make_sequence([*base, 50], id=0))
    [work] = play(scheduler)
    leave(scheduler, work.sequence)
    second = make_sequence([*base, *range(60, 69)], id=1)  # needs 6 blocks, 3 of them cached: one too many
    scheduler.add(second)
    assert schedule(scheduler) == []
    assert second.kv.blocks == []
    assert second.kv.num_computed == 0
    pool.check([])
    leave(scheduler, second)
    third = make_sequence([*base, *range(60, 68)], id=2)
    scheduler.add(third)
    assert shares(schedule(scheduler)) == {2: 8}
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
    scheduler.pool.release(old.kv)
    old.tokens += range(20)
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


# --- fair shares ------------------------------------------------------------------------------------------------------


def samples(
    scheduler: Scheduler, first: int, n: int, length: int = 3, priority: int = 0, group: str = ""
) -> list[Sequence]:
    """The sequences of a new request with n samples; `first`: id of the first one."""
    params = SamplingParams(n=n, priority=priority)
    request = Request(f"request-{first}", tuple(range(1000 * first, 1000 * first + length)), params, group)
    made = [Sequence.of(request, first + i, i, 100, frozenset()) for i in range(n)]
    for sequence in made:
        scheduler.add(sequence)
    return made


def first_token(scheduler: Scheduler, sequence: Sequence) -> int:
    """Rounds until a sequence has its first token."""
    for rounds in range(1, 100):
        play(scheduler)
        if sequence.num_output:
            return rounds
    raise AssertionError("it never gets a token")


@pytest.mark.parametrize("num_long", [1, 5])
def test_long_prompts_do_not_hold_up_a_short_one(num_long: int) -> None:
    """Catches prompts that are served one after the other: 5 of 200 tokens would take 63 rounds."""
    scheduler = make_scheduler(num_blocks=500, tokens=16)
    long = arrive(scheduler, *[200] * num_long, max_tokens=300)
    play(scheduler)
    [short] = arrive(scheduler, 6, max_tokens=300)
    assert first_token(scheduler, short) == 1
    assert long[0].kv.num_computed >= 16 + 8


def test_short_prompts_do_not_hold_up_a_long_one() -> None:
    """Catches serving the shortest first: the oldest gets half of the tokens, however many short ones come."""
    scheduler = make_scheduler(num_blocks=500, tokens=16)
    [long] = arrive(scheduler, 80, max_tokens=300)
    for _ in range(10):
        assert long.num_output == 0
        arrive(scheduler, 8, 8, max_tokens=9)
        play(scheduler)
    assert long.num_output == 1


def test_prompts_of_one_length_are_served_in_turn() -> None:
    """Catches sharing among equals, which delays all first tokens to the last."""
    scheduler = make_scheduler(tokens=16)
    arrive(scheduler, 16, 16, 16, max_tokens=17)
    assert [shares(play(scheduler)) for _ in range(3)] == [{0: 16}, {1: 16}, {2: 16}]


def test_half_prefilled_prompts_keep_their_blocks() -> None:
    """Catches admission to blocks that a prompt in chunks still needs: one of them would be preempted for nothing."""
    scheduler = make_scheduler(num_blocks=20, tokens=16)
    arrive(scheduler, 60, max_tokens=64)
    play(scheduler)
    arrive(scheduler, 24, 4, max_tokens=28)
    while scheduler.has_work:
        play(scheduler)
    assert scheduler.num_preemptions == 0


def test_tokens_that_nobody_else_can_take_go_to_the_long_prompt() -> None:
    """Catches a share that is kept free for a prompt that does not fit the pool, or whose prefix is cached."""
    scheduler = make_scheduler(num_blocks=22, tokens=16, caching=True)
    [long] = arrive(scheduler, 70, max_tokens=72)
    play(scheduler)
    arrive(scheduler, 20, max_tokens=72)
    assert shares(play(scheduler)) == {0: 16}
    leave(scheduler, scheduler.waiting[0])
    again = make_sequence([*long.tokens[:32], 7], id=9, max_tokens=72)
    scheduler.add(again)
    assert shares(play(scheduler)) == {0: 15, 9: 1}


def test_a_waiting_prompt_that_does_not_fit_holds_up_no_running_one() -> None:
    """Catches tokens that are kept for an earlier prompt that cannot be admitted: neither was computed, for ever."""
    scheduler = make_scheduler(num_blocks=20, tokens=16)
    scheduler.add(make_sequence(range(60), id=5, max_tokens=64))
    play(scheduler)
    scheduler.add(make_sequence(range(100, 144), id=0, max_tokens=64))  # waited while its group had its share
    assert shares(play(scheduler)) == {5: 16}
    while scheduler.has_work:
        assert play(scheduler)
    assert scheduler.num_preemptions == 0


def test_drafts_leave_tokens_for_prompts() -> None:
    """Catches a prompt that waits until those that decode have ended, since their drafts take all tokens."""
    scheduler = make_scheduler(seqs=4, tokens=9, lookahead=7)
    arrive(scheduler, 2, 2, max_tokens=90)
    for _ in range(3):
        play(scheduler)
    [prompt] = arrive(scheduler, 6, max_tokens=90)
    assert first_token(scheduler, prompt) == 2


@pytest.mark.parametrize("caching", [True, False])
def test_samples_of_a_request_that_is_alone_have_all_places(caching: bool) -> None:
    """Catches shares where nobody waits, and samples that are admitted one by one after their prompt."""
    scheduler = make_scheduler(num_blocks=200, seqs=8, caching=caching)
    samples(scheduler, 0, 20, length=7)
    play(scheduler)
    assert len(play(scheduler)) == 8


@pytest.mark.parametrize("n", [1, 20])
@pytest.mark.parametrize("caching", [True, False])
def test_many_samples_or_prompts_give_way_to_a_first_token(caching: bool, n: int) -> None:
    """Catches a request with a large n, or many prompts, that keeps all others waiting until one of them ends."""
    scheduler = make_scheduler(num_blocks=200, seqs=8, caching=caching)
    crowd = [s for i in range(20 // n) for s in samples(scheduler, i, n, group="crowd")]
    while len(scheduler.running) < 8:
        play(scheduler)
    others = [samples(scheduler, 100 + i, 1)[0] for i in range(7)]
    for _ in range(7):
        play(scheduler)
    assert [other.num_output > 0 for other in others] == [True] * 6 + [False]
    assert sum(s.status is Status.RUNNING for s in crowd) == 2, "its share: a quarter"
    leave(scheduler, others[0])
    assert first_token(scheduler, others[6]) == 1
    leave(scheduler, others[1])
    play(scheduler)
    assert sum(s.status is Status.RUNNING for s in crowd) == 3, "nobody else waits for a first token"


def test_samples_that_wait_for_their_prompt_hold_up_nobody() -> None:
    """Catches a queue that stops at the samples of a request whose long prompt is being prefilled."""
    scheduler = make_scheduler(num_blocks=200, tokens=16, caching=True)
    samples(scheduler, 0, 3, length=90)
    [other] = samples(scheduler, 100, 1)
    assert first_token(scheduler, other) == 1


@pytest.mark.parametrize(("length", "rounds", "cached"), [(25, 2, 24), (7, 1, 4)])
def test_samples_wait_for_the_prefill_of_the_first_and_reuse_it(length: int, rounds: int, cached: int) -> None:
    """Catches samples that compute the prompt once more each: while the first one runs, or in its first round."""
    scheduler = make_scheduler(num_blocks=200, tokens=16, caching=True)
    made = samples(scheduler, 0, 4, length=length)
    for _ in range(rounds):
        assert made[0].num_output == 0
        assert set(shares(play(scheduler))) == {0}
    assert made[0].num_output == 1
    play(scheduler)
    assert [s.num_output for s in made] == [2, 1, 1, 1]
    assert [s.metrics.cached_tokens for s in made] == [0] + [cached] * 3


# --- priority ---------------------------------------------------------------------------------------------------------


def test_lower_priority_values_are_served_earlier() -> None:
    """Catches priorities that are ignored, or turned round, in the queue and among prompts."""
    scheduler = make_scheduler(seqs=2, tokens=8)
    for first, priority in ((0, 5), (10, 0), (20, -1), (30, 0)):
        samples(scheduler, first, 1, length=8, priority=priority)
    assert shares(play(scheduler)) == {20: 8}
    assert [s.id for s in scheduler.waiting] == [10, 30, 0]


def test_the_lowest_priority_is_preempted_first() -> None:
    """Catches preempting the youngest, whatever its priority."""
    scheduler = make_scheduler(num_blocks=6)
    [low] = samples(scheduler, 0, 1, length=8, priority=1)
    [a] = samples(scheduler, 10, 1, length=8)
    [b] = samples(scheduler, 20, 1, length=7)
    play(scheduler)
    play(scheduler)
    assert [s.status for s in (low, a, b)] == [Status.WAITING, Status.RUNNING, Status.RUNNING]


@pytest.mark.parametrize("in_flight", [False, True])
def test_a_higher_priority_takes_the_place_of_a_lower_one(in_flight: bool) -> None:
    """Catches an urgent request that waits for batch jobs; and a preemption under a round in flight."""
    scheduler = make_scheduler(seqs=2)
    [low] = samples(scheduler, 0, 1, priority=1)
    [other] = samples(scheduler, 10, 1)
    works = schedule(scheduler)
    if in_flight:
        works = launch(works)
    else:
        commit(scheduler, works)
    [urgent] = samples(scheduler, 20, 1)
    if in_flight:
        assert scheduler.schedule() is None
        commit(scheduler, works)
    assert set(shares(play(scheduler))) == {other.id, urgent.id}
    assert scheduler.preempted == [low]
    [equal] = samples(scheduler, 30, 1)
    play(scheduler)
    assert equal.status is Status.WAITING
    assert scheduler.num_preemptions == 1


def test_a_crowd_of_higher_priority_keeps_its_places() -> None:
    """Catches the youngest of a large group that makes way for an unserved request of lower priority."""
    scheduler = make_scheduler(num_blocks=200, seqs=8)
    crowd = samples(scheduler, 0, 8, priority=-1)
    while len(scheduler.running) < 8:
        play(scheduler)
    [lower] = samples(scheduler, 100, 1, priority=0)
    play(scheduler)
    assert (lower.status, scheduler.num_preemptions) == (Status.WAITING, 0)
    [equal] = samples(scheduler, 200, 1, priority=-1)
    play(scheduler)
    assert (equal.status, scheduler.num_preemptions) == (Status.RUNNING, 1)
    assert crowd[-1].status is Status.WAITING


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
        leave(scheduler, s)
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
    assert (a.tokens, a.kv.num_computed, a.kv.blocks, a.status) == (tokens, 0, [], Status.WAITING)
    [work] = schedule(scheduler)
    assert work.decides
    assert (work.start, work.end) == (0, len(tokens))


def test_preempted_kv_is_found_again() -> None:
    """Catches a preemption that throws away KV nobody else needed; what it cost at first admission stays on record."""
    scheduler = make_scheduler(caching=True)
    [a] = arrive(scheduler, 9, max_tokens=40)
    play(scheduler)
    scheduler.preempt(a)
    [work] = schedule(scheduler)
    assert work.num_tokens == 2
    assert a.kv.num_computed == 8
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
    leave(scheduler, a)
    assert not scheduler.has_work
    assert a.status is Status.FINISHED
    assert scheduler.pool.num_free == 64
    assert schedule(scheduler) == []


# --- lookahead --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lookahead", [1, 3, 7, 20])
def test_lookahead_is_reserved_but_not_counted(lookahead: int) -> None:
    """Catches drafts without slots (they would write into a neighbour's block) and slots taken for tokens."""
    scheduler = make_scheduler(lookahead=lookahead, caching=True)
    [a] = arrive(scheduler, 8, max_tokens=32)
    while a.status is not Status.FINISHED:
        [work] = schedule(scheduler)
        room = min(lookahead, a.num_remaining - 1)
        assert len(a.kv.blocks) == -(-(a.kv.num_computed + work.num_tokens + room) // SIZE)
        assert (work.num_tokens, a.num_pending) == (len(a.tokens) - a.kv.num_computed,) * 2
        commit(scheduler, [work])
        assert len(a.kv.entries) == a.kv.num_computed // SIZE
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
    [work] = schedule(scheduler)
    assert not work.decides
    assert len(a.kv.blocks) == 2


# --- rounds in flight -------------------------------------------------------------------------------------------------


def launch(works: list[Work], drafted: int = 0) -> list[Work]:
    """Puts a round in flight; each of its sequences that decides has a draft of so many tokens, if they fit."""
    works = [
        work.with_proposal(Proposal(num_on_device=min(drafted, work.lookahead))) if work.decides else work
        for work in works
    ]
    for work in works:
        work.sequence.in_flight = work
    return works


def test_the_next_round_is_scheduled_before_its_length_is_known() -> None:
    """Catches a round that waits for the one before it, computes the wrong token, or reserves too few slots."""
    scheduler = make_scheduler(lookahead=3)
    [a] = arrive(scheduler, 7, max_tokens=40)
    first = launch(schedule(scheduler), drafted=3)
    second = schedule(scheduler)
    check_plan(scheduler, second)
    [work] = second
    assert (work.start, work.num_tokens, work.decides, work.lookahead) == (None, 1, True, 3)
    assert len(a.kv.blocks) == 4, "7 tokens, up to 4 more from the round in flight, and 3 drafted ones"
    second = launch(second, drafted=3)
    commit(scheduler, first, num_accepted=1)
    assert (len(a.tokens), a.kv.num_computed, a.in_flight) == (9, 8, second[0])
    commit(scheduler, second, num_accepted=3)
    assert (len(a.tokens), a.kv.num_computed, a.in_flight) == (13, 12, None)


def test_chunks_of_a_prompt_follow_each_other_in_flight() -> None:
    """Catches a chunk that is computed twice, or skipped, because the one before it is not committed."""
    scheduler = make_scheduler(tokens=8)
    arrive(scheduler, 20, max_tokens=40)
    seen, before = [], launch(schedule(scheduler))
    for _ in range(3):
        works = launch(schedule(scheduler))
        seen.append([(work.start, work.num_tokens, work.decides) for work in works])
        commit(scheduler, before)
        before = works
    assert seen == [[(8, 8, False)], [(16, 4, True)], [(None, 1, True)]]


def test_a_sequence_that_is_sure_to_finish_is_left_out() -> None:
    """Catches a round that is computed for nothing: the one in flight brings the last token."""
    scheduler = make_scheduler(lookahead=3)
    arrive(scheduler, 7, 3, max_tokens=8)
    first = launch(schedule(scheduler))
    assert shares(first) == {0: 7, 1: 3}
    assert shares(schedule(scheduler)) == {1: 1}


def test_a_finished_sequence_keeps_slot_and_blocks_while_it_is_in_flight() -> None:
    """Catches blocks, or a slot, that are given to somebody else while a round still writes there."""
    scheduler = make_scheduler(seqs=1)
    a, b = arrive(scheduler, 7, 5)
    works = launch(schedule(scheduler))
    blocks, slot = a.kv.blocks.copy(), a.slot
    scheduler.finish(a)
    assert scheduler.released() == []
    assert (a.kv.blocks, a.slot, scheduler.leaving) == (blocks, slot, [a])
    assert schedule(scheduler) == [], "there is no slot yet"
    commit(scheduler, works)
    assert (a.kv.blocks, a.slot, scheduler.leaving) == ([], -1, [])
    [work] = schedule(scheduler)
    assert (work.sequence, work.slot) == (b, slot)


def test_nobody_is_preempted_in_flight() -> None:
    """Catches blocks that are taken from under a round; once it is committed, the youngest makes way."""
    scheduler = make_scheduler(num_blocks=4)
    a, b = arrive(scheduler, 8, 8, max_tokens=40)
    works = launch(schedule(scheduler))
    assert scheduler.schedule() is None
    with pytest.raises(AssertionError):
        scheduler.preempt(b)
    assert (a.status, b.status, scheduler.num_preemptions) == (Status.RUNNING, Status.RUNNING, 0)
    commit(scheduler, works)
    assert shares(schedule(scheduler)) == {0: 1}
    assert scheduler.preempted == [b]


def test_blocks_that_are_about_to_be_free_are_waited_for() -> None:
    """Catches a preemption while a sequence is leaving, whose blocks would have done."""
    scheduler = make_scheduler(num_blocks=4)
    _, b = arrive(scheduler, 8, 8, max_tokens=40)
    works = launch(schedule(scheduler))
    scheduler.finish(b)
    assert scheduler.schedule() is None
    commit(scheduler, works)
    assert shares(schedule(scheduler)) == {0: 1}
    assert scheduler.num_preemptions == 0


# --- progress ---------------------------------------------------------------------------------------------------------


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
        before = oldest.kv.num_computed, oldest.num_output
        play(scheduler)
        assert (oldest.kv.num_computed, oldest.num_output) > before or oldest.status is Status.FINISHED
    assert all(s.status is Status.FINISHED and len(s.tokens) == 24 for s in sequences)
    assert scheduler.pool.num_free == 6 + extra


@given(
    data=st.data(),
    lengths=st.lists(st.integers(1, 23), min_size=1, max_size=6),
    extra=st.integers(0, 4),
    seqs=st.integers(1, 4),
    budget=st.integers(0, 12),
    lookahead=st.sampled_from([0, 1, 3, 7]),
    caching=st.booleans(),
)
def test_everybody_finishes_in_flight(
    data: st.DataObject, lengths: list[int], extra: int, seqs: int, budget: int, lookahead: int, caching: bool
) -> None:
    """The same while a round is always in flight, with drafts that stand or fall, and sequences that end early."""
    scheduler = make_scheduler(6 + extra, seqs=seqs, tokens=seqs + budget, lookahead=lookahead, caching=caching)
    sequences = arrive(scheduler, *lengths, max_tokens=24)
    before: list[Work] = []
    for _ in range(24 * 24 * len(lengths)):
        if not (scheduler.has_work or before):
            break
        works = scheduler.schedule()
        if works is None:
            commit(scheduler, before, data.draw(st.integers(0, lookahead)))
            works, before = schedule(scheduler), []
        check_plan(scheduler, works)
        works = launch(works, data.draw(st.integers(0, lookahead)))
        commit(scheduler, before, data.draw(st.integers(0, lookahead)))
        check_blocks(scheduler)
        before = works
        if scheduler.running and data.draw(st.integers(0, 15)) == 0:
            scheduler.finish(data.draw(st.sampled_from(scheduler.running)))
    assert all(s.status is Status.FINISHED for s in sequences)
    assert scheduler.leaving == []
    assert scheduler.pool.num_free == 6 + extra
