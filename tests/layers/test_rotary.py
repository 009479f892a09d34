"""Rotary tables against those of `transformers`, at every position."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from bits import same_bits
from conftest import mostly_slow
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from ssd.layers.rotary import rope_tables
from ssd.models.families import rope_config

GPT_OSS = {"beta_fast": 32.0, "beta_slow": 1.0, "factor": 32.0, "original_max_position_embeddings": 4096}
LINEAR = {"rope_type": "linear", "factor": 4.0}


@pytest.mark.parametrize(
    ("scaling", "theta"),
    mostly_slow(
        [
            ({**GPT_OSS, "rope_type": "yarn", "truncate": False}, 150000.0),
            ({**GPT_OSS, "rope_type": "yarn", "truncate": True}, 150000.0),
            ({**GPT_OSS, "rope_type": "yarn"}, 10000.0),
            ({**GPT_OSS, "rope_type": "yarn", "truncate": False, "attention_factor": 1.5}, 150000.0),
            ({**GPT_OSS, "rope_type": "yarn", "mscale": 1.0, "mscale_all_dim": 0.7}, 50000.0),
            ({**GPT_OSS, "rope_type": "yarn", "mscale": 1.0}, 50000.0),
            ({**GPT_OSS, "rope_type": "yarn", "beta_fast": 1.0, "truncate": False}, 50000.0),
            (LINEAR, 10000.0),
        ],
        fast=[
            ({**GPT_OSS, "rope_type": "yarn", "truncate": False}, 150000.0),
            ({**GPT_OSS, "rope_type": "yarn", "mscale": 1.0, "mscale_all_dim": 0.7}, 50000.0),
            (LINEAR, 10000.0),
        ],
    ),
    ids=str,
)
def test_tables_are_those_of_transformers(scaling: dict[str, Any], theta: float) -> None:
    """Bit by bit, beyond the original length, too: catches a correction range that is rounded where it should not be,
    and another factor of the cosines."""
    length, dim = 131072, 64
    parameters = {**scaling, "rope_theta": theta}
    config = LlamaConfig(head_dim=dim, hidden_size=8 * dim, num_attention_heads=8, max_position_embeddings=length)
    config.rope_parameters = parameters
    theirs = LlamaRotaryEmbedding(config)(torch.zeros(1), torch.arange(length)[None])
    ours = rope_tables(rope_config({"rope_parameters": parameters}, length), dim, length)
    for mine, other in zip(ours, theirs, strict=True):
        assert same_bits(mine, other[0, :, : dim // 2])
