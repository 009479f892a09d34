"""Draws the rounds of a text with their branches, as an SVG or as a self-contained HTML page.

Time goes right, row after row. The text is the trunk. Rejected draft tokens fork off upwards; a prepared branch forks
off where its outcome leaves the trunk (downwards) or the rejected draft (upwards).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from html import escape
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Final
from xml.etree import ElementTree

from rich.cells import cell_len, set_cell_size

from ssd.errors import ConfigError

if TYPE_CHECKING:
    from ssd.cli.trace import Branch, Step

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
    rounds = [_Round(number, step, following, spell) for number, (step, following) in pairs]
    width = max(WIDTH, *(each.width + 2 * MARGIN for each in rounds))
    spaces = {"xmlns": "http://www.w3.org/2000/svg", "xml:space": "preserve"}
    root = ElementTree.Element("svg", spaces, role="img")
    y = _add_heading(root, title, summary)
    for row in _rows(rounds, width - 2 * MARGIN):
        y = _add_row(root, row, y, width, last=row[-1] is rounds[-1])
    size = {"width": f"{width:.0f}", "height": f"{y + MARGIN:.0f}"}
    root.attrib.update(size, viewBox=f"0 0 {size['width']} {size['height']}")
    return ElementTree.tostring(root, encoding="unicode")


class _Round:
    """The drawing of one round: a group of elements, relative to its left end and to the trunk."""

    def __init__(self, number: int, step: Step, following: Step | None, spell: Callable[[int], str]) -> None:
        self.group = ElementTree.Element("g")
        self.width = self.top = self.bottom = 0.0
        self.used: tuple[float, float] | None = None  # end of the branch that was used
        self._spell = spell
        self._places = {0: (MARK - GAP / 2, 0.0)}  # where branches fork off, by number of draft tokens before
        kind = "hit" if step.hit else "miss" if step.looked_up else ""
        _add(self.group, "circle", kind, cx=8, cy=0, r=4.5)
        _add_text(self.group, 3, -11, f"{number} {kind}", f"small {kind or 'faint'}")
        self.lines, self._tokens = (ElementTree.SubElement(self.group, "g") for _ in range(2))  # tokens are on top
        self._add_tokens(MARK, 0.0, step.written[: step.accepted], "stands", 1)
        leaves, _ = self._places[max(self._places)]  # the rejected draft
        self._add_tokens(leaves + GAP / 2, 0.0, step.own, "own", -1)
        if rejected := step.draft[step.accepted :]:
            end = self._add_tokens(leaves + INDENT, UP, rejected, "fails", step.accepted + 1)
            _add(self.lines, "path", d=_fork(leaves, 0.0, UP, end))
        left_out = len(step.branches) - self._add_branches(step, following is not None and following.hit)
        if left_out:
            more = _add_text(self.group, 20, LINE + 3, f"+{left_out}", "small faint")
            ElementTree.SubElement(more, "title").text = f"{left_out} more branches were prepared"

    def _add_tokens(self, x: float, y: float, tokens: tuple[int, ...], kind: str, first: int) -> float:
        """Draws tokens from x on, and returns where they end. `first`: the place after the first of them."""
        for place, token in enumerate(tokens, start=first):
            text = _shown(self._spell(token))
            end = x + cell_len(text) * CELL + 8
            _add(self._tokens, "rect", kind, x=x, y=y - 9, width=end - x, height=18, rx=4)
            _add_text(self._tokens, x + 4, y + 4, text, kind)
            self._extend(end, y)
            self._places[place] = (end + GAP / 2, y)
            x = end + GAP
        return x - GAP

    def _add_branches(self, step: Step, hit: bool) -> int:
        """Draws the likeliest branches and the one that was used, and returns how many these are.

        The last to fork is drawn next to the trunk: no lines cross.
        """
        ranked = sorted(step.branches, key=lambda branch: not (hit and step.came_true(branch)))
        chosen = sorted((b for b in ranked[:MOST] if b.accepted in self._places), key=lambda b: -b.accepted)
        for sign in (1, -1):
            own = [b for b in chosen if (self._places[b.accepted][1] < 0) == (sign < 0)]
            for line, branch in enumerate(own, start=1):
                self._add_branch(branch, sign * (line * LINE + 5), hit and step.came_true(branch))
        return len(chosen)

    def _add_branch(self, branch: Branch, offset: float, used: bool) -> None:
        x, start = self._places[branch.accepted]
        y, kind = start + offset, "used" if used else ""
        fork, rest = _shown(self._spell(branch.token)), "".join(_shown(self._spell(token)) for token in branch.draft)
        told = f"if {branch.accepted} drafted tokens are accepted, then “{fork}”: “{rest}”"
        kept = LONGEST - cell_len(fork)
        if cell_len(rest) > kept:
            rest = set_cell_size(rest, max(0, kept - 1)) + "…"
        _add(self.lines, "path", kind, d=_fork(x, start, y, x + INDENT - 3))
        text = _add_text(self.lines, x + INDENT, y + 4, fork, kind)
        ElementTree.SubElement(text, "tspan", {} if used else {"class": "faint"}).text = rest
        ElementTree.SubElement(text, "title").text = told
        end = x + INDENT + cell_len(fork + rest) * CELL
        self._extend(end, y)
        if used:
            self.used = end + 4, y

    def _extend(self, end: float, y: float) -> None:
        self.width = max(self.width, end + APART)
        self.top, self.bottom = min(self.top, y), max(self.bottom, y)


def _rows(rounds: list[_Round], width: float) -> Iterator[list[_Round]]:
    row: list[_Round] = []
    for each in rounds:
        if row and sum(before.width for before in row) + each.width > width:
            yield row
            row = []
        row.append(each)
    yield row


def _add_row(root: ElementTree.Element, row: list[_Round], y: float, width: float, last: bool) -> float:
    """Draws the trunk and its rounds below y, and returns where they end. `last`: there are no more rounds."""
    y += LINE - min(each.top for each in row)
    x = [MARGIN + sum(each.width for each in row[:i]) for i in range(len(row) + 1)]
    end = x[-1] - APART if last else width - MARGIN
    _add(root, "path", "trunk", d=f"M{MARGIN} {y:.1f}H{end:.1f}")
    for each, left in zip(row, x, strict=False):
        each.group.set("transform", f"translate({left:.1f} {y:.1f})")
        root.append(each.group)
        if each.used is not None:  # to the next round
            bend = f"H{each.width + 8 - BEND:.1f}q{BEND} 0 {BEND} {-BEND}V5"
            path = f"H{width - MARGIN - left:.1f}" if each is row[-1] else bend
            _add(each.lines, "path", "used", d="M{:.1f} {:.1f}".format(*each.used) + path)
    return y + max(each.bottom for each in row) + 1.5 * LINE


def _add_heading(root: ElementTree.Element, title: str, summary: str) -> float:
    """Draws titles and legend, and returns where they end."""
    ElementTree.SubElement(root, "title").text = title
    ElementTree.SubElement(root, "style").text = STYLE
    _add(root, "rect", "paper", width="100%", height="100%")
    _add_text(root, MARGIN, 30, title, "heading")
    _add_text(root, MARGIN, 48, summary, "faint")
    x = float(MARGIN)
    for kind, meaning in LEGEND:
        if kind in ("hit", "miss"):
            _add(root, "circle", kind, cx=x + 4, cy=72, r=4)
            x += 14
        _add_text(root, x, 76, meaning, f"small {kind}")
        x += 18 + len(meaning) * CELL * 0.83
    return 90.0


def _add_text(parent: ElementTree.Element, x: float, y: float, text: str, kind: str) -> ElementTree.Element:
    element = _add(parent, "text", kind, x=x, y=y)
    element.text = text
    return element


def _add(parent: ElementTree.Element, tag: str, kind: str = "", **attributes: float | str) -> ElementTree.Element:
    values = {name: value if isinstance(value, str) else f"{value:.1f}" for name, value in attributes.items()}
    return ElementTree.SubElement(parent, tag, ({"class": kind} if kind else {}) | values)


def _fork(x: float, start: float, y: float, end: float) -> str:
    """The path from a token's edge to another line, and along it."""
    sign = 1 if y > start else -1
    return f"M{x:.1f} {start + 9 * sign:.1f}V{y - BEND * sign:.1f}q0 {BEND * sign} {BEND} {BEND * sign}H{end:.1f}"


def _shown(text: str) -> str:
    return visible(text, space="\u00a0" if text.strip() else "·")
