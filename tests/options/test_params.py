"""Validation: every wrong value is refused when it is given, with an error that names the field and the value."""

from __future__ import annotations

import ast
import json
import math
from dataclasses import FrozenInstanceError, asdict, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import ssd
from ssd.config import EngineConfig, SpeculationConfig
from ssd.core import SamplingParams
from ssd.errors import ConfigError, EngineClosed, ModelNotFound, RequestError, SSDError, UnsupportedModel
from ssd.options import build
from ssd.sampling.sampler import Needs, Rows, Sampler, SamplingColumns

NAN, INF = math.nan, math.inf

WRONG_PARAMS: dict[str, list[Any]] = {
    "temperature": [-0.1, 100.5, NAN, INF, "1", None, True],
    "top_k": [-1, 1.5, NAN, INF, "5", None, True],
    "top_p": [0.0, -0.5, 1.01, NAN, "0.9", None, True],
    "min_p": [-0.1, 1.01, NAN, "0", None],
    "repetition_penalty": [0.0, -1.0, 101, NAN, INF, "1", None, True],
    "presence_penalty": [-101, 101, NAN, "0", None],
    "frequency_penalty": [-101, 101, NAN, "0", None],
    "logit_bias": [
        *({-1: 0.0}, {"-5": 0.0}, {"x": 0.0}, {5: 0.0, "5": 1.0}, {1.0: 0.0}, {True: 0.0}, 5, [3]),
        *({1: NAN}, {1: INF}, {1: 1001}, {1: "x"}, {1: None}),
    ],
    "seed": [1.0, "7", NAN, True],
    "stop": ["", ["a", ""], [1], [None], 5, [b"a"]],
    "stop_token_ids": [[-1], ["1"], [1.0], [None], 5, "12", [True], b"1", bytearray(b"1"), {1: 2}],
    "max_new_tokens": [0, -1, 1.5, INF, NAN, "5", None, True],
    "min_tokens": [-1, 257, 1.5, NAN, "1", None, True],
    "ignore_eos": ["no"],
    "logprobs": [-1, 101, 1.0, "2", True],
    "prompt_logprobs": [-1, 101, 1.0, "2", True],
    "pooling": ["max", "", 1, True],
    "n": [0, 1025, 2.0, INF, NAN, "1", None, True],
    "speculate": ["no", 1, None],
    "shown_token_ids": [[-1], ["1"], [1.0], [None], 5, "12", [True], b"1", {1: 2}],
    "priority": [0.5, "1", NAN, None, True],
    "logits_processor": [5, "f", [max]],
    "structured": [5, "json", {}, {"json_object": 1}, {"json_object": True, "regex": "a"}, {"pattern": "a"}],
}
WRONG_OPTIONS: dict[str, list[Any]] = {
    "model": [None, ""],
    "device": ["gpu", "", "cuda:", "cuda:x", "cuda:-1", "cuda:1 ", "cpu:0", None, 0, []],
    "dtype": ["fp32", "", None, 32, torch.float32],
    "quantization": ["int3", "awq", "", 8, True],
    "kv_cache_dtype": ["fp8_e5m2", "fp8_e4m3", "float32", "", None, 8],
    "max_model_len": [0, -1, 1.5, "8", True],
    "max_num_seqs": [0, -1, 1.5, "8", True, None],
    "max_num_batched_tokens": [0, -1, 1.5, "8", True],
    "block_size": [0, -1, 1.5, "8", True],
    "num_kv_blocks": [0, -1, 1.5, "8", True],
    "gpu_memory_utilization": [0.0, -0.5, 1.01, NAN, INF, "0.9", None, True],
    "tensor_parallel_size": [0, -1, 1.5, "2", True, None],
    "prefix_caching": ["no", None],
    "eager": ["no", None],
    "trust_request_chat_template": ["no", None],
    "speculation": ["sd", 3, [], {"mode": "warp"}, {"mode": None}],
}


def cases(table: dict[str, list[Any]]) -> list[Any]:
    return [pytest.param(name, value, id=f"{name}={value!r}") for name, values in table.items() for value in values]


# --- sampling parameters ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "value"), cases(WRONG_PARAMS))
def test_wrong_sampling_params(name: str, value: Any) -> None:
    """Catches a wrong value that is accepted, or that raises something else than an error naming its field."""
    with pytest.raises(RequestError, match=name):
        SamplingParams(**{name: value})


@pytest.mark.parametrize("name", ["stop", "stop_token_ids", "shown_token_ids", "logit_bias"])
def test_none_is_refused_or_means_nothing(name: str) -> None:
    """Catches a bare TypeError for the None that many clients send in place of an absent list."""
    try:
        params = SamplingParams(**{name: None})
    except RequestError as error:
        assert name in str(error)  # noqa: PT017
    else:
        assert params == SamplingParams()


