"""Resources with which a rank executes schedules, the state of a micro-batch between actions, and checks of the first
step: of hidden states of each link, and of gradients of rows that several ranks need. Ranks compare these through a
store, since they run at different times. Waits have no time-out: a watchdog ends a wait that takes too long.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from megatron_hetero.base.errors import UserError
from megatron_hetero.boundary.communicator import (
    BoundaryCommunicator,
    Crossing,
    GradientCopy,
    can_compare,
    require_fit,
    summarize,
)
from megatron_hetero.boundary.loaded import LoadedPlan
from megatron_hetero.groups.topology import Topology
from megatron_hetero.groups.watchdog import Stopwatch, Watchdog
from megatron_hetero.layout.graph import Edge, Graph
from megatron_hetero.schedule.actions import WorkKind
from megatron_hetero.schedule.contract import LOSS, InChunks, MicroBatchInputs, ModuleOnRank
from megatron_hetero.schedule.program import StageId
from megatron_hetero.step.fully_sharded import ShardedStage
from megatron_hetero.step.joint import JointOptimizer

_POLL_S = 0.005


@dataclass(eq=False, repr=False, kw_only=True)
class RankResources:
    """What a rank executes schedules with.

    Attributes:
        topology: topology of all modules.
        graph: its graph.
        modules: the modules on this rank.
        communicators: communicators of the edges that include this rank, without `check`: the two sides start crossings
            in different orders.
        gathered: stages that are notified how long gathered weights stay.
        optimizer: begins to sum gradients within the last backward pass of a step.
        watch: measures the seconds of each module, of "boundary" and of "pipeline".
        watchdog: ends waits that take too long.
        timeout_s: seconds that an action may take; None for the topology's.
        checks: checks of the first step, and of the models in each step; None to skip them.
    """

    topology: Topology
    graph: Graph
    modules: Mapping[str, ModuleOnRank]
    communicators: Mapping[Edge, BoundaryCommunicator]
    gathered: Mapping[StageId, Sequence[ShardedStage]]
    optimizer: JointOptimizer | None
    watch: Stopwatch
    watchdog: Watchdog
    timeout_s: float | None
    checks: RunChecks | None


@dataclass(eq=False)
class Activation:
    """A micro-batch in one stage. If one call computes several, the last of them has what belongs to the call."""

    embedded: Tensor | None = None
    """Result of the model's `embed`, until the forward pass."""
    receives: dict[WorkKind, tuple[Tensor, dist.Work]] = field(default_factory=dict[WorkKind, tuple[Tensor, dist.Work]])
    """Hidden states (F, R) and their gradient (B), from `irecv` to `wait`."""
    received: dict[WorkKind, Tensor] = field(default_factory=dict[WorkKind, Tensor])
    """The same, from `wait` to the run that uses them."""
    hidden: Tensor | None = None
    """Received hidden states as a leaf of the stage's graph, from the forward pass until their gradient is sent."""
    outputs: dict[str, Tensor] = field(default_factory=dict[str, Tensor])
    """By name, from the forward pass until they have left the rank or, with a graph, until the backward pass."""
    hidden_shape: torch.Size | None = None
    """Shape of the hidden states among the outputs, and so of the gradient that comes back."""
    random_state: Any = None
    """State of the generators before a forward pass that will be recomputed."""
    called: dict[str, Tensor] = field(default_factory=dict[str, Tensor])
    """Outputs of a call of several micro-batches, with their graph, until its backward pass."""
    in_chunks: tuple[InChunks, Any] | None = None
    """Input whose chunks run again in the backward pass, and the random state before the first."""
    row_grads: dict[tuple[Edge, int], Tensor] = field(default_factory=dict[tuple[Edge, int], Tensor])
    """Gradients of rows that left, by edge and micro-batch, from `finish` to the backward pass."""


