"""The end of a run. After an error, the trained steps are saved; if exporting a trained model fails, the model is
written elsewhere. All ranks end with the same message, which says where the result is.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from megatron_hetero.base.errors import NotFiniteError, SharedError
from megatron_hetero.base.outputs import chosen_in, name_of, step_of
from megatron_hetero.groups.collective import on_every, on_first
from megatron_hetero.train.run import Run
from megatron_hetero.train.stopping import StopRequest

EXPORT = "python -m megatron_hetero.cli.export"
LEFT_OVER = "trained-model"
"""Name of the folder in `log.dir` for a trained model that could not be written to its target."""


@contextmanager
def saved_at_end(run: Run, request: StopRequest) -> Iterator[Ending]:
    """Return a context for the steps of a run; if a stop request or an error on all ranks ends them early, save what
    was trained. `Ending.export_and_finish` raises the error. Collective.
    """
    ending, waiting = Ending(run), run.trainer.topology.watchdog.waiting
    request.begin()
    with run.writer:
        try:
            yield ending
            ending.stopped = run.saver.trained if run.trainer.on_any_rank(request) else None
        except SharedError as error:
            with waiting(lambda: "the saving of what was trained, with all other ranks,"):
                ending.stopped = ending.failed(run.settle(error))
        if ending.stopped is not None:
            with waiting(lambda: "the end of the run, with all other ranks,"):
                ending.report_stop()
    if ending.stopped is None:
        request.end()  # Signals may interrupt an export, since a half-written export is never used.


class Ending:
    """Ends a run, collectively. `stopped`: the step after which the run stopped; None if training is complete."""

    def __init__(self, run: Run) -> None:
        self.stopped: int | None = None
        self._run, self._config = run, run.trainer.job.config
        self._problems: list[str] = []

    def failed(self, error: SharedError) -> int | None:
        """Save what was trained before an error on all ranks, unless the weights may have caused the error, so that a
        resumed run would fail again. Returns the step after which the run stopped; None if training was complete.
        """
        run, saver, in_doubt = self._run, self._run.saver, isinstance(error, NotFiniteError)
        run.writer.failed = True
        notes = saver.settle()
        # A rank whose save is still in progress cannot join another collective save.
        is_free = not run.trainer.on_any_rank(saver.is_busy)
        if is_free and not in_doubt:
            notes += saver.rescue()
        for note in notes:
            run.writer.print(note)
        text = str(error)
        if saver.trained == self._config.train.iters:
            self._problems.append(text)
            return None
        sentence = text if text.endswith((".", "?", "!")) else f"{text}."
        self._problems.append(f"{sentence} {self._what_is_saved(in_doubt)}".strip())
        if is_free and saver.lost is not None and self._last_checkpoint() is None:
            self._write_first(self._places(None), f"model after step {saver.trained}")
        return saver.trained

    def report_stop(self) -> None:
        """Report that the run stops early on request; do nothing if it failed."""
        if not self._problems:
            done = f"stopped after step {self.stopped}, as requested"
            self._run.writer.print(f"{done}; {self._command} resumes from there")
        self._add_faults()

    def export_and_finish(self) -> bool:
        """Export a trained model and wait for all ranks. Return whether training is complete. Raises `SharedError`."""
        trainer = self._run.trainer
        if self.stopped is None:
            with trainer.topology.watchdog.waiting(lambda: "the end of the run, with all other ranks,"):
                self._export(self._config.export.hf_dir)
        trainer.wait_for_all("the end of all other ranks")
        if self._problems:
            raise SharedError("\nerror: ".join(dict.fromkeys(self._problems)))
        return self.stopped is None

    def _export(self, target: Path | None) -> None:
        """Export the model to `target`, or to a folder in `log.dir` if that fails and no checkpoint has the model."""
        saver, checkpoint = self._run.saver, self._last_checkpoint()
        if saver.lost is not None and str(saver.lost) not in self._problems:
            self._problems.append(str(saver.lost))
        if checkpoint is None and (target is not None or saver.lost is not None):
            self._write_first(self._places(target), "trained model")
        elif target is not None and not self._written(target):
            self._problems[-1] += f" {checkpoint} has the trained model: `{EXPORT} {checkpoint} HF_DIR` writes it."
        self._add_faults()

    @property
    def _command(self) -> str:
        """Description of the command that resumes from the newest checkpoint, for messages."""
        return "the same command" if self._config.checkpoint.resume == "auto" else "--checkpoint.resume auto"

    def _what_is_saved(self, in_doubt: bool) -> str:
        """Describe for the user what is saved. `in_doubt`: whether the weights may have caused the failure."""
        saver, checkpoint = self._run.saver, self._last_checkpoint()
        if in_doubt and checkpoint is not None:
            return (
                f"The newest checkpoint is {checkpoint}; if its weights are at fault, resume from an earlier one with "
                "--checkpoint.resume PATH, or start over, with another checkpoint.dir."
            )
        if saver.trained == self._run.resumed.step:
            return ""
        if self._config.checkpoint.dir is None:
            return "Nothing was saved, since checkpoint.dir is not set."
        if checkpoint is not None:
            return f"What was trained is saved in {checkpoint}; {self._command} resumes from there."
        newest = on_first(self._run.trainer.topology.files, lambda: chosen_in(self._config.checkpoint.dir or Path()))
        again = f"The newest checkpoint is {newest}; {self._command} resumes from there."
        if step_of(newest) is None:
            again = "There is no earlier checkpoint; the same command starts over."
        why = "was not saved, since its weights may be at fault" if in_doubt else "could not be saved"
        return f"Step {saver.trained} {why}. {again}"

    def _last_checkpoint(self) -> Path | None:
        """Return the checkpoint after the last trained step, whether this run wrote it or resumed from it."""
        saver = self._run.saver
        if saver.saved is not None and saver.saved.path.name == name_of(saver.trained):
            return saver.saved.path
        return self._run.resumed.path if self._run.resumed.step == saver.trained else None

    def _places(self, target: Path | None) -> Iterator[Path]:
        """Yield `target`, if any, then an unused path in `log.dir`, so that no earlier run's model is replaced."""
        if target is not None:
            yield target
        place = self._config.log.dir / LEFT_OVER
        names = itertools.chain([place], (place.with_name(f"{LEFT_OVER}-{number}") for number in itertools.count(2)))
        files = self._run.trainer.topology.files
        yield on_first(files, lambda: next(path for path in names if not os.path.lexists(path)))

    def _write_first(self, places: Iterable[Path], model: str) -> None:
        """Write the model, which no checkpoint has, to the first of `places` that can be written."""
        if place := next(filter(self._written, places), None):
            self._run.writer.print(f"the {model} is in {place}")
        if self._problems:
            self._problems[-1] += f" The {model} {f'is in {place}' if place else 'could not be written and is lost'}."

    def _written(self, place: Path) -> bool:
        try:
            self._run.export(place)
        except SharedError as error:
            self._problems.append(str(error))
            return False
        return True

    def _add_faults(self) -> None:
        """Add the failed writes of metrics on all ranks to the problems of the run."""
        by_rank = on_every(self._run.trainer.topology.files, lambda: list(self._run.writer.faults.values()))
        self._problems += [fault for faults in by_rank for fault in faults]