def test_every_parameter_has_wrong_values() -> None:
    """Catches a new parameter without a line in the tables above."""
    assert set(WRONG_PARAMS) == {f.name for f in fields(SamplingParams)}
    assert set(WRONG_OPTIONS) == {f.name for f in fields(EngineConfig)}


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"temperature": 100, "top_p": 1, "min_p": 1, "repetition_penalty": 100},
        {"presence_penalty": -100, "frequency_penalty": 100.0},
        {"logit_bias": {0: -INF, 1: -1000, 2: 1000.0}},
        {"max_new_tokens": 5, "min_tokens": 5, "n": 1024, "logprobs": 100},
        {"seed": -(2**70), "priority": -5, "stop": "x", "stop_token_ids": (0,), "logprobs": 0},
        {"stop": ["a", "b"], "stop_token_ids": range(3), "top_k": 0},
    ],
)
def test_borders_are_allowed(options: dict[str, Any]) -> None:
    """Catches a check that is too strict."""
    params = SamplingParams(**options)
    assert params.greedy == (params.temperature == 0)


def test_params_are_normalised_and_their_own() -> None:
    """Catches a parameter that changes when the caller's list does; one stop string is a list of one."""
    stops, ids, bias = ["a"], [1, 2], {3: 0.5}
    params = SamplingParams(stop=stops, stop_token_ids=ids, logit_bias=bias)
    stops.append("b")
    ids.append(3)
    bias[4] = 1.0
    assert (params.stop, params.stop_token_ids, params.logit_bias) == (("a",), (1, 2), {3: 0.5})
    assert SamplingParams(stop="ab").stop == ("ab",)
    with pytest.raises(FrozenInstanceError):
        params.n = 2  # type: ignore[misc]


def test_numbers_become_pythons_own() -> None:
    """Catches numpy's scalars and ints for floats that go on to kernels, JSON and the wire; JSON's keys are strings."""
    odd = SamplingParams(
        temperature=np.float32(0.5),  # type: ignore[arg-type]
        top_k=np.int64(7),  # type: ignore[arg-type]
        top_p=1,
        repetition_penalty=np.int32(2),  # type: ignore[arg-type]
        presence_penalty=1,
        logit_bias={"65": 1, np.int64(3): np.float16(0.5), 4: np.float32(-np.inf)},  # type: ignore[dict-item]
        seed=np.uint64(2**63),  # type: ignore[arg-type]
        stop_token_ids=np.array([1, 2]),  # type: ignore[arg-type]
        max_new_tokens=np.int8(9),  # type: ignore[arg-type]
        ignore_eos=np.bool_(True),  # type: ignore[arg-type]
        logprobs=np.int16(2),  # type: ignore[arg-type]
    )
    right = SamplingParams(
        temperature=0.5,
        top_k=7,
        top_p=1.0,
        repetition_penalty=2.0,
        presence_penalty=1.0,
        logit_bias={65: 1.0, 3: 0.5, 4: -INF},
        seed=2**63,
        stop_token_ids=(1, 2),
        max_new_tokens=9,
        ignore_eos=True,
        logprobs=2,
    )
    assert odd == right
    for field in fields(SamplingParams):
        assert repr(getattr(odd, field.name)) == repr(getattr(right, field.name))  # 1 == 1.0, but not its repr
    assert type(SamplingParams().max_new_tokens) is int
    with pytest.raises(RequestError, match="temperature=tensor"):
        SamplingParams(temperature=torch.tensor(0.5))  # type: ignore[arg-type]


def test_max_tokens_is_another_name_of_max_new_tokens() -> None:
    """Catches a name that other libraries use and that is refused, or that silently loses against the other one."""
    assert SamplingParams(max_tokens=7) == SamplingParams(max_new_tokens=7) == SamplingParams(7 * 0.0, max_tokens=7)
    assert SamplingParams(max_tokens=7, max_new_tokens=7).max_new_tokens == 7
    assert replace(SamplingParams(max_tokens=7), seed=1).max_new_tokens == 7
    for other in (8, 256):
        with pytest.raises(RequestError, match=f"max_tokens=7 and max_new_tokens={other} are the same"):
            SamplingParams(max_tokens=7, max_new_tokens=other)
    with pytest.raises(RequestError, match="max_tokens=0"):
        SamplingParams(max_tokens=0)


def test_replace_validates_again() -> None:
    """Catches a copy with changes that goes round the checks."""
    with pytest.raises(RequestError, match="top_p"):
        replace(SamplingParams(), top_p=2.0)


@pytest.mark.parametrize("top_k", [2**31, 2**63 - 1, 2**63, 10**30])
def test_a_huge_top_k_keeps_all_tokens(top_k: int) -> None:
    """Catches a valid request that overflows in the middle of a round and takes the whole batch with it."""
    huge, none = SamplingParams(temperature=1.0, top_k=top_k), SamplingParams(temperature=1.0)
    columns = SamplingColumns(2, 20, torch.device("cpu"))
    for slot, params in enumerate((huge, none)):
        columns.set(slot, params, 0, [1], [], ())
    rows = Rows(torch.tensor([0, 1], dtype=torch.int32), torch.tensor([1, 1], dtype=torch.int32))
    chosen = Sampler(columns).choose(torch.linspace(-1, 1, 20).repeat(2, 1), rows, Needs.of([huge, none]))
    assert chosen[0] == chosen[1]


