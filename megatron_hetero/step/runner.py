"""The process groups of a graph of modules, and the runner of its steps: modules may have pipeline stages, and ranks
work at the same time by a schedule.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from megatron_hetero.base.errors import UserError, one_of
from megatron_hetero.boundary.boundary import Boundary, Rows
from megatron_hetero.boundary.loaded import LoadedPlan
from megatron_hetero.groups.collective import all_or_none, require_equal, require_same
from megatron_hetero.groups.platform import CPU, Platform
from megatron_hetero.groups.topology import Topology
from megatron_hetero.groups.watchdog import Stopwatch, Watchdog, watched
from megatron_hetero.layout.graph import Edge, Graph, as_edge
from megatron_hetero.layout.layout import Layout
from megatron_hetero.schedule.builders import build_schedule
from megatron_hetero.schedule.check import check_schedule
from megatron_hetero.schedule.contract import DeviceMicroBatch, InParts, ModuleOnRank, StageModel, StepResult
from megatron_hetero.schedule.program import Schedule
from megatron_hetero.schedule.settings import ScheduleSettings
from megatron_hetero.step.interpreter import Interpreter
from megatron_hetero.step.joint import JointOptimizer
from megatron_hetero.step.module import gathered_stages


def build(
    graph: Graph,
    layouts: Mapping[str, str | Layout] | None = None,
    *,
    platform: Platform | None = None,
    tied: Collection[str] = (),
    interleaved: Collection[str] = (),
    megatron: Collection[str] | None = None,
    decoding: Collection[str] = (),
    planned: bool = True,
    check: bool = True,
    timeout_s: float = 300.0,
    watchdog: Watchdog | None = None,
    **named: str | Layout,
) -> Topology:
    """Build the topology for the modules of `graph`, each in the layout with its name. All ranks call it alike.

        topology = build(graph, vision="dp:8", text="tp:4,dp:2")
        topology = build(graph, {"vision": "dp:8", "text": "tp:4,dp:2"})

    Args:
        graph: the modules, and the edges between them.
        layouts, named: by module; a layout without ranks is on all of them.
        platform: where tensors are; by default the current GPU if the default process group is NCCL's, else the CPU.
        tied, interleaved, megatron, decoding: as for `Topology.build`.
        planned: whether ranks exchange which rows cross, as a `Runner` does (see `Boundary.plan`).
        check: whether ranks compare their arguments, and check each group, as for `Topology.build`.
        timeout_s, watchdog: as for `Topology.build`.

    Raises:
        UserError: on all ranks. A module has no layout, or the graph not the module; a layout does not fit the ranks;
            ranks call it with different arguments; or no process group is initialised.
    """
    if not dist.is_initialized():
        fix = "call `torch.distributed.init_process_group`, or be inside `process_group()`"
        raise UserError.at("build", problem="no process group is initialised", fix=fix)
    platform = platform or _platform()
    watchdog = watchdog or Watchdog.of_world(timeout_s, platform)
    try:
        parsed = _parsed(graph, {**(layouts or {}), **named})
        graph, problem = graph.in_layouts(parsed), None
    except UserError as error:
        parsed, problem = {}, error
    if check:
        facts = _facts(graph, parsed) | {
            "problem": str(problem or "none"),
            "tied": str(sorted(tied)),
            "interleaved": str(sorted(interleaved)),
            "megatron": "all" if megatron is None else str(sorted(megatron)),
        }
        with watchdog.waiting(lambda: "`build`, with all other ranks,"):
            require_same(dist.group.WORLD, "build", facts, "call it with the same graph and layouts on all ranks")
    if problem is not None:
        raise problem
    topology = Topology.build(
        parsed,
        platform,
        edges=graph.edges,
        planned=graph.edges if planned else (),
        decoding=decoding,
        tied=tied,
        interleaved=interleaved,
        megatron=megatron,
        check=check,
        watchdog=watchdog,
    )
    return replace(topology, graph=graph)


def _facts(graph: Graph, layouts: Mapping[str, Layout]) -> dict[str, str]:
    """Arguments that must be equal on all ranks."""
    return {
        "edges": ", ".join(map(str, graph.edges)) or "none",
        **{f"layout of `{name}`": str(layout) for name, layout in layouts.items()},
        "modules": ", ".join(layouts),
        **{f"width of `{edge}`": str(graph.width_of(edge)) for edge in graph.edges},
        **{f"outputs of `{edge}`": ", ".join(graph.outputs_of(edge)) for edge in graph.edges},
        "dtype": str(graph.dtype),
        "transport": str(graph.transport),
    }


def _parsed(graph: Graph, layouts: Mapping[str, str | Layout]) -> dict[str, Layout]:
    """The layouts of the graph's modules, in its order. Raises `UserError`."""
    for name in (*graph.modules, *layouts):
        if name not in layouts:
            fix = f"add {name}=..."
            raise UserError.at("build", found=f"no layout of `{name}`", expected="one for each module", fix=fix)
        if name not in graph.modules:
            expected = one_of(graph.modules, "modules in the graph", "those of")
            raise UserError.at("build", found=f"a layout of `{name}`", expected=expected, fix="remove it")
    world = dist.get_world_size()
    return {
        name: given if isinstance(given := layouts[name], Layout) else Layout.parse(given, world, module=name)
        for name in graph.modules
    }


