"""`python -m tests.fake_cuda.worker LIBRARY NUMBER...`: measure these cases in this process, a line of JSON for each.
Without numbers, say what the fake device notices of what it has to.

A process of its own: a device guard stays for ever, and what is cached of fake tensors must not reach other tests.
"""

from __future__ import annotations

import gc
import json
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path

from tests.fake_cuda import guard


def main(argv: Sequence[str]) -> None:
    """See above."""
    library, *numbers = argv
    guard.load(Path(library))  # before torch is used
    warnings.simplefilter("ignore")
    from tests.fake_cuda.cases import CASES
    from tests.fake_cuda.device import FakeGpu
    from tests.fake_cuda.faults import noticed
    from tests.fake_cuda.rank import measure

    with FakeGpu() as gpu:
        if not numbers:
            print(json.dumps(noticed(gpu)))
        for number in map(int, numbers):
            print(json.dumps({"number": number, **measure(CASES[number], gpu)}), flush=True)
            gc.collect()


if __name__ == "__main__":
    main(sys.argv[1:])
