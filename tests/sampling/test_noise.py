"""The noise: pinned bits, no state, no company, and the Gumbel distribution.

Everything here is deterministic. A false-alarm probability is that of the test over the choice of seeds, had another
equally good generator been pinned.
"""

from __future__ import annotations

import functools
import itertools
import math
import random
from collections.abc import Callable
from collections.abc import Sequence as Seq

import numpy as np
import pytest
import torch
from bits import same_bits
from conftest import mostly_slow
from fakes import chi_squared_p
from hypothesis import given
from hypothesis import strategies as st
from reference_noise import gumbel_reference

from ssd.sampling import noise
from ssd.sampling.noise import (
    Stream,
    gumbel,
    gumbel_of,
    mix64,
    position_key,
    position_keys,
    seed_key,
    signed,
    uniform,
)

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


def unmix64(y: int) -> int:
    """The x of which y is `mix64`: the steps undone, last first."""
    y ^= (y >> 31) ^ (y >> 62)
    y = y * pow(0x94D0_49BB_1331_11EB, -1, 2**64) % 2**64
    y ^= (y >> 27) ^ (y >> 54)
    y = y * pow(0xBF58_476D_1CE4_E5B9, -1, 2**64) % 2**64
    return y ^ (y >> 30) ^ (y >> 60)


Draw = Callable[[Seq[int], int, torch.device], torch.Tensor]


def plain(some_keys: Seq[int], vocab: int, device: torch.device) -> torch.Tensor:
    """What `gumbel` is where there is no compiler."""
    return gumbel_reference(torch.tensor([signed(k) for k in some_keys], dtype=torch.int64, device=device), vocab)


BOTH = pytest.mark.parametrize("draw", [gumbel, plain], ids=["kernel", "torch"])


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


@BOTH
def test_known_answers(draw: Draw) -> None:
    """Catches any change of the noise, which would change every seeded output of every user."""
    assert [position_key(0, 0), position_key(42, 7), position_key(2**64 - 1, 123456)] == PINNED_KEYS
    found = draw([position_key(0, 0), position_key(42, 7)], 4, CPU)
    assert found.dtype == torch.float32
    assert found.shape == (2, 4)
    torch.testing.assert_close(found, torch.tensor(PINNED_NOISE), rtol=1e-6, atol=0)


@BOTH
@given(some_keys=st.lists(u64, min_size=1, max_size=4), vocab=st.integers(1, 40))
def test_the_tensor_code_is_the_python_code(draw: Draw, some_keys: list[int], vocab: int) -> None:
    """Catches arithmetic shifts, lost carries and signs in the int64 emulation of uint64."""
    found = draw(some_keys, vocab, CPU)
    expected = torch.tensor([[in_python(k, t) for t in range(vocab)] for k in some_keys], dtype=torch.float64)
    torch.testing.assert_close(found.double(), expected, rtol=2e-7, atol=1e-9)


@given(u64)
def test_mix64_ignores_bits_beyond_64_and_is_a_bijection(x: int) -> None:
    """Catches Python's unbounded integers leaking into the key."""
    assert mix64(x) == mix64(x + 2**64) == mix64(x - 2**64) < 2**64
    assert unmix64(mix64(x)) == x


@BOTH
def test_every_kind_of_bits_is_as_precise(draw: Draw) -> None:
    """Catches a logarithm that loses digits next to 0 or 1, where -log(u) is 1 and where its mantissa wraps around.

    The rows' first tokens have chosen bits. Half an ulp of float32 is the rounding; what float64 leaves is far below.
    """
    near = [int(u * 2**32) for u in (0.0, 1 / math.e, math.sqrt(0.5), 0.5, 0.25, math.exp(-math.sqrt(2)), 1.0)]
    bits = sorted({b for n in near for b in range(n - 2000, n + 2000) if 0 <= b < 2**32})
    assert (bits[0], bits[-1]) == (0, 2**32 - 1)
    chosen = [unmix64(b << 32 | (b * GOLDEN & 0xFFFF_FFFF)) for b in bits]
    expected = torch.tensor([-math.log(-math.log((b + 0.5) * 2.0**-32)) for b in bits], dtype=torch.float64)
    found = draw(chosen, 1, CPU)[:, 0].double()
    torch.testing.assert_close(found, expected, rtol=2.0**-24 * 1.00001, atol=1e-15)
    assert found[0] == np.float32(SMALLEST)
    assert found[-1] == np.float32(LARGEST)


