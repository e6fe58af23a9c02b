"""Files around the code agree with it: the workflow, images, templates, citation and changes."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")
TARGETS = set(re.findall(r"^([a-z-]+):", MAKEFILE, re.MULTILINE))
DOCKERFILE = (ROOT / "docker/Dockerfile").read_text(encoding="utf-8")
PAGES = ("SECURITY.md", "CHANGELOG.md", "CONTRIBUTING.md", ".github/pull_request_template.md")


def _loaded(path: str) -> Any:
    return yaml.safe_load((ROOT / path).read_text(encoding="utf-8"))


def _setup(name: str) -> Any:
    """What setup.py gives for the keyword `name`."""
    nodes = ast.walk(ast.parse((ROOT / "setup.py").read_text(encoding="utf-8")))
    (value,) = (node.value for node in nodes if isinstance(node, ast.keyword) and node.arg == name)
    return ast.literal_eval(value)


def test_the_workflow_makes_targets_that_exist_on_both_ends_of_python() -> None:
    job = _loaded(".github/workflows/ci.yml")["jobs"]["make"]
    matrix = job["strategy"]["matrix"]
    runs = [(python, target) for python in matrix["python"] for target in matrix["target"]]
    runs += [(each["python"], each["target"]) for each in matrix["include"]]
    commands = " ".join(step.get("run", "") for step in job["steps"])
    named = {target for _, target in runs} | set(re.findall(r"make ([a-z]\S*)", commands))
    assert named <= TARGETS and {"lint", "types", "unit", "functional", "release-check"} <= named
    assert {python for python, _ in runs} == {"3.11", "3.13"}
    assert len(runs) == len(set(runs)), "a row that is included twice runs twice"
    assert _loaded(".github/workflows/ci.yml")["permissions"] == {"contents": "read"}


def test_images_are_made_by_the_makefile_and_run_as_a_user() -> None:
    lines = re.sub(r"\\\n\s*", "", DOCKERFILE).splitlines()
    assert [line.split()[-1] for line in lines if line.startswith("FROM")] == ["base", "cpu", "cuda"]
    as_root = " ".join(lines[: lines.index("USER 1000")])
    assert "pip install" not in as_root and "make venv" not in as_root
    assert sum("make venv" in line for line in lines if line.startswith("RUN")) == 2
    whole = [number for number, line in enumerate(lines) if line.endswith(" . .")]
    assert all("make venv" in lines[number - 1] for number in whole) and len(whole) == 2, "edits install nothing"
    as_users = [line.split()[1] for line in lines if line.startswith("USER")]
    assert as_users == ["1000", "root", "1000"] and "ibverbs-providers libibverbs1 librdmacm1" in DOCKERFILE
    extras = {extra for each in re.findall(r"ARG EXTRAS=(\S+)", DOCKERFILE) for extra in each.split(",")}
    assert extras <= _setup("extras_require").keys()
    assert "PYTHON ?=" in MAKEFILE and "EXTRAS :=" in MAKEFILE, "the images set them"
    ignored = (ROOT / "docker/Dockerfile.dockerignore").read_text(encoding="utf-8").split()
    assert not {"megatron_hetero", "examples", "tests", "docs"}.intersection(ignored)


@pytest.mark.parametrize("form", ["bug", "feature"])
def test_forms_of_issues(form: str) -> None:
    values = _loaded(f".github/ISSUE_TEMPLATE/{form}.yml")
    assert {"name", "description", "body"} <= values.keys()
    fields = [each for each in values["body"] if each["type"] != "markdown"]
    assert len({each["id"] for each in fields}) == len(fields)
    assert all(each["attributes"]["label"] for each in fields)


@pytest.mark.parametrize("page", PAGES)
def test_what_pages_name_is_there(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    for target in re.findall(r"\]\(([^)#]+)", text):
        assert (ROOT / page).parent.joinpath(target).exists(), target
    assert set(re.findall(r"`make ([a-z-]+)", text)) <= TARGETS


def test_the_version_is_one() -> None:
    version, citation = _setup("version"), _loaded("CITATION.cff")
    assert citation["version"] == version and citation["license"] == _setup("license")
    assert {"cff-version", "message", "title", "authors"} <= citation.keys()
    assert f"\n## {version} " in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
