"""Searches for settings with which a job fits into memory. Pure.

The search estimates each change of `CHANGES` alone, then pairs of changes, then the same layouts on more ranks. The
time of a step is its simulated time, times a factor of the change for costs that the simulation does not include:
kernels of smaller matrices, transfers, collectives.

An entry of `CHANGES` is a function that yields the changes to try for an estimate, if any; the order of entries matters
only between changes of equal cost.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, is_dataclass, replace
from itertools import combinations, zip_longest
from math import gcd
from typing import Any

import torch

from megatron_hetero.base.errors import UserError
from megatron_hetero.config.fields import children, flag_of, item_type
from megatron_hetero.config.schema import Config
from megatron_hetero.estimate.allowance import NODE
from megatron_hetero.estimate.estimate import Estimate
from megatron_hetero.estimate.experts import expert_mlps, ranks_of_experts, with_experts_over
from megatron_hetero.layout.axes import EXPERTS, Fold
from megatron_hetero.layout.layout import Layout
from megatron_hetero.layout.names import TEXT

Settings = Mapping[str, object]
"""Values of settings by dotted name, such as `{"modules.text.recompute": "full"}`; None for the default."""


def with_settings(config: Config, settings: Settings) -> Config:
    """Return the configuration with these settings changed. Raises `UserError` if settings conflict."""
    return _changed(config, settings, Config)


def _changed(node: Any, settings: Settings, kind: Any) -> Any:
    """Return a section or a mapping with settings changed; the empty name replaces `node` itself. `kind`: the type of
    `node`, which determines the type of new entries of a mapping.
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
    """Return the settings as command-line flags."""
    return " ".join(f"{flag_of(name)} {str(value).lower()}" for name, value in settings.items())


SMALLER = 1.05
"""Slowdown of halving the size of micro-batches: smaller kernels, and twice as many collectives."""
DOUBLED = {"tp": 1 / (1 - 0.28), "pp": 1.06, "cp": 1.1}
"""Slowdown of doubling a degree of the text module and halving dp. Throughput falls by 28 % with tp and by some 6 %
with pp (Llama 3 70B, "Memory Tuning" in the documentation of Megatron Bridge; the simulation includes idle stages). The
value for cp is a guess.
"""
EXCHANGED = {True: 1.02, False: 1.1}
"""Slowdown of doubling sp and halving dp of an encoder with windows (True), where few layers exchange tokens, or
without windows (False): guesses."""
DISPATCHED = 1.05
"""Slowdown of doubling the number of ranks over which experts are divided: a guess for ranks of one node."""
SPLIT, ROUNDED = 1.005, 1.01
"""Slowdown of split masters, and of rounded moments or gradients. Rounding takes no time; its factor makes the search
prefer exact settings.
"""
CHUNK = 8192
"""Number of tokens in a chunk, large enough for efficient matrix products."""
CALL = 16384
"""Number of patches in a call of an encoder, large enough that the GPU does not wait for the host."""
SELECTED = 1.03
"""Slowdown of recomputing norms and activation functions: a guess."""
OFFLOADED = 1.02
"""Slowdown of the computation by concurrent activation offloading, which uses memory and bus bandwidth: a guess. The
simulation includes copies that take longer than the computation.
"""
STREAMED = 1.3
"""Slowdown of streaming optimizer states from the host: a guess, for steps of some seconds."""
REDUCED, GATHERED = 1.02, 1.1
"""Slowdown of reducing gradients in each backward pass, and of gathering weights for each pass: guesses for
micro-batches of some thousand tokens on one node.
"""


@dataclass(frozen=True)
class Change:
    """Settings to change. `unseen`: the factor by which a step is slower than its simulation."""

    settings: Settings
    unseen: float = 1.0
    rounds: bool = False
    """Whether the change lowers the precision of training."""


