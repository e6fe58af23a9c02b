"""Weights that are drawn where they are needed, for measurements of models that no folder holds."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_hetero.hf.weight_map import TensorSlice

STD = 0.02
"""Of weights: `initializer_range` of the families."""


@dataclass(frozen=True)
class DrawnWeights:
    """A source of weights of `shapes`: normal ones, biases of 0, norms of 1, of `dtype` on `device`.

    Slices are drawn when they are read, so that ranks which hold the same slice hold different values: good for what
    one rank computes, not for a model.
    """

    shapes: Mapping[str, tuple[int, ...]]
    dtype: torch.dtype
    device: torch.device

    def read(self, tensor_slice: TensorSlice) -> Tensor:
        """The values of one slice: 1-D where the tensor is, else 2-D."""
        rows, shape = tensor_slice.rows[1] - tensor_slice.rows[0], self.shapes[tensor_slice.name]
        if len(shape) == 1:
            value = 0.0 if tensor_slice.name.endswith(".bias") else 1.0
            return torch.full((rows,), value, dtype=self.dtype, device=self.device)
        whole = torch.Size(shape[1:]).numel()
        columns = whole if tensor_slice.columns is None else tensor_slice.columns[1] - tensor_slice.columns[0]
        return torch.empty(rows, columns, dtype=self.dtype, device=self.device).normal_(std=STD)

    def require_copy(self, copy: str, original: str, slices: Iterable[TensorSlice]) -> None:
        """Nothing is stored twice here."""
