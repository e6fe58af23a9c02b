"""Converts values from YAML and flags to the type of their field.

Both take the same path. Flags are text, so numbers and booleans are accepted as text.

Builds nested dataclasses from a YAML file and the command line, with errors that name the source.

A tree of settings has the shape of the YAML file: sections, fields, and keys of mappings. Its leaves are `Setting`
values, which remember their source. Both sources are read into such trees, the trees are merged, and one function
builds the dataclasses from the result.

Mappings (``Mapping[str, T]``) take any key; dataclasses take only their fields.
"""

from __future__ import annotations

import math
import os
import re
import reprlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import MISSING, Field, dataclass, field, fields, is_dataclass
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, ClassVar, Literal, TypeVar, Union, cast, get_args, get_origin, get_type_hints

import yaml

from megatron_hetero.base.errors import UserError, reason
from megatron_hetero.base.files import read_text, unusable
from megatron_hetero.layout.grammar import did_you_mean


class ConversionError(Exception):
    """The value found, and the value expected."""

    def __init__(self, found: str, expected: str) -> None:
        super().__init__(found)
        self.found, self.expected = found, expected


def convert(value: object, kind: object, base: Path) -> object:
    """`value` as a `kind`.

    Args:
        value: a YAML value: text, a number, a boolean, None or a list of these.
        kind: str, int, float, bool, Path, a Literal of texts or of integers, one of these or None, a tuple of
            one of these, or the union of a Literal and the type of any other value.
        base: the folder that relative paths start from.

    Raises:
        ConversionError: the value is not a `kind`.
    """
    origin, args = get_origin(kind), get_args(kind)
    if origin in (Union, UnionType):
        if NoneType in args and (value is None or (isinstance(value, str) and value.lower() in ("none", "null"))):
            return None
        *words, other = (arg for arg in args if arg is not NoneType)
        return _word_or(value, [word for kind in words for word in get_args(kind)], other, base)
    if origin is Literal:
        return _choice(value, args)
    if origin is tuple:
        return _items(value, args, kind, base)
    if kind is Path:
        return _path(value, base)
    return _SCALARS[kind](value)


def describe(kind: object) -> str:
    """A type in a user's words."""
    origin, args = get_origin(kind), get_args(kind)
    if origin in (Union, UnionType):
        return " or ".join("none" if arg is NoneType else describe(arg) for arg in args)
    if origin is Literal:
        return "|".join(map(str, args))
    if origin is tuple:
        return f"list of {describe(args[0])}" if args[-1] is Ellipsis else f"{len(args)} {describe(args[0])}s"
    return {str: "text", int: "integer", float: "number", bool: "true|false", Path: "path"}[kind]


def show(value: object) -> str:
    """A value as error messages quote it, with its type."""
    if value is None:
        return "null"
    names = {bool: "the boolean", int: "the integer", float: "the number", str: "the text", list: "the list"}
    # Only the first items of lists and mappings: YAML aliases expand a few lines without limit.
    text = str(value).lower() if isinstance(value, bool) else value if isinstance(value, str) else reprlib.repr(value)
    return f"{names.get(type(value), f'a {type(value).__name__}')} `{text[:80]}`"


def _word_or(value: object, words: list[str], other: object, base: Path) -> object:
    """One of the `words`, or the value as an `other`."""
    if value in words:
        return value
    try:
        return convert(value, other, base)
    except ConversionError as error:
        hint = did_you_mean(value, words) if isinstance(value, str) else ""
        expected = " or ".join(filter(None, [", ".join(words), error.expected]))
        raise ConversionError(f"{error.found}{hint}", expected) from None


def _choice(value: object, options: tuple[str | int, ...]) -> str | int:
    named = {str(option): option for option in options}
    # `true` equals 1, and is none.
    if isinstance(value, str | int) and not isinstance(value, bool) and str(value) in named:
        return named[str(value)]
    hint = did_you_mean(value, list(named)) if isinstance(value, str) else ""
    raise ConversionError(f"{show(value)}{hint}", f"one of {', '.join(named)}")


def _items(value: object, args: tuple[object, ...], kind: object, base: Path) -> tuple[object, ...]:
    if not isinstance(value, list):
        raise ConversionError(show(value), f"a {describe(kind)}" if args[-1] is Ellipsis else describe(kind))
    if args[-1] is not Ellipsis and len(value) != len(args):
        raise ConversionError(f"{len(value)} values", f"{len(args)}")
    return tuple(convert(item, args[0], base) for item in value)


def _path(value: object, base: Path) -> Path:
    if not isinstance(value, str) or not value or "\0" in value:
        raise ConversionError(show(value), "a path")
    try:
        home = Path(value).expanduser()
    except RuntimeError:
        raise ConversionError(show(value), "a path with an existing home folder") from None
    # Links stay unresolved, so that messages name the path that the user wrote.
    path = Path(os.path.abspath(base / home))
    if (why := unusable(path)) is not None:
        raise ConversionError(f"{show(value)}, {why}", "a valid path")
    return path


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise ConversionError(show(value), "text")
    return value


