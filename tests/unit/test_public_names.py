"""The library's public names: one screen, documented, and imported only when they are used."""

from __future__ import annotations

import ast
import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest

import megatron_hetero

ROOT = Path(__file__).parents[2]
PLANNING = (
    "Layout BoundaryPlan Ownership Schedule Simulation UserError build_schedule own_samples own_tokens plan_boundary "
    "resolve simulate timeline tokens_of"
)


def loaded(statement: str) -> set[str]:
    """The heavy packages that a statement imports in a process of its own."""
    code = (
        f"{statement}; import sys; print([m for m in ('torch', 'megatron.core', 'transformers') if m in sys.modules])"
    )
    return set(ast.literal_eval(subprocess.check_output([sys.executable, "-c", code], text=True, cwd=ROOT)))


def test_the_package_and_what_plans_import_no_torch() -> None:
    names = "; ".join(f"megatron_hetero.{name}" for name in PLANNING.split())
    assert loaded(f"import megatron_hetero; {names}") == set()


def test_what_runs_imports_no_megatron() -> None:
    """It takes seconds; only a `Topology.collection` needs it, and what is for Megatron's models when it is called."""
    names = (
        "Boundary Interpreter Platform Topology boundary_communicators build_optimizers cross finish_gradients guarded "
        "megatron_schedule micro_batch prepare_megatron process_group"
    )
    assert loaded("; ".join(f"from megatron_hetero import {name}" for name in names.split())) == {"torch"}


@pytest.mark.parametrize("name", megatron_hetero.__all__)
def test_every_public_name_is_there_and_documented(name: str) -> None:
    value = getattr(megatron_hetero, name)
    text = inspect.getdoc(value)
    # What `dataclass` writes where nobody else has.
    assert text and not text.startswith(f"{name}("), f"{name} has no docstring"
    if inspect.isclass(value):
        methods = [m for m in vars(value).values() if inspect.isfunction(m) and not m.__name__.startswith("_")]
        assert not [method.__qualname__ for method in methods if not inspect.getdoc(method)]


def test_public_names_are_listed_once_for_people_for_checkers_and_at_run_time() -> None:
    assert list(megatron_hetero.__all__) == sorted(megatron_hetero.__all__)
    assert set(megatron_hetero.__all__) == megatron_hetero._HOME_OF.keys() <= set(dir(megatron_hetero))
    source = (ROOT / "megatron_hetero/__init__.py").read_text(encoding="utf-8")
    imported = {
        (node.module, alias.name)
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("megatron_hetero.")
        for alias in node.names
    }
    assert imported == {(f"megatron_hetero.{home}", name) for name, home in megatron_hetero._HOME_OF.items()}


def test_the_guide_lists_every_public_name_on_one_screen() -> None:
    table = re.search(
        r"^\| purpose .*?\n\n", (ROOT / "docs/library.md").read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL
    )
    assert table and len(table[0].splitlines()) < 40
    named = {name for line in table[0].strip().splitlines()[2:] for name in re.findall(r"`(\w+)`", line.split("|")[2])}
    assert named == set(megatron_hetero.__all__)


def test_code_in_the_guide_calls_public_names_only() -> None:
    blocks = re.findall(
        r"^```python\n(.*?)^```", (ROOT / "docs/library.md").read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL
    )
    nodes = [node for block in blocks for node in ast.walk(ast.parse(block))]
    called = {node.func.id for node in nodes if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)}
    of_others = {"GPTModel", "Siglip", "forward_backward", "fully_shard", "len", "partial", "vars", "zip"}
    own = {"boundary", "encoder", "decoder", "run", "text_loss", "vision"}
    assert called - set(megatron_hetero.__all__) == own | of_others


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="'megatron_hetero' has no attribute 'Layuot'"):
        megatron_hetero.Layuot  # noqa: B018  # pyright: ignore[reportAttributeAccessIssue]


def test_the_package_says_that_it_is_typed() -> None:
    assert (ROOT / "megatron_hetero/py.typed").is_file()
    assert '"megatron_hetero": ["py.typed"]' in (ROOT / "setup.py").read_text(encoding="utf-8")
