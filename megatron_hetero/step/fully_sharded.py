"""ZeRO stages 2 and 3 with PyTorch's FSDP2 (`fully_shard`), following the rule for gradients in `gradients`.

A stage consists of *units*: each layer, the embedding, and the rest of the stage; submodules of these whose parameters
are in a further view are separate units. The ranks that sum a unit's gradients all-gather its weights when it runs, and
free the gathered weights afterwards. Each backward pass reduce-scatters the gradients of a unit, as sums and in the
accumulation dtype; the sums are accumulated in buffers of this module, not in `.grad`, which has the weights' dtype. A
rank stores rows [rank * k, rank * k + k) of each parameter, with k = ceil(rows / ranks): a flat range, as in the
distributed optimizer.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.overrides import TorchFunctionMode
from typing_extensions import override

from megatron_hetero.groups.fsdp import forget_order, fsdp_groups, fsdp_parameters, reduce_unused
from megatron_hetero.groups.local_group import LocalGroup
from megatron_hetero.schedule.contract import Gathered
from megatron_hetero.schedule.gathering import rows_of_share
from megatron_hetero.schedule.program import StageId
from megatron_hetero.step.buffers import units_of
from megatron_hetero.step.gradient_state import GradientState
from megatron_hetero.step.module import ModuleGradients, ModuleWeights, Range, TrainedModule

Load = Callable[[str, Tensor], None]
"""A function that fills the given parameter tensor with the values of the parameter of the given name."""


@dataclass(frozen=True, eq=False)
class Unit:
    """A module of a stage whose weights are gathered in one collective.

    Attributes:
        module: the module, wrapped by FSDP2.
        gradients: gradients of this rank's rows of the trained parameters, padded to the size on the first rank.
        places: the offset of each parameter's gradient in `gradients`, by name.
        read_again: whether the weights are read again after the module has run.
    """

    module: Any
    gradients: Tensor
    places: Mapping[str, int]
    read_again: bool


@dataclass(frozen=True, eq=False)
class ShardedStage:
    """The weights of a stage in one view, which are gathered when it runs.

    Attributes:
        units: the units in the order in which they run. In the main view the last unit is the model itself, with the
            parameters that are in no other unit.
        gradients: the concatenated gradients of all units.
        zero: the ZeRO stage, 2 or 3.
    """

    units: tuple[Unit, ...]
    gradients: Tensor
    zero: int

    def before_run(self, stays: bool) -> None:
        """Set whether the weights stay gathered after the next run of the stage."""
        if not any(unit.places for unit in self.units):
            forget_order([unit.module for unit in self.units])
        for unit in self.units:
            unit.module.set_reshard_after_backward(not stays, recurse=False)
            unit.module.set_reshard_after_forward(not (stays or unit.read_again), recurse=False)


@dataclass(frozen=True, eq=False)
class ShardedWeights(ModuleWeights):
    """Weights of which each rank stores and updates a range of rows; `stages` gather full weights when they run."""

    stages: tuple[ShardedStage, ...]

    @override
    def stored(self, name: str) -> Range:
        return _range_of(self.parameters[name].shape, self.group)

    @override
    def values(self, name: str) -> Tensor:
        parameter: Any = self.parameters[name]
        return parameter.detach().to_local().view(-1)

    @override
    def publish(self) -> None:
        """Free weights that are still gathered, which the update has made outdated."""
        for stage in self.stages:
            for unit in stage.units:
                unit.module.reshard()

    @override
    def whole(self, name: str, flat: Tensor) -> Tensor:
        shape, group = self.parameters[name].shape, self.group
        padded = flat.new_zeros(share_of(shape, group.size()))
        padded[: len(flat)] = flat
        gathered = padded.new_empty(len(padded) * group.size())
        dist.all_gather_into_tensor(gathered, padded, group=group)
        return gathered[: shape.numel()].view(shape)


class ShardedGradients(ModuleGradients):
    """Gradients that each backward pass reduce-scatters; each rank accumulates the sums for the rows that it stores."""

    reduces_early: ClassVar[bool] = True

    def __init__(self, name: str, weights: ShardedWeights):
        self.state, self._weights = GradientState(name), weights
        units = (unit for stage in weights.stages for unit in stage.units)
        # For each trained parameter, a flat view of the gradients that begins at the parameter's gradient.
        self._by_name = {name: unit.gradients[start:] for unit in units for name, start in unit.places.items()}

    @property
    @override
    def sums_shares(self) -> bool:
        return True

    @property
    @override
    def summed(self) -> Sequence[Tensor]:
        return [stage.gradients for stage in self._weights.stages if len(stage.gradients)]

    @override
    def accumulated(self, name: str) -> tuple[Tensor, Range]:
        start, stop = self._weights.stored(name)
        return self._by_name[name][: stop - start], (start, stop)

    @override
    def clear(self, *, set_to_none: bool) -> None:
        for gradients in self.summed:
            gradients.zero_()

    @override
    def finish(self) -> Tensor:
        """Return whether the sums that backward passes have accumulated are finite, as an fp64 scalar."""
        extremes = [extreme for gradients in self.summed for extreme in torch.aminmax(gradients)]
        return torch.stack(extremes).isfinite().all().double()


def in_shards(
    name: str, parameters: Mapping[str, nn.Parameter], group: dist.ProcessGroup, stages: tuple[ShardedStage, ...]
) -> tuple[ShardedWeights, ShardedGradients]:
    """Return the weights and gradients of a view, in its sharded `stages`. `group`: the ranks that share the view."""
    trained = (each for stage in stages for unit in stage.units for each in unit.places)
    owned = {each: _range_of(parameters[each].shape, group) for each in trained}
    weights = ShardedWeights(parameters, group, owned, True, stages)
    return weights, ShardedGradients(name, weights)


def gathered_stages(modules: Iterable[TrainedModule]) -> dict[StageId, list[ShardedStage]]:
    """Return the sharded stages of all views of the modules, by module and stage number."""
    stages_by_id = dict[StageId, list[ShardedStage]]()
    for module in modules:
        if isinstance(module.weights, ShardedWeights):
            for number, stage in zip(module.stages, module.weights.stages, strict=True):
                stages_by_id.setdefault((module.name, number), []).append(stage)
    return stages_by_id


def _range_of(shape: torch.Size, group: dist.ProcessGroup) -> Range:
    """Return the range of a parameter's elements that this rank of the group stores."""
    size, share = shape.numel(), share_of(shape, group.size())
    start = min(size, share * group.rank())
    return start, min(size, start + share)


