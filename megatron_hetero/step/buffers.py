"""Flat buffers for the gradients of a module, and for its weights if ranks update shares of them, cut into buckets; the
sums of gradients over ranks, and the gathers of updated weights, bucket by bucket.

Parameters are in reverse order, about that in which a backward pass computes their gradients, so that the first bucket
is complete first. A parameter's gradient is accumulated in its attribute `main_grad`, a view, in a dtype that may be
wider than that of the weights; layers may add to it themselves and set `grad_added_to_main_grad`, as Megatron-Core's
do.

All ranks of a group begin the same sums in the order of the buckets. A bucket that is ready before its predecessor
waits for it, and what a backward pass has not begun (without images there is none, and a parameter may get no gradient)
begins behind it. Ranks may begin at different times: nothing that is computed waits for a sum before the end of the
step, and the group's communicator has no other use meanwhile.

After an update all buckets are gathered beside the next forward pass, those first that are read first. Each part of a
stage (an embedding, a layer, the rest) waits for the buckets of its parameters before it runs. All ranks of a group
begin the same gathers in one order, whenever, and whether, each of them runs the module in this step; whoever reads or
writes weights otherwise waits for all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import lcm
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from typing_extensions import override

from megatron_hetero.base.errors import UserError
from megatron_hetero.schedule.contract import Gathered
from megatron_hetero.schedule.gathering import bucket_elements
from megatron_hetero.step.module import DataParallel, Range

ALIGNED = 64
"""Parameters begin at multiples of this number of elements if ranks update shares: 128 bytes at 16 bits."""
BUCKETS_ALIGNED = 128
"""Buckets then end at multiples of this number of elements: 256 bytes, which suits matrix products."""


class Cut(NamedTuple):
    """The start of each parameter in a buffer, and the range of each bucket with the numbers of its parameters."""

    starts: tuple[int, ...]
    buckets: tuple[tuple[Range, tuple[int, ...]], ...]

    @property
    def size(self) -> int:
        """Elements of the buffer."""
        return self.buckets[-1][0][1]


def cut(sizes: Sequence[int], most: int | None, shares: int | None, alone: Collection[int] = ()) -> Cut:
    """Lay out parameters in a buffer.

    Args:
        sizes: elements of each parameter, in the order of the buffer.
        most: elements at which a bucket is closed; None for one bucket.
        shares: number of ranks that update equal shares of each bucket; None if all update everything, and nothing is
            padded.
        alone: numbers of parameters with a bucket of their own if there are shares, so that their shares are the same
            on another rank with other neighbours.
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
        if apart or (most is not None and position - first >= most):
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
        summed: the part of them that this rank needs the sum of, a view; `gradients` itself if that is all.
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
    most: int | None,
    group: Any,
    *,
    sharded: bool,
    sums_shares: bool,
) -> tuple[Tensor, list[Bucket], dict[int, Range]]:
    """Allocate the gradients of parameters of one dtype, and move the weights into one buffer too if `sharded`.

    Args:
        parameters: in the order of the module.
        dtype: dtype of the gradients.
        most: elements at which a bucket is closed.
        group: the ranks that sum the gradients.
        sharded: whether each of them updates a share of each bucket.
        sums_shares: whether a rank needs the sum of its share only.

    Returns:
        The gradients, their buckets, and the elements of each parameter that this rank updates, by identity.
    """
    ordered: list[Any] = list(reversed(parameters))
    ranks, rank = (group.size(), group.rank()) if sharded else (1, 0)
    alone = [n for n, p in enumerate(ordered) if getattr(p, "shared_embedding", False)]
    places = cut([p.numel() for p in ordered], most, ranks if sharded else None, alone)
    device = ordered[0].device
    gradients = torch.zeros(places.size, dtype=dtype, device=device)
    weights = torch.zeros(places.size, dtype=ordered[0].dtype, device=device) if sharded else None
    for parameter, start in zip(ordered, places.starts, strict=True):
        stop = start + parameter.numel()
        if weights is not None:
            place = weights[start:stop].view(parameter.shape)
            place.copy_(parameter.detach())
            parameter.data = place
        parameter.main_grad = gradients[start:stop].view(parameter.shape)
        parameter.grad_added_to_main_grad = False
    buckets, owned = list[Bucket](), dict[int, Range]()
    for (first, stop), numbers in places.buckets:
        size = (stop - first) // ranks
        low, high = first + size * rank, first + size * (rank + 1)
        whole, stored, own = gradients[first:stop], None, None
        if weights is not None:
            stored, own = weights[first:stop], weights[low:high]
        summed = gradients[low:high] if sums_shares else whole
        buckets.append(Bucket(whole, summed, stored, own, tuple(ordered[n] for n in numbers)))
        for n in numbers:
            start, size = places.starts[n], ordered[n].numel()
            begin = min(max(0, low - start), size)
            owned[id(ordered[n])] = begin, max(begin, min(size, high - start))
    return gradients, buckets, owned


