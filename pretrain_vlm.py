"""Train a vision-language model, each module in its own layout.

    python -m megatron_hetero.run --nproc-per-node 8 pretrain_vlm.py --config FILE --vision-parallel sp:8 ...

or plan that, without GPUs and without the ranks:

    python pretrain_vlm.py --plan --world-size 8 --config FILE --vision-parallel sp:8 --text-parallel tp:4,dp:2

`python pretrain_vlm.py --help` lists every flag.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

try:
    from megatron_hetero.base.errors import SharedError
    from megatron_hetero.config.schema import Config, load_command
    from megatron_hetero.groups.launch import guarded, note_stop, process_group
    from megatron_hetero.train.stopping import StopRequest, stop_requests
except (ImportError, SyntaxError) as error:
    sys.exit(f"error: {error}. Run `make venv`, and start this with .venv/bin/python (Python 3.11 or newer).")

# torch and Megatron-Core are imported where they are used: a signal handler should not wait for them.
if TYPE_CHECKING:
    from megatron_hetero.groups.platform import Platform
    from megatron_hetero.train.log import Writer
    from megatron_hetero.train.trainer import Trainer


def main(argv: Sequence[str]) -> None:
    """Do what the command line asks for."""
    config, planned = load_command(argv)
    if planned is None:
        with stop_requests(config.checkpoint.dir is not None) as request:
            train(config, request)
    else:
        from megatron_hetero.estimate.report import show_estimate

        show_estimate(config, planned)


def train(config: Config, request: StopRequest) -> None:
    """Train, evaluate and export the model."""
    with process_group(config.schedule.timeout_s) as platform:
        finished = train_and_export(config, platform, request)
    if not finished:
        note_stop()


def train_and_export(config: Config, platform: Platform, request: StopRequest) -> bool:
    """Build the run, train and evaluate it, and export the model. Returns whether it finished, rather than being asked
    to stop. Raises `UserError`, after saving what was trained if possible.
    """
    from megatron_hetero.groups.watchdog import Watchdog

    watchdog = Watchdog.of_world(config.schedule.timeout_s, platform, "schedule.timeout_s")
    with watchdog.working():  # Imports may take long while other ranks wait.
        from megatron_hetero.train.ending import Ending
        from megatron_hetero.train.start import build_trainer

    run = build_trainer(config, platform, watchdog)
    request.begin()
    ending = Ending(run)
    with run.writer:
        try:
            stopped = train_steps(run, run.writer, request)
        except SharedError as error:
            with watchdog.waiting(lambda: "the saving of what was trained, with all other ranks,"):
                stopped = ending.failed(error)
        if stopped is not None:
            with watchdog.waiting(lambda: "the end of the run, with all other ranks,"):
                ending.stopped(stopped)
    if stopped is None:
        request.end()  # An export may be interrupted anywhere: a half-written one is never used.
        with watchdog.waiting(lambda: "the end of the run, with all other ranks,"):
            ending.trained()
    run.wait_for_all("the end of all other ranks")
    ending.finish()
    return stopped is None


def train_steps(run: Trainer, writer: Writer, request: StopRequest) -> int | None:
    """Train the remaining steps, save and evaluate. Returns the step after which the run was stopped, if it was."""
    from megatron_hetero.train.held_out import HeldOutEvaluation
    from megatron_hetero.train.trainer import describe

    evaluation, step, stopping = HeldOutEvaluation.build(run), run.resumed.step, False
    writer.print(describe(run))
    for note in run.resumed.notes:
        writer.print(note)
    for held_out in evaluation.overdue():
        writer.write_evaluation(held_out)
    for step, batch, waited in run.batches():
        metrics = run.train_step(step, batch, waited, stop=request)
        writer.write(metrics)
        # Before evaluating: a run that resumes from here repeats an evaluation that failed or was skipped.
        for note in run.saver.after(step, metrics.stopping):
            writer.print(note)
        if stopping := metrics.stopping:
            break
        for held_out in evaluation.after(step):
            writer.write_evaluation(held_out)
    return step if stopping or run.on_any_rank(request) else None


if __name__ == "__main__":
    guarded(main, sys.argv[1:])
