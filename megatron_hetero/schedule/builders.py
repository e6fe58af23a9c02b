"""Builds schedules. docs/schedules.md describes each kind; a schedule combines one or several of these cases:

  1. *Colocated, text pp:1*: `waves` of one micro-batch.
  2. *Colocated, text pp > 1*: every rank encodes, in `waves` or with `recompute`.
  3. *Disjoint*, `ahead`: the first text stage's order of forwards and backwards sets the pace. When it receives the
     rows of micro-batch m, the encoder starts the forward of m + 1 + run_ahead; when it has run a backward, the encoder
     runs that of the same micro-batch.
  4. *Mixed*: as 2, also on ranks that hold only one of the modules; encoders on ranks apart from all of these run as
     in 3.
  5. Virtual stages: the text module's 1F1B is interleaved. The pipeline drains between waves.
  6. Further edges: their rows leave after the forward of their stage, and their gradients after the backward of the
     stage that they entered.

When all ranks turn to the encoder, a stage waits for the stages behind it. So each stage turns to the encoder after the
progress that it would have made without an encoder by the time the first stage turns: stage s just before the forward
of the micro-batch that is s // 3 earlier, if a backward takes twice as long as a forward. For pp:4, waves of four and
micro-batch 4, the first of its wave (E: the encoder's turn; numbers are the micro-batches run backward and forward):

    stage 0   F0 F1 F2 F3 B0 E F4 B1          E: backward of 0, forward of 4 to 7
    stage 1   F0 F1 F2 B0 F3 B1 E F4 B2
    stage 2   F0 F1 B0 F2 B1 F3 B2 E F4 B3
    stage 3   F0 B0 F1 B1 F2 B2 E F3 B3

Why no order deadlocks. In a turn of the encoder (return, encode) all ranks walk through one list, each skipping actions
of other ranks, and nothing in the list depends on what comes later. The turns are in one order on all ranks, and what a
stage runs before a turn depends only on what others run before it. Encoders that run ahead walk through the list of the
first text stage, one step behind in what they receive and ahead in what they send. `check_schedule` proves it each
time.

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
        layouts: layouts of all modules, by name.
        micro_batches: number of micro-batches in the step.
        settings: see `ScheduleSettings`.
        text: the module that all other modules, the encoders, feed; by default the module that all `edges` enter, or
            `text` without edges.
        forward_only: modules without a backward pass: frozen encoders, or all modules in an evaluation.
        edges: edges of the graph of modules; a pair (from, to) is the edge from the last stage to the first. With
            `text`, encoders without an edge feed its first stage. Graphs in which several modules are fed, or some
            modules feed none, run as `graph_builder` describes; they have no settings.

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
    """Return `edges` encoder by encoder; one from the last stage to the first text stage where an encoder has none."""
    layouts = {module.name: module.layout for module in modules}
    named = [as_edge(edge, layouts) for edge in edges]
    *encoders, text = modules
    result = list[Edge]()
    for encoder in encoders:
        result += [edge for edge in named if edge.source == encoder.name] or [Edge(encoder.name, text.name)]
    return tuple(result)


def last_entered(virtual_stages: int) -> int:
    """Return the last pipeline coordinate of the text module that rows of an encoder that runs ahead may enter.

    The encoder follows the pace of the first stage. Stage s runs backwards s micro-batches earlier: from s = 3 on its
    gradients are ready, and block its queue, before the encoder has sent the rows that it waits for. Interleaved stages
    of all ranks but the first wait for each other before they receive rows.
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
    """Order the work of a pipeline coordinate: 1F1B, interleaved if the module has virtual stages."""
    order = _interleaved("F", module, coordinate, micro_batches)
    if module.backward:  # Run `warm_up` forwards, then backwards and forwards alternating, then the other backwards.
        pp, left = module.layout.pp, module.layout.pp - 1 - coordinate
        warm_up = left if module.virtual == 1 else 2 * left + (module.virtual - 1) * pp
        backwards = _interleaved("B", module, coordinate, micro_batches)
        steady = max(0, len(order) - warm_up)
        pairs = zip(order[warm_up:], backwards[:steady], strict=True)
        order = [*order[:warm_up], *chain.from_iterable(pairs), *backwards[steady:]]
    return [work for work in order if work.micro_batch >= 0]


