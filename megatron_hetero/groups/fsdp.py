"""Internals of PyTorch's FSDP2 (`fully_shard`), used in no other file: it has no public names for the parameters that
it shards and for its pending gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn


def fsdp_groups(module: nn.Module) -> list[Any]:
    """Return FSDP2's parameter groups of `module`, without groups of separately sharded submodules."""
    state: Any = module._get_fsdp_state() if hasattr(module, "_get_fsdp_state") else None  # pyright: ignore[reportCallIssue]
    # PyTorch 2.12 and earlier have one group per module.
    groups = getattr(state, "_fsdp_param_groups", None) or [getattr(state, "_fsdp_param_group", None)]
    return [group for group in groups if group is not None]


def has_reduced(module: nn.Module) -> bool:
    """Return whether FSDP2 has reduced all gradients of `module`."""
    groups = fsdp_groups(module)
    parameters = [each for group in groups for each in group.fsdp_params]
    pending = [each.unsharded_accumulated_grad for each in parameters]
    pending += [group._partial_reduce_output for group in groups]
    pending += [each._unsharded_param.grad for each in parameters if hasattr(each, "_unsharded_param")]
    return all(each is None for each in pending)


def forget_order(modules: Sequence[nn.Module]) -> None:
    """Clear FSDP2's record of the order in which modules ran, as a backward pass would."""
    for group in (group for module in modules for group in fsdp_groups(module)):
        group._post_forward_indices.clear()
        group.comm_ctx.post_forward_order.clear()


def reduce_unused(module: Any) -> None:
    """Have the backward pass reduce zeros for trained parameters of `module` that get no gradient."""
    if hasattr(module, "set_reduce_scatter_unused_params"):
        module.set_reduce_scatter_unused_params(True, recurse=False)
        return
    for group in fsdp_groups(module):  # PyTorch 2.12 and earlier skip parameters without gradients.
        group.post_backward = partial(_with_zeros, group, group.post_backward)


def _with_zeros(group: Any, post_backward: Callable[..., None], *args: Any) -> None:
    for each in group.fsdp_params:
        whole = getattr(each, "_unsharded_param", None)
        if whole is not None and whole.requires_grad and whole.grad is None and each.unsharded_accumulated_grad is None:
            whole.grad = torch.zeros_like(whole)
    post_backward(*args)


def fsdp_parameters(module: nn.Module) -> list[nn.Parameter]:
    """Return FSDP2's parameters of `module`, in the order in which their gradients are communicated."""
    return [each.sharded_param for group in fsdp_groups(module) for each in group.fsdp_params]
