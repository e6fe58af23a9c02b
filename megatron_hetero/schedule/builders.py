"""Builds schedules. docs/schedules.md describes each kind. A schedule combines one or several of these cases:

  1. *Colocated, text pp:1*: `waves` of one micro-batch.
  2. *Colocated, text pp > 1*: every rank encodes, in `waves` or with `recompute`.
  3. *Disjoint*, `ahead`: the first text stage's order of forwards and backwards sets the pace. When it receives the
     rows of micro-batch m, the encoder starts the forward of m + 1 + run_ahead; when it has run a backward, the encoder
     runs the backward of the same micro-batch.
  4. *Mixed*: as case 2, also on ranks that hold only one of the modules; encoders that share no rank with any of these
     modules run as in case 3.
  5. Virtual stages: the text module's 1F1B is interleaved. The pipeline drains between waves.
  6. Further edges: rows leave after the forward of the edge's source stage, and their gradients leave after the
     backward of its target stage.

When all ranks switch to the encoder, a stage waits for the stages behind it. So each stage switches after the progress
that it would have made without an encoder by the time the first stage switches: stage s just before the forward of the
micro-batch that is s // 3 earlier, if a backward takes twice as long as a forward. For pp:4 and waves of four, around
micro-batch 4, the first of its wave (E: the encoder's turn; F and B: forward and backward of a micro-batch):

    stage 0   F0 F1 F2 F3 B0 E F4 B1          E: backward of 0, forward of 4 to 7
    stage 1   F0 F1 F2 B0 F3 B1 E F4 B2
    stage 2   F0 F1 B0 F2 B1 F3 B2 E F4 B3
    stage 3   F0 B0 F1 B1 F2 B2 E F3 B3

These orders do not deadlock. In a turn of the encoder (return, encode) all ranks follow one list, each rank skips the
actions of other ranks, and no action depends on a later action. All ranks take the turns in one order, and the work of
a stage before a turn depends only on work of other stages before that turn. Encoders that run ahead follow the list of
the first text stage; they receive one step later than it and send earlier. `check_schedule` verifies each schedule.

For pp:3 and five micro-batches, the text module alone runs as follows (1F1B; time goes to the right):

    stage 0   F0 F1 F2          B0 F3    B1 F4    B2       B3       B4
    stage 1      F0 F1       B0 F2    B1 F3    B2 F4    B3       B4
    stage 2         F0 B0       F1 B1    F2 B2    F3 B3    F4 B4

1F1B: Narayanan et al. 2019 (PipeDream), in the flushing variant of Narayanan et al. 2021 (arXiv 2104.04473).
Interleaving of virtual stages: section 2.2 of the latter, with the warm-up of Megatron-LM.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain, pairwise, product

from megatron_hetero.base.errors import UserError, one_of
from megatron_hetero.layout.graph import Edge, Ends, as_edge, edge_of
from megatron_hetero.layout.layout import Layout
from megatron_hetero.schedule.actions import Action, WorkKind, finish, run, start
from megatron_hetero.schedule.graph_builder import build_graph_schedule, fed_by_all, require_trained_through
from megatron_hetero.schedule.program import Module, Role, Schedule, find_roles
from megatron_hetero.schedule.settings import ScheduleSettings, resolve_settings, sharing_encoders
from megatron_hetero.schedule.transfers import with_transfers


def build_schedule(
    layouts: Mapping[str, Layout],
    micro_batches: int,
    settings: ScheduleSettings | None = None,
    *,
    text: str | None = None,
    forward_only: Collection[str] = (),
    edges: Collection[Ends] | None = None,
) -> Schedule:
    """Build the schedule of a step.

    Args:
        layouts: the layouts of all modules, by name.
        micro_batches: the number of micro-batches in the step.
        settings: the settings of how modules take turns; None for the defaults.
        text: the module that all other modules, the encoders, feed; by default the module that all `edges` enter, or
            the module named `text` if there are no edges.
        forward_only: modules without a backward pass: frozen encoders, or all modules in an evaluation.
        edges: edges of the graph of modules; a pair (from, to) is the edge from the last stage to the first. With
            `text`, encoders without an edge feed its first stage. Other graphs, with several target modules, are
            scheduled by `graph_builder` and have no settings.

    Raises:
        UserError: the settings or edges do not fit the layouts.
    """
    _require_forward_only_exists(layouts, forward_only)
    named = [edge_of(edge) for edge in edges or ()]
    if text is None and edges is not None and (text := fed_by_all(layouts, named)) is None:
        _require_no_settings(settings or ScheduleSettings())
        return build_graph_schedule(layouts, named, micro_batches, forward_only)
    text = text or "text"
    settings = resolve_settings(settings or ScheduleSettings(), layouts, micro_batches, text=text)
    _require_edges_fit(layouts, text, settings.virtual_stages, named)
    modules = _modules(layouts, settings, text, forward_only)
    empty = Schedule(modules, _edges(modules, named), micro_batches, find_roles(modules))
    require_trained_through(empty)
    context = _Context(empty, settings.run_ahead or 0)
    orders = [list(_order(context, role)) for role in empty.roles]
    return replace(empty, roles=with_transfers(empty, orders))


def _modules(
    layouts: Mapping[str, Layout],
    settings: ScheduleSettings,
    text: str,
    forward_only: Collection[str],
) -> tuple[Module, ...]:
    sharing = sharing_encoders(layouts, text)

    def encoder(name: str) -> Module:
        style, window = "waves", settings.waves or 1
        if name not in sharing:
            style, window = "ahead", settings.run_ahead or 0
        elif settings.kind == "recompute":
            style, window = "recompute", 0
        return Module(name, layouts[name], style, window, backward=name not in forward_only)

    last = Module(text, layouts[text], "text", virtual=settings.virtual_stages, backward=text not in forward_only)
    return *(encoder(name) for name in layouts if name != text), last


def _edges(modules: Sequence[Module], edges: Collection[Edge]) -> tuple[Edge, ...]:
    """Return `edges` grouped by encoder. An encoder without edges gets one from its last to the first text stage."""
    layouts = {module.name: module.layout for module in modules}
    named = [as_edge(edge, layouts) for edge in edges]
    *encoders, text = modules
    result = list[Edge]()
    for encoder in encoders:
        result += [edge for edge in named if edge.source == encoder.name] or [Edge(encoder.name, text.name)]
    return tuple(result)


def last_entered(virtual_stages: int) -> int:
    """Return the last pipeline coordinate of the text module that rows of an encoder that runs ahead may enter.

    The encoder follows the pace of the first stage. Stage s runs backwards s micro-batches earlier: from s = 3 on, its
    gradients block its queue before the encoder has sent the rows for which the stage waits. With interleaving, the
    stages of all ranks except the first wait for each other before they receive rows.
    """
    return 2 if virtual_stages == 1 else 0


def _require_edges_fit(layouts: Mapping[str, Layout], text: str, virtual: int, edges: Collection[Edge]) -> None:
    sharing = sharing_encoders(layouts, text)
    for edge in edges:
        encoders, text_stages = [name for name in layouts if name != text], layouts[text].pp * virtual
        source_stage, stage = edge.source_stage or 0, edge.target_stage or 0
        is_from_encoder = edge.source in encoders and source_stage < layouts[edge.source].pp
        if not is_from_encoder or edge.target != text or stage >= text_stages:
            stages = ", ".join(f"`{name}` with {layouts[name].pp} stages" for name in encoders)
            because, fix = f"encoders feed `{text}`", "number stages from 0"
            expected = f"an edge from a stage of {stages or 'an encoder'} to one of the {text_stages} of `{text}`"
            raise UserError.at("edges", found=f"`{edge}`", expected=expected, because=because, fix=fix)
        if edge.source not in sharing and stage % layouts[text].pp > last_entered(virtual):
            raise UserError.at(
                "edges",
                found=f"`{edge}`, with {virtual} stages of `{text}` on each rank",
                expected=f"an edge that enters stages of pipeline ranks 0 to {last_entered(virtual)}",
                because=f"`{edge.source}` runs ahead on its own ranks: others would wait for it to take gradients, "
                "while it waits for them to take rows",
                fix=f"let the rows enter an earlier stage, or let `{edge.source}` share ranks with `{text}`",
            )


def _require_no_settings(settings: ScheduleSettings) -> None:
    if settings != ScheduleSettings():
        because, fix = "they apply to encoders and the one module that all of them feed", "leave `settings` out"
        raise UserError.at("settings", found=str(settings), expected="none", because=because, fix=fix)


def _require_forward_only_exists(layouts: Mapping[str, Layout], forward_only: Collection[str]) -> None:
    if unknown := [name for name in forward_only if name not in layouts]:
        found, expected = f"`{unknown[0]}`", one_of(layouts, "layouts", "some of")
        raise UserError.at("forward_only", found=found, expected=expected, fix="name modules that have a layout")


# --------------------------------------------------------------------------------------------- orders


def pipeline_order(module: Module, coordinate: int, micro_batches: Sequence[int]) -> list[Action]:
    """Return the 1F1B order of work at a pipeline coordinate, interleaved if the module has virtual stages."""
    order = _interleaved("F", module, coordinate, micro_batches)
    if module.backward:  # Run `warm_up` forwards, then alternate forwards and backwards, then the remaining backwards.
        pp, left = module.layout.pp, module.layout.pp - 1 - coordinate
        warm_up = left if module.virtual == 1 else 2 * left + (module.virtual - 1) * pp
        backwards = _interleaved("B", module, coordinate, micro_batches)
        steady = max(0, len(order) - warm_up)
        pairs = zip(order[warm_up:], backwards[:steady], strict=True)
        order = [*order[:warm_up], *chain.from_iterable(pairs), *backwards[steady:]]
    return [work for work in order if work.micro_batch >= 0]


def _interleaved(kind: WorkKind, module: Module, coordinate: int, micro_batches: Sequence[int]) -> list[Action]:
    """Return the runs of a rank: pp micro-batches through each of its stages in turn, then the next pp micro-batches.

    The micro-batches are padded to a multiple of pp; padding has the number -1 and is removed by the caller. Removing a
    micro-batch on all ranks adds no cycle to an order.
    """
    pp = module.layout.pp
    padded = [*micro_batches, *[-1] * (-len(micro_batches) % pp)]
    stages = range(coordinate, module.stages, pp)
    return [
        run(kind, module.name, stage, m)
        for first in range(0, len(padded), pp)
        for stage in (stages if kind == "F" else reversed(stages))
        for m in padded[first : first + pp]
    ]


@dataclass(frozen=True, eq=False)
class _Context:
    """The values from which the order of each role is built. `schedule` has no actions yet."""

    schedule: Schedule
    run_ahead: int

    @cached_property
    def ahead(self) -> tuple[Module, ...]:
        """The encoders that run ahead on separate ranks."""
        return tuple(e for e in self.schedule.encoders if e.style == "ahead")

    @cached_property
    def sharing(self) -> tuple[Module, ...]:
        """The encoders that take turns with the text module."""
        return tuple(e for e in self.schedule.encoders if e.style != "ahead")

    @cached_property
    def turns(self) -> list[tuple[Sequence[int], Sequence[int]]]:
        """For each turn of the encoders after the first encoding, the micro-batches whose gradients return, and the
        micro-batches that are encoded.
        """
        return list(zip(self.schedule.returned, [*self.schedule.waves[1:], range(0)], strict=True))

    @cached_property
    def pace(self) -> list[Action]:
        """The forwards and backwards of the first text stage, in the order in which it runs them."""
        return [work for works in self.text_work_by_turn(0) for work in works if work.stage == 0]

    @cached_property
    def starts_back_early(self) -> bool:
        """Whether gradients start to return, before the turn, to encoders that take turns with the text module."""
        names = [encoder.name for encoder in self.sharing]
        return any(self.schedule.returns_early(e) for e in self.schedule.edges if e.source in names)

    def text_work_by_turn(self, stage: int | None) -> list[list[Action]]:
        """Return, for each turn of the encoders, the text work before it on ranks whose first text stage is `stage`."""
        schedule = self.schedule
        if stage is None:
            return [[] for _ in self.turns]
        if schedule.text.virtual > 1:
            return [pipeline_order(schedule.text, stage, wave) for wave in schedule.waves]
        works = pipeline_order(schedule.text, stage, range(schedule.micro_batches))
        firsts = (max(0, wave[0] - stage // 3) for wave in schedule.waves[1:])
        cuts = [works.index(run("F", schedule.text.name, stage, m)) for m in firsts]
        return [works[first:last] for first, last in pairwise([0, *cuts, len(works)])]

    def crossed(self, role: Role, encoder: Module) -> list[tuple[Edge, int]]:
        """Return the edges of an encoder whose rows leave or enter the role, each with the stage that sends rows."""
        schedule = self.schedule
        edges = [e for e in schedule.edges if e.source == encoder.name and any(schedule.crosses(role, e))]
        return [(edge, schedule.stages_of(edge)[0]) for edge in edges]

    def leaving(self, encoder: Module, stage: int) -> tuple[Edge, ...]:
        """Return the edges whose rows leave a stage of an encoder."""
        return self.schedule.leaving.get((encoder.name, stage), ())

    def arriving(self, role: Role) -> list[Edge]:
        """Return the edges along which encoders that run ahead send rows to text stages of the role."""
        names = [encoder.name for encoder in self.ahead]
        return [e for e in self.schedule.edges if e.source in names and self.schedule.crosses(role, e)[1]]


def _first_stage(role: Role, module: Module) -> int | None:
    """Return the first stage of `module` on the role's ranks; None if they have no stage of it."""
    return next((stage for name, stage in role.held_stages if name == module.name), None)


