"""Whole sequences of a pack, for layers with a recurrence along each sequence."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from megatron_hetero.groups.platform import Function, on_device
from megatron_hetero.layout.context import zigzag_tokens
from megatron_hetero.models.layers.chunks import Chunks


@dataclass(frozen=True, eq=False)
class Sequences:
    """The consecutive sequences of a pack. Derived tensors are computed once for all layers.

    Attributes:
        lengths: number of tokens of each sequence; sequences may be empty.
        device: device of the tensors.
        members: size of the `cp` group, whose members have zigzag chunks of every sequence.
    """

    lengths: tuple[int, ...]
    device: torch.device
    members: int = 1

    @property
    def total(self) -> int:
        """Number of tokens in all sequences."""
        return sum(self.lengths)

    @cached_property
    def offsets(self) -> Tensor:
        """Offset of each token in its sequence, int64 [tokens]."""
        lengths = np.asarray(self.lengths, np.int64)
        starts = np.repeat(np.cumsum(lengths) - lengths, lengths)
        return self._moved(np.arange(self.total) - starts)

    @cached_property
    def numbers(self) -> Tensor:
        """Index of each token's sequence, int32 [tokens]."""
        return self._moved(np.repeat(np.arange(len(self.lengths), dtype=np.int32), self.lengths))

    @cached_property
    def cu_seqlens(self) -> Tensor:
        """Boundaries of the sequences, int64 [sequences + 1]."""
        return self._moved(self.host_cu_seqlens.numpy())

    @cached_property
    def host_cu_seqlens(self) -> Tensor:
        """Boundaries of the sequences in host memory, int64 [sequences + 1]."""
        return torch.from_numpy(np.cumsum([0, *self.lengths], dtype=np.int64))

    @cached_property
    def by_member(self) -> Tensor:
        """Index in the pack of each token of member 0, then of member 1, and so on: int64 [tokens]."""
        return self._moved(self._by_member)

    @cached_property
    def in_order(self) -> Tensor:
        """Index in `by_member` of each token of the pack, int64 [tokens]: the inverse permutation."""
        return self._moved(np.argsort(self._by_member))

    @cached_property
    def chunks(self) -> Chunks:
        """Chunks of the sequences, for the gated delta rule."""
        return Chunks.of(self.lengths, self.device)

    @cached_property
    def _by_member(self) -> np.ndarray:
        return np.concatenate(zigzag_tokens(self.lengths, self.members))

    def _moved(self, values: np.ndarray) -> Tensor:
        return on_device(torch.from_numpy(values), self.device)


class Order(NamedTuple):
    """Placement of n tokens of a sequence in S rows. `rows`: int64 [n], the row of each token. `tokens`: int64 [S], the
    token of each row; n or larger for padding.
    """

    rows: Tensor
    tokens: Tensor

    def chosen(self, x: Tensor) -> Tensor:
        """Return the rows of `x` [S, ...] in the order of tokens, without padding: [n, ...]."""
        return _Reordered.apply(x, self, False)  # pyright: ignore[reportReturnType]

    def placed(self, x: Tensor) -> Tensor:
        """Return [S, ...] with the tokens `x` [n, ...] in their rows, and zeros for padding."""
        return _Reordered.apply(x, self, True)  # pyright: ignore[reportReturnType]


class _Reordered(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Order, into_rows: bool) -> Tensor:
        ctx.order, ctx.into_rows = order, into_rows
        return _place(x, order) if into_rows else x.index_select(0, order.rows)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return grad.index_select(0, ctx.order.rows) if ctx.into_rows else _place(grad, ctx.order), None, None


def _place(x: Tensor, order: Order) -> Tensor:
    length = len(order.tokens)
    allocate = x.new_empty if length == len(x) else x.new_zeros
    return allocate(length, *x.shape[1:]).index_copy_(0, order.rows, x)
