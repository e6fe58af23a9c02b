"""Runs the layers of a stage, with what is done between some of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from megatron.core import tensor_parallel
from megatron.core.transformer.transformer_block import TransformerBlock
from megatron.core.utils import make_viewless_tensor
from torch import Tensor

from megatron_hetero.models.common.attention import AttentionPlan
from megatron_hetero.models.common.offload.activations import ActivationOffload

Between = Callable[[Tensor], Tensor]
"""From the hidden states after a layer to those that the next one takes."""
NOTHING: Mapping[int, Between] = {}


def run_layers(
    block: TransformerBlock,
    hidden: Tensor,
    table_2nD: Tensor,
    plan: AttentionPlan,
    after: Mapping[int, Between] = NOTHING,
    offload: ActivationOffload | None = None,
) -> Tensor:
    """`hidden` [S, 1, hidden] after the layers of `block`, and after its final norm where it has one.

    `after`: what is done after a layer, by its number in the whole module. `offload`: where layers keep their
    activations, if not on the device.
    """
    with _saving(block, offload, table_2nD):
        return _run(block, hidden, table_2nD, plan, after)


def _saving(
    block: TransformerBlock, offload: ActivationOffload | None, table_2nD: Tensor
) -> AbstractContextManager[None]:
    if offload is None or not torch.is_grad_enabled():
        return nullcontext()
    norm: Any = block.final_layernorm
    return offload.saving(list(block.layers), [] if norm is None else [norm], [table_2nD])


def _run(
    block: TransformerBlock, hidden: Tensor, table_2nD: Tensor, plan: AttentionPlan, after: Mapping[int, Between]
) -> Tensor:
    if not after:
        return block(hidden, None, rotary_pos_emb=table_2nD, packed_seq_params=plan)
    # What `TransformerBlock.forward` does, of what modules here are configured to do.
    hidden = _viewless(hidden)
    tracker: Any = tensor_parallel.get_cuda_rng_tracker()
    with tracker.fork() if block.config.sequence_parallel else nullcontext():
        for layer in block.layers:
            each: Any = layer
            out = each(hidden, attention_mask=None, rotary_pos_emb=table_2nD, packed_seq_params=plan)[0]
            hidden = _viewless(after.get(each.layer_number - 1, _unchanged)(out))
    return hidden if block.final_layernorm is None else _viewless(block.final_layernorm(hidden))


def _unchanged(hidden: Tensor) -> Tensor:
    return hidden


def _viewless(hidden: Tensor) -> Tensor:
    return make_viewless_tensor(inp=hidden, requires_grad=True, keep_graph=True)
