"""A configuration with some settings changed, and the flags that change them.

Changes of settings that save memory, as they are tried where a plan does not fit. Pure.

An entry of `CHANGES` is a small function of the plan that yields each `Change` that it would try: settings by dotted
name (several where they belong together), and how much longer a step takes by what the plan's simulation does not see.
It yields nothing where it does not apply or is in use already. To add one, write the function and put it into
`CHANGES`:

    def no_run_ahead(plan: Plan) -> Iterator[Change]:
        if plan.config.schedule.run_ahead != 0:
            yield Change({"schedule.run_ahead": 0})

Nothing else is needed. What a change saves, and whether it goes together with all other settings, is found by planning
it; repeated work, idle stages and shorter waves are in the simulation, so that `unseen` is for the rest: kernels of
smaller matrices, transfers, collectives. The order of entries matters only between changes of equal cost.

Settings that make a plan fit, found by planning it with them. Pure.

Of the changes in `CHANGES` each is planned alone, then pairs of them; then the same layouts on more ranks. The time of
a step is estimated as the simulation of its schedule in operations, times what a change says that this does not see.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, is_dataclass, replace
from itertools import combinations, zip_longest
from typing import Any

import torch

from megatron_hetero.base.errors import TEXT, UserError
from megatron_hetero.config.fields import children, item_type
from megatron_hetero.config.schema import Config
from megatron_hetero.estimate.communicator_memory import NODE
from megatron_hetero.estimate.estimate import Plan
from megatron_hetero.layout.layout import Layout

Settings = Mapping[str, object]
"""Values by dotted name, such as `{"model.recompute.text": "full"}`; None where a default is to be chosen."""


def with_settings(config: Config, settings: Settings) -> Config:
    """The configuration with these settings changed, all at once. Raises `UserError` where they do not go together."""
    return _changed(config, settings, Config)


def _changed(node: Any, settings: Settings, kind: Any) -> Any:
    """`node`, a section or a mapping of names, with what is below it changed. The name of a node itself is empty.
    `kind`: its type, which says what a new name of a mapping stands for.
    """
    if "" in settings:
        return settings[""]
    below: dict[str, dict[str, object]] = {}
    for name, value in settings.items():
        first, _, rest = name.partition(".")
        below.setdefault(first, {})[rest] = value
    item = item_type(kind)
    if item is not None:
        new = item() if is_dataclass(item) and isinstance(item, type) else None
        return {**node, **{name: _changed(node.get(name, new), inner, item) for name, inner in below.items()}}
    kinds = children(kind) or {}
    return replace(node, **{name: _changed(getattr(node, name), inner, kinds[name]) for name, inner in below.items()})


def flags_of(settings: Settings) -> str:
    """The settings as flags of the command line."""
    return " ".join(f"{_flag(name)} {_text(value)}" for name, value in settings.items())


def _flag(name: str) -> str:
    section, _, module = name.partition(".")
    return f"--{module}-parallel" if section == "parallel" else f"--{name}"


def _text(value: object) -> str:
    if isinstance(value, tuple):
        return " ".join(map(_text, value))
    return str(value).lower() if value is None or isinstance(value, bool) else str(value)


SMALLER = 1.05
"""How much longer a step takes when micro-batches are halved: kernels of fewer tokens, twice as many collectives."""
DOUBLED = {"tp": 1 / (1 - 0.28), "pp": 1.06, "cp": 1.1}
"""And when this degree of the text module is doubled in place of dp. Throughput falls by 28 % with tp, and by some 6 %
with pp (Llama 3 of 70 billion parameters, "Memory Tuning" in the documentation of Megatron Bridge; idle stages are in
the simulation). For cp, whose layers gather keys and values, it is a guess between them.
"""
EXCHANGED = {True: 1.02, False: 1.1}
"""And when sp of an encoder is doubled in place of dp: a guess, for one whose windows stay on their ranks, so that few
layers exchange tokens, and for one without windows, all of whose layers do.
"""


SPLIT, ROUNDED = 1.005, 1.01
"""How much longer a step takes when masters are put together for each update; and when moments or gradients are
rounded. That takes less time, if any, but what trains as before comes first.
"""
CHUNK = 8192
"""Tokens of a chunk: enough for the kernels of matrix products."""
SELECTED = 1.03
"""How much longer a step takes when norms and activation functions are repeated, which takes passes over memory: a
guess.
"""
OFFLOADED = 1.02
"""How much longer a step takes when activations are copied to the host and back beside the computation: a guess, for
the memory and the bus that they share with kernels and collectives. Copies that take longer than what they run beside
are in the simulation.
"""
STREAMED = 1.3
"""How much longer a step takes when optimizer states are streamed from the host: a guess, for steps of some seconds."""
REDUCED, GATHERED = 1.02, 1.1
"""How much longer a step takes when gradients are reduced in each backward pass; and when weights are gathered for each
forward and backward pass, beside what is computed: guesses, for micro-batches of some thousand tokens on one node.
"""


@dataclass(frozen=True)
class Change:
    """Settings to change, and by what factor a step takes longer in ways that a simulation does not see."""

    settings: Settings
    unseen: float = 1.0
    rounds: bool = False
    """Whether training is no longer the same to rounding."""


def split_activations(plan: Plan) -> Iterator[Change]:
    """Along the sequence over tp: the same bytes are sent, in other collectives."""
    for name, layout in plan.layouts.items():
        if layout.tp > 1 and not plan.job.sequence_parallel[name]:
            yield Change({f"model.sequence_parallel.{name}": True})


def shorter_waves(plan: Plan) -> Iterator[Change]:
    """Encoders on shared ranks keep fewer micro-batches at once, and the pipeline drains more often."""
    window = max((encoder.window for encoder in plan.schedule.encoders if encoder.style == "waves"), default=1)
    while window > 1:
        window //= 2
        yield Change({"schedule.waves": window})


def no_run_ahead(plan: Plan) -> Iterator[Change]:
    """Encoders on ranks of their own keep no micro-batch that the text module has not asked for."""
    if any(encoder.style == "ahead" for encoder in plan.schedule.encoders) and plan.config.schedule.run_ahead != 0:
        yield Change({"schedule.run_ahead": 0})


def rows_alone(plan: Plan) -> Iterator[Change]:
    """Encoders on shared ranks keep rows alone, and repeat their forward pass."""
    if any(encoder.style == "waves" for encoder in plan.schedule.encoders):
        waves = {"schedule.waves": None} if plan.config.schedule.waves is not None else {}
        yield Change({"schedule.kind": "recompute", **waves})


def recomputed_layers(plan: Plan) -> Iterator[Change]:
    """Layers repeat what is cheap to make again, or keep their input alone and repeat their forward pass."""
    for name in plan.layouts:
        mode = plan.config.model.recompute.get(name, "none")
        if mode == "none":
            yield Change({f"model.recompute.{name}": "selective"}, SELECTED)
        if mode != "full":
            yield Change({f"model.recompute.{name}": "full"})


def split_masters(plan: Plan) -> Iterator[Change]:
    """Without rounding anything: a weight and 16 bits more are its master."""
    if plan.job.dtype == torch.bfloat16:
        yield from _states(plan, {"master": "split"}, SPLIT)


def smaller_states(plan: Plan) -> Iterator[Change]:
    """Moments and gradients in bfloat16: these are rounded."""
    moments = {"moments": "bfloat16"} if plan.job.optimizer.moments else {}
    gradients = {"gradients": "bfloat16"} if plan.job.dtype == torch.bfloat16 else {}
    for chosen in (moments, gradients, {**moments, **gradients} if moments and gradients else {}):
        yield from _states(plan, chosen, ROUNDED, rounds=True)
    if moments and gradients:
        yield from _states(plan, {"master": "split", **moments, **gradients}, ROUNDED * SPLIT, rounds=True)


def _states(plan: Plan, chosen: Settings, unseen: float, *, rounds: bool = False) -> Iterator[Change]:
    """Of all modules that are trained, where any has other numbers yet."""
    settings = {
        f"precision.{name}.{field}": value
        for name in _trained(plan)
        for field, value in chosen.items()
        if getattr(plan.config.precision_of(name), field) == "float32"
    }
    if settings:
        yield Change(settings, unseen, rounds)


def activations_on_the_host(plan: Plan) -> Iterator[Change]:
    """Copies run beside the computation."""
    for name in plan.layouts:
        keeps = name == TEXT or plan.job.frozen.trains(name)
        if keeps and not plan.config.offload_of(name).activations:
            yield Change({f"offload.{name}.activations": True}, OFFLOADED)


def states_on_the_host(plan: Plan) -> Iterator[Change]:
    """Updates wait for the bus between GPU and host."""
    names = [name for name in _trained(plan) if not plan.config.offload_of(name).states]
    for chosen in dict.fromkeys((tuple(names[-1:]), tuple(names))):
        if chosen:
            yield Change({f"offload.{name}.states": True for name in chosen}, STREAMED)


def shared_gradients_and_weights(plan: Plan) -> Iterator[Change]:
    """The ranks that hold the same weights share gradients, or these and weights, which are gathered for each run."""
    trained = _trained(plan)
    for name, layout in plan.layouts.items():
        zero = plan.config.zero_of(name) if layout.ways("tokens", "samples") > 1 else 3
        if zero < 2 and name in trained:
            yield Change({f"zero.{name}": 2}, REDUCED)
        if zero < 3:
            yield Change({f"zero.{name}": 3}, GATHERED)


def _trained(plan: Plan) -> list[str]:
    return [name for name in plan.layouts if any(of[0] == name and p.trained for of, p in plan.parameters.items())]


def chunked_mlps(plan: Plan) -> Iterator[Change]:
    """MLPs take their tokens in chunks, and repeat their first product."""
    for name in plan.layouts:
        if not plan.config.model.chunk.get(name, 0):
            yield Change({f"model.chunk.{name}": CHUNK}, SMALLER)


def smaller_micro_batches(plan: Plan) -> Iterator[Change]:
    """Of fewer samples or tokens, and more of them: the global batch stays."""
    samples, budget = plan.batch.samples, plan.job.budget
    if budget is not None:
        longest = plan.config.data.max_seq_length
        for halvings in range(1, (budget.tokens // longest).bit_length()):
            yield Change({"train.tokens_per_micro_batch": budget.tokens >> halvings}, SMALLER**halvings)
        return
    for divisor in range(2, samples + 1):
        if samples % divisor == 0:
            yield Change({"train.micro_batch_size": samples // divisor}, SMALLER ** (divisor.bit_length() - 1))


def images_over_more_ranks(plan: Plan) -> Iterator[Change]:
    """Replicas of an encoder become fewer, and each image is split over more ranks."""
    for name, shape in plan.shapes.encoders.items():
        longer = EXCHANGED[any(layer.attention.windowed for layer in shape.architecture.layers)]
        yield from _over_more_ranks(plan, name, "sp", longer)


def text_over_more_ranks(plan: Plan) -> Iterator[Change]:
    """Replicas of the text module become fewer, and each is split over more ranks."""
    for axis, longer in DOUBLED.items():
        yield from _over_more_ranks(plan, TEXT, axis, longer)


def _over_more_ranks(plan: Plan, name: str, axis: str, longer: float) -> Iterator[Change]:
    """One degree doubled in place of dp, as often as can be; tp stays in a node."""
    layout, unseen = plan.layouts[name], 1.0
    while layout.dp % 2 == 0 and (axis != "tp" or 2 * layout.tp <= NODE):
        layout, unseen = _moved(layout, axis), unseen * longer
        yield Change({f"parallel.{name}": layout.short(plan.world_size)}, unseen)


def _moved(layout: Layout, axis: str) -> Layout:
    """Half of the replicas, each twice as large."""
    return replace(layout, **{"dp": layout.dp // 2, axis: 2 * layout.degrees[axis]})


CHANGES: tuple[Callable[[Plan], Iterator[Change]], ...] = (
    split_activations,
    shorter_waves,
    no_run_ahead,
    rows_alone,
    split_masters,
    smaller_states,
    recomputed_layers,
    activations_on_the_host,
    chunked_mlps,
    shared_gradients_and_weights,
    states_on_the_host,
    smaller_micro_batches,
    images_over_more_ranks,
    text_over_more_ranks,
)
"""All that is tried."""


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
