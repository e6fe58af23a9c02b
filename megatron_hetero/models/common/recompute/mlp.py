"""Megatron's MLP, which keeps less here, and takes its tokens in chunks where asked to."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.fusions.fused_bias_swiglu import bias_swiglu_impl
from megatron.core.transformer.mlp import MLP
from torch import Tensor

from megatron_hetero.models.common.layers.compiled import activated
from megatron_hetero.models.common.layers.overlapped import first_in_parts, parts_of, second_in_parts
from megatron_hetero.models.common.layers.swiglu import swiglu
from megatron_hetero.models.common.recompute.policy import Recompute
from megatron_hetero.models.common.recompute.remake import not_keeping, remake

Make = Callable[..., Tensor]
"""What the activation gives, of the first product of an MLP and the bias that it has not added, if any."""


def frugal_mlp(
    mlp: MLP, recompute: Recompute, hidden: Tensor, *, compile_layers: bool = False, **_: Any
) -> tuple[Tensor, Tensor | None]:
    """What `mlp` makes of `hidden` [S, 1, hidden] ([S / tp, 1, hidden] with sequence-parallel activations): of the same
    shape, and the bias that the layer adds. `recompute`:

    selective   the product of gate and up (what the activation gives, without a gate) is made again, from gate and up
    chunk       where more tokens than that pass through the MLP on this rank, they pass in chunks, and the backward
                pass of each makes gate and up again: the first of the MLP's products, with the all-gather over tp where
                activations are split. The second, and its communication, are done once.

    With activations that are split over tp, each rank gives an equal share of each chunk. All ranks of a tp group have
    equally many tokens, split or not, and so equally many chunks; over other axes an MLP exchanges nothing.
    `compile_layers`: the activation is compiled.
    """
    tp: Any = mlp.tp_group
    shards = tp.size() if mlp.config.sequence_parallel else 1
    make = partial(_compiled if compile_layers else _product, mlp)
    if not recompute.chunks(len(hidden) * shards):
        return _at_once(mlp, recompute, make, hidden)
    outs, bias = [], None
    for piece in hidden.split(max(1, recompute.chunk // shards)):
        with not_keeping(hidden):
            product = remake(partial(_product_of_input, mlp, make), piece)
        with not_keeping(product):
            out, bias = mlp.linear_fc2(product)
        outs.append(out)
    return torch.cat(outs), bias


def _at_once(mlp: MLP, recompute: Recompute, make: Make, hidden: Tensor) -> tuple[Tensor, Tensor | None]:
    parts = parts_of(mlp, len(hidden))
    whole = len(parts) == 1
    with not_keeping(hidden):
        wide, bias = mlp.linear_fc1(hidden) if whole else (first_in_parts(mlp.linear_fc1, hidden, parts), None)
    inputs = (wide,) if bias is None else (wide, bias)
    product = remake(make, *inputs) if recompute.selective else make(*inputs)
    with not_keeping(product):
        return mlp.linear_fc2(product) if whole else second_in_parts(mlp.linear_fc2, product, parts)


def _product_of_input(mlp: MLP, make: Make, piece: Tensor) -> Tensor:
    return make(*mlp.linear_fc1(piece))


def _compiled(mlp: MLP, wide: Tensor, bias: Tensor | None = None) -> Tensor:
    """As `_product`."""
    return activated(wide, bias, mlp.config.activation_func, has_gate=mlp.config.gated_linear_unit)


def _product(mlp: MLP, wide: Tensor, bias: Tensor | None = None) -> Tensor:
    """[..., 2 ffn] of gate and up to [..., ffn]; without a gate [..., ffn] to the same. As `MLP.forward` does, of what
    is configured here.
    """
    config = mlp.config
    if bias is not None and config.bias_activation_fusion:
        return bias_swiglu_impl(wide, bias, config.activation_func_fp8_input_store, False)
    wide = wide if bias is None else wide + bias
    if not config.gated_linear_unit:
        return config.activation_func(wide)
    if config.activation_func is F.silu:
        return swiglu(wide)
    gate, up = torch.chunk(wide, 2, dim=-1)
    return config.activation_func(gate) * up
