"""What a run says of itself at its start: tables for the terminal."""

from __future__ import annotations

from rich.console import Group
from rich.table import Table

from megatron_hetero.training.run import Run
from megatron_hetero.training.step_loader import StepBatch


def describe(run: Run) -> Table:
    """Modules, their layouts, ranks, and parameters per rank (of this rank)."""
    table = Table(title=f"{run.config.model.hf_path} in {run.config.model.dtype} on {run.platform.device.type}")
    for column in ("module", "layout", "ranks", "parameters per rank", "trained per rank", "activations over tp"):
        table.add_column(column, justify="right" if "per rank" in column else "left")
    for module in run.modules:
        layout = run.topology.layouts[module.name]
        trained = sum(p.numel() for p in module.model.parameters() if p.requires_grad)
        sharded = "sharded" if module.model.config.sequence_parallel else "whole"
        table.add_row(
            module.name,
            layout.degrees_text,
            layout.ranks_text,
            f"{module.parameters_per_rank:,}",
            f"{trained:,}",
            "-" if layout.tp == 1 else sharded,
        )
    return table


def describe_boundary(run: Run, batch: StepBatch) -> Group | Table:
    """The boundary in the first step, as this rank sees it."""
    row_bytes = run.communicator.row_bytes
    table = Table(title="boundary vision to text, step 1, this rank")
    for column in ("direction", "rows in place after", "rows received", "bytes received", "bytes sent", "collectives"):
        table.add_column(column, justify="left" if column == "direction" else "right")
    plans = [m.plan.vision.boundary for m in batch.micro_batches if m.plan.vision is not None]
    for name, directions in (("forward", [p.forward for p in plans]), ("backward", [p.backward for p in plans])):
        received, sent = sum(d.received_rows for d in directions), sum(d.sent_rows for d in directions)
        table.add_row(
            name,
            f"{sum(d.rows for d in directions):,}",
            f"{received:,}",
            f"{received * row_bytes:,}",
            f"{sent * row_bytes:,}",
            str(sum(d.collectives for d in directions)),
        )
    return table