def share_of(shape: torch.Size, ranks: int) -> int:
    """Return the number of a parameter's elements on the first rank, which is the maximum over all `ranks`."""
    return rows_of_share(shape[0], ranks) * shape[1:].numel()


@contextmanager
def without_weights() -> Iterator[None]:
    """Build modules on PyTorch's device `meta` inside this context, so that parameters use no memory."""
    with torch.device("meta"), _DevicesMeanMeta():
        yield


class _DevicesMeanMeta(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if kwargs.get("device") is not None:
            kwargs["device"] = "meta"
        return func(*args, **kwargs)


def shard_stage(
    model: Any,
    name_of: Callable[[str], str],
    group: dist.ProcessGroup,
    device: torch.device,
    load: Load,
    trained: Collection[str],
    *,
    gradients: torch.dtype,
    zero: int,
    adds_up: bool,
    further: Sequence[tuple[dist.ProcessGroup, Collection[str]]] = (),
) -> tuple[ShardedStage, ...]:
    """Shard the weights of a stage, unit by unit, so that at most one unit of a stage that was built `without_weights`
    is unsharded at a time. Returns the sharded stage in the main view, and in each further view.

    Args:
        model: model of the stage. The modules in `model.units()`, if it has that method, are gathered separately, in
            the order in which they run.
        name_of: maps a parameter's name in the stage to its name in the module; other arguments use the latter.
        group: the ranks that shard the weights of the main view.
        device: device of the weights.
        load: fills weights that have no memory yet.
        trained: names of the parameters to train.
        gradients: dtype in which gradients are reduced and accumulated.
        zero: ZeRO stage, 2 or 3.
        adds_up: whether one backward pass may compute several gradients of a parameter.
        further: for each further view, the ranks that shard its weights, and the names of its parameters.
    """
    groups = [group, *(further_group for further_group, _ in further)]
    for each in groups:
        if isinstance(each, LocalGroup):
            each.register()  # A `DeviceMesh` looks groups up by name.
    meshes = [DeviceMesh.from_group(each, device.type, mesh_dim_names=("dp_cp",)) for each in groups]
    names = {parameter: name_of(name) for name, parameter in model.named_parameters()}
    view_by_name = {name: view for view, (_, names_in_view) in enumerate(further, 1) for name in names_in_view}
    views = {parameter: view_by_name.get(name, 0) for parameter, name in names.items()}
    policy = MixedPrecisionPolicy(reduce_dtype=gradients, cast_forward_inputs=False)
    runs = list[list[_FutureUnit]]()
    # The model itself, with the remaining parameters, is last in the forward pass and first in the backward pass.
    for outer in (*units_of(model), Gathered(model, read_again=True)):
        run = list[_FutureUnit]()
        # FSDP2 requires that inner modules are wrapped first.
        for view, each in (*_of_further_views(outer.module, views), (0, outer)):
            known = _materialize(each.module, names, device, load, trained)
            fully_shard(each.module, mesh=meshes[view], mp_policy=policy)
            starts, size = _lay_out(each.module, known, groups[view].size())
            run.insert(0, _FutureUnit(view, each, starts, size))
        runs.append(run)
    unfilled = [name for name, tensor in (*model.named_parameters(), *model.named_buffers()) if tensor.is_meta]
    assert not unfilled, f"built without memory, and not filled: {unfilled}"
    stages = list[ShardedStage]()
    for view in range(len(groups)):
        future = [each for run in runs for each in run if each.view == view]
        flat = torch.zeros(sum(each.size for each in future), dtype=gradients, device=device)
        stages.append(ShardedStage(_units(future, flat, adds_up=adds_up), flat, zero))
    _order(model, [[each.gathered.module for each in run] for run in runs])
    return tuple(stages)


@dataclass(frozen=True, eq=False)
class _FutureUnit:
    """A planned unit of a view: its module, the offset of each trained parameter's gradient, and the total size."""

    view: int
    gathered: Gathered
    starts: Mapping[str, int]
    size: int


def _of_further_views(module: nn.Module, views: Mapping[nn.Parameter, int]) -> Iterator[tuple[int, Gathered]]:
    """Yield the number of a further view and a module, for each largest module inside a unit whose parameters are all
    in that view. `views`: the view of each parameter that is in no other unit.
    """
    direct = {views[parameter] for parameter in module.parameters(recurse=False) if parameter in views}
    assert not direct - {0}, f"{type(module).__name__} has parameters of several views: build those of each apart"
    for child in module.children():
        views_inside = {views[parameter] for parameter in child.parameters() if parameter in views}
        if len(views_inside) == 1 and views_inside != {0}:
            yield views_inside.pop(), Gathered(child)
        elif views_inside - {0}:
            yield from _of_further_views(child, views)


def _materialize(
    unit: nn.Module, names: Mapping[nn.Parameter, str], device: torch.device, load: Load, trained: Collection[str]
) -> dict[str, tuple[str, dict[str, Any]]]:
    """Load the parameters of a planned unit that are on the device `meta`. Returns, by each parameter's name in the
    unit, its name in the module and its attributes, such as Megatron's.
    """
    known: dict[str, tuple[str, dict[str, Any]]] = {}
    for path, empty in list(unit.named_parameters()):
        if empty not in names:  # The parameter is already in a unit inside this one.
            continue
        name, (owner, _, attribute) = names[empty], path.rpartition(".")
        known[path] = name, dict(vars(empty))
        if empty.is_meta:
            parameter = nn.Parameter(torch.empty(empty.shape, dtype=empty.dtype, device=device), name in trained)
            load(name, parameter)
            setattr(unit.get_submodule(owner), attribute, parameter)
    return known


def _lay_out(module: Any, known: Mapping[str, tuple[str, dict[str, Any]]], ranks: int) -> tuple[dict[str, int], int]:
    """Copy the `known` attributes to the sharded parameters of a unit. Returns the offset of each trained parameter's
    gradient among the gradients of the unit, and their total size.
    """
    paths = {id(parameter): path for path, parameter in module.named_parameters()}
    starts, end = dict[str, int](), 0
    for parameter in fsdp_parameters(module):
        name, attributes = known[paths[id(parameter)]]
        vars(parameter).update(attributes)
        if parameter.requires_grad:
            starts[name] = end
            end += share_of(parameter.shape, ranks)
            parameter.register_post_accumulate_grad_hook(_drop)
    return starts, end


def _units(future: Sequence[_FutureUnit], gradients: Tensor, *, adds_up: bool) -> tuple[Unit, ...]:
    """Return the units of a stage in a view, each with a segment of the flat `gradients`."""
    segments = gradients.split([each.size for each in future])
    return tuple(
        _unit(each.gathered, each.starts, segment, adds_up=adds_up)
        for each, segment in zip(future, segments, strict=True)
    )


def _unit(gathered: Gathered, starts: Mapping[str, int], gradients: Tensor, *, adds_up: bool) -> Unit:
    module = gathered.module
    module.set_unshard_in_backward(gathered.in_backward)
    if starts and adds_up:
        _accumulate_in(gradients.dtype, module)
    if starts:
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)
        module.set_all_reduce_hook(_adding_to(gradients))
        reduce_unused(module)
    return Unit(module, gradients, starts, gathered.read_again)


