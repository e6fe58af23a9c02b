"""Describes the modules that a library user passes as `TrainedModule`s: which parameters are trained, how tensor
parallelism shards the parameters, and how wrappers (DDP, FSDP2) have reduced their gradients. A wrapper may be around
the whole module or any submodule.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from math import prod
from typing import Any, NamedTuple

import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel
from torch.utils.weak import WeakIdKeyDictionary

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

Chunks = Any  # Type checkers do not see the result of `fully_shard` as an `nn.Module`.
"""A module, or a list of modules, one for each virtual stage of this rank."""


def trained_modules(topology: Topology, modules: Mapping[str, Chunks | None]) -> tuple[TrainedModule, ...]:
    """Describe the modules of this rank, in the order of the topology, once for each view that has parameters. Raises
    `UserError` if the topology has other modules on this rank, or if a wrapper's reduction is not supported.
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
    """Check that all replicas of a module train the same parameters, that its tensor-parallel ranks sum the same
    gradients over `tp`, and that a parameter shared by its first and last stage is trained on both or frozen on both.
    Collective over the ranks of each module; all of these ranks raise `UserError` if there is a difference.
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
    # Raise only after all comparisons: a rank that raised earlier would leave ranks of other groups waiting.
    for name, differing, ranks in gathered:
        require_same_facts(f"module `{name}`: trainable parameters", differing, ranks, fix)


def _has_ends(topology: Topology, name: str) -> bool:
    """Return whether this rank is in a process group of the first and last pipeline stage of a module."""
    try:
        return topology.group(name, *ENDS).size() > 1
    except KeyError:
        return False


def _sums(module: TrainedModule, name: str) -> str:
    """Describe the reductions of a parameter's gradient as text, which ranks compare."""
    text = f"`{name}`"
    if name in module.over_tp:
        text += f", its {module.over_tp[name]} over tp"
    if isinstance(module.gradients, WrappedGradients) and (axes := module.gradients.remaining[name].axes):
        text += f", summed over {'·'.join(axes)}"
    return text


def unreduced(module: TrainedModule) -> str:
    """Return the name of a PyTorch wrapper that did not average gradients in the last backward pass; "" if none."""
    for wrapper in _wrappers(module.chunks):
        # DDP sets this attribute to False in a forward pass under `no_sync` or `no_grad`.
        if isinstance(wrapper, DistributedDataParallel) and not wrapper.require_forward_param_sync:
            return "DistributedDataParallel"
        if not has_reduced(wrapper):
            return "FSDP2"
    return ""


def reshard(chunks: Sequence[nn.Module]) -> None:
    """Reshard all FSDP2 modules. After a forward pass without a backward pass, their parameters are still unsharded,
    and the next forward pass would use these outdated values.
    """
    for wrapper in _wrappers(chunks):
        if isinstance(wrapper, FSDPModule):
            wrapper.reshard()


Description = Mapping[str, tuple[int, bool, int]]
"""For each parameter name: the parameter's id, whether it is trained, and its data address if persistent, else 0."""


def described(module: TrainedModule) -> Description:
    """Describe the parameters of a module on this rank. Reshards the module's FSDP2 modules."""
    chunks: Any = module.chunks
    # Read `requires_grad` before `reshard` replaces the parameters.
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
    """Raise `UserError` if a module's parameters, or which of them are trained, have changed since `before`."""
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
    """Return the checkpoint key of this rank's shard of a module. Ranks that have the same shard, or different shards
    of the same `DTensor`s, share a key.
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
    """Return whether the device mesh of a `DTensor` contains more than one rank of `group`."""
    ranks = parameter.device_mesh.mesh.flatten().tolist()
    return len(set(ranks).intersection(dist.get_process_group_ranks(group))) > 1


def is_megatrons_ddp(module: nn.Module) -> bool:
    """Return whether `module` is Megatron's `DistributedDataParallel`, which stores gradients in flat buffers."""
    return hasattr(module, "finish_grad_sync") and hasattr(module, "buffers") and hasattr(module, "ddp_config")


def _chunks(module: Chunks | None) -> tuple[nn.Module, ...]:
    if module is None:
        return ()
    return (module,) if isinstance(module, nn.Module) else tuple(module)


def _wrappers(chunks: Sequence[nn.Module]) -> tuple[nn.Module, ...]:
    """Return all FSDP2 modules and all `DistributedDataParallel` wrappers of PyTorch or Megatron in `chunks`."""
    modules = (module for chunk in chunks for module in chunk.modules())
    return tuple(m for m in modules if isinstance(m, (DistributedDataParallel, FSDPModule)) or is_megatrons_ddp(m))


