"""Computes the memory of a rank's parameters: weights, gradients, optimizer states, and gathered weights. Pure.

  * Trained parameters are in one buffer, and their gradients in another; padding of the buffers is not counted.
  * AdamW: each of n ranks stores two moments of an n-th of the trained elements, and master weights where the weights
    are bfloat16. 8-bit moments have a scale per 256 elements.
  * SGD: each rank stores master weights of all trained parameters where the weights are bfloat16.
  * ZeRO 2 and 3 (FSDP2): each of n ranks stores about an n-th of the rows of each parameter, its gradient and states.
    The units of `step.fully_sharded` are an embedding, each layer, and the rest of a stage. A rank gathers the weights
    of the running unit and of the prefetched unit, and has a second copy of one unit as it arrives; the rest of a
    stage, and an embedding that is also the head, stay gathered from forward to backward. With ZeRO 2, and with waves
    of several calls, all weights stay. The gradients of a unit exist whole, and a second time in the dtype of the sum.

The module's `precision` sets the dtypes; with `offload.states` optimizer states are on the host.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import astuple, dataclass, replace
from functools import reduce
from itertools import pairwise
from operator import add

from megatron_hetero.config.optimizers import FP32, OptimizerKind, PrecisionConfig
from megatron_hetero.hf.weight_map import MAIN, Share, TensorSlice
from megatron_hetero.job.job import JobSpec
from megatron_hetero.job.module import ModuleJob
from megatron_hetero.layout.names import TEXT
from megatron_hetero.layout.pipeline import LAYERS, PipelineStage, stages_of_rank
from megatron_hetero.schedule.gathering import GatherSpan, rows_of_share, shares_weights, span_of
from megatron_hetero.step.number_formats import BLOCK, batch_elements

_MASTER = {"float32": 4, "split": 2, "none": 0}
_MOMENT = {"float32": 4, "bfloat16": 2, "8bit": 1}
_GRADIENT = {"float32": 4, "bfloat16": 2}
UNPACKED = 48
"""Bytes per element of the buffers into which an update unpacks 8-bit moments."""


@dataclass(frozen=True)
class Parameter:
    """A parameter on a rank. `name`: its name in the whole module; `rows`, `elements`: the numbers on the rank."""

    name: str
    rows: int
    elements: int
    trains: bool


def parameters_of(
    module: ModuleJob, holders: int, stages: Sequence[PipelineStage], view: str = MAIN
) -> tuple[Parameter, ...]:
    """Return the parameters of a rank that holds `stages`, in model order. `holders`: the number of ranks over which
    `view` splits a parameter.
    """
    architecture, parameters = module.shape.architecture, list[Parameter]()
    share = Share(0 if view == MAIN else holders - 1, holders)  # The last rank has the most experts.
    for stage in stages:
        for name, slices in architecture.weight_map("", share, stage, view).items():
            rows = sum(map(_rows, slices))
            elements = sum(_elements(each, architecture.tensors[each.name]) for each in slices)
            parameters.append(Parameter(name, rows, elements, slices[0].name not in module.frozen))
    return tuple(parameters)


def _elements(tensor_slice: TensorSlice, shape: tuple[int, ...]) -> int:
    columns = tensor_slice.columns
    width = math.prod(shape[1:]) if columns is None else columns[1] - columns[0] + tensor_slice.padding
    return _rows(tensor_slice) * width


def _rows(tensor_slice: TensorSlice) -> int:
    padding = tensor_slice.padding if tensor_slice.columns is None else 0
    return tensor_slice.rows[1] - tensor_slice.rows[0] + padding


@dataclass(frozen=True)
class ParameterBytes:
    """Memory of a rank's parameters: `parameters` and `trained` in elements, the other fields in bytes.

    `host`: optimizer states in host memory. `update`: further device memory during an update. `stays`: the peak of
    weights that ZeRO 2 and 3 keep gathered between runs of the module. `running`: the peak above `stays` in a run.
    """

    parameters: int
    trained: int
    weights: int
    gradients: int
    optimizer: int
    host: int
    update: int
    stays: int = 0
    running: int = 0

    def __add__(self, other: ParameterBytes) -> ParameterBytes:
        """Return the sum of two memories on one rank; the maximum for `update`, because updates do not overlap."""
        added = ParameterBytes(*(a + b for a, b in zip(astuple(self), astuple(other), strict=True)))
        return replace(added, update=max(self.update, other.update))


def parameter_bytes(
    parameters: Sequence[Parameter],
    ranks: int,
    itemsize: int,
    optimizer: OptimizerKind,
    precision: PrecisionConfig = FP32,
    *,
    on_host: bool = False,
    zero: int = 1,
) -> ParameterBytes:
    """Return the memory of `parameters` on each of `ranks` data- and context-parallel ranks.

    `itemsize`: the bytes of a weight. `on_host`: whether optimizer states are in host memory. `zero`: the ZeRO stage.
    """
    trained_parameters = [p for p in parameters if p.trains]
    elements, trained = (sum(p.elements for p in each) for each in (parameters, trained_parameters))
    sharded = shares_weights(zero, ranks, trained > 0)
    if sharded:  # ZeRO 2 and 3 store weights, gradients and states of the local rows.
        weights, gradients = (_sharded_elements(each, ranks) for each in (parameters, trained_parameters))
        updated = gradients
    else:
        weights, gradients = elements, trained
        updated = -(-trained // ranks) if optimizer.sharded else trained
    moments = len(optimizer.moments)
    states = updated * _state_itemsize(moments, itemsize, precision)
    if precision.moments == "8bit":
        states += -(-updated // BLOCK) * 4 * moments
    return ParameterBytes(
        parameters=elements,
        trained=trained,
        weights=weights * itemsize,
        gradients=gradients * _gradient_itemsize(itemsize, precision),
        optimizer=0 if on_host else states,
        host=states if on_host else 0,
        update=_update_bytes(updated, moments, itemsize, precision, on_host=on_host, in_buffer=not sharded),
    )


def _sharded_elements(parameters: Sequence[Parameter], ranks: int) -> int:
    """Return the maximum number of elements on any of the `ranks` that share the rows of each parameter."""
    return sum(rows_of_share(p.rows, ranks) * (p.elements // p.rows) for p in parameters)


def _state_itemsize(moments: int, itemsize: int, precision: PrecisionConfig) -> int:
    """Return the bytes of the moments and the master weight of an element whose weight has `itemsize` bytes."""
    master = _MASTER[precision.master] if itemsize < 4 else 0
    return moments * _MOMENT[precision.moments] + master


def _update_bytes(
    elements: int, moments: int, itemsize: int, precision: PrecisionConfig, *, on_host: bool, in_buffer: bool
) -> int:
    """Return the device memory of the batches of elements in an update: two at a time if states are on the host.

    `in_buffer`: whether weights and gradients are in contiguous buffers, and are not copied into batches.
    """
    batch = min(elements, batch_elements(elements))
    if precision.moments == "8bit" and moments:
        return batch * UNPACKED * (2 if on_host else 1)
    gathered = 0 if in_buffer else itemsize + _gradient_itemsize(itemsize, precision)
    if not on_host:
        return batch * gathered
    return batch * 2 * (_state_itemsize(moments, itemsize, precision) + gathered)


def _gradient_itemsize(itemsize: int, precision: PrecisionConfig) -> int:
    """Return the bytes of an element of the accumulated gradient if a weight element has `itemsize` bytes."""
    return 4 if itemsize == 4 else _GRADIENT[precision.gradients]


_EMBEDDING = "embedding"
"""Name of the embedding, which is a separate FSDP2 unit."""


def gathered_bytes(
    parameters: Sequence[Parameter], itemsize: int, gradient: int, span: GatherSpan, *, is_head: bool
) -> tuple[int, int]:
    """Return the bytes of weights that stay gathered between runs of a module, and the peak above that in a run, with
    gradients in exchange. `itemsize`: the bytes of a weight; `gradient`: the bytes of its gradient and of the copy that
    is sent. `is_head`: whether the embedding is also the head.
    """
    weights, gradients = defaultdict[str, int](int), defaultdict[str, int](int)
    for parameter in parameters:
        unit = _unit_of(parameter.name)
        weights[unit] += parameter.elements * itemsize
        gradients[unit] += parameter.elements * gradient if parameter.trains else 0
    if span != "run":
        return sum(weights.values()), max(weights.values()) + max(gradients.values())
    layers = [unit for unit in weights if unit.startswith(LAYERS)]
    sizes, embedding = [weights[unit] for unit in layers], weights[_EMBEDDING]
    # The peak in layers: two gathered layers, a second copy of one layer as it arrives, and the gradients of one layer.
    # Gradients of the embedding and of the rest are exchanged later.
    two_layers = max(map(sum, pairwise(sizes)), default=sum(sizes))
    in_layers = two_layers + max(sizes, default=0) + max((gradients[unit] for unit in layers), default=0)
    stays, embedding_twice = (weights[""] + embedding, embedding) if is_head else (weights[""], 2 * embedding)
    return stays, max(in_layers, *gradients.values(), embedding_twice)


def _unit_of(name: str) -> str:
    """Return the FSDP2 unit of a parameter: a layer, the embedding, or "" for the rest of a stage."""
    if name.startswith(LAYERS):
        return LAYERS + name.removeprefix(LAYERS).partition(".")[0]
    return _EMBEDDING if name.startswith(f"{_EMBEDDING}.") else ""


# ------------------------------------------------------------------------------------------ modules


def module_bytes(job: JobSpec, module: ModuleJob, coordinate: int, calls: Sequence[range]) -> ParameterBytes:
    """Return the memory of a module's parameters, over all views, on a rank of a pipeline coordinate. `calls`: the
    micro-batches of each call of the module.
    """
    layout, settings, itemsize = module.layout, module.settings, module.dtype.itemsize
    stages = stages_of_rank(module.stages, coordinate, layout.pp)
    parameters, each_view = list[Parameter](), list[ParameterBytes]()
    for view in layout.every_view:
        local = parameters_of(module, layout.ways("weights", "experts", view=view), stages, view.name)
        parameters += local
        each_view.append(
            parameter_bytes(
                local,
                layout.ways("tokens", "samples", view=view),
                itemsize,
                module.optimizer,
                settings.precision,
                on_host=settings.offload.states,
                zero=settings.zero,
            )
        )
    total = reduce(add, each_view)
    ranks = max(layout.ways("tokens", "samples", view=view) for view in layout.every_view)
    if not shares_weights(settings.zero, ranks, total.trained > 0):
        return total
    exchanged = _gradient_itemsize(itemsize, settings.precision)
    # With chunked MLPs, whole gradients have the dtype of the sum too.
    whole = exchanged if settings.chunk else itemsize
    is_head = module.role == TEXT and module.shape.tied and layout.pp == 1
    span = _gather_span(job, module, calls)
    stays, running = gathered_bytes(parameters, itemsize, whole + exchanged, span, is_head=is_head)
    return replace(total, stays=stays, running=running)


def _gather_span(job: JobSpec, module: ModuleJob, calls: Sequence[range]) -> GatherSpan:
    """Return how long gathered weights stay in memory. With one call in each turn of the encoders, weights need not
    stay for another call.
    """
    span = span_of(job.schedule.module[module.name], module.settings.zero)
    turns = [turn for turn in (*job.schedule.waves, *job.schedule.returned) if turn]
    if span == "wave" and all(any(call[0] <= turn[0] and turn[-1] <= call[-1] for call in calls) for turn in turns):
        return "run"
    return span
