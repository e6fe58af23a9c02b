"""The segments of attention in a pack, as kernels take them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

from megatron_hetero.distributed.platform import on_device
from megatron_hetero.layout.context import AttentionSegments
from megatron_hetero.models.layers.exchange import padded_index


class ShapeBucket(NamedTuple):
    """The `segments` (their number) of so many `queries` and `keys` each."""

    queries: int
    keys: int
    segments: int


@dataclass
class PackedSegments(PackedSeqParams):
    """Segments of attention in a pack (`megatron_hetero.layout.context`): queries attend within their own segment
    only.

    A Megatron `PackedSeqParams` (what kernels that take all segments at once read: where queries and keys of each
    segment begin, int32 [segments + 1] on the device, and the longest). What kernels need that take segments of one
    shape at a time is made at first use, and kept for the other layers: `buckets`, `order`, `key_order` and
    `causal_mask`.

    `key_index`: int64 [K], where the keys of the segments stand in the padded gather of all context-parallel members'
    tokens; None where they are this member's own tokens in their order.
    """

    segments: AttentionSegments = field(default=AttentionSegments((), ()), repr=False)
    key_index: Tensor | None = None
    _masks: dict[ShapeBucket, Tensor] = field(default_factory=dict, repr=False, compare=False)

    @classmethod
    def of(cls, lengths: Sequence[int], device: torch.device) -> PackedSegments:
        """Whole sequences of `lengths` tokens, one after the other. Empty ones are dropped."""
        return cls.of_segments(AttentionSegments.whole(lengths), device)

    @classmethod
    def of_segments(
        cls, segments: AttentionSegments, device: torch.device, cp_lengths: Sequence[int] = ()
    ) -> PackedSegments:
        """What one context-parallel member attends to. `cp_lengths`, the tokens of each member, are needed where the
        segments have a `key_index`.
        """
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
        """The shapes of the segments, each with their number, in the order in which they first appear."""
        counts = np.bincount(self._bucket_of_segment, minlength=len(self._shapes))
        return tuple(ShapeBucket(*shape, int(counts[i])) for shape, i in self._shapes.items())

    @cached_property
    def order(self) -> Tensor | None:
        """int64 indices that bring queries into the order of the buckets; None where they are in it."""
        return self._order(self.segments.queries)

    @cached_property
    def key_order(self) -> Tensor | None:
        """The same for keys."""
        return self._order(self.segments.keys)

    def causal_mask(self, bucket: ShapeBucket) -> Tensor:
        """Boolean [queries, keys], True where a query sees a key: the last query sees every key, each query before it
        one less.
        """
        if bucket not in self._masks:
            everything = torch.ones(bucket.queries, bucket.keys, dtype=torch.bool, device=self.cu_seqlens_q.device)
            self._masks[bucket] = everything.tril_(bucket.keys - bucket.queries)
        return self._masks[bucket]

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
