"""Packs of samples for tests of attention: assigned to ranks, and attended to by definition."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from megatron_hetero.groups.megatron import ModuleGroups
from megatron_hetero.groups.platform import CPU
from megatron_hetero.layout.context import contiguous_segments, zigzag_segments, zigzag_tokens
from megatron_hetero.models.layers.attention import AttentionParams
from megatron_hetero.models.layers.segments import PackedSegments


def naive(q_nHD: Tensor, k_nHD: Tensor, v_nHD: Tensor, lengths: tuple[int, ...], causal: bool) -> Tensor:
    """Softmax over a full matrix of scores with everything masked that is not to be seen: [n, H * D]."""
    copies = q_nHD.shape[1] // k_nHD.shape[1]
    k, v = (x.repeat_interleave(copies, dim=1) for x in (k_nHD, v_nHD))
    owner = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths, dtype=torch.int64))
    seen = owner[:, None] == owner[None, :]
    if causal:
        seen &= torch.ones_like(seen).tril()
    scores = torch.einsum("qhd,khd->hqk", q_nHD, k) / q_nHD.shape[2] ** 0.5
    weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
    return torch.einsum("hqk,khd->qhd", weights, v).flatten(1)


class Assigned(NamedTuple):
    """Positions of a rank's tokens in the pack, and what they attend to."""

    mine: np.ndarray
    params: AttentionParams


def assign(lengths: tuple[int, ...], groups: ModuleGroups, causal: bool, how: str) -> Assigned:
    """Assign a pack to `cp` (zigzag where causal), then to `sp`; `how` as in `split`."""
    sp, cp, member = groups.sp.size(), groups.context.size(), groups.context.rank()
    if causal:
        tokens, segments = zigzag_tokens(lengths, cp), zigzag_segments(lengths, cp, member)
    else:
        shares = split(sum(lengths), cp, how)
        tokens = np.split(np.arange(sum(lengths)), np.cumsum(shares)[:-1])
        segments = contiguous_segments(lengths, shares, member)
    cp_lengths = tuple(len(part) for part in tokens)
    sp_lengths = split(cp_lengths[member], sp, how)
    mine = np.split(tokens[member], np.cumsum(sp_lengths)[:-1])[groups.sp.rank()]
    packed = PackedSegments.of_segments(segments, CPU, cp_lengths)
    return Assigned(mine, AttentionParams(packed, sp_lengths, cp_lengths, lengths=lengths))


def split(total: int, members: int, how: str) -> tuple[int, ...]:
    """`total` as a sum of `members` terms: `even`, `ragged` (some are none), or `last` (all at the last member)."""
    weights = {"even": [1] * members, "ragged": [3, 0, 1, 2, 1, 0, 5, 1][:members], "last": [0] * (members - 1) + [1]}
    bounds = np.cumsum([0, *weights[how]]) * total // sum(weights[how])
    return tuple(int(n) for n in np.diff(bounds))
