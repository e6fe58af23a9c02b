"""The runner of a module graph. Modules may have pipeline stages, and ranks run concurrently, as a schedule says."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

import torch
from torch import nn

from megatron_hetero.base.errors import UserError, one_of
from megatron_hetero.boundary.boundary import Boundary, Rows
from megatron_hetero.boundary.communicator import boundary_communicators
from megatron_hetero.boundary.loaded import LoadedPlan
from megatron_hetero.groups.collective import all_or_none, on_every, require_equal
from megatron_hetero.groups.topology import Topology
from megatron_hetero.groups.watchdog import Stopwatch, watched
from megatron_hetero.layout.graph import Edge, Graph, as_edge
from megatron_hetero.schedule.builders import build_schedule
from megatron_hetero.schedule.check import check_schedule
from megatron_hetero.schedule.contract import MicroBatchInputs, ModuleOnRank, StageModel, StepResult, chunks_of
from megatron_hetero.schedule.program import Schedule
from megatron_hetero.schedule.settings import ScheduleSettings
from megatron_hetero.step.execution import StepExecution
from megatron_hetero.step.fully_sharded import gathered_stages
from megatron_hetero.step.joint import JointOptimizer
from megatron_hetero.step.resources import RankResources, RunChecks


class Stage(nn.Module):
    """A pipeline stage after the first one, for a model without a method `hidden_shape`.

    `hidden_shape`: the shape of the hidden states that the stage receives, or a function that returns this shape for
    the module's input of a micro-batch.
    """

    def __init__(self, model: Callable[..., Any], hidden_shape: Sequence[int] | Callable[[Any], Sequence[int]]):
        super().__init__()
        self.model = model
        self.hidden_shape = hidden_shape if callable(hidden_shape) else lambda _: hidden_shape

    def forward(self, *inputs: Any) -> Any:
        """Return the model's output for `inputs`."""
        return self.model(*inputs)


