"""Sets of versions that setup.py allows, each installed in an environment of its own and tested.

    python -m tests.versions                  all rows, with the tests in SUBSET
    python -m tests.versions --all oldest     one row, with all tests

Without --all, results are recorded in tests/versions.json, and in tables of docs/installation.md and tests/versions.md.

A row takes its own version of Python from PATH, or from pyenv; one without is a failure. Environments are kept in
.versions/ and brought up to date when they are used again; where torch comes as a CUDA build, one takes about 6 GB. The
exit status is zero if every row was tested and passed. Needs nothing but Python.

Megatron-Core needs Python 3.12 from 0.17 on. Where there is none, `pip install --no-deps --ignore-requires-python
--no-binary :all: megatron-core==...` and `pip install triton` build it for Python 3.11, in which it runs too.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from dataclasses import asdict, dataclass, field
from pathlib import Path

from tools import names

ROOT = Path(__file__).parents[1]
RECORD = Path(__file__).with_suffix(".json")


@dataclass(frozen=True)
class Row:
    """A version of Python, and what pip is asked for beside this project."""

    name: str
    python: str
    pins: tuple[str, ...]


TESTED = ("-c", "constraints.txt")
"""What `make venv` installs."""

ROWS = (
    Row(
        "oldest",
        "3.11",
        (
            "torch==2.11.0",
            "megatron-core==0.16.0",
            "transformers==5.17.0",
            "tokenizers==0.23.1",
            "msgspec==0.19.0",
            "safetensors==0.8.0",
            "jinja2==3.1.6",
            "fsspec==2026.6.0",
            "numpy==1.26.0",
            "packaging==24.2",
            "pillow==11.0.0",
            "pyyaml==6.0",
            "regex==2025.10.22",
            "rich==13.8.0",
            "typing-extensions==4.12.2",
            "pydantic==2.10.6",  # The extra `dev` needs it; pip does not find by itself that newer ones do not fit.
        ),
    ),
    Row("tested-3.11", "3.11", TESTED),
    Row("0.17", "3.12", ("torch==2.13.0", "megatron-core==0.17.1", "transformers==5.20.2")),
    Row("0.18", "3.12", ("torch==2.14.1", "megatron-core==0.18.2", "transformers==5.23.0")),
    Row("tested-3.12", "3.12", TESTED),
    Row("tested-3.13", "3.13", TESTED),
)

SHOWN = ("torch", "megatron-core", "transformers", "numpy")

# About five minutes: layers, boundaries, rows of the parity matrix for both families and for each kind of placement and
# schedule, the library with Megatron's own models, checkpoints, NCCL's rules, and the program.
SUBSET = (
    "tests/unit/groups/test_platform.py",
    "tests/unit/groups/test_topology.py",
    "tests/unit/boundary/test_communicator.py",
    "tests/unit/models/test_attention.py",
    "tests/unit/models/test_kernels.py",
    "tests/unit/models/test_layers.py",
    "tests/unit/models/test_loss.py",
    "tests/unit/models/test_te.py",
    "tests/unit/step/test_megatron.py",
    "tests/unit/step/test_optimizers.py",
    "tests/unit/step/test_recipe.py",
    "tests/unit/support/test_nccl_rules.py",
    "tests/parity/test_parity.py",
    "tests/parity/test_qwen3_vl.py",
    "tests/parity/test_bf16.py",
    "tests/parity/test_nccl_rules.py",
    "tests/functional/checkpoint/test_across_layouts.py",
    "tests/functional/test_torchrun.py::test_sgd_run_equals_transformers",
)


@dataclass(frozen=True)
class Result:
    """What became of a row: its versions and numbers of tests, or why there are none. `missing`: names of Megatron-Core
    and PyTorch that the package uses and these versions lack.
    """

    row: str
    python: str = ""
    versions: dict[str, str] = field(default_factory=dict)
    passed: int = 0
    failed: int = 0
    skipped: int = 0
    minutes: float = 0.0
    missing: list[str] = field(default_factory=list)
    problem: str | None = None

    @property
    def good(self) -> bool:
        return self.problem is None and self.failed == 0 and self.passed > 0


def interpreter(version: str) -> str | None:
    """A Python of `version` ("3.12"): this one, or one on PATH; None where there is none that runs."""
    if version == f"{sys.version_info.major}.{sys.version_info.minor}":
        return sys.executable
    found = shutil.which(f"python{version}")
    if found is None:
        return None
    # Version managers leave a file of that name which runs only where the version is chosen, as this does for pyenv.
    asked = [found, "-c", "import sys; print(sys.executable)"]
    done = subprocess.run(asked, env=os.environ | {"PYENV_VERSION": version}, capture_output=True, text=True)
    return done.stdout.strip() if done.returncode == 0 else None


def environment(row: Row, folder: Path, extras: str) -> str | None:
    """Install `row` and this project with `extras` into a virtual environment at `folder`. Says what failed, if so."""
    python = folder / "bin" / "python"
    wanted = [*row.pins, "-e", f".[{extras}]"]
    read = [(ROOT / name).read_text("utf-8") for name in ("setup.py", "constraints.txt")]
    key = hashlib.sha256("\n".join([row.python, *wanted, *read]).encode()).hexdigest()
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


_INSTALLED = """
import json, sys
from importlib.metadata import version
from tools import names
head = {"python": sys.version.split()[0], "versions": {name: version(name) for name in sys.argv[1:]}}
print(json.dumps(head | {"missing": names.missing(list(names.names(names.PACKAGE)))}))
"""


def run(row: Row, folder: Path, extras: str, tests: tuple[str, ...]) -> Result:
    """Install `row` below `folder`, and run `tests` with it."""
    if problem := environment(row, folder / row.name, extras):
        return Result(row.name, problem=problem)
    python = str(folder / row.name / "bin" / "python")
    asked = subprocess.run([python, "-W", "ignore", "-c", _INSTALLED, *SHOWN], cwd=ROOT, capture_output=True, text=True)
    if asked.returncode:
        return Result(row.name, problem=f"versions and names could not be read: {asked.stderr.strip()[-300:]}")
    head = json.loads(asked.stdout.splitlines()[-1])
    report = folder / f"{row.name}.xml"
    report.unlink(missing_ok=True)
    start = time.monotonic()
    # anyio, which others depend on, has a plugin for other versions of pytest.
    pytest = [python, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:anyio"]
    status = subprocess.run([*pytest, f"--junitxml={report}", *tests], cwd=ROOT).returncode
    if not report.is_file():
        return Result(row.name, **head, problem=f"pytest ended with status {status}")
    suite = next(ElementTree.parse(report).iter("testsuite"))
    total, skipped, failures, errors = (int(suite.get(n, "0")) for n in ("tests", "skipped", "failures", "errors"))
    failed = failures + errors
    # Status 1 says that tests failed, which the numbers say too.
    problem = f"pytest ended with status {status}" if status not in (0, 1) else None
    minutes = round((time.monotonic() - start) / 60, 1)
    return Result(row.name, **head, passed=total - skipped - failed, failed=failed, skipped=skipped,
                  minutes=minutes, problem=problem)  # fmt: skip


# --------------------------------------------------------------------------------------------------- tables


def table(results: list[Result]) -> str:
    """The results as lines of text, a row for each."""
    cells: list[tuple[str, ...]] = [("row", "Python", *SHOWN, "passed", "failed", "skipped", "minutes", "")]
    for result in results:
        numbers = (str(result.passed), str(result.failed), str(result.skipped), str(result.minutes))
        note = result.problem or ("" if result.good else "FAILED")
        versions = [result.versions.get(name, "") for name in SHOWN]
        cells.append((result.row, result.python, *versions, *numbers, note))
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = ("  ".join(map(str.ljust, line, widths)).rstrip() for line in cells)
    return "\n".join(lines)


def recorded() -> list[Result]:
    """The results in tests/versions.json, in the order of rows."""
    found = {line["row"]: Result(**line) for line in json.loads(RECORD.read_text("utf-8"))} if RECORD.exists() else {}
    return [found[row.name] for row in ROWS if row.name in found]


def versions_markdown(results: list[Result]) -> str:
    """Table of the sets of versions that were tested."""
    lines = [f"| Python | {' | '.join(SHOWN[:3])} | tests |", "|---|---|---|---|---|"]
    for result in results:
        failed = f", {result.failed} failed" if result.failed else ""
        tests = result.problem or f"{result.passed} passed{failed}, {result.skipped} need a GPU"
        versions = [result.versions.get(name, "").partition("+")[0] for name in SHOWN[:3]]
        cells = [result.python or next(row.python for row in ROWS if row.name == result.row), *versions, tests]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def names_markdown(results: list[Result], owner: str) -> str:
    """Table of the names below `owner` that the package uses, with the versions of `results` that lack each."""
    package = "megatron-core" if owner == names.CORE else "torch"
    lines = ["| name | used in | missing in |", "|---|---|---|"]
    for name, files in names.names(names.PACKAGE).items():
        if name.startswith(f"{owner}."):
            lacking = {r.versions.get(package, "").partition("+")[0] for r in results if name in r.missing}
            lines.append(f"| `{name.removeprefix(f'{owner}.')}` | {', '.join(files)} | {', '.join(sorted(lacking))} |")
    return "\n".join(lines) + "\n"


def with_tables(page: str, text: str) -> str:
    """The text of a page with its tables written anew."""
    results = recorded()
    tables = {
        "versions": lambda: versions_markdown(results),
        "megatron": lambda: names_markdown(results, names.CORE),
        "torch": lambda: names_markdown(results, "torch"),
    }
    for name in PAGES[page]:
        begin, end = f"<!-- {name}:begin -->\n", f"<!-- {name}:end -->"
        before, _, rest = text.partition(begin)
        text = before + begin + tables[name]() + end + rest.partition(end)[2]
    return text


PAGES = {"docs/installation.md": ("versions",), "tests/versions.md": ("megatron", "torch")}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("rows", nargs="*", metavar="ROW", help=f"of {', '.join(row.name for row in ROWS)}; all if none")
    parser.add_argument("--all", action="store_true", help="all tests instead of a subset")
    parser.add_argument("--folder", type=Path, default=ROOT / ".versions", help="where environments are kept")
    extras = "dev,tensorboard,bench,video,parquet"
    parser.add_argument("--extras", default=extras, help="extras of this project to install")
    flags = parser.parse_args()
    if unknown := set(flags.rows) - {row.name for row in ROWS}:
        parser.error(f"no row {', '.join(sorted(unknown))}; there are {', '.join(row.name for row in ROWS)}")
    flags.folder.mkdir(parents=True, exist_ok=True)
    # As in the Makefile: ranks share the cores, and nothing is fetched while tests run.
    os.environ |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    rows = [row for row in ROWS if not flags.rows or row.name in flags.rows]
    results = []
    for row in rows:
        results.append(run(row, flags.folder, flags.extras, () if flags.all else SUBSET))
        if not flags.all:
            kept = [result for result in recorded() if result.row != row.name]
            RECORD.write_text(json.dumps([asdict(r) for r in [*kept, results[-1]]], indent=1) + "\n", "utf-8")
    for path in map(ROOT.joinpath, PAGES if not flags.all else ()):
        path.write_text(with_tables(str(path.relative_to(ROOT)), path.read_text("utf-8")), "utf-8")
    print(table(results))
    return 0 if all(result.good for result in results) else 1


if __name__ == "__main__":
    sys.exit(main())
