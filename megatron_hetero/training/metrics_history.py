"""What the lines of a metrics.jsonl tell of evaluations that a run has made. Anyone may have written them."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from megatron_hetero.outputs.logs import METRICS


def evaluated_after(step: int, history: str) -> frozenset[str]:
    """The data sets whose evaluation after `step` is told by the lines of metrics.jsonl up to that step. Lines that
    are none of ours tell nothing.
    """
    records = filter(None, map(_parsed, reversed(history.splitlines())))
    last = itertools.takewhile(lambda record: record.get("step") == step, records)
    return frozenset(record["eval_dataset"] for record in last if isinstance(record.get("eval_dataset"), str))


def _parsed(line: str) -> dict[str, Any] | None:
    """The record of a line; None where it is none."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return record if isinstance(record, dict) else None


def evaluations_since(history: str, step: int, folder: Path) -> str:
    """The evaluations after `step` whose lines follow directly on `history`, which ends with that step, in the
    metrics.jsonl of `folder`: they were made after the checkpoint that has this history. Nothing where the file cannot
    be read or tells of another run.
    """
    try:
        found = (folder / METRICS).read_text(encoding="utf-8")
    except (OSError, ValueError):
        return ""
    if not history or not found.startswith(history):
        return ""
    return "".join(_evaluations(found[len(history) :].splitlines(keepends=True), step))


def _evaluations(lines: list[str], step: int) -> Iterator[str]:
    """The evaluations after `step` that begin `lines`."""
    for line in lines:
        record = (_parsed(line) if line.endswith("\n") else None) or {}
        if "eval_dataset" not in record or record.get("step") != step:
            return
        yield line
