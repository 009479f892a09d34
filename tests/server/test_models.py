"""Several models in one server: loads on demand, unloads, names, files; each writes the text that it writes alone."""

from __future__ import annotations

import asyncio
import json
import re
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from conftest import mostly_slow
from live_server import openai, running
from typer.testing import CliRunner

from ssd import LLM, SamplingParams
from ssd.assembly.open import BUNDLE
from ssd.cli.main import app as cli
from ssd.cli.server_file import ServerFile, in_folder, served_models
from ssd.config import EngineConfig
from ssd.errors import ConfigError, NotEnoughMemory
from ssd.server.errors import ApiError
from ssd.server.models.catalog import Catalog, Loaded, make
from ssd.server.models.front import create_front
from ssd.server.models.options import CatalogOptions, ServedModel
from ssd.server.options import ServerOptions

NAMES = ("tiny-llama-draft", "tiny-qwen3-draft", "tiny-llama")


def served(name: str, model: str = "", keep_alive: float = -1.0, **others: Any) -> ServedModel:
    aliases = others.pop("aliases", ())
    config = EngineConfig(model or name, device="cpu", max_model_len=256, max_num_seqs=4)
    return ServedModel(config, ServerOptions(name, aliases=aliases, access_log=False), keep_alive, **others)


# --- the catalog, with loads that a test plays ------------------------------------------------------------------------


class Played:
    """Loads that take as long as a test wants, in a memory of so many models."""

    def __init__(self, memory: int = 9) -> None:
        self.memory, self.loaded, self.loads, self.most = memory, set[str](), list[str](), 0
        self.go = threading.Event()
        self.go.set()
        self.fail = ""

    def __call__(self, model: ServedModel) -> Loaded:
        assert self.go.wait(10)
        if self.fail:
            raise ConfigError(self.fail)
        if len(self.loaded) >= self.memory:
            raise NotEnoughMemory("it does not fit")
        self.loads.append(model.name)
        self.loaded.add(model.name)
        self.most = max(self.most, len(self.loaded))
        llm: Any = SimpleNamespace(
            driver=SimpleNamespace(failure=None), close=lambda: self.loaded.remove(model.name), name=model.name
        )
        return llm, SimpleNamespace(name=model.name)  # type: ignore[return-value]


def catalog_of(*models: ServedModel, load: Callable[[ServedModel], Loaded], **options: Any) -> Catalog:
    return Catalog(models, CatalogOptions(**options), load)


async def use(catalog: Catalog, name: str | None, seconds: float = 0.0) -> str:
    slot = catalog.find(name)
    async with catalog.using(slot) as found:
        await asyncio.sleep(seconds)
        assert slot.loaded is not None  # whatever happens meanwhile
        name = found.name  # type: ignore[attr-defined]
    return name


def test_models_are_loaded_once_and_found_by_their_names() -> None:
    load = Played()
    catalog = catalog_of(served("a", aliases=("gpt-4o",)), served("b"), load=load)

    async def play() -> None:
        assert await asyncio.gather(*(use(catalog, name) for name in ("a", "gpt-4o", None, "b"))) == [*"aaab"]
        with pytest.raises(ApiError, match="'c' is not served here: use 'a' or 'b'"):
            catalog.find("c")

    asyncio.run(play())
    assert sorted(load.loads) == ["a", "b"]
    catalog.close()
    assert not load.loaded


@pytest.mark.parametrize("limit", ["memory", "max_loaded_models"])
def test_the_least_recently_used_idle_model_makes_room(limit: str) -> None:
    """Catches a model that is unloaded while it is used, or though it is pinned, and more models than may be."""
    load = Played(memory=2 if limit == "memory" else 9)
    models = [served("a"), served("b"), served("c"), served("p", pinned=True)][: 3 if limit == "memory" else 4]
    catalog = catalog_of(*models, load=load, **({} if limit == "memory" else {"max_loaded_models": 3}))

    async def play() -> None:
        if limit != "memory":
            catalog.preload(models[3])
        await use(catalog, "a")
        await use(catalog, "b")
        long = asyncio.create_task(use(catalog, "a", 0.2))
        await asyncio.sleep(0)
        assert await use(catalog, "c") == "c"
        assert load.loaded - {"p"} == {"a", "c"}
        assert await asyncio.gather(use(catalog, "b"), long) == ["b", "a"]  # waits for one of them
        assert "b" in load.loaded

    asyncio.run(play())
    assert load.most <= (2 if limit == "memory" else 3)
    assert limit == "memory" or "p" in load.loaded
    catalog.close()


