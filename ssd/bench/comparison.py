"""What `ssd verify` reports: which ways of answering the same requests gave the same tokens, and where one did not.

Knows nothing of how the requests were answered.
"""

from __future__ import annotations

import html
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import asdict, dataclass, field
from itertools import zip_longest
from typing import Any, Final

from rich.box import SIMPLE
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from ssd.bench import page
from ssd.bench.answers import Answer, Prompt, RequestSettings
from ssd.bench.serve import Result

COLUMNS: Final = ("", "requests", "compared", "different", "what took part")
_PROMPT_SHOWN: Final = 60  # characters

Asked = tuple[Prompt, RequestSettings]


@dataclass(frozen=True)
class Token:
    """A token of an answer; a character where a server does not tell its tokens."""

    text: str
    token_id: int | None = None
    logprob: float | None = None

    def __str__(self) -> str:
        known = ("token", self.token_id), ("logprob", self.logprob)
        return ", ".join([repr(self.text), *(f"{name} {value!r}" for name, value in known if value is not None)])


@dataclass(frozen=True)
class Difference:
    """The first position at which an answer differs from the reference; None: the answer has ended there."""

    prompt: Prompt
    temperature: float
    seed: int
    position: int
    reference: Token | None
    found: Token | None

    def __str__(self) -> str:
        prompt = self.prompt[0]["content"] if isinstance(self.prompt[0], dict) else str(self.prompt)
        prompt = prompt if len(prompt) <= _PROMPT_SHOWN else prompt[: _PROMPT_SHOWN - 1] + "…"
        both = [str(token or "the end") for token in (self.reference, self.found)]
        return (
            f"prompt {prompt!r}, temperature {self.temperature:g}, seed {self.seed}, position {self.position}: "
            f"{both[0]} in the reference, {both[1]} here"
        )


@dataclass
class Comparison:
    """One way of answering all requests, compared with the reference."""

    way: str
    unit: str = "tokens"
    compared: int = 0  # tokens (or characters) of the reference
    different: int = 0  # positions with another token or another log-probability
    requests: int = 0  # that both have answered
    different_requests: int = 0
    first_difference: Difference | None = None
    errors: list[str] = field(default_factory=list)  # of requests that were not answered
    counts: dict[str, int] = field(default_factory=dict)  # what took part, such as accepted draft tokens

    @classmethod
    def of(cls, way: str, asked: Seq[Asked], reference: Seq[Result], found: Seq[Result]) -> Comparison:
        result = cls(way, errors=[each.error for each in found if each.answer is None])
        for request, expected, got in zip(asked, reference, found, strict=True):
            if expected.answer is not None and got.answer is not None:
                result._add(request, expected.answer, got.answer)
        return result

    def _add(self, request: Asked, reference: Answer, found: Answer) -> None:
        expected, got = _tokens(reference), _tokens(found)
        if expected is None or got is None or (expected == got and reference.text != found.text):
            expected, got, self.unit = list(map(Token, reference.text)), list(map(Token, found.text)), "characters"
        pairs = list(zip_longest(expected, got))
        # repr() tells all floats apart, also 0.0 from -0.0, and finds a NaN equal to itself.
        places = [i for i, (one, other) in enumerate(pairs) if repr(one) != repr(other)]
        self.requests += 1
        self.compared += len(expected)
        self.different += len(places)
        self.different_requests += bool(places)
        if places and self.first_difference is None:
            prompt, settings = request
            place = places[0]
            self.first_difference = Difference(prompt, settings.temperature, settings.seed, place, *pairs[place])

    @property
    def verdict(self) -> str:
        failed = f", {len(self.errors)} failed" if self.errors else ""
        if not self.different:
            return ("equal" if self.requests else "nothing to compare") + failed
        return f"{self.different:,} in {self.different_requests} requests" + failed

    @property
    def cells(self) -> list[str]:
        counts = ", ".join(f"{name.replace('_', ' ')} {count:,}" for name, count in self.counts.items())
        return [self.way, str(self.requests), f"{self.compared:,} {self.unit}", self.verdict, counts]


def _tokens(answer: Answer) -> list[Token] | None:
    if answer.logprobs is None:
        return None
    ids: Seq[int | None] = answer.token_ids or [None] * len(answer.logprobs)
    return [Token(text, token, logprob) for token, (text, logprob) in zip(ids, answer.logprobs, strict=True)]


@dataclass(frozen=True)
class Verification:
    """The report. The first comparison is that of the reference with itself."""

    title: str
    header: Mapping[str, Any]  # versions, machine, settings
    comparisons: Seq[Comparison]
    not_compared: Mapping[str, str]  # the reason, by what was not compared
    notes: Seq[str] = ()

    @property
    def equal(self) -> bool:
        return not any(each.different for each in self.comparisons)

    @property
    def complete(self) -> bool:
        """Whether there was something to compare, and every request was answered."""
        return len(self.comparisons) > 1 and not any(each.errors or not each.requests for each in self.comparisons)

    @property
    def verdict(self) -> str:
        if not self.equal:
            return "There are differences."
        return "No difference." if self.complete else "No difference, but not everything could be compared."

    @property
    def differences(self) -> list[str]:
        return [f"{each.way}: {each.first_difference}" for each in self.comparisons if each.first_difference]

    @property
    def remarks(self) -> list[str]:
        """What was not compared, errors and notes, in words."""
        left_out = [f"not compared: {what}: {reason}" for what, reason in self.not_compared.items()]
        errors = [f"{each.way}: failed: {error}" for each in self.comparisons for error in dict.fromkeys(each.errors)]
        return [*errors, *left_out, *self.notes]

    def as_dict(self) -> dict[str, Any]:
        return {
            **self.header,
            "equal": self.equal,
            "complete": self.complete,
            "comparisons": list(map(asdict, self.comparisons)),
            "not_compared": self.not_compared,
            "notes": self.notes,
        }

    def show(self, console: Console) -> None:
        table = Table(*COLUMNS, title=self.title, box=SIMPLE)
        for each in self.comparisons:
            table.add_row(*map(escape, each.cells), style="bold red" if each.different else "")
        console.print(table)
        for line in self.differences:
            console.print(f"[bold red]{escape(line)}[/]", highlight=False, soft_wrap=True)
        for line in self.remarks:
            console.print(f"[dim]{escape(line)}[/]", highlight=False, soft_wrap=True)
        console.print(self.verdict)

    def as_page(self) -> str:
        first = "".join(f"<p><strong>{html.escape(line)}</strong></p>" for line in self.differences)
        remarks = "".join(f"<li>{html.escape(line)}</li>" for line in self.remarks)
        table = page.table(COLUMNS, [each.cells for each in self.comparisons])
        body = f"<p>{self.verdict}</p>\n{table}\n{first}\n<ul>{remarks}</ul>"
        return page.render(self.title, body, self.header["command"], self.as_dict())
