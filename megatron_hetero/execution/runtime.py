"""Executes a schedule: one loop over a rank's actions, whatever builder made them. What actions mean is in `actions`,
what is asked of the models in `contract`.

Crossings and transfers are explicit, not autograd's: outputs are detached where they leave a rank and become leaves
where they arrive, so that every rank takes part whether or not it holds a row.

Three things happen early: tokens are embedded before rows are waited for; the gradients of rows leave as soon as they
are known, while the text module finishes its own; and a micro-batch is moved to the device when an action first needs
it (and dropped after the last one).
"""

from __future__ import annotations

import contextlib
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_hetero.boundary.communicator import BoundaryCommunicator, Crossing, boundary_communicators
from megatron_hetero.distributed.communicators import Link
from megatron_hetero.distributed.topology import Links, Topology
from megatron_hetero.errors import UserError
from megatron_hetero.execution.contract import DeviceMicroBatch, ModuleOnRank, RandomStates
from megatron_hetero.execution.watch import Stopwatch, Watchdog
from megatron_hetero.schedule.actions import Action
from megatron_hetero.schedule.communication import described, use_of
from megatron_hetero.schedule.program import Schedule


class Interpreter:
    """Executes schedules on this rank.

    Args:
        modules: what this rank holds, by name.
        communicators: of the boundaries to the text module that this rank takes part in, by encoder. They must not
            `check`: the two sides start crossings in different orders.
        pipelines: the links of those of this rank's modules that have stages.
        rank: of this process.
        width: elements of a row.
        dtype: of hidden states and rows.
        device: where they are.
        watch: counts seconds of each module by its name, of "boundary" and of "pipeline".
        watchdog: is told of every action before it begins.
        random: the states of the random generators that models draw from.
    """

    def __init__(
        self,
        modules: Mapping[str, ModuleOnRank],
        communicators: Mapping[str, BoundaryCommunicator],
        pipelines: Mapping[str, Links],
        *,
        rank: int,
        width: int,
        dtype: torch.dtype,
        device: torch.device,
        watch: Stopwatch,
        watchdog: Watchdog,
        random: RandomStates,
    ):
        assert not any(c.check for c in communicators.values()), "the sides of a boundary start in different orders"
        self.modules, self.communicators, self.pipelines = modules, communicators, pipelines
        self.rank, self.width, self.dtype, self.device = rank, width, dtype, device
        self.watch, self.watchdog, self.random = watch, watchdog, random

    @classmethod
    def build(
        cls,
        topology: Topology,
        modules: Mapping[str, ModuleOnRank],
        *,
        width: int,
        dtype: torch.dtype,
        transport: torch.dtype | None = None,
        timeout_s: float = 1800.0,
        watch: Stopwatch | None = None,
        watchdog: Watchdog | None = None,
        random: RandomStates | None = None,
    ) -> Interpreter:
        """An interpreter on the groups of a topology that was built with the boundaries as `edges`.

        Args:
            topology: with this rank and its groups.
            modules: what this rank holds, by name.
            width: elements of a row.
            dtype: of hidden states and rows.
            transport: what rows are rounded to on the wire; None sends them as they are.
            timeout_s: seconds after which an action that has not ended ends the process, with a message. 0: never.
            watch: where times are wanted.
            watchdog: one that the rank has already, in place of one for `timeout_s`.
            random: of the generators that models draw from, where these are more than PyTorch's own.

        Raises:
            UserError: `modules` are not those that the topology places on this rank, or miss a stage.
        """
        _require_placed(topology, modules)
        return cls(
            modules,
            boundary_communicators(topology, width, dtype, transport=transport, check=False),
            topology.pipelines,
            rank=topology.rank,
            width=width,
            dtype=dtype,
            device=topology.platform.device,
            watch=watch or Stopwatch(topology.platform, keeps=False),
            watchdog=watchdog or Watchdog.of_world(timeout_s, topology.platform),
            random=random or RandomStates.of(topology.platform),
        )

    def run(self, schedule: Schedule, load: Callable[[int], DeviceMicroBatch]) -> Tensor:
        """Execute this rank's actions.

        Args:
            schedule: of the modules and layouts that the interpreter was built for.
            load: moves a micro-batch, counted from 0, to the device; called when an action first needs it.

        Returns:
            This rank's sum of losses, fp32 scalar, 0 where it holds no last stage of the text module. Gradients
            accumulate in the parameters.

        Raises:
            ValueError: what a model returned does not fit, or a plan is another rank's or batch's.
        """
        return _Execution(self, schedule, load).run()


