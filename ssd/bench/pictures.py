"""A report as a picture (PNG or SVG) and as a self-contained HTML page."""

from __future__ import annotations

import html
from pathlib import Path
from typing import Final

from ssd.bench import drawing, page
from ssd.bench.measure import MEAN
from ssd.bench.report import CAPTION, LATENCIES, SPEEDS, Report, cells

KINDS: Final = (".png", ".svg", ".html")
_CJK: Final = (
    *(f"{family} CJK {language}" for family in ("Noto Sans", "Noto Serif") for language in ("SC", "JP", "KR")),
    *("Source Han Sans SC", "WenQuanYi Zen Hei", "Droid Sans Fallback", "PingFang SC", "Hiragino Sans"),
    *("Apple SD Gothic Neo", "Microsoft YaHei", "Yu Gothic", "Malgun Gothic", "Arial Unicode MS"),
)
_COLOURS: Final = ("#9aa5b1", "#4c8bf5", "#0b9e6b", "#e07a1f", "#a259c4", "#c43d4b", "#7a6a4f", "#2bb3c0")


def write_picture(report: Report, file: Path) -> None:
    if file.suffix == ".html":
        file.write_text(_page(report), encoding="utf-8")
    else:
        file.write_bytes(_drawn(report, file.suffix[1:]))


def _drawn(report: Report, kind: str) -> bytes:
    """Bars per set and contender, with the range of the repeats and the speed-up."""
    import matplotlib

    fonts = _fonts()
    matplotlib.rcParams["font.family"] = fonts
    groups = [*report.sets, *([MEAN] if len(report.sets) > 1 else [])]
    contenders = report.contenders
    figure = drawing.new_figure(max(7.0, 0.42 * len(groups) * len(contenders) + 2), 4.2)
    axes = figure.subplots()
    width = 0.8 / len(contenders)
    for i, contender in enumerate(contenders):
        rows = [report.row(contender, name) for name in groups]
        rates = [row["decode_tokens_per_second"] for row in rows]
        places = [j + (i - (len(contenders) - 1) / 2) * width for j in range(len(groups))]
        ranges = [row["decode_tokens_per_second_range"] for row in rows]
        spread = [[r - low for r, (low, _) in zip(rates, ranges, strict=True)]]
        spread += [[high - r for r, (_, high) in zip(rates, ranges, strict=True)]]
        colour = _COLOURS[i % len(_COLOURS)]
        bars = axes.bar(
            places, rates, width * 0.92, label=_legible(contender, fonts), color=colour, yerr=spread, ecolor="#333333"
        )
        if i:
            axes.bar_label(bars, [f"{row['ratio']:.2f}x" for row in rows], fontsize=7, padding=2)
    axes.set_xticks(range(len(groups)), [_legible(name, fonts) for name in groups])
    axes.set_ylabel("decoded tokens a second")
    title = [report.title, *(f"warning: {warning.partition(':')[0]}" for warning in report.warnings)]
    axes.set_title("\n".join(_legible(line, fonts) for line in title), fontsize=9)
    axes.spines[["top", "right"]].set_visible(False)
    axes.margins(y=0.12)
    axes.legend(fontsize=8, frameon=False, ncols=min(4, len(contenders)), loc="upper left", bbox_to_anchor=(0, -0.08))
    return drawing.encode(figure, kind)


def _fonts() -> list[str]:
    """Installed font families: matplotlib's own, then those with Chinese, Japanese and Korean characters."""
    from matplotlib import font_manager

    installed = set(font_manager.get_font_names())
    return ["DejaVu Sans", *(family for family in _CJK if family in installed)]


def _legible(text: str, fonts: list[str]) -> str:
    """The text, with escapes for characters that none of the fonts has."""
    from matplotlib import font_manager

    known = {c for family in fonts for c in font_manager.get_font(font_manager.findfont(family)).get_charmap()}
    return "".join(c if ord(c) in known else ascii(c)[1:-1] for c in text)


def _page(report: Report) -> str:
    drawing = _drawn(report, "svg").decode()
    drawing = drawing[drawing.index("<svg") :]
    first = report.contenders[0]
    headings = (*SPEEDS, *LATENCIES[1:])
    summary = page.table(
        headings, [cells(report.row(contender, MEAN), headings, first) for contender in report.contenders]
    )
    details = [[row["set"], *cells(row, headings, first)] for row in report.rows if row["set"] != MEAN]
    same = {True: "Every method wrote the same tokens.", False: "The methods wrote different tokens.", None: ""}
    warnings = "".join(f"<p><strong>Warning: {html.escape(warning)}</strong></p>\n" for warning in report.warnings)
    notes = "".join(f"<li>{html.escape(note)}</li>" for note in report.notes)
    return page.render(
        report.title,
        f"""{warnings}{drawing}
<p>{CAPTION.capitalize()}. Latencies in ms: median, 90th and 99th percentile.
{same[report.same_text]}</p>
{summary}
<details><summary>Set by set</summary>{page.table(("set", *headings), details)}</details>
<ul>{notes}</ul>""",
        report.header["command"],
        report.as_dict(),
    )
