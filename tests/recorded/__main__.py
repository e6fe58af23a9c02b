"""Record what small runs of every kind compute, to the bit, or compare with what was recorded.

    python -m tests.recorded --check          # exit status 1 where a loss, a norm or a weight differs
    python -m tests.recorded --write          # records anew
    python -m tests.recorded --write /tmp/old.json --tree ../old    # what another checkout computes, with these rows

Bits depend on the CPU and on the versions of libraries. Where a commit differs from its own file on your machine, write
a file from the commit before your change, and check against that.
"""

from __future__ import annotations

import argparse
import json
import platform
import shutil
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import yaml

from tests.recorded.running import HERE, preload, run_row, write_inputs

FILE = HERE / "recorded.json"
ROWS: dict[str, list[str]] = yaml.safe_load((HERE / "rows.yaml").read_text())


def main(arguments: Sequence[str]) -> int:
    options = _parse(arguments)
    names = [name for name in ROWS if not options.only or any(part in name for part in options.only)]
    if options.list:
        print(*(line for name in names for line in (name, *(f"    {command}" for command in ROWS[name]))), sep="\n")
        return 0
    file: Path = options.write or options.check or FILE
    stored = json.loads(file.read_text()) if file.exists() else {"rows": {}}
    preload()
    folder = Path(tempfile.mkdtemp())  # A `TemporaryDirectory` is removed by the first forked rank that ends.
    try:
        head = machine() | {"inputs": write_inputs(options.tree, folder)}
        for what, here in head.items() if options.write is None else ():
            if (there := stored.get(what)) != here:
                print(f"{what}: recorded with {there}, here {here}. Rows may differ for that reason alone.")
        found, good = dict[str, Any](), True
        for number, name in enumerate(names):
            start = time.monotonic()
            try:
                found[name] = run_row(ROWS[name], options.tree, folder, folder / f"row-{number}")
                verdict = "recorded" if options.write else difference(stored["rows"].get(name), found[name])
            except RuntimeError as error:
                verdict = f"FAILS\n{error}"
            good = good and verdict in ("same", "recorded")
            print(f"{time.monotonic() - start:5.1f} s  {name}: {verdict}", flush=True)
    finally:
        shutil.rmtree(folder)
    if options.write:
        rows = (stored["rows"] if options.only else {}) | found
        lines = [f"  {json.dumps(name)}: {json.dumps(rows[name])}" for name in ROWS if name in rows]  # A row, a line.
        top = "".join(f" {json.dumps(what)}: {json.dumps(here)},\n" for what, here in head.items())
        file.write_text(f'{{\n{top} "rows": {{\n' + ",\n".join(lines) + "\n }\n}\n")
    return 0 if good else 1


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tests.recorded", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    action = parser.add_mutually_exclusive_group()
    action.add_argument("--write", type=Path, nargs="?", const=FILE, metavar="FILE", help=f"record; default {FILE}")
    action.add_argument("--check", type=Path, nargs="?", const=FILE, metavar="FILE", help="compare (default)")
    action.add_argument("--list", action="store_true", help="print the rows and their commands")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="rows whose names contain one of these")
    parser.add_argument("--tree", type=Path, default=HERE.parents[1], metavar="PATH", help="checkout that is run")
    options = parser.parse_args(arguments)
    options.tree = options.tree.resolve()
    if unknown := [part for part in options.only or () if not any(part in name for name in ROWS)]:
        parser.error(f"found no row named {', '.join(unknown)}; --list names them")
    return options


def machine() -> dict[str, str]:
    """What bits depend on."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    cpu = next((line.partition(": ")[2] for line in lines if line.startswith("model name")), platform.processor())
    return {"cpu": cpu} | {name: version(name) for name in ("torch", "megatron-core", "transformers")}


def difference(before: Mapping[str, Any] | None, after: Mapping[str, Any]) -> str:
    """`same`, or the first value that differs, by how much, and what else does."""
    if before is None:
        return "DIFFERS: not recorded; --write with --only adds it"
    if len(before["steps"]) != len(after["steps"]):
        return f"DIFFERS: {len(after['steps'])} lines of metrics, recorded {len(before['steps'])}"
    values = [
        (f"step {old['step']} {name}", old.get(name), new.get(name))
        for old, new in zip(before["steps"], after["steps"], strict=True)
        for name in {**old, **new}
    ]
    apart = [value for value in values if value[1] != value[2]]
    weights = {**before["weights"], **after["weights"]}
    modules = [name for name in weights if before["weights"].get(name) != after["weights"].get(name)]
    told = [f"weights of {', '.join(modules)}"] if modules else []
    if apart:
        what, old, new = apart[0]
        gap = f" ({new - old:+.1e})" if isinstance(old, int | float) and isinstance(new, int | float) else ""
        told = [f"{what} {old} -> {new}{gap}", f"in all {len(apart)} of {len(values)} values", *told]
    return f"DIFFERS: {'; '.join(told)}" if told else "same"


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
