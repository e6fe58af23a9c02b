"""The rule by which gradients of all modules are reduced: its steps, and the functions that a training loop calls.

Every rank has back-propagated the *sum* of its local tokens' losses. For each module:

  1. gradients are summed over the module's data- and context-parallel ranks (with a sharded optimizer each rank uses
     only its share of the sums), unless the user's wrapper has done so; a wrapper's mean is turned into a sum;
  2. slices of parameters that several tp ranks store, and whose gradients are partial (parameters used on
     sequence-sharded activations; norms of heads; replicated key/value heads), are summed over `tp`;
  3. the gradient of an embedding that is tied to the head is summed over the first and last pipeline stage. This
     follows step 1, so that both copies are bitwise equal whatever the order of additions in step 1;
  4. squares are added up over all modules and ranks, each element of each parameter counted once;
  5. all gradients are scaled by 1/N and by the clipping factor, the same on every rank, when the update reads them.

Step 1 may overlap with the backward pass (`ModuleGradients.start`, `TrainedModule.expect`). `gradient_state` tracks the
progress of a step, and which call may come next.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from megatron_hetero.base.errors import NotFiniteError, UserError
from megatron_hetero.groups.collective import all_or_none, meet, on_every, require_equal
from megatron_hetero.groups.platform import on_device, on_host
from megatron_hetero.groups.topology import Topology
from megatron_hetero.groups.watchdog import watched
from megatron_hetero.hf.weight_map import Held, TensorSlice
from megatron_hetero.schedule.contract import StepResult
from megatron_hetero.step.gradient_state import Phase
from megatron_hetero.step.library_modules import Chunks, trained_modules, unreduced
from megatron_hetero.step.module import TrainedModule


@dataclass(frozen=True)
class GradientSummary:
    """The loss and gradient norms of a step, equal on every rank before the update.

    `loss_sum`: the sum of token losses of the global batch. `norms`: the norm of its gradient for each trained module.
    `faults`: a pair (module or "loss", rank) for each NaN or infinite value; the rank is None if only the sum over
    ranks is not finite.
    """

    loss_sum: float
    norms: dict[str, float]
    faults: tuple[tuple[str, int | None], ...]

    @property
    def norm(self) -> float:
        """The gradient norm over all modules."""
        return math.sqrt(sum(norm**2 for norm in self.norms.values()))


@dataclass(frozen=True, eq=False)
class GradientTable:
    """The data of a `GradientSummary` as a device tensor, which the host has not yet waited for.

    `rows`: for each rank its loss, whether the loss counts, and for each module whether it trains on the rank, whether
    its gradients are finite, and the sum of their squares, fp64 [ranks, 2 + 3 modules]. `names`: names of the modules.
    """

    rows: Tensor
    names: tuple[str, ...]

    @property
    def squares(self) -> Tensor:
        """Squares of the norms of all modules, fp64 [modules]."""
        return self._columns(self.rows)[2].sum(0)

    def scale(self, tokens: float, limit: float) -> Tensor:
        """Return the factor that turns gradients of sums over `tokens` into gradients of means, and clips these to a
        norm of `limit` (0: no limit): an fp64 scalar on the device. It is NaN if the summary would have `faults`.
        """
        total = self.rows.sum(0)  # Not finite if any loss or square is not.
        trained, finite, squares = (each[0] for each in self._columns(total[None]))
        is_sound = total.isfinite().all() & trained.eq(finite).all()
        norm = torch.linalg.vector_norm(squares.clamp(min=0.0).sqrt())
        return torch.where(is_sound, clip_factor(norm / tokens, limit) / tokens, torch.nan)

    def on_host(self) -> GradientTable:
        """Copy the table to pinned memory without waiting (see `platform.on_host`)."""
        return replace(self, rows=on_host(self.rows))

    def read(self) -> GradientSummary:
        """Copy the table to the host, which waits for the device, and return the summary."""
        rows = self.rows.cpu()
        losses, counts = rows[:, 0], rows[:, 1]
        trained, finite, squares = self._columns(rows)
        faults: list[tuple[str, int | None]] = [
            ("loss", rank) for rank, loss in enumerate(losses) if not loss.isfinite()
        ]
        norms = dict[str, float]()
        for i, name in enumerate(self.names):
            squared_norm = squares[:, i].sum()
            ranks = [rank for rank in range(len(rows)) if trained[rank, i] and not finite[rank, i]]
            if ranks:
                faults += [(name, rank) for rank in ranks]
            elif not squared_norm.isfinite():
                faults.append((name, None))
            elif trained[:, i].any():
                norms[name] = math.sqrt(max(0.0, squared_norm.item()))
        return GradientSummary(float((losses * counts).sum()), {} if faults else norms, tuple(faults))

    def _columns(self, rows: Tensor) -> tuple[Tensor, ...]:
        return rows[:, 2:].view(len(rows), len(self.names), 3).unbind(2)


def sum_gradients(modules: Iterable[TrainedModule]) -> dict[str, Tensor]:
    """Sum the gradients of the modules on this rank (steps 1 to 3), in the order of the topology.

    Returns, for each module that trains, whether this rank's gradients were finite before the sums, as an fp64 scalar.
    Raises `UserError` for gradients that have already been summed.
    """
    trained = [module for module in modules if module.trained]
    for module in trained:
        module.gradients.start()
    finite = dict[str, Tensor]()
    for module in trained:
        in_view = module.gradients.finish()
        finite[module.name] = finite[module.name] * in_view if module.name in finite else in_view
        _sum_partial_over_tp(module)
    for module in trained:
        _sum_tied_over_stages(module)
    for module in trained:
        module.gradients.advance(Phase.SUMMED)
    return finite


def add_up(
    topology: Topology,
    squares: Iterable[tuple[str, Tensor]],
    finite: Mapping[str, Tensor] | None,
    loss_sum: Tensor | None = None,
    *,
    loss_counts_here: bool = False,
) -> GradientTable:
    """Gather the loss and the squared gradient norms of all ranks (step 4). Every rank calls this function.

    Args:
        topology: topology of all modules.
        squares: pairs of a module's name and the result of `squares_of`, one for each view of a module on this rank.
        finite: the result of `sum_gradients`; None to assume that gradients are finite.
        loss_sum: the fp32 sum of this rank's token losses, if the step has a loss.
        loss_counts_here: whether the loss of the step includes `loss_sum`.
    """
    squares_by_module = dict[str, Tensor]()
    for name, in_view in squares:
        squares_by_module[name] = squares_by_module[name] + in_view if name in squares_by_module else in_view
    no_loss = torch.zeros((), dtype=torch.float64, device=topology.platform.device)
    loss = no_loss if loss_sum is None else loss_sum.double()
    row = [torch.stack([loss, torch.full_like(loss, float(loss_counts_here))])]
    for name in topology.layouts:
        if name in squares_by_module:
            trains = torch.ones_like(squares_by_module[name])
            row.append(torch.stack([trains, trains if finite is None else finite[name], squares_by_module[name]]))
        else:
            row.append(no_loss.new_zeros(3))
    local = torch.cat(row)
    table = local.new_empty(topology.world_size * len(local))
    dist.all_gather_into_tensor(table, local, group=topology.world)
    return GradientTable(table.view(topology.world_size, -1), tuple(topology.layouts))


@torch.no_grad()
def scale_gradients(modules: Iterable[TrainedModule], factor: float | Tensor) -> None:
    """Scale all summed gradients on this rank (step 5): with a sharded optimizer on a GPU, only this rank's share."""
    summed = [gradients for module in modules for gradients in module.gradients.summed]
    if summed:
        torch._foreach_mul_(summed, factor)


