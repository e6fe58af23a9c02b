"""Draw layouts, run a step of each on the process group with NCCL's rules, compare with one process.

The loss of a step and the norm of its gradients depend on the model and the data alone, so that one process, plain
`transformers`, says what they are for all layouts of the same modules.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

from transformers.utils.logging import disable_progress_bar

from tests.parity import runs
from tests.rules.drawing import BATCH, DETAIL, MODELS, SIZES, Drawn, draws
from tests.support.folders import write_data, write_model
from tests.support.oracle import Oracle, TwoTowers
from tests.support.pool import Pool

LOSS, NORM = 1e-5, 1e-4
"""Relative differences that are rounding."""


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.rules", description=__doc__)
    parser.add_argument("--layouts", type=int, default=200, help="how many")
    parser.add_argument("--seed", type=int, default=0, help="which")
    parser.add_argument("--one-connection", action="store_true", help="as with CUDA_DEVICE_MAX_CONNECTIONS=1")
    parser.add_argument("--family", choices=MODELS, default=next(iter(MODELS)), help="of the model")
    options = parser.parse_args(arguments)
    disable_progress_bar()
    with tempfile.TemporaryDirectory() as name:
        folders = {towers: _write(Path(name) / str(towers), options.family, towers) for towers in (1, 2)}
        expected = {towers: _ask(folder, towers) for towers, folder in folders.items()}
        chosen, differences = [], []
        for drawn, found in _run(options, folders, Path(name)):
            chosen.append(drawn)
            differences.append(None if found is None else _difference(found, expected[len(drawn.layouts) - 1]))
            print(f"{len(chosen):4} {drawn}: {_said(differences[-1])}", flush=True)
    ended = [difference for difference in differences if difference is not None]
    kinds = Counter(drawn.kind for drawn in chosen)
    print(f"\n{options.family}, seed {options.seed}: {len(chosen)} layouts, {len(ended)} ended")
    print(", ".join(f"{count} {kind}" for kind, count in sorted(kinds.items())))
    if not ended:
        return 1
    losses, norms = zip(*ended, strict=True)
    print(f"largest relative difference to one process: loss {max(losses):.1e}, norm of gradients {max(norms):.1e}")
    return 0 if len(ended) == len(chosen) and max(losses) <= LOSS and max(norms) <= NORM else 1


def _write(folder: Path, family: str, towers: int) -> Path:
    folder.mkdir()
    model = MODELS[family]
    write_model(folder / "model", model)
    if towers == 2:
        write_model(folder / "detail", DETAIL)
    write_data(folder, BATCH, seed=model.seed, turns=2, details=(1, 0, 0, 2) if towers == 2 else (0,))
    return folder


def _ask(folder: Path, towers: int) -> tuple[float, float]:
    """Loss and norm of the gradients, by one process."""
    oracle = (TwoTowers if towers == 2 else Oracle).load(folder / "model", folder / "data.jsonl")
    loss, gradients = oracle.step(range(BATCH))
    return loss, math.sqrt(sum(float((gradient.double() ** 2).sum()) for gradient in gradients.values()))


def _run(
    options: argparse.Namespace, folders: dict[int, Path], stores: Path
) -> Iterator[tuple[Drawn, tuple[float, float] | None]]:
    """Loss and norm of each, None where it did not end. As many of each number of ranks, and one pool for these."""
    made = 0
    for ranks in SIZES:
        share = len(range(ranks - SIZES[0], options.layouts, len(SIZES)))
        pool = None
        for drawn in islice(draws(options.seed, ranks, folders[2]), share):
            if pool is None or not pool.alive:
                folder = stores / f"pool {made}"
                folder.mkdir()
                pool, made = Pool(ranks, folder, rules=True, one_connection=options.one_connection), made + 1
            begun = time.monotonic()
            try:
                found = pool.run(runs.losses_in_buckets, drawn.command(folders[len(drawn.layouts) - 1]), timeout_s=600)[
                    0
                ]
            except (AssertionError, TimeoutError) as error:
                print(f"\n{drawn}: after {time.monotonic() - begun:.0f} s\n{error}\n", file=sys.stderr, flush=True)
                found = None
            yield drawn, found
        if pool is not None:
            pool.close()


def _difference(found: tuple[float, float], expected: tuple[float, float]) -> tuple[float, float]:
    """Relative, of loss and norm."""
    loss, norm = (abs(a - b) / b for a, b in zip(found, expected, strict=True))
    return loss, norm


def _said(difference: tuple[float, float] | None) -> str:
    return "did not end" if difference is None else "loss {:.1e}, norm {:.1e} off".format(*difference)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
