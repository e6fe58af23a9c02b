"""The interpreter of schedules on one rank. What it does with the actions of a step is in `step`."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence

import torch
from torch import Tensor

from megatron_hetero.boundary.communicator import boundary_communicators
from megatron_hetero.distributed.communicators import edge_ranks
from megatron_hetero.distributed.topology import Topology
from megatron_hetero.errors import UserError
from megatron_hetero.execution.contract import DeviceMicroBatch, ModuleOnRank, RandomStates
from megatron_hetero.execution.resources import RankResources
from megatron_hetero.execution.step import StepExecution
from megatron_hetero.execution.watch import Stopwatch, Watchdog
from megatron_hetero.layout.edge import Edge, as_edge
from megatron_hetero.names import ROWS
from megatron_hetero.schedule.program import Schedule


class Interpreter(RankResources):
    """Executes schedules on this rank."""

    @classmethod
    def build(
        cls,
        topology: Topology,
        modules: Mapping[str, ModuleOnRank],
        *,
        width: int,
        dtype: torch.dtype,
        outputs: Mapping[Edge, Sequence[str]] | None = None,
        transport: torch.dtype | None = None,
        timeout_s: float = 1800.0,
        watch: Stopwatch | None = None,
        watchdog: Watchdog | None = None,
        random: RandomStates | None = None,
    ) -> Interpreter:
        """An interpreter on the groups of a topology that was built with the boundaries as `edges`.

        Args:
            topology: with this rank and its groups.
            modules: the modules of this rank, by name.
            width: elements of a row of one output.
            dtype: of hidden states and rows.
            outputs: which outputs of an encoder cross along an edge, of edges where these are not its rows alone.
            transport: dtype of rows on the wire; None: `dtype`.
            timeout_s: an action that takes longer, in seconds, ends the process with a message. 0: never.
            watch: measures times; default: none are recorded.
            watchdog: the rank's existing watchdog, instead of a new one with `timeout_s`.
            random: the states of the generators that models use; default: PyTorch's own.

        Raises:
            UserError: `modules` are not those that the topology places on this rank, or lack a stage; or `outputs` has
                an edge that the topology does not have.
        """
        _require_placed(topology, modules)
        _require_edges(topology, outputs or {})
        further = {as_edge(edge, topology.layouts): tuple(names) for edge, names in (outputs or {}).items()}
        crossing = dict.fromkeys(topology.boundaries, (ROWS,)) | further
        widths = {edge: width * len(crossing[edge]) for edge in topology.boundaries}
        return cls(
            modules=modules,
            communicators=boundary_communicators(topology, widths, dtype, transport=transport, check=False),
            outputs=crossing,
            pipelines=topology.pipelines,
            rank=topology.rank,
            width=width,
            dtype=dtype,
            device=topology.platform.device,
            watch=watch or Stopwatch(topology.platform, record=False),
            watchdog=watchdog or Watchdog.of_world(timeout_s, topology.platform),
            random=random or RandomStates.of(topology.platform),
        )

    def run(self, schedule: Schedule, load: Callable[[int], DeviceMicroBatch]) -> Tensor:
        """Execute this rank's actions.

        Args:
            schedule: for the modules and layouts of the interpreter.
            load: moves a micro-batch, numbered from 0, to the device; called when an action first needs it.

        Returns:
            This rank's sum of losses, fp32 scalar; 0 on ranks without the last stage of the text module. Gradients
            accumulate in the parameters.

        Raises:
            ValueError: a model's output has the wrong shape or dtype, or a plan is of another rank or batch, or the
                schedule has other edges than the topology.
        """
        _require_same_edges(self, schedule)
        return StepExecution(self, schedule, load).run()


def _require_placed(topology: Topology, modules: Mapping[str, ModuleOnRank]) -> None:
    """Check that the rank holds its modules, and the first stage of each, as in the layouts."""
    rank = topology.rank
    for name, layout in topology.layouts.items():
        expected = f"stage {layout.coordinate(rank).pp} of `{name}`" if rank in layout else f"none of `{name}`"
        held = sorted(modules[name].stages) if name in modules else []
        if (layout.coordinate(rank).pp in held) if rank in layout else not held:
            continue
        raise UserError.at(
            f"interpreter on rank {rank}",
            found=f"stages {held} of `{name}`" if held else f"no stage of `{name}`",
            expected=expected,
            because=f"its layout is {layout}",
            fix="give each rank the stages of its layouts, `layout.coordinate(rank).pp` being the first",
        )
    if unknown := sorted(modules.keys() - topology.layouts.keys()):
        found, expected = f"`{unknown[0]}`", f"some of {', '.join(topology.layouts)}"
        raise UserError.at(
            f"interpreter on rank {rank}", found=found, expected=expected, fix="name it as in the layouts"
        )


def _require_edges(topology: Topology, outputs: Mapping[Edge, Sequence[str]]) -> None:
    """Check that the edges of `outputs` are the topology's, as far as they include the rank."""
    for edge in outputs:
        known = {edge.source, edge.target} <= topology.layouts.keys()
        named = as_edge(edge, topology.layouts) if known else edge
        if named in topology.boundaries or (known and topology.rank not in edge_ranks(topology.layouts, named)):
            continue
        raise UserError.at(
            f"interpreter on rank {topology.rank}",
            found=f"outputs of `{edge}`",
            expected=f"outputs of some of {_listed(topology.boundaries)}",
            because="the topology has no other edges on this rank",
            fix="give `Topology.build` the edge in `edges`",
        )


def _require_same_edges(interpreter: Interpreter, schedule: Schedule) -> None:
    """Check that the edges of a schedule that include the rank are those of the communicators."""
    mine = {edge for edge in schedule.edges if any(interpreter.rank in side for side in schedule.sides(edge))}
    if mine != interpreter.communicators.keys():
        raise UserError.at(
            f"interpreter on rank {interpreter.rank}",
            found=f"a schedule with the edges {_listed(mine)}",
            expected=_listed(interpreter.communicators),
            because="the topology has these",
            fix="give `build_schedule` and `Topology.build` the same `edges`",
        )


def _listed(edges: Collection[Edge]) -> str:
    return ", ".join(sorted(f"`{edge}`" for edge in edges)) or "none"
