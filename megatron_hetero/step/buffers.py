"""Flat buffers for the gradients of a module, and for its weights if ranks update shares of them. Buffers are cut into
buckets; sums of gradients over ranks, and gathers of updated weights, run bucket by bucket.

Parameters are in reverse order, about that in which a backward pass computes their gradients, so that the first bucket
is complete first. A parameter's gradient is accumulated in its attribute `main_grad`, a view, in a dtype that may be
wider than that of the weights; layers may add to it themselves and set `grad_added_to_main_grad`, as Megatron-Core's
do.

All ranks of a group begin the same sums in the order of the buckets. A bucket that is ready before its predecessor
waits for it. Sums that a backward pass has not begun (without images there is none, and a parameter may get no
gradient) begin after it. Ranks may begin at different times: no computation waits for a sum before the end of the step,
and the group's communicator has no other use meanwhile.

After an update all buckets are gathered beside the next forward pass, in the order in which they are read. Each unit of
a stage (an embedding, a layer, the rest) waits for the buckets of its parameters before it runs. All ranks of a group
begin the same gathers in one order, even a rank that does not run the module in this step; other code that reads or
writes weights waits for all of them.
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
"""Parameters begin at multiples of this number of elements if ranks update shares: 128 bytes at 16 bits."""
BUCKETS_ALIGNED = 128
"""Buckets then end at multiples of this number of elements: 256 bytes, which suits matrix products."""


class Cut(NamedTuple):
    """The start of each parameter in a buffer; and of each bucket its range, and the numbers of its parameters."""

    starts: tuple[int, ...]
    buckets: tuple[tuple[Range, tuple[int, ...]], ...]

    @property
    def size(self) -> int:
        """Elements of the buffer."""
        return self.buckets[-1][0][1]


def cut(sizes: Sequence[int], maximum: int | None, shares: int | None, alone: Collection[int] = ()) -> Cut:
    """Lay out parameters in a buffer.

    Args:
        sizes: elements of each parameter, in the order of the buffer.
        maximum: elements at which a bucket is closed; None for one bucket.
        shares: number of ranks that update equal shares of each bucket; None if all update everything, and nothing is
            padded.
        alone: numbers of parameters that get a bucket to themselves if there are shares, so that they are cut in the
            same way on another rank, where they have other neighbours.
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
    """Gradients that are summed in one collective, and weights that are gathered in one.

    Attributes:
        gradients: gradients of this rank, flat.
        summed: the gradients of which this rank needs the sum, a view; `gradients` itself if it needs all.
        weights: the same elements of the weights, if ranks update shares of them.
        share: the weights that this rank updates, a view.
        parameters: the parameters.
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
    """Allocate the gradients of parameters of one dtype, and move the weights into one buffer too if `sharded`.

    Args:
        parameters: in the order of the module.
        dtype: dtype of the gradients.
        maximum: elements at which a bucket is closed.
        group: the ranks that sum the gradients.
        sharded: whether each of them updates a share of each bucket.
        sums_shares: whether a rank needs the sum of its share only.

    Returns:
        The gradients, their buckets, and the elements of each parameter that this rank updates, by identity.
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
        # Attributes by which layers of Megatron-Core add gradients themselves.
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
    """Make each backward pass add gradients to `main_grad`. Yields each parameter with autograd's node that accumulates
    its gradient; hooks that are registered on it later run after the addition.
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
    """Gradients of a module in flat buffers, which are summed bucket by bucket.

    Attributes:
        state: progress of the gradients in a step.
        memory: the buffers.
        buckets: their buckets, in the order in which sums begin.
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
        """`accumulators`: for all trained parameters, the nodes in which autograd accumulates gradients, once in each
        backward pass. `adds_up`: whether a backward pass gives parameters several gradients.
        """
        self.state, self.name, self.buckets, self.memory = GradientState(name), name, buckets, memory
        self._parameters, self._group, self._adds_up = parameters, group, adds_up
        self._place = {id(p): place for place, bucket in enumerate(buckets) for p in bucket.parameters}
        self._accumulators, self._hooked = accumulators, False
        self._begin_step()

    def _begin_step(self) -> None:
        """Reset: nothing has been summed, and no backward pass is known to be the last."""
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
        self._wait()  # A sum that ends later would write over the zeros.
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
        """There must be one gradient for each parameter in the backward pass."""
        if self._adds_up:
            return
        if not self._hooked:  # Registered after Megatron's hooks, which add gradients up.
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
        key, place = id(parameter), self._place[id(parameter)]
        self._require_before(place)
        if key in self._expected:
            self._missing[place].discard(key)
        while len(self._works) < len(self.buckets) and not self._missing[len(self._works)]:
            self._start(len(self._works))

    def _start(self, place: int) -> None:
        bucket = self.buckets[place]
        with torch.no_grad(), torch.profiler.record_function(f"{self.name} gradient sums"):
            # The extremes are finite if all elements are; NaN counts as both. Many times as fast as a norm.
            self._extremes.extend(torch.aminmax(bucket.gradients))
            sums: Callable[..., Any] = dist.all_reduce
            tensors = [bucket.gradients]
            if bucket.summed is not bucket.gradients:
                sums, tensors = dist.reduce_scatter_tensor, [bucket.summed, bucket.gradients]
            work = sums(*tensors, group=self._group, async_op=True)
        assert work is not None, "this rank is in the group"
        self._works.append(work)


