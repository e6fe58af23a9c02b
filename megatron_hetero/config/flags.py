"""Reads the command line. Flags are paths of settings: ``--train.iters 20``, ``--data.registry.NAME.images DIR``.

Lists take several values (``--data.datasets a b%50``). ``--MODULE-zero 3`` is short for ``--modules.MODULE.zero 3``:
before the first dot, the first ``-`` ends a module's name. Relative paths start from the current directory.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import MISSING, Field, fields, is_dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple, get_origin

from rich.console import Console
from rich.text import Text

from megatron_hetero.base.environment import LAUNCHER
from megatron_hetero.base.errors import UserError
from megatron_hetero.config.fields import MODULES, NAMED, children, is_leaf, item_type, shown_name
from megatron_hetero.config.load import Setting, Tree, describe, merge, read_yaml, step, tree_of
from megatron_hetero.config.modules import MODULE_NAME, NO_MODULES
from megatron_hetero.config.moved import refuse_moved, settings_of
from megatron_hetero.layout.grammar import MAX_PLANNED, did_you_mean
from megatron_hetero.layout.names import TEXT

_MODULE_FLAG = "--MODULE-"


class EstimateRequest(NamedTuple):
    """A request for an estimate instead of training."""

    world_size: int = 1
    """Number of ranks to estimate for."""
    plot: Path | None = None
    """File to which topology and schedule are drawn, if any."""
    files: bool = False
    """Whether the input files of training must exist."""


PLAN_FLAGS = {
    "--plan": (
        "no value",
        "off",
        "Print parameters, traffic, memory and schedule of the run instead of training.",
    ),
    "--world-size": ("integer", "1", "Number of ranks to plan for."),
    "--plan-files": ("no value", "off", "Fail if weights, annotations or image folders are missing."),
    "--plan-svg": ("path", "none", "Also draw topology and schedule to a .svg or .png file."),
}
"""Flags that are not settings, with their values, defaults and help texts."""


def read_command(argv: Sequence[str], root: type, *, plans: bool) -> tuple[Tree, EstimateRequest | None]:
    """Return the settings of a command line and its ``--config`` file for the dataclass `root`, and the request for an
    estimate if ``--plan`` is given. Flags override the file. ``--help`` prints and exits. `plans`: whether flags of
    section `plan` need ``--plan``.

    Raises:
        UserError: a file is missing or malformed; a name is unknown or old; a flag is given twice, or has too few or
            too many values.
    """
    given = _flags(argv)
    if not given.keys().isdisjoint(("--help", "-h")):
        print_help(root)
        raise SystemExit(0)
    file = Path(_one("--config", given.pop("--config"))) if "--config" in given else None
    request = _estimate_request({flag: given.pop(flag) for flag in PLAN_FLAGS if flag in given})
    content = read_yaml(file) if file else ""
    names = [name for name, _ in settings_of(content)] + [tuple(flag.removeprefix("--").split(".")) for flag in given]
    refuse_moved(f"--config {file} and flags" if file else "command line", names)
    tree: Tree = {}
    for flag, values in given.items():
        _insert(tree, flag, values, root)
    settings = merge(tree_of(content, root, file), tree) if file else tree
    waves = settings.get("schedule", {}).get("waves") if plans else None
    plans = plans and not (isinstance(waves, Setting) and waves.value == "auto")  # A run with `auto` plans.
    if plans and request is None and "plan" in tree:  # A file may have the section for later plans.
        raise _without_plan(f"--plan.{next(iter(tree['plan']))}")
    return settings, request


def _estimate_request(given: Mapping[str, list[str]]) -> EstimateRequest | None:
    """Return the request for an estimate; None without ``--plan``. Raises `UserError`."""
    for flag in ("--plan", "--plan-files"):
        if values := given.get(flag):
            raise UserError.at(flag, found=f"`{values[0]}`", expected="no value", fix=f"write only {flag}")
    if "--plan" not in given:
        for flag in given:
            raise _without_plan(flag)
        return None
    plot = Path(_one("--plan-svg", given["--plan-svg"])).absolute() if "--plan-svg" in given else None
    return EstimateRequest(_world_size(given.get("--world-size", ["1"])), plot, "--plan-files" in given)


def _without_plan(flag: str) -> UserError:
    """Return the error for a flag that has no effect without `--plan`."""
    because, fix = "only a plan uses it", f"add --plan, or remove it and train with {LAUNCHER} --nproc-per-node"
    return UserError.at(flag, found="it without --plan", expected="both", because=because, fix=fix)


def _world_size(values: list[str]) -> int:
    text = _one("--world-size", values)
    if not re.fullmatch("[0-9]+", text) or not 1 <= int(text) <= MAX_PLANNED:
        expected = f"a number of ranks from 1 to {MAX_PLANNED}"
        raise UserError.at("--world-size", found=f"`{text}`", expected=expected, fix="write --world-size 8")
    return int(text)


def _flags(argv: Sequence[str]) -> dict[str, list[str]]:
    """Return the values of each flag in `argv`. Raises `UserError`."""
    values_by_flag: dict[str, list[str]] = {}
    flag = ""
    for word in argv:
        if word.startswith("--") or word == "-h":
            flag, equals, value = word.partition("=")
            if flag in values_by_flag:
                raise UserError.at(flag, problem="given twice", fix="remove one")
            values_by_flag[flag] = [value] if equals else []
        elif not flag:
            expected = "a flag such as --config FILE"
            raise UserError.at("command line", found=f"`{word}`", expected=expected, fix="see --help")
        else:
            values_by_flag[flag].append(word)
    return values_by_flag


def _one(flag: str, values: list[str]) -> str:
    if len(values) != 1:
        found = f"{len(values)} values ({' '.join(values)})" if values else "no value"
        raise UserError.at(flag, found=found, expected="one", fix=f"write {flag} VALUE")
    return values[0]


def _insert(tree: Tree, flag: str, values: list[str], root: type) -> None:
    path = _path_of(flag)
    kind: object = root
    is_short = path[0] == MODULES and not flag.startswith(f"--{MODULES}.")
    for i, name in enumerate(path):
        known = children(kind)
        if is_leaf(kind) or not name or (known is not None and name not in known and (i == 0 or is_short)):
            raise _no_such_flag(flag, root)
        kind = step(kind, name, path[:i], flag)
    if not is_leaf(kind):
        raise _no_such_flag(flag, root)
    *parents, last = path
    for name in parents:
        tree = tree.setdefault(name, {})
    if last in tree:
        raise UserError.at(flag, problem=f"{'.'.join(path)} given twice", fix="remove one")
    value = values if get_origin(kind) is tuple else _one(flag, values)
    tree[last] = Setting(value, flag, Path.cwd())


def _path_of(flag: str) -> tuple[str, ...]:
    """Return the path of the setting that `flag` sets."""
    first, *rest = flag.removeprefix("--").split(".")
    module, dash, setting = first.partition("-")
    named = dash and MODULE_NAME.fullmatch(module) and module not in NO_MODULES
    path = (MODULES, module, setting, *rest) if named else (first, *rest)
    if path[3:4] == ("patterns",) and len(path) > 5:  # Patterns may contain dots.
        path = (*path[:4], ".".join(path[4:-1]), path[-1])
    return path


def _no_such_flag(flag: str, root: type) -> UserError:
    rows = [row.flag for row in flag_rows(root)]
    path, dashed = _path_of(flag), _path_of(flag.replace("_", "-", 1))
    if f"{_MODULE_FLAG}{'.'.join(dashed[2:])}" in rows and not any(row.endswith(f".{flag[2:]}") for row in rows):
        path = dashed  # such as `--vision_parallel`
    first, dot, _ = flag.removeprefix("--").partition(".")
    module = first if dot and first not in (children(root) or {}) else TEXT  # such as `--vision.parallel`
    module = path[1] if path[0] == MODULES and len(path) > 2 else module
    known = [row.replace(_MODULE_FLAG, f"--{module}-") for row in rows]
    below = [row for row in known if row.startswith(f"{flag}.")]
    guess = f" (a section with {', '.join(below)})" if below else did_you_mean(flag, known)
    return UserError.at(flag, problem=f"unknown flag{guess}", fix="see --help")


# --------------------------------------------------------------------------------------- documentation


class FlagRow(NamedTuple):
    """A row of the table of flags in `--help` and docs/configuration.md."""

    flag: str
    """The flag, such as `--train.iters`."""
    values: str
    """The type of the flag's values, as shown to users."""
    default: str
    """The default value, or its description."""
    text: str
    """The help text of the flag."""


