"""The one rule for gradients, in one place, for modules of any kind: its steps, and the calls of a training loop.

Every rank has back-propagated the *sum* of its own tokens' losses. For each module:

  1. everything is summed over the module's data- and context-parallel ranks (with a sharded optimizer each rank uses
     its own share of the sums), unless a wrapper of the user has done it; a wrapper's mean is turned into a sum;
  2. slices of parameters that several tp ranks hold, and whose gradients are parts (parameters used on sequence-sharded
     activations; norms of heads; replicated key/value heads), are summed over `tp`; so are the unused sums of other
     shares in them;
  3. an embedding of which the last pipeline stage has a copy, for the tied head, is summed over the two. This comes
     last, so that both copies have the same bits whatever the order of additions in 1;
  4. squares are added up over all modules and ranks, each element of each parameter counted once;
  5. all gradients are scaled by 1/N and by the clipping factor, the same on every rank, when the update reads them.

1 may begin while there is still something to compute (`start_sums`, `TrainedModule.expect`).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_hetero.base.errors import NotFiniteError, UserError
from megatron_hetero.groups.collective import all_or_none, meet, on_every, require_equal
from megatron_hetero.groups.platform import on_device
from megatron_hetero.groups.topology import Topology
from megatron_hetero.groups.watchdog import watched
from megatron_hetero.hf.weight_map import Held, TensorSlice
from megatron_hetero.schedule.contract import StepResult
from megatron_hetero.step.library_modules import Chunks, trained_modules, unreduced
from megatron_hetero.step.module import DataParallel, TrainedModule


@dataclass(frozen=True)
class GradientSummary:
    """The result of a step that every rank knows before the update.

    `loss_sum`: sum of token losses of the global batch. `norms`: norm of that sum's gradient for each trained module.
    `faults`: (module or "loss", rank) of all that was NaN or infinite before sums over ranks, or None if only
    the sum is.
    """

    loss_sum: float
    norms: dict[str, float]
    faults: tuple[tuple[str, int | None], ...]

    @property
    def norm(self) -> float:
        """The norm over all modules."""
        return math.sqrt(sum(norm**2 for norm in self.norms.values()))


@dataclass(frozen=True, eq=False)
class GradientTable:
    """A `GradientSummary` on the device, before anything waits for it.

    `rows`: for each rank its loss, whether that counts, and for each module whether it trains there, whether its
    gradients are finite, and the sum of their squares, fp64 [ranks, 2 + 3 modules]. `names`: names of the modules.
    """

    rows: Tensor
    names: tuple[str, ...]

    @property
    def squares(self) -> Tensor:
        """Squares of the norms of all modules, fp64 [modules]."""
        return self._columns(self.rows)[2].sum(0)

    def read(self) -> GradientSummary:
        """Wait for the device."""
        table = self.rows.cpu()
        loss, counts = table[:, 0], table[:, 1]
        trained, finite, squares = self._columns(table)
        faults: list[tuple[str, int | None]] = [("loss", rank) for rank, own in enumerate(loss) if not own.isfinite()]
        for i, name in enumerate(self.names):
            ranks = [rank for rank in range(len(table)) if trained[rank, i] and not finite[rank, i]]
            faults += [(name, rank) for rank in ranks or [None] if ranks or not squares[:, i].sum().isfinite()]
        norms = {
            name: math.sqrt(max(0.0, squares[:, i].sum().item()))
            for i, name in enumerate(self.names)
            if trained[:, i].any()
        }
        return GradientSummary(float((loss * counts).sum()), {} if faults else norms, tuple(faults))

    def _columns(self, table: Tensor) -> tuple[Tensor, ...]:
        return table[:, 2:].view(len(table), len(self.names), 3).unbind(2)


def sum_gradients(modules: Iterable[TrainedModule], started: Mapping[str, Tensor] | None = None) -> dict[str, Tensor]:
    """Steps 1 to 3, for the modules on this rank, in the order of the topology.

    `started`: results of `start_sums`, by module. Returns the same for all modules that train.
    """
    trained, begun = [module for module in modules if module.trained], dict(started or {})
    finite = begun | start_sums(module for module in trained if module.name not in begun)
    for module in trained:
        module.data_parallel.reduce()
        _sum_parts_over_tp(module)
    for module in trained:
        _sum_tied_over_stages(module)
    return finite


def start_sums(modules: Iterable[TrainedModule]) -> dict[str, Tensor]:
    """Begin step 1 for modules whose gradients are complete, without waiting. Collective over the ranks that have the
    same stages of a module.

    Returns by module whether the gradients of this rank were finite before, in all views, fp64 scalar.
    """
    finite = dict[str, Tensor]()
    for module in modules:
        own = module.data_parallel.start_reducing()
        finite[module.name] = finite[module.name] * own if module.name in finite else own
    return finite


def add_up(
    topology: Topology,
    squares: Iterable[tuple[str, Tensor]],
    finite: Mapping[str, Tensor] | None,
    loss_sum: Tensor,
    *,
    loss_counts_here: bool,
) -> GradientTable:
    """Step 4. Every rank calls it.

    Args:
        topology: topology of all modules.
        squares: names of modules, and `squares_of` this rank's trained parameters of them in each view.
        finite: what `sum_gradients` returned; None to take gradients for finite.
        loss_sum: the fp32 sum of this rank's token losses.
        loss_counts_here: whether the loss of the step includes that sum.
    """
    sums = dict[str, Tensor]()
    for name, own in squares:
        sums[name] = sums[name] + own if name in sums else own
    ones = {name: torch.ones_like(own) for name, own in sums.items()}
    columns = {name: torch.stack([ones[name], (finite or ones)[name], own]) for name, own in sums.items()}
    absent = torch.zeros(3, dtype=torch.float64, device=loss_sum.device)
    counts = torch.full_like(loss_sum, float(loss_counts_here), dtype=torch.float64)
    names = tuple(topology.layouts)
    mine = torch.cat([torch.stack([loss_sum.double(), counts]), *(columns.get(name, absent) for name in names)])
    table = mine.new_empty(topology.world_size * len(mine))
    dist.all_gather_into_tensor(table, mine, group=topology.world)
    return GradientTable(table.view(topology.world_size, -1), names)


@torch.no_grad()
def scale_gradients(modules: Iterable[TrainedModule], factor: float | Tensor) -> None:
    """Step 5 for all sums: those of a rank's own share with a sharded optimizer on a GPU."""
    summed = [gradients for module in modules for gradients in module.data_parallel.summed]
    if summed:
        torch._foreach_mul_(summed, factor)