def test_requests_for_two_models_of_which_one_fits_are_all_served() -> None:
    """Catches two models that unload each other before a request gets one of them."""
    load = Played(memory=1)
    catalog = catalog_of(served("a"), served("b"), load=load)

    async def play() -> list[str]:
        return await asyncio.wait_for(asyncio.gather(*(use(catalog, "ab"[i % 2], 0.001) for i in range(40))), 20)

    assert asyncio.run(play()) == ["ab"[i % 2] for i in range(40)]
    assert len(load.loads) < 10
    catalog.close()


def test_idle_models_are_unloaded() -> None:
    load = Played()
    catalog = catalog_of(served("a", keep_alive=0.05), served("b"), served("c", keep_alive=0.0), load=load)

    async def play() -> None:
        for name in "abc":
            await use(catalog, name)
        await use(catalog, "a", 0.2)
        assert "a" in load.loaded
        while load.loaded != {"b"}:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.1)

    asyncio.run(asyncio.wait_for(play(), 20))
    assert load.loaded == {"b"}
    catalog.close()


def test_a_model_that_is_used_while_it_waits_to_be_unloaded_stays() -> None:
    """Catches a model that is unloaded right after a use, because it was idle before another one was loaded."""
    load = Played()
    catalog = catalog_of(served("a", keep_alive=60.0), load=load)

    async def play() -> None:
        await use(catalog, "a")
        slot = catalog.find("a")
        async with catalog._changes:  # another model is loaded
            catalog._expire(slot, slot.last_used)
            await use(catalog, "a")
        await asyncio.gather(*catalog._tasks)
        assert load.loaded == {"a"}
        catalog._expire(slot, slot.last_used)
        await asyncio.gather(*catalog._tasks)

    asyncio.run(play())
    assert not load.loaded
    catalog.close()


def test_a_model_that_cannot_be_loaded_is_no_other_one_s_error() -> None:
    load = Played()
    catalog = catalog_of(served("a"), served("b"), load=load)

    async def play() -> None:
        load.fail = "the file is damaged"
        for _ in range(2):  # the second is told at once
            with pytest.raises(ApiError, match="'a' cannot be loaded: ConfigError: the file is damaged"):
                await use(catalog, "a")
        load.fail = ""
        assert await use(catalog, "b") == "b"
        assert catalog.find("a").state == "failed"
        catalog.find("a").since -= 60
        assert await use(catalog, "a") == "a"

    asyncio.run(play())
    catalog.close()


def test_a_model_whose_engine_failed_is_loaded_again() -> None:
    load = Played()
    catalog = catalog_of(served("a"), load=load)

    async def play() -> None:
        await use(catalog, "a")
        loaded = catalog.find("a").loaded
        assert loaded is not None
        loaded[0].driver.failure = "out of order"  # type: ignore[misc]
        assert await use(catalog, "a") == "a"

    asyncio.run(play())
    assert load.loads == ["a", "a"]
    catalog.close()


def test_unloading_waits_for_requests_and_not_for_those_that_come_later() -> None:
    load = Played()
    catalog = catalog_of(served("a"), load=load)

    async def play() -> None:
        slot = catalog.find("a")
        async with catalog.using(slot):
            unload = asyncio.create_task(catalog.unload(slot))
            await asyncio.sleep(0.01)
            later = asyncio.create_task(use(catalog, "a"))
            await asyncio.sleep(0.01)
            assert not unload.done()
            assert not later.done()
            assert load.loaded
        assert await later == "a"
        await unload

    asyncio.run(asyncio.wait_for(play(), 20))
    assert load.loads == ["a", "a"]
    catalog.close()


def test_a_client_that_goes_away_leaves_the_load_to_others() -> None:
    load = Played()
    catalog = catalog_of(served("a"), load=load)
    load.go.clear()

    async def play() -> None:
        gone, waits = (asyncio.create_task(use(catalog, "a")) for _ in range(2))
        await asyncio.sleep(0.05)
        gone.cancel()
        load.go.set()
        assert await waits == "a"
        assert (catalog.find("a").waiting, catalog.find("a").users) == (0, 0)

    asyncio.run(play())
    assert load.loads == ["a"]
    catalog.close()


