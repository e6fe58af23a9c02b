"""Saves checkpoints of a run, either while training waits or in a background thread from a copy in host memory."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from megatron_hetero.base.errors import UserError
from megatron_hetero.base.terminal import size_text
from megatron_hetero.checkpoint.index import Entry
from megatron_hetero.checkpoint.record import FILE_NAME as RECORD
from megatron_hetero.checkpoint.record import RunRecord
from megatron_hetero.checkpoint.resume import HISTORY, TrainState
from megatron_hetero.checkpoint.storage import Saved, save
from megatron_hetero.config.schema import Config
from megatron_hetero.groups.collective import Watched
from megatron_hetero.groups.launch import in_background
from megatron_hetero.groups.platform import Platform

SETTLED_S = 600.0
"""Seconds that a failed run waits for a save in progress."""


@dataclass(frozen=True, eq=False)
class _Writing:
    """A save in progress. `waited_s`: seconds that training has waited for this save so far."""

    step: int
    outcome: Future[tuple[Saved, float]]
    waited_s: float


class Saver:
    """Saves a run every `checkpoint.interval` steps, after the last step, and when the run is stopped.

    With `checkpoint.async`, a thread writes one save at a time, and training continues once this rank's entries have
    been copied to host memory. The thread uses a separate process group. Training waits for the last save to finish.

    `trained`: the last trained step; `saved`: the newest checkpoint written; `lost`: why the last attempt failed.
    """

    def __init__(
        self,
        config: Config,
        state: TrainState,
        record: RunRecord | None,
        trained: int = 0,
        watched: Watched = lambda _: nullcontext(),
        history: Callable[[], str] = str,
    ) -> None:
        """Start without a save in progress. `watched`: function from a description to a context for waiting on other
        ranks. `history`: function that returns the text of metrics.jsonl so far.
        """
        self.config, self.state, self.record, self._watched = config, state, record, watched
        self._history = history
        self.trained = self._tried = trained
        self.saved: Saved | None = None
        self.lost: UserError | None = None
        self._copies = HostCopies(state.topology.platform)
        self._writing: _Writing | None = None

    def after(self, step: int, stopping: bool = False) -> list[str]:
        """Save if a checkpoint is due, and report on an earlier save. Collective; called after each step.

        Returns notes for the user: checkpoints that are now complete, and a failed save if training is complete, since
        the model can still be exported. Raises `SharedError` if a save failed; the failure of a background save is
        raised after a later step.
        """
        self.trained = step
        chosen, due = self.config.checkpoint, self.is_due(step, stopping)
        last = stopping or step == self.config.train.iters
        raises = step < self.config.train.iters
        with self._watched(lambda: f"the saving of a checkpoint after step {step}, with all other ranks,"):
            notes = self._ended(waits=due, raises=raises)
            if due:
                self._writing = self._begin(step, in_thread=chosen.async_ and not last)
                notes += self._ended(waits=not chosen.async_ or last, raises=raises)
        if stopping and self.lost is not None:  # A stopped run must not exit as if it had saved.
            raise self.lost
        return notes

    def is_due(self, step: int, stopping: bool = False) -> bool:
        """Return whether a checkpoint is due after `step`; `stopping`: whether the run stops after it."""
        chosen, last = self.config.checkpoint, stopping or step == self.config.train.iters
        return chosen.dir is not None and (last or step % chosen.interval == 0)

    @property
    def is_busy(self) -> bool:
        """Whether a save is in progress on this rank."""
        return self._writing is not None

    def settle(self) -> list[str]:
        """Wait for a save in progress after an error on every rank, and return notes for the user."""
        with self._watched(lambda: "the end of a save that was under way"):
            if self._writing is not None and wait([self._writing.outcome], SETTLED_S).done:
                with suppress(Exception):
                    return self._ended(waits=True, raises=False)
        return []

    def rescue(self) -> list[str]:
        """Save the last step after an error on every rank, and return notes for the user. No save may be in progress.
        All older checkpoints remain, since any of them may be the last good one.
        """
        if self.config.checkpoint.dir is None or self.trained == self._tried:
            return []
        with self._watched(lambda: f"the saving of a checkpoint after step {self.trained}, with all other ranks,"):
            self._writing = self._begin(self.trained, in_thread=False, keeps_all=True)
            return self._ended(waits=True, raises=False)

    def _begin(self, step: int, in_thread: bool, keeps_all: bool = False) -> _Writing:
        self._tried, keep = step, None if keeps_all else self.config.checkpoint.keep_last
        start, history = time.perf_counter(), self._history()
        entries = self.state.entries()
        if in_thread:
            work = partial(self._write, step, self._copies.of(entries), history, start, keep)
            return _Writing(step, in_background(work, "checkpoint writer"), time.perf_counter() - start)
        outcome: Future[tuple[Saved, float]] = Future()
        try:
            outcome.set_result(self._write(step, entries, history, start, keep))
        except UserError as error:
            outcome.set_exception(error)
        return _Writing(step, outcome, time.perf_counter() - start)

    def _write(
        self, step: int, entries: list[Entry], history: str, start: float, keep: int | None
    ) -> tuple[Saved, float]:
        """Write the checkpoint after `step`; return it and the seconds since `start`."""
        chosen = self.config.checkpoint
        assert chosen.dir is not None and self.record is not None, "saves are due only with checkpoint.dir"
        record, group = replace(self.record, step=step), self.state.topology.files

        def texts() -> dict[str, str]:
            return {RECORD: record.to_json(), HISTORY: history}

        saved = save(entries, chosen.dir, step, texts, keep, group, self.state.working)
        return saved, time.perf_counter() - start

    def _ended(self, waits: bool, raises: bool) -> list[str]:
        """Return notes on the save in progress if it has ended. `waits`: whether to wait for its end."""
        writing, start = self._writing, time.perf_counter()
        if writing is None or not (waits or writing.outcome.done()):
            return []
        self._writing = self.lost = None
        try:
            self.saved, seconds = writing.outcome.result()
        except UserError as error:
            self.lost = error
            if raises:
                raise
            return [f"warning: no checkpoint after step {writing.step}: {error}"]
        waited = writing.waited_s + time.perf_counter() - start
        return [
            f"checkpoint {self.saved.path.name}: {size_text(self.saved.size)} in {seconds:.1f} s; "
            f"training waited for {min(waited, seconds):.2f} s"
        ]


class HostCopies:
    """Host buffers for copies of entries. Buffers are reused, since allocation takes longer than copying, and pinned
    for GPUs, which makes copies several times as fast.
    """

    def __init__(self, platform: Platform) -> None:
        self._platform = platform
        self._copies: list[Tensor] = []

    def of(self, entries: Sequence[Entry]) -> list[Entry]:
        """Return entries with host copies of the values. Blocks until copied; valid until the next call."""
        values = [entry.values for entry in entries]
        if list(map(_kind, values)) != list(map(_kind, self._copies)):
            self._copies = []  # Free the old copies before new ones are allocated.
            self._copies = [torch.empty(v.shape, dtype=v.dtype, pin_memory=self._platform.is_cuda) for v in values]
        for copy, entry in zip(self._copies, entries, strict=True):
            copy.copy_(entry.current(), non_blocking=True)
        self._platform.synchronize()
        return [replace(entry, values=copy, load=None) for entry, copy in zip(entries, self._copies, strict=True)]


def _kind(tensor: Tensor) -> tuple[torch.Size, torch.dtype]:
    return tensor.shape, tensor.dtype
