"""The interface of a `Runner`: micro-batches, and models, which may be any `torch.nn.Module` or callable. What models
are called with and return is in docs/library.md, "Models".

Inputs are leaves of the model's own graph, which ends with its output. Models may communicate inside their module, in
one order on all ranks of a stage. If a schedule recomputes, an encoder is called twice per micro-batch and draws the
same random numbers both times.
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
"""Name of the output with the sum of losses. Other names are in `megatron_hetero.layout.names`."""
METRICS = "metrics"
"""Name under which a last stage may return other sums by name, scalars without gradients."""

StageOutput = Tensor | Mapping[str, Any]
"""The only output of a stage, or its outputs by name."""


StageModel = Callable[..., Any]
"""The model of a stage. After the first stage it has a method `hidden_shape(batch)`, which returns the shape of the
hidden states that it receives. On the first stage of a module that `embeds` it has `embed(batch)`, which computes what
needs no rows, a tensor of any shape.
"""


@dataclass(frozen=True, eq=False)
class Gathered:
    """A submodule of a stage whose weights are gathered separately, where data-parallel ranks share them.

    `read_again`: whether they are read after the submodule has run. `in_backward`: whether its backward pass reads
    them.
    """

    module: Any
    read_again: bool = False
    in_backward: bool = True


@dataclass(frozen=True, eq=False)
class ModuleOnRank:
    """The stages of a module on one rank.

    `stages`: models by stage number. `embeds`: whether the first stage of the text module has `embed`, which runs while
    rows are on their way. `trains_before_last`: whether stages before the last one, or rows that enter them, need
    gradients; if not, hidden states need none (a frozen encoder whose projector trains).
    """

    stages: Mapping[int, StageModel]
    embeds: bool = False
    trains_before_last: bool = True


@dataclass(frozen=True, eq=False)
class InChunks:
    """The input of an encoder that has no incoming rows, in `chunks`, one for each call of each of its stages: as many
    on all ranks of the encoder. Hidden states and rows are those of all calls, one after the other along the first
    dimension; losses and metrics are added up. `hidden_shape` is called with one chunk.

    To bound memory, forward passes save no activations; the backward pass runs each call once more, right before the
    call's own backward pass.
    """

    chunks: Sequence[Any]


def chunks_of(given: Any) -> Sequence[Any]:
    """Return the inputs of the calls that a module's input takes: several if it is `InChunks`."""
    return given.chunks if isinstance(given, InChunks) else [given]


@dataclass(frozen=True, eq=False)
class MicroBatchInputs:
    """The inputs of one rank in a micro-batch, on the host until `Runner` needs them.

        MicroBatchInputs({"vision": pictures, "text": tokens}, {("vision", "text"): Rows(held, needed)})

    Attributes:
        inputs: by module of this rank, what all its models are called with, or `InChunks`. For a module that takes only
            rows it may be anything, such as `()`. A module without an input, on all of its ranks, is not run.
        rows: by edge, or by the two modules that it joins, without edges of which this rank holds and needs no rows.
            `Runner(...)` takes `Rows`: which rows the rank holds and needs, or the counts that they follow from, as in
            `Boundary.plan`. `Runner.run` takes plans: the rank's `LoadedPlan` of each edge.
        calls: by module, the micro-batches that one call of it computes, where these are several. The input of the
            first is that of all, the others have none. Only encoders in waves have such calls, within
            `Schedule.in_one_call`.
    """

    inputs: Mapping[str, Any]
    rows: Mapping[Any, Any] = field(default_factory=dict[Any, Any])
    calls: Mapping[str, range] = field(default_factory=dict[str, range])


@dataclass(frozen=True, eq=False)
class StepResult:
    """Sums over the micro-batches of a step on this rank: scalars on the device.

    `loss`: the losses of all modules, fp32; 0 without any. `losses`: by module whose last stage is on this rank and has
    a loss. `metrics`: by module and name, with every module of the topology on every rank; a module whose last stage is
    elsewhere, or returns no metrics, has none: `result.metrics["text"].get("correct", 0)`.
    """

    loss: Tensor
    losses: Mapping[str, Tensor]
    metrics: Mapping[str, Mapping[str, Tensor]]


def require_fits(micro_batch: int, batch: MicroBatchInputs, schedule: Schedule) -> None:
    """Check that a micro-batch names modules and edges of the schedule, as others would be ignored silently; that
    inputs in chunks are of modules without incoming rows; and that the calls which begin with it are within
    `Schedule.in_one_call`: other rows would be sent before they are computed, or their gradients be waited for. Raises
    `UserError`.
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
    """Return two functions: one copies the states of the random generators that models use, PyTorch's and, once it is
    imported, Megatron-Core's; the other restores a copy. Neither waits for the device.
    """
    if "megatron.core.tensor_parallel.random" not in sys.modules:
        return platform.random_states, platform.set_random_states
    from megatron_hetero.groups import megatron

    return partial(megatron.random_states, platform), partial(megatron.set_random_states, platform=platform)
