"""Table, requirements and plot of the ways over a boundary."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.report import Ratio, table, verdict, write

MEGATRON = {"bridge": "→ tp:4@4-7", "colocated": "→ tp:4,dp:2"}
"""Megatron-Core's communicators, with where edges end that they take into sequence-parallel tp."""
FASTER = 3.0
"""What ours must be over them into sequence-parallel tp, from `MANY` rows on."""
MANY = 16_000
COLOURS = {"ours": "tab:green", "bridge": "tab:orange", "colocated": "tab:red", "all-gather": "tab:blue"}


@dataclass
class BoundaryReport:
    """`points`: one for each case and system. `refusals`: by edge, the error of each of `MEGATRON`, or nothing.
    `versions`: by distribution.
    """

    ranks: int
    versions: dict[str, str]
    refusals: dict[str, dict[str, str]] = field(default_factory=dict)
    points: list[dict[str, Any]] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)

    def leave_out(self, text: str) -> None:
        """Say once that something was not measured, and why."""
        if text not in self.left_out:
            self.left_out.append(text)

    def add(
        self,
        case: dict[str, Any],
        seconds: dict[str, list[tuple[float, float]]],
        received: dict[str, list[int]],
        least: Sequence[int],
        least_in_all: int,
    ) -> None:
        """Take a case. `seconds`: forward and backward by system and round; `received`, `least`: bytes by rank."""
        both = {name: [sum(pair) for pair in rounds] for name, rounds in seconds.items()}
        for name, rounds in seconds.items():
            self.points.append({
                **case,
                "system": name,
                "forward_s": [pair[0] for pair in rounds],
                "backward_s": [pair[1] for pair in rounds],
                "ratio": asdict(Ratio.of(both[name], both["ours"])),
                "received_bytes": received[name],
                "least_bytes": list(least),
                "least_bytes_in_all": least_in_all,
                "over_least": sum(received[name]) / least_in_all if least_in_all else 1.0,
            })  # fmt: skip

    def of(self, system: str) -> list[dict[str, Any]]:
        """The points of one system."""
        return [point for point in self.points if point["system"] == system]

    # --------------------------------------------------------------------------------------------- text

    def text(self, last_only: bool = False) -> str:
        """The table, and whether the requirements are met. With `last_only` the rows of the latest case."""
        rows = [self._row(p) for p in self.points if not last_only or _case(p) == _case(self.points[-1])]
        found = table(
            "edge | rows × width | system | forward, ms | backward, ms | both, ms: median [min, max] | "
            "received per rank, at most | received / least | time / time of ours",
            rows,
        )
        if last_only:
            return "\n".join(found.splitlines()[2:])
        head = (
            f"Ways over a boundary on {self.ranks} ranks over gloo, forward and backward, from a rank's rows to its "
            "shard of the embedding. Width 1,280 in fp32, 5,120 in bf16. `whole`: activations are not split over tp. "
            f"Measured with {', '.join(f'{name} {version}' for name, version in self.versions.items())}."
        )
        notes = (
            "Ours plans each crossing anew. Received: bytes that reach a rank from others, counted at the collectives; "
            "least: what the plan states as the minimum for the pair of ownerships, over all ranks. Times: the slowest "
            "rank's; ratios of the same round, median [min, max]."
        )
        left_out = "\n".join(f"- left out: {text}" for text in self.left_out)
        verdicts = "\n".join(f"- {v}" for v in self.verdicts())
        return "\n\n".join(filter(None, [head, found, notes, left_out, self.refused(), verdicts]))

    def refused(self) -> str:
        """Which edges Megatron-Core's communicators cross, and their errors on the others."""
        rows = [" | ".join([edge, *(said[name] or "crosses" for name in MEGATRON)])
                for edge, said in self.refusals.items()]  # fmt: skip
        head = (
            "What Megatron-Core's `BridgeCommunicator` and `ColocatedBridgeCommunicator` refuse, as tried. Their grids "
            "have no `sp`; it is tried as `cp`. On shared ranks the bridge has a rank receive from itself."
        )
        return f"{head}\n\n{table('edge | bridge | colocated', rows)}"

    def _row(self, p: dict[str, Any]) -> str:
        both = [1e3 * (a + b) for a, b in zip(p["forward_s"], p["backward_s"], strict=True)]
        return " | ".join([
            p["edge"], f"{p['rows']:,} × {p['width']:,}", p["system"],
            f"{1e3 * median(p['forward_s']):.1f}", f"{1e3 * median(p['backward_s']):.1f}",
            f"{median(both):.1f} [{min(both):.1f}, {max(both):.1f}]",
            f"{max(p['received_bytes']) / 2**20:.2f} MiB", f"{p['over_least']:.2f}",
            "—" if p["system"] == "ours" else str(Ratio(**p["ratio"])),
        ])  # fmt: skip

    def verdicts(self) -> list[str]:
        """What was required, each with what was found."""
        most = max((p["over_least"] for p in self.of("ours")), default=0.0)
        lines = [
            "PASS: all ways deliver the same rows and gradients, to the bit, on every rank",
            verdict(
                most <= 1.0 if self.points else None, f"ours receives the least everywhere; found {most:.4f} times"
            ),
        ]
        for name, end in MEGATRON.items():
            into = [p for p in self.of(name) if p["edge"].endswith(end)]
            many, few = ([p for p in into if (p["rows"] >= MANY) == large] for large in (True, False))
            lines += [_faster(many, FASTER, f"from {MANY:,} rows on", name),
                      _faster(few, 1.0, f"with fewer than {MANY:,} rows", name)]  # fmt: skip
        for name in (*MEGATRON, "all-gather"):
            ratios = sorted(p["ratio"]["median"] for p in self.of(name))
            if ratios:
                lines.append(
                    f"REPORT: time of {name} over that of ours, all edges: {ratios[0]:.2f} to {ratios[-1]:.2f}, "
                    f"median {median(ratios):.2f}; it receives up to {max(p['over_least'] for p in self.of(name)):.1f} "
                    "times the least"
                )
        return lines

    # --------------------------------------------------------------------------------------------- plot

    def write(self, folder: Path) -> None:
        """Table, numbers and plot."""
        write(folder, "boundary", self.text(), asdict(self), self._figure())

    def _figure(self) -> Any:
        import matplotlib

        matplotlib.use("agg")
        import matplotlib.pyplot as plt

        edges, widths = (list(dict.fromkeys(p[key] for p in self.points)) for key in ("edge", "width"))
        size = (2.6 * len(edges), 3.2 * len(widths))
        figure, grid = plt.subplots(len(widths), len(edges), figsize=size, squeeze=False, sharex=True, sharey=True)
        for width, line in zip(widths, grid, strict=True):
            for edge, axes in zip(edges, line, strict=True):
                self._panel(axes, [p for p in self.points if (p["edge"], p["width"]) == (edge, width)])
                axes.set_title(edge.replace(" → ", " →\n"), fontsize=8)
            line[0].set_ylabel(f"width {width:,}\nforward + backward, ms", fontsize=8)
        for axes in grid[-1]:
            axes.set_xlabel("rows", fontsize=8)
        legends = (zip(*axes.get_legend_handles_labels(), strict=True) for axes in grid.flat)
        lines = {label: line for legend in legends for line, label in legend}
        grid[0][0].legend(lines.values(), lines, fontsize=7)
        figure.tight_layout()
        return figure

    def _panel(self, axes: Any, points: list[dict[str, Any]]) -> None:
        for name, colour in COLOURS.items():
            mine = [p for p in points if p["system"] == name]
            both = [[1e3 * (a + b) for a, b in zip(p["forward_s"], p["backward_s"], strict=True)] for p in mine]
            middle = [median(times) for times in both]
            spread = [[m - min(t) for m, t in zip(middle, both, strict=True)],
                      [max(t) - m for m, t in zip(middle, both, strict=True)]]  # fmt: skip
            if mine:
                axes.errorbar([p["rows"] for p in mine], middle, spread, color=colour, marker="o", markersize=3,
                              capsize=2, linewidth=1, label=name)  # fmt: skip
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.grid(alpha=0.3)
        axes.tick_params(labelsize=7)


def _case(point: dict[str, Any]) -> tuple[Any, ...]:
    return point["edge"], point["rows"], point["width"]


def _faster(points: list[dict[str, Any]], times: float, rows: str, system: str) -> str:
    """Whether a communicator takes `times` as long as ours into sequence-parallel tp, by the medians."""
    ratios = [p["ratio"]["median"] for p in points]
    found = ", ".join(str(Ratio(**p["ratio"])) for p in points) or "nothing"
    return verdict(
        min(ratios) >= times if ratios else None,
        f"into sequence-parallel tp {rows}, ours is at least {times:g} times as fast as {system}; found {found}",
    )