class Runner(RankResources):
    """Runs training steps of a topology's module graph. All ranks build and call it equally. `runner(inputs)` plans the
    transfers of rows and runs a schedule from `settings`; `runner.run(schedule, load)` runs any schedule and plans.

    docs/library.md, "Models", describes the arguments and results of models.

    Args:
        topology: a topology with a graph, from `build`.
        modules: this rank's stage of each module, None or absent for modules of other ranks; a `Stage` if the model has
            no `hidden_shape`. For `interleaved` modules, a mapping from stage numbers to models, or a `ModuleOnRank`.
        optimizer: the result of `build_optimizers` for these modules. With it, sums of gradients in buffers (`AdamW`,
            `SGD`) begin during the last backward pass of a step.
        settings: the settings of the schedule, for graphs in which all modules feed one module.
        forward_only: names of modules without a backward pass, which no trained module may feed.
        timeout_s: seconds after which an action ends the process with a message; 0: no limit; default: the topology's.
        watch: a stopwatch for the times of modules; by default, times are not recorded.
        check: whether to compare arguments between ranks, hidden states with `hidden_shape`, and gradients of rows with
            their plan, and to refuse PyTorch's `DistributedDataParallel` in stages, and losses of trained modules that
            have no graph. Without checks, ranks with different arguments hang or abort, and gradients may be counted
            too often, too seldom or not at all.

    Raises:
        UserError: on all ranks. `build_schedule` refuses the settings; `modules` are not the modules and stages that
            the topology places on a rank; a stage after the first has no `hidden_shape`; a module in `forward_only` has
            trained parameters; rows of one name that enter one stage differ in width; or ranks' arguments differ.
    """

    @watched
    def __init__(
        self,
        topology: Topology,
        modules: Mapping[str, StageModel | Mapping[int, StageModel] | ModuleOnRank | None],
        *,
        optimizer: JointOptimizer | None = None,
        settings: ScheduleSettings | None = None,
        forward_only: Collection[str] = (),
        timeout_s: float | None = None,
        watch: Stopwatch | None = None,
        check: bool = True,
    ):
        graph = topology.graph
        if graph is None:
            raise UserError.at("Runner", problem="the topology has no graph", fix="build it with `build`")
        facts = {"check": str(check), "settings": str(settings), "forward_only": str(sorted(forward_only))}
        require_equal(topology.host, "Runner", facts, "build it equally on all ranks")
        local = {name: _on_rank(topology, name, each) for name, each in modules.items() if each is not None}

        def require() -> str:
            _require_placed(topology, local)
            _require_one_width(graph)
            if check:
                _require_frozen(forward_only, local, optimizer)
            return uuid.uuid4().hex

        key, *_ = on_every(topology.host, require)
        widths = {edge: graph.width_of(edge) * len(graph.outputs_of(edge)) for edge in topology.boundaries}
        super().__init__(
            topology=topology,
            graph=graph,
            modules=local,
            communicators=boundary_communicators(topology, widths, graph.dtype, transport=graph.transport, check=False),
            gathered=gathered_stages(optimizer.modules if optimizer else ()),
            optimizer=optimizer,
            watch=watch or Stopwatch(topology.platform, record=False),
            watchdog=topology.watchdog,
            timeout_s=timeout_s,
            checks=RunChecks(key) if check else None,
        )
        self._settings, self._forward_only = settings, tuple(forward_only)
        # Cache on the object: a cache on the class would keep the runner's process groups and their threads alive.
        self.schedule = lru_cache(maxsize=8)(self._checked_schedule)
        if check:
            self.schedule(1)  # Raise now for a graph and settings that have no valid schedule.
        planned = topology.planned
        self._boundaries = {edge: Boundary(topology, edge, check=check, timeout_s=timeout_s) for edge in planned}

    @watched
    def __call__(self, micro_batches: Sequence[MicroBatchInputs], *, forward_only: bool | None = None) -> StepResult:
        """Run a step and accumulate gradients in the parameters. If the step sums gradients in buffers, call
        `optimizer.zero_grad()` before the next step with a backward pass.

        `micro_batches`: this rank's inputs of each micro-batch, equally many on all ranks. `forward_only`: whether to
        skip the backward pass, as in an evaluation; the default is true inside `torch.no_grad()`. Returns this rank's
        sums of losses and metrics by module; `total_loss` adds losses up over ranks.

        With `check`, raises `UserError` on all ranks if summed gradients are not zeroed; the number of micro-batches,
        `forward_only`, or a module's inputs differ between ranks; a module without input has rows; or rows belong to no
        edge of the graph or are refused by `Boundary.plan`.
        """
        forward_only = not torch.is_grad_enabled() if forward_only is None else forward_only
        if self.checks:
            all_or_none(self.topology.host, lambda: self._require_known(micro_batches, trains=not forward_only))
            facts = {"micro-batches": str(len(micro_batches)), "forward_only": str(forward_only)}
            facts |= {
                f"micro-batches with an input of `{name}`": self._with_input(name, micro_batches)
                for name in self.topology.layouts
            }
            require_equal(self.topology.host, "Runner", facts, "give all ranks their part of the same micro-batches")
        with torch.set_grad_enabled(not forward_only):
            plans = self._plans(micro_batches)

        def load(m: int) -> MicroBatchInputs:
            inputs = {name: given for name, given in micro_batches[m].inputs.items() if given is not None}
            return replace(micro_batches[m], inputs=inputs, rows={edge: each[m] for edge, each in plans.items()})

        return self.run(self.schedule(len(micro_batches), forward_only=forward_only), load)

    @watched
    def run(self, schedule: Schedule, load: Callable[[int], MicroBatchInputs]) -> StepResult:
        """Execute this rank's actions of a schedule, and accumulate gradients in the parameters.

        `schedule`: a schedule for the layouts and edges of the topology. `load`: a function that moves a micro-batch,
        numbered from 0, to the device, called when an action first needs it. Returns this rank's sums of losses and
        metrics. Raises `UserError` on each rank that finds a wrong model output, micro-batch or schedule, or summed
        gradients that were not zeroed; the launcher or the watchdog ends the other ranks.
        """
        self._require_edges(schedule)
        trains = torch.is_grad_enabled() and any(module.backward for module in schedule.modules)
        if trains and self.optimizer is not None:
            self.optimizer.require_unsummed()
        return StepExecution(self, schedule, load).run()

    def _checked_schedule(self, micro_batches: int, *, forward_only: bool = False) -> Schedule:
        """Build and check the schedule of a step with this number of micro-batches."""
        layouts, edges = self.topology.layouts, self.graph.edges
        frozen = tuple(layouts) if forward_only else self._forward_only
        schedule = build_schedule(layouts, micro_batches, self._settings, forward_only=frozen, edges=edges)
        check_schedule(schedule)
        return schedule

    def _plans(self, micro_batches: Sequence[MicroBatchInputs]) -> dict[Edge, list[LoadedPlan]]:
        """Return the plans of all micro-batches by edge. Raises `UserError` on all ranks if any rank's plan fails."""
        plans, problems, layouts = dict[Edge, list[LoadedPlan]](), list[UserError](), self.topology.layouts
        given = [{as_edge(ends, layouts): rows for ends, rows in each.rows.items()} for each in micro_batches]
        for edge, boundary in self._boundaries.items():
            try:
                plans[edge] = boundary.plans([each.get(edge, Rows()) for each in given])
            except UserError as error:
                problems.append(error)

        def require() -> None:
            if problems:
                raise problems[0]

        if self.checks:
            all_or_none(self.topology.host, require)
        else:
            require()
        return plans

    def _require_edges(self, schedule: Schedule) -> None:
        """Check that a schedule has the same edges on this rank as the topology. Raises `UserError`."""
        rank, boundaries = self.topology.rank, self.topology.boundaries
        mine = [edge for edge in schedule.edges if any(rank in side for side in schedule.sides(edge))]
        if set(mine) != boundaries.keys():
            names, expected = (", ".join(sorted(f"`{edge}`" for edge in edges)) for edges in (mine, boundaries))
            found = f"a schedule with the edges {names}" if names else "a schedule with no edges"
            because = f"the topology has {'these' if expected else 'no edges'} on this rank"
            fix = "give `build_schedule` the edges of the graph"
            where = f"Runner on rank {rank}"
            raise UserError.at(where, found=found, expected=expected or "none", because=because, fix=fix)

    def _with_input(self, name: str, micro_batches: Sequence[MicroBatchInputs]) -> str | None:
        """Return text that lists the micro-batches with an input of the module; None if this rank lacks the module."""
        if not self.topology.has(name):
            return None
        inputs = {m: each.inputs.get(name) for m, each in enumerate(micro_batches)}
        chunks = {m: len(chunks_of(given)) for m, given in inputs.items() if given is not None}
        return f"[{', '.join(f'{m}' if n == 1 else f'{m} in {n} chunks' for m, n in chunks.items())}]"

    def _require_known(self, micro_batches: Sequence[MicroBatchInputs], *, trains: bool) -> None:
        """Check that inputs belong to modules of this rank, that rows belong to edges of the graph, that modules with
        rows have an input and, if `trains`, that gradients have not been summed. Raises `UserError`.
        """
        if trains and self.optimizer is not None:
            self.optimizer.require_unchanged()
            self.optimizer.require_unsummed()
        local = [name for name in self.topology.layouts if self.topology.has(name)]

        def refuse(what: str, **problem: str) -> None:
            raise UserError.at(f"Runner on rank {self.topology.rank}: {what}", **problem)

        for each in micro_batches:
            if unknown := [name for name, given in each.inputs.items() if given is not None and name not in local]:
                found, expected = f"an input of `{unknown[0]}`", one_of(local, "modules on this rank", "those of")
                refuse("inputs", found=found, expected=expected, fix="give the inputs of this rank's modules")
            for ends, rows in each.rows.items():
                if (edge := as_edge(ends, self.topology.layouts)) not in self.graph.edges:
                    expected = one_of(self.graph.edges, "edges in the graph", "of")
                    refuse("rows", found=f"rows of `{edge}`", expected=expected, fix="name an edge of the graph")
                if not isinstance(rows, Rows):
                    found, fix = f"a {type(rows).__name__}", "write `Rows(held, needed)`"
                    refuse(f"rows of `{edge}`", found=found, expected="`Rows`", fix=fix)
                rows = rows.counted(self.topology, edge)
                for name, ids, what in ((edge.source, rows.held, "held"), (edge.target, rows.needed, "needed")):
                    if _number_of(ids) and name in local and each.inputs.get(name) is None:
                        found = f"none of `{name}`, and {_number_of(ids)} {what} rows of `{edge}`"
                        expected, because = "an input where there are rows", "a module without an input is not run"
                        fix = "give it one, such as `()` for a module that takes only rows"
                        refuse("inputs", found=found, expected=expected, because=because, fix=fix)


