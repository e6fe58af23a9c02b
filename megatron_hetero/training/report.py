"""Tables that a run prints at its start."""

from __future__ import annotations

from rich.console import Group
from rich.table import Table

from megatron_hetero.data.step_loader import StepBatch
from megatron_hetero.layout.edge import Edge
from megatron_hetero.training.trainer import Trainer


def describe(run: Trainer) -> Table:
    """Modules, their layouts, ranks, and the most parameters on a rank. Every rank calls it."""
    table = Table(title=f"{run.config.model.hf_path} in {run.config.model.dtype} on {run.platform.device.type}")
    for column in ("module", "layout", "ranks", "parameters per rank", "trained per rank", "activations over tp"):
        table.add_column(column, justify="right" if "per rank" in column else "left")
    for name, layout in run.topology.layouts.items():
        held, trained = run.all_gather(_parameters(run, name)).max(dim=0).values.long().tolist()
        whole = layout.tp == 1 or not run.job.sequence_parallel[name]
        table.add_row(
            name,
            layout.degrees_text,
            layout.ranks_text,
            f"{held:,}",
            f"{trained:,}",
            "-" if layout.tp == 1 else "whole" if whole else "sharded",
        )
    return table


def _parameters(run: Trainer, name: str) -> tuple[int, int]:
    """The elements of this rank's parameters of a module, and of those that train."""
    own = [p for module in run.modules if module.name == name for p in module.parameters.values()]
    return sum(p.numel() for p in own), sum(p.numel() for p in own if p.requires_grad)


def describe_boundaries(run: Trainer, batch: StepBatch) -> Group:
    """The boundaries in the first step, as this rank sees them."""
    return Group(*(_boundary(edge, run, batch) for edge in run.job.edges))


def _boundary(edge: Edge, run: Trainer, batch: StepBatch) -> Table:
    row_bytes = run.job.row_bytes * len(run.job.edges[edge])
    table = Table(title=f"boundary {' to '.join(edge.ends)}, first step, this rank")
    for column in ("direction", "rows in place after", "rows received", "bytes received", "bytes sent", "collectives"):
        table.add_column(column, justify="left" if column == "direction" else "right")
    plans = [m.plan.boundaries[edge] for m in batch.micro_batches if edge in m.plan.boundaries]
    backward = [p.backward for p in plans if p.backward is not None]
    for name, directions in (("forward", [p.forward for p in plans]), ("backward", backward)):
        received, sent = sum(d.received_rows for d in directions), sum(d.sent_rows for d in directions)
        table.add_row(
            name,
            f"{sum(d.needed for d in directions):,}",
            f"{received:,}",
            f"{received * row_bytes:,}",
            f"{sent * row_bytes:,}",
            str(sum(d.collectives for d in directions)),
        )
    return table
