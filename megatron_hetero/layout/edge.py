"""Edges of the graph of modules. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeVar

from megatron_hetero.errors import UserError
from megatron_hetero.layout.grammar import did_you_mean
from megatron_hetero.layout.layout import Layout

_EDGE = re.compile(r"([^.>]+)(?:\.(\d+))?>([^.>]+)(?:\.(\d+))?")


@dataclass(frozen=True, slots=True)
class Edge:
    """Rows go from a stage of `source` to a stage of `target`, and their gradients back.

    The edge without stages, ``vision>text``, goes from the last stage to the first. Others name both:
    ``vision.0>text.1``. See `Edge.of`. Raises `UserError` where one stage is given without the other.
    """

    source: str
    target: str
    source_stage: int | None = None
    target_stage: int | None = None

    def __post_init__(self) -> None:
        if (self.source_stage is None) != (self.target_stage is None):
            raise UserError.at(
                f"edge {self.source} to {self.target}",
                found="a stage at one end",
                expected="one at both or at none",
                fix="give `source_stage` and `target_stage`",
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

    @classmethod
    def parse(cls, text: str) -> Edge:
        """The inverse of `str`. Raises `ValueError`."""
        found = _EDGE.fullmatch(text)
        if not found:
            raise ValueError(f"found {text!r}, expected an edge such as 'vision>text' or 'vision.0>text.1'")
        source, own, target, stage = found.groups()
        return cls(source, target, *(None if each is None else int(each) for each in (own, stage)))

    @property
    def ends(self) -> tuple[str, str]:
        """Both ends as text, such as ``vision.0`` and ``text.1``."""
        if self.source_stage is None:
            return self.source, self.target
        return f"{self.source}.{self.source_stage}", f"{self.target}.{self.target_stage}"

    def __str__(self) -> str:
        return ">".join(self.ends)


T = TypeVar("T")
Ends = Edge | tuple[str, str]
"""An edge; two modules alone are the edge from the last stage of one to the first of the other."""
ByEdge = Mapping[Edge, T] | Mapping[tuple[str, str], T] | Mapping[Ends, T]


def edge_of(ends: Ends) -> Edge:
    """The edge, as it is named. Raises `UserError` if it is none."""
    if isinstance(ends, Edge):
        return ends
    if isinstance(ends, str) or len(ends) != 2:
        raise UserError.at(
            "edges",
            found=repr(ends),
            expected="pairs of modules, or `Edge`s",
            fix='write `edges=[("vision", "text")]`, and an edge between two stages as an `Edge`',
        )
    return Edge(*ends)


def as_edge(ends: Ends, layouts: Mapping[str, Layout]) -> Edge:
    """The edge by its only name, for modules in these layouts.

    Raises:
        UserError: it is no edge, or there is no such module.
    """
    edge = edge_of(ends)
    for module in (edge.source, edge.target):
        if module not in layouts:
            raise UserError.at(
                f"edge {edge}",
                found=f"no module `{module}`{did_you_mean(str(module), layouts)}",
                expected=f"modules among {', '.join(layouts)}",
                fix="name them as in the layouts",
            )
    if edge.source_stage is None or edge.target_stage is None:
        return edge
    return Edge.of(edge.source, edge.source_stage, layouts[edge.source].pp, edge.target, edge.target_stage)
