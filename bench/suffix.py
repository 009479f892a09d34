"""Suffix look-up beside n-gram look-up: accepted tokens per round, and microseconds of a look-up.

    python bench/suffix.py FOLDER --tokenizer path/to/model
    python bench/suffix.py FOLDER --tokenizer path/to/model --compare-arctic   # needs `arctic_inference`

FOLDER has `python_libraries.jsonl.xz`, `github_docs.jsonl.xz` ({"text"} a line) and `gsm8k_train.jsonl.xz`
({"prompt", "response"}). Traces are made from them, and nothing is generated: what a trace says next is what the target
would have chosen.

- edits: a source file, then the whole file with a name changed everywhere, and some lines changed and inserted.
- agents: a session of turns; in each a sentence, then a call of a tool that quotes lines of a file and their
  replacement, or repeats a command. The tools' results show the lines with their numbers.
- chat: answers to questions, which repeat little.

`speed`: tokens per round over its cost, which is 1 and `--row-cost` for each drafted token. N-gram look-up is that of
prompt look-up decoding: what followed the last 4 to 2 tokens when they last occurred.
"""

from __future__ import annotations

import argparse
import json
import lzma
import random
import re
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from ssd.bench.record import HELP, record, rows_of
from ssd.kernels.cpu.suffix import SuffixTree
from ssd.text.tokenizer import load_tokenizer

Turn = tuple[list[int], list[int]]  # what the sequence is given, then what it answers
WORD = re.compile(r"\b[a-z_]{6,}\b")


def main() -> None:
    args = arguments()
    traces = make_traces(args)
    ways: dict[str, Callable[[], Any]] = {f"n-gram k={k}": lambda k=k: NGram(k) for k in (4, args.k)}
    for k in (4, args.k):
        ways[f"suffix k={k}"] = lambda k=k: Suffix(k)
    ways[f"suffix k={args.k}, earlier answers"] = lambda: Suffix(args.k, SuffixTree(args.cached))
    if args.compare_arctic:
        ways[f"arctic k={args.k}"] = lambda: Arctic(args.k)
        ways[f"arctic k={args.k}, earlier answers"] = lambda: Arctic(args.k, cached=-1)
    columns = ("tokens/round", "drafted/round", "speed", "look-up, µs", "extension, µs/token")
    table = Table("traces", "method", *columns, title="look-up")
    for kind, sessions in traces.items():
        for name, make in ways.items():
            result = play(make(), sessions)
            table.add_row(kind, name, *result.cells(args.row_cost))
    Console(width=140).print(table)
    sizes = {kind: statistics.mean(sum(map(len, turn)) for s in found for turn in s) for kind, found in traces.items()}
    shown = ", ".join(f"{kind} {size:.0f}" for kind, size in sizes.items())
    record(args.json, rows_of(table, 2), [f"Mean tokens of a turn: {shown}; cost of a drafted token {args.row_cost}"])


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="where the .jsonl.xz files are")
    parser.add_argument("--tokenizer", type=Path, required=True, help="folder of a model or tokenizer")
    parser.add_argument("--sessions", type=int, default=24, help="traces of each kind (default: 24)")
    parser.add_argument("--k", type=int, default=16, help="longest draft (default: 16)")
    parser.add_argument("--row-cost", type=float, default=0.02, help="of a drafted token, in rounds (default: 0.02)")
    parser.add_argument("--cached", type=int, default=1 << 20, help="tokens of earlier answers (default: 2^20)")
    parser.add_argument("--compare-arctic", action="store_true", help="measure arctic_inference, too")
    parser.add_argument("--json", type=Path, help=HELP)
    return parser.parse_args()


# --- traces -----------------------------------------------------------------------------------------------------------


