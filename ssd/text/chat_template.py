"""Chat templates: programs that come with checkpoints and requests, run in a sandbox and within limits.

Renders as Hugging Face does. A template can make no text, list or number beyond a size, and ends after some seconds:
whatever makes values (operators, calls, filters, literals) measures them, and where one step could make a huge value,
its size is estimated before. Knows nothing of tokenizers or files.
"""

from __future__ import annotations

import functools
import json
import re
import string
import threading
import time
from collections.abc import Callable, ItemsView, Iterable, Iterator, KeysView, Mapping, ValuesView
from datetime import datetime
from typing import Any, Final

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.runtime
import jinja2.utils
import jinja2.visitor
from jinja2.sandbox import ImmutableSandboxedEnvironment

MAX_SECONDS: Final = 10.0
MAX_CHARS: Final = 1 << 23  # longest prompt, and largest value
_MAX_TOTAL: Final = 64 * MAX_CHARS  # characters of all values that a rendering makes
_ITEM: Final = 32  # an item of a list counts as this many characters
_MAX_BITS: Final = 4096  # largest integer
_MAX_SOURCE: Final = 1 << 20  # characters of a template
_EXCLUDED: Final = ("urlize", "striptags", "wordwrap", "pprint")  # for HTML, and slow on long texts
_WIDE: Final = re.compile(r"%[^%a-zA-Z]*(\d{4}|\*)")  # a field of a % format, or of strftime's


class LimitError(jinja2.TemplateError):
    """A template takes too long, or makes too much."""


def compile_template(source: str) -> jinja2.Template:
    if len(source) > _MAX_SOURCE:
        raise LimitError(f"the template has {len(source)} characters, {_MAX_SOURCE} are allowed")
    return _environment().from_string(source)


def render(template: jinja2.Template, variables: Mapping[str, Any]) -> str:
    environment = _environment()
    environment.start()
    return template.render(variables)


@functools.cache
def _environment() -> _Environment:
    return _Environment()