def require_finite(
    where: str, faults: Sequence[tuple[str, int | None]], fix: str, parameter: Callable[[str], str] = lambda _: ""
) -> None:
    """Raise `NotFiniteError` if there are `faults`. `parameter`: returns text that names a module's bad parameter."""
    if not faults:
        return
    what, rank = faults[0]
    others = f" (and {len(faults) - 1} more)" if len(faults) > 1 else ""
    kind = "loss" if what == "loss" else f"gradient of module {what}{parameter(what)}"
    on = "in the sum over ranks" if rank is None else f"on rank {rank}"
    raise NotFiniteError(
        f"{where}: found a {kind} that is NaN or infinite {on}{others}, expected finite numbers; the weights have "
        f"not been updated. {fix}"
    )


def require_finite_sums(topology: Topology, modules: Sequence[TrainedModule], table: GradientTable) -> None:
    """Wait for the summed gradients, and check that all are finite. Raises `NotFiniteError` on all ranks."""

    def first_fault(faulty: str) -> str:
        for module in modules:
            for name in module.trained if module.name == faulty else ():
                if not module.gradient(name).isfinite().all():
                    return f", parameter {name},"
        return ""

    def parameter(faulty: str) -> str:
        return max(on_every(topology.host, lambda: first_fault(faulty)))

    fix = (
        "Call `zero_grad()` to skip this step, lower the learning rate, or look for broken samples; with "
        "`error_if_nonfinite=False` they are applied."
    )
    require_finite("gradients", table.read().faults, fix, parameter)


