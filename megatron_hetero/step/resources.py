"""The resources with which a rank executes schedules, the state of a micro-batch between actions, and run-time checks.
The first step checks the hidden states of each link, and gradients of rows that several ranks need. Ranks compare these
through a store, since they run at different times. A watchdog, not a time-out, ends waits that take too long.
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
    """The resources with which a rank executes schedules.

    Attributes:
        topology: topology of all modules.
        graph: the module graph of the topology.
        modules: the modules on this rank.
        communicators: communicators of the edges that include this rank, built with `check=False`, since the two sides
            of an edge start crossings in different orders.
        gathered: sharded stages, which are notified before each run whether gathered weights stay.
        optimizer: the optimizer, which begins to sum gradients during the last backward pass of a step, if any.
        watch: a stopwatch for the time of each module, of "boundary" and of "pipeline".
        watchdog: the watchdog, which ends waits that take too long.
        timeout_s: seconds that an action may take; None for the topology's time-out.
        checks: checks of the first step, and of the models in each step; None to skip all checks.
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
    """The tensors of a micro-batch in one stage. The last micro-batch of a call of several has the call's tensors."""

    embedded: Tensor | None = None
    """The result of the model's `embed`, stored until the forward pass."""
    receives: dict[WorkKind, tuple[Tensor, dist.Work]] = field(default_factory=dict[WorkKind, tuple[Tensor, dist.Work]])
    """Receive buffers of hidden states (F, R) and of their gradient (B), stored from `irecv` to `wait`."""
    received: dict[WorkKind, Tensor] = field(default_factory=dict[WorkKind, Tensor])
    """Received hidden states (F, R) and their gradient (B), stored from `wait` to the run that uses them."""
    hidden: Tensor | None = None
    """Received hidden states as a leaf of the stage's graph, from the forward pass until their gradient is sent."""
    outputs: dict[str, Tensor] = field(default_factory=dict[str, Tensor])
    """Outputs by name, stored from the forward pass until they are sent or, if they have a graph, back-propagated."""
    hidden_shape: torch.Size | None = None
    """The shape of the hidden states among the outputs, which is also the shape of their gradient."""
    random_state: Any = None
    """The state of the random generators before a forward pass that will be recomputed."""
    called: dict[str, Tensor] = field(default_factory=dict[str, Tensor])
    """The outputs, with their graph, of one call for several micro-batches, stored until the backward pass."""
    in_chunks: tuple[InChunks, Any] | None = None
    """The input whose chunks are recomputed in the backward pass, and the random state before the first chunk."""
    row_grads: dict[tuple[Edge, int], Tensor] = field(default_factory=dict[tuple[Edge, int], Tensor])
    """Gradients of sent rows, by edge and micro-batch, stored from `finish` to the backward pass."""


@dataclass(frozen=True, eq=False)
class ReceivedRows:
    """The rows received along an edge, as autograd leaves of the receiving stage, [needed, width], by output name."""

    leaves: Mapping[str, Tensor]

    @classmethod
    def of(cls, rows: Tensor, names: Sequence[str], requires_grad: bool) -> ReceivedRows:
        """Split received rows, [needed, outputs * width], into one leaf for each of the outputs `names`."""
        outputs = rows.chunk(len(names), dim=1) if len(names) > 1 else [rows]
        return cls({name: out.detach().requires_grad_(requires_grad) for name, out in zip(names, outputs, strict=True)})

    def grad(self) -> Tensor:
        """Return the gradients of all outputs, concatenated along dim 1; zero for unused rows."""
        grads = [grad_of(leaf) for leaf in self.leaves.values()]
        return grads[0] if len(grads) == 1 else torch.cat(grads, dim=1)

    def when_gradients_are_computed(self, call: Callable[[], None]) -> None:
        """Run `call` in the backward pass once the gradients of all outputs are computed; never if one is missing."""
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
    """The state of a micro-batch on a rank, stored from its first action to its last action."""

    batch: MicroBatchInputs
    """This rank's inputs of the micro-batch, on the device."""
    stages: defaultdict[StageId, Activation] = field(default_factory=partial(defaultdict, Activation))
    """The tensors of the micro-batch in each stage on the rank."""
    crossings: dict[tuple[WorkKind, Edge], Crossing] = field(default_factory=dict[tuple[WorkKind, Edge], Crossing])
    """Crossings of rows (F) and of their gradients (B) in flight, stored from `start` to `finish`."""
    rows: dict[Edge, ReceivedRows] = field(default_factory=dict[Edge, ReceivedRows])
    """Received rows, stored from `finish` until they are used or, if gradients are returned, until these are sent."""


