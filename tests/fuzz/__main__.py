"""Run the cases of each target in a process of its own, and print the findings."""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.fuzz.targets import TARGETS
from tests.fuzz.worker import NUMBER, REPORT

ROOT = Path(__file__).parents[2]


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description="Give bad input to the program.")
    parser.add_argument("targets", nargs="*", metavar="TARGET", help=f"{', '.join(TARGETS)} (default: all)")
    parser.add_argument("--seconds", type=float, default=1200.0, help="in all (1200)")
    parser.add_argument("--seed", type=int, default=0, help="which cases (0)")
    parser.add_argument("--jobs", type=int, default=2, help="processes at once (2)")
    parser.add_argument("--keep", type=Path, default=Path("fuzz-findings"), help="folder of all files (fuzz-findings)")
    parser.add_argument("--replay", nargs=2, metavar=("TARGET", "NUMBER"), help="one case alone")
    options = parser.parse_args(arguments)
    names = options.replay[:1] if options.replay else options.targets or list(TARGETS)
    if unknown := set(names) - TARGETS.keys():
        parser.error(f"no target {', '.join(sorted(unknown))}; there are {', '.join(TARGETS)}")
    more = ["--number", options.replay[1]] if options.replay else []
    more += ["--seconds", str(options.seconds * min(options.jobs, len(names)) / len(names))]
    with ThreadPoolExecutor(options.jobs) as pool:
        good = list(pool.map(lambda name: _fuzz(name, options.keep.absolute() / name, options.seed, more), names))
    print(
        f"seed {options.seed}: {good.count(False)} targets with findings; the files of the last cases: {options.keep}"
    )
    return 0 if all(good) else 1


def _fuzz(name: str, folder: Path, seed: int, more: Sequence[str]) -> bool:
    """Run the cases of one target and print its report. Whether there are no findings."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    environment = {
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "HF_HOME": str(folder),
        "TMPDIR": str(folder),
        "PYTHONHASHSEED": "0",  # The same cases each time.
    }
    line = [sys.executable, "-X", "faulthandler", "-m", "tests.fuzz.worker", name, str(folder), "--seed", str(seed)]
    with (folder / "output").open("wb") as output:
        done = subprocess.run(
            [*line, *more],
            env=os.environ | environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            check=False,
        )
    report = (folder / REPORT).read_text() if (folder / REPORT).exists() else ""
    if done.returncode not in (0, 1):  # A crash, or no end.
        number = (folder / NUMBER).read_text() if (folder / NUMBER).exists() else "before the first"
        output = (folder / "output").read_text(errors="replace")[-3000:]
        report += f"{name}: ended with status {done.returncode} in case {number}:\n{output}"
    print(report.strip(), flush=True)
    return done.returncode == 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
