"""The floor of decoding: which bytes a token reads, and what the report tells of it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from conftest import mostly_slow

from ssd.bench.config import BenchConfig
from ssd.bench.floor import Floor, bandwidth, streamed_bytes
from ssd.bench.run import run
from ssd.grafts.shapes import SHAPES
from ssd.layers.formats import FormatOf, dense
from ssd.layers.formats.gguf import BLOCKS
from ssd.layers.formats.rounded import rounded
from ssd.layers.spec import ExpertsSpec
from ssd.models.config import DecoderConfig
from ssd.models.decoder import Decoder, outline, parameter_shapes

SMALL = SHAPES["cpu-7m"]


def streamed(config: DecoderConfig, formats: FormatOf = dense, rows: int = 1) -> float:
    return streamed_bytes(Decoder(config, outline(torch.bfloat16, formats), max_positions=1), rows)


def weights(config: DecoderConfig) -> int:
    """Elements of all matrices."""
    return sum(shape[0] * shape[1] for shape in parameter_shapes(config).values() if len(shape) == 2)


def test_every_matrix_is_read_once_and_an_embedding_only_as_a_head() -> None:
    assert streamed(SMALL) == streamed(replace(SMALL, tie_embeddings=False)) == 2 * weights(SMALL)


def test_blocks_count_as_in_the_file() -> None:
    """Catches the bytes that they have in memory, where a weight of 5 bits takes 8."""
    assert streamed(SMALL, lambda name: BLOCKS["Q5_0"]) == weights(SMALL) * 22 / 32
    rounding = streamed(SMALL, rounded("int8", dense, exact=True))
    assert weights(SMALL) < rounding < 2 * weights(SMALL)


def test_experts_that_a_token_does_not_use_are_not_read() -> None:
    config = SHAPES["qwen3-30b-a3b"].with_layers(2)
    mlp = config.layer.mlp
    assert isinstance(mlp, ExpertsSpec)
    experts = 2 * mlp.num_experts * 3 * mlp.intermediate_size * config.hidden_size
    embedding = config.vocab_size * config.hidden_size
    others = weights(config) - experts - embedding
    assert streamed(config) == pytest.approx(2 * (others + experts * 8 / 128))
    assert streamed(config, rows=2) == pytest.approx(2 * (others + experts * (1 - (1 - 8 / 128) ** 2)))


def test_a_shared_expert_is_read_by_every_step() -> None:
    glm = SHAPES["glm-4.7-flash"]
    config = replace(glm, layers=glm.layers[:2])
    mlp = config.layers[1].mlp
    assert isinstance(mlp, ExpertsSpec)
    each = 3 * mlp.intermediate_size * config.hidden_size
    others = weights(config) - mlp.num_experts * each - config.vocab_size * config.hidden_size
    assert streamed(config) == pytest.approx(2 * (others + 4 * each))


def test_shares() -> None:
    floor = Floor(num_bytes=2e9, bandwidth=50e9, decoded=20.0)
    expected = {"weight_bytes": 2e9, "bytes_per_second": 50e9, "tokens_per_second": 25.0, "share": 0.8}
    assert floor.as_dict() == expected
    assert str(floor) == (
        "a token reads 2 GB of weights, at 50 GB/s (measured) at most 25.0 tokens/s: ar has 0.80 of that"
    )
    assert bandwidth(torch.device("cpu")) > 1e8


@pytest.mark.parametrize(
    ("methods", "batch"), mostly_slow([("ar,suffix:2", 1), ("suffix:2", 1), ("ar", 2)], fast=[("ar,suffix:2", 1)])
)
def test_a_report_tells_the_floor_of_plain_decoding(methods: str, batch: int) -> None:
    few = {"sets": ("example",), "num_prompts": 1, "output_len": 8, "repeats": 1, "engine": {"device": "cpu"}}
    report = run(BenchConfig("tiny-llama", methods=methods, batch=batch, **few))
    floor, told = report.as_dict()["floor"], [note for note in report.notes if "of weights" in note]
    if (methods, batch) != ("ar,suffix:2", 1):
        assert (floor, told) == (None, [])
        return
    rate = report.row("ar", "mean")["decode_tokens_per_second"]
    assert floor["share"] == pytest.approx(rate * floor["weight_bytes"] / floor["bytes_per_second"])
    assert len(told) == 1
