"""Describes modules of any kind, as a library user passes them, as `TrainedModule`s: which parameters train, how tensor
parallelism splits them, and how wrappers have reduced their gradients. A wrapper may be around the whole module or any
module inside it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from math import prod
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from megatron_hetero.base.errors import UserError
from megatron_hetero.groups.collective import Facts, differing_facts, require_same_facts
from megatron_hetero.groups.fsdp import fsdp_groups, has_reduced
from megatron_hetero.groups.topology import Topology
from megatron_hetero.hf.weight_map import TensorSlice, held
from megatron_hetero.layout.axes import EXPERTS, MAIN, View
from megatron_hetero.layout.communicators import ENDS, GRADIENT_AXES
from megatron_hetero.layout.grammar import format_ranks
from megatron_hetero.layout.layout import Layout
from megatron_hetero.step.gradient_state import GradientState
from megatron_hetero.step.module import OverTp, TrainedModule
from megatron_hetero.step.wrapped import Remaining, WrappedGradients, WrappedWeights, is_sharded, local

Chunks = Any  # What `fully_shard` returns is no `nn.Module` to type checkers.
"""A module, or a list of one for each of its virtual stages."""


def trained_modules(topology: Topology, modules: Mapping[str, Chunks | None]) -> tuple[TrainedModule, ...]:
    """Describe the modules of this rank, in the order of the topology, once for each view that parameters belong to.
    Raises `UserError` if the topology has others, or if a wrapper reduces in an unknown way.
    """
    given = {name: _chunks(module) for name, module in modules.items()}
    given = {name: chunks for name, chunks in given.items() if chunks}
    expected = [name for name, layout in topology.layouts.items() if topology.rank in layout]
    if wrong := sorted(given.keys() ^ expected):
        found = f"{'no' if wrong[0] in expected else 'a'} module `{wrong[0]}`"
        raise UserError.at(
            f"modules on rank {topology.rank}",
            found=found,
            expected=f"those of this rank: {', '.join(expected) or 'none'}",
            because="all ranks of a module reduce its gradients",
            fix="pass the shard of each module that this rank holds, and None or nothing for others",
        )
    for chunks in given.values():
        reshard(chunks)
    described = tuple(view for name in expected for view in _trained_views(topology, name, given[name]))
    owner: dict[int, str] = {}
    for module in described:
        for name, parameter in module.trained.items():
            if (first := owner.setdefault(id(parameter), module.name)) != module.name:
                raise UserError.at(
                    f"module `{module.name}`",
                    found=f"{name} in `{first}` too",
                    expected="parameters of its own",
                    fix="give each parameter to one module",
                )
    return described


def require_replicas(modules: Sequence[TrainedModule]) -> None:
    """Check that the replicas of each module train the same parameters, that its ranks along `tp` sum the same
    gradients over `tp`, and that its first and last stage both train a parameter that they share, or neither.
    Collective over the ranks of each module, which all raise `UserError` if they differ.
    """
    gathered: list[tuple[str, list[Facts], list[int]]] = []
    for module in modules:
        view = module.view
        along = {
            view.sum_axes: [f"{_sums(module, n)}, {tuple(p.shape)} {p.dtype}" for n, p in module.trained.items()],
            view.shard_axes: [_sums(module, name) for name in module.over_tp],
        }
        if view == MAIN and _has_ends(module.topology, module.name):
            trains = "trained" if module.tied in module.trained else "frozen"
            along[ENDS] = [f"{trains} copy of a parameter of the other end" if module.tied else "none of the other end"]
        for axes, facts in along.items():
            group = module.topology.group(module.name, *axes)
            numbered = {f"parameter {n}": fact for n, fact in enumerate(facts)}
            if group.size() > 1 and (differing := differing_facts(group, f"module `{module.name}`", numbered)):
                gathered.append((module.name, differing, dist.get_process_group_ranks(group)))
    fix = "build, freeze and wrap the module in the same way on all its ranks, whose gradients are summed"
    # After all comparisons: a rank that raises earlier would leave ranks of other groups waiting.
    for name, differing, ranks in gathered:
        require_same_facts(f"module `{name}`: trainable parameters", differing, ranks, fix)


def _has_ends(topology: Topology, name: str) -> bool:
    """Return whether this rank has a group of a module's first and last stage."""
    try:
        return topology.group(name, *ENDS).size() > 1
    except KeyError:
        return False


