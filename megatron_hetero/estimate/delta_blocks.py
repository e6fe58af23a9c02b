"""The gated delta rule for measuring its memory on `meta`, in a time that does not grow with its sequences.

The rule runs block after block and saves the state between two of them. Of blocks in a row with the same sizes one is
run, and the states before the others are allocated only. On a GPU it has the memory of the PyTorch rule or of
flash-linear-attention, whichever takes more, as the planning host need not have that package.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from megatron_hetero.models.layers.chunks import BLOCK, Chunks, TokenBlock, blocks_of, chunk_length
from megatron_hetero.models.layers.delta_rule import delta_rule
from megatron_hetero.models.layers.sequences import Sequences

META = torch.device("meta")
FLA_CHUNK = 64
"""Tokens of a chunk of flash-linear-attention."""


def measured_rule(device: str) -> Callable[..., Tensor]:
    """Return a function with the memory of `delta_rule` on a type of device, "cuda" or "cpu", for tensors on `meta`."""
    places = BLOCK[device == "cpu"]

    def rule(
        q_nhK: Tensor, k_nhK: Tensor, v_nHV: Tensor, decay_nH: Tensor, beta_nH: Tensor, sequences: Sequences
    ) -> Tensor:
        chunks, others = abridged(sequences.lengths, places)
        (H, V), K = v_nHV.shape[1:], q_nhK.shape[2]
        states = [v_nHV.new_empty(members * H, K, V, dtype=torch.float32) for members in others]
        some: Any = SimpleNamespace(chunks=chunks)
        out = delta_rule(q_nhK, k_nhK, v_nHV, decay_nH, beta_nH, some)
        work = fla_workspace(q_nhK.shape, v_nHV.shape) if device == "cuda" and v_nHV.itemsize == 2 else 0
        return _Saving.apply(work, out, *states)  # pyright: ignore[reportReturnType]

    return rule


@lru_cache(maxsize=64)
def abridged(lengths: tuple[int, ...], places: int) -> tuple[Chunks, tuple[int, ...]]:
    """Return blocks of at most `places` tokens of sequences of these lengths, without those that have the sizes of the
    one before them, and of each of those the number of its sequences if it begins with a saved state.
    """
    length, blocks, others = chunk_length(lengths), list[TokenBlock](), list[int]()
    for steps, starts, follows, tokens in blocks_of(lengths, length, places // length):
        if blocks and blocks[-1][:3] == (steps, starts, follows):
            others += [] if starts else [steps[0]]
            continue
        rows = torch.empty(tokens.size, dtype=torch.int64, device=META)
        mask = torch.empty(*tokens.shape, 1, device=META)
        blocks.append(TokenBlock(steps, starts, follows, length, rows, rows, mask))
    return Chunks(length, tuple(blocks)), tuple(others)


def fla_workspace(keys: tuple[int, ...], values: tuple[int, ...]) -> int:
    """Return the bytes that the backward pass of fla-core's `chunk_gated_delta_rule` takes besides its inputs, of
    shapes [tokens, heads, width].

    In half precision, per token and value head: shares of two states of a chunk, a row of its inverse, scales, and six
    and four tensors as wide as keys and as values; per key head four more. Its functions hold them to their end
    (`chunk_gated_delta_rule_bwd` in fla/ops/gated_delta_rule/chunk.py).
    """
    (tokens, key_heads, key), (_, heads, value) = keys, values
    of_head = 2 * key * value // FLA_CHUNK + FLA_CHUNK + 11 + 6 * key + 4 * value
    return 2 * tokens * (heads * of_head + 4 * key_heads * key)


class _Saving(torch.autograd.Function):
    """Saves `states` for the backward pass of `out`, which it passes on, and takes `work` bytes in that pass."""

    @staticmethod
    def forward(ctx: Any, work: int, out: Tensor, *states: Tensor) -> Tensor:
        ctx.save_for_backward(*states)
        ctx.work = work
        return out.view_as(out)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        torch.empty(ctx.work, dtype=torch.uint8, device=META)
        return None, grad, *(None for _ in ctx.saved_tensors)
