"""Tables from what the checkpoints' benchmark has measured."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.report import Ratio, table, verdict

COPY = 1.5
"""How many times the copy to the host's memory alone may last what holds up the step that begins a save beside it."""


@dataclass
class CheckpointReport:
    """What was measured, a value for each round. `weight_bytes`: of the model's folder."""

    saves: list[dict[str, Any]] = field(default_factory=list)
    tools: list[dict[str, tuple[float, int]]] = field(default_factory=list)
    weight_bytes: int = 0

    def add_save(
        self,
        size: int,
        steps: Sequence[float],
        waited: float,
        copied: float,
        to_host: float,
        held: float,
        meanwhile: Sequence[float],
    ) -> None:
        """Take a round of saves; seconds of the slowest rank, and the bytes of all ranks."""
        self.saves.append({
            "bytes": size, "steps": list(steps), "waited": waited, "copied": copied, "to_host": to_host, "held": held,
            "meanwhile": list(meanwhile),
        })  # fmt: skip

    def add_tools(self, costs: Mapping[str, tuple[float, int]]) -> None:
        """Take a round of export and import: seconds and peak memory in bytes."""
        self.tools.append(dict(costs))

    def text(self) -> str:
        """The tables, and whether what is required holds."""
        return "\n\n".join([
            f"Checkpoints of AdamW's state in fp32 on 2 ranks and 2 cores: {self.saves[0]['bytes'] / 1e9:.2f} GB. "
            f"Medians of {len(self.saves)} rounds; ratios are of the same round, median [min, max].",
            table("what | s | GB/s | time / time of a plain copy", self._speeds()),
            "How long training is held up:",
            table(
                "save | the step that begins it waits, s | time / time of the copy alone | lost until it is whole, s",
                self._holds(),
            ),
            "What is lost beside that wait are later steps that take longer: the thread has no core for itself here.",
            f"Model folder of {self.weight_bytes / 1e9:.2f} GB in fp32, each in a process of its own:",
            table("what | s | peak memory above an idle process | time / time of transformers", self._tools()),
            "\n".join(f"- {line}" for line in self.verdicts()),
        ])  # fmt: skip

    def _of(self, name: str) -> list[float]:
        return [save[name] for save in self.saves]

    def _speeds(self) -> list[str]:
        copied = self._of("copied")
        rows = {
            "plain copy of the files, flushed to the disk": copied,
            "save that is waited for": self._of("waited"),
        }
        size = self.saves[0]["bytes"]
        return [
            f"{name} | {median(times):.2f} | {size / median(times) / 1e9:.2f} | {Ratio.of(times, copied)}"
            for name, times in rows.items()
        ]

    def _holds(self) -> list[str]:
        to_host, waited, held = self._of("to_host"), self._of("waited"), self._of("held")
        lost = [
            save["held"] + sum(save["meanwhile"]) - len(save["meanwhile"]) * median(save["steps"])
            for save in self.saves
        ]
        rows = {"waited for": (waited, waited), "beside training": (held, lost), "the copy alone": (to_host, to_host)}
        return [
            f"{name} | {median(begins):.3f} | {Ratio.of(begins, to_host)} | {median(in_all):.2f}"
            for name, (begins, in_all) in rows.items()
        ]

    def _tools(self) -> list[str]:
        idle = min(costs["idle"][1] for costs in self.tools)
        names = {
            "transformers": "from_pretrained, save_pretrained",
            "export": "tools.export, in files of 0.2 GB",
            "import": "tools.import",
        }
        seconds = {name: [costs[name][0] for costs in self.tools] for name in names}
        peaks = {name: median(costs[name][1] for costs in self.tools) - idle for name in names}
        return [
            f"{shown} | {median(seconds[name]):.1f} | {peaks[name] / 1e9:.2f} GB | "
            f"{Ratio.of(seconds[name], seconds['transformers'])}"
            for name, shown in names.items()
        ]

    def verdicts(self) -> list[str]:
        """The requirements, each with what was found."""
        ratio = Ratio.of(self._of("held"), self._of("to_host"))
        idle = min(costs["idle"][1] for costs in self.tools)
        peaks = {name: median(costs[name][1] for costs in self.tools) - idle for name in self.tools[0]}
        most = max(peaks["export"], peaks["import"])
        return [
            verdict(
                ratio.median <= COPY,
                f"a step that begins a save beside training waits {ratio} times as long as the copy alone lasts",
            ),
            verdict(
                most <= peaks["transformers"],
                f"tools take at most {most / 1e9:.2f} GB, transformers {peaks['transformers'] / 1e9:.2f} GB",
            ),
        ]

    def write(self, folder: Path) -> None:
        """Write `checkpoint.md` and `checkpoint.json`."""
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "checkpoint.md").write_text(self.text() + "\n", encoding="utf-8")
        numbers = {"weight_bytes": self.weight_bytes, "saves": self.saves, "tools": self.tools}
        (folder / "checkpoint.json").write_text(json.dumps(numbers, indent=1) + "\n", encoding="utf-8")