def clip_factor(norm: Tensor, limit: float) -> Tensor:
    """Return the factor that clips gradients of `norm` to a norm of at most `limit`. A `limit` of 0 means no limit."""
    if limit <= 0:
        return torch.ones_like(norm)
    # A number divided by a tensor would be a product with the reciprocal, which is rounded twice.
    return torch.where(norm <= limit, 1.0, torch.full_like(norm, limit) / (norm + 1e-6))


# ---------------------------------------------------------------------------------------------------------
# Step 2
# ---------------------------------------------------------------------------------------------------------


Rectangle = tuple[Any, ...]
"""The name of a stored tensor, and the rows and columns of a slice of the tensor."""


@dataclass(frozen=True)
class _PartialSlices:
    """The layout of a buffer for all parameter slices of a module whose gradients are partial over `tp`.

    `local`: names of this rank's parameters, and their slices. `starts`: the offset in the buffer of each rectangle on
    any rank. `size`: number of elements of the buffer.
    """

    local: Sequence[tuple[str, TensorSlice]]
    starts: Mapping[Rectangle, int]
    size: int

    @classmethod
    def of(cls, module: TrainedModule) -> _PartialSlices:
        """Find the partial slices of all ranks of the group `holders`, in the same order on each rank."""
        local, starts, size = list[tuple[str, TensorSlice]](), dict[Rectangle, int](), 0
        for name, parameter in module.trained.items():
            for rank, (weight_map, held) in enumerate(zip(module.maps, module.held, strict=True)):
                for tensor_slice in _partial_slices(weight_map[name], held[name], name in module.over_tp):
                    if rank == module.holders.rank():
                        local.append((name, tensor_slice))
                    if tensor_slice.rectangle not in starts:
                        starts[tensor_slice.rectangle] = size
                        size += _elements(parameter, tensor_slice)  # This size is the same on all ranks.
        return cls(local, starts, size)


@torch.no_grad()
def _sum_partial_over_tp(module: TrainedModule) -> None:
    """Sum all partial gradients of slices in one all-reduce over `tp`. If a rank has several copies of a slice, the
    gradients of these copies are also added up.
    """
    if module.holders.size() == 1:
        return
    partial = _PartialSlices.of(module)
    if not partial.starts:
        return
    is_wide = any(parameter.dtype == torch.float64 for parameter in module.trained.values())
    dtype, device = torch.float64 if is_wide else torch.float32, module.topology.platform.device
    buffer = torch.zeros(partial.size, dtype=dtype, device=device)
    _zero_unsummed(module, {name for name, _ in partial.local})
    gradients, views = list[Tensor](), list[Tensor]()
    rounds, times = dict[int, list[int]](), Counter[Rectangle]()
    for number, (name, tensor_slice) in enumerate(partial.local):
        rectangle = tensor_slice.rectangle
        gradient, before = _accumulated_rows(module, name, tensor_slice)
        start = partial.starts[rectangle] + before
        gradients.append(gradient)
        views.append(buffer[start : start + gradient.numel()].view_as(gradient))
        # One kernel must not add to the same memory twice.
        rounds.setdefault(times[rectangle], []).append(number)
        times[rectangle] += 1
    for numbers in rounds.values():
        torch._foreach_add_([views[n] for n in numbers], [gradients[n] for n in numbers])
    if module.gradients.sums_shares:
        # A slice may have different offsets on different tp ranks, which then have the sums of different rows of it.
        dist.all_reduce(buffer, group=module.replicas)
    dist.all_reduce(buffer, group=module.holders)
    means = [
        view
        for (name, _), view in zip(partial.local, views, strict=True)
        if name in module.over_tp and module.over_tp[name] == "mean"
    ]
    if means:
        torch._foreach_div_(means, module.holders.size())
    if gradients:
        torch._foreach_copy_(gradients, views)


