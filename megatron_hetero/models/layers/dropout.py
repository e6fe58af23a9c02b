"""Dropout of the inputs of adapters by a hash of each element's identity, in place of a random generator.

Whether an element is dropped depends only on the run's seed, its layer, its token and its column. So the mask is the
same on every rank, in every layout, micro-batch and order of tokens, after a resume, and when it is recomputed, as in
the backward pass, which saves no mask.

    id of a token      64 mixed bits of its sample and its position there (`megatron_hetero.data.token_ids`)
    key of a layer     64 bits of seed and name, odd
    row [S]            the upper half of id * key, by multiply-shift hashing (Dietzfelbinger et al. 1997)
    column [in]        32 mixed bits of the column's number in the whole layer
    element [S, in]    dropped if mixed(row ^ column) < p 2**32

`mixed` consists of the two multiplications of lowbias32 and the shift between them (Wellons 2018, "Prospecting for hash
functions"). Its other two shifts are not needed, because rows and columns are already mixed, and the highest bits of
the result decide. Two tokens have the same mask in a layer if their rows are equal: one pair in 2**32.

Projections in one parameter, such as queries, keys and values, share a mask; `peft` draws one mask for each.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from megatron_hetero.groups.platform import Function, compiles_for, on_device
from megatron_hetero.models.layers.compiled import run
from megatron_hetero.models.layers.linear import gradient_of_weight, product

_STEP, _FIRST, _SECOND = (np.uint64(each) for each in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))


def mixed_bits(*fields: np.ndarray | int) -> np.ndarray:
    """Return a 64-bit hash, int64, of `fields`, integers that are broadcast, by SplitMix64 (Steele et al. 2014, OOPSLA)
    of one field after the other.
    """
    state = np.zeros(1, np.uint64)
    for each in fields:
        state = (state ^ np.asarray(each, np.int64).view(np.uint64)) + _STEP
        state = (state ^ (state >> np.uint64(30))) * _FIRST
        state = (state ^ (state >> np.uint64(27))) * _SECOND
        state = state ^ (state >> np.uint64(31))
    return state.view(np.int64)


@dataclass(frozen=True, eq=False)
class TokenIds:
    """Ids of the tokens of a shard, padding included.

    `values`: int64 [ranks, tokens per rank] where activations are split over tp, else int64 [1, tokens].
    """

    values: Tensor

    def local(self, rank: int) -> Tensor:
        """Return the ids of a tp rank's tokens, where activations are split."""
        return self.values[rank]

    def of_units(self, unit: int) -> TokenIds:
        """Return the ids of units of `unit` consecutive tokens: the id of the first token of each unit."""
        return TokenIds(self.values[:, ::unit])


def ids_of_chunks(ids: TokenIds | None, chunks: Sequence[Tensor]) -> Iterator[TokenIds | None]:
    """Yield the ids of the tokens of each chunk on all tp ranks, or None for each chunk if `ids` is None."""
    if ids is None:
        yield from [None] * len(chunks)
    else:
        yield from (TokenIds(values) for values in ids.values.split([len(chunk) for chunk in chunks], dim=1))


@dataclass(frozen=True)
class Dropout:
    """Dropout of the input of an adapter.

    Attributes:
        p: probability that an element is dropped.
        key: key of the layer, an odd signed 64-bit number.
        first: index of this rank's first column in the whole layer.
    """

    p: float
    key: int
    first: int

    @classmethod
    def of(cls, p: float, seed: int, layer: str, first: int) -> Self:
        """Return the dropout of the layer named `layer` in a run with this `seed`."""
        digest = hashlib.sha256(f"dropout {seed} {layer}".encode()).digest()
        return cls(p, int.from_bytes(digest[:8], "little", signed=True) | 1, first)

    @property
    def scale(self) -> float:
        """Factor by which the remaining elements are multiplied."""
        return 1 / (1 - self.p)

    @property
    def threshold(self) -> int:
        """The int32 hash below which elements are dropped."""
        return round(self.p * 2**32) - 2**31

    def linear(self, x: Tensor, weight: Tensor, ids: Tensor) -> Tensor:
        """Drop elements of `x` [S, 1, in], without applying `scale`, and multiply by `weight` [out, in]. Return [S, 1,
        out]. `ids`: ids of the tokens, int64 [S].
        """
        return _DroppedLinear.apply(x, weight, self.rows(ids), self)  # pyright: ignore[reportReturnType]

    def rows(self, ids: Tensor) -> Tensor:
        """Return the hash of each token, int32 [S]."""
        return ((ids * self.key) >> 32).to(torch.int32)

    def dropped(self, rows: Tensor, *xs: Tensor) -> tuple[Tensor, ...]:
        """Return each of `xs` [S, 1, in] with dropped elements set to zero."""
        columns = _columns(self.first, xs[0].shape[-1], rows.device)
        # Inside a tuple, the columns have a fixed number for the compiler.
        inputs = rows, (columns, self.threshold), *xs
        return run(_zeroed, *inputs) if compiles_for(xs[0]) else _zeroed(*inputs)


@lru_cache(maxsize=64)
def _columns(first: int, width: int, device: torch.device) -> Tensor:
    """Return the hash of each of `width` columns, starting at number `first`: int32 [width]."""
    bits = mixed_bits(np.arange(first, first + width))
    with torch.inference_mode(False):
        return on_device(torch.from_numpy((bits >> 32).astype(np.int32)), device)


def _zeroed(rows: Tensor, mask: tuple[Tensor, int], *xs: Tensor) -> tuple[Tensor, ...]:
    """Return `xs` with dropped elements set to zero, in a single pass over memory if compiled. `mask`: the hashes of
    columns, and the threshold.
    """
    columns, threshold = mask
    bits = rows.view(-1, 1, 1) ^ columns
    bits *= 0x7FEB352D
    bits ^= bits >> 15  # The shift is arithmetic, which maps a number and its complement to one value.
    bits *= 0x846CA68B - 2**32
    is_dropped = bits < threshold
    return tuple(x.masked_fill(is_dropped, 0) for x in xs)


class _DroppedLinear(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, rows: Tensor, dropout: Dropout) -> Tensor:
        ctx.save_for_backward(x if ctx.needs_input_grad[1] else None, weight)
        ctx.parameter, ctx.rows, ctx.dropout = weight, rows, dropout
        (x,) = dropout.dropped(rows, x)
        return product(x, weight.t())

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        x, weight = ctx.saved_tensors
        grad_x = product(grad, weight) if ctx.needs_input_grad[0] else None
        grad_weight = None
        # Drop elements of both tensors in one call, which computes the mask once.
        dropped = iter(ctx.dropout.dropped(ctx.rows, *(each for each in (grad_x, x) if each is not None)))
        if grad_x is not None:
            grad_x = next(dropped)
        if x is not None:
            grad_weight = gradient_of_weight(ctx.parameter, grad.flatten(0, -2).t(), next(dropped).flatten(0, -2))
        return grad_x, grad_weight, None, None