def require_finite(
    where: str, faults: Sequence[tuple[str, int | None]], fix: str, parameter: Callable[[str], str] = lambda _: ""
) -> None:
    """Raise `NotFiniteError` if there are faults. `parameter`: gives the parameter of a module, if it is known."""
    if faults:
        (what, rank), others = faults[0], f" (and {len(faults) - 1} more)" if len(faults) > 1 else ""
        kind = "loss" if what == "loss" else f"gradient of module {what}{parameter(what)}"
        on = "in the sum over ranks" if rank is None else f"on rank {rank}"
        raise NotFiniteError(
            f"{where}: found a {kind} that is NaN or infinite {on}{others}, expected finite numbers; the weights have "
            f"not been updated. {fix}"
        )


def require_finite_sums(topology: Topology, modules: Sequence[TrainedModule], table: GradientTable) -> None:
    """Wait for the sums of gradients, and check that they are finite. Raises `NotFiniteError` on all ranks."""

    def parameter(of: str) -> str:
        mark(modules)  # As sums, which must not be summed again.
        own = ((name, module.gradient(name)) for module in modules if module.name == of for name in module.trained)
        first = next((f", parameter {name}," for name, gradient in own if not gradient.isfinite().all()), "")
        return max(on_every(topology.host, lambda: first))

    fix = (
        "Call `zero_grad()` to skip this step, lower the learning rate, or look for broken samples; with "
        "`error_if_nonfinite=False` they are applied."
    )
    require_finite("gradients", table.read().faults, fix, parameter)