def _interleaved(kind: WorkKind, module: Module, coordinate: int, micro_batches: Sequence[int]) -> list[Action]:
    """Run pp micro-batches through each of the rank's stages in turn, then the next pp of them.

    The micro-batches are padded to a multiple of pp; the padding has number -1 and is dropped later. Dropping a
    micro-batch everywhere adds no cycle to an order.
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
    """Values that the orders of all roles share. `schedule` has no actions yet."""

    schedule: Schedule
    run_ahead: int

    @cached_property
    def ahead(self) -> tuple[Module, ...]:
        """Encoders on ranks of their own."""
        return tuple(e for e in self.schedule.encoders if e.style == "ahead")

    @cached_property
    def sharing(self) -> tuple[Module, ...]:
        """Encoders that take turns with the text module."""
        return tuple(e for e in self.schedule.encoders if e.style != "ahead")

    @cached_property
    def turns(self) -> list[tuple[Sequence[int], Sequence[int]]]:
        """Turns of the encoders that share ranks with the text module, after the first encoding: the micro-batches
        whose gradients return, and the micro-batches that are encoded.
        """
        return list(zip(self.schedule.returned, [*self.schedule.waves[1:], range(0)], strict=True))

    @cached_property
    def pace(self) -> list[Action]:
        """The work of the first text stage, in order."""
        return [work for works in self.text_work_by_turn(0) for work in works if work.stage == 0]

    @cached_property
    def starts_back_early(self) -> bool:
        """Whether gradients return to encoders that take turns with the text module before their turn."""
        names = [encoder.name for encoder in self.sharing]
        return any(self.schedule.returns_early(e) for e in self.schedule.edges if e.source in names)

    def text_work_by_turn(self, stage: int | None) -> list[list[Action]]:
        """Return the work of ranks whose first text stage is `stage` before each turn of the encoders."""
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
        """Return the edges of an encoder that the role takes part in, each with the stage that its rows leave."""
        schedule = self.schedule
        edges = [e for e in schedule.edges if e.source == encoder.name and any(schedule.crosses(role, e))]
        return [(edge, schedule.stages_of(edge)[0]) for edge in edges]

    def leaving(self, encoder: Module, stage: int) -> tuple[Edge, ...]:
        """Return the edges that leave a stage of an encoder."""
        return self.schedule.leaving.get((encoder.name, stage), ())

    def arriving(self, role: Role) -> list[Edge]:
        """Return the edges from encoders that run ahead to any text stage of the role."""
        names = [encoder.name for encoder in self.ahead]
        return [e for e in self.schedule.edges if e.source in names and self.schedule.crosses(role, e)[1]]


def _first_stage(role: Role, module: Module) -> int | None:
    """Return the first stage of `module` that the role holds, if any."""
    return next((stage for name, stage in role.held_stages if name == module.name), None)


def _order(context: _Context, role: Role) -> Iterator[Action]:
    """Order the work and crossings of a role, without the transfers between stages."""
    if any(_first_stage(role, encoder) is not None for encoder in context.ahead):
        yield from _ahead_order(context, role)
        return
    arriving = context.arriving(role)
    if context.run_ahead:  # Rows of the first micro-batch may arrive at any time.
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
    """Run the forward and crossing of a wave. In step k stage i runs micro-batch k - i. The rows of a micro-batch leave
    in the step in which their stage has run it, and have one step to arrive.
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
    """Run the backward crossing and the backward of a wave. In step k the gradients of micro-batch k leave for the last
    stage, those of k - 1 arrive, and a stage with n stages after it runs the backward of micro-batch k - 1 - n;
    gradients that only this stage needs leave n steps later. With `recompute` the forward runs again, stage after
    stage, so that the last stage has run it when the gradients arrive.
    """
    encoders = [encoder for encoder in context.sharing if encoder.backward]
    if context.starts_back_early and _first_stage(role, context.schedule.text) != 0:
        # In the order of the text module's ranks.
        for m, encoder in product(wave, encoders):
            yield from (start("B", edge, m) for edge, _ in context.crossed(role, encoder))
    for step in range(len(wave) + 2 * max((e.stages for e in encoders), default=0)):
        for encoder in encoders:
            stage, last = _first_stage(role, encoder), encoder.stages - 1
            # Steps by which the backward of the last stage is later than its gradients.
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
    """Return the micro-batch of that index in the wave, if any."""
    return wave[index : index + 1] if index >= 0 else ()


