"""Reads settings from a YAML file and from flags, and builds the dataclasses of the configuration.

Both sources have text or lists of text, which `convert` converts to the type of a field. A tree of settings has the
shape of the YAML file: sections, fields, and keys of mappings. Its leaves are `Setting` values, which store their
source for error messages. Both sources are read into such trees, the trees are merged, and `build` builds the
dataclasses from the result.

Mappings (``Mapping[str, T]``) take any key; dataclasses take only their fields.
"""

from __future__ import annotations

import math
import os
import re
import reprlib
from collections.abc import Callable, Iterable
from dataclasses import MISSING, dataclass, fields, is_dataclass
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, ClassVar, Literal, TypeVar, Union, get_args, get_origin

import yaml

from megatron_hetero.base.contents import is_url
from megatron_hetero.base.errors import UserError, reason
from megatron_hetero.base.files import read_text, unusable
from megatron_hetero.config.fields import MODULES, Pattern, children, is_leaf, item_type, shown_name
from megatron_hetero.layout.grammar import did_you_mean

T = TypeVar("T")
MAX_BYTES = 1 << 20
"""Maximum size of a YAML file in bytes, a hundred times the size of a long configuration."""
Tree = dict[str, Any]
"""Maps names to `Setting` leaves or to subtrees."""


@dataclass(frozen=True)
class Setting:
    """A value that the user gave, with its source."""

    value: object
    """The value as written by the user."""
    where: str
    """The flag or the file that gives the value."""
    base: Path
    """The folder that relative paths start from."""


# ---------------------------------------------------------------------------------------------- conversion


class ConversionError(Exception):
    """Error for a value that cannot be converted: what was found, and what is expected."""

    def __init__(self, found: str, expected: str) -> None:
        super().__init__(found)
        self.found, self.expected = found, expected


def convert(value: object, kind: object, base: Path) -> object:
    """Convert `value` to the type `kind`.

    Args:
        value: text, or a list of texts.
        kind: str, int, float, bool, Path, a Literal of texts or of integers, a union of one of these and None, a tuple
            of one of these, or a union of a Literal and another of these types.
        base: the folder that relative paths start from.

    Raises:
        ConversionError: `value` cannot be converted to `kind`.
    """
    origin, args = get_origin(kind), get_args(kind)
    if origin is tuple:
        return _items(value, args, kind, base)
    if not isinstance(value, str):
        raise ConversionError(_show(value), describe(kind))
    if origin in (Union, UnionType):
        if NoneType in args and value.lower() in ("none", "null", "~", ""):
            return None
        *words, other = (arg for arg in args if arg is not NoneType)
        return _word(value, [word for kind in words for word in get_args(kind)], other, base)
    if origin is Literal:
        return _word(value, args, None, base)
    if kind is Path:
        return _path(value, base)
    if kind is Pattern:
        return Pattern(value if is_url(value) else str(_path(value, base)))
    return _SCALARS[kind](value)


def describe(kind: object) -> str:
    """Return a description of a type for users."""
    origin, args = get_origin(kind), get_args(kind)
    if origin in (Union, UnionType):
        return " or ".join("none" if arg is NoneType else describe(arg) for arg in args)
    if origin is Literal:
        return "|".join(map(str, args))
    if origin is tuple:
        return f"list of {describe(args[0])}" if args[-1] is Ellipsis else f"{len(args)} {describe(args[0])}s"
    return {str: "text", int: "integer", float: "number", bool: "true|false", Path: "path", Pattern: "path"}[kind]


def _show(value: object) -> str:
    """Return a value as error messages quote it."""
    if value == "":
        return "no value"
    # Show only the first items of lists and mappings: YAML aliases may expand a few lines without limit.
    what = {list: "the list ", dict: "the mapping "}.get(type(value), "")
    return f"{what}`{value[:80] if isinstance(value, str) else reprlib.repr(value)}`"


