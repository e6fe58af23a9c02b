"""`python -m tests.fake_cuda`: measure all cases, print what they take, and write `kernels.json` anew."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from rich.console import Console
from rich.table import Table

from tests.fake_cuda import guard, runs


def main() -> None:
    """See above."""
    if why := guard.missing():
        sys.exit(f"not measured: {why}")
    with tempfile.TemporaryDirectory() as folder:
        found = runs.measured(Path(folder)).cases
    table = Table("case", "planned GiB", "peak GiB", "planned/peak", "peak in", "waits", "kernels")
    for name, of_case in found.items():
        planned, peak = sum(of_case["planned"].values()), of_case["peak"]
        waits = sum(times for *_, times in of_case["waits"])
        numbers = f"{planned / 2**30:.2f}", f"{peak / 2**30:.2f}", f"{planned / peak:.3f}", of_case["at_peak"]
        table.add_row(name, *numbers, str(waits), f"{of_case['kernels']['all']:,}")
    Console(width=150).print(table)
    runs.write(found)


if __name__ == "__main__":
    main()
