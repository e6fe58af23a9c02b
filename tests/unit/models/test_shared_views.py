"""What all layers of a module share in a micro-batch: views of the table of angles, and marks for the compiler."""

from __future__ import annotations

import gc
import weakref
from typing import Any
from unittest import mock

import pytest
import torch

from megatron_hetero.models.layers.compiled import run
from megatron_hetero.models.layers.rotary import AxialRotary, rotate, rotated_heads, unbound


def _table(tokens: int, width: int) -> Any:
    return AxialRotary(1e4, width).table(torch.arange(2 * tokens).view(2, tokens))


def test_layers_and_passes_share_the_views_of_a_table() -> None:
    table, mixed = _table(9, 8), torch.randn(9, 1, 2, 4 * 8, requires_grad=True)
    q, *_ = rotated_heads(mixed, table, 8)
    first = dict(table.stored_views)
    q, k, v = rotated_heads(mixed, table, 8)
    (q.sum() + k.sum() + v.sum()).backward()
    rotate(torch.randn(9, 2, 8), table)
    assert set(table.stored_views) == {3, 4}, "of tensors with 3 dims and with 4"
    assert table.stored_views[4] is first[4]
    assert q.grad_fn is not None
    assert unbound(table) is unbound(table)


def test_views_go_with_their_table() -> None:
    """Nothing but the table keeps them, without the garbage collector, which does not see cycles in C++."""
    gc.disable()
    try:
        table = _table(9, 8)
        rotate(torch.randn(9, 2, 8), table)
        views = weakref.ref(table.stored_views[3].cosines), weakref.ref(unbound(table)[1])
        del table
        assert [view() for view in views] == [None, None]
    finally:
        gc.enable()


def test_rotated_heads_are_no_views() -> None:
    """Autograd would copy views; and of the projection they would keep all."""
    for heads in rotated_heads(torch.randn(9, 1, 2, 4 * 8, requires_grad=True), _table(9, 8), 8):
        assert not heads._is_view() and heads.is_contiguous()


@pytest.mark.parametrize("tokens, marks", [(9, 3), (1, 0)])
def test_a_tensor_is_marked_once_for_the_compiler(tokens: int, marks: int) -> None:
    table = _table(tokens, 8)
    with (
        mock.patch("torch._dynamo.mark_dynamic", wraps=torch._dynamo.mark_dynamic) as mark,
        mock.patch("megatron_hetero.models.layers.compiled.compiled_once", lambda function, dynamic: function),
    ):
        x = torch.randn(tokens, 8)
        for _ in range(4):
            run(lambda x, *table: (x, *table), x, *unbound(table))
    assert mark.call_count == marks