def _word(value: str, words: Iterable[str | int], other: object, base: Path) -> object:
    """Return the one of `words` that `value` names; else convert `value` to the type `other`, if that is not None."""
    named = {str(word): word for word in words}
    if value in named:
        return named[value]
    guess, expected = did_you_mean(value, named), ", ".join(named)
    if other is None:
        raise ConversionError(f"{_show(value)}{guess}", f"one of {expected}")
    try:
        return convert(value, other, base)
    except ConversionError as error:
        expected = " or ".join(filter(None, [expected, error.expected]))
        raise ConversionError(f"{error.found}{guess}", expected) from None


def _items(value: object, args: tuple[object, ...], kind: object, base: Path) -> tuple[object, ...]:
    if not isinstance(value, list):
        raise ConversionError(_show(value), f"a {describe(kind)}" if args[-1] is Ellipsis else describe(kind))
    if args[-1] is not Ellipsis and len(value) != len(args):
        raise ConversionError(f"{len(value)} values", f"{len(args)}")
    return tuple(convert(item, args[0], base) for item in value)


def _path(value: str, base: Path) -> Path:
    if not value or "\0" in value:
        raise ConversionError(_show(value), "a path")
    try:
        home = Path(value).expanduser()
    except RuntimeError:
        raise ConversionError(_show(value), "a path with an existing home folder") from None
    # Links stay unresolved, so that messages name the path that the user wrote.
    path = Path(os.path.abspath(base / home))
    if (why := unusable(path)) is not None:
        raise ConversionError(f"{_show(value)}, {why}", "a valid path")
    return path


def _text(value: str) -> str:
    if not value:
        raise ConversionError(_show(value), "text")
    return value


def _boolean(value: str) -> bool:
    if value.lower() not in ("true", "false"):
        raise ConversionError(_show(value), "true or false")
    return value.lower() == "true"


def _integer(value: str) -> int:
    if not re.fullmatch(r"[+-]?[0-9]+(_[0-9]+)*", value):
        raise ConversionError(_show(value), "an integer")
    if len(value) > 30 or abs(int(value)) >= 2**63:  # Python refuses to convert thousands of digits.
        raise ConversionError(_show(value), "an integer below 2^63")
    return int(value)


def _number(value: str) -> float:
    try:
        number = float(value)
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        raise ConversionError(_show(value), "a finite number")
    return number


_SCALARS: dict[object, Callable[[str], object]] = {str: _text, bool: _boolean, int: _integer, float: _number}


# ------------------------------------------------------------------------------------- YAML to a tree


def step(kind: object, name: str, path: tuple[str, ...], where: str) -> object:
    """Return the type of `name` inside a value of type `kind` at `path`.

    Raises:
        UserError: `kind` has no field `name`.
    """
    known = children(kind)
    if known is None:
        return item_type(kind)
    if name not in known:
        what = f"field of {'.'.join(path)}" if path else "section"
        found = f"`{'.'.join((*path, name))}`{did_you_mean(name, known)}"
        expected = f"a {what}, one of {', '.join(known)}"
        # YAML splits `{parallel: tp:4,dp:2}` at the comma, which leaves the name `dp:2`.
        is_layout = path[:1] == (MODULES,) and ":" in name
        fix = "quote layouts with commas inside braces" if is_layout else "rename or remove it"
        raise UserError.at(where, found=found, expected=expected, fix=fix)
    return known[name]


class _Loader(yaml.SafeLoader):
    """The safe YAML loader, reduced to text, lists and mappings: scalars such as `0400`, `4:16`, `on` or `2024-01-01`
    are text, while other tags and duplicate keys are errors.
    """

    # The stubs declare instance variables; PyYAML itself sets them on the class.
    yaml_implicit_resolvers: ClassVar[dict[str, list[Any]]] = {  # pyright: ignore[reportIncompatibleVariableOverride]
        "<": yaml.SafeLoader.yaml_implicit_resolvers["<"]  # `<<` merges mappings.
    }
    yaml_constructors: ClassVar[dict[Any, Any]] = {  # pyright: ignore[reportIncompatibleVariableOverride]
        tag: constructor
        for tag, constructor in yaml.SafeLoader.yaml_constructors.items()
        if tag is None or tag.endswith((":str", ":seq", ":map"))
    }

    # Check for duplicates here: in construct_mapping, `<<` may already have merged the keys of another node.
    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        lines: dict[str, int] = {}
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                continue
            if key.value in lines:
                problem = f"`{key.value}` given twice, first in line {lines[key.value]}"
                raise yaml.constructor.ConstructorError(None, None, problem, key.start_mark)
            lines[key.value] = key.start_mark.line + 1
        return node


