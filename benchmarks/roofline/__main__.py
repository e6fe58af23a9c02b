"""Predicts steps on a named GPU: `python -m benchmarks.roofline [--help]`.

One rank of each layout of `cases` runs on a GPU that computes nothing; from its kernels, their operations, bytes of
memory and bytes on the wire follow times and MFU by module. So do recorded steps, beside what was measured of them.
Two processes, about six minutes on two cores, no GPU. Writes `roofline/GPU.md` and `.json` under `benchmarks/results`.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.roofline.cases import LAYOUTS, PICTURES, WORLD, Step, steps
from benchmarks.roofline.costs import Event, read_events
from benchmarks.roofline.devices import ASSUMED, FASTEST, GPUS, MIDDLE, SLOWEST, USUAL, Assumed, Gpu
from benchmarks.roofline.measured import read, with_measured
from benchmarks.roofline.prediction import Prediction, phase_times
from benchmarks.roofline.replay import RECORDS, Recorded, own_launch, predicted, recorded
from benchmarks.roofline.report import Found, Measured, Replayed, numbers_of, text_of
from tests.fake_cuda import guard
from tests.fake_cuda.cases import Case

RESULTS = Path(__file__).parents[1] / "results" / "roofline"
ROOT = Path(__file__).parents[2]
PROCESSES = 2
SIDES = (
    "pixels of pictures' sides: 1008 where left out, in packs of 8,208 tokens; others alone as in the published table"
)


def main() -> None:
    """See above."""
    options = _options()
    if why := guard.missing():
        sys.exit(f"nothing is predicted: {why}")
    gpu = GPUS[options.gpu]
    try:
        shares = () if options.measured is None else read(options.measured, gpu)
    except ValueError as error:
        sys.exit(f"--measured: {error}")
    every = steps(gpu, options.model or LAYOUTS, options.side or (PICTURES[0].side,))
    records = [share for file in RECORDS for share in recorded(file)]
    cases = list(dict.fromkeys([*(step.case for step in every), *(share.case for share in records)]))
    counted = dict(zip(cases, _counted(cases), strict=True))
    found, measured = list[Found](), list[Measured]()
    for step in every:
        events, peak = read_events(counted[step.case]), counted[step.case]["peak"]
        names = ASSUMED if step.picture is PICTURES[0] else (SLOWEST, MIDDLE, FASTEST)
        alone = {name: _predicted(step, events, gpu, ASSUMED[name]) for name in names}
        both = {name: with_measured(step, each, shares) for name, each in alone.items()}
        found.append((step, {name: prediction for name, (prediction, _) in both.items()}, peak))
        _, seconds = both[MIDDLE]
        measured += [(step, alone[MIDDLE], seconds)] if seconds else []
    page = text_of(found, gpu, measured, [_replayed(share, counted[share.case]) for share in records])
    print(page)
    if options.results is not None:
        options.results.mkdir(parents=True, exist_ok=True)
        (options.results / f"{gpu.name}.md").write_text(page + "\n", encoding="utf-8")
        record = json.dumps(numbers_of(found), indent=1)
        (options.results / f"{gpu.name}.json").write_text(record + "\n", encoding="utf-8")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.roofline", description=__doc__)
    parser.add_argument("--gpu", choices=list(GPUS), default="h100", help="whose numbers are taken")
    parser.add_argument("--model", action="append", choices=list(LAYOUTS), help="all where left out")
    parser.add_argument("--side", action="append", type=int, help=SIDES)
    parser.add_argument(
        "--measured",
        type=Path,
        metavar="GPU.JSON",
        help="a record of benchmarks.gpu on such a device: what it has measured is taken in place of predictions",
    )
    parser.add_argument("--results", type=Path, default=RESULTS, help="where to write")
    parser.add_argument("--dry", dest="results", action="store_const", const=None, help="print only")
    return parser.parse_args()


def _counted(cases: Sequence[Case]) -> list[dict[str, Any]]:
    """What the worker finds of each case. Raises `RuntimeError` with the output of a process that failed."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        library = guard.compiled(folder)
        file = folder / "cases.json"
        file.write_text(json.dumps([asdict(case) for case in cases]), encoding="utf-8")
        shares = [map(str, range(first, len(cases), PROCESSES)) for first in range(PROCESSES)]
        started = [_start([str(library), str(file), *share], folder / str(n)) for n, share in enumerate(shares)]
        found: dict[int, dict[str, Any]] = {}
        for number, process in enumerate(started):
            if process.wait() != 0:
                for other in started:
                    other.kill()
                raise RuntimeError(f"counting failed: {(folder / f'{number}.err').read_text(encoding='utf-8')}")
            lines = (folder / f"{number}.out").read_text(encoding="utf-8").splitlines()
            found |= dict(map(json.loads, lines))
    return [found[place] for place in range(len(cases))]


def _start(arguments: Sequence[str], files: Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "benchmarks.roofline.worker", *arguments]
    # As in `tests.fake_cuda.runs`: compiled functions would hide what they are made of.
    environment = os.environ | {"TORCHDYNAMO_DISABLE": "1", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    with open(f"{files}.out", "w") as out, open(f"{files}.err", "w") as errors:
        return subprocess.Popen(command, cwd=ROOT, env=environment, stdout=out, stderr=errors, text=True)


def _predicted(step: Step, events: Sequence[Event], gpu: Gpu, assumed: Assumed = USUAL) -> Prediction:
    micro_batches = max(1, assumed.micro_batches // step.layouts.waves) if assumed.micro_batches else step.micro_batches
    times = phase_times(events, micro_batches, gpu, assumed)
    return Prediction(times, micro_batches, step.flops, step.pictures * step.picture.patches, WORLD, gpu)


def _replayed(share: Recorded, counted: Mapping[str, Any]) -> Replayed:
    events = read_events(counted)
    own = own_launch(share, events)
    return share, predicted(share, events, share.launch), own, predicted(share, events, own)


if __name__ == "__main__":
    main()