def split_activations(estimate: Estimate) -> Iterator[Change]:
    """Yield changes that split a module's activations along the sequence over tp, which adds no traffic."""
    for name, layout in estimate.job.layouts.items():
        if layout.tp > 1 and not estimate.job.sequence_parallel[name]:
            yield Change({f"modules.{name}.sequence_parallel": True})


def shorter_waves(estimate: Estimate) -> Iterator[Change]:
    """Yield changes that encode fewer micro-batches per wave, so that the pipeline drains more often."""
    window = max((encoder.window for encoder in estimate.job.schedule.encoders if encoder.style == "waves"), default=1)
    while window > 1:
        window //= 2
        yield Change({"schedule.waves": window})


def no_run_ahead(estimate: Estimate) -> Iterator[Change]:
    """Yield the change that stops encoders on separate ranks from running ahead."""
    ahead = any(encoder.style == "ahead" for encoder in estimate.job.schedule.encoders)
    if ahead and estimate.job.config.schedule.run_ahead != 0:
        yield Change({"schedule.run_ahead": 0})


def rows_alone(estimate: Estimate) -> Iterator[Change]:
    """Yield the change that saves only the rows of encoders on shared ranks, and recomputes their forward pass."""
    if any(encoder.style == "waves" for encoder in estimate.job.schedule.encoders):
        waves = {"schedule.waves": None} if estimate.job.config.schedule.waves is not None else {}
        yield Change({"schedule.kind": "recompute", **waves})


def recomputed_layers(estimate: Estimate) -> Iterator[Change]:
    """Yield changes that recompute a module's layers, selectively, with experts, or fully."""
    for name in estimate.job.layouts:
        mode = estimate.job.modules[name].settings.recompute
        if mode == "none":
            yield Change({f"modules.{name}.recompute": "selective"}, SELECTED)
        if mode in ("none", "selective") and EXPERTS in estimate.job.layouts[name].views:
            yield Change({f"modules.{name}.recompute": "experts"}, SELECTED)
        if mode != "full":
            yield Change({f"modules.{name}.recompute": "full"})


def smaller_states(estimate: Estimate) -> Iterator[Change]:
    """Yield changes that split masters into a bfloat16 weight and 16 more bits, or store other states in bfloat16."""
    halves = estimate.job.dtype == torch.bfloat16
    masters = {"master": "split"} if halves else {}
    moments = {"moments": "bfloat16"} if estimate.job.optimizer.moments else {}
    gradients = {"gradients": "bfloat16"} if halves else {}
    yield from _states(estimate, masters, SPLIT)
    yield from _states(estimate, moments, ROUNDED, rounds=True)
    yield from _states(estimate, gradients, ROUNDED, rounds=True)
    if moments and gradients:
        yield from _states(estimate, {**moments, **gradients}, ROUNDED, rounds=True)
        yield from _states(estimate, {**masters, **moments, **gradients}, ROUNDED * SPLIT, rounds=True)


def _states(estimate: Estimate, chosen: Settings, unseen: float, *, rounds: bool = False) -> Iterator[Change]:
    """Yield the change that applies `chosen` precision settings to all trained modules where these are fp32."""
    settings = {
        f"modules.{name}.precision.{field}": value
        for name in _trained(estimate)
        for field, value in chosen.items()
        if getattr(estimate.job.modules[name].settings.precision, field) == "float32"
    }
    if settings:
        yield Change(settings, unseen, rounds)


def activations_on_the_host(estimate: Estimate) -> Iterator[Change]:
    """Yield changes that offload a module's activations to the host, concurrently with the computation."""
    for name, module in estimate.job.modules.items():
        if module.passes_gradients and not module.settings.offload.activations:
            yield Change({f"modules.{name}.offload.activations": True}, OFFLOADED)


def states_on_the_host(estimate: Estimate) -> Iterator[Change]:
    """Yield changes that offload optimizer states of one or all modules to the host; updates wait for the bus."""
    names = [name for name in _trained(estimate) if not estimate.job.modules[name].settings.offload.states]
    for chosen in dict.fromkeys((tuple(names[-1:]), tuple(names))):
        if chosen:
            yield Change({f"modules.{name}.offload.states": True for name in chosen}, STREAMED)