def _text(context: _Context, role: Role, works: Sequence[Action]) -> Iterator[Action]:
    """Run the role's text stages, with the crossings of their edges."""
    first = _first_stage(role, context.schedule.text)
    for work in works:
        if work.stage == first and work.kind == "F":
            yield from _receive_rows(context, context.arriving(role), work.micro_batch)
        yield work
        if work.kind == "B":
            yield from _send_gradients(context, role, work)


def _send_gradients(context: _Context, role: Role, work: Action) -> Iterator[Action]:
    """Send the gradients of rows back after the backward of the role's first stage. Gradients of its later virtual
    stages are known before, but would wait for an encoder that waits for the first stage. They finish so late that
    encoders that run ahead block nothing.
    """
    if work.stage != _first_stage(role, context.schedule.text):
        return
    if context.starts_back_early:
        sharing = (context.crossed(role, encoder) for encoder in context.sharing if encoder.backward)
        yield from (start("B", edge, work.micro_batch) for edges in sharing for edge, _ in edges)
    yield from _send_gradients_ahead(context, role, work.micro_batch)


def _ahead_order(context: _Context, role: Role) -> Iterator[Action]:
    """Run encoders at the pace of the first text stage. An encoder's stage is ahead of it by the run-ahead, plus one
    for the stage itself and one for each stage after it.
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
    """Return how many micro-batches a stage encodes ahead of the one that the text module is ready for."""
    return max(1, context.run_ahead) + encoder.stages - 1 - stage


def _forward_ahead(context: _Context, encoder: Module, stage: int, m: int) -> Iterator[Action]:
    """Run the forward of a micro-batch once the text module is ready for the rows of the micro-batch `_lag` before it.

    Rows leave when the text module is ready for the rows before them, also after the last forward. More rows in flight
    would queue behind each other on one communicator; and if all streams of a GPU share a queue
    (CUDA_DEVICE_MAX_CONNECTIONS=1), queued sends keep the encoder from computing, possibly forever.
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
    """Run the backward of a micro-batch; then the gradients of the next one may arrive."""
    edges = context.leaving(encoder, stage)
    yield from (finish("B", edge, m) for edge in edges)
    yield run("B", encoder.name, stage, m)
    if m + 1 < context.schedule.micro_batches:
        yield from (start("B", edge, m + 1) for edge in edges)


def _receive_rows(context: _Context, arriving: Sequence[Edge], m: int) -> Iterator[Action]:
    """Receive the rows of encoders that run ahead. A posted receive lets the encoder proceed, so without run-ahead it
    must not be posted before the rows are needed; with it, the next rows may arrive during the forward.
    """
    if not context.run_ahead:
        yield from (start("F", edge, m) for edge in arriving)
    yield from (finish("F", edge, m) for edge in arriving)
    if context.run_ahead and m + 1 < context.schedule.micro_batches:
        yield from (start("F", edge, m + 1) for edge in arriving)


def _send_gradients_ahead(context: _Context, role: Role, m: int) -> Iterator[Action]:
    """Send the gradients of micro-batch `m`, if there is one, to encoders that run ahead."""
    edges, sent = [edge for edge in context.arriving(role) if context.schedule.returns(edge)], m - 1 - context.run_ahead
    if 0 <= m < context.schedule.micro_batches:
        yield from (start("B", edge, m) for edge in edges)
    if 0 <= sent < context.schedule.micro_batches:
        yield from (finish("B", edge, sent) for edge in edges)
