"""The ranges in setup.py are those whose ends `make test-versions` tests."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

from tests import versions

SETUP = versions.ROOT / "setup.py"
OLDEST, NEWEST = versions.ROWS
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


def test_the_lower_ends_are_the_oldest_that_are_tested() -> None:
    lower = {
        name: Version(bound.version)
        for name, requirement in _required().items()
        for bound in requirement.specifier
        if bound.operator == ">="
    }
    assert lower == _pinned(OLDEST)
    assert ast.literal_eval(_setup("python_requires")) == f">={OLDEST.python}"


def test_the_upper_ends_are_the_newest_that_are_tested() -> None:
    required, newest = _required(), _pinned(NEWEST)
    assert newest.keys() == set(SUPPORTED)
    for name, version in newest.items():
        following = f"{version.major}.{version.minor + 1}"
        assert f"<{following}" in {str(bound) for bound in required[name].specifier}, name


def test_the_installation_page_has_the_versions() -> None:
    text = (versions.ROOT / "docs/installation.md").read_text("utf-8")
    tested = {
        name: version
        for name, _, version in (
            line.partition("==") for line in (versions.ROOT / "constraints.txt").read_text("utf-8").splitlines()
        )
    }
    for name in SUPPORTED:
        row = f"| {name} | {_pinned(OLDEST)[name]} | {tested[name]} | {_pinned(NEWEST)[name]} |"
        assert row in text, f"docs/installation.md lacks {row}"


def test_a_row_is_good_only_if_its_tests_ran_and_passed() -> None:
    assert versions.Result(OLDEST, passed=3, skipped=1).good
    assert not versions.Result(OLDEST).good
    assert not versions.Result(OLDEST, passed=3, failed=1).good
    assert not versions.Result(OLDEST, passed=3, problem="pytest ended with status 2").good


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
