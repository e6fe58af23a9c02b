"""Renders chat templates in a sandbox that bounds their memory.

A template is a program that comes with the weights. Jinja's sandbox protects Python's internals, not memory:
``'a' * 10**9`` is one expression, and a text that doubles itself needs thirty. Here everything that a rendering
allocates is first charged to a budget, which bounds its memory; `time_limit` bounds its time. Templates get what
transformers' `apply_chat_template` offers, except methods whose result can be arbitrarily wide (`str.ljust`,
`str.format`, ...).
"""

from __future__ import annotations

import json
import math
import threading
from collections.abc import Callable, ItemsView, Iterable, Iterator, KeysView, Mapping, ValuesView
from datetime import datetime
from functools import cache, wraps
from typing import Any, ClassVar

from jinja2 import Environment, Template, TemplateError, nodes
from jinja2.compiler import CodeGenerator, Frame
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context, EvalContext
from jinja2.sandbox import ImmutableSandboxedEnvironment, SecurityError
from jinja2.utils import Namespace

MADE = 2**27
"""Budget of one rendering in characters, temporaries included: 512 MiB at four bytes each. A record's text has up to
4 Mi characters, of which a template makes a few copies."""
REFERENCE, OBJECT = 2, 16
"""Characters charged for a list element (eight bytes), and for any text in addition to its characters."""
BITS = 4096
"""Limit of integers in bits."""

TEXT_METHODS = frozenset(
    "capitalize casefold count endswith find index isalnum isalpha isascii isdecimal isdigit isidentifier islower "
    "isnumeric isprintable isspace istitle isupper join lower lstrip partition removeprefix removesuffix replace rfind "
    "rindex rpartition rsplit rstrip split splitlines startswith strip swapcase title upper".split()
)
FILTERS = frozenset(
    "attr capitalize count d default dictsort first float groupby indent int items join last length list lower map "
    "max min reject rejectattr replace reverse select selectattr sort string title trim unique upper".split()
)
GLOBALS = ("range", "joiner", "cycler")
JINJAS_OWN = (Environment, Context, EvalContext)
VIEWS = range | KeysView | ValuesView | ItemsView
"""Containers other than lists."""


def render(source: str, values: Mapping[str, Any]) -> str:
    """Renders the template with this source.

    Raises:
        TemplateError: it is not a template, or uses what is not offered, or exceeds the budget.
    """
    _ENVIRONMENT.left.count = MADE
    return _compiled(source).render(values)


@cache
def _compiled(source: str) -> Template:
    return _ENVIRONMENT.from_string(source)


class _Left(threading.local):
    """The remaining budget of this thread's rendering."""

    count = 0


class _Generation(Extension):
    """``{% generation %}`` marks the assistant's text, which stays as it is."""

    tags: ClassVar = {"generation"}  # pyright: ignore[reportIncompatibleVariableOverride] (Jinja's own do so too)

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body).set_lineno(line)


class _Code(CodeGenerator):
    """Routes what Jinja's generated code would allocate itself through the environment: joins, slices and literals."""

    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:
        self.write("environment.concat((")
        for part in node.nodes:
            self.visit(part, frame)
            self.write(", ")
        self.write("))")

    def visit_Getitem(self, node: nodes.Getitem, frame: Frame) -> None:
        if not isinstance(node.arg, nodes.Slice):
            return super().visit_Getitem(node, frame)
        self.write("environment.cut(")
        self.visit(node.node, frame)
        self.write(", slice(")
        for bound in (node.arg.start, node.arg.stop, node.arg.step):
            self.write("None") if bound is None else self.visit(bound, frame)
            self.write(", ")
        self.write("))")
        return None

    def visit_List(self, node: nodes.List, frame: Frame) -> None:
        self.write("environment.kept(")
        super().visit_List(node, frame)
        self.write(")")

    def visit_Tuple(self, node: nodes.Tuple, frame: Frame) -> None:
        stored = node.ctx != "load"
        self.write("" if stored else "environment.kept(")
        super().visit_Tuple(node, frame)
        self.write("" if stored else ")")

    def visit_Dict(self, node: nodes.Dict, frame: Frame) -> None:
        self.write("environment.kept(")
        super().visit_Dict(node, frame)
        self.write(")")


class _Namespace(Namespace):
    """Without private names, as in transformers, and without its content in `repr`, which may be recursive."""

    def __init__(*args: Any, **values: Any) -> None:
        held = dict(*args[1:], **values)
        for name in held:
            _require_public(name)
        Namespace.__init__(args[0], held)

    def __setitem__(self, name: str, value: Any) -> None:
        _require_public(name)
        super().__setitem__(name, value)

    def __repr__(self) -> str:
        return "<Namespace>"


def _require_public(name: Any) -> None:
    if str(name).startswith("_"):
        raise SecurityError(f"a namespace has no private attributes such as {name!r}")


