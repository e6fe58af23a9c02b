"""The process groups of a graph of modules, from a layout for each, on whatever group is initialised."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace

import torch
import torch.distributed as dist

from megatron_hetero.distributed.collective import require_same
from megatron_hetero.distributed.platform import CPU, Platform
from megatron_hetero.distributed.topology import Topology
from megatron_hetero.errors import UserError
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
    **named: str | Layout,
) -> Topology:
    """A topology for the modules of `graph`, each in the layout that its name gives. All ranks call it alike.

        topology = build(graph, vision="dp:8", text="tp:4,dp:2")
        topology = build(graph, {"vision": "dp:8", "text": "tp:4,dp:2"})

    Args:
        graph: whose edges all ranks plan together, see `Boundary.plan`.
        layouts, named: by module; without ranks a layout is on all of them.
        platform: where tensors are; default: the current GPU where the default process group is NCCL's, else the CPU.
        tied, interleaved, megatron, decoding: as for `Topology.build`.
        planned: whether ranks plan together which rows cross, as a `Runner` does.
        check: whether ranks compare what they were called with, and check each group, as for `Topology.build`.

    Raises:
        UserError: on all ranks. A module has no layout, or the graph not the module; a layout does not fit the ranks;
            ranks call it with different arguments; or no process group is initialised.
    """
    if not dist.is_initialized():
        fix = "call `torch.distributed.init_process_group`, or be inside `process_group()`"
        raise UserError.at("build", problem="no process group is initialised", fix=fix)
    try:
        parsed = _parsed(graph, {**(layouts or {}), **named})
        graph, problem = graph.in_layouts(parsed), None
    except UserError as error:
        parsed, problem = {}, error
    facts = {
        "problem": str(problem or "none"),
        "edges": ", ".join(map(str, graph.edges)) or "none",
        **{f"layout of `{name}`": str(layout) for name, layout in parsed.items()},
        "modules": ", ".join(parsed),
        **{f"width of `{edge}`": str(graph.width_of(edge)) for edge in graph.edges},
        **{f"outputs of `{edge}`": ", ".join(graph.outputs_of(edge)) for edge in graph.edges},
        "dtype": str(graph.dtype),
        "transport": str(graph.transport),
        "tied": str(sorted(tied)),
        "interleaved": str(sorted(interleaved)),
        "megatron": "all" if megatron is None else str(sorted(megatron)),
        "check": str(check),
    }
    if check:
        fix = "call it with the same graph and layouts: all ranks make all groups"
        require_same(dist.group.WORLD, "build", lambda: facts, fix)
    if problem is not None:
        raise problem
    topology = Topology.build(
        parsed,
        platform or _platform(),
        edges=graph.edges,
        planned=graph.edges if planned else (),
        decoding=decoding,
        tied=tied,
        interleaved=interleaved,
        megatron=megatron,
        check=check,
    )
    return replace(topology, graph=graph)


def _parsed(graph: Graph, layouts: Mapping[str, str | Layout]) -> dict[str, Layout]:
    """The layouts of the graph's modules, in its order. Raises `UserError`."""
    for name in (*graph.modules, *layouts):
        if name not in layouts:
            fix = f"add {name}=..."
            raise UserError.at("build", found=f"no layout of `{name}`", expected="one for each module", fix=fix)
        if name not in graph.modules:
            known = ", ".join(graph.modules)
            raise UserError.at("build", found=f"a layout of `{name}`", expected=f"those of {known}", fix="remove it")
    world, found = dist.get_world_size(), dict[str, Layout]()
    for name in graph.modules:
        given = layouts[name]
        found[name] = given if isinstance(given, Layout) else Layout.parse(given, world, module=name)
        if found[name].ranks[-1] >= world:
            expected = f"ranks below {world}, the number of ranks"
            raise UserError.at(f"build: {name}", found=str(found[name]), expected=expected, fix="correct its ranks")
    return found


def _platform() -> Platform:
    """That of the default process group."""
    # Several where the group is for a GPU and its host, as `init_process_group()` makes it.
    backends = dist.get_backend_config()
    if torch.cuda.is_available() and "nccl" in backends:
        return Platform(torch.device("cuda", torch.cuda.current_device()), "nccl")
    return Platform(CPU, "gloo" if "gloo" in backends else dist.get_backend())
