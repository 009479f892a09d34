"""The Triton sampler against the one in plain torch: in Triton's interpreter on a CPU, for real on a GPU."""

from __future__ import annotations

import itertools
import random

import pytest
import torch
from bits import same_bits
from conftest import mostly_slow

from ssd.core import SamplingParams
from ssd.sampling import noise
from ssd.sampling.sampler import MIN_TEMPERATURE, Needs, Rows, Sampler, SamplingColumns

triton_sampling = pytest.importorskip("ssd.kernels.triton.sampling", exc_type=ImportError)
import triton  # noqa: E402
import triton.language as tl  # noqa: E402

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
CPU = torch.device("cpu")
VOCAB = 1500  # not a multiple of what one program reads
SLOW = pytest.mark.slow
MIXES = [
    {"temperature": t, "top_k": k, "top_p": p, "min_p": m}
    for t, (k, p, m) in zip((0.5, 1.5, 1.5, 0.5) * 2, itertools.product((0, 7), (1.0, 0.8), (0.0, 0.02)), strict=True)
] + [
    {},
    {"temperature": 1.0, "top_k": 1},
    {"temperature": 1.0, "top_p": 1e-6},
    {"temperature": 1e-9, "top_k": 10**6, "top_p": 0.999},
    {"temperature": 1.0, "min_p": 1.0},
    {"temperature": 1.0, "top_k": 700, "top_p": 0.99},
    {"temperature": 1.0, "repetition_penalty": 1.3, "min_tokens": 5},
    {"presence_penalty": 0.5, "frequency_penalty": 0.7, "logit_bias": {5: 3.0, 10**6: 1.0}},
    {"temperature": 0.7, "top_p": 0.9, "logit_bias": {7: -100.0, 8: 4.0}, "repetition_penalty": 0.9},
]


def some_logits(kind: str, rows: int, vocab_size: int) -> torch.Tensor:
    logits = torch.randn((rows, vocab_size), generator=torch.Generator().manual_seed(3)) * 3
    if kind == "ties":
        return logits.round()
    if kind == "holes":
        return logits.masked_fill(
            torch.rand(logits.shape, generator=torch.Generator().manual_seed(4)) < 0.5, -torch.inf
        )
    return torch.full_like(logits, -torch.inf) if kind == "nothing" else logits


