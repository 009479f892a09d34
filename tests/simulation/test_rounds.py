"""Rounds as events: what must hold between modes, whatever the times are."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ssd.simulation.rounds import Clock, DraftServer, Setup, Step, World

VERIFY, DRAFT = 10.0, 2.0


def verify(rows: int, sequences: int) -> float:
    return VERIFY + 0.01 * rows


def draft(rows: int, sequences: int) -> float:
    return DRAFT


def constant(seconds: float) -> Step:
    return lambda rows, sequences: seconds


AR = Setup("ar", verify, draft)
SD = replace(AR, mode="sd", k=4, rates=(0.8,) * 4)
SSD = replace(SD, mode="ssd", hits=0.8, backup="jit")


def ran(setup: Setup) -> World:
    world = World(setup)
    world.run()
    return world


def speed(setup: Setup) -> float:
    """Tokens a second."""
    world = ran(setup)
    return world.totals.tokens / world.clock.now


def round_seconds(setup: Setup) -> float:
    totals = ran(setup).totals
    return totals.round_seconds / totals.rounds


def test_events_come_in_order_of_time_and_equal_ones_in_order_of_entry() -> None:
    clock, seen = Clock(), []
    for seconds, name in ((2.0, "c"), (1.0, "a"), (1.0, "b")):
        clock.after(seconds, lambda name=name: seen.append((clock.now, name)))  # type: ignore[misc]
    clock.after(1.0, lambda: clock.after(0.5, lambda: seen.append((clock.now, "later"))))
    clock.run()
    assert seen == [(1.0, "a"), (1.0, "b"), (1.5, "later"), (2.0, "c")]


def test_a_server_takes_all_that_waits_in_one_run() -> None:
    """Two jobs wait while the first one runs: 3 s for it, then the steps of the longer one."""
    clock, ended = Clock(), []
    server = DraftServer(clock, lambda rows, sequences: 1.0 + rows / 100)
    for begin, steps in ((0.0, 3), (1.0, 2), (1.5, 5)):
        done = lambda: ended.append(clock.now)  # noqa: E731
        clock.after(begin, lambda steps=steps, done=done: server.submit(steps, 10, 1, done))  # type: ignore[misc]
    clock.run()
    assert ended == pytest.approx([3 * 1.1, 3.3 + 5 * 1.2, 3.3 + 5 * 1.2])
    assert server.busy == pytest.approx(3.3 + 6.0)


def test_plain_decoding_and_drafts_take_their_steps() -> None:
    assert speed(AR) == pytest.approx(1 / 10.01)
    assert speed(replace(AR, batch=8)) == pytest.approx(8 / 10.08)
    assert round_seconds(SD) == pytest.approx(10.05 + 4 * DRAFT)
    assert speed(replace(SD, rates=(1.0,) * 4, tokens=500)) == pytest.approx(5 / 18.05, rel=1e-3)
    assert speed(replace(SD, rates=(0.0,) * 4)) == pytest.approx(1 / 18.05)


def test_without_hits_ssd_is_sd_with_messages() -> None:
    """The draft is written after the verification, on the server. A request's first draft is there at once."""
    sd = replace(SD, tokens=10**6, draft=lambda rows, sequences: 1.5)
    ssd = replace(sd, mode="ssd", hits=0.0, backup="jit")
    assert round_seconds(replace(ssd, link=0.25)) == pytest.approx(round_seconds(sd) + 2 * 0.25, rel=1e-3)
    assert speed(ssd) == pytest.approx(speed(sd), rel=1e-3)


def test_with_hits_and_an_instant_draft_a_round_is_a_verification() -> None:
    best = replace(SSD, hits=1.0, draft=lambda rows, sequences: 0.0)
    assert round_seconds(best) == pytest.approx(10.05)
    assert speed(best) / speed(SD) == pytest.approx(18.05 / 10.05, rel=1e-3)  # the same draws of acceptance


def test_a_preparation_longer_than_a_verification_decides_the_round() -> None:
    late = replace(SSD, hits=1.0, draft=lambda rows, sequences: 3.0, link=0.5)
    assert round_seconds(late) == pytest.approx(5 * 3.0 + 2 * 0.5)


def test_a_draft_beside_the_verification_makes_it_longer() -> None:
    beside = replace(SSD, hits=1.0, beside=lambda rows, sequences: rows / 16)
    assert round_seconds(beside) == pytest.approx(10.05 + 5 * 1.0)
    assert not any(server.busy for server in ran(beside).servers)


def test_more_hits_are_never_slower() -> None:
    for others in ({"batch": 1}, {"batch": 4}, {"batch": 4, "backup": "fast"}, {"batch": 4, "backup": "auto"}):
        speeds = [speed(replace(SSD, hits=hits, **others)) for hits in (0.0, 0.5, 1.0)]
        assert speeds == sorted(speeds), others