def _accumulate_in(dtype: torch.dtype, module: Any) -> None:
    """Accumulate several gradients of a parameter in one backward pass (from chunks) in `dtype`, not in the dtype of
    the weights.
    """

    def widen(sharded: Any, parameter: Tensor) -> None:
        assert parameter.grad is not None, "the hook runs when there is one"
        if sharded.unsharded_accumulated_grad is None:
            sharded.unsharded_accumulated_grad = parameter.grad.to(dtype)
        else:
            sharded.unsharded_accumulated_grad += parameter.grad
        parameter.grad = None

    module.unshard()  # FSDP2 creates the unsharded parameters in the first `unshard()`.
    for sharded in (each for group in fsdp_groups(module) for each in group.fsdp_params):
        if sharded.sharded_param.requires_grad and sharded.sharded_param.dtype != dtype:
            sharded.unsharded_param.register_post_accumulate_grad_hook(partial(widen, sharded))
    module.reshard()


def _adding_to(gradients: Tensor) -> Callable[[Tensor], None]:
    def add(reduced: Tensor) -> None:
        assert len(reduced) == len(gradients), "some trained parameter of a unit got no gradient"
        if reduced.is_cuda:
            # FSDP2 allocates this tensor in another stream, and frees it without waiting for the current stream.
            reduced.record_stream(torch.cuda.current_stream())
        gradients.add_(reduced)

    return add


def _drop(parameter: Tensor) -> None:
    parameter.grad = None


def _order(model: nn.Module, runs: Sequence[Sequence[Any]]) -> None:
    """Prefetch the weights of a unit, and of units inside it, during the previous unit (in the backward pass, during
    the next unit). FSDP2's recorded order is unsuitable: it is reset at the end of each backward pass, while other
    micro-batches are in flight. `runs`: for each unit, the unit followed by the units inside it.
    """
    for earlier, later in pairwise(runs):
        later[0].set_modules_to_backward_prefetch([*earlier])
    for earlier, later in pairwise(runs[:-1]):  # The model itself, the last unit, is gathered before all others.
        earlier[0].set_modules_to_forward_prefetch([*later])
    for first, *_ in runs[:1]:
        first.set_modules_to_backward_prefetch([first])  # Disable prefetching in FSDP2's recorded order.
    for inside in (each for _, *others in runs for each in others):
        inside.set_modules_to_backward_prefetch([inside])
        inside.set_modules_to_forward_prefetch([inside])
    # FSDP2 treats the first module that runs as the root, but the embedding of a stage may run before the model.
    fully_shard.state(model)._lazy_init()  # pyright: ignore[reportFunctionMemberAccess]