def _order(context: _Context, role: Role) -> Iterator[Action]:
    """Yield the work and crossings of a role in order, without the transfers between stages."""
    if any(_first_stage(role, encoder) is not None for encoder in context.ahead):
        yield from _ahead_order(context, role)
        return
    arriving = context.arriving(role)
    if context.run_ahead:  # Post the receive of the first micro-batch's rows before any work.
        yield from (start("F", edge, 0) for edge in arriving)
    yield from _encode(context, role, context.schedule.waves[0])
    for works, (returned, encoded) in zip(
        context.text_work_by_turn(_first_stage(role, context.schedule.text)), context.turns, strict=True
    ):
        yield from _text(context, role, works)
        yield from _return(context, role, returned)
        yield from _encode(context, role, encoded)
    for m in range(context.schedule.micro_batches, context.schedule.micro_batches + context.run_ahead + 1):
        yield from _send_gradients_ahead(context, role, m)


# ------------------------------------------------------------------------- modules that share ranks: waves


def _encode(context: _Context, role: Role, wave: Sequence[int]) -> Iterator[Action]:
    """Yield the forward and crossing of a wave. In step k stage i runs micro-batch k - i. The rows of a micro-batch
    leave their stage in the step that computes the rows, and arrive in the next step.
    """
    for step in range(len(wave) + max((e.stages for e in context.sharing), default=0)):
        for encoder in context.sharing:
            stage = _first_stage(role, encoder)
            if stage is not None:
                yield from (run("F", encoder.name, stage, m) for m in _at(wave, step - stage))
            for edge, source_stage in context.crossed(role, encoder):
                yield from (start("F", edge, m) for m in _at(wave, step - source_stage))
                yield from (finish("F", edge, m) for m in _at(wave, step - source_stage - 1))