def clip_factor(norm: float, limit: float) -> float:
    """The factor that brings gradients of `norm` to a norm of at most `limit`; 0 means no limit."""
    return 1.0 if limit <= 0 or norm <= limit else limit / (norm + 1e-6)


# ---------------------------------------------------------------------------------------------------------
# Step 2
# ---------------------------------------------------------------------------------------------------------


@torch.no_grad()
def _sum_parts_over_tp(module: TrainedModule) -> None:
    """Sum all slices whose gradients are parts in one all-reduce over `tp`. A slice that a rank holds twice is added up
    as well.
    """
    own, slots, size = _parts(module)
    if not slots:
        return
    wide = any(parameter.dtype == torch.float64 for parameter in module.trained.values())
    dtype, device = torch.float64 if wide else torch.float32, module.topology.platform.device
    buffer = torch.zeros(size, dtype=dtype, device=device)
    gradients, views = list[Tensor](), list[Tensor]()
    rounds = dict[int, list[int]]()
    times = Counter[Any]()
    _zero_unsummed(module.data_parallel, {name for name, _ in own})
    for name, tensor_slice in own:
        gradient, before = _accumulated_rows(module, name, tensor_slice)
        # One kernel must not add to the same memory twice.
        rounds.setdefault(times[tensor_slice.rectangle], []).append(len(views))
        times[tensor_slice.rectangle] += 1
        gradients.append(gradient)
        views.append(buffer.narrow(0, slots[tensor_slice.rectangle] + before, gradient.numel()).view_as(gradient))
    for places in rounds.values():
        torch._foreach_add_([views[place] for place in places], [gradients[place] for place in places])
    if module.data_parallel.sums_shares:
        # Ranks of a tp group may have the sums of other rows of a slice, if it is elsewhere in their parameters.
        dist.all_reduce(buffer, group=module.replicas)
    dist.all_reduce(buffer, group=module.holders)
    means = {name for name, over_tp in module.over_tp.items() if over_tp == "mean"}
    if divided := [view for (name, _), view in zip(own, views, strict=True) if name in means]:
        torch._foreach_div_(divided, module.holders.size())
    if gradients:
        torch._foreach_copy_(gradients, views)


def _zero_unsummed(sharing: DataParallel, names: Collection[str]) -> None:
    """Zero what this rank accumulates of gradients and other ranks sum."""
    if not sharing.sums_shares:
        return
    parts = list[Tensor]()
    for name in names:
        values, (begin, _) = sharing.accumulated(name)
        start, stop = sharing.owned[name]
        parts += [part for part in (values[: start - begin], values[stop - begin :]) if part.numel()]
    if parts:
        torch._foreach_zero_(parts)


def _accumulated_rows(module: TrainedModule, name: str, tensor_slice: TensorSlice) -> tuple[Tensor, int]:
    """The rows of a slice whose gradient is on this rank, and the number of elements of the slice before them."""
    values, (begin, _) = module.data_parallel.accumulated(name)
    row = module.parameters[name].shape[1:]
    rows = values.view(-1, *row)
    first = begin // row.numel()
    end = tensor_slice.at + tensor_slice.rows[1] - tensor_slice.rows[0]
    start = min(max(tensor_slice.at, first), end)
    stop = max(start, min(end, first + len(rows)))
    found = rows[(slice(start - first, stop - first), *tensor_slice.place[1:])]
    return found, (start - tensor_slice.at) * found.shape[1:].numel()


def _parts(module: TrainedModule) -> tuple[list[tuple[str, TensorSlice]], dict[tuple[Any, ...], int], int]:
    """This rank's (parameter, slice) whose gradients are parts, where the slice of any rank begins in a buffer, and the
    size of that.
    """
    own: list[tuple[str, TensorSlice]] = []
    slots: dict[tuple[Any, ...], int] = {}
    end = 0
    if module.holders.size() == 1:
        return own, slots, end
    for name, parameter in module.trained.items():
        on_shards = name in module.over_tp
        for rank, (of_rank, how) in enumerate(zip(module.maps, module.held, strict=True)):
            slices = _partial_slices(of_rank[name], how[name], on_shards)
            own += [(name, tensor_slice) for tensor_slice in slices if rank == module.holders.rank()]
            for tensor_slice in slices:
                if tensor_slice.rectangle not in slots:
                    slots[tensor_slice.rectangle] = end
                    end += _elements(parameter, tensor_slice)  # slices of a rectangle are alike on all ranks
    return own, slots, end


