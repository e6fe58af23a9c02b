"""`python -m benchmarks.roofline.worker LIBRARY CASES PLACE...`: for each place in the file of cases a line of JSON
with it and what the rank of that case asks for: its events (see `costs.written`) and the `peak` of its memory in bytes.

A process of its own, for the reasons of `tests.fake_cuda.worker`.
"""

from __future__ import annotations

import gc
import json
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.fake_cuda import guard


def main(argv: Sequence[str]) -> None:
    """See above."""
    library, cases, *places = argv
    guard.load(Path(library))  # before torch is used
    warnings.simplefilter("ignore")
    from benchmarks.roofline.costs import CountingGpu, written
    from tests.fake_cuda.cases import Case
    from tests.fake_cuda.rank import measure

    written_cases = json.loads(Path(cases).read_text(encoding="utf-8"))
    every = [Case(**{name: _of_json(value) for name, value in fields.items()}) for fields in written_cases]
    gc.freeze()
    with CountingGpu() as gpu:
        for place in map(int, places):
            gpu.start_again()
            peak = measure(every[place], gpu)["peak"]
            print(json.dumps([place, written(gpu.events) | {"peak": peak}]), flush=True)
            gc.collect()


def _of_json(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


if __name__ == "__main__":
    main(sys.argv[1:])
