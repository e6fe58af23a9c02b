"""`python -m benchmarks.roofline.worker LIBRARY GPU CASES PLACE...`: for each place in the file of cases a line of JSON
with it and what the rank of that case asks for: `costs`, [phase, stream, kind, fields of `costs.Costs`] each, and the
`peak` of its memory in bytes.

A process of its own, for the reasons of `tests.fake_cuda.worker`.
"""

from __future__ import annotations

import gc
import json
import sys
import warnings
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from tests.fake_cuda import guard


def main(argv: Sequence[str]) -> None:
    """See above."""
    library, name, cases, *places = argv
    guard.load(Path(library))  # before torch is used
    warnings.simplefilter("ignore")
    from benchmarks.roofline.costs import CountingGpu
    from benchmarks.roofline.devices import GPUS
    from tests.fake_cuda.cases import Case
    from tests.fake_cuda.rank import measure

    every = [Case(**fields) for fields in json.loads(Path(cases).read_text(encoding="utf-8"))]
    gc.freeze()
    with CountingGpu(GPUS[name]) as gpu:
        for place in map(int, places):
            gpu.start_again()
            peak = measure(every[place], gpu)["peak"]
            costs = [[*key, asdict(found)] for key, found in gpu.costs.items()]
            print(json.dumps([place, {"costs": costs, "peak": peak}]), flush=True)
            gc.collect()


if __name__ == "__main__":
    main(sys.argv[1:])
