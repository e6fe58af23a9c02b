"""The one rule for gradients, in its one place, for modules of any kind.

Every rank has back-propagated the *sum* of its own tokens' losses. For each module:

  1. everything is summed over the module's data- and context-parallel ranks (with a sharded optimizer each rank uses
     its own share of the sums), as far as a wrapper of the user has not done it; a wrapper's mean is made a sum;
  2. slices of parameters that several tp ranks hold, and whose gradients are parts (parameters used on sequence-sharded
     activations; norms of heads; replicated key/value heads), are summed over `tp`, those of other shares with them,
     which nobody uses;
  3. an embedding that the last pipeline stage holds a copy of, for the head that is tied to it, is summed over the two.
     Last, so that the two sums are of the same bits, and stay so whatever the order in which 1 adds up;
  4. squares are added up over all modules and ranks, each element of each parameter counted once;
  5. all gradients are scaled by 1/N and by the clipping factor, the same on every rank, as the update reads them.

1 may begin while there is still something to compute (`start_sums`, `TrainedModule.expect`).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_hetero.distributed.platform import on_device
from megatron_hetero.distributed.topology import Topology
from megatron_hetero.hf.weight_map import Held, TensorSlice
from megatron_hetero.step.module import TrainedModule

Squares = Mapping[str, Tensor]
"""By module, fp64 scalars that add up over ranks to the square of the norm of its gradients."""


@dataclass(frozen=True)
class GradientSummary:
    """What every rank knows of a step before the update.

    `loss_sum`: sum of token losses of the global batch. `norms`: gradient norm of each trained module of that sum.
    `faults`: (module or "loss", rank) wherever something was NaN or infinite before ranks were mixed.
    """

    loss_sum: float
    norms: dict[str, float]
    faults: tuple[tuple[str, int], ...]

    @property
    def norm(self) -> float:
        """The norm over all modules together."""
        return math.sqrt(sum(norm**2 for norm in self.norms.values()))


@dataclass(frozen=True, eq=False)
class GradientTable:
    """What all ranks know of a step, on the device: nothing has waited for it.

    `rows`: of each rank its loss, whether that counts, and the columns of each module, fp64 [ranks, 2 + 3 modules].
    `names`: of the modules.
    """

    rows: Tensor
    names: tuple[str, ...]

    @property
    def squares(self) -> Tensor:
        """Squares of the norms of all modules, fp64 [modules]."""
        return self._columns(self.rows)[:, :, _Column.SQUARES].sum(0)

    def read(self) -> GradientSummary:
        """Wait for it."""
        table = self.rows.cpu()
        loss, counts = table[:, 0], table[:, 1]
        trained, finite, squares = self._columns(table).unbind(2)
        faults = [("loss", rank) for rank in range(len(table)) if not math.isfinite(loss[rank])]
        for i, name in enumerate(self.names):
            faults += [(name, rank) for rank in range(len(table)) if trained[rank, i] and not finite[rank, i]]
        norms = {
            name: math.sqrt(max(0.0, squares[:, i].sum().item()))
            for i, name in enumerate(self.names)
            if trained[:, i].any()
        }
        return GradientSummary(float((loss * counts).sum()), {} if faults else norms, tuple(faults))

    def _columns(self, table: Tensor) -> Tensor:
        return table[:, 2:].view(len(table), len(self.names), len(_Column))


class _Column(IntEnum):
    """What a rank reports of a module. All zero where it trains nothing of it."""

    TRAINED = 0
    FINITE = 1
    SQUARES = 2


def sum_gradients(modules: Iterable[TrainedModule], started: Mapping[str, Tensor] | None = None) -> dict[str, Tensor]:
    """Steps 1 to 3, of modules that this rank has a part of, in the order of the topology.

    `started`: by module, what `start_sums` gave, where it has been called. Returns the same of all modules that train.
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
    """The beginning of step 1, as far as it has not begun, of modules whose gradients are those of the step: nothing
    waits for the sums.

    Returns by module whether the gradients of this rank were finite before, in all views, fp64 scalar. Collective over
    the ranks that have the same stages of a module.
    """
    finite = dict[str, Tensor]()
    for module in modules:
        own = module.data_parallel.start_reducing()
        finite[module.name] = finite[module.name] * own if module.name in finite else own
    return finite


