"""Records, for the stand-in in `tests/support/stand_ins`, which names that Megatron-Core uses exist in which version of
Transformer Engine, and the parameters of the methods that the stand-in has.

    pip download --no-deps -d WHEELS transformer-engine==2.20.2 megatron-core==0.19.2       # and each other version
    python -m tools.te_signatures WHEELS
"""

from __future__ import annotations

import ast
import json
import re
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

from packaging.utils import parse_wheel_filename

STAND_IN = Path(__file__).parents[1] / "tests/support/stand_ins/transformer_engine_2/transformer_engine"
Modules = dict[str, ast.Module]


def modules(wheel: Path, folder: str) -> Modules:
    """Modules of a wheel in a folder, by name."""
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if name.startswith(f"{folder}/") and name.endswith(".py")]
        return {re.sub(r"(/__init__)?\.py$", "", n).replace("/", "."): ast.parse(archive.read(n)) for n in names}


def taken(megatron: Modules) -> Iterator[str]:
    """Dotted names that Megatron-Core imports from Transformer Engine, or finds in it."""
    for node in (node for tree in megatron.values() for node in ast.walk(tree)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Attribute):
            yield re.sub(r"^te\.(?=pytorch|common)", "transformer_engine.", ast.unparse(node))


def place(dotted: str, known: set[str]) -> str:
    """A dotted name as `module:name`, with the longest of the `known` modules."""
    names = dotted.split(".")
    length = max(n for n in range(1, len(names) + 1) if ".".join(names[:n]) in known)
    return f"{'.'.join(names[:length])}:{''.join(names[length : length + 1])}"


def signature(engine: Modules, place: str) -> str | None:
    """The parameters of a method, an empty text for another name or a module, None if it does not exist."""
    module, _, name = place.partition(":")
    if module not in engine or (name and "." not in name and name not in _names(engine, module)):
        return None
    if "." not in name:
        return ""
    node: ast.AST = engine[module]
    for inner in name.split("."):
        node = next(child for child in ast.iter_child_nodes(node) if getattr(child, "name", "") == inner)
    assert isinstance(node, ast.FunctionDef)
    for argument in ast.walk(node.args):
        if isinstance(argument, ast.arg):
            argument.annotation = None
    return ast.unparse(node.args)


def _names(engine: Modules, module: str) -> set[str]:
    """Names that a module binds, including names of star imports."""
    names: set[str] = set()
    for node in ast.walk(engine.get(module) or ast.Module([], [])):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, ast.ImportFrom) and node.names[0].name == "*":
            # Star imports are in packages, from their submodules.
            names |= _names(engine, f"{module}.{node.module}" if node.level else f"{node.module}")
        elif isinstance(node, ast.ImportFrom):
            names |= {alias.asname or alias.name for alias in node.names}
    return names


def record(folder: Path, stand_in: Path) -> dict[str, dict[str, str | None]]:
    """The `signature` of each name in each version, of the wheels in a folder, in which it changed."""
    engines: dict[str, Modules] = {}
    dotted: set[str] = set()
    for wheel in sorted(folder.glob("*.whl"), key=lambda wheel: parse_wheel_filename(wheel.name)[1]):
        if wheel.name.startswith("megatron_core-"):
            dotted |= {name for name in taken(modules(wheel, "megatron")) if name.startswith("transformer_engine.")}
        else:
            engines[str(parse_wheel_filename(wheel.name)[1])] = modules(wheel, "transformer_engine")
    known = {module for engine in engines.values() for module in engine}
    places = {place(name, known) for name in dotted}
    for path in stand_in.glob("*.py"):
        signed = re.findall(r'@signed\(\s*"([^"]+)"', path.read_text())
        places |= {f"transformer_engine.pytorch.{method}" for method in signed}
    result: dict[str, dict[str, str | None]] = {}
    for name in sorted(places):
        last = None
        for version, engine in engines.items():
            if (now := signature(engine, name)) != last:
                result.setdefault(name, {})[version] = last = now
    return result


if __name__ == "__main__":
    text = json.dumps(record(Path(sys.argv[1]), STAND_IN), indent=1)
    (STAND_IN / "recorded.json").write_text(re.sub(r"\{\s+(.*)\s+\}", r"{\1}", text) + "\n")
