"""Past evaluations of a run, from the lines of a metrics.jsonl, which is untrusted."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from pathlib import Path

from megatron_hetero.outputs.logs import METRICS


def evaluated_after(step: int, history: str) -> frozenset[str]:
    """The data sets evaluated after `step`, according to the lines of metrics.jsonl up to that step. Foreign lines are
    ignored.
    """
    records = filter(None, map(_parsed, reversed(history.splitlines())))
    last = itertools.takewhile(lambda record: record.get("step") == step, records)
    return frozenset(name for record in last if isinstance(name := record.get("eval_dataset"), str))


def _parsed(line: str) -> dict[str, object] | None:
    """The record of a line; None if it is invalid."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return record if isinstance(record, dict) else None


def evaluations_since(history: str, step: int, folder: Path) -> str:
    """The lines of evaluations after `step` that directly follow `history`, which ends with that step, in the
    metrics.jsonl of `folder`: evaluations made after the checkpoint with this history was written. Empty if the file
    cannot be read or is another run's.
    """
    try:
        found = (folder / METRICS).read_text(encoding="utf-8")
    except (OSError, ValueError):
        return ""
    if not history or not found.startswith(history):
        return ""
    return "".join(_evaluations(found[len(history) :].splitlines(keepends=True), step))


def _evaluations(lines: list[str], step: int) -> Iterator[str]:
    """The leading `lines` that are evaluations after `step`."""
    for line in lines:
        record = (_parsed(line) if line.endswith("\n") else None) or {}
        if "eval_dataset" not in record or record.get("step") != step:
            return
        yield line