def _return(context: _Context, role: Role, wave: Sequence[int]) -> Iterator[Action]:
    """Yield the backward crossing and the backward of a wave. In step k the gradients of micro-batch k are sent to the
    last stage, the gradients of k - 1 arrive, and a stage with n stages after it runs the backward of k - 1 - n;
    gradients of an edge from this stage are sent n steps later. With `recompute` the forward runs again, stage after
    stage, and has ended on the last stage when the gradients arrive.
    """
    encoders = [encoder for encoder in context.sharing if encoder.backward]
    if context.starts_back_early and _first_stage(role, context.schedule.text) != 0:
        # Start in the order in which the ranks of the first text stage start these crossings.
        for m, encoder in product(wave, encoders):
            yield from (start("B", edge, m) for edge, _ in context.crossed(role, encoder))
    for step in range(len(wave) + 2 * max((e.stages for e in encoders), default=0)):
        for encoder in encoders:
            stage, last = _first_stage(role, encoder), encoder.stages - 1
            # With recomputation, all backwards are later by `delay` steps, in which the stages run forward again.
            delay, crossed = last if encoder.recomputes else 0, context.crossed(role, encoder)
            if not context.starts_back_early:
                for edge, source_stage in crossed:
                    yield from (start("B", edge, m) for m in _at(wave, step - delay - (last - source_stage)))
            if stage is not None and encoder.recomputes:
                yield from (run("R", encoder.name, stage, m) for m in _at(wave, step - 1 - stage))
            for edge, source_stage in crossed:
                yield from (finish("B", edge, m) for m in _at(wave, step - 1 - delay - (last - source_stage)))
            if stage is not None:
                yield from (run("B", encoder.name, stage, m) for m in _at(wave, step - 1 - delay - (last - stage)))


