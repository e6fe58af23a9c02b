"""Edges of the graph of modules. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from megatron_hetero.layout.layout import Layout


@dataclass(frozen=True, slots=True)
class Edge:
    """Rows go from a stage of `source` to a stage of `target`, and their gradients back.

    The edge without stages, ``vision>text``, goes from the last stage to the first. Others name both:
    ``vision.0>text.1``. See `Edge.of`. Raises `ValueError` where one stage is given without the other.
    """

    source: str
    target: str
    source_stage: int | None = None
    target_stage: int | None = None

    def __post_init__(self) -> None:
        if (self.source_stage is None) != (self.target_stage is None):
            raise ValueError(
                f"edge {self.source} to {self.target}: found a stage at one end, expected one at both or at none"
            )

    @classmethod
    def of(cls, source: str, source_stage: int, source_stages: int, target: str, target_stage: int) -> Edge:
        """The edge between two stages; `source_stages`: their number. Equal edges have equal names."""
        if source_stage == source_stages - 1 and target_stage == 0:
            return cls(source, target)
        return cls(source, target, source_stage, target_stage)

    def source_coordinate(self, layout: Layout) -> int:
        """The pipeline coordinate at which rows leave, in the layout of `source`."""
        return layout.pp - 1 if self.source_stage is None else self.source_stage % layout.pp

    def target_coordinate(self, layout: Layout) -> int:
        """The pipeline coordinate at which rows arrive, in the layout of `target`."""
        return (self.target_stage or 0) % layout.pp

    def source_ranks(self, layout: Layout) -> tuple[int, ...]:
        """The ranks that rows leave, ascending."""
        return layout.stage(self.source_coordinate(layout)).ranks

    def target_ranks(self, layout: Layout) -> tuple[int, ...]:
        """The ranks at which rows arrive, ascending."""
        return layout.stage(self.target_coordinate(layout)).ranks

    @property
    def ends(self) -> tuple[str, str]:
        """Both ends as text, such as ``vision.0`` and ``text.1``."""
        if self.source_stage is None:
            return self.source, self.target
        return f"{self.source}.{self.source_stage}", f"{self.target}.{self.target_stage}"

    def __str__(self) -> str:
        return ">".join(self.ends)


def as_edge(edge: Edge | tuple[str, str], layouts: Mapping[str, Layout]) -> Edge:
    """`edge` by its only name, for modules in these layouts; a tuple is the edge from the last stage to the first."""
    if not isinstance(edge, Edge):
        return Edge(*edge)
    if edge.source_stage is None or edge.target_stage is None:
        return edge
    return Edge.of(edge.source, edge.source_stage, layouts[edge.source].pp, edge.target, edge.target_stage)