def _sums(module: TrainedModule, name: str) -> str:
    """Describe the reductions of a gradient, for a comparison between ranks."""
    text = f"`{name}`"
    if name in module.over_tp:
        text += f", its {module.over_tp[name]} over tp"
    if isinstance(module.gradients, WrappedGradients) and (axes := module.gradients.remaining[name].axes):
        text += f", summed over {'·'.join(axes)}"
    return text


def unreduced(module: TrainedModule) -> str:
    """Return PyTorch's wrapper that did not average gradients in the last backward pass, if any."""
    for wrapper in _wrappers(module.chunks):
        # DDP sets this attribute in each forward pass.
        if isinstance(wrapper, DistributedDataParallel) and not wrapper.require_forward_param_sync:
            return "DistributedDataParallel"
        if not has_reduced(wrapper):
            return "FSDP2"
    return ""


def reshard(chunks: Sequence[nn.Module]) -> None:
    """Reshard all modules of FSDP2. After a forward pass alone they have unsharded parameters, which the next forward
    pass would use as they are.
    """
    for wrapper in _wrappers(chunks):
        if isinstance(wrapper, FSDPModule):
            wrapper.reshard()


Description = Mapping[str, tuple[int, bool, int]]
"""By name, the identity of each parameter, whether it trains, and the address of its values if a buffer has them."""


def described(module: TrainedModule) -> Description:
    """Describe the parameters of a module on this rank. FSDP2 has resharded them afterwards."""
    chunks: Any = module.chunks
    # Read before FSDP2 replaces the parameters.
    trains = [p.requires_grad for chunk in chunks for p in chunk.parameters()]
    reshard(chunks)
    prefixes = [f"stage {stage}: " if len(chunks) > 1 else "" for stage in module.stages]
    named = [(at + path, p) for at, chunk in zip(prefixes, chunks, strict=True) for path, p in chunk.named_parameters()]
    description = dict[str, tuple[int, bool, int]]()
    for (name, parameter), trained in zip(named, trains, strict=True):
        stays = module.gradients.persistent and parameter.requires_grad and not is_sharded(parameter)
        description[name] = id(parameter), trained, parameter.data_ptr() if stays else 0
    return description


def require_unchanged(module: TrainedModule, before: Description, fix: str) -> None:
    """Check that a module has the parameters of `before`, and trains the same. Raises `UserError`."""
    now = described(module)
    changed = next((name for name in (*before, *now) if before.get(name) != now.get(name)), None)
    if changed is None:
        return
    if changed not in before:
        change = "added"
    elif changed not in now:
        change = "removed"
    else:
        (old, trained, _), (new, trains, _) = before[changed], now[changed]
        change = "replaced" if old != new or trained == trains else "unfrozen" if trains else "frozen"
    raise UserError.at(
        f"module `{module.name}`",
        problem=f"{changed} was {change} after `build_optimizers`",
        because="the optimizer has the parameters of before",
        fix=fix,
    )


def dcp_key(*views: TrainedModule) -> str:
    """Return the key of this rank's shard of a module, the same on ranks with the same shard, or with other shards of
    the same `DTensor`s.
    """
    first = views[0]
    key = first.key
    for view in views:
        whole = {name for name, p in view.parameters.items() if is_sharded(p) and spans(p, view.holders)}
        differ = (
            slices != view.maps[0][name]
            for weight_map in view.maps
            for name, slices in weight_map.items()
            if name not in whole
        )
        if any(differ):
            key += f".{'-'.join(view.view.shard_axes)}{view.holders.rank()}"
    layout = first.topology.layouts[first.name]
    return f"{key}.pp{layout.coordinate(first.topology.rank).pp}" if layout.pp > 1 else key