def _at(wave: Sequence[int], index: int) -> Sequence[int]:
    """Return the micro-batch at `index` in the wave as a sequence, empty if there is none."""
    return wave[index : index + 1] if index >= 0 else ()


def _text(context: _Context, role: Role, works: Sequence[Action]) -> Iterator[Action]:
    """Yield the actions of the role's text stages, with the transfers at their boundaries."""
    first = _first_stage(role, context.schedule.text)
    for work in works:
        if work.stage == first and work.kind == "F":
            yield from _receive_rows(context, context.arriving(role), work.micro_batch)
        yield work
        if work.kind == "B":
            yield from _send_gradients(context, role, work)


def _send_gradients(context: _Context, role: Role, work: Action) -> Iterator[Action]:
    """Yield the crossings that send gradients of rows back after the backward of the role's first text stage. Gradients
    of its later virtual stages are ready earlier, but if sent then would wait for an encoder that itself waits for the
    first stage.
    """
    if work.stage != _first_stage(role, context.schedule.text):
        return
    if context.starts_back_early:
        sharing = (context.crossed(role, encoder) for encoder in context.sharing if encoder.backward)
        yield from (start("B", edge, work.micro_batch) for edges in sharing for edge, _ in edges)
    yield from _send_gradients_ahead(context, role, work.micro_batch)