class _Environment(ImmutableSandboxedEnvironment):
    """A sandbox with limits; each thread has a budget of characters and time."""

    intercepted_binops = frozenset(ImmutableSandboxedEnvironment.default_binop_table)

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            optimized=False,  # constants are not computed while compiling, outside of the limits
            finalize=_measure_output,
            extensions=[_GenerationBlock, jinja2.ext.loopcontrols],
        )
        self._budget = threading.local()
        self.filters["tojson"] = self._tojson
        self.filters = {name: self._limited(name, f) for name, f in self.filters.items() if name not in _EXCLUDED}
        self.filters |= {"_counted": self._counted, "_measured": self.measured}
        del self.globals["lipsum"]
        self.globals |= {"namespace": _Namespace, "raise_exception": _raise_exception, "strftime_now": _strftime_now}

    def start(self) -> None:
        """Resets this thread's budget, at the beginning of a rendering."""
        self._budget.left = _MAX_TOTAL
        self._budget.end = time.monotonic() + MAX_SECONDS

    def spend(self, size: int) -> None:
        self._budget.left -= size
        if self._budget.left < 0:
            raise LimitError(f"the template makes values of more than {_MAX_TOTAL} characters in all")
        if time.monotonic() > self._budget.end:
            raise LimitError(f"the template takes more than {MAX_SECONDS:g} seconds")

    def measured(self, value: Any) -> Any:
        """The value, if it is not too large; items of an iterator are counted as they come."""
        if isinstance(value, Iterator) and not isinstance(value, jinja2.runtime.LoopContext):
            return self._counted(value)
        self.spend(_size(value))
        return value

    def _counted(self, items: Iterable[Any]) -> Iterator[Any]:
        for item in items:
            self.spend(1)
            yield item

    def concat(self, pieces: Iterable[str]) -> str:  # type: ignore[override]
        """Joins the output of a template, a macro or a block, within the limits."""
        kept, size = [], 0
        for piece in pieces:
            size += len(piece)
            self.spend(len(piece))
            _check_size(size)
            kept.append(piece)
        return "".join(kept)

    def _parse(self, source: str, name: str | None, filename: str | None) -> jinja2.nodes.Template:
        tree = super()._parse(source, name, filename)
        _Measuring().visit(tree)
        return tree.set_environment(self)  # type: ignore[return-value]

    def call_binop(self, context: jinja2.runtime.Context, operator: str, left: Any, right: Any) -> Any:
        if operator in _BINARY_SIZES:
            _check_size(_BINARY_SIZES[operator](left, right))
        return self.measured(super().call_binop(context, operator, left, right))

    def call(__self, __context: jinja2.runtime.Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805
        if isinstance(__obj, jinja2.runtime.LoopContext):  # {% for … recursive %}
            args = tuple(map(__self._counted, args))
        method = getattr(__obj, "__wrapped__", __obj)  # the sandbox wraps str.format
        owner, name = getattr(method, "__self__", None), getattr(method, "__name__", "")
        if isinstance(owner, (str, bytes, int)) and name in _METHOD_SIZES:
            if name == "join":
                args = tuple(list(__self._counted(items)) for items in args)
            _check_size(_METHOD_SIZES[name](owner, *args, **kwargs))
        return __self.measured(super().call(__context, __obj, *args, **kwargs))

    def _limited(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """A filter whose result is measured, and estimated before where that is needed."""
        skipped = 1 if hasattr(function, "jinja_pass_arg") else 0  # a context comes first

        @functools.wraps(function)
        def limited(*args: Any, **kwargs: Any) -> Any:
            if name == "join":
                place = slice(skipped, skipped + 1)
                args = (*args[:skipped], *(list(self._counted(items)) for items in args[place]), *args[skipped + 1 :])
            if name in _FILTER_SIZES:
                _check_size(_FILTER_SIZES[name](*args[skipped:], **kwargs))
            return self.measured(function(*args, **kwargs))

        return limited

    def _tojson(
        self,
        value: Any,
        ensure_ascii: bool = False,
        indent: int | str | None = None,
        separators: tuple[str, str] | None = None,
        sort_keys: bool = False,
    ) -> str:
        """Plain JSON: Jinja's own filter escapes HTML characters, which models were not trained on."""
        self.measured(value)
        if max(_length(indent), *map(len, separators or ("",))) > 64:
            raise LimitError("tojson: an indent or separator is longer than 64 characters")
        encoder = json.JSONEncoder(ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
        return encoder.encode(value) if indent is None else self.concat(encoder.iterencode(value))


@jinja2.pass_context
def _measure_output(context: jinja2.runtime.Context, value: Any) -> Any:
    environment = context.environment
    return environment.measured(value) if isinstance(environment, _Environment) else value


class _Measuring(jinja2.visitor.NodeTransformer):
    """Counts the iterations of loops, and measures literals and concatenations."""

    def visit_For(self, node: jinja2.nodes.For) -> jinja2.nodes.Node:  # noqa: N802  (jinja2's names)
        self.generic_visit(node)
        node.iter = _filtered(node.iter, "_counted")
        return node

    def visit_List(self, node: jinja2.nodes.Expr) -> jinja2.nodes.Node:  # noqa: N802
        self.generic_visit(node)
        return _filtered(node, "_measured")

    visit_Dict = visit_Concat = visit_List  # noqa: N815

    def visit_Tuple(self, node: jinja2.nodes.Tuple) -> jinja2.nodes.Node:  # noqa: N802
        self.generic_visit(node)
        return _filtered(node, "_measured") if node.ctx == "load" else node


def _filtered(node: jinja2.nodes.Node, name: str) -> jinja2.nodes.Filter:
    return jinja2.nodes.Filter(node, name, [], [], None, None, lineno=node.lineno)


# --- sizes ------------------------------------------------------------------------------------------------------------


def _check_size(size: float) -> None:
    if size > MAX_CHARS:
        raise LimitError(f"the template makes a value of more than {MAX_CHARS} characters")


def _size(value: Any) -> int:
    """Characters of a value when it is written: what occurs twice in it counts twice."""
    size, pending = 0, [value]
    while pending:
        item = pending.pop()
        if isinstance(item, (str, bytes)):
            size += len(item)
        elif isinstance(item, int):
            _check_bits(item.bit_length())
        elif isinstance(item, Mapping):
            pending += item.keys()
            pending += item.values()
        elif isinstance(item, (list, tuple, set, frozenset, KeysView, ItemsView, ValuesView)):
            pending += item
        size += _ITEM
        _check_size(size - _ITEM + _ITEM * len(pending))
    return size


def _check_bits(bits: int) -> None:
    if bits > _MAX_BITS:
        raise LimitError(f"the template makes an integer of more than {_MAX_BITS} bits")


def _length(width: int | str | None) -> int:
    return width if isinstance(width, int) else len(width or "")


def _replaced(text: Any, old: Any, new: Any, *_: Any, **__: Any) -> int:
    return len(str(text)) + str(text).count(str(old)) * len(str(new))


def _joined(separator: Any, items: Any) -> int:
    return _size(items) + len(str(separator)) * len(items)


def _braces(text: str, *args: Any, **kwargs: Any) -> int:
    """Upper bound for str.format: every field may be the longest of the arguments."""
    for _, _, layout, _ in string.Formatter().parse(text):
        if layout and re.search(r"\d{4}|\{", layout):
            raise LimitError(f"the format {layout[:20]!r} is too wide")
    return len(text) + text.count("{") * _size([args, kwargs])


def _percents(text: Any, *args: Any, **kwargs: Any) -> int:
    """Upper bound for the % operator: names may occur several times, positions occur once."""
    if not isinstance(text, (str, bytes)):
        return 0
    text = text if isinstance(text, str) else text.decode("latin-1")
    if _WIDE.search(text):
        raise LimitError(f"the format {text[:20]!r} is too wide")
    named = kwargs or any(isinstance(value, Mapping) for value in args)
    return len(text) + (text.count("%") if named else 1) * _size([args, kwargs])


def _product(left: Any, right: Any) -> float:
    if isinstance(left, int) and isinstance(right, int):
        _check_bits(left.bit_length() + right.bit_length() - 1)
        return 0
    number, other = (left, right) if isinstance(left, int) else (right, left)
    if not isinstance(number, int) or number < 1:
        return 0
    return (len(other) if isinstance(other, (str, bytes)) else _size(other)) * number


def _power(left: Any, right: Any) -> int:
    if isinstance(left, int) and isinstance(right, int) and right > 0:
        _check_bits(left.bit_length() * right)
    return 0


def _summed(items: Any, attribute: Any = None, start: Any = 0) -> float:
    """Lists are added one by one, which takes long."""
    return 0 if isinstance(start, (int, float)) else float("inf")


def _rounded(number: Any, precision: int = 0, *_: Any, **__: Any) -> int:
    _check_bits(4 * abs(precision))
    return 0


def _width(text: Any, width: int = 80, *_: Any, **__: Any) -> int:
    return width


_BINARY_SIZES: Final[Mapping[str, Callable[..., float]]] = {"*": _product, "**": _power, "%": _percents}
_METHOD_SIZES: Final[Mapping[str, Callable[..., float]]] = {
    **dict.fromkeys(("center", "ljust", "rjust", "zfill", "to_bytes"), _width),
    "expandtabs": lambda text, tabsize=8: text.count("\t") * tabsize,
    "replace": _replaced,
    "join": _joined,
    "format": _braces,
    "format_map": _braces,
    "translate": lambda *_: float("inf"),
}
_FILTER_SIZES: Final[Mapping[str, Callable[..., float]]] = {
    "center": _width,
    "indent": lambda text, width=4, *_, **__: (str(text).count("\n") + 1) * _length(width),
    "replace": _replaced,
    "join": lambda items, d="", *_, **__: _joined(d, items),
    "format": _percents,
    "batch": lambda items, linecount, *_, **__: _ITEM * linecount,
    "slice": lambda items, slices, *_, **__: _ITEM * slices,
    "round": _rounded,
    "sum": _summed,
}


# --- globals and extensions -------------------------------------------------------------------------------------------


class _Namespace(jinja2.utils.Namespace):
    """Its text does not show what is in it, since that may have grown after it was measured."""

    def __repr__(self) -> str:
        return "<Namespace>"


class _GenerationBlock(jinja2.ext.Extension):
    """`{% generation %}` marks what the assistant said, for training; for inference its body is simply rendered."""

    tags = {"generation"}  # noqa: RUF012  (declared so by jinja2)

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.Scope(body, lineno=line)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(layout: str) -> str:
    if len(layout) > 1000 or _WIDE.search(layout):
        raise LimitError("strftime_now: the format is too wide")
    return datetime.now().strftime(layout)
