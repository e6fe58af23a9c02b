"""Checks of the layouts of all modules: none is missing, each suits its module, and every rank has work. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from megatron_hetero.base.errors import UserError
from megatron_hetero.layout.axes import MAIN, LayoutProblem, ModuleShape, problem_of
from megatron_hetero.layout.grammar import did_you_mean, format_ranks
from megatron_hetero.layout.layout import Layout, advice, closest_layout, unfit


def resolve(
    texts: Mapping[str, str], modules: Mapping[str, ModuleShape], world_size: int, *, flags: bool = False
) -> dict[str, Layout]:
    """A checked layout for every module: from `texts`, or else ``dp`` over the world. `flags`: whether errors name
    command-line flags, as for `Layout.parse`.

    Raises:
        UserError: see `Layout.parse` and `validate`.
    """
    _require_known(texts, modules, flags)
    layouts = {
        name: Layout.parse(texts.get(name, f"dp:{world_size}"), world_size, module=name, flags=flags, shape=shape)
        for name, shape in modules.items()
    }
    validate(modules, layouts, world_size, flags=flags)
    return layouts


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
            fix = advice(name, Layout.of({"dp": world_size}, tuple(range(world_size))), world_size, flags=flags)
            raise UserError.at(f"module {name}", found="no layout", expected="one", fix=fix)
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
    problem = problem_of(shape, layout.stated)
    if problem is None and layout.views != shape.views:
        found, expected = (", ".join(view.name for view in (MAIN, *views)) for views in (layout.views, shape.views))
        problem = LayoutProblem(f"views {found}", expected, "its layers have parameters in these")
    if problem is not None:
        better = closest_layout(layout.stated, layout.ranks, shape, shape.views)
        fix = advice(shape.name, better, world_size, flags=flags)
        raise unfit(problem, shape.name, layout.short(world_size), fix, flags=flags)


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
        fix=f"widen a layout{fewer}; {advice(name, wider, world_size, flags=flags)}",
    )
