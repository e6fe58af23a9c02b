"""The interpreter of schedules on one rank. `execution` executes the actions of a step."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Collection, Mapping

from megatron_hetero.base.errors import UserError, one_of
from megatron_hetero.boundary.communicator import boundary_communicators
from megatron_hetero.groups.collective import on_every, require_alike
from megatron_hetero.groups.topology import Topology
from megatron_hetero.groups.watchdog import Stopwatch, watched
from megatron_hetero.layout.communicators import edge_ranks
from megatron_hetero.layout.graph import Edge, Graph
from megatron_hetero.schedule.contract import DeviceMicroBatch, ModuleOnRank, StepResult
from megatron_hetero.schedule.program import Schedule
from megatron_hetero.step.execution import StepExecution
from megatron_hetero.step.resources import RankResources, RunChecks


class Interpreter(RankResources):
    """Executes schedules on this rank."""

    @classmethod
    @watched
    def build(
        cls,
        topology: Topology,
        modules: Mapping[str, ModuleOnRank],
        graph: Graph,
        *,
        timeout_s: float | None = None,
        watch: Stopwatch | None = None,
        check: bool = True,
    ) -> Interpreter:
        """Build an interpreter on the groups of a topology that was built with the edges of `graph`. All ranks call it.

        Args:
            topology: with this rank and its groups.
            modules: the modules of this rank, by name.
            graph: what crosses along which edges, and the dtype of rows and hidden states.
            timeout_s: an action that takes longer, in seconds, ends the process with a message. 0: never. The default
                is that of the topology.
            watch: measures times; by default none are recorded.
            check: whether to compare the first hidden states between any two stages with the receiver's
                `hidden_shape`, and the first gradients of rows that several ranks need with the plan; and to refuse
                PyTorch's `DistributedDataParallel` in stages, and losses without a graph of modules that train.
                Without it, hidden states of another shape hang, abort, or go unnoticed if they have as many bytes, and
                gradients are counted too often, too seldom or not at all.

        Raises:
            UserError: on all ranks. `modules` are not those that the topology places on a rank, or lack a stage, or a
                stage after the first has no `hidden_shape`; or the edges of the graph are not the topology's; or ranks
                differ in dtypes or `check`.
        """
        named = graph

        def require() -> tuple[str, dict[str, str]]:
            nonlocal named
            _require_placed(topology, modules)
            named = _in_topology(topology, graph)
            facts = {"dtype": graph.dtype, "transport": graph.transport or graph.dtype, "check": check}
            return uuid.uuid4().hex, {name: str(fact) for name, fact in facts.items()}

        keys, facts = zip(*on_every(topology.host, require), strict=True)
        require_alike("interpreter", facts, range(topology.world_size), "build it alike")
        widths = {edge: named.width_of(edge) * len(named.outputs_of(edge)) for edge in topology.boundaries}
        return cls(
            topology=topology,
            graph=named,
            modules=modules,
            communicators=boundary_communicators(topology, widths, graph.dtype, transport=graph.transport, check=False),
            width=graph.width if isinstance(graph.width, int) else 0,
            watch=watch or Stopwatch(topology.platform, record=False),
            watchdog=topology.watchdog,
            timeout_s=timeout_s,
            checks=RunChecks(keys[0]) if check else None,
        )

    @watched
    def run(
        self,
        schedule: Schedule,
        load: Callable[[int], DeviceMicroBatch],
        after_backward: Callable[[str], None] = lambda _: None,
        before_last: Callable[[str, int], None] = lambda _, __: None,
    ) -> StepResult:
        """Execute this rank's actions.

        Args:
            schedule: for the modules and layouts of the interpreter.
            load: moves a micro-batch, numbered from 0, to the device; called when an action first needs it.
            after_backward: called with the name of a module after its last backward pass on this rank, even if that had
                nothing to compute: its gradients are those of the step.
            before_last: called with module and stage before the last backward pass of the stage on this rank, if that
                has something to compute.

        Returns:
            This rank's sums of losses and metrics. Gradients accumulate in the parameters.

        Raises:
            UserError: on the ranks that see it; the launcher or the watchdog ends the others. A model's output has the
                wrong shape or dtype, a plan is for another rank or batch, the schedule has other edges than the
                topology, a micro-batch has unknown modules, edges or calls, or gradients of rows contradict their plan.
        """
        mine = [edge for edge in schedule.edges if any(self.topology.rank in side for side in schedule.sides(edge))]
        _require_edges(self.topology, "schedule", mine, "give `build_schedule` and `Topology.build` the same `edges`")
        return StepExecution(self, schedule, load, after_backward, before_last).run()


def _require_placed(topology: Topology, modules: Mapping[str, ModuleOnRank]) -> None:
    """Check that the rank has its modules, the first stage of each as in the layouts, and later ones `hidden_shape`.
    Raises `UserError`.
    """
    rank, where = topology.rank, f"interpreter on rank {topology.rank}"
    for name, module in modules.items():
        if not isinstance(module, ModuleOnRank):
            found, fix = f"a {type(module).__name__} for `{name}`", "write `ModuleOnRank({0: model})`"
            raise UserError.at(where, found=found, expected="a ModuleOnRank", fix=fix)
    for name, layout in topology.layouts.items():
        stages = sorted(modules[name].stages) if name in modules else []
        first = layout.coordinate(rank).pp if rank in layout else None
        if (not stages) if first is None else first in stages:
            continue
        raise UserError.at(
            where,
            found=f"stages {stages} of `{name}`" if stages else f"no stage of `{name}`",
            expected=f"none of `{name}`" if first is None else f"stage {first} of `{name}`",
            because=f"its layout is {layout}",
            fix="give each rank the stages of its layouts, `layout.coordinate(rank).pp` being the first",
        )
    for name, module in modules.items():
        if name not in topology.layouts:
            expected = one_of(topology.layouts, "layouts", "some of")
            raise UserError.at(where, found=f"`{name}`", expected=expected, fix="name it as in the layouts")
        for number, model in module.stages.items():
            if number and not callable(getattr(model, "hidden_shape", None)):
                raise UserError.at(
                    where,
                    found=f"a {type(model).__name__} without `hidden_shape` as stage {number} of `{name}`",
                    expected="the shape of the hidden states that it receives",
                    fix="add a method `hidden_shape(batch)`, or give a Runner `Stage(model, hidden_shape)`",
                )


def _in_topology(topology: Topology, graph: Graph) -> Graph:
    """The graph with the names of the topology, whose edges on this rank it must have. Rows of one name that enter one
    stage must be equally wide, since they are in one tensor. Raises `UserError`.
    """
    named = graph.in_layouts(topology.layouts)
    mine = [edge for edge in named.edges if topology.rank in edge_ranks(topology.layouts, edge)]
    _require_edges(topology, "graph", mine, "give `Topology.build` the edges of the graph in `edges`")
    first: dict[tuple[str, int, str], Edge] = {}
    for edge in named.edges:
        for name in named.outputs_of(edge):
            other = first.setdefault((edge.target, edge.target_stage or 0, name), edge)
            if (width := named.width_of(edge)) != named.width_of(other):
                raise UserError.at(
                    "width",
                    found=f"{named.width_of(other)} of `{name}` along `{other}` and {width} along `{edge}`",
                    expected="one width, or several names",
                    because="the stage gets all rows of a name in one tensor",
                    fix="name them differently, in `outputs`",
                )
    return named


def _require_edges(topology: Topology, what: str, mine: Collection[Edge], fix: str) -> None:
    """Check that the edges of a graph or schedule that include the rank are the topology's. Raises `UserError`."""
    if set(mine) != topology.boundaries.keys():
        names, own = (", ".join(sorted(f"`{edge}`" for edge in edges)) for edges in (mine, topology.boundaries))
        where, found = f"interpreter on rank {topology.rank}", f"the edges {names}" if names else "no edges"
        expected, because = own or "none", f"the topology has {'these' if own else 'no edges'} on this rank"
        raise UserError.at(where, found=f"a {what} with {found}", expected=expected, because=because, fix=fix)
