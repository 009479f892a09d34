"""The trees that draft models, EAGLE heads and block drafts write, and those that draft models prepare, are the best
ones, by the logits of a plain implementation.

That holds only if every beam reads the KV and hidden states of its own path, and if those of what was accepted are
where the next draft begins. Wrong ones cost nothing but speed: nobody would notice.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable
from collections.abc import Sequence as Seq
from pathlib import Path
from typing import Any

import pytest
import torch
from block_drafts import Block, make_block
from conftest import TestModel, mostly_slow, ragged_prompts
from eagle_heads import Head, make_head
from eagle_observers import FEW

from ssd import LLM, SamplingParams
from ssd.core import Origin, Proposal, Work
from ssd.drafting.fan_out import RANKS
from ssd.drafting.tree import MOST_BEAMS, SHARPNESS
from ssd.sampling import noise

PROMPTS = ragged_prompts(5, longest=40)
OPTIONS: dict[str, Any] = {"device": "cpu", "dtype": "float32", "max_num_seqs": 3, "block_size": 4}
OPTIONS |= {"max_num_batched_tokens": 40, "max_model_len": 100}
NODES, DEPTH = 7, 3
SHARE = 0.97  # of the trees: sums are taken in another order, so a close choice may be another one
Paths = set[tuple[int, ...]]


class Plain:
    """A draft model."""

    def __init__(self, model: TestModel) -> None:
        self.path, self._reference = model.path, model.reference

    @torch.inference_mode()
    def draft(self, tokens: Seq[int], count: int, _: None, path: Seq[int]) -> tuple[None, torch.Tensor]:
        """Logits after the last `count` of these tokens and those of a path behind them."""
        return None, self._reference(torch.tensor([[*tokens, *path]])).logits[0, -count:]


Draft = Plain | Head | Block


def ranked(
    logits: torch.Tensor,
    position: int,
    params: SamplingParams,
    seed: int,
    count: int = MOST_BEAMS,
    sharpness: float = SHARPNESS,
) -> list[tuple[int, float]]:
    """The best tokens at a position and the logarithms of how likely they are."""
    logits = logits.clone()
    if params.logit_bias:
        logits[list(FEW)] += 100.0
    if params.temperature:
        noises = noise.gumbel([noise.position_key(seed, position)], len(logits), logits.device)
        logits = logits / params.temperature + noises[0]
    else:
        logits *= sharpness
    values, chosen = logits.topk(count)
    found = zip(chosen.tolist(), values.log_softmax(0).tolist(), strict=True)
    return [(token, score) for token, score in found if score > -torch.inf]


def best_tree(draft: Draft, tokens: Seq[int], params: SamplingParams, seed: int) -> Paths:
    """The paths of all nodes, taken from the best to the worst."""
    found: Paths = set()
    heap: list[tuple[float, tuple[int, ...]]] = [(0.0, ())]
    while len(found) <= NODES:
        cost, path = heapq.heappop(heap)
        found.add(path)
        if len(path) == DEPTH:
            continue
        count = DEPTH if isinstance(draft, Block) else len(path) + 1  # a block depends on how many it writes
        logits = draft.draft(tokens, count, None, path)[1][len(path)]
        sharpness = 1.0 if isinstance(draft, Block) else SHARPNESS
        for token, score in ranked(logits, len(tokens) + len(path), params, seed, sharpness=sharpness):
            heapq.heappush(heap, (cost - score, (*path, token)))
    return found - {()}


class SeenTrees:
    """The trees of a drafter as it writes them to the SequenceState, each beside the best one; in every fourth round it
    is made to write chains."""

    def __init__(self, llm: LLM, draft: Draft) -> None:
        self.seen: list[tuple[Paths, Paths]] = []
        self.accepted: list[int] = []  # before them
        self._state, self._draft = llm.engine.round.target.state, draft
        self._drafter, self._rounds = llm.engine.round.drafter, itertools.count(1)
        self._propose = llm.engine.round.drafter.propose
        llm.engine.round.drafter.propose = self.propose  # type: ignore[method-assign]

    def propose(self, works: Seq[Work]) -> list[Proposal]:
        self._drafter.levels = DEPTH if next(self._rounds) % 4 else 0
        proposals = self._propose(works)
        assert self._state.tree is not None
        for work, proposal in zip(works, proposals, strict=True):
            if proposal.num_tokens < NODES:  # a chain, or near the end of a text
                continue
            paths: list[tuple[int, ...]] = []
            both = (each[work.slot].tolist() for each in (self._state.drafts, self._state.tree.parents))
            for token, parent in zip(*both, strict=True):
                paths.append((*(paths[parent] if parent >= 0 else ()), token))
            sequence = work.sequence
            best = best_tree(self._draft, sequence.tokens, sequence.params, sequence.seed)
            self.seen.append((set(paths), best))
            self.accepted.append(sequence.last_accepted)
        return proposals


MODELS = ("qwen2", "mistral-windows", "glm4-moe-lite")
HEADS: dict[str, dict[str, Any]] = {"": {}, "norms": {"norm_before_residual": True, "norm_output": True}}
BLOCKS: dict[str, dict[str, Any]] = {
    "dflash": {},
    "dflash2": {"second": True},
    "vanilla": {"layout": "deepspec", "markov": "vanilla"},
    "rnn": {"layout": "speculators", "markov": "rnn"},
}


def sampled(bias: dict[int, float]) -> list[SamplingParams]:
    """Of each prompt: greedy, or with a seed and a temperature."""
    return [
        SamplingParams(temperature=(0.0, 1.0, 0.7)[i % 3], seed=i, logit_bias=bias, max_new_tokens=26, ignore_eos=True)
        for i in range(len(PROMPTS))
    ]


@pytest.mark.parametrize("kind", mostly_slow([*MODELS, *HEADS, *BLOCKS], fast={"qwen2"}))
def test_trees_are_the_best_ones(make_model: Callable[[str], TestModel], tmp_path: Path, kind: str) -> None:
    """At T = 0 and above, with chunks of prompts, several sequences and accepted paths of all lengths."""
    target = make_model("qwen3" if kind in BLOCKS else "llama-tied")
    draft: Draft
    if kind in MODELS:
        draft = Plain(make_model(kind))
    elif kind in HEADS:
        draft = make_head(target, tmp_path / "head", **HEADS[kind])
    else:
        draft = make_block(target, tmp_path / "block", **BLOCKS[kind])
    speculation = {"mode": "sd", "draft": draft.path, "k": DEPTH, "tree": NODES}
    bias = dict.fromkeys(FEW, 100.0) if kind != "dflash2" else {}  # which leaves a few tokens of its own choice
    params = sampled(bias)
    with LLM(target.path, speculation=speculation, **OPTIONS) as llm:
        trees = SeenTrees(llm, draft)
        outputs = llm.generate(PROMPTS, params)
        assert llm.engine.metrics.drafter_failures == 0
    with LLM(target.path, **OPTIONS) as llm:
        assert [o.token_ids for o in outputs] == [o.token_ids for o in llm.generate(PROMPTS, params)]
    assert len(trees.seen) > 20
    assert not bias or {0, 1, 2} <= set(trees.accepted)
    others = [pair for pair in trees.seen if pair[0] != pair[1]]
    assert len(others) <= (1 - SHARE) * len(trees.seen), others


# --- trees that are prepared ------------------------------------------------------------------------------------------

WIDTH, COMPARED = 6, 12
Forest = dict[tuple[int, int], tuple[int, ...]]  # by outcome, the tokens of its tree, the best first


def best_forest(
    draft: Plain, tokens: Seq[int], tree: list[tuple[int, ...]], params: SamplingParams, seed: int
) -> Forest:
    """`tree`: the paths of its nodes. An outcome is the number of accepted nodes and the token behind them."""

    def following(path: tuple[int, ...], count: int) -> list[tuple[int, float]]:
        logits = draft.draft(tokens, 1, None, path)[1][0]
        return ranked(logits, len(tokens) + len(path), params, seed, count)

    reached, outcomes = {(): 0.0}, list[tuple[float, tuple[int, ...]]]()
    for path in sorted([(), *tree], key=len):
        best = following(path, RANKS)
        for node in (node for node in tree if node[:-1] == path):
            reached[node] = reached[path] + dict(best).get(node[-1], best[-1][1])
        outcomes += [(reached[path] + score, (*path, token)) for token, score in best if (*path, token) not in tree]
    roots = sorted(outcomes, reverse=True)[:WIDTH]
    trees: dict[tuple[int, ...], list[tuple[float, int]]] = {root: [] for _, root in roots}
    beams = [(score, root, root) for score, root in roots]
    for _ in range(DEPTH):
        level = []
        for score, path, root in beams:
            for token, own in following(path, MOST_BEAMS)[:NODES]:
                level.append((score + own, (*path, token), root))
                trees[root].append((score + own, token))
        beams = sorted(level, reverse=True)[:WIDTH]
    found = {root: tuple(token for _, token in sorted(nodes, reverse=True)[:NODES]) for root, nodes in trees.items()}
    return {(len(root) - 1, root[-1]): found[root] for _, root in reversed(roots)}  # of equal keys the likelier one


class SeenForests:
    """What is prepared in each round, beside the best trees; and where the outcomes were."""

    def __init__(self, llm: LLM, draft: Plain) -> None:
        self.seen: list[tuple[Forest, Forest]] = []
        self.depths: set[int] = set()  # of the nodes that outcomes are behind
        self._state, self._draft = llm.engine.round.target.state, draft
        self._prepare = llm.engine.round.drafter.prepare
        self._drafter = llm.engine.round.drafter
        llm.engine.round.drafter.prepare = self.prepare  # type: ignore[method-assign]

    def prepare(self, works: Seq[Work]) -> None:
        self._prepare(works)
        assert self._state.tree is not None
        for work in works:
            paths: list[tuple[int, ...]] = []
            both = (each[work.slot].tolist() for each in (self._state.drafts, self._state.tree.parents))
            for token, parent in zip(*(each[: work.proposal.num_tokens] for each in both), strict=True):
                if parent == NODES:  # and so have all others: there are no more nodes
                    break
                paths.append((*(paths[parent] if parent >= 0 else ()), token))
            found = self._drafter.prepared(work.sequence)
            looked_up = work.proposal.origin is Origin.HIT  # mostly; after that the tree has scores of a forest
            if len(self.seen) == COMPARED or not found or not (looked_up or len(self.seen) < COMPARED // 4):
                continue
            sequence = work.sequence
            best = best_forest(self._draft, sequence.tokens, paths, sequence.params, sequence.seed)
            self.seen.append((dict(found), best))
            self.depths |= {after for after, _ in found}


@pytest.mark.parametrize("kind", mostly_slow(["qwen2", "mistral-windows", "glm4-moe-lite"], fast={"qwen2"}))
def test_prepared_trees_are_the_best_ones(make_model: Callable[[str], TestModel], kind: str) -> None:
    """Behind nodes of all depths, at T = 0 and above, in prompts that are read in chunks and in batches."""
    target, draft = make_model("llama-tied"), Plain(make_model(kind))
    speculation = {"mode": "ssd", "draft": draft.path, "k": DEPTH, "tree": NODES, "budget": WIDTH}
    bias = dict.fromkeys(FEW, 100.0)
    params = sampled(bias)
    with LLM(target.path, speculation=speculation, **OPTIONS) as llm:
        forests = SeenForests(llm, draft)
        outputs = llm.generate(PROMPTS, params)
        assert llm.engine.metrics.drafter_failures == 0
        assert llm.engine.metrics.ssd_hit_rate > 0.2
    with LLM(target.path, **OPTIONS) as llm:
        assert [o.token_ids for o in outputs] == [o.token_ids for o in llm.generate(PROMPTS, params)]
    assert len(forests.seen) == COMPARED
    assert {0, 1, 2} <= forests.depths
    others = [pair for pair in forests.seen if pair[0] != pair[1]]
    assert len(others) <= (1 - SHARE) * len(forests.seen), others
