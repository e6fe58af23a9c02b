"""The orders of encoders that run ahead on ranks of their own, and what the text module does with their rows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from megatron_hetero.layout.edge import Edge
from megatron_hetero.schedule.actions import Action, finish, run, start
from megatron_hetero.schedule.context import BuildContext, first_stage
from megatron_hetero.schedule.program import Module, Role


def ahead_order(ctx: BuildContext, role: Role) -> Iterator[Action]:
    """The actions of encoders at the pace of the first text stage. A stage leads it by the run-ahead, plus one for the
    stage itself and each stage after it.
    """
    held = [(e, stage) for e in ctx.ahead if (stage := first_stage(role, e)) is not None]
    lead = {encoder.name: ctx.run_ahead + encoder.stages - stage for encoder, stage in held}
    for step in range(-max(lead.values()), 0):
        for encoder, stage in held:
            yield from _forward_ahead(ctx, encoder, stage, step + lead[encoder.name])
    for work in ctx.pace:
        for encoder, stage in held:
            if work.kind == "F":
                yield from _forward_ahead(ctx, encoder, stage, work.micro_batch + lead[encoder.name])
            elif encoder.backward:
                yield from _backward_ahead(ctx, encoder, stage, work.micro_batch)
    for encoder, stage in held:
        if _lag(ctx, encoder, stage) == 1:
            yield from (finish("F", edge, ctx.batches - 1) for edge in ctx.leaving(encoder, stage))


def _lag(ctx: BuildContext, encoder: Module, stage: int) -> int:
    """How many micro-batches before the one that a stage encodes the text module is ready for."""
    return max(1, ctx.run_ahead) + encoder.stages - 1 - stage


def _forward_ahead(ctx: BuildContext, encoder: Module, stage: int, m: int) -> Iterator[Action]:
    """Forward of a micro-batch, once the text module is ready for the rows of the micro-batch `_lag` before it.

    Rows leave when the text module is ready for those before them, also after the last forward. More of them in flight
    would queue behind each other on one communicator; and if all streams of a GPU share a queue
    (CUDA_DEVICE_MAX_CONNECTIONS=1), queued sends keep the encoder from computing, possibly forever.
    """
    edges, lag = ctx.leaving(encoder, stage), _lag(ctx, encoder, stage)
    holds_back, sent = lag > 1, m - lag
    if 0 <= sent < ctx.batches and (holds_back or m < ctx.batches):
        yield from (finish("F", edge, sent) for edge in edges)
        if holds_back and sent + 1 < ctx.batches:
            yield from (start("F", edge, sent + 1) for edge in edges)
    if not 0 <= m < ctx.batches:
        return
    yield run("F", encoder.name, stage, m)
    if m == 0 or not holds_back:
        yield from (start("F", edge, m) for edge in edges)
    if m == 0 and encoder.backward:
        yield from (start("B", edge, 0) for edge in edges)


def _backward_ahead(ctx: BuildContext, encoder: Module, stage: int, m: int) -> Iterator[Action]:
    """Backward of a micro-batch; then the gradients of the next may arrive."""
    edges = ctx.leaving(encoder, stage)
    yield from (finish("B", edge, m) for edge in edges)
    yield run("B", encoder.name, stage, m)
    if m + 1 < ctx.batches:
        yield from (start("B", edge, m + 1) for edge in edges)


def receive_rows(ctx: BuildContext, arriving: Sequence[Edge], m: int) -> Iterator[Action]:
    """Receive the rows of encoders that run ahead. A posted receive lets the encoder proceed, so without run-ahead it
    must not be posted before the rows are needed; with it, the next rows may arrive during the forward.
    """
    if not ctx.run_ahead:
        yield from (start("F", edge, m) for edge in arriving)
    yield from (finish("F", edge, m) for edge in arriving)
    if ctx.run_ahead and m + 1 < ctx.batches:
        yield from (start("F", edge, m + 1) for edge in arriving)


def send_gradients_ahead(ctx: BuildContext, role: Role, m: int) -> Iterator[Action]:
    """Send those of micro-batch `m`, if there is one, to encoders that run ahead."""
    edges, sent = [edge for edge in ctx.arriving(role) if ctx.has_backward(edge)], m - 1 - ctx.run_ahead
    if 0 <= m < ctx.batches:
        yield from (start("B", edge, m) for edge in edges)
    if 0 <= sent < ctx.batches:
        yield from (finish("B", edge, sent) for edge in edges)