def spans(parameter: Any, group: dist.ProcessGroup) -> bool:
    """Return whether the mesh of a `DTensor` has several ranks of the group."""
    ranks = parameter.device_mesh.mesh.flatten().tolist()
    return len(set(ranks).intersection(dist.get_process_group_ranks(group))) > 1


def is_megatrons_ddp(module: nn.Module) -> bool:
    """Return whether this is Megatron's `DistributedDataParallel`, which stores gradients in buffers of its own."""
    return hasattr(module, "finish_grad_sync") and hasattr(module, "buffers") and hasattr(module, "ddp_config")


def _chunks(module: Chunks | None) -> tuple[nn.Module, ...]:
    if module is None:
        return ()
    return (module,) if isinstance(module, nn.Module) else tuple(module)


def _wrappers(chunks: Sequence[nn.Module]) -> tuple[nn.Module, ...]:
    """Return all modules that are wrapped by FSDP2, PyTorch's or Megatron's `DistributedDataParallel`."""
    modules = (module for chunk in chunks for module in chunk.modules())
    return tuple(m for m in modules if isinstance(m, (DistributedDataParallel, FSDPModule)) or is_megatrons_ddp(m))


def _trained_views(topology: Topology, name: str, chunks: tuple[nn.Module, ...]) -> list[TrainedModule]:
    """Describe a module in each view that parameters of this rank belong to, and in the main view. The first one that
    trains has the wrappers of Megatron, which reduce all gradients at once.
    """
    layout = topology.layouts[name]
    _require_known_views(name, layout)
    stages = tuple(layout.coordinate(topology.rank).pp + i * layout.pp for i in range(len(chunks)))
    by_view: dict[View, dict[str, _Parameter]] = {MAIN: {}}
    parameters = _parameters(_Module(topology, name, MAIN), dict(zip(stages, chunks, strict=True)))
    for path, parameter in parameters.items():
        by_view.setdefault(_view_of(layout, parameter), {})[path] = parameter
    ddps = tuple(filter(is_megatrons_ddp, _wrappers(chunks)))
    modules = list[TrainedModule]()
    for view, in_view in by_view.items():
        module = _trained_module(_Module(topology, name, view), stages, chunks, in_view, ddps)
        ddps = () if module.trained else ddps
        modules.append(module)
    return modules


def _view_of(layout: Layout, of: _Parameter) -> View:
    """Return the view of a parameter: Megatron marks parameters of experts that only some data-parallel ranks have."""
    return EXPERTS if EXPERTS in layout.views and not getattr(of.parameter, "allreduce", True) else MAIN


_STATES = WeakKeyDictionary[nn.Module, dict[tuple[str, View], GradientState]]()
"""The state of the gradients of each module, by its first chunk: each call of `finish_gradients` describes it anew."""


def _trained_module(
    here: _Module,
    stages: tuple[int, ...],
    chunks: tuple[nn.Module, ...],
    found: Mapping[str, _Parameter],
    ddps: tuple[Any, ...],
) -> TrainedModule:
    topology, name, layout, view = here.topology, here.name, here.layout, here.view
    parameters = {each: of.parameter for each, of in found.items()}
    trained = {each: of for each, of in found.items() if of.parameter.requires_grad}
    in_main_grad = frozenset(each for each, of in trained.items() if of.around.megatrons_ddp is not None)
    others = trained.keys() - in_main_grad
    if taken := next((each for each in parameters if each in others and hasattr(parameters[each], "main_grad")), None):
        problem = f"{taken} is in the buffers of an optimizer already"
        because = "they have the gradients, and ranks share the states"
        fix = "call `step` or `finish_gradients` of that optimizer, or build the module anew"
        raise UserError.at(f"module `{name}`", problem=problem, because=because, fix=fix)
    weights = WrappedWeights(
        parameters=parameters,
        group=topology.group(name, *view.sum_axes),
        owned={each: (0, local(of.parameter).numel()) for each, of in trained.items()},
        sharded=False,
        ranks_with_copies={each: here.copies(of) for each, of in trained.items()},
    )
    gradients = WrappedGradients(
        state=_STATES.setdefault(chunks[0], {}).setdefault((name, view), GradientState(name)),
        platform=topology.platform,
        parameters={each: of.parameter for each, of in trained.items()},
        remaining={each: here.remaining(of) for each, of in trained.items()},
        in_main_grad=in_main_grad,
        ddps=ddps,
    )
    over_tp = dict[str, OverTp]()
    for each, of in trained.items() if view == MAIN and layout.tp > 1 else ():
        if (how := _over_tp(of)) is not None:
            over_tp[each] = how
    holders = prod(here.degrees[axis] for axis in view.shard_axes)
    maps = tuple({each: here.slices(each, of, rank) for each, of in found.items()} for rank in range(holders))
    tied = _tied(topology, name, parameters)
    counts_elsewhere = tied is not None and getattr(parameters[tied], "shared", False)
    return TrainedModule(
        name=name,
        topology=topology,
        stages=stages,
        chunks=chunks,
        maps=maps,
        weights=weights,
        gradients=gradients,
        over_tp=over_tp,
        tied=tied,
        tied_copy=tied if counts_elsewhere else None,
        view=view,
    )


