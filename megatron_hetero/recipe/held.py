"""A module on this rank as a training program gives it: which parameters train, where their gradients are, and what
wrappers have done to them. A wrapper may be around the whole module or around any part of it.

    wrapper                     gradients after the backward pass          what is left to do here
    none                        of this rank's tokens                      sums over sp, cp and dp
    Megatron's DDP              of this rank's tokens, in `main_grad`      its own `finish_grad_sync`
    FSDP2 (`fully_shard`)       shards, their mean over the mesh           times the mesh's ranks; sums over other axes
    PyTorch's DDP               their mean over its group                  times the group's ranks; sums over other axes
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import prod
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from megatron_hetero.distributed.communicators import GRADIENT_AXES
from megatron_hetero.distributed.fsdp import fsdp_groups, has_reduced
from megatron_hetero.distributed.topology import Topology
from megatron_hetero.errors import UserError
from megatron_hetero.layout.axes import AXES
from megatron_hetero.layout.grammar import format_ranks

Chunks = Any  # What `fully_shard` returns is no `nn.Module` to type checkers.
"""A module, or a list of one for each of its virtual stages."""
OverTp = Literal["sum", "mean"]


@dataclass(frozen=True, eq=False)
class HeldParameter:
    """A parameter that trains.

    `axes`: over which its gradient is still to be summed, and `factor`: by which that sum is to be multiplied, since a
    wrapper has divided it. `over_tp`: what to do over `tp`. `counts`: whether this rank's share of its gradient counts
    in the norm; each element counts on one rank. `tied`: the first and last stage hold copies of it.
    """

    name: str
    parameter: Any
    in_main_grad: bool
    axes: tuple[str, ...]
    factor: float
    over_tp: OverTp | None
    counts: bool
    tied: bool

    def gradient(self) -> Tensor:
        """This rank's part; zeros where there is none."""
        if self.in_main_grad:
            return self.parameter.main_grad
        parameter = self.parameter
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        elif is_sharded(parameter) and parameter.grad.placements != parameter.placements:
            # With tensor parallelism of PyTorch, sums over `tp` may still be to be formed.
            parameter.grad = parameter.grad.redistribute(placements=parameter.placements)
        return local(parameter.grad)


@dataclass(frozen=True, eq=False)
class HeldModule:
    """A module of the topology on this rank. `chunks` are as they were given, wrapped or not."""

    name: str
    chunks: tuple[nn.Module, ...]
    topology: Topology

    @cached_property
    def parameters(self) -> tuple[HeldParameter, ...]:
        """Those that train, in the order in which all replicas have them."""
        found: dict[int, HeldParameter] = {}
        for chunk in self.chunks:
            inside = _Inside()
            inside.add(chunk, _Around())
            _require_megatron_fits(self, inside)
            for name, parameter in chunk.named_parameters():
                if parameter.requires_grad and id(parameter) not in found:
                    found[id(parameter)] = _held(self, inside, name, parameter)
        return tuple(found.values())

    @cached_property
    def wrappers(self) -> tuple[nn.Module, ...]:
        """Each part that FSDP2, PyTorch's or Megatron's `DistributedDataParallel` wraps."""
        parts = (part for chunk in self.chunks for part in chunk.modules())
        return tuple(p for p in parts if isinstance(p, (DistributedDataParallel, FSDPModule)) or is_megatrons_ddp(p))

    @property
    def megatrons_ddps(self) -> tuple[Any, ...]:
        """Each `DistributedDataParallel` of Megatron in the module."""
        return tuple(filter(is_megatrons_ddp, self.wrappers))

    def unreduced(self) -> str:
        """The wrapper of PyTorch's that has not averaged gradients of the last backward pass, if one has not."""
        for part in self.wrappers:
            # DDP's own note of the last forward pass.
            if isinstance(part, DistributedDataParallel) and not part.require_forward_param_sync:
                return "DistributedDataParallel"
            if not has_reduced(part):
                return "FSDP2"
        return ""

    def reshard(self) -> None:
        """Have what FSDP2 shards hold shards again. After a forward pass alone it does not: its parameters are others
        then, and the next forward pass would take them as they are.
        """
        for part in self.wrappers:
            if isinstance(part, FSDPModule):
                part.reshard()


