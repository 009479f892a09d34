"""Draws the rounds of a text with their branches, as an SVG or as a self-contained HTML page.

Time goes right, row after row. The text is the trunk. Rejected draft tokens fork off upwards; a prepared branch forks
off where its outcome leaves the trunk (downwards) or the rejected draft (upwards).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from html import escape
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Final
from xml.etree import ElementTree

from rich.cells import cell_len, set_cell_size

from ssd.errors import ConfigError

if TYPE_CHECKING:
    from ssd.cli.trace import Step

WIDTH: Final = 1280
MARGIN: Final = 24
CELL: Final = 7.3  # width of a character
LINE: Final = 19
UP: Final = -30.0  # offset of a rejected draft from the trunk
MARK: Final = 50.0  # x of a round's first token
GAP: Final = 5.0  # between tokens
BEND: Final = 6.0
APART: Final = 20.0  # between rounds
INDENT: Final = 16.0  # of a branch
MOST: Final = 6  # branches drawn per round
LONGEST: Final = 26  # characters of a branch
LEGEND: Final = (
    ("stands", "drafted and accepted"),
    ("own", "the target's own token"),
    ("fails", "drafted and rejected"),
    ("faint", "prepared for another outcome"),
    ("used", "prepared, and used"),
    ("hit", "hit: the draft was there"),
    ("miss", "miss: it had to be made"),
    ("faint", "+N: N more prepared"),
)

STYLE: Final = """
text { font: 12px ui-monospace, "DejaVu Sans Mono", Menlo, Consolas, "Noto Sans Mono CJK SC", "Noto Sans CJK SC",
  "Source Han Sans SC", "PingFang SC", "Hiragino Sans", "Apple SD Gothic Neo", "Microsoft YaHei", "Yu Gothic",
  "Malgun Gothic", "WenQuanYi Zen Hei", monospace; fill: #1f2328; }
.paper { fill: #ffffff; } .small { font-size: 10px; } .faint { fill: #7d8590; } .heading { font-weight: bold; }
path { fill: none; stroke: #c8ced6; } .trunk { stroke-width: 2; }
.stands { fill: #d7f5de; } .own { fill: #ffffff; stroke: #1f2328; } .fails { fill: #ffebe9; }
text.own { font-weight: bold; fill: #1f2328; stroke: none; }
text.stands { fill: #116329; } text.fails { fill: #b42318; text-decoration: line-through; }
text.used { fill: #0758c2; } path.used { stroke: #0969da; stroke-width: 1.6; }
circle { fill: #c8ced6; } text.hit, circle.hit { fill: #1a7f37; } text.miss, circle.miss { fill: #b35900; }
@media (prefers-color-scheme: dark) {
text { fill: #e6edf3; } .paper { fill: #0d1117; } .faint { fill: #8b949e; }
path { stroke: #3d444d; } .stands { fill: #12351f; } .own { fill: #0d1117; stroke: #e6edf3; } .fails { fill: #3c1618; }
text.own { fill: #e6edf3; } text.stands { fill: #7ee2a0; } text.fails { fill: #ff9a92; }
text.used { fill: #79b8ff; } path.used { stroke: #58a6ff; }
circle { fill: #3d444d; } text.hit, circle.hit { fill: #3fb950; } text.miss, circle.miss { fill: #e3a008; }
}
"""
PAGE: Final = """\
<!DOCTYPE html>
<html lang="en" xmlns="http://www.w3.org/1999/xhtml">
<head>
<meta charset="utf-8"/>
<meta name="viewport" content="width=device-width, initial-scale=1"/>
<title>{title}</title>
<style>
:root {{ color-scheme: light dark; }}
body {{ font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: {width}px; padding: 0 1rem;
  background: #ffffff; color: #1f2328; }}
h1 {{ font-size: 1.3rem; }} figure {{ margin: 0; overflow-x: auto; }}
@media (prefers-color-scheme: dark) {{ body {{ background: #0d1117; color: #e6edf3; }} }}
</style>
</head>
<body>
<h1>The forking paths of a text</h1>
<p>Time goes right, row after row; the boxes on the line are the text. While the target verifies a draft, the draft
model prepares the next one for likely outcomes: those are the branches. If the outcome is among them, the next draft
is ready (a hit); if not, it has to be written first (a miss). Hover over a branch to read it.</p>
<figure>{picture}</figure>
</body>
</html>
"""


def check(file: Path) -> None:
    """ConfigError for a file that cannot be written."""
    if file.suffix not in (".svg", ".html"):
        raise ConfigError(f"--out {file}: pictures are .svg or .html files: name it {file.with_suffix('.svg')}, say")
    if not file.parent.is_dir():
        raise ConfigError(f"--out {file}: there is no directory {file.parent}: create it first")


def write(file: Path, steps: list[Step], spell: Callable[[int], str], title: str, summary: str) -> None:
    picture = svg(steps, spell, title, summary)
    if file.suffix == ".html":
        picture = PAGE.format(title=escape(title), picture=picture, width=WIDTH)
    try:
        file.write_text(picture, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--out {file}: cannot be written ({error}): name another file") from error


def visible(text: str, space: str = "·") -> str:
    """A text on one line, with spaces and control characters made visible."""
    marks = {" ": space, "\n": "↵", "\t": "⇥"}
    return "".join(marks.get(c) or (c if c.isprintable() else ascii(c)[1:-1]) for c in text)


def svg(steps: list[Step], spell: Callable[[int], str], title: str, summary: str) -> str:
    pairs = enumerate(zip_longest(steps, steps[1:]), start=1)
    blocks = [_block(number, step, following, spell) for number, (step, following) in pairs]
    drawing = _Drawing(max(WIDTH, *(block.width + 2 * MARGIN for block in blocks)), title, summary)
    for row in _rows(blocks, drawing.width - 2 * MARGIN):
        drawing.add_row(row, last=row[-1] is blocks[-1])
    return drawing.finished()


# --- layout of one round, relative to its left end and to the trunk ---------------------------------------------------


@dataclass(frozen=True)
class _Pill:
    """A token of the text, or of a rejected draft."""

    x: float
    y: float
    text: str
    kind: str  # stands, own or fails

    @property
    def end(self) -> float:
        return self.x + cell_len(self.text) * CELL + 8


@dataclass(frozen=True)
class _BranchLine:
    """A branch: where it forks off, and its line."""

    x: float
    start: float
    y: float
    fork: str
    rest: str
    told: str
    used: bool

    @property
    def end(self) -> float:
        return self.x + INDENT + cell_len(self.fork + self.rest) * CELL


@dataclass(frozen=True)
class _Block:
    """The drawing of one round."""

    number: int
    kind: str  # hit, miss or nothing
    leaves: float  # x where the rejected draft forks off
    pills: list[_Pill]
    branches: list[_BranchLine]
    left_out: int  # branches that are not drawn

    @property
    def items(self) -> list[_Pill | _BranchLine]:
        return [*self.pills, *self.branches]

    @property
    def width(self) -> float:
        return max(item.end for item in self.items) + APART

    @property
    def top(self) -> float:
        return min(item.y for item in self.items)

    @property
    def bottom(self) -> float:
        return max(item.y for item in self.items)


def _block(number: int, step: Step, following: Step | None, spell: Callable[[int], str]) -> _Block:
    pills: list[_Pill] = []
    places = {0: (MARK - GAP / 2, 0.0)}  # by number of draft tokens before it

    def lay(x: float, y: float, tokens: tuple[int, ...], kind: str, first: int) -> None:
        for place, token in enumerate(tokens, start=first):
            pills.append(_Pill(x, y, _shown(spell(token)), kind))
            x = pills[-1].end + GAP
            places[place] = (x - GAP / 2, y)

    lay(MARK, 0.0, step.written[: step.accepted], "stands", 1)
    leaves, _ = places[max(places)]
    lay(leaves + GAP / 2, 0.0, step.own, "own", -1)
    lay(leaves + INDENT, UP, step.draft[step.accepted :], "fails", step.accepted + 1)
    branches = _branch_lines(step, following is not None and following.hit, places, spell)
    kind = "hit" if step.hit else "miss" if step.looked_up else ""
    return _Block(number, kind, leaves, pills, branches, len(step.branches) - len(branches))


def _branch_lines(
    step: Step, hit: bool, places: dict[int, tuple[float, float]], spell: Callable[[int], str]
) -> list[_BranchLine]:
    """The likeliest branches and the one that was used. The last to fork is drawn next to the trunk: no lines cross."""
    ranked = sorted(step.branches, key=lambda branch: not (hit and step.came_true(branch)))
    chosen = sorted((b for b in ranked[:MOST] if b.accepted in places), key=lambda b: -b.accepted)
    branches: list[_BranchLine] = []
    for sign in (1, -1):
        own = [b for b in chosen if (places[b.accepted][1] < 0) == (sign < 0)]
        for line, branch in enumerate(own, start=1):
            x, start = places[branch.accepted]
            fork, rest = _shown(spell(branch.token)), "".join(_shown(spell(token)) for token in branch.draft)
            told = f"if {branch.accepted} drafted tokens are accepted, then “{fork}”: “{rest}”"
            kept = LONGEST - cell_len(fork)
            if cell_len(rest) > kept:
                rest = set_cell_size(rest, max(0, kept - 1)) + "…"
            used = hit and step.came_true(branch)
            branches.append(_BranchLine(x, start, start + sign * (line * LINE + 5), fork, rest, told, used))
    return branches


def _rows(blocks: list[_Block], width: float) -> Iterator[list[_Block]]:
    row: list[_Block] = []
    for block in blocks:
        if row and sum(b.width for b in row) + block.width > width:
            yield row
            row = []
        row.append(block)
    yield row


def _shown(text: str) -> str:
    return visible(text, space="\u00a0" if text.strip() else "·")


# --- drawing ----------------------------------------------------------------------------------------------------------


class _Drawing:
    """An SVG that is drawn row by row."""

    def __init__(self, width: float, title: str, summary: str) -> None:
        self.width = width
        spaces = {"xmlns": "http://www.w3.org/2000/svg", "xml:space": "preserve"}
        self._root = ElementTree.Element("svg", spaces, role="img")
        ElementTree.SubElement(self._root, "title").text = title
        ElementTree.SubElement(self._root, "style").text = STYLE
        self._add("rect", "paper", width="100%", height="100%")
        self._text(MARGIN, 30, title, "heading")
        self._text(MARGIN, 48, summary, "faint")
        x = float(MARGIN)
        for kind, meaning in LEGEND:
            if kind in ("hit", "miss"):
                self._add("circle", kind, cx=x + 4, cy=72, r=4)
                x += 14
            self._text(x, 76, meaning, f"small {kind}")
            x += 18 + len(meaning) * CELL * 0.83
        self._y = 90.0

    def add_row(self, blocks: list[_Block], last: bool) -> None:
        y = self._y - min(block.top for block in blocks) + LINE
        x = [MARGIN + sum(block.width for block in blocks[:i]) for i in range(len(blocks) + 1)]
        end = x[-1] - APART if last else self.width - MARGIN
        self._add("path", "trunk", d=f"M{MARGIN} {y:.1f}H{end:.1f}")
        for block, left, following in zip_longest(blocks, x[:-1], x[1:-1]):
            self._add_block(block, left, y, following)
        self._y = y + max(block.bottom for block in blocks) + 1.5 * LINE

    def finished(self) -> str:
        size = {"width": f"{self.width:.0f}", "height": f"{self._y + MARGIN:.0f}"}
        self._root.attrib.update(size, viewBox=f"0 0 {size['width']} {size['height']}")
        return ElementTree.tostring(self._root, encoding="unicode")

    def _add_block(self, block: _Block, x: float, y: float, following: float | None) -> None:
        """`following`: x of the next block, if it is in this row."""
        self._add("circle", block.kind, cx=x + 8, cy=y, r=4.5)
        self._text(x + 3, y - 11, f"{block.number} {block.kind}", f"small {block.kind or 'faint'}")
        if block.left_out:
            more = self._text(x + 20, y + LINE + 3, f"+{block.left_out}", "small faint")
            ElementTree.SubElement(more, "title").text = f"{block.left_out} more branches were prepared"
        rejected = [pill.end for pill in block.pills if pill.kind == "fails"]
        if rejected:
            self._add("path", d=_fork(x + block.leaves, y, y + UP, x + rejected[-1]))
        for branch in block.branches:
            self._add_branch(branch, x, y, following)
        for pill in block.pills:
            box = {"x": x + pill.x, "y": y + pill.y - 9, "width": pill.end - pill.x, "height": 18, "rx": 4}
            self._add("rect", pill.kind, **box)
            self._text(x + pill.x + 4, y + pill.y + 4, pill.text, pill.kind)

    def _add_branch(self, branch: _BranchLine, x: float, y: float, following: float | None) -> None:
        kind, line = "used" if branch.used else "", y + branch.y
        self._add("path", kind, d=_fork(x + branch.x, y + branch.start, line, x + branch.x + INDENT - 3))
        text = self._text(x + branch.x + INDENT, line + 4, branch.fork, kind)
        ElementTree.SubElement(text, "tspan", {} if branch.used else {"class": "faint"}).text = branch.rest
        ElementTree.SubElement(text, "title").text = branch.told
        if branch.used and following is not None:
            bend = f"H{following + 8 - BEND:.1f}q{BEND} 0 {BEND} {-BEND}V{y + 5:.1f}"
            self._add("path", kind, d=f"M{x + branch.end + 4:.1f} {line:.1f}{bend}")
        elif branch.used:
            self._add("path", kind, d=f"M{x + branch.end + 4:.1f} {line:.1f}H{self.width - MARGIN:.1f}")

    def _text(self, x: float, y: float, text: str, kind: str) -> ElementTree.Element:
        element = self._add("text", kind, x=x, y=y)
        element.text = text
        return element

    def _add(self, tag: str, kind: str = "", **attributes: float | str) -> ElementTree.Element:
        values = {name: value if isinstance(value, str) else f"{value:.1f}" for name, value in attributes.items()}
        return ElementTree.SubElement(self._root, tag, ({"class": kind} if kind else {}) | values)


def _fork(x: float, start: float, y: float, end: float) -> str:
    """The path from a token's edge to another line, and along it."""
    sign = 1 if y > start else -1
    return f"M{x:.1f} {start + 9 * sign:.1f}V{y - BEND * sign:.1f}q0 {BEND * sign} {BEND} {BEND * sign}H{end:.1f}"
