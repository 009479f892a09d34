"""The block pool: exact prefix cache, eviction order, and books that balance."""

from __future__ import annotations

from collections.abc import Sequence as Seq

import pytest
from fakes import cached_prefixes
from hypothesis import given
from hypothesis import strategies as st

from ssd.kv.blocks import NULL, BlockPool, BlockTable, most_blocks

SIZE = 4


def computed(pool: BlockPool, tokens: Seq[int], num_computed: int | None = None) -> BlockTable:
    """A table that took what the cache has, computed `num_computed` tokens (default: all), and entered them."""
    table = BlockTable()
    pool.attach_prefix(table, tokens)
    assert pool.grow(table, len(tokens))
    table.num_computed = len(tokens) if num_computed is None else num_computed
    pool.commit(table, tokens)
    return table


def cached_tokens(pool: BlockPool, tokens: Seq[int]) -> int:
    """How many leading tokens the cache would give to a sequence; asks without leaving a trace in the books."""
    table = BlockTable()
    count = pool.attach_prefix(table, tokens)
    pool.release(table)
    return count


def take(pool: BlockPool, num_blocks: int) -> BlockTable:
    """A stranger that takes blocks and never computes anything."""
    table = BlockTable()
    assert pool.grow(table, num_blocks * pool.block_size)
    return table


# --- what the prefix cache finds --------------------------------------------------------------------------------------


def test_a_prefix_is_shared_by_block() -> None:
    """Catches a cache that copies, misses, or reorders blocks."""
    pool = BlockPool(8, SIZE)
    first = computed(pool, range(10))
    second = BlockTable()
    assert pool.attach_prefix(second, [*range(8), 99, 98]) == 8 == second.num_computed
    assert second.blocks == first.blocks[:2]
    assert second.entries == first.entries[:2]
    pool.check([first, second])


def test_the_end_of_a_prefix_is_computed_again_where_it_has_to_be() -> None:
    """Catches a pool that drops a cached block, enters it twice, or counts below zero."""
    pool = BlockPool(8, SIZE, recomputed=1)
    first = computed(pool, range(10))
    second = BlockTable()
    assert pool.attach_prefix(second, [*range(8), 99]) == 7 == second.num_computed
    assert second.blocks == first.blocks[:2]
    assert pool.grow(second, 9)
    second.num_computed = 9
    pool.commit(second, [*range(8), 99])
    assert second.entries == first.entries
    assert cached_tokens(pool, [5, 6, 7]) == 0
    pool.check([first, second])


def test_the_key_is_the_whole_prefix_not_the_block() -> None:
    """Catches a cache keyed by a block's own tokens: the same block behind another prefix has another KV."""
    pool = BlockPool(8, SIZE)
    computed(pool, [*range(4), *range(4), 9])
    assert cached_tokens(pool, [*range(4), *range(4), 7]) == 8
    assert cached_tokens(pool, [8, 8, 8, 8, *range(4), 7]) == 0
    pool = BlockPool(8, SIZE)
    computed(pool, [8, 8, 8, 8, *range(4), 9])
    assert cached_tokens(pool, [*range(4), 7]) == 0, "the second block must not serve as a first one"


def test_the_key_is_exact_content() -> None:
    """Catches a hash instead of a comparison: hash(-1) == hash(-2) and hash(2**61 - 1) == hash(0) in Python."""
    pool = BlockPool(8, SIZE)
    computed(pool, [-1, 0, 0, 0, 5])
    assert cached_tokens(pool, [-2, 0, 0, 0, 5]) == 0
    assert cached_tokens(pool, [-1, 2**61 - 1, 0, 0, 5]) == 0
    assert cached_tokens(pool, [-1, 0, 0, 0, 5]) == 4


@pytest.mark.parametrize("num_computed", range(13))
def test_only_full_blocks_of_computed_tokens_are_entered(num_computed: int) -> None:
    """Catches entering a block whose last slots have no KV yet (a prefill chunk that ends inside it)."""
    pool = BlockPool(8, SIZE)
    table = computed(pool, range(12), num_computed)
    assert len(table.entries) == num_computed // SIZE
    assert cached_tokens(pool, range(13)) == num_computed // SIZE * SIZE