def _trained_views(topology: Topology, name: str, chunks: tuple[nn.Module, ...]) -> list[TrainedModule]:
    """Describe a module in the main view, and in each other view that has parameters on this rank. Megatron's wrappers
    reduce all gradients at once, so only the first description with trained parameters has these wrappers.
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
    """Return the view of a parameter. Megatron sets `allreduce=False` on expert parameters under expert parallelism."""
    return EXPERTS if EXPERTS in layout.views and not getattr(of.parameter, "allreduce", True) else MAIN


_STATES: Any = WeakIdKeyDictionary()
"""The gradient state of a module in a view, by its first trained parameter. The key is a parameter, so that any wrapper
around the module, such as a compiled module, has the same state.
"""


def _state_of(name: str, trained: Sequence[nn.Parameter]) -> GradientState:
    """Return the gradient state of the `trained` parameters of a module in a view; a new state on the first call."""
    if not trained:
        return GradientState(name)
    if trained[0] not in _STATES:
        _STATES[trained[0]] = GradientState(name)
    return _STATES[trained[0]]


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
        state=_state_of(name, [of.parameter for of in trained.values()]),
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
    """Return all parameters of the `chunks`, by name in the whole module. `chunks`: chunks by stage."""
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
    """Return the name of the parameter shared by the first and last pipeline stage, if any. Raises `UserError` if the
    two stages have no process group.
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
    """Map names of parameters and `buffers` in a stage to names in the whole module: with the stage's method
    `global_name`, else with Megatron-Core's layer numbers, which count over all stages, else return an empty dict.
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


# --------------------------------------------------------------------------------- reductions by wrappers


class _Around(NamedTuple):
    """The DDP wrappers, the outermost Megatron module and the innermost Megatron config around a parameter."""

    ddp: DistributedDataParallel | None = None
    megatrons_ddp: Any = None
    model: nn.Module | None = None
    config: Any = None


class _Parameter(NamedTuple):
    """A parameter, its path in its chunk, its wrappers, and the FSDP2 parameter group that shards it, if any."""

    path: str
    parameter: Any
    around: _Around
    fsdp: Any


def _walk(module: nn.Module, outer: _Around, around: dict[int, _Around], fsdp: dict[int, Any]) -> None:
    """Walk `module` recursively, and add the wrappers of each parameter to `around` and its FSDP2 parameter group to
    `fsdp`, by the parameter's id. `outer`: the wrappers around `module`.
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
        """Return the reductions of a gradient that wrappers have not done. Raises `UserError`."""
        sum_axes = self.view.sum_axes
        reduced, divisor = self._reduced(of)
        left = tuple(axis for axis in sum_axes if axis not in reduced and self.degrees[axis] > 1)
        groups = [self.topology.group(self.name, axis) for axis in left]
        if left and all(axis in left or self.degrees[axis] == 1 for axis in sum_axes):
            groups = [self.topology.group(self.name, *sum_axes)]  # Sum over all axes in one group.
        return Remaining(left, tuple(groups), divisor)

    def copies(self, of: _Parameter) -> int:
        """Return the number of ranks with the same elements of a parameter, along the axes that sum gradients and, for
        a `DTensor`, the dimensions of its mesh. Raises `UserError`.
        """
        if not is_sharded(of.parameter):
            return prod(self.degrees[axis] for axis in self.view.sum_axes)
        along = self.axes_of(of)
        return _copies(of.parameter) * prod(self.degrees[axis] for axis in self.view.sum_axes if axis not in along)

    def _reduced(self, of: _Parameter) -> tuple[tuple[str, ...], float]:
        """Return the axes along which a wrapper has reduced a gradient, and the divisor that the wrapper applied."""
        around = of.around
        if around.megatrons_ddp is not None:
            # Megatron's wrapper averages over the ranks of the main view, even for experts.
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
        """Return the layout axes that the mesh of a `DTensor` spans. Raises `UserError` if it spans no whole axes."""
        return _axes_between(self, of.parameter.device_mesh.mesh.flatten().tolist(), of.path, sharded=True)

    def slices(self, name: str, of: _Parameter, rank: int) -> tuple[TensorSlice, ...]:
        """Return the slices of the whole parameter on `rank` of the group `holders`. Slices are named by module and
        parameter.
        """
        parameter, tp, name = of.parameter, self.layout.tp, f"{self.name}.{name}"
        if hasattr(parameter, "stored_as"):
            return _stored_slices(name, of, rank)
        rows = parameter.shape[0] if parameter.dim() else 1
        if self.view == EXPERTS:
            return (TensorSlice(_of_expert(name, of, rank), (0, rows)),)
        if is_sharded(parameter) and "tp" in self.axes_of(of):
            return (TensorSlice(f"{name} of tp {rank}", (0, rows)),)  # Treat each shard as a separate tensor.
        if tp == 1 or not getattr(parameter, "tensor_model_parallel", False):
            return (TensorSlice(name, (0, rows)),)
        if getattr(parameter, "partition_dim", 0) == 1 and parameter.dim() == 2:
            width = parameter.shape[1]
            return (TensorSlice(name, (0, rows), columns=(rank * width, rank * width + width)),)
        # Megatron's gated MLP concatenates this rank's rows of the gate and this rank's rows of the up projection.
        is_gated = getattr(of.around.config, "gated_linear_unit", False)
        matrices = 2 if is_gated and of.path.rpartition(".")[0].endswith("linear_fc1") else 1
        size = rows // matrices
        starts = [matrix * size * tp + rank * size for matrix in range(matrices)]
        return tuple(TensorSlice(name, (start, start + size), at=number * size) for number, start in enumerate(starts))


