"""What modules read in a micro-batch, on the device."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from megatron_hetero.models.layers.attention import AttentionPlan


@dataclass(frozen=True)
class EncoderInput:
    """What one rank encodes in one micro-batch.

    `patches`: [patches of this rank, elements of a patch], padding included; None on pipeline stages after the first.
    `positions`: int64 [dims, n], of the shard's n real patches (of pictures: row and column first).
    `attention`: windows of the shard, sequences of the replica. `padding`: how many of this rank's patches, the last
    ones, pad it.
    """

    patches: Tensor | None
    positions: Tensor
    attention: AttentionPlan
    padding: int


@dataclass(frozen=True)
class TextInput:
    """What one rank's language model reads in one micro-batch: S tokens of its replica's pack, padding included. The
    ranks of a tp group read the same, and so do all pipeline stages.

    `tokens`: int64 [S]. `positions`: int64 [dims, n] for the n real tokens. `supervised`: int64 [t], which of the n
    tokens predict, and `targets`: int64 [t], what they must predict. `rows_at`: by the output of the encoders, int64
    [rows], where this rank's rows of it go in its shard of the hidden states. `attention`: the samples of the pack.
    `hits`: bool [t], which the last stage fills where it is given: whether the likeliest token is the target.
    """

    tokens: Tensor
    positions: Tensor
    supervised: Tensor
    targets: Tensor
    rows_at: Mapping[str, Tensor]
    attention: AttentionPlan
    hits: Tensor | None = None
