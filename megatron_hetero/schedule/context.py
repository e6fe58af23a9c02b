"""What the orders of all roles are built from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

from megatron_hetero.layout.edge import Edge
from megatron_hetero.schedule.orders import Work, pipeline_order
from megatron_hetero.schedule.program import Module, Role, Schedule
from megatron_hetero.schedule.settings import ScheduleSettings


@dataclass(frozen=True, eq=False)
class BuildContext:
    """Shared by the orders of all roles."""

    schedule: Schedule
    settings: ScheduleSettings

    @property
    def text(self) -> Module:
        """The text module."""
        return self.schedule.text

    @property
    def batches(self) -> int:
        """Micro-batches of the step."""
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
        """Micro-batches that encoders may be ahead by."""
        return self.settings.run_ahead or 0

    @property
    def waves(self) -> tuple[range, ...]:
        """The micro-batches of each wave."""
        return self.schedule.waves

    @cached_property
    def turns(self) -> list[tuple[Sequence[int], Sequence[int]]]:
        """For each turn of the encoders that share ranks with the text module, after the first encoding: the
        micro-batches whose gradients return, and those that are encoded.
        """
        return list(zip(self.schedule.returned, [*self.waves[1:], range(0)], strict=True))

    @cached_property
    def pace(self) -> list[Work]:
        """The work of the first text stage, in order."""
        return [work for part in text_parts(self, 0) for work in part if work.stage == 0]

    @property
    def starts_back_early(self) -> bool:
        """Whether gradients go back to encoders that take turns with the text module before their turn."""
        return any(self.schedule.returns_early(e) for e in self.schedule.edges if e.source in self._sharing_names)

    @cached_property
    def _sharing_names(self) -> list[str]:
        return [encoder.name for encoder in self.sharing]

    def crossed(self, role: Role, encoder: Module) -> list[tuple[Edge, int]]:
        """The edges of an encoder that the role is on a side of, each with the stage that its rows leave."""
        schedule = self.schedule
        edges = [e for e in schedule.edges if e.source == encoder.name and any(schedule.crosses(role, e))]
        return [(edge, schedule.stages_of(edge)[0]) for edge in edges]

    def leaving(self, encoder: Module, stage: int) -> tuple[Edge, ...]:
        """The edges that leave a stage of an encoder."""
        return self.schedule.leaving.get((encoder.name, stage), ())

    def arriving(self, role: Role) -> list[Edge]:
        """The edges of encoders that run ahead to any text stage of the role."""
        names = [encoder.name for encoder in self.ahead]
        return [e for e in self.schedule.edges if e.source in names and self.schedule.crosses(role, e)[1]]

    def has_backward(self, edge: Edge) -> bool:
        """Whether gradients go back along the edge."""
        return self.schedule.returns(edge)


def first_stage(role: Role, module: Module) -> int | None:
    """The (first) stage of `module` that the role holds."""
    return next((stage for name, stage in role.held_stages if name == module.name), None)


def text_parts(ctx: BuildContext, stage: int | None) -> list[list[Work]]:
    """Before each turn of the encoders, the work of ranks whose first text stage is `stage`; none without a stage."""
    if stage is None:
        return [[] for _ in ctx.turns]
    if ctx.text.virtual > 1:
        return [pipeline_order(ctx.text, stage, wave) for wave in ctx.waves]
    works = pipeline_order(ctx.text, stage, range(ctx.batches))
    cuts = [works.index(Work("F", stage, max(0, wave[0] - stage // 3))) for wave in ctx.waves[1:]]
    return [works[first:last] for first, last in pairwise([0, *cuts, len(works)])]