def _zero_unsummed(module: TrainedModule, names: Collection[str]) -> None:
    """Zero the locally accumulated gradient elements whose sums are on other ranks."""
    if not module.gradients.sums_shares:
        return
    unsummed = list[Tensor]()
    for name in names:
        values, (begin, _) = module.gradients.accumulated(name)
        start, stop = module.weights.owned[name]
        unsummed += [values[: start - begin], values[stop - begin :]]
    if unsummed := [values for values in unsummed if values.numel()]:
        torch._foreach_zero_(unsummed)


def _accumulated_rows(module: TrainedModule, name: str, tensor_slice: TensorSlice) -> tuple[Tensor, int]:
    """Return the gradient rows of a slice on this rank, and the number of elements of the slice before these rows."""
    values, (begin, _) = module.gradients.accumulated(name)
    row_shape = module.parameters[name].shape[1:]
    rows = values.view(-1, *row_shape)
    first = begin // row_shape.numel()
    end = tensor_slice.at + tensor_slice.rows[1] - tensor_slice.rows[0]
    start = min(max(tensor_slice.at, first), end)
    stop = max(start, min(end, first + len(rows)))
    accumulated = rows[(slice(start - first, stop - first), *tensor_slice.place[1:])]
    return accumulated, (start - tensor_slice.at) * accumulated.shape[1:].numel()


def _elements(parameter: Tensor, tensor_slice: TensorSlice) -> int:
    rows, columns = tensor_slice.rows, tensor_slice.columns
    return (rows[1] - rows[0]) * (columns[1] - columns[0] if columns else parameter.shape[1:].numel())


def _partial_slices(slices: Sequence[TensorSlice], held: Held, over_tp: bool) -> list[TensorSlice]:
    """Return the slices with partial gradients. `over_tp`: whether an unsharded parameter has partial gradients."""
    if not held.sharded:
        return list(slices) if over_tp else []
    return [tensor_slice for tensor_slice, copies in zip(slices, held.copies, strict=True) if copies > 1]


# ---------------------------------------------------------------------------------------------------------
# Step 3
# ---------------------------------------------------------------------------------------------------------


@torch.no_grad()
def _sum_tied_over_stages(module: TrainedModule) -> None:
    if module.tied is not None and module.tied in module.trained:
        # A sharded optimizer shards both copies equally: a parameter with `shared_embedding` has a separate bucket.
        dist.all_reduce(module.gradient(module.tied), group=module.ends)


# ---------------------------------------------------------------------------------------------------------
# Step 4
# ---------------------------------------------------------------------------------------------------------


@torch.no_grad()
def squares_of(module: TrainedModule) -> Tensor:
    """Return the sum of squares of this rank's share of the module's gradients, as an fp64 scalar. The results of all
    ranks add up to the squared norm of the module's gradient.
    """
    counted = [
        (values, share / module.weights.copies(name))
        for name in module.trained
        if name != module.tied_copy
        for values, share in _counted_segments(module, name)
        if values.numel()
    ]
    return sum_of_squares(counted, module.topology.platform.device)


def sum_of_squares(counted: Sequence[tuple[Tensor, float]], device: torch.device) -> Tensor:
    """Return the weighted sum of the squares of tensors, an fp64 scalar. `counted`: pairs of a tensor and its weight.
    Norms of tensors are computed in fp32, or in fp64 if any tensor is fp64.
    """
    if not counted:
        return torch.zeros((), dtype=torch.float64, device=device)
    is_wide = any(values.dtype == torch.float64 for values, _ in counted)
    # Compute all norms in few kernels: a model has hundreds of parameters.
    norms = torch._foreach_norm([values for values, _ in counted], dtype=torch.float64 if is_wide else torch.float32)
    shares = torch.tensor([share for _, share in counted], dtype=torch.float64)
    return torch.dot(torch.stack(norms).double().square(), on_device(shares, device))