def _elements(parameter: Tensor, tensor_slice: TensorSlice) -> int:
    rows, columns = tensor_slice.rows, tensor_slice.columns
    return (rows[1] - rows[0]) * (columns[1] - columns[0] if columns else parameter.shape[1:].numel())


def _partial_slices(slices: Sequence[TensorSlice], how: Held, on_shards: bool) -> list[TensorSlice]:
    if not how.sharded:
        return list(slices) if on_shards else []
    return [tensor_slice for tensor_slice, copies in zip(slices, how.copies, strict=True) if copies > 1]


# ---------------------------------------------------------------------------------------------------------
# Step 3
# ---------------------------------------------------------------------------------------------------------


@torch.no_grad()
def _sum_tied_over_stages(module: TrainedModule) -> None:
    if module.tied is not None and module.tied in module.trained:
        # With a sharded optimizer both copies are cut alike, see `shared_embedding` where modules are built.
        gradient = module.gradient(module.tied)
        dist.all_reduce(gradient, group=module.ends)


# ---------------------------------------------------------------------------------------------------------
# Step 4
# ---------------------------------------------------------------------------------------------------------


@torch.no_grad()
def squares_of(module: TrainedModule) -> Tensor:
    """The sum of squares of this rank's share of the module's gradients, fp64 scalar. Those of all ranks add up."""
    counted = [
        (part, share / module.data_parallel.copies(name))
        for name in module.trained
        if name != module.tied_copy
        for part, share in _counted_parts(module, name)
        if part.numel()
    ]
    return sum_of_squares(counted, module.topology.platform.device)


def sum_of_squares(counted: Sequence[tuple[Tensor, float]], device: torch.device) -> Tensor:
    """The sum of all squares, each times the share of it that counts, fp64 scalar. Norms of tensors are in fp32, or in
    fp64 if one of them is.
    """
    if not counted:
        return torch.zeros((), dtype=torch.float64, device=device)
    wide = any(part.dtype == torch.float64 for part, _ in counted)
    # All norms at once: a model has hundreds of parameters.
    norms = torch._foreach_norm([part for part, _ in counted], dtype=torch.float64 if wide else torch.float32)
    shares = torch.tensor([share for _, share in counted], dtype=torch.float64)
    return torch.dot(torch.stack(norms).double().square(), on_device(shares, device))


def _counted_parts(module: TrainedModule, name: str) -> Iterator[tuple[Tensor, float]]:
    """Yield flat parts of the gradient of a parameter that this rank updates, and the share of their squares that
    counts, if several ranks hold them.
    """
    whole, (begin, end), how = module.gradient(name), module.data_parallel.owned[name], module.own_held[name]
    if not how.replicated_slices:
        yield whole, 1 / how.copies[0]
        return
    yield whole, 1.0
    width = module.parameters[name].shape[1:].numel()
    for tensor_slice, copies in zip(module.own_map[name], how.copies, strict=True):
        if copies > 1:
            start = max(begin, tensor_slice.at * width)
            stop = min(end, (tensor_slice.at + tensor_slice.rows[1] - tensor_slice.rows[0]) * width)
            yield whole[start - begin : max(start, stop) - begin], 1 / copies - 1


Tokens = int | float | Tensor


