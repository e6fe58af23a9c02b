"""Weights and gradients of a module in the user's wrappers, or without a wrapper and with an optimizer of PyTorch.

wrapper                     gradients after the backward pass          remaining reductions
none                        sums over this rank's tokens               sums over sp, cp and dp
FSDP2 (`fully_shard`)       shards of the mean over the mesh           factor of the mesh size; sums over other axes
PyTorch's DDP               the mean over its group                    factor of the group size; sums over other axes
Megatron's DDP              sums over this rank's tokens, `main_grad`  Megatron's `finish_grad_sync`
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from typing_extensions import override

from megatron_hetero.groups.platform import Platform
from megatron_hetero.step.gradient_state import GradientState
from megatron_hetero.step.module import ModuleGradients, ModuleWeights, Range

BUCKET = 1 << 25
"""The maximum number of elements in one all-reduce of several tensors: 128 MiB in fp32."""


@torch.no_grad()
def sum_over(tensors: Sequence[Tensor], group: dist.ProcessGroup) -> None:
    """Sum each tensor over the ranks of a group, in place. All ranks must pass tensors of the same shapes."""
    if group.size() == 1:
        return
    for bucket in _buckets(tensors):
        if len(bucket) == 1 and bucket[0].is_contiguous() and bucket[0].element_size() >= 4:
            dist.all_reduce(bucket[0], group=group)
            continue
        # 16-bit tensors are summed in fp32.
        flat = torch.cat([t.reshape(-1).to(torch.float32 if t.element_size() < 4 else t.dtype) for t in bucket])
        dist.all_reduce(flat, group=group)
        segments = flat.split([tensor.numel() for tensor in bucket])
        torch._foreach_copy_(bucket, [values.view_as(t) for values, t in zip(segments, bucket, strict=True)])


def _buckets(tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Yield lists of nonempty tensors of one dtype, with at most `BUCKET` elements or a single larger tensor."""
    by_dtype: dict[torch.dtype, list[Tensor]] = {}
    for tensor in tensors:
        if tensor.numel():
            by_dtype.setdefault(tensor.dtype, []).append(tensor)
    for same_dtype in by_dtype.values():
        bucket: list[Tensor] = []
        size = 0
        for tensor in same_dtype:
            if bucket and size + tensor.numel() > BUCKET:
                yield bucket
                bucket, size = [], 0
            bucket.append(tensor)
            size += tensor.numel()
        yield bucket


@torch.no_grad()
def differ(pairs: Iterable[tuple[Tensor, Tensor]]) -> bool:
    """Return whether any weights differ from their masters by more than rounding. Pairs on different devices are
    ignored. The host waits for the device.
    """
    comparable = [(weights, master) for weights, master in pairs if weights.device == master.device]
    flags = [
        ((weights - master).abs() > (master.to(weights.dtype) - master).abs()).any() for weights, master in comparable
    ]
    return bool(torch.stack(flags).any()) if flags else False


@torch.no_grad()
def copy_from_first(tensors: Sequence[Tensor], group: dist.ProcessGroup) -> None:
    """Copy each tensor from the first rank of a group to the other ranks, in place."""
    if group.size() > 1:
        first = dist.get_global_rank(group, 0)
        for tensor in filter(torch.numel, tensors):
            sent = tensor.contiguous()
            dist.broadcast(sent, first, group=group)
            tensor.copy_(sent)


@dataclass(frozen=True)
class Remaining:
    """The reductions of a parameter's gradient that wrappers have not done.

    Attributes:
        axes: the axes along which the gradient must still be summed.
        groups: the process groups in which to sum the gradient, one after the other.
        factor: the factor that undoes a wrapper's division.
    """

    axes: tuple[str, ...]
    groups: tuple[dist.ProcessGroup, ...]
    factor: float


@dataclass(frozen=True, eq=False)
class WrappedWeights(ModuleWeights):
    """The weights of a module as the user's wrapper, if any, stores them.

    Attributes:
        ranks_with_copies: for each trained parameter, the number of ranks with the same elements, along sp, cp and dp,
            and along the axes of the wrapper's mesh.
    """

    ranks_with_copies: Mapping[str, int]

    @override
    def copies(self, name: str) -> int:
        return self.ranks_with_copies[name]

    @override
    def stored(self, name: str) -> Range:
        return 0, local(self.parameters[name]).numel()

    @override
    def values(self, name: str) -> Tensor:
        return local(self.parameters[name].detach()).view(-1)


