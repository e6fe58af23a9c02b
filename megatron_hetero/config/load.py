"""Builds nested dataclasses from a YAML file and the command line, with errors that name the source.

A tree of settings has the shape of the YAML file: sections, fields, and keys of mappings. Its leaves are `Setting`
values, which remember their source. Both sources are read into such trees, the trees are merged, and one function
builds the dataclasses from the result.

Mappings (``Mapping[str, T]``) take any key; dataclasses take only their fields.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, Field, dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Any, ClassVar, TypeVar, cast, get_args, get_origin, get_type_hints

import yaml

from megatron_hetero.config.conversion import ConversionError, convert, show
from megatron_hetero.errors import UserError, reason
from megatron_hetero.files.opening import read_text
from megatron_hetero.layout.grammar import did_you_mean

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


def _integer(loader: yaml.SafeLoader, node: yaml.ScalarNode) -> int:
    return int(loader.construct_scalar(node))


def _number(loader: yaml.SafeLoader, node: yaml.ScalarNode) -> float:
    return float(re.sub(r"\.(?=[inIN])", "", loader.construct_scalar(node)))  # Python writes inf and nan without a dot.


_Loader.add_constructor("tag:yaml.org,2002:int", _integer)
_Loader.add_constructor("tag:yaml.org,2002:float", _number)


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