def test_names_belong_to_one_model() -> None:
    with pytest.raises(ConfigError, match="same name or alias"):
        catalog_of(served("a", aliases=("x",)), served("b", aliases=("x",)), load=Played())


# --- over HTTP --------------------------------------------------------------------------------------------------------


@contextmanager
def server_of(catalog: Catalog, **options: Any) -> Iterator[str]:
    with running(create_front(catalog, ServerOptions("ssd", **options))) as (url, *_):
        yield url
    catalog.close()


@pytest.fixture(scope="module")
def alone() -> dict[str, str]:
    """What each model writes alone."""
    found = {}
    for name in NAMES:
        with LLM(name, device="cpu", max_model_len=256, max_num_seqs=4) as llm:
            found[name] = llm.generate("Once upon a time", SamplingParams(max_new_tokens=12, ignore_eos=True))[0].text
    return found


def complete(url: str, name: str, **others: Any) -> httpx.Response:
    body = {"prompt": "Once upon a time", "max_tokens": 12, "ignore_eos": True, "temperature": 0, **others}
    return httpx.post(f"{url}/v1/completions", json={"model": name, **body}, timeout=60)


def test_each_model_writes_its_text_while_they_come_and_go(alone: dict[str, str]) -> None:
    """Two of three are loaded at a time; an operator unloads them meanwhile."""
    catalog = catalog_of(*map(served, NAMES), load=make, max_loaded_models=2)
    with server_of(catalog) as url, ThreadPoolExecutor(6) as pool:
        asked = [NAMES[i * i % 3] for i in range(12)]
        answers = [pool.submit(complete, url, name) for name in asked]
        for name in NAMES:
            httpx.post(f"{url}/models/unload", json={"model": name}, timeout=60).raise_for_status()
        for name, answer in zip(asked, answers, strict=True):
            found = answer.result().json()
            assert (found["model"], found["choices"][0]["text"]) == (name, alone[name])
        states = {each["id"]: each for each in httpx.get(f"{url}/models").json()["models"]}
        assert sum(each["state"] == "ready" for each in states.values()) <= 2
        exposed = httpx.get(f"{url}/metrics").text
        for name, each in states.items():
            assert f'ssd_model_loads_total{{model_name="{name}"}} {float(each["loads"])}' in exposed
            assert (f'ssd_generation_tokens_total{{model_name="{name}"}}' in exposed) == (each["state"] == "ready")


def test_clients_see_models_and_their_states(alone: dict[str, str]) -> None:
    catalog = catalog_of(
        served("tiny-llama", "tiny-llama-draft", aliases=("gpt-4o",)), served("other", "tiny-qwen3-draft"), load=make
    )
    with server_of(catalog) as url:
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
        assert [each.id for each in client.models.list()] == ["tiny-llama", "other"]
        assert client.models.retrieve("gpt-4o").id == "tiny-llama"
        assert complete(url, "gpt-4o").json()["choices"][0]["text"] == alone["tiny-llama-draft"]
        assert httpx.post(f"{url}/tokenize", json={"prompt": "Hi"}).json()["count"] > 0  # by the first one
        with pytest.raises(openai.NotFoundError, match="use 'tiny-llama' or 'other'"):
            client.completions.create(model="gpt-5", prompt="x")
        chunks = list(client.completions.create(model="other", prompt="Hi", max_tokens=4, stream=True))
        assert {chunk.model for chunk in chunks} == {"other"}
        assert httpx.get(f"{url}/playground/state?model=other").json()["models"] == ["tiny-llama", "other"]
        messages = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2}
        assert httpx.post(f"{url}/playground/chat?model=other", json=messages).text.count("rounds") > 1
        for path in ("/", "/docs", "/health", "/health/ready", "/version", "/openapi.json"):
            assert httpx.get(f"{url}{path}").status_code == 200
        assert complete(url, "tiny-llama", temperature="hot").status_code == 400
        assert httpx.post(f"{url}/v1/completions", content=b"{", timeout=60).status_code == 400
        assert httpx.post(f"{url}/v1/completions", json={"model": 5}).json()["error"]["param"] == "model"
        assert httpx.get(f"{url}/nowhere").status_code == 404


