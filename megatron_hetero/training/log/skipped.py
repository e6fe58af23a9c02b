"""Summary of the samples that a run skipped as too long."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Skipped:
    """Counts from the lines of metrics.jsonl: skipped samples, steps with any, and steps with no other samples."""

    samples: int = 0
    steps: int = 0
    idle_steps: int = 0

    @classmethod
    def of(cls, history: str) -> Skipped:
        """From the text of a metrics.jsonl."""
        skipped = cls()
        for record in _records(history):
            skipped = skipped.and_of(record)
        return skipped

    def and_of(self, record: Mapping[str, object]) -> Skipped:
        """With one more step."""
        samples = record.get("skipped_samples")
        if not isinstance(samples, int) or samples <= 0:
            return self
        idle = record.get("loss") is None
        return Skipped(self.samples + samples, self.steps + 1, self.idle_steps + idle)

    def notes(self) -> tuple[str, ...]:
        """Notes for the user; none if nothing was skipped."""
        if not self.samples:
            return ()
        idle = f"; {_counted(self.idle_steps, 'step')} had no other samples and trained nothing" * bool(self.idle_steps)
        where = _counted(self.steps, "step")
        return (f"{_counted(self.samples, 'sample')} longer than data.max_seq_length skipped, in {where}{idle}",)


def _records(history: str) -> Iterator[Mapping[str, object]]:
    """The lines that are JSON objects: the file may have been edited."""
    for line in history.splitlines():
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(record, dict):
            yield record


def _counted(number: int, what: str) -> str:
    return f"{number:,} {what}{'' if number == 1 else 's'}"