def _parameters(here: _Module, chunks: Mapping[int, nn.Module]) -> dict[str, _Parameter]:
    """Return the parameters of the `chunks`, which are by stage, named as in the whole module."""
    parameters, known = dict[str, _Parameter](), set[int]()
    for stage, chunk in chunks.items():
        around, fsdp = dict[int, _Around](), dict[int, Any]()
        _walk(chunk, _Around(), around, fsdp)
        _require_megatron_fits(here, around, fsdp)
        names = global_names(chunk)
        for path, parameter in chunk.named_parameters():
            if id(parameter) in known:
                continue
            known.add(id(parameter))
            name = names.get(path, path)
            if name in parameters or (here.layout.pp > 1 and path not in names):
                name = f"stage {stage}: {path}"
            parameters[name] = _Parameter(path, parameter, around[id(parameter)], fsdp.get(id(parameter)))
    return parameters


def _tied(topology: Topology, name: str, parameters: Mapping[str, nn.Parameter]) -> str | None:
    """Return the parameter that the other end of the pipeline shares, if any. Raises `UserError` if the ends have no
    group.
    """
    if topology.layouts[name].pp == 1:
        return None
    tied = next((each for each, p in parameters.items() if getattr(p, "shared_embedding", False)), None)
    if tied is not None and not _has_ends(topology, name):
        fix = f'build the topology with needs={{"{name}": GroupNeeds(tied=True)}}; only the end stages may share it'
        problem = f"{tied} is a shared embedding, and this rank has no group with the other end of the pipeline"
        raise UserError.at(f"module `{name}`", problem=problem, fix=fix)
    return tied


def global_names(chunk: nn.Module, buffers: Sequence[str] = ()) -> dict[str, str]:
    """Map names of parameters and `buffers` of a stage to names in the whole module: by its method `global_name`, or by
    the numbers of Megatron-Core's layers, which count over all stages. Without either the result is empty.
    """
    paths = [*(path for path, _ in chunk.named_parameters()), *buffers]
    global_name: Any = getattr(chunk, "global_name", None)
    if callable(global_name):
        return {path: str(global_name(path)) for path in paths}
    layers = dict[str, str]()
    for path, module in chunk.named_modules():
        owner, _, place = path.rpartition(".")
        number = getattr(module, "layer_number", None)
        if isinstance(number, int) and place.isdecimal():
            layers[path] = f"{owner}.{number - 1}"
    if not layers:
        return {}
    names = {path: path for path in paths}
    for path in paths:
        for layer, numbered in layers.items():
            if path.startswith(f"{layer}."):
                names[path] = numbered + path.removeprefix(layer)
    return names


# --------------------------------------------------------------------------------- what wrappers have done


class _Around(NamedTuple):
    """Wrappers around a parameter, and the outermost module and innermost configuration of Megatron's around it."""

    ddp: DistributedDataParallel | None = None
    megatrons_ddp: Any = None
    model: nn.Module | None = None
    config: Any = None


