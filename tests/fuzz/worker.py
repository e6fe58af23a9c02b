"""Runs the cases of one target, one after the other, in a process of its own."""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import sys
import time
import traceback
from pathlib import Path
from typing import Any

from tests.fuzz.guards import Guards, forget_memory, most_memory
from tests.fuzz.targets import TARGETS, Odd, Target

MOST_MEMORY = 2 * 10**9
STATE, FINDINGS, SUMMARY, CASE = "state", "findings.jsonl", "summary.json", "case"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("target", choices=TARGETS)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--first", type=int, required=True)
    parser.add_argument("--seconds", type=float, required=True)
    parser.add_argument("--only-first", action="store_true")
    options = parser.parse_args()
    sys.dont_write_bytecode = True
    os.chdir(options.folder)
    _serve(TARGETS[options.target], Path.cwd(), options)


def _serve(target: Target, folder: Path, options: argparse.Namespace) -> None:
    good = target.make(folder / "good")
    guards = Guards(folder)
    counts, slowest, number = {"taken": 0, "refused": 0}, 0.0, options.first
    end = time.monotonic() + options.seconds
    with (folder / STATE).open("wb", buffering=0) as state:
        while time.monotonic() < end:
            os.pwrite(state.fileno(), f"{number:12}".encode(), 0)
            rng = random.Random(f"{options.seed} {target.name} {number}")
            begun = time.monotonic()
            outcome, problem = _run(target, good, rng, folder / CASE, guards)
            slowest = max(slowest, time.monotonic() - begun)
            if problem is None:
                counts[outcome] += 1
            else:
                _note(folder, target.name, number, problem)
            number += 1
            _write(folder / SUMMARY, {"next": number, "slowest_s": slowest, **counts})
            if options.only_first:
                print(outcome, problem or "")
                break


def _run(target: Target, good: Any, rng: random.Random, case: Path, guards: Guards) -> tuple[str, str | None]:
    """How a case ended, and what is wrong with that, if anything."""
    shutil.rmtree(case, ignore_errors=True)
    case.mkdir()
    forget_memory()
    problem, refused = None, False
    with guards.watching():
        try:
            refused = target.run(good, rng, case)
        except Odd as odd:
            problem = str(odd)
        except BaseException:
            problem = traceback.format_exc()
    if guards.seen:
        problem = "\n".join(guards.seen)
    elif (memory := most_memory()) > MOST_MEMORY:
        problem = f"memory: {memory / 1e9:.1f} GB"
    return "refused" if refused else "taken", problem


def _note(folder: Path, target: str, number: int, problem: str) -> None:
    with (folder / FINDINGS).open("a") as file:
        file.write(json.dumps({"target": target, "number": number, "problem": problem}) + "\n")


def _write(path: Path, value: dict[str, float]) -> None:
    """So that it is whole whenever this process is killed."""
    path.with_suffix(".new").write_text(json.dumps(value))
    path.with_suffix(".new").replace(path)


if __name__ == "__main__":
    main()
