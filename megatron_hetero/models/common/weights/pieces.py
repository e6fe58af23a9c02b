"""Pieces of stored tensors that parameters of several modules consist of."""

from __future__ import annotations

from megatron_hetero.hf.weight_map import Interval, Piece, share, stack


def whole(name: str, rows: int) -> tuple[Piece, ...]:
    """All of a tensor."""
    return stack((name, (0, rows)))


def columns(name: str, rows: int, part: Interval) -> tuple[Piece, ...]:
    """Columns of a matrix."""
    return (Piece(name, (0, rows), columns=part),)


def head(index: int, head_dim: int, count: int = 1) -> Interval:
    """The rows of `count` heads."""
    return index * head_dim, (index + count) * head_dim


def gate_and_up(prefix: str, kind: str, ffn: int, tp_rank: int, tp: int) -> tuple[Piece, ...]:
    """Gate above up, each with its own padding below it. `kind`: weight or bias."""
    rows, length = share(ffn, tp_rank, tp)
    return Piece(f"{prefix}gate_proj.{kind}", rows), Piece(f"{prefix}up_proj.{kind}", rows, at=length)
