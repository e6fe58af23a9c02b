"""Train a vision-language model, each module in its own layout.

    torchrun --nproc-per-node 8 pretrain_vlm.py --config FILE --vision-parallel sp:8 --text-parallel tp:4,dp:2

or plan that, without GPUs and without torchrun:

    python pretrain_vlm.py --plan --world-size 8 --config FILE --vision-parallel sp:8 --text-parallel tp:4,dp:2

`python pretrain_vlm.py --help` lists every flag.
"""

import sys
from collections.abc import Sequence

from megatron_hetero.launch import guarded, process_group, rank
from megatron_hetero.training.config import Config, load_command


def main(argv: Sequence[str]) -> None:
    """Do what the command line asks for."""
    config, planned = load_command(argv)
    if planned is None:
        train(config)
    else:
        # Imported where they are needed: a plan does not wait for Megatron-Core.
        from megatron_hetero.planning.command import show_plan

        show_plan(config, planned)


def train(config: Config) -> None:
    """Build the run, train and evaluate it, export the model, and answer the held-out questions with it."""
    from megatron_hetero.training.evaluation import evaluate_export
    from megatron_hetero.training.held_out import HeldOutEvaluation
    from megatron_hetero.training.report import describe, describe_boundaries
    from megatron_hetero.training.run import Run
    from megatron_hetero.training.stopping import stop_requests

    with process_group() as platform, stop_requests(config.checkpoint.dir is not None) as request:
        run = Run.build(config, platform)
        evaluation = HeldOutEvaluation.build(run)
        with run.writer as writer:
            writer.print(describe(run))
            for note in run.resumed.notes:
                writer.print(note)
            for step, batch, waited in run.batches():
                if step == run.resumed.step + 1:
                    writer.print(describe_boundaries(run, batch))
                metrics = run.train_step(step, batch, waited, stop=bool(request))
                writer.write(metrics)
                for held_out in () if metrics.stopping else evaluation.after(step):
                    writer.write_evaluation(held_out)
                for note in run.saver.after(step, metrics.stopping):
                    writer.print(note)
                if metrics.stopping:
                    return writer.print(f"stopped after step {step}, as asked; the same command goes on from there")
        if config.export.hf_dir is not None:
            run.export(config.export.hf_dir)
    if config.answers and rank() == 0:
        evaluate_export(config, platform)


if __name__ == "__main__":
    guarded(main, sys.argv[1:])
