"""Short convolution, against PyTorch's of each sequence by itself."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._dynamo.utils import counters

from megatron_hetero.groups.platform import CPU
from megatron_hetero.models.layers import short_convolution
from megatron_hetero.models.layers.compiled import run
from megatron_hetero.models.layers.sequences import Sequences
from megatron_hetero.models.layers.short_convolution import activated, convolved, gradients

CHANNELS = 6
PACKS = (
    st.lists(st.sampled_from([1, 2, 3, 63, 64, 65, 127]) | st.integers(0, 70), min_size=1, max_size=6)
    .map(tuple)
    .filter(any)
)


def inputs_of(lengths: tuple[int, ...], taps: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens, weight, and gradient of the result."""
    draw = torch.Generator().manual_seed(seed)
    sizes = (sum(lengths), CHANNELS), (CHANNELS, taps), (sum(lengths), CHANNELS)
    x, weight, grad = (torch.randn(size, generator=draw) for size in sizes)
    return x, weight, grad


def ours(x: Tensor, weight: Tensor, grad: Tensor, lengths: tuple[int, ...]) -> list[Tensor]:
    x, weight = x.clone().requires_grad_(), weight.clone().requires_grad_()
    out = convolved(x, weight, Sequences(lengths, CPU))
    return [out.detach(), *torch.autograd.grad(out, (x, weight), grad)]


def as_on_a_gpu(x: Tensor, weight: Tensor, grad: Tensor, lengths: tuple[int, ...]) -> list[Tensor]:
    offsets = Sequences(lengths, CPU).offsets
    return [activated(x, weight, offsets), *gradients(grad, x, weight, offsets)]


def expected(x: Tensor, weight: Tensor, grad: Tensor, lengths: tuple[int, ...]) -> list[Tensor]:
    leaves = [x.double().requires_grad_(), weight.double().requires_grad_()]
    padded = [F.pad(one.t(), (weight.shape[1] - 1, 0)) for one in leaves[0].split(lengths) if len(one)]
    out = torch.cat([F.silu(F.conv1d(one[None], leaves[1][:, None], groups=len(weight))[0].t()) for one in padded])
    return [out.detach(), *torch.autograd.grad(out, leaves, grad.double())]


def close(found: list[Tensor], wanted: list[Tensor]) -> None:
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a.double(), b, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("rows", [1, 2, 5, 1000])
@pytest.mark.parametrize("taps", [1, 2, 4, 7])
def test_sequences_one_at_a_time(rows: int, taps: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(short_convolution, "ROWS", rows * CHANNELS)
    for lengths in ((1, 2, 3, 0, 63, 64, 65, 127), (1,), (3,), (0, 9), (1, 1, 1, 1, 1)):
        inputs = inputs_of(lengths, taps)
        close(ours(*inputs, lengths), expected(*inputs, lengths))
        close(as_on_a_gpu(*inputs, lengths), expected(*inputs, lengths))


@settings(max_examples=40)
@given(PACKS, st.integers(1, 6), st.data())
def test_sequences_do_not_mix(lengths: tuple[int, ...], taps: int, data: st.DataObject) -> None:
    changed = data.draw(st.sampled_from([i for i, length in enumerate(lengths) if length]))
    x, weight, grad = inputs_of(lengths, taps)
    number = Sequences(lengths, CPU).numbers
    other = torch.where((number == changed)[:, None], x + 1, x)
    for compute in (ours, as_on_a_gpu):
        before, after = (compute(each, weight, grad, lengths) for each in (x, other))
        for a, b in zip(before[:2], after[:2], strict=True):
            assert torch.equal(a[number != changed], b[number != changed])
            assert not torch.equal(a[number == changed], b[number == changed])


def test_half_precision_is_rounded_once() -> None:
    lengths = (9, 1, 30)
    x, weight, grad = (each.bfloat16() for each in inputs_of(lengths, 4))
    wanted = expected(x, weight, grad, lengths)
    for found in (ours(x, weight, grad, lengths), as_on_a_gpu(x, weight, grad, lengths)):
        for a, b in zip(found, wanted, strict=True):
            # Half a unit in the last place of 8 bits, and what fp32 adds.
            torch.testing.assert_close(a.double(), b, rtol=2**-8, atol=1e-5)
        assert found[0].dtype == found[1].dtype == torch.bfloat16


def test_saves_its_input_only() -> None:
    saved: list[Tensor] = []
    x, weight, _ = inputs_of((9, 3), 4)
    with torch.autograd.graph.saved_tensors_hooks(lambda each: saved.append(each) or each, lambda each: each):
        convolved(x.requires_grad_(), weight.requires_grad_(), Sequences((9, 3), CPU))
    assert [each.data_ptr() for each in saved] == [x.data_ptr(), weight.data_ptr()]


def test_gradient_of_one_input() -> None:
    lengths = (9, 3)
    x, weight, grad = inputs_of(lengths, 4)
    _, of_x, of_weight = ours(x, weight, grad, lengths)
    for wanted, gradient in ((x, of_x), (weight, of_weight)):
        wanted.requires_grad_()
        out = convolved(x, weight, Sequences(lengths, CPU))
        assert torch.equal(torch.autograd.grad(out, wanted, grad)[0], gradient)
        wanted.requires_grad_(False)


def test_tensors_without_values() -> None:
    x, weight = (torch.empty(*size, device="meta", requires_grad=True) for size in ((12, 6), (6, 4)))
    out = convolved(x, weight, Sequences((9, 3), torch.device("meta")))
    assert [each.shape for each in (out, *torch.autograd.grad(out.sum(), (x, weight)))] == [(12, 6), (12, 6), (6, 4)]


@pytest.mark.long  # The compiler takes long.
def test_compiled_for_any_number_of_tokens() -> None:
    torch._dynamo.reset()
    counters.clear()
    for lengths in ((9, 3, 1), (1, 1), (40,)):
        x, weight, grad = inputs_of(lengths, 4)
        offsets, fixed = Sequences(lengths, CPU).offsets, torch.nn.Parameter(weight, requires_grad=False)
        found = [run(activated, x, fixed, offsets), *run(gradients, grad, x, fixed, offsets)]
        close(found, expected(x, weight, grad, lengths))
    assert counters["stats"]["unique_graphs"] == 2