def make_traces(args: argparse.Namespace) -> dict[str, list[list[Turn]]]:
    encode = load_tokenizer(args.tokenizer).encode
    dice = random.Random(0)
    files = [text for text in texts(args.folder, "python_libraries") if 2000 < len(text) < 20_000][: 8 * args.sessions]
    notes = [line for text in texts(args.folder, "github_docs") for line in text.splitlines() if 60 < len(line) < 200]
    kinds: dict[str, Callable[[], list[tuple[str, str]]]] = {
        "edits": lambda: edit(dice, dice.choice(files), dice.choice(files)),
        "agents": lambda: agent(dice, dice.choice(files), dice.choice(files), notes),
    }
    made = {kind: [make() for _ in range(args.sessions)] for kind, make in kinds.items()}
    made["chat"] = [
        [(each["prompt"], each["response"])]
        for each, _ in zip(lines(args.folder, "gsm8k_train"), range(args.sessions), strict=False)
    ]
    return {
        kind: [[(encode(given), encode(answer)) for given, answer in s] for s in found] for kind, found in made.items()
    }


def lines(folder: Path, name: str) -> Iterator[dict[str, str]]:
    with lzma.open(folder / f"{name}.jsonl.xz", "rt", encoding="utf-8") as file:
        for line, _ in zip(file, range(5000), strict=False):
            yield json.loads(line)


def texts(folder: Path, name: str) -> list[str]:
    return [each["text"] for each in lines(folder, name)]


def edit(dice: random.Random, source: str, other: str) -> list[tuple[str, str]]:
    """A file, and the same with changes."""
    old = dice.choice([word for word, _ in Counter(WORD.findall(source)).most_common(20)] or ["self"])
    new, edited = f"{old}_{dice.choice(['value', 'item', 'new', 'impl'])}", list[str]()
    for line in source.splitlines():
        change = dice.random()
        if change < 0.03:
            edited.append(dice.choice(other.splitlines()))
        elif change < 0.05:
            at = dice.randrange(len(other))
            edited += [line, *other[at : at + 300].splitlines()[1:-1]]
        else:
            edited.append(line)
    wanted = f"Rename {old} to {new} and clean up. Answer with the whole file.\n```python\n{source}\n```\n"
    return [(wanted, "```python\n" + re.sub(rf"\b{old}\b", new, "\n".join(edited)) + "\n```")]


def agent(dice: random.Random, source: str, other: str, notes: Seq[str]) -> list[tuple[str, str]]:
    """A session: the file is shown, then blocks of it are replaced and commands are run."""
    path = f"src/{dice.choice(['app', 'core', 'utils', 'models'])}/{dice.choice(['main', 'base', 'views', 'tasks'])}.py"
    content = source.splitlines()
    turns, given = list[tuple[str, str]](), f"Fix the failing test in {path}.\n"
    calls: list[tuple[str, dict[str, str], str]] = [("view", {"path": path}, numbered(content, 0, len(content)))]
    test = f"python -m pytest tests/test_{Path(path).stem}.py -x -q"
    for _ in range(4):
        count = dice.randrange(4, 20)
        at = dice.randrange(max(1, len(content) - count))
        old = content[at : at + count]
        new = [dice.choice(other.splitlines()) if dice.random() < 0.15 else line for line in old]
        content[at : at + count] = new
        arguments = {"path": path, "old_str": "\n".join(old), "new_str": "\n".join(new)}
        calls.append(("str_replace", arguments, "The file was edited:\n" + numbered(content, at, at + count + 3)))
        calls.append(("bash", {"command": test}, f"1 failed\n{dice.choice(notes)}\n"))
    for name, arguments, answer in calls:
        call = json.dumps({"name": name, "arguments": arguments})
        turns.append((given, f"{dice.choice(notes)}\n<tool_call>\n{call}\n</tool_call>"))
        given = answer
    return turns


def numbered(content: Seq[str], first: int, end: int) -> str:
    return "\n".join(f"{i + 1:6}\t{line}" for i, line in enumerate(content[first:end], first)) + "\n"


# --- methods ----------------------------------------------------------------------------------------------------------


