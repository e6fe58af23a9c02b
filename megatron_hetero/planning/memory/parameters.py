"""How many parameters a rank holds, and the bytes of weights, gradients and optimizer that they take. Pure.

What Megatron does, and is followed here to the byte:

  * Trained parameters lie in one buffer, in the order in which gradients come: the reverse of the model's. With AdamW
    (the distributed optimizer) each begins at a multiple of 64 elements and each bucket ends at a multiple of 128 and
    of the ranks that share it. There is one bucket, and one more where head and embedding are tied over stages.
  * Gradients are fp32, in a buffer of the same size.
  * AdamW: rank i of n keeps, for the i-th of n equal parts of each bucket, two fp32 moments, fp32 master weights where
    the weights are bfloat16, and a step counter of four bytes for each parameter that has elements there.
  * SGD: fp32 master weights of all trained parameters where the weights are bfloat16, and nothing else.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from megatron_hetero.config.optimizers import OptimizerKind
from megatron_hetero.hf.weight_map import TensorSlice
from megatron_hetero.models.shapes import ModelShapes
from megatron_hetero.models.weights import group_of, stored_shapes, tied_parameter, weight_map
from megatron_hetero.sharding.stages import LAYERS, Stage

PARAMETER_ALIGNMENT, BUCKET_ALIGNMENT = 64, 128
"""Elements; see Megatron's `_ParamAndGradBuffer`."""

_IN_LAYER = (
    "input_layernorm.weight",
    "input_layernorm.bias",
    "self_attention.linear_proj.weight",
    "self_attention.linear_proj.bias",
    "self_attention.linear_qkv.weight",
    "self_attention.linear_qkv.bias",
    "self_attention.q_layernorm.weight",
    "self_attention.k_layernorm.weight",
    "pre_mlp_layernorm.weight",
    "pre_mlp_layernorm.bias",
    "mlp.linear_fc1.weight",
    "mlp.linear_fc1.bias",
    "mlp.linear_fc2.weight",
    "mlp.linear_fc2.bias",
)
_BEFORE_LAYERS = ("embedding.", "patch_embed.")
"""What names of parameters begin with that come before the layers."""


@dataclass(frozen=True)
class Parameter:
    """A parameter of a rank: its name in the whole module, elements, whether it trains, and whether another pipeline
    stage holds a copy of it.
    """

    name: str
    elements: int
    trains: bool
    tied: bool


def parameters_of(
    module: str, shapes: ModelShapes, tp: int, stages: Sequence[Stage], freeze: Collection[str]
) -> tuple[Parameter, ...]:
    """The parameters of a rank that holds `stages`, in the order of the model. They are as large on all tp ranks."""
    stored, found = stored_shapes(shapes), []
    for stage in stages:
        tied = tied_parameter(module, shapes, stage)
        # The first tp rank's part is never smaller than others', which pad theirs.
        slices = weight_map(module, shapes, 0, tp, stage)
        for name in sorted(slices, key=_place):
            elements = sum(_elements(tensor_slice, stored[tensor_slice.name]) for tensor_slice in slices[name])
            found.append(Parameter(name, elements, group_of(module, name) not in freeze, name == tied))
    return tuple(found)


def _elements(tensor_slice: TensorSlice, shape: tuple[int, ...]) -> int:
    width = math.prod(shape[1:]) if tensor_slice.columns is None else tensor_slice.columns[1] - tensor_slice.columns[0]
    return (tensor_slice.rows[1] - tensor_slice.rows[0]) * width


def _place(name: str) -> tuple[int, int, int]:
    """Where a parameter comes in its model."""
    if name.startswith(LAYERS):
        number, _, rest = name.removeprefix(LAYERS).partition(".")
        return 1, int(number), _IN_LAYER.index(rest)
    # What comes after the layers is in order in the map of weights already.
    return (0, 0, 0) if name.startswith(_BEFORE_LAYERS) else (2, 0, 0)


@dataclass(frozen=True)
class ParameterBucket:
    """Part of a buffer: where its parameters begin and end in it, in elements, and its size."""

    bounds: tuple[tuple[int, int], ...]
    size: int


def buckets_of(parameters: Sequence[Parameter], ranks: int, distributed: bool) -> tuple[ParameterBucket, ...]:
    """The buckets of the trained parameters over `ranks` data- and context-parallel ranks."""
    trained = [p for p in reversed(parameters) if p.trains]
    if not distributed:
        ends = np.cumsum([p.elements for p in trained]).tolist()
        bounds = tuple((end - p.elements, end) for p, end in zip(trained, ends, strict=True))
        return (ParameterBucket(bounds, ends[-1]),) if trained else ()
    return tuple(_bucket(group, ranks) for group in _groups(trained))


def _groups(trained: Sequence[Parameter]) -> Iterator[list[Parameter]]:
    """Tied parameters are alone in their bucket."""
    group: list[Parameter] = []
    for parameter in trained:
        if parameter.tied and group:
            yield group
            group = []
        group.append(parameter)
        if parameter.tied:
            yield group
            group = []
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
    among the data- and context-parallel ranks.
    """

    parameters: int
    trained: int
    weights: int
    gradients: int
    optimizer: np.ndarray


def parameter_bytes(
    parameters: Sequence[Parameter], ranks: int, itemsize: int, optimizer: OptimizerKind
) -> ParameterBytes:
    """What `parameters` take on each of `ranks` data- and context-parallel ranks. `itemsize`: bytes of a weight."""
    buckets = buckets_of(parameters, ranks, optimizer.sharded)
    buffer, frozen = sum(b.size for b in buckets), sum(p.elements for p in parameters if not p.trains)
    trained = sum(p.elements for p in parameters if p.trains)
    state = 4 * len(optimizer.moments) + (4 if itemsize < 4 else 0)
    counter = 4 if optimizer.moments else 0
    if optimizer.sharded:
        owned, shards = _owned(buckets, ranks)
        held = owned * state + shards * counter
    else:
        held = np.full(ranks, trained * state + counter * sum(p.trains for p in parameters), np.int64)
    return ParameterBytes(
        trained + frozen, trained, (buffer + frozen) * itemsize, 4 * buffer, held
    )  # fmt: skip


def _owned(buckets: Sequence[ParameterBucket], ranks: int) -> tuple[np.ndarray, np.ndarray]:
    """Elements of parameters in each rank's parts of the buckets, and how many parameters they are of."""
    elements, shards = np.zeros((2, ranks), np.int64)
    for bucket in buckets:
        share = bucket.size // ranks
        starts, ends = np.array(bucket.bounds, np.int64).T
        edges = np.arange(ranks + 1) * share
        before = np.searchsorted(ends, edges, side="right")  # parameters that end at or before an edge
        sizes = np.concatenate([[0], np.cumsum(ends - starts)])
        within = np.clip(edges - np.append(starts, bucket.size)[before], 0, None)
        elements += np.diff(sizes[before] + within)
        begun = np.searchsorted(starts, edges, side="left")  # parameters that begin before an edge
        shards += begun[1:] - before[:-1]
    return elements, shards
