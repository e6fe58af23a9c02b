"""Load-balancing loss of sparse layers, which does not depend on the layout.

It is the loss of `transformers` (`load_balancing_loss_func`; Fedus et al. 2022, arXiv 2101.03961, eq. 4 to 6), computed
per sample and weighted by the sample's n supervised tokens, so that a step does not depend on its micro-batches:

    sum over samples of   coefficient * n * E * sum_e f_e P_e
    f_e = choices of expert e / (L T)         P_e = sum of the router's probabilities of e / (L T)

with E experts, over the L sparse layers of the model and the T tokens of the sample, which are on the tp, sp and cp
ranks of a replica. Choices have no gradient, so the gradient of a probability is `factor` times the number of choices
of its expert by its sample in all layers. This number is known after the forward pass of the last pipeline stage:

    forward     each stage adds its statistics to the statistics that the previous stage appended to the hidden states
    last stage  sums the choices over the replica's ranks, and computes the loss
    backward    each stage sends the sums after the gradients, before the previous stage's routers need them
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_hetero.groups.platform import Function


@dataclass(frozen=True, eq=False)
class BalancedSamples:
    """The samples of a pack of one replica, and their factors in the loss.

    Attributes:
        by_token: int64 [n], the sample of each of this shard's n tokens without padding.
        factors: fp32 [samples], coefficient * supervised tokens * experts / (sparse layers * tokens)^2.
    """

    by_token: Tensor
    factors: Tensor


@dataclass(eq=False)
class Balance:
    """Statistics of a rank's tokens in one micro-batch, up to this stage.

    Attributes:
        samples: the samples of the pack.
        experts: number of experts.
        choices: int64 [samples, experts], number of choices of each expert.
        probabilities: fp32 [samples, experts], sums of the router's probabilities.
        totals: fp32 [samples, experts], choices in all layers and on all ranks of the replica; None until known.
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
        """Return the sample of each of `tokens` consecutive tokens of the shard, starting at token `first`."""
        return self.samples.by_token[first : first + tokens]

    @torch.no_grad()
    def count(self, samples: Tensor, chosen: Tensor, probabilities: Tensor) -> None:
        """Add to the statistics a layer's choices `chosen`, int64 [tokens, k], and `probabilities`, fp32 [tokens,
        experts]. `samples`: int64 [tokens], the sample of each token.
        """
        places = samples[:, None] * self.experts + chosen
        self.choices.view(-1).scatter_(0, places.flatten(), 1, reduce="add")
        # A matrix product adds in a fixed order; `index_add_` on a GPU does not.
        numbers = torch.arange(len(self.probabilities), device=samples.device)
        self.probabilities += (numbers[:, None] == samples).float() @ probabilities.float()

    def balanced(self, samples: Tensor, probabilities: Tensor) -> Tensor:
        """Return `probabilities` [tokens, experts] unchanged; the backward pass adds the gradient of the loss."""
        return _Balanced.apply(probabilities, samples, self)  # pyright: ignore[reportReturnType]

    @torch.no_grad()
    def loss(self, groups: Any) -> Tensor:
        """Return the balancing loss of the tokens of this rank's tp group, fp32 []. Only the last stage calls this
        method, which is collective over tp, sp and cp.
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
        """Return the number of rows that the statistics occupy when appended to `hidden` [S, 1, hidden]."""
        samples, experts = self.choices.shape
        return rows_of(samples, experts, hidden.shape[-1], hidden.element_size())

    def leave(self, hidden: Tensor) -> Tensor:
        """Append the statistics to `hidden` [S, 1, hidden], for the next stage."""
        return _Left.apply(hidden, self)  # pyright: ignore[reportReturnType]

    def arrive(self, hidden: Tensor) -> Tensor:
        """Add the statistics that earlier stages appended to `hidden`; return `hidden` without the appended rows."""
        return _Arrived.apply(hidden, self)  # pyright: ignore[reportReturnType]


_BYTES = 12
"""Size in bytes of the statistics of one sample and expert: choices and probabilities."""


def rows_of(samples: int, experts: int, hidden: int, itemsize: int) -> int:
    """Return the number of rows of `hidden` elements, each of `itemsize` bytes, that the statistics occupy."""
    return math.ceil(samples * experts * _BYTES / (hidden * itemsize))


def _packed(like: Tensor, rows: int, *tensors: Tensor) -> Tensor:
    """Return the bytes of `tensors`, padded with zeros, as `rows` rows like the rows of `like` [S, 1, hidden]."""
    flat = torch.cat([each.contiguous().view(-1).view(torch.uint8) for each in tensors])
    padded = flat.new_zeros(rows * like.shape[-1] * like.element_size())
    padded[: len(flat)] = flat
    return padded.view(like.dtype).view(rows, 1, like.shape[-1])


def _unpacked(rows: Tensor, *like: Tensor) -> list[Tensor]:
    """Return tensors with the dtypes and shapes of `like`, read from the bytes of `rows`."""
    flat, tensors, start = rows.contiguous().view(-1).view(torch.uint8), list[Tensor](), 0
    for each in like:
        # Clone the bytes, since a view in another dtype requires alignment.
        tensors.append(flat[start : start + each.nbytes].clone().view(each.dtype).view(each.shape))
        start += each.nbytes
    return tensors


class _Balanced(Function):
    @staticmethod
    def forward(ctx: Any, probabilities: Tensor, samples: Tensor, balance: Balance) -> Tensor:
        ctx.samples, ctx.balance = samples, balance
        return probabilities.view_as(probabilities)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        totals, factors = ctx.balance.totals, ctx.balance.samples.factors
        assert totals is not None, "the last stage runs before any backward pass"
        return grad + (totals * factors[:, None]).index_select(0, ctx.samples), None, None


class _Left(Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, balance: Balance) -> Tensor:
        ctx.balance, ctx.tokens = balance, len(hidden)
        rows = balance.rows_beside(hidden)
        return torch.cat([hidden, _packed(hidden, rows, balance.choices, balance.probabilities)])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        (ctx.balance.totals,) = _unpacked(grad[ctx.tokens :], ctx.balance.probabilities)
        return grad[: ctx.tokens], None


class _Arrived(Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, balance: Balance) -> Tensor:
        ctx.balance = balance
        tokens = len(hidden) - balance.rows_beside(hidden)
        choices, probabilities = _unpacked(hidden[tokens:], balance.choices, balance.probabilities)
        balance.choices += choices
        balance.probabilities += probabilities
        return hidden[:tokens].clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        balance = ctx.balance
        assert balance.totals is not None, "the last stage runs before any backward pass"
        rows = balance.rows_beside(grad)
        return torch.cat([grad, _packed(grad, rows, balance.totals)]), None
