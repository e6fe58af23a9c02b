"""Edges of the graph of modules. Pure.

Graphs of modules: between which of them rows go, and what the rows are. Pure.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, TypeVar

from megatron_hetero.base.errors import ROWS, UserError
from megatron_hetero.layout.grammar import did_you_mean
from megatron_hetero.layout.layout import Layout

if TYPE_CHECKING:
    import torch

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


@dataclass(frozen=True, eq=False)
class Graph:
    """Modules, and the edges along which rows go from one to another.

        Graph({"vision": ["text"], "text": ["generator"]}, width=4096, dtype=torch.bfloat16)

    Raises `UserError` if an edge is given twice, leads from a module to itself, or has no width.
    """

    feeds: Mapping[str, Sequence[str]] | Sequence[Ends]
    """The modules that each module feeds, from its last stage to the first of theirs; or the edges."""
    width: int | ByEdge[int]
    """Elements of a row, of all edges or of each."""
    dtype: torch.dtype
    """Of rows, and of hidden states between stages."""
    transport: torch.dtype | None = None
    """Of rows on the wire; None: `dtype`."""
    outputs: ByEdge[Sequence[str]] | None = None
    """The outputs of a module that cross along an edge, of edges where these are not its `rows` alone."""

    def __post_init__(self) -> None:
        for name, dtype in (("dtype", self.dtype), ("transport", self.transport)):
            if dtype is not None and not dtype.is_floating_point:
                fix = "use bfloat16 or float32"
                raise UserError.at(f"Graph: {name}", found=str(dtype), expected="a floating dtype", fix=fix)
        edges = self.edges
        for at, edge in enumerate(edges):
            problem = "twice" if edge in edges[:at] else "from a module to itself" if edge.source == edge.target else ""
            if problem:
                raise UserError.at("Graph: edges", problem=f"`{edge}` {problem}", fix="remove it")
        for name, given in (("width", self.width), ("outputs", self.outputs)):
            for ends in given if isinstance(given, Mapping) else ():
                if edge_of(ends) not in edges:
                    expected = ", ".join(f"`{edge}`" for edge in edges) or "none"
                    raise UserError.at(
                        f"Graph: {name}", found=f"`{edge_of(ends)}`", expected=f"edges of the graph, {expected}",
                        fix="correct it",
                    )  # fmt: skip
        for edge in edges:
            if edge not in self._widths:
                raise UserError.at("Graph: width", found=f"none for `{edge}`", expected="one per edge", fix="add it")
            if (width := self._widths[edge]) < 1:
                fix = "give the elements of a row"
                raise UserError.at("Graph: width", found=str(width), expected="1 or more", fix=fix)

    @cached_property
    def edges(self) -> tuple[Edge, ...]:
        """All edges, in the order in which they were given."""
        if isinstance(self.feeds, Mapping):
            return tuple(Edge(source, target) for source, targets in self.feeds.items() for target in targets)
        return tuple(map(edge_of, self.feeds))

    @cached_property
    def modules(self) -> tuple[str, ...]:
        """The names of all modules."""
        alone = self.feeds if isinstance(self.feeds, Mapping) else ()
        return tuple(dict.fromkeys([*alone, *(name for edge in self.edges for name in (edge.source, edge.target))]))

    def width_of(self, edge: Edge) -> int:
        """Elements of a row of one output."""
        return self._widths[edge]

    def outputs_of(self, edge: Edge) -> tuple[str, ...]:
        """The outputs that cross along the edge."""
        return self._outputs.get(edge, (ROWS,))

    def in_layouts(self, layouts: Mapping[str, Layout]) -> Graph:
        """The same graph, with each edge by its only name in these layouts, see `as_edge`. Raises `UserError`."""
        named = {edge: as_edge(edge, layouts) for edge in self.edges}
        return replace(
            self,
            feeds=tuple(named.values()),
            width={named[edge]: self.width_of(edge) for edge in self.edges},
            outputs={named[edge]: self.outputs_of(edge) for edge in self.edges},
        )

    @cached_property
    def _widths(self) -> dict[Edge, int]:
        if isinstance(self.width, Mapping):
            return {edge_of(ends): width for ends, width in self.width.items()}
        return dict.fromkeys(self.edges, self.width)

    @cached_property
    def _outputs(self) -> dict[Edge, tuple[str, ...]]:
        return {edge_of(ends): tuple(names) for ends, names in (self.outputs or {}).items()}