def read_yaml(file: Path) -> object:
    """Return the content of a YAML file, with text for all values. Raises `UserError` if it is missing or malformed."""
    try:
        return yaml.load(read_text(file, MAX_BYTES), Loader=_Loader) or ""
    except OSError as error:
        raise UserError.at(f"--config {file}", problem=reason(error), fix="correct the path") from None
    # Text that is not UTF-8 raises ValueError, deep nesting RecursionError.
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise _broken(file, error) from None


def tree_of(content: object, root: type, file: Path) -> Tree:
    """Return the settings for dataclass `root` in the content of a YAML file; relative paths start from the file's
    folder. Raises `UserError` for keys that `root` lacks.
    """
    return _tree(content, root, (), file)


def _tree(content: object, kind: Any, path: tuple[str, ...], file: Path) -> Any:
    if is_leaf(kind):
        return Setting(content, str(file), file.absolute().parent)
    if content in ("", "null", "~"):
        return {}
    if not isinstance(content, dict):
        where = f"{'.'.join(path) or 'the configuration'} ({file})"
        raise UserError.at(where, found=_show(content), expected="a mapping, `key: value`", fix="correct the file")
    return {
        name: _tree(value, step(kind, name, path, str(file)), (*path, name), file) for name, value in content.items()
    }


def _broken(file: Path, error: Exception) -> UserError:
    """Return the error for malformed YAML, with line and column."""
    mark = getattr(error, "problem_mark", None)
    problem = " ".join(str(getattr(error, "problem", None) or error).split()).removeprefix("found ")
    problem = f"malformed YAML ({problem})" if problem.startswith("expected") else problem
    where = f"{file}, line {mark.line + 1}, column {mark.column + 1}" if mark else file
    expected = "UTF-8 YAML, `key: value`, each key once"
    return UserError.at(f"--config {where}", found=problem, expected=expected, fix="correct the file")


# ---------------------------------------------------------------------------------- trees to dataclasses


def merge(base: Tree, over: Tree) -> Tree:
    """Return the union of both trees, in which leaves of `over` override leaves of `base`."""
    both = {n: merge(base[n], over[n]) for n in base.keys() & over.keys() if isinstance(over[n], dict)}
    return base | over | both


def build(kind: type[T], tree: Tree) -> T:
    """Return an instance of the dataclass `kind`, built from settings and defaults.

    Raises:
        UserError: required fields are missing, or a value has the wrong type.
    """
    missing: list[str] = []
    built = _value(kind, tree, (), missing)
    if missing:
        fix = f"add it to the --config file, or pass --{missing[0]} VALUE"
        raise UserError.at(", ".join(missing), problem="required, but not set", fix=fix)
    return built


def _value(kind: Any, node: Any, path: tuple[str, ...], missing: list[str]) -> Any:
    """Convert `node` to the type `kind`. Names of required fields without a value are appended to `missing`."""
    types, item = children(kind), item_type(kind)
    if types is not None:
        values = {}
        for f in fields(kind):
            name = shown_name(f)
            if name in node or is_dataclass(types[name]):
                values[f.name] = _value(types[name], node.get(name, {}), (*path, name), missing)
            elif f.default is MISSING and f.default_factory is MISSING:
                missing.append(".".join((*path, name)))
        return None if missing else kind(**values)
    if item is not None:
        return {name: _value(item, below, (*path, name), missing) for name, below in node.items()}
    try:
        return convert(node.value, kind, node.base)
    except ConversionError as error:
        where = f"{'.'.join(path)} ({node.where})"
        raise UserError.at(where, found=error.found, expected=error.expected, fix="correct the value") from None
