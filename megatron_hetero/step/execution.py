"""Executes one training step on one rank, as a loop over the rank's actions in a schedule. `schedule.actions` specifies
the actions, and `schedule.contract` the interface of the models.

Communication is explicit, not autograd's: tensors are detached on the sending rank and become leaves on the receiving
rank, so that every rank takes part in each collective even if it has no rows.

To overlap communication with computation, tokens are embedded before the rank waits for encoder rows, and gradients of
rows are sent as soon as they are computed, during the text module's backward pass.

One call of an encoder may compute several micro-batches. It then runs in the forward action of the first micro-batch,
and its backward pass in the backward action of the last one; the actions of the other micro-batches do nothing. All
these actions are in one turn of the encoder, in which no other action depends on the call.

An input in chunks (`InChunks`) saves memory: forward passes build no graph, and the backward pass of each chunk runs
directly after a second forward pass of that chunk.
"""

from __future__ import annotations

import contextlib
from collections import defaultdict, deque
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_hetero.base.errors import UserError
from megatron_hetero.layout.communicators import Link
from megatron_hetero.layout.graph import Edge
from megatron_hetero.layout.names import HIDDEN, ROWS
from megatron_hetero.schedule.actions import Action
from megatron_hetero.schedule.contract import (
    LOSS,
    METRICS,
    InChunks,
    MicroBatchInputs,
    StageOutput,
    StepResult,
    random_states,
    require_fits,
)
from megatron_hetero.schedule.gathering import stays_gathered
from megatron_hetero.schedule.program import Schedule, StageId, describe_action, early_start, use_of
from megatron_hetero.step.resources import (
    Activation,
    LiveMicroBatch,
    RankResources,
    ReceivedRows,
    grad_of,
    hidden_shape,
    inputs_of_chunks,
    joined_outputs,
    require_frozen,
    without_ddp,
    wrong_outputs,
)

SUMS = "the sums of gradients over ranks"