@watched
def finish_gradients(
    topology: Topology, modules: Mapping[str, Chunks | None], tokens: Tokens, *, error_if_nonfinite: bool = True
) -> None:
    """Turn each rank's gradients into those of the mean loss over the tokens of the step, in place. All ranks call it
    once, after the last backward pass of the step and before any optimizer's.

    A parameter without a gradient on this rank counts as zeros; frozen ones are skipped. Gradients of Megatron's
    `DistributedDataParallel` are in `main_grad`, with its distributed optimizer each rank's own share only. The means
    of FSDP2 and PyTorch's DDP are corrected to sums. Custom communication hooks are not supported.

    Along `tp` a gradient is summed if its parameter has the attribute `sequence_parallel`, which Megatron sets for
    parameters used on sharded activations, or is a norm of queries or keys; averaged if it has
    `average_gradients_across_tp_domain`. Copies of an embedding on the first and last stage have `shared_embedding`.

    Args:
        topology: topology of all modules.
        modules: this rank's part of each module, by name, with its wrapper. A list for virtual stages.
        tokens: number of tokens of the whole step (or whatever losses were summed over), the same on all ranks: a
            number, or a tensor [] on the device; zero tokens in it make gradients zero. The host does not wait for the
            result of `count_tokens`.
        error_if_nonfinite: whether to wait for the sums, and to raise if any is NaN or infinite; the same on all ranks.

    Raises:
        NotFiniteError: on all ranks. A gradient is NaN or infinite. Set them to None before the next backward pass.
        UserError: on all ranks. `modules` are not those of a rank, gradients are finished already, `tokens` is a number
            that is not positive or not the same on all ranks, a wrapper reduced over ranks that are not along axes of
            the layout, or PyTorch's DDP or FSDP2 did not reduce in the last backward pass.
    """

    def check() -> tuple[TrainedModule, ...]:
        own = trained_modules(topology, modules)
        require_ready(own, finished=False)
        return own

    own = all_or_none(topology.host, check)
    finish(own, factor_of(topology, tokens), topology if error_if_nonfinite else None)


@watched
def count_tokens(topology: Topology, module: str, mine: int | Tensor) -> Tensor:
    """Count the tokens of the whole step, int64 [] on the device. All ranks call it.

    Args:
        topology: topology of all modules.
        module: the module whose loss is summed over tokens.
        mine: tokens in this rank's part of the losses. It counts on the first rank along `tp` of the last stage, and
            is ignored elsewhere.
    """
    number = torch.as_tensor(mine)
    if number.dim() or number.is_floating_point():
        found = f"{number.dtype} of shape {tuple(number.shape)}"
        raise UserError.at("count_tokens", found=found, expected="one integer", fix="give the sum of this rank")
    total: Any = _total(topology, "count_tokens", module, number.long())
    total.counted_version = total._version
    return total


@watched
def total_loss(topology: Topology, module: str, mine: float | Tensor | StepResult) -> Tensor:
    """Add up the loss of the whole step, fp32 [] on the device. All ranks call it.

    Args:
        topology: topology of all modules.
        module: the module whose loss it is.
        mine: what a `Runner` returned, or this rank's sum of that module's losses, or of another number. It counts on
            the same ranks as in `count_tokens`.
    """
    if isinstance(mine, StepResult):
        mine = mine.losses.get(module, 0.0)
    return _total(topology, "total_loss", module, torch.as_tensor(mine, dtype=torch.float32).detach())


def _total(topology: Topology, function: str, module: str, mine: Tensor) -> Tensor:
    """Sum over the ranks of the last stage that are first along `tp`."""
    if module not in topology.layouts:
        known = ", ".join(topology.layouts)
        raise UserError.at(function, found=f"no module `{module}`", expected=f"one of {known}", fix="correct it")
    layout = topology.layouts[module]
    summed = mine.to(topology.platform.device, non_blocking=True).clone()
    place = layout.coordinate(topology.rank) if topology.has(module) else None
    if place is None or place.tp or place.pp != layout.pp - 1:
        summed.zero_()
    meet(topology.host, f"{function} of {module}")  # The device says too late that ranks add up different things.
    dist.all_reduce(summed, group=topology.world)
    return summed


# ------------------------------------------------------------------------------------------ for optimizers


def finish(modules: Sequence[TrainedModule], factor: float | Tensor, finite_on: Topology | None = None) -> None:
    """Finish gradients with a `factor` for all of them. `finite_on`: where they must be finite, on all ranks."""
    finite = sum_gradients(modules)
    if finite_on is not None:
        squares = [(module.name, squares_of(module)) for module in modules if module.trained]
        no_loss = torch.zeros((), device=finite_on.platform.device)
        table = add_up(finite_on, squares, finite, no_loss, loss_counts_here=False)
        require_finite_sums(finite_on, modules, table)
    scale_gradients(modules, factor)
    mark(modules)


