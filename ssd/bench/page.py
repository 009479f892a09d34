"""The self-contained HTML page of a report."""

from __future__ import annotations

import html
import json
from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Seq
from typing import Any


def render(title: str, body: str, command: str, figures: Mapping[str, Any]) -> str:
    """`command`: what wrote the report; `figures`: all of it, as in its JSON."""
    return f"""<!doctype html>
<html lang="en"><meta charset="utf-8"><title>{html.escape(title)}</title>
<style>
body {{ font: 15px/1.45 system-ui, sans-serif; margin: 2rem auto; max-width: 70rem; padding: 0 1rem; color: #1d2733; }}
svg {{ width: 100%; height: auto; }}
h1, p, li {{ overflow-wrap: anywhere; }}
table {{ border-collapse: collapse; margin: 1rem 0; width: 100%; }}
th, td {{ padding: .3rem .5rem; text-align: right; border-bottom: 1px solid #dde3ea; }}
th {{ vertical-align: bottom; }}
th:first-child, td:first-child {{ text-align: left; }}
pre {{ background: #f4f6f8; padding: 1rem; white-space: pre-wrap; overflow-wrap: anywhere; }}
</style>
<h1>{html.escape(title)}</h1>
<p><code>{html.escape(command)}</code></p>
{body}
<details><summary>All figures</summary><pre>{html.escape(json.dumps(figures, indent=1))}</pre></details>
</html>
"""


def table(headings: Seq[str], rows: Iterable[Seq[Any]]) -> str:
    head = "".join(f"<th>{html.escape(heading)}</th>" for heading in headings)
    body = "".join("<tr>" + "".join(f"<td>{html.escape(str(cell))}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
