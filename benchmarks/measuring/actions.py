"""Reads the texts of schedules' actions."""

from __future__ import annotations

import re
from typing import cast

from megatron_hetero.layout.graph import Edge
from megatron_hetero.schedule.actions import Action, Op, WorkKind, finish, run, start

NAME = r"[A-Za-z_][\w-]*"
"""A module's name, as a regular expression."""
_RUN = re.compile(rf"({NAME})\.(\d+)\.([FRB])(\d+)")
_TRANSFER = re.compile(rf"({NAME})\.(\d+)(>(?=[^!]*$)|<)(\d+)\.([FRB])(\d+)!?")
_TRANSFER_OPS: dict[str, Op] = {">": "send", "<": "irecv", "<!": "wait"}
_END = rf"({NAME})(?:\.(\d+))?"
_CROSSING = re.compile(rf"{_END}>{_END}\.([FB])(\d+)(!?)")


def parsed(text: str) -> Action:
    """The action with this text: ``parsed(str(action)) == action``. Raises `ValueError`."""
    if found := _RUN.fullmatch(text):
        module, stage, kind, batch = found.groups()
        return run(cast(WorkKind, kind), module, int(stage), int(batch))
    if found := _TRANSFER.fullmatch(text):
        module, stage, arrow, peer, kind, batch = found.groups()
        op = _TRANSFER_OPS[arrow + text[len(text.rstrip("!")) :]]
        return Action(op, cast(WorkKind, kind), module, int(batch), int(stage), int(peer))
    if (found := _CROSSING.fullmatch(text)) and (found[2] is None) == (found[4] is None):
        left, left_stage, right, right_stage, kind, batch, finishes = found.groups()
        edge = _edge_between((left, left_stage), (right, right_stage), kind)
        return (finish if finishes else start)(cast(WorkKind, kind), edge, int(batch))
    raise ValueError(
        f"found {text!r}, expected an action such as 'text.1.F3', 'text.1>2.F3', 'text.2<1.F3', 'text.2<1.F3!', "
        "'vision>text.F3', 'vision.0>text.1.F3' or 'vision>text.F3!'"
    )


def _edge_between(left: tuple[str, str | None], right: tuple[str, str | None], kind: str) -> Edge:
    """The edge of a crossing that is written from left to right; each end is a module and maybe a stage."""
    source, target = (left, right) if kind == "F" else (right, left)
    return Edge(source[0], target[0], *(None if end[1] is None else int(end[1]) for end in (source, target)))
