"""Layouts: how one module is split over ranks, and the text that says so.

The grammar is in `megatron_hetero.layout.grammar`. Examples:

    sp:8                 eight-way sequence parallel over a world of 8
    tp:4,pp:2@8-15       four-way tensor parallel in two pipeline stages on ranks 8 to 15
    dp:2,tp:4@0-3,8-11   two replicas of four tensor-parallel ranks on two sets of ranks

Without ``@`` a layout covers the whole world. ``dp`` left out is what the other degrees leave of the
ranks. Ranks ascend, because process groups number their members in ascending order.

Everything here is pure: no torch, no process group.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from math import prod
from typing import Any, NamedTuple

from megatron_hetero.environment.ranks import LAUNCHER
from megatron_hetero.errors import UserError
from megatron_hetero.layout.axes import AXES, Split, axes_of
from megatron_hetero.layout.degrees import ModuleShape, closest_degrees, problem_of
from megatron_hetero.layout.foreign import grid_of_hyper_grid, grid_of_mesh, grid_of_mpu, in_layout_order
from megatron_hetero.layout.grammar import MOST_PLANNED, GrammarError, did_you_mean, format_ranks, read, salvage

__all__ = ["AXES", "Coordinate", "Layout", "ModuleShape"]

_MOST_RANKS = 1 << 20  # of a world that is suggested


class Coordinate(NamedTuple):
    """Where a rank sits in its layout: one index per axis, in the order of `AXES`."""

    tp: int = 0
    sp: int = 0
    cp: int = 0
    dp: int = 0
    pp: int = 0


# The specification, for tp:2,dp:2,pp:2@4-11. `tp` varies fastest, then sp, cp, dp, and pp slowest.
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
# Each row shows the group that the rank belongs to.
@dataclass(frozen=True)
class Layout:
    """A degree per axis, and the ranks that they cover.

    ``repr`` is for machines and evaluates to an equal value. ``str`` is for people and always says
    the ranks, so that ``Layout.parse(str(x)) == x`` in any world that has them.

    Raises:
        UserError: a degree is not a positive integer, the ranks do not ascend, or their number is
            not the product of the degrees.
    """

    tp: int
    sp: int
    cp: int
    dp: int
    pp: int
    ranks: tuple[int, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "ranks", tuple(self.ranks))
        wrong = [f"{axis}:{degree}" for axis, degree in self.degrees.items() if type(degree) is not int or degree < 1]
        if wrong:
            found = f"degrees {', '.join(wrong)}"
            raise UserError.at("layout", found=found, expected="integers of 1 or more", fix="correct the degrees")
        if any(b <= a for a, b in zip((-1, *self.ranks), self.ranks, strict=False)):
            expected = "each to be larger than the last, from 0"
            raise UserError.at("layout", found=f"ranks {self.ranks}", expected=expected, fix="sort the ranks")
        needed = prod(self.degrees.values())
        if needed != self.size:
            expected = f"{needed}, the product of the degrees"
            where = f"layout {self.degrees_text}"
            raise UserError.at(where, found=f"{self.size} ranks", expected=expected, fix="give that many ranks")

    @classmethod
    def parse(
        cls,
        text: str,
        world_size: int | None = None,
        *,
        module: str = "",
        flags: bool = False,
        shape: ModuleShape | None = None,
        idle: Iterable[int] = (),
    ) -> Layout:
        """The layout that `text` describes (grammar above).

        Args:
            text: such as ``tp:4,dp:2@0-7``.
            world_size: number of ranks in the world; may be left out where `text` gives its ranks.
            module: the module that the layout is for, named in errors.
            flags: whether errors name the module's flag (``--MODULE-parallel``) rather than an argument.
            shape: where given, layouts suggested in errors also suit the module's shape.
            idle: ranks that no other module covers; layouts suggested in errors that name ranks cover these too.

        Raises:
            UserError: the text is malformed, or the degrees do not fit the ranks. The message
                suggests a layout that does.
        """
        try:
            return _fitted(*read(text), world_size)
        except GrammarError as error:
            suggestion = mended_layout(text, world_size, shape, idle)
            more = _with_more_ranks(text, world_size, shape, flags)
            better = str(suggestion) if world_size is None else suggestion.short(world_size)
            raise UserError.at(
                titled(module, text, error.axis, flags=flags),
                found=error.found,
                expected=error.expected,
                because=error.why,
                fix=f"try `{as_given(module, better, flags=flags)}`{more}",
            ) from None

    @property
    def size(self) -> int:
        """Number of ranks."""
        return len(self.ranks)

    def ways(self, *splits: Split) -> int:
        """Over how many ranks these are split: the product of the degrees of their axes."""
        return prod(self.degrees[axis] for axis in axes_of(*splits))

    @property
    def degrees(self) -> dict[str, int]:
        """The degree of each axis, in the order of `AXES`."""
        return {axis: getattr(self, axis) for axis in AXES}

    @classmethod
    def from_mesh(cls, mesh: Any, *, axes: Mapping[str, str] | None = None) -> Layout:
        """The layout of a whole `DeviceMesh` of PyTorch, with dimensions named as axes.

        Args:
            mesh: as made, not a slice of another.
            axes: of dimensions with other names, such as ``{"dp_replicate": "dp", "dp_shard": "dp"}``.

        Raises:
            UserError: a dimension is no axis, or ranks are ordered in a way that a layout cannot express.
        """
        return _of_grid(*grid_of_mesh(mesh, axes or {}))

    @classmethod
    def from_grid(cls, grid: Any, *, axes: Mapping[str, str] | None = None) -> Layout:
        """The layout of a `HyperCommGrid` of Megatron-Core. `axes`, `UserError` as `from_mesh`."""
        return _of_grid(*grid_of_hyper_grid(grid, axes or {}))

    @classmethod
    def from_mpu(cls) -> Layout:
        """The layout that Megatron-Core's `parallel_state` was initialised with, of all ranks.

        Raises:
            UserError: it is not initialised, has experts on ranks of their own, or orders ranks in a way that a layout
                cannot express.
        """
        # It needs the process groups, and so torch.
        import torch.distributed as dist
        from megatron.core import parallel_state  # pyright: ignore[reportMissingTypeStubs]

        return _of_grid(*grid_of_mpu(parallel_state, dist))

    @property
    def degrees_text(self) -> str:
        """The degrees above one, such as ``tp:4,dp:2``; ``dp:1`` where there are none."""
        return ",".join(f"{axis}:{n}" for axis, n in self.degrees.items() if n != 1) or "dp:1"

    @property
    def ranks_text(self) -> str:
        """The ranks as ranges, such as ``0-3,8-11``."""
        return format_ranks(self.ranks)

    def __str__(self) -> str:
        return f"{self.degrees_text}@{self.ranks_text}"

    def short(self, world_size: int) -> str:
        """The shortest text that `parse` reads as this layout in a world of `world_size` ranks."""
        return self.degrees_text if self.covers(world_size) else str(self)

    def covers(self, world_size: int) -> bool:
        """Whether the layout's ranks are the whole world."""
        return self.ranks == tuple(range(world_size))

    def __contains__(self, rank: int) -> bool:
        i = bisect_left(self.ranks, rank)
        return i < self.size and self.ranks[i] == rank

    def coordinate(self, rank: int) -> Coordinate:
        """The index of `rank` along each axis.

        Raises:
            UserError: the rank is not one of the layout's.
        """
        if rank not in self:
            raise UserError.at(
                f"layout {self}", found=f"rank {rank}", expected="one of its ranks", fix="ask about those"
            )
        rest = bisect_left(self.ranks, rank)
        index: list[int] = []
        for degree in self.degrees.values():
            index.append(rest % degree)
            rest //= degree
        return Coordinate(*index)

    def rank_at(self, *, tp: int = 0, sp: int = 0, cp: int = 0, dp: int = 0, pp: int = 0) -> int:
        """The rank at these indices; an axis left out is at its first.

        Raises:
            UserError: an index lies outside the degree of its axis.
        """
        position, stride = 0, 1
        for axis, i, degree in zip(AXES, (tp, sp, cp, dp, pp), self.degrees.values(), strict=True):
            if not 0 <= i < degree:
                found, expected = f"{axis} index {i}", f"0 to {degree - 1}"
                raise UserError.at(f"layout {self}", found=found, expected=expected, fix="ask for one of these")
            position, stride = position + i * stride, stride * degree
        return self.ranks[position]

    def groups(self, *axes: str) -> tuple[tuple[int, ...], ...]:
        """The ranks parted into groups along `axes`: in a group only the indices of `axes` differ.

        Groups come in the order of their first rank and ranks ascend inside a group, which is the
        order of the layout. Without axes every rank is a group of its own.
        """
        members: dict[Coordinate, list[int]] = {}
        zeros = dict.fromkeys(_known(axes), 0)
        for rank in self.ranks:
            members.setdefault(self.coordinate(rank)._replace(**zeros), []).append(rank)
        return tuple(map(tuple, members.values()))

    def group_of(self, rank: int, *axes: str) -> tuple[int, ...]:
        """The group of ``groups(*axes)`` that holds `rank`."""
        here = self.coordinate(rank)._asdict()
        spans = [range(n) if axis in _known(axes) else (here[axis],) for axis, n in self.degrees.items()]
        # The last factor of a product varies fastest, so the axes go in from slow to fast.
        return tuple(self.rank_at(**dict(zip(reversed(AXES), i, strict=True))) for i in product(*reversed(spans)))

    def stage(self, index: int) -> Layout:
        """One pipeline stage as a layout of its own, with `pp` of 1.

        Raises:
            UserError: there is no such stage.
        """
        first = self.rank_at(pp=index)
        size = self.size // self.pp
        at = bisect_left(self.ranks, first)
        return Layout(**self.degrees | {"pp": 1}, ranks=self.ranks[at : at + size])

    def peer_at_stage(self, rank: int, stage: int) -> int:
        """The rank of another pipeline stage with the other coordinates of `rank`."""
        return self.rank_at(**self.coordinate(rank)._asdict() | {"pp": stage})

    def replica_of(self, rank: int) -> int:
        """The data-parallel replica that `rank` belongs to, from 0."""
        return self.coordinate(rank).dp


