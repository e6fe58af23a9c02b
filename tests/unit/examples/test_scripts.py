"""Scripts of examples/ run as files and as modules, from any folder."""

from __future__ import annotations

import importlib
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
SCRIPTS = sorted(path.stem for path in ROOT.glob("examples/*.py") if path.stem != "two_modules")
"""All but the lines of the README, which have no main: tests/functional runs them."""


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")  # Megatron-Core's, at import.
@pytest.mark.parametrize("as_file", [True, False])
@pytest.mark.parametrize("script", SCRIPTS)
def test_a_script_finds_its_modules(script: str, as_file: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """All but its main, with the path of `python examples/SCRIPT.py` elsewhere or of `python -m examples.SCRIPT`."""
    ours = {str(ROOT), str(ROOT / "examples"), ""}
    first = ROOT / "examples" if as_file else ROOT
    monkeypatch.setattr(sys, "path", [str(first), *(path for path in sys.path if path not in ours)])
    for name in [*sys.modules]:
        if name.partition(".")[0] in ("examples", "demo", *SCRIPTS):
            monkeypatch.delitem(sys.modules, name)
    if as_file:
        runpy.run_path(str(ROOT / "examples" / f"{script}.py"), run_name="script")
    else:
        importlib.import_module(f"examples.{script}")


def test_help(tmp_path: Path) -> None:
    for command, folder in (([f"{ROOT}/examples/make_demo.py"], tmp_path), (["-m", "examples.make_demo"], ROOT)):
        line = [sys.executable, *command, "--help"]
        told = subprocess.run(line, cwd=folder, capture_output=True, text=True, check=True)
        assert told.stdout.startswith("usage: python -m examples.make_demo")


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")  # Megatron-Core's, at import.
@pytest.mark.parametrize("script", ["recipe", "plain_loop", "generator"])
def test_help_of_a_program_that_trains(
    script: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", [f"{script}.py", "--help"])
    if script == "recipe":
        monkeypatch.setitem(sys.modules, "torch", None)  # It helps before it imports anything slow.
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(ROOT / "examples" / f"{script}.py"), run_name="__main__")
    assert not ended.value.code and capsys.readouterr().out.startswith(f"usage: {script}.py")