@lru_cache
def flag_rows(root: type) -> tuple[FlagRow, ...]:
    """Return a row for each flag, in the order of the configuration."""
    config = FlagRow("--config", "path", "none", "YAML configuration file; flags override it.")
    return config, *(FlagRow(flag, *shown) for flag, shown in PLAN_FLAGS.items()), *_rows(root, "--")


def print_help(root: type) -> None:
    """Print every flag with its values, default and help text."""
    console = Console(highlight=False)
    console.print("Flags override the YAML file, the file overrides the defaults.\n", soft_wrap=True)
    for row in flag_rows(root):
        text = f"  [{row.values}]  (default: {row.default})\n    {row.text}"
        console.print(Text.assemble((row.flag, "bold"), text), soft_wrap=True)


def _rows(kind: object, prefix: str) -> Iterator[FlagRow]:
    assert is_dataclass(kind), "the configuration and its sections are dataclasses"
    types = children(kind) or {}
    for f in fields(kind):
        name = shown_name(f)
        inner, text, default = types[name], f.metadata.get("help", ""), _default(f)
        if is_dataclass(inner):
            yield from _rows(inner, f"{prefix}{name}.")
        elif is_leaf(inner):
            yield FlagRow(f"{prefix}{name}", describe(inner), default, text)
        elif name == MODULES:
            yield from _rows(item_type(inner), _MODULE_FLAG)
        elif is_dataclass(item := item_type(inner)):
            yield from _rows(item, f"{prefix}{name}.{NAMED[name]}.")
        else:
            yield FlagRow(f"{prefix}{name}.{NAMED[name]}", describe(item), default, text)


def _default(f: Field[Any]) -> str:
    if shown := f.metadata.get("shown"):
        return shown
    if f.default is MISSING:
        return "required"
    if isinstance(f.default, bool) or f.default is None:
        return str(f.default).lower()
    return (" ".join(map(str, f.default)) or "none") if isinstance(f.default, tuple) else str(f.default)
