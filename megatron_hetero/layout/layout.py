"""Layouts: how one module is split over ranks, as values and as text. Pure: no torch, no process group.

The grammar is in `megatron_hetero.layout.grammar`. Examples:

    sp:8                 eight-way sequence parallel over a world of 8
    tp:4,pp:2@8-15       four-way tensor parallel in two pipeline stages on ranks 8 to 15
    dp:2,tp:4@0-3,8-11   two replicas of four tensor-parallel ranks on two sets of ranks
    tp:4,dp:2,ep:8       the experts of a layer, if any, are divided over the same eight ranks

Without ``@`` a layout covers the whole world. ``dp`` defaults to the ranks divided by the other degrees, ``ep`` to
``tp``, or to the next lower divisor of a stage's ranks if there are fewer experts. Ranks ascend, because process groups
number their members in ascending order.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any, NamedTuple

from megatron_hetero.base.environment import LAUNCHER
from megatron_hetero.base.errors import UserError
from megatron_hetero.layout.axes import (
    AXES,
    EXPERTS,
    MAIN,
    Fold,
    LayoutProblem,
    ModuleShape,
    Split,
    View,
    axis_names,
    divisors,
    problem_of,
)
from megatron_hetero.layout.foreign import FROM_MESH, grid_dims, mesh_dims, of_mpu, of_pair
from megatron_hetero.layout.grammar import MAX_PLANNED, did_you_mean, format_ranks, read, unknown_axis

__all__ = ["AXES", "Coordinate", "Layout", "ModuleShape"]


class Coordinate(NamedTuple):
    """The indices of a rank in its layout, one per axis, in the order of `AXES`."""

    tp: int = 0
    sp: int = 0
    cp: int = 0
    dp: int = 0
    pp: int = 0


# Example of the order of ranks, for tp:2,dp:2,pp:2@4-11: `tp` varies fastest, then sp, cp and dp; pp varies slowest.
#
#     rank   tp sp cp dp pp     groups("tp")  groups("dp")  groups("pp")  groups("tp", "dp")
#        4    0  0  0  0  0     (4, 5)        (4, 6)        (4, 8)        (4, 5, 6, 7)
#        5    1  0  0  0  0     (4, 5)        (5, 7)        (5, 9)        (4, 5, 6, 7)
#        6    0  0  0  1  0     (6, 7)        (4, 6)        (6, 10)       (4, 5, 6, 7)
#        7    1  0  0  1  0     (6, 7)        (5, 7)        (7, 11)       (4, 5, 6, 7)
#        8    0  0  0  0  1     (8, 9)        (8, 10)       (4, 8)        (8, 9, 10, 11)
#        9    1  0  0  0  1     (8, 9)        (9, 11)       (5, 9)        (8, 9, 10, 11)
#       10    0  0  0  1  1     (10, 11)      (8, 10)       (6, 10)       (8, 9, 10, 11)
#       11    1  0  0  1  1     (10, 11)      (9, 11)       (7, 11)       (8, 9, 10, 11)
#
# Each row of the table shows the groups that contain the rank.
#
# A further view arranges the ranks of each stage, in the same order, along other axes, the first varying fastest.
# For tp:2,dp:2,pp:2,ep:2@4-11 with the view `EXPERTS`:
#
#     rank        4   5   6   7   8   9  10  11     groups("ep")   (4, 5) (6, 7) (8, 9) (10, 11)
#     ep          0   1   0   1   0   1   0   1     groups("edp")  (4, 6) (5, 7) (8, 10) (9, 11)
#     edp         0   0   1   1   0   0   1   1
@dataclass(frozen=True, repr=False)
class Layout:
    """The layout of a module: a degree per axis, the ranks that it covers, and further views of these ranks.

    ``repr`` evaluates to an equal value. ``str`` is readable text that always includes the ranks, so that
    ``Layout.parse(str(x), views=x.views) == x`` in any world that has these ranks.

    Raises:
        UserError: a degree is not a positive integer, the ranks do not ascend, their number is
            not the product of the degrees, or the degrees of a further view do not divide the ranks of a stage.
    """

    tp: int
    sp: int
    cp: int
    dp: int
    pp: int
    ranks: tuple[int, ...]
    folds: tuple[Fold, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "ranks", tuple(self.ranks))
        axis_names(self.views)
        wrong = [f"{axis}:{degree}" for axis, degree in self.stated.items() if type(degree) is not int or degree < 1]
        if wrong:
            found = f"degrees {', '.join(wrong)}"
            raise UserError.at("layout", found=found, expected="integers of 1 or more", fix="correct the degrees")
        if any(b <= a for a, b in zip((-1, *self.ranks), self.ranks, strict=False)):
            expected = "each to be larger than the one before, from 0"
            raise UserError.at("layout", found=f"ranks {self.ranks}", expected=expected, fix="sort the ranks")
        if problem := _misfit(self.stated, self.ranks, self.views):
            where, fix = f"layout {self.degrees_text}", "correct the degrees"
            raise UserError.at(where, found=problem.found, expected=problem.expected, because=problem.why, fix=fix)

    @classmethod
    def of(cls, degrees: Mapping[str, int], ranks: tuple[int, ...], views: Sequence[View] = ()) -> Layout:
        """Return the layout with `degrees`, 1 for omitted axes, on `ranks`, in the main view and further `views`.
        Raises `UserError` as the class does.
        """
        folds = tuple(Fold(view, tuple(degrees.get(axis, 1) for axis in view.stated)) for view in views)
        return cls(**{axis: degrees.get(axis, 1) for axis in AXES}, ranks=ranks, folds=folds)

    @classmethod
    def parse(
        cls,
        text: str,
        world_size: int | None = None,
        *,
        module: str = "",
        flags: bool = False,
        shape: ModuleShape | None = None,
        views: Sequence[View] | None = None,
    ) -> Layout:
        """Return the layout that `text` describes.

        Args:
            text: such as ``tp:4,dp:2@0-7``.
            world_size: number of ranks in the world; may be None if `text` gives its ranks.
            module: name of the module for errors.
            flags: whether errors name the module's flag (``--MODULE-parallel``) rather than an argument.
            shape: shape of the module, so that errors suggest layouts that suit it.
            views: further views of the module, whose axes `text` may give; by default the views of `shape`;
                without a shape, `EXPERTS` if `text` has an axis of that view.

        Raises:
            UserError: the text is malformed, or the degrees do not fit the ranks. The message suggests a layout that
                fits.
        """
        if views is None and shape is None:
            views = [EXPERTS] if re.search(r"\be(d?)p\s*:", text) else []
        views = tuple(views if views is not None else shape.views if shape is not None else ())
        axes, degrees, ranks = axis_names(views), dict[str, int](), None
        try:
            degrees, ranks = read(text, axes)
            return _fitted(degrees, ranks, world_size, shape, views)
        except LayoutProblem as problem:
            readable: list[tuple[str, str]] = re.findall("([a-z]+):([1-9][0-9]{0,6})", text)
            wanted = {axis: int(degree) for axis, degree in readable if axis in axes}
            size = world_size or min(_main_ranks(wanted), MAX_PLANNED)
            inside = tuple(rank for rank in ranks or () if world_size is None or rank < world_size)
            better = closest_layout(wanted, inside or tuple(range(size)), shape, views)
            fix = advice(module, better, world_size, flags=flags)
            more = _more_ranks(degrees, ranks, world_size, shape, views, flags)
            raise unfit(problem, module, text, fix + more, flags=flags) from None

    @property
    def size(self) -> int:
        """The number of ranks in the layout."""
        return len(self.ranks)

    @property
    def stage_size(self) -> int:
        """The number of ranks in each pipeline stage."""
        return self.size // self.pp

    @property
    def views(self) -> tuple[View, ...]:
        """The further views, in addition to the main view."""
        return tuple(view for view, _ in self.folds)

    @property
    def every_view(self) -> tuple[View, ...]:
        """All views: the main view, then the further views."""
        return (MAIN, *self.views)

    def view(self, name: str) -> View:
        """Return the view called `name`. Raises `UserError` if the layout has no such view."""
        views = {view.name: view for view in self.every_view}
        if name not in views:
            found, expected = f"no view `{name}`{did_you_mean(name, views)}", f"one of {', '.join(views)}"
            raise UserError.at(f"layout {self}", found=found, expected=expected, fix="use one of these")
        return views[name]

    def ways(self, *splits: Split, view: View = MAIN) -> int:
        """Return the number of shards that `splits` are divided into: the product of their axes' degrees in `view`."""
        degrees = self.degrees_in(view)
        return prod(degrees[axis] for axis in view.axes_of(*splits))

    @property
    def degrees(self) -> dict[str, int]:
        """The degree of each axis of the main view, in the order of `AXES`."""
        return {axis: getattr(self, axis) for axis in AXES}

    @property
    def stated(self) -> dict[str, int]:
        """The degrees of the main view's axes and of each further view's `stated` axes, which determine the rest."""
        further = {axis: n for view, degrees in self.folds for axis, n in zip(view.stated, degrees, strict=True)}
        return {**self.degrees, **further}

    def degrees_in(self, view: View) -> dict[str, int]:
        """Return the degree of each axis of `view`, from the fastest-varying axis to the slowest, `pp`."""
        if view == MAIN:
            return self.degrees
        stated = self.stated
        rest = self.stage_size // prod(stated[axis] for axis in view.stated)
        return {axis: stated.get(axis, rest) for axis in view.names} | {"pp": self.pp}

    def view_of(self, *axes: str) -> View:
        """Return the view that has all of `axes`. Every view has `pp`.

        Raises:
            UserError: an axis is unknown, or no single view has all of them.
        """
        known = axis_names(self.views)
        for axis in axes:
            if axis not in known:
                problem = unknown_axis(axis, known)
                because, fix = problem.why, "use these"
                raise UserError.at("layout", found=problem.found, expected=problem.expected, because=because, fix=fix)
        for view in self.every_view:
            if {*axes} <= {*view.names, "pp"}:
                return view
        found, fix = f"axes {', '.join(axes)}", "use the axes of each view separately"
        raise UserError.at("layout", found=found, expected="axes of one view", fix=fix)

    @classmethod
    def from_mesh(cls, mesh: Any, *, axes: Mapping[str, str] | None = None, experts: Any = None) -> Layout:
        """Return the layout of a PyTorch `DeviceMesh` whose dimensions have the names of axes.

        Args:
            mesh: a whole mesh, not a slice.
            axes: the axis of each dimension with another name, such as ``{"dp_replicate": "dp", "dp_shard": "dp"}``.
            experts: another mesh of the same ranks, with the dimensions `ep`, `edp` (or `dp`) and `pp`, for layers with
                experts.

        Raises:
            UserError: a dimension is not an axis, or a layout cannot express the order of the ranks.
        """
        return cls.of(*of_pair(FROM_MESH, mesh_dims, mesh, experts, axes or {}))

    @classmethod
    def from_grid(cls, grid: Any, *, axes: Mapping[str, str] | None = None, experts: Any = None) -> Layout:
        """Return the layout of a Megatron-Core `HyperCommGrid`. `experts`: a second grid of the same ranks for layers
        with experts. `axes` and errors are as in `from_mesh`.
        """
        return cls.of(*of_pair("Layout.from_grid", grid_dims, grid, experts, axes or {}))

    @classmethod
    def from_mpu(cls) -> Layout:
        """Return the layout of all ranks in Megatron-Core's initialised `parallel_state`. The layout has the view
        `EXPERTS` if expert parallelism was configured.

        Raises:
            UserError: `parallel_state` is not initialised, splits each expert, or has an order of ranks that a layout
                cannot express.
        """
        # Imported here so that importing this module needs no torch.
        import torch.distributed as dist
        from megatron.core import parallel_state  # pyright: ignore[reportMissingTypeStubs]

        return cls.of(*of_mpu(parallel_state, dist))

    @property
    def degrees_text(self) -> str:
        """The degrees as text, such as ``tp:4,dp:2``: all degrees above 1 (``dp:1`` if there are none), and
        degrees of 1 whose default may be larger.
        """
        degrees = self.stated
        main = [f"{axis}:{degrees[axis]}" for axis in AXES if degrees[axis] != 1] or ["dp:1"]
        further = (axis for view in self.views for axis in view.axes if axis.name in degrees)
        shown = (axis.name for axis in further if max(degrees[axis.name], degrees.get(axis.follows, 1)) != 1)
        return ",".join([*main, *(f"{axis}:{degrees[axis]}" for axis in shown)])

    @property
    def ranks_text(self) -> str:
        """The ranks as ranges, such as ``0-3,8-11``."""
        return format_ranks(self.ranks)

    def __str__(self) -> str:
        return f"{self.degrees_text}@{self.ranks_text}"

    def __repr__(self) -> str:
        degrees = ", ".join(f"{axis}={n!r}" for axis, n in self.degrees.items())
        return f"Layout({degrees}, ranks={self.ranks!r}{f', folds={self.folds!r}' if self.folds else ''})"

    def short(self, world_size: int) -> str:
        """Return the shortest text that `parse` reads as this layout in a world of `world_size` ranks."""
        return self.degrees_text if self.ranks == tuple(range(world_size)) else str(self)

    def __contains__(self, rank: int) -> bool:
        i = bisect_left(self.ranks, rank)
        return i < self.size and self.ranks[i] == rank

    def coordinate(self, rank: int) -> Coordinate:
        """Return the index of `rank` along each axis of the main view.

        Raises:
            UserError: `rank` is not in the layout.
        """
        return Coordinate(**self.indices(rank, MAIN))

    def indices(self, rank: int, view: View) -> dict[str, int]:
        """Return the index of `rank` along each axis of `view`, in the order of `degrees_in`. Raises `UserError`."""
        return _indices(self._position(rank), self.degrees_in(view))

    def _position(self, rank: int) -> int:
        if rank not in self:
            raise UserError.at(f"layout {self}", found=f"rank {rank}", expected="one of its ranks", fix="use these")
        return bisect_left(self.ranks, rank)

    def rank_at(self, *, tp: int = 0, sp: int = 0, cp: int = 0, dp: int = 0, pp: int = 0) -> int:
        """Return the rank at the given indices along the axes of the main view.

        Raises:
            UserError: an index is outside the degree of its axis.
        """
        position, stride = 0, 1
        for axis, i, degree in zip(AXES, (tp, sp, cp, dp, pp), self.degrees.values(), strict=True):
            if not 0 <= i < degree:
                found, expected = f"{axis} index {i}", f"0 to {degree - 1}"
                raise UserError.at(f"layout {self}", found=found, expected=expected, fix="use one of these")
            position, stride = position + i * stride, stride * degree
        return self.ranks[position]

    def groups(self, *axes: str) -> tuple[tuple[int, ...], ...]:
        """Return the groups of ranks along `axes` of one view: ranks of a group differ only in the indices of `axes`.

        Groups are in the order of their first rank, and ranks ascend inside a group. Without axes every rank
        forms a separate group. Raises `UserError` as `view_of` does.
        """
        degrees = self.degrees_in(self.view_of(*axes))
        members: dict[tuple[int, ...], list[int]] = {}
        for position, rank in enumerate(self.ranks):
            others = tuple(i for axis, i in _indices(position, degrees).items() if axis not in axes)
            members.setdefault(others, []).append(rank)
        return tuple(map(tuple, members.values()))

    def group_of(self, rank: int, *axes: str) -> tuple[int, ...]:
        """Return the group of ``groups(*axes)`` that contains `rank`."""
        members, stride = [self._position(rank)], 1
        for axis, degree in self.degrees_in(self.view_of(*axes)).items():
            if axis in axes:
                first = [at - at // stride % degree * stride for at in members]
                members = [at + i * stride for i in range(degree) for at in first]
            stride *= degree
        return tuple(self.ranks[at] for at in members)

    def stage(self, index: int) -> Layout:
        """Return the layout of pipeline stage `index`, with a `pp` of 1.

        Raises:
            UserError: the layout has no such stage.
        """
        at = bisect_left(self.ranks, self.rank_at(pp=index))
        return replace(self, pp=1, ranks=self.ranks[at : at + self.stage_size])

    def replica_of(self, rank: int) -> int:
        """Return the number of the data-parallel replica that `rank` belongs to."""
        return self.coordinate(rank).dp


# ------------------------------------------------------------------------------- errors and suggestions


def unfit(problem: LayoutProblem, module: str, text: str, fix: str, *, flags: bool) -> UserError:
    """Return the error for an unsuitable layout of `module`, such as ``text layout `tp:3` (axis tp): found ...``."""
    places = [*([f"--{module}-parallel"] if flags else []), *([f"axis {problem.axis}"] if problem.axis else [])]
    place = f" ({', '.join(places)})" if places else ""
    where = f"{module} layout `{text}`{place}".lstrip()
    return UserError.at(where, found=problem.found, expected=problem.expected, because=problem.why, fix=fix)


def advice(module: str, layout: Layout, world_size: int | None, *, flags: bool) -> str:
    """Return the advice to try a layout, written as a flag or as an argument such as ``text="tp:4"``."""
    text = str(layout) if world_size is None else layout.short(world_size)
    if flags:
        return f"try `--{module}-parallel {text}`"
    return f'try `{module}="{text}"`' if module else f"try `{text}`"


def closest_layout(
    wanted: Mapping[str, int], ranks: tuple[int, ...], shape: ModuleShape | None, views: Sequence[View]
) -> Layout:
    """Return a legal layout over `ranks`, choosing for each axis in turn the largest legal degree up to the `wanted`
    degree. An axis without a wanted degree is limited to the degree of the axis that it follows, or else to 1. `dp` and
    the axis of samples of each further view take the remaining ranks.
    """
    best = dict.fromkeys(AXES, 1)
    for view in (MAIN, *views):
        left = len(ranks) // best["pp"]
        for axis in (axis for axis in view.axes if axis.name != view.rest):
            limit = wanted.get(axis.name, best.get(axis.follows, 1))
            options = (best | {axis.name: degree} for degree in divisors(left) if degree <= limit)
            best = [degrees for degrees in options if shape is None or problem_of(shape, degrees) is None][-1]
            left //= best[axis.name]
        if view is MAIN:
            best["dp"] = left
    return Layout.of(best, ranks, views)


def _more_ranks(
    degrees: Mapping[str, int],
    ranks: tuple[int, ...] | None,
    world_size: int | None,
    shape: ModuleShape | None,
    views: Sequence[View],
    flags: bool,
) -> str:
    """Return the advice to start as many ranks as the layout needs; empty if a larger world would not help."""
    wanted = _main_ranks(degrees) if ranks is None else ranks[-1] + 1
    if world_size is None or not world_size < wanted <= MAX_PLANNED:
        return ""
    try:
        layout = _fitted(degrees, ranks, wanted, shape, views)
    except LayoutProblem:
        return ""
    if shape is not None and problem_of(shape, layout.stated):
        return ""
    how = f" with {LAUNCHER} or torchrun (in a plan: --world-size {wanted})" if flags else ""
    return f", or start {wanted} ranks{how}"


def _fitted(
    degrees: Mapping[str, int],
    ranks: tuple[int, ...] | None,
    world_size: int | None,
    shape: ModuleShape | None,
    views: Sequence[View],
) -> Layout:
    """Return the layout with `degrees`, inferring missing degrees from the number of ranks.

    Raises:
        LayoutProblem: degrees and ranks do not fit each other or the world.
    """
    if ranks is None and world_size is None:
        why = "without them a layout covers the world, whose size is not known here"
        raise LayoutProblem("no ranks", "ranks after `@`", why)
    ranks = tuple(range(world_size or 0)) if ranks is None else ranks
    if world_size is not None and ranks[-1] >= world_size:
        outside = format_ranks(rank for rank in ranks if rank >= world_size)
        why = f"the world has {world_size} ranks"
        raise LayoutProblem(f"ranks {outside}", f"ranks from 0 to {world_size - 1}", why)
    if problem := _misfit(degrees, ranks, views):
        raise problem
    degrees = {"dp": len(ranks) // _main_ranks(degrees), **degrees}
    for view in views:
        degrees |= _followers(view, degrees, len(ranks) // degrees.get("pp", 1), shape.counts if shape else {})
    return Layout.of(degrees, ranks, views)


def _followers(view: View, degrees: Mapping[str, int], stage: int, counts: Mapping[Split, int]) -> dict[str, int]:
    """Return the degrees of a view's axes. An omitted axis that follows another gets the largest divisor of the
    remaining ranks of a `stage` up to the followed axis's degree and the count of what it splits; or all remaining
    ranks if the axis of samples has a degree.
    """
    result = {axis: degrees[axis] for axis in view.names if axis in degrees}
    for axis in view.axes:
        if not axis.follows or axis.name in degrees:
            continue
        left = stage // prod(result.values())
        if view.rest in result:
            result[axis.name] = left
        else:
            limit = min(degrees.get(axis.follows, 1), counts.get(axis.splits, left))
            result[axis.name] = max(n for n in divisors(left) if n <= limit)
    return result


def _main_ranks(degrees: Mapping[str, int]) -> int:
    """Return the product of the degrees of the main view."""
    return prod(n for axis, n in degrees.items() if axis in AXES)


def _misfit(degrees: Mapping[str, int], ranks: Sequence[int], views: Sequence[View]) -> LayoutProblem | None:
    """Return the problem if `degrees` do not fit the ranks, else None. An axis of samples without a degree takes the
    remaining ranks.
    """
    size, needed = len(ranks), _main_ranks(degrees)
    found = f"degrees that multiply to {needed} on {size} ranks"
    if "dp" in degrees and size != needed:
        return LayoutProblem(f"{found} ({format_ranks(ranks)})", str(size), "every rank of a layout has work", "dp")
    if size % needed:
        why = "every replica has equally many ranks"
        return LayoutProblem(f"{found} ({format_ranks(ranks)})", f"a divisor of {size}", why)
    stage = size // degrees.get("pp", 1)
    for view in views:
        given = {axis: degrees[axis] for axis in view.names if axis in degrees}
        # Omitted axes take the remaining ranks if they split samples or follow another axis.
        is_all = view.rest in given and all(axis.name in given for axis in view.axes if axis.follows)
        if stage % prod(given.values()) or (is_all and prod(given.values()) != stage):
            given_text = ",".join(f"{axis}:{n}" for axis, n in given.items())
            expected = f"degrees that multiply to {stage}" if is_all else f"a divisor of {stage}"
            why = f"{', '.join(view.names)} divide the same {stage} ranks of a pipeline stage"
            return LayoutProblem(f"{given_text} on {stage} ranks", expected, why, next(iter(given)))
    return None


def _indices(position: int, degrees: Mapping[str, int]) -> dict[str, int]:
    """Return the index of the rank at `position` along each axis of `degrees`, which begin with the fastest axis."""
    indices: dict[str, int] = {}
    for axis, degree in degrees.items():
        position, indices[axis] = divmod(position, degree)
    return indices
