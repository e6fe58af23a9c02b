"""Draws an estimate as one figure: the modules and stages on each rank, and the timeline of the schedule."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_hetero.estimate.estimate import Estimate
from megatron_hetero.estimate.problems import shortened
from megatron_hetero.layout.grammar import runs_of
from megatron_hetero.layout.layout import Layout
from megatron_hetero.layout.pipeline import stages_of_rank
from megatron_hetero.schedule.drawing import colours_of, draw_legend, draw_panel, new_figure, write_plot
from megatron_hetero.schedule.simulator import Span

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MAX_MARKS = 128
"""Maximum number of marks between replicas or ranks of a module."""
CHARACTER = 0.0068
"""Width of a character in a label, as a fraction of the figure's width."""


def draw_estimate(estimate: Estimate, file: Path) -> None:
    """Draw the topology and the schedule of an estimate to an SVG or PNG file. Raises `UserError`."""
    timelines = zip(estimate.job.schedule.roles, estimate.simulation.spans, strict=True)
    scaled = {
        f"{shortened(role.ranks, 24)} {role.name}": [Span(s.action, s.start / 1e12, s.end / 1e12) for s in spans]
        for role, spans in timelines
    }
    colours = colours_of([scaled])
    modules = len(estimate.job.layouts)
    figure = new_figure((15, 1.6 + 0.95 * modules + 0.36 * max(2, len(scaled))))
    ratios = [0.95 * modules, 0.36 * max(2, len(scaled))]
    top, bottom = figure.subplots(2, 1, gridspec_kw={"height_ratios": ratios})
    _draw_topology(top, estimate, colours)
    idle = f"ranks wait {estimate.simulation.mean_bubble:.0%} of it on average"
    draw_panel(bottom, f"One step of {estimate.job.batch.micro_batches} micro-batches; {idle}", scaled, colours)
    bottom.set_xlabel("TFLOP of a rank: work takes as long as it has operations")
    draw_legend(figure, [scaled], colours)
    write_plot(figure, file)


# ----------------------------------------------------------------------------------------------- topology


def _draw_topology(axis: Axes, estimate: Estimate, colours: Mapping[str, str]) -> None:
    layouts = estimate.job.layouts
    for at, (name, layout) in enumerate(layouts.items()):
        for stage in range(layout.pp):
            ranks = layout.stage(stage).ranks
            for first, last in runs_of(ranks):
                whole = last - first + 1 == len(ranks)
                texts = _texts(estimate, name, layout, stage) if whole else [f"pp {stage}"]
                _draw_block(axis, at, first, last, colours[name], texts, estimate.world_size)
            _draw_replicas(axis, at, layout, ranks)
    labels = [f"{name}\n{layout.degrees_text}\n{shortened(layout.ranks)}" for name, layout in layouts.items()]
    axis.set_yticks(range(len(labels)), labels, fontsize=8)
    axis.set_ylim(len(labels) - 0.5, -0.5)
    margin = 0.002 * estimate.world_size  # A margin keeps the outer edges of blocks visible.
    axis.set_xlim(-0.5 - margin, estimate.world_size - 0.5 + margin)
    axis.xaxis.get_major_locator().set_params(integer=True)  # pyright: ignore[reportCallIssue], it is an AutoLocator
    axis.xaxis.set_major_formatter("{x:,.0f}")
    axis.set_title(f"Who holds what: {estimate.world_size:,} ranks", loc="left", fontsize=10)
    axis.set_xlabel("rank")
    axis.spines[["top", "right", "left"]].set_visible(False)
    axis.tick_params(left=False)


def _texts(estimate: Estimate, name: str, layout: Layout, stage: int) -> list[str]:
    """Return candidate labels for the block of a pipeline stage, longest first."""
    stages = stages_of_rank(estimate.job.stages[name], stage, layout.pp)
    layers = ", ".join(str(each).removeprefix("layers ") for each in stages)
    axes = " x ".join(f"{axis}:{n}" for axis, n in layout.degrees.items() if n > 1 and axis != "pp") or "one rank"
    parameters = f"{estimate.parameters[name, stage].parameters / 1e6:,.1f} M parameters each"
    number = f"pp {stage}: " if layout.pp > 1 else ""
    return [
        f"{number}layers {layers}\n{axes}\n{parameters}",
        f"{number}\n{layers}\n{axes}".replace(": \n", "\n").lstrip("\n"),
        f"{stage}\n{layers}",
        f"{stage}",
    ]


def _draw_block(axis: Axes, at: int, first: int, last: int, colour: str, texts: Sequence[str], world: int) -> None:
    width = last - first + 1
    axis.broken_barh([(first - 0.5, width)], (at - 0.4, 0.8), facecolor=colour, alpha=0.35, edgecolor="none")
    axis.broken_barh([(first - 0.5, width)], (at - 0.4, 0.8), facecolor="none", edgecolor="black", linewidth=0.8)
    fitting = [text for text in texts if CHARACTER * max(map(len, text.splitlines())) * world < width]
    if fitting:
        axis.text(first + (width - 1) / 2, at, fitting[0], ha="center", va="center", fontsize=8)


def _draw_replicas(axis: Axes, at: int, layout: Layout, ranks: Sequence[int]) -> None:
    """Draw long marks between replicas and short marks between ranks, each kind only if there are few."""
    for size, length in ((layout.ways("weights", "tokens"), 0.14), (1, 0.06)):
        if len(ranks) // size <= MAX_MARKS // layout.pp:
            places = [ranks[i] - 0.5 for i in range(size, len(ranks), size)]
            axis.vlines(places, at + 0.4 - length, at + 0.4, color="black", linewidth=0.6)
