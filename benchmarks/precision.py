"""What optimizer states in fewer bits cost in quality: the demo's task, from several seeds, in every setting.

    make demo/demo.json
    python -m benchmarks.precision demo

trains `--steps` steps per setting and seed on one process, bfloat16 throughout, and writes
`benchmarks/results/precision.*`: the final training loss (mean of the last 50 steps), held-out loss and exact match
beside those with fp32 states, and the curves. A seed draws another order of samples. Runs that are in `--work` already
are not repeated.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from hashlib import blake2b
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import yaml

from benchmarks.report import table, write

LAST = 50
"""Steps whose mean is the final loss."""
FP32 = "fp32 states"


def _of(master: str, moments: str, gradients: str) -> tuple[str, ...]:
    chosen = {"master": master, "moments": moments, "gradients": gradients}
    return tuple(
        word
        for m in ("vision", "text")
        for name, value in chosen.items()
        for word in (f"--{m}-precision.{name}", value)
    )


SETTINGS: Mapping[str, tuple[str, ...]] = {
    FP32: (),
    "bf16 moments": _of("split", "bfloat16", "float32"),
    "8-bit moments": _of("split", "8bit", "float32"),
    "bf16 gradients": _of("split", "float32", "bfloat16"),
    "bf16 moments and gradients": _of("split", "bfloat16", "bfloat16"),
    "no masters": _of("none", "float32", "float32"),
    "no masters, 8-bit moments, bf16 gradients": _of("none", "8bit", "bfloat16"),
}
"""Where masters are `split`, they train as fp32 masters do, bit by bit."""
BYTES: Mapping[str, str] = {
    FP32: "18 (16 with `split`)",
    "bf16 moments": "12",
    "8-bit moments": "10.03",
    "bf16 gradients": "14",
    "bf16 moments and gradients": "10",
    "no masters": "14",
    "no masters, 8-bit moments, bf16 gradients": "6.03",
}
"""Of a parameter: weight, master, moments and gradient, with `split` masters where there are any."""


@dataclass(frozen=True)
class Run:
    """Losses of all steps, and held-out loss and exact match after the last."""

    losses: list[float]
    held_out: float
    exact_match: float

    @property
    def final(self) -> float:
        """The final training loss."""
        return mean(self.losses[-LAST:])


def train(demo: Path, folder: Path, setting: str, seed: int, steps: int) -> Run:
    """Train in a process of its own, unless `folder` has such a run."""
    history = folder / "metrics.jsonl"
    if not _is_whole(history, steps):
        chosen = yaml.safe_load((demo / "config.yaml").read_text(encoding="utf-8"))
        chosen.pop("export")
        config = demo / "precision.yaml"
        config.write_text(yaml.safe_dump(chosen), encoding="utf-8")
        flags = (
            f"--config {config} --model.hf_path {demo}/model --vision-parallel dp:1 --text-parallel dp:1 "
            f"--model.dtype bfloat16 --train.iters {steps} --train.seed {seed} --data.workers 0 --log.dir {folder} "
            f"--eval.datasets demo-heldout --eval.interval {steps}"
        )
        command = [sys.executable, "pretrain_vlm.py", *flags.split(), *SETTINGS[setting]]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env={**os.environ, "OMP_NUM_THREADS": "1"})
    lines = [json.loads(line) for line in history.read_text(encoding="utf-8").splitlines()]
    last = next(line for line in reversed(lines) if "eval_loss" in line)
    return Run([line["loss"] for line in lines if "loss" in line], last["eval_loss"], last["eval_exact_match"])


def _is_whole(history: Path, steps: int) -> bool:
    if not history.is_file():
        return False
    last = history.read_text(encoding="utf-8").splitlines()[-1]
    return json.loads(last).get("step") == steps and "eval_loss" in last


def report(runs: Mapping[str, Sequence[Run]]) -> str:
    """The table: mean ± standard deviation over seeds, and the difference from fp32 of the same seeds."""
    rows, base = [], runs[FP32]
    for name, of_setting in runs.items():
        losses, matches = [run.held_out for run in of_setting], [100 * run.exact_match for run in of_setting]
        apart = [run.held_out - other.held_out for run, other in zip(of_setting, base, strict=True)]
        finals = [run.final for run in of_setting]
        rows.append(
            f"{name} | {BYTES[name]} | {_spread(finals, 4)} | {_spread(losses, 4)} | {_spread(matches, 1)} % | "
            f"{'' if name == FP32 else _spread(apart, 4)}"
        )
    count, steps = len(base), len(base[0].losses)
    return "\n\n".join(
        (
            f"The demo's task, bfloat16, {steps} steps, {count} seeds: mean ± standard deviation over seeds.",
            table(
                f"states | bytes per parameter | loss of the last {LAST} steps | held-out loss | held-out exact match "
                "| held-out loss less that of fp32, same seed",
                rows,
            ),
        )
    )


def _spread(values: Sequence[float], digits: int) -> str:
    return f"{mean(values):.{digits}f} ± {stdev(values):.{digits}f}"


def plot(runs: Mapping[str, Sequence[Run]]) -> Any:
    """Curves of the loss, means of `LAST` steps and of seeds."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 5), layout="constrained")
    axes = figure.subplots()
    for name, of_setting in runs.items():
        losses = [mean(of_step) for of_step in zip(*(run.losses for run in of_setting), strict=True)]
        smooth = [mean(losses[max(0, i - LAST) : i + 1]) for i in range(len(losses))]
        axes.plot(range(1, len(smooth) + 1), smooth, label=name, linewidth=2.5 if name == FP32 else 1.0)
    axes.set(xlabel="step", ylabel=f"training loss, mean of {LAST} steps and of seeds", yscale="log")
    axes.legend()
    axes.grid(alpha=0.3)
    return figure


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("demo", type=Path, help="folder of the demo")
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--work", type=Path, default=Path("precision-runs"), help="folder of all runs")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    options = parser.parse_args()
    if options.seeds < 2:
        parser.error("--seeds: 2 or more, for the spread")
    runs: dict[str, list[Run]] = {name: [] for name in SETTINGS}
    for seed in range(options.seeds):
        for name in SETTINGS:
            # Named by its flags, so that no run is taken for that of another setting.
            digest = blake2b(repr(SETTINGS[name]).encode(), digest_size=4).hexdigest()
            folder = options.work.absolute() / f"{digest}-{seed}"
            run = train(options.demo.absolute(), folder, name, seed, options.steps)
            print(f"seed {seed}, {name}: loss {run.final:.4f}, held out {run.held_out:.4f}", flush=True)
            runs[name].append(run)
    numbers = {name: [asdict(run) for run in of_setting] for name, of_setting in runs.items()}
    write(options.out, "precision", report(runs), numbers, plot(runs))
    print(report(runs))


if __name__ == "__main__":
    main()