def add_up(
    squares: Squares, finite: Mapping[str, Tensor], loss_sum: Tensor, topology: Topology, *, loss_counts_here: bool
) -> GradientTable:
    """Step 4. Every rank calls it.

    Args:
        squares: by module, the sum of `squares_of` this rank's trained parameters in all views.
        finite: what `sum_gradients` returned.
        loss_sum: the fp32 sum of this rank's token losses.
        topology: of all modules.
        loss_counts_here: whether that is one of those that add up to the whole.
    """
    columns = {name: torch.stack([torch.ones_like(s), finite[name], s]) for name, s in squares.items()}
    absent = torch.zeros(len(_Column), dtype=torch.float64, device=loss_sum.device)
    counts = torch.full_like(loss_sum, float(loss_counts_here), dtype=torch.float64)
    names = tuple(topology.layouts)
    mine = torch.cat([torch.stack([loss_sum.double(), counts]), *(columns.get(name, absent) for name in names)])
    table = mine.new_empty(topology.world_size * len(mine))
    dist.all_gather_into_tensor(table, mine, group=topology.world)
    return GradientTable(table.view(topology.world_size, -1), names)


@torch.no_grad()
def scale_gradients(modules: Iterable[TrainedModule], factor: float | Tensor) -> None:
    """Step 5, of what was summed: with a sharded optimizer a rank's own share on a GPU."""
    summed = [gradients for module in modules for gradients in module.data_parallel.summed]
    if summed:
        torch._foreach_mul_(summed, factor)


def clip_factor(norm: float, limit: float) -> float:
    """What gradients of `norm` are scaled by so that their norm is at most `limit`; 0 means no limit."""
    return 1.0 if limit <= 0 or norm <= limit else limit / (norm + 1e-6)


# ---------------------------------------------------------------------------------------------------------
# Step 2
# ---------------------------------------------------------------------------------------------------------


@torch.no_grad()
def _sum_parts_over_tp(module: TrainedModule) -> None:
    """One all-reduce over `tp` of all slices whose gradients are parts. A slice that a rank holds twice is added up as
    well.
    """
    own, slots, size = _parts(module)
    if not slots:
        return
    buffer = torch.zeros(size, dtype=_widest(module), device=module.topology.platform.device)
    gradients, views = list[Tensor](), list[Tensor]()
    rounds = dict[int, list[int]]()
    times = Counter[Any]()
    module.data_parallel.zero_unsummed({name for name, _ in own})
    for name, tensor_slice in own:
        gradient, before = _accumulated_rows(module, name, tensor_slice)
        # What one kernel adds to must not have the same memory twice.
        rounds.setdefault(times[tensor_slice.rectangle], []).append(len(views))
        times[tensor_slice.rectangle] += 1
        gradients.append(gradient)
        views.append(buffer.narrow(0, slots[tensor_slice.rectangle] + before, gradient.numel()).view_as(gradient))
    for places in rounds.values():
        torch._foreach_add_([views[place] for place in places], [gradients[place] for place in places])
    if module.data_parallel.sums_shares:
        # Ranks of a tp group may have the sums of other rows of a slice: it may lie elsewhere in their parameters.
        dist.all_reduce(buffer, group=module.replicas)
    dist.all_reduce(buffer, group=module.holders)
    means = {name for name, over_tp in module.over_tp.items() if over_tp == "mean"}
    if divided := [view for (name, _), view in zip(own, views, strict=True) if name in means]:
        torch._foreach_div_(divided, module.holders.size())
    if gradients:
        torch._foreach_copy_(gradients, views)


def _accumulated_rows(module: TrainedModule, name: str, tensor_slice: TensorSlice) -> tuple[Tensor, int]:
    """Those rows of a slice whose gradient is on this rank, and the elements of the slice before them."""
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
    """This rank's (parameter, slice) whose gradients are parts; where the slice of any rank begins in a buffer; its
    size.
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
    """The sum of squares of this rank's share of the module's gradients, fp64 scalar; shares of all ranks add up to
    the whole.
    """
    counted = [
        (part, share / module.data_parallel.copies(name))
        for name in module.trained
        if name != module.tied_copy
        for part, share in _counted_parts(module, name)
        if part.numel()
    ]
    device = module.topology.platform.device
    if not counted:
        return torch.zeros((), dtype=torch.float64, device=device)
    # All norms at once: a model has hundreds of parameters.
    norms = torch.stack(torch._foreach_norm([part for part, _ in counted], dtype=_widest(module))).double()
    shares = torch.tensor([share for _, share in counted], dtype=torch.float64)
    return torch.dot(norms.square(), on_device(shares, device))


def _widest(module: TrainedModule) -> torch.dtype:
    """The dtype of sums: fp32, or fp64 where a parameter is."""
    wide = any(parameter.dtype == torch.float64 for parameter in module.trained.values())
    return torch.float64 if wide else torch.float32


def _counted_parts(module: TrainedModule, name: str) -> Iterator[tuple[Tensor, float]]:
    """Flat parts of the gradient of a parameter, as far as this rank updates it, and what share of their squares
    counts: of what several ranks hold, one share on each.
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
