"""Checks of the layouts of all modules: none is missing, each suits its module, and every rank has work. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from math import prod

from megatron_hetero.base.errors import UserError
from megatron_hetero.layout.axes import MAIN, LayoutProblem, ModuleShape, divisors, problem_of
from megatron_hetero.layout.grammar import did_you_mean, format_ranks
from megatron_hetero.layout.layout import Layout, as_given, closest_layout, mended_layout, titled


def resolve(
    texts: Mapping[str, str], modules: Mapping[str, ModuleShape], world_size: int, *, flags: bool = False
) -> dict[str, Layout]:
    """A checked layout for every module: from `texts`, or else ``dp`` over the world. `flags`: whether errors name
    command-line flags, as for `Layout.parse`.

    Raises:
        UserError: see `Layout.parse` and `validate`.
    """
    _require_known(texts, modules, flags)
    world = tuple(range(world_size))
    layouts = {
        name: _parsed(name, texts, modules, world_size, flags)
        if name in texts
        else Layout.of({"dp": world_size}, world, shape.views)
        for name, shape in modules.items()
    }
    validate(modules, layouts, world_size, flags=flags)
    return layouts


def _parsed(
    name: str, texts: Mapping[str, str], modules: Mapping[str, ModuleShape], world_size: int, flags: bool
) -> Layout:
    """The layout of a module, or an error with advice that suits the other modules too."""
    others = {other: shape for other, shape in modules.items() if other != name}
    covered = (_likely_ranks(texts.get(other), world_size, shape) for other, shape in others.items())
    return Layout.parse(
        texts[name],
        world_size,
        module=name,
        shape=modules[name],
        idle=set(range(world_size)).difference(*covered),
        flags=flags,
        elsewhere=[view for shape in others.values() for view in shape.views],
    )


def _likely_ranks(text: str | None, world_size: int, shape: ModuleShape) -> Sequence[int]:
    """The ranks of a module, or of the layout that is suggested for it."""
    try:
        return range(world_size) if text is None else Layout.parse(text, world_size, views=shape.views).ranks
    except UserError:
        return mended_layout(text or "", world_size, shape, views=shape.views).ranks


def validate(
    modules: Mapping[str, ModuleShape], layouts: Mapping[str, Layout], world_size: int, *, flags: bool = False
) -> None:
    """Check layouts against the shapes of their modules and the world. `flags`: as for `resolve`.

    Raises:
        UserError: a module is unknown or has no layout, a layout does not suit its module, or ranks
            are outside the world or have no work. The message suggests a layout that passes.
    """
    _require_known(layouts, modules, flags)
    for name, shape in modules.items():
        if name not in layouts:
            raise UserError.at(
                f"module {name}",
                found="no layout",
                expected="one",
                fix=f"try `{as_given(name, f'dp:{world_size}', flags=flags)}`",
            )
        layout = layouts[name]
        if layout.ranks[-1] >= world_size:  # Parsed again for the message.
            Layout.parse(str(layout), world_size, module=name, shape=shape, flags=flags, views=layout.views)
        _require_shape(shape, layout, world_size, flags)
    _require_all_covered(modules, layouts, world_size, flags)


def _require_known(names: Iterable[str], modules: Mapping[str, ModuleShape], flags: bool) -> None:
    for name in names:
        if name not in modules:
            raise UserError.at(
                f"--{name}-parallel" if flags else f"layout of `{name}`",
                found=f"module `{name}`{did_you_mean(name, modules)}",
                expected=f"one of {', '.join(modules)}",
                because="the model has no other modules",
                fix="rename or remove it",
            )


def _require_shape(shape: ModuleShape, layout: Layout, world_size: int, flags: bool) -> None:
    problem = problem_of(shape, layout.stated) or _views_problem(shape, layout)
    if problem is None:
        return
    axis, found, expected, why = problem
    options = [str(other.stated[axis]) for other in _varied(layout, axis) if problem_of(shape, other.stated) is None]
    use = f"use one of {axis}: {', '.join(options)}; " if options else ""
    suggestion = closest_layout(layout.stated, layout.ranks, shape, shape.views).short(world_size)
    raise UserError.at(
        titled(shape.name, layout.short(world_size), axis, flags=flags),
        found=found,
        expected=expected,
        because=why,
        fix=f"{use}try `{as_given(shape.name, suggestion, flags=flags)}`",
    )


def _views_problem(shape: ModuleShape, layout: Layout) -> LayoutProblem | None:
    """The problem of a layout that has other views than its module."""
    if layout.views == shape.views:
        return None
    found, expected = (", ".join(view.name for view in (MAIN, *views)) for views in (layout.views, shape.views))
    return LayoutProblem("", f"views {found}", expected, "its layers have parameters in these")


def _require_all_covered(
    modules: Mapping[str, ModuleShape], layouts: Mapping[str, Layout], world_size: int, flags: bool
) -> None:
    idle = sorted(set(range(world_size)).difference(*(layout.ranks for layout in layouts.values())))
    if not idle:
        return
    # The text module has most use for more ranks.
    name = next((n for n, shape in modules.items() if shape.kind == "text"), next(iter(modules)))
    ranks, shape = tuple(sorted({*layouts[name].ranks, *idle})), modules[name]
    wider = closest_layout(layouts[name].stated, ranks, shape, shape.views)
    used = max(rank for layout in layouts.values() for rank in layout.ranks) + 1
    fewer = f", or start {used} ranks only" if idle[0] == used else ""
    raise UserError.at(
        f"ranks {format_ranks(idle)}",
        found="no module that covers them",
        expected=f"every one of the {world_size} ranks to have work",
        because="idle ranks waste their devices",
        fix=f"widen a layout{fewer}; try `{as_given(name, wider.short(world_size), flags=flags)}`",
    )


def _varied(layout: Layout, axis: str) -> Iterator[Layout]:
    """The layout with every degree of `axis` that its ranks allow; the axis of samples takes up the difference."""
    if not axis:
        return
    view = layout.view_of(axis)
    others = prod(n for other, n in layout.degrees_in(view).items() if other not in (axis, view.rest))
    for degree in divisors(layout.size // others):
        degrees = layout.stated | {axis: degree}
        if view == MAIN:
            degrees["dp"] = layout.size // others // degree
        with suppress(UserError):  # Other views may not fit shorter stages.
            yield Layout.of(degrees, layout.ranks, layout.views)
