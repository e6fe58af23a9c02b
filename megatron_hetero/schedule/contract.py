"""The interface of a `Runner`: micro-batches, and models, which may be any `torch.nn.Module` or callable. The arguments
and results of models are described in docs/library.md, "Models".

A model's autograd graph begins at its inputs, as leaves, and ends at its output. Models may communicate inside their
module, in one order on all ranks of a stage. If a schedule recomputes, an encoder is called twice per micro-batch and
draws the same random numbers both times.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torch import Tensor

from megatron_hetero.base.errors import UserError, one_of
from megatron_hetero.groups.platform import Platform
from megatron_hetero.schedule.program import Schedule

LOSS = "loss"
"""Name of the output that is the sum of losses. Other names are in `megatron_hetero.layout.names`."""
METRICS = "metrics"
"""Name of the output with which a last stage may return other sums: a mapping of scalars without gradients."""

StageOutput = Tensor | Mapping[str, Any]
"""The single output of a stage, or its outputs by name."""


StageModel = Callable[..., Any]
"""The model of a stage. Models after the first stage have a method `hidden_shape(batch)`, which returns the shape of
the hidden states that the stage receives. The first stage of a module that `embeds` has a method `embed(batch)`, which
computes a tensor of any shape that does not depend on rows.
"""


@dataclass(frozen=True, eq=False)
class Gathered:
    """A submodule of a stage whose weights are gathered separately, where data-parallel ranks share them.

    `read_again`: whether the weights are read after the submodule has run. `in_backward`: whether its backward pass
    reads the weights.
    """

    module: Any
    read_again: bool = False
    in_backward: bool = True


@dataclass(frozen=True, eq=False)
class ModuleOnRank:
    """The stages of a module on one rank.

    `stages`: models by stage number. `embeds`: whether the first stage of the text module has `embed`, which runs while
    rows are in transit. `trains_before_last`: whether stages before the last one, or the rows that they receive, need
    gradients; if not, no gradients of hidden states are computed (a frozen encoder whose projector trains).
    """

    stages: Mapping[int, StageModel]
    embeds: bool = False
    trains_before_last: bool = True


@dataclass(frozen=True, eq=False)
class InChunks:
    """The input of an encoder without incoming rows, in `chunks`: each stage makes one call per chunk. All ranks of the
    encoder have the same number of chunks. Hidden states and rows of all calls are concatenated along the first
    dimension; losses and metrics are summed. `hidden_shape` is called with one chunk.

    To bound memory, forward passes save no activations; the backward pass runs the forward pass of each call again,
    right before the backward pass of that call.
    """

    chunks: Sequence[Any]


def chunks_of(given: Any) -> Sequence[Any]:
    """Return the inputs of all calls: the chunks if `given` is `InChunks`, else the one input."""
    return given.chunks if isinstance(given, InChunks) else [given]


@dataclass(frozen=True, eq=False)
class MicroBatchInputs:
    """The inputs of one rank in a micro-batch, on the host until `Runner` needs them.

        MicroBatchInputs({"vision": pictures, "text": tokens}, {("vision", "text"): Rows(held, needed)})

    Attributes:
        inputs: by module of this rank, the input with which all its models are called, or `InChunks`. For a module that
            takes only rows it may be anything, such as `()`. A module is not run if none of its ranks has an input.
        rows: by edge, or by the pair of modules that the edge joins. Edges on which this rank neither holds nor needs
            rows are left out. `Runner(...)` takes `Rows`: the rows that the rank holds and needs, or their counts, as
            in `Boundary.plan`. `Runner.run` takes the rank's `LoadedPlan` of each edge.
        calls: by module, the micro-batches that one call computes, if there are several. The first micro-batch has the
            input of the whole call, the others have none. Only encoders in waves have such calls, within the ranges
            that `Schedule.in_one_call` returns.
    """

    inputs: Mapping[str, Any]
    rows: Mapping[Any, Any] = field(default_factory=dict[Any, Any])
    calls: Mapping[str, range] = field(default_factory=dict[str, range])


@dataclass(frozen=True, eq=False)
class StepResult:
    """Sums over the micro-batches of a step on this rank: scalars on the device.

    `loss`: the sum of the losses of all modules, fp32; 0 without losses. `losses`: the loss of each module whose last
    stage is on this rank and has a loss. `metrics`: the metrics by module and name. Every module has an entry on every
    rank, empty without metrics or if its last stage is on other ranks: `result.metrics["text"].get("correct", 0)`.
    """

    loss: Tensor
    losses: Mapping[str, Tensor]
    metrics: Mapping[str, Mapping[str, Tensor]]


def require_fits(micro_batch: int, batch: MicroBatchInputs, schedule: Schedule) -> None:
    """Check that a micro-batch names only modules and edges of the schedule, because others would be ignored silently;
    that inputs in chunks are for modules without incoming rows; and that calls which begin with the micro-batch are
    within `Schedule.in_one_call`, because otherwise rows would be sent before they are computed. Raises `UserError`.
    """
    modules, edges = schedule.module, schedule.edges
    for name, found, known in (("inputs", batch.inputs, modules), ("rows", batch.rows, edges)):
        if unknown := [key for key in found if key not in known]:
            where = f"micro-batch {micro_batch}: `{name}` of its `MicroBatchInputs`"
            expected = one_of((f"`{each}`" for each in known), {"inputs": "modules"}.get(name, "edges"), "some of")
            fix = "name modules as in the layouts, and edges by `Edge(source, target)`"
            raise UserError.at(where, found=f"`{unknown[0]}`", expected=expected, fix=fix)
    for name, given in batch.inputs.items():
        if not isinstance(given, InChunks):
            continue
        takes_rows = modules[name].style == "text" or any(edge.target == name for edge in edges)
        if takes_rows or not given.chunks:
            why = "which takes rows" if given.chunks else "without chunks"
            where, expected = f"micro-batch {micro_batch}: `inputs`", "one chunk or more, of an encoder without rows"
            fix = f"give `{name}` one input"
            raise UserError.at(where, found=f"`InChunks` of `{name}`, {why}", expected=expected, fix=fix)
    for module, call in batch.calls.items():
        known = schedule.in_one_call(module) if module in modules else ()
        if call and call[0] == micro_batch and any(set(call) <= set(run) for run in known):
            continue
        runs = ", ".join(f"{run[0]}-{run[-1]}" for run in known if micro_batch in run)
        where = f"micro-batch {micro_batch}: `calls` of its `MicroBatchInputs`"
        expected = f"a range that begins with it, within {runs or 'the micro-batches of a module in waves'}"
        because = "these are encoded in one turn, and their gradients come back in one"
        fix = f"leave `{module}` out, or take micro-batches of one run of `schedule.in_one_call({module!r})`"
        raise UserError.at(where, found=f"{call} of `{module}`", expected=expected, because=because, fix=fix)


def random_states(platform: Platform) -> tuple[Callable[[], Any], Callable[[Any], None]]:
    """Return two functions: one copies the states of PyTorch's random generators and, if Megatron-Core has been
    imported, of its generators; the other restores such a copy. Neither function waits for the device.
    """
    if "megatron.core.tensor_parallel.random" not in sys.modules:
        return platform.random_states, platform.set_random_states
    from megatron_hetero.groups import megatron

    return partial(megatron.random_states, platform), partial(megatron.set_random_states, platform=platform)
