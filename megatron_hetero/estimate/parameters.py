"""Parameters of a rank: bytes of weights, gradients and optimizer states, and of what ZeRO 2 and 3 gather. Pure.

  * Trained parameters and their gradients are in one buffer each; its padding is not counted.
  * AdamW: each of n ranks stores two moments of an n-th of the trained elements, and master weights where the weights
    are bfloat16. 8-bit moments have a scale per 256 elements.
  * SGD: master weights of all trained parameters where the weights are bfloat16.
  * ZeRO 2 and 3 (FSDP2): each of n ranks stores about an n-th of the rows of each parameter, its gradient and states.
    Units are those of `step.fully_sharded`: an embedding, each layer, and the rest of a stage. Gathered are the weights
    of the running unit, of the prefetched one, and once more of one unit as they arrive; the rest of a stage, and an
    embedding that is the head too, stay from forward to backward. With ZeRO 2, and with waves of several calls,
    everything stays. The gradients of a unit exist whole, and once more in the dtype of their sum, as they are sent.

Dtypes are those of the module's `precision`; with `offload.states` states are on the host.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import astuple, dataclass, replace
from itertools import pairwise

from megatron_hetero.config.optimizers import FP32, OptimizerKind, PrecisionConfig
from megatron_hetero.hf.weight_map import MAIN, Share, TensorSlice
from megatron_hetero.job.module import ModuleJob
from megatron_hetero.layout.pipeline import LAYERS, PipelineStage
from megatron_hetero.schedule.gathering import GatherSpan, rows_of_share, shares_weights
from megatron_hetero.step.number_formats import BLOCK, batch_elements

_MASTER = {"float32": 4, "split": 2, "none": 0}
_MOMENT = {"float32": 4, "bfloat16": 2, "8bit": 1}
_GRADIENT = {"float32": 4, "bfloat16": 2}
UNPACKED = 48
"""Bytes per element during an update with 8-bit moments."""


@dataclass(frozen=True)
class Parameter:
    """A parameter of a rank, by its name in the whole module."""

    name: str
    rows: int
    elements: int
    trains: bool


def parameters_of(
    module: ModuleJob, holders: int, stages: Sequence[PipelineStage], view: str = MAIN
) -> tuple[Parameter, ...]:
    """The parameters of a rank that holds `stages`, in model order. `holders`: ranks that the view splits a parameter
    over.
    """
    stored, found = module.shape.architecture.tensors, []
    share = Share(0 if view == MAIN else holders - 1, holders)  # The last rank has the most experts.
    for stage in stages:
        slices = module.shape.architecture.weight_map("", share, stage, view)
        for name in slices:
            elements = sum(_elements(tensor_slice, stored[tensor_slice.name]) for tensor_slice in slices[name])
            rows = sum(map(_rows, slices[name]))
            found.append(Parameter(name, rows, elements, slices[name][0].name not in module.frozen))
    return tuple(found)


def _elements(tensor_slice: TensorSlice, shape: tuple[int, ...]) -> int:
    columns = tensor_slice.columns
    width = math.prod(shape[1:]) if columns is None else columns[1] - columns[0] + tensor_slice.padding
    return _rows(tensor_slice) * width


def _rows(tensor_slice: TensorSlice) -> int:
    padding = tensor_slice.padding if tensor_slice.columns is None else 0
    return tensor_slice.rows[1] - tensor_slice.rows[0] + padding


@dataclass(frozen=True)
class ParameterBytes:
    """Memory of a rank's parameters: `parameters`, `trained` in elements, the rest in bytes.

    `host`: states in host memory. `update`: further device memory during an update. `stays`, `running`: what ZeRO 2 and
    3 gather, the most between runs of the module, and besides in a run.
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
        """The sum; updates do not overlap."""
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
    """Memory of `parameters` on each of `ranks` data- and context-parallel ranks.

    `itemsize`: bytes of a weight. `on_host`: whether states are in host memory. `zero`: the ZeRO stage.
    """
    moving, every = [p for p in parameters if p.trains], sum(p.elements for p in parameters)
    trained = sum(p.elements for p in moving)
    weights, buffer, held = every, trained, trained
    shares = shares_weights(zero, ranks, trained > 0)
    if shares:
        weights, buffer = (
            sum(rows_of_share(p.rows, ranks) * (p.elements // p.rows) for p in of) for of in (parameters, moving)
        )
        held = buffer
    elif optimizer.sharded:
        held = -(-trained // ranks)
    moments = len(optimizer.moments)
    states = held * moments * _MOMENT[precision.moments] + held * _MASTER[precision.master] * (itemsize < 4)
    states += -(-held // BLOCK) * 4 * moments * (precision.moments == "8bit")
    return ParameterBytes(
        every,
        trained,
        weights * itemsize,
        gradient_itemsize(itemsize, precision) * buffer,
        0 if on_host else states,
        states if on_host else 0,
        _update_bytes(held, moments, itemsize, precision, on_host=on_host, apart=shares),
    )


def _update_bytes(
    elements: int, moments: int, itemsize: int, precision: PrecisionConfig, *, on_host: bool, apart: bool
) -> int:
    """Bytes of the batches gathered or unpacked on the device, two at once where states come from the host.

    `apart`: whether weights and gradients are in many tensors rather than in one buffer.
    """
    batch = min(elements, batch_elements(elements))
    if precision.moments == "8bit" and moments:
        return batch * UNPACKED * (2 if on_host else 1)
    states = moments * _MOMENT[precision.moments] + _MASTER[precision.master] * (itemsize < 4)
    gathered = itemsize + gradient_itemsize(itemsize, precision) if apart else 0
    return batch * (2 * (states + gathered) if on_host else gathered)


def gradient_itemsize(itemsize: int, precision: PrecisionConfig) -> int:
    """Bytes of an accumulated gradient element of a weight of `itemsize` bytes."""
    return 4 if itemsize == 4 else _GRADIENT[precision.gradients]


_EMBEDDING = "embedding"
"""The embedding, an FSDP2 unit of its own."""


def gathered_bytes(
    parameters: Sequence[Parameter], itemsize: int, gradient: int, span: GatherSpan, *, is_head: bool
) -> tuple[int, int]:
    """Bytes of gathered weights and of gradients in exchange: the most between runs of a module, and besides in a run.
    `itemsize`: bytes of a weight; `gradient`: of its gradient, whole and as it is sent. `is_head`: whether the
    embedding is also the head.
    """
    whole, exchanged = defaultdict[str, int](int), defaultdict[str, int](int)
    for parameter in parameters:
        unit = _unit_of(parameter.name)
        whole[unit] += parameter.elements * itemsize
        exchanged[unit] += parameter.elements * parameter.trains * gradient
    if span != "run":
        return sum(whole.values()), max(whole.values()) + max(exchanged.values())
    layers = [unit for unit in whole if unit.startswith(LAYERS)]
    sizes, embedding = [whole[unit] for unit in layers], whole[_EMBEDDING]
    # All layers are gathered before gradients of the embedding and of the rest are exchanged.
    of_layers = max((exchanged[unit] for unit in layers), default=0) + max(sizes, default=0)
    of_layers += max(map(sum, pairwise(sizes)), default=sum(sizes))
    stays = whole[""] + embedding * is_head
    return stays, max(of_layers, *exchanged.values(), embedding * (1 + (not is_head)))


def _unit_of(name: str) -> str:
    """The FSDP2 unit of a parameter: a layer, the embedding, or the unnamed rest."""
    if name.startswith(LAYERS):
        return LAYERS + name.removeprefix(LAYERS).partition(".")[0]
    return _EMBEDDING if name.startswith(f"{_EMBEDDING}.") else ""
