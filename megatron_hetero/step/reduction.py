"""Sums of many tensors over a process group, in few calls."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

BUCKET = 1 << 25
"""Elements that one all-reduce sums: 128 MiB of fp32."""


@torch.no_grad()
def sum_over(tensors: Sequence[Tensor], group: dist.ProcessGroup) -> None:
    """Sum each tensor over the ranks of a group, in place; all ranks pass tensors of the same shapes."""
    if group.size() == 1:
        return
    for bucket in buckets(tensors):
        if len(bucket) == 1 and bucket[0].is_contiguous() and bucket[0].element_size() >= 4:
            dist.all_reduce(bucket[0], group=group)
            continue
        # Sums of narrow tensors are formed in fp32.
        flat = torch.cat([t.reshape(-1).to(torch.float32 if t.element_size() < 4 else t.dtype) for t in bucket])
        dist.all_reduce(flat, group=group)
        _copy_back(flat, bucket)


@torch.no_grad()
def copy_from_first(tensors: Sequence[Tensor], group: dist.ProcessGroup) -> None:
    """Give each tensor the values that the group's first rank has."""
    if group.size() == 1:
        return
    first = dist.get_global_rank(group, 0)
    for bucket in buckets(tensors):
        flat = torch.cat([tensor.reshape(-1) for tensor in bucket])
        dist.broadcast(flat, first, group=group)
        _copy_back(flat, bucket)


def buckets(tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """The tensors in lists of one dtype and of `BUCKET` elements, or of one larger tensor; empty ones are left out."""
    by_dtype: dict[torch.dtype, list[Tensor]] = {}
    for tensor in tensors:
        if tensor.numel():
            by_dtype.setdefault(tensor.dtype, []).append(tensor)
    for alike in by_dtype.values():
        bucket: list[Tensor] = []
        size = 0
        for tensor in alike:
            if bucket and size + tensor.numel() > BUCKET:
                yield bucket
                bucket, size = [], 0
            bucket.append(tensor)
            size += tensor.numel()
        yield bucket


def _copy_back(flat: Tensor, bucket: list[Tensor]) -> None:
    parts = flat.split([tensor.numel() for tensor in bucket])
    torch._foreach_copy_(bucket, [part.view_as(t) for part, t in zip(parts, bucket, strict=True)])
