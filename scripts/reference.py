"""Writes what docs/reference.md says of classes and options: `python scripts/reference.py`, after a change of them.

It replaces what is between these markers and the next `<!-- end -->`:

    <!-- class: ssd.llm.LLM without config -->    signature, docstring, fields and methods of a class
    <!-- options: ssd.config.EngineConfig -->     docstring of a class, and a table of its options
    <!-- errors -->                               the errors that `import ssd` offers
"""

from __future__ import annotations

import ast
import importlib
import inspect
import re
from collections.abc import Callable, Collection
from dataclasses import MISSING
from pathlib import Path

import ssd
from ssd import errors
from ssd.options import Option, options_of

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "reference.md"
Function = ast.FunctionDef | ast.AsyncFunctionDef


def rendered(page: str) -> str:
    """The page, with what its markers stand for as it is now."""
    return re.sub(r"(<!-- (\w+)(?:: (.*?))? -->\n).*?(<!-- end -->)", _section, page, flags=re.DOTALL)


def _section(found: re.Match[str]) -> str:
    marker, kind, wanted, end = found.groups()
    name, _, left_out = (wanted or "").partition(" without ")
    writers: dict[str, Callable[[], str]] = {
        "class": lambda: of_class(name, left_out.split(", ")),
        "options": lambda: of_options(name),
        "errors": of_errors,
    }
    return f"{marker}\n{writers[kind]()}\n\n{end}"


# --- sections ---------------------------------------------------------------------------------------------------------


def of_class(name: str, without: Collection[str]) -> str:
    source = Source(name)
    members = source.members(without)
    made = next((each for each in members if each.name == "__init__"), None)
    call = f"`{source.node.name}{_arguments(made)}`" if made else ""
    entries = [*source.fields(without), *(_method(each) for each in members if each is not made)]
    return "\n\n".join(filter(None, [f"### {source.node.name}", call, _text(source.node), "\n".join(entries)]))


def of_options(name: str) -> str:
    module, _, owner = name.rpartition(".")
    options = options_of(getattr(importlib.import_module(module), owner)).values()
    rows = [f"| `{each.name}` | {_default(each)} | {_cell(each.description.help)} |" for each in options]
    table = "\n".join(["| option | default | |", "|---|---|---|", *rows])
    return "\n\n".join([f"### {owner}", _text(Source(name).node), table])


def of_errors() -> str:
    public = [getattr(errors, name) for name in ssd.__all__ if hasattr(errors, name)]
    rows = [f"| `{each.__name__}` | {_bases(each)} | {_cell(inspect.getdoc(each) or '')} |" for each in public]
    return "\n".join(["| error | is also | |", "|---|---|---|", *rows])


# --- classes, as they are written in their modules --------------------------------------------------------------------


class Source:
    """A class in its module's source, which is read and not imported: annotations and comments stay as written."""

    def __init__(self, name: str) -> None:
        module, _, owner = name.rpartition(".")
        text = (ROOT / f"{module.replace('.', '/')}.py").read_text()
        self._lines = text.splitlines()
        self._classes = {each.name: each for each in ast.parse(text).body if isinstance(each, ast.ClassDef)}
        self.node = self._classes[owner]

    def members(self, without: Collection[str]) -> list[Function]:
        """Its public methods and properties, and its constructor; those of a private base class, too."""
        bases = [self._classes[base.id] for base in self.node.bases if isinstance(base, ast.Name) and base.id[0] == "_"]
        found = {each.name: each for part in (*bases, self.node) for each in part.body if isinstance(each, Function)}
        return [each for name, each in found.items() if (name[0] != "_" or name == "__init__") and name not in without]

    def fields(self, without: Collection[str]) -> list[str]:
        """Of a dataclass, each with the comment behind it."""
        fields = [each for each in self.node.body if isinstance(each, ast.AnnAssign)]
        return [self._field(each) for each in fields if ast.unparse(each.target) not in without]

    def _field(self, node: ast.AnnAssign) -> str:
        code = re.sub(r"field\(default_factory=(\w+)\)", r"\1()", ast.unparse(node))
        return _entry(code, self._lines[(node.end_lineno or node.lineno) - 1].partition("  # ")[2])


def _method(node: Function) -> str:
    kind = "async " if isinstance(node, ast.AsyncFunctionDef) else ""
    if any("property" in ast.unparse(each) for each in node.decorator_list):
        return _entry(f"{node.name}{_returned(node, ': ')}", _text(node))
    return _entry(f"{kind}{node.name}{_arguments(node)}{_returned(node, ' -> ')}", _text(node))


def _arguments(node: Function) -> str:
    given = re.sub(r"^self(, )?", "", ast.unparse(node.args))
    return f"({given.replace('=', ' = ')})"


def _returned(node: Function, arrow: str) -> str:
    return f"{arrow}{ast.unparse(node.returns)}" if node.returns else ""


def _text(node: ast.ClassDef | Function) -> str:
    """The docstring, a paragraph in a line."""
    return "\n\n".join(paragraph.replace("\n", " ") for paragraph in (ast.get_docstring(node) or "").split("\n\n"))


# --- Markdown ---------------------------------------------------------------------------------------------------------


def _entry(code: str, text: str) -> str:
    """An item of a list; further paragraphs are indented."""
    return f"- `{code}`" + (f": {text}" if text else "").replace("\n\n", "\n\n    ")


def _bases(error: type) -> str:
    return ", ".join(f"`{base.__name__}`" for base in error.__bases__)


def _default(option: Option) -> str:
    if option.nested:
        return f"`{option.nested.__name__}()`"
    return "required" if option.default is MISSING else f"`{_cell(repr(option.default))}`"


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;").replace("\n", " ")


if __name__ == "__main__":
    PAGE.write_text(rendered(PAGE.read_text()))