def _counted_segments(module: TrainedModule, name: str) -> Iterator[tuple[Tensor, float]]:
    """Yield flat gradient segments of a parameter that this rank updates, each with the weight of its squares in the
    norm, so that elements with copies on several ranks are counted once.
    """
    gradient, (begin, end), held = module.gradient(name), module.weights.owned[name], module.local_held[name]
    if not held.replicated_slices:
        yield gradient, 1 / held.copies[0]
        return
    yield gradient, 1.0
    width = module.parameters[name].shape[1:].numel()
    for tensor_slice, copies in zip(module.local_map[name], held.copies, strict=True):
        if copies > 1:  # A negative weight subtracts the squares that other ranks also count.
            start = max(begin, tensor_slice.at * width)
            stop = min(end, (tensor_slice.at + tensor_slice.rows[1] - tensor_slice.rows[0]) * width)
            yield gradient[start - begin : max(start, stop) - begin], 1 / copies - 1


# ---------------------------------------------------------------------------------------------------------
# The calls of a training loop
# ---------------------------------------------------------------------------------------------------------

Tokens = int | float | Tensor


@watched
def finish_gradients(
    topology: Topology, modules: Mapping[str, Chunks | None], tokens: Tokens, *, error_if_nonfinite: bool = True
) -> None:
    """Turn each rank's gradients into gradients of the mean loss over the tokens of the step, in place. All ranks call
    this function once, after the last backward pass of the step and before the step of any optimizer.

    A missing gradient of a trained parameter counts as zeros; frozen parameters are skipped. With Megatron's
    `DistributedDataParallel`, gradients are in `main_grad`; with its distributed optimizer, only each rank's share is
    valid. The means of FSDP2 and PyTorch's DDP are corrected to sums. Custom communication hooks are not supported.

    Along `tp` a gradient is summed if its parameter has the attribute `sequence_parallel`, which Megatron sets for
    parameters used on sharded activations, or is a norm of queries or keys; averaged if it has
    `average_gradients_across_tp_domain`. Copies of an embedding on the first and last stage have `shared_embedding`.

    Args:
        topology: topology of all modules.
        modules: this rank's shard of each module, with its wrapper, by name; a list of shards for virtual stages.
        tokens: number of tokens of the whole step (or of other units over which losses were summed), the same on all
            ranks: a number, or a scalar tensor; a tensor of 0 makes gradients zero. The host does not wait for a result
            of `count_tokens`.
        error_if_nonfinite: whether to wait for the sums, and to raise if any is NaN or infinite; the same on all ranks.

    Raises:
        NotFiniteError: on all ranks. A gradient is NaN or infinite. Set gradients to None before the next backward.
        UserError: on all ranks. `modules` are not the rank's modules, gradients are finished already, `tokens` is not
            positive or not the same on all ranks, a wrapper reduced over ranks that are not along axes of the layout,
            or PyTorch's DDP or FSDP2 did not reduce in the last backward pass.
    """

    def check() -> tuple[TrainedModule, ...]:
        local_modules = trained_modules(topology, modules)
        require_ready(local_modules, finished=False)
        return local_modules

    local_modules = all_or_none(topology.host, check)
    finish(local_modules, factor_of(topology, tokens), topology if error_if_nonfinite else None)


_COUNTED = WeakIdKeyDictionary()
"""The tensor version of each live result of `count_tokens`. An unmodified result is the same on all ranks."""


@watched
def count_tokens(topology: Topology, module: str, mine: int | Tensor) -> Tensor:
    """Return the number of tokens of the whole step, an int64 scalar on the device. All ranks call this function.

    Args:
        topology: topology of all modules.
        module: the module whose loss is summed over tokens.
        mine: number of tokens in this rank's losses. Only the last pipeline stage's ranks that are first along `tp`
            contribute; other ranks' values are ignored.
    """
    number = torch.as_tensor(mine)
    if number.dim() or number.is_floating_point():
        found = f"{number.dtype} of shape {tuple(number.shape)}"
        raise UserError.at("count_tokens", found=found, expected="one integer", fix="give the sum of this rank")
    total = _total(topology, "count_tokens", module, number.long())
    _COUNTED[total] = total._version
    return total


