"""Runs one section in this process, for `sections.run`: `python -m benchmarks.gpu.section NAME FOLDER [--small]`."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from pathlib import Path

from benchmarks.gpu.record import Record
from benchmarks.gpu.sections import SECTIONS
from megatron_hetero.base.environment import prepare_environment


def main() -> None:
    """Measure; the record is in `FOLDER/found.json`."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu.section")
    parser.add_argument("name", choices=SECTIONS)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--small", action="store_true")
    options = parser.parse_args()
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    section = SECTIONS[options.name]
    if section.module != "program":
        prepare_environment()  # as the program does by itself, before anything looks at the device
    module = importlib.import_module(f"benchmarks.gpu.{section.module}")
    module.measure(Record(options.folder / "found.json"), options.folder, *section.arguments, small=options.small)
    sys.stdout.flush()
    # What was found is written. Nothing is gained by taking process groups and their threads apart in good order.
    os._exit(0)


if __name__ == "__main__":
    main()
