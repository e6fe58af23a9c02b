"""Kill a run at least twenty times, and see that it ends as one that nobody touched.

Rounds: in one layout the two must agree bit by bit; with another layout and number of ranks at each start they agree to
rounding. Kills hit one rank, all, or torchrun with all; half of them are aimed at a save. In the last round two
launchers stand for two hosts, and one rank of either is killed at a time: all ranks of both go.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import shutil
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from transformers.utils.logging import disable_progress_bar

from megatron_hetero.base.outputs import name_of, unfinished
from tests.functional.checkpoint.runs import tensors
from tests.support.folders import ModelChoice, write_data, write_model
from tests.torture.kills import Durations, Kill, Killed, draw, newest_whole, phase_of, strike, wait_for_moment
from tests.torture.watched import Off, Said, Watched

MODEL = ModelChoice(
    heads=8, kv_heads=4, head_dim=12, vision_heads=4, vision_ffn=152, text_ffn=514, vision_layers=2, text_layers=4
)
CONFIG = """\
model: {hf_path: model, dtype: float32}
data:
  registry:
    a: {annotations: a/data.jsonl, images: a/images}
    b: {annotations: b/data.jsonl, images: b/images}
  datasets: [a%50, b%150]
  workers: 2
train: {global_batch_size: 4}
optimizer: {name: adamw, lr: 1e-3, weight_decay: 0.1}
checkpoint: {keep_last: 2}
"""
STEPS_PER_KILL = 4
START_S = 120.0
"""Longest start of a run; longer is a hang."""
GONE_S = 8.0
"""Longest time that a rank may live after another was killed."""
SAME = ("loss", "grad_norm", "lr", "tokens", "images", "supervised_tokens")


@dataclass(frozen=True)
class Start:
    """How a run is started: layouts, number of ranks, further flags."""

    vision: str
    text: str
    ranks: int
    more: str = ""

    def __str__(self) -> str:
        return f"{self.vision}|{self.text}{' ' if self.more else ''}{self.more}"

    def flags(self, folder: Path, run: Path, steps: int, interval: int) -> list[str]:
        """The command line."""
        return (
            f"--config {folder}/config.yaml --vision-parallel {self.vision} --text-parallel {self.text} "
            f"--train.iters {steps} --checkpoint.dir {run}/checkpoints --checkpoint.interval {interval} "
            f"--log.dir {run}/log {self.more}"
        ).split()


FIXED = (Start("sp:2", "tp:2", 2), Start("dp:1@0", "dp:1@1", 2), Start("dp:2", "pp:2", 2))
HOSTS = (Start("tp:2,dp:2", "tp:2,pp:2", 4), Start("dp:2@0-1", "pp:2@2-3", 4), Start("sp:4", "tp:4", 4))
CHANGING = (
    Start("dp:1", "tp:1", 1),
    Start("sp:2", "tp:2", 2, "--train.micro_batch_size 2"),
    Start("dp:1@0", "dp:1@1", 2, "--schedule.run_ahead 2"),
    Start("dp:2", "pp:2", 2, "--schedule.virtual_stages 2"),
    Start("sp:2@0-1", "pp:2@1-2", 3),
    Start("tp:2,dp:2", "tp:2,pp:2", 4),
)


@dataclass(frozen=True)
class Round:
    """One run that is killed, and one that is not. `starts`: one after the other, in a random order."""

    name: str
    starts: tuple[Start, ...]
    kills: tuple[Kill, ...]
    interval: int
    more: str = ""
    hosts: int = 1

    @property
    def steps(self) -> int:
        """Enough for all kills."""
        return STEPS_PER_KILL * self.interval * len(self.kills)


def write_inputs(folder: Path) -> None:
    """A model, two data sets and a configuration."""
    disable_progress_bar()
    write_model(folder / "model", MODEL)
    for seed, name in enumerate(("a", "b")):
        write_data(folder / name, 12, seed=seed)
    (folder / "config.yaml").write_text(CONFIG, encoding="utf-8")


def untouched(this: Round, folder: Path, run: Path, deadline: float) -> Durations:
    """Train without a kill. Returns how long its phases took."""
    start = time.monotonic()
    flags, ranks = flags_of(this, this.starts[0], folder, run), this.starts[0].ranks
    with Watched(flags, ranks, run / "output.log", this.hosts) as watched:
        watched.wait_for_step(1, min(deadline, start + START_S))
        first, saves, since = time.monotonic(), [], None
        while watched.running():
            saving = bool(unfinished(run / "checkpoints"))
            if saving and since is None:
                since = time.monotonic()
            if not saving and since is not None:
                saves.append(time.monotonic() - since)
                since = None
            time.sleep(0.001)
        if status := watched.wait(deadline):
            raise Off(f"a run that nobody touched ended with {status}; see {watched.log}")
        last = time.monotonic()
    save = statistics.median(saves)
    return Durations(first - start, (last - first) / this.steps, save)


def flags_of(this: Round, start: Start, folder: Path, run: Path) -> list[str]:
    """The command line of one start of a round."""
    return [*start.flags(folder, run, this.steps, this.interval), *this.more.split()]


def killed_run(
    this: Round, folder: Path, run: Path, durations: Durations, rng: random.Random, deadline: float
) -> Iterator[Killed]:
    """Train with the kills, to the end. Raises `Off` where anything is not as it must be."""
    checkpoints, kills, trained, number = run / "checkpoints", list(this.kills), 0, 0
    starts = itertools.cycle(rng.sample(this.starts, len(this.starts)))
    while kills:
        start, kill, number = next(starts), kills.pop(), number + 1
        flags = flags_of(this, start, folder, run)
        with Watched(flags, start.ranks, run / f"output-{number:02}.log", this.hosts) as watched:
            soon = min(deadline, time.monotonic() + START_S)
            ranks = wait_for_moment(kill, watched, trained, checkpoints, durations, soon)
            who, seconds = strike(kill, watched, ranks, rng, this.hosts * GONE_S)
            if watched.wait(time.monotonic() + this.hosts * GONE_S) == 0:
                raise Off(f"torchrun exited with 0 after a kill; see {watched.log}")
            said = watched.said()
            require_went_on(said, trained, watched.log)
            phase, newest = phase_of(said, checkpoints), newest_whole(checkpoints)
            require_kept(said, trained, newest, this)
            trained = newest
            yield Killed(kill, f"{start}: {who}", phase, newest, seconds)
    start = next(starts)
    with Watched(flags_of(this, start, folder, run), start.ranks, run / "output.log", this.hosts) as watched:
        finish(watched, trained, this, deadline)


def finish(watched: Watched, trained: int, this: Round, deadline: float) -> None:
    """Wait until the last step is trained. Raises `Off`."""
    if status := watched.wait(deadline):
        raise Off(f"the last start ended with {status}; see {watched.log}")
    said = watched.said()
    require_went_on(said, trained, watched.log)
    if said.steps and said.steps[-1] != this.steps:
        raise Off(f"the last step is {said.steps[-1]}, expected {this.steps}; see {watched.log}")


def require_went_on(said: Said, trained: int, log: Path) -> None:
    """Check that a start went on from the newest whole checkpoint, with the step after it, one by one."""
    if said.steps and (said.resumed or 0) != trained:
        raise Off(f"went on after step {said.resumed}, expected {trained}; see {log}")
    if said.steps != tuple(range(trained + 1, trained + 1 + len(said.steps))):
        raise Off(f"trained steps {said.steps}, expected those after {trained} in order; see {log}")


def require_kept(said: Said, trained: int, newest: int, this: Round) -> None:
    """Check that every save that had ended is there: at the latest, it has when the step after the next is printed."""
    begun = said.steps[-1] - 1 if said.steps else 0
    if "async" in this.more:
        begun -= this.interval
    if newest < max(trained, begun // this.interval * this.interval):
        raise Off(f"the newest whole checkpoint is after step {newest}; before the kill there was a later one")


def require_same(this: Round, killed: Path, whole: Path) -> str:
    """Compare two finished runs. Returns what was compared. Raises `Off` with the first differences."""
    one, other = (tensors(run / "checkpoints" / name_of(this.steps)) for run in (killed, whole))
    histories = [history(run / "log/metrics.jsonl") for run in (killed, whole)]
    if [line["step"] for line in histories[0]] != list(range(1, this.steps + 1)):
        raise Off(f"{killed}/log/metrics.jsonl does not have every step once")
    if len(this.starts) == 1:
        return _same_bits(one, other, histories, this.steps)
    return _alike(one, other, histories, this.steps)


def _same_bits(
    one: Mapping[str, torch.Tensor], other: Mapping[str, torch.Tensor], histories: Sequence[Any], steps: int
) -> str:
    unlike = [key for key in other if key not in one or not torch.equal(one[key], other[key])]
    if unlike or one.keys() != other.keys():
        raise Off(f"{len(unlike)} tensors of the last checkpoint differ from those of an untouched run: {unlike[:5]}")
    for mine, its in zip(*histories, strict=True):
        if any(mine[name] != its[name] for name in SAME):
            raise Off(f"step {mine['step']} was {mine}, and {its} in an untouched run")
    return f"{len(one)} tensors and {steps} lines of metrics have the same bits"


def _alike(
    one: Mapping[str, torch.Tensor], other: Mapping[str, torch.Tensor], histories: Sequence[Any], steps: int
) -> str:
    names = [key for key in other if key.startswith("weights/")]
    distance = max(float((one[key] - other[key]).norm() / other[key].norm()) for key in names)
    loss = max(abs(mine["loss"] - its["loss"]) for mine, its in zip(*histories, strict=True))
    counts = [key for key in other if key.startswith("step/") and not torch.equal(one[key], other[key])]
    text = f"over {steps} steps losses differ by {loss:.1e} at most, weights by {distance:.1e} of their norm"
    if counts or loss > 1e-3 or distance > 1e-2:
        raise Off(f"{text}; {len(counts)} counts of updates differ")
    return text


def history(path: Path) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def report(found: Sequence[Killed], wanted: int) -> None:
    """Print how many kills of which kind came when. Raises `Off` where too few came inside a save."""
    counts = Counter((killed.kill.victims, _kind(killed.phase)) for killed in found)
    phases = sorted({phase for _, phase in counts})
    print(f"\n{'':24}" + "".join(f"{phase:>26}" for phase in phases))
    for victims in sorted({victims for victims, _ in counts}):
        print(f"{victims:24}" + "".join(f"{counts[victims, phase]:>26}" for phase in phases))
    inside = sum(_kind(killed.phase) in ("inside a save", "after the rename") for killed in found)
    longest = max(killed.seconds for killed in found)
    print(f"{len(found)} kills, {inside} of them in a save; the longest death took {longest:.1f} s")
    if len(found) < wanted or 4 * inside < len(found):
        raise Off(f"{len(found)} kills, {inside} in a save; expected {wanted}, a quarter of them in a save")


def _kind(phase: str) -> str:
    kinds = {"inside the save": "inside a save", "between the rename": "after the rename", "after step": "in a step"}
    return next((kind for start, kind in kinds.items() if phase.startswith(start)), "during start-up")


def rounds(rng: random.Random, kills: int, changing: int, hosts: int, more: str) -> Iterator[Round]:
    """In one layout bit by bit, then in changing ones, then on two hosts."""
    if kills:
        yield Round("one-layout", (rng.choice(FIXED),), tuple(draw(rng, kills)), 1, more)
    if changing:
        yield Round("changing-layouts", CHANGING, tuple(draw(rng, changing)), 2, more)
    if hosts:
        ones = tuple(replace(kill, victims="one rank") for kill in draw(rng, hosts))
        yield Round("two-hosts", (rng.choice(HOSTS),), ones, 1, more, 2)


def torture(this: Round, folder: Path, rng: random.Random, deadline: float) -> list[Killed]:
    """One round. Prints a line for each kill. Raises `Off`."""
    whole, cut = folder / this.name / "untouched", folder / this.name / "killed"
    for run in (whole, cut):
        run.mkdir(parents=True)
    durations = untouched(this, folder, whole, deadline)
    print(
        f"{this.name}: {this.steps} steps, {len(this.kills)} kills; a start takes {durations.start_up:.1f} s, a step "
        f"with its save {durations.step * 1e3:.0f} ms, a save {durations.save * 1e3:.0f} ms",
        flush=True,
    )
    found = []
    for killed in killed_run(this, folder, cut, durations, rng, deadline):
        found.append(killed)
        print(f"{len(found):3}  {killed}", flush=True)
    print(f"{this.name}: {require_same(this, cut, whole)}", flush=True)
    return found


def main() -> None:
    """Exits with 1 and keeps the folder where anything is not as it must be."""
    parser = argparse.ArgumentParser(prog="python -m tests.torture", description=__doc__)
    parser.add_argument("--kills", type=int, default=24, help="of the run in one layout; 0 leaves it out")
    parser.add_argument("--changing", type=int, default=8, help="of the run in changing layouts; 0 leaves it out")
    parser.add_argument("--hosts", type=int, default=10, help="of the run on two hosts; 0 leaves it out")
    parser.add_argument("--seed", type=int, default=0, help="of what is killed when")
    parser.add_argument("--minutes", type=float, default=30.0, help="after which it gives up")
    parser.add_argument("--async", dest="beside", action="store_true", help="training goes on while it saves")
    options = parser.parse_args()
    more = "--checkpoint.async true" if options.beside else ""
    rng, start = random.Random(options.seed), time.monotonic()
    folder, found = Path(tempfile.mkdtemp(prefix="torture-")), list[Killed]()
    try:
        write_inputs(folder)
        for this in rounds(rng, options.kills, options.changing, options.hosts, more):
            found += torture(this, folder, rng, start + 60 * options.minutes)
        report(found, options.kills + options.changing + options.hosts)
    except Off as off:
        print(f"\nseed {options.seed}: {off}\nall files are in {folder}", file=sys.stderr)
        raise SystemExit(1) from None
    shutil.rmtree(folder)
    print(f"seed {options.seed}: passed in {time.monotonic() - start:.0f} s")


if __name__ == "__main__":
    main()