def _number_of(ids: Any) -> int:
    """Return the number of ids; 1 for a value without a length, which `Boundary.plan` refuses."""
    return len(ids) if hasattr(ids, "__len__") and getattr(ids, "ndim", 1) else 1


def _on_rank(topology: Topology, name: str, given: Any) -> ModuleOnRank:
    """Return the `ModuleOnRank` for a module that the user has given in any of the accepted forms."""
    if isinstance(given, ModuleOnRank):
        return given
    if isinstance(given, Mapping):
        return ModuleOnRank(given)
    layout = topology.layouts.get(name)
    return ModuleOnRank({layout.coordinate(topology.rank).pp if layout and topology.rank in layout else 0: given})


def _require_placed(topology: Topology, modules: Mapping[str, ModuleOnRank]) -> None:
    """Check that the rank has the modules and first stages that the layouts place on it, and that stages after the
    first have `hidden_shape`. Raises `UserError`.
    """
    rank, where = topology.rank, f"Runner on rank {topology.rank}"
    for name, layout in topology.layouts.items():
        stages = sorted(modules[name].stages) if name in modules else []
        first = layout.coordinate(rank).pp if rank in layout else None
        if (not stages) if first is None else first in stages:
            continue
        found = f"stages {stages} of `{name}`" if stages else f"no stage of `{name}`"
        expected = f"none of `{name}`" if first is None else f"stage {first} of `{name}`"
        fix = "give each rank the stages of its layouts, `layout.coordinate(rank).pp` being the first"
        raise UserError.at(where, found=found, expected=expected, because=f"its layout is {layout}", fix=fix)
    for name, module in modules.items():
        if name not in topology.layouts:
            expected = one_of(topology.layouts, "layouts", "some of")
            raise UserError.at(where, found=f"`{name}`", expected=expected, fix="name it as in the layouts")
        for number, model in module.stages.items():
            if number and not callable(getattr(model, "hidden_shape", None)):
                found = f"a {type(model).__name__} without `hidden_shape` as stage {number} of `{name}`"
                expected = "the shape of the hidden states that it receives"
                fix = "add a method `hidden_shape(batch)`, or give `Stage(model, hidden_shape)`"
                raise UserError.at(where, found=found, expected=expected, fix=fix)


