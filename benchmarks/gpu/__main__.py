"""What only a GPU can show: `python -m benchmarks.gpu [--help]`, in under ten minutes on a machine with one.

  environment   device, driver, libraries, and what the device does at its best
  correctness   one rank over NCCL against plain `transformers`, in fp32 and bf16: loss, gradients, weights
  sharing       2 and 4 ranks on the one device, collectives staged on the host, against one rank
  program       pretrain_vlm.py: 20 steps, killed and resumed, exported, evaluated
  video         steps with many frames on one rank: the encoder in one call, recomputed, and in several calls
  share-7b      one rank's share of sp:8|tp:4,dp:2, without communication: times by module, kernels, memory beside the
                plan's, MFU
  share-32b     the same of sp:8|tp:8

With `--sections hopper`, together with `environment` and both shares, or with `--sections all`:

  attention     every attention kernel at a share's sizes: rate, error, time of a new plan
  spinning      the products of a layer beside a kernel that holds 16 multiprocessors, in both orders, and by ranks
  swiglu        SwiGLU eager, compiled, and the package's
  heads         norms and rotation of heads one after the other, and the package's
  graph         both passes of an encoder's 32 layers as a CUDA graph
  experts       experts without rows, with one, and idle ones; steps of a small model against `transformers`
  share-7b-before, share-32b-before
                the shares with attention by FlashAttention-2 and SwiGLU compiled for any width

Each runs in a process of its own with a limit; one that fails says so and the others go on. Sections that compare with
`transformers` or with one rank come first, two side by side. Results are in `gpu.md` and `gpu.json`, written after each
section. The exit status is 1 where anything failed.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from benchmarks.gpu import report, sections
from benchmarks.gpu.sections import SECTIONS, SETS, TOTAL_S

RESULTS = Path(__file__).parents[1] / "results"


def main() -> int:
    """Measure, write, and print; returns the exit status."""
    options = _options()
    if not options.small and (missing := _no_gpu()):
        print(missing, file=sys.stderr)
        return 2
    outcomes: dict[str, sections.Outcome] = {}
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        for name, outcome in _outcomes(options, Path(folder)):
            outcomes[name] = outcome
            report.write(options.out, outcomes, small=options.small, seconds=time.monotonic() - start)
            print(report.text_of(name, outcome), flush=True)
    return 0 if all(outcome.passed for outcome in outcomes.values()) else 1


def _outcomes(options: argparse.Namespace, folder: Path) -> Iterator[tuple[str, sections.Outcome]]:
    """Outcome of each section in turn, while there is time. Two run side by side where nothing is timed."""
    start = time.monotonic()

    def run(name: str) -> sections.Outcome:
        print(f"{SECTIONS[name].title} ...", flush=True)
        left_s = options.time_limit - (time.monotonic() - start)
        limit_s = max(1.0, min(SECTIONS[name].limit_s * options.time_limit / TOTAL_S, left_s))
        return sections.run(name, folder / name, limit_s, small=options.small)

    times_nothing = _no_gpu() is not None
    for names in _untimed_first(options.sections):
        with ThreadPoolExecutor(2 if times_nothing or SECTIONS[names[0]].exact else 1) as pool:
            yield from zip(names, pool.map(run, names), strict=True)


def _untimed_first(names: Sequence[str]) -> list[list[str]]:
    """The sections that time nothing, then the others."""
    split = [[name for name in names if SECTIONS[name].exact == exact] for exact in (True, False)]
    return [part for part in split if part]


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--sections", type=_names, default=list(SETS["default"]), help=f"of {','.join((*SETS, *SECTIONS))}"
    )
    parser.add_argument("--small", action="store_true", help="small sizes, on a CPU where there is no GPU")
    parser.add_argument("--time-limit", type=float, default=TOTAL_S, help="seconds of all sections together")
    parser.add_argument("--out", type=Path, default=RESULTS, metavar="DIR", help="where to write")
    return parser.parse_args()


def _names(text: str) -> list[str]:
    names = [name for given in text.split(",") for name in SETS.get(given, (given,))]
    if unknown := [name for name in names if name not in SECTIONS]:
        raise argparse.ArgumentTypeError(f"found {unknown[0]}, expected some of {', '.join((*SETS, *SECTIONS))}")
    return list(dict.fromkeys(names))


def _no_gpu() -> str | None:
    """What to say where PyTorch sees no GPU."""
    import torch

    if torch.cuda.is_available():
        return None
    built = f"built for CUDA {torch.version.cuda}" if torch.version.cuda else "built without CUDA"
    return (
        f"error: found no GPU (PyTorch {torch.__version__}, {built}), expected one, because this measures what only a "
        "GPU shows; run it on a machine with one, with a PyTorch that is built for its driver, or add --small to try "
        "the sections on the CPU"
    )


if __name__ == "__main__":
    raise SystemExit(main())
