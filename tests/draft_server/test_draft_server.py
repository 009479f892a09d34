"""`ssd draft-server`: drafts for several engines, of which none can harm another one, nor any text."""

from __future__ import annotations

import functools
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from conftest import mostly_slow
from draft_servers import (
    draft_server,
    engine,
    greeting,
    new_entry,
    plain_texts,
    scripted,
    server_process,
    texts,
    until,
)
from prometheus_client.parser import text_string_to_metric_families

from ssd import LLM
from ssd.config import SpeculationConfig
from ssd.draft_server import session
from ssd.draft_server.health import health_server
from ssd.draft_server.options import DraftServerOptions
from ssd.draft_server.server import DraftServer
from ssd.drafting.remote import DraftServers, Refused
from ssd.drafting.remote import _greet as greet
from ssd.drafting.runner import DraftRunner
from ssd.drafting.wire import Draft, Entry, Kind
from ssd.errors import ConfigError
from ssd.parallel.address import Address
from ssd.parallel.transport import (
    REFUSED,
    SETUP,
    Channel,
    ChannelClosed,
    Message,
    encode_json,
    reason_of,
    refusal,
    words,
)

expected = functools.cache(plain_texts)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DraftServer]:
    with draft_server(tmp_path_factory.mktemp("drafts")) as server:
        yield server


@pytest.fixture
def url(server: DraftServer) -> Iterator[str]:
    yield server.options.listen[0]
    for each in server.sessions:
        each.drain()
    until(lambda: not server.sessions)


def drafter_of(llm: LLM) -> Any:
    return llm.engine.round.drafter


# --- engines ----------------------------------------------------------------------------------------------------------


def test_an_engine_has_its_drafts_from_a_server(url: str) -> None:
    with engine(url) as llm:
        assert texts(llm) == expected()
        assert drafter_of(llm).replies + drafter_of(llm).at_hand > 5
        assert drafter_of(llm).stats.failures == 0


def test_three_engines_have_joined_steps_and_the_texts_of_plain_decoding(url: str, server: DraftServer) -> None:
    before = server.draft.turns.passes
    engines = [engine(url) for _ in range(3)]
    try:
        with ThreadPoolExecutor(3) as pool:
            found = list(pool.map(texts, engines))
        assert found == [expected()] * 3
        assert server.draft.turns.passes - before > 5
        for llm in engines:
            metrics = llm.engine.metrics
            assert metrics.spec_decode_num_accepted_tokens > 0.2 * metrics.spec_decode_num_draft_tokens
            assert drafter_of(llm).stats.failures == 0
    finally:
        for llm in engines:
            llm.close()
    until(lambda: not server.sessions)
    server.draft.pool.check([])


# --- the protocol -----------------------------------------------------------------------------------------------------


