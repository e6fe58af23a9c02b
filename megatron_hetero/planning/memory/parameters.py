"""How many parameters a rank holds, and the bytes of weights, gradients and optimizer that they take. Pure.

What Megatron does, and is followed here to the byte:

  * Trained parameters lie in one buffer, in the order in which gradients come: the reverse of the model's. With AdamW
    (the distributed optimizer) each begins at a multiple of 64 elements and each bucket ends at a multiple of 128 and
    of the ranks that share it. A bucket ends where it has as many elements as `bucket_elements` says, but only on the
    first pipeline stage, and is of one parameter where head and embedding are tied over stages.
  * Gradients are in a buffer of as many elements.
  * AdamW: rank i of n keeps, for the i-th of n equal parts of each bucket, two moments, and master weights where the
    weights are bfloat16. With moments of 8 bits each 256 of the elements of a parameter there have a scale.
  * SGD: master weights of all trained parameters where the weights are bfloat16, and nothing else.
  * ZeRO 2 and 3 (FSDP2): there is no buffer of parameters. Rank i of n keeps the i-th of n parts of the rows of each
    parameter, as many rows as on the first rank, as weights and, where it trains, as gradients; and the optimizer's
    states of its own rows. Weights that are gathered are in `gathered`.

Dtypes are those of `precision.MODULE`. With `offload.MODULE.states` no states are on the device.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from megatron_hetero.config.optimizers import OptimizerKind
from megatron_hetero.config.schema import FP32, PrecisionConfig
from megatron_hetero.execution.gathering import bucket_elements, rows_of_share, shares_weights
from megatron_hetero.hf.weight_map import MAIN, Share, TensorSlice
from megatron_hetero.layout.stages import Stage
from megatron_hetero.models.shapes import ModelShapes
from megatron_hetero.models.weights import stored_shapes, tied_parameter, weight_map
from megatron_hetero.step.number_formats import BLOCK, batch_elements

_MASTER = {"float32": 4, "split": 2, "none": 0}
_MOMENT = {"float32": 4, "bfloat16": 2, "8bit": 1}
_GRADIENT = {"float32": 4, "bfloat16": 2}
UNPACKED = 48
"""Bytes of an element while it is updated with moments of 8 bits."""
PARAMETER_ALIGNMENT, BUCKET_ALIGNMENT = 64, 128
"""Elements; see Megatron's `_ParamAndGradBuffer`."""


@dataclass(frozen=True)
class Parameter:
    """A parameter of a rank: its name in the whole module, rows, elements, whether it trains, and whether another
    pipeline stage holds a copy of it.
    """

    name: str
    rows: int
    elements: int
    trains: bool
    tied: bool


def parameters_of(
    module: str, shapes: ModelShapes, holders: int, stages: Sequence[Stage], frozen: Collection[str], view: str = MAIN
) -> tuple[Parameter, ...]:
    """The parameters of a rank that holds `stages`, in the order of the model. They are as large on all `holders`, the
    ranks that the view splits them over. `frozen`: the stored tensors that do not train.
    """
    stored, found = stored_shapes(shapes), []
    for stage in stages:
        tied = tied_parameter(module, shapes, stage)
        slices = weight_map(module, shapes, Share(0, holders), stage, view)
        for name in slices:
            elements = sum(_elements(tensor_slice, stored[tensor_slice.name]) for tensor_slice in slices[name])
            rows = sum(map(_rows, slices[name]))
            found.append(Parameter(name, rows, elements, slices[name][0].name not in frozen, name == tied))
    return tuple(found)


def _elements(tensor_slice: TensorSlice, shape: tuple[int, ...]) -> int:
    columns = tensor_slice.columns
    width = math.prod(shape[1:]) if columns is None else columns[1] - columns[0] + tensor_slice.padding
    return _rows(tensor_slice) * width


def _rows(tensor_slice: TensorSlice) -> int:
    padding = tensor_slice.padding if tensor_slice.columns is None else 0
    return tensor_slice.rows[1] - tensor_slice.rows[0] + padding


