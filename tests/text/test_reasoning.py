"""Reasoning is split from the answer where the template marks it."""

from __future__ import annotations

import pytest

from ssd.text.reasoning import ReasoningSplitter, marks_reasoning, opens_reasoning


def split(pieces: list[str], opened: bool = False) -> tuple[str, str]:
    splitter = ReasoningSplitter(opened)
    pairs = [splitter.feed(piece) for piece in pieces] + [splitter.finish()]
    return "".join(r for r, _ in pairs), "".join(t for _, t in pairs)


@pytest.mark.parametrize(
    ("text", "opened", "reasoning", "answer"),
    [
        ("<think>\nHm, 2.\n</think>\n\nTwo.", False, "Hm, 2.", "Two."),
        ("Hm, 2.\n</think>\n\nTwo.", True, "Hm, 2.", "Two."),
        ("<think>\n\n</think>\n\nTwo.", False, "", "Two."),
        ("<think>cut off </thi", False, "cut off </thi", ""),
        ("cut off", True, "cut off", ""),
        ("No tags.\n", False, "", "No tags.\n"),
        ("In the <think>middle</think>", False, "", "In the <think>middle</think>"),
        ("<think>a</think>b<think>c</think>", False, "a", "b<think>c</think>"),
        ("<thin", False, "", "<thin"),
        ("  ", False, "", "  "),
        ("", True, "", ""),
    ],
)
def test_split(text: str, opened: bool, reasoning: str, answer: str) -> None:
    """In one piece, by character, and in pieces of three."""
    for size in (1, 3, max(len(text), 1)):
        assert split([text[i : i + size] for i in range(0, len(text), size)], opened) == (reasoning, answer)


def test_reasoning_is_streamed() -> None:
    splitter = ReasoningSplitter()
    assert splitter.feed("<think>\nfirst ") == ("first", "")
    assert splitter.feed("second</think>x") == (" second", "x")


def test_what_the_template_says() -> None:
    assert marks_reasoning("{% if '</think>' in content %}")
    assert not marks_reasoning("{{ messages }}")
    assert opens_reasoning("<|im_start|>assistant\n<think>\n")
    assert not opens_reasoning("<|im_start|>assistant\n<think>\n\n</think>\n\n")
