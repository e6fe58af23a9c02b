"""Formats timelines of ranks as text, and draws them as SVG or PNG with matplotlib."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron_hetero.base.errors import UserError, reason
from megatron_hetero.base.files import replacing
from megatron_hetero.schedule.actions import Action
from megatron_hetero.schedule.program import Schedule
from megatron_hetero.schedule.simulator import Simulation, Span

Timelines = Mapping[str, Sequence[Span]]
"""The simulated or recorded spans of each row of a plot, by the label of the row."""


def timelines_of(simulation: Simulation) -> dict[str, Sequence[Span]]:
    """Return the timelines of a simulation, one for each role."""
    pairs = zip(simulation.schedule.roles, simulation.spans, strict=True)
    return {role.label: spans for role, spans in pairs}


# ---------------------------------------------------------------------------------------------------- text


def timeline(simulation: Simulation, *, unit: float | None = None, columns: int = 40) -> str:
    """Return the timelines as text, with a line per role and a cell per `unit` seconds (default: the shortest work):

        0 vision.0  vF0 vF1                     vB0 =       vB1 =
        1 text.0        tF0 tF1         tB0 =       tB1 =
        2 text.1            tF0 tB0 =   tF1 tB1 =

    A cell names the work that begins in it, `=` continues the work of the cell before, and an empty cell is idle. Lines
    longer than `columns` cells end in ``…``.
    """
    works = [s for spans in simulation.spans for s in spans if s.action.op == "run" and s.end > s.start]
    unit = unit or min((s.end - s.start for s in works), default=1.0)
    names = _short_names(simulation.schedule)
    cell_width = max((len(_label(names, s.action)) for s in works), default=1)
    rows = timelines_of(simulation)
    label_width = max(map(len, rows))
    lines: list[str] = []
    for label, spans in rows.items():
        cells = list(_cells(names, spans, unit))
        line = " ".join(cell.ljust(cell_width) for cell in cells[:columns]).rstrip()
        lines.append(f"{label:<{label_width}}  {line}{' …' if len(cells) > columns else ''}".rstrip())
    return "\n".join(lines)


def _cells(names: Mapping[str, str], spans: Iterable[Span], unit: float) -> Iterator[str]:
    at = 0
    for span in spans:
        if span.action.op != "run":
            continue
        first, last = round(span.start / unit), max(round(span.start / unit) + 1, round(span.end / unit))
        yield from [""] * (first - at)
        yield from [_label(names, span.action), *["="] * (last - first - 1)]
        at = max(at, last)


def _short_names(schedule: Schedule) -> dict[str, str]:
    """Return, for each module, the shortest prefix of its name with which no other module's name begins."""
    short: dict[str, str] = {}
    for name in schedule.module:
        others = [other for other in schedule.module if other != name]
        prefixes = (name[:length] for length in range(1, len(name)))
        short[name] = next((p for p in prefixes if not any(other.startswith(p) for other in others)), name)
    return short


def _label(names: Mapping[str, str], action: Action) -> str:
    return f"{names[action.module]}{action.kind}{action.micro_batch}"


# ------------------------------------------------------------------------------------------------ plots


def draw(panels: Mapping[str, Simulation | Timelines], file: str | Path) -> None:
    """Draw timelines, coloured by module, in panels below each other on a shared time axis.

    Args:
        panels: the simulation or the recorded timelines of each panel, by title.
        file: a path that ends in .svg or .png.

    Raises:
        UserError: the file has another suffix, or matplotlib is not installed.
    """
    require_plot(file)
    timelines = {
        title: timelines_of(panel) if isinstance(panel, Simulation) else panel for title, panel in panels.items()
    }
    heights = [max(1, len(rows)) for rows in timelines.values()]
    figure = new_figure((14, 1.2 * len(timelines) + 0.38 * sum(heights)))
    axes = figure.subplots(len(timelines), 1, sharex=True, squeeze=False, gridspec_kw={"height_ratios": heights})[:, 0]
    colours = colours_of(timelines.values())
    for axis, (title, rows) in zip(axes, timelines.items(), strict=True):
        draw_panel(axis, title, rows, colours)
    axes[-1].set_xlabel("seconds")
    draw_legend(figure, timelines.values(), colours)
    write_plot(figure, Path(file))


def require_plot(file: str | Path) -> None:
    """Check that the name of the file ends in .svg or .png. Raises `UserError`."""
    if Path(file).suffix not in (".svg", ".png"):
        expected = "a name that ends in .svg or .png"
        raise UserError.at("plot", found=str(file), expected=expected, fix="rename it")


