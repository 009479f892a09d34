"""The noise: pinned bits, no state, no company, and the Gumbel law.

Everything here is deterministic. A false-alarm probability is that of the test over the choice of seeds, had another
equally good generator been pinned.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence as Seq

import numpy as np
import pytest
import torch
from fakes import chi_squared_p
from hypothesis import given
from hypothesis import strategies as st

from ssd.decoding.noise import gumbel, mix64, position_key

CPU = torch.device("cpu")
GOLDEN = 0x9E37_79B9_7F4A_7C15
SMALLEST, LARGEST = -math.log(33 * math.log(2)), 33 * math.log(2)  # of 32 random bits, half a step from 0 and 1
u64 = st.integers(0, 2**64 - 1)

PINNED_KEYS = [0x4821_8226_FF3C_D4BF, 0x3202_8F50_341E_BD74, 0x34B0_5213_F4DE_5426]
PINNED_NOISE = [  # of the first two keys
    [-0.4662735164, -0.0811690316, -0.2719792426, -0.2650896609],
    [0.2598149180, 0.2043412626, 2.8378458023, 0.7758507729],
]


def keys(seed: int, positions: Seq[int]) -> list[int]:
    return [position_key(seed, p) for p in positions]


def in_python(key: int, token: int) -> float:
    """The definition, in plain integers and float64."""
    uniform = ((mix64(key + token * GOLDEN) >> 32) + 0.5) * 2.0**-32
    return -math.log(-math.log(uniform))


# --- known answers ----------------------------------------------------------------------------------------------------


def test_mix64_is_splitmix64s_finaliser() -> None:
    """Catches any change of the mixing: these are the published outputs of SplitMix64 for the seeds 0 and 1234567."""
    assert mix64(GOLDEN) == 0xE220_A839_7B1D_CDAF
    expected = [
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
        4593380528125082431,
        16408922859458223821,
    ]
    assert [mix64(1234567 + (i + 1) * GOLDEN) for i in range(5)] == expected


def test_known_answers() -> None:
    """Catches any change of the noise, which would change every seeded output of every user."""
    assert [position_key(0, 0), position_key(42, 7), position_key(2**64 - 1, 123456)] == PINNED_KEYS
    noise = gumbel([position_key(0, 0), position_key(42, 7)], 4, CPU)
    assert noise.dtype == torch.float32
    assert noise.shape == (2, 4)
    torch.testing.assert_close(noise, torch.tensor(PINNED_NOISE), rtol=1e-6, atol=0)


@given(st.lists(u64, min_size=1, max_size=4), st.integers(1, 40))
def test_the_tensor_code_is_the_python_code(some_keys: list[int], vocab: int) -> None:
    """Catches arithmetic shifts, lost carries and signs in the int64 emulation of uint64."""
    noise = gumbel(some_keys, vocab, CPU)
    expected = torch.tensor([[in_python(k, t) for t in range(vocab)] for k in some_keys], dtype=torch.float64)
    torch.testing.assert_close(noise.double(), expected, rtol=2e-7, atol=1e-9)


@given(u64)
def test_mix64_ignores_bits_beyond_64_and_is_a_bijection(x: int) -> None:
    """Catches Python's unbounded integers leaking into the key."""
    assert mix64(x) == mix64(x + 2**64) == mix64(x - 2**64) < 2**64
    y = mix64(x)  # undo it, step by step
    y ^= (y >> 31) ^ (y >> 62)
    y = y * pow(0x94D0_49BB_1331_11EB, -1, 2**64) % 2**64
    y ^= (y >> 27) ^ (y >> 54)
    y = y * pow(0xBF58_476D_1CE4_E5B9, -1, 2**64) % 2**64
    assert y ^ (y >> 30) ^ (y >> 60) == x


# --- no state, no company ---------------------------------------------------------------------------------------------


@given(st.lists(u64, min_size=1, max_size=20), st.integers(1, 300), st.integers(0, 200))
def test_a_row_is_independent_of_its_company(some_keys: list[int], vocab: int, more: int) -> None:
    """Catches noise that depends on the number of rows or of tokens: bits must be equal alone and together."""
    together = gumbel(some_keys, vocab + more, CPU)
    for key, row in zip(some_keys, together, strict=True):
        assert torch.equal(gumbel([key], vocab, CPU)[0], row[:vocab])


def test_large_calls_equal_small_ones() -> None:
    """Catches vectorised code paths (taken for long rows only) whose log has other last bits than the scalar path."""
    some = keys(5, range(8))
    together = gumbel(some, 150_001, CPU)
    for i, key in enumerate(some):
        assert torch.equal(gumbel([key], 150_001, CPU)[0], together[i])
    for vocab in (1, 7, 8, 9, 1000):
        assert torch.equal(gumbel(some, vocab, CPU), together[:, :vocab])