class Case:
    """One row for each mix of parameters, and some of padding; the same parameters on both devices."""

    def __init__(self, mixes: list[dict[str, object]], vocab_size: int) -> None:
        rng = random.Random(1)
        self.needs = Needs.of(SamplingParams(**mix) for mix in mixes)  # type: ignore[arg-type]
        self.columns = {d: SamplingColumns(len(mixes), vocab_size, d) for d in {CPU, DEVICE}}
        drafted = [rng.randint(0, 3) for _ in mixes]
        slots = list(range(len(mixes)))
        for columns, slot in itertools.product(self.columns.values(), slots):
            params = SamplingParams(**mixes[slot])  # type: ignore[arg-type]
            columns.set(slot, params, 100 + slot, [1, 2, 9], [4, 4, slot % vocab_size], [0, 4, vocab_size])
        drafts = torch.randint(0, min(vocab_size, 9), (len(mixes), 3), generator=torch.Generator().manual_seed(2))
        columns_of_rows = ([-1, *slots, -1], [0, *(6 + n for n in drafted), 0], [0, *drafted, 0])
        self.rows = Rows(*(torch.tensor(c, dtype=torch.int32) for c in columns_of_rows), drafts.int())

    def torch_sampler(self) -> Sampler:
        return Sampler(self.columns[CPU])

    def on_device(self) -> Rows:
        return Rows(*(x.to(DEVICE) for x in self.rows if x is not None))

    def triton_best(
        self,
        logits: torch.Tensor,
        rows: Rows,
        needs: Needs,
        count: int,
        excluded: torch.Tensor | None = None,
        ids: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        columns, logits = self.columns[DEVICE], logits.to(DEVICE, copy=True)
        if needs.adjusted:
            triton_sampling.adjust(logits, columns, *rows)
        tokens, scores = triton_sampling.best(
            logits,
            columns,
            rows.slots,
            rows.positions,
            truncated=needs.truncated,
            count=count,
            excluded=None if excluded is None else excluded.to(DEVICE),
            ids=None if ids is None else ids.to(DEVICE),
            constants=noise.constants(),
        )
        return tokens.cpu(), scores.cpu()


def real(x: torch.Tensor) -> torch.Tensor:
    return x[1:-1]  # without padding


@pytest.mark.parametrize(
    ("kind", "count"),
    [
        pytest.param("random", 1, marks=SLOW),
        ("ties", 3),
        pytest.param("holes", 3, marks=SLOW),
        pytest.param("nothing", 1, marks=SLOW),
    ],
)
def test_best_tokens(kind: str, count: int) -> None:
    case = Case(MIXES, VOCAB)
    logits = some_logits(kind, len(MIXES) + 2, VOCAB)
    excluded = torch.arange(len(logits), dtype=torch.int32) % 5 - 1 if count > 1 else None
    expected = case.torch_sampler().best(logits.clone(), case.rows, case.needs, count, excluded)
    tokens, scores = case.triton_best(logits, case.on_device(), case.needs, count, excluded)
    assert real(tokens).tolist() == real(expected[0]).tolist()
    torch.testing.assert_close(real(scores), real(expected[1]), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("rows", mostly_slow([4, 18], fast={4}))
@pytest.mark.parametrize("truncated", [False, True])
def test_tokens_of_a_draft_vocabulary(rows: int, truncated: bool) -> None:
    """Noise, the excluded tokens and the results are those of the ids."""
    own = {"top_k": 700, "top_p": 0.9} if truncated else {}
    case = Case([{"temperature": (0.0, 1.0, 0.4)[i % 3], **own} for i in range(rows)], VOCAB)
    logits, ids = some_logits("ties", rows + 2, VOCAB), 7 * torch.randperm(VOCAB, dtype=torch.int32) + 3
    likeliest = case.torch_sampler().best(logits, case.rows, case.needs, 1, None, ids)[0][:, 0].contiguous()
    for excluded in (None, likeliest):
        expected = case.torch_sampler().best(logits, case.rows, case.needs, 3, excluded, ids)
        tokens, scores = case.triton_best(logits, case.on_device(), case.needs, 3, excluded, ids)
        assert real(tokens).tolist() == real(expected[0]).tolist()
        torch.testing.assert_close(real(scores), real(expected[1]), rtol=1e-5, atol=1e-5)
        assert bool((real(tokens) % 7 == 3)[real(scores) > -torch.inf].all())
    logits[3, 4] = torch.nan
    assert case.triton_best(logits, case.on_device(), case.needs, 2, None, ids)[0][3, 0] == -1


def test_rows_without_a_choice() -> None:
    """NaN or +inf anywhere, or -inf everywhere; the other rows are as they were."""
    case = Case(MIXES[:6], VOCAB)
    logits = some_logits("random", 6 + 2, VOCAB)
    logits[1, VOCAB - 1], logits[2, 3], logits[3] = torch.nan, torch.inf, -torch.inf
    expected = case.torch_sampler().best(logits.clone(), case.rows, case.needs, 2)
    tokens, _ = case.triton_best(logits, case.on_device(), case.needs, 2)
    assert tokens[1:4, 0].tolist() == [-1, -1, -1]
    assert tokens[1:-1, 0].tolist() == expected[0][1:-1, 0].tolist()


@pytest.mark.parametrize("vocab_size", mostly_slow([1, 2, 5], fast=[] if DEVICE == CPU else {1}))
def test_small_vocabularies(vocab_size: int) -> None:
    mixes = [{k: v for k, v in mix.items() if k != "logit_bias"} for mix in MIXES]
    case = Case(mixes, vocab_size)
    logits = some_logits("random", len(mixes) + 2, vocab_size)
    rows = case.rows._replace(num_drafted=None, drafts=None)
    expected, scores = case.torch_sampler().best(logits.clone(), rows, case.needs, 3)
    tokens, values = case.triton_best(logits, Rows(*case.on_device()[:2]), case.needs, 3)
    assert real(tokens).tolist() == real(expected).tolist()
    torch.testing.assert_close(real(values), real(scores), rtol=1e-5, atol=1e-5)


def test_adjusted_logits() -> None:
    case = Case(MIXES, VOCAB)
    expected = some_logits("holes", len(MIXES) + 2, VOCAB)
    found = expected.to(DEVICE, copy=True)
    case.torch_sampler().adjust(expected, case.rows)
    triton_sampling.adjust(found, case.columns[DEVICE], *case.on_device())
    torch.testing.assert_close(found.cpu(), expected, rtol=1e-6, atol=1e-6)


def test_masked_logits() -> None:
    """Of some rows only, with the bits of a last word that is not full."""
    expected = some_logits("random", 6, VOCAB)
    found = expected.to(DEVICE, copy=True)
    rows = torch.tensor([4, 0, 5])
    masks = torch.randint(-(2**31), 2**31, (3, -(-VOCAB // 32)), generator=torch.Generator().manual_seed(5)).int()
    Sampler(SamplingColumns(1, VOCAB, CPU)).mask(expected, rows, masks)
    triton_sampling.mask(found, rows.to(DEVICE), masks.to(DEVICE))
    assert same_bits(found.cpu(), expected)
    allowed = [[bool(int(masks[i, t // 32]) >> t % 32 & 1) for t in range(VOCAB)] for i in range(3)]
    assert torch.equal(expected[rows] > -torch.inf, torch.tensor(allowed))
    assert (expected[1:4] > -torch.inf).all()


@pytest.mark.parametrize("kind", mostly_slow(["random", "ties"], fast=[] if DEVICE == CPU else {"ties"}))
def test_what_truncation_keeps(kind: str) -> None:
    case = Case(MIXES, VOCAB)
    logits = some_logits(kind, len(MIXES) + 2, VOCAB)
    expected = case.torch_sampler().distribution(logits, case.rows, Needs(truncated=True))
    z = triton_sampling.tempered(logits.to(DEVICE), case.columns[DEVICE], case.on_device().slots, MIN_TEMPERATURE).cpu()
    torch.testing.assert_close(real(z.double().softmax(-1)), real(expected), rtol=1e-4, atol=1e-9)


@pytest.mark.parametrize("step", mostly_slow([4, 8], fast={8 if DEVICE == CPU else 4}))
def test_company_and_variants_do_not_matter(step: int) -> None:
    """Alone or in company, in every variant that covers its needs: the same bits."""
    case = Case(MIXES, VOCAB)
    logits, rows = some_logits("ties", len(MIXES) + 2, VOCAB), case.on_device()
    expected = case.triton_best(logits, rows, Needs(True, True), 2)
    for i in range(0, len(MIXES), step):
        row = slice(1 + i, 2 + i)
        own = Needs.of([SamplingParams(**MIXES[i])])  # type: ignore[arg-type]
        alone = Rows(*(c[row] for c in rows[:3] if c is not None), rows.drafts)
        for needs in {own, Needs(True, own.adjusted)}:
            found = case.triton_best(logits[row], alone, needs, 2)
            assert all(same_bits(a, b[row]) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize(
    ("kind", "count"),
    [
        *(pytest.param(*case, marks=SLOW) for case in [("random", 1), ("ties", 1), ("holes", 2)]),
        pytest.param("nothing", 1, marks=SLOW),
        pytest.param("ties", 3, marks=SLOW),
    ],
)
def test_many_rows_have_the_bits_of_few(kind: str, count: int) -> None:
    """Many rows are bounded in float32 first; their tokens and scores are those of the float64 rule."""
    few = triton_sampling._BOUNDED_ROWS - 1
    mixes: list[dict[str, object]] = [{"temperature": (0.0, 0.3, 1.0, 5.0)[i % 4]} for i in range(2 * few - 2)]
    case = Case(mixes, 2 * VOCAB)
    logits, rows = some_logits(kind, 2 * few, 2 * VOCAB), case.on_device()
    logits[5, 7], logits[6, 2 * VOCAB - 1], logits[7] = torch.nan, torch.inf, -torch.inf
    found = case.triton_best(logits, rows, Needs(), count)
    for part in (slice(0, few), slice(few, None)):
        alone = Rows(*(column[part] for column in rows[:3] if column is not None), rows.drafts)
        expected = case.triton_best(logits[part], alone, Needs(), count)
        kept = rows.slots[part].cpu() >= 0
        assert all(same_bits(a[part][kept], b[kept]) for a, b in zip(found, expected, strict=True))


@triton.jit
def _noise_kernel(bits_ptr, exact_ptr, rough_ptr, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    bits = tl.load(bits_ptr + at).to(tl.uint64)
    tl.store(exact_ptr + at, triton_sampling._gumbel(bits))
    tl.store(rough_ptr + at, triton_sampling._rough_gumbel(bits))


def test_the_error_of_rough_noise_is_far_below_its_bound() -> None:
    edges = [0, 1, 2, 2**31 - 1, 2**31, 2**32 - 2**26 - 1, 2**32 - 2**26, 2**32 - 2, 2**32 - 1]
    bits = torch.randint(0, 2**32, (1 << 14,), generator=torch.Generator().manual_seed(5))
    powers = 2 ** torch.arange(32)
    bits[: len(edges)], bits[100:132], bits[200:232] = torch.tensor(edges), powers, 2**32 - powers
    bits = bits.to(DEVICE)
    exact, rough = (torch.empty(len(bits), device=DEVICE) for _ in range(2))
    _noise_kernel[(len(bits) // 1024,)](bits, exact, rough, BLOCK=1024)
    assert (exact - rough).abs().max() < triton_sampling._NOISE_ERROR.value / 50