class _Parameter(NamedTuple):
    """A parameter, its path in its chunk, the wrappers around it, and the group of FSDP2 that shards it, if any."""

    path: str
    parameter: Any
    around: _Around
    fsdp: Any


def _walk(module: nn.Module, outer: _Around, around: dict[int, _Around], fsdp: dict[int, Any]) -> None:
    """Add the wrappers around each parameter inside `module`, which is inside `outer`, by identity, and groups of
    FSDP2.
    """
    for group in fsdp_groups(module):
        fsdp.update((id(each.sharded_param), group) for each in group.fsdp_params)
    if isinstance(module, DistributedDataParallel):
        outer = outer._replace(ddp=module)
    elif is_megatrons_ddp(module):
        outer = outer._replace(megatrons_ddp=module)
    elif hasattr(config := getattr(module, "config", None), "tensor_model_parallel_size"):
        outer = outer._replace(model=module if outer.model is None else outer.model, config=config)
    around.update((id(parameter), outer) for parameter in module.parameters(recurse=False))
    for child in module.children():
        _walk(child, outer, around, fsdp)


@dataclass(frozen=True)
class _Module:
    """A view of a module in the topology."""

    topology: Topology
    name: str
    view: View

    @property
    def layout(self) -> Layout:
        return self.topology.layouts[self.name]

    @property
    def degrees(self) -> Mapping[str, int]:
        return self.layout.degrees_in(self.view)

    def remaining(self, of: _Parameter) -> Remaining:
        """Return the reductions of a gradient that wrappers leave to do. Raises `UserError`."""
        sum_axes = self.view.sum_axes
        reduced, divisor = self._reduced(of)
        left = tuple(axis for axis in sum_axes if axis not in reduced and self.degrees[axis] > 1)
        groups = [self.topology.group(self.name, axis) for axis in left]
        if left and all(axis in left or self.degrees[axis] == 1 for axis in sum_axes):
            groups = [self.topology.group(self.name, *sum_axes)]  # One group for all axes.
        return Remaining(left, tuple(groups), divisor)

    def copies(self, of: _Parameter) -> int:
        """Return the number of ranks with the same elements of a parameter, along the axes that sum gradients and the
        dims of its mesh. Raises `UserError`.
        """
        if not is_sharded(of.parameter):
            return prod(self.degrees[axis] for axis in self.view.sum_axes)
        along = self.axes_of(of)
        return _copies(of.parameter) * prod(self.degrees[axis] for axis in self.view.sum_axes if axis not in along)

    def _reduced(self, of: _Parameter) -> tuple[tuple[str, ...], float]:
        """Return the axes along which a wrapper has reduced a gradient, and by what it has divided it."""
        around = of.around
        if around.megatrons_ddp is not None:
            # Its mean is over the ranks of the main view, for experts too.
            sums = around.megatrons_ddp.config.calculate_per_token_loss
            return self.view.sum_axes, 1.0 if sums else prod(self.layout.degrees[axis] for axis in GRADIENT_AXES)
        if of.fsdp is not None:
            axes = tuple(axis for axis in self.axes_of(of) if axis in self.view.sum_axes)
            return axes, of.fsdp.gradient_divide_factor or prod(self.degrees[axis] for axis in axes)
        if around.ddp is not None:
            ranks = dist.get_process_group_ranks(around.ddp.process_group)
            return _axes_between(self, ranks, of.path, sharded=False), len(ranks)
        return (), 1.0

    def axes_of(self, of: _Parameter) -> tuple[str, ...]:
        """Return the axes of the mesh of a `DTensor`. Raises `UserError`."""
        return _axes_between(self, of.parameter.device_mesh.mesh.flatten().tolist(), of.path, sharded=True)

    def slices(self, name: str, of: _Parameter, rank: int) -> tuple[TensorSlice, ...]:
        """Return the slices of the whole parameter that a rank of the group `holders` has, named by module and
        parameter.
        """
        parameter, tp, name = of.parameter, self.layout.tp, f"{self.name}.{name}"
        if hasattr(parameter, "stored_as"):
            return _stored_slices(name, of, rank)
        rows = parameter.shape[0] if parameter.dim() else 1
        if self.view == EXPERTS:
            return (TensorSlice(_of_expert(name, of, rank), (0, rows)),)
        if is_sharded(parameter) and "tp" in self.axes_of(of):
            return (TensorSlice(f"{name} of tp {rank}", (0, rows)),)  # A shard counts as a tensor.
        if tp == 1 or not getattr(parameter, "tensor_model_parallel", False):
            return (TensorSlice(name, (0, rows)),)
        if getattr(parameter, "partition_dim", 0) == 1 and parameter.dim() == 2:
            width = parameter.shape[1]
            return (TensorSlice(name, (0, rows), columns=(rank * width, rank * width + width)),)
        # Megatron's MLP stacks this rank's rows of the gate on its rows of the linear layer that is gated.
        is_gated = getattr(of.around.config, "gated_linear_unit", False)
        matrices = 2 if is_gated and of.path.rpartition(".")[0].endswith("linear_fc1") else 1
        size = rows // matrices
        starts = [matrix * size * tp + rank * size for matrix in range(matrices)]
        return tuple(TensorSlice(name, (start, start + size), at=number * size) for number, start in enumerate(starts))


