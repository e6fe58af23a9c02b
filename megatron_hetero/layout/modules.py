"""Checks the layouts of all modules: each module has one, each suits its module, and every rank has work. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from megatron_hetero.base.errors import UserError, one_of
from megatron_hetero.layout.axes import MAIN, LayoutProblem, ModuleShape, problem_of
from megatron_hetero.layout.grammar import did_you_mean, format_ranks
from megatron_hetero.layout.layout import Layout, advice, closest_layout, unfit


def resolve(
    texts: Mapping[str, str], modules: Mapping[str, ModuleShape], world_size: int, *, flags: bool = False
) -> dict[str, Layout]:
    """Return a checked layout for every module: parsed from `texts`, or ``dp`` over the world. `flags`: whether errors
    name command-line flags, as for `Layout.parse`.

    Raises:
        UserError: a module is unknown; see also `Layout.parse` and `validate`.
    """
    for name in texts:
        if name not in modules:
            where, expected = f"--{name}-parallel" if flags else f"layout of `{name}`", one_of(modules, "modules")
            found, because = f"module `{name}`{did_you_mean(name, modules)}", "the model has no other modules"
            raise UserError.at(where, found=found, expected=expected, because=because, fix="rename or remove it")
    layouts = {
        name: Layout.parse(texts.get(name, f"dp:{world_size}"), world_size, module=name, flags=flags, shape=shape)
        for name, shape in modules.items()
    }
    validate(modules, layouts, world_size, flags=flags)
    return layouts


def validate(
    modules: Mapping[str, ModuleShape], layouts: Mapping[str, Layout], world_size: int, *, flags: bool = False
) -> None:
    """Check the layouts of all modules against the modules' shapes and the world. `flags`: as for `resolve`.

    Raises:
        UserError: a layout does not suit its module, or ranks have no work. The message suggests a layout that passes.
    """
    for name, shape in modules.items():
        _require_shape(shape, layouts[name], world_size, flags)
    _require_all_covered(modules, layouts, world_size, flags)


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
    # Give more ranks to the text module, which gains the most from them.
    name = next((n for n, shape in modules.items() if shape.kind == "text"), next(iter(modules)))
    ranks, shape = tuple(sorted({*layouts[name].ranks, *idle})), modules[name]
    wider = closest_layout(layouts[name].stated, ranks, shape, shape.views)
    used = max(rank for layout in layouts.values() for rank in layout.ranks) + 1
    fewer = f", or start {used} ranks only" if idle[0] == used else ""
    where, expected = f"ranks {format_ranks(idle)}", f"every one of the {world_size} ranks to have work"
    found, fix = "no module that covers them", f"widen a layout{fewer}; {advice(name, wider, world_size, flags=flags)}"
    raise UserError.at(where, found=found, expected=expected, because="idle ranks waste their devices", fix=fix)