@dataclass(frozen=True, eq=False)
class ReceivedRows:
    """Rows that crossed along an edge: leaves of the graph of the stage that they entered, [needed, width], by name."""

    leaves: Mapping[str, Tensor]

    @classmethod
    def of(cls, rows: Tensor, names: Sequence[str], requires_grad: bool) -> ReceivedRows:
        """Split rows of several outputs that are side by side, [needed, outputs * width]."""
        outputs = rows.chunk(len(names), dim=1) if len(names) > 1 else [rows]
        return cls({name: out.detach().requires_grad_(requires_grad) for name, out in zip(names, outputs, strict=True)})

    def grad(self) -> Tensor:
        """Return the gradients, side by side like the rows; zero for unused rows."""
        grads = [grad_of(leaf) for leaf in self.leaves.values()]
        return grads[0] if len(grads) == 1 else torch.cat(grads, dim=1)

    def when_gradients_are_computed(self, call: Callable[[], None]) -> None:
        """Call once, in the backward pass, when the last gradient is computed; never if one is not."""
        missing = set(self.leaves)

        def arrived(name: str) -> None:
            missing.discard(name)
            if not missing:
                call()

        for name, leaf in self.leaves.items():
            if leaf.requires_grad:
                leaf.register_post_accumulate_grad_hook(lambda _, name=name: arrived(name))


@dataclass(eq=False)
class LiveMicroBatch:
    """A micro-batch on a rank, from its first action to its last."""

    batch: MicroBatchInputs
    """The rank's share, on the device."""
    stages: defaultdict[StageId, Activation] = field(default_factory=partial(defaultdict, Activation))
    """What each stage on the rank stores."""
    crossings: dict[tuple[WorkKind, Edge], Crossing] = field(default_factory=dict[tuple[WorkKind, Edge], Crossing])
    """Crossings of rows (F) and of their gradients (B), from `start` to `finish`."""
    rows: dict[Edge, ReceivedRows] = field(default_factory=dict[Edge, ReceivedRows])
    """Rows that entered, from `finish` to the run that uses them or, if gradients return, until these leave."""


def grad_of(leaf: Tensor) -> Tensor:
    """Return the gradient of a model's input; zero if unused."""
    return torch.zeros_like(leaf) if leaf.grad is None else leaf.grad


class RunChecks:
    """The checks of one runner. `name`: the same on all ranks, and unique to the runner."""

    def __init__(self, name: str):
        self._store = dist.PrefixStore(name, dist.distributed_c10d._get_default_store())
        self._known: set[str] = set()
        self._turns: Counter[str] = Counter()

    def is_new(self, what: str) -> bool:
        """Return whether this is the first call for `what`."""
        new = what not in self._known
        self._known.add(what)
        return new

    def publish(self, key: str, what: Sequence[float]) -> None:
        """Store numbers for other ranks."""
        self._store.set(key, json.dumps(what))

    def published(self, key: str) -> list[Any]:
        """Wait for the numbers that another rank publishes, and return them."""
        while not self._store.check([key]):
            time.sleep(_POLL_S)
        return json.loads(self._store.get(key))

    def require_fit(self, edge: Edge, plan: LoadedPlan, grads: Tensor) -> None:
        """Check that gradients of needed rows, [needed, width], are whole or partial as the plan says. Otherwise they
        would be counted too often or too seldom. Each kind of gradient along an edge is compared until some are not
        zero. Waits for the other ranks that need the rows. Raises `UserError` on all of these.
        """
        where = f"{edge} on {plan.copies}, {'partial' if plan.summed else 'whole'}"
        if where in self._known or not can_compare(plan, grads):
            return
        self._turns[where] += 1
        turn = f"{where}, {self._turns[where]}"
        self.publish(f"{turn} of {plan.rank}", summarize(plan, grads).tolist())
        copies = {rank: GradientCopy(*self.published(f"{turn} of {rank}")) for rank in plan.copies}
        if any(copy.size for copy in copies.values()):
            self._known.add(where)
        require_fit(f"boundary {edge}", copies)