def write_plot(figure: Any, file: Path) -> None:
    """Write a figure to a file in the format of its suffix. Raises `UserError`."""
    try:
        with replacing(file) as new:
            figure.savefig(new, format=file.suffix[1:], dpi=130)
    except OSError as error:
        found, fix = reason(error), "free space or grant access, or choose another place"
        raise UserError.at(f"plot {file}", found=found, expected="a file that can be written", fix=fix) from None


def new_figure(size: tuple[float, float]) -> Any:
    """Create a matplotlib figure of `size`, in inches. Raises `UserError` if matplotlib is not installed."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        fix = "run `pip install matplotlib`, or print without a plot"
        raise UserError.at("plot", found="no matplotlib", expected="it to be installed", fix=fix) from error
    return Figure(figsize=size, layout="constrained")


def colours_of(panels: Iterable[Timelines]) -> dict[str, str]:
    """Return a matplotlib colour for each module, the same in all panels."""
    names = dict.fromkeys(s.action.module for rows in panels for spans in rows.values() for s in spans)
    return {name: f"C{i % 10}" for i, name in enumerate(sorted(names))}


_STYLE: dict[str, dict[str, Any]] = {"F": {"alpha": 0.45}, "R": {"alpha": 0.45, "hatch": "////"}, "B": {"alpha": 0.9}}
"""The bar style of forward, recomputed forward and backward. A bar has the colour of its module."""


def draw_panel(axis: Any, title: str, rows: Timelines, colours: Mapping[str, str]) -> None:
    """Draw one panel on a matplotlib axis, with a row for each entry of `rows`."""
    seconds = max((s.end for spans in rows.values() for s in spans), default=0.0)
    for at, spans in enumerate(rows.values()):
        _draw_row(axis, at, spans, colours, seconds)
    axis.set_title(title, loc="left", fontsize=10)
    axis.set_yticks(range(len(rows)), list(rows), fontsize=8)
    axis.set_ylim(len(rows) - 0.5, -0.5)
    axis.margins(x=0.005)
    axis.spines[["top", "right", "left"]].set_visible(False)
    axis.tick_params(left=False)


def _draw_row(axis: Any, at: int, spans: Sequence[Span], colours: Mapping[str, str], seconds: float) -> None:
    """Draw the spans of one row. Spans of one kind are one artist, because thousands of artists are slow to draw."""
    bars: dict[tuple[str, str], list[tuple[float, float]]] = {}
    waits: list[tuple[float, float]] = []
    for span in spans:
        length = span.end - span.start
        if span.action.op in ("wait", "finish") and length > 0:
            waits.append((span.start, length))
        if span.action.op == "run" and length > 0:
            bars.setdefault((span.action.module, span.action.kind), []).append((span.start, length))
            _draw_number(axis, at, span, seconds)
    axis.broken_barh(waits, (at - 0.04, 0.08), color="0.75", linewidth=0)
    for (module, kind), ranges in bars.items():
        axis.broken_barh(
            ranges, (at - 0.4, 0.8), facecolor=colours[module], edgecolor="white", linewidth=0.5, **_STYLE[kind]
        )


def _draw_number(axis: Any, at: int, span: Span, seconds: float) -> None:
    """Write the micro-batch number of a span into its bar, if the bar is wide enough."""
    if span.end - span.start > 0.012 * seconds:
        colour = "white" if span.action.kind == "B" else "black"
        middle = (span.start + span.end) / 2
        axis.text(middle, at, span.action.micro_batch, ha="center", va="center", fontsize=7, color=colour)


def draw_legend(figure: Any, panels: Iterable[Timelines], colours: Mapping[str, str]) -> None:
    """Add a legend to a figure: one entry for each module and kind of work in `panels`, and one for waits."""
    from matplotlib.patches import Patch

    names = {"F": "forward", "R": "forward again", "B": "backward"}
    works = {(s.action.module, s.action.kind) for rows in panels for spans in rows.values() for s in spans}
    handles = [
        Patch(facecolor=colours[module], edgecolor="white", label=f"{module} {names[kind]}", **_STYLE[kind])
        for module in colours
        for kind in names
        if (module, kind) in works
    ]
    waits = Patch(color="0.75", label="waits")
    figure.legend(handles=[*handles, waits], loc="outside upper right", ncols=8, fontsize=8)
