"""The loss that balances experts is that of `transformers`, sample by sample, and survives the way between stages."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.models.qwen3_vl_moe.modeling_qwen3_vl_moe import load_balancing_loss_func

from megatron_hetero.groups.local_group import LocalGroup
from megatron_hetero.models.layers.balance_loss import Balance, BalancedSamples, rows_of

EXPERTS, TOP_K, LAYERS, LENGTHS, SUPERVISED = 6, 2, 3, (5, 1, 8), (3, 0, 4)
COEFFICIENT = 0.3
ALONE: Any = SimpleNamespace(**{name: LocalGroup((0,), 0, name) for name in ("tp", "sp", "context")})


def samples(coefficient: float = COEFFICIENT) -> BalancedSamples:
    lengths, supervised = torch.tensor(LENGTHS), torch.tensor(SUPERVISED)
    factors = coefficient * supervised * EXPERTS / (LAYERS * lengths) ** 2
    return BalancedSamples(torch.arange(len(LENGTHS)).repeat_interleave(lengths), factors)


def logits_of_layers() -> list[Tensor]:
    generator = torch.manual_seed(2)
    return [torch.randn(sum(LENGTHS), EXPERTS, generator=generator).requires_grad_() for _ in range(LAYERS)]


def layer(balance: Balance, logits: Tensor) -> Tensor:
    """What a sparse layer makes of its router's logits: something to differentiate."""
    probabilities, of_tokens = logits.softmax(-1), balance.of(0, len(logits))
    balance.count(of_tokens, probabilities.topk(TOP_K).indices, probabilities)
    return balance.balanced(of_tokens, probabilities).square().sum()


def expected(logits: list[Tensor]) -> Tensor:
    """By `transformers`, of one sample at a time."""
    parts = zip(*(each.split(LENGTHS) for each in logits), strict=True)
    losses = [load_balancing_loss_func(tuple(part), EXPERTS, TOP_K) for part in parts]
    return COEFFICIENT * sum(n * loss for n, loss in zip(SUPERVISED, losses, strict=True))  # pyright: ignore[reportReturnType]


def test_value_and_gradients() -> None:
    ours, theirs = logits_of_layers(), logits_of_layers()
    balance = Balance(samples(), EXPERTS)
    out = torch.stack([layer(balance, each) for each in ours]).sum()
    added = balance.loss(ALONE)
    out.backward()
    wanted = expected(theirs)
    (wanted + sum(each.softmax(-1).square().sum() for each in theirs)).backward()
    assert float(added) == pytest.approx(wanted.item(), rel=1e-6)
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine.grad, other.grad)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("hidden", [8, 100])
def test_statistics_travel_between_stages(dtype: torch.dtype, hidden: int) -> None:
    """Two stages of one layer and of two, whose statistics are exact in any dtype of hidden states."""
    ours = logits_of_layers()
    first, last = Balance(samples(), EXPERTS), Balance(samples(), EXPERTS)
    hidden_states = torch.randn(4, 1, hidden, dtype=dtype).requires_grad_()
    sent = first.leave(hidden_states + layer(first, ours[0]).to(dtype))
    assert len(sent) == 4 + rows_of(len(LENGTHS), EXPERTS, hidden, dtype.itemsize)
    received = sent.detach().clone().requires_grad_()
    arrived = last.arrive(received)
    assert torch.equal(arrived, sent[:4])
    out = arrived.double().sum() + layer(last, ours[1]) + layer(last, ours[2])
    added = last.loss(ALONE)
    out.backward()
    sent.backward(received.grad)
    assert float(added) == pytest.approx(expected(logits_of_layers()).item(), rel=1e-6)
    assert torch.equal(first.totals, last.totals) and first.totals is not None  # pyright: ignore[reportArgumentType]
    assert int(first.totals.sum()) == LAYERS * TOP_K * sum(LENGTHS)
    assert hidden_states.grad is not None and torch.equal(hidden_states.grad, torch.ones_like(hidden_states))


def test_a_pack_without_samples() -> None:
    none = BalancedSamples(torch.zeros(0, dtype=torch.int64), torch.zeros(0))
    balance = Balance(none, EXPERTS)
    hidden = torch.randn(2, 1, 8)
    assert torch.equal(balance.arrive(balance.leave(hidden)), hidden) and float(balance.loss(ALONE)) == 0
