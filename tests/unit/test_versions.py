"""The ranges in setup.py are those whose ends `make test-versions` tests, and pages have what it found."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

from tests import versions
from tools import names

SETUP = versions.ROOT / "setup.py"
OLDEST = versions.ROWS[0]
SUPPORTED = ("torch", "megatron-core", "transformers")


def _setup(name: str) -> ast.expr:
    """What setup.py gives for the keyword `name`."""
    nodes = ast.walk(ast.parse(SETUP.read_text("utf-8")))
    (value,) = (node.value for node in nodes if isinstance(node, ast.keyword) and node.arg == name)
    return value


def _required() -> dict[str, Requirement]:
    return {(r := Requirement(text)).name: r for text in ast.literal_eval(_setup("install_requires"))}


def _pinned(row: versions.Row) -> dict[str, Version]:
    return {name: Version(version) for name, version in (pin.split("==") for pin in row.pins)}


def _constraints(python: str) -> list[tuple[str, Version]]:
    """The names and versions in constraints.txt for a version of Python."""
    lines = (versions.ROOT / "constraints.txt").read_text("utf-8").splitlines()
    wanted = [Requirement(line) for line in lines if not line.startswith("#")]
    own = [r for r in wanted if r.marker is None or r.marker.evaluate({"python_version": python})]
    return [(r.name, Version(next(iter(r.specifier)).version)) for r in own]


def test_the_lower_ends_are_the_oldest_that_are_tested() -> None:
    lower = {
        name: Version(bound.version)
        for name, requirement in _required().items()
        for bound in requirement.specifier
        if bound.operator == ">="
    }
    lower.pop("triton")  # torch brings its own, exactly.
    assert lower == {name: version for name, version in _pinned(OLDEST).items() if name != "pydantic"}
    assert ast.literal_eval(_setup("python_requires")) == f">={OLDEST.python}"


def test_the_upper_ends_are_the_newest_that_are_tested() -> None:
    required, newest = _required(), dict(_constraints("3.12"))
    for name in SUPPORTED:
        following = f"{newest[name].major}.{newest[name].minor + 1}"
        assert f"<{following}" in {str(bound) for bound in required[name].specifier}, name


@pytest.mark.parametrize("python", ["3.11", "3.12", "3.13"])
def test_each_python_has_one_version_of_each_package_and_a_row(python: str) -> None:
    pinned = [name for name, _ in _constraints(python)]
    assert len(pinned) == len(set(pinned))
    assert [row.name for row in versions.ROWS if row.pins == versions.TESTED and row.python == python]


@pytest.mark.parametrize("page", versions.PAGES)
def test_pages_have_the_recorded_tables(page: str) -> None:
    text = (versions.ROOT / page).read_text("utf-8")
    assert text == versions.with_tables(page, text), "run `make test-versions`"


def test_the_record_has_every_row_and_all_are_good() -> None:
    assert [result.row for result in versions.recorded()] == [row.name for row in versions.ROWS]
    assert all(result.good for result in versions.recorded())


def test_one_file_imports_megatron_core() -> None:
    """But for the layouts of `parallel_state`, which the package of layouts reads by itself."""
    importing = {path for path in names.PACKAGE.rglob("*.py") if "megatron.core" in _imported(path)}
    assert importing == {names.PACKAGE / name for name in ("groups/megatron.py", "layout/layout.py")}


def _imported(path: Path) -> str:
    modules = []
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        modules += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        modules += [node.module] if isinstance(node, ast.ImportFrom) and node.module else []
    return " ".join(modules)


def test_names_are_found_and_missed(tmp_path: Path) -> None:
    package = tmp_path / "pack"
    package.mkdir()
    (package / "a.py").write_text(
        "import torch\nfrom megatron.core import tensor_parallel as tp\nfrom torch._compile import _nothing\n"
        "tp.all_to_all\ntp.not_there\ntorch.cat\ntorch._C._not_there\n"
    )
    found = names.names(package)
    core = "megatron.core.tensor_parallel"
    mine = {name for name, files in found.items() if files}
    assert mine == {f"{core}.all_to_all", f"{core}.not_there", "torch._C._not_there", "torch._compile._nothing"}
    assert names.missing(sorted(mine)) == sorted(mine - {f"{core}.all_to_all"})


def test_a_row_is_good_only_if_its_tests_ran_and_passed() -> None:
    assert versions.Result("row", passed=3, skipped=1).good
    assert not versions.Result("row").good
    assert not versions.Result("row", passed=3, failed=1).good
    assert not versions.Result("row", passed=3, problem="pytest ended with status 2").good


def test_an_interpreter_that_is_not_there_is_named(tmp_path: Path) -> None:
    row = versions.Row("future", "3.99", ("torch==2.11.0",))
    result = versions.run(row, tmp_path, "dev", ("tests",))
    assert result.problem == "no python3.99 on PATH"
    assert "no python3.99 on PATH" in versions.table([result])


def test_failing_and_missing_tests_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the environment of these tests in place of a row's."""
    monkeypatch.setattr(versions, "environment", lambda *_: None)
    row = versions.Row("row", "3.11", ())
    (tmp_path / "row" / "bin").mkdir(parents=True)
    python = tmp_path / "row" / "bin" / "python"
    python.write_text(f'#!/bin/sh\nexec {versions.sys.executable} "$@"\n')
    python.chmod(0o755)
    case = tmp_path / "test_case.py"
    case.write_text("import pytest\ndef test_a(): pass\ndef test_b(): assert 0\ndef test_c(): pytest.skip('x')\n")
    found = versions.run(row, tmp_path, "dev", (str(case),))
    assert (found.passed, found.failed, found.skipped, found.problem) == (1, 1, 1, None)
    missing = versions.run(row, tmp_path, "dev", (f"{case}::test_d",))
    assert not missing.good and missing.problem == "pytest ended with status 4"


def test_the_subset_exists() -> None:
    assert not [name for name in versions.SUBSET if not (versions.ROOT / name.partition("::")[0]).exists()]