def held_modules(topology: Topology, modules: Mapping[str, Chunks | None]) -> tuple[HeldModule, ...]:
    """Those of this rank, in the order of the topology. Raises `UserError` if the topology has others, or if a wrapper
    has done what is not known here.
    """
    given = {name: _chunks(module) for name, module in modules.items()}
    given = {name: chunks for name, chunks in given.items() if chunks}
    expected = [name for name, layout in topology.layouts.items() if topology.rank in layout]
    if wrong := sorted(given.keys() ^ expected):
        missing = wrong[0] in expected
        raise UserError.at(
            f"modules on rank {topology.rank}",
            found=f"{'no' if missing else 'a'} module `{wrong[0]}`",
            expected=f"those of this rank: {', '.join(expected) or 'none'}",
            because="ranks of a module reduce its gradients together",
            fix="pass the part of each module that this rank holds, and None or nothing for others",
        )
    held = tuple(HeldModule(name, given[name], topology) for name in expected)
    owner: dict[int, str] = {}
    for module in held:
        module.reshard()
        for each in module.parameters:  # What is wrong is said here, before ranks wait for each other.
            if (first := owner.setdefault(id(each.parameter), module.name)) != module.name:
                found, fix = f"{each.name} in `{first}` too", "give each parameter to one module"
                raise UserError.at(f"module `{module.name}`", found=found, expected="parameters of its own", fix=fix)
    return held


def is_megatrons_ddp(module: nn.Module) -> bool:
    """Whether this is Megatron's `DistributedDataParallel`, which keeps gradients in buffers of its own."""
    return hasattr(module, "finish_grad_sync") and hasattr(module, "buffers") and hasattr(module, "ddp_config")


def local(tensor: Tensor) -> Tensor:
    """This rank's part of a `DTensor`; other tensors as they are."""
    return tensor.to_local() if is_sharded(tensor) else tensor  # pyright: ignore[reportAttributeAccessIssue]


def is_sharded(tensor: Any) -> bool:
    """Whether this is a `DTensor`."""
    return hasattr(tensor, "device_mesh") and hasattr(tensor, "placements")


def _chunks(module: Chunks | None) -> tuple[nn.Module, ...]:
    if module is None:
        return ()
    return (module,) if isinstance(module, nn.Module) else tuple(module)


# --------------------------------------------------------------------------------- what wrappers have done


@dataclass(frozen=True)
class _Wrapped:
    """What a wrapper has done to a gradient: summed it along axes, and divided it."""

    axes: tuple[str, ...] = ()
    divisor: float = 1.0


class _Around(NamedTuple):
    """Wrappers around a parameter, and of Megatron's models the outermost module and innermost configuration."""

    ddp: DistributedDataParallel | None = None
    megatrons_ddp: Any = None
    model: nn.Module | None = None
    config: Any = None


@dataclass(frozen=True, eq=False)
class _Inside:
    """What is inside a module, by the identities of its parameters: what is `around` each, and what FSDP2 divides
    gradients by, None for the number of its ranks.
    """

    around: dict[int, _Around] = field(default_factory=dict)
    fsdp: dict[int, float | None] = field(default_factory=dict)

    def add(self, part: nn.Module, outer: _Around) -> None:
        """Walk through `part`, which has `outer` around it."""
        for group in fsdp_groups(part):
            self.fsdp.update(dict.fromkeys((id(each.sharded_param) for each in group.fsdp_params), _divisor_of(group)))
        if isinstance(part, DistributedDataParallel):
            outer = outer._replace(ddp=part)
        elif is_megatrons_ddp(part):
            outer = outer._replace(megatrons_ddp=part)
        elif hasattr(config := getattr(part, "config", None), "tensor_model_parallel_size"):
            outer = outer._replace(model=part if outer.model is None else outer.model, config=config)
        self.around.update((id(parameter), outer) for parameter in part.parameters(recurse=False))
        for child in part.children():
            self.add(child, outer)


def _held(module: HeldModule, inside: _Inside, name: str, parameter: Any) -> HeldParameter:
    topology, degrees = module.topology, module.topology.layouts[module.name].degrees
    wrapped = _wrapped(module, inside, name, parameter)
    place = topology.layouts[module.name].coordinate(topology.rank)._asdict()
    if is_sharded(parameter):
        along = axes_of_mesh(module, parameter, name)
        counts = _is_first_copy(parameter) and all(place[axis] == 0 for axis in GRADIENT_AXES if axis not in along)
        split = "tp" in along or getattr(parameter, "tensor_model_parallel", False)
    else:
        counts = all(place[axis] == 0 for axis in GRADIENT_AXES)
        split = getattr(parameter, "tensor_model_parallel", False)
    return HeldParameter(
        name=name,
        parameter=parameter,
        in_main_grad=inside.around[id(parameter)].megatrons_ddp is not None,
        axes=tuple(axis for axis in GRADIENT_AXES if axis not in wrapped.axes and degrees[axis] > 1),
        factor=wrapped.divisor,
        over_tp=_over_tp(name, parameter, inside.around[id(parameter)].config) if degrees["tp"] > 1 else None,
        counts=counts and bool(split or place["tp"] == 0) and not getattr(parameter, "shared", False),
        tied=bool(getattr(parameter, "shared_embedding", False)),
    )


