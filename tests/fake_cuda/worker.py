"""`python -m tests.fake_cuda.worker LIBRARY NAME...`: for each name a line of JSON with it and what is found in this
process. A name is the number of a case, which is measured, or `noticed`, for what the fake device notices.

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

NOTICED = "noticed"


def main(argv: Sequence[str]) -> None:
    """See above."""
    library, *names = argv
    guard.load(Path(library))  # before torch is used
    warnings.simplefilter("ignore")
    from tests.fake_cuda.cases import CASES
    from tests.fake_cuda.device import FakeGpu
    from tests.fake_cuda.faults import noticed
    from tests.fake_cuda.rank import measure

    gc.freeze()  # What has been imported need not be looked through again and again.
    with FakeGpu() as gpu:
        for name in names:
            found = noticed(gpu) if name == NOTICED else measure(CASES[int(name)], gpu)
            print(json.dumps([name, found]), flush=True)
            gc.collect()


if __name__ == "__main__":
    main(sys.argv[1:])
