"""Flat buffers for the gradients of a module, and for its weights if ranks update shares of the weights. Buffers are
cut into buckets; gradients are summed over ranks, and updated weights are gathered, bucket by bucket.

Parameters are in reverse order, roughly the order in which a backward pass computes their gradients, so that the first
bucket is complete first. A parameter's gradient is accumulated in `main_grad`, a view of the buffer whose dtype may be
wider than the weights' dtype; layers may add to it directly and set `grad_added_to_main_grad`, as in Megatron-Core.

All ranks of a group begin the same sums in the order of the buckets: a bucket that is ready early waits for its
predecessors. Sums that the backward pass has not begun begin after it: there is no backward pass without images, and a
parameter may have no gradient. Ranks may begin at different times: no computation waits for a sum before the end of the
step, and the group's communicator is not used for anything else until then.

After an update, all buckets are gathered during the next forward pass, in the order in which they are read. Each unit
of a stage (an embedding, a layer, the remaining parameters) waits for the buckets of its parameters before it runs. All
ranks of a group begin the same gathers in the same order, even ranks that do not run the module in this step. Other
code that reads or writes weights waits for all gathers.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import lcm
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from typing_extensions import override

from megatron_hetero.schedule.contract import Gathered
from megatron_hetero.schedule.gathering import bucket_elements
from megatron_hetero.step.gradient_state import GradientState
from megatron_hetero.step.module import ModuleGradients, ModuleWeights, Range

ALIGNED = 64
"""If ranks update shares, parameters begin at multiples of this number of elements: 128 bytes in a 16-bit dtype."""
BUCKETS_ALIGNED = 128
"""If ranks update shares, buckets end at multiples of this number of elements: 256 bytes in a 16-bit dtype."""


class Cut(NamedTuple):
    """The layout of a buffer: the start of each parameter, and the range and parameter numbers of each bucket."""

    starts: tuple[int, ...]
    buckets: tuple[tuple[Range, tuple[int, ...]], ...]

    @property
    def size(self) -> int:
        """The number of elements of the buffer."""
        return self.buckets[-1][0][1]


def cut(sizes: Sequence[int], maximum: int | None, shares: int | None, alone: Collection[int] = ()) -> Cut:
    """Lay out parameters in a buffer that is cut into buckets.

    Args:
        sizes: number of elements of each parameter, in the order of the buffer.
        maximum: number of elements at which a bucket is closed; None for one bucket.
        shares: number of ranks that update equal shares of each bucket; None if all ranks update all parameters, in a
            buffer without padding.
        alone: numbers of parameters that get a separate bucket if there are shares, so that they are sharded equally on
            other ranks with other parameters.
    """
    align, multiple = (1, 1) if shares is None else (ALIGNED, lcm(shares, BUCKETS_ALIGNED))
    starts, buckets, members = list[int](), list[tuple[Range, tuple[int, ...]]](), list[int]()
    first = position = 0

    def close(end: int) -> int:
        nonlocal first
        stop = _up(end, multiple)
        buckets.append(((first, stop), tuple(members)))
        members.clear()
        first = stop
        return stop

    for number, size in enumerate(sizes):
        position = _up(position, align)
        apart = shares is not None and number in alone
        if apart and members:
            position = close(position)
        starts.append(position)
        members.append(number)
        position += size
        if apart or (maximum is not None and position - first >= maximum):
            position = close(position)
    if members:
        close(position)
    return Cut(tuple(starts), tuple(buckets))


def _up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


@dataclass(frozen=True, eq=False)
class Bucket:
    """Gradients that are summed in one collective, and weights that are gathered in one collective.

    Attributes:
        gradients: the flat gradients of the bucket on this rank.
        summed: a view of the gradients whose sum this rank needs; `gradients` itself if it needs all sums.
        weights: the flat weights of the bucket, if ranks update shares of the weights.
        share: a view of the weights that this rank updates.
        parameters: the parameters in the bucket.
    """

    gradients: Tensor
    summed: Tensor
    weights: Tensor | None
    share: Tensor | None
    parameters: tuple[nn.Parameter, ...]


def _allocate(
    parameters: Sequence[nn.Parameter],
    dtype: torch.dtype,
    maximum: int | None,
    group: Any,
    *,
    sharded: bool,
    sums_shares: bool,
) -> tuple[Tensor, list[Bucket], dict[int, Range]]:
    """Allocate a gradient buffer for parameters of one dtype and, if `sharded`, move the weights into another buffer.

    Args:
        parameters: the parameters, in the order of the module.
        dtype: dtype of the gradients.
        maximum: number of elements at which a bucket is closed.
        group: the ranks that sum the gradients.
        sharded: whether each rank of the group updates a share of each bucket.
        sums_shares: whether each rank receives only the sum of its share.

    Returns:
        The gradient buffer, its buckets, and the range of each parameter that this rank updates, by the parameter's id.
    """
    ordered: list[Any] = list(reversed(parameters))
    ranks, rank = (group.size(), group.rank()) if sharded else (1, 0)
    alone = [number for number, p in enumerate(ordered) if getattr(p, "shared_embedding", False)]
    places = cut([p.numel() for p in ordered], maximum, ranks if sharded else None, alone)
    device = ordered[0].device
    gradients = torch.zeros(places.size, dtype=dtype, device=device)
    weights = torch.zeros(places.size, dtype=ordered[0].dtype, device=device) if sharded else None
    for parameter, start in zip(ordered, places.starts, strict=True):
        stop = start + parameter.numel()
        if weights is not None:
            place = weights[start:stop].view(parameter.shape)
            place.copy_(parameter.detach())
            parameter.data = place
        # Layers of Megatron-Core use these attributes to accumulate gradients directly.
        parameter.main_grad = gradients[start:stop].view(parameter.shape)
        parameter.grad_added_to_main_grad = False
    buckets, owned = list[Bucket](), dict[int, Range]()
    for (first, stop), numbers in places.buckets:
        size = (stop - first) // ranks
        low, high = first + size * rank, first + size * (rank + 1)
        whole = gradients[first:stop]
        bucket = Bucket(
            gradients=whole,
            summed=gradients[low:high] if sums_shares else whole,
            weights=None if weights is None else weights[first:stop],
            share=None if weights is None else weights[low:high],
            parameters=tuple(ordered[number] for number in numbers),
        )
        buckets.append(bucket)
        for number in numbers:
            start, elements = places.starts[number], ordered[number].numel()
            begin = min(max(0, low - start), elements)
            owned[id(ordered[number])] = begin, max(begin, min(elements, high - start))
    return gradients, buckets, owned


def accumulate(parameters: Sequence[nn.Parameter]) -> Iterator[tuple[nn.Parameter, Any]]:
    """Make each backward pass add gradients to `main_grad`. Yields each parameter with its autograd accumulation node;
    hooks that are registered on this node later run after the addition.
    """
    for parameter in parameters:
        node: Any = torch.autograd.graph.get_gradient_edge(parameter).node
        node.register_hook(partial(_add, parameter))
        yield parameter, node


def _add(parameter: Any, *_: object) -> None:
    if parameter.grad is not None and (
        not parameter.grad_added_to_main_grad or getattr(parameter, "zero_out_wgrad", False)
    ):
        parameter.main_grad.add_(parameter.grad.data)
    parameter.grad = None


class BufferedGradients(ModuleGradients):
    """The gradients of a module in flat buffers, which are summed over ranks bucket by bucket.

    Attributes:
        state: the phase of the gradients in a step.
        memory: the flat buffers.
        buckets: the buckets of all buffers, in the order in which sums begin.
    """

    def __init__(
        self,
        name: str,
        parameters: Mapping[str, nn.Parameter],
        buckets: Sequence[Bucket],
        group: dist.ProcessGroup,
        accumulators: Sequence[tuple[nn.Parameter, Any]],
        *,
        memory: Sequence[Tensor] = (),
        adds_up: bool = False,
    ):
        """`accumulators`: pairs of a trained parameter and its autograd accumulation node. `adds_up`: whether one
        backward pass may compute several gradients of a parameter.
        """
        self.state, self.name, self.buckets, self.memory = GradientState(name), name, buckets, memory
        self._parameters, self._group, self._adds_up = parameters, group, adds_up
        self._place = {id(p): place for place, bucket in enumerate(buckets) for p in bucket.parameters}
        self._accumulators, self._hooked = accumulators, False
        self._begin_step()

    def _begin_step(self) -> None:
        """Reset the state of a step: no bucket is summed, and no gradient is expected."""
        self._missing = [set(map(id, bucket.parameters)) for bucket in self.buckets]
        self._expected = set[int]()
        self._extremes: list[Tensor] = []
        self._works: list[dist.Work] = []

    @property
    @override
    def sums_shares(self) -> bool:
        return any(bucket.summed is not bucket.gradients for bucket in self.buckets)

    @property
    @override
    def summed(self) -> Sequence[Tensor]:
        return [bucket.summed for bucket in self.buckets]

    @override
    def accumulated(self, name: str) -> tuple[Tensor, Range]:
        parameter: Any = self._parameters[name]
        return parameter.main_grad.view(-1), (0, parameter.numel())

    @override
    def clear(self, *, set_to_none: bool) -> None:
        self._wait()  # A sum that ended later would overwrite the zeros.
        for gradients in self.memory:
            gradients.zero_()
        for bucket in self.buckets:
            for parameter in bucket.parameters:
                parameter.grad_added_to_main_grad = False  # pyright: ignore[reportAttributeAccessIssue]
        self._begin_step()

    @override
    def require_unsummed(self) -> None:
        self._require_before(0)

    @override
    def expect(self, parameters: Collection[nn.Parameter]) -> None:
        """Expect the final gradients of `parameters` in the next backward pass: one gradient for each parameter."""
        if self._adds_up:
            return
        if not self._hooked:  # These hooks must be registered after the hooks that accumulate gradients.
            for parameter, accumulator in self._accumulators:
                accumulator.register_hook(partial(self._arrived, parameter))
            self._hooked = True
        self._expected.update(map(id, parameters))

    @override
    def start(self) -> None:
        for place in range(len(self._works), len(self.buckets)):
            self._start(place)

    @override
    def finish(self) -> Tensor:
        self.start()
        finite = torch.stack(self._extremes).isfinite().all().double()
        self._wait()
        return finite

    def _wait(self) -> None:
        for work in self._works:
            work.wait()

    def _require_before(self, place: int) -> None:
        """Check that the sum of a bucket has not begun in this step. Raises `UserError`."""
        if place < len(self._works):
            self.state.refuse_backward()

    def _arrived(self, parameter: nn.Parameter, *_: object) -> None:
        key = id(parameter)
        place = self._place[key]
        self._require_before(place)
        if key not in self._expected:
            return
        self._missing[place].discard(key)
        while len(self._works) < len(self.buckets) and not self._missing[len(self._works)]:
            self._start(len(self._works))

    def _start(self, place: int) -> None:
        bucket = self.buckets[place]
        with torch.no_grad(), torch.profiler.record_function(f"{self.name} gradient sums"):
            # The minimum and maximum are finite only if all elements are finite; `aminmax` is much faster than a norm.
            self._extremes.extend(torch.aminmax(bucket.gradients))
            sums: Callable[..., Any] = dist.all_reduce
            tensors = [bucket.gradients]
            if bucket.summed is not bucket.gradients:
                sums, tensors = dist.reduce_scatter_tensor, [bucket.summed, bucket.gradients]
            work = sums(*tensors, group=self._group, async_op=True)
        assert work is not None, "this rank is in the group"
        self._works.append(work)


Reader = tuple[nn.Module, Collection[nn.Parameter]]
"""A module that waits for weights before it runs, and the parameters that it waits for."""


@dataclass(frozen=True, eq=False, kw_only=True)
class BufferedWeights(ModuleWeights):
    """Weights that each rank stores in full, and gathers bucket by bucket if ranks update shares of the weights.

    Attributes:
        name: name of the module.
        buckets: the buckets to gather, in the order in which weights are read; empty unless ranks update shares.
        overlaps: whether a stage may run before all weights arrive: each of its `units()` then waits for its weights.
    """

    name: str
    buckets: Sequence[Bucket]
    overlaps: bool = True
    _works: dict[int, dist.Work] = field(default_factory=dict[int, dist.Work])

    def hold_back(self, readers: Iterable[Reader]) -> None:
        """Register hooks that make each module wait for its weights before it runs."""
        places = {id(p): place for place, bucket in enumerate(self.buckets) for p in bucket.parameters}
        for module, parameters in readers:
            if read := sorted({places[id(p)] for p in parameters if id(p) in places}):
                module.register_forward_pre_hook(partial(self._before_run, read))

    @override
    def values(self, name: str) -> Tensor:
        self.wait()
        return self.parameters[name].detach().view(-1)

    @override
    def publish(self) -> None:
        """Begin to gather the weights that the ranks have updated. Collective over the group."""
        self.wait()
        with torch.profiler.record_function(f"{self.name} weights"):
            for place, bucket in enumerate(self.buckets):
                assert bucket.weights is not None and bucket.share is not None, "ranks update shares"
                work = dist.all_gather_into_tensor(bucket.weights, bucket.share, group=self.group, async_op=True)
                assert work is not None, "this rank is in the group"
                self._works[place] = work
        if not self.overlaps:
            self.wait()

    @override
    def wait(self, places: Iterable[int] | None = None) -> None:
        """Wait for the gathers of the buckets with the indices `places`, by default of all buckets."""
        for place in list(self._works) if places is None else places:
            if (work := self._works.pop(place, None)) is not None:
                work.wait()

    def _before_run(self, places: Sequence[int], *_: Any) -> None:
        if self._works:
            self.wait(places)


def readers_of_stage(stage: Any) -> list[Reader]:
    """Return the modules that wait for weights: the stage, for the parameters that are in none of its `units()`, and
    the units, each for its parameters.
    """
    units = [(unit.module, list(unit.module.parameters())) for unit in units_of(stage)]
    inside = {id(p) for _, parameters in units for p in parameters}
    return [(stage, [p for p in stage.parameters() if id(p) not in inside]), *units]


def in_reading_order(buckets: Iterable[Bucket], readers: Sequence[Reader]) -> list[Bucket]:
    """Sort buckets by the first reader of their parameters. `readers`: all readers, in the order in which they run."""
    first_read = dict[int, int]()
    for place, (_, parameters) in enumerate(readers):
        for parameter in parameters:
            first_read.setdefault(id(parameter), place)
    return sorted(buckets, key=lambda bucket: min(first_read[id(p)] for p in bucket.parameters))


def units_of(stage: Any) -> list[Gathered]:
    """Return the `units()` of a stage, in the order in which they run; an empty list without that method."""
    named = stage.units() if hasattr(stage, "units") else ()
    return [unit if isinstance(unit, Gathered) else Gathered(unit) for unit in named]


def in_buffers(
    name: str,
    parameters: Mapping[str, nn.Parameter],
    chunks: Sequence[Any],
    group: dist.ProcessGroup,
    *,
    in_one_bucket: bool,
    prefers_all_reduce: bool,
    sharded: bool,
    gradients: torch.dtype,
    adds_up: bool,
) -> tuple[BufferedWeights, BufferedGradients]:
    """Allocate buffers for the stages of a module on this rank. Each rank stores all weights and gradients.

    Args:
        name: name of the module.
        parameters: parameters of all stages in one view, by name.
        chunks: models of the stages.
        group: the ranks with the same parameters.
        in_one_bucket: whether sums begin only when all gradients are complete, for stages whose backward pass is not
            the last of the step.
        prefers_all_reduce: whether to use all-reduce instead of reduce-scatter, as with gloo.
        sharded: whether each rank updates a share of the weights.
        gradients: dtype of the gradient buffers.
        adds_up: whether one backward pass may compute several gradients of a parameter.
    """
    in_view = {id(p) for p in parameters.values() if p.requires_grad}
    trained = [p for p in dict.fromkeys(p for chunk in chunks for p in chunk.parameters()) if id(p) in in_view]
    by_dtype: dict[torch.dtype, list[nn.Parameter]] = {}
    for parameter in trained:
        by_dtype.setdefault(parameter.dtype, []).append(parameter)
    size = sum(p.numel() for p in parameters.values() if p.requires_grad)
    maximum = None if in_one_bucket else bucket_elements(size, group.size())
    memory, buckets, ranges = list[Tensor](), list[Bucket](), dict[int, Range]()
    for same_dtype in by_dtype.values():
        buffer, its_buckets, its_ranges = _allocate(
            same_dtype, gradients, maximum, group, sharded=sharded, sums_shares=sharded and not prefers_all_reduce
        )
        memory.append(buffer)
        buckets += its_buckets
        ranges |= its_ranges
    readers = [reader for chunk in chunks for reader in readers_of_stage(chunk)]
    weights = BufferedWeights(
        parameters=parameters,
        group=group,
        owned={each: ranges[id(p)] for each, p in parameters.items() if p.requires_grad},
        sharded=sharded,
        name=name,
        buckets=in_reading_order(buckets, readers) if sharded else (),
        overlaps=all(hasattr(chunk, "units") for chunk in chunks),
    )
    weights.hold_back(readers)
    accumulators = list(accumulate(trained))
    return weights, BufferedGradients(name, parameters, buckets, group, accumulators, memory=memory, adds_up=adds_up)
