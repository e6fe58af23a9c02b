"""Old names of settings: refused in files and flags of users, translated in records of checkpoints."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from megatron_hetero.base.errors import UserError
from megatron_hetero.config.fields import MODULES, flag_of

Names = tuple[str, ...]
"""Names of a setting and of the sections around it, outermost first."""
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
"""New names of settings, by old name. Words in capitals stand for any name."""
_RATE = ("optimizer", "lr_vision")
"""The former learning rate of all encoders; each encoder now has a separate rate."""


def new_names(names: Names) -> Names | None:
    """Return the new names of a setting, or of the settings in a section; None if it has not moved."""
    for old, new in MOVED.items():
        if _agree(old, names) and len(names) >= sum(not word.isupper() for word in old):
            known = dict(zip(old, names, strict=False))
            return *(known.get(word, word) if word.isupper() else word for word in new), *names[len(old) :]
    return None


def _agree(pattern: Names, names: Names) -> bool:
    return all(word.isupper() or word == name for word, name in zip(pattern, names, strict=False))


def _is_section(names: Names) -> bool:
    """Return whether `names` is a section that contains settings that have moved."""
    return any(len(names) < len(old) and _agree(old, names) for old in MOVED)


def settings_of(content: object, names: Names = ()) -> Iterator[tuple[Names, object]]:
    """Yield names and values of settings in nested mappings; each section without moved settings is one value."""
    if isinstance(content, Mapping) and content and _is_section(names):
        for name, below in content.items():
            yield from settings_of(below, (*names, name))
    else:
        yield names, content


def refuse_moved(where: str, names: Iterable[Names]) -> None:
    """Check that no setting has its old name. Raises one `UserError` with all old and new names."""
    if renamed := [f"{'.'.join(old)} -> {_shown(old, new)}" for old in names if (new := new_names(old)) is not None]:
        problem = f"{len(renamed)} old name{'s' * (len(renamed) > 1)}"
        why = "all settings of a module are in its record in `modules`"
        raise UserError.at(where, problem=problem, because=why, fix=f"rename {', '.join(renamed)}")


def _shown(old: Names, new: Names) -> str:
    every = ", and lr of each further encoder" if old == _RATE else ""
    return f"{'.'.join(new)} ({flag_of('.'.join(new))}){every}"


def name_today(name: str) -> str:
    """Return the current name of a setting with a dotted name."""
    return ".".join(new_names(tuple(name.split("."))) or (name,))


def translated(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a recorded configuration under new names. Malformed sections raise `TypeError` or `AttributeError`."""
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