def _stored_slices(name: str, of: _Parameter, rank: int) -> tuple[TensorSlice, ...]:
    """Return the slices of a parameter that has the attribute `stored_as`: its path in a layer, and for each rank along
    `tp` slices of stored tensors that are named within that layer. Raises `UserError` for a wrapper that does not know
    of copies of slices.
    """
    path, by_rank = of.parameter.stored_as
    copies = held([{path: slices} for slices in by_rank])[rank][path].replicated_slices
    if copies and (is_sharded(of.parameter) or of.around.megatrons_ddp is not None):
        where, found = f"parameter {name}", "heads of which several ranks along tp have copies, in a wrapper"
        expected, because = "no FSDP2 and no DistributedDataParallel of Megatron", "they do not know of copies"
        fix = "use a `tp` that divides the key heads, or `AdamW` of this package without a wrapper"
        raise UserError.at(where, found=found, expected=expected, because=because, fix=fix)
    return tuple(replace(each, name=name.removesuffix(path) + each.name) for each in by_rank[rank])


def _of_expert(name: str, of: _Parameter, rank: int) -> str:
    """Return the name of an expert's parameter in the whole module: Megatron counts experts from 0 on each rank along
    `ep`.
    """
    owner, marker, path = name.partition(".local_experts.")
    if not marker:
        return f"{name} of ep {rank}"
    number, _, rest = path.partition(".")
    experts_per_rank = of.around.config.num_moe_experts // of.around.config.expert_model_parallel_size
    return f"{owner}{marker}{int(number) + rank * experts_per_rank}.{rest}"


def _require_known_views(name: str, layout: Layout) -> None:
    """Check that only the view of experts sums gradients over other ranks than the main view: parameters cannot name
    another view. Raises `UserError`.
    """
    for view in layout.views:
        if view != EXPERTS and layout.groups(*view.sum_axes) != layout.groups(*GRADIENT_AXES):
            found = f"layout {layout}, whose view `{view.name}` sums gradients over other ranks than the main one"
            because = "parameters would be summed, and replicas made equal, over those of the main view"
            fix = "leave the further view out, or sum gradients over its groups with an optimizer of your own"
            where, same = f"module `{name}`", "the same ranks in both"
            raise UserError.at(where, found=found, expected=same, because=because, fix=fix)