class Suffix:
    def __init__(self, k: int, others: SuffixTree | None = None) -> None:
        self.k, self.others, self.tree = k, others, SuffixTree()

    def extend(self, tokens: Seq[int], *, answer: bool) -> None:
        self.tree.extend(tokens)

    def draft(self) -> list[int]:
        return self.tree.draft(self.k, self.others)[0]

    def end(self, answers: Seq[int]) -> None:
        if self.others is not None:
            self.others.add(answers)
        self.tree = SuffixTree()


class NGram:
    def __init__(self, k: int) -> None:
        self.k, self.tokens, self.after = k, list[int](), dict[tuple[int, ...], int]()

    def extend(self, tokens: Seq[int], *, answer: bool) -> None:
        for token in tokens:
            end = len(self.tokens)
            self.after |= {tuple(self.tokens[end - n :]): end for n in (2, 3, 4) if n <= end}
            self.tokens.append(token)

    def draft(self) -> list[int]:
        for n in (4, 3, 2):
            start = self.after.get(tuple(self.tokens[-n:]))
            if start is not None:
                period = len(self.tokens) - start
                return [self.tokens[start + i % period] for i in range(self.k)]
        return []

    def end(self, answers: Seq[int]) -> None:
        self.__init__(self.k)  # type: ignore[misc]


class Arctic:
    def __init__(self, k: int, cached: int = 0) -> None:
        from arctic_inference.suffix_decoding import SuffixDecodingCache

        self.k, self.id, self.tokens = k, 0, list[int]()
        self.cache = SuffixDecodingCache(24, cached)

    def extend(self, tokens: Seq[int], *, answer: bool) -> None:
        if not self.tokens:
            self.cache.start_request(self.id, list(tokens))
        elif answer:
            self.cache.add_active_response(self.id, list(tokens))
        else:  # its interface has no second prompt
            self.cache._local_trees[self.id].extend(0, list(tokens))
        self.tokens += tokens

    def draft(self) -> list[int]:
        found: list[int] = self.cache.speculate(self.id, self.tokens[-24:], self.k).token_ids
        return found

    def end(self, answers: Seq[int]) -> None:
        self.cache.stop_request(self.id)
        self.id, self.tokens = self.id + 1, []


# --- rounds -----------------------------------------------------------------------------------------------------------


@dataclass
class Result:
    rounds: int = 0
    tokens: int = 0
    drafted: int = 0
    extended: int = 0
    look_ups: list[float] = field(default_factory=list)  # seconds
    extending: float = 0.0

    def cells(self, row_cost: float) -> list[str]:
        per_round, drafted = self.tokens / self.rounds, self.drafted / self.rounds
        speed = per_round / (1 + row_cost * drafted)
        times = (1e6 * statistics.median(self.look_ups), 1e6 * self.extending / self.extended)
        return [f"{value:.2f}" for value in (per_round, drafted, speed, *times)]


def play(method: Any, sessions: Seq[Seq[Turn]]) -> Result:
    """Rounds of all turns: a draft, its accepted tokens and one more."""
    result = Result()
    for session in sessions:
        answers = list[int]()
        for given, answer in session:
            extend(method, given, result, answer=False)
            done = 0
            while done < len(answer):
                began = time.perf_counter()
                draft = method.draft()
                result.look_ups.append(time.perf_counter() - began)
                accepted = 0
                while accepted < min(len(draft), len(answer) - done - 1) and draft[accepted] == answer[done + accepted]:
                    accepted += 1
                extend(method, answer[done : done + accepted + 1], result, answer=True)
                done += accepted + 1
                result.rounds, result.drafted = result.rounds + 1, result.drafted + len(draft)
            result.tokens += len(answer)
            answers += answer
        method.end(answers)
    return result


def extend(method: Any, tokens: Seq[int], result: Result, *, answer: bool) -> None:
    began = time.thread_time()  # a mean: other processes must not count
    method.extend(tokens, answer=answer)
    result.extending += time.thread_time() - began
    result.extended += len(tokens)


if __name__ == "__main__":
    main()