def _platform() -> Platform:
    """The platform of the default process group."""
    # `init_process_group()` without arguments has a backend for the GPU and one for the host.
    backends = dist.get_backend_config()
    if torch.cuda.is_available() and "nccl" in backends:
        return Platform(torch.device("cuda", torch.cuda.current_device()), "nccl")
    return Platform(CPU, "gloo" if "gloo" in backends else dist.get_backend())


SUMS = "the sums of gradients over ranks"


class Stage(nn.Module):
    """A pipeline stage after the first one, for a model without a method `hidden_shape`.

    `hidden_shape`: shape of the hidden states that it receives, or a function from the module's input of a micro-batch
    to it.
    """

    def __init__(self, model: Callable[..., Any], hidden_shape: Sequence[int] | Callable[[Any], Sequence[int]]):
        super().__init__()
        self.model = model
        self.hidden_shape = hidden_shape if callable(hidden_shape) else lambda _: hidden_shape

    def forward(self, *inputs: Any) -> Any:
        """Call the model."""
        return self.model(*inputs)


@dataclass(frozen=True, eq=False)
class MicroBatchInputs:
    """This rank's part of a micro-batch.

        MicroBatchInputs({"vision": pictures, "text": tokens}, {("vision", "text"): Rows(held, needed)})

    `inputs`: what all models of each module of this rank are called with, by module. For a module that takes only rows
    it may be anything, such as `()`. A module without an input, on all of its ranks alike, is not run. `rows`: by edge,
    or by the two modules that it joins.
    """

    inputs: Mapping[str, Any]
    rows: Mapping[Any, Rows] = field(default_factory=dict)
    """Which rows this rank holds and needs, without edges of which it does neither; or the counts that they follow
    from, as in `Boundary.plan`: `Rows(samples=8, rows_per_sample=9)` on all ranks of the edge.
    """


