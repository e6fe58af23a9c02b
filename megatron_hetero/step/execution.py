"""One step on one rank: a loop over its actions, independent of their builder. Actions are specified in
`schedule.actions`, the interface of the models in `contract`.

Crossings and transfers are explicit, not autograd's: outputs are detached where they leave a rank and become leaves
where they arrive, so that every rank takes part even if it holds no row.

To overlap communication, tokens are embedded before rows are waited for, and the gradients of rows leave as soon as
they are computed, during the text module's backward. A micro-batch is moved to the device when an action first needs
it, and dropped after the last one.

If one call of an encoder computes several micro-batches, the call is made in the forward of the first and the backward
of the last; the actions of the others do nothing, as in a micro-batch without images. All of them are in one turn of
the encoder, in which no other action depends on the call.

An input in parts saves memory: forward passes build no graph, and the backward pass of a part follows its second
forward pass.
"""

from __future__ import annotations

import contextlib
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_hetero.base.errors import UserError
from megatron_hetero.boundary.communicator import Crossing
from megatron_hetero.layout.communicators import Link
from megatron_hetero.layout.graph import Edge
from megatron_hetero.layout.names import HIDDEN, ROWS
from megatron_hetero.schedule.actions import Action
from megatron_hetero.schedule.contract import (
    LOSS,
    METRICS,
    DeviceMicroBatch,
    InParts,
    StageOutput,
    StepResult,
    random_states,
    require_calls,
    require_known,
)
from megatron_hetero.schedule.gathering import stays_gathered
from megatron_hetero.schedule.program import Schedule, describe_action, early_start, use_of
from megatron_hetero.step.resources import (
    RankResources,
    ReceivedRows,
    grad_of,
    hidden_shape,
    inputs_of_parts,
    joined_outputs,
    require_frozen,
    without_ddp,
    wrong_outputs,
)

ActivationKey = tuple[str, int, int]
"""Module, stage and micro-batch."""
CrossingKey = tuple[str, Edge, int]
"""Kind, edge and micro-batch."""


