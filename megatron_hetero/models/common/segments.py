"""The pieces of attention in a pack, as kernels take them."""

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
from megatron_hetero.models.common.exchange import padded_index
from megatron_hetero.sharding.context import Pieces


class Bucket(NamedTuple):
    """All pieces of so many `queries` and `keys`, of which there are `pieces`."""

    queries: int
    keys: int
    pieces: int


@dataclass
class Segments(PackedSeqParams):
    """Pieces of attention in a pack (`megatron_hetero.sharding.context`): queries attend within their own piece only.

    A Megatron `PackedSeqParams` (what kernels that take all pieces at once read: where queries and keys of each piece
    begin, int32 [pieces + 1] on the device, and the longest). What kernels need that take pieces of one shape at a time
    is made at first use, and kept for the other layers: `buckets`, `order`, `key_order` and `causal_mask`.

    `key_index`: int64 [K], where the keys of the pieces stand in the padded gather of all context-parallel members'
    tokens; None where they are this member's own tokens in their order.
    """

    pieces: Pieces = field(default=Pieces((), ()), repr=False)
    key_index: Tensor | None = None
    _masks: dict[Bucket, Tensor] = field(default_factory=dict, repr=False, compare=False)

    @classmethod
    def of(cls, lengths: Sequence[int], device: torch.device) -> Segments:
        """Whole sequences of `lengths` tokens, one after the other. Empty ones are dropped."""
        return cls.of_pieces(Pieces.whole(lengths), device)

    @classmethod
    def of_pieces(cls, pieces: Pieces, device: torch.device, cp_lengths: Sequence[int] = ()) -> Segments:
        """What one context-parallel member attends to. `cp_lengths`, the tokens of each member, are needed where the
        pieces have a `key_index`.
        """
        index = None if pieces.key_index is None else padded_index(pieces.key_index, cp_lengths)
        cu_queries = _cumulated(pieces.queries, device)
        return cls(
            qkv_format="thd",
            cu_seqlens_q=cu_queries,
            cu_seqlens_kv=cu_queries if pieces.queries == pieces.keys else _cumulated(pieces.keys, device),
            max_seqlen_q=max(pieces.queries, default=0),
            max_seqlen_kv=max(pieces.keys, default=0),
            pieces=pieces,
            key_index=None if index is None else on_device(torch.from_numpy(index), device),
        )

    @cached_property
    def buckets(self) -> tuple[Bucket, ...]:
        """The shapes of the pieces, each with their number, in the order in which they first appear."""
        counts = np.bincount(self._bucket_of_piece, minlength=len(self._shapes))
        return tuple(Bucket(*shape, int(counts[i])) for shape, i in self._shapes.items())

    @cached_property
    def order(self) -> Tensor | None:
        """int64 indices that bring queries into the order of the buckets; None where they are in it."""
        return self._order(self.pieces.queries)

    @cached_property
    def key_order(self) -> Tensor | None:
        """The same for keys."""
        return self._order(self.pieces.keys)

    def causal_mask(self, bucket: Bucket) -> Tensor:
        """Boolean [queries, keys], True where a query sees a key: the last query sees every key, each query before it
        one less.
        """
        if bucket not in self._masks:
            everything = torch.ones(bucket.queries, bucket.keys, dtype=torch.bool, device=self.cu_seqlens_q.device)
            self._masks[bucket] = everything.tril_(bucket.keys - bucket.queries)
        return self._masks[bucket]

    @cached_property
    def _shapes(self) -> dict[tuple[int, int], int]:
        shapes = dict.fromkeys(zip(self.pieces.queries, self.pieces.keys, strict=True))
        return {shape: i for i, shape in enumerate(shapes)}

    @cached_property
    def _bucket_of_piece(self) -> np.ndarray:
        pieces = zip(self.pieces.queries, self.pieces.keys, strict=True)
        return np.array([self._shapes[piece] for piece in pieces], np.int64)

    def _order(self, lengths: Sequence[int]) -> Tensor | None:
        bucket = self._bucket_of_piece
        if np.all(np.diff(bucket) >= 0):
            return None
        order = np.argsort(np.repeat(bucket, lengths), kind="stable")
        return on_device(torch.from_numpy(order), self.cu_seqlens_q.device)


def _cumulated(lengths: Sequence[int], device: torch.device) -> Tensor:
    return on_device(torch.from_numpy(np.cumsum([0, *lengths], dtype=np.int32)), device)
