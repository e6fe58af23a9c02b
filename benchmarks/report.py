"""Tables, requirements and plots from what was measured."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import mean, median
from textwrap import fill
from typing import Any

from benchmarks.material import SAMPLES, Case
from benchmarks.measuring.material import ModelSize
from megatron_hetero.models.registry import FAMILIES

COMMUNICATING = 0.35
"""Share of uniform tp's encoder time from which `sp` must be `FASTER`."""
FASTER = 1.26
COMPUTING = 0.2
"""Share of uniform tp's encoder time below which arithmetic dominates, and `sp` must be at least `NOT_SLOWER`."""
NOT_SLOWER = 0.97
TRAFFIC = 0.25
"""Largest share of tp's traffic that `sp` may have."""


@dataclass(frozen=True)
class Ratio:
    """A ratio of times of the same round: median, smallest and largest over the rounds."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, slower: Sequence[float], faster: Sequence[float]) -> Ratio:
        """How many times longer `slower` takes than `faster`, round by round."""
        ratios = [a / b for a, b in zip(slower, faster, strict=True)]
        return cls(median(ratios), min(ratios), max(ratios))

    def __str__(self) -> str:
        return f"{self.median:.2f} [{self.low:.2f}, {self.high:.2f}]"


def table(header: str, rows: Sequence[str]) -> str:
    """A Markdown table; cells are parted by ` | `."""
    columns = header.count("|") - header.count("\\|") + 1
    return "\n".join([f"| {header} |", "|---" * columns + "|", *(f"| {row} |" for row in rows)])


def verdict(passed: bool | None, text: str) -> str:
    """A line that says whether a requirement is met, or that nothing shows it (None)."""
    return f"{'NOT SHOWN' if passed is None else 'PASS' if passed else 'FAIL'}: {text}"


def write(folder: Path, name: str, text: str, numbers: Any, figure: Any) -> None:
    """Write `NAME.md`, `.json` and `.png`."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.md").write_text(text + "\n", encoding="utf-8")
    (folder / f"{name}.json").write_text(json.dumps(numbers, indent=1) + "\n", encoding="utf-8")
    figure.savefig(folder / f"{name}.png", dpi=90)


# ---------------------------------------------------------------------------------------------------------
# The encoder alone
# ---------------------------------------------------------------------------------------------------------


@dataclass
class EncoderReport:
    """The sweep over widths and image sizes. `points` as `EncoderBench.measure` returns them, plus what follows."""

    layers: int
    ranks: int
    points: list[dict[str, Any]] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)

    def add(self, point: dict[str, Any]) -> None:
        """Take a point, and find tp at its best in it."""
        seconds, traffic = point["seconds"], point["traffic"]
        best = min((name for name in seconds if name != "sp"), key=lambda name: median(seconds[name]))
        point |= {
            "best_tp": best,
            "ratio": asdict(Ratio.of(seconds[best], seconds["sp"])),
            "shares": {name: traffic[name]["seconds"] / median(seconds[name]) for name in seconds},
            "traffic_ratio": traffic["sp"]["bytes"] / min(traffic[n]["bytes"] for n in seconds if n != "sp"),
        }
        self.points.append(point)

    def text(self, last_only: bool = False) -> str:
        """The table, and whether the requirements are met."""
        points = self.points[-1:] if last_only else self.points
        rows = table(
            "width | patches | tp at its best | tp communicates | sp communicates | sp sends | tp sends | "
            "collectives sp, tp | saved activations sp, tp | tp / sp time: median [min, max]",
            [self._row(p) for p in points],
        )
        if last_only:
            return rows.splitlines()[-1]
        head = f"Vision encoder, {self.layers} layers, {self.ranks} ranks, forward and backward; per rank."
        skipped = [f"Skipped as too long for this machine: {s}." for s in self.skipped]
        return "\n\n".join([head, rows, *skipped, "\n".join(f"- {v}" for v in self.verdicts())])

    def _row(self, p: dict[str, Any]) -> str:
        best, traffic = p["best_tp"], p["traffic"]
        sp, tp = traffic["sp"], traffic[best]
        saved = f"{sp['saved_activation_bytes'] / 2**20:.0f}, {tp['saved_activation_bytes'] / 2**20:.0f} MiB"
        return (
            f"{p['hidden']} | {p['patches']} | {best} | {p['shares'][best]:.0%} | {p['shares']['sp']:.0%} | "
            f"{sp['bytes'] / 2**20:.2f} MiB | {tp['bytes'] / 2**20:.2f} MiB | "
            f"{sp['collectives']}, {tp['collectives']} | {saved} | {Ratio(**p['ratio'])}"
        )

    def verdicts(self) -> list[str]:
        """The requirements, each with the measured value."""
        if not self.points:
            return []
        busy = [p for p in self.points if p["shares"][p["best_tp"]] >= COMMUNICATING]
        calm = [p for p in self.points if p["shares"][p["best_tp"]] < COMPUTING]
        slowest = min((p["ratio"]["median"] for p in busy), default=None)
        worst = min((p["ratio"]["median"] for p in calm), default=None)
        share = max(p["traffic_ratio"] for p in self.points)
        return [
            verdict(
                all(p["as_predicted"] for p in self.points), "sp sends what the shapes predict, on every rank and point"
            ),
            verdict(share <= TRAFFIC, f"sp sends at most {TRAFFIC:.0%} of tp's bytes; found {share:.1%} at most"),
            verdict(
                None if slowest is None else slowest >= FASTER,
                f"where tp communicates {COMMUNICATING:.0%} of its time or more ({len(busy)} points), sp is at least "
                f"{FASTER} times faster; found {_number(slowest)} at least",
            ),
            verdict(
                None if worst is None else worst >= NOT_SLOWER,
                f"where tp communicates less than {COMPUTING:.0%} of its time ({len(calm)} points), sp is at least "
                f"{NOT_SLOWER} times as fast; found {_number(worst)} at least",
            ),
        ]

    def write(self, folder: Path) -> None:
        """Table, numbers and plot."""
        write(folder, "encoder", self.text(), asdict(self), self._figure())

    def _figure(self) -> Any:
        figure, axes = _axes("tp's share of time communicating", "time of tp / time of sp")
        for patches in sorted({p["patches"] for p in self.points}):
            points = sorted(
                (p["shares"][p["best_tp"]], p["ratio"], p["hidden"]) for p in self.points if p["patches"] == patches
            )
            x, y = [p[0] for p in points], [p[1]["median"] for p in points]
            spread = [[r["median"] - r["low"] for _, r, _ in points], [r["high"] - r["median"] for _, r, _ in points]]
            axes.errorbar(x, y, yerr=spread, marker="o", capsize=3, label=f"{patches} patches")
            for share, ratio, hidden in points:
                axes.annotate(f" {hidden}", (share, ratio["median"]))
        axes.axhline(1.0, color="grey", linewidth=1)
        axes.legend()
        axes.set_title("Encoder, widths at the points")
        figure.tight_layout()
        return figure