def test_auto_is_about_as_fast_as_the_better_backup() -> None:
    """Catches the engine's rule with its sides exchanged."""
    for batch, drafting in ((1, 0.2), (1, 3.0), (16, 0.2), (16, 3.0)):
        setup = replace(SSD, batch=batch, draft=constant(drafting))
        speeds = {backup: speed(replace(setup, backup=backup)) for backup in ("auto", "jit", "fast")}
        assert speeds["auto"] > 0.93 * max(speeds["jit"], speeds["fast"]), (batch, drafting, speeds)


def test_a_shared_server_saturates_and_more_of_them_are_never_slower() -> None:
    """A run of all waiting work takes as long as one, so a server serves many until its runs are longer than rounds."""

    def heavy(rows: int, sequences: int) -> float:
        return 0.25 * sequences

    setup = replace(SSD, hits=1.0, draft=heavy, engines=16)
    speeds = [speed(replace(setup, servers=servers)) for servers in (1, 4, 16)]
    assert speeds == sorted(speeds)
    alone = speed(replace(setup, engines=1))
    assert speeds[-1] == pytest.approx(16 * alone, rel=0.05)
    assert speeds[0] < 0.7 * 16 * alone
    world = ran(replace(setup, servers=1))
    assert world.servers[0].busy / world.clock.now > 0.95


def test_littles_law_holds_for_arrivals() -> None:
    """The number of requests in the system, looked at in regular intervals, is rate times latency."""
    world, seen = World(replace(SSD, batch=8, rate=0.02, requests=400, tokens=32)), []

    def look() -> None:
        seen.append(sum(engine.load for engine in world.engines))
        if len(world.totals.ended) < 400:
            world.clock.after(7.0, look)

    world.clock.after(7.0, look)
    world.run()
    latency = sum(each.ended - each.arrived for each in world.totals.ended) / 400
    assert sum(seen) / len(seen) == pytest.approx(400 / world.clock.now * latency, rel=0.03)


def test_every_request_gets_its_tokens_and_its_prompt_once() -> None:
    for setup in (AR, SD, SSD, replace(SSD, backup="fast")):
        world = ran(replace(setup, batch=4, rate=0.01, requests=50, tokens=30, prefill=5.0, engines=2, servers=2))
        assert [each.left for each in world.totals.ended] == [0] * 50
        assert world.totals.tokens == 50 * 30
        assert all(each.arrived < each.first <= each.ended for each in world.totals.ended)
        steps = world.totals.verify_seconds - 50 * 5.0
        assert steps == pytest.approx(world.totals.rounds * VERIFY, rel=0.1)


def test_rounds_have_the_tokens_that_were_asked_for_although_requests_differ() -> None:
    """Without the shift of `centre`, requests that are hard to draft would have more of the rounds."""
    wanted = 1 + 0.8 + 0.8**2 + 0.8**3 + 0.8**4
    for spread in (0.0, 0.6):
        setup = replace(SD, spread=spread)
        assert setup.tokens_per_round(setup.centre()) == pytest.approx(wanted, rel=1e-3)
        totals = ran(replace(setup, batch=16)).totals
        assert totals.tokens / totals.decided == pytest.approx(wanted, rel=0.03)
    assert replace(SD, spread=0.6).centre() > 0.05


def test_a_batch_that_ends_waits_for_its_slowest_request() -> None:
    alike, spread = (speed(replace(SD, batch=8, requests=8, spread=spread)) for spread in (0.0, 0.6))
    assert spread < 0.95 * alike < speed(replace(SD, batch=8))


def test_a_seed_gives_the_same_rounds_and_another_one_others() -> None:
    setup = replace(SSD, batch=4, rate=0.05, requests=40)
    assert speed(setup) == speed(setup) != speed(replace(setup, seed=1))


def test_hits_follow_the_number_of_branches() -> None:
    """256 branches are 4 for each of 64 sequences; four replicas have four times as many for each."""
    setup = replace(SSD, hits=0.8, fan_out=0.5, budget=16)
    assert [setup.branches(sequences) for sequences in (1, 16, 64, 300)] == [16, 256, 256, 300]
    assert [setup.hit_rate(sequences) for sequences in (1, 16, 64)] == pytest.approx([0.8, 0.8, 0.6])
    assert replace(setup, replicas=4).hit_rate(1) == pytest.approx(0.9)
    assert replace(setup, hits=0.1).hit_rate(256) == 0.0
    totals = ran(replace(setup, batch=64)).totals
    assert totals.hits / totals.look_ups == pytest.approx(0.6, abs=0.02)