Reader = tuple[nn.Module, Collection[nn.Parameter]]
"""A module that waits for its weights before it runs, and these weights."""


@dataclass(frozen=True, eq=False, kw_only=True)
class BufferedWeights(ModuleWeights):
    """Weights that each rank stores whole, and gathers bucket by bucket if ranks update shares of them.

    Attributes:
        name: name of the module.
        buckets: the buckets that are gathered, in the order in which they are read; none unless ranks update shares.
        overlaps: whether a stage may run before all weights arrive: its `units()` wait for theirs.
    """

    name: str
    buckets: Sequence[Bucket]
    overlaps: bool = True
    _works: dict[int, dist.Work] = field(default_factory=dict[int, dist.Work])

    def hold_back(self, readers: Iterable[Reader]) -> None:
        """Let each module wait for its weights before it runs."""
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
        """Begin to gather the weights that each rank has updated. Collective."""
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
        """Make the weights of the buckets at `places`, by default of all, visible to later computation."""
        for place in list(self._works) if places is None else places:
            if (work := self._works.pop(place, None)) is not None:
                work.wait()

    def _before_run(self, places: Sequence[int], *_: Any) -> None:
        if self._works:
            self.wait(places)


def readers_of_stage(stage: Any) -> list[Reader]:
    """Return the modules that wait for weights: the stage itself, with the parameters in none of its `units()`, and the
    units.
    """
    units = [(unit.module, list(unit.module.parameters())) for unit in units_of(stage)]
    inside = {id(p) for _, parameters in units for p in parameters}
    return [(stage, [p for p in stage.parameters() if id(p) not in inside]), *units]


def in_reading_order(buckets: Iterable[Bucket], readers: Sequence[Reader]) -> list[Bucket]:
    """Sort buckets by the first of the `readers`, which are in the order in which they run."""
    first_read = dict[int, int]()
    for place, (_, parameters) in enumerate(readers):
        for parameter in parameters:
            first_read.setdefault(id(parameter), place)
    return sorted(buckets, key=lambda bucket: min(first_read[id(p)] for p in bucket.parameters))


def units_of(stage: Any) -> list[Gathered]:
    """The `units()` of a stage, in the order in which they run; none without that method."""
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
    """Allocate buffers for the models of a module's stages: each rank stores all weights and gradients.

    Args:
        name: name of the module.
        parameters: parameters of all stages in one view, by name.
        chunks: models of the stages.
        group: the ranks that hold the same parameters.
        in_one_bucket: whether sums begin when all gradients are there: on stages whose backward pass is not the last
            of the step.
        prefers_all_reduce: whether the platform sums everything for each rank, as gloo does.
        sharded: whether each rank updates a share.
        gradients: dtype of the buffers.
        adds_up: whether a backward pass gives parameters several gradients.
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