def accumulate(parameters: Sequence[nn.Parameter]) -> Iterator[tuple[nn.Parameter, Any]]:
    """Make each backward pass add gradients to `main_grad`. Yields each parameter with autograd's node that accumulates
    its gradient, whose later hooks run after this.
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


class BucketSums:
    """The sums of gradients of a module, step after step. `accumulators`: for all parameters, the nodes in which
    autograd accumulates gradients, once in each backward pass.
    """

    def __init__(
        self,
        name: str,
        buckets: Sequence[Bucket],
        group: dist.ProcessGroup,
        accumulators: Sequence[tuple[nn.Parameter, Any]],
    ):
        self.name, self.buckets, self.group = name, buckets, group
        self._place = {id(p): place for place, bucket in enumerate(buckets) for p in bucket.parameters}
        self._accumulators, self._hooked = accumulators, False
        self.begin_step()

    def begin_step(self) -> None:
        """Reset: nothing has been summed, and no backward pass is known to be the last."""
        self._missing = [set(map(id, bucket.parameters)) for bucket in self.buckets]
        self._expected = set[int]()
        self._finite: list[Tensor] = []
        self._works: list[dist.Work] = []

    def expect(self, parameters: Collection[nn.Parameter]) -> None:
        """Note that the next backward pass is the last of the step for `parameters`, with one gradient for each."""
        if not self._hooked:  # After Megatron's hooks, which add gradients up.
            for parameter, accumulator in self._accumulators:
                accumulator.register_hook(partial(self._accumulated, parameter))
            self._hooked = True
        self._expected.update(map(id, parameters))

    def require_before(self, place: int = 0) -> None:
        """Check that the sum of a bucket has not begun in this step. Raises `UserError`."""
        if place < len(self._works):
            problem, because = "a backward pass comes after their sums over ranks have begun", "its part would be lost"
            fix = "give all micro-batches of a step to one call of the `Runner`, and call `zero_grad` before the next"
            raise UserError.at(f"gradients of `{self.name}`", problem=problem, because=because, fix=fix)

    def start_rest(self) -> Tensor:
        """Begin the other sums. Returns whether all gradients of this rank were finite before, fp64 scalar."""
        for place in range(len(self._works), len(self.buckets)):
            self._start(place)
        return torch.stack(self._finite).isfinite().all().double()

    def wait(self) -> None:
        """Make the sums visible to what is computed next."""
        for work in self._works:
            work.wait()

    def _accumulated(self, parameter: nn.Parameter, *_: object) -> None:
        key, place = id(parameter), self._place[id(parameter)]
        self.require_before(place)
        if key in self._expected:
            self._missing[place].discard(key)
        while len(self._works) < len(self.buckets) and not self._missing[len(self._works)]:
            self._start(len(self._works))

    def _start(self, place: int) -> None:
        bucket = self.buckets[place]
        with torch.no_grad(), torch.profiler.record_function(f"{self.name} gradient sums"):
            # The extremes are finite if all elements are; NaN counts as both. Many times as fast as a norm.
            self._finite.extend(torch.aminmax(bucket.gradients))
            sums: Callable[..., Any] = dist.all_reduce
            tensors = [bucket.gradients]
            if bucket.summed is not bucket.gradients:
                sums, tensors = dist.reduce_scatter_tensor, [bucket.summed, bucket.gradients]
            work = sums(*tensors, group=self.group, async_op=True)
        assert work is not None, "this rank is in the group"
        self._works.append(work)


Part = tuple[nn.Module, Collection[nn.Parameter]]
"""A module that waits for its weights before it runs, and these weights."""


class WeightGathers:
    """The gathers of a module's weights, update after update. `parts`: those of its stages on this rank, in the order
    in which they run.
    """

    def __init__(self, name: str, buckets: Sequence[Bucket], group: dist.ProcessGroup, parts: Sequence[Part]):
        self.name, self.group = name, group
        first_read = {id(p): place for place, (_, own) in reversed(list(enumerate(parts))) for p in own}
        self.buckets = sorted(buckets, key=lambda bucket: min(first_read[id(p)] for p in bucket.parameters))
        self._works: dict[int, dist.Work] = {}
        places = {id(p): place for place, bucket in enumerate(self.buckets) for p in bucket.parameters}
        for module, own in parts:
            read = sorted({places[id(p)] for p in own if id(p) in places})
            if read:
                module.register_forward_pre_hook(partial(self._before_run, read))

    def start(self) -> None:
        """Begin to gather what each rank has updated, without waiting. Collective."""
        self.wait()
        with torch.profiler.record_function(f"{self.name} weights"):
            for place, bucket in enumerate(self.buckets):
                assert bucket.weights is not None and bucket.share is not None, "ranks update shares"
                work = dist.all_gather_into_tensor(bucket.weights, bucket.share, group=self.group, async_op=True)
                assert work is not None, "this rank is in the group"
                self._works[place] = work

    def wait(self, places: Iterable[int] | None = None) -> None:
        """Make the weights of the buckets at `places`, by default of all, visible to what is computed next."""
        for place in list(self._works) if places is None else places:
            if (work := self._works.pop(place, None)) is not None:
                work.wait()

    def _before_run(self, places: Sequence[int], *_: Any) -> None:
        if self._works:
            self.wait(places)


def parts_of_stage(stage: Any) -> list[Part]:
    """The rest of a stage besides its `units()`, which is needed first, and these."""
    units = [(unit.module, list(unit.module.parameters())) for unit in units_of(stage)]
    inside = {id(p) for _, own in units for p in own}
    return [(stage, [p for p in stage.parameters() if id(p) not in inside]), *units]


def units_of(stage: Any) -> list[Gathered]:
    """The `units()` of a stage, in the order in which they run; none without that method."""
    named = stage.units() if hasattr(stage, "units") else ()
    return [unit if isinstance(unit, Gathered) else Gathered(unit) for unit in named]


@dataclass(frozen=True, eq=False)
class Replicated(DataParallel):
    """Each rank stores all weights and gradients; with a sharded optimizer it updates a share of them.

    Attributes:
        memory: buffers of the gradients.
        sums: sums of the buckets.
        gathers: gathers of their weights, which are none unless ranks update shares.
        adds_up: whether a backward pass gives parameters several gradients.
        overlaps_gathers: whether a stage may run before all weights arrive: its `units()` wait for theirs.
    """

    memory: tuple[Tensor, ...]
    sums: BucketSums
    gathers: WeightGathers
    adds_up: bool
    overlaps_gathers: bool

    @classmethod
    def of(
        cls,
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
    ) -> Replicated:
        """Allocate buffers for the models of a module's stages.

        Args:
            name: name of the module.
            parameters: parameters of all stages in one view, by name.
            chunks: models of the stages.
            group: the ranks that hold the same parameters.
            in_one_bucket: whether sums begin when all gradients are there: on stages whose backward pass is not the
                last of the step.
            prefers_all_reduce: whether the platform sums everything for each rank, as gloo does.
            sharded: whether each rank updates a share.
            gradients: dtype of the buffers.
            adds_up: whether a backward pass gives parameters several gradients.
        """
        own = {id(p) for p in parameters.values() if p.requires_grad}
        trained = [p for p in dict.fromkeys(p for each in chunks for p in each.parameters()) if id(p) in own]
        size = sum(p.numel() for p in parameters.values() if p.requires_grad)
        by_dtype: dict[torch.dtype, list[nn.Parameter]] = {}
        for parameter in trained:
            by_dtype.setdefault(parameter.dtype, []).append(parameter)
        sums_shares = sharded and not prefers_all_reduce
        most = None if in_one_bucket else bucket_elements(size, group.size())
        allocated = [
            _allocate(of_dtype, gradients, most, group, sharded=sharded, sums_shares=sums_shares)
            for of_dtype in by_dtype.values()
        ]
        memory = tuple(of_dtype for of_dtype, _, _ in allocated)
        buckets = [bucket for _, of_dtype, _ in allocated for bucket in of_dtype]
        ranges = {key: own for _, _, of_dtype in allocated for key, own in of_dtype.items()}
        owned = {name: ranges[id(p)] for name, p in parameters.items() if p.requires_grad}
        sums = BucketSums(name, buckets, group, list(accumulate(trained)))
        parts = [part for chunk in chunks for part in parts_of_stage(chunk)]
        gathers = WeightGathers(name, buckets if sharded else (), group, parts)
        overlaps = all(hasattr(chunk, "units") for chunk in chunks)
        return cls(parameters, group, owned, sharded, sums_shares, memory, sums, gathers, adds_up, overlaps)

    @property
    @override
    def summed(self) -> Sequence[Tensor]:
        return [bucket.summed for bucket in self.sums.buckets]

    @override
    def weights(self, name: str) -> Tensor:
        self.wait_for_weights()
        return self.parameters[name].detach().view(-1)

    @override
    def accumulated(self, name: str) -> tuple[Tensor, Range]:
        parameter: Any = self.parameters[name]
        return parameter.main_grad.view(-1), (0, parameter.numel())

    @override
    def zero_gradients(self, *, set_to_none: bool = True) -> None:
        self.reduce()  # A sum that ends later would write over the zeros.
        for gradients in self.memory:
            gradients.zero_()
        for parameter in (parameter for bucket in self.sums.buckets for parameter in bucket.parameters):
            parameter.grad_added_to_main_grad = False  # pyright: ignore[reportAttributeAccessIssue]
        self.sums.begin_step()

    @override
    def require_unsummed(self) -> None:
        self.sums.require_before()

    @override
    def expect(self, parameters: Collection[nn.Parameter]) -> None:
        if not self.adds_up:
            self.sums.expect(parameters)

    @override
    def start_reducing(self) -> Tensor:
        return self.sums.start_rest()

    @override
    def reduce(self) -> None:
        self.sums.wait()

    @override
    def share_weights(self) -> None:
        self.gathers.start()
        if not self.overlaps_gathers:
            self.gathers.wait()

    @override
    def wait_for_weights(self) -> None:
        self.gathers.wait()
