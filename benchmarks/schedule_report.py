"""Tables, requirements, plots and pictures of schedules."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.measuring.recording import Recorded, bubble, least_transfers, median_durations, step_seconds
from benchmarks.report import Ratio, table, verdict, write
from megatron_hetero.schedule.drawing import draw
from megatron_hetero.schedule.program import Schedule
from megatron_hetero.schedule.simulator import simulate

POINTS = 0.10
"""By how much recorded and simulated shares of idle time may differ where every rank has a core."""
CORES = 2
EVEN, UNEVEN = "equal pictures", "pictures of 64 to 400 patches"
"""Data. With equal micro-batches an encoder that is as fast as the text module is never late; with others it is."""
MORE_TIME = 1.05
"""What waves may take over everything first."""
MIB = 2**20


@dataclass
class ScheduleReport:
    """What was measured. `micro_batches`: of a step whose time was compared."""

    micro_batches: int
    recordings: list[dict[str, Any]] = field(default_factory=list)
    run_ahead: list[dict[str, Any]] = field(default_factory=list)
    waves: list[dict[str, Any]] = field(default_factory=list)

    def add_recording(self, name: str, schedule: Schedule, steps: Sequence[Recorded], folder: Path | None) -> None:
        """Take recorded steps of a schedule, simulate it with their medians, and draw both into `folder`."""
        durations, transfers = median_durations(steps), least_transfers(schedule, steps)
        simulation = simulate(schedule, durations, transfers)
        seconds = median(map(step_seconds, steps))
        idle = median(map(bubble, steps))
        if folder is not None:
            shown = min(steps, key=lambda step: abs(step_seconds(step) - seconds))
            roles = {rank: role.name for role in schedule.roles for rank in role.ranks}
            rows = {f"{rank} {roles[rank]}": spans for rank, spans in shown.items()}
            file = folder / f"schedule-{name.replace('|', '-').replace(':', '').replace('@', '_')}.png"
            draw({f"{name}, simulated": simulation, f"{name}, recorded": rows}, file)
        self.recordings.append({
            "placement": name,
            "ranks": len(steps[0]),
            "seconds": list(map(step_seconds, steps)),
            "bubbles": list(map(bubble, steps)),
            "simulated_seconds": simulation.seconds,
            "simulated_bubble": simulation.mean_bubble,
            "durations": {".".join(map(str, key)): value for key, value in durations.items()},
            "transfers": {".".join(map(str, key)): value for key, value in transfers.items()},
            "line": f"{name.replace('|', ', ')} | {len(steps[0])} | {seconds:.2f} | {simulation.seconds:.2f} | "
            f"{idle:.0%} | {simulation.mean_bubble:.0%} | yes",
        })  # fmt: skip

    def add_run_ahead(self, data: str, seconds: dict[str, list[float]], kept: dict[str, int]) -> None:
        """Take the times of one kind of data, and the activations that the encoder keeps, by run-ahead."""
        for name, each in seconds.items():
            ratio = asdict(Ratio.of(seconds["0"], each))
            row = {"data": data, "run_ahead": int(name), "seconds": each, "ratio": ratio, "kept_bytes": kept[name]}
            self.run_ahead.append(row)

    def add_waves(self, seconds: dict[str, list[float]], kept: dict[str, int], memory: dict[str, int]) -> None:
        """Take the times, the activations that encoders keep, and the peak memory, by size of waves."""
        first = str(self.micro_batches)
        for name, each in seconds.items():
            self.waves.append({
                "waves": name,
                "seconds": each,
                "ratio": asdict(Ratio.of(each, seconds[first])),
                "kept_bytes": kept[name],
                "kept_share": kept[name] / kept[first],
                "peak_bytes": memory[name],
            })  # fmt: skip

    # --------------------------------------------------------------------------------------------- text

    def text(self) -> str:
        """The tables, and what was required."""
        return "\n\n".join([
            f"Schedules over gloo on {CORES} cores. Ratios are of steps of the same round, median [min, max] of "
            f"{len(self.waves[0]['seconds'])} alternations; a step has {self.micro_batches} micro-batches, those of "
            "the first table 8.",
            "Recorded, beside the simulation with the medians of the recorded durations:",
            self.recordings_table(),
            "An encoder on a rank of its own (dp:1@0, dp:1@1):",
            self.run_ahead_table(self.run_ahead),
            "An encoder that shares ranks with two text stages (sp:2, pp:2):",
            self.waves_table(),
            "\n".join(f"- {v}" for v in self.verdicts()),
        ])  # fmt: skip

    def recordings_table(self) -> str:
        """A row for each placement."""
        header = "vision, text | ranks | step, s | simulated, s | idle | simulated idle | order as simulated"
        return table(header, [recording["line"] for recording in self.recordings])

    def run_ahead_table(self, rows: Sequence[dict[str, Any]]) -> str:
        """A row for each run-ahead and kind of data."""
        header = "data | run-ahead | step, s | encoder activations kept | time of run-ahead 0 / time"
        return table(header, [
            f"{r['data']} | {r['run_ahead']} | {median(r['seconds']):.2f} | {r['kept_bytes'] / MIB:.1f} MiB | "
            f"{'—' if r['run_ahead'] == 0 else Ratio(**r['ratio'])}"
            for r in rows
        ])  # fmt: skip

    def waves_table(self) -> str:
        """A row for each size of waves."""
        header = "waves | step, s | time / time of everything first | encoder activations kept | of everything first | "
        return table(header + "peak memory per rank", [
            f"{self._wave_name(r)} | {median(r['seconds']):.2f} | {Ratio(**r['ratio'])} | "
            f"{r['kept_bytes'] / MIB:.1f} MiB | {r['kept_share']:.0%} | {r['peak_bytes'] / MIB:.0f} MiB"
            for r in self.waves
        ])  # fmt: skip

    def _wave_name(self, row: dict[str, Any]) -> str:
        return f"{row['waves']}, everything first" if row["waves"] == str(self.micro_batches) else row["waves"]

    @property
    def waves_first(self) -> dict[str, Any]:
        """The row of everything first."""
        return next(r for r in self.waves if r["waves"] == str(self.micro_batches))

    def verdicts(self) -> list[str]:
        """The requirements, each with what was found."""
        lines = ["PASS: every rank did its actions in the schedule's order, and received nothing before it was sent"]
        for r in self.recordings:
            apart = abs(median(r["bubbles"]) - r["simulated_bubble"])
            told = f"{r['placement']}: recorded and simulated idle time are {100 * apart:.1f} points apart"
            lines.append(verdict(apart <= POINTS, told) if r["ranks"] <= CORES else f"REPORT: {told}")
        for r in self.run_ahead:
            if r["run_ahead"]:
                told = f"{r['data']}: run-ahead {r['run_ahead']} is {Ratio(**r['ratio'])} times as fast as none"
                lines.append(verdict(r["ratio"]["median"] > 1, told))
        for r in self.waves:
            if r["waves"].isdigit() and int(r["waves"]) < self.micro_batches:
                told = f"waves of {r['waves']} take {Ratio(**r['ratio'])} times as long as everything first and keep "
                less = r["kept_share"] < 1 and r["peak_bytes"] < self.waves_first["peak_bytes"]
                passed = r["ratio"]["median"] <= MORE_TIME and less
                lines.append(verdict(passed, f"{told}{r['kept_share']:.0%} of the encoder activations"))
        return lines

    # -------------------------------------------------------------------------------------------- plots

    def write(self, folder: Path) -> None:
        """Tables, numbers and plot."""
        write(folder, "schedule", self.text(), asdict(self), self._figure())

    def _figure(self) -> Any:
        from matplotlib.figure import Figure

        figure = Figure(figsize=(12, 4.5), layout="constrained")
        left, right = figure.subplots(1, 2)
        self._plot_run_ahead(left)
        self._plot_waves(right)
        return figure

    def _plot_run_ahead(self, axes: Any) -> None:
        kinds = list(dict.fromkeys(r["data"] for r in self.run_ahead))
        for i, kind in enumerate(kinds):
            rows = [r for r in self.run_ahead if r["data"] == kind and r["run_ahead"]]
            places = [k + 0.38 * i - 0.19 for k in range(len(rows))]
            _bars(axes, places, [Ratio(**r["ratio"]) for r in rows], 0.36, kind)
            axes.set_xticks(range(len(rows)), [f"run-ahead {r['run_ahead']}" for r in rows])
        axes.axhline(1.0, color="grey", linewidth=1)
        axes.set_ylabel("time of run-ahead 0 / time")
        axes.set_ylim(0.8)
        axes.set_title("Encoder on a rank of its own: dp:1@0, dp:1@1")
        axes.legend(loc="upper center", ncols=2, bbox_to_anchor=(0.5, -0.1))

    def _plot_waves(self, axes: Any) -> None:
        names = [r["waves"] if r["waves"].isdigit() else "recompute" for r in self.waves]
        _bars(axes, [i - 0.2 for i in range(len(names))], [Ratio(**r["ratio"]) for r in self.waves], 0.38, "step time")
        kept = [r["kept_share"] for r in self.waves]
        axes.bar([i + 0.2 for i in range(len(names))], kept, 0.38, color="tab:green", label="encoder activations kept")
        axes.axhline(1.0, color="grey", linewidth=1)
        axes.axhline(MORE_TIME, color="tab:red", linewidth=1, linestyle="--", label=f"{MORE_TIME:g}")
        axes.set_xticks(range(len(names)), names)
        axes.set_xlabel("micro-batches in a wave")
        axes.set_ylabel("over everything first")
        axes.set_title("Encoder on the ranks of two text stages: sp:2, pp:2")
        axes.legend(loc="upper center", ncols=3, bbox_to_anchor=(0.5, -0.14))


def _bars(axes: Any, places: Sequence[float], ratios: Sequence[Ratio], width: float, label: str) -> None:
    height = [r.median for r in ratios]
    spread = [[r.median - r.low for r in ratios], [r.high - r.median for r in ratios]]
    axes.bar(places, height, width, yerr=spread, capsize=3, label=label)
    for place, ratio in zip(places, ratios, strict=True):
        axes.annotate(f"{ratio.median:.2f}", (place, 0.84), ha="center", fontsize=9, bbox={"facecolor": "white"})