# --------------------------------------------------------------------------------------- suggestions


def titled(module: str, layout: str, axis: str, *, flags: bool) -> str:
    """A layout in an error, such as ``text layout `tp:3` (axis tp)``."""
    places = [*([f"--{module}-parallel"] if flags else []), *([f"axis {axis}"] if axis else [])]
    return f"{module} layout `{layout}`".lstrip() + (f" ({', '.join(places)})" if places else "")


def as_given(module: str, layout: str, *, flags: bool) -> str:
    """How a user gives a module its layout: ``text="tp:4"``, or by a flag."""
    if flags:
        return f"--{module}-parallel {layout}"
    return f'{module}="{layout}"' if module else layout


def closest_layout(wanted: Mapping[str, int], ranks: tuple[int, ...], shape: ModuleShape | None) -> Layout:
    """The layout over `ranks`, legal for a module of this shape, whose degrees are closest to those wanted."""
    return Layout(**closest_degrees(wanted, len(ranks), shape), ranks=ranks)


def mended_layout(text: str, world_size: int | None, shape: ModuleShape | None, idle: Iterable[int] = ()) -> Layout:
    """A legal layout as close as may be to what a faulty text seems to say, over the `idle` ranks too."""
    degrees, ranks = salvage(text)
    world = range(min(prod(degrees.values()), _MOST_RANKS) if world_size is None else world_size)
    if world_size is not None:
        ranks = tuple(rank for rank in ranks if rank < world_size)
    return closest_layout(degrees, tuple(sorted({*ranks, *idle})) if ranks else tuple(world), shape)


