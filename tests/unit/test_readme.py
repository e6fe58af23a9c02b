"""README and docs agree with the code: flags, commands, links, examples.

`python -m tests.unit.test_readme` writes the table of flags into docs/configuration.md, and the measured times of
benchmarks/results/pictures.md into the README.
"""

from __future__ import annotations

import doctest
import json
import re
from pathlib import Path

import pytest
import yaml

from megatron_hetero.config.schema import load_config
from megatron_hetero.data.validation import item_fields, validate_record
from tests.support.flag_table import flag_table_markdown

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"
FLAGS = ROOT / "docs" / "configuration.md"
MAX_LINES = 150
"""Limit of the README; what is longer belongs in docs/."""
PAGES = [README, ROOT / "CONTRIBUTING.md", ROOT / "benchmarks/README.md", *sorted((ROOT / "docs").glob("*.md"))]
BEGIN, END = "<!-- flags:begin -->\n", "<!-- flags:end -->"
MEASURED = ROOT / "benchmarks/results/pictures.md"
MEASURED_BEGIN, MEASURED_END = "<!-- pictures:begin -->\n", "<!-- pictures:end -->"
FIX = "run `make readme`"


def _replaced(text: str, begin: str, between: str, end: str) -> str:
    before, _, rest = text.partition(begin)
    return before + begin + between + end + rest.partition(end)[2]


def _with_table(text: str) -> str:
    return _replaced(text, BEGIN, flag_table_markdown(), END)


def _with_measured(text: str) -> str:
    """The README with the first table of the measurement."""
    first = re.search(r"^(\|.*\n)+", MEASURED.read_text(encoding="utf-8"), re.MULTILINE)
    assert first
    return _replaced(text, MEASURED_BEGIN, first[0], MEASURED_END)


def _blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)


def _named(page: Path) -> str:
    return str(page.relative_to(ROOT))


def _anchors(page: Path) -> set[str]:
    headings = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_the_table_of_flags_is_what_the_code_says() -> None:
    text = FLAGS.read_text(encoding="utf-8")
    assert text.count(BEGIN) == text.count(END) == 1
    assert text == _with_table(text), FIX


def test_the_measured_times_are_those_of_the_benchmark() -> None:
    text = README.read_text(encoding="utf-8")
    assert text.count(MEASURED_BEGIN) == text.count(MEASURED_END) == 1
    assert text == _with_measured(text), FIX


def test_the_readme_is_short() -> None:
    assert len(README.read_text(encoding="utf-8").splitlines()) <= MAX_LINES


@pytest.mark.parametrize("page", PAGES, ids=_named)
def test_flags_named_in_the_text_exist(page: Path) -> None:
    text = page.read_text(encoding="utf-8").replace(flag_table_markdown(), "")
    known = re.findall(r"`--([a-zA-Z_.-]+)`", flag_table_markdown())
    known += [
        "modules.MODULE.FIELD",
        "MODULE-FIELD",
        "vision-hidden",
        "vision-heads",
    ]  # The last are of benchmarks.step.
    module = "(?:vision|text|detail|encoder|decoder|MODULE)"
    patterns = [re.escape(flag).replace("NAME", r"[\w-]+").replace("MODULE", module) for flag in known]
    ours = r"(?:[a-z_]+\.|(?:vision|text|detail|MODULE)-)[a-zA-Z_.-]+|[a-z]+-parallel"
    named = set(re.findall(rf"(?<![\w-])--({ours})", text))
    assert not [flag for flag in named if not any(re.fullmatch(pattern, flag.rstrip(".")) for pattern in patterns)]


@pytest.mark.parametrize("page", PAGES, ids=_named)
def test_links_lead_somewhere(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    for target in re.findall(r"\]\(([^)]+)\)", text):
        name, _, anchor = target.partition("#")
        linked = page.parent / name if name else page
        assert linked.exists() and (not anchor or anchor in _anchors(linked)), target
    for path in re.findall(r"(?:examples|docs|tests|megatron_hetero)/[\w/.]*\w", text):
        assert (ROOT / path).exists(), path


@pytest.mark.parametrize("page", PAGES, ids=_named)
def test_python_files_named_in_the_text_exist(page: Path) -> None:
    files = [str(file) for folder in ("megatron_hetero", "tests", "examples") for file in (ROOT / folder).rglob("*.py")]
    files += map(str, ROOT.glob("*.py"))
    for name in re.findall(r"`([\w/.]+\.py)`", page.read_text(encoding="utf-8")):
        assert any(file.endswith(f"/{name}") for file in files), name


def test_pages_and_headings_named_in_the_code_exist() -> None:
    for file in [*(ROOT / "megatron_hetero").rglob("*.py"), *(ROOT / "examples").rglob("*.*")]:
        if file.suffix == ".pyc":
            continue
        text = " ".join(file.read_text(encoding="utf-8").split())
        for page, heading in re.findall(r'docs/(\w+\.md)(?:, "([^"]+)")?', text):
            anchor = re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")
            anchors = {re.sub(r"^\d+-", "", anchor) for anchor in _anchors(ROOT / "docs" / page)}
            assert not anchor or anchor in anchors, f"{file}: {page}, {heading}"


def test_make_targets_named_in_the_text_exist() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    for page in PAGES:
        named = set(re.findall(r"(?:`|^ +)make ([a-z-]+)", page.read_text(encoding="utf-8"), re.MULTILINE))
        assert named <= targets, page


def test_ci_runs_the_test_command_of_the_contributors_guide() -> None:
    assert "\n    make test " in (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    assert "make test" in (ROOT / ".ci" / "run").read_text(encoding="utf-8")


def test_records_in_the_text_are_valid() -> None:
    found = [json.loads(block) for page in PAGES for block in _blocks(page, "json")]
    records = [record for item in found for record in (item if isinstance(item, list) else [item])]
    assert records
    for record in records:
        validate_record(record, "README", folder=Path("/images"), fields=item_fields({"vision": ("image", "video")}))


@pytest.mark.parametrize("page", PAGES, ids=_named)
def test_yaml_in_the_text_loads(page: Path, tmp_path: Path) -> None:
    for block in _blocks(page, "yaml"):
        file = tmp_path / "config.yaml"
        file.write_text(block)
        assert load_config(["--config", str(file), "--model.hf_path", "model"]).data.registry.keys() == (
            yaml.safe_load(block)["data"]["registry"].keys()
        )


@pytest.mark.parametrize("page", PAGES, ids=_named)
def test_sessions_in_the_text_run(page: Path) -> None:
    assert doctest.testfile(str(page), module_relative=False).failed == 0


if __name__ == "__main__":
    FLAGS.write_text(_with_table(FLAGS.read_text(encoding="utf-8")), encoding="utf-8")
    README.write_text(_with_measured(README.read_text(encoding="utf-8")), encoding="utf-8")