def _wrapped(module: HeldModule, inside: _Inside, name: str, parameter: Any) -> _Wrapped:
    degrees, around = module.topology.layouts[module.name].degrees, inside.around[id(parameter)]
    if around.megatrons_ddp is not None:
        sums = around.megatrons_ddp.config.calculate_per_token_loss
        return _Wrapped(GRADIENT_AXES, 1.0 if sums else prod(degrees[axis] for axis in GRADIENT_AXES))
    if id(parameter) in inside.fsdp:
        along = axes_of_mesh(module, parameter, name)
        axes = tuple(axis for axis in along if axis in GRADIENT_AXES)
        return _Wrapped(axes, inside.fsdp[id(parameter)] or prod(degrees[axis] for axis in axes))
    if around.ddp is not None:
        ranks = torch.distributed.get_process_group_ranks(around.ddp.process_group)
        return _Wrapped(_axes_between(module, ranks, name, tp=False), len(ranks))
    return _Wrapped()


def _require_megatron_fits(module: HeldModule, inside: _Inside) -> None:
    """Check that models of Megatron have no expert parallelism, which no layout has, and that their parameters still
    say how they are split: `fully_shard` makes new ones that do not. Raises `UserError`.
    """
    layout, where = module.topology.layouts[module.name], f"module `{module.name}`"
    if any((size := getattr(each.config, "expert_model_parallel_size", 1)) > 1 for each in inside.around.values()):
        because, fix = "layouts have no expert parallelism yet", "set it to 1: experts are split over tp, or not at all"
        found = f"config.expert_model_parallel_size {size}"
        raise UserError.at(where, found=found, expected="1", because=because, fix=fix)
    models = dict.fromkeys(each.model for key, each in inside.around.items() if key in inside.fsdp)
    for model in models if layout.tp * layout.pp > 1 else ():
        parts = () if model is None else model.modules()
        sharded = [(part, p) for part in parts for p in part.parameters(recurse=False) if id(p) in inside.fsdp]
        # Weights of layers that are split over tp say so.
        split = [p for part, p in sharded if hasattr(part, "tp_group") and p is getattr(part, "weight", None)]
        if sharded and not all(hasattr(p, "tensor_model_parallel") for p in split or [p for _, p in sharded]):
            raise UserError.at(
                where,
                problem="parameters have lost the attributes that Megatron gave them, such as `tensor_model_parallel`",
                because="FSDP2 puts new ones in their place, and sums over tp and between stages depend on them",
                fix="keep vars(p) of each parameter by name before `fully_shard` and put them back after "
                "(docs/library.md)",
            )


def _divisor_of(group: Any) -> float | None:
    return None if group.gradient_divide_factor is None else float(group.gradient_divide_factor)


def axes_of_mesh(module: HeldModule, parameter: Any, name: str = "") -> tuple[str, ...]:
    """The axes of the module's layout along which a `DTensor` is. Raises `UserError`."""
    return _axes_between(module, parameter.device_mesh.mesh.flatten().tolist(), name, tp=True)


def _axes_between(module: HeldModule, ranks: Sequence[int], name: str, *, tp: bool) -> tuple[str, ...]:
    """The axes of the module's layout along which `ranks` lie: those of `GRADIENT_AXES`, and `tp` if that may be one.
    Raises `UserError` if they are not all ranks along some.
    """
    topology, layout = module.topology, module.topology.layouts[module.name]
    mine = layout.coordinate(topology.rank)
    places = [layout.coordinate(rank) for rank in ranks if rank in layout]
    axes = tuple(axis for i, axis in enumerate(AXES) if any(place[i] != mine[i] for place in places))
    along = {axis for axis in axes if axis in GRADIENT_AXES or (axis == "tp" and tp)}
    if sorted(ranks) != list(layout.group_of(topology.rank, *along)):
        raise UserError.at(
            f"parameter {name} of `{module.name}`",
            found=f"a wrapper over ranks {format_ranks(sorted(ranks))}",
            expected=f"ranks along axes of its layout {layout}",
            because="its gradients are summed along the other axes",
            fix=f'wrap the module with a mesh or group of the topology, such as topology.mesh("{module.name}")["dp"]',
        )
    return axes


def _is_first_copy(parameter: Any) -> bool:
    """Whether no rank before this one in the mesh of a `DTensor` holds the same elements."""
    mesh = parameter.device_mesh
    # FSDP2 over tensor parallelism has a kind of shards of its own, which says that it is none.
    return all(not p.is_replicate() or mesh.get_local_rank(dim) == 0 for dim, p in enumerate(parameter.placements))


def _over_tp(name: str, parameter: Any, configuration: Any) -> OverTp | None:
    """As Megatron's `finalize_model_grads`."""
    if getattr(parameter, "average_gradients_across_tp_domain", False):
        return "mean"
    norms_heads = getattr(configuration, "qk_layernorm", False) and ("q_layernorm" in name or "k_layernorm" in name)
    return "sum" if norms_heads or getattr(parameter, "sequence_parallel", False) else None