def _require_megatron_fits(here: _Module, around: Mapping[int, _Around], fsdp: Mapping[int, Any]) -> None:
    """Check that Megatron's experts are divided as in the layout, and that parameters still have the attributes that
    say how they are split, which `fully_shard` loses. Raises `UserError`.
    """
    layout, where = here.layout, f"module `{here.name}`"
    ep = layout.degrees_in(EXPERTS)["ep"] if EXPERTS in layout.views else 1
    whole = {"expert_tensor_parallel_size": 1} if EXPERTS in layout.views else {}
    configs = [each.config for each in around.values() if getattr(each.config, "num_moe_experts", None)]
    because = f"the layout {layout} says which ranks have which experts"
    for config, (field, size) in product(configs, [("expert_model_parallel_size", ep), *whole.items()]):
        if (found := getattr(config, field)) != size:
            fix = "set it, or give the layout `ep` in the view `experts` (docs/library.md)"
            raise UserError.at(where, found=f"config.{field} {found}", expected=str(size), because=because, fix=fix)
    if configs and EXPERTS in layout.views and ep == 1 < layout.tp:
        because = "Megatron marks parameters of experts only where ep is above 1"
        fix = "leave the view out to split each expert over tp"
        raise UserError.at(where, found=f"layout {layout} with ep:1", expected="ep:2 or more", because=because, fix=fix)
    models = dict.fromkeys(each.model for key, each in around.items() if key in fsdp)
    for model in models if layout.tp * layout.pp > 1 else ():
        layers = () if model is None else model.modules()
        sharded = [(layer, p) for layer in layers for p in layer.parameters(recurse=False) if id(p) in fsdp]
        # Weights of layers that are split over tp say so.
        split = [p for layer, p in sharded if hasattr(layer, "tp_group") and p is getattr(layer, "weight", None)]
        if sharded and not all(hasattr(p, "tensor_model_parallel") for p in split or [p for _, p in sharded]):
            problem = "parameters have lost the attributes that Megatron gave them, such as `tensor_model_parallel`"
            because = "FSDP2 replaces the parameters, and sums over tp and between stages depend on the attributes"
            fix = "keep vars(p) of each parameter by name before `fully_shard`, put them back after (docs/library.md)"
            raise UserError.at(where, problem=problem, because=because, fix=fix)


def _axes_between(here: _Module, ranks: Sequence[int], name: str, *, sharded: bool) -> tuple[str, ...]:
    """Return the axes along which `ranks` differ in the module's view: axes along which gradients are summed, and if
    `sharded` those that split parameters. Raises `UserError` if they are not all ranks along these.
    """
    topology, layout, view = here.topology, here.layout, here.view
    local_indices = layout.indices(topology.rank, view)
    places = [layout.indices(rank, view) for rank in ranks if rank in layout]
    axes = tuple(axis for axis, index in local_indices.items() if any(place[axis] != index for place in places))
    along = {axis for axis in axes if axis in view.sum_axes or (axis in view.shard_axes and sharded)}
    if sorted(ranks) != list(layout.group_of(topology.rank, *along)):
        where, found = f"parameter {name} of `{here.name}`", f"a wrapper over ranks {format_ranks(sorted(ranks))}"
        expected, because = f"ranks along axes of its layout {layout}", "its gradients are summed along the other axes"
        fix = f'wrap the module with a mesh or group of the topology, such as topology.mesh("{here.name}")["dp"]'
        raise UserError.at(where, found=found, expected=expected, because=because, fix=fix)
    return axes


def _copies(parameter: Any) -> int:
    """Return the number of ranks in the mesh of a `DTensor` with the same elements."""
    mesh = parameter.device_mesh
    # FSDP2 over tensor parallelism has a `_StridedShard`, whose `is_shard()` is false.
    return prod(mesh.size(dim) for dim, placement in enumerate(parameter.placements) if placement.is_replicate())


def _over_tp(of: _Parameter) -> OverTp | None:
    """Return the reduction of a gradient over tp, by the rules of Megatron's `finalize_model_grads`."""
    name, parameter = of.path, of.parameter
    if getattr(parameter, "average_gradients_across_tp_domain", False):
        return "mean"
    norms_heads = getattr(of.around.config, "qk_layernorm", False) and ("q_layernorm" in name or "k_layernorm" in name)
    return "sum" if norms_heads or getattr(parameter, "sequence_parallel", False) else None
