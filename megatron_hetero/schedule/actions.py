"""Actions of a rank in a step: small frozen values with a short text.

This docstring is the specification. A model is a graph of modules: encoders, each with one or more edges to the one
text module. Along an edge, rows leave a stage of the encoder and enter a stage of the text module.
A module has stages, numbered along its pipeline; with virtual stages, stage s of the text module is on the ranks of
pipeline coordinate s mod pp. A step runs M micro-batches, numbered from 0. The kinds of work are

    F   forward of a stage; saves what its backward needs, unless the module recomputes
    R   second run of the same forward, just before its backward, if the module recomputes
    B   backward of a stage

and the actions, which a rank executes in order:

    op      text               meaning
    run     text.1.F3          compute the forward of stage 1 of `text`, micro-batch 3
    send    text.1>2.F3        stage 1 sends its output (B: the gradient of its input) to stage 2. Never blocks
    irecv   text.2<1.F3        stage 2 posts the receive of this output. Never blocks
    wait    text.2<1.F3!       wait until the output has arrived; directly before its use
    start   vision>text.F3     send rows from the last stage of `vision` to the first of `text`. Never blocks
            text>vision.B3     send the gradients of these rows back
            vision.0>text.1.F3 send the rows of another edge, from stage 0 of `vision` to stage 1 of `text`
    finish  vision>text.F3!    wait until the rows have arrived and may be used, or are sent and may be overwritten
            text>vision.B3!    wait for their gradients in the same way

A pipeline transfer (`send`, `irecv`, `wait`) is between a rank and the one rank with the same other coordinates in the
other stage. A rank posts the receives of a module from another rank in the order in which that rank sends. So an
ordered pair of ranks is a queue and needs no tags.

On NCCL every communicator is a queue too, on each of its ranks: an operation issued early delays all later operations
of the queue, and a send ends only when its receive has begun. "Never blocks" refers to the host. So operations that may
be issued early have separate communicators: each ordered pair of ranks in a pipeline has one for F and R and one for B,
each edge has one for F and one for B. `deadlock` describes how actions map to streams, and when they deadlock.

A crossing (`start`, `finish`) is one operation of many ranks, its *participants*: all ranks of the two stages of an
edge, in all replicas. Every participant starts and finishes every crossing once, even if it has no rows, and a rank on
both sides does so once for both.

  * If the two sides share no rank, a crossing is batched point-to-point. The `finish` of a sender ends when all
    receivers have started; the `finish` of a receiver ends when all senders have started and the other receivers have
    reached their `finish` (they may gather rows). In each direction of an edge all participants start in one order, and
    receivers finish in one order. Partial gradients on several senders are summed inside `start`.
  * If the sides share ranks, a crossing is a collective over all participants. `start` enters its first exchange,
    `finish` the others, so that a `finish` ends when all participants have reached theirs. In each direction of an edge
    all starts and finishes are in one order on all participants.

What an action needs before it:

    run F, R      in stage s > 0: its `wait` from s - 1. In the text module: `finish` F of every edge that enters it
    run R         its F
    run B         its F (R if the module recomputes); its `wait` B from the next stage. In an encoder: `finish` B of
                  every edge that leaves it
    send          its run
    start F       on the encoder's side: F of the stage that the edge leaves. On the text module's side: nothing
    start B       on the text module's side: B of the stage that the edge enters. On the encoder's side: nothing
    wait, finish  its `irecv` or `start`, and other ranks as specified above

The actions of a rank follow from its modules and stages alone (`expected_actions`); the builder determines their order.
For `--vision-parallel dp:1@0 --text-parallel pp:2@1-2`, run-ahead 0 and two micro-batches, the order begins as follows,
with one step per line (``-`` is no action; an action is below the actions of other ranks for which it waits):

    step  vision.0         text.0           text.1
          @0               @1               @2
       0  vision.0.F0      vision>text.F0   text.1<0.F0
       1  vision>text.F0   -                -
       2  text>vision.B0   vision>text.F0!  -
       3  vision>text.F0!  text.0.F0        -
       4  vision.0.F1      text.0>1.F0      -
       5  vision>text.F1   vision>text.F1   text.1<0.F0!
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from megatron_hetero.layout.graph import Edge

Op = Literal["run", "send", "irecv", "wait", "start", "finish"]
WorkKind = Literal["F", "R", "B"]


@dataclass(frozen=True, slots=True)
class Action:
    """One action of one rank in one micro-batch. The fields depend on `op`:

    op             module                       stage                peer
    run            the module that runs         the stage that runs  None
    send           the module of both stages    the sending stage    the receiving stage
    irecv, wait    the module of both stages    the receiving stage  the sending stage
    start, finish  the source module of `peer`  None                 the edge
    """

    op: Op
    kind: WorkKind
    module: str
    micro_batch: int
    stage: int | None = None
    peer: int | Edge | None = None

    def __str__(self) -> str:
        work = f"{self.kind}{self.micro_batch}"
        match self.op:
            case "run":
                return f"{self.module}.{self.stage}.{work}"
            case "send":
                return f"{self.module}.{self.stage}>{self.peer}.{work}"
            case "irecv" | "wait":
                return f"{self.module}.{self.stage}<{self.peer}.{work}{'!' if self.op == 'wait' else ''}"
            case "start" | "finish":
                # `peer` may be no edge: checks also print invalid actions.
                ends = self.peer.ends if isinstance(self.peer, Edge) else (self.module, f"{self.peer}")
                ends = ends if self.kind == "F" else ends[::-1]
                return f"{'>'.join(ends)}.{work}{'!' if self.op == 'finish' else ''}"

    @property
    def edge(self) -> Edge:
        """The edge of a `start` or `finish`."""
        assert isinstance(self.peer, Edge), f"{self.op} has no edge"
        return self.peer

    @property
    def own_stage(self) -> int:
        """The stage that runs, sends or receives; crossings have none."""
        assert self.stage is not None, f"{self.op} has no stage"
        return self.stage

    @property
    def peer_stage(self) -> int:
        """The stage at the other end of a `send`, `irecv` or `wait`."""
        assert isinstance(self.peer, int), f"{self.op} has no other stage"
        return self.peer

    @property
    def place(self) -> tuple[str, int]:
        """The module and the stage of the action."""
        return self.module, self.own_stage

    @property
    def posted(self) -> Action:
        """The `irecv` of a `wait`, or the `start` of a `finish`."""
        op: Op = "irecv" if self.op == "wait" else "start"
        return Action(op, self.kind, self.module, self.micro_batch, self.stage, self.peer)


def run(kind: WorkKind, module: str, stage: int, micro_batch: int) -> Action:
    """Return the action that runs a forward, recomputed forward or backward (`kind`) of a stage."""
    return Action("run", kind, module, micro_batch, stage)


def send(kind: WorkKind, module: str, stage: int, peer: int, micro_batch: int) -> Action:
    """Return the action that sends the output of `stage` to the stage `peer`."""
    return Action("send", kind, module, micro_batch, stage, peer)


def irecv(kind: WorkKind, module: str, stage: int, peer: int, micro_batch: int) -> Action:
    """Return the action that posts the receive of `stage` from the stage `peer`."""
    return Action("irecv", kind, module, micro_batch, stage, peer)


def wait(kind: WorkKind, module: str, stage: int, peer: int, micro_batch: int) -> Action:
    """Return the action with which `stage` waits until its receive from the stage `peer` has ended."""
    return Action("wait", kind, module, micro_batch, stage, peer)


def start(kind: WorkKind, edge: Edge, micro_batch: int) -> Action:
    """Return the action that starts a crossing of rows along an edge (F) or of their gradients (B)."""
    return Action("start", kind, edge.source, micro_batch, None, edge)


def finish(kind: WorkKind, edge: Edge, micro_batch: int) -> Action:
    """Return the action that waits for the end of a crossing of rows along an edge (F) or of their gradients (B)."""
    return Action("finish", kind, edge.source, micro_batch, None, edge)
