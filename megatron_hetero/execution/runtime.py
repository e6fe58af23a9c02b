"""Executes a schedule: one loop over a rank's actions, independent of their builder. Actions are specified in
`schedule.actions`, the interface of the models in `contract`.

Crossings and transfers are explicit, not autograd's: outputs are detached where they leave a rank and become leaves
where they arrive, so that every rank takes part whether or not it holds a row.

To overlap communication, tokens are embedded before rows are waited for, and the gradients of rows leave as soon as
they are known, during the text module's backward. A micro-batch is moved to the device when an action first needs it,
and dropped after the last one.
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
from megatron_hetero.schedule.communication import describe_action, use_of
from megatron_hetero.schedule.program import Schedule


class Interpreter:
    """Executes schedules on this rank.

    Args:
        modules: the modules of this rank, by name.
        communicators: of the boundaries to the text module that include this rank, by encoder. They must not `check`:
            the two sides start crossings in different orders.
        pipelines: the links of this rank's modules that have stages, by name.
        rank: of this process.
        width: elements of a row.
        dtype: of hidden states and rows.
        device: of hidden states and rows.
        watch: measures the seconds of each module, by name, of "boundary" and of "pipeline".
        watchdog: is notified of every action before it begins.
        random: the states of the random generators that models use.
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
            modules: the modules of this rank, by name.
            width: elements of a row.
            dtype: of hidden states and rows.
            transport: dtype of rows on the wire; None: `dtype`.
            timeout_s: an action that takes longer, in seconds, ends the process with a message. 0: never.
            watch: measures times; default: none are recorded.
            watchdog: the rank's existing watchdog, instead of a new one with `timeout_s`.
            random: the states of the generators that models use; default: PyTorch's own.

        Raises:
            UserError: `modules` are not those that the topology places on this rank, or lack a stage.
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
            watch=watch or Stopwatch(topology.platform, record=False),
            watchdog=watchdog or Watchdog.of_world(timeout_s, topology.platform),
            random=random or RandomStates.of(topology.platform),
        )

    def run(self, schedule: Schedule, load: Callable[[int], DeviceMicroBatch]) -> Tensor:
        """Execute this rank's actions.

        Args:
            schedule: for the modules and layouts of the interpreter.
            load: moves a micro-batch, numbered from 0, to the device; called when an action first needs it.

        Returns:
            This rank's sum of losses, fp32 scalar; 0 on ranks without the last stage of the text module. Gradients
            accumulate in the parameters.

        Raises:
            ValueError: a model's output has the wrong shape or dtype, or a plan is of another rank or batch.
        """
        return _Execution(self, schedule, load).run()


def _require_placed(topology: Topology, modules: Mapping[str, ModuleOnRank]) -> None:
    """Check that the rank holds its modules, and the first stage of each, as in the layouts."""
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
            fix="give each rank the stages of its layouts, `layout.coordinate(rank).pp` being the first",
        )
    if unknown := sorted(modules.keys() - topology.layouts.keys()):
        found, expected = f"`{unknown[0]}`", f"some of {', '.join(topology.layouts)}"
        raise UserError.at(
            f"interpreter on rank {rank}", found=found, expected=expected, fix="name it as in the layouts"
        )


ActivationKey = tuple[str, int, int]
"""Module, stage and micro-batch."""