def grad_of(leaf: Tensor) -> Tensor:
    """Return the gradient of a model's input; zeros if the model did not use the input."""
    return torch.zeros_like(leaf) if leaf.grad is None else leaf.grad


class RunChecks:
    """The run-time checks of one runner. `name`: a unique name of the runner, the same on all ranks."""

    def __init__(self, name: str):
        self._store = dist.PrefixStore(name, dist.distributed_c10d._get_default_store())
        self._known: set[str] = set()
        self._turns: Counter[str] = Counter()

    def is_new(self, what: str) -> bool:
        """Return whether this is the first call with `what`."""
        new = what not in self._known
        self._known.add(what)
        return new

    def publish(self, key: str, what: Sequence[float]) -> None:
        """Store numbers under `key` in the store, for other ranks to read."""
        self._store.set(key, json.dumps(what))

    def published(self, key: str) -> list[Any]:
        """Wait until another rank publishes numbers under `key`, and return the numbers."""
        while not self._store.check([key]):
            time.sleep(_POLL_S)
        return json.loads(self._store.get(key))

    def require_fit(self, edge: Edge, plan: LoadedPlan, grads: Tensor) -> None:
        """Check that the gradients of needed rows, [needed, width], are whole or partial as the plan says: otherwise
        they would be counted too often or too seldom. Each kind of gradient along an edge is compared until one of
        them is nonzero. Waits for the other ranks that need the rows. Raises `UserError` on all these ranks.
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
    """Raise `UserError` if a stage runs PyTorch's DDP inside this context: DDP would also reduce gradients, which the
    optimizer sums.
    """

    def refuse(*_: object, **__: object) -> None:
        where, found = f"Runner on rank {rank}", f"DistributedDataParallel in stage {stage} of `{module}`"
        because = "DDP averages gradients in every backward pass, and expects one per forward pass"
        fix = "leave it out: `build_optimizers` makes replicas equal, and its `step` sums their gradients"
        raise UserError.at(where, found=found, expected="the module itself", because=because, fix=fix)

    # Replace `forward` instead of adding hooks to modules, which torch.compile would trace.
    forward = DistributedDataParallel.forward
    try:
        DistributedDataParallel.forward = refuse  # pyright: ignore[reportAttributeAccessIssue]
        yield
    finally:
        DistributedDataParallel.forward = forward


def require_frozen(module: str, stage: int, model: object, inputs: Sequence[Any], loss: Tensor) -> None:
    """Check that a stage whose `loss` is nonzero and has no graph has nothing to train. Raises `UserError`."""
    given = [each for some in inputs for each in (some.values() if isinstance(some, Mapping) else [some])]
    trains = isinstance(model, nn.Module) and any(p.requires_grad for p in model.parameters())
    if (trains or any(each.requires_grad and each.numel() for each in given)) and loss.item():
        found, because = "a loss that requires no gradient", "nothing would be trained by it"
        only = "run inside `torch.no_grad()`, name the module in `forward_only`, or return it among `metrics`"
        fix = f"return it without `detach()`; where it is to be measured only, {only}"
        where = f"stage {stage} of `{module}`"
        raise UserError.at(where, found=found, expected="one with a graph", because=because, fix=fix)


def hidden_shape(model: Any, batch: Any) -> Sequence[int]:
    """Return the shape of the hidden states that a stage receives; for an input in chunks, of the concatenation."""
    if not isinstance(batch, InChunks):
        return model.hidden_shape(batch)
    shapes = [model.hidden_shape(chunk) for chunk in batch.chunks]
    return [sum(shape[0] for shape in shapes), *shapes[0][1:]]


def inputs_of_chunks(model: Any, given: InChunks, hidden: Tensor | None) -> list[list[Tensor]]:
    """Return, for each chunk, the arguments after the chunk in a call of the stage's model: the hidden states of the
    chunk as a leaf, or no arguments on the first stage.
    """
    if hidden is None:
        return [[] for _ in given.chunks]
    lengths = [model.hidden_shape(chunk)[0] for chunk in given.chunks]
    return [[each.detach().requires_grad_(hidden.requires_grad)] for each in hidden.split(lengths)]


def joined_outputs(chunks: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Return the concatenated outputs of all chunks, and the sum of the losses."""
    joined = {name: torch.cat([outputs[name] for outputs in chunks]) for name in chunks[0] if name != LOSS}
    losses = [outputs[LOSS] for outputs in chunks if LOSS in outputs]
    return joined | ({LOSS: torch.stack(losses).sum()} if losses else {})


def wrong_outputs(output: object, expected: Sequence[str], may_have: Sequence[str] = ()) -> str:
    """Return a description of what is wrong with a stage's output; "" if it is a tensor for the single `expected` name,
    or a mapping with a tensor for each `expected` name, and optionally for names in `may_have`.
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