def test_the_kernel_is_the_torch_code() -> None:
    """Catches two generators that are not one function: a text would depend on whether there is a compiler.

    Both round a float64 that is right to 1e-15; the chance that this shows in one of a million float32s is below 3%,
    and then by one ulp.
    """
    some = keys(29, range(16))
    ours, theirs = gumbel(some, 65_536, CPU), plain(some, 65_536, CPU)
    torch.testing.assert_close(ours, theirs, rtol=1.2e-7, atol=1e-9)
    assert int((ours != theirs).sum()) <= 3


def test_keys_may_be_strided_or_none() -> None:
    """Catches a kernel that reads a view's storage as if it were the view, or an empty batch at all."""
    some = torch.tensor([signed(k) for k in keys(37, range(8))])
    assert same_bits(gumbel_of(some[::3], 50), gumbel_of(some, 50)[::3])
    assert gumbel_of(some[:0], 50).shape == (0, 50)


@given(
    st.lists(st.tuples(st.integers(-(2**63), 2**64 - 1), st.integers(0, 2**31 - 1)), min_size=1, max_size=8),
    st.sampled_from(Stream),
)
def test_keys_of_tensors_are_those_of_integers(places: list[tuple[int, int]], stream: Stream) -> None:
    """Catches a device that derives other noise from a seed and a position than the host does."""
    seeds = torch.tensor([signed(seed_key(seed)) for seed, _ in places])
    positions = torch.tensor([position for _, position in places], dtype=torch.int32)
    expected = [signed(position_key(seed, position, stream)) for seed, position in places]
    assert position_keys(seeds, positions, stream).tolist() == expected


# --- no state, no company ---------------------------------------------------------------------------------------------


@BOTH
@given(
    some_keys=st.lists(u64, min_size=1, max_size=20),
    vocab=st.integers(1, 300),
    more=st.integers(0, 200),
)
def test_a_row_is_independent_of_its_company(draw: Draw, some_keys: list[int], vocab: int, more: int) -> None:
    """Catches noise that depends on the number of rows or of tokens: bits must be equal alone and together."""
    together = draw(some_keys, vocab + more, CPU)
    for key, row in zip(some_keys, together, strict=True):
        assert same_bits(draw([key], vocab, CPU)[0], row[:vocab])


@BOTH
def test_large_calls_equal_small_ones(draw: Draw) -> None:
    """Catches vectorised code paths (taken for long rows only) whose log has other last bits than the scalar path."""
    some = keys(5, range(8))
    together = draw(some, 150_001, CPU)
    for i, key in enumerate(some):
        assert same_bits(draw([key], 150_001, CPU)[0], together[i])
    for vocab in (1, 7, 8, 9, 1000):
        assert same_bits(draw(some, vocab, CPU), together[:, :vocab])


def test_no_global_generator_is_touched() -> None:
    """Catches a hidden torch.rand: it would couple requests to each other and to the user's own program."""
    states = torch.get_rng_state(), np.random.get_state()[1].tolist(), random.getstate()
    first = gumbel([1, 2], 100, CPU)
    assert torch.equal(torch.get_rng_state(), states[0])
    assert np.random.get_state()[1].tolist() == states[1]
    assert random.getstate() == states[2]
    torch.manual_seed(99)
    assert same_bits(gumbel([1, 2], 100, CPU), first)


def test_seeds_positions_and_tokens_all_matter() -> None:
    """Catches a seed, position or token that is masked away. False alarm: 2e6 pairs of 64-bit keys, below 1e-12."""
    seeds = [0, 1, 2, 41, 42, 2**31, 2**32, 2**32 + 1, 2**63, 2**64 - 1, *(1 << b for b in range(3, 31))]
    many = [position_key(seed, p) for seed in seeds for p in range(50)]
    assert len(set(many)) == len(many)
    assert position_key(1, 0) != position_key(0, 1)
    found = gumbel(keys(3, range(100)), 100, CPU)
    assert len(set(found.flatten().tolist())) > 9_990, "float32 may make a few values equal, not many"


# --- the distribution -------------------------------------------------------------------------------------------------


@functools.cache
def axis(name: str, n: int) -> torch.Tensor:
    """`n` values along one axis, the other two held fixed: each alone must be a good random sequence."""
    if name == "tokens":
        return gumbel([position_key(11, 3)], n, CPU)[0]
    some = keys(11, range(n)) if name == "positions" else [position_key(seed, 3) for seed in range(n)]
    return gumbel(some, 2, CPU)[:, 1]