def _with_more_ranks(text: str, world_size: int | None, shape: ModuleShape | None, flags: bool) -> str:
    """Advice to start as many ranks as a layout wants, where the world has fewer and that would do."""
    try:
        degrees, ranks = read(text)
        wanted = prod(degrees.values()) if ranks is None else ranks[-1] + 1
        if world_size is None or not world_size < wanted <= MOST_PLANNED:
            return ""
        problem = shape and problem_of(shape, _fitted(degrees, ranks, wanted).degrees)
    except GrammarError:
        return ""
    if problem:
        return ""
    if not flags:
        return f", or start {wanted} ranks"
    return f", or start {wanted} ranks with {LAUNCHER} or torchrun (in a plan: --world-size {wanted})"


def _fitted(degrees: dict[str, int], ranks: tuple[int, ...] | None, world_size: int | None) -> Layout:
    """The layout of these degrees, `dp` inferred where it is missing.

    Raises:
        GrammarError: degrees and ranks do not fit one another or the world.
    """
    if ranks is None and world_size is None:
        why = "without them a layout covers the world, whose size is not known here"
        raise GrammarError("no ranks", "ranks after `@`", why)
    ranks = tuple(range(world_size or 0)) if ranks is None else ranks
    if world_size is not None and ranks[-1] >= world_size:
        raise _outside(ranks, world_size)
    stated = prod(degrees.values())
    where = f"{len(ranks)} ranks ({format_ranks(ranks)})"
    if len(ranks) % stated:
        multiply = f"degrees that multiply to {stated} on {where}"
        raise GrammarError(multiply, f"a divisor of {len(ranks)}", "every replica has equally many ranks")
    if "dp" in degrees and len(ranks) != stated:
        found = f"degrees that multiply to {stated} on {where}"
        raise GrammarError(found, f"{len(ranks)}", "every rank of a layout has a part of the work", "dp")
    return Layout(**dict.fromkeys(AXES, 1) | {"dp": len(ranks) // stated} | degrees, ranks=ranks)


def _outside(ranks: Sequence[int], world_size: int) -> GrammarError:
    found = f"ranks {format_ranks(rank for rank in ranks if rank >= world_size)}"
    return GrammarError(found, f"ranks from 0 to {world_size - 1}", f"the world has {world_size} ranks")


def _of_grid(what: str, dims: Sequence[tuple[str, int]], ranks: Sequence[int]) -> Layout:
    """The layout of `ranks`, listed along `dims` from the slowest to the fastest. Raises `UserError`."""
    ordered = in_layout_order(what, dims, ranks)
    degrees = dict.fromkeys(AXES, 1)
    for axis, size in dims:
        degrees[axis] *= size
    return Layout(**degrees, ranks=tuple(ordered))


def _known(axes: Sequence[str]) -> Sequence[str]:
    for axis in axes:
        if axis not in AXES:
            found = f"axis `{axis}`{did_you_mean(axis, AXES)}"
            raise UserError.at("layout", found=found, expected=f"one of {', '.join(AXES)}", fix="ask about these")
    return axes