def test_no_global_generator_is_touched() -> None:
    """Catches a hidden torch.rand: it would couple requests to each other and to the user's own program."""
    states = torch.get_rng_state(), np.random.get_state()[1].tolist(), random.getstate()
    first = gumbel([1, 2], 100, CPU)
    assert torch.equal(torch.get_rng_state(), states[0])
    assert np.random.get_state()[1].tolist() == states[1]
    assert random.getstate() == states[2]
    torch.manual_seed(99)
    assert torch.equal(gumbel([1, 2], 100, CPU), first)


def test_seeds_positions_and_tokens_all_matter() -> None:
    """Catches a seed, position or token that is masked away. False alarm: 2e6 pairs of 64-bit keys, below 1e-12."""
    seeds = [0, 1, 2, 41, 42, 2**31, 2**32, 2**32 + 1, 2**63, 2**64 - 1, *(1 << b for b in range(3, 31))]
    many = [position_key(seed, p) for seed in seeds for p in range(50)]
    assert len(set(many)) == len(many)
    assert position_key(1, 0) != position_key(0, 1)
    noise = gumbel(keys(3, range(100)), 100, CPU)
    assert len(set(noise.flatten().tolist())) > 9_990, "float32 may make a few values equal, not many"


# --- the law ----------------------------------------------------------------------------------------------------------


def axis(name: str, n: int) -> torch.Tensor:
    """`n` values along one axis, the other two held fixed: each alone must be a good random sequence."""
    if name == "tokens":
        return gumbel([position_key(11, 3)], n, CPU)[0]
    some = keys(11, range(n)) if name == "positions" else [position_key(seed, 3) for seed in range(n)]
    return gumbel(some, 2, CPU)[:, 1]


AXES = pytest.mark.parametrize("name", ["tokens", "positions", "seeds"])


@AXES
def test_moments(name: str) -> None:
    """Catches a wrong law: mean is Euler's constant, variance pi^2/6. False alarm: 5.5 sigma twice, below 1e-7."""
    x = axis(name, 200_000).double()
    variance = math.pi**2 / 6
    assert abs(x.mean() - 0.5772156649015329) < 5.5 * math.sqrt(variance / len(x))
    assert abs(x.var() - variance) < 5.5 * variance * math.sqrt((5.4 - 1) / len(x))  # a Gumbel's kurtosis is 5.4


@AXES
def test_kolmogorov_smirnov(name: str) -> None:
    """Catches any other distribution than exp(-exp(-x)). False alarm: 2 exp(-2 * 2.7^2), below 1e-6."""
    x = axis(name, 200_000).double().sort().values
    n = len(x)
    cdf = torch.exp(-torch.exp(-x))
    rank = torch.arange(n + 1, dtype=torch.float64) / n
    distance = torch.maximum((cdf - rank[:-1]).abs().max(), (rank[1:] - cdf).abs().max())
    assert distance * math.sqrt(n) < 2.7


@AXES
@pytest.mark.parametrize("lag", [1, 2, 8])
def test_neighbours_are_independent(name: str, lag: int) -> None:
    """Catches correlation along an axis (chi-squared over 8 x 8 cells of pairs). False alarm: 1e-7."""
    uniform = torch.exp(-torch.exp(-axis(name, 200_000).double()))
    cell = (uniform * 8).long().clamp(max=7)
    chosen = torch.arange(0, len(cell) - lag).view(-1)
    chosen = chosen[(chosen // lag) % 2 == 0]  # disjoint pairs
    counts = torch.bincount(cell[chosen] * 8 + cell[chosen + lag], minlength=64)
    assert chi_squared_p(counts.tolist(), [1 / 64] * 64) > 1e-7


def test_the_far_tail_has_the_right_weight() -> None:
    """Catches 24-bit uniforms, whose largest noise is 17: rare tokens would never be drawn.

    Of 4e6 values about 4e6 * exp(-12) = 24.6 exceed 12. False alarm of leaving 4..60 (Poisson): below 1e-6.
    """
    noise = torch.cat([gumbel([k], 500_000, CPU)[0] for k in keys(23, range(8))])
    assert 4 <= int((noise > 12).sum()) <= 60
    assert noise.min() >= SMALLEST - 1e-6
    assert noise.max() <= LARGEST + 1e-5


@pytest.mark.parametrize("p", [[0.5, 0.3, 0.15, 0.04, 0.01], [0.2] * 5, [0.999, 0.0005, 0.0003, 0.0002]])
def test_gumbel_max_samples_the_distribution(p: list[float]) -> None:
    """Catches a biased sampler: 200,000 draws, one a position, by chi-squared. False alarm: 1e-7."""
    scores = torch.tensor(p).log() + gumbel(keys(7, range(200_000)), len(p), CPU)
    counts = torch.bincount(scores.argmax(-1), minlength=len(p))
    assert chi_squared_p(counts.tolist(), p) > 1e-7