AXES = pytest.mark.parametrize("name", ["tokens", "positions", "seeds"])


@AXES
def test_moments(name: str) -> None:
    """Mean is Euler's constant, variance pi^2/6. False alarm: 5.5 sigma twice, below 1e-7."""
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
@pytest.mark.parametrize("lag", mostly_slow([1, 2, 8], fast={1, 8}))
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
    found = torch.cat([gumbel([k], 500_000, CPU)[0] for k in keys(23, range(8))])
    assert 4 <= int((found > 12).sum()) <= 60
    assert found.min() >= SMALLEST - 1e-6
    assert found.max() <= LARGEST + 1e-5


@pytest.mark.parametrize("p", [[0.5, 0.3, 0.15, 0.04, 0.01], [0.2] * 5, [0.999, 0.0005, 0.0003, 0.0002]])
def test_gumbel_max_samples_the_distribution(p: list[float]) -> None:
    """Catches a biased sampler: 200,000 draws, one a position, by chi-squared. False alarm: 1e-7."""
    scores = torch.tensor(p).log() + gumbel(keys(7, range(200_000)), len(p), CPU)
    counts = torch.bincount(scores.argmax(-1), minlength=len(p))
    assert chi_squared_p(counts.tolist(), p) > 1e-7


# --- the streams ------------------------------------------------------------------------------------------------------


@functools.cache
def numbers(stream: Stream, n: int, token: int = 0) -> torch.Tensor:
    """Uniform numbers of one stream at positions 0..999 of several seeds; of one token where it has many."""
    places = [(seed, position) for seed in range(n // 1000) for position in range(1000)]
    if stream is Stream.ACCEPT:
        return torch.tensor([uniform(*place) for place in places], dtype=torch.float64)
    some = [position_key(*place, stream) for place in places]
    return torch.exp(-torch.exp(-gumbel(some, token + 1, CPU)[:, token].double()))


def independent(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Chi-squared over 8 x 8 cells. False alarm: 1e-8."""
    cells = (a * 8).long().clamp(max=7) * 8 + (b * 8).long().clamp(max=7)
    return chi_squared_p(torch.bincount(cells, minlength=64).tolist(), [1 / 64] * 64) > 1e-8


def test_acceptance_numbers_are_uniform() -> None:
    """Catches a biased acceptance, and one number that moves the next (at the next position, or the next seed).

    False alarm: 2 exp(-2 · 2.9²), below 1e-7, for Kolmogorov-Smirnov, and 1e-8 for each of the pairs.
    """
    u = numbers(Stream.ACCEPT, 100_000)
    ordered, rank = u.sort().values, torch.arange(len(u) + 1, dtype=torch.float64) / len(u)
    distance = torch.maximum((ordered - rank[:-1]).abs().max(), (rank[1:] - ordered).abs().max())
    assert 0.0 < u.min() <= u.max() < 1.0
    assert distance * math.sqrt(len(u)) < 2.9
    for a, b in ((u[0::2], u[1::2]), (u.view(-1, 1000)[0::2].flatten(), u.view(-1, 1000)[1::2].flatten())):
        assert independent(a, b)


def test_the_largest_and_smallest_acceptance_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches rounding to 0 or 1: a token with p = q would fall, or one with p = 0 be kept by a careless rule."""
    for bits, bound in ((0, 0.0), (2**64 - 1, 1.0)):
        monkeypatch.setattr(noise, "mix64", lambda x, bits=bits: bits)
        assert 0.0 < uniform(1, 2) < 1.0
        assert uniform(1, 2) == pytest.approx(bound, abs=1e-15)


@pytest.mark.parametrize(("one", "other"), list(itertools.combinations(Stream, 2)))
def test_streams_are_independent(one: Stream, other: Stream) -> None:
    """Catches streams that share bits, which would bias the rejection rule.

    At equal positions, of the same token, of its neighbour, and one position later. False alarm: 6 pairs of streams,
    3 tests at 1e-8 and 3 correlations of more than 6 sigma (2e-9): 3e-7 in all.
    """
    a, b, c = numbers(one, 40_000), numbers(other, 40_000), numbers(other, 40_000, token=1)
    for left, right in ((a, b), (a, c), (a[:-1], b[1:])):
        assert independent(left, right)
        correlation = torch.corrcoef(torch.stack([left, right]))[0, 1]
        assert abs(float(correlation)) * math.sqrt(len(left)) < 6.0
