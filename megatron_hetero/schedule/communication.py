"""The communicators and the peers of actions. Pure."""

from __future__ import annotations

from megatron_hetero.distributed.communicators import Direction, EdgeUse, Link
from megatron_hetero.layout.grammar import format_ranks
from megatron_hetero.schedule.actions import Action
from megatron_hetero.schedule.program import Schedule


def use_of(schedule: Schedule, action: Action) -> Link | EdgeUse:
    """The use of a communicator by a transfer or crossing."""
    direction: Direction = "backward" if action.kind == "B" else "forward"
    if action.op in ("start", "finish"):
        return EdgeUse(action.edge, direction)
    sender = action.stage if action.op == "send" else action.peer
    assert isinstance(sender, int), "work uses no communicator"
    return Link(action.module, direction, schedule.module[action.module].coordinate(sender))


def starts_early(schedule: Schedule, work: Action, following: Action | None) -> bool:
    """Whether `following`, the next crossing of the rank after the backward `work`, starts amid it: it returns the
    gradients of rows that entered this stage.
    """
    return (
        following is not None
        and (following.op, following.kind, following.micro_batch) == ("start", "B", work.micro_batch)
        and following.edge in schedule.entering.get((work.module, work.stage or 0), ())
        and schedule.returns_early(following.edge)
    )


def describe_action(schedule: Schedule, rank: int, action: Action) -> str:
    """An action of `rank` in words: its micro-batch, its peers and its communicator."""
    if action.op == "run":
        others = "the other ranks of its stage"
    elif action.op in ("start", "finish"):
        source, destination = schedule.sides(action.edge)
        others = f"ranks {format_ranks(sorted({*source, *destination} - {rank}))} over {use_of(schedule, action)}"
    else:
        others = f"rank {schedule.peer_rank(rank, action)} over {use_of(schedule, action)}"
    return f"action {action} of micro-batch {action.micro_batch}, with {others},"