@pytest.mark.parametrize("length", range(1, 14))
def test_one_token_is_always_left_to_compute(length: int) -> None:
    """Catches a fully cached prompt, which would leave no query token and hence no logits."""
    pool = BlockPool(8, SIZE)
    computed(pool, range(12))
    assert cached_tokens(pool, range(length)) == min((length - 1) // SIZE * SIZE, 12)


def test_commit_goes_on_where_it_stopped() -> None:
    """Catches entries that are made twice or skipped when a sequence grows over several rounds."""
    pool = BlockPool(8, SIZE)
    table = computed(pool, range(12), 0)
    for n in range(13):
        table.num_computed = n
        pool.commit(table, range(12))
    assert len(set(table.entries)) == 3
    assert cached_prefixes(pool) == {b: tuple(range(4 * i + 4)) for i, b in enumerate(table.blocks)}


def test_duplicates_are_not_entered_twice() -> None:
    """Catches two blocks under one key, of which the index would forget one; the copy is just a plain block."""
    pool = BlockPool(6, SIZE)
    twins, tokens = [BlockTable(), BlockTable()], [*range(8), 9]
    for twin in twins:  # both are admitted before either has computed anything
        pool.attach_prefix(twin, tokens)
        assert pool.grow(twin, 9)
    for twin in twins:
        twin.num_computed = 9
        pool.commit(twin, tokens)
        pool.check(twins)
    assert twins[0].entries == twins[1].entries
    assert set(cached_prefixes(pool)) == set(twins[0].blocks[:2])
    copies = twins[1].blocks.copy()
    for twin in twins:
        pool.release(twin)
    pool.check([])
    assert take(pool, 3).blocks != [], "the copies hold nothing that is worth keeping"
    assert cached_tokens(pool, range(9)) == 8
    assert not set(copies) & set(cached_prefixes(pool))


def test_prefix_caching_off() -> None:
    """Catches an option that is accepted and ignored."""
    pool = BlockPool(8, SIZE, prefix_caching=False)
    table = computed(pool, range(9))
    assert table.entries == []
    assert cached_prefixes(pool) == {}
    assert cached_tokens(pool, range(9)) == 0
    pool.release(table)
    assert pool.num_free == 8


def test_clear_prefix_cache_keeps_blocks_in_use() -> None:
    """Catches a clear that frees blocks of running sequences, or leaves entries behind."""
    pool = BlockPool(8, SIZE)
    user, done = computed(pool, range(9)), computed(pool, range(50, 59))
    pool.release(done)
    blocks = user.blocks.copy()
    pool.clear_prefix_cache()
    pool.check([user])
    assert user.blocks == blocks
    assert cached_tokens(pool, range(9)) == cached_tokens(pool, range(50, 59)) == 0
    assert pool.grow(user, 12)
    user.num_computed = 12
    pool.commit(user, range(12))
    assert cached_tokens(pool, range(13)) == 0, "a block behind a forgotten one must not be found from the root"
    pool.release(user)
    pool.check([])


# --- eviction ---------------------------------------------------------------------------------------------------------


def test_blocks_without_an_entry_go_first() -> None:
    """Catches eviction of cached prefixes while blocks that hold nothing are still free."""
    pool = BlockPool(6, SIZE)
    cached = computed(pool, range(9))  # two full blocks and a partial one
    pool.release(cached)
    take(pool, 4)  # three never used, and the partial one
    assert cached_tokens(pool, range(9)) == 8
    assert pool.num_free == 2


def test_a_prefix_loses_its_tail_before_its_head() -> None:
    """Catches evicting the head, which makes the whole tail unreachable at once."""
    pool = BlockPool(3, SIZE)
    table = computed(pool, range(12))
    pool.release(table)
    for left in (8, 4, 0):
        stranger = take(pool, 1)
        assert cached_tokens(pool, range(13)) == left
        stranger.blocks, kept = [], stranger.blocks  # stays taken
        assert kept


def test_the_longest_unused_prefix_goes_first() -> None:
    """Catches FIFO (or random) eviction: a prefix that was used again is younger than one that was not."""
    pool = BlockPool(4, SIZE)
    for tokens in (range(4), range(10, 14), range(20, 24)):
        pool.release(computed(pool, tokens))
    assert cached_tokens(pool, [*range(4), 9]) == 4  # a use: the oldest becomes the youngest
    take(pool, 2)  # the block that was never used, and one evicted
    pool_after = cached_prefixes(pool).values()
    assert set(pool_after) == {(0, 1, 2, 3), (20, 21, 22, 23)}
    take(pool, 1)
    assert list(cached_prefixes(pool).values()) == [(0, 1, 2, 3)]


def test_an_evicted_head_is_never_confused_with_its_successor() -> None:
    """Catches parents named by block number: after reuse, the old tail would hang behind a new head."""
    pool = BlockPool(2, SIZE)
    tail_owner = computed(pool, range(8))
    head = tail_owner.blocks[0]
    pool.release(tail_owner)
    fresh = BlockTable()
    pool._unused.move_to_end(head, last=False)  # force the unnatural order: the head goes first
    assert pool.grow(fresh, 4)
    fresh.num_computed = 4
    pool.commit(fresh, [90, 91, 92, 93])
    pool.release(fresh)
    assert cached_tokens(pool, [90, 91, 92, 93, 4, 5, 6, 7, 0]) == 4
    assert cached_tokens(pool, [*range(8), 0]) == 0


# --- balance ----------------------------------------------------------------------------------------------------------


def test_grow_is_all_or_nothing() -> None:
    """Catches a failed grow that keeps some blocks, or evicts entries for nothing."""
    pool = BlockPool(4, SIZE)
    pool.release(computed(pool, range(8)))
    greedy = take(pool, 1)
    assert not pool.grow(greedy, 5 * SIZE)
    assert len(greedy.blocks) == 1
    assert pool.num_free == 3
    assert cached_tokens(pool, range(9)) == 8
    assert pool.grow(greedy, SIZE), "it already has that much"
    assert pool.grow(greedy, 4 * SIZE)
    assert len(set(greedy.blocks)) == 4
    pool.check([greedy])


def test_a_shared_block_is_free_when_its_last_user_leaves() -> None:
    """Catches a block freed under somebody who still reads it, and one that never comes back."""
    pool = BlockPool(6, SIZE)
    users = [computed(pool, [*range(4), 10 + i]) for i in range(3)]
    assert len({u.blocks[0] for u in users}) == 1
    for i, user in enumerate(users):
        assert users[-1].blocks[0] not in pool._unused
        pool.release(user)
        pool.check(users[i + 1 :])
    assert pool.num_free == 6


def test_release_resets_the_table() -> None:
    """Catches a preempted sequence that believes its KV is still there; releasing twice must be harmless."""
    pool = BlockPool(4, SIZE)
    table = computed(pool, range(9))
    for _ in range(2):
        pool.release(table)
        assert (table.blocks, table.entries, table.num_computed) == ([], [], 0)
        pool.check([])


@pytest.mark.parametrize("damage", ["leak", "double", "index"])
def test_check_finds_damage(damage: str) -> None:
    """Catches a check that passes whatever happens."""
    pool = BlockPool(4, SIZE)
    table = computed(pool, range(9))
    if damage == "leak":
        table.blocks.pop()
    elif damage == "double":
        pool._unused[table.blocks[0]] = None
    else:
        pool._entry_of[table.blocks[0]][0].blocks.clear()
    with pytest.raises(AssertionError):
        pool.check([table])


# --- groups and windows -----------------------------------------------------------------------------------------------


def of_group(pool: BlockPool, table: BlockTable, group: int) -> list[int]:
    return table.blocks[group :: len(pool.windows)]


def test_a_window_frees_what_it_has_passed_and_full_attention_keeps_its_own() -> None:
    """Catches blocks that are freed while the next token sees them, never, or of the wrong group."""
    pool = BlockPool(32, SIZE, windows=(None, 6))
    table, tokens = BlockTable(), range(40)
    assert pool.grow(table, 40)
    whole, own = of_group(pool, table, 0), of_group(pool, table, 1)
    for table.num_computed in range(41):
        pool.commit(table, tokens)
        pool.check([table])
        first_seen = max(0, table.num_computed - 5) // SIZE
        assert of_group(pool, table, 0) == whole
        assert of_group(pool, table, 1) == [NULL] * first_seen + own[first_seen:]
        assert pool.num_free == 32 - 20 + first_seen


@pytest.mark.parametrize("caching", [False, True])
def test_a_window_alone_needs_few_blocks_for_a_long_text(caching: bool) -> None:
    """Catches a pool that counts a text's whole length, and a bound that is too low: in rounds of up to 3 tokens."""
    most = most_blocks(1000, SIZE, (6,), 3)
    pool = BlockPool(most, SIZE, windows=(6,), most_new=3, prefix_caching=caching)
    for least in (1, 3):
        table, tokens = BlockTable(), range(1000)
        while table.num_computed < 1000:
            assert len([b for b in table.blocks if b != NULL]) + pool.missing(table, 1000) <= most
            table_before = table.num_computed
            assert pool.grow(table, min(1000, table_before + 3))
            table.num_computed = min(1000, table_before + least)
            pool.commit(table, tokens)
            pool.check([table])
        assert pool.missing(table, 1000) == 0
        pool.release(table)
    assert pool.num_free == most


@pytest.mark.parametrize("windows", [(None, 6), (6,), (6, 6), (6, None)])
def test_a_prefix_needs_the_last_blocks_of_each_window(windows: tuple[int | None, ...]) -> None:
    """Catches a hit whose window was reused, one that asks for blocks before the window, and one that is lost."""
    pool = BlockPool(64, SIZE, windows=windows)
    first = computed(pool, range(42))
    assert cached_tokens(pool, range(42)) == 40
    group = windows.index(6)
    seen = {index: entry.blocks[group] for index, entry in enumerate(first.entries)}
    pool.release(first)
    pool._forget(seen[3])  # as its reuse does
    second = BlockTable()
    assert pool.attach_prefix(second, range(42)) == 40, "a prefix of 40 sees positions from 35 on: blocks 8 and 9"
    assert of_group(pool, second, group) == [*[NULL] * 8, seen[8], seen[9]]
    pool.check([second])
    pool.release(second)
    pool._forget(seen[8])
    assert cached_tokens(pool, range(42)) == 32, "which needs blocks 6 and 7"
    pool._forget(seen[5])
    assert cached_tokens(pool, range(29)) == 12, "28 need block 5, 20 need block 3, and 12 the blocks 1 and 2"


def test_tokens_that_are_computed_again_see_a_window_of_their_own() -> None:
    """Catches a hit without a block that the first token to compute sees: its window begins before that of the token
    behind the prefix, by the tokens that are computed again."""
    pool = BlockPool(64, SIZE, windows=(5,), recomputed=1)
    first = computed(pool, range(42))
    seen = [entry.blocks[0] for entry in first.entries]
    pool.release(first)
    pool._forget(seen[8])  # as its reuse does
    table = BlockTable()
    assert pool.attach_prefix(table, range(42)) == 31, "token 39 sees positions from 35 on: blocks 8 and 9"
    assert table.blocks == [*[NULL] * 6, seen[6], seen[7]]
    pool.check([table])


@given(
    st.data(),
    st.integers(1, 3),
    st.integers(3, 20),
    st.booleans(),
    st.sampled_from([(None,), (None, 3), (2,), (None, 1, 5), (4, None)]),
    st.integers(0, 1),
)
def test_random_use_keeps_the_books_and_the_content(
    data: st.DataObject,
    size: int,
    num_blocks: int,
    caching: bool,
    windows: tuple[int | None, ...],
    recomputed: int,
) -> None:
    """Catches leaks, double use and wrong content over random attach, grow, commit and release (a model of the KV)."""
    pool = BlockPool(num_blocks, size, windows=windows, prefix_caching=caching, recomputed=recomputed)
    held: dict[int, tuple[int, tuple[int, ...]]] = {}  # block -> its group and the prefix whose KV it holds
    alive: list[BlockTable] = []
    for _ in range(data.draw(st.integers(1, 25))):
        if alive and data.draw(st.booleans()):
            pool.release(alive.pop(data.draw(st.integers(0, len(alive) - 1))))
        else:
            tokens = data.draw(st.lists(st.integers(0, 1), min_size=1, max_size=4 * size + 1))
            table = BlockTable()
            found = pool.attach_prefix(table, tokens)
            for group, window in enumerate(windows):
                first = 0 if window is None else max(0, found - window + 1) // size
                for i, block in enumerate(of_group(pool, table, group)):
                    assert (block == NULL) == (i < first)
                    if block != NULL:
                        assert held[block] == (group, tuple(tokens[: (i + 1) * size])), "another prefix's KV"
            assert found < len(tokens)
            assert caching or found == 0
            attached = len(table.blocks) // len(windows)
            if not pool.grow(table, len(tokens)):
                pool.release(table)
                continue
            alive.append(table)
            table.num_computed = data.draw(st.integers(found, len(tokens)))
            for group in range(len(windows)):
                for i, block in enumerate(of_group(pool, table, group)):
                    end = (i + 1) * size
                    if i >= attached:
                        held[block] = group, tuple(tokens[:end]) if end <= table.num_computed else ()
            pool.commit(table, tokens)
        pool.check(alive)
    for table in alive:
        pool.release(table)
    pool.check([])
    assert pool.num_free == num_blocks