def _require_one_width(graph: Graph) -> None:
    """Check that all rows with the same name that enter a stage have the same width, since they are concatenated.
    Raises `UserError`.
    """
    first: dict[tuple[str, int, str], Edge] = {}
    for edge in graph.edges:
        for name in graph.outputs_of(edge):
            other = first.setdefault((edge.target, edge.target_stage or 0, name), edge)
            if (width := graph.width_of(edge)) != graph.width_of(other):
                where, because = "width", "the stage gets all rows of a name in one tensor"
                found = f"{graph.width_of(other)} of `{name}` along `{other}` and {width} along `{edge}`"
                fix = "name them differently, in `outputs`"
                raise UserError.at(where, found=found, expected="one width, or several names", because=because, fix=fix)


def _require_frozen(
    forward_only: Collection[str], modules: Mapping[str, ModuleOnRank], optimizer: JointOptimizer | None
) -> None:
    """Check that modules without a backward pass have no trained parameters. Raises `UserError`."""
    trained = {each.name for each in optimizer.modules if each.trained} if optimizer else set[str]()
    for name in forward_only:
        stages = modules[name].stages.values() if name in modules else ()
        parameters = (p for each in stages if isinstance(each, nn.Module) for p in each.parameters())
        if name in trained or any(p.requires_grad for p in parameters):
            because, fix = "they would get no gradients", f"freeze them: `{name}.requires_grad_(False)`"
            where, problem = f"Runner: forward_only `{name}`", "it has parameters that require gradients"
            raise UserError.at(where, problem=problem, because=because, fix=fix)