def refused(url: str, hello: Any) -> str:
    channel = Channel(Address.of(url).connect(5.0))
    channel.send(Message(Kind.HELLO, payload=hello.encode()))
    answer = channel.receive(timeout=20)
    assert answer is not None
    assert answer.kind == REFUSED
    channel.close()
    return reason_of(answer)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"protocol": 99}, "protocol 99"),
        ({"vocabulary": "another"}, "another vocabulary"),
        ({"tokenizer": "another"}, "another tokenizer"),
        ({"k": 7}, "k=7: the draft server takes 1 to 6"),
        ({"budget": 17}, "budget=17"),
        ({"max_sequences": 9}, "max_num_seqs=9"),
        ({"max_len": 513}, "max_model_len=513"),
        ({"vocab_size": 1 << 40}, "vocab_size="),
        ({"backup": "never"}, "backup='never'"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_what_does_not_fit_is_refused_by_name(url: str, change: dict[str, Any], named: str) -> None:
    assert named in refused(url, greeting(**change))


def test_an_engine_that_is_refused_does_not_start(url: str) -> None:
    with pytest.raises(ConfigError, match=r"draft_url: .*k=7: the draft server takes 1 to 6: lower k"):
        engine(url, speculation={"k": 7})
    with pytest.raises(ConfigError, match="another tokenizer"):
        LLM("tiny-qwen3", device="cpu", max_num_seqs=4, max_model_len=256, speculation={"draft_url": url})


def test_tokens_are_asked_for(tmp_path: Path) -> None:
    with draft_server(tmp_path, tokens=("one", "two"), listen=("tcp://127.0.0.1:0",)) as server:
        url = f"tcp://127.0.0.1:{server.addresses[0].port}"
        assert "draft_token is missing or wrong" in refused(url, greeting(token="three"))
        assert "draft_token is missing or wrong" in refused(url, greeting())
        with engine(url, speculation={"draft_token": "two"}) as llm:
            assert texts(llm) == expected()
            [session] = server.sessions
            assert session.tenant == 1


def test_prefixes_are_shared_within_a_tenant_only(tmp_path: Path) -> None:
    """Catches a prefix cache by which one tenant could tell, by the time of a reply, what another one has asked."""
    tokens = list(range(5, 75))
    with draft_server(tmp_path, tokens=("one", "two")) as server:
        url = server.options.listen[0]
        pool, found = server.draft.pool, list[int]()
        attach = pool.attach_prefix
        pool.attach_prefix = lambda table, tokens: found.append(attach(table, tokens))  # type: ignore[method-assign, func-returns-value]
        for token in ("one", "two", "one"):
            each = scripted(url, greeting(token=token))
            each.ask([new_entry(1, tokens)])
            assert len(each.drafts(1)[0]) == 4
            each.prepared()
            each.ask([Entry(1, 70, [7], 4)])  # commits
            each.drafts(1)
            each.prepared()
            each.channel.close()
            until(lambda: not server.sessions)
        assert [bool(count) for count in found] == [False, False, True]


NONSENSE = {
    "noise": None,
    "no round": Message(Kind.PROPOSALS, 1, words([0])),
    "a sequence without a beginning": [Entry(9, 5, [1], 4)],
    "a token that is not there": [new_entry(9, [1, 2, 5000])],
    "a draft token that is not there": [new_entry(9, [1, 2, 3], draft=Draft((5000,), (0.0,)))],
    "too long a draft": [new_entry(9, [1, 2, 3], k=5)],
    "too many tokens": [new_entry(9, [1] * 400)],
    "too many sequences": [new_entry(i, [1, 2, 3]) for i in range(5)],
    "twice the same": [new_entry(9, [1, 2, 3])] * 2,
    "new and known": [new_entry(7, [1, 2, 3])],
    "more tokens than are known": [Entry(7, 4, [1], 4)],
}


@pytest.mark.parametrize("case", mostly_slow(NONSENSE, fast=list(NONSENSE)[::3]))
def test_nonsense_harms_its_engine_only(url: str, case: str, server: DraftServer) -> None:
    good, bad = scripted(url), scripted(url)
    bad.ask([new_entry(7, [1, 2, 3])])
    bad.drafts(1)
    bad.prepared()
    good.ask([new_entry(1, [1, 2, 3])])
    before = good.drafts(1)
    good.prepared()
    said, refusals = NONSENSE[case], server.refused["bad message"]
    if said is None:
        bad.channel._socket.send(bytes(range(1, 200)))
    elif isinstance(said, Message):
        bad.channel.send(said)
    else:
        bad.ask(said)
    answer = bad.channel.receive(timeout=20)
    assert answer is not None
    assert answer.kind == REFUSED
    assert len(reason_of(answer)) > 20
    until(lambda: len(server.sessions) == 1)
    assert server.refused["bad message"] == refusals + 1
    good.ask([new_entry(2, [1, 2, 3])], [1])
    assert good.drafts(1) == before
    good.channel.close()
    bad.channel.close()


def test_an_engine_that_does_not_read_waits_for_nobody(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches an answer that waits inside of a turn for its engine to take it."""
    monkeypatch.setattr(session, "_READING_SECONDS", 0.5)
    deaf, good = scripted(url), scripted(url)

    def shout() -> None:
        with suppress(ChannelClosed, OSError):
            for number in range(2000):
                entries = [Entry(i, 1 + number, [7], 4) if number else new_entry(i, [1, 2]) for i in range(4)]
                deaf.ask(entries if number < 200 else [])

    thread = threading.Thread(target=shout)
    thread.start()
    for number in range(20):
        good.ask([new_entry(number, [1, 2, 3])], [number - 1] if number else [])
        assert len(good.drafts(1)[0]) == 4
        good.prepared()
    deaf.channel.close()
    good.channel.close()
    thread.join()


def test_a_round_begins_within_two_steps_of_another_engine(
    url: str, server: DraftServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches a round that waits for the K + 1 steps of another engine's."""
    steps = list[tuple[DraftRunner, float]]()
    launch = DraftRunner._launch

    def slow(self: DraftRunner, shape: Any, piece: int) -> None:
        steps.append((self, time.monotonic()))
        time.sleep(0.02)
        launch(self, shape, piece)

    old, new = scripted(url), scripted(url)
    monkeypatch.setattr(DraftRunner, "_launch", slow)
    for number in range(3):
        old.ask([new_entry(number, [1, 2, 3])])
        until(lambda: len(steps) >= 2)  # its round is under way
        runner, asked = steps[0][0], time.monotonic()
        new.ask([new_entry(number, [4, 5, 6])])
        assert len(new.drafts(1)[0]) == 4
        began = next(at for each, at in steps if each is not runner)
        assert sum(each is runner and asked < at < began for each, at in steps) <= 2
        new.prepared()
        old.drafts(1)
        old.prepared()
        until(lambda: server.draft.turns._active == 0)
        steps.clear()
    old.channel.close()
    new.channel.close()


# --- several engines, some of them greedy -----------------------------------------------------------------------------


def test_engines_that_ask_for_all_they_can_get_have_equal_shares(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches an engine with many sequences, or one that came first, that starves others. Shares are of rounds; steps
    take long, so that engines are always in a round."""
    launch = DraftRunner._launch

    def slow(self: DraftRunner, shape: Any, piece: int) -> None:
        time.sleep(0.004)
        launch(self, shape, piece)

    monkeypatch.setattr(DraftRunner, "_launch", slow)
    engines = [scripted(url) for _ in range(3)]
    counts, end = [0, 0, 0], time.monotonic() + 1.0

    def hammer(place: int) -> None:
        own = engines[place]
        names = range(1 + place)
        own.ask([new_entry(name, [1, 2, 3 + name]) for name in names])
        while time.monotonic() < end or sum(counts) < 60:
            own.drafts(len(names))
            own.prepared()
            counts[place] += 1
            if counts[place] % 50 == 0:  # sequences end and others come
                own.ask([new_entry(name, [1, 2, 3 + name]) for name in names], list(names))
            else:
                own.ask([Entry(name, 2 + counts[place] % 50, [5], 4) for name in names])

    with ThreadPoolExecutor(3) as pool:
        list(pool.map(hammer, range(3)))
    assert min(counts) > 0.8 * sum(counts) / 3, counts
    assert max(counts) < 1.2 * sum(counts) / 3, counts
    for each in engines:
        each.channel.close()


def test_a_place_is_free_again_when_its_engine_is_gone(tmp_path: Path) -> None:
    with draft_server(tmp_path, max_engines=1) as server:
        url = server.options.listen[0]
        first = scripted(url)
        assert "all places for engines are taken" in refused(url, greeting())
        first.ask([new_entry(1, [1, 2, 3])])
        first.channel.close()  # in a round
        until(lambda: server.draft.free_places == 1)
        server.draft.pool.check([])
        again = scripted(url)
        again.ask([new_entry(1, [1, 2, 3])])
        assert len(again.drafts(1)[0]) == 4
        again.channel.close()


# --- health -----------------------------------------------------------------------------------------------------------


def test_health_readiness_and_metrics(tmp_path: Path) -> None:
    with draft_server(tmp_path, max_engines=1, http_port=0) as server, health_server(server) as page:
        one = scripted(server.options.listen[0])
        one.ask([new_entry(1, [1, 2, 3])])
        one.drafts(1)
        one.prepared()
        until(lambda: server.sessions[0].sequences == 1)
        assert httpx.get(f"{page}/health").status_code == 200
        assert httpx.get(f"{page}/ready").text == "all places are taken\n"
        refused(server.options.listen[0], greeting(k=7))
        until(lambda: bool(server.refused))
        text = httpx.get(f"{page}/metrics").text
        samples = {
            sample.name: sample.value for each in text_string_to_metric_families(text) for sample in each.samples
        }
        assert samples["ssd_draft_server_engines"] == samples["ssd_draft_server_sequences"] == 1
        assert samples["ssd_draft_server_rounds_total"] == samples["ssd_draft_server_refused_total"] == 1
        assert samples["ssd_draft_server_kv_blocks_free"] < samples["ssd_draft_server_kv_blocks"]
        one.channel.close()
        until(lambda: httpx.get(f"{page}/ready").status_code == 200)
        assert httpx.get(f"{page}/other").status_code == 404
        server.drain()
        assert httpx.get(f"{page}/ready").text == "draining\n"


def test_a_session_that_ends_is_counted_once(tmp_path: Path) -> None:
    """Catches a counter that goes down: of a session that ends between two looks."""
    options = DraftServerOptions(listen=(f"unix:{tmp_path}/socket",))
    server = DraftServer(SimpleNamespace(), options, [])  # type: ignore[arg-type]
    ended: Any = SimpleNamespace(tenant=0, rounds=3, refusal="")

    class Lock:
        def __enter__(self) -> None:
            pass

        def __exit__(self, *_: object) -> None:
            if ended in server._sessions:
                server._sessions.discard(ended)
                server._served[0] += ended.rounds

    ended = type("Ended", (), vars(ended))
    server._sessions.add(ended)
    server._lock = Lock()  # type: ignore[assignment]
    assert [server.rounds, server.rounds] == [{0: 3}] * 2


# --- faults of the server ---------------------------------------------------------------------------------------------


def test_without_a_server_an_engine_decodes_without_drafts(tmp_path: Path) -> None:
    """The server is not there, or takes connections and says nothing."""
    silent = Address(path=f"{tmp_path}/silent")
    with silent.listen(), engine(f"unix:{tmp_path}/nobody,{silent}") as llm:
        assert texts(llm) == expected()
        assert drafter_of(llm).replies == 0


def test_another_server_replaces_one_that_is_lost(tmp_path: Path) -> None:
    """Catches an engine that stays without drafts, or asks the server that is gone again and again."""
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
    url = ",".join(f"unix:{tmp_path}/{name}/socket" for name in ("one", "two"))
    with draft_server(tmp_path / "two") as two, draft_server(tmp_path / "one") as one, engine(url) as llm:
        before, after = (one, two) if one.sessions else (two, one)
        assert texts(llm) == expected()
        before.drain()
        until(lambda: not before.sessions)
        until(lambda: texts(llm) == expected() and bool(after.sessions))
        replies = drafter_of(llm).replies
        assert texts(llm) == expected()
        assert drafter_of(llm).replies > replies


def test_all_servers_are_asked_at_the_same_time(tmp_path: Path) -> None:
    """Catches a server that waits for SETUP in vain, while the engine asks others that are silent."""
    addresses, asked = [Address(path=f"{tmp_path}/{i}") for i in range(3)], threading.Barrier(3, timeout=20)

    answered = list[Channel]()

    def answer(listening: socket.socket) -> None:
        end, _ = listening.accept()
        with listening, end:
            channel = Channel(end)
            channel.expect(Kind.HELLO, timeout=20)
            asked.wait()
            channel.send(Message(Kind.WELCOME, payload=encode_json({})))
            answered.append(channel)
            channel.expect(SETUP, timeout=20)

    with ThreadPoolExecutor(3) as pool:
        answers = [pool.submit(answer, each.listen()) for each in addresses]
        servers = DraftServers(addresses, greeting())
        servers()
        servers.wait(20)
        assert servers() is not None
        errors = [each.exception(20) for each in answers]
    assert len(answered) == 3
    assert sorted(isinstance(each, ChannelClosed) for each in errors) == [False, True, True]


@pytest.mark.slow
def test_a_host_whose_name_is_not_found_for_long_keeps_nobody_waiting(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    good, lost, connect, over = Address.of(url), Address(host="lost", port=1), Address.connect, threading.Event()

    def resolved(self: Address, timeout: float) -> socket.socket:
        if self == lost:
            over.wait(60)
            raise OSError("there is no such host")
        return connect(self, timeout)

    monkeypatch.setattr(Address, "connect", resolved)
    servers = DraftServers([lost, good], greeting())
    servers()
    servers.wait(20)
    found = servers()
    over.set()
    assert found is not None
    found.close()


def test_a_server_that_refuses_before_it_is_asked_says_why() -> None:
    ours, theirs = socket.socketpair()
    with theirs:
        Channel(theirs).send(refusal("there are too many connections"))
    full: Any = SimpleNamespace(connect=lambda timeout: ours)
    with pytest.raises(Refused, match="too many connections"):
        greet(full, greeting())


def test_a_server_that_ends_leaves_the_socket_of_the_next_one(tmp_path: Path) -> None:
    """Catches a server that is restarted and cannot be reached: the old one has removed its socket."""
    address, successors = Address(path=f"{tmp_path}/socket"), list[socket.socket]()

    class Socket(socket.socket):
        def close(self) -> None:
            super().close()
            if not successors:
                successors.append(address.listen())

    own = Socket(fileno=address.listen().detach())
    server = DraftServer(SimpleNamespace(), DraftServerOptions(listen=(str(address),)), [own])  # type: ignore[arg-type]
    server.drain()
    server.serve()
    with successors[0]:
        address.connect(1.0).close()


def test_a_server_begins_while_another_one_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    address, connect = Address(path=f"{tmp_path}/socket"), Address.connect
    old = address.listen()

    def end(self: Address, timeout: float) -> socket.socket:
        Path(self.path).unlink()
        old.close()
        return connect(self, timeout)

    with monkeypatch.context() as patch:
        patch.setattr(Address, "connect", end)
        new = address.listen()
    with new:
        address.connect(1.0).close()


@pytest.mark.slow
def test_sigterm_drains_and_the_engine_goes_on(tmp_path: Path) -> None:
    with server_process("--listen", f"unix:{tmp_path}/socket") as process, engine(f"unix:{tmp_path}/socket") as llm:
        assert texts(llm) == expected()
        process.terminate()
        assert process.wait(30) == 0
        assert not (tmp_path / "socket").exists()
        assert texts(llm) == expected()
        assert drafter_of(llm).stats.failures > 0


@pytest.mark.slow
def test_texts_stand_while_servers_and_engines_are_killed(tmp_path: Path) -> None:
    """Three engines; the server is killed and started again, and so are engines of another process, in rounds."""
    url, ended = f"unix:{tmp_path}/socket", threading.Event()

    def kill_servers() -> None:
        while not ended.is_set():
            with server_process("--listen", url) as process:
                ended.wait(4.0)
                process.kill()

    def kill_engines() -> None:
        while not ended.is_set():
            program = f"from draft_servers import *; llm = engine({url!r})\nwhile True: texts(llm)"
            with subprocess.Popen([sys.executable, "-c", program], stderr=subprocess.DEVNULL) as process:
                ended.wait(8.0)
                process.kill()

    killers = [threading.Thread(target=each) for each in (kill_servers, kill_engines)]
    for each in killers:
        each.start()
    until(lambda: (tmp_path / "socket").exists(), 60)
    engines = [engine(url) for _ in range(3)]
    try:
        with ThreadPoolExecutor(3) as pool:
            for _ in range(12):
                assert list(pool.map(texts, engines)) == [expected()] * 3
        assert all(drafter_of(llm).replies > 20 and drafter_of(llm).stats.failures for llm in engines)
    finally:
        ended.set()
        for each in (*killers,):
            each.join()
        for llm in engines:
            llm.close()


# --- options ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("speculation", "message"),
    [
        ({"draft_url": "http://host:1"}, "draft_url='http://host:1': must be unix:/path or tcp://host:port"),
        (
            {"draft_url": "unix:/s", "draft": "tiny-llama-eagle"},
            "heads and block drafts read the target's hidden states",
        ),
        ({"draft_url": "unix:/s", "mode": "sd"}, 'is for mode="ssd", not for mode="sd"'),
        ({"draft_url": "unix:/s", "acceptance": "rejection"}, "has no option acceptance"),
        ({"mode": "ssd", "draft": "x", "draft_token": "y"}, "draft_token is for a draft server"),
    ],
)
def test_options_that_do_not_fit(speculation: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        SpeculationConfig.of(speculation)


def test_options_of_a_server_that_do_not_fit(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="engines that come over TCP need a token"):
        DraftServerOptions(listen=("tcp://127.0.0.1:1",))
    with pytest.raises(ConfigError, match=r"address 'tcp://host': must be"):
        DraftServerOptions(listen=("tcp://host",), tokens=("x",))
    with (
        pytest.raises(ConfigError, match="reads the target's hidden states"),
        draft_server(tmp_path, "tiny-llama-eagle"),
    ):
        pass
    address = Address(path=f"{tmp_path}/twice")
    with address.listen(), pytest.raises(ConfigError, match=r"cannot listen on unix:.*a server listens there"):
        address.listen()
