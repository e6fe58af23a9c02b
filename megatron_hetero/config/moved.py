"""Names of settings that have moved: the one table, for files and flags of users, and for records of checkpoints."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from megatron_hetero.base.errors import UserError
from megatron_hetero.config.fields import MODULES, flag_of

Names = tuple[str, ...]
"""The names of a setting and of the sections around it, outermost first."""
_OF_MODEL = ("recompute", "chunk", "patches_per_call", "tp_overlap", "sequence_parallel")
_TABLE = {
    "model.encoders.NAME.FIELD": "modules.NAME.FIELD",
    **{f"model.{name}.MODULE": f"modules.MODULE.{name}" for name in _OF_MODEL},
    "parallel.MODULE": "modules.MODULE.parallel",
    "parallel_layers.MODULE": "modules.MODULE.layers",
    "zero.MODULE": "modules.MODULE.zero",
    "precision.MODULE.FIELD": "modules.MODULE.precision.FIELD",
    "offload.MODULE.FIELD": "modules.MODULE.offload.FIELD",
    "optimizer.lr_vision": "modules.vision.lr",
}
MOVED: Mapping[Names, Names] = {tuple(old.split(".")): tuple(new.split(".")) for old, new in _TABLE.items()}
"""New names of settings by their old names. Words in capitals stand for any name."""
_RATE = ("optimizer", "lr_vision")
"""The learning rate of all encoders, each of which has its own now."""
_EMPTY = ({}, "", "null", "~")
"""Values of settings in files that say nothing."""
_ALLOWED = ("checkpoint", "allow_changes")
"""The setting whose value `model.encoders` is now `modules`."""


def new_names(names: Names) -> Names | None:
    """The new names of a setting, or of the settings in a section; None if it has not moved."""
    for old, new in MOVED.items():
        if _agree(old, names) and len(names) >= sum(not word.isupper() for word in old):
            known = dict(zip(old, names, strict=False))
            return *(known.get(word, word) if word.isupper() else word for word in new), *names[len(old) :]
    return None


def _agree(pattern: Names, names: Names) -> bool:
    return all(word.isupper() or word == name for word, name in zip(pattern, names, strict=False))


def _is_section(names: Names) -> bool:
    """Whether settings whose names or values have moved are below these names."""
    return any(len(names) < len(old) and _agree(old, names) for old in (*MOVED, _ALLOWED))


def settings_of(content: object, names: Names = ()) -> Iterator[tuple[Names, object]]:
    """Names and values in nested mappings; what is below a setting or a section that has not moved is one value."""
    if isinstance(content, Mapping) and content and _is_section(names):
        for name, below in content.items():
            yield from settings_of(below, (*names, name))
    else:
        yield names, content


def refuse_moved(where: str, settings: Iterable[tuple[Names, object]]) -> None:
    """Check that no setting has its old name. Raises one `UserError` with all old and new names."""
    settings = list(settings)
    empty = [".".join(names) for names, value in settings if value in _EMPTY and _renamed(names, value)]
    renamed = [text for names, value in settings if value not in _EMPTY and (text := _renamed(names, value))]
    if number := len(renamed) + len(empty):
        why = "all settings of a module are in its record in `modules`"
        fixes = [f"rename {', '.join(renamed)}"] * bool(renamed) + [f"remove {', '.join(empty)} (empty)"] * bool(empty)
        raise UserError.at(where, problem=f"{number} old name{'s' * (number > 1)}", because=why, fix="; ".join(fixes))


def _renamed(names: Names, value: object) -> str:
    """Old and new name of a setting; empty if neither it nor its value has moved."""
    old, new = ".".join(names), new_names(names)
    if new is not None:
        every = ", and lr of each further encoder" if names == _RATE else ""
        return f"{old} -> {'.'.join(new)} ({flag_of('.'.join(new))}){every}"
    allowed = value if names == _ALLOWED and isinstance(value, list) else ()
    return f"{old} model.encoders -> modules" if "model.encoders" in allowed else ""


def name_today(name: str) -> str:
    """The name that a setting has now, with dots."""
    return ".".join(new_names(tuple(name.split("."))) or (name,))


def translated(config: Mapping[str, Any]) -> dict[str, Any]:
    """A recorded configuration under the new names, unchanged if it has them. Malformed sections raise `TypeError` or
    `AttributeError`.
    """
    encoders = (config.get("model") or {}).get("encoders") or ()
    new: dict[str, Any] = {MODULES: {name: {**row} for name, row in (config.get(MODULES) or {}).items()}}
    for names, value in settings_of(config):
        moved = new_names(names)
        if moved is not None and _is_section(names):
            if value or names[:-1] == ("model", "encoders"):
                raise TypeError(f"{'.'.join(names)} is no section")
        elif names[:1] not in ((), (MODULES,)):
            _put(new, moved or names, value)
        for name in encoders if names == _RATE else ():
            _put(new, (MODULES, name, "lr"), value)
    return new


def _put(tree: dict[str, Any], names: Names, value: object) -> None:
    for name in names[:-1]:
        tree = tree.setdefault(name, {})
    tree[names[-1]] = value