@dataclass(frozen=True)
class ParameterBucket:
    """Part of a buffer: where its parameters begin and end in it, in elements, and its size."""

    bounds: tuple[tuple[int, int], ...]
    size: int


def buckets_of(parameters: Sequence[Parameter], ranks: int, *, several: bool = True) -> tuple[ParameterBucket, ...]:
    """The buckets of the distributed optimizer for the trained parameters, over `ranks` data- and context-parallel
    ranks. `several`: whether there may be some, beside those of tied parameters.
    """
    trained = [p for p in reversed(parameters) if p.trains]
    limit = bucket_elements(sum(map(_size, trained)), ranks) if several else math.inf
    return tuple(_bucket(group, ranks) for group in _groups(trained, limit))


def _groups(trained: Sequence[Parameter], limit: float) -> Iterator[list[Parameter]]:
    """Tied parameters are alone in their bucket."""
    group, end = list[Parameter](), 0
    for parameter in trained:
        if parameter.tied and group:
            yield group
            group, end = [], 0
        group.append(parameter)
        end = _rounded(end, PARAMETER_ALIGNMENT) + parameter.elements
        if parameter.tied or end >= limit:
            yield group
            group, end = [], 0
    if group:
        yield group


def _bucket(parameters: Sequence[Parameter], ranks: int) -> ParameterBucket:
    bounds, end = [], 0
    for parameter in parameters:
        start = _rounded(end, PARAMETER_ALIGNMENT)
        end = start + parameter.elements
        bounds.append((start, end))
    return ParameterBucket(tuple(bounds), _rounded(end, math.lcm(ranks, BUCKET_ALIGNMENT)))


