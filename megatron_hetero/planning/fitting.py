"""Settings that make a plan fit, found by planning it with them. Pure.

Of the changes in `CHANGES` each is planned alone, then pairs of them; then the same layouts on more ranks. The time of
a step is estimated as the simulation of its schedule in operations, times what a change says that this does not see.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, zip_longest

from megatron_hetero.config.edits import flags_of, with_settings
from megatron_hetero.errors import UserError
from megatron_hetero.layout.layout import Layout
from megatron_hetero.names import TEXT
from megatron_hetero.planning.changes import CHANGES, Change
from megatron_hetero.planning.estimate import Plan
from megatron_hetero.planning.memory.nccl_memory import NODE

SHOWN = 2
"""Alternatives that are looked for."""
LEAST_TRIES, MOST_TRIES = 8, 60
"""Plans that are made in search of them, however large or small."""
EFFORT = 150_000
"""Ranks and actions of all these plans together, which takes some seconds."""
OVERHEAD = 500
"""What a plan costs besides, in actions."""
FACTORS = (2, 4)
"""By how much more ranks are tried."""
MOST_RANKS = 1024
"""Larger worlds are not tried."""
SLACK = 1.02
"""Pairs are planned whose savings, added up, come as close as this to the memory there is."""

CLOSEST = 3
"""Pairs that are planned where none should fit, to say how close they come."""


@dataclass(frozen=True, eq=False)
class Attempt:
    """The plan with some settings changed. `slowdown`: a step's time over that of the plan as it was."""

    change: Change
    plan: Plan
    slowdown: float

    @property
    def needed(self) -> int:
        """Bytes of the rank that needs most, allowance included."""
        return int(self.plan.totals.max())

    @property
    def flags(self) -> str:
        """What the command line needs for it, besides the number of ranks."""
        return flags_of(self.change.settings)


@dataclass(frozen=True)
class Fitting:
    """What was found: up to `SHOWN` attempts that fit, cheapest in time first. Where there is none, the one that comes
    closest, and one that fits on more ranks.
    """

    attempts: tuple[Attempt, ...] = ()
    closest: Attempt | None = None
    larger: Attempt | None = None


def find_fitting(plan: Plan, limit: int) -> Fitting:
    """What makes every rank of a plan need at most `limit` bytes."""
    trials = _Trials(plan, _tries(plan))
    alone = [a for a in trials.of(_changes(plan)) if (a.plan.totals < plan.totals).any()]
    if found := _cheapest(alone, limit):
        return Fitting(found)
    pairs = list(trials.of(_pairs(alone, plan, limit), enough=limit))
    if found := _cheapest(pairs, limit):
        return Fitting(found)
    closest = min([*alone, *pairs], key=lambda attempt: attempt.needed, default=None)
    return Fitting((), closest, _on_more_ranks(plan, closest, limit))


def _changes(plan: Plan) -> list[Change]:
    """All changes, the first of each entry before the second of any, since not all may be tried."""
    in_turn = zip_longest(*(entry(plan) for entry in CHANGES))
    return [change for turn in in_turn for change in turn if change is not None]


def _tries(plan: Plan) -> int:
    size = OVERHEAD + plan.world_size + sum(len(role.actions) for role in plan.schedule.roles)
    return max(LEAST_TRIES, min(MOST_TRIES, EFFORT // size))


@dataclass
class _Trials:
    """Plans `base` with changed settings, `left` more times."""

    base: Plan
    left: int

    def of(self, changes: Iterable[Change], *, enough: int | None = None) -> Iterator[Attempt]:
        """Those changes that go together with all other settings, until `SHOWN` need no more than `enough` bytes."""
        fitting: set[frozenset[str]] = set()
        for change in changes:
            if not self.left or len(fitting) == SHOWN:
                return
            self.left -= 1
            if attempt := planned(self.base, change):
                yield attempt
                if enough is not None and attempt.needed <= enough:
                    fitting.add(frozenset(change.settings))


def planned(base: Plan, change: Change, world_size: int | None = None) -> Attempt | None:
    """The plan `base` with a change; none where that would be refused."""
    try:
        plan = Plan.of(with_settings(base.config, change.settings), world_size or base.world_size, gpu=base.gpu)
    except UserError:
        return None
    return Attempt(change, plan, change.unseen * plan.simulation.seconds / base.simulation.seconds)


def _cheapest(attempts: Sequence[Attempt], limit: int) -> tuple[Attempt, ...]:
    """Those that fit, cheapest in time first, of each choice of settings one."""
    fitting = sorted((a for a in attempts if a.needed <= limit), key=lambda attempt: attempt.slowdown)
    chosen: dict[frozenset[str], Attempt] = {}
    for attempt in fitting:
        chosen.setdefault(frozenset(attempt.change.settings), attempt)
    return tuple(chosen.values())[:SHOWN]


def _pairs(alone: Sequence[Attempt], plan: Plan, limit: int) -> list[Change]:
    """Two changes of different settings that should fit together, cheapest in time first. Where there are none, those
    that should need least.
    """
    pairs = [(a, b) for a, b in combinations(alone, 2) if not a.change.settings.keys() & b.change.settings.keys()]
    needed = [int((a.plan.totals + b.plan.totals - plan.totals).max()) for a, b in pairs]
    by_time = sorted(range(len(pairs)), key=lambda i: pairs[i][0].slowdown * pairs[i][1].slowdown)
    by_memory = sorted(range(len(pairs)), key=needed.__getitem__)
    chosen = [i for i in by_time if needed[i] <= SLACK * limit] or by_memory[:CLOSEST]
    return [_both(*pairs[i]) for i in chosen]


def _both(a: Attempt, b: Attempt) -> Change:
    return Change(
        {**a.change.settings, **b.change.settings},
        a.change.unseen * b.change.unseen,
        a.change.rounds or b.change.rounds,
    )


# --------------------------------------------------------------------------------------------- more ranks


def _on_more_ranks(plan: Plan, closest: Attempt | None, limit: int) -> Attempt | None:
    """The same layouts on as few more ranks as fit, with other settings as they are, or those that come closest.
    Encoders get more replicas; the text module replicas, stages, or ranks of each inside a node.
    """
    starts = [Change({}), *([closest.change] if closest else [])]
    for factor in FACTORS:
        world_size = factor * plan.world_size
        if world_size > MOST_RANKS:
            return None
        for start in starts:
            layouts = plan.layouts if start.settings == {} or closest is None else closest.plan.layouts
            for axis in ("dp", "pp", *(["tp"] if factor * layouts[TEXT].tp <= NODE else [])):
                grown = {
                    f"parallel.{name}": _grown(layout, factor, axis if name == TEXT else "dp").short(world_size)
                    for name, layout in layouts.items()
                }
                attempt = planned(plan, replace(start, settings={**start.settings, **grown}), world_size)
                if attempt and attempt.needed <= limit:
                    return attempt
    return None


def _grown(layout: Layout, factor: int, axis: str) -> Layout:
    """`factor` ranks in place of each, which one degree more makes use of."""
    ranks = tuple(rank * factor + i for rank in layout.ranks for i in range(factor))
    return replace(layout, **{axis: factor * layout.degrees[axis]}, ranks=ranks)
