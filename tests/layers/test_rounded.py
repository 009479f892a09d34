"""Weights that are rounded when they are loaded: the shares of ranks, what is kept meanwhile, what is refused."""

from __future__ import annotations

import weakref
from collections.abc import Iterator

import pytest
import torch
from bits import same_bits
from random_weights import RandomCheckpoint
from reference_ops import ReferenceOps

from ssd.errors import ConfigError
from ssd.kernels.codes import Format
from ssd.layers.formats import DENSE, Use, WeightFormat
from ssd.layers.formats.rounded import Rounded, rounded
from ssd.layers.parameter import Build
from ssd.models.config import equal_layers
from ssd.models.decoder import Decoder

FORMATS: tuple[Format, ...] = ("fp8", "int8", "int4")
CPU = torch.device("cpu")


def widened(form: WeightFormat, weight: torch.Tensor, columns: slice) -> torch.Tensor:
    """What a rank's codes of the weight stand for."""
    stored = {"weight": weight[form.share("weight", slice(None), columns)]}
    return form.prepare([stored], ReferenceOps(), torch.float32, Use(columns=columns)).codes.wide


@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize("depth", [128, 384, 896])
@pytest.mark.parametrize("form", FORMATS)
def test_the_shares_of_ranks_are_parts_of_one_rounded_weight(form: Format, depth: int, ranks: int) -> None:
    """Catches ranks that round their columns by themselves: the text would depend on the number of ranks. Groups of
    128 weights are cut, too (896 over 2 ranks)."""
    weight, share = torch.randn(6, depth, generator=torch.Generator().manual_seed(depth)), depth // ranks
    whole = widened(Rounded(form), weight, slice(None))
    parts = [widened(Rounded(form), weight, slice(i * share, (i + 1) * share)) for i in range(ranks)]
    assert same_bits(torch.cat(parts, 1), whole)


def test_the_share_of_one_rank_may_have_any_size() -> None:
    weight = torch.randn(4, 40)
    whole, share = (widened(Rounded("int4"), weight, part) for part in (slice(None), slice(0, 40)))
    assert same_bits(whole, share)


def test_a_share_that_no_kernel_multiplies_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"tensor_parallel_size: a rank's share of 24 weights .*use fewer ranks"):
        widened(Rounded("int4"), torch.randn(4, 192), slice(24, 48))


@pytest.mark.parametrize("form", FORMATS)
def test_loading_keeps_no_more_than_one_fused_weight_unrounded(form: Format) -> None:
    """Catches a layer that holds on to its float tensors: a 70B in fp8 would need the memory of both."""
    config = equal_layers("llama", 64, 64, 128, 6, 4, 2, 16, 64)
    alive, counts = list[weakref.ref[torch.Tensor]](), list[int]()

    def watched() -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in RandomCheckpoint(config).weights(CPU, torch.float32):
            if "_proj" in name:
                counts.append(sum(ref() is not None for ref in alive))
                alive.append(weakref.ref(tensor))
            yield name, tensor

    decoder = Decoder(config, Build(ReferenceOps(), CPU, torch.float32, format_of=rounded(form)), max_positions=1)
    decoder.load(watched())
    assert max(counts) <= 3  # q, k and v
    assert not any(ref() is not None for ref in alive)


def test_a_quantised_checkpoint_is_not_rounded_again() -> None:
    """For a target it is refused, by the option's name; of a draft, the float weights are rounded."""

    class Stored(WeightFormat):
        name = "awq"

    def stored(name: str) -> WeightFormat:
        return DENSE if name in ("lm_head", "model.embed_tokens", "model.layers.0.mlp.up_proj") else Stored()

    target, draft = rounded("fp8", stored, exact=True), rounded("fp8", stored)
    for name in ("lm_head", "model.embed_tokens"):
        assert target(name) is DENSE
        assert draft(name).name == "fp8"
    with pytest.raises(ConfigError, match=r"quantization='fp8': .*mlp\.down_proj is awq\): leave it out"):
        target("model.layers.0.mlp.down_proj")
    assert draft("model.layers.0.mlp.up_proj").name == "fp8"
    assert draft("model.layers.0.mlp.down_proj").name == "awq"
