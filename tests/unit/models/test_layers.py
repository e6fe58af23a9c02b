"""What layers are made of, against what it is by definition and in `transformers`, with their gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VLRMSNorm, rotate_half

from megatron_hetero.estimate.allocations import address_of
from megatron_hetero.models.layers import mlp, rotary
from megatron_hetero.models.layers.compiled import NormWeights
from megatron_hetero.models.layers.linear import gradient_of_weight
from megatron_hetero.models.layers.mlp import swiglu
from megatron_hetero.models.layers.norms import LayerNorm, RMSNorm
from megatron_hetero.models.layers.rotary import rotate, rotated_heads, split_heads
from megatron_hetero.models.layers.sequences import Order
from tests.support import head_passes
from tests.unit.models.layers import norm_of, with_gradients

HALF_ULP = 2**-8
"""Of bfloat16, relative."""


@settings(max_examples=30)
@given(st.integers(0, 9), st.integers(1, 33), st.sampled_from([(), (1,), (3,)]))
def test_an_rms_norm_is_that_of_transformers(rows: int, width: int, between: tuple[int, ...]) -> None:
    norm, theirs = norm_of(RMSNorm, width, torch.float32), Qwen2_5_VLRMSNorm(width, eps=1e-6)
    theirs.load_state_dict(norm.state_dict())
    x = torch.randn(rows, *between, width)
    results = [[*with_gradients(each, x), each.weight.grad] for each in (norm, theirs)]
    torch.testing.assert_close(*results, rtol=1e-5, atol=1e-5)


def test_in_bfloat16_norms_are_computed_in_fp32_and_rounded_once() -> None:
    norm, wide = norm_of(RMSNorm, 64, torch.bfloat16), norm_of(RMSNorm, 64, torch.float32)
    wide.load_state_dict(norm.state_dict())
    x = torch.randn(50, 1, 64).bfloat16()
    out, of_x = with_gradients(norm, x)
    exact, exact_of_x = with_gradients(wide, x.float())
    assert out.dtype == of_x.dtype == torch.bfloat16
    torch.testing.assert_close(out.float(), exact, rtol=HALF_ULP, atol=0)
    # The gradient of the output has been rounded, too.
    assert (of_x.float() - exact_of_x).norm() < 2 * HALF_ULP * exact_of_x.norm()


@pytest.mark.parametrize("kind, dtype, numbers", [(RMSNorm, torch.bfloat16, 1), (LayerNorm, torch.float32, 2)])
def test_a_norm_keeps_its_input_and_a_number_or_two_for_each_row(kind: Any, dtype: torch.dtype, numbers: int) -> None:
    norm, x, kept = norm_of(kind, 64, dtype), torch.randn(50, 1, 64).to(dtype).requires_grad_(), []

    def keep(tensor: Tensor) -> Tensor:
        kept.extend([] if isinstance(tensor, torch.nn.Parameter) else [tensor])
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        norm(x)
    assert sum(tensor.nbytes for tensor in kept) == x.nbytes + numbers * 4 * len(x)


def turned(x: Tensor, table: Tensor) -> Tensor:
    """By definition."""
    x, rest = x.split((table.shape[2], x.shape[-1] - table.shape[2]), dim=-1)
    return torch.cat((x * table[0][:, None] + rotate_half(x) * table[1][:, None], rest), dim=-1)


@settings(max_examples=30)
@given(st.integers(0, 7), st.integers(0, 3), st.integers(1, 3), st.integers(1, 3), st.sampled_from([2, 4, 6]))
def test_heads_are_split_and_rotated(tokens: int, padding: int, groups: int, queries: int, width: int) -> None:
    """Of any table: the adjoint needs no two halves that are alike. A narrow one leaves the rest of a head."""
    dim = 6
    mixed, table = torch.randn(tokens + padding, 1, groups, (queries + 2) * dim), torch.randn(2, tokens, width)

    def joined(mixed: Tensor) -> Tensor:
        return torch.cat(rotated_heads(mixed, table, dim), dim=1)

    def by_definition(mixed: Tensor) -> Tensor:
        q, k, v = mixed.squeeze(1)[:tokens].unflatten(-1, (queries + 2, dim)).split((queries, 1, 1), dim=2)
        return torch.cat((turned(q.flatten(1, 2), table), turned(k.flatten(1, 2), table), v.flatten(1, 2)), dim=1)

    torch.testing.assert_close(with_gradients(joined, mixed), with_gradients(by_definition, mixed))


@settings(max_examples=30)
@given(st.integers(0, 7), st.integers(1, 3), st.integers(1, 3), st.sampled_from([2, 4, 6]))
def test_heads_are_rotated_in_one_pass_as_in_several(padding: int, groups: int, queries: int, width: int) -> None:
    """Each way, as a compiler gets it."""
    dim, rows = 6, 8
    table = torch.randn(2, rows - padding, width)
    mixed = torch.randn(rows, 1, groups, (queries + 2) * dim, requires_grad=True)
    outs = rotary.rotated_heads(mixed, table, dim)
    grads = [torch.randn_like(out) for out in outs]
    torch.autograd.backward(outs, grads)
    made = rotary.heads_turned(mixed.detach(), table[0], table[1], dim)
    back = rotary.heads_turned_back(grads[0], grads[1], grads[2], table[0], table[1], table.new_empty(rows, 0))
    torch.testing.assert_close([*made, back.view(mixed.shape)], [*outs, mixed.grad])
    assert all(out.is_contiguous() for out in made), "as kernels of attention want them"


@pytest.mark.parametrize("members", [1, 2])
@pytest.mark.parametrize("width, tokens", [(8, 9), (4, 9), (8, 7)])
def test_normed_heads(tokens: int, width: int, members: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """As norms and rotations one after the other, with the gradients of the projection and of the weights. Values are a
    view of the projection, which is saved.
    """
    head_passes.replace_kernels(monkeypatch)
    dim, norms = 8, [norm_of(RMSNorm, 8, torch.float32, 1) for _ in "qk"]
    mixed, table = torch.randn(9, 1, 2, 5 * dim), torch.randn(2, tokens, width)

    def in_one_pass(mixed: Tensor) -> Tensor:
        weights = [NormWeights.of(norm) for norm in norms]
        saved = list[Tensor]()
        with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x):
            outs = rotated_heads(mixed, table, dim, members=members, norms=weights)
        assert [out.shape for out in outs] == [
            (tokens, heads, dim) if members == 1 else (tokens, members, heads // members, dim) for heads in (6, 2, 2)
        ]
        assert {address_of(x) for x in saved} == set(map(address_of, (mixed, table, *(norm.weight for norm in norms))))
        assert address_of(outs[2]) == address_of(mixed)
        return torch.cat([x.flatten(1, -2) for x in outs], dim=1)

    def one_by_one(mixed: Tensor) -> Tensor:
        q, k, v = (x.flatten(1, 2) for x in split_heads(mixed, tokens, dim))
        return torch.cat([*(rotate(norm(x), table) for norm, x in zip(norms, (q, k), strict=True)), v], dim=1)

    found = list[Any]()
    for function in (in_one_pass, one_by_one):
        found.append([with_gradients(function, mixed), [norm.weight.grad for norm in norms]])
        for norm in norms:
            norm.weight.grad = None
    torch.testing.assert_close(*found, rtol=1e-5, atol=1e-5)


def test_orders_go_backward_as_their_adjoints() -> None:
    """Of five tokens in six rows."""
    order = Order(torch.tensor([0, 2, 3, 1, 4]), torch.tensor([0, 3, 1, 2, 4, 5]))
    x, back = torch.randn(6, 2), torch.randn(5, 2)
    rows, tokens = x.clone().requires_grad_(), back.clone().requires_grad_()
    order.chosen(rows).backward(back)
    order.placed(tokens).backward(x)
    assert torch.equal(order.chosen(order.placed(back)), back)
    assert rows.grad is not None and tokens.grad is not None
    assert torch.equal(rows.grad, order.placed(back)) and torch.equal(tokens.grad, order.chosen(x))


def test_a_rotation_is_rounded_once() -> None:
    x, angles = torch.randn(9, 2, 8).bfloat16(), torch.randn(9, 8)
    table = torch.stack((angles.cos(), angles.sin()))
    exact = turned(x.double(), table.double()).bfloat16()
    assert torch.equal(rotate(x, table), exact)
    torch.testing.assert_close(rotary.turned(x, *table), exact)
    [_, of_x] = with_gradients(lambda x: rotate(x, table), x)
    grad = torch.linspace(-1, 1, x.numel(), dtype=x.dtype).view_as(x)
    torch.testing.assert_close(rotary.turned_back(grad, *table), of_x)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_gates_are_those_of_their_definition(dtype: torch.dtype) -> None:
    wide = torch.randn(7, 1, 24).to(dtype)
    exact = with_gradients(lambda x: F.silu(x.chunk(2, dim=-1)[0]) * x.chunk(2, dim=-1)[1], wide)
    torch.testing.assert_close(with_gradients(swiglu, wide), exact)
    grad = torch.randn(7, 1, 12).to(dtype)
    local = wide.clone().requires_grad_()
    (of_wide,) = torch.autograd.grad(mlp.swiglu_forward(local), local, grad)
    torch.testing.assert_close(mlp.swiglu_backward(grad, wide)[0], of_wide)
    torch.testing.assert_close(wide, of_wide)  # where it was written


def test_a_second_backward_pass_through_gates_is_refused() -> None:
    """The first one has overwritten what it was given."""
    wide = torch.randn(7, 1, 24, requires_grad=True)
    out = swiglu(wide * 1)
    out.sum().backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


@pytest.mark.parametrize("total", [torch.float32, torch.bfloat16], ids=str)
def test_a_gradient_is_added_at_once_where_there_is_a_product_for_it(total: torch.dtype) -> None:
    """In fp32, of products in bfloat16, there is none on a CPU."""
    parameter: Any = torch.nn.Parameter(torch.randn(3, 5).bfloat16())
    left, right = torch.rand(3, 7).bfloat16(), torch.rand(7, 5).bfloat16()
    assert torch.equal(gradient_of_weight(parameter, left, right), left @ right), "without Megatron's wrapper"
    parameter.main_grad, parameter.grad_added_to_main_grad = torch.ones(3, 5, dtype=total), False
    got = gradient_of_weight(parameter, left, right)
    assert parameter.grad_added_to_main_grad is (total == torch.bfloat16)
    if parameter.grad_added_to_main_grad:
        parameter.zero_out_wgrad = True  # Megatron's, of a weight that has a gradient besides
        assert not gradient_of_weight(parameter, left[:, :0], right[:0]).any()
        torch.testing.assert_close(parameter.main_grad, torch.ones(3, 5, dtype=total) + left @ right)
        assert got.shape == parameter.shape and got.dtype == parameter.dtype, "for autograd to pass on"
    else:
        assert torch.equal(got, left @ right)
