"""Flat memory of the gradients of a module, and of its weights where ranks update shares of them, cut into buckets.

Parameters lie in the reverse of their order, about that in which a backward pass gives their gradients, so that the
first bucket is complete first. A parameter's gradient is accumulated in its attribute `main_grad`, a view, in a dtype
that may be wider than that of the weights; layers may add to it themselves and say so by `grad_added_to_main_grad`, as
Megatron-Core's do.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from math import lcm
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

Range = tuple[int, int]
"""Elements [start, stop)."""
ALIGNED = 64
"""Parameters begin at multiples of so many elements where ranks update shares: 128 bytes at 16 bits."""
BUCKETS_ALIGNED = 128
"""Buckets end at multiples of so many elements there: 256 bytes, which is what matrix products like."""


class Cut(NamedTuple):
    """Where each parameter begins in a flat memory, and each bucket with the numbers of its parameters."""

    starts: tuple[int, ...]
    buckets: tuple[tuple[Range, tuple[int, ...]], ...]

    @property
    def size(self) -> int:
        """Elements of the memory."""
        return self.buckets[-1][0][1]


def cut(sizes: Sequence[int], most: int | None, shares: int | None, alone: Collection[int] = ()) -> Cut:
    """Lay out parameters of so many elements, one behind the other.

    Args:
        sizes: elements of each parameter, in the order of the memory.
        most: elements at which a bucket is closed; None makes one bucket.
        shares: number of ranks of which each updates an equal share of a bucket; None if all update everything, and
            nothing is padded.
        alone: numbers of parameters with a bucket of their own if there are shares: on another rank with other
            neighbours the shares of such a parameter are the same.
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
    """Gradients that are summed at once, and weights that are gathered at once.

    Attributes:
        gradients: flat, of this rank.
        summed: the part of them that this rank needs the sum of, a view; `gradients` itself if that is all.
        weights: the same elements of the weights, where ranks update shares of them.
        share: the weights that this rank updates, a view.
        parameters: whose gradients and weights these are.
    """

    gradients: Tensor
    summed: Tensor
    weights: Tensor | None
    share: Tensor | None
    parameters: tuple[nn.Parameter, ...]


@dataclass(frozen=True, eq=False)
class Buffer:
    """The gradients of parameters of one dtype. `owned`: by the identity of a parameter the elements of it that this
    rank updates.
    """

    gradients: Tensor
    buckets: tuple[Bucket, ...]
    owned: dict[int, Range]

    @classmethod
    def of(
        cls,
        parameters: Sequence[nn.Parameter],
        dtype: torch.dtype,
        most: int | None,
        group: Any,
        *,
        sharded: bool,
        sums_shares: bool,
    ) -> Buffer:
        """Allocate the gradients in `dtype`, and where `sharded` put the weights into one memory too.

        Args:
            parameters: of one dtype, in the order of the module.
            dtype: of the gradients.
            most: elements at which a bucket is closed.
            group: the ranks that sum the gradients.
            sharded: whether each of them updates a share of each bucket.
            sums_shares: whether a rank needs the sum of its share only.
        """
        ordered = list(reversed(parameters))
        alone = [n for n, p in enumerate(ordered) if getattr(p, "shared_embedding", False)]
        places = cut([p.numel() for p in ordered], most, group.size() if sharded else None, alone)
        device = ordered[0].device
        gradients = torch.zeros(places.size, dtype=dtype, device=device)
        weights = torch.zeros(places.size, dtype=ordered[0].dtype, device=device) if sharded else None
        for parameter, start in zip(ordered, places.starts, strict=True):
            _map(parameter, start, gradients, weights)
        buckets, owned = list[Bucket](), dict[int, Range]()
        for (first, stop), numbers in places.buckets:
            low, high = (first, stop) if not sharded else _share(first, stop, group)
            own, whole = None if weights is None else weights[low:high], gradients[first:stop]
            buckets.append(
                Bucket(
                    whole,
                    gradients[low:high] if sums_shares else whole,
                    None if weights is None else weights[first:stop],
                    own,
                    tuple(ordered[n] for n in numbers),
                )
            )
            for n in numbers:
                start, size = places.starts[n], ordered[n].numel()
                begin = min(max(0, low - start), size)
                owned[id(ordered[n])] = begin, max(begin, min(size, high - start))
        return cls(gradients, tuple(buckets), owned)


def _map(parameter: nn.Parameter, start: int, gradients: Tensor, weights: Tensor | None) -> None:
    """Make a parameter's gradient, and its values if there is a memory for them, views of these."""
    stop, any_parameter = start + parameter.numel(), parameter
    if weights is not None:
        place = weights[start:stop].view(parameter.shape)
        place.copy_(parameter.detach())
        parameter.data = place
    accumulated: Any = any_parameter
    accumulated.main_grad = gradients[start:stop].view(parameter.shape)
    accumulated.grad_added_to_main_grad = False


def _share(first: int, stop: int, group: Any) -> Range:
    size = (stop - first) // group.size()
    return first + size * group.rank(), first + size * (group.rank() + 1)


def accumulate(parameters: Sequence[nn.Parameter]) -> Iterator[tuple[nn.Parameter, Any]]:
    """Have each backward pass add gradients to `main_grad`. Yields each parameter with autograd's node that accumulates
    its gradient: what is hooked to it later runs behind this.
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
