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

    `after`: what is done after a layer, by its number in the whole module. It is no part of the layer's activation
    checkpoint: it is done once, and keeps its activations. `offload`: where layers keep theirs, if not on the device.
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
    # What `TransformerBlock.forward` and `_checkpointed_forward` do, of what modules here are configured to do.
    checkpointed = (block.config.recompute_num_layers or 0) if block.training else 0
    hidden = _viewless(hidden)
    tracker: Any = tensor_parallel.get_cuda_rng_tracker()
    with tracker.fork() if block.config.sequence_parallel else nullcontext():
        for i, layer in enumerate(block.layers):
            run, number, inputs = _runner(layer, plan), _number(layer), (hidden, table_2nD)
            out: Any = tensor_parallel.checkpoint(run, False, *inputs) if i < checkpointed else run(*inputs)
            hidden = _viewless(after.get(number, _unchanged)(out))
    return hidden if block.final_layernorm is None else _viewless(block.final_layernorm(hidden))


def _number(layer: Any) -> int:
    return layer.layer_number - 1


def _runner(layer: Any, plan: AttentionPlan) -> Callable[[Tensor, Tensor], Tensor]:
    def run(hidden: Tensor, table_2nD: Tensor) -> Tensor:
        return layer(hidden, attention_mask=None, rotary_pos_emb=table_2nD, packed_seq_params=plan)[0]

    return run


def _unchanged(hidden: Tensor) -> Tensor:
    return hidden


def _viewless(hidden: Tensor) -> Tensor:
    return make_viewless_tensor(inp=hidden, requires_grad=True, keep_graph=True)