def _number(value: float | None) -> str:
    return "none" if value is None else f"{value:.2f}"


def _axes(x: str, y: str) -> tuple[Any, Any]:
    import matplotlib

    matplotlib.use("agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4.5))
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    return figure, axes


# ---------------------------------------------------------------------------------------------------------
# Whole steps
# ---------------------------------------------------------------------------------------------------------

OURS, UNIFORM = ("sp|tp", "sp|sp", "sp|cp", "sp|dp", "dp|dp"), ("tp|tp",)
"""Prefixes of systems' names; the fastest of a kind in a case represents it."""
KINDS = {"best layout": OURS, "tp": UNIFORM, "FSDP2": ("fsdp",), "DDP": ("ddp",)}
"""What plots compare, with the prefixes of systems' names."""
ZERO, LESS_TIME, LESS_MEMORY = " zero", 0.95, 1.0
"""Suffix of systems with ZeRO 3, and the maximum that one of them may take of FSDP2's time and memory."""


@dataclass
class StepReport:
    """Whole training steps of all systems."""

    size: ModelSize
    ranks: int
    parameters: int
    rows: list[dict[str, Any]] = field(default_factory=list)
    same_loss: bool = True
    draws: list[str] = field(default_factory=list)

    def add(
        self, case: Case, steps: dict[str, list[Any]], traffic: dict[str, list[Any]], peaks: dict[str, list[int]]
    ) -> None:
        """Take one case: steps by system, round and rank; traffic and peak memory by system and rank."""
        if case.is_drawn:
            self.draws.append(case.description)
        seconds = {name: [max(r.seconds for r in ranks) for ranks in rounds] for name, rounds in steps.items()}
        losses = [rounds[0][0].loss for rounds in steps.values()]
        self.same_loss = self.same_loss and max(losses) - min(losses) <= 1e-3 * max(losses)
        ours = min((s for name, s in seconds.items() if name.startswith(OURS)), key=median, default=None)
        for name, rounds in steps.items():
            self.rows.append({
                "case": case.name,
                "system": name,
                "tokens_per_s": rounds[0][0].tokens / median(seconds[name]),
                "seconds": seconds[name],
                "cpu_seconds": [sum(r.cpu_seconds for r in ranks) for ranks in rounds],
                "peak_bytes": max(peaks[name]),
                "ratio": asdict(Ratio.of(seconds[name], ours)) if ours else None,
                **_traffic(rounds, traffic[name], case.steps),
            })  # fmt: skip

    def text(self, last_only: bool = False) -> str:
        """The table, and what was checked. With `last_only` the rows of the latest case."""
        latest = self.rows[-1]["case"] if self.rows else ""
        rows = [self._row(r) for r in self.rows if not last_only or r["case"] == latest]
        details = table(
            "data | system | tokens/s | peak memory per rank | sent in a step | collectives | vision sends | "
            "vision collectives | vision's share communicating | time / time of ours at its best",
            rows,
        )
        if last_only:
            return "\n".join(details.splitlines()[2:])
        size = ", ".join(f"{k.replace('_', ' ')} {v}" for k, v in asdict(self.size).items())
        head = (
            f"Whole training steps, {self.ranks} ranks on {_processors()}, global batch of {SAMPLES} samples, fp32. "
            f"Model: {self.parameters / 1e6:.1f} M parameters; {size}."
        )
        notes = (
            "Ours: sp, tp (vision, text) and the like; the best layout is the fastest of them here. FSDP2 and DDP: one "
            "sample per rank. `whole`: activations not split over tp. `zero`: ZeRO 3, with tp "
            "of the encoder alone. `ep`: experts divided over all ranks. Ratio: median [min, max] of rounds. "
            "Memory: resident (of the allocator on a GPU), above what the process held before the model was built. "
            "All compute their products by the library that PyTorch takes."
        )
        return "\n\n".join(
            [head, self.summary(), details, notes, *self.draws, "\n".join(f"- {v}" for v in self.verdicts())]
        )

    def summary(self) -> str:
        """A short table: the time of each kind of system relative to our best layout, median [min, max] of rounds."""
        names = list(KINDS)
        rows = []
        for case, systems in self._by_kind().items():
            ours = systems[names[0]]
            ratios = [
                str(Ratio.of(systems[name]["seconds"], ours["seconds"])) if name in systems else "—"
                for name in names[1:]
            ]
            rows.append(" | ".join([case, ours["system"].replace("|", ", "), *ratios]))
        return table(" | ".join(["pictures", f"{names[0]} (vision, text)", *names[1:]]), rows)

    def _by_kind(self) -> dict[str, dict[str, dict[str, Any]]]:
        """By case, and by kind of system, the row of the fastest system. Cases without one of ours are left out."""
        result: dict[str, dict[str, dict[str, Any]]] = {}
        for case in dict.fromkeys(row["case"] for row in self.rows):
            for kind, prefixes in KINDS.items():
                rows = [row for row in self.rows if row["case"] == case and row["system"].startswith(prefixes)]
                if rows:
                    result.setdefault(case, {})[kind] = min(rows, key=lambda row: median(row["seconds"]))
        return {case: systems for case, systems in result.items() if next(iter(KINDS)) in systems}

    def _row(self, r: dict[str, Any]) -> str:
        vision = ("—", "—", "—")
        if r["vision_bytes"] is not None:
            vision = (f"{r['vision_bytes'] / 2**20:.1f} MiB", f"{r['vision_collectives']}", f"{r['vision_share']:.0%}")
        name = r["system"].replace("|", ", ")
        return " | ".join([
            r["case"], name, f"{r['tokens_per_s']:.0f}", f"{r['peak_bytes'] / 2**20:.0f} MiB",
            f"{r['bytes'] / 2**20:.1f} MiB", f"{r['collectives']}", *vision,
            str(Ratio(**r["ratio"])) if r["ratio"] else "—",
        ])  # fmt: skip

    def verdicts(self) -> list[str]:
        """What was required of whole steps, and what is reported."""
        lines = [verdict(self.same_loss, "all systems compute the same loss on the same data")]
        for case in dict.fromkeys(r["case"] for r in self.rows):
            rows = {r["system"]: r for r in self.rows if r["case"] == case}
            ours, uniform = ([r for name, r in rows.items() if name.startswith(kind)] for kind in (OURS, UNIFORM))
            if not ours:
                continue
            against = {"fsdp": rows.get("fsdp"), "ddp": rows.get("ddp")}
            if uniform:
                best = min(uniform, key=lambda r: median(r["seconds"]))
                against = {f"best uniform tp ({best['system'].replace('|', ', ')})": best, **against}
                share = max(r["vision_bytes"] for r in ours) / min(r["vision_bytes"] for r in uniform)
                lines.append(verdict(share <= TRAFFIC, f"{case}: sp's vision traffic is {share:.1%} of tp's"))
            ratios = [f"{name} {Ratio(**row['ratio'])}" for name, row in against.items() if row]
            lines.append(f"REPORT: {case}: time over that of ours: {'; '.join(ratios)}")
            shared = [row for name, row in rows.items() if name.endswith(ZERO)]
            if shared and (fsdp := rows.get("fsdp")):
                lines.append(_against_fsdp(case, shared, fsdp))
            if (self.size.experts or self.size.attention_every) and (fsdp := rows.get("fsdp")):
                shares = "; ".join(_shares(row, fsdp) for name, row in rows.items() if name != "fsdp")
                what = "time, processors' time, memory and bytes sent"
                lines.append(f"REPORT: {case}: shares of FSDP2's {what}: {shares}")
        return lines

    def write(self, folder: Path) -> None:
        """Table, numbers and plot."""
        name = "experts" if self.size.experts else "qwen3_5" if self.size.attention_every else "step"
        name = "pictures" if self.draws else name
        write(folder, name, self.text(), asdict(self), self._figure())

    def _figure(self) -> Any:
        """Tokens per second, a group of bars for each case; whiskers are the fastest and the slowest round."""
        figure, axes = _axes("", "tokens per second")
        cases = self._by_kind()
        width = 0.8 / len(KINDS)
        for number, kind in enumerate(KINDS):
            rows = [(place, systems[kind]) for place, systems in enumerate(cases.values()) if kind in systems]
            if not rows:
                continue
            heights = [row["tokens_per_s"] for _, row in rows]
            tokens = [row["tokens_per_s"] * median(row["seconds"]) for _, row in rows]
            slowest = [count / max(row["seconds"]) for count, (_, row) in zip(tokens, rows, strict=True)]
            fastest = [count / min(row["seconds"]) for count, (_, row) in zip(tokens, rows, strict=True)]
            spread = [
                [height - low for height, low in zip(heights, slowest, strict=True)],
                [high - height for height, high in zip(heights, fastest, strict=True)],
            ]
            places = [place + width * (number + 0.5) - 0.4 for place, _ in rows]
            axes.bar(places, heights, width, yerr=spread, capsize=2, label=kind, color=f"C{number}")
        best = [systems[next(iter(KINDS))]["system"].replace("|", ", ") for systems in cases.values()]
        labels = [f"{fill(case, 22)}\nbest: {layout}" for case, layout in zip(cases, best, strict=True)]
        axes.set_xticks(range(len(cases)), labels, fontsize=9)
        model = f"{FAMILIES[self.size.family].title} with {self.parameters / 1e6:.0f} M parameters"
        axes.set_title(f"Training {model}, fp32, {self.ranks} ranks on {_processors()}", fontsize=10)
        axes.set_ylim(top=1.15 * axes.get_ylim()[1])
        axes.legend(fontsize=9, ncols=len(KINDS), loc="upper center")
        figure.tight_layout()
        return figure


def _processors() -> str:
    import torch

    return torch.cuda.get_device_name() if torch.cuda.is_available() else f"{os.cpu_count()} CPU cores"


def _against_fsdp(case: str, shared: Sequence[dict[str, Any]], fsdp: dict[str, Any]) -> str:
    shares, passed = [], False
    for row in shared:
        time, memory = Ratio.of(row["seconds"], fsdp["seconds"]), row["peak_bytes"] / fsdp["peak_bytes"]
        passed |= time.median <= LESS_TIME and memory <= LESS_MEMORY
        shares.append(f"{row['system'].replace('|', ', ')} {time} of its time, {memory:.2f} of its memory")
    wanted = f"at most {LESS_TIME} of FSDP2's time in at most {LESS_MEMORY} of its memory"
    return verdict(passed, f"{case}: ZeRO 3 takes {wanted}; {'; '.join(shares)}")


def _shares(row: dict[str, Any], fsdp: dict[str, Any]) -> str:
    times = (str(Ratio.of(row[key], fsdp[key])) for key in ("seconds", "cpu_seconds"))
    rest = (f"{row[key] / fsdp[key]:.2f}" for key in ("peak_bytes", "bytes"))
    return f"{row['system'].replace('|', ', ')} {', '.join([*times, *rest])}"


def _traffic(rounds: list[list[Any]], ranks: list[Any], steps: int) -> dict[str, Any]:
    """What is sent in each of the `steps` of a case, on average."""
    result: dict[str, Any] = {
        "bytes": max(t.bytes for t in ranks) / steps,
        "collectives": round(max(t.collectives for t in ranks) / steps),
        "seconds_communicating": mean(t.seconds for t in ranks) / steps,
        "vision_bytes": None,
        "vision_collectives": None,
        "vision_share": None,
    }
    if ranks[0].vision_bytes is not None:
        vision_seconds = median(mean(rank.vision_seconds for rank in one) for one in rounds)
        result |= {
            "vision_bytes": max(t.vision_bytes for t in ranks) / steps,
            "vision_collectives": round(max(t.vision_collectives for t in ranks) / steps),
            "vision_share": mean(t.vision_seconds for t in ranks) / vision_seconds,
        }
    return result
