"""What an operator sets for all requests: chat template, sampling defaults; and the fingerprint of all of it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from live_server import MODEL, SMALL, Served, serving
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

import ssd.server.fingerprint
from ssd import LLM, SamplingParams
from ssd.assembly.open import BUNDLE
from ssd.cli.main import app
from ssd.errors import ConfigError
from ssd.kernels import device
from ssd.server.fingerprint import system_fingerprint
from ssd.server.options import ServerOptions
from ssd.server.protocol import CompletionRequest
from ssd.server.sampling_defaults import FILE, sampling_defaults

MESSAGES = [{"role": "user", "content": "Hi"}]


def options(**others: Any) -> ServerOptions:
    return ServerOptions(served_model_name=MODEL, **others)


# --- chat template ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def own() -> Iterator[LLM]:
    """A model of its own: its template is replaced."""
    with LLM(SMALL, device="cpu") as llm:
        yield llm


def test_a_chat_template_of_the_operator_replaces_the_model_s(own: LLM, tmp_path: Path) -> None:
    file = tmp_path / "template.jinja"
    file.write_text("{% for m in messages %}[{{ m.role }}] {{ m.content }}{% endfor %}{{ tools }}")
    with serving(own, chat_template=str(file)) as served:
        [found] = [httpx.post(f"{served.url}/tokenize", json={"messages": MESSAGES}).json()["tokens"]]
    assert own.tokenizer.decode(found, False) == "[user] HiNone"
    assert own.tokenizer.chat_template_names == ["default"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "cannot be read"),
        (b"\xff\xfe", "cannot be read"),
        (b"{% for m in messages %}", "line 1: cannot render a chat"),
        (b"\n{{ messages | no_such_filter }}", "line 2: cannot render a chat"),
        (b"{{ no_such_function() }}", "cannot render a chat ('no_such_function' is undefined)"),
        (b"{{ raise_exception('no chats') }}", "cannot render a chat (no chats)"),
    ],
)
def test_a_bad_chat_template_is_an_error_before_the_model_is_loaded(
    tmp_path: Path, content: bytes | None, message: str
) -> None:
    file = tmp_path / "template.jinja"
    if content is not None:
        file.write_bytes(content)
    ended = CliRunner().invoke(app, ["serve", "no-such-model", "--chat-template", str(file)])
    assert ended.exit_code == 1
    said = " ".join(ended.stderr.split())
    assert said.startswith(f"error: chat_template {file}")
    assert message in said


# --- sampling defaults ------------------------------------------------------------------------------------------------

STATED = {"temperature": 0.6, "top_p": 0.95, "top_k": 20, "min_p": None, "repetition_penalty": 1.1, "do_sample": True}


def checkpoint(folder: Path, **stated: Any) -> Path:
    (folder / FILE).write_text(json.dumps({"eos_token_id": 1, "max_new_tokens": 7, **stated}))
    return folder


def test_the_model_s_generation_config_is_the_default_and_the_operator_s_comes_first(tmp_path: Path) -> None:
    model = checkpoint(tmp_path, **STATED)
    known = {"temperature": 0.6, "top_p": 0.95, "top_k": 20, "repetition_penalty": 1.1}
    assert sampling_defaults(model, options()) == known
    changed = {"temperature": 0.0, "presence_penalty": 0.5}
    assert sampling_defaults(model, options(override_generation_config=changed)) == {**known, **changed}
    only = options(generation_config="none", override_generation_config={"min_p": 0.1})
    assert sampling_defaults(model, only) == {"temperature": 1.0, "min_p": 0.1}
    assert sampling_defaults(model, options(generation_config="none")) == {"temperature": 1.0}
    assert sampling_defaults(checkpoint(tmp_path, top_k=-1), options())["top_k"] == 0


def test_the_bundled_models_have_openai_s_defaults() -> None:
    for model in BUNDLE.iterdir():
        assert sampling_defaults(model, options()) == {"temperature": 1.0}


def test_what_a_request_says_wins(tmp_path: Path) -> None:
    """Values that are those of `SamplingParams`, too, and -1 for top_k; null is as if it were left out."""
    defaults = sampling_defaults(checkpoint(tmp_path, **STATED), options())

    def params(**fields: Any) -> SamplingParams:
        return CompletionRequest(model=MODEL, prompt="x", **fields).sampling_params(defaults, 16, None)

    left = params(temperature=None, top_p=None)
    assert (left.temperature, left.top_p, left.top_k, left.repetition_penalty) == (0.6, 0.95, 20, 1.1)
    said = params(temperature=0.0, top_p=1.0, top_k=-1, repetition_penalty=1.0)
    assert (said.temperature, said.top_p, said.top_k, said.repetition_penalty) == (0.0, 1.0, 0, 1.0)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ('{"temprature": 1}', "'temprature': is none of temperature, top_p"),
        ('{"max_new_tokens": 5}', "'max_new_tokens': is none of"),
        ('{"top_p": 2}', "top_p=2: must be"),
        ('{"top_p": "0.5"}', "top_p='0.5': must be"),
        ("[1]", "must be a JSON object"),
        ("{", "is not JSON"),
    ],
)
def test_sampling_defaults_that_cannot_be_are_refused_at_the_start(value: str, message: str) -> None:
    ended = CliRunner().invoke(app, ["serve", "no-such-model", "--override-generation-config", value])
    assert ended.exit_code == 1
    assert message in " ".join(ended.stderr.split())


def test_a_broken_generation_config_names_the_file_and_the_way_out(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=rf"{FILE}: temperature='hot'.*--generation-config none"):
        sampling_defaults(checkpoint(tmp_path, temperature="hot"), options())


def test_defaults_reach_every_endpoint(llm: LLM) -> None:
    """Greedy by the operator's default; the text of a request with a temperature is another one."""
    greedy = llm.chat([MESSAGES], SamplingParams(max_tokens=12))[0].text
    body = {"model": MODEL, "max_tokens": 12, "seed": 3}
    with serving(llm, override_generation_config={"temperature": 0.0, "top_p": 0.5}) as served:

        def post(path: str, **fields: Any) -> Any:
            return httpx.post(served.url + path, json={**body, **fields}).json()

        assert post("/v1/chat/completions", messages=MESSAGES)["choices"][0]["message"]["content"] == greedy
        drawn = post("/v1/chat/completions", messages=MESSAGES, temperature=1.0, top_p=1.0)
        assert drawn["choices"][0]["message"]["content"] != greedy
        assert post("/v1/messages", messages=MESSAGES, seed=None)["content"][0]["text"] == greedy
        fields = {"model": MODEL, "input": "Hi", "max_output_tokens": 12}
        response = httpx.post(f"{served.url}/v1/responses", json=fields).json()
        assert response["output"][0]["content"][0]["text"] == greedy
        assert (response["temperature"], response["top_p"]) == (0.0, 0.5)