@pytest.mark.parametrize(
    "path", mostly_slow(["/v1/completions", "/v1/messages", "/v1/responses"], fast={"/v1/messages"})
)
def test_a_stream_tells_that_its_model_is_loaded(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As comments, which clients skip; an error that comes later is the stream's last event."""
    monkeypatch.setattr("ssd.server.models.front._COMMENTS", 0.05)

    def slowly(model: ServedModel) -> Loaded:
        time.sleep(0.3)
        return make(model)

    catalog = catalog_of(served("tiny-llama", "tiny-llama-draft"), served("absent", "no/such-model"), load=slowly)
    body: dict[str, Any] = {"stream": True, "max_tokens": 2}
    if path == "/v1/completions":
        body |= {"prompt": "Hi"}
    elif path == "/v1/messages":
        body |= {"messages": [{"role": "user", "content": "Hi"}]}
    else:
        body = {"stream": True, "max_output_tokens": 16, "input": "Hi"}
    with server_of(catalog) as url:
        found = httpx.post(f"{url}{path}", json={**body, "model": "tiny-llama"}, timeout=60)
        assert found.status_code == 200
        assert re.match(r": model tiny-llama is loading, \d s\n\n: ", found.text)
        events = [line for line in found.text.splitlines() if line.startswith("data: ")]
        assert len(events) > 2
        failed = httpx.post(f"{url}{path}", json={**body, "model": "absent"}, timeout=60).text
        assert "cannot be loaded" in failed
        last = [line[6:] for line in failed.splitlines() if line.startswith("data: {")]
        assert "error" in json.loads(last[-1]) or json.loads(last[-1])["type"] == "error"
        refused = httpx.post(f"{url}{path}", json={**body, "model": "absent", "stream": False}, timeout=60)
        assert refused.status_code == 500


def test_a_request_does_not_wait_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ssd.server.models.front._COMMENTS", 0.05)
    load = Played()
    load.go.clear()
    catalog = catalog_of(served("a"), load=load, load_timeout=0.1)
    with server_of(catalog) as url:
        answer = complete(url, "a")
        assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
        assert answer.json()["error"]["code"] == "model_loading"
        load.go.set()


def test_keys_are_checked_before_a_model_is_loaded() -> None:
    load = Played()
    with server_of(catalog_of(served("a"), load=load), api_keys=("secret",)) as url:
        assert complete(url, "a").status_code == 401
        assert httpx.get(f"{url}/models").status_code == 401
    assert load.loads == []


# --- files and folders ------------------------------------------------------------------------------------------------


FILE = """
[server]
port = 8123
api_keys = ["k"]
keep_alive = 60

[engine]
max_num_seqs = 4
mode = "ar"

[[models]]
model = "models/one"
aliases = ["gpt-4o"]
pinned = true

[[models]]
model = "tiny-llama"
name = "two"
draft = "tiny-llama-draft"
mode = "ssd"
k = 3
keep_alive = -1
chat_template = "template.jinja"
"""


def test_a_file_says_all(tmp_path: Path) -> None:
    (tmp_path / "models" / "one").mkdir(parents=True)
    (tmp_path / "template.jinja").write_text("{{ messages }}")
    (tmp_path / "server.toml").write_text(FILE)
    found = ServerFile.read(tmp_path / "server.toml")
    assert (found.place, found.server, found.catalog) == ({"port": 8123}, {"api_keys": ["k"]}, {"keep_alive": 60})
    one, two = served_models(
        found.models,
        {**found.engine, "max_num_seqs": 2},
        CatalogOptions(**found.catalog),
        ServerOptions("ssd", max_n=3, api_keys=("k",)),
    )
    assert (one.name, one.config.model, one.pinned, one.keep_alive) == ("one", str(tmp_path / "models/one"), True, 60)
    assert (one.options.aliases, one.config.max_num_seqs, one.config.speculation.mode) == (("gpt-4o",), 2, "ar")
    assert (two.config.speculation.mode, two.config.speculation.k, two.keep_alive) == ("ssd", 3, -1)
    assert (two.options.max_n, two.options.api_keys) == (3, ())  # those of the server; the key is checked before
    assert two.options.chat_template == str(tmp_path / "template.jinja")


def test_the_file_of_the_documentation(tmp_path: Path) -> None:
    text = (Path(__file__).parents[2] / "docs" / "serving.md").read_text()
    (tmp_path / "server.toml").write_text(text.split("```toml\n")[1].split("```")[0])
    found = ServerFile.read(tmp_path / "server.toml")
    first, second = served_models(found.models, found.engine, CatalogOptions(**found.catalog), ServerOptions("ssd"))
    assert (first.name, first.pinned, first.keep_alive, first.config.speculation.mode) == (
        "assistant",
        True,
        600,
        "auto",
    )
    assert (second.name, second.keep_alive, second.config.max_num_seqs) == ("tiny-qwen3", -1, 8)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("[server", "is not TOML"),
        ("[servers]\nport = 1", "servers: is not a key; did you mean 'server'"),
        ("[server]\nprot = 1\n[[models]]\nmodel = 'x'", "server.prot: is not a key; did you mean 'port'"),
        ("[server]\nport = 'x'\n[[models]]\nmodel = 'x'", "server.port='x': must be int"),
        ("[server]\nserved_model_name = 'x'\n[[models]]\nmodel = 'x'", "server.served_model_name: is not a key"),
        ("models = 5", "models: must be one or more tables"),
        ("models = []", "models: must be one or more tables"),
        ("engine = 5\n[[models]]\nmodel = 'x'", "engine: must be a table"),
        ("[[models]]\nname = 'x'", r"models\[0\].model: is missing"),
        ("[[models]]\nmodel = 5", r"models\[0\].model: is missing"),
        ("[[models]]\nmodel = 'x'\nmax_num_sequences = 5", r"models\[0\].max_num_sequences: .* 'max_num_seqs'"),
        ("[[models]]\nmodel = 'x'\nmax_num_seqs = 'many'", r"models\[0\] \(x\): max_num_seqs='many': must be"),
        ("[[models]]\nmodel = 'x'\nk = 3", r"models\[0\] \(x\): speculation mode=\"sd\" needs a draft"),
        ("[[models]]\nmodel = 'x'\naliases = 'y'", r"models\[0\].aliases='y': must be a list"),
        ("[[models]]\nmodel = 'x'\npinned = 1", r"models\[0\]: pinned must be true or false"),
        ("[[models]]\nmodel = 'x'\nkeep_alive = '5m'", r"models\[0\]: .*keep_alive a number"),
        ("[[models]]\nmodel = 'x'\ntool_parser = 'y'", r"models\[0\] \(x\): tool_parser='y': must be one of"),
    ],
)
def test_what_is_wrong_in_a_file_is_named(text: str, expected: str, tmp_path: Path) -> None:
    file = tmp_path / "server.toml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=expected):
        served_models(ServerFile.read(file).models, {}, CatalogOptions(), ServerOptions("ssd"))