@dataclass(frozen=True, eq=False)
class WrappedGradients(ModuleGradients):
    """The gradients of a module as the user's wrapper, if any, stores them.

    Attributes:
        state: the phase of the gradients in a step.
        platform: the platform of the topology.
        parameters: the trained parameters, by name.
        remaining: for each trained parameter, the reductions that wrappers have not done.
        in_main_grad: names of parameters whose gradients are in buffers of Megatron's `DistributedDataParallel`; with
            the distributed optimizer, each rank has only the sums of its share.
        ddps: the module's wrappers of Megatron's `DistributedDataParallel`.
    """

    state: GradientState
    platform: Platform
    parameters: Mapping[str, Any]
    remaining: Mapping[str, Remaining]
    in_main_grad: frozenset[str]
    ddps: tuple[Any, ...]

    @property
    @override
    def persistent(self) -> bool:
        return next(iter(self.parameters), None) in self.in_main_grad

    @property
    @override
    def first(self) -> Tensor | None:
        for name, parameter in self.parameters.items():
            gradient = parameter.main_grad if name in self.in_main_grad else parameter.grad
            return None if gradient is None else local(gradient)
        return None

    @property
    @override
    def summed(self) -> Sequence[Tensor]:
        return [self._gradient(name) for name in self.parameters]

    @override
    def accumulated(self, name: str) -> tuple[Tensor, Range]:
        gradient = self._gradient(name)
        return gradient.view(-1), (0, gradient.numel())

    @override
    def clear(self, *, set_to_none: bool) -> None:
        for ddp in self.ddps:
            ddp.zero_grad_buffer()
        for parameter in self.parameters.values():
            if set_to_none or parameter.grad is None:
                parameter.grad = None
            else:
                parameter.grad.zero_()

    @torch.no_grad()
    @override
    def finish(self) -> Tensor:
        finite = self._are_finite()
        for ddp in self.ddps:
            ddp.finish_grad_sync(force_all_reduce=self.platform.prefers_all_reduce)
        for groups in dict.fromkeys(each.groups for each in self.remaining.values()):
            gradients = [self._gradient(name) for name, each in self.remaining.items() if each.groups == groups]
            for group in groups:
                sum_over(gradients, group)
        for factor in dict.fromkeys(each.factor for each in self.remaining.values()):
            if factor != 1:
                means = [self._gradient(name) for name, each in self.remaining.items() if each.factor == factor]
                torch._foreach_mul_(means, factor)
        return finite

    def _are_finite(self) -> Tensor:
        """Return whether all gradients that no wrapper reduces are finite, as an fp64 scalar."""
        unreduced = [
            parameter.grad
            for name, parameter in self.parameters.items()
            if name not in self.in_main_grad and self.remaining[name].factor == 1 and parameter.grad is not None
        ]
        whole = [gradient for gradient in unreduced if not is_sharded(gradient)]
        extremes = [torch.zeros((), device=self.platform.device)]
        if whole:
            extremes += torch._foreach_norm(whole, math.inf)
        return torch.stack([each.double() for each in extremes]).isfinite().all().double()

    @torch.no_grad()
    def _gradient(self, name: str) -> Tensor:
        """Return this rank's shard of a parameter's gradient; a missing gradient is first set to zeros."""
        parameter = self.parameters[name]
        if name in self.in_main_grad:
            return parameter.main_grad
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        elif is_sharded(parameter) and parameter.grad.placements != parameter.placements:
            # With PyTorch's tensor parallelism, a gradient may be a partial sum, to be summed over `tp`.
            parameter.grad = parameter.grad.redistribute(placements=parameter.placements)
        elif not parameter.grad.is_contiguous():
            parameter.grad = parameter.grad.contiguous()
        return local(parameter.grad)


def local(tensor: Tensor) -> Tensor:
    """Return this rank's shard of a `DTensor`, or any other tensor unchanged."""
    return tensor.to_local() if is_sharded(tensor) else tensor  # pyright: ignore[reportAttributeAccessIssue]


def is_sharded(tensor: Any) -> bool:
    """Return whether `tensor` is a `DTensor`."""
    return hasattr(tensor, "device_mesh") and hasattr(tensor, "placements")
