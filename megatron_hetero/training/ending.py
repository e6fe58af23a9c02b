"""How a run ends: what is whole is saved where an error ends it, a trained model gets to disk whatever fails, and every
rank ends with the same message, which says where it is.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from megatron_hetero.checkpoint.collective import on_every, on_first
from megatron_hetero.checkpoint.folder import name_of
from megatron_hetero.errors import SharedError
from megatron_hetero.training.run import Run

EXPORT = "python -m megatron_hetero.tools.export"
LEFT_OVER = "trained-model"
"""What a model is called that could not be written to where it was meant to go."""


class Ending:
    """The end of a run. Every rank calls the same methods in the same order."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._problems: list[str] = []

    @property
    def _is_trained(self) -> bool:
        return self._run.saver.trained == self._run.config.train.iters

    @property
    def _command(self) -> str:
        """What goes on from the newest checkpoint."""
        return "the same command" if self._run.config.checkpoint.resume == "auto" else "--checkpoint.resume auto"

    def failed(self, error: SharedError) -> int | None:
        """Save what has been trained before an error that all ranks have come upon. Returns the step after which it
        stopped the run; None where all had been trained.
        """
        run, saver = self._run, self._run.saver
        notes = saver.settle()
        # A rank whose save is still under way would not join in another one.
        if not run.on_any_rank(saver.is_busy):
            notes += saver.rescue()
        for note in notes:
            run.writer.print(note)
        self._problems.append(str(error) if self._is_trained else f"{error} {self._what_is_saved()}".strip())
        return None if self._is_trained else saver.trained

    def stopped(self, step: int) -> None:
        """Say that the run stops after `step`, and why, where it did not fail."""
        if not self._problems:
            self._add_faults()
            if self._problems:
                self._problems[-1] += f" The run has stopped after step {step}. {self._what_is_saved()}"
            else:
                self._run.writer.print(f"stopped after step {step}, as asked; {self._command} goes on from there")

    def trained(self) -> None:
        """Export the model; where that cannot be done, and no checkpoint has it, to another place than it was meant
        for.
        """
        saver, target = self._run.saver, self._run.config.export.hf_dir
        if saver.lost is not None and str(saver.lost) not in self._problems:
            self._problems.append(str(saver.lost))
        held_by = self._last_checkpoint()
        if target is None and (held_by is not None or saver.lost is None):
            return self._add_faults()
        for place in self._places(target):
            try:
                self._run.export(place)
            except SharedError as error:
                self._problems.append(str(error))
            else:
                self._delivered(place)
                break
            if held_by is not None:
                self._problems[-1] += f" {held_by} has the trained model: `{EXPORT} {held_by} HF_DIR` writes it."
                break
        self._add_faults()

    def finish(self) -> None:
        """Raise `SharedError` where anything went wrong."""
        if self._problems:
            raise SharedError("\nerror: ".join(dict.fromkeys(self._problems)))

    def _what_is_saved(self) -> str:
        saver = self._run.saver
        if saver.trained == self._run.resumed.step:
            return ""
        if saver.config.checkpoint.dir is None:
            return "Nothing was saved, since checkpoint.dir is not set."
        if (checkpoint := self._last_checkpoint()) is not None:
            return f"What was trained is saved in {checkpoint}; {self._command} goes on from there."
        return f"Step {saver.trained} could not be saved."

    def _last_checkpoint(self) -> Path | None:
        """The checkpoint after the last step that was trained, by this run or the one that it goes on from."""
        saver = self._run.saver
        if saver.saved is not None and saver.saved.path.name == name_of(saver.trained):
            return saver.saved.path
        return self._run.resumed.path if self._run.resumed.step == saver.trained else None

    def _places(self, target: Path | None) -> Iterator[Path]:
        """Where the model may go: where it is meant to, beside that, and where metrics go."""
        if target is not None:
            yield target
        parents = [self._run.config.log.dir] if target is None else [target.parent, self._run.config.log.dir]
        for parent in dict.fromkeys(parents):
            yield on_first(self._run.topology.files, partial(_free, parent / LEFT_OVER))

    def _delivered(self, place: Path) -> None:
        if self._problems:
            self._problems[-1] += f" The trained model is in {place}."
        self._run.writer.print(f"the trained model is in {place}")

    def _add_faults(self) -> None:
        """What went wrong beside training, on any rank."""
        of_ranks = on_every(self._run.topology.files, lambda: self._run.faults)
        self._problems += [fault for faults in of_ranks for fault in faults]


def _free(place: Path) -> Path:
    """A path of that name, or with a number behind it, at which nothing is."""
    numbered = (place.with_name(f"{place.name}-{number}") for number in itertools.count(2))
    return next(path for path in itertools.chain([place], numbered) if not os.path.lexists(path))