@contextlib.contextmanager
def without_ddp(rank: int, module: str, stage: int) -> Iterator[None]:
    """Refuse PyTorch's DDP inside a call of a stage, wherever the stage stores it: it would reduce gradients by itself.
    Raises `UserError`.
    """

    def refuse(*_: object, **__: object) -> None:
        where, found = f"Runner on rank {rank}", f"DistributedDataParallel in stage {stage} of `{module}`"
        because = "DDP averages gradients in every backward pass, and expects one per forward pass"
        fix = "leave it out: `build_optimizers` makes replicas equal, and its `step` sums their gradients"
        raise UserError.at(where, found=found, expected="the module itself", because=because, fix=fix)

    # Hooks on modules would be seen by torch.compile.
    forward = DistributedDataParallel.forward
    try:
        DistributedDataParallel.forward = refuse  # pyright: ignore[reportAttributeAccessIssue]
        yield
    finally:
        DistributedDataParallel.forward = forward


def require_frozen(module: str, stage: int, model: object, inputs: Sequence[Any], loss: Tensor) -> None:
    """Check that a stage whose `loss` has no graph has nothing to train, unless it is 0. Raises `UserError`."""
    given = [each for some in inputs for each in (some.values() if isinstance(some, Mapping) else [some])]
    trains = isinstance(model, nn.Module) and any(p.requires_grad for p in model.parameters())
    if (trains or any(each.requires_grad and each.numel() for each in given)) and loss.item():
        found, because = "a loss that requires no gradient", "nothing would be trained by it"
        only = "run inside `torch.no_grad()`, name the module in `forward_only`, or return it among `metrics`"
        fix = f"return it without `detach()`; where it is to be measured only, {only}"
        where = f"stage {stage} of `{module}`"
        raise UserError.at(where, found=found, expected="one with a graph", because=because, fix=fix)


def hidden_shape(model: Any, batch: Any) -> Sequence[int]:
    """Return the shape of the hidden states that a stage receives."""
    if not isinstance(batch, InChunks):
        return model.hidden_shape(batch)
    shapes = [model.hidden_shape(chunk) for chunk in batch.chunks]
    return [sum(shape[0] for shape in shapes), *shapes[0][1:]]


def inputs_of_chunks(model: Any, given: InChunks, hidden: Tensor | None) -> list[list[Tensor]]:
    """Return the arguments of a stage's model beside each chunk: its hidden states, as leaves; none on the first
    stage.
    """
    if hidden is None:
        return [[] for _ in given.chunks]
    lengths = [model.hidden_shape(chunk)[0] for chunk in given.chunks]
    return [[each.detach().requires_grad_(hidden.requires_grad)] for each in hidden.split(lengths)]


def joined_outputs(chunks: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Concatenate the outputs of all chunks; losses are added up."""
    joined = {name: torch.cat([outputs[name] for outputs in chunks]) for name in chunks[0] if name != LOSS}
    losses = [outputs[LOSS] for outputs in chunks if LOSS in outputs]
    return joined | ({LOSS: torch.stack(losses).sum()} if losses else {})


def wrong_outputs(output: object, expected: Sequence[str], may_have: Sequence[str] = ()) -> str:
    """Describe the fault of a stage's output. Empty if it is one tensor for the only expected name, or has a tensor for
    each of the names, and for some of `may_have`.
    """
    if isinstance(output, Tensor):
        return "" if len(expected) == 1 else f"outputs {expected[0]}"
    if not isinstance(output, Mapping):
        return f"a {type(output).__name__}"
    if output.keys() - set(may_have) != set(expected):
        return f"outputs {', '.join(map(str, output))}" if output else "no outputs"
    return ", ".join(
        f"{name} of type {type(value).__name__}" for name, value in output.items() if not isinstance(value, Tensor)
    )
