"""The oldest and the newest versions that setup.py allows, each set installed in an environment of its own and tested.

    python -m tests.versions                  all rows of the table, with the tests in SUBSET
    python -m tests.versions --all oldest     one row, with all tests

Environments are kept in .versions/ and brought up to date when they are used again; where torch comes as a CUDA build,
one takes about 6 GB. The exit status is zero if every row was tested and passed. Needs nothing but Python.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import shutil
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]


@dataclass(frozen=True)
class Row:
    """A set of versions: of Python, and of packages that setup.py names."""

    name: str
    python: str
    pins: tuple[str, ...]


# What lies between is not tested, but for the versions in constraints.txt, which `make test` installs.
ROWS = (
    Row(
        "oldest",
        "3.11",
        (
            "torch==2.11.0",
            "megatron-core==0.16.0",
            "transformers==5.17.0",
            "tokenizers==0.23.1",
            "safetensors==0.8.0",
            "jinja2==3.1.6",
            "numpy==1.26.0",
            "packaging==24.2",
            "pillow==11.0.0",
            "pyyaml==6.0",
            "rich==13.8.0",
            "typing-extensions==4.12.0",
        ),
    ),
    Row("newest", "3.11", ("torch==2.13.0", "megatron-core==0.16.1", "transformers==5.23.0")),
)

# What touches torch, transformers or Megatron-Core, with a row of the parity matrix for each kind of placement and
# schedule.
SUBSET = (
    "tests/unit/layout/test_communicators.py",
    "tests/unit/groups/test_platform.py",
    "tests/unit/groups/test_topology.py",
    "tests/unit/boundary",
    "tests/unit/checkpoint",
    "tests/functional/checkpoint",
    "tests/unit/data",
    "tests/unit/models",
    "tests/unit/schedule",
    "tests/unit/examples",
    "tests/unit/train",
    "tests/functional/train",
    "tests/parity/test_parity.py::test_no_schedule_changes_the_loss",
    "tests/parity/test_parity.py::test_three_sgd_steps",
    "tests/parity/test_parity.py::test_three_adamw_steps[dp:1|dp:1 untied micro 2]",
    "tests/parity/test_parity.py::test_three_adamw_steps[sp:4|tp:4 untied micro 2]",
    "tests/parity/test_parity.py::test_three_adamw_steps[pp:2,sp:2|pp:2,tp:2 deep-tied micro 1 text]",
    "tests/parity/test_bf16.py",
    "tests/functional/test_torchrun.py::test_sgd_run_equals_transformers",
    "tests/functional/test_torchrun.py::test_export_loads_without_a_warning",
)


@dataclass(frozen=True)
class Result:
    """What became of a row: numbers of tests, or why there are none."""

    row: Row
    passed: int = 0
    failed: int = 0
    skipped: int = 0
    problem: str | None = None

    @property
    def good(self) -> bool:
        return self.problem is None and self.failed == 0 and self.passed > 0


def interpreter(version: str) -> str | None:
    """A Python of `version` ("3.12"): this one, or what PATH has; None where there is none that runs."""
    if version == f"{sys.version_info.major}.{sys.version_info.minor}":
        return sys.executable
    found = shutil.which(f"python{version}")
    # Version managers leave a file of that name which only says that the version is not chosen.
    runs = found is not None and subprocess.run([found, "-c", ""], capture_output=True).returncode == 0
    return found if runs else None


def environment(row: Row, folder: Path, extras: str) -> str | None:
    """Install `row` and this project with `extras` into a virtual environment at `folder`. Says what failed, if so."""
    python = folder / "bin" / "python"
    wanted = [*row.pins, "-e", f".[{extras}]"]
    key = hashlib.sha256("\n".join([row.python, *wanted, (ROOT / "setup.py").read_text("utf-8")]).encode()).hexdigest()
    stamp = folder / ".installed"
    if stamp.is_file() and stamp.read_text("utf-8") == key:
        return None
    if not (folder / "lib" / f"python{row.python}").is_dir():
        base = interpreter(row.python)
        if base is None:
            return f"no python{row.python} on PATH"
        if subprocess.run([base, "-m", "venv", "--clear", str(folder)]).returncode:
            return "no virtual environment"
    install = [str(python), "-m", "pip", "install", "--disable-pip-version-check", "--no-input", "-q", *wanted]
    if subprocess.run(install, cwd=ROOT).returncode:
        return "pip found no such set of versions"
    stamp.write_text(key, "utf-8")
    return None


def run(row: Row, folder: Path, extras: str, tests: tuple[str, ...]) -> Result:
    """Install `row` below `folder`, and run `tests` with it."""
    if problem := environment(row, folder / row.name, extras):
        return Result(row, problem=problem)
    report = folder / f"{row.name}.xml"
    report.unlink(missing_ok=True)
    pytest = [str(folder / row.name / "bin" / "python"), "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    status = subprocess.run([*pytest, f"--junitxml={report}", *tests], cwd=ROOT).returncode
    if not report.is_file():
        return Result(row, problem=f"pytest ended with status {status}")
    suite = next(ElementTree.parse(report).iter("testsuite"))
    total, skipped, failures, errors = (int(suite.get(n, "0")) for n in ("tests", "skipped", "failures", "errors"))
    failed = failures + errors
    # Status 1 says that tests failed, which the numbers say too.
    problem = f"pytest ended with status {status}" if status not in (0, 1) else None
    return Result(row, total - skipped - failed, failed, skipped, problem)


def table(results: list[Result]) -> str:
    """The results as lines of text, a row for each."""
    cells = [("row", "Python", "versions", "passed", "failed", "skipped", "")]
    for result in results:
        numbers = (str(result.passed), str(result.failed), str(result.skipped))
        note = result.problem or ("" if result.good else "FAILED")
        cells.append((result.row.name, result.row.python, " ".join(result.row.pins[:3]), *numbers, note))
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = ("  ".join(map(str.ljust, line, widths)).rstrip() for line in cells)
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("rows", nargs="*", metavar="ROW", help=f"of {', '.join(row.name for row in ROWS)}; all if none")
    parser.add_argument("--all", action="store_true", help="all tests instead of a subset")
    parser.add_argument("--folder", type=Path, default=ROOT / ".versions", help="where environments are kept")
    parser.add_argument("--extras", default="dev,tensorboard,bench", help="extras of this project to install")
    flags = parser.parse_args()
    if unknown := set(flags.rows) - {row.name for row in ROWS}:
        parser.error(f"no row {', '.join(sorted(unknown))}; there are {', '.join(row.name for row in ROWS)}")
    flags.folder.mkdir(parents=True, exist_ok=True)
    # As in the Makefile: ranks share the cores, and nothing is fetched while tests run.
    os.environ |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    rows = [row for row in ROWS if not flags.rows or row.name in flags.rows]
    results = [run(row, flags.folder, flags.extras, () if flags.all else SUBSET) for row in rows]
    print(table(results))
    return 0 if all(result.good for result in results) else 1


if __name__ == "__main__":
    sys.exit(main())