@watched
def total_loss(topology: Topology, module: str, mine: float | Tensor | StepResult) -> Tensor:
    """Return the summed loss of the whole step, an fp32 scalar on the device. All ranks call this function.

    Args:
        topology: topology of all modules.
        module: the module that computes the loss.
        mine: the result of a `Runner`, or this rank's sum of the module's losses or of another quantity. The same ranks
            contribute as in `count_tokens`.
    """
    if isinstance(mine, StepResult):
        mine = mine.losses.get(module, 0.0)
    return _total(topology, "total_loss", module, torch.as_tensor(mine, dtype=torch.float32).detach())


def _total(topology: Topology, function: str, module: str, mine: Tensor) -> Tensor:
    """Return the sum of `mine` over the ranks of the module's last stage that are first along `tp`."""
    if module not in topology.layouts:
        known = ", ".join(topology.layouts)
        raise UserError.at(function, found=f"no module `{module}`", expected=f"one of {known}", fix="correct it")
    layout = topology.layouts[module]
    summed = mine.to(topology.platform.device, non_blocking=True).clone()
    place = layout.coordinate(topology.rank) if topology.has(module) else None
    if place is None or place.tp or place.pp != layout.pp - 1:
        summed.zero_()
    meet(topology.host, f"{function} of {module}")  # Check on the host that all ranks make the same call.
    dist.all_reduce(summed, group=topology.world)
    return summed


# ------------------------------------------------------------------------------------------ for optimizers


def finish(modules: Sequence[TrainedModule], factor: float | Tensor, finite_on: Topology | None = None) -> None:
    """Sum all gradients and multiply them by `factor`. If `finite_on` is given, check that they are finite."""
    finite = sum_gradients(modules)
    trained = [module for module in modules if module.trained]
    if finite_on is not None:
        squares = [(module.name, squares_of(module)) for module in trained]
        require_finite_sums(finite_on, modules, add_up(finite_on, squares, finite))
    scale_gradients(modules, factor)
    for module in trained:
        module.gradients.advance(Phase.SCALED)


@torch.no_grad()
def require_ready(modules: Iterable[TrainedModule], *, finished: bool) -> None:
    """Check that gradients belong to this step, and are summed if `finished`, else unsummed. Raises `UserError`."""
    for module in modules:
        gradients = module.gradients
        if finished and module.trained:
            gradients.state.require_summed(gradients.first)
        elif not finished:
            gradients.state.require_local(gradients.first, persistent=gradients.persistent)
            if wrapper := unreduced(module):
                gradients.state.refuse_unreduced(wrapper)


def factor_of(topology: Topology, tokens: Tokens | None) -> float | Tensor:
    """Return the factor that turns sums over tokens into means; 1 for None. All ranks call this function. The host
    waits for tensors, except results of `count_tokens`.

    Raises:
        UserError: on all ranks. The number of tokens differs between ranks, or is not positive.
    """
    is_tensor = isinstance(tokens, Tensor)
    is_counted = is_tensor and _COUNTED.get(tokens) == tokens._version
    number = None if is_counted or tokens is None else float(tokens)
    if number is None:
        shown = "counted" if is_counted else "None"
    else:
        shown = f"{number:.17g}"
        if number == 0 and is_tensor:  # A tensor of 0 is accepted, but the number 0 is refused.
            shown += " in a tensor"
    fix = "give the tokens of the whole step, which `count_tokens` adds up"
    require_equal(topology.host, "gradients", {"tokens": shown}, fix)
    if number is not None and not (0 < number < math.inf or (number == 0 and is_tensor)):
        fix = "skip the step, or count the tokens of all ranks"
        expected = "those of the whole step, 1 or more"
        raise UserError.at("gradients: tokens", found=shown, expected=expected, fix=fix)
    if isinstance(tokens, Tensor):
        # Without tokens all gradients are zero, and a factor of 0 leaves them zero.
        count = tokens.detach().to(topology.platform.device, torch.float32, non_blocking=True).reshape(())
        return torch.where(count > 0, count.reciprocal(), torch.zeros_like(count))
    return 1.0 if tokens is None else 1.0 / tokens