class StepExecution:
    """Executes one step on one rank.

    The first action that names a micro-batch loads it. A forward pass reads what a `wait` or `finish` has received, and
    stores outputs, which a `send` or `start` then sends. A backward pass reads received gradients and the outputs that
    have a graph; inputs are stored until their gradients have been sent. A `LiveMicroBatch` stores all these tensors
    and is dropped after the last action that names the micro-batch. `sends` has the tensors of unfinished sends.
    """

    def __init__(self, resources: RankResources, schedule: Schedule, load: Callable[[int], MicroBatchInputs]):
        self.resources, self.schedule, self.load = resources, schedule, load
        self.graph, self.checks, self.rank = resources.graph, resources.checks, resources.topology.rank
        self.device = resources.topology.platform.device
        self.optimizer = resources.optimizer if torch.is_grad_enabled() else None
        self.actions: Sequence[Action] = schedule.actions_of(self.rank) if self.rank in schedule.role_index else ()
        self.position = 0
        backward = {i: action for i, action in enumerate(self.actions) if action.op == "run" and action.kind == "B"}
        self.last_of_module = _last({i: action.module for i, action in backward.items()})
        self.last_of_stage = _last({i: action.place for i, action in backward.items()})
        self.last_of_micro_batch = _last({i: action.micro_batch for i, action in enumerate(self.actions)})
        self.live: dict[int, LiveMicroBatch] = {}
        # For each module and micro-batch, the range of micro-batches that one call of the module computes.
        self.calls: dict[tuple[str, int], range] = {}
        self.sends: deque[tuple[dist.Work, Tensor, Action]] = deque()
        # For each module, the irecv actions of gradients whose shape is not yet known, in order.
        self.deferred: defaultdict[str, deque[Action]] = defaultdict(deque)
        # The sums of losses and metrics on this rank, by module.
        self.losses = dict[str, Tensor]()
        self.metrics = {name: dict[str, Tensor]() for name in resources.topology.layouts}
        # The `run` actions after which the weights of a gathered stage stay gathered.
        self.stays_gathered = set[Action]()
        for module, zero in {module: stages[0].zero for (module, _), stages in resources.gathered.items()}.items():
            self.stays_gathered.update(stays_gathered(self.actions, schedule.module[module], zero))

    def run(self) -> StepResult:
        """Execute all actions of this rank. Returns the sums of losses and metrics on this rank."""
        handlers = {
            "run": self._run, "send": self._send, "irecv": self._irecv, "wait": self._wait, "start": self._start,
            "finish": self._finish,
        }  # fmt: skip
        for gathered in chain.from_iterable(self.resources.gathered.values()):
            gathered.before_run(gathered.zero == 2)  # The `embed` method may read weights before the first run.
        for position, action in enumerate(self.actions):
            self.position = position
            with self._watched(action), self.resources.watch.lap(self._timed_as(action), str(action)):
                # A module that is absent from the micro-batch sends and receives nothing.
                if action.op not in ("send", "irecv", "wait") or self._module_input(action) is not None:
                    handlers[action.op](action)
            if position in self.last_of_module:
                self._start_sums(action.module)
            if position in self.last_of_micro_batch:
                self.live.pop(action.micro_batch, None)
        for work, _, action in self.sends:
            with self._watched(action):
                work.wait()
        losses = [*self.losses.values()] or [torch.zeros((), device=self.device)]
        return StepResult(losses[0] if len(losses) == 1 else torch.stack(losses).sum(), self.losses, self.metrics)

    def _start_sums(self, module: str) -> None:
        """Begin to sum the module's complete gradients over ranks, even if this rank computed no gradient."""
        if self.optimizer is not None:
            with self.resources.watchdog.doing(lambda: f"{SUMS}, with all other ranks,"):
                self.optimizer.start_sums(module)

    @contextlib.contextmanager
    def _watched(self, action: Action) -> Iterator[None]:
        """Report the action to the watchdog, and name it in a note on each `RuntimeError` raised inside."""
        # The watchdog stores the description until the device has executed the action: it must not refer to tensors.
        description = partial(describe_action, self.schedule, self.rank, action)
        with self.resources.watchdog.doing(description):
            try:
                yield
            except RuntimeError as error:
                error.add_note(f"rank {self.rank} was in {description()} when this happened")
                raise

    def _timed_as(self, action: Action) -> str:
        """Return the stopwatch category of an action: its module, `boundary` or `pipeline`."""
        if action.op == "run":
            return action.module
        return "boundary" if action.op in ("start", "finish") else "pipeline"

    def _micro_batch(self, number: int) -> LiveMicroBatch:
        """Return the state of a micro-batch on this rank. The first access loads the micro-batch."""
        if number not in self.live:
            batch = self.load(number)
            require_fits(number, batch, self.schedule)
            self.live[number] = LiveMicroBatch(batch)
            for module, call in batch.calls.items():
                self.calls.update(((module, m), call) for m in call)
        return self.live[number]

    def _activation(self, action: Action, micro_batch: int | None = None) -> Activation:
        """Return the tensors that the stage of an action stores for `micro_batch`, by default the action's."""
        return self._micro_batch(action.micro_batch if micro_batch is None else micro_batch).stages[action.place]

    def _call(self, action: Action) -> range:
        """Return the range of micro-batches that one model call computes together, including the action's."""
        m = action.micro_batch
        return self.calls.get((action.module, m), range(m, m + 1))

    def _module_input(self, action: Action) -> Any:
        """Return the input of an action's module; None if the micro-batch has no input for the module."""
        return self._micro_batch(action.micro_batch).batch.inputs.get(action.module)

    def _model(self, action: Action) -> Any:
        return self.resources.modules[action.module].stages[action.own_stage]

    def _is_last_stage(self, action: Action) -> bool:
        return action.stage == self.schedule.module[action.module].stages - 1

    # ------------------------------------------------------------------------------------------------ work

    def _run(self, action: Action) -> None:
        runs = self._module_input(action) is not None
        if action.kind == "B":
            call = self._call(action)
            if len(call) > 1:
                runs = action.micro_batch == call[-1]
            if runs:
                self._backward(action)
        elif runs:
            self._before_run(action)
            self._forward(action)

    def _before_run(self, action: Action, *, more: bool = False) -> None:
        """Notify gathered stages of a run. `more`: whether other chunks of the input follow in the same action."""
        for gathered in self.resources.gathered.get(action.place, ()):
            last = replace(action, micro_batch=self._call(action)[-1])
            gathered.before_run(last in self.stays_gathered or (more and gathered.zero == 2))

    def _forward(self, action: Action) -> None:
        module, given = self.schedule.module[action.module], self._module_input(action)
        activation = self._activation(action)
        goes_back = module.backward and (action.kind == "R" or not module.recomputes)
        keeps = goes_back and not isinstance(given, InChunks)
        # A recomputed forward pass must draw the same random numbers as the first one.
        random_state = contextlib.nullcontext() if action.kind == "F" else self._random_state(activation.random_state)
        activation.random_state = self._read_random_state() if action.kind == "F" and module.recomputes else None
        with torch.set_grad_enabled(keeps), random_state:
            inputs = self._inputs(action, goes_back=goes_back)
            if isinstance(given, InChunks):
                outputs = self._forward_in_chunks(action, given, inputs, goes_back=goes_back)
            else:
                outputs = self._outputs(action, given, inputs)
        if outputs is not None:
            self._store(action, inputs, outputs, keeps=keeps)

    def _inputs(self, action: Action, *, goes_back: bool) -> list[Any]:
        """Return the arguments that a stage's model takes after the module's input: hidden states or embedded tokens,
        and rows. `goes_back`: whether a backward pass follows.
        """
        inputs, activation = [], self._activation(action)
        if action.stage != 0:
            trains = self.resources.modules[action.module].trains_before_last
            inputs.append(activation.received.pop(action.kind).requires_grad_(goes_back and trains))
            activation.hidden = inputs[0] if goes_back else None
        else:
            self._embed(action.module, action.micro_batch)
            if activation.embedded is not None:
                inputs.append(activation.embedded)
                activation.embedded = None
        return inputs + self._rows_of_stage(action)

    def _forward_in_chunks(
        self, action: Action, given: InChunks, inputs: Sequence[Any], *, goes_back: bool
    ) -> dict[str, Tensor] | None:
        """Run each chunk forward. Returns the joined outputs; None if only the backward pass needs outputs."""
        random_state = self._read_random_state() if goes_back else None
        outputs = None
        if action.kind == "F" or not self._is_last_stage(action):
            arguments = inputs_of_chunks(self._model(action), given, next(iter(inputs), None))
            outputs = joined_outputs(
                [self._outputs(action, chunk, more) for chunk, more in zip(given.chunks, arguments, strict=True)]
            )
        if goes_back:
            self._activation(action, self._call(action)[-1]).in_chunks = given, random_state
        return outputs

    def _store(self, action: Action, inputs: Sequence[Any], outputs: dict[str, Tensor], *, keeps: bool) -> None:
        """Add the loss of a forward pass to the module's sum, and store the outputs of the stage. `keeps`: whether the
        outputs have a graph for the backward pass.
        """
        self._require_result(action, outputs)
        if action.kind == "R" and not keeps:
            outputs = {HIDDEN: outputs[HIDDEN]}  # The first forward pass has already sent the rows.
        if LOSS in outputs:
            if action.kind == "F":
                loss = outputs[LOSS].detach()
                if action.module in self.losses:
                    self.losses[action.module].add_(loss)
                else:
                    self.losses[action.module] = loss.to(torch.float32, copy=True)
            if keeps and self.checks and not outputs[LOSS].requires_grad:
                require_frozen(*action.place, self._model(action), inputs, outputs[LOSS])
            if not keeps:  # No backward pass starts from this loss: evaluation, or the forward pass is recomputed.
                del outputs[LOSS]
        activation = self._activation(action)
        if len(call := self._call(action)) > 1:
            self._split_call(action, outputs, call, keeps=keeps)
        else:
            activation.outputs = outputs
        if HIDDEN in outputs:
            activation.hidden_shape = outputs[HIDDEN].shape
        self._receive_deferred(action.module)

    def _outputs(self, action: Action, given: Any, inputs: Sequence[Any]) -> dict[str, Tensor]:
        """Call the model of a stage, check the outputs and return them by name."""
        with without_ddp(self.rank, *action.place) if self.checks else contextlib.nullcontext():
            output: StageOutput = self._model(action)(given, *inputs)
        is_last = self._is_last_stage(action)
        expected = [*([] if is_last else [HIDDEN]), *self._crossing_names(action)] or [LOSS]
        # A module that feeds other modules may also return a loss.
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
            self._require(value.dim() == 0, action, found, "a scalar, a sum over this rank's tokens")
            sums[name] = sums[name] + value.detach() if name in sums else value.detach().clone()

    def _split_call(self, action: Action, outputs: Mapping[str, Tensor], call: range, *, keeps: bool) -> None:
        """Split the rows of a call into views, one for each micro-batch. If `keeps`, also store the whole outputs with
        their graph until the backward pass of the last micro-batch.
        """
        if keeps:
            self._activation(action, call[-1]).called = dict(outputs)
        first = 0
        for m in call:
            boundaries = self._micro_batch(m).batch.rows
            if plans := [plan for plan in map(boundaries.get, self._leaving(action)) if plan]:
                rows = slice(first, first + plans[0].forward.held)
                crossing = self._crossing_names(action)
                self._activation(action, m).outputs = {name: outputs[name].detach()[rows] for name in crossing}
                first = rows.stop

    def _crossing_names(self, action: Action) -> list[str]:
        """Return the names of the outputs that an action's stage sends to other modules."""
        return list(dict.fromkeys(name for edge in self._leaving(action) for name in self.graph.outputs_of(edge)))

    def _leaving(self, action: Action) -> tuple[Edge, ...]:
        """Return the edges of the module graph that leave the stage of an action."""
        return self.schedule.leaving.get(action.place, ())

    def _read_random_state(self) -> Any:
        return random_states(self.resources.topology.platform)[0]()

    @contextlib.contextmanager
    def _random_state(self, state: Any) -> Iterator[None]:
        """Set the random state to `state` inside the context, and restore the previous state after it."""
        read, write = random_states(self.resources.topology.platform)
        outside = read()
        write(state)
        try:
            yield
        finally:
            write(outside)

    def _rows_of_stage(self, action: Action) -> list[Tensor | dict[str, Tensor]]:
        """Return the rows that enter a stage, as a list of zero or one arguments of the stage's model."""
        edges = self.schedule.entering.get(action.place, ())
        if not edges:
            # The text module's first stage has an argument for rows even if no encoder sends rows to it.
            takes_rows = action.stage == 0 and self.schedule.module[action.module].style == "text"
            width = self.graph.width if isinstance(self.graph.width, int) else 0
            return [self._no_rows(width)] if takes_rows else []
        rows_by_name = defaultdict[str, list[Tensor]](list)
        entered = self._micro_batch(action.micro_batch).rows
        for edge in edges:
            # Received rows are stored until their gradients are returned, if the edge returns gradients.
            received = entered.get(edge) if self.schedule.returns(edge) else entered.pop(edge, None)
            leaves = {} if received is None else received.leaves
            for name in self.graph.outputs_of(edge):
                rows_by_name[name].append(leaves[name] if name in leaves else self._no_rows(self.graph.width_of(edge)))
        rows = {name: each[0] if len(each) == 1 else torch.cat(each) for name, each in rows_by_name.items()}
        return [rows[ROWS] if rows.keys() == {ROWS} else rows]

    def _embed(self, module: str, number: int) -> None:
        """Call the `embed` method of a module's first stage, if it has one and has not run for this micro-batch."""
        micro_batch = self._micro_batch(number)
        activation = micro_batch.stages[module, 0]
        if activation.embedded is not None or not self.resources.modules[module].embeds:
            return
        backward = self.schedule.module[module].backward
        with torch.profiler.record_function(f"{module} embedding"), torch.set_grad_enabled(backward):
            first: Any = self.resources.modules[module].stages[0]
            activation.embedded = first.embed(micro_batch.batch.inputs[module])

    def _backward(self, action: Action) -> None:
        activation, call = self._activation(action), self._call(action)
        outputs = activation.outputs if len(call) == 1 else activation.called
        activation.outputs, activation.called = {}, {}
        grads = {HIDDEN: activation.received.pop("B", None), LOSS: None}
        self._return_rows_early(action)
        row_grads = activation.row_grads
        for edge in self._leaving(action):
            names = self.graph.outputs_of(edge)
            if arrived := [row_grads.pop((edge, m)) for m in call if (edge, m) in row_grads]:
                whole = torch.cat(arrived) if len(arrived) > 1 else arrived[0]
                arrived.clear()  # Free the gradients: they would use memory during the backward pass.
                for name, grad in zip(names, whole.chunk(len(names), dim=1), strict=True):
                    # Rows that are sent to several modules receive a gradient from each.
                    grads[name] = grad if (other := grads.get(name)) is None else other + grad
        if activation.in_chunks is not None:
            self._backward_in_chunks(action, *activation.in_chunks, grads)
            activation.in_chunks = None  # Free the patches of all chunks, which are on the device.
        else:
            self._before_run(action)
            self._backpropagate(action, outputs, grads, is_last=True)

    def _backpropagate(
        self, action: Action, outputs: Mapping[str, Tensor], grads: Mapping[str, Tensor | None], *, is_last: bool
    ) -> None:
        """Run autograd from the outputs that have a graph. `is_last`: whether this is the last chunk of the action."""
        if is_last and self.position in self.last_of_stage and self.optimizer is not None:
            self.optimizer.expect(*action.place)
        # Outputs of a frozen first stage require no gradient, and rows that no module uses have no gradient.
        names = [name for name, output in outputs.items() if output.requires_grad and name in grads]
        if names:
            torch.autograd.backward([outputs[name] for name in names], [grads[name] for name in names])

    def _backward_in_chunks(
        self, action: Action, given: InChunks, random_state: Any, grads: Mapping[str, Tensor | None]
    ) -> None:
        """Recompute and back-propagate each chunk. `grads`: gradients of the concatenated outputs, by name."""
        hidden = self._activation(action).hidden
        arguments = inputs_of_chunks(self._model(action), given, hidden)
        starts = dict.fromkeys(grads, 0)
        with torch.enable_grad(), self._random_state(random_state):
            for number, (chunk, inputs) in enumerate(zip(given.chunks, arguments, strict=True), 1):
                is_last = number == len(given.chunks)
                self._before_run(action, more=not is_last)
                outputs, chunk_grads = self._outputs(action, chunk, inputs), dict(grads)
                for name, grad in grads.items():
                    if grad is not None and name in outputs:
                        chunk_grads[name] = grad.narrow(0, starts[name], len(outputs[name]))
                        starts[name] += len(outputs[name])
                self._backpropagate(action, outputs, chunk_grads, is_last=is_last)
                del outputs  # Free the outputs: they would use memory while the next chunk runs.
        if hidden is not None and hidden.requires_grad:
            hidden.grad = torch.cat([grad_of(leaf) for (leaf,) in arguments])

    # ------------------------------------------------------------------------------------------- pipelines

    def _send(self, action: Action) -> None:
        activation = self._activation(action)
        if action.kind != "B":
            tensor = self._take(action.place, activation, HIDDEN)
        else:
            assert activation.hidden is not None, f"{action} has no backward pass before it"
            tensor, activation.hidden = grad_of(activation.hidden), None
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
        if action.kind != "B":
            shape = hidden_shape(self._model(action), self._module_input(action))
            if self.checks and self.checks.is_new(f"{(link := self._link(action, self._peer_rank(action)))} expects"):
                self.checks.publish(f"{link} expects", tuple(shape))
            self._receive(action, shape)
            return
        # A gradient has the shape of the output, which this rank may compute only after this irecv action.
        self.deferred[action.module].append(action)
        self._receive_deferred(action.module)

    def _receive_deferred(self, module: str) -> None:
        deferred = self.deferred[module]
        while deferred and (shape := self._activation(deferred[0]).hidden_shape) is not None:
            self._receive(deferred.popleft(), shape)

    def _receive(self, action: Action, shape: Sequence[int]) -> None:
        buffer = torch.empty(shape, dtype=self.graph.dtype, device=self.device)
        work = dist.irecv(buffer, self._peer_rank(action), group=self._pipeline(action))
        assert work is not None, "this rank is in the group of its pipeline"
        self._activation(action).receives[action.kind] = buffer, work

    def _wait(self, action: Action) -> None:
        activation = self._activation(action)
        assert action.kind in activation.receives, f"{action} has no irecv"
        buffer, work = activation.receives.pop(action.kind)
        sender = self._peer_rank(action)
        if self.checks and action.kind != "B" and self.checks.is_new(link := self._link(action, sender)):
            self._require_shape(action, sender, self.checks.published(f"{link} has"), buffer.shape)
        work.wait()
        activation.received[action.kind] = buffer

    def _require_shape(self, action: Action, sender: int, found: Sequence[int], expected: Sequence[int]) -> None:
        """Raise `UserError` unless sent hidden states have the shape of the next stage's buffer."""
        shape = f"hidden states of shape {tuple(found)} from rank {sender}"
        wanted = f"{tuple(expected)}, the `hidden_shape` of the next stage"
        wrong = "`hidden_shape`, or what the stage before it returns"
        self._require(tuple(found) == tuple(expected), action, shape, wanted, wrong)

    def _link(self, action: Action, sender: int) -> str:
        """Return a name for the transfer of hidden states between two stages, equal on both ranks."""
        stage = action.stage if action.op != "send" else action.peer
        return f"{action.module} {action.kind} {stage} {sender}"

    def _peer_rank(self, action: Action) -> int:
        return self.schedule.peer_rank(self.rank, action)

    def _pipeline(self, action: Action) -> dist.ProcessGroup:
        """Return the process group of an action's transfers: one direction between two ranks."""
        use = use_of(self.schedule, action)
        assert isinstance(use, Link), f"{action} is no pipeline transfer"
        return self.resources.topology.pipelines[action.module][use.direction, use.sender]

    # ------------------------------------------------------------------------------------------- boundaries

    def _start(self, action: Action) -> None:
        edge, micro_batch = action.edge, self._micro_batch(action.micro_batch)
        plan, crossings = micro_batch.batch.rows.get(edge), micro_batch.crossings
        if plan is None or (action.kind, edge) in crossings:
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
            crossings["F", edge] = communicator.start_forward(plan, self._encoded(edge, micro_batch))
        else:
            rows = micro_batch.rows.pop(edge, None)
            grads = communicator.no_rows() if rows is None else rows.grad()
            if self.checks:
                self.checks.require_fit(edge, plan, grads)
            crossings["B", edge] = communicator.start_backward(plan, grads)

    def _encoded(self, edge: Edge, micro_batch: LiveMicroBatch) -> Tensor:
        """Return the rows that this rank sends along an edge, outputs concatenated along dim 1; empty on receivers."""
        place = edge.source, self.schedule.stages_of(edge)[0]
        activation = micro_batch.stages[place]
        if not activation.outputs:
            return self.resources.communicators[edge].no_rows()
        rows = [self._take(place, activation, name, edge) for name in self.graph.outputs_of(edge)]
        return rows[0] if len(rows) == 1 else torch.cat(rows, dim=1)

    def _take(self, place: StageId, activation: Activation, name: str, edge: Edge | None = None) -> Tensor:
        """Return an output to send, detached. The last use removes an output without a graph (frozen, or recomputed
        later) from the stored outputs.
        """
        outputs = activation.outputs
        others = [e for e in self.schedule.leaving.get(place, ()) if name in self.graph.outputs_of(e)]
        is_last = edge is None or edge == others[-1]
        output = outputs.pop(name) if is_last and not outputs[name].requires_grad else outputs[name]
        return output.detach()

    def _finish(self, action: Action) -> None:
        edge, micro_batch = action.edge, self._micro_batch(action.micro_batch)
        crossing = micro_batch.crossings.pop((action.kind, edge), None)
        role = self.schedule.roles[self.schedule.role_index[self.rank]]
        (leaves, enters), (left, entered) = self.schedule.crosses(role, edge), self.schedule.stages_of(edge)
        if action.kind == "F" and enters and entered == 0:
            self._embed(edge.target, action.micro_batch)
        if crossing is None:
            return
        arrived = crossing.wait()
        if action.kind == "F" and enters:
            micro_batch.rows[edge] = ReceivedRows.of(arrived, self.graph.outputs_of(edge), self.schedule.returns(edge))
        elif action.kind == "B" and leaves:
            last = self._micro_batch(self._call(action)[-1])
            last.stages[edge.source, left].row_grads[edge, action.micro_batch] = arrived

    def _return_rows_early(self, action: Action) -> None:
        """If this rank's next crossing returns gradients of rows that entered the stage, start the crossing as soon as
        the backward pass has computed these gradients.
        """
        following = early_start(self.schedule, self.actions, self.position)
        entered = self._micro_batch(action.micro_batch).rows
        if following is not None and following.edge in entered:
            entered[following.edge].when_gradients_are_computed(lambda: self._start(following))

    def _require_result(self, action: Action, outputs: Mapping[str, Tensor]) -> None:
        """Check the shapes of the rows that a stage sends to other modules. Raises `UserError`."""
        for edge in self._leaving(action):
            plans = (self._micro_batch(m).batch.rows.get(edge) for m in self._call(action))
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
        """Raise `UserError` for a model's output unless `fits`. `wrong`: what the user should correct."""
        if not fits:
            where = f"micro-batch {action.micro_batch} of `{action.module}`, stage {action.stage}"
            raise UserError.at(where, found=found, expected=expected, fix=f"correct {wrong}")

    def _no_rows(self, width: int) -> Tensor:
        return torch.zeros(0, width, dtype=self.graph.dtype, device=self.device)


def _last(keys: Mapping[int, Hashable]) -> frozenset[int]:
    """Return the last position of each distinct key. `keys`: keys by position, in ascending order."""
    return frozenset({key: position for position, key in keys.items()}.values())
