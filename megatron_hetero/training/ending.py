"""How a run ends: what is whole is saved where an error ends it, a trained model gets to disk whatever fails, and every
rank ends with the same message, which says where it is.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path

from megatron_hetero.distributed.collective import on_every, on_first
from megatron_hetero.errors import NotFiniteError, SharedError
from megatron_hetero.outputs.checkpoints import name_of, unsound_name_of, whole
from megatron_hetero.training.trainer import Trainer

EXPORT = "python -m megatron_hetero.cli.export"
LEFT_OVER = "trained-model"
"""What a model is called that could not be written to where it was meant to go."""


class Ending:
    """The end of a run. Every rank calls the same methods in the same order."""

    def __init__(self, run: Trainer) -> None:
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
        is_free = not run.on_any_rank(saver.is_busy)
        if is_free:
            notes += saver.rescue(in_doubt=isinstance(error, NotFiniteError))
        for note in notes:
            run.writer.print(note)
        if self._is_trained:
            self._problems.append(str(error))
            return None
        saved = self._what_is_saved(in_doubt=isinstance(error, NotFiniteError))
        self._problems.append(f"{_sentence(error)} {saved}".strip())
        if is_free and saver.lost is not None and self._last_checkpoint() is None:
            self._write_instead(self._places_beside(), f"model after step {saver.trained}")
        return saver.trained

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
        if held_by is None:
            places = self._places_beside() if target is None else itertools.chain([target], self._places_beside())
            self._write_instead(places, "trained model")
        elif target is not None and not self._written(target):
            self._problems[-1] += f" {held_by} has the trained model: `{EXPORT} {held_by} HF_DIR` writes it."
        self._add_faults()
        return None

    def finish(self) -> None:
        """Raise `SharedError` where anything went wrong."""
        if self._problems:
            raise SharedError("\nerror: ".join(dict.fromkeys(self._problems)))

    def _what_is_saved(self, in_doubt: bool = False) -> str:
        """`in_doubt`: whether the weights may be what the run failed of."""
        saver, checkpoint = self._run.saver, self._last_checkpoint()
        if in_doubt and checkpoint is not None:
            return self._what_is_before(checkpoint)
        if saver.trained == self._run.resumed.step:
            return ""
        if saver.config.checkpoint.dir is None:
            return "Nothing was saved, since checkpoint.dir is not set."
        if saver.saved is not None and saver.saved.path.name == unsound_name_of(saver.trained):
            place = f"What was trained is in {saver.saved.path}, from which no run goes on by itself"
            return f"{place}, since its weights may be at fault. {self._where_it_goes_on()}"
        if checkpoint is not None:
            return f"What was trained is saved in {checkpoint}; {self._command} goes on from there."
        return f"Step {saver.trained} could not be saved. {self._where_it_goes_on()}"

    def _where_it_goes_on(self) -> str:
        """What the next run begins from, where the last step is no checkpoint."""
        if (newest := self._newest_before(self._run.config.checkpoint.dir)) is not None:
            return f"The newest checkpoint is {newest}; {self._command} goes on from there."
        given = self._run.resumed.path
        begins = "with step 1" if given is None else f"from {given}"
        return f"There is no checkpoint before it; the same command begins again {begins}."

    def _what_is_before(self, checkpoint: Path) -> str:
        """What to go on from, where the newest checkpoint may be at fault."""
        doubt = f"The newest checkpoint is {checkpoint}; if its weights are at fault, no run gets further from there."
        if (older := self._newest_before(checkpoint.parent)) is None:
            return f"{doubt} There is none before it: begin anew, with another checkpoint.dir."
        return f"{doubt} Go on from the one before it with --checkpoint.resume {older} and another checkpoint.dir."

    def _newest_before(self, folder: Path | None) -> Path | None:
        """The newest checkpoint in a folder that is older than the last step that was trained."""

        def newest() -> Path | None:
            found = whole(folder) if folder is not None else {}
            return next((found[step] for step in reversed(found) if step < self._run.saver.trained), None)

        return on_first(self._run.topology.files, newest)

    def _last_checkpoint(self) -> Path | None:
        """The checkpoint after the last step that was trained, by this run or the one that it goes on from."""
        saver = self._run.saver
        if saver.saved is not None and saver.saved.path.name == name_of(saver.trained):
            return saver.saved.path
        return self._run.resumed.path if self._run.resumed.step == saver.trained else None

    def _places_beside(self) -> Iterator[Path]:
        """Where the model may go that cannot go where it is meant to: beside that, and where metrics go."""
        target, logs = self._run.config.export.hf_dir, self._run.config.log.dir
        for parent in dict.fromkeys([logs] if target is None else [target.parent, logs]):
            yield on_first(self._run.topology.files, partial(_free, parent / LEFT_OVER))

    def _write_instead(self, places: Iterable[Path], model: str) -> None:
        """Write the model, of which no checkpoint has anything, to the first of the places that takes it."""
        for place in places:
            if self._written(place):
                if self._problems:
                    self._problems[-1] += f" The {model} is in {place}."
                return self._run.writer.print(f"the {model} is in {place}")
        self._problems[-1] += f" The {model} could be written nowhere, and is lost."
        return None

    def _written(self, place: Path) -> bool:
        try:
            self._run.export(place)
        except SharedError as error:
            self._problems.append(str(error))
            return False
        return True

    def _add_faults(self) -> None:
        """What went wrong beside training, on any rank."""
        of_ranks = on_every(self._run.topology.files, lambda: self._run.faults)
        self._problems += [fault for faults in of_ranks for fault in faults]


def _sentence(error: SharedError) -> str:
    text = str(error)
    return text if text.endswith((".", "?", "!")) else f"{text}."


def _free(place: Path) -> Path:
    """A path of that name, or with a number behind it, at which nothing is."""
    numbered = (place.with_name(f"{place.name}-{number}") for number in itertools.count(2))
    return next(path for path in itertools.chain([place], numbered) if not os.path.lexists(path))