class _Execution:
    """One step. The dictionaries hold the tensors that live on the rank between actions."""

    def __init__(self, interpreter: Interpreter, schedule: Schedule, load: Callable[[int], DeviceMicroBatch]):
        self.interpreter, self.schedule, self.load = interpreter, schedule, load
        self.actions = schedule.actions_of(interpreter.rank)
        self.last_use = {action.micro_batch: i for i, action in enumerate(self.actions)}
        self.position = 0
        self.loss = torch.zeros((), dtype=torch.float32, device=interpreter.device)
        self.batches: dict[int, DeviceMicroBatch] = {}
        self.inputs: dict[ActivationKey, Tensor] = {}  # leaves: hidden states that a stage received
        self.outputs: dict[ActivationKey, Tensor] = {}
        self.output_shapes: dict[ActivationKey, torch.Size] = {}
        # By module, the irecvs of gradients whose shape is not yet known, in order.
        self.deferred: defaultdict[str, deque[Action]] = defaultdict(deque)
        self.receives: dict[Action, tuple[Tensor, Any]] = {}
        self.received: dict[tuple[str, ActivationKey], Tensor] = {}
        self.sends: deque[tuple[Any, Tensor, Action]] = deque()
        self.crossings: dict[tuple[str, str, int], Crossing] = {}
        self.embedded: dict[int, Tensor] = {}
        self.rows: dict[tuple[str, int], Tensor] = {}  # leaves: the received rows of an encoder
        self.row_grads: dict[tuple[str, int], Tensor] = {}
        self.random_states: dict[ActivationKey, Any] = {}  # before a forward pass that will be recomputed

    def run(self) -> Tensor:
        handlers = {
            "run": self._run, "send": self._send, "irecv": self._irecv, "wait": self._wait, "start": self._start,
            "finish": self._finish,
        }  # fmt: skip
        for position, action in enumerate(self.actions):
            self.position = position
            with (
                self.interpreter.watchdog.doing(self._description(action)),
                self.interpreter.watch.part(self._part(action), str(action)),
                self._annotating_errors(action),
            ):
                handlers[action.op](action)
            if self.last_use[action.micro_batch] == position:
                self.batches.pop(action.micro_batch, None)
        for work, _, action in self.sends:
            with self.interpreter.watchdog.doing(self._description(action)), self._annotating_errors(action):
                work.wait()
        return self.loss

    def _description(self, action: Action) -> Callable[[], str]:
        """For the watchdog, which keeps it until the device has executed the action: it must hold no tensor."""
        return partial(describe_action, self.schedule, self.interpreter.rank, action)

    @contextlib.contextmanager
    def _annotating_errors(self, action: Action) -> Iterator[None]:
        """Add a note with the action to errors of process groups."""
        try:
            yield
        except RuntimeError as error:
            error.add_note(f"rank {self.interpreter.rank} was in {self._description(action)()} when this happened")
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

    def _module_input(self, action: Action) -> Any:
        """The input of an action's module; None if the module is absent from the micro-batch."""
        return self._batch(action.micro_batch).inputs.get(action.module)

    def _model(self, action: Action) -> Any:
        return self.interpreter.modules[action.module].stages[_activation_key(action)[1]]

    # ------------------------------------------------------------------------------------------------ work

    def _run(self, action: Action) -> None:
        if self._module_input(action) is None:
            return
        if action.kind == "B":
            self._backward(action)
        else:
            self._forward(action)

    def _forward(self, action: Action) -> None:
        module, key = self.schedule.module[action.module], _activation_key(action)
        keeps = module.backward and (action.kind == "R" or not module.recomputes)
        with torch.set_grad_enabled(keeps), self._same_random_state(action):
            if action.stage != 0:
                self.inputs[key] = self.received.pop((action.kind, key)).requires_grad_(keeps)
                output = self._model(action)(self._module_input(action), self.inputs[key])
                if not keeps:
                    del self.inputs[key]
            elif self._is_text(action):
                output = self._first_text_stage(action)
            else:
                output = self._model(action)(self._module_input(action))
        if action.stage == module.stages - 1:
            self._require_result(action, output)
        if self._is_text(action) and action.stage == module.stages - 1:
            self.loss += output.detach()
            if not keeps:  # an evaluation: no backward follows
                return
        self.outputs[key], self.output_shapes[key] = output, output.shape
        self._receive_deferred(action.module)

    @contextlib.contextmanager
    def _same_random_state(self, action: Action) -> Iterator[None]:
        """Let the recomputed forward of a stage draw the random numbers of the first, without affecting later draws."""
        module, random = self.schedule.module[action.module], self.interpreter.random
        if not module.recomputes:
            yield
        elif action.kind == "F":
            self.random_states[_activation_key(action)] = random.read()
            yield
        else:
            outside = random.read()
            random.write(self.random_states.pop(_activation_key(action)))
            try:
                yield
            finally:
                random.write(outside)

    def _first_text_stage(self, action: Action) -> Tensor:
        micro_batch = action.micro_batch
        names = [(e.name, micro_batch) for e in self.schedule.encoders if (e.name, micro_batch) in self.rows]
        # Rows live until their gradients leave, if any.
        rows = [self.rows[name] if self.schedule.text.backward else self.rows.pop(name) for name in names]
        self._embed(micro_batch)
        embedded = [self.embedded.pop(micro_batch)] if micro_batch in self.embedded else []
        return self._model(action)(
            self._module_input(action), *embedded, rows[0] if len(rows) == 1 else torch.cat([self._no_rows(), *rows])
        )

    def _embed(self, micro_batch: int) -> None:
        """Run the first text stage's `embed`, if it has one and has not run."""
        text = self.schedule.text
        if micro_batch in self.embedded or not self.interpreter.modules[text.name].embeds:
            return
        with torch.profiler.record_function("text embedding"), torch.set_grad_enabled(text.backward):
            first: Any = self.interpreter.modules[text.name].stages[0]
            self.embedded[micro_batch] = first.embed(self._batch(micro_batch).inputs[text.name])

    def _backward(self, action: Action) -> None:
        key = _activation_key(action)
        output, grad = self.outputs.pop(key, None), self.received.pop(("B", key), None)
        if self._is_text(action) and action.stage == 0:
            self._return_rows_early(action)
        if output is None or not output.requires_grad:  # a frozen first stage
            return
        if grad is None and not self._is_text(action):
            grad = self.row_grads.pop((action.module, action.micro_batch))
        output.backward(grad)

    # ------------------------------------------------------------------------------------------- pipelines

    def _send(self, action: Action) -> None:
        if self._module_input(action) is None:
            return
        key = _activation_key(action)
        if action.kind == "B":
            tensor = _grad_of(self.inputs.pop(key))
        else:
            tensor = self.outputs[key].detach()
            if not self.outputs[key].requires_grad:  # no gradient comes back
                del self.outputs[key]
        self._require(
            tensor.dtype == self.interpreter.dtype,
            action,
            f"hidden states of {tensor.dtype}",
            f"{self.interpreter.dtype}",
        )
        tensor = tensor.contiguous()
        work = dist.isend(tensor, self._peer_rank(action), group=self._pipeline(action))
        self.sends.append((work, tensor, action))
        while self.sends and self.sends[0][0].is_completed():
            self.sends.popleft()

    def _irecv(self, action: Action) -> None:
        batch = self._module_input(action)
        if batch is None:
            return
        if action.kind != "B":
            self._receive(action, self._model(action).hidden_shape(batch))
            return
        # A gradient has the shape of its output, which may be computed only after the irecv.
        self.deferred[action.module].append(action)
        self._receive_deferred(action.module)

    def _receive_deferred(self, module: str) -> None:
        deferred = self.deferred[module]
        while deferred and _activation_key(deferred[0]) in self.output_shapes:
            action = deferred.popleft()
            self._receive(action, self.output_shapes[_activation_key(action)])

    def _receive(self, action: Action, shape: Sequence[int]) -> None:
        buffer = torch.empty(shape, dtype=self.interpreter.dtype, device=self.interpreter.device)
        self.receives[action] = buffer, dist.irecv(buffer, self._peer_rank(action), group=self._pipeline(action))

    def _wait(self, action: Action) -> None:
        posted = Action("irecv", action.kind, action.module, action.micro_batch, action.stage, action.peer)
        if self._module_input(action) is None:
            return
        assert posted in self.receives, f"{action} has no irecv"
        buffer, work = self.receives.pop(posted)
        work.wait()
        self.received[action.kind, _activation_key(action)] = buffer

    def _peer_rank(self, action: Action) -> int:
        return self.schedule.peer_rank(self.interpreter.rank, action)

    def _pipeline(self, action: Action) -> dist.ProcessGroup:
        """The group of an action's link, one direction between two ranks."""
        use = use_of(self.schedule, action)
        assert isinstance(use, Link), f"{action} is no pipeline transfer"
        return self.interpreter.pipelines[action.module][use.direction, use.sender]

    # ------------------------------------------------------------------------------------------- boundaries

    def _start(self, action: Action) -> None:
        encoder, key = action.module, _crossing(action)
        plan = self._batch(action.micro_batch).boundaries.get(encoder)
        if plan is None or key in self.crossings:
            return
        communicator = self.interpreter.communicators[encoder]
        if action.kind == "F":
            self.crossings[key] = communicator.start_forward(plan, self._encoded(action))
        else:
            rows = self.rows.pop((encoder, action.micro_batch), None)
            self.crossings[key] = communicator.start_backward(plan, self._no_rows() if rows is None else _grad_of(rows))

    def _encoded(self, action: Action) -> Tensor:
        """This rank's rows that cross; none on ranks that only receive."""
        key = action.module, self.schedule.module[action.module].stages - 1, action.micro_batch
        if key not in self.outputs:
            return self._no_rows()
        rows = self.outputs[key].detach()
        if not self.outputs[key].requires_grad:  # no gradient comes back: it is recomputed or frozen
            del self.outputs[key]
        return rows

    def _finish(self, action: Action) -> None:
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
        return self.schedule.roles[self.schedule.role_index[self.interpreter.rank]]

    def _return_rows_early(self, action: Action) -> None:
        """If this rank's next crossing returns the gradients of this micro-batch's rows, start it as soon as they are
        known, during the backward.
        """
        following = next((a for a in self.actions[self.position :] if a.op in ("start", "finish")), None)
        if following is None or (following.op, following.kind) != ("start", "B"):
            return
        rows = self.rows.get((following.module, following.micro_batch))
        if rows is not None and following.micro_batch == action.micro_batch and rows.requires_grad:
            rows.register_post_accumulate_grad_hook(lambda _: self._start(following))

    def _require_result(self, action: Action, output: Tensor) -> None:
        """Check the output of a module's last stage."""
        if self._is_text(action):
            found = f"a loss of shape {tuple(output.shape)}"
            self._require(output.dim() == 0, action, found, "a scalar, the sum of losses")
        elif (plan := self._batch(action.micro_batch).boundaries.get(action.module)) is not None:
            expected = (plan.forward.held, self.interpreter.width)
            found, holds = f"rows of shape {tuple(output.shape)}", f"{expected}, what this rank holds in the plan"
            self._require(output.shape == expected, action, found, holds)

    def _require(self, fits: bool, action: Action, found: str, expected: str) -> None:
        """Raise `UserError` unless a model's output `fits`."""
        if not fits:
            where = f"micro-batch {action.micro_batch} of `{action.module}`, stage {action.stage}"
            raise UserError.at(where, found=found, expected=expected, fix="correct what the model of the stage returns")

    def _no_rows(self) -> Tensor:
        return torch.zeros(0, self.interpreter.width, dtype=self.interpreter.dtype, device=self.interpreter.device)


def _activation_key(action: Action) -> ActivationKey:
    assert isinstance(action.stage, int), f"{action} has no stage"
    return action.module, action.stage, action.micro_batch


def _crossing(action: Action) -> tuple[str, str, int]:
    return action.kind, action.module, action.micro_batch


def _grad_of(leaf: Tensor) -> Tensor:
    """The gradient of a model's input; zero if unused."""
    return torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