def test_models_of_a_folder(tmp_path: Path) -> None:
    (tmp_path / "b.Q4_K_M.gguf").touch()
    (tmp_path / "mmproj-b.gguf").touch()
    (tmp_path / "a").symlink_to(BUNDLE / "tiny-llama")
    (tmp_path / "nothing").mkdir()
    tables = in_folder(tmp_path)
    assert [each["name"] for each in tables] == ["b.Q4_K_M", "a"]
    assert [each.name for each in served_models(tables, {}, CatalogOptions(), ServerOptions("ssd"))] == [
        "b.Q4_K_M",
        "a",
    ]
    for folder in (tmp_path / "nothing", tmp_path / "absent"):
        with pytest.raises(ConfigError, match="--models-dir"):
            in_folder(folder)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["tiny-llama", "--models-dir", "."], "use one"),
        (["--models-dir", ".", "--config", "x.toml"], "use one"),
        (["tiny-llama", "--keep-alive", "5"], "only with --config or --models-dir"),
        (["--models-dir", ".", "--alias", "x"], "is for one MODEL"),
        (["--config", "absent.toml"], "cannot be read"),
    ],
)
def test_flags_that_contradict_each_other(arguments: list[str], expected: str) -> None:
    result = CliRunner().invoke(cli, ["serve", *arguments])
    assert result.exit_code != 0
    assert expected in " ".join(result.output.split())


def test_flags_are_variables_too() -> None:
    result = CliRunner().invoke(cli, ["serve", "tiny-llama"], env={"SSD_KEEP_ALIVE": "5"})
    assert "--keep-alive: only with --config" in " ".join(result.output.split())