def _require_placed(topology: Topology, modules: Mapping[str, ModuleOnRank]) -> None:
    """Check that a rank holds the modules, and the first of their stages, that its layouts say."""
    rank = topology.rank
    for name, layout in topology.layouts.items():
        expected = f"stage {layout.coordinate(rank).pp} of `{name}`" if rank in layout else f"none of `{name}`"
        held = sorted(modules[name].stages) if name in modules else []
        if (layout.coordinate(rank).pp in held) if rank in layout else not held:
            continue
        raise UserError.at(
            f"interpreter on rank {rank}",
            found=f"stages {held} of `{name}`" if held else f"no stage of `{name}`",
            expected=expected,
            because=f"its layout is {layout}",
            fix="give each rank the stages that the layouts say, `layout.coordinate(rank).pp` being the first",
        )
    if unknown := sorted(modules.keys() - topology.layouts.keys()):
        found, expected = f"`{unknown[0]}`", f"some of {', '.join(topology.layouts)}"
        raise UserError.at(
            f"interpreter on rank {rank}", found=found, expected=expected, fix="name it as in the layouts"
        )


Key = tuple[str, int, int]
"""Module, stage and micro-batch."""


class _Execution:
    """One step. What lives on the rank between two actions is in the dictionaries."""

    def __init__(self, interpreter: Interpreter, schedule: Schedule, load: Callable[[int], DeviceMicroBatch]):
        self.of, self.schedule, self.load = interpreter, schedule, load
        self.actions = schedule.actions_of(interpreter.rank)
        self.last_use = {action.micro_batch: i for i, action in enumerate(self.actions)}
        self.position = 0
        self.loss = torch.zeros((), dtype=torch.float32, device=interpreter.device)
        self.batches: dict[int, DeviceMicroBatch] = {}
        self.entered: dict[Key, Tensor] = {}  # leaves: what a stage was given
        self.left: dict[Key, Tensor] = {}  # what it made of it
        self.left_shape: dict[Key, torch.Size] = {}
        # By module, gradients that may come, in order, once it is known how large they are.
        self.posted: defaultdict[str, deque[Action]] = defaultdict(deque)
        self.arriving: dict[Action, tuple[Tensor, Any]] = {}
        self.arrived: dict[tuple[str, Key], Tensor] = {}
        self.leaving: deque[tuple[Any, Tensor, Action]] = deque()
        self.crossings: dict[tuple[str, str, int], Crossing] = {}
        self.embedded: dict[int, Tensor] = {}
        self.rows: dict[tuple[str, int], Tensor] = {}  # leaves: the rows of an encoder
        self.row_grads: dict[tuple[str, int], Tensor] = {}
        self.drawn_from: dict[Key, Any] = {}  # random states before a forward pass that is made again

    def run(self) -> Tensor:
        handlers = {
            "run": self._run, "send": self._send, "irecv": self._post, "wait": self._take, "start": self._start,
            "finish": self._wait,
        }  # fmt: skip
        for position, action in enumerate(self.actions):
            self.position = position
            with (
                self.of.watchdog.doing(self._described(action)),
                self.of.watch.part(self._part(action), str(action)),
                self._explained(action),
            ):
                handlers[action.op](action)
            if self.last_use[action.micro_batch] == position:
                self.batches.pop(action.micro_batch, None)
        for work, _, action in self.leaving:
            with self.of.watchdog.doing(self._described(action)), self._explained(action):
                work.wait()
        return self.loss

    def _described(self, action: Action) -> Callable[[], str]:
        """For the watchdog, which keeps it until the device has done the action: it must hold no tensor."""
        return partial(described, self.schedule, self.of.rank, action)

    @contextlib.contextmanager
    def _explained(self, action: Action) -> Iterator[None]:
        """Add to an error of a process group which action it broke."""
        try:
            yield
        except RuntimeError as error:
            error.add_note(
                f"rank {self.of.rank} was in {described(self.schedule, self.of.rank, action)} when this happened"
            )
            raise

    def _part(self, action: Action) -> str:
        if action.op == "run":
            return action.module
        return "boundary" if action.op in ("start", "finish") else "pipeline"

    def _is_text(self, action: Action) -> bool:
        return action.module == self.schedule.text.name

    def _batch(self, micro_batch: int) -> DeviceMicroBatch:
        if micro_batch not in self.batches:
            self.batches[micro_batch] = self.load(micro_batch)
        return self.batches[micro_batch]

    def _input(self, action: Action) -> Any:
        """What the module of an action reads; None where it has nothing to do."""
        return self._batch(action.micro_batch).inputs.get(action.module)

    def _model(self, action: Action) -> Any:
        return self.of.modules[action.module].stages[_key(action)[1]]

    # ------------------------------------------------------------------------------------------------ work

    def _run(self, action: Action) -> None:
        if self._input(action) is None:
            return
        if action.kind == "B":
            self._backward(action)
        else:
            self._forward(action)

    def _forward(self, action: Action) -> None:
        module, key = self.schedule.module[action.module], _key(action)
        keeps = module.backward and (action.kind == "R" or not module.recomputes)
        with torch.set_grad_enabled(keeps), self._same_draws(action):
            if action.stage != 0:
                self.entered[key] = self.arrived.pop((action.kind, key)).requires_grad_(keeps)
                left = self._model(action)(self._input(action), self.entered[key])
                if not keeps:
                    del self.entered[key]
            elif self._is_text(action):
                left = self._first_text_stage(action)
            else:
                left = self._model(action)(self._input(action))
        if action.stage == module.stages - 1:
            self._require_result(action, left)
        if self._is_text(action) and action.stage == module.stages - 1:
            self.loss += left.detach()
            if not keeps:  # an evaluation: nothing comes back to it
                return
        self.left[key], self.left_shape[key] = left, left.shape
        self._receive_posted(action.module)

    @contextlib.contextmanager
    def _same_draws(self, action: Action) -> Iterator[None]:
        """Let the second forward pass of a stage draw the random numbers of the first, and nobody else notice."""
        module, random = self.schedule.module[action.module], self.of.random
        if not module.recomputes:
            yield
        elif action.kind == "F":
            self.drawn_from[_key(action)] = random.read()
            yield
        else:
            outside = random.read()
            random.write(self.drawn_from.pop(_key(action)))
            try:
                yield
            finally:
                random.write(outside)

    def _first_text_stage(self, action: Action) -> Tensor:
        micro_batch = action.micro_batch
        names = [(e.name, micro_batch) for e in self.schedule.encoders if (e.name, micro_batch) in self.rows]
        # Where gradients go back to rows, these live until then.
        rows = [self.rows[name] if self.schedule.text.backward else self.rows.pop(name) for name in names]
        self._embed(micro_batch)
        embedded = [self.embedded.pop(micro_batch)] if micro_batch in self.embedded else []
        return self._model(action)(
            self._input(action), *embedded, rows[0] if len(rows) == 1 else torch.cat([self._no_rows(), *rows])
        )

    def _embed(self, micro_batch: int) -> None:
        """What the first text stage computes without rows, where it does and has not done so."""
        text = self.schedule.text
        if micro_batch in self.embedded or not self.of.modules[text.name].embeds:
            return
        with torch.profiler.record_function("text embedding"), torch.set_grad_enabled(text.backward):
            first: Any = self.of.modules[text.name].stages[0]
            self.embedded[micro_batch] = first.embed(self._batch(micro_batch).inputs[text.name])

    def _backward(self, action: Action) -> None:
        key = _key(action)
        left, grad = self.left.pop(key, None), self.arrived.pop(("B", key), None)
        if self._is_text(action) and action.stage == 0:
            self._return_rows_early(action)
        if left is None or not left.requires_grad:  # a frozen first stage
            return
        if grad is None and not self._is_text(action):
            grad = self.row_grads.pop((action.module, action.micro_batch))
        left.backward(grad)

    # ------------------------------------------------------------------------------------------- pipelines

    def _send(self, action: Action) -> None:
        if self._input(action) is None:
            return
        key = _key(action)
        if action.kind == "B":
            tensor = _grad_of(self.entered.pop(key))
        else:
            tensor = self.left[key].detach()
            if not self.left[key].requires_grad:  # nothing comes back to it
                del self.left[key]
        self._require(tensor.dtype == self.of.dtype, action, f"hidden states of {tensor.dtype}", f"{self.of.dtype}")
        tensor = tensor.contiguous()
        work = dist.isend(tensor, self._partner(action), group=self._pipeline(action))
        self.leaving.append((work, tensor, action))
        while self.leaving and self.leaving[0][0].is_completed():
            self.leaving.popleft()

    def _post(self, action: Action) -> None:
        batch = self._input(action)
        if batch is None:
            return
        if action.kind != "B":
            self._receive(action, self._model(action).hidden_shape(batch))
            return
        # A gradient is as large as the output that it is of, which may only be computed between post and take.
        self.posted[action.module].append(action)
        self._receive_posted(action.module)

    def _receive_posted(self, module: str) -> None:
        posted = self.posted[module]
        while posted and _key(posted[0]) in self.left_shape:
            action = posted.popleft()
            self._receive(action, self.left_shape[_key(action)])

    def _receive(self, action: Action, shape: Sequence[int]) -> None:
        buffer = torch.empty(shape, dtype=self.of.dtype, device=self.of.device)
        self.arriving[action] = buffer, dist.irecv(buffer, self._partner(action), group=self._pipeline(action))

    def _take(self, action: Action) -> None:
        posted = Action("irecv", action.kind, action.module, action.micro_batch, action.stage, action.peer)
        if self._input(action) is None:
            return
        assert posted in self.arriving, f"{action} waits for what was never asked for"
        buffer, work = self.arriving.pop(posted)
        work.wait()
        self.arrived[action.kind, _key(action)] = buffer

    def _partner(self, action: Action) -> int:
        return self.schedule.peer_rank(self.of.rank, action)

    def _pipeline(self, action: Action) -> dist.ProcessGroup:
        """The group of the link that an action uses, one way between two ranks."""
        use = use_of(self.schedule, action)
        assert isinstance(use, Link)
        return self.of.pipelines[action.module][use.direction, use.sender]

    # ------------------------------------------------------------------------------------------- boundaries

    def _start(self, action: Action) -> None:
        encoder, key = action.module, _crossing(action)
        plan = self._batch(action.micro_batch).boundaries.get(encoder)
        if plan is None or key in self.crossings:
            return
        communicator = self.of.communicators[encoder]
        if action.kind == "F":
            self.crossings[key] = communicator.start_forward(plan, self._encoded(action))
        else:
            rows = self.rows.pop((encoder, action.micro_batch), None)
            self.crossings[key] = communicator.start_backward(plan, self._no_rows() if rows is None else _grad_of(rows))

    def _encoded(self, action: Action) -> Tensor:
        """The rows of this rank that cross; none on ranks that only receive."""
        key = action.module, self.schedule.module[action.module].stages - 1, action.micro_batch
        if key not in self.left:
            return self._no_rows()
        rows = self.left[key].detach()
        if not self.left[key].requires_grad:  # nothing comes back to it: it is encoded again, or does not train
            del self.left[key]
        return rows

    def _wait(self, action: Action) -> None:
        crossing = self.crossings.get(_crossing(action))
        text, encoder = self.schedule.text, self.schedule.module[action.module]
        reads = (text.name, 0) in self._role.held_stages
        if action.kind == "F" and reads:
            self._embed(action.micro_batch)
        if crossing is None:
            return
        arrived = self.crossings.pop(_crossing(action)).wait()
        if action.kind == "F" and reads:
            self.rows[action.module, action.micro_batch] = arrived.requires_grad_(encoder.backward)
        elif action.kind == "B" and (encoder.name, encoder.stages - 1) in self._role.held_stages:
            self.row_grads[action.module, action.micro_batch] = arrived

    @property
    def _role(self) -> Any:
        return self.schedule.roles[self.schedule.role_index[self.of.rank]]

    def _return_rows_early(self, action: Action) -> None:
        """Where the next crossing of this rank is the return of this micro-batch's rows, let it start as soon as their
        gradients are known.
        """
        following = next((a for a in self.actions[self.position :] if a.op in ("start", "finish")), None)
        if following is None or (following.op, following.kind) != ("start", "B"):
            return
        rows = self.rows.get((following.module, following.micro_batch))
        if rows is not None and following.micro_batch == action.micro_batch and rows.requires_grad:
            rows.register_post_accumulate_grad_hook(lambda _: self._start(following))

    def _require_result(self, action: Action, left: Tensor) -> None:
        """Check what the last stage of a module returned."""
        if self._is_text(action):
            found = f"a loss of shape {tuple(left.shape)}"
            self._require(left.dim() == 0, action, found, "a scalar, the sum of losses")
        elif (plan := self._batch(action.micro_batch).boundaries.get(action.module)) is not None:
            expected = (plan.forward.held, self.of.width)
            found, holds = f"rows of shape {tuple(left.shape)}", f"{expected}, what this rank holds in the plan"
            self._require(left.shape == expected, action, found, holds)

    def _require(self, fits: bool, action: Action, found: str, expected: str) -> None:
        """Check what a model returned."""
        if not fits:
            where = f"micro-batch {action.micro_batch} of `{action.module}`, stage {action.stage}"
            raise UserError.at(where, found=found, expected=expected, fix="mend what the model of the stage returns")

    def _no_rows(self) -> Tensor:
        return torch.zeros(0, self.of.width, dtype=self.of.dtype, device=self.of.device)


def _key(action: Action) -> Key:
    assert isinstance(action.stage, int)
    return action.module, action.stage, action.micro_batch


def _crossing(action: Action) -> tuple[str, str, int]:
    return action.kind, action.module, action.micro_batch


def _grad_of(leaf: Tensor) -> Tensor:
    """The gradient of what a model was given; 0 where it made no use of it."""
    return torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
