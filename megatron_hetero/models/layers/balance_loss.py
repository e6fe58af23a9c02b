"""Load-balancing loss of sparse layers, which does not depend on the layout.

It is that of `transformers` (`load_balancing_loss_func`; Fedus et al. 2022, arXiv 2101.03961, eq. 4 to 6), of each
sample by itself and weighted by its n supervised tokens, so that a step is the same whatever its micro-batches:

    sum over samples of   coefficient * n * E * sum_e f_e P_e
    f_e = choices of expert e / (L T)         P_e = sum of the router's probabilities of e / (L T)

over the L sparse layers of the model and the T tokens of the sample, which are on the tp, sp and cp ranks of a replica.
Choices have no gradient, so that each probability's is `factor` times the choices of its expert by its sample, in all
layers. These are known once the last pipeline stage has run forward:

    forward    statistics of a rank travel behind its hidden states from stage to stage, and grow
    last stage sums choices over the replica's ranks; the loss follows
    backward   sums travel behind gradients from stage to stage, before the stage's routers need them
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable


@dataclass(frozen=True, eq=False)
class BalancedSamples:
    """Samples of a replica's pack, for the loss.

    Attributes:
        of_tokens: int64 [n], the sample of each of this shard's n real tokens.
        factors: fp32 [samples], coefficient * supervised tokens * experts / (sparse layers * tokens)^2.
    """

    of_tokens: Tensor
    factors: Tensor


@dataclass(eq=False)
class Balance:
    """Statistics of a rank's tokens in one micro-batch, up to this stage.

    `choices` int64 and `probabilities` fp32 [samples, experts]: numbers of choices and sums of probabilities. `totals`:
    choices in all layers and on all ranks of the replica, fp32, once they are known.
    """

    samples: BalancedSamples
    experts: int
    choices: Tensor = field(init=False)
    probabilities: Tensor = field(init=False)
    totals: Tensor | None = None

    def __post_init__(self) -> None:
        factors = self.samples.factors
        self.choices = torch.zeros(len(factors), self.experts, dtype=torch.int64, device=factors.device)
        self.probabilities = torch.zeros(len(factors), self.experts, device=factors.device)

    def of(self, first: int, tokens: int) -> Tensor:
        """Return the samples of `tokens` of the shard, from the token `first` on."""
        return self.samples.of_tokens[first : first + tokens]

    @torch.no_grad()
    def count(self, of_tokens: Tensor, chosen: Tensor, probabilities: Tensor) -> None:
        """Add a layer's choices int64 [tokens, k] and probabilities fp32 [tokens, experts]. `of_tokens`: samples."""
        places = of_tokens[:, None] * self.experts + chosen
        self.choices.view(-1).scatter_(0, places.flatten(), 1, reduce="add")
        # A product sums in one order, which `index_add_` does not on a GPU.
        numbers = torch.arange(len(self.probabilities), device=of_tokens.device)
        self.probabilities += (numbers[:, None] == of_tokens).float() @ probabilities.float()

    def balanced(self, of_tokens: Tensor, probabilities: Tensor) -> Tensor:
        """Return `probabilities` [tokens, experts] with the gradient of the loss in the backward pass."""
        return _Balanced.apply(probabilities, of_tokens, self)  # pyright: ignore[reportReturnType]

    @torch.no_grad()
    def loss(self, groups: Any) -> Tensor:
        """Return the loss that counts on this rank of the last stage, fp32 []: that of the tokens of its tp group.
        Collective over tp, sp and cp.
        """
        totals = self.choices
        for group in (groups.tp, groups.sp, groups.context):
            if group.size() > 1:
                dist.all_reduce(totals, group=group)
        self.totals = totals.float()
        if groups.tp.size() > 1:
            dist.all_reduce(self.probabilities, group=groups.tp)
        return torch.dot((self.totals * self.probabilities).sum(1), self.samples.factors)

    # ---------------------------------------------------------------------------- between pipeline stages

    def rows_beside(self, hidden: Tensor) -> int:
        """Return how many rows of `hidden` [S, 1, hidden] the statistics take."""
        samples, experts = self.choices.shape
        return rows_of(samples, experts, hidden.shape[-1], hidden.element_size())

    def leave(self, hidden: Tensor) -> Tensor:
        """Return `hidden` [S, 1, hidden] with the statistics behind it."""
        return _Left.apply(hidden, self)  # pyright: ignore[reportReturnType]

    def arrive(self, hidden: Tensor) -> Tensor:
        """Take the statistics of earlier stages from behind hidden states, and return these alone."""
        return _Arrived.apply(hidden, self)  # pyright: ignore[reportReturnType]


_BYTES = 12
"""Bytes of one sample's statistics of an expert: choices and probabilities."""


def rows_of(samples: int, experts: int, hidden: int, itemsize: int) -> int:
    """Return the rows of `hidden` elements, of so many bytes, that statistics take."""
    return math.ceil(samples * experts * _BYTES / (hidden * itemsize))


def _packed(like: Tensor, rows: int, *parts: Tensor) -> Tensor:
    """Return the bits of `parts` as `rows` of hidden states `like` [S, 1, hidden]."""
    flat = torch.cat([part.contiguous().view(-1).view(torch.uint8) for part in parts])
    padded = flat.new_zeros(rows * like.shape[-1] * like.element_size())
    padded[: len(flat)] = flat
    return padded.view(like.dtype).view(rows, 1, like.shape[-1])


def _unpacked(rows: Tensor, *like: Tensor) -> list[Tensor]:
    """Return tensors like `like` from the bits in `rows`."""
    flat, found, start = rows.contiguous().view(-1).view(torch.uint8), list[Tensor](), 0
    for each in like:
        # Copied, since views of other dtypes have to be aligned.
        found.append(flat[start : start + each.nbytes].clone().view(each.dtype).view(each.shape))
        start += each.nbytes
    return found


class _Balanced(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, probabilities: Tensor, of_tokens: Tensor, balance: Balance) -> Tensor:
        ctx.of_tokens, ctx.balance = of_tokens, balance
        return probabilities.view_as(probabilities)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        totals, factors = ctx.balance.totals, ctx.balance.samples.factors
        assert totals is not None, "the last stage runs before any backward pass"
        return grad + (totals * factors[:, None]).index_select(0, ctx.of_tokens), None, None


class _Left(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, balance: Balance) -> Tensor:
        ctx.balance, ctx.own = balance, len(hidden)
        rows = balance.rows_beside(hidden)
        return torch.cat([hidden, _packed(hidden, rows, balance.choices, balance.probabilities)])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        (ctx.balance.totals,) = _unpacked(grad[ctx.own :], ctx.balance.probabilities)
        return grad[: ctx.own], None


class _Arrived(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, balance: Balance) -> Tensor:
        ctx.balance = balance
        own = len(hidden) - balance.rows_beside(hidden)
        choices, probabilities = _unpacked(hidden[own:], balance.choices, balance.probabilities)
        balance.choices += choices
        balance.probabilities += probabilities
        return hidden[:own].clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        balance = ctx.balance
        assert balance.totals is not None, "the last stage runs before any backward pass"
        rows = balance.rows_beside(grad)
        return torch.cat([grad, _packed(grad, rows, balance.totals)]), None