class Runner:
    """Runs steps of the graph of a topology from `build`. All ranks build one, and call it alike.

    Models are called as the interpreter does (docs/library.md, section 5): with a module's input of the micro-batch,
    with hidden states if the stage is not the first, and with the rows that enter it, if any edges do. They return
    rows, hidden states, or the sum of losses; several of these by name, and last stages "metrics" with further sums.

    Args:
        topology: topology with a graph.
        modules: this rank's stage of each module, None or nothing for others; a `Stage` if the model has no
            `hidden_shape`. For modules that were `interleaved` in `build`, models by stage; or a `ModuleOnRank`.
        optimizer: the result of `build_optimizers` for these modules. Sums of gradients in buffers (`AdamW`, `SGD`)
            then begin within the last backward pass of a step.
        settings: see `ScheduleSettings`; for graphs in which all modules feed one.
        forward_only: modules without a backward pass, which nothing that trains feeds.
        timeout_s, watch, check: as for `Interpreter.build`.

    Raises:
        UserError: on all ranks, see `Interpreter.build`, `build_schedule` and `check_schedule`.
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
        self.topology, self.graph, self._check, self.timeout_s = topology, graph, check, timeout_s
        self._settings, self._forward_only, self._optimizer = settings, tuple(forward_only), optimizer
        facts = {"check": str(check), "settings": str(settings), "forward_only": str(sorted(self._forward_only))}
        require_equal(topology.host, "Runner", facts, "build it alike on all ranks")
        if check:
            all_or_none(topology.host, lambda: self._require_frozen(modules))
        # On the object: a cache on the class would keep its groups, and their threads, alive.
        self._cached_schedule = lru_cache(maxsize=8)(self._build_schedule)
        if check:
            self.schedule(1)  # Refuse now what cannot run.
        planned = topology.planned
        self._boundaries = {edge: Boundary(topology, edge, check=check, timeout_s=timeout_s) for edge in planned}
        given = {name: each for name, each in modules.items() if each is not None}
        own = {name: _on_rank(topology, name, each, optimizer) for name, each in given.items()}
        self.interpreter = Interpreter.build(topology, own, graph, timeout_s=timeout_s, watch=watch, check=check)

    @watched
    def __call__(self, micro_batches: Sequence[MicroBatchInputs], *, forward_only: bool | None = None) -> StepResult:
        """Run a step; gradients accumulate in the parameters. If it sums gradients in buffers, the next one with a
        backward pass needs `optimizer.zero_grad()` before.

        Args:
            micro_batches: equally many on all ranks.
            forward_only: whether to skip the backward pass, as in an evaluation; the default is true inside
                `torch.no_grad()`.

        Returns:
            This rank's sums of losses and metrics by module; `total_loss` adds them up over ranks.

        Raises:
            UserError: on all ranks, with `check`. Gradients that were summed are not zeroed; ranks differ in the number
                of micro-batches or in `forward_only`; ranks of a module differ in whether it has an input; a module
                without input has rows; or rows belong to no edge of the graph or do not fit, see `Boundary.plan`.
        """
        forward_only = not torch.is_grad_enabled() if forward_only is None else forward_only
        if self._check:
            all_or_none(self.topology.host, lambda: self._require_known(micro_batches, trains=not forward_only))
            facts = {"micro-batches": str(len(micro_batches)), "forward_only": str(forward_only)}
            facts |= {
                f"micro-batches with an input of `{name}`": self._with_input(name, micro_batches)
                for name in self.topology.layouts
            }
            require_equal(self.topology.host, "Runner", facts, "give all ranks their part of the same micro-batches")
        with torch.set_grad_enabled(not forward_only):
            plans = self._plans(micro_batches)
        if not any(self.topology.has(name) for name in self.topology.layouts):
            nothing = torch.zeros((), device=self.topology.platform.device)
            return StepResult(nothing, {}, {name: {} for name in self.topology.layouts})

        def load(m: int) -> DeviceMicroBatch:
            inputs = {name: given for name, given in micro_batches[m].inputs.items() if given is not None}
            return DeviceMicroBatch(inputs, {edge: each[m] for edge, each in plans.items()})

        return self.run(self.schedule(len(micro_batches), forward_only=forward_only), load)

    def run(self, schedule: Schedule, load: Callable[[int], DeviceMicroBatch]) -> StepResult:
        """Run another schedule, with plans from elsewhere, see `Interpreter.run`. Gradients accumulate in the
        parameters.
        """
        if self._optimizer is None or not torch.is_grad_enabled():
            return self.interpreter.run(schedule, load)
        optimizer, watchdog = self._optimizer, self.interpreter.watchdog
        if any(module.backward for module in schedule.modules):
            optimizer.require_unsummed()

        def start_sums(module: str) -> None:
            with watchdog.doing(lambda: f"{SUMS}, with all other ranks,"):
                optimizer.start_sums(module)

        return self.interpreter.run(schedule, load, start_sums, optimizer.expect)

    def schedule(self, micro_batches: int, *, forward_only: bool = False) -> Schedule:
        """The checked schedule of a step."""
        return self._cached_schedule(micro_batches, forward_only)

    def _build_schedule(self, micro_batches: int, forward_only: bool) -> Schedule:
        layouts, edges = self.topology.layouts, self.graph.edges
        frozen = tuple(layouts) if forward_only else self._forward_only
        schedule = build_schedule(layouts, micro_batches, self._settings, forward_only=frozen, edges=edges)
        check_schedule(schedule)
        return schedule

    def _plans(self, micro_batches: Sequence[MicroBatchInputs]) -> dict[Edge, list[LoadedPlan]]:
        """The plans of all micro-batches, by edge. Raises `UserError` on all ranks if it does on those of an edge."""
        plans: dict[Edge, list[LoadedPlan]] = {}
        problems: list[UserError] = []
        layouts = self.topology.layouts
        given = [{as_edge(ends, layouts): rows for ends, rows in each.rows.items()} for each in micro_batches]
        for edge, boundary in self._boundaries.items():
            try:
                plans[edge] = boundary.plans([each.get(edge, Rows()) for each in given])
            except UserError as error:
                problems.append(error)

        def require() -> None:
            if problems:
                raise problems[0]

        if self._check:
            all_or_none(self.topology.host, require)
        else:
            require()
        return plans

    def _require_frozen(self, modules: Mapping[str, Any]) -> None:
        """Check that modules without a backward pass do not train."""
        trained = {each.name for each in self._optimizer.modules if each.trained} if self._optimizer else set[str]()
        for name in self._forward_only:
            given = modules.get(name)
            stages = given.stages if isinstance(given, ModuleOnRank) else given
            models = list(stages.values()) if isinstance(stages, Mapping) else [stages]
            parameters = (p for each in models if isinstance(each, nn.Module) for p in each.parameters())
            if name in trained or any(p.requires_grad for p in parameters):
                because, fix = "they would get no gradients", f"freeze them: `{name}.requires_grad_(False)`"
                where, problem = f"Runner: forward_only `{name}`", "it has parameters that require gradients"
                raise UserError.at(where, problem=problem, because=because, fix=fix)

    def _with_input(self, name: str, micro_batches: Sequence[MicroBatchInputs]) -> str | None:
        """The numbers of the micro-batches in which a module of this rank has an input."""
        if not self.topology.has(name):
            return None
        given = {m: each.inputs.get(name) for m, each in enumerate(micro_batches)}
        parts = {
            m: len(each.parts) if isinstance(each, InParts) else 1 for m, each in given.items() if each is not None
        }
        return f"[{', '.join(f'{m}' if n == 1 else f'{m} in {n} parts' for m, n in parts.items())}]"

    def _require_known(self, micro_batches: Sequence[MicroBatchInputs], *, trains: bool) -> None:
        """Check that inputs belong to modules of this rank, and rows to edges of the graph, that modules with rows have
        an input, and that gradients may be added to.
        """
        if trains and self._optimizer is not None:
            self._optimizer.require_unchanged()
            self._optimizer.require_unsummed()
        rank, own = self.topology.rank, [name for name in self.topology.layouts if self.topology.has(name)]
        for each in micro_batches:
            if unknown := [name for name, given in each.inputs.items() if given is not None and name not in own]:
                where, expected = f"Runner on rank {rank}: inputs", one_of(own, "modules on this rank", "those of")
                fix = "give the inputs of this rank's modules"
                raise UserError.at(where, found=f"an input of `{unknown[0]}`", expected=expected, fix=fix)
            for ends, rows in each.rows.items():
                if (edge := as_edge(ends, self.topology.layouts)) not in self.graph.edges:
                    where, fix = f"Runner on rank {rank}: rows", "name an edge of the graph"
                    expected = one_of(self.graph.edges, "edges in the graph", "of")
                    raise UserError.at(where, found=f"rows of `{edge}`", expected=expected, fix=fix)
                if not isinstance(rows, Rows):
                    where, found = f"Runner on rank {rank}: rows of `{edge}`", f"a {type(rows).__name__}"
                    raise UserError.at(where, found=found, expected="`Rows`", fix="write `Rows(held, needed)`")
                rows = rows.counted(self.topology, edge)
                for name, ids, what in ((edge.source, rows.held, "held"), (edge.target, rows.needed, "needed")):
                    if _number_of(ids) and name in own and each.inputs.get(name) is None:
                        raise UserError.at(
                            f"Runner on rank {rank}: inputs",
                            found=f"none of `{name}`, and {_number_of(ids)} {what} rows of `{edge}`",
                            expected="an input where there are rows",
                            because="a module without an input is not run",
                            fix="give it one, such as `()` for a module that takes only rows",
                        )


def _number_of(ids: Any) -> int:
    """The number of ids; 1 for what is no list, which `Boundary.plan` refuses."""
    return len(ids) if hasattr(ids, "__len__") and getattr(ids, "ndim", 1) else 1


def _on_rank(topology: Topology, name: str, given: Any, optimizer: JointOptimizer | None) -> ModuleOnRank:
    """A module in the form of the interpreter."""
    if isinstance(given, ModuleOnRank):
        return given
    if not isinstance(given, Mapping):
        layout = topology.layouts.get(name)
        given = {layout.coordinate(topology.rank).pp if layout and topology.rank in layout else 0: given}
    trained = [each for each in optimizer.modules if each.name == name] if optimizer else []
    return ModuleOnRank(dict(given), gathered=gathered_stages(trained))