class StepExecution:
    """One step. Its dictionaries hold the tensors that live on the rank between actions."""

    def __init__(
        self,
        resources: RankResources,
        schedule: Schedule,
        load: Callable[[int], DeviceMicroBatch],
        after_backward: Callable[[str], None],
        before_last: Callable[[str, int], None],
    ):
        self.resources, self.schedule, self.load, self.after_backward = resources, schedule, load, after_backward
        self.before_last, self.checks = before_last, resources.checks
        self.graph, self.rank = resources.graph, resources.topology.rank
        self.device = resources.topology.platform.device
        self.actions = schedule.actions_of(self.rank)
        backward = [(i, action) for i, action in enumerate(self.actions) if _is_backward(action)]
        self.last_backward = {action.module: i for i, action in backward}
        self.last_of_stage = {(action.module, action.stage): i for i, action in backward}
        self.last_use = {action.micro_batch: i for i, action in enumerate(self.actions)}
        self.position = 0
        self.losses: dict[str, Tensor] = {}  # by module
        self.metrics: dict[str, dict[str, Tensor]] = {name: {} for name in resources.topology.layouts}
        self.batches: dict[int, DeviceMicroBatch] = {}
        self.calls: dict[tuple[str, int], range] = {}  # of several micro-batches, by module and micro-batch
        self.called: dict[ActivationKey, dict[str, Tensor]] = {}  # their outputs, by the last micro-batch
        self.inputs: dict[ActivationKey, Tensor] = {}  # received hidden states, as leaves
        self.outputs: dict[ActivationKey, dict[str, Tensor]] = {}  # by name
        self.hidden_shapes: dict[ActivationKey, torch.Size] = {}  # of outputs
        # By module, the irecvs of gradients whose shape is not yet known, in order.
        self.deferred: defaultdict[str, deque[Action]] = defaultdict(deque)
        self.receives: dict[Action, tuple[Tensor, dist.Work]] = {}
        self.received: dict[tuple[str, ActivationKey], Tensor] = {}
        self.sends: deque[tuple[dist.Work, Tensor, Action]] = deque()
        self.crossings: dict[CrossingKey, Crossing] = {}
        self.embedded: dict[tuple[str, int], Tensor] = {}  # by module and micro-batch
        self.rows: dict[tuple[Edge, int], ReceivedRows] = {}
        self.row_grads: dict[tuple[Edge, int], Tensor] = {}
        self.random_states: dict[ActivationKey, Any] = {}  # before a forward pass that will be recomputed
        # By the last micro-batch of the call: an input whose parts run again, and the random state before the first.
        self.in_parts: dict[ActivationKey, tuple[InParts, Any]] = {}
        self.stays_gathered = {
            name: stays_gathered(self.actions, schedule.module[name], next(iter(module.gathered.values()))[0].zero)
            for name, module in resources.modules.items()
            if module.gathered
        }

    def run(self) -> StepResult:
        """Execute the actions. Returns the sums of this rank."""
        handlers = {
            "run": self._run, "send": self._send, "irecv": self._irecv, "wait": self._wait, "start": self._start,
            "finish": self._finish,
        }  # fmt: skip
        for module in self.resources.modules.values():
            for gathered in chain(*module.gathered.values()):
                gathered.before_run(gathered.zero == 2)  # Tokens may be embedded before the first run.
        for position, action in enumerate(self.actions):
            self.position = position
            with (
                self.resources.watchdog.doing(self._description(action)),
                self.resources.watch.part(self._part(action), str(action)),
                self._annotating_errors(action),
            ):
                handlers[action.op](action)
            if _is_backward(action) and self.last_backward[action.module] == position:
                self.after_backward(action.module)
            if self.last_use[action.micro_batch] == position:
                self.batches.pop(action.micro_batch, None)
        for work, _, action in self.sends:
            with self.resources.watchdog.doing(self._description(action)), self._annotating_errors(action):
                work.wait()
        losses = [*self.losses.values()] or [torch.zeros((), device=self.device)]
        return StepResult(losses[0] if len(losses) == 1 else torch.stack(losses).sum(), self.losses, self.metrics)

    def _description(self, action: Action) -> Callable[[], str]:
        """Describe an action. The watchdog stores this until the device has executed the action: it refers to no
        tensor.
        """
        return partial(describe_action, self.schedule, self.rank, action)

    @contextlib.contextmanager
    def _annotating_errors(self, action: Action) -> Iterator[None]:
        """Add a note with the action to errors of process groups."""
        try:
            yield
        except RuntimeError as error:
            error.add_note(f"rank {self.rank} was in {self._description(action)()} when this happened")
            raise

    def _part(self, action: Action) -> str:
        if action.op == "run":
            return action.module
        return "boundary" if action.op in ("start", "finish") else "pipeline"

    def _batch(self, micro_batch: int) -> DeviceMicroBatch:
        if micro_batch not in self.batches:
            self.batches[micro_batch] = self.load(micro_batch)
            require_known(micro_batch, self.batches[micro_batch], self.schedule.module, self.schedule.edges)
            require_calls(micro_batch, self.batches[micro_batch], self.schedule)
            for module, call in self.batches[micro_batch].calls.items():
                self.calls.update(((module, m), call) for m in call)
        return self.batches[micro_batch]

    def _call(self, action: Action) -> range:
        """The micro-batches that are computed in one call with that of an action."""
        m = action.micro_batch
        return self.calls.get((action.module, m), range(m, m + 1))

    def _module_input(self, action: Action) -> Any:
        """The input of an action's module; None if the module is absent from the micro-batch."""
        return self._batch(action.micro_batch).inputs.get(action.module)

    def _model(self, action: Action) -> Any:
        return self.resources.modules[action.module].stages[_activation_key(action)[1]]

    # ------------------------------------------------------------------------------------------------ work

    def _run(self, action: Action) -> None:
        has_input, call = self._module_input(action) is not None, self._call(action)
        runs = action.micro_batch == call[-1] if action.kind == "B" and len(call) > 1 else has_input
        if not runs:
            return
        if action.kind == "B":
            self._backward(action)
        else:
            self._before_run(action)
            self._forward(action)

    def _before_run(self, action: Action, *, more: bool = False) -> None:
        """Notify gathered stages. `more`: whether other parts of the input follow in the same action."""
        for gathered in self.resources.modules[action.module].gathered.get(_activation_key(action)[1], ()):
            last = replace(action, micro_batch=self._call(action)[-1])
            gathered.before_run(last in self.stays_gathered[action.module] or (more and gathered.zero == 2))

    def _forward(self, action: Action) -> None:
        module, key, given = self.schedule.module[action.module], _activation_key(action), self._module_input(action)
        goes_back = module.backward and (action.kind == "R" or not module.recomputes)
        keeps = goes_back and not isinstance(given, InParts)
        with torch.set_grad_enabled(keeps), self._same_random_state(action):
            inputs = []
            if action.stage != 0:
                trains = self.resources.modules[action.module].trains_before_last
                inputs.append(self.received.pop((action.kind, key)).requires_grad_(goes_back and trains))
                self.inputs[key] = inputs[0]
            else:
                self._embed(action.module, action.micro_batch)
                if (embedded := self.embedded.pop((action.module, action.micro_batch), None)) is not None:
                    inputs.append(embedded)
            inputs += self._rows_of_stage(action)
            if not goes_back:
                self.inputs.pop(key, None)
            if not isinstance(given, InParts):
                outputs = self._outputs(action, given, inputs)
            else:
                if goes_back:
                    read, _ = random_states(self.resources.topology.platform)
                    self.in_parts[*key[:2], self._call(action)[-1]] = given, read()
                if action.kind == "R" and action.stage == module.stages - 1:
                    return  # Its backward pass will run the parts again.
                each = inputs_of_parts(self._model(action), given, next(iter(inputs), None))
                calls = zip(given.parts, each, strict=True)
                outputs = joined_outputs([self._outputs(action, *call) for call in calls])
        self._require_result(action, outputs)
        if action.kind == "R" and not keeps:
            outputs = {HIDDEN: outputs[HIDDEN]}  # Rows have crossed.
        if LOSS in outputs:
            if action.kind == "F":
                loss, so_far = outputs[LOSS].detach(), self.losses.get(action.module)
                self.losses[action.module] = loss.to(torch.float32, copy=True) if so_far is None else so_far.add_(loss)
            if keeps and self.checks and not outputs[LOSS].requires_grad:
                require_frozen(*key[:2], self._model(action), inputs, outputs[LOSS])
            if not keeps:  # an evaluation, or a forward that will be recomputed
                del outputs[LOSS]
        if len(call := self._call(action)) > 1:
            self._split_call(action, outputs, call, keeps=keeps)
        elif outputs:
            self.outputs[key] = outputs
        if HIDDEN in outputs:
            self.hidden_shapes[key] = outputs[HIDDEN].shape
        self._receive_deferred(action.module)

    def _outputs(self, action: Action, given: Any, inputs: Sequence[Any]) -> dict[str, Tensor]:
        """Call the model of a stage, and check what it returns. Returns its outputs by name."""
        with without_ddp(self.rank, *_activation_key(action)[:2]) if self.checks else contextlib.nullcontext():
            output: StageOutput = self._model(action)(given, *inputs)
        is_last = action.stage == self.schedule.module[action.module].stages - 1
        expected = [*([] if is_last else [HIDDEN]), *self._crossing_names(action)] or [LOSS]
        # A module that feeds others may have a loss of its own.
        may_have = [LOSS] if is_last and expected != [LOSS] else []
        if is_last and isinstance(output, Mapping) and METRICS in output:
            output = dict(output)
            self._add_metrics(action, output.pop(METRICS))
        problem = wrong_outputs(output, expected, may_have)
        self._require(not problem, action, problem, f"a tensor by each of the names {', '.join(expected)}")
        outputs = {expected[0]: output} if isinstance(output, Tensor) else dict(output)
        if LOSS in outputs:
            found = f"a loss of shape {tuple(outputs[LOSS].shape)}"
            self._require(outputs[LOSS].dim() == 0, action, found, "a scalar, the sum of losses")
        return outputs

    def _add_metrics(self, action: Action, metrics: Mapping[str, Any]) -> None:
        sums = self.metrics[action.module]
        for name, value in metrics.items() if action.kind == "F" else ():
            value = torch.as_tensor(value, device=self.device)
            found = f"{METRICS} `{name}` of shape {tuple(value.shape)}"
            self._require(value.dim() == 0, action, found, "a scalar, a sum over this rank's part")
            sums[name] = sums[name] + value.detach() if name in sums else value.detach().clone()

    def _split_call(self, action: Action, outputs: Mapping[str, Tensor], call: range, *, keeps: bool) -> None:
        """Split the rows that a call returned into those of its micro-batches, without copies. Outputs with a graph are
        stored whole, too, until the backward of the last micro-batch.
        """
        module, stage, _ = _activation_key(action)
        if keeps:
            self.called[module, stage, call[-1]] = dict(outputs)
        first = 0
        for m in call:
            if plans := [plan for plan in map(self._batch(m).boundaries.get, self._leaving(action)) if plan]:
                rows = slice(first, first + plans[0].forward.held)
                crossing = self._crossing_names(action)
                self.outputs[module, stage, m] = {name: outputs[name].detach()[rows] for name in crossing}
                first = rows.stop

    def _crossing_names(self, action: Action) -> list[str]:
        """The outputs of the stage of an action that cross along some edge."""
        return list(dict.fromkeys(name for edge in self._leaving(action) for name in self.graph.outputs_of(edge)))

    def _leaving(self, action: Action) -> tuple[Edge, ...]:
        """The edges that leave the stage of an action."""
        return self.schedule.leaving.get(_activation_key(action)[:2], ())

    def _entering(self, action: Action) -> tuple[Edge, ...]:
        """The edges that enter the stage of an action."""
        return self.schedule.entering.get(_activation_key(action)[:2], ())

    @contextlib.contextmanager
    def _same_random_state(self, action: Action) -> Iterator[None]:
        """Make the recomputed forward of a stage draw the random numbers of the first. Later draws are unaffected."""
        if not self.schedule.module[action.module].recomputes:
            yield
            return
        if action.kind == "F":
            self.random_states[_activation_key(action)] = random_states(self.resources.topology.platform)[0]()
            yield
        else:
            with self._random_state(self.random_states.pop(_activation_key(action))):
                yield

    @contextlib.contextmanager
    def _random_state(self, state: Any) -> Iterator[None]:
        read, write = random_states(self.resources.topology.platform)
        outside = read()
        write(state)
        try:
            yield
        finally:
            write(outside)

    def _rows_of_stage(self, action: Action) -> list[Tensor | dict[str, Tensor]]:
        """The rows that enter a stage, as its arguments."""
        edges, rows = self._entering(action), defaultdict[str, list[Tensor]](list)
        for edge in edges:
            # Rows live until their gradients leave, if any.
            key = edge, action.micro_batch
            received = self.rows.get(key) if self.schedule.returns(edge) else self.rows.pop(key, None)
            leaves = {} if received is None else received.leaves
            for name in self.graph.outputs_of(edge):
                rows[name] += [leaves[name] if name in leaves else self._no_rows(self.graph.width_of(edge))]
        found = {name: each[0] if len(each) == 1 else torch.cat(each) for name, each in rows.items()}
        if not edges:
            # The text module takes rows even if no encoder enters its first stage.
            takes_rows = action.stage == 0 and self.schedule.module[action.module].style == "text"
            width = self.graph.width if isinstance(self.graph.width, int) else 0
            return [self._no_rows(width)] if takes_rows else []
        return [found[ROWS] if found.keys() == {ROWS} else found]

    def _embed(self, module: str, micro_batch: int) -> None:
        """Run the `embed` of a module's first stage, if it has one and has not run."""
        if (module, micro_batch) in self.embedded or not self.resources.modules[module].embeds:
            return
        backward = self.schedule.module[module].backward
        with torch.profiler.record_function(f"{module} embedding"), torch.set_grad_enabled(backward):
            first: Any = self.resources.modules[module].stages[0]
            self.embedded[module, micro_batch] = first.embed(self._batch(micro_batch).inputs[module])

    def _backward(self, action: Action) -> None:
        key, call = _activation_key(action), self._call(action)
        outputs = (self.outputs if len(call) == 1 else self.called).pop(key, {})
        grads = {HIDDEN: self.received.pop(("B", key), None), LOSS: None}
        self._return_rows_early(action)
        for edge in self._leaving(action):
            names = self.graph.outputs_of(edge)
            if arrived := [self.row_grads.pop((edge, m)) for m in call if (edge, m) in self.row_grads]:
                whole = torch.cat(arrived) if len(arrived) > 1 else arrived[0]
                arrived.clear()  # Or they would stay beside it during the backward pass.
                for name, grad in zip(names, whole.chunk(len(names), dim=1), strict=True):
                    # Rows that several modules take have gradients from each.
                    grads[name] = grad if (other := grads.get(name)) is None else other + grad
        if key in self.in_parts:
            self._backward_in_parts(action, *self.in_parts[key], grads)
            del self.in_parts[key]  # The patches of all parts are on the device until here.
        else:
            self._before_run(action)
            self._backpropagate(action, outputs, grads, is_last=True)

    def _backpropagate(
        self, action: Action, outputs: Mapping[str, Tensor], grads: Mapping[str, Tensor | None], *, is_last: bool
    ) -> None:
        """`is_last`: whether no other part of the action's input follows."""
        if is_last and self.last_of_stage[action.module, action.stage] == self.position:
            self.before_last(*_activation_key(action)[:2])
        # Outputs of a frozen first stage require no gradient; rows that no module takes get none.
        names = [name for name, output in outputs.items() if output.requires_grad and name in grads]
        if names:
            torch.autograd.backward([outputs[name] for name in names], [grads[name] for name in names])

    def _backward_in_parts(
        self, action: Action, given: InParts, random_state: Any, grads: Mapping[str, Tensor | None]
    ) -> None:
        """Run each part forward once more, and back. `grads`: of the concatenated outputs."""
        hidden = self.inputs.get(_activation_key(action))
        each, starts = inputs_of_parts(self._model(action), given, hidden), dict.fromkeys(grads, 0)
        with torch.enable_grad(), self._random_state(random_state):
            for number, (part, inputs) in enumerate(zip(given.parts, each, strict=True), 1):
                is_last = number == len(given.parts)
                self._before_run(action, more=not is_last)
                outputs, own = self._outputs(action, part, inputs), dict(grads)
                for name, grad in grads.items():
                    if grad is not None and name in outputs:
                        own[name] = grad.narrow(0, starts[name], len(outputs[name]))
                        starts[name] += len(outputs[name])
                self._backpropagate(action, outputs, own, is_last=is_last)
                del outputs  # Or the next part would run beside them.
        if hidden is not None and hidden.requires_grad:
            hidden.grad = torch.cat([grad_of(leaf) for (leaf,) in each])

    # ------------------------------------------------------------------------------------------- pipelines

    def _send(self, action: Action) -> None:
        if self._module_input(action) is None:
            return
        key = _activation_key(action)
        tensor = grad_of(self.inputs.pop(key)) if action.kind == "B" else self._take(key, HIDDEN)
        found, expected = f"hidden states of {tensor.dtype}", str(self.graph.dtype)
        self._require(tensor.dtype == self.graph.dtype, action, found, expected)
        tensor = tensor.contiguous()
        if self.checks and action.kind != "B" and self.checks.is_new(link := self._link(action, self.rank)):
            self.checks.publish(f"{link} has", tensor.shape)
            self._require_shape(action, self.rank, tensor.shape, self.checks.published(f"{link} expects"))
        work = dist.isend(tensor, self._peer_rank(action), group=self._pipeline(action))
        assert work is not None, "this rank is in the group of its pipeline"
        self.sends.append((work, tensor, action))
        while self.sends and self.sends[0][0].is_completed():
            self.sends.popleft()

    def _irecv(self, action: Action) -> None:
        batch = self._module_input(action)
        if batch is None:
            return
        if action.kind != "B":
            shape = hidden_shape(self._model(action), batch)
            if self.checks and self.checks.is_new(f"{(link := self._link(action, self._peer_rank(action)))} expects"):
                self.checks.publish(f"{link} expects", tuple(shape))
            self._receive(action, shape)
            return
        # A gradient has the shape of its output, which may be computed only after the irecv.
        self.deferred[action.module].append(action)
        self._receive_deferred(action.module)

    def _receive_deferred(self, module: str) -> None:
        deferred = self.deferred[module]
        while deferred and _activation_key(deferred[0]) in self.hidden_shapes:
            action = deferred.popleft()
            self._receive(action, self.hidden_shapes[_activation_key(action)])

    def _receive(self, action: Action, shape: Sequence[int]) -> None:
        buffer = torch.empty(shape, dtype=self.graph.dtype, device=self.device)
        work = dist.irecv(buffer, self._peer_rank(action), group=self._pipeline(action))
        assert work is not None, "this rank is in the group of its pipeline"
        self.receives[action] = buffer, work

    def _wait(self, action: Action) -> None:
        posted = Action("irecv", action.kind, action.module, action.micro_batch, action.stage, action.peer)
        if self._module_input(action) is None:
            return
        assert posted in self.receives, f"{action} has no irecv"
        buffer, work = self.receives.pop(posted)
        sender = self._peer_rank(action)
        if self.checks and action.kind != "B" and self.checks.is_new(link := self._link(action, sender)):
            self._require_shape(action, sender, self.checks.published(f"{link} has"), buffer.shape)
        work.wait()
        self.received[action.kind, _activation_key(action)] = buffer

    def _require_shape(self, action: Action, sender: int, found: Sequence[int], expected: Sequence[int]) -> None:
        """Raise `UserError` unless hidden states fit the next stage's buffer."""
        shape = f"hidden states of shape {tuple(found)} from rank {sender}"
        wanted = f"{tuple(expected)}, the `hidden_shape` of the next stage"
        wrong = "`hidden_shape`, or what the stage before it returns"
        self._require(tuple(found) == tuple(expected), action, shape, wanted, wrong)

    def _link(self, action: Action, sender: int) -> str:
        """Name a transfer of hidden states between two stages, alike on both ranks."""
        stage = action.stage if action.op != "send" else action.peer
        return f"{action.module} {action.kind} {stage} {sender}"

    def _peer_rank(self, action: Action) -> int:
        return self.schedule.peer_rank(self.rank, action)

    def _pipeline(self, action: Action) -> dist.ProcessGroup:
        """The group of an action's link, one direction between two ranks."""
        use = use_of(self.schedule, action)
        assert isinstance(use, Link), f"{action} is no pipeline transfer"
        return self.resources.topology.pipelines[action.module][use.direction, use.sender]

    # ------------------------------------------------------------------------------------------- boundaries

    def _start(self, action: Action) -> None:
        edge, key = action.edge, _crossing(action)
        plan = self._batch(action.micro_batch).boundaries.get(edge)
        if plan is None or key in self.crossings:
            return
        communicator = self.resources.communicators[edge]
        if plan.point_to_point == self.schedule.collective[edge]:
            where = f"micro-batch {action.micro_batch}, boundary {edge}"
            found = f"a plan between ranks of which {'none' if plan.point_to_point else 'some'} hold and need rows"
            because = "the schedule would deadlock: ranks in both ownerships take part in both sides, even with no rows"
            fix = "let `Ownership`s name the ranks of the stage that rows leave, and of the one that they enter"
            expected = "one between the ranks of its two stages"
            raise UserError.at(where, found=found, expected=expected, because=because, fix=fix)
        if action.kind == "F":
            self.crossings[key] = communicator.start_forward(plan, self._encoded(action))
        else:
            rows = self.rows.pop((edge, action.micro_batch), None)
            grads = communicator.no_rows() if rows is None else rows.grad()
            if self.checks:
                self.checks.require_fit(edge, plan, grads)
            self.crossings[key] = communicator.start_backward(plan, grads)

    def _encoded(self, action: Action) -> Tensor:
        """This rank's rows that cross, outputs side by side; no rows on ranks that only receive."""
        key = action.module, self.schedule.stages_of(action.edge)[0], action.micro_batch
        if key not in self.outputs:
            return self.resources.communicators[action.edge].no_rows()
        rows = [self._take(key, name, action.edge) for name in self.graph.outputs_of(action.edge)]
        return rows[0] if len(rows) == 1 else torch.cat(rows, dim=1)

    def _take(self, key: ActivationKey, name: str, edge: Edge | None = None) -> Tensor:
        """An output that leaves the rank. The last use frees it if no gradient returns (recomputed or frozen)."""
        outputs = self.outputs[key]
        others = [e for e in self.schedule.leaving.get(key[:2], ()) if name in self.graph.outputs_of(e)]
        is_last = edge is None or edge == others[-1]
        output = outputs.pop(name) if is_last and not outputs[name].requires_grad else outputs[name]
        if not outputs:
            del self.outputs[key]
        return output.detach()

    def _finish(self, action: Action) -> None:
        crossing, edge = self.crossings.pop(_crossing(action), None), action.edge
        role = self.schedule.roles[self.schedule.role_index[self.rank]]
        (leaves, enters), stage = self.schedule.crosses(role, edge), self.schedule.stages_of(edge)[1]
        if action.kind == "F" and enters and stage == 0:
            self._embed(edge.target, action.micro_batch)
        if crossing is None:
            return
        arrived, key = crossing.wait(), (edge, action.micro_batch)
        if action.kind == "F" and enters:
            self.rows[key] = ReceivedRows.of(arrived, self.graph.outputs_of(edge), self.schedule.returns(edge))
        elif action.kind == "B" and leaves:
            self.row_grads[key] = arrived

    def _return_rows_early(self, action: Action) -> None:
        """If this rank's next crossing returns the gradients of rows that entered the stage, start it as soon as they
        are computed, during the backward.
        """
        following = early_start(self.schedule, self.actions, self.position)
        if following is None:
            return
        rows = self.rows.get((following.edge, action.micro_batch))
        if rows is not None:
            rows.when_gradients_are_computed(lambda: self._start(following))

    def _require_result(self, action: Action, outputs: Mapping[str, Tensor]) -> None:
        """Check the shapes of rows that cross."""
        for edge in self._leaving(action):
            plans = (self._batch(m).boundaries.get(edge) for m in self._call(action))
            if not (rows := [plan.forward.held for plan in plans if plan is not None]):
                continue
            expected = (sum(rows), self.graph.width_of(edge))
            for name in self.graph.outputs_of(edge):
                found = f"{name} of shape {tuple(outputs[name].shape)}"
                holds = f"{expected}, what this rank holds in the plan"
                self._require(outputs[name].shape == expected, action, found, holds)

    def _require(
        self, fits: bool, action: Action, found: str, expected: str, wrong: str = "what the model of the stage returns"
    ) -> None:
        """Raise `UserError` unless a model's output `fits`."""
        if not fits:
            where = f"micro-batch {action.micro_batch} of `{action.module}`, stage {action.stage}"
            raise UserError.at(where, found=found, expected=expected, fix=f"correct {wrong}")

    def _no_rows(self, width: int) -> Tensor:
        return torch.zeros(0, width, dtype=self.graph.dtype, device=self.device)


def _is_backward(action: Action) -> bool:
    return action.op == "run" and action.kind == "B"


def _activation_key(action: Action) -> ActivationKey:
    assert isinstance(action.stage, int), f"{action} has no stage"
    return action.module, action.stage, action.micro_batch


def _crossing(action: Action) -> CrossingKey:
    return action.kind, action.edge, action.micro_batch