def shared_gradients_and_weights(estimate: Estimate) -> Iterator[Change]:
    """Yield changes that shard a module's gradients, or its gradients and weights (ZeRO 2 and 3)."""
    trained = _trained(estimate)
    for name, layout in estimate.job.layouts.items():
        zero = estimate.job.modules[name].settings.zero if layout.ways("tokens", "samples") > 1 else 3
        if zero < 2 and name in trained:
            yield Change({f"modules.{name}.zero": 2}, REDUCED)
        if zero < 3:
            yield Change({f"modules.{name}.zero": 3}, GATHERED)


def _trained(estimate: Estimate) -> list[str]:
    return [name for name, module in estimate.job.modules.items() if module.trains]


def chunked_mlps(estimate: Estimate) -> Iterator[Change]:
    """Yield changes that run a module's MLPs in chunks of tokens, and recompute the first product of the MLPs."""
    for name, module in estimate.job.modules.items():
        if not module.settings.chunk:
            yield Change({f"modules.{name}.chunk": CHUNK}, SMALLER)


def several_calls(estimate: Estimate) -> Iterator[Change]:
    """Yield changes that encode a micro-batch in several calls, and repeat each call in the backward pass."""
    for name in estimate.job.shapes.encoders:
        patches = max((sum(shard.tokens for shard in work) for work in estimate.shards[name].shards), default=0)
        if patches > CALL and name not in estimate.job.patch_limits:
            yield Change({f"modules.{name}.patches_per_call": CALL}, SMALLER)


