"""A configuration with some settings changed, and the flags that change them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import is_dataclass, replace
from typing import Any

from megatron_hetero.config.load import children, item_type
from megatron_hetero.config.schema import Config

Settings = Mapping[str, object]
"""Values by dotted name, such as `{"model.recompute.text": "full"}`; None where a default is to be chosen."""


def with_settings(config: Config, settings: Settings) -> Config:
    """The configuration with these settings changed, all at once. Raises `UserError` where they do not go together."""
    return _changed(config, settings, Config)


def _changed(node: Any, settings: Settings, kind: Any) -> Any:
    """`node`, a section or a mapping of names, with what is below it changed. The name of a node itself is empty.
    `kind`: its type, which says what a new name of a mapping stands for.
    """
    if "" in settings:
        return settings[""]
    below: dict[str, dict[str, object]] = {}
    for name, value in settings.items():
        first, _, rest = name.partition(".")
        below.setdefault(first, {})[rest] = value
    item = item_type(kind)
    if item is not None:
        new = item() if is_dataclass(item) and isinstance(item, type) else None
        return {**node, **{name: _changed(node.get(name, new), inner, item) for name, inner in below.items()}}
    kinds = children(kind) or {}
    return replace(node, **{name: _changed(getattr(node, name), inner, kinds[name]) for name, inner in below.items()})


def flags_of(settings: Settings) -> str:
    """The settings as flags of the command line."""
    return " ".join(f"{_flag(name)} {_text(value)}" for name, value in settings.items())


def _flag(name: str) -> str:
    section, _, module = name.partition(".")
    return f"--{module}-parallel" if section == "parallel" else f"--{name}"


def _text(value: object) -> str:
    if isinstance(value, tuple):
        return " ".join(map(_text, value))
    return str(value).lower() if value is None or isinstance(value, bool) else str(value)
