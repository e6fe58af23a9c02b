"""docs/extending.md speaks of the code as it is: its files, its names, its floors."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from tests.support.floors import FLOORS

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs/extending.md").read_text(encoding="utf-8")
SPANS = sorted(set(re.findall(r"`([^`\n]+)`", TEXT)))
PACKAGE_FILES = [span for span in SPANS if re.fullmatch(r"megatron_hetero/[\w/]+\.py", span)]


@pytest.mark.parametrize("span", [span for span in SPANS if re.search(r"[/.](py)?$|/", span) and "NAME" not in span])
def test_files_and_folders_are_there(span: str) -> None:
    places = [ROOT / span, ROOT / "megatron_hetero" / span]
    assert any(place.exists() for place in places)


@pytest.mark.parametrize("span", [span for span in SPANS if re.fullmatch(r"[A-Z]\w*(\.[a-z]\w*)?|[a-z]+_\w+", span)])
def test_names_are_in_the_files_that_are_named(span: str) -> None:
    """Each is defined in one of the package files that the page names; after a dot its member."""
    name, _, member = span.partition(".")
    found = [node for file in PACKAGE_FILES for node in _defined(ROOT / file) if _name(node) == name]
    assert found, f"{name} is in none of the files that the page names"
    if member:
        assert any(_name(inner) == member for node in found for inner in ast.walk(node))


WAY = re.findall(r"^\| \d+ \| `(\w+)` \| `([^`]+)` \| ([^|]+) \|", TEXT, re.MULTILINE)
"""Type, file and makers of each row of the table of "From file to device"."""
MORE = ("device", "encoder_shards", "token_ids")
"""Files of `data/` on the way whose values have no row."""


def test_at_most_eight_types_lead_from_file_to_device() -> None:
    assert 1 < len(WAY) <= 8
    for name, file, makers in WAY:
        assert name in map(_name, _defined(ROOT / file)), f"{name} is not in {file}"
        functions = re.findall(r"`([\w.]+)`", makers)
        assert functions, f"nothing makes {name}"


def test_no_type_on_the_way_is_left_out() -> None:
    """Values that the files of the table define have a row, or are named below it as what they contain or compute."""
    [section] = re.findall(r"^## From file to device\n(.*?)^## ", TEXT, re.MULTILINE | re.DOTALL)
    named = set(re.findall(r"`(\w+)`", section))
    files = {ROOT / file for _, file, _ in WAY} | {ROOT / f"megatron_hetero/data/{name}.py" for name in MORE}
    values = [node for file in files for node in _defined(file) if isinstance(node, ast.ClassDef) and _is_value(node)]
    assert not sorted(node.name for node in values if node.name not in named)


def _is_value(node: ast.ClassDef) -> bool:
    """Whether a class is public and a dataclass or named tuple."""
    marks = [ast.unparse(each) for each in (*node.decorator_list, *node.bases)]
    return not node.name.startswith("_") and any("dataclass" in mark or mark == "NamedTuple" for mark in marks)


def _defined(file: Path) -> list[ast.stmt]:
    return ast.parse(file.read_text(encoding="utf-8")).body


def _name(node: ast.AST) -> str | None:
    if isinstance(node, ast.ClassDef | ast.FunctionDef):
        return node.name
    if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
        return node.targets[0].id
    return node.target.id if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) else None


def test_the_floors_are_those_that_the_order_is_held_to() -> None:
    rows = re.findall(r"^\| (`[^|]+) \|", TEXT, re.MULTILINE)
    named = [[name.removesuffix(".py").rstrip("/") for name in re.findall(r"`([^`]+)`", row)] for row in rows]
    floors = [floor.split() for floor in FLOORS.strip().split("\n")]
    order = {name: number for number, floor in enumerate(floors) for name in floor}
    assert sorted(name for row in named for name in row) == sorted(order)
    lowest = [min(order[name] for name in row) for row in named]
    highest = [max(order[name] for name in row) for row in named]
    assert all(high < low for high, low in zip(highest, lowest[1:], strict=False))
