"""Whole sequences of a pack, for layers with a recurrence along each sequence."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from megatron_hetero.groups.platform import on_device
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
