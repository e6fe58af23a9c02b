"""Prepares a process for Megatron-Core models, and runs the models in the layouts of a topology. For example:
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
    """Create Megatron-Core's memory buffer and random streams. All ranks call this function before they build models; a
    second call resets the seeds.

    PyTorch's generators are seeded equally on all ranks. Megatron's stream for tensor-parallel regions differs between
    ranks along `tp` and `pp`, and is equal on all replicas. A rank with several modules uses the coordinates of the
    module with the largest `tp`; initial weights of its other modules may differ between replicas until
    `build_optimizers` makes replicas equal.

    If Megatron's `parallel_state` is already initialised, its memory buffer and random streams are not changed. On a
    CPU, `device="cuda"` and `Tensor.cuda()` refer to the CPU in this process after the call.
    """
    from megatron_hetero.groups import megatron

    megatron.prepare(topology.platform)
    topology.platform.enter_megatron_scope()
    torch.manual_seed(seed)
    layouts = [layout for layout in topology.layouts.values() if topology.rank in layout]
    place = max(layouts, key=lambda layout: layout.tp).coordinate(topology.rank) if layouts else None
    megatron.prepare_layers(seed, place.tp if place else 0, place.pp if place else 0)


def megatron_schedule(topology: Topology, module: str, config: Any) -> Callable[..., Any]:
    """Return Megatron's `forward_backward_func` for a module, with the process groups of the topology.

    The ranks of the module call the result as in Megatron:

        losses = forward_backward(
            forward_step_func=..., data_iterator=..., model=..., num_microbatches=8, seq_length=4096, micro_batch_size=1
        )

    Do not set `config.finalize_model_grads_func`: `finish_gradients` sums gradients of all modules, after gradients of
    rows have been returned.

    Args:
        topology: a topology with `module` among its `megatron` modules, which is the default.
        module: name of the module.
        config: the model's `TransformerConfig`.

    Raises:
        UserError: `config` does not match the module's layout.
        KeyError: this rank is not in the module's layout.
    """
    from megatron_hetero.groups.megatron import megatron_loop

    groups, layout = topology.collection(module), topology.layouts[module]
    _check(f"megatron_schedule: {module}", layout, config)
    run, communicator = megatron_loop(layout.pp, config.virtual_pipeline_model_parallel_size, groups.pp, config)
    return partial(run, p2p_communicator=communicator, pg_collection=groups)


def _check(where: str, layout: Layout, config: Any) -> None:
    """Check that a Megatron config matches the layout. Raises `UserError`."""
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
