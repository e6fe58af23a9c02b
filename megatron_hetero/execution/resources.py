"""What a rank executes schedules with."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from megatron_hetero.boundary.communicator import BoundaryCommunicator
from megatron_hetero.distributed.topology import Links
from megatron_hetero.execution.checks import RunChecks
from megatron_hetero.execution.contract import ModuleOnRank
from megatron_hetero.layout.edge import Edge
from megatron_hetero.watch.stopwatch import Stopwatch
from megatron_hetero.watch.watchdog import Watchdog


@dataclass(eq=False, kw_only=True)
class RankResources:
    """What a rank executes schedules with.

    Attributes:
        modules: the modules of this rank, by name.
        communicators: of the edges that include this rank. They must not `check`: the two sides
            start crossings in different orders.
        outputs: the outputs of an encoder that cross along each edge.
        pipelines: the links of this rank's modules that have stages, by name.
        rank: of this process.
        width: elements of a row that the text module takes where it has no encoder.
        dtype: of hidden states and rows.
        device: of hidden states and rows.
        watch: measures the seconds of each module, by name, of "boundary" and of "pipeline".
        watchdog: is notified of every action before it begins.
        random: see `random_states`.
        checks: of hidden states, gradients of rows and models; None: there are none.
    """

    modules: Mapping[str, ModuleOnRank]
    communicators: Mapping[Edge, BoundaryCommunicator]
    outputs: Mapping[Edge, Sequence[str]]
    pipelines: Mapping[str, Links]
    rank: int
    width: int
    dtype: torch.dtype
    device: torch.device
    watch: Stopwatch
    watchdog: Watchdog
    random: tuple[Callable[[], Any], Callable[[Any], None]]
    checks: RunChecks | None

    def width_of(self, edge: Edge) -> int:
        """Elements of a row of one output that crosses along the edge."""
        return self.communicators[edge].width // len(self.outputs[edge])

    def __post_init__(self) -> None:
        checks = any(communicator.check for communicator in self.communicators.values())
        assert not checks, "the sides of a boundary start in different orders"
