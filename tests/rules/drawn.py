"""Layouts, placements, schedules and micro-batches that a user could configure, drawn at random."""

from __future__ import annotations

import random
from dataclasses import dataclass
from itertools import product
from math import prod
from pathlib import Path

from megatron_hetero.layout.axes import divisors

BATCH = 12
"""Samples of the step, so that many degrees of data parallelism divide it."""
AXES = ("tp", "sp", "cp", "dp", "pp")
Ranks = tuple[int, ...]
BALANCE, COEFFICIENT = "--model.router_aux_loss_coef", 0.05


@dataclass(frozen=True)
class Drawn:
    """A run: its number of ranks, layouts by module and further flags."""

    ranks: int
    layouts: dict[str, str]
    flags: tuple[str, ...]

    @property
    def balance(self) -> float:
        """Coefficient of the loss that balances experts."""
        return COEFFICIENT if BALANCE in self.flags else 0.0

    def command(self, folder: Path) -> list[str]:
        """The configuration, for the model and data in `folder`."""
        data = "--data.registry.d.annotations", f"{folder}/data.jsonl", "--data.registry.d.images", f"{folder}/images"
        text = f"--model.hf_path {folder}/model --model.dtype float32 --log.dir {folder}/log "
        text += f"--data.datasets d --data.shuffle false --data.workers 0 --train.global_batch_size {BATCH}"
        if "detail" in self.layouts:
            text += f" --detail-hf_path {folder}/detail --detail-token <|video_pad|>"
        places = [part for name, layout in self.layouts.items() for part in (f"--{name}-parallel", layout)]
        return [*text.split(), *data, *places, *self.flags]

    def __str__(self) -> str:
        pairs = zip(self.flags[::2], self.flags[1::2], strict=True)
        settings = " ".join(f"{flag.removeprefix('--')} {value}" for flag, value in pairs)
        return f"{self.ranks} ranks, {' | '.join(self.layouts.values())}, {settings}"


def draw(rng: random.Random, world: int, experts: int) -> Drawn:
    placement = rng.choice(["colocated", "disjoint", "mixed"])
    vision, text = _ranks(rng, placement, world)
    layouts = {"vision": _layout(rng, vision), "text": _layout(rng, text, experts)}
    if rng.random() < 0.25:
        layouts = {"vision": layouts["vision"], "detail": _layout(rng, rng.choice([vision, text])), **layouts}
    schedule = rng.choice(["ahead"] if placement == "disjoint" else ["waves", "waves", "recompute"])
    flags = ["--schedule.kind", schedule, "--train.micro_batch_size", str(rng.choice([1, 1, 1, 2, 3]))]
    if schedule == "waves" and rng.random() < 0.7:
        flags += ["--schedule.waves", str(rng.randint(1, 5))]
    if schedule == "ahead":
        flags += ["--schedule.run_ahead", str(rng.choice([0, 1, 2, 3]))]
    if "pp" in layouts["text"] and rng.random() < 0.5:
        flags += ["--schedule.virtual_stages", "2"]
    for name, layout in layouts.items():
        if any(axis in layout for axis in ("dp", "sp", "cp")) and rng.random() < 0.3:
            flags += [f"--{name}-zero", str(rng.choice([2, 3]))]
        if "tp" in layout and rng.random() < 0.3:
            flags += [f"--{name}-tp_overlap", "true"]
    flags += ["--optimizer.name", rng.choice(["sgd", "adamw"])]
    if experts and rng.random() < 0.5:
        flags += [BALANCE, str(COEFFICIENT)]
    for name in layouts if experts and schedule != "recompute" else ():
        if (kind := rng.choice(["none", "full", "selective"])) != "none":
            flags += [f"--{name}-recompute", kind]
    return Drawn(world, layouts, tuple(flags))


def _ranks(rng: random.Random, placement: str, world: int) -> tuple[Ranks, Ranks]:
    """Of the encoder and of the text: together all, and each a range."""
    everyone = tuple(range(world))
    if placement == "colocated":
        return everyone, everyone
    if placement == "disjoint":
        cut = rng.randint(1, world - 1)
        return everyone[:cut], everyone[cut:]
    first, last = sorted(rng.sample(range(world + 1), 2))
    sides = rng.choice([(everyone[:last], everyone[first:]), (everyone[first:last], everyone)])
    return sides if rng.random() < 0.5 else (sides[1], sides[0])


def _layout(rng: random.Random, ranks: Ranks, experts: int = 0) -> str:
    """Degrees over so many ranks; few axes as often as many, stages in half of the cases where they divide. Experts are
    over ranks of a stage, in half of the cases as many as can be.
    """
    size = len(ranks)
    every = [degrees for degrees in product(divisors(size), repeat=len(AXES)) if prod(degrees) == size]
    staged = rng.random() < 0.5
    every = [degrees for degrees in every if (degrees[-1] > 1) == staged] or every
    used = rng.choice(sorted({sum(n > 1 for n in degrees) for degrees in every}))
    degrees = rng.choice([degrees for degrees in every if sum(n > 1 for n in degrees) == used])
    text = ",".join(f"{axis}:{n}" for axis, n in zip(AXES, degrees, strict=True) if n > 1) or "dp:1"
    if experts:
        ways = [ep for ep in divisors(size // degrees[-1]) if ep <= experts]
        text += f",ep:{rng.choice([*ways, *ways[-1:] * len(ways)])}"
    return f"{text}@{ranks[0]}-{ranks[-1]}" if size > 1 else f"{text}@{ranks[0]}"
