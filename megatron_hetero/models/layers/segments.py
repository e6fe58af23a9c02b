"""Segments of attention in a pack, and the exchanges of attention between ranks that share sequences: heads for tokens
under `sp`, keys and values under `cp`.

Shape suffixes:
    n  tokens of this rank
    N  tokens of all members of the group
    m  members of the group
    H  heads of this rank
    D  elements per head
    c  columns

    sp   ulysses_scatter_heads    one all-to-all each way     [n, H, D] -> [N, H / m, D]
         ulysses_gather_heads     one all-to-all each way     [N, H / m * D] -> [n, H * D]
    cp   gather_keys              one all-gather forward, one reduce-scatter backward
                                  [n, H, D] -> [keys that this rank's queries see, H, D]

Every member knows all lengths, so that members without tokens join the same exchanges.

Sources: Ulysses, Jacobs et al. 2023, arXiv 2309.14509; context parallelism with gathered keys and values, Llama Team
2024, arXiv 2407.21783, section 3.3.2.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from megatron_hetero.groups.megatron import PackedSeqParams, tensor_parallel
from megatron_hetero.groups.platform import on_device
from megatron_hetero.layout.context import AttentionSegments


def ulysses_scatter_heads(
    q_nHD: Tensor, k_nHD: Tensor, v_nHD: Tensor, lengths: tuple[int, ...], group: dist.ProcessGroup
) -> tuple[Tensor, Tensor, Tensor]:
    """Exchange heads for tokens in one all-to-all: queries, keys and values each from [n, H, D] to [N, H / m, D].

    Inputs may already be [n, m, H / m, D], which avoids a copy of their gradients. If there are fewer key/value heads
    than members, they are repeated first, so that each member gets the heads that its query heads use.
    """
    members = group.size()
    by_member = [_by_member(x, members) for x in (q_nHD, k_nHD, v_nHD)]
    widths = [x.shape[2] for x in by_member]
    # Pack one buffer, ordered by receiver: [m, n, (q | k | v heads of the receiver), D].
    packed = torch.cat([x.transpose(0, 1) for x in by_member], dim=2)
    tokens, dim = len(q_nHD), q_nHD.shape[-1]
    rows = packed.flatten(0, 1).flatten(1)  # The shape is [m * n, heads * D], even if n is 0.
    received = tensor_parallel.all_to_all(group, rows, list(lengths), [tokens] * members)
    return received.unflatten(1, (sum(widths), dim)).split(widths, dim=1)  # pyright: ignore[reportReturnType]


def ulysses_gather_heads(x_Nc: Tensor, lengths: tuple[int, ...], group: dist.ProcessGroup) -> Tensor:
    """Exchange tokens for heads in one all-to-all, from [N, H / m * D] to [n, H * D]."""
    members, tokens = group.size(), lengths[group.rank()]
    received = tensor_parallel.all_to_all(group, x_Nc, [tokens] * members, list(lengths))
    return received.unflatten(0, (members, tokens)).transpose(0, 1).flatten(1)


def gather_keys(
    k_nHD: Tensor, v_nHD: Tensor, lengths: tuple[int, ...], index: Tensor, group: dist.ProcessGroup
) -> tuple[Tensor, Tensor]:
    """Gather keys and values over `group` and return the rows at `index` (see `padded_index`), each [len(index), H, D].
    `lengths`: number of tokens of each member.
    """
    local = torch.cat((k_nHD, v_nHD), dim=1)
    padding = max(lengths) - len(local)
    padded = F.pad(local, (0, 0, 0, 0, 0, padding)) if padding else local
    gathered = tensor_parallel.gather_from_sequence_parallel_region(padded, group=group)
    return gathered.index_select(0, index).chunk(2, dim=1)  # pyright: ignore[reportReturnType]


def padded_index(index: np.ndarray, lengths: Sequence[int]) -> np.ndarray:
    """Convert indices of the tokens of all members to indices of the tokens with each member padded to the longest.

    >>> padded_index(np.array([0, 1, 2, 3]), (1, 0, 3)).tolist()
    [0, 6, 7, 8]
    """
    ends = np.cumsum(np.asarray(lengths, np.int64))
    member = np.searchsorted(ends, index, side="right")
    return index - (ends - lengths)[member] + member * max(lengths)


def _by_member(x: Tensor, members: int) -> Tensor:
    """View heads as [n, m, heads of a member, D], after repeating heads that `members` does not divide."""
    if x.dim() == 4:
        return x
    copies = math.lcm(x.shape[1], members) // x.shape[1]
    return (x if copies == 1 else x.repeat_interleave(copies, dim=1)).unflatten(1, (members, -1))


class ShapeBucket(NamedTuple):
    """A shape of segments, by its number of `queries` and of `keys`, and the number of `segments` with this shape."""

    queries: int
    keys: int
    segments: int


@dataclass
class PackedSegments(PackedSeqParams):
    """Segments of attention in a pack (`megatron_hetero.layout.context`): queries attend within their segment.

    Like Megatron's `PackedSeqParams` it has the offsets of queries and keys, int32 [segments + 1] on the device, for
    kernels that compute all segments at once. Kernels that compute segments of one shape at a time use `buckets`,
    `order`, `key_order` and `causal_mask`, which are computed once for all layers; so is `padded_offsets`.

    `key_index`: int64 [K], the indices of the segments' keys in the padded gather of all `cp` members' tokens; None if
    the keys are this member's tokens in order.
    """

    segments: AttentionSegments = field(default=AttentionSegments((), ()), repr=False)
    key_index: Tensor | None = None
    _masks: dict[ShapeBucket, Tensor] = field(default_factory=dict, repr=False, compare=False)
    _offsets: dict[int, Tensor] = field(default_factory=dict, repr=False, compare=False)

    @classmethod
    def of(cls, lengths: Sequence[int], device: torch.device) -> PackedSegments:
        """Return the segments of consecutive whole sequences of `lengths` tokens, omitting empty sequences."""
        return cls.of_segments(AttentionSegments.whole(lengths), device)

    @classmethod
    def of_segments(
        cls, segments: AttentionSegments, device: torch.device, cp_lengths: Sequence[int] = ()
    ) -> PackedSegments:
        """Return the segments of one `cp` member. `cp_lengths`: tokens of each member, required with a `key_index`."""
        index = None if segments.key_index is None else padded_index(segments.key_index, cp_lengths)
        cu_queries = _cumulated(segments.queries, device)
        return cls(
            qkv_format="thd",
            cu_seqlens_q=cu_queries,
            cu_seqlens_kv=cu_queries if segments.queries == segments.keys else _cumulated(segments.keys, device),
            max_seqlen_q=max(segments.queries, default=0),
            max_seqlen_kv=max(segments.keys, default=0),
            segments=segments,
            key_index=None if index is None else on_device(torch.from_numpy(index), device),
        )

    @cached_property
    def buckets(self) -> tuple[ShapeBucket, ...]:
        """Shapes of the segments with their counts, in the order of first occurrence."""
        counts = np.bincount(self._bucket_of_segment, minlength=len(self._shapes))
        return tuple(ShapeBucket(*shape, int(counts[i])) for shape, i in self._shapes.items())

    @cached_property
    def order(self) -> Tensor | None:
        """Indices (int64) that sort queries by bucket; None if they are already sorted."""
        return self._order(self.segments.queries)

    @cached_property
    def key_order(self) -> Tensor | None:
        """Indices (int64) that sort keys by bucket; None if they are already sorted."""
        return self._order(self.segments.keys)

    def causal_mask(self, bucket: ShapeBucket) -> Tensor:
        """Return the causal mask, bool [queries, keys], True where a query sees a key: the last query sees all keys,
        and each earlier query sees one key less than the next query.
        """
        if bucket not in self._masks:
            everything = torch.ones(bucket.queries, bucket.keys, dtype=torch.bool, device=self.cu_seqlens_q.device)
            self._masks[bucket] = everything.tril_(bucket.keys - bucket.queries)
        return self._masks[bucket]

    def padded_offsets(self, segments: int) -> Tensor:
        """Return the offsets of queries, int32 [segments + 1], after adding empty segments at the end."""
        if segments not in self._offsets:
            lengths, device = self.segments.queries, self.cu_seqlens_q.device
            self._offsets[segments] = _cumulated((*lengths, *[0] * (segments - len(lengths))), device)
        return self._offsets[segments]

    @cached_property
    def _shapes(self) -> dict[tuple[int, int], int]:
        shapes = dict.fromkeys(zip(self.segments.queries, self.segments.keys, strict=True))
        return {shape: i for i, shape in enumerate(shapes)}

    @cached_property
    def _bucket_of_segment(self) -> np.ndarray:
        segments = zip(self.segments.queries, self.segments.keys, strict=True)
        return np.array([self._shapes[segment] for segment in segments], np.int64)

    def _order(self, lengths: Sequence[int]) -> Tensor | None:
        bucket = self._bucket_of_segment
        if np.all(np.diff(bucket) >= 0):
            return None
        order = np.argsort(np.repeat(bucket, lengths), kind="stable")
        return on_device(torch.from_numpy(order), self.cu_seqlens_q.device)


def _cumulated(lengths: Sequence[int], device: torch.device) -> Tensor:
    return on_device(torch.from_numpy(np.cumsum([0, *lengths], dtype=np.int32)), device)