def _boolean(value: object) -> bool:
    if isinstance(value, bool):
        return value
    if isinstance(value, str) and value.lower() in ("true", "false"):
        return value.lower() == "true"
    raise ConversionError(show(value), "true or false")


def _integer(given: object) -> int:
    value = given
    if isinstance(value, str) and re.fullmatch(r"[+-]?[0-9]+(_[0-9]+)*", value):
        value = int(value) if len(value) <= 30 else 2**63  # Python refuses thousands of digits.
    if isinstance(value, int) and not isinstance(value, bool):
        if abs(value) < 2**63:
            return value
        raise ConversionError(show(given), "an integer below 2^63")
    raise ConversionError(show(given), "an integer")


def _number(value: object) -> float:
    if isinstance(value, int | float | str) and not isinstance(value, bool):
        try:
            number = float(value)
        except (ValueError, OverflowError):
            number = math.nan
        if math.isfinite(number):
            return number
    raise ConversionError(show(value), "a finite number")


_SCALARS: dict[object, Callable[[object], object]] = {str: _text, bool: _boolean, int: _integer, float: _number}


T = TypeVar("T")
MOST_BYTES = 1 << 20
"""Maximum size of a YAML file: a hundred times a long one."""
Tree = dict[str, Any]
"""Names to `Setting` leaves or further trees."""


@dataclass(frozen=True)
class Setting:
    """A value from the user."""

    value: object
    """The value as written."""
    where: str
    """Its source: a flag or a file."""
    base: Path
    """The folder that relative paths start from."""


def option(default: T, text: str, shown: str = "") -> T:
    """A dataclass field with a default, its help text, and the default as shown to users if that differs."""
    metadata = {"help": text, "shown": shown}
    if isinstance(default, dict):
        return cast(T, field(default_factory=lambda: dict(default), metadata=metadata))
    return field(default=default, metadata=metadata)


def required(text: str) -> Any:
    """A required dataclass field with its help text."""
    return field(metadata={"help": text})


def children(kind: object) -> dict[str, object] | None:
    """The fields of a dataclass type with their types; None for any other type."""
    if not is_dataclass(kind):
        return None
    hints = get_type_hints(kind)
    return {shown_name(f): hints[f.name] for f in fields(kind)}


def shown_name(f: Field[Any]) -> str:
    """A field's name in YAML and flags: Python keywords such as `async` carry a trailing underscore in the code."""
    return f.name.removesuffix("_")


def item_type(kind: object) -> object:
    """The type of a mapping's values; None for any other type."""
    return get_args(kind)[1] if get_origin(kind) is Mapping else None


def step(kind: object, name: str, path: tuple[str, ...], where: str) -> object:
    """The type of `name` below a value of type `kind` at `path`.

    Raises:
        UserError: there is no such field.
    """
    known = children(kind)
    if known is None:
        return item_type(kind)
    if name not in known:
        what = f"field of {'.'.join(path)}" if path else "section"
        raise UserError.at(
            where,
            found=f"`{'.'.join((*path, name))}`{did_you_mean(name, known)}",
            expected=f"a {what}, one of {', '.join(known)}",
            fix="rename or remove it",
        )
    return known[name]


def is_leaf(kind: object) -> bool:
    """Whether a type holds a value, not further names."""
    return not is_dataclass(kind) and item_type(kind) is None


# ------------------------------------------------------------------------------------- YAML to a tree


def read_yaml(file: Path, root: type) -> Tree:
    """The settings of a YAML file for the dataclass `root`; relative paths start from the file's folder.

    Raises:
        UserError: the file is missing or malformed, or has keys that `root` lacks.
    """
    try:
        # A SafeLoader: builds plain values only.
        content = yaml.load(read_text(file, MOST_BYTES), Loader=_Loader)
    except OSError as error:
        raise UserError.at(f"--config {file}", problem=reason(error), fix="correct the path") from None
    # Malformed dates and numbers raise ValueError, deep nesting RecursionError.
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise _broken(file, error) from None
    return _tree(content, root, (), file) if content is not None else {}


def _tree(content: object, kind: Any, path: tuple[str, ...], file: Path) -> Any:
    if is_leaf(kind):
        return Setting(content, str(file), file.absolute().parent)
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise UserError.at(
            _named(path, file),
            found=show(content),
            expected="a mapping, `key: value`",
            fix="correct the file",
        )
    return {
        _name(name, path, file): _tree(value, step(kind, name, path, str(file)), (*path, name), file)
        for name, value in content.items()
    }


def _name(name: object, path: tuple[str, ...], file: Path) -> str:
    if not isinstance(name, str):
        found, fix = f"{show(name)} as a name", f'put it in quotes: "{name}"'
        raise UserError.at(_named(path, file), found=found, expected="text", fix=fix)
    return name


def _named(path: tuple[str, ...], file: Path) -> str:
    return f"{'.'.join(path) or 'the configuration'} ({file})"


