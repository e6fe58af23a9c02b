"""Train a vision-language model, each module in its own layout.

    python -m megatron_hetero.run --nproc-per-node 8 pretrain_vlm.py --config FILE --vision-parallel sp:8 ...

or plan that, without GPUs and without the ranks:

    python pretrain_vlm.py --plan --world-size 8 --config FILE --vision-parallel sp:8 --text-parallel tp:4,dp:2

`python pretrain_vlm.py --help` lists every flag.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

try:
    from megatron_hetero import guarded, process_group
    from megatron_hetero.config.schema import Config, load_command
    from megatron_hetero.groups.launch import note_stop
    from megatron_hetero.train.stopping import StopRequest, stop_requests
except (ImportError, SyntaxError) as error:
    sys.exit(f"error: {error}. Run `make venv`, and start this with .venv/bin/python (Python 3.11 or newer).")

# torch and Megatron-Core are imported where they are used, so that signal handlers are set first.
if TYPE_CHECKING:
    from megatron_hetero.groups.platform import Platform
    from megatron_hetero.groups.watchdog import Watchdog
    from megatron_hetero.hf.weight_map import WeightSource
    from megatron_hetero.job.job import JobSpec
    from megatron_hetero.train.run import Run
    from megatron_hetero.train.trainer import Trainer


def main(argv: Sequence[str]) -> None:
    """Do what the command line asks for."""
    config, planned = load_command(argv)
    if planned is not None:
        from megatron_hetero.estimate.report import show_estimate

        show_estimate(config, planned)
        return
    with stop_requests(config.checkpoint.dir is not None) as request:
        with process_group(config.schedule.timeout_s) as platform:
            finished = train(config, platform, request)
        if not finished:
            note_stop()


def build_trainer(
    job: JobSpec, platform: Platform, weights: Mapping[str, WeightSource], watchdog: Watchdog, *, check: bool = True
) -> Trainer:
    """Build this rank's stages of the modules, each in its own layout, and their optimizer.

    `weights`: sources of weights by module. `check`: whether ranks compare what they build, and test their groups.
    Raises `UserError`.
    """
    from megatron_hetero import Runner, build
    from megatron_hetero.groups.watchdog import Stopwatch
    from megatron_hetero.train.measures import StepProfiler
    from megatron_hetero.train.start import build_modules, build_optimizer, on_rank, prepare
    from megatron_hetero.train.trainer import Trainer

    prepare(job, platform)
    # Create this host group first: PyTorch names it by the number of a rank's groups, which is equal only now.
    with watchdog.waiting(lambda: "the creation of process groups, with all other ranks,"):
        figures = platform.host_group("figures")
    # Process groups along the axes of each layout, and for rows that cross between modules.
    topology = build(
        job.graph,
        job.layouts,
        platform=platform,
        needs=job.needs,
        decoding=tuple(job.shapes.encoders),
        megatron=(),  # None of Megatron's schedules and optimizers is used.
        planned=False,  # The loader plans boundaries, equally on each rank.
        check=check,
        watchdog=watchdog,
    )
    modules = build_modules(job, topology, weights, check=check)
    # One for all modules: their gradients have one norm, by which they are clipped.
    optimizer = build_optimizer(job, topology, modules)
    runner = Runner(topology, on_rank(job, modules), optimizer=optimizer, watch=Stopwatch(platform), check=False)
    profiler = StepProfiler(job.config, topology, optimizer.wait_for_weights)
    return Trainer(job, topology, optimizer, runner, profiler, figures)


def build_run(config: Config, platform: Platform) -> Run:
    """Build a run on this rank, and load the checkpoint that it resumes from.

    Raises `UserError` for anything that the user can fix, before anything is written.
    """
    from megatron_hetero.groups.watchdog import Watchdog

    watchdog = Watchdog.of_world(config.schedule.timeout_s, platform, "schedule.timeout_s")
    with watchdog.working():  # Imports may take long while other ranks wait.
        from megatron_hetero.data.loader import StepLoader
        from megatron_hetero.train.inputs import open_inputs
        from megatron_hetero.train.run import Run
        from megatron_hetero.train.start import resume_run

    job, inputs = open_inputs(config, platform, watchdog)  # The same files on all ranks.
    trainer = build_trainer(job, platform, inputs.weights, watchdog)
    loader = StepLoader.of(job, inputs.mixture, inputs.processor, trainer.topology)
    resumed, writer, saver = resume_run(trainer, inputs)
    inputs = replace(inputs, weights={})  # Otherwise their files would stay mapped.
    return Run(trainer=trainer, inputs=inputs, loader=loader, resumed=resumed, writer=writer, saver=saver)


def train(config: Config, platform: Platform, request: StopRequest) -> bool:
    """Build the run, train and evaluate, and export the model. Returns whether it finished, False if it was asked to
    stop. Raises `UserError`, if possible after saving what was trained.
    """
    run = build_run(config, platform)

    from megatron_hetero.train.ending import saved_at_end
    from megatron_hetero.train.held_out import HeldOutEvaluation
    from megatron_hetero.train.run import describe

    evaluation = HeldOutEvaluation.build(run)
    with saved_at_end(run, request) as ending:
        for line in (describe(run.trainer), *run.resumed.notes):
            run.writer.print(line)
        for held_out in evaluation.after(run.resumed.step):
            run.writer.write_evaluation(held_out)
        for metrics in run.steps(request):
            run.writer.write(metrics)
            # Before evaluating: a run that resumes from here repeats an evaluation that failed or was skipped.
            for note in run.saver.after(metrics.step, metrics.stopping):
                run.writer.print(note)
            if metrics.stopping:
                break
            for held_out in evaluation.after(metrics.step):
                run.writer.write_evaluation(held_out)
    return ending.export_and_finish()


if __name__ == "__main__":
    guarded(main, sys.argv[1:])
