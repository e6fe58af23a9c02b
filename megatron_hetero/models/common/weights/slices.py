"""Slices of stored tensors that parameters of several modules consist of."""

from __future__ import annotations

from megatron_hetero.hf.weight_map import Interval, TensorSlice, share, stack


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
    rows, length = share(ffn, tp_rank, tp)
    return TensorSlice(f"{prefix}gate_proj.{kind}", rows), TensorSlice(f"{prefix}up_proj.{kind}", rows, at=length)
