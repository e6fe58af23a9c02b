"""Slices of stored tensors that parameters of several modules consist of.

Widths of MLPs and the vocabulary are split over tp with padding: weights and gradients of what pads are zero.
"""

from __future__ import annotations

from megatron_hetero.hf.weight_map import Interval, TensorSlice, share, stack

ALIGNMENT = 8
"""What a rank has of them is a multiple of it: 16 bytes in bfloat16, the unit of matrix products on tensor cores
(NVIDIA, "Matrix Multiplication Background User's Guide", 2023).
"""


def split_length(size: int, tp: int) -> int:
    """What each rank of `tp` has of `size`, with padding."""
    _, length = share(size, 0, tp, ALIGNMENT)
    return length


def split_rows(name: str, size: int, tp_rank: int, tp: int) -> tuple[TensorSlice, ...]:
    """A rank's rows of a tensor of `size` rows, and what pads them."""
    rows, length = share(size, tp_rank, tp, ALIGNMENT)
    return (TensorSlice(name, rows, padding=length - (rows[1] - rows[0])),)


def split_columns(name: str, rows: int, size: int, tp_rank: int, tp: int) -> tuple[TensorSlice, ...]:
    """A rank's columns of a matrix of `size` columns, and what pads them."""
    own, length = share(size, tp_rank, tp, ALIGNMENT)
    return (TensorSlice(name, (0, rows), columns=own, padding=length - (own[1] - own[0])),)


def whole(name: str, rows: int) -> tuple[TensorSlice, ...]:
    """All of a tensor."""
    return stack((name, (0, rows)))


def columns(name: str, rows: int, part: Interval) -> tuple[TensorSlice, ...]:
    """Columns of a matrix."""
    return (TensorSlice(name, (0, rows), columns=part),)


def head(index: int, head_dim: int, count: int = 1) -> Interval:
    """The rows of `count` heads."""
    return index * head_dim, (index + count) * head_dim


def gate_and_up(prefix: str, kind: str, ffn: int, tp_rank: int, tp: int) -> tuple[TensorSlice, ...]:
    """Gate above up, each with its own padding below it. `kind`: weight or bias."""
    rows, length = share(ffn, tp_rank, tp, ALIGNMENT)
    padding = length - (rows[1] - rows[0])
    gate = TensorSlice(f"{prefix}gate_proj.{kind}", rows, padding=padding)
    return gate, TensorSlice(f"{prefix}up_proj.{kind}", rows, at=length, padding=padding)
