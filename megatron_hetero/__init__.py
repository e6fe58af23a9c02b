"""Heterogeneous parallelism for multimodal training on Megatron-Core: each module in its own layout, on its own
ranks.

The names below are the library; docs/library.md shows how they go together. They are imported when they are first used,
so that what plans (layouts, boundaries, schedules, their simulation) needs no torch and no GPU.
"""

import warnings
from importlib import import_module
from typing import TYPE_CHECKING, Any

# What Megatron-Core says on every rank, at import and from inside its own calls, is not for our users.
warnings.filterwarnings("ignore", category=UserWarning, module=r"megatron\.core")
warnings.filterwarnings(
    "ignore", message=r"`torch\.distributed\.(all_gather_into|reduce_scatter)_tensor` is deprecated"
)

# Nothing here is done in place with what a stage returns.
warnings.filterwarnings("ignore", message=r"FSDP2-wrapped module .*\(FSDP(Text|Vision|Language)\w*\) returned a view")

if TYPE_CHECKING:
    from megatron_hetero.boundary.autograd import cross
    from megatron_hetero.boundary.boundary import Boundary, Rows, micro_batch
    from megatron_hetero.boundary.communicator import BoundaryCommunicator, Crossing, boundary_communicators
    from megatron_hetero.boundary.loaded import LoadedPlan, load_plan
    from megatron_hetero.boundary.ownership import Ownership
    from megatron_hetero.boundary.plan import BoundaryPlan, RankPlan, plan_boundary
    from megatron_hetero.distributed.launch import guarded, process_group
    from megatron_hetero.distributed.platform import Platform
    from megatron_hetero.distributed.topology import Topology
    from megatron_hetero.errors import UserError
    from megatron_hetero.execution.contract import (
        DeviceMicroBatch,
        EmbeddingTextStage,
        EncoderStage,
        LaterStage,
        ModuleOnRank,
        TextStage,
    )
    from megatron_hetero.execution.runtime import Interpreter
    from megatron_hetero.layout.edge import Edge
    from megatron_hetero.layout.graph import Graph
    from megatron_hetero.layout.layout import Layout, ModuleShape
    from megatron_hetero.layout.modules import resolve, validate
    from megatron_hetero.recipe.build import build
    from megatron_hetero.recipe.gradients import count_tokens, finish_gradients, total_loss
    from megatron_hetero.recipe.megatron import megatron_schedule, prepare_megatron
    from megatron_hetero.recipe.optimizers import JointOptimizer, build_optimizers
    from megatron_hetero.recipe.runner import MicroBatch, Runner, Stage
    from megatron_hetero.schedule.builders import build_schedule
    from megatron_hetero.schedule.checks.check import ScheduleError, check_schedule
    from megatron_hetero.schedule.drawing import draw, timeline
    from megatron_hetero.schedule.grid import format_schedule
    from megatron_hetero.schedule.program import Schedule
    from megatron_hetero.schedule.settings import ScheduleSettings
    from megatron_hetero.schedule.simulator import Simulation, simulate
    from megatron_hetero.sharding.ownerships import own_samples, own_tokens, tokens_of

__all__ = [
    "Boundary",
    "BoundaryCommunicator",
    "BoundaryPlan",
    "Crossing",
    "DeviceMicroBatch",
    "Edge",
    "EmbeddingTextStage",
    "EncoderStage",
    "Graph",
    "Interpreter",
    "JointOptimizer",
    "LaterStage",
    "Layout",
    "LoadedPlan",
    "MicroBatch",
    "ModuleOnRank",
    "ModuleShape",
    "Ownership",
    "Platform",
    "RankPlan",
    "Rows",
    "Runner",
    "Schedule",
    "ScheduleError",
    "ScheduleSettings",
    "Simulation",
    "Stage",
    "TextStage",
    "Topology",
    "UserError",
    "boundary_communicators",
    "build",
    "build_optimizers",
    "build_schedule",
    "check_schedule",
    "count_tokens",
    "cross",
    "draw",
    "finish_gradients",
    "format_schedule",
    "guarded",
    "load_plan",
    "megatron_schedule",
    "micro_batch",
    "own_samples",
    "own_tokens",
    "plan_boundary",
    "prepare_megatron",
    "process_group",
    "resolve",
    "simulate",
    "timeline",
    "tokens_of",
    "total_loss",
    "validate",
]

_HOMES = {
    "boundary.autograd": "cross",
    "boundary.boundary": "Boundary Rows micro_batch",
    "boundary.communicator": "BoundaryCommunicator Crossing boundary_communicators",
    "boundary.loaded": "LoadedPlan load_plan",
    "boundary.ownership": "Ownership",
    "boundary.plan": "BoundaryPlan RankPlan plan_boundary",
    "distributed.launch": "guarded process_group",
    "distributed.platform": "Platform",
    "distributed.topology": "Topology",
    "errors": "UserError",
    "execution.contract": "DeviceMicroBatch EmbeddingTextStage EncoderStage LaterStage ModuleOnRank TextStage",
    "execution.runtime": "Interpreter",
    "layout.edge": "Edge",
    "layout.graph": "Graph",
    "layout.layout": "Layout ModuleShape",
    "layout.modules": "resolve validate",
    "recipe.build": "build",
    "recipe.gradients": "count_tokens finish_gradients total_loss",
    "recipe.megatron": "megatron_schedule prepare_megatron",
    "recipe.optimizers": "JointOptimizer build_optimizers",
    "recipe.runner": "MicroBatch Runner Stage",
    "schedule.builders": "build_schedule",
    "schedule.checks.check": "ScheduleError check_schedule",
    "schedule.drawing": "draw timeline",
    "schedule.grid": "format_schedule",
    "schedule.program": "Schedule",
    "schedule.settings": "ScheduleSettings",
    "schedule.simulator": "Simulation simulate",
    "sharding.ownerships": "own_samples own_tokens tokens_of",
}
"""Where each public name is defined, by submodule."""
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names.split()}


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOME_OF[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
