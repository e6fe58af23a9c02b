"""Runs the cases of one target, one after the other."""

from __future__ import annotations

import argparse
import faulthandler
import itertools
import os
import random
import shutil
import sys
import time
import traceback
from collections import Counter
from pathlib import Path
from typing import Any

from tests.fuzz.guards import Guards
from tests.fuzz.targets import TARGETS, Odd, Target

HANG_S = 60.0
"""A case that takes longer ends the process with a trace."""
REPORT, NUMBER, CASE = "report", "number", "case"


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("target", choices=TARGETS)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--seconds", type=float, required=True)
    parser.add_argument("--number", type=int)
    options = parser.parse_args()
    sys.dont_write_bytecode = True
    os.chdir(options.folder)
    target, folder = TARGETS[options.target], Path.cwd()
    good, guards, counts = target.make(folder / "good"), Guards(folder), Counter[str]()
    end = time.monotonic() + options.seconds
    with (folder / REPORT).open("w", errors="backslashreplace") as report:
        for number in itertools.count() if options.number is None else [options.number]:
            if time.monotonic() > end:
                break
            (folder / NUMBER).write_text(str(number))
            rng = random.Random(f"{options.seed} {target.name} {number}")
            faulthandler.dump_traceback_later(HANG_S, exit=True)
            outcome, problem = _run(target, good, rng, folder / CASE, guards)
            faulthandler.cancel_dump_traceback_later()
            counts[outcome] += 1
            if problem:
                print(f"--replay {target.name} {number}:\n{problem}", file=report, flush=True)
        print(f"{target.name}: {dict(counts)}", file=report)
    return 1 if counts["finding"] else 0


def _run(target: Target, good: Any, rng: random.Random, case: Path, guards: Guards) -> tuple[str, str]:
    """How a case ended: taken, refused, or as a finding with a problem."""
    shutil.rmtree(case, ignore_errors=True)
    case.mkdir()
    problem, refused = "", False
    with guards.watching():
        try:
            refused = target.run(good, rng, case)
        except Odd as odd:
            problem = str(odd)
        except BaseException:
            problem = traceback.format_exc()
    problem = "\n".join(guards.seen) or problem
    return "finding" if problem else "refused" if refused else "taken", problem


if __name__ == "__main__":
    sys.exit(main())
