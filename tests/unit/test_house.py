"""The order of the floors: a folder imports from lower floors only, no module imports itself over others, a family is
known to the registry alone.
"""

from __future__ import annotations

import ast
import re
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

from tests.support.floors import FLOORS

PACKAGE = Path(__file__).parents[2] / "megatron_hetero"
FLOOR = {name: number for number, floor in enumerate(FLOORS.split("\n")) for name in floor.split()}


@cache
def modules() -> dict[str, Path]:
    """The files of the package by dotted name, without the package's own."""
    found = {}
    for file in sorted(PACKAGE.rglob("*.py")):
        parts = file.relative_to(PACKAGE).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = file
    del found[""]
    return found


@cache
def imports() -> dict[str, frozenset[str]]:
    """For each module those of the package that it imports, anywhere in it, for type checkers alone too."""
    return {name: frozenset(_imported(ast.parse(file.read_text(encoding="utf-8")))) for name, file in modules().items()}


def _imported(tree: ast.Module) -> set[str]:
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(PACKAGE.name):
            base = (node.module or "").removeprefix(PACKAGE.name).lstrip(".")
            for alias in node.names:
                whole = f"{base}.{alias.name}".lstrip(".")
                found.add(whole if whole in modules() else base)
    return found - {""}


def test_every_folder_has_a_floor() -> None:
    assert {name.partition(".")[0] for name in modules()} == FLOOR.keys()


@pytest.mark.parametrize("name", modules())
def test_imports_come_from_lower_floors(name: str) -> None:
    own = name.partition(".")[0]
    above = [other for other in imports()[name] if (top := other.partition(".")[0]) != own and FLOOR[top] >= FLOOR[own]]
    assert not above


def test_no_module_imports_itself_over_others() -> None:
    try:
        TopologicalSorter(imports()).prepare()
    except CycleError as error:
        pytest.fail(" -> ".join(error.args[1]))


def folders() -> list[Path]:
    return sorted({file.parent for file in modules().values()} - {PACKAGE})


@pytest.mark.parametrize("folder", folders(), ids=lambda folder: str(folder.relative_to(PACKAGE)))
def test_a_folder_says_what_it_holds(folder: Path) -> None:
    assert ast.get_docstring(ast.parse((folder / "__init__.py").read_text(encoding="utf-8")))


def families() -> list[str]:
    return sorted(
        folder.name for folder in (PACKAGE / "models" / "families").iterdir() if (folder / "family.py").is_file()
    )


@pytest.mark.parametrize("family", families())
def test_a_family_is_known_to_the_registry_and_to_families_alone(family: str) -> None:
    own, every = f"models.families.{family}.", "models.families."
    knowing = {
        name for name in modules() if not name.startswith(every) and any(i.startswith(own) for i in imports()[name])
    }
    assert knowing == {"models.registry"}


def test_code_names_no_model() -> None:
    """Outside of `models/families`, but for help texts and comments."""
    named = {}
    for name, file in modules().items():
        if name.startswith("models.families.") or name == "models.registry":
            continue
        tree = ast.parse(file.read_text(encoding="utf-8"))
        words = [node.id for node in ast.walk(tree) if isinstance(node, ast.Name)]
        words += [node.name for node in ast.walk(tree) if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.alias)]
        words += [node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and _is_a_word(node.value)]
        if found := [word for word in map(str, words) if re.search("qwen", word, re.IGNORECASE)]:
            named[name] = found
    assert not named


def _is_a_word(value: object) -> bool:
    return isinstance(value, str) and re.fullmatch(r"[\w.]+", value) is not None


ROOT = PACKAGE.parent


def test_tests_and_benchmarks_share_what_they_measure_with_alone() -> None:
    shared = "benchmarks.measuring"
    wrong = {
        str(file.relative_to(ROOT)): name
        for file in [*(ROOT / "tests").rglob("*.py"), *(ROOT / "benchmarks/measuring").rglob("*.py")]
        for name in _imported_names(ast.parse(file.read_text(encoding="utf-8")))
        if name.startswith("benchmarks" if "tests" in file.parts else ("benchmarks", "tests"))
        if not name.startswith(shared)
    }
    assert not wrong


def test_no_test_module_is_imported() -> None:
    """What several of them need is in a module beside them, or in tests/support."""
    wrong = {
        str(file.relative_to(ROOT)): name
        for folder in ("tests", "benchmarks", "examples", "tools", PACKAGE.name)
        for file in (ROOT / folder).rglob("*.py")
        for name in _imported_names(ast.parse(file.read_text(encoding="utf-8")))
        if name.startswith(("tests.", "benchmarks.")) and any(part.startswith("test_") for part in name.split("."))
        if (ROOT / f"{name.replace('.', '/')}.py").exists()
    }
    assert not wrong


def test_benchmarks_import_the_fake_device_alone_of_the_tests() -> None:
    """Their own tests also import what supports tests."""
    wrong = {
        str(file.relative_to(ROOT)): name
        for file in (ROOT / "benchmarks").rglob("*.py")
        for name in _imported_names(ast.parse(file.read_text(encoding="utf-8")))
        if name.startswith("tests.") and not name.startswith("tests.fake_cuda")
        if not ("tests" in file.relative_to(ROOT).parts and name.startswith("tests.support"))
    }
    assert not wrong


def _imported_names(tree: ast.Module) -> set[str]:
    """The modules that a module imports, anywhere in it, and the names that it takes from them."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found |= {node.module or "", *(f"{node.module}.{alias.name}" for alias in node.names)}
    return found
