"""Start workers, watch that no case takes too long or too much memory, and say what was found."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.fuzz.targets import TARGETS
from tests.fuzz.worker import CASE, FINDINGS, STATE, SUMMARY

HANG_S = 30.0
START_S = 180.0
"""For imports and good input, on a busy machine."""
KILL_MEMORY = 3 * 10**9
"""Before the machine has none. What is above `worker.MOST_MEMORY` is a finding anyhow."""
SHOWN = 12
"""Findings of a target that are printed."""


@dataclass
class Fuzzed:
    """What came of one target."""

    name: str
    counts: Counter[str] = field(default_factory=Counter)
    slowest_s: float = 0.0
    findings: list[dict[str, Any]] = field(default_factory=list)

    @property
    def cases(self) -> int:
        return self.counts["taken"] + self.counts["refused"] + len(self.findings)

    def line(self) -> str:
        taken, refused = self.counts["taken"], self.counts["refused"]
        return (
            f"{self.name:15} {self.cases:7,} cases: {taken:6,} taken, {refused:6,} refused, "
            f"{len(self.findings):3} findings; the slowest took {self.slowest_s:.1f} s"
        )


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description="Give bad input to the program.")
    parser.add_argument("targets", nargs="*", metavar="TARGET", help=f"{', '.join(TARGETS)} (default: all)")
    parser.add_argument("--seconds", type=float, default=1200.0, help="in all (1200)")
    parser.add_argument("--seed", type=int, default=0, help="which cases (0)")
    parser.add_argument("--jobs", type=int, default=2, help="processes at once (2)")
    parser.add_argument("--keep", type=Path, default=Path("fuzz-findings"), help="where findings go (fuzz-findings)")
    parser.add_argument("--replay", nargs=2, metavar=("TARGET", "NUMBER"), help="one case alone; its files stay")
    options = parser.parse_args(arguments)
    if unknown := {*options.targets, *(options.replay or ())[:1]} - TARGETS.keys():
        parser.error(f"no target {', '.join(sorted(unknown))}; there are {', '.join(TARGETS)}")
    if options.replay:
        return _replay(options)
    names = options.targets or list(TARGETS)
    each = options.seconds * min(options.jobs, len(names)) / len(names)
    with tempfile.TemporaryDirectory(prefix="fuzz-") as root, ThreadPoolExecutor(options.jobs) as pool:
        done = list(pool.map(lambda name: _fuzz(name, Path(root) / name, options, each), names))
    findings = sum(len(fuzzed.findings) for fuzzed in done)
    print(f"seed {options.seed}: {sum(fuzzed.cases for fuzzed in done):,} cases, {findings} findings")
    return 1 if findings else 0


def _fuzz(name: str, folder: Path, options: argparse.Namespace, seconds: float) -> Fuzzed:
    """Run the cases of one target, with a new process after each that had to be killed."""
    fuzzed, first, end = Fuzzed(name), 0, time.monotonic() + seconds
    while (left := end - time.monotonic()) > 0:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        process = _start(name, folder, options.seed, first, left)
        killed = _watch(process, folder, end)
        first = _gather(fuzzed, folder, killed, options.keep)
        if killed is None:
            break
    print(fuzzed.line(), flush=True)
    for finding in fuzzed.findings[:SHOWN]:
        print(f"  --replay {name} {finding['number']}:\n    " + finding["problem"].strip().replace("\n", "\n    "))
    return fuzzed


def _start(name: str, folder: Path, seed: int, first: int, seconds: float, *more: str) -> subprocess.Popen[bytes]:
    root = Path(__file__).parents[2]
    environment = os.environ | {
        "PYTHONPATH": str(root),
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "HF_HOME": str(folder),
        "TMPDIR": str(folder),
        "PYTHONHASHSEED": "0",  # Case by case the same.
    }
    line = [sys.executable, "-m", "tests.fuzz.worker", name, str(folder), "--seed", str(seed), "--first", str(first)]
    with (folder / "output").open("wb") as output:
        return subprocess.Popen(
            [*line, "--seconds", str(seconds), *more],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=None if more else output,
            stderr=None if more else subprocess.STDOUT,
            start_new_session=True,
        )


def _watch(process: subprocess.Popen[bytes], folder: Path, end: float) -> str | None:
    """Wait for a worker. Returns why it ended before its time, if it did: it hung, took too much memory, or died."""
    number, since = b"", time.monotonic()
    while process.poll() is None:
        time.sleep(0.2)
        now = (folder / STATE).read_bytes() if (folder / STATE).exists() else b""
        if now != number:
            number, since = now, time.monotonic()
        waited = time.monotonic() - since
        why = None
        if waited > (HANG_S if number else START_S):
            why = f"no end within {waited:.0f} s"
        elif (memory := _memory(process.pid)) > KILL_MEMORY:
            why = f"memory: {memory / 1e9:.1f} GB"
        if why is not None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            return why
    if process.returncode == 0:
        return None
    said = (folder / "output").read_text(errors="replace")
    return f"the process ended with status {process.returncode}:\n{said[-3000:]}"


def _memory(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, IndexError):  # It has just ended.
        return 0


def _gather(fuzzed: Fuzzed, folder: Path, killed: str | None, keep: Path) -> int:
    """Add what a worker has found; returns the number of the next case."""
    summary = json.loads((folder / SUMMARY).read_text()) if (folder / SUMMARY).exists() else {}
    fuzzed.counts.update({kind: summary.get(kind, 0) for kind in ("taken", "refused")})
    fuzzed.slowest_s = max(fuzzed.slowest_s, summary.get("slowest_s", 0.0))
    if (folder / FINDINGS).exists():
        fuzzed.findings += map(json.loads, (folder / FINDINGS).read_text().splitlines())
    if killed is None:
        return summary.get("next", 0)
    if not (folder / STATE).exists():
        raise RuntimeError(f"{fuzzed.name}: the worker did not begin: {killed}")
    number = int((folder / STATE).read_bytes())
    fuzzed.findings.append({"target": fuzzed.name, "number": number, "problem": killed})
    shutil.copytree(folder / CASE, keep / f"{fuzzed.name}-{number}", dirs_exist_ok=True, symlinks=True)
    return number + 1


def _replay(options: argparse.Namespace) -> int:
    name, number = options.replay
    folder = options.keep.absolute() / f"replay-{name}-{number}"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    process = _start(name, folder, options.seed, int(number), 3600.0, "--only-first")
    try:
        status = process.wait()
    except KeyboardInterrupt:
        os.killpg(process.pid, signal.SIGKILL)
        status = 130
    print(f"its files are in {folder / CASE}, good ones in {folder / 'good'}")
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
