"""Prepares a process for models of Megatron-Core, and runs them in the layouts of a topology.

prepare_megatron(topology, seed=1)
model = GPTModel(config, spec, vocabulary, length, pg_collection=topology.collection("text"))
forward_backward = megatron_schedule(topology, "text", config)
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from megatron_hetero.base.errors import UserError
from megatron_hetero.groups.topology import Topology
from megatron_hetero.layout.layout import Layout


def prepare_megatron(topology: Topology, seed: int) -> None:
    """Create Megatron-Core's memory buffer and random streams. All ranks call it before they build models; a second
    call seeds anew.

    PyTorch's generators get the same seed on all ranks. Megatron's stream for tensor-parallel regions differs between
    the ranks along `tp` and `pp`, and is the same on all replicas. A rank with several modules takes the coordinates of
    the one with the largest `tp`; numbers that other modules draw differ between their replicas, and `build_optimizers`
    makes these equal.

    If `parallel_state` is initialised, its buffer and the streams that it seeded are left alone; initialise it first.
    On a CPU a literal `device="cuda"`, and `Tensor.cuda()`, mean the CPU from now on in this process.
    """
    from megatron_hetero.groups import megatron

    megatron.prepare(topology.platform)
    topology.platform.enter_megatron_scope()
    torch.manual_seed(seed)
    layouts = [layout for layout in topology.layouts.values() if topology.rank in layout]
    place = max(layouts, key=lambda layout: layout.tp).coordinate(topology.rank) if layouts else None
    megatron.prepare_layers(seed, place.tp if place else 0, place.pp if place else 0)


def megatron_schedule(topology: Topology, module: str, config: Any) -> Callable[..., Any]:
    """Megatron's own `forward_backward_func` for a module, with the groups of the topology.

    It is called as Megatron calls it, by the ranks of the module:

        losses = forward_backward(
            forward_step_func=..., data_iterator=..., model=..., num_microbatches=8, seq_length=4096, micro_batch_size=1
        )

    Leave `config.finalize_model_grads_func` out: gradients are finished over all modules, after the gradients of rows
    have returned.

    Args:
        topology: built with `module` among its `megatron` modules, which is the default.
        module: name of the module.
        config: the model's `TransformerConfig`.

    Raises:
        UserError: `config` and the layout differ.
        KeyError: this rank is not in the module's layout.
    """
    from megatron_hetero.groups.megatron import megatron_loop

    groups, layout = topology.collection(module), topology.layouts[module]
    _check(f"megatron_schedule: {module}", layout, config)
    run, communicator = megatron_loop(layout.pp, config.virtual_pipeline_model_parallel_size, groups.pp, config)
    return partial(run, p2p_communicator=communicator, pg_collection=groups)


def _check(where: str, layout: Layout, config: Any) -> None:
    """Check a configuration against the layout. Raises `UserError`."""
    for axis, field, degree in (
        ("tp", "tensor_model_parallel_size", layout.tp),
        ("pp", "pipeline_model_parallel_size", layout.pp),
        ("sp·cp", "context_parallel_size", layout.sp * layout.cp),
    ):
        if (size := getattr(config, field)) != degree:
            found, fix = f"config.{field} {size}", f"set config.{field} to {degree}"
            raise UserError.at(where, found=found, expected=f"{degree}, its {axis}", fix=fix)
    if not config.calculate_per_token_loss:
        because = "losses are summed over tokens and divided once, by those of the whole step"
        found, fix = "config.calculate_per_token_loss False", "return (sum of losses, tokens, what to log)"
        raise UserError.at(where, found=found, expected="True", because=because, fix=f"set it, and {fix}")
    if config.finalize_model_grads_func is not None:
        because = "gradients of rows return after the loop, and `finish_gradients` sums those of all modules"
        problem = "config.finalize_model_grads_func is set"
        raise UserError.at(where, problem=problem, because=because, fix="leave it out")
    if layout.pp == 2 and config.virtual_pipeline_model_parallel_size is not None and not config.overlap_p2p_comm:
        because = "two messages between the same two ranks in one batch are taken for each other"
        found, fix = "virtual stages on pp:2 and config.overlap_p2p_comm False", "use more stages, or overlap"
        raise UserError.at(where, found=found, expected="pp of 3 or more", because=because, fix=fix)
