"""Settings of the schedule, with their checks and defaults."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from math import ceil
from typing import Literal, get_args

from megatron_hetero.base.errors import UserError
from megatron_hetero.layout.grammar import did_you_mean
from megatron_hetero.layout.layout import Layout

ScheduleKind = Literal["auto", "waves", "recompute", "ahead"]


@dataclass(frozen=True)
class ScheduleSettings:
    """Settings of how modules take turns. A setting that is None is chosen from the layouts."""

    kind: ScheduleKind = "auto"
    """How encoders that share ranks with the text module run: in `waves`, or with `recompute` (save only the rows, run
    forward again before backward). `ahead`: no encoder shares ranks with the text module. `auto`: `waves` or `ahead`.
    """
    waves: int | None = None
    """Number of micro-batches encoded at a time. Up to `waves` + pp - 1 micro-batches have live encoder activations."""
    run_ahead: int | None = None
    """Number of micro-batches by which an encoder that shares no ranks may be ahead of the text module. With 0 it
    starts a micro-batch when the text module has received the rows of the previous micro-batch."""
    virtual_stages: int = 1
    """Number of stages of the text module per pipeline rank; several stages are interleaved."""


def sharing_encoders(layouts: Mapping[str, Layout], text: str) -> tuple[str, ...]:
    """Return the encoders that share ranks with the text module, directly or through another encoder. These encoders
    take turns with the text module.
    """
    sharing: list[str] = []
    ranks, more = set(layouts[text].ranks), True
    while more:
        more = [name for name in layouts if name not in (text, *sharing) and not ranks.isdisjoint(layouts[name].ranks)]
        sharing += more
        ranks.update(*(layouts[name].ranks for name in more))
    return tuple(name for name in layouts if name in sharing)


def resolve_settings(
    settings: ScheduleSettings,
    layouts: Mapping[str, Layout],
    micro_batches: int,
    *,
    text: str = "text",
    place: str = "ScheduleSettings",
    maximum: int | None = None,
) -> ScheduleSettings:
    """Return the settings with all defaults filled in; settings that do not apply stay None.

    Args:
        settings: the settings as given.
        layouts: the layouts of all modules, by name.
        micro_batches: the number of micro-batches in the step.
        text: the module that all others feed.
        place: the place where the user gave the settings, for messages.
        maximum: the number of micro-batches of every step, if it is the same for all.

    Raises:
        UserError: a setting is out of range, or applies to encoders that do not exist.
    """
    _require_known(settings, layouts, micro_batches, text, place)
    sharing = sharing_encoders(layouts, text)
    ahead = [name for name in layouts if name not in (text, *sharing)]
    kind = settings.kind if settings.kind != "auto" else "waves" if sharing else "ahead"
    _require_kind_fits(kind, sharing, text, place)
    _require_applies(f"{place}.waves", settings.waves, kind == "waves", f"the schedule is `{kind}`")
    _require_applies(f"{place}.run_ahead", settings.run_ahead, bool(ahead), "no encoder has all its ranks to itself")
    waves, run_ahead = settings.waves, settings.run_ahead
    for name, value in {"waves": waves, "run_ahead": run_ahead}.items():
        if maximum is not None and value is not None and value > maximum:
            because = "a replica of the text module has no more micro-batches in a step"
            fix = f"lower it to {maximum}, or raise train.global_batch_size"
            where = f"{place}.{name} (--{place}.{name})"
            raise UserError.at(where, found=str(value), expected=f"at most {maximum}", because=because, fix=fix)
    if kind == "waves" and waves is None:
        waves = _default_waves(layouts[text].pp, micro_batches, settings.virtual_stages)
    if ahead and run_ahead is None:
        run_ahead = 1  # With one, the next rows are ready when the text module needs them, if batches are equal.
    return replace(settings, kind=kind, waves=waves, run_ahead=run_ahead)


def _default_waves(pp: int, micro_batches: int, virtual_stages: int) -> int:
    """Return the default size of waves: 1 if pp is 1; else a size near 3 pp that makes waves equally large. In
    simulations, waits at waves then cost less than 5 % of a step for an encoder without stages that has at least a
    quarter of the text module's work, and up to 6.5 % for an encoder with stages or virtual text stages.
    """
    if pp == 1:
        return 1
    even = ceil(micro_batches / ceil(micro_batches / (3 * pp)))
    return even if virtual_stages == 1 else ceil(even / pp) * pp


# ------------------------------------------------------------------------------------------------ checks


def _require_known(
    settings: ScheduleSettings, layouts: Mapping[str, Layout], micro_batches: int, text: str, place: str
) -> None:
    if text not in layouts:
        known = f" among {', '.join(layouts)}" if layouts else ""
        found, because = f"no layout for module `{text}`{known}", "it is the module that all others feed"
        fix = f"give the layout of `{text}`, or name that module in `text`"
        raise UserError.at("layouts", found=found, expected="one", because=because, fix=fix)
    _require_least("micro-batches", micro_batches, 1)
    _require_least(f"{place}.waves", settings.waves, 1)
    _require_least(f"{place}.run_ahead", settings.run_ahead, 0)
    _require_least(f"{place}.virtual_stages", settings.virtual_stages, 1)
    if settings.virtual_stages > 1 and layouts[text].pp == 1:
        found = f"{settings.virtual_stages} with {text} layout `{layouts[text]}`"
        because = "stages of a pipeline of one rank have nothing to overlap"
        fix = f"set {place}.virtual_stages to 1, or give `{text}` a pp of 2 or more"
        raise UserError.at(f"{place}.virtual_stages", found=found, expected="1", because=because, fix=fix)
    kinds = get_args(ScheduleKind)
    if settings.kind not in kinds:
        found = f"`{settings.kind}`{did_you_mean(settings.kind, kinds)}"
        raise UserError.at(f"{place}.kind", found=found, expected=f"one of {', '.join(kinds)}", fix="set it to auto")


def _require_least(where: str, found: int | None, least: int) -> None:
    if found is not None and (type(found) is not int or found < least):
        raise UserError.at(where, found=str(found), expected=f"an integer of {least} or more", fix=f"set it to {least}")


def _require_kind_fits(kind: str, sharing: Collection[str], text: str, place: str) -> None:
    if kind == "ahead" and sharing:
        names = ", ".join(f"`{name}`" for name in sharing)
        found = f"`ahead`, while {names} and `{text}` share ranks"
        because = "modules that share ranks take turns on them"
        fix = f"set {place}.kind to auto, or give the modules ranks of their own"
        raise UserError.at(f"{place}.kind", found=found, expected="waves or recompute", because=because, fix=fix)
    if kind != "ahead" and not sharing:
        where, found = f"{place}.kind", f"`{kind}`, while no encoder shares ranks with `{text}`"
        because = "encoders on ranks of their own run concurrently with it"
        raise UserError.at(where, found=found, expected="ahead", because=because, fix=f"set {place}.kind to auto")


def _require_applies(where: str, value: int | None, applies: bool, why: str) -> None:
    if value is not None and not applies:
        raise UserError.at(where, found=str(value), expected="no value", because=why, fix=f"leave {where} out")