def _stored_slices(name: str, of: _Parameter, rank: int) -> tuple[TensorSlice, ...]:
    """Return the slices of a parameter with the attribute `stored_as`: the parameter's path in a layer and, for each
    rank along `tp`, the slices of stored tensors, which are named within that layer. Raises `UserError` if slices have
    copies on several ranks and a wrapper does not support copies.
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
    """Return the name of an expert's parameter in the whole module. Megatron numbers the experts of each
    expert-parallel rank from 0.
    """
    owner, marker, path = name.partition(".local_experts.")
    if not marker:
        return f"{name} of ep {rank}"
    number, _, rest = path.partition(".")
    experts_per_rank = of.around.config.num_moe_experts // of.around.config.expert_model_parallel_size
    return f"{owner}{marker}{int(number) + rank * experts_per_rank}.{rest}"


def _require_known_views(name: str, layout: Layout) -> None:
    """Check that every view but `experts` sums gradients over the same ranks as the main view: parameters cannot be
    assigned to further views. Raises `UserError`.
    """
    for view in layout.views:
        if view != EXPERTS and layout.groups(*view.sum_axes) != layout.groups(*GRADIENT_AXES):
            found = f"layout {layout}, whose view `{view.name}` sums gradients over other ranks than the main one"
            because = "parameters would be summed, and replicas made equal, over those of the main view"
            fix = "leave the further view out, or sum gradients over its groups with an optimizer of your own"
            where, same = f"module `{name}`", "the same ranks in both"
            raise UserError.at(where, found=found, expected=same, because=because, fix=fix)


def _require_megatron_fits(here: _Module, around: Mapping[int, _Around], fsdp: Mapping[int, Any]) -> None:
    """Check that Megatron's configs divide experts as the layout does, and that parameters sharded by FSDP2 have
    Megatron's attributes for tensor parallelism, which `fully_shard` loses. Raises `UserError`.
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
        # Weights of tensor-parallel layers must have the attribute `tensor_model_parallel`.
        split = [p for layer, p in sharded if hasattr(layer, "tp_group") and p is getattr(layer, "weight", None)]
        if sharded and not all(hasattr(p, "tensor_model_parallel") for p in split or [p for _, p in sharded]):
            problem = "parameters have lost the attributes that Megatron gave them, such as `tensor_model_parallel`"
            because = "FSDP2 replaces the parameters, and sums over tp and between stages depend on the attributes"
            fix = "keep vars(p) of each parameter by name before `fully_shard`, put them back after (docs/library.md)"
            raise UserError.at(where, problem=problem, because=because, fix=fix)


def _axes_between(here: _Module, ranks: Sequence[int], name: str, *, sharded: bool) -> tuple[str, ...]:
    """Return the axes along which `ranks` differ in the module's view. Raises `UserError` unless `ranks` are all ranks
    along these axes, and gradients are summed or, if `sharded`, parameters are split along each of the axes.
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
    """Return the number of ranks in the mesh of a `DTensor` that have the same elements."""
    mesh = parameter.device_mesh
    # Check `is_replicate()`: FSDP2 over tensor parallelism has `_StridedShard`, whose `is_shard()` is false.
    return prod(mesh.size(dim) for dim, placement in enumerate(parameter.placements) if placement.is_replicate())


def _over_tp(of: _Parameter) -> OverTp | None:
    """Return the reduction of a gradient over `tp`, if any, following Megatron's `finalize_model_grads`."""
    name, parameter = of.path, of.parameter
    if getattr(parameter, "average_gradients_across_tp_domain", False):
        return "mean"
    norms_heads = getattr(of.around.config, "qk_layernorm", False) and ("q_layernorm" in name or "k_layernorm" in name)
    return "sum" if norms_heads or getattr(parameter, "sequence_parallel", False) else None
