"""Finds problems of an estimate, such as memory, idle ranks, uneven stages or padding, each with a fix. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import ceil, lcm

import numpy as np

from megatron_hetero.estimate.allowance import NODE
from megatron_hetero.estimate.estimate import KINDS, Estimate
from megatron_hetero.estimate.experts import expert_mlps, experts_of_ranks, ranks_of_experts, with_experts_over
from megatron_hetero.estimate.search import Attempt, find_fitting
from megatron_hetero.hf.weight_map import split_length
from megatron_hetero.job.job import micro_batch_setting
from megatron_hetero.layout.axes import axes_of, divisors
from megatron_hetero.layout.grammar import format_ranks
from megatron_hetero.layout.names import TEXT
from megatron_hetero.models.shapes import assumed_sample
from megatron_hetero.schedule.program import Role

MAX_IDLE = 0.3
"""Fraction of a step above which waiting of ranks is reported."""
MAX_PADDING = 0.01
"""Fraction of a width above which padding is reported."""
UNEVEN = 1.25
"""Ratio to the mean above which the work of a pipeline stage or the number of experts on a rank is reported."""


@dataclass(frozen=True)
class Problem:
    """A problem of an estimate and its fix, each worded as a clause."""

    found: str
    fix: str


def problems_of(estimate: Estimate) -> tuple[Problem, ...]:
    """Return all problems of an estimate, with the most severe kinds of problems first."""
    sample_problems = (_assumption, _idle_replicas, _empty_shards, _exchanges)
    finders = (_memory, *sample_problems, _waiting, _stages, _experts, _heads, _padding)
    return tuple(problem for find in finders for problem in find(estimate))


# ------------------------------------------------------------------------------------------------- memory


def _memory(estimate: Estimate) -> Iterator[Problem]:
    plan, totals = estimate.job.config.plan, estimate.totals
    limit, worst = plan.memory_bytes, int(totals.argmax())
    if limit is None or totals[worst] <= limit:
        return
    gpu = f"{limit / 1e9:.1f} GB of {plan.memory_gb}" if isinstance(plan.memory_gb, str) else f"{plan.memory_gb:g} GB"
    kind = KINDS[int(estimate.memory[worst].argmax())]
    role = estimate.job.schedule.roles[estimate.job.schedule.role_index[worst]]
    yield Problem(
        f"a GPU's memory (plan.memory_gb), {gpu}, is not enough for {_counted((totals > limit).sum(), 'rank')}: rank "
        f"{worst} ({role.name}) needs {_gb(totals[worst])}, {_gb(estimate.allowance[worst].sum())} of it allowance, "
        f"and of the rest most is {kind}",
        _against_memory(estimate, limit, _modules(role)),
    )


def _gb(size: float) -> str:
    return f"{size / 1e9:.2f} GB"


def _against_memory(estimate: Estimate, limit: int, modules: tuple[str, ...]) -> str:
    """Return advice against too little memory: settings that fit, or else the closest settings and more ranks."""
    fitting = find_fitting(estimate, limit)
    if fitting.attempts:
        texts = [f"{a.flags} ({_costs(a)}, about {a.slowdown:.2f} times the time of a step)" for a in fitting.attempts]
        return f"try {', or '.join(texts)}"
    missed = "no setting that was tried saves memory"
    if (best := fitting.closest) is not None:
        missed = (
            "no one or two settings that were tried are enough: the closest are "
            f"{best.flags}, with {_costs(best)} ({_gb(best.needed - limit)} too much)"
        )
    if (larger := fitting.larger) is not None:
        flags = f"--world-size {larger.estimate.world_size} {larger.flags}"
        return f"{missed}. {larger.estimate.world_size:,} ranks are enough: {flags} ({_costs(larger)})"
    return f"{missed}. Give {' and '.join(modules)} more ranks, or lower {micro_batch_setting(estimate.job.config)}"


def _costs(attempt: Attempt) -> str:
    """Return the memory of an attempt as text, with a note if optimizer states are rounded."""
    host = int(attempt.estimate.host_memory.sum())
    on_host = f" and {_gb(host)} of all hosts" if host else ""
    return f"{_gb(attempt.needed)}{on_host}{', states rounded' if attempt.change.rounds else ''}"


# ------------------------------------------------------------------------------------------------ samples


def _assumption(estimate: Estimate) -> Iterator[Problem]:
    config = estimate.job.config
    data, chosen = config.data, config.plan
    sample = assumed_sample(chosen, estimate.job.shapes)  # This sample has no text that fills up a token budget.
    if sample.tokens > data.max_seq_length:
        yield Problem(
            f"the assumed sample has {sample.tokens:,} tokens, more than data.max_seq_length, {data.max_seq_length:,}: "
            "training would refuse it",
            "raise data.max_seq_length, or lower plan.image_side, plan.images, plan.frames or plan.tokens",
        )
    limits = {f"modules.{name}": (row.min_pixels, row.max_pixels) for name, row in config.further.items()}
    for section, (low, high) in {"data": (data.min_pixels, data.max_pixels), **limits}.items():
        pixels = chosen.image_side**2 if chosen.images else None
        bounds = (("fewer", "min_pixels", low, "enlarge"), ("more", "max_pixels", high, "reduce"))
        for more, name, limit, what in bounds:
            if pixels and limit and (pixels < limit if more == "fewer" else pixels > limit):
                yield Problem(
                    f"the assumed images have {pixels:,} pixels, {more} than {section}.{name}, {limit:,}: training "
                    f"would {what} them",
                    f"try --plan.image_side {ceil(limit**0.5) if more == 'fewer' else int(limit**0.5)}",
                )


# ---------------------------------------------------------------------------------------- encoder replicas


def _idle_replicas(estimate: Estimate) -> Iterator[Problem]:
    for name in estimate.job.shapes.encoders:
        size = estimate.assumed.sizes_of_calls(name)[0]
        assigned, layout = estimate.assumed.encoder_shards(name, size).assigned, estimate.job.layouts[name]
        images, idle = sum(map(len, assigned)), sum(not pieces for pieces in assigned)
        setting = micro_batch_setting(estimate.job.config)
        if images and idle:
            what = "a micro-batch" if size == 1 else f"{size} micro-batches"
            heads = estimate.job.shapes.encoders[name].architecture.heads
            axis = "sp" if not heads or heads // layout.tp > layout.sp else "cp"  # The axis can split tokens further.
            yield Problem(
                f"{idle:,} of the {layout.dp:,} replicas of {name} have no image in {what} of {images:,}",
                f"raise {setting}, or give {name} less dp and more {axis}",
            )


def _empty_shards(estimate: Estimate) -> Iterator[Problem]:
    for name in estimate.job.shapes.encoders:
        layout, shards = estimate.job.layouts[name], estimate.shards[name]
        idle = [
            number
            for number, work in enumerate(shards.shards)
            if any(shard.segments.queries for shard in work) and not any(shard.tokens for shard in work)
        ]
        if empty := int(np.isin(shards.of_rank, idle).sum()):
            yield Problem(
                f"no window of their replica's images falls to {_counted(empty, 'rank')} of {name} under "
                f"{layout.degrees_text}",
                f"lower sp or cp of {name}, or raise {micro_batch_setting(estimate.job.config)}",
            )


def _exchanges(estimate: Estimate) -> Iterator[Problem]:
    """Yield a problem for each encoder without windows whose tokens are split, so that every layer exchanges tokens."""
    for name, shape in estimate.job.shapes.encoders.items():
        layout, windowed = estimate.job.layouts[name], any(e.attention.windowed for e in shape.architecture.layers)
        split = [f"{axis}:{layout.degrees[axis]}" for axis in axes_of("tokens") if layout.degrees[axis] > 1]
        if windowed or not split or not estimate.shards[name].used:
            continue
        replicas, images = layout.ways("tokens", "samples"), len(estimate.assumed.encoder_shards(name, 1).sizes)
        whole = replace(layout, **dict.fromkeys(axes_of("tokens"), 1), dp=replicas)
        flag = f"--{name}-parallel {whole.short(estimate.world_size)}"
        fix = f"assign whole images to ranks, of which a micro-batch has {images:,}: try {flag}"
        if images < replicas:
            fix = (
                f"keep it for large images; a micro-batch has {_counted(images, 'image')}, and with {replicas:,} or "
                f"more ({micro_batch_setting(estimate.job.config)}) {flag} would exchange nothing"
            )
        yield Problem(
            f"{name} has no windows, so that each of its {shape.layers} layers exchanges tokens over {','.join(split)}",
            fix,
        )


# ----------------------------------------------------------------------------------------------- schedule


def _waiting(estimate: Estimate) -> Iterator[Problem]:
    shares = {role: estimate.simulation.bubble(role.ranks[0]) for role in estimate.job.schedule.roles}
    waiting = {role: share for role, share in shares.items() if share > MAX_IDLE}
    for names in dict.fromkeys(_modules(role) for role in waiting):
        same = {role: share for role, share in waiting.items() if _modules(role) == names}
        role, share = max(same.items(), key=lambda pair: pair[1])
        ranks = sum(len(r.ranks) for r in same)
        where = " and ".join(names)
        yield Problem(
            f"{_counted(ranks, 'rank')} of {where} wait for up to {share:.0%} of a step, such as "
            f"{'rank' if len(role.ranks) == 1 else 'ranks'} {shortened(role.ranks)}",
            _against_waiting(estimate, names),
        )


def _modules(role: Role) -> tuple[str, ...]:
    return tuple(dict.fromkeys(name for name, _ in role.held_stages))


def _against_waiting(estimate: Estimate, names: tuple[str, ...]) -> str:
    schedule, where = estimate.job.schedule, " and ".join(names)
    ahead = [encoder.name for encoder in schedule.encoders if encoder.style == "ahead"]
    if TEXT not in names:
        if set(names) <= set(ahead):
            return f"{where} waits for {TEXT}: give it fewer ranks, or share ranks with {TEXT}"
        return f"{where} waits while other ranks run {TEXT}: let the modules have the same ranks, or none in common"
    if ahead:
        busy = {True: 0.0, False: 0.0}
        for role in schedule.roles:
            runs_text = TEXT in _modules(role)
            busy[runs_text] = max(busy[runs_text], estimate.simulation.busy(role.ranks[0]))
        if busy[False] > busy[True]:
            slow = " and ".join(ahead)
            if all(all(estimate.assumed.encoder_shards(name, 1).assigned) for name in ahead):
                return f"give {slow} more of the ranks: it is slower than {TEXT}"
            return f"split images over more ranks: {slow} is slower than {TEXT}, while some of its replicas have none"
    return _against_bubble(estimate)


def _against_bubble(estimate: Estimate) -> str:
    """Return advice on how to shorten the bubble of the text module's pipeline."""
    layout, config, text = estimate.job.layouts[TEXT], estimate.job.config, estimate.job.schedule.text
    if layout.pp == 1:
        return f"give {TEXT} fewer ranks, or share ranks with the encoder"
    options = []
    waves = next((e.window for e in estimate.job.schedule.encoders if e.style == "waves"), None)
    micro_batches = estimate.job.batch.micro_batches
    if waves is not None and waves < micro_batches:
        options.append(f"--schedule.waves {min(2 * waves, micro_batches)}")
        options.append("or --schedule.kind recompute with no schedule.waves")
    total = 2 * config.train.global_batch_size
    options.append(f"more micro-batches (--train.global_batch_size {total})")
    split = estimate.job.text.settings.layers
    if text.virtual == 1 and not split and estimate.job.shapes.text.layers >= 2 * layout.pp:
        options.append("--schedule.virtual_stages 2")
    return f"try {', '.join(options)}, or a lower pp"