class _Loader(yaml.SafeLoader):
    """The safe loader with two changes: a duplicate key is an error, and plain scalars follow YAML 1.2 (`0400` is 400;
    `4:16`, `on` and `2024-01-01` are text, not a number, a boolean, a date).
    """

    # The stubs declare an instance variable; PyYAML itself sets it on the class.
    yaml_implicit_resolvers: ClassVar[dict[str, list[Any]]] = {}  # pyright: ignore[reportIncompatibleVariableOverride]

    # Not in construct_mapping, which may see a node after `<<` has merged in another's keys.
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


class _Dumper(yaml.SafeDumper):
    """The safe dumper, except that it quotes text that `_Loader` would not read as text."""


# Everything else is text, which fields of other types convert or refuse as they do a flag's.
for _tag, _words, _first in (
    ("null", "~|null|Null|NULL|", ["~", "n", "N", ""]),
    ("bool", "true|True|TRUE|false|False|FALSE", list("tTfF")),
    ("int", "[-+]?[0-9]+", list("-+0123456789")),
    ("float", r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?", list("-+.0123456789")),
    ("float", r"[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)", list("-+.")),
    ("merge", "<<", ["<"]),
):
    for _either in (_Loader, _Dumper):
        _either.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(f"(?:{_words})$"), _first)


def _yaml_integer(loader: yaml.SafeLoader, node: yaml.ScalarNode) -> int:
    return int(loader.construct_scalar(node))


def _yaml_number(loader: yaml.SafeLoader, node: yaml.ScalarNode) -> float:
    return float(re.sub(r"\.(?=[inIN])", "", loader.construct_scalar(node)))  # Python writes inf and nan without a dot.


_Loader.add_constructor("tag:yaml.org,2002:int", _yaml_integer)
_Loader.add_constructor("tag:yaml.org,2002:float", _yaml_number)


def yaml_of(plain: object) -> str:
    """Plain values as YAML that `read_yaml` reads back unchanged."""
    return yaml.dump(plain, Dumper=_Dumper, sort_keys=False, allow_unicode=True)


def _broken(file: Path, error: Exception) -> UserError:
    """The error for malformed YAML, with line and column."""
    mark = getattr(error, "problem_mark", None)
    problem = " ".join(str(getattr(error, "problem", None) or error).split()).removeprefix("found ")
    problem = f"malformed YAML ({problem})" if problem.startswith("expected") else problem
    where = f"{file}, line {mark.line + 1}, column {mark.column + 1}" if mark else file
    expected = "UTF-8 YAML, `key: value`, each key once"
    return UserError.at(f"--config {where}", found=problem, expected=expected, fix="correct the file")


# ---------------------------------------------------------------------------------- trees to dataclasses


def merge(base: Tree, over: Tree) -> Tree:
    """The union of both trees; leaves of `over` override those of `base`."""
    both = {n: merge(base[n], over[n]) for n in base.keys() & over.keys() if isinstance(over[n], dict)}
    return base | over | both


def build(kind: type[T], tree: Tree) -> T:
    """An instance of the dataclass `kind`, from the settings and its defaults.

    Raises:
        UserError: required fields are missing, or a value has the wrong type.
    """
    missing = list(_missing(kind, tree, ()))
    if missing:
        raise UserError.at(
            ", ".join(missing),
            problem="required, but not set",
            fix=f"add it to the --config file, or pass --{missing[0]} VALUE",
        )
    return _value(kind, tree, ())


def _missing(kind: object, tree: Tree, path: tuple[str, ...]) -> Iterator[str]:
    if is_dataclass(kind):
        types = children(kind) or {}
        for f in fields(kind):
            name = shown_name(f)
            if name in tree or is_dataclass(types[name]):
                yield from _missing(types[name], tree.get(name, {}), (*path, name))
            elif not _has_default(f):
                yield ".".join((*path, name))
    elif (item := item_type(kind)) is not None and not is_leaf(item):
        for name, below in tree.items():
            yield from _missing(item, below, (*path, name))


def _has_default(f: Field[Any]) -> bool:
    return f.default is not MISSING or f.default_factory is not MISSING


def _value(kind: Any, node: Any, path: tuple[str, ...]) -> Any:
    if is_leaf(kind):
        return _converted(kind, node, path)
    types = children(kind)
    if types is None:
        return {name: _value(item_type(kind), below, (*path, name)) for name, below in node.items()}
    given = {name: node.get(name, {}) for name in types if name in node or is_dataclass(types[name])}
    field_names = {shown_name(f): f.name for f in fields(kind)}
    return kind(**{field_names[name]: _value(types[name], below, (*path, name)) for name, below in given.items()})


def _converted(kind: object, setting: Setting, path: tuple[str, ...]) -> object:
    try:
        return convert(setting.value, kind, setting.base)
    except ConversionError as error:
        where = f"{'.'.join(path)} ({setting.where})"
        raise UserError.at(where, found=error.found, expected=error.expected, fix="correct the value") from None
