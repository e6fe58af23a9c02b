"""Fields of the configuration's dataclasses: help texts, bounds, and checks of their values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import Field, field, fields, is_dataclass
from typing import Any, NewType, TypeVar, cast, get_args, get_origin, get_type_hints

from megatron_hetero.base.errors import UserError

T = TypeVar("T")
NAMED = {"registry": "NAME", "fields": "FIELD", "patterns": "PATTERN"}
"""Mappings whose keys the user chooses, each with the placeholder for a key in help texts."""
MODULES = "modules"
"""Name of the mapping of modules, whose settings have short flags: `--MODULE-zero` for `modules.MODULE.zero`."""
Pattern = NewType("Pattern", str)
"""The absolute path of a file or folder, with wildcards, or the URL of an object in a store."""


def option(
    default: T,
    text: str,
    shown: str = "",
    *,
    at_least: float | None = None,
    above: float | None = None,
    at_most: float | None = None,
) -> T:
    """Return a dataclass field with a default and a help text. `shown`: the default as help shows it, if different. The
    bounds apply to the field's number, or to the numbers in its mapping.
    """
    bounds = {"≥": at_least, ">": above, "≤": at_most}
    metadata = {"help": text, "shown": shown, "bounds": {sign: b for sign, b in bounds.items() if b is not None}}
    if isinstance(default, dict):
        return cast(T, field(default_factory=lambda: dict(default), metadata=metadata, hash=False))
    return field(default=default, metadata=metadata)


def required(text: str) -> Any:
    """Return a required dataclass field with its help text."""
    return field(metadata={"help": text})


class Section:
    """Base class of the dataclasses of settings."""

    @property
    def given(self) -> tuple[str, ...]:
        """Names of settings that differ from their defaults. The section must have no required settings."""
        assert is_dataclass(self), "sections are dataclasses"
        default = type(self)()
        return tuple(f.name for f in fields(self) if getattr(self, f.name) != getattr(default, f.name))

    def _check(self, section: str) -> None:
        """Check the section's values against each other. Raises `UserError`, which names `section`."""


def check_values(section: Section, path: str = "") -> None:
    """Check the bounds of all numbers in a section and its subsections, then the rules of each section, innermost
    first.

    Raises:
        UserError: for the first invalid value.
    """
    assert is_dataclass(section), "sections are dataclasses"
    for f in fields(section):
        name = f"{path}.{shown_name(f)}".removeprefix(".")
        value = getattr(section, f.name)
        items = {f"{name}.{key}": item for key, item in value.items()} if isinstance(value, Mapping) else {name: value}
        for where, item in items.items():
            if isinstance(item, Section):
                check_values(item, where)
            elif isinstance(item, int | float):
                _check_bounds(where, item, f.metadata.get("bounds", {}))
    section._check(path)


def _check_bounds(name: str, value: float, bounds: Mapping[str, float]) -> None:
    for sign, bound in bounds.items():
        if not {"≥": value >= bound, ">": value > bound, "≤": value <= bound}[sign]:
            expected = " and ".join(f"{sign} {bound}" for sign, bound in bounds.items())
            raise wrong(name, value, expected, "", f"{'lower' if sign == '≤' else 'raise'} or remove it")


def wrong(name: str, found: object, expected: str, because: str, fix: str) -> UserError:
    """Return the error for a setting with a wrong value."""
    return UserError.at(f"{name} ({flag_of(name)})", found=str(found), expected=expected, because=because, fix=fix)


def unused(name: str, found: object, because: str, fix: str) -> UserError:
    """Return the error for a setting without effect: a user's setting is never silently ignored."""
    return wrong(name, found, "no value", because, fix)


def check_pixels(section: str, low: int | None, high: int | None) -> None:
    """Check that `min_pixels` of a section is no larger than its `max_pixels`. Raises `UserError`."""
    if low is not None and high is not None and low > high:
        fix = f"lower it, or raise {section}.max_pixels"
        raise wrong(f"{section}.min_pixels", low, f"≤ {section}.max_pixels = {high}", "no image could fit", fix)


def flag_of(name: str) -> str:
    """Return the flag of a setting, such as `--train.iters`, or `--text-zero` for `modules.text.zero`."""
    section, _, rest = name.partition(".")
    module, dot, setting = rest.partition(".")
    return f"--{module}-{setting}" if section == MODULES and dot else f"--{name}"


def children(kind: object) -> dict[str, object] | None:
    """Return the fields of a dataclass type with their types; None for any other type."""
    if not is_dataclass(kind):
        return None
    hints = get_type_hints(kind)
    return {shown_name(f): hints[f.name] for f in fields(kind)}


def shown_name(f: Field[Any]) -> str:
    """Return a field's name in YAML and flags. In code, Python keywords such as `async` have a trailing underscore."""
    return f.name.removesuffix("_")


def item_type(kind: object) -> object:
    """Return the type of a mapping's values; None for any other type."""
    return get_args(kind)[1] if get_origin(kind) is Mapping else None


def is_leaf(kind: object) -> bool:
    """Return whether values of a type have no settings below them: it is neither a dataclass nor a mapping."""
    return not is_dataclass(kind) and item_type(kind) is None