def _ahead_order(context: _Context, role: Role) -> Iterator[Action]:
    """Yield the actions of encoders that run at the pace of the first text stage. Each stage of an encoder leads the
    text stage by the run-ahead, plus one micro-batch for itself and for each stage after it.
    """
    held = [(e, stage) for e in context.ahead if (stage := _first_stage(role, e)) is not None]
    lead = {encoder.name: context.run_ahead + encoder.stages - stage for encoder, stage in held}
    for step in range(-max(lead.values()), 0):
        for encoder, stage in held:
            yield from _forward_ahead(context, encoder, stage, step + lead[encoder.name])
    for work in context.pace:
        for encoder, stage in held:
            if work.kind == "F":
                yield from _forward_ahead(context, encoder, stage, work.micro_batch + lead[encoder.name])
            elif encoder.backward:
                yield from _backward_ahead(context, encoder, stage, work.micro_batch)
    for encoder, stage in held:
        if _lag(context, encoder, stage) == 1:
            last = context.schedule.micro_batches - 1
            yield from (finish("F", edge, last) for edge in context.leaving(encoder, stage))


def _lag(context: _Context, encoder: Module, stage: int) -> int:
    """Return the number of micro-batches by which a stage's forward is ahead of the rows that the text module takes."""
    return max(1, context.run_ahead) + encoder.stages - 1 - stage


def _forward_ahead(context: _Context, encoder: Module, stage: int, m: int) -> Iterator[Action]:
    """Yield the forward of micro-batch `m`, once the text module is ready for the rows of micro-batch `m - _lag`.

    Rows are sent when the text module is ready for the previous micro-batch's rows, also after the last forward. More
    rows in flight would queue on one communicator; and if all streams of a GPU share a hardware queue
    (CUDA_DEVICE_MAX_CONNECTIONS=1), queued sends would block the encoder's computation, possibly forever.
    """
    edges, lag = context.leaving(encoder, stage), _lag(context, encoder, stage)
    holds_back, sent = lag > 1, m - lag
    if 0 <= sent < context.schedule.micro_batches and (holds_back or m < context.schedule.micro_batches):
        yield from (finish("F", edge, sent) for edge in edges)
        if holds_back and sent + 1 < context.schedule.micro_batches:
            yield from (start("F", edge, sent + 1) for edge in edges)
    if not 0 <= m < context.schedule.micro_batches:
        return
    yield run("F", encoder.name, stage, m)
    if m == 0 or not holds_back:
        yield from (start("F", edge, m) for edge in edges)
    if m == 0 and encoder.backward:
        yield from (start("B", edge, 0) for edge in edges)


def _backward_ahead(context: _Context, encoder: Module, stage: int, m: int) -> Iterator[Action]:
    """Yield the backward of micro-batch `m`, then the start of receiving the next micro-batch's gradients."""
    edges = context.leaving(encoder, stage)
    yield from (finish("B", edge, m) for edge in edges)
    yield run("B", encoder.name, stage, m)
    if m + 1 < context.schedule.micro_batches:
        yield from (start("B", edge, m + 1) for edge in edges)


def _receive_rows(context: _Context, arriving: Sequence[Edge], m: int) -> Iterator[Action]:
    """Yield the receives of rows from encoders that run ahead. A posted receive lets the encoder proceed. So without
    run-ahead it is posted only when the rows are needed; with run-ahead, the next rows arrive during the forward.
    """
    if not context.run_ahead:
        yield from (start("F", edge, m) for edge in arriving)
    yield from (finish("F", edge, m) for edge in arriving)
    if context.run_ahead and m + 1 < context.schedule.micro_batches:
        yield from (start("F", edge, m + 1) for edge in arriving)


def _send_gradients_ahead(context: _Context, role: Role, m: int) -> Iterator[Action]:
    """Yield the start of sending gradients of micro-batch `m` to encoders that run ahead, and ends of earlier sends."""
    edges, sent = [edge for edge in context.arriving(role) if context.schedule.returns(edge)], m - 1 - context.run_ahead
    if 0 <= m < context.schedule.micro_batches:
        yield from (start("B", edge, m) for edge in edges)
    if 0 <= sent < context.schedule.micro_batches:
        yield from (finish("B", edge, sent) for edge in edges)