class _Environment(ImmutableSandboxedEnvironment):
    code_generator_class = _Code
    intercepted_binops = frozenset({"+", "-", "*", "/", "//", "**", "%"})

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[_Generation, loopcontrols],
            optimized=False,  # What is folded at compile time would be charged to nobody.
            finalize=self.written,
        )
        self.left = _Left()
        filters = {name: self.filters[name] for name in FILTERS} | {"tojson": _to_json, "safe": str}
        self.filters = {name: self._charging(name, each) for name, each in filters.items()}
        self.globals = {name: self.globals[name] for name in GLOBALS} | {
            "namespace": _Namespace,
            "dict": _to_dict,
            "raise_exception": _raise,
            "strftime_now": _now,
        }

    def charge(self, count: int) -> None:
        """Raises `TemplateError` if this exceeds the remaining budget."""
        if count > self.left.count:
            raise TemplateError(f"makes more than {MADE:,} characters")
        self.left.count -= count

    def written(self, value: Any) -> Any:
        """`value`, which becomes text with all its content."""
        self.charge(OBJECT + size(value))
        return value

    def kept(self, value: Any) -> Any:
        """`value`, which the template has created. Its elements are already charged, but its size is bounded too:
        comparing a list that holds one list twice, and so on, takes exponential time.
        """
        if isinstance(value, str | list | tuple | dict):
            if size(value) > MADE:
                raise TemplateError(f"makes a {type(value).__name__} of more than {MADE:,} characters")
            self.charge(OBJECT + _length(value))
        return value

    def concat(self, parts: Iterable[Any]) -> str:  # pyright: ignore[reportIncompatibleVariableOverride]
        return "".join([str(self.written(part)) for part in parts])

    def cut(self, value: Any, bounds: slice) -> Any:
        return self.kept(value[bounds])

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "%" and isinstance(left, str):
            raise SecurityError("formatting with % is not offered")
        if isinstance(left, int) and isinstance(right, int):
            times = abs(right) if operator == "**" else 1
            if max(left.bit_length() * times, right.bit_length()) > BITS:
                raise SecurityError(f"an integer of more than {BITS} bits")
        elif operator == "+":
            self.charge(_length(left) + _length(right))
        elif operator == "*":
            self.charge(max(_length(left) * _times(right), _length(right) * _times(left)))
        return self.kept(super().call_binop(context, operator, left, right))

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        if isinstance(obj, str):
            return attr in TEXT_METHODS
        return not isinstance(obj, bytes | int | float) and super().is_safe_attribute(obj, attr, value)

    def wrap_str_format(self, value: Any) -> None:
        """Left to `is_safe_attribute`, which refuses it: a format asks for any width."""

    def call(self, context: Context, function: Any, /, *args: Any, **named: Any) -> Any:
        text = getattr(function, "__self__", None)
        if isinstance(text, str):
            function, args = self._charging(function.__name__, getattr(str, function.__name__)), (text, *args)
        result = super().call(context, function, *args, **named)
        return self.kept(result) if isinstance(result, dict) else result

    def _charging(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """A filter or string method that charges its result, in advance if that may be much longer than the input."""

        @wraps(function)
        def charged(*args: Any, **named: Any) -> Any:
            args = tuple(list(each) if _is_lazy(each) else each for each in args)
            given = [each for each in [*args, *named.values()] if not isinstance(each, JINJAS_OWN)]
            if name in LENGTHENING and LENGTHENING[name](given) > self.left.count:
                raise TemplateError(f"`{name}` makes more than {MADE:,} characters")
            return self.kept(function(*args, **named))

        return charged


def size(value: Any) -> int:
    """Characters and elements in `value`, weighted by nesting depth, since deeper levels are written with more
    brackets, quotes and indentation. Counting stops beyond `MADE`.
    """
    count, depth, level = 0, 0, [value]
    while level:
        depth += 1
        below: list[Any] = []
        for each in level:
            count += depth * (1 + len(each) if isinstance(each, str) else 1)
            below += _held(each)
            if count + len(below) > MADE:
                return MADE + 1
        level = below
    return count


def _held(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return [*value.keys(), *value.values()]
    return list(value) if isinstance(value, list | tuple | VIEWS) else []


def _is_lazy(value: Any) -> bool:
    return isinstance(value, Iterator | VIEWS)


def _length(value: Any) -> int:
    if isinstance(value, str):
        return len(value)
    return REFERENCE * len(value) if isinstance(value, list | tuple | dict) else 0


def _times(value: Any) -> int:
    return max(0, value) if isinstance(value, int) else 0


def _replaced(given: list[Any]) -> int:
    text, *pair = [str(each) for each in given[:3]]
    return max(1 + text.count(each) for each in pair) * max(len(each) for each in pair)


def _multiplied(given: list[Any]) -> int:
    """For a list and its separator, or a text and a width."""
    return math.prod(abs(each) if isinstance(each, int) else size(each) for each in given if each)


LENGTHENING: Mapping[str, Callable[[list[Any]], int]] = {
    "replace": _replaced,
    "join": _multiplied,
    "indent": _multiplied,
    "tojson": _multiplied,
}
"""Upper bounds for the functions whose result may be much longer than their input."""


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _to_dict(*args: Any, **values: Any) -> dict[Any, Any]:
    return dict(*args, **values)


def _raise(message: str) -> None:
    raise TemplateError(message)


def _now(form: str) -> str:
    if len(form) > 1000:
        raise SecurityError("a format of a date of more than 1,000 characters")
    return datetime.now().strftime(form)


_ENVIRONMENT = _Environment()
"""One for all threads, each with its own budget. Created at import, because two threads may race for the first use, and
a template charges the environment that compiled it.
"""