def _stages(estimate: Estimate) -> Iterator[Problem]:
    for name, stages in estimate.job.stages.items():
        if len(stages) == 1 or not estimate.shards[name].used:
            continue
        work = [estimate.work[name, "F", i] for i in range(len(stages))]
        worst, mean = int(np.argmax(work)), sum(work) / len(work)
        if work[worst] > UNEVEN * mean:
            yield Problem(
                f"stage {worst} of {name} ({stages[worst]}) computes {work[worst] / mean:.2f} times the mean of the "
                "stages, and the others wait for it",
                f"give it fewer layers with --{name}-layers",
            )


# ------------------------------------------------------------------------------------------------ experts


def _experts(estimate: Estimate) -> Iterator[Problem]:
    layout, mlps = estimate.job.layouts[TEXT], expert_mlps(estimate.job.shapes.text.architecture.layers)
    if not mlps:
        return
    experts, ranks = mlps[0].experts, ranks_of_experts(layout)
    fewest, most = experts_of_ranks(experts, ranks)
    even = [n for n in divisors(layout.stage_size) if n <= experts and not _is_uneven(experts, n)]
    inside = max(n for n in even if n <= NODE)

    def flag(ranks: int) -> str:
        return f"--{TEXT}-parallel {with_experts_over(layout, ranks).short(estimate.world_size)}"

    if _is_uneven(experts, ranks):
        yield Problem(
            f"{experts} experts over ep:{ranks} are {fewest} to {most} for a rank, {most * ranks / experts:.2f} times "
            "the mean, and the other ranks wait for those with most",
            f"try {flag(max(n for n in even if n < ranks))}, or an ep that divides {experts}",
        )
    nodes = max(len({rank // NODE for rank in group}) for group in layout.groups("ep"))
    if nodes > 1 and ranks > inside:
        yield Problem(
            f"experts of a layer are on ep:{ranks} ranks of {nodes} nodes, so that most tokens cross the network",
            f"where memory allows, try {flag(inside)}",
        )
    if estimate.job.text.settings.zero == 3 and ranks < inside:
        yield Problem(
            f"each pass gathers {most} experts of a layer (--{TEXT}-zero 3), of which a token uses {mlps[0].top_k}",
            f"let tokens come to the experts: try {flag(inside)}",
        )


def _is_uneven(experts: int, ranks: int) -> bool:
    return experts_of_ranks(experts, ranks)[1] * ranks > UNEVEN * experts


# ------------------------------------------------------------------------------------------------- widths


def _heads(estimate: Estimate) -> Iterator[Problem]:
    layout, kv_heads = estimate.job.layouts[TEXT], estimate.job.shapes.text.architecture.kv_heads
    if not kv_heads:  # No layer has key/value heads.
        return
    tp_copies = lcm(kv_heads, layout.tp) // kv_heads
    on_rank = kv_heads * tp_copies // layout.tp
    copies = tp_copies * lcm(on_rank, layout.sp) // on_rank
    if copies > 1:
        what = f"tp:{layout.tp}" + (f" and sp:{layout.sp}" if layout.sp > 1 else "")
        yield Problem(
            f"{TEXT} has {kv_heads} key/value heads for {what}, so that each is computed or sent {copies} times",
            f"use cp in place of what tp·sp has above {kv_heads}, where memory allows",
        )


def _padding(estimate: Estimate) -> Iterator[Problem]:
    text, tp = estimate.job.shapes.text, estimate.job.layouts[TEXT].tp
    widths = [(TEXT, "vocabulary", text.vocab, tp)]
    for name in (TEXT, *estimate.job.shapes.encoders):
        layers = estimate.job.shapes[name].architecture.layers
        each = dict.fromkeys(width for layer in layers for width in layer.mlp.widths)
        widths += [(name, "MLP width", width, estimate.job.layouts[name].tp) for width in each]
    for name, what, size, degree in widths:
        whole = degree * split_length(size, degree)
        if whole - split_length(size, 1) > MAX_PADDING * size:
            yield Problem(
                f"the {what} of {name}, {size:,}, is padded to {whole:,} for tp:{degree}, {whole / size - 1:.1%} more",
                f"choose a tp of {name} that divides it",
            )


# --------------------------------------------------------------------------------------------------- text


def _counted(number: int, what: str) -> str:
    return f"{number:,} {what}" if number == 1 else f"{number:,} {what}s"


def shortened(ranks: tuple[int, ...] | list[int], limit: int = 28) -> str:
    """Return the text of ranks as ranges, truncated to about `limit` characters."""
    text = format_ranks(ranks)
    if len(text) <= limit or "," not in text[:limit]:
        return text
    return f"{text[: text.rindex(',', 0, limit - 1)]},…"