def _rounded(size: int, unit: int) -> int:
    return -(-size // unit) * unit


@dataclass(frozen=True, eq=False)
class ParameterBytes:
    """Bytes of the ranks of one module that hold the same stages.

    `parameters`, `trained`: elements. `weights`, `gradients`: bytes. `optimizer`: bytes, int64, by the rank's place
    among the data- and context-parallel ranks; `host`: of host memory, likewise; `update`: that a GPU takes besides
    while it updates, likewise.
    """

    parameters: int
    trained: int
    weights: int
    gradients: int
    optimizer: np.ndarray
    host: np.ndarray
    update: np.ndarray

    def at(self, places: np.ndarray) -> ParameterBytes:
        """The bytes of the ranks at these places."""
        return replace(self, optimizer=self.optimizer[places], host=self.host[places], update=self.update[places])

    def __add__(self, other: ParameterBytes) -> ParameterBytes:
        """The bytes of the same ranks with further parameters, which are updated at another time."""
        return ParameterBytes(
            self.parameters + other.parameters,
            self.trained + other.trained,
            self.weights + other.weights,
            self.gradients + other.gradients,
            self.optimizer + other.optimizer,
            self.host + other.host,
            np.maximum(self.update, other.update),
        )


def parameter_bytes(
    parameters: Sequence[Parameter],
    ranks: int,
    itemsize: int,
    optimizer: OptimizerKind,
    precision: PrecisionConfig = FP32,
    *,
    on_host: bool = False,
    zero: int = 1,
    is_first: bool = True,
) -> ParameterBytes:
    """What `parameters` take on each of `ranks` data- and context-parallel ranks. `itemsize`: bytes of a weight.
    `on_host`: whether states are in host memory. `zero`: the ZeRO stage. `is_first`: whether the ranks are the first in
    their pipelines.
    """
    frozen, trained = (sum(p.elements for p in parameters if p.trains == trains) for trains in (False, True))
    weights, buffer = trained + frozen, trained
    if shares_weights(zero, ranks, trained > 0):
        held = _held_rows(parameters, ranks)
        weights, buffer = (sum(_share(p, ranks) for p in of) for of in (parameters, filter(_trains, parameters)))
    elif optimizer.sharded:
        buckets = buckets_of(parameters, ranks, several=is_first)
        buffer = sum(bucket.size for bucket in buckets)
        held, weights = _held(buckets, ranks), buffer + frozen
    else:
        sizes = np.array([p.elements for p in parameters if p.trains], np.int64)
        held = _Held(*(np.full(ranks, n, np.int64) for n in (sizes.sum(), (-(-sizes // BLOCK)).sum())))
    moments = len(optimizer.moments)
    states = held.elements * moments * _MOMENT[precision.moments]
    states += held.blocks * 4 * moments * (precision.moments == "8bit")
    states += held.elements * _MASTER[precision.master] * (itemsize < 4)
    shares = shares_weights(zero, ranks, trained > 0)
    update = _update_bytes(held.elements, moments, itemsize, precision, on_host=on_host, apart=shares)
    return ParameterBytes(
        trained + frozen,
        trained,
        weights * itemsize,
        gradient_itemsize(itemsize, precision) * buffer,
        np.zeros_like(states) if on_host else states,
        states if on_host else np.zeros_like(states),
        update,
    )


def _update_bytes(
    elements: np.ndarray, moments: int, itemsize: int, precision: PrecisionConfig, *, on_host: bool, apart: bool
) -> np.ndarray:
    """Of the batches that are brought together on the device, or unpacked there: two at once where states come from the
    host. `apart`: whether weights and gradients lie in many places.
    """
    batch = np.array([min(n, batch_elements(n)) for n in elements.tolist()], np.int64)
    if precision.moments == "8bit" and moments:
        return batch * UNPACKED * (2 if on_host else 1)
    states = moments * _MOMENT[precision.moments] + _MASTER[precision.master] * (itemsize < 4)
    gathered = itemsize + gradient_itemsize(itemsize, precision) if apart else 0
    return batch * (2 * (states + gathered) if on_host else gathered)


def gradient_itemsize(itemsize: int, precision: PrecisionConfig) -> int:
    """Bytes of an accumulated gradient of a weight of so many."""
    return 4 if itemsize == 4 else _GRADIENT[precision.gradients]


def _trains(parameter: Parameter) -> bool:
    return parameter.trains


def _size(parameter: Parameter) -> int:
    return parameter.elements


def _share(parameter: Parameter, ranks: int) -> int:
    return rows_of_share(parameter.rows, ranks) * (parameter.elements // parameter.rows)


@dataclass(frozen=True, eq=False)
class _Held:
    """Of each rank's parts of the buckets: elements of parameters, and blocks of these; int64 [ranks]."""

    elements: np.ndarray
    blocks: np.ndarray


def _held_rows(parameters: Sequence[Parameter], ranks: int) -> _Held:
    trained = [p for p in parameters if p.trains]
    shares, sizes = (np.array([of(p) for p in trained], np.int64) for of in (partial(_share, ranks=ranks), _size))
    held = np.clip(sizes - np.arange(ranks)[:, None] * shares, 0, shares)
    return _Held(held.sum(axis=1), (-(-held // BLOCK)).sum(axis=1))


def _held(buckets: Sequence[ParameterBucket], ranks: int) -> _Held:
    held = _Held(*np.zeros((2, ranks), np.int64))
    for bucket in buckets:
        share = bucket.size // ranks
        starts, ends = np.array(bucket.bounds, np.int64).T
        # Each parameter, cut where a rank's part ends.
        cuts = np.union1d(np.arange(ranks + 1) * share, np.concatenate([starts, ends]))
        begins, sizes = cuts[:-1], np.diff(cuts)
        after = np.searchsorted(ends, begins, side="right")  # The first parameter that ends behind it.
        within = begins >= np.append(starts, bucket.size)[after]
        rank = begins[within] // share
        for total, values in (
            (held.elements, sizes[within]),
            (held.blocks, -(-sizes[within] // BLOCK)),
        ):
            np.add.at(total, rank, values)
    return held
