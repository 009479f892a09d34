"""Kernels of draft trees: those in Triton (in its interpreter on a CPU) against the ones in torch."""

from __future__ import annotations

import pytest
import torch

from ssd.kernels.cpu import trees as in_torch
from ssd.kernels.state import Candidates

in_triton = pytest.importorskip("ssd.kernels.triton.trees", exc_type=ImportError)
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
RANKS, VOCAB, KNOWN = 16, 500, 450
Level = tuple[torch.Tensor, torch.Tensor]


def candidates(n: int, total: int, device: torch.device) -> Candidates:
    ints = torch.full((2, n, total), -7, dtype=torch.int32, device=device)
    return Candidates(ints[0], torch.full((n, total), float("nan"), device=device), ints[1])


def level(rows: int) -> Level:
    """The best tokens of some rows. Some rows have few, one has none, and one is padding with anything in it."""
    scores = 3 * torch.randn(rows, RANKS).sort(dim=1, descending=True).values
    tokens = torch.randint(0, VOCAB, (rows, RANKS)).int()
    scores[0, 5:] = -torch.inf
    tokens[0, 5:] = 0
    if rows > 2:
        scores[1] = -torch.inf
        tokens[1, 0] = -1
        scores[2, 3] = torch.nan
        tokens[2, 4] = 1 << 30
    return tokens, scores


def grown(kernel: object, levels: list[Level], n: int, children: int, device: torch.device) -> tuple[Candidates, list]:
    found, beams, first = candidates(n, children + (len(levels) - 1) * children**2, device), None, 0
    outputs = []
    columns = torch.tensor([[1, i % 2] for i in range(n + 1)], dtype=torch.float32)  # temperatures: 0, 1, 0, ...
    for tokens, scores in levels:
        following = torch.full((n * children, 3), -9, dtype=torch.int32, device=device)
        rows, beams = kernel.grow(
            *(tokens.to(device), scores.to(device), torch.arange(n, device=device).int() + 1),
            *(columns[:, 1].to(device), beams, found, following[:, 1]),
            first=first,
            children=children,
            vocab_size=VOCAB,
            known=KNOWN,
            sharpness=1.5,
        )
        outputs.append([each.cpu() for each in (following, rows, *beams)])
        first += len(scores) // n * children
    return Candidates(*(each.cpu() for each in found)), outputs


@pytest.mark.parametrize("children", [1, 3, 8])
@pytest.mark.parametrize("n", [1, 4])
def test_levels(n: int, children: int) -> None:
    torch.manual_seed(10 * n + children)
    levels = [level(n), level(n * children), level(n * children)]
    expected, found = (
        grown(kernel, levels, n, children, device)
        for kernel, device in ((in_torch, torch.device("cpu")), (in_triton, DEVICE))
    )
    for own, other in zip(expected[1], found[1], strict=True):
        torch.testing.assert_close(other, own)
        assert int(own[0].max()) < KNOWN
    torch.testing.assert_close(tuple(found[0]), tuple(expected[0]))


@pytest.mark.parametrize("nodes", [3, 8, 21])
@pytest.mark.parametrize("total", [9, 136])
def test_the_best_are_kept_in_order(nodes: int, total: int) -> None:
    """Of equal scores the first; where candidates are few, or score -inf, the other nodes have no parent."""
    torch.manual_seed(total)
    above = torch.tensor([[i // 8 - 1 for i in range(total)]] * 3).int()
    scores = torch.randint(-20, 0, (3, total)).float().sort(dim=1, descending=True).values
    scores[2, 4:] = -torch.inf
    made = Candidates(torch.randint(0, VOCAB, (3, total)).int(), scores, above)
    results = []
    for kernel, device in ((in_torch, torch.device("cpu")), (in_triton, DEVICE)):
        parents, drafts = (torch.full((6, nodes), -9, dtype=torch.int32, device=device) for _ in range(2))
        origins, slots = torch.zeros(6, dtype=torch.int32, device=device), torch.tensor([4, 0, 2]).int()
        kernel.keep(Candidates(*(e.to(device) for e in made)), slots.to(device), parents, drafts, origins, origin=3)
        results.append([each.cpu() for each in (parents, drafts, origins)])
    for own, other in zip(*results, strict=True):
        assert torch.equal(own, other)
    parents = results[0][0][4]
    assert all(int(parent) < place for place, parent in enumerate(parents) if place < total)
    assert results[0][0][2].tolist()[4:] == [nodes] * (nodes - 4)
