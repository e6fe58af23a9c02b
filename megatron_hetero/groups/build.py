"""The process groups of a graph of modules: `build`, which all ranks call before they run or train it."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace

import torch
import torch.distributed as dist

from megatron_hetero.base.errors import UserError, one_of
from megatron_hetero.groups.collective import require_same
from megatron_hetero.groups.platform import CPU, Platform
from megatron_hetero.groups.topology import Topology
from megatron_hetero.groups.watchdog import Watchdog
from megatron_hetero.layout.graph import Graph
from megatron_hetero.layout.layout import Layout


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