# --- fingerprint ------------------------------------------------------------------------------------------------------


def test_the_fingerprint_is_in_answers_and_chunks(served: Served) -> None:
    fingerprint = system_fingerprint(served.llm, None, {"temperature": 1.0})
    bodies = {"/v1/completions": {"prompt": "x"}, "/v1/chat/completions": {"messages": MESSAGES}}
    for path, fields in bodies.items():
        body = {"model": MODEL, "max_tokens": 2, **fields}
        assert httpx.post(served.url + path, json=body).json()["system_fingerprint"] == fingerprint
        streamed = {**body, "stream": True, "stream_options": {"include_usage": True}}
        lines = httpx.post(served.url + path, json=streamed).text.split("\n\n")
        chunks = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]
        assert len(chunks) >= 2
        assert {chunk["system_fingerprint"] for chunk in chunks} == {fingerprint}


def test_the_fingerprint_changes_with_model_weights_version_and_kernels(
    own: LLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And with nothing else: a copy of the model, with other times, has the same."""
    copy = tmp_path / "copy"
    shutil.copytree(own.path, copy)
    monkeypatch.setattr(own, "path", copy)
    found = [system_fingerprint(own)]
    assert found[0] == system_fingerprint(own)
    (copy / "model.safetensors").touch()
    monkeypatch.setattr(own, "path", BUNDLE / SMALL)
    assert system_fingerprint(own) == found[0]
    monkeypatch.setattr(own, "path", copy)
    weights = load_file(copy / "model.safetensors")
    save_file({name: tensor * 1.001 for name, tensor in weights.items()}, copy / "model.safetensors")
    found.append(system_fingerprint(own))
    (copy / "tokenizer_config.json").write_text("{}")
    found.append(system_fingerprint(own))
    found.append(system_fingerprint(own, "another chat template"))
    with monkeypatch.context() as patch:
        patch.setattr(own, "config", replace(own.config, kv_cache_dtype="fp8"))
        found.append(system_fingerprint(own))
    with monkeypatch.context() as patch:
        patch.setattr(ssd.server.fingerprint, "VERSION", "0.0.0")
        found.append(system_fingerprint(own))
    with monkeypatch.context() as patch:
        own_kernels = device.kernels(torch.device("cpu"))._replace(build="another compiler's")
        patch.setattr(device, "kernels", lambda _: own_kernels)
        found.append(system_fingerprint(own))
    kernels = tmp_path / "kernels"
    kernels.mkdir()
    (kernels / "__init__.py").write_text("# other kernels")
    monkeypatch.setattr(ssd.server.fingerprint.kernels, "__file__", str(kernels / "__init__.py"))
    found.append(system_fingerprint(own))
    (kernels / "cpu" / "csrc" / "isa").mkdir(parents=True)
    for name in ("norm.h", "isa/neon.h"):
        (kernels / "cpu" / "csrc" / name).write_text(f"/* another {name} */")
        found.append(system_fingerprint(own))
    assert len(set(found)) == len(found)
