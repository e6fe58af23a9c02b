"""Builds schedules. The cases, of which a schedule has one or several:

  1. *Colocated, text pp:1*: `waves` of one micro-batch: encode, cross, text forward and backward, cross back, encoder
     backward.
  2. *Colocated, text pp > 1*: every rank encodes.
       waves      encode and cross W micro-batches; one 1F1B of the text over all. In it all ranks take turns at the
                  encoder whenever the first stage needs rows of the next W: what the first stage has run backward
                  crosses back, its encoder backward is run, and the next W are encoded and cross. Encoder activations
                  of W + pp - 1 micro-batches live, since the pipeline is not drained for it.
       recompute  encode and cross all, keeping rows only; 1F1B over all; then per micro-batch forward again and
                  backward. Encoder activations of one micro-batch live; a second forward is paid for one pipeline fill.
  3. *Disjoint*, `ahead`: the first text stage's order of forwards and backwards sets the pace. When it takes the rows
     of micro-batch m, the encoder turns to the forward of m + 1 + run_ahead; when it has run a backward, the encoder
     runs the same. That makes the encoder the stage before the first in 1F1B. Several encoders run side by side. Rows
     of one micro-batch at a time are on their way: those that are encoded further ahead wait on the encoder's ranks.
  4. *Mixed*: as 2, on ranks that hold only one of the modules too; encoders whose ranks are apart from all of these
     run as in 3.
  5. Virtual stages: the text's 1F1B is the interleaved one, in all of the above. The pipeline drains between waves.

When all ranks turn to the encoder, a stage waits for those that are further behind. So each turns to it when it would
have come as far as it has when the first stage does, if there were no encoder: stage s just before the forward of a
micro-batch that comes s // 3 earlier, where a backward takes twice as long as a forward. For pp:4, waves of four and
micro-batch 4, the first of its wave (E: the encoder's turn; numbers say which micro-batches are run backward, and
forward):

    stage 0   F0 F1 F2 F3 B0 E F4 B1          E: backward of 0, forward of 4 to 7
    stage 1   F0 F1 F2 B0 F3 B1 E F4 B2
    stage 2   F0 F1 B0 F2 B1 F3 B2 E F4 B3
    stage 3   F0 B0 F1 B1 F2 B2 E F3 B3

An encoder's own pipeline stages follow each other by one micro-batch.

Why no order deadlocks. In a turn of the encoder (return, encode) all ranks walk through one list, each leaving out what
it has no part in, and nothing in the list needs what comes later. The turns follow one another on all ranks, and what
a stage runs before a turn needs only what others run before it: a stage turns at the same forward as the stage before
it, or at one that comes one earlier. What runs
ahead walks through the first text stage's list, one step behind in what it receives and ahead in what it gives. On
NCCL, what is posted early stands before other things in the queue of its communicator, and where the streams of a GPU
share one hardware queue (CUDA_DEVICE_MAX_CONNECTIONS=1, as Megatron wants) what stands behind it there keeps the GPU
from everything issued later. So no more is on its way than one thing after another, and `Schedule.check` proves
for each schedule that it ends even so.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise, product

from megatron_hetero.errors import UserError
from megatron_hetero.layout.layout import Layout
from megatron_hetero.schedule.actions import Action, Kind, finish, run, start
from megatron_hetero.schedule.orders import Work, pipeline_order
from megatron_hetero.schedule.program import Module, Role, Schedule, find_roles
from megatron_hetero.schedule.settings import ScheduleSettings, resolve_settings, sharing_encoders
from megatron_hetero.schedule.transfers import with_transfers


def build_schedule(
    layouts: Mapping[str, Layout],
    micro_batches: int,
    settings: ScheduleSettings | None = None,
    *,
    text: str = "text",
    forward_only: Collection[str] = (),
) -> Schedule:
    """The schedule of a step.

    Args:
        layouts: of all modules, by name; those other than `text` are encoders that feed it.
        micro_batches: how many the step has.
        settings: see `ScheduleSettings`.
        text: the name of the text module.
        forward_only: modules without a backward pass: frozen encoders, or all modules in an evaluation.

    Raises:
        UserError: the settings do not fit the layouts.
    """
    settings = resolve_settings(settings or ScheduleSettings(), layouts, micro_batches, text=text)
    modules = _modules(layouts, settings, text, forward_only)
    empty = Schedule(modules, micro_batches, find_roles(modules))
    plan = _Plan(empty, settings)
    orders = [list(_order(plan, role)) for role in empty.roles]
    return replace(empty, roles=with_transfers(empty, orders))


def _modules(
    layouts: Mapping[str, Layout], settings: ScheduleSettings, text: str, forward_only: Collection[str]
) -> tuple[Module, ...]:
    _require_forward_only_fits(layouts, text, forward_only)
    sharing = sharing_encoders(layouts, text)

    def encoder(name: str) -> Module:
        backward = name not in forward_only
        if name not in sharing:
            return Module(name, layouts[name], "ahead", settings.run_ahead or 0, backward=backward)
        if settings.kind == "recompute":
            return Module(name, layouts[name], "recompute", backward=backward)
        return Module(name, layouts[name], "waves", settings.waves or 1, backward=backward)

    last = Module(text, layouts[text], "text", virtual=settings.virtual_stages, backward=text not in forward_only)
    return *(encoder(name) for name in layouts if name != text), last


def _require_forward_only_fits(layouts: Mapping[str, Layout], text: str, forward_only: Collection[str]) -> None:
    if unknown := [name for name in forward_only if name not in layouts]:
        found, expected = f"`{unknown[0]}`", f"some of {', '.join(layouts)}"
        raise UserError.at("forward_only", found=found, expected=expected, fix="name modules that have a layout")
    if text in forward_only and len(set(forward_only)) < len(layouts):
        raise UserError.at(
            "forward_only",
            found=f"`{text}` without {', '.join(f'`{name}`' for name in layouts if name not in forward_only)}",
            expected="all modules",
            because=f"encoders get their gradients through `{text}`",
            fix="name all modules, or leave it out (its parameters may be frozen all the same)",
        )


@dataclass(frozen=True, eq=False)
class _Plan:
    """What the orders of all roles have in common."""

    schedule: Schedule
    settings: ScheduleSettings

    @property
    def text(self) -> Module:
        return self.schedule.text

    @property
    def batches(self) -> int:
        return self.schedule.micro_batches

    @cached_property
    def ahead(self) -> tuple[Module, ...]:
        """Encoders with ranks of their own."""
        return tuple(e for e in self.schedule.encoders if e.style == "ahead")

    @cached_property
    def sharing(self) -> tuple[Module, ...]:
        """Encoders that take turns with the text module."""
        return tuple(e for e in self.schedule.encoders if e.style != "ahead")

    @cached_property
    def run_ahead(self) -> int:
        return self.settings.run_ahead or 0

    @cached_property
    def waves(self) -> list[range]:
        """The micro-batches of each wave."""
        size = self.settings.waves if self.sharing and self.settings.waves else self.batches
        return [range(first, min(first + size, self.batches)) for first in range(0, self.batches, size)]

    @cached_property
    def turns(self) -> list[tuple[Sequence[int], Sequence[int]]]:
        """For each turn of the encoders that share ranks with the text, after the first encoding: the micro-batches
        that return, and those that are encoded.
        """
        in_flight = self.schedule.in_flight_between_waves
        ends = [max(0, wave[0] - in_flight) for wave in self.waves[1:]] + [self.batches]
        returned = [range(*pair) for pair in pairwise([0, *ends])]
        return list(zip(returned, [*self.waves[1:], range(0)], strict=True))

    @cached_property
    def pace(self) -> list[Work]:
        """What the first stage of the text runs, in order."""
        return [work for part in _text_parts(self, 0) for work in part if work.stage == 0]

    @property
    def starts_back_early(self) -> bool:
        """Whether gradients start to cross back to encoders that take turns with the text as soon as they are there.

        With stages of the text the other ranks cannot take part before the end of their wave. The communication that
        waits for them would gain nothing meanwhile, and may even keep a GPU from going on with the text, where its
        streams share a queue (CUDA_DEVICE_MAX_CONNECTIONS).
        """
        return self.text.layout.pp == 1

    def start(self, kind: Kind, encoder: Module, micro_batch: int) -> Action:
        return start(kind, encoder.name, self.text.name, micro_batch)

    def finish(self, kind: Kind, encoder: Module, micro_batch: int) -> Action:
        return finish(kind, encoder.name, self.text.name, micro_batch)


def _stage(role: Role, module: Module) -> int | None:
    """The (first) stage of `module` that the role holds."""
    return next((stage for name, stage in role.held_stages if name == module.name), None)


def _order(plan: _Plan, role: Role) -> Iterator[Action]:
    """What a role runs and crosses, without the transfers between stages."""
    if any(_stage(role, encoder) is not None for encoder in plan.ahead):
        yield from _ahead_order(plan, role)
        return
    is_first = _stage(role, plan.text) == 0
    if is_first and plan.run_ahead:  # Rows of the first micro-batch may come at any time.
        yield from (plan.start("F", encoder, 0) for encoder in plan.ahead)
    yield from _encode(plan, role, plan.waves[0])
    for works, (returned, encoded) in zip(_text_parts(plan, _stage(role, plan.text)), plan.turns, strict=True):
        yield from _text(plan, works)
        yield from _return(plan, role, returned)
        yield from _encode(plan, role, encoded)
    if is_first:
        last = range(max(0, plan.batches - 1 - plan.run_ahead), plan.batches)
        yield from (plan.finish("B", encoder, m) for m in last for encoder in plan.ahead if encoder.backward)


# ------------------------------------------------------------------------- modules that share ranks: waves


def _encode(plan: _Plan, role: Role, wave: Sequence[int]) -> Iterator[Action]:
    """Forward and crossing of a wave. In step k stage i runs micro-batch k - i; the rows of micro-batch m leave in the
    step in which the last stage has run it, and have a step's time to arrive.
    """
    for step in range(len(wave) + max((e.stages for e in plan.sharing), default=0)):
        for encoder in plan.sharing:
            stage, last = _stage(role, encoder), encoder.stages - 1
            crosses = any(plan.schedule.crosses(role, encoder.name))
            if stage is not None:
                yield from (run("F", encoder.name, stage, m) for m in _at(wave, step - stage))
            if crosses:
                yield from (plan.start("F", encoder, m) for m in _at(wave, step - last))
                yield from (plan.finish("F", encoder, m) for m in _at(wave, step - last - 1))


def _return(plan: _Plan, role: Role, wave: Sequence[int]) -> Iterator[Action]:
    """Crossing back and backward of a wave. In step k the gradients of micro-batch k leave, those of k - 1 arrive, and
    stage i runs the backward of micro-batch k - 1 less the number of stages after it. With `recompute` the forward is
    run again, stage after stage, so that the last stage has it when the gradients arrive.
    """
    encoders = [encoder for encoder in plan.sharing if encoder.backward]
    if plan.starts_back_early and _stage(role, plan.text) != 0:  # As the text's ranks have done.
        for m, encoder in product(wave, encoders):
            if any(plan.schedule.crosses(role, encoder.name)):
                yield plan.start("B", encoder, m)
    for step in range(len(wave) + 2 * max((e.stages for e in encoders), default=0)):
        for encoder in encoders:
            stage, last = _stage(role, encoder), encoder.stages - 1
            crosses, again = any(plan.schedule.crosses(role, encoder.name)), last if encoder.recomputes else 0
            if crosses and not plan.starts_back_early:
                yield from (plan.start("B", encoder, m) for m in _at(wave, step - again))
            if stage is not None and encoder.recomputes:
                yield from (run("R", encoder.name, stage, m) for m in _at(wave, step - 1 - stage))
            if crosses:
                yield from (plan.finish("B", encoder, m) for m in _at(wave, step - 1 - again))
            if stage is not None:
                yield from (run("B", encoder.name, stage, m) for m in _at(wave, step - 1 - again - (last - stage)))


def _at(wave: Sequence[int], index: int) -> Sequence[int]:
    """The micro-batch of that index in the wave, if there is one."""
    return wave[index : index + 1] if index >= 0 else ()


def _text_parts(plan: _Plan, stage: int | None) -> list[list[Work]]:
    """What the ranks of a (first) stage of the text run before each turn of the encoders; nothing without a stage."""
    if stage is None:
        return [[] for _ in plan.turns]
    if plan.text.virtual > 1:
        return [pipeline_order(plan.text, stage, wave) for wave in plan.waves]
    works = pipeline_order(plan.text, stage, range(plan.batches))
    cuts = [works.index(Work("F", stage, max(0, wave[0] - stage // 3))) for wave in plan.waves[1:]]
    return [works[first:last] for first, last in pairwise([0, *cuts, len(works)])]


def _text(plan: _Plan, works: Sequence[Work]) -> Iterator[Action]:
    """Work of the text module, with what its first stage receives and sends back."""
    for work in works:
        if work.stage == 0 and work.kind == "F":
            yield from _take_rows(plan, work.micro_batch)
        yield run(work.kind, plan.text.name, work.stage, work.micro_batch)
        if work.stage == 0 and work.kind == "B":
            yield from _send_gradients(plan, work.micro_batch)


def _take_rows(plan: _Plan, m: int) -> Iterator[Action]:
    """Take the rows of encoders that run ahead. Being ready to receive rows is what lets the encoder go on, so that
    without run-ahead it must not happen before they are wanted; else the next rows may arrive during the forward.
    """
    if not plan.run_ahead:
        yield from (plan.start("F", encoder, m) for encoder in plan.ahead)
    yield from (plan.finish("F", encoder, m) for encoder in plan.ahead)
    if plan.run_ahead and m + 1 < plan.batches:
        yield from (plan.start("F", encoder, m + 1) for encoder in plan.ahead)


def _send_gradients(plan: _Plan, m: int) -> Iterator[Action]:
    """Let the gradients of rows go back. They are waited for so late that encoders that run ahead hold up nothing."""
    leaving = (*plan.sharing, *plan.ahead) if plan.starts_back_early else plan.ahead
    yield from (plan.start("B", encoder, m) for encoder in leaving if encoder.backward)
    gone = m - 1 - plan.run_ahead
    if gone >= 0:
        yield from (plan.finish("B", encoder, gone) for encoder in plan.ahead if encoder.backward)


# --------------------------------------------------------------------------------- encoders that run ahead


def _ahead_order(plan: _Plan, role: Role) -> Iterator[Action]:
    """What encoders run at the pace of the first text stage. A stage is ahead of it by the run-ahead, and by one more
    for each stage after it.
    """
    held = [(e, stage) for e in plan.ahead if (stage := _stage(role, e)) is not None]
    lead = {encoder.name: plan.run_ahead + encoder.stages - stage for encoder, stage in held}
    for step in range(-max(lead.values()), 0):
        for encoder, stage in held:
            yield from _forward_ahead(plan, encoder, stage, step + lead[encoder.name])
    for work in plan.pace:
        for encoder, stage in held:
            if work.kind == "F":
                yield from _forward_ahead(plan, encoder, stage, work.micro_batch + lead[encoder.name])
            elif encoder.backward:
                yield from _backward_ahead(plan, encoder, stage, work.micro_batch)
    if plan.run_ahead < 2:
        yield from (plan.finish("F", e, plan.batches - 1) for e, stage in held if stage == e.stages - 1)


def _forward_ahead(plan: _Plan, encoder: Module, stage: int, m: int) -> Iterator[Action]:
    """Forward of a micro-batch, once the text module is ready for the rows of the last one that it may lag behind.

    Rows leave when the text module is ready for those before them, after the last forward too. More of them on their
    way would stand behind each other on one communicator; and where all streams of a GPU share a queue
    (CUDA_DEVICE_MAX_CONNECTIONS=1) what stands there keeps the encoder from computing, and may do so for ever.
    """
    is_last, holds_back, gone = stage == encoder.stages - 1, plan.run_ahead > 1, m - max(1, plan.run_ahead)
    if is_last and 0 <= gone < plan.batches and (holds_back or m < plan.batches):
        yield plan.finish("F", encoder, gone)
        if holds_back and gone + 1 < plan.batches:
            yield plan.start("F", encoder, gone + 1)
    if not 0 <= m < plan.batches:
        return
    yield run("F", encoder.name, stage, m)
    if is_last and (m == 0 or not holds_back):
        yield plan.start("F", encoder, m)
    if is_last and m == 0 and encoder.backward:
        yield plan.start("B", encoder, 0)


def _backward_ahead(plan: _Plan, encoder: Module, stage: int, m: int) -> Iterator[Action]:
    """Backward of a micro-batch; then the gradients of the next one may arrive."""
    is_last = stage == encoder.stages - 1
    if is_last:
        yield plan.finish("B", encoder, m)
    yield run("B", encoder.name, stage, m)
    if is_last and m + 1 < plan.batches:
        yield plan.start("B", encoder, m + 1)
