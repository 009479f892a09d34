"""A hook of mkdocs: `<!-- options: package.Class -->` becomes a table of the options of a class."""

from __future__ import annotations

import importlib
import re
from dataclasses import MISSING
from typing import Any

from ssd.options import Option, options_of


def on_page_markdown(markdown: str, **_: Any) -> str:
    return re.sub(r"<!-- options: ([\w.]+)\.(\w+) -->", lambda found: table(*found.groups()), markdown)


def table(module: str, name: str) -> str:
    options = options_of(getattr(importlib.import_module(module), name)).values()
    rows = [f"| `{each.name}` | {_default(each)} | {_cell(each.description.help)} |" for each in options]
    return "\n".join(["| option | default | |", "|---|---|---|", *rows])


def _default(option: Option) -> str:
    return "required" if option.default is MISSING else f"`{_cell(repr(option.default))}`"


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;").replace("\n", " ")
