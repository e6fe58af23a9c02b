"""Builds schedules. A schedule combines one or several of these cases:

  1. *Colocated, text pp:1*: `waves` of one micro-batch: encode, cross, text forward and backward, cross back, encoder
     backward.
  2. *Colocated, text pp > 1*: every rank encodes.
       waves      encode and cross W micro-batches; one 1F1B of the text module over all. Whenever its first stage needs
                  rows of the next W, all ranks take a turn at the encoder: the gradients of what the first stage has
                  run backward cross back, the encoder runs their backward, and the next W are encoded and cross.
                  Encoder activations of W + pp - 1 micro-batches live, since the pipeline is not drained.
       recompute  encode and cross all, keeping rows only; 1F1B over all; then per micro-batch forward again and
                  backward. Encoder activations of one micro-batch live; the cost of one pipeline fill is a second
                  forward.
  3. *Disjoint*, `ahead`: the first text stage's order of forwards and backwards sets the pace. When it receives the
     rows of micro-batch m, the encoder starts the forward of m + 1 + run_ahead; when it has run a backward, the encoder
     runs the same. That makes the encoder the stage before the first in 1F1B. Several encoders run concurrently. Rows
     of one micro-batch at a time are in flight: those encoded further ahead wait on the encoder's ranks.
  4. *Mixed*: as 2, also on ranks that hold only one of the modules; encoders on ranks apart from all of these run as
     in 3.
  5. Virtual stages: in all of the above, the text module's 1F1B is interleaved. The pipeline drains between waves.

When all ranks turn to the encoder, a stage waits for those behind it. So each stage turns to it after the progress that
it would have made without an encoder when the first stage turns: stage s just before the forward of a micro-batch that
comes s // 3 earlier, if a backward takes twice as long as a forward. For pp:4, waves of four and micro-batch 4, the
first of its wave (E: the encoder's turn; numbers are the micro-batches run backward and forward):

    stage 0   F0 F1 F2 F3 B0 E F4 B1          E: backward of 0, forward of 4 to 7
    stage 1   F0 F1 F2 B0 F3 B1 E F4 B2
    stage 2   F0 F1 B0 F2 B1 F3 B2 E F4 B3
    stage 3   F0 B0 F1 B1 F2 B2 E F3 B3

An encoder's own pipeline stages follow each other by one micro-batch.

Why no order deadlocks. In a turn of the encoder (return, encode) all ranks walk through one list, each skipping what it
has no part in, and nothing in the list depends on what comes later. The turns are in one order on all ranks, and what a
stage runs before a turn depends only on what others run before it: a stage turns at the same forward as the stage
before it, or one earlier. Encoders that run ahead walk through the first text stage's list, one step behind in what
they receive and ahead in what they send. On NCCL, an operation that is issued early holds up later ones in the queue of
its communicator, and where the streams of a GPU share one hardware queue (CUDA_DEVICE_MAX_CONNECTIONS=1, as Megatron
wants) those hold up everything that the GPU is issued later. So only one crossing after another is in flight, and
`check_schedule` proves for each schedule that it ends even so.
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
    """Build the schedule of a step.

    Args:
        layouts: of all modules, by name; all but `text` are encoders that feed it.
        micro_batches: their number in the step.
        settings: see `ScheduleSettings`.
        text: the name of the text module.
        forward_only: modules without a backward pass: frozen encoders, or all modules in an evaluation.

    Raises:
        UserError: the settings do not fit the layouts.
    """
    settings = resolve_settings(settings or ScheduleSettings(), layouts, micro_batches, text=text)
    modules = _modules(layouts, settings, text, forward_only)
    empty = Schedule(modules, micro_batches, find_roles(modules))
    ctx = _Context(empty, settings)
    orders = [list(_order(ctx, role)) for role in empty.roles]
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
class _Context:
    """Shared by the orders of all roles."""

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
        """Encoders on their own ranks."""
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
        """For each turn of the encoders that share ranks with the text module, after the first encoding: the
        micro-batches whose gradients return, and those that are encoded.
        """
        in_flight = self.schedule.in_flight_between_waves
        ends = [max(0, wave[0] - in_flight) for wave in self.waves[1:]] + [self.batches]
        returned = [range(*pair) for pair in pairwise([0, *ends])]
        return list(zip(returned, [*self.waves[1:], range(0)], strict=True))

    @cached_property
    def pace(self) -> list[Work]:
        """The work of the first text stage, in order."""
        return [work for part in _text_parts(self, 0) for work in part if work.stage == 0]

    @property
    def starts_back_early(self) -> bool:
        """Whether gradients start to cross back to encoders that take turns with the text module as soon as possible.

        If the text module has stages, the other ranks cannot take part before the end of their wave. Communication
        that waits for them gains nothing, and may even keep a GPU from going on with the text module if its streams
        share a queue (CUDA_DEVICE_MAX_CONNECTIONS).
        """
        return self.text.layout.pp == 1

    def start(self, kind: Kind, encoder: Module, micro_batch: int) -> Action:
        return start(kind, encoder.name, self.text.name, micro_batch)

    def finish(self, kind: Kind, encoder: Module, micro_batch: int) -> Action:
        return finish(kind, encoder.name, self.text.name, micro_batch)


def _stage(role: Role, module: Module) -> int | None:
    """The (first) stage of `module` that the role holds."""
    return next((stage for name, stage in role.held_stages if name == module.name), None)


def _order(ctx: _Context, role: Role) -> Iterator[Action]:
    """The work and crossings of a role, without the transfers between stages."""
    if any(_stage(role, encoder) is not None for encoder in ctx.ahead):
        yield from _ahead_order(ctx, role)
        return
    is_first = _stage(role, ctx.text) == 0
    if is_first and ctx.run_ahead:  # Rows of the first micro-batch may arrive at any time.
        yield from (ctx.start("F", encoder, 0) for encoder in ctx.ahead)
    yield from _encode(ctx, role, ctx.waves[0])
    for works, (returned, encoded) in zip(_text_parts(ctx, _stage(role, ctx.text)), ctx.turns, strict=True):
        yield from _text(ctx, works)
        yield from _return(ctx, role, returned)
        yield from _encode(ctx, role, encoded)
    if is_first:
        last = range(max(0, ctx.batches - 1 - ctx.run_ahead), ctx.batches)
        yield from (ctx.finish("B", encoder, m) for m in last for encoder in ctx.ahead if encoder.backward)


# ------------------------------------------------------------------------- modules that share ranks: waves


def _encode(ctx: _Context, role: Role, wave: Sequence[int]) -> Iterator[Action]:
    """Forward and crossing of a wave. In step k stage i runs micro-batch k - i. The rows of a micro-batch leave in the
    step in which the last stage has run it, and have one step to arrive.
    """
    for step in range(len(wave) + max((e.stages for e in ctx.sharing), default=0)):
        for encoder in ctx.sharing:
            stage, last = _stage(role, encoder), encoder.stages - 1
            crosses = any(ctx.schedule.crosses(role, encoder.name))
            if stage is not None:
                yield from (run("F", encoder.name, stage, m) for m in _at(wave, step - stage))
            if crosses:
                yield from (ctx.start("F", encoder, m) for m in _at(wave, step - last))
                yield from (ctx.finish("F", encoder, m) for m in _at(wave, step - last - 1))


def _return(ctx: _Context, role: Role, wave: Sequence[int]) -> Iterator[Action]:
    """Crossing back and backward of a wave. In step k the gradients of micro-batch k leave, those of k - 1 arrive, and
    a stage with n stages after it runs the backward of micro-batch k - 1 - n. With `recompute` the forward runs again,
    stage after stage, so that the last stage has it when the gradients arrive.
    """
    encoders = [encoder for encoder in ctx.sharing if encoder.backward]
    if ctx.starts_back_early and _stage(role, ctx.text) != 0:  # As the text module's ranks have.
        for m, encoder in product(wave, encoders):
            if any(ctx.schedule.crosses(role, encoder.name)):
                yield ctx.start("B", encoder, m)
    for step in range(len(wave) + 2 * max((e.stages for e in encoders), default=0)):
        for encoder in encoders:
            stage, last = _stage(role, encoder), encoder.stages - 1
            crosses, again = any(ctx.schedule.crosses(role, encoder.name)), last if encoder.recomputes else 0
            if crosses and not ctx.starts_back_early:
                yield from (ctx.start("B", encoder, m) for m in _at(wave, step - again))
            if stage is not None and encoder.recomputes:
                yield from (run("R", encoder.name, stage, m) for m in _at(wave, step - 1 - stage))
            if crosses:
                yield from (ctx.finish("B", encoder, m) for m in _at(wave, step - 1 - again))
            if stage is not None:
                yield from (run("B", encoder.name, stage, m) for m in _at(wave, step - 1 - again - (last - stage)))


def _at(wave: Sequence[int], index: int) -> Sequence[int]:
    """The micro-batch of that index in the wave, if any."""
    return wave[index : index + 1] if index >= 0 else ()


def _text_parts(ctx: _Context, stage: int | None) -> list[list[Work]]:
    """Before each turn of the encoders, the work of ranks whose first text stage is `stage`; none without a stage."""
    if stage is None:
        return [[] for _ in ctx.turns]
    if ctx.text.virtual > 1:
        return [pipeline_order(ctx.text, stage, wave) for wave in ctx.waves]
    works = pipeline_order(ctx.text, stage, range(ctx.batches))
    cuts = [works.index(Work("F", stage, max(0, wave[0] - stage // 3))) for wave in ctx.waves[1:]]
    return [works[first:last] for first, last in pairwise([0, *cuts, len(works)])]


def _text(ctx: _Context, works: Sequence[Work]) -> Iterator[Action]:
    """Work of the text module, with the crossings of its first stage."""
    for work in works:
        if work.stage == 0 and work.kind == "F":
            yield from _receive_rows(ctx, work.micro_batch)
        yield run(work.kind, ctx.text.name, work.stage, work.micro_batch)
        if work.stage == 0 and work.kind == "B":
            yield from _send_gradients(ctx, work.micro_batch)


def _receive_rows(ctx: _Context, m: int) -> Iterator[Action]:
    """Receive the rows of encoders that run ahead. A posted receive lets the encoder go on, so without run-ahead it
    must not be posted before the rows are needed; with it, the next rows may arrive during the forward.
    """
    if not ctx.run_ahead:
        yield from (ctx.start("F", encoder, m) for encoder in ctx.ahead)
    yield from (ctx.finish("F", encoder, m) for encoder in ctx.ahead)
    if ctx.run_ahead and m + 1 < ctx.batches:
        yield from (ctx.start("F", encoder, m + 1) for encoder in ctx.ahead)


def _send_gradients(ctx: _Context, m: int) -> Iterator[Action]:
    """Send the gradients of rows back. They are finished so late that encoders that run ahead hold up nothing."""
    sending = (*ctx.sharing, *ctx.ahead) if ctx.starts_back_early else ctx.ahead
    yield from (ctx.start("B", encoder, m) for encoder in sending if encoder.backward)
    sent = m - 1 - ctx.run_ahead
    if sent >= 0:
        yield from (ctx.finish("B", encoder, sent) for encoder in ctx.ahead if encoder.backward)


# --------------------------------------------------------------------------------- encoders that run ahead


def _ahead_order(ctx: _Context, role: Role) -> Iterator[Action]:
    """The actions of encoders at the pace of the first text stage. A stage leads it by the run-ahead, plus one for the
    stage itself and each stage after it.
    """
    held = [(e, stage) for e in ctx.ahead if (stage := _stage(role, e)) is not None]
    lead = {encoder.name: ctx.run_ahead + encoder.stages - stage for encoder, stage in held}
    for step in range(-max(lead.values()), 0):
        for encoder, stage in held:
            yield from _forward_ahead(ctx, encoder, stage, step + lead[encoder.name])
    for work in ctx.pace:
        for encoder, stage in held:
            if work.kind == "F":
                yield from _forward_ahead(ctx, encoder, stage, work.micro_batch + lead[encoder.name])
            elif encoder.backward:
                yield from _backward_ahead(ctx, encoder, stage, work.micro_batch)
    if ctx.run_ahead < 2:
        yield from (ctx.finish("F", e, ctx.batches - 1) for e, stage in held if stage == e.stages - 1)


def _forward_ahead(ctx: _Context, encoder: Module, stage: int, m: int) -> Iterator[Action]:
    """Forward of a micro-batch, once the text module is ready for the rows of micro-batch m - max(1, run_ahead).

    Rows leave when the text module is ready for those before them, also after the last forward. More of them in flight
    would queue behind each other on one communicator; and if all streams of a GPU share a queue
    (CUDA_DEVICE_MAX_CONNECTIONS=1), queued sends keep the encoder from computing, possibly forever.
    """
    is_last, holds_back, sent = stage == encoder.stages - 1, ctx.run_ahead > 1, m - max(1, ctx.run_ahead)
    if is_last and 0 <= sent < ctx.batches and (holds_back or m < ctx.batches):
        yield ctx.finish("F", encoder, sent)
        if holds_back and sent + 1 < ctx.batches:
            yield ctx.start("F", encoder, sent + 1)
    if not 0 <= m < ctx.batches:
        return
    yield run("F", encoder.name, stage, m)
    if is_last and (m == 0 or not holds_back):
        yield ctx.start("F", encoder, m)
    if is_last and m == 0 and encoder.backward:
        yield ctx.start("B", encoder, 0)


def _backward_ahead(ctx: _Context, encoder: Module, stage: int, m: int) -> Iterator[Action]:
    """Backward of a micro-batch; then the gradients of the next may arrive."""
    is_last = stage == encoder.stages - 1
    if is_last:
        yield ctx.finish("B", encoder, m)
    yield run("B", encoder.name, stage, m)
    if is_last and m + 1 < ctx.batches:
        yield ctx.start("B", encoder, m + 1)