# --- engine options ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "value"), cases(WRONG_OPTIONS))
def test_wrong_engine_options(name: str, value: Any) -> None:
    """Catches a wrong option that is accepted, or that raises something else than an error naming it."""
    with pytest.raises(ConfigError, match=name):
        build(EngineConfig, {"model": "m", name: value})


@pytest.mark.parametrize(
    "options",
    [
        {"device": "cuda", "dtype": "bfloat16"},
        {"device": "cuda:3", "tensor_parallel_size": 2},
        {"max_num_seqs": 4, "max_num_batched_tokens": 4, "block_size": 1, "num_kv_blocks": 1, "max_model_len": 1},
        {"gpu_memory_utilization": 1, "prefix_caching": False, "eager": True},
        {"speculation": None},
        {"speculation": {"mode": "ar"}},
        {"speculation": SpeculationConfig()},
        {"model": Path("some/where")},
    ],
)
def test_right_engine_options(options: dict[str, Any]) -> None:
    """Catches a check that is too strict, and options that do not arrive."""
    config = build(EngineConfig, {"model": "m", **options})
    assert config.speculation == SpeculationConfig()
    for name in set(options) - {"speculation", "model"}:
        assert getattr(config, name) == options[name]
    assert config.model == str(options.get("model", "m"))


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ("max_num_seq", "max_num_seqs"),
        ("max_seqs", "max_num_seqs"),
        ("blocksize", "block_size"),
        ("prefix_cache", "prefix_caching"),
        ("max_batched_tokens", "max_num_batched_tokens"),
        ("gpu_memory_utilisation", "gpu_memory_utilization"),
        ("Device", "device"),
    ],
)
def test_unknown_options_suggest_the_nearest(given: str, meant: str) -> None:
    """Catches a misspelt option that is dropped, or an error that leaves the user to guess."""
    with pytest.raises(ConfigError, match=f"{given!r}.*{meant!r}"):
        build(EngineConfig, {"model": "m", given: 1})


def test_an_option_like_no_other_lists_them_all() -> None:
    """Catches an error without a remedy."""
    with pytest.raises(ConfigError, match=r"known options: model, device.*speculation"):
        build(EngineConfig, {"model": "m", "zzz": 1})
    with pytest.raises(ConfigError, match="'mode'"):
        build(EngineConfig, {"model": "m", "speculation": {"moed": "ar"}})


def test_numbers_of_options_become_pythons_own() -> None:
    """Catches numpy's scalars in a config, which cannot be sent to a worker as JSON."""
    speculation = {
        "mode": "ssd",
        "draft": Path("d"),
        "k": np.int64(2),
        "budget": np.int32(8),
        "fan_out_hit": [np.int64(1)] * 3,
        "fan_out_miss": (1, np.int8(2), 1),
    }
    odd = EngineConfig("m", max_num_seqs=np.int64(4), eager=np.bool_(True), speculation=speculation)  # type: ignore[arg-type]
    plain = {**speculation, "draft": "d", "k": 2, "budget": 8, "fan_out_hit": [1, 1, 1], "fan_out_miss": [1, 2, 1]}
    right = EngineConfig("m", max_num_seqs=4, eager=True, speculation=plain)  # type: ignore[arg-type]
    assert json.dumps(asdict(odd)) == json.dumps(asdict(right))
    assert repr(EngineConfig("m", gpu_memory_utilization=1).gpu_memory_utilization) == "1.0"
    with pytest.raises(ConfigError, match="fan_out=True"):
        SpeculationConfig("ssd", "d", fan_out=True)


def test_a_missing_model_is_a_config_error() -> None:
    """Catches a bare TypeError from a dataclass in place of an error of ours."""
    with pytest.raises(ConfigError, match="model"):
        build(EngineConfig, {})


def test_the_budget_must_hold_a_token_for_every_sequence() -> None:
    """Catches a contradiction between two options that would starve decoding sequences."""
    with pytest.raises(ConfigError, match=r"max_num_batched_tokens=3.*max_num_seqs=4"):
        EngineConfig("m", max_num_seqs=4, max_num_batched_tokens=3)


# --- errors -----------------------------------------------------------------------------------------------------------


def test_one_tree_of_errors() -> None:
    """Catches an error that `except SSDError` misses; wrong values are also ValueErrors, as Python users expect."""
    for kind in (ConfigError, RequestError, ModelNotFound, UnsupportedModel, EngineClosed):
        assert issubclass(kind, SSDError)
    assert issubclass(ConfigError, ValueError)
    assert issubclass(RequestError, ValueError)
    assert all(hasattr(ssd, name) for name in ssd.__all__ if name != "LLM")


def test_nothing_depends_on_assert_statements() -> None:
    """Catches `assert` in the package's bookkeeping and validation, which `python -O` would remove."""
    root = Path(ssd.__file__).parent
    files = [root / "core.py", root / "config.py", root / "llm.py", *(root / "engine").glob("*.py")]
    files += (root / "decoding").glob("*.py")
    found = [
        f"{file.name}:{node.lineno}"
        for file in files
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        if isinstance(node, ast.Assert)
    ]
    assert not found
