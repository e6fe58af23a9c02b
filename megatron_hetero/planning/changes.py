"""Changes of settings that save memory, as they are tried where a plan does not fit. Pure.

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
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch

from megatron_hetero.config.edits import Settings
from megatron_hetero.layout.layout import Layout
from megatron_hetero.names import TEXT
from megatron_hetero.planning.estimate import Plan
from megatron_hetero.planning.memory.nccl_memory import NODE

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
