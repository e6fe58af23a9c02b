"""Heterogeneous parallelism for multimodal training on Megatron-Core: each module has a separate parallel layout and
separate ranks.

This module exports the public API for training recipes; docs/library.md shows how to use it. Names are imported when
they are first used, so that plans (layouts, boundaries, schedules) need neither torch nor a GPU.
"""

import warnings
from importlib import import_module
from typing import TYPE_CHECKING, Any

# Suppress warnings that Megatron-Core emits on every rank and that users cannot act on.
warnings.filterwarnings("ignore", category=UserWarning, module=r"megatron\.core")
warnings.filterwarnings(
    "ignore", message=r"`torch\.distributed\.(all_gather_into|reduce_scatter)_tensor` is deprecated"
)

# FSDP2 warns against in-place operations on returned views; outputs of stages are never modified in place.
warnings.filterwarnings("ignore", message=r"FSDP2-wrapped module .*\(FSDP(Text|Vision|Language)\w*\) returned a view")

if TYPE_CHECKING:
    from megatron_hetero.base.errors import UserError
    from megatron_hetero.boundary.boundary import Boundary, Rows, micro_batch, place_rows
    from megatron_hetero.checkpoint.library import load_checkpoint, save_checkpoint
    from megatron_hetero.groups.launch import guarded, process_group
    from megatron_hetero.groups.topology import Topology, build
    from megatron_hetero.layout.graph import Graph
    from megatron_hetero.layout.layout import Layout
    from megatron_hetero.schedule.contract import MicroBatchInputs
    from megatron_hetero.step.algorithms import SGD, AdamW
    from megatron_hetero.step.gradients import count_tokens, finish_gradients, total_loss
    from megatron_hetero.step.library_optimizers import build_optimizers
    from megatron_hetero.step.megatron_adapters import lora
    from megatron_hetero.step.megatron_training import megatron_schedule, prepare_megatron
    from megatron_hetero.step.runner import Runner, Stage

__all__ = [
    "SGD",
    "AdamW",
    "Boundary",
    "Graph",
    "Layout",
    "MicroBatchInputs",
    "Rows",
    "Runner",
    "Stage",
    "Topology",
    "UserError",
    "build",
    "build_optimizers",
    "count_tokens",
    "finish_gradients",
    "guarded",
    "load_checkpoint",
    "lora",
    "megatron_schedule",
    "micro_batch",
    "place_rows",
    "prepare_megatron",
    "process_group",
    "save_checkpoint",
    "total_loss",
]

_HOMES = {
    "boundary.boundary": "Boundary Rows micro_batch place_rows",
    "checkpoint.library": "load_checkpoint save_checkpoint",
    "groups.launch": "guarded process_group",
    "groups.topology": "Topology build",
    "base.errors": "UserError",
    "layout.graph": "Graph",
    "layout.layout": "Layout",
    "schedule.contract": "MicroBatchInputs",
    "step.gradients": "count_tokens finish_gradients total_loss",
    "step.megatron_adapters": "lora",
    "step.megatron_training": "megatron_schedule prepare_megatron",
    "step.library_optimizers": "build_optimizers",
    "step.algorithms": "AdamW SGD",
    "step.runner": "Runner Stage",
}
"""Public names and the submodules that define them."""
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names.split()}


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOME_OF[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
