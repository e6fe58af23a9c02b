"""Layouts: how one module is split over ranks, the text that says so, and the checks on it.

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
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from math import prod
from typing import NamedTuple

from megatron_hetero.environment.ranks import LAUNCHER
from megatron_hetero.errors import UserError
from megatron_hetero.layout.axes import AXES, Split, axes_of
from megatron_hetero.layout.degrees import ModuleShape, closest_degrees, divisors, problem_of
from megatron_hetero.layout.grammar import MOST_PLANNED, GrammarError, did_you_mean, format_ranks, read, salvage

__all__ = ["AXES", "Coordinate", "Layout", "ModuleShape", "resolve", "validate"]

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
            raise UserError.at("layout", found=found, expected="integers of 1 or more", fix="mend the degrees")
        if any(b <= a for a, b in zip((-1, *self.ranks), self.ranks, strict=False)):
            expected = "each to be larger than the last, from 0"
            raise UserError.at("layout", found=f"ranks {self.ranks}", expected=expected, fix="sort the ranks")
        needed = prod(self.degrees.values())
        if needed != self.size:
            expected = f"{needed}, the product of the degrees"
            where = f"layout {self.degrees_text}"
            raise UserError.at(where, found=f"{self.size} ranks", expected=expected, fix="give as many ranks as that")

    @classmethod
    def parse(
        cls,
        text: str,
        world_size: int | None = None,
        *,
        module: str = "vision",
        flag: str | None = None,
        shape: ModuleShape | None = None,
        idle: Iterable[int] = (),
    ) -> Layout:
        """The layout that `text` describes (grammar above).

        Args:
            text: such as ``tp:4,dp:2@0-7``.
            world_size: number of ranks in the world; may be left out where `text` gives its ranks.
            module: the module that the layout is for, named in errors.
            flag: what the user set, named in errors; ``--MODULE-parallel`` where left out.
            shape: where given, layouts suggested in errors also suit the module's shape.
            idle: ranks that no other module covers; layouts suggested in errors that name ranks cover these too.

        Raises:
            UserError: the text is malformed, or the degrees do not fit the ranks. The message
                suggests a layout that does.
        """
        flag = flag or f"--{module}-parallel"
        try:
            return _fitted(*read(text), world_size)
        except GrammarError as error:
            suggestion = _mended(text, world_size, shape, idle)
            more = _with_more_ranks(text, world_size, shape)
            axis = f", axis {error.axis}" if error.axis else ""
            raise UserError.at(
                f"{module} layout `{text}` ({flag}{axis})",
                found=error.found,
                expected=error.expected,
                because=error.why,
                fix=f"try `{flag} {suggestion if world_size is None else suggestion.short(world_size)}`{more}",
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


# ------------------------------------------------------------------------------ checks across modules


def resolve(texts: Mapping[str, str], modules: Mapping[str, ModuleShape], world_size: int) -> dict[str, Layout]:
    """A checked layout for every module: what `texts` gives, and ``dp`` over the world for the others.

    Raises:
        UserError: see `Layout.parse` and `validate`.
    """
    _require_known(texts, modules)
    world = tuple(range(world_size))
    layouts = {
        name: _parsed(name, texts, modules, world_size)
        if name in texts
        else Layout(tp=1, sp=1, cp=1, dp=world_size, pp=1, ranks=world)
        for name in modules
    }
    validate(modules, layouts, world_size)
    return layouts


def _parsed(name: str, texts: Mapping[str, str], modules: Mapping[str, ModuleShape], world_size: int) -> Layout:
    try:
        return Layout.parse(texts[name], world_size)
    except UserError:  # Again, for a message with advice that suits the other modules.
        idle = set(range(world_size)).difference(
            *(_likely_ranks(texts.get(other), world_size, shape) for other, shape in modules.items() if other != name)
        )
        return Layout.parse(texts[name], world_size, module=name, shape=modules[name], idle=idle)


def _likely_ranks(text: str | None, world_size: int, shape: ModuleShape) -> Sequence[int]:
    """The ranks that a module covers, or will when its text has been mended."""
    try:
        return range(world_size) if text is None else Layout.parse(text, world_size).ranks
    except UserError:
        return _mended(text or "", world_size, shape).ranks


def validate(modules: Mapping[str, ModuleShape], layouts: Mapping[str, Layout], world_size: int) -> None:
    """Checks the layouts of a model's modules against their shapes and the world.

    Raises:
        UserError: a module is unknown or has no layout, a layout does not suit its module, or ranks
            are outside the world or have no work. The message suggests a layout that passes.
    """
    _require_known(layouts, modules)
    for name, shape in modules.items():
        if name not in layouts:
            raise UserError.at(
                f"module {name}",
                found="no layout",
                expected="one",
                because="every module runs somewhere",
                fix=f"try `--{name}-parallel dp:{world_size}`",
            )
        _require_inside(name, shape, layouts[name], world_size)
        _require_shape(shape, layouts[name], world_size)
    _require_all_covered(modules, layouts, world_size)


def _require_known(names: Iterable[str], modules: Mapping[str, ModuleShape]) -> None:
    for name in names:
        if name not in modules:
            raise UserError.at(
                f"--{name}-parallel",
                found=f"module `{name}`{did_you_mean(name, modules)}",
                expected=f"one of {', '.join(modules)}",
                because="the model has no other",
                fix="rename or remove the setting",
            )


def _require_inside(name: str, shape: ModuleShape, layout: Layout, world_size: int) -> None:
    if layout.ranks[-1] >= world_size:
        Layout.parse(str(layout), world_size, module=name, shape=shape)


def _require_shape(shape: ModuleShape, layout: Layout, world_size: int) -> None:
    problem = problem_of(shape, layout.degrees)
    if problem is None:
        return
    axis, found, expected, why = problem
    options = [str(other.degrees[axis]) for other in _varied(layout, axis) if problem_of(shape, other.degrees) is None]
    use = f"use one of {axis}: {', '.join(options)}; " if options else ""
    suggestion = _closest(layout.degrees, layout.ranks, shape).short(world_size)
    raise UserError.at(
        f"{shape.name} layout `{layout.short(world_size)}` (--{shape.name}-parallel, axis {axis})",
        found=found,
        expected=expected,
        because=why,
        fix=f"{use}try `--{shape.name}-parallel {suggestion}`",
    )


def _require_all_covered(modules: Mapping[str, ModuleShape], layouts: Mapping[str, Layout], world_size: int) -> None:
    idle = sorted(set(range(world_size)).difference(*(layout.ranks for layout in layouts.values())))
    if not idle:
        return
    # The text module is the one that has most use for more ranks.
    name = next((n for n, shape in modules.items() if shape.kind == "text"), next(iter(modules)))
    wider = _closest(layouts[name].degrees, tuple(sorted({*layouts[name].ranks, *idle})), modules[name])
    used = max(rank for layout in layouts.values() for rank in layout.ranks) + 1
    fewer = f", or start {used} ranks only" if idle[0] == used else ""
    raise UserError.at(
        f"ranks {format_ranks(idle)}",
        found="no module that covers them",
        expected=f"every one of the {world_size} ranks to have work",
        because="idle ranks waste their devices",
        fix=f"widen a layout{fewer}; try `--{name}-parallel {wider.short(world_size)}`",
    )


# --------------------------------------------------------------------------------------- suggestions


def _varied(layout: Layout, axis: str) -> Iterator[Layout]:
    """The layout with every degree of `axis` that its ranks allow, `dp` taking up the difference."""
    others = prod(n for other, n in layout.degrees.items() if other not in (axis, "dp"))
    for degree in divisors(layout.size // others):
        yield Layout(**layout.degrees | {axis: degree, "dp": layout.size // others // degree}, ranks=layout.ranks)


def _closest(wanted: Mapping[str, int], ranks: tuple[int, ...], shape: ModuleShape | None) -> Layout:
    return Layout(**closest_degrees(wanted, len(ranks), shape), ranks=ranks)


def _mended(text: str, world_size: int | None, shape: ModuleShape | None, idle: Iterable[int] = ()) -> Layout:
    """A legal layout as close as may be to what a faulty text seems to say, over the `idle` ranks too."""
    degrees, ranks = salvage(text)
    world = range(min(prod(degrees.values()), _MOST_RANKS) if world_size is None else world_size)
    if world_size is not None:
        ranks = tuple(rank for rank in ranks if rank < world_size)
    return _closest(degrees, tuple(sorted({*ranks, *idle})) if ranks else tuple(world), shape)


def _with_more_ranks(text: str, world_size: int | None, shape: ModuleShape | None) -> str:
    """Advice to start as many ranks as a layout wants, where the world has fewer and that would do."""
    try:
        degrees, ranks = read(text)
        wanted = prod(degrees.values()) if ranks is None else ranks[-1] + 1
        if world_size is None or not world_size < wanted <= MOST_PLANNED:
            return ""
        problem = shape and problem_of(shape, _fitted(degrees, ranks, wanted).degrees)
    except GrammarError:
        return ""
    advice = f", or start {wanted} ranks with {LAUNCHER} or torchrun (in a plan: --world-size {wanted})"
    return "" if problem else advice


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


def _known(axes: Sequence[str]) -> Sequence[str]:
    for axis in axes:
        if axis not in AXES:
            found = f"axis `{axis}`{did_you_mean(axis, AXES)}"
            raise UserError.at("layout", found=found, expected=f"one of {', '.join(AXES)}", fix="ask about these")
    return axes