def smaller_micro_batches(estimate: Estimate) -> Iterator[Change]:
    """Yield changes that split the global batch into more, smaller micro-batches."""
    samples, budget = estimate.job.batch.samples, estimate.job.budget
    if budget is not None:
        longest = estimate.job.config.data.max_seq_length
        for halvings in range(1, (budget.tokens // longest).bit_length()):
            yield Change({"train.tokens_per_micro_batch": budget.tokens >> halvings}, SMALLER**halvings)
        return
    for divisor in range(2, samples + 1):
        if samples % divisor == 0:
            yield Change({"train.micro_batch_size": samples // divisor}, SMALLER ** (divisor.bit_length() - 1))


def images_over_more_ranks(estimate: Estimate) -> Iterator[Change]:
    """Yield changes that split each image over more ranks, with fewer replicas of the encoder."""
    for name, shape in estimate.job.shapes.encoders.items():
        slowdown = EXCHANGED[any(layer.attention.windowed for layer in shape.architecture.layers)]
        yield from _over_more_ranks(estimate, name, "sp", slowdown)


def text_over_more_ranks(estimate: Estimate) -> Iterator[Change]:
    """Yield changes that split the text module over more ranks, with fewer replicas."""
    for axis, slowdown in DOUBLED.items():
        yield from _over_more_ranks(estimate, TEXT, axis, slowdown)


def experts_over_more_ranks(estimate: Estimate) -> Iterator[Change]:
    """Yield changes that divide experts over more ranks, with fewer copies of each expert."""
    layout, mlps = estimate.job.layouts[TEXT], expert_mlps(estimate.job.shapes.text.architecture.layers)
    ranks, unseen = ranks_of_experts(layout), 1.0
    while mlps and layout.stage_size % (2 * ranks) == 0 and 2 * ranks <= mlps[0].experts:
        ranks, unseen = 2 * ranks, unseen * DISPATCHED
        yield Change({f"modules.{TEXT}.parallel": with_experts_over(layout, ranks).short(estimate.world_size)}, unseen)


def _over_more_ranks(estimate: Estimate, name: str, axis: str, slowdown: float) -> Iterator[Change]:
    """Yield layouts in which one degree is doubled and dp halved, as often as possible; tp stays within a node."""
    layout, unseen = estimate.job.layouts[name], 1.0
    while layout.dp % 2 == 0 and (axis != "tp" or 2 * layout.tp <= NODE):
        layout = _with_degrees(layout, {"dp": layout.dp // 2, axis: 2 * layout.degrees[axis]})
        unseen *= slowdown
        yield Change({f"modules.{name}.parallel": layout.short(estimate.world_size)}, unseen)


def _with_degrees(layout: Layout, degrees: Mapping[str, int], ranks: tuple[int, ...] | None = None) -> Layout:
    """Return the layout with `degrees` of the main view replaced. Degrees of further views are lowered to divisors of
    the number of ranks of a stage.
    """
    ranks, degrees = ranks or layout.ranks, {**layout.degrees, **degrees}
    size = len(ranks) // degrees["pp"]
    folds = (Fold(view, tuple(gcd(degree, size) for degree in stated)) for view, stated in layout.folds)
    return Layout(**degrees, ranks=ranks, folds=tuple(folds))


CHANGES: tuple[Callable[[Estimate], Iterator[Change]], ...] = (
    split_activations,
    shorter_waves,
    no_run_ahead,
    rows_alone,
    smaller_states,
    recomputed_layers,
    activations_on_the_host,
    chunked_mlps,
    several_calls,
    shared_gradients_and_weights,
    states_on_the_host,
    smaller_micro_batches,
    images_over_more_ranks,
    experts_over_more_ranks,
    text_over_more_ranks,
)
"""The functions that yield all changes that the search tries."""

SHOWN = 2
"""Maximum number of alternatives that the search returns."""
LEAST_TRIES, MAX_TRIES = 8, 60
"""Minimum and maximum number of estimates in a search."""
EFFORT = 150_000
"""Maximum total number of ranks and actions in all estimates of a search, which then takes some seconds."""
OVERHEAD = 500
"""Fixed cost of an estimate, as a number of actions."""
FACTORS = (2, 4)
"""Factors by which the search multiplies the number of ranks."""
MAX_RANKS = 1024
"""Number of ranks of the largest world that the search tries."""
SLACK = 1.02
"""A pair of changes is estimated if its predicted memory is at most this multiple of the limit."""
CLOSEST = 3
"""Number of pairs that are estimated if no pair is predicted to fit, to report the closest pair."""


@dataclass(frozen=True, eq=False)
class Attempt:
    """An estimate with changed settings. `slowdown`: its step time relative to the step time without the change."""

    change: Change
    estimate: Estimate
    slowdown: float

    @property
    def needed(self) -> int:
        """The maximum device memory of a rank in bytes, allowance included."""
        return int(self.estimate.totals.max())

    @property
    def flags(self) -> str:
        """The command-line flags of the change."""
        return flags_of(self.change.settings)


@dataclass(frozen=True)
class Fitting:
    """The result of a search: up to `SHOWN` attempts that fit, fastest first, or else the `closest` attempt and a
    `larger` attempt that fits on more ranks, if there are such attempts.
    """

    attempts: tuple[Attempt, ...] = ()
    closest: Attempt | None = None
    larger: Attempt | None = None


def find_fitting(estimate: Estimate, limit: int) -> Fitting:
    """Return the result of a search for settings with which every rank needs at most `limit` bytes."""
    size = OVERHEAD + estimate.world_size + sum(len(role.actions) for role in estimate.job.schedule.roles)
    tries = max(LEAST_TRIES, min(MAX_TRIES, EFFORT // size))
    # Try the first change of each entry before the second change of any entry, because the tries are limited.
    in_turn = zip_longest(*(entry(estimate) for entry in CHANGES))
    changes = [change for turn in in_turn for change in turn if change is not None][:tries]
    tried = [attempt for change in changes if (attempt := planned(estimate, change))]
    alone = [attempt for attempt in tried if (attempt.estimate.totals < estimate.totals).any()]
    if found := _cheapest(alone, limit):
        return Fitting(found)
    pairs = list[Attempt]()
    for change in _pairs(alone, estimate, limit)[: tries - len(changes)]:
        if attempt := planned(estimate, change):
            pairs.append(attempt)
            if len(_cheapest(pairs, limit)) == SHOWN:
                break
    if found := _cheapest(pairs, limit):
        return Fitting(found)
    closest = min([*alone, *pairs], key=lambda attempt: attempt.needed, default=None)
    return Fitting((), closest, _on_more_ranks(estimate, closest, limit))


def planned(base: Estimate, change: Change, world_size: int | None = None) -> Attempt | None:
    """Return the attempt that applies a change to `base`; None if the configuration is then invalid."""
    try:
        config = with_settings(base.job.config, change.settings)
        estimate = Estimate.of(config, world_size or base.world_size, gpu=base.gpu)
    except UserError:
        return None
    return Attempt(change, estimate, change.unseen * estimate.simulation.seconds / base.simulation.seconds)


def _cheapest(attempts: Sequence[Attempt], limit: int) -> tuple[Attempt, ...]:
    """Return up to `SHOWN` attempts that fit, fastest first, with at most one for each set of changed settings."""
    fitting = sorted((a for a in attempts if a.needed <= limit), key=lambda attempt: attempt.slowdown)
    chosen: dict[frozenset[str], Attempt] = {}
    for attempt in fitting:
        chosen.setdefault(frozenset(attempt.change.settings), attempt)
    return tuple(chosen.values())[:SHOWN]


def _pairs(alone: Sequence[Attempt], estimate: Estimate, limit: int) -> list[Change]:
    """Return combined pairs of changes of different settings that are predicted to fit, fastest first; if no pair is,
    the pairs that need the least memory.
    """
    pairs = [(a, b) for a, b in combinations(alone, 2) if not a.change.settings.keys() & b.change.settings.keys()]
    needed = [int((a.estimate.totals + b.estimate.totals - estimate.totals).max()) for a, b in pairs]
    by_time = sorted(range(len(pairs)), key=lambda i: pairs[i][0].slowdown * pairs[i][1].slowdown)
    by_memory = sorted(range(len(pairs)), key=needed.__getitem__)
    chosen = [i for i in by_time if needed[i] <= SLACK * limit] or by_memory[:CLOSEST]
    return [
        Change(
            {**a.change.settings, **b.change.settings},
            a.change.unseen * b.change.unseen,
            a.change.rounds or b.change.rounds,
        )
        for a, b in (pairs[i] for i in chosen)
    ]


# --------------------------------------------------------------------------------------------- more ranks


def _on_more_ranks(estimate: Estimate, closest: Attempt | None, limit: int) -> Attempt | None:
    """Return an attempt that fits on more ranks, with the present settings or with the closest change; None if no
    attempt fits. Encoders get more replicas; the text module gets more replicas, more stages, or a larger tp on a node.
    """
    starts = [(Change({}), estimate), *([(closest.change, closest.estimate)] if closest else [])]
    for factor in FACTORS:
        world_size = factor * estimate.world_size
        if world_size > MAX_RANKS:
            return None
        for start, base in starts:
            layouts = base.job.layouts
            for axis in ("dp", "pp", *(["tp"] if factor * layouts[TEXT].tp <= NODE else [])):
                grown = {
                    f"modules.{name}.parallel": _grown(layout, factor, axis if name == TEXT else "dp").short(world_size)
                    for name, layout in layouts.items()
                }
                attempt = planned(estimate, replace(start, settings={**start.settings, **grown}), world_size)
                if attempt and attempt.needed <= limit:
                    return attempt
    return None


def _grown(layout: Layout, factor: int, axis: str) -> Layout:
    """Return the layout with one degree and the number of ranks multiplied by `factor`."""
    ranks = tuple(rank * factor + i for rank in layout.ranks for i in range(factor))
    return _with_degrees(layout, {axis: factor * layout.degrees[axis]}, ranks)
