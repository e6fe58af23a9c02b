"""The library's public names: one screen, documented, and imported only when they are used."""

from __future__ import annotations

import ast
import inspect
import re
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

import megatron_hetero

ROOT = Path(__file__).parents[2]
GUIDE = (ROOT / "docs/library.md").read_text(encoding="utf-8")
PLANNING = "boundary.ownership boundary.plan layout.graph layout.modules schedule.check schedule.drawing "
PLANNING += "schedule.program schedule.settings schedule.simulator data.token_shards"
"""Modules of the guide that need no torch."""


def rows_of_the_table(head: str) -> list[list[str]]:
    """The cells of a table of the guide."""
    table = re.search(rf"^\| {head} .*?\n\n", GUIDE, re.MULTILINE | re.DOTALL)
    assert table and len(table[0].splitlines()) < 40
    return [line.split("|")[1:-1] for line in table[0].strip().splitlines()[2:]]


def names_by_module() -> dict[str, list[str]]:
    """The second table of the guide. Names of several modules in a row are parted by semicolons."""
    found = {}
    for modules, names in rows_of_the_table("module"):
        homes, parts = re.findall(r"`([\w.]+)`", modules), names.split(";")
        found |= {home: re.findall(r"`(\w+)`", part) for home, part in zip(homes, parts, strict=True)}
    return found


NAMES = {f"megatron_hetero.{home}.{name}": (home, name) for home, names in names_by_module().items() for name in names}
NAMES |= {f"megatron_hetero.{name}": ("", name) for name in megatron_hetero.__all__}


def loaded(statement: str) -> set[str]:
    """The heavy packages that a statement imports in a process of its own."""
    heavy = "'torch', 'megatron.core', 'transformers', 'torch._inductor', 'torch._dynamo'"
    code = f"{statement}; import sys; print([name for name in ({heavy}) if name in sys.modules])"
    return set(ast.literal_eval(subprocess.check_output([sys.executable, "-c", code], text=True, cwd=ROOT)))


def test_the_package_and_what_plans_import_no_torch() -> None:
    modules = ", ".join(f"megatron_hetero.{name}" for name in PLANNING.split())
    assert loaded("from megatron_hetero import Layout, UserError") == loaded(f"import {modules}") == set()


def test_what_runs_imports_no_megatron() -> None:
    """It takes seconds; only a `Topology.collection` needs it, and what is for Megatron's models when it is called."""
    modules = "; ".join(f"import megatron_hetero.{home}" for home in names_by_module())
    assert loaded(f"from megatron_hetero import *; {modules}") == {"torch"}


def test_a_rank_starts_without_the_compiler() -> None:
    assert loaded("import megatron_hetero.train.start") == {"torch", "megatron.core"}


@pytest.mark.parametrize("path", NAMES)
def test_every_name_of_the_guide_is_there_and_documented(path: str) -> None:
    home, name = NAMES[path]
    value = getattr(import_module(f"megatron_hetero.{home}".rstrip(".")), name)
    text = inspect.getdoc(value)
    # What `dataclass` writes where nobody else has.
    assert text and not text.startswith(f"{name}("), f"{name} has no docstring"
    if inspect.isclass(value):
        methods = [m for m in vars(value).values() if inspect.isfunction(m) and not m.__name__.startswith("_")]
        assert not [method.__qualname__ for method in methods if not inspect.getdoc(method)]


def test_public_names_are_listed_once_for_people_for_checkers_and_at_run_time() -> None:
    assert len(megatron_hetero.__all__) == len(set(megatron_hetero.__all__))
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
    named = [name for _, names in rows_of_the_table("purpose") for name in re.findall(r"`(\w+)`", names)]
    assert sorted(named) == sorted(megatron_hetero.__all__)


def test_code_in_the_guide_calls_names_of_the_guide_only() -> None:
    blocks = re.findall(r"^```python\n(.*?)^```", GUIDE, re.MULTILINE | re.DOTALL)
    nodes = [node for block in blocks for node in ast.walk(ast.parse(block))]
    called = {node.func.id for node in nodes if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)}
    of_others = set(
        "CosineAnnealingLR GPTModel LoraConfig ModuleSpec Siglip TransformerConfig "
        "forward_backward fully_shard get_gpt_layer_local_spec get_peft_model len partial range "
        "scatter_to_sequence_parallel_region sum zip".split()
    )
    own = {
        "boundary",
        "encoder",
        "decoder",
        "layer",
        "loss_of",
        "model",
        "run",
        "stage_of",
        "talker",
        "text_loss",
        "to_decoder",
        "to_talker",
        "vision",
    }
    assert called - {name for _, name in NAMES.values()} == own | of_others


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="'megatron_hetero' has no attribute 'Layuot'"):
        megatron_hetero.Layuot  # noqa: B018  # pyright: ignore[reportAttributeAccessIssue]


def test_the_package_says_that_it_is_typed() -> None:
    assert (ROOT / "megatron_hetero/py.typed").is_file()
    assert '"megatron_hetero": ["py.typed"]' in (ROOT / "setup.py").read_text(encoding="utf-8")
