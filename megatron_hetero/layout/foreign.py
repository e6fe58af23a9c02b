"""Reads degrees and ranks from the descriptions of parallelism of other libraries. Pure.

    DeviceMesh (PyTorch)            the last dimension varies fastest among ranks
    HyperCommGrid (Megatron-Core)   the first dimension varies fastest
    parallel_state (Megatron-Core)  describes the sizes, and the groups of this rank

A layout orders ranks along `tp` (fastest), `sp`, `cp`, `dp` and `pp`; for layers with experts, it orders the same ranks
along `ep`, `edp` and `pp`, which a second mesh or grid describes. Dimensions of size 1 may be in any position.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise
from math import prod
from typing import Any

import numpy as np

from megatron_hetero.base.errors import UserError
from megatron_hetero.layout.axes import EXPERTS, MAIN, SPLIT_EXPERTS, WHOLE_EXPERTS, View
from megatron_hetero.layout.grammar import format_ranks

Arranged = tuple[dict[str, int], tuple[int, ...], tuple[View, ...]]
"""Degrees by axis, ranks in the order of a layout, and further views."""

FROM_MESH = "Layout.from_mesh"

_Dims = tuple[Sequence[str], Sequence[int], Sequence[int]]
"""Names and sizes of dimensions, the last varying fastest, and the ranks in that order."""


def of_mpu(state: Any, dist: Any) -> Arranged:
    """Return the degrees, ranks and views of `megatron.core.parallel_state`, computed from the groups of this rank.
    `dist`: the module `torch.distributed`. Raises `UserError`.
    """
    where = "Layout.from_mpu"
    if not state.model_parallel_is_initialized():
        fix = "call `parallel_state.initialize_model_parallel` first"
        raise UserError.at(where, found="no parallel state", expected="an initialised one", fix=fix)
    groups = {
        "tp": state.get_tensor_model_parallel_group(),
        "cp": state.get_context_parallel_group(),
        "dp": state.get_data_parallel_group(),
        "pp": state.get_pipeline_model_parallel_group(),
    }
    degrees = _strided(where, groups, dist)
    ranks = tuple(range(prod(degrees.values())))
    ep, etp = state.get_expert_model_parallel_world_size(), state.get_expert_tensor_parallel_world_size()
    if ep == 1 and etp == degrees["tp"]:  # the defaults, which models without experts have too
        return degrees, ranks, ()
    if etp > 1:
        found, fix = f"experts that are split over {etp} ranks", "initialise it with expert_tensor_parallel_size=1"
        raise UserError.at(where, found=found, expected="whole experts", because=WHOLE_EXPERTS, fix=fix)
    experts = {"ep": state.get_expert_model_parallel_group(), "edp": state.get_expert_data_parallel_group()}
    return _strided(where, experts | {"pp": groups["pp"]}, dist) | degrees, ranks, (EXPERTS,)


def _strided(where: str, groups: Mapping[str, Any], dist: Any) -> dict[str, int]:
    """Return the degree of each axis, computed from `groups`, the groups of this rank by axis. Raises `UserError`
    unless the axes are ordered, the fastest-varying first.
    """
    stride, degrees = 1, dict[str, int]()
    for axis, group in groups.items():
        ranks = dist.get_process_group_ranks(group)
        if any(b - a != stride for a, b in pairwise(ranks)):
            found, expected, because = f"ranks {ranks} along {axis}", f"{stride} between them", _order(groups)
            fix = 'initialise it with order="tp-cp-ep-dp-pp", which is its default'
            raise UserError.at(where, found=found, expected=expected, because=because, fix=fix)
        degrees[axis] = len(ranks)
        stride *= len(ranks)
    return degrees


def mesh_dims(mesh: Any) -> _Dims:
    """Return the dimensions of a `DeviceMesh`. Raises `UserError` if they have no names, or the mesh is a slice."""
    names, ranks, root = mesh.mesh_dim_names, mesh.mesh, getattr(mesh, "_root_mesh", None)
    if names is None:
        fix = "give it `mesh_dim_names`"
        raise UserError.at(FROM_MESH, found="a mesh without names", expected="named dimensions", fix=fix)
    if root is not None and root.size() != mesh.size():
        because = "slices differ between ranks, and a layout is the same on all of them"
        raise UserError.at(FROM_MESH, found="a slice", expected="a mesh", because=because, fix="pass the whole")
    return names, list(ranks.shape), ranks.flatten().tolist()


def grid_dims(grid: Any) -> _Dims:
    """Return the dimensions of a Megatron-Core `HyperCommGrid`."""
    first, sizes = int(grid.rank_offset), [int(size) for size in grid.shape]
    return list(grid.dim_names)[::-1], sizes[::-1], range(first, first + prod(sizes))


def of_pair(what: str, dims_of: Callable[[Any], _Dims], main: Any, experts: Any, axes: Mapping[str, str]) -> Arranged:
    """Return the degrees, ranks and views of mesh or grid `main` and optionally of `experts`. Raises `UserError`."""
    degrees, ranks = _arranged(what, MAIN, dims_of(main), axes)
    if experts is None:
        return degrees, ranks, ()
    what = f"{what} (experts)"
    folded, same = _arranged(what, EXPERTS, dims_of(experts), axes)
    if (same, folded["pp"]) != (ranks, degrees["pp"]):
        found, expected = (
            f"pp:{pp} over ranks {format_ranks(over)}" for pp, over in ((folded["pp"], same), (degrees["pp"], ranks))
        )
        because = "experts are divided over the same pipeline stages as other layers"
        raise UserError.at(what, found=found, expected=expected, because=because, fix="build it over the same ranks")
    return folded | degrees, ranks, (EXPERTS,)


def _arranged(what: str, view: View, dims: _Dims, axes: Mapping[str, str]) -> tuple[dict[str, int], tuple[int, ...]]:
    """Return the degrees, and the ranks reordered from `dims` to the order of `view`. Raises `UserError` if the
    reordered ranks do not ascend.
    """
    known = tuple(dict.fromkeys((*view.names, "pp")))
    named, ranks = _named(what, view, known, dims, axes), dims[2]
    order = sorted(range(len(named)), key=lambda i: (-known.index(named[i][0]), i))
    listed = np.reshape(ranks, [size for _, size in named]).transpose(order).flatten().tolist()
    if any(b <= a for a, b in pairwise(listed)):
        found = f"ranks {list(ranks)} along {', '.join(f'{axis}:{size}' for axis, size in named)}, the last fastest"
        expected, because = f"ascending ranks along {', '.join(named[i][0] for i in order)}", _order(known)
        fix = "put the dimensions in that order, or state the layout as text"
        raise UserError.at(what, found=found, expected=expected, because=because, fix=fix)
    degrees = dict.fromkeys(known, 1)
    for axis, size in named:
        degrees[axis] *= size
    return degrees, tuple(listed)


def _named(what: str, view: View, known: Sequence[str], dims: _Dims, axes: Mapping[str, str]) -> list[tuple[str, int]]:
    """Return the axis and the size of each dimension, omitting dimensions of size 1 that are not axes. `dp` stands for
    the axis of samples of any view. Raises `UserError` for unknown dimensions.
    """
    named: list[tuple[str, int]] = []
    for name, size in zip(*dims[:2], strict=True):
        axis = axes.get(name, name)
        axis = view.rest if axis == MAIN.rest else axis
        if axis in known:
            named.append((axis, size))
        elif size > 1:
            expected, because = f"one of {', '.join(known)}", ""
            fix = f"say which it is: axes={{{name!r}: ...}}"
            if axis in (SPLIT_EXPERTS, "tp"):
                because, fix = WHOLE_EXPERTS, "use `ep` instead"
            elif axis in EXPERTS.names:
                fix = "pass the dimensions of experts, over the same ranks, as `experts=`"
            dimension = f"dimension `{name}` of size {size}"
            raise UserError.at(what, found=dimension, expected=expected, because=because, fix=fix)
    return named


def _order(axes: Iterable[str]) -> str:
    *first, last = axes
    return f"layouts number ranks along {', '.join(first)} and {last}, the first fastest"
