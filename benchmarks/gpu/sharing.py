"""Several ranks on one device, with its real streams and kernels: loss and gradients against those of one rank.

NCCL refuses two ranks on a GPU, so that collectives are staged on the host (`groups.StagedGroup`). What this shows is
that the work on the device is in order whatever the layout: nothing is read before it is there, nothing overwritten
before it is read.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.crew import Crew
from benchmarks.gpu import cases, groups
from benchmarks.gpu.record import Record
from benchmarks.gpu.reference import difference, errors
from megatron_hetero.groups.platform import CPU, Platform

LOSS, GRADIENTS = 1e-5, 1e-4
"""Largest relative errors in fp32: of the loss, and of any gradient (as `reference.errors` has it)."""
SAME = 1e-6
"""How far apart may be, relatively, the losses of the same step done twice: sums on a GPU have no fixed order."""


@dataclass(frozen=True)
class Layout:
    """How ranks are laid out, and what else is set."""

    kind: str
    vision: str
    text: str
    more: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.vision}|{self.text}{' ' + ' '.join(self.more) if self.more else ''}"


VIRTUAL = ("--schedule.virtual_stages", "2")
RECOMPUTE = ("--schedule.kind", "recompute")
LAYOUTS: dict[int, tuple[Layout, ...]] = {
    2: (
        Layout("colocated", "sp:2", "tp:2"),
        Layout("disjoint", "dp:1@0", "dp:1@1"),
        Layout("colocated", "sp:2", "pp:2", RECOMPUTE),
    ),
    4: (
        Layout("colocated", "sp:4", "tp:2,dp:2"),
        Layout("colocated", "sp:4", "pp:4"),
        Layout("disjoint", "dp:2@0-1", "tp:2@2-3"),
        Layout("disjoint", "sp:2@0-1", "pp:2@2-3", VIRTUAL),
        Layout("mixed", "dp:2@0-1", "pp:3@1-3", ("--text-layers", "1", "2", "1")),
        Layout("mixed", "dp:3@0-2", "tp:2@2-3"),
    ),
}


def measure(record: Record, folder: Path, *, small: bool) -> None:
    """One rank, then all layouts."""
    cases.write(folder, small=small)
    on_gpu = torch.cuda.device_count() > 0
    record.put("device", "the GPU, through the host" if on_gpu else "the CPU, with copies")
    crews = {ranks: _crew(ranks, folder, on_gpu) for ranks in (1, *LAYOUTS)}
    for crew in crews.values():
        crew.wait()
    expected_loss, expected, _ = _gradients(crews[1], Layout("alone", "dp:1", "dp:1"))
    rows = []
    for ranks, layouts in LAYOUTS.items():
        for layout in layouts:
            start = time.monotonic()
            loss, found, again = _gradients(crews[ranks], layout)
            by_kind = errors(found, expected)
            off = abs(loss - expected_loss) / expected_loss
            rows.append({
                "ranks": ranks, "placement": layout.kind, "layout": str(layout), "loss error": off,
                "gradient error": difference(found, expected), "largest of a kind": max(by_kind.values()),
                "seconds": time.monotonic() - start,
            })  # fmt: skip
            record.put("layouts", rows)
            record.check(f"{layout}: relative error of the loss", off, LOSS)
            record.check(f"{layout}: largest relative error of a gradient", max(by_kind.values()), GRADIENTS)
            record.check(f"{layout}: the loss of the same step once more", abs(again - loss) / loss, SAME)
    for crew in crews.values():
        crew.close()


def _gradients(crew: Crew, layout: Layout) -> tuple[float, dict[str, Tensor], float]:
    loss, found, again = crew.run("gradients", layout.vision, layout.text, layout.more)[0]
    return loss, {name: torch.from_numpy(array) for name, array in found.items()}, again


def _crew(ranks: int, folder: Path, on_gpu: bool) -> Crew:
    # A process that was forked from one that has asked for GPUs cannot use them.
    return Crew(
        ranks,
        folder / f"store-{ranks}",
        Shares,
        folder,
        preload="benchmarks.gpu.sharing",
        join=join,
        start="spawn" if on_gpu else "forkserver",
        ready=False,
    )


def join(rank: int, ranks: int, store: str) -> Platform:
    """The platform of a rank: all ranks have the first device."""
    torch.set_num_threads(1)
    groups.register()
    device = torch.device("cuda", 0) if torch.cuda.is_available() else CPU
    if device.type == "cuda":
        torch.cuda.set_device(device)
    # Without `device_id`: there is no communicator on the device that could be split.
    dist.init_process_group(
        groups.StagedGroup.backend,
        store=dist.FileStore(store, ranks),
        rank=rank,
        world_size=ranks,
        timeout=timedelta(seconds=100),
    )
    return Platform(device, groups.StagedGroup.backend)


class Shares:
    """What the ranks run."""

    def __init__(self, platform: Platform, folder: Path):
        self.platform, self.folder = platform, folder

    def gradients(self, vision: str, text: str, more: tuple[str, ...]) -> tuple[float, Any, float]:
        """Loss and gradients of the first step, and its loss when it is done once more. Gradients on rank 0."""
        # Plain SGD: with the distributed optimizer no rank would have the sums of whole gradients.
        flags = cases.flags(self.folder, vision, text, "float32", "--optimizer.name", "sgd", *more)
        run = cases.build(self.platform, flags)
        loss, found = cases.gradients(run)
        again, _ = cases.gradients(run)
        return loss, {name: tensor.numpy() for name, tensor in found.items()}, again
