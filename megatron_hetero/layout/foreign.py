"""Degrees and ranks from other libraries' descriptions of parallelism. Pure.

    DeviceMesh (PyTorch)            the last dimension varies fastest among ranks
    HyperCommGrid (Megatron-Core)   the first one does
    parallel_state (Megatron-Core)  knows the sizes, and the groups of this rank

A layout has one order, `tp` fastest, then `sp`, `cp`, `dp` and `pp`. Dimensions of size 1 may be anywhere.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from math import prod
from typing import Any

import numpy as np

from megatron_hetero.base.errors import UserError
from megatron_hetero.layout.axes import AXES

Arranged = tuple[dict[str, int], tuple[int, ...]]
"""The degree of each axis, and the ranks in the order of a layout."""

_ORDER = "layouts number ranks along tp, sp, cp, dp and pp, the first fastest"


def of_mesh(mesh: Any, axes: Mapping[str, str]) -> Arranged:
    """Degrees and ranks of a `DeviceMesh`. Raises `UserError` if it has no names, other names, or is a slice."""
    what, names, ranks = "Layout.from_mesh", mesh.mesh_dim_names, mesh.mesh
    if names is None:
        fix = "give it `mesh_dim_names`"
        raise UserError.at(what, found="a mesh without names", expected="named dimensions", fix=fix)
    if getattr(mesh, "_root_mesh", None) is not None:
        because = "ranks hold different slices, and a layout is the same on all of them"
        raise UserError.at(what, found="a slice", expected="a mesh", because=because, fix="pass the whole")
    return _arranged(what, _dims(what, names, list(ranks.shape), axes), ranks.flatten().tolist())


def of_hyper_grid(grid: Any, axes: Mapping[str, str]) -> Arranged:
    """Degrees and ranks of a `HyperCommGrid`. Raises `UserError` if it has other names."""
    what, first = "Layout.from_grid", int(grid.rank_offset)
    dims = _dims(what, grid.dim_names, [int(size) for size in grid.shape], axes)[::-1]
    return _arranged(what, dims, range(first, first + prod(size for _, size in dims)))


def of_mpu(state: Any, dist: Any) -> Arranged:
    """Degrees and ranks of `megatron.core.parallel_state`, from the groups of this rank. `dist`: `torch.distributed`.
    Raises `UserError`.
    """
    where = "Layout.from_mpu"
    if not state.model_parallel_is_initialized():
        fix = "call `parallel_state.initialize_model_parallel` first"
        raise UserError.at(where, found="no parallel state", expected="an initialised one", fix=fix)
    if (experts := state.get_expert_model_parallel_world_size()) > 1:
        because = "layouts have no axis of experts"
        found, fix = f"expert parallelism over {experts} ranks", "use 1"
        raise UserError.at(where, found=found, expected="none", because=because, fix=fix)
    groups = {
        "tp": state.get_tensor_model_parallel_group(),
        "cp": state.get_context_parallel_group(),
        "dp": state.get_data_parallel_group(),
        "pp": state.get_pipeline_model_parallel_group(),
    }
    mine = {axis: dist.get_process_group_ranks(group) for axis, group in groups.items()}
    stride = 1
    for axis, ranks in mine.items():
        if any(b - a != stride for a, b in pairwise(ranks)):
            found = f"ranks {ranks} along {axis}"
            fix = 'initialise it with order="tp-cp-ep-dp-pp", which is its default'
            raise UserError.at(where, found=found, expected=f"{stride} between them", because=_ORDER, fix=fix)
        stride *= len(ranks)
    return {axis: len(ranks) for axis, ranks in mine.items()}, tuple(range(stride))


def _arranged(what: str, dims: Sequence[tuple[str, int]], ranks: Sequence[int]) -> Arranged:
    """Degrees, and `ranks` reordered from `dims`, the last fastest, to the order of a layout. Raises `UserError` if
    they do not ascend in it.
    """
    order = sorted(range(len(dims)), key=lambda i: (-AXES.index(dims[i][0]), i))
    listed = np.reshape(ranks, [size for _, size in dims]).transpose(order).flatten().tolist()
    if any(b <= a for a, b in pairwise(listed)):
        found = f"ranks {list(ranks)} along {', '.join(f'{axis}:{size}' for axis, size in dims)}, the last fastest"
        expected = f"ascending ranks along {', '.join(dims[i][0] for i in order)}"
        fix = "put the dimensions in that order, or state the layout as text"
        raise UserError.at(what, found=found, expected=expected, because=_ORDER, fix=fix)
    degrees = dict.fromkeys(AXES, 1)
    for axis, size in dims:
        degrees[axis] *= size
    return degrees, tuple(listed)


def _dims(what: str, names: Sequence[str], sizes: Sequence[int], axes: Mapping[str, str]) -> list[tuple[str, int]]:
    """Axis and size of each dimension, without dimensions of size 1 that are no axis."""
    found: list[tuple[str, int]] = []
    for name, size in zip(names, sizes, strict=True):
        axis = axes.get(name, name)
        if axis in AXES:
            found.append((axis, size))
        elif size > 1:
            expected, fix = f"one of {', '.join(AXES)}", f"say which it is: axes={{{name!r}: ...}}"
            raise UserError.at(what, found=f"dimension `{name}` of size {size}", expected=expected, fix=fix)
    return found