@torch.no_grad()
def mark(modules: Iterable[TrainedModule], *, applied: bool = False) -> None:
    """Mark gradients as finished, and as `applied` by an optimizer."""
    for module in modules:
        if (gradient := module.data_parallel.marked) is not None:
            gradient.finished_version, gradient.is_applied = gradient._version, applied


@torch.no_grad()
def require_ready(modules: Iterable[TrainedModule], *, finished: bool) -> None:
    """Check that gradients belong to this step, and are `finished` or not. Raises `UserError`."""
    for module in modules:
        gradient, problem, because, fix = _finished_gradient(module), "", "", ""
        if gradient is not None and gradient.is_applied:
            problem = "they are those of the step before, which has applied them"
            because = "gradients of this step are added to them"
            fix = "call `zero_grad()` of this optimizer after each step; zeros that others write are not seen"
        elif finished and module.trained and gradient is None:
            problem, because = "they are not finished", "each rank has those of its own tokens"
            fix = "give `tokens`, or call `finish_gradients` before"
        # Buffers live on, and may have been zeroed since.
        elif (
            not finished
            and gradient is not None
            and not (module.data_parallel.lives_on and gradient._version != gradient.finished_version)
        ):
            problem, because = "they are finished already", "they would be summed and divided again"
            fix = (
                "call `finish_gradients` and then `step(tokens=None)`, or `step(tokens=...)` alone, once after the "
                "last backward pass of a step; set gradients to None before the next"
            )
        elif not finished and (wrapper := unreduced(module)):
            problem = (
                f"{wrapper} has not averaged them: its last pass was inside `no_sync()`, `no_grad()` or "
                "`set_requires_gradient_sync(False)`"
            )
            because = "they are taken to be means over its ranks"
            fix = "leave the last micro-batch of each step out of these, and evaluate after the step"
        if problem:
            raise UserError.at(f"gradients of `{module.name}`", problem=problem, because=because, fix=fix)


@torch.no_grad()
def forget_finished(modules: Iterable[TrainedModule]) -> None:
    """Remove the mark of gradients that are zeroed."""
    for module in modules:
        if (gradient := _finished_gradient(module)) is not None:
            del gradient.finished_version


def _finished_gradient(module: TrainedModule) -> Any:
    """The gradient with the mark `finished_version`; None if gradients are not finished."""
    gradient = module.data_parallel.marked
    return gradient if hasattr(gradient, "finished_version") else None


def factor_of(topology: Topology, tokens: Tokens | None) -> float | Tensor:
    """The factor from sums over tokens to means; 1 for None. All ranks call it. The host waits for tensors other than
    the result of `count_tokens`.

    Raises:
        UserError: on all ranks. They have different numbers, or one that is not positive.
    """
    counted = isinstance(tokens, Tensor) and getattr(tokens, "counted_version", None) == tokens._version
    number = None if counted or tokens is None else float(tokens)
    shown = "counted" if counted else "None" if number is None else f"{number:.17g}"
    shown += " in a tensor" if number == 0 and isinstance(tokens, Tensor) else ""  # Refused unless it is in one.
    fix = "give the tokens of the whole step, which `count_tokens` adds up"
    require_equal(topology.host, "gradients", {"tokens": shown}, fix)
    if number is not None and not (0 < number < math.inf or (number == 0 and isinstance(tokens, Tensor))):
        fix = "skip the step, or count the tokens of all ranks"
        expected = "those of the whole step, 1 or more"
        raise UserError.at("gradients: tokens", found=shown, expected=expected, fix=fix)
    if isinstance(tokens, Tensor):
        # Without tokens all gradients are zero, and remain so.
        found = tokens.detach().to(topology.platform.device, torch.float32, non_blocking=True).reshape(())
        return torch.where(found > 0, found.reciprocal(), torch.zeros_like(found))
    return 1.0 if tokens is None else 1.0 / tokens
