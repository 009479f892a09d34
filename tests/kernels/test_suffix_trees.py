"""Suffix trees in C against a reference that compresses nothing, over small alphabets, where everything repeats."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ssd.kernels.cpu.suffix import MOST_DRAFTED, SuffixTree

DEPTH = MOST_DRAFTED + 1
END = -1


@dataclass(eq=False)
class Node:
    """A string: how many windows begin with it, the text of the newest one from the window on, what may follow."""

    count: int = 0
    newest: tuple[list[int], int] = field(default_factory=lambda: ([], 0))
    children: dict[int, Node] = field(default_factory=dict)
    order: list[int] = field(default_factory=list)  # of the children


class Naive:
    """A node for every string, and a search from the root for every question."""

    def __init__(self, limit: int = 0) -> None:
        self.limit, self.root = limit, Node()
        self.texts: deque[tuple[list[int], int]] = deque()  # that are over, and how many windows of each are inserted
        self.text: list[int] = []
        self.inserted = 0

    def at(self, string: Seq[int]) -> Node | None:
        node: Node | None = self.root
        for token in string:
            node = node and node.children.get(token)
        return node

    def extend(self, tokens: Seq[int]) -> None:
        for token in tokens:
            self.lengthen(token)
            while self.inserted < len(self.text):
                window = self.text[self.inserted :]
                if len(window) < DEPTH and self.at(window):
                    break
                self.insert(window[:DEPTH])
                self.inserted += 1

    def lengthen(self, token: int) -> None:
        """Appends to the text and to its windows that are inserted and not complete."""
        for p in range(max(0, len(self.text) - DEPTH + 1), self.inserted):
            node = self.at(self.text[p:])
            assert node is not None
            assert not node.children
            node.children, node.order = {token: Node(1, (self.text, p))}, [token]
        self.text.append(token)

    def insert(self, window: Seq[int]) -> None:
        node = self.root
        for token in window:
            if token not in node.children:
                node.children[token] = Node()
                node.order.insert(1, token)
            child, first = node.children[token], node.children[node.order[0]]
            child.count, child.newest = child.count + 1, (self.text, self.inserted)
            if child.count >= first.count:
                node.order.remove(token)
                node.order.insert(0, token)
            node = child

    def add(self, tokens: Seq[int]) -> None:
        tokens = tokens[max(0, len(tokens) + 1 - self.limit) :]
        while sum(len(text) for text, _ in self.texts) + len(tokens) + 1 > self.limit:
            text, count = self.texts.popleft()
            for p in range(count):
                self.remove(text[p : p + DEPTH])
        self.extend(tokens)
        self.lengthen(END)
        self.texts.append((self.text, self.inserted))
        self.text, self.inserted = [], 0

    def remove(self, window: Seq[int]) -> None:
        node = self.root
        for token in window:
            child = node.children[token]
            child.count -= 1
            if not child.count:
                del node.children[token]
                node.order.remove(token)
            node = child

    def follow(self, string: list[int], node: Node, most: int) -> tuple[list[int], np.float32]:
        drafted, score, prob = list[int](), np.float32(0), np.float32(1)
        while len(drafted) < most:
            if len(string) < DEPTH and node.order:
                token = node.order[0]
                prob *= np.float32(node.children[token].count) / np.float32(node.count)
                if prob < np.float32(0.1):
                    break
                node = node.children[token]
            else:
                text, start = node.newest
                token = [*text, *drafted][start + len(string)]
            if token == END:
                break
            drafted.append(token)
            string, score = [*string, token], score + prob
        return drafted, score

    def draft(self, most: int, others: Naive | None = None) -> tuple[list[int], float]:
        best, best_score = list[int](), np.float32(0)
        for tree in (self, others) if others is not None else (self,):
            longest = len(self.text) - self.inserted if tree is self else DEPTH - 1
            for m in range(min(longest, len(self.text)), 0, -1):
                node = tree.at(self.text[-m:])
                if node is not None:
                    drafted, score = tree.follow(self.text[-m:], node, min(m, most))
                    if score > best_score:
                        best, best_score = drafted, score
        return best, float(best_score)


def random_text(dice: random.Random, alphabet: int, count: int) -> list[int]:
    """Random tokens and copies of what came before."""
    text = list[int]()
    while len(text) < count:
        start = dice.randrange(len(text) + 1)
        text += text[start : start + dice.randrange(60)] if dice.random() < 0.5 else [dice.randrange(alphabet)]
    return text[:count]


TEXTS = st.builds(random_text, st.randoms(use_true_random=False), st.integers(1, 5), st.integers(0, 150))


@given(TEXTS, st.integers(1, 70))
@settings(max_examples=2 * settings.default.max_examples)
def test_a_growing_text(text: list[int], most: int) -> None:
    """Catches a count, an order of tokens or a score that is wrong, and a string that is not found, after any token."""
    tree, naive = SuffixTree(), Naive()
    for token in text:
        tree.extend([token])
        naive.extend([token])
        assert tree.draft(most) == naive.draft(min(most, MOST_DRAFTED))
    whole = SuffixTree()
    whole.extend(text)
    assert whole.length == len(text)
    assert whole.draft(most) == tree.draft(most)


@given(st.lists(TEXTS, max_size=12), TEXTS, st.integers(1, 300))
def test_other_texts(texts: list[list[int]], text: list[int], limit: int) -> None:
    """Catches what a removed text leaves behind or takes along, and a match across two texts."""
    others, naive_others = SuffixTree(limit), Naive(limit)
    for i, other in enumerate(texts):
        others.add(other)
        naive_others.add(other)
        own, naive = SuffixTree(), Naive()
        for token in text[10 * i : 10 * i + 30]:
            own.extend([token])
            naive.extend([token])
            assert own.draft(8, others) == naive.draft(8, naive_others)


@pytest.mark.parametrize("alphabet", [1, 2, 1000])
def test_memory_is_bounded(alphabet: int) -> None:
    """Catches nodes that are lost when texts are removed."""
    dice = random.Random(alphabet)
    tree, sizes = SuffixTree(2000), list[int]()
    for _ in range(300):
        tree.add(random_text(dice, alphabet, dice.randrange(500)))
        sizes.append(tree.num_bytes)
    assert sizes[-1] == sizes[30] <= 2000 * 172
