"""The graph of modules: edges, and the sizes and dtypes of the rows that cross edges. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, TypeVar

from megatron_hetero.base.errors import UserError, one_of
from megatron_hetero.layout.grammar import did_you_mean
from megatron_hetero.layout.layout import Layout
from megatron_hetero.layout.names import ROWS

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class Edge:
    """An edge along which rows go from a stage of `source` to a stage of `target`, and their gradients back.

    Without stages, ``vision>text``, it goes from the last stage of `source` to the first of `target`. Other edges name
    both stages, ``vision.0>text.1``; see `Edge.of`. Raises `UserError` if one stage is given without the other.
    """

    source: str
    target: str
    source_stage: int | None = None
    target_stage: int | None = None

    def __post_init__(self) -> None:
        if (self.source_stage is None) != (self.target_stage is None):
            where, fix = f"edge {self.source} to {self.target}", "give `source_stage` and `target_stage`"
            raise UserError.at(where, found="a stage at one end", expected="one at both or at none", fix=fix)

    @classmethod
    def of(cls, source: str, source_stage: int, source_stages: int, target: str, target_stage: int) -> Edge:
        """Return the canonical edge between two stages of modules; `source` has `source_stages` stages."""
        if source_stage == source_stages - 1 and target_stage == 0:
            return cls(source, target)
        return cls(source, target, source_stage, target_stage)

    def source_coordinate(self, layout: Layout) -> int:
        """Return the pipeline coordinate that sends rows, in the layout of `source`."""
        return layout.pp - 1 if self.source_stage is None else self.source_stage % layout.pp

    def target_coordinate(self, layout: Layout) -> int:
        """Return the pipeline coordinate that receives rows, in the layout of `target`."""
        return (self.target_stage or 0) % layout.pp

    def source_ranks(self, layout: Layout) -> tuple[int, ...]:
        """Return the ranks that send rows, ascending."""
        return layout.stage(self.source_coordinate(layout)).ranks

    def target_ranks(self, layout: Layout) -> tuple[int, ...]:
        """Return the ranks that receive rows, ascending."""
        return layout.stage(self.target_coordinate(layout)).ranks

    @property
    def ends(self) -> tuple[str, str]:
        """The two ends of the edge as text, such as ``vision.0`` and ``text.1``."""
        if self.source_stage is None:
            return self.source, self.target
        return f"{self.source}.{self.source_stage}", f"{self.target}.{self.target_stage}"

    def __str__(self) -> str:
        return ">".join(self.ends)


T = TypeVar("T")
Ends = Edge | tuple[str, str]
"""An edge, or a pair of modules: the edge from the last stage of one to the first stage of the other."""
ByEdge = Mapping[Edge, T] | Mapping[tuple[str, str], T] | Mapping[Ends, T]


def edge_of(ends: Ends) -> Edge:
    """Return the edge between these ends. Raises `UserError` if they are neither an edge nor a pair."""
    if isinstance(ends, Edge):
        return ends
    if isinstance(ends, str) or len(ends) != 2:
        fix = 'write `edges=[("vision", "text")]`, and an edge between two stages as an `Edge`'
        raise UserError.at("edges", found=repr(ends), expected="pairs of modules, or `Edge`s", fix=fix)
    return Edge(*ends)


def as_edge(ends: Ends, layouts: Mapping[str, Layout]) -> Edge:
    """Return the edge between `ends` in the canonical form of `Edge.of`, for modules in `layouts`.

    Raises:
        UserError: as `edge_of`, or no layout is given for one of its modules.
    """
    edge = edge_of(ends)
    for module in (edge.source, edge.target):
        if module not in layouts:
            found = f"no module `{module}`{did_you_mean(str(module), layouts)}"
            expected = one_of(layouts, "layouts", "modules among")
            raise UserError.at(f"edge {edge}", found=found, expected=expected, fix="use the names in the layouts")
    if edge.source_stage is None or edge.target_stage is None:
        return edge
    return Edge.of(edge.source, edge.source_stage, layouts[edge.source].pp, edge.target, edge.target_stage)


@dataclass(frozen=True, eq=False)
class Graph:
    """A graph of modules, with edges along which rows go from one module to another.

        Graph({"vision": ["text"], "text": ["generator"]}, width=4096, dtype=torch.bfloat16)

    Raises `UserError` if an edge is given twice, leads from a module to itself, or has no width.
    """

    feeds: Mapping[str, Sequence[str]] | Sequence[Ends]
    """The modules to whose first stages the last stage of each module sends rows; or all edges."""
    width: int | ByEdge[int]
    """Number of elements of a row, for all edges or by edge."""
    dtype: torch.dtype
    """The dtype of rows, and of hidden states between stages."""
    transport: torch.dtype | None = None
    """The dtype of rows on the wire; by default `dtype`."""
    outputs: ByEdge[Sequence[str]] | None = None
    """Outputs of the source module that cross each edge; by default its `rows` alone."""

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
                    expected = one_of((f"`{edge}`" for edge in edges), "edges", "edges of the graph,")
                    found, fix = f"`{edge_of(ends)}`", "correct it"
                    raise UserError.at(f"Graph: {name}", found=found, expected=expected, fix=fix)
        for edge in edges:
            if edge not in self._widths:
                raise UserError.at("Graph: width", found=f"none for `{edge}`", expected="one per edge", fix="add it")
            if (width := self._widths[edge]) < 1:
                fix = "give the elements of a row"
                raise UserError.at("Graph: width", found=str(width), expected="1 or more", fix=fix)

    @cached_property
    def edges(self) -> tuple[Edge, ...]:
        """All edges, in the given order."""
        if isinstance(self.feeds, Mapping):
            return tuple(Edge(source, target) for source, targets in self.feeds.items() for target in targets)
        return tuple(map(edge_of, self.feeds))

    @cached_property
    def modules(self) -> tuple[str, ...]:
        """The names of all modules."""
        alone = self.feeds if isinstance(self.feeds, Mapping) else ()
        return tuple(dict.fromkeys([*alone, *(name for edge in self.edges for name in (edge.source, edge.target))]))

    def width_of(self, edge: Edge) -> int:
        """Return the number of elements of a row that crosses the edge."""
        return self._widths[edge]

    def outputs_of(self, edge: Edge) -> tuple[str, ...]:
        """Return the names of the outputs that cross the edge."""
        given = {edge_of(ends): tuple(names) for ends, names in (self.outputs or {}).items()}
        return given.get(edge, (ROWS,))

    def in_layouts(self, layouts: Mapping[str, Layout]) -> Graph:
        """Return the same graph with canonical edges, see `as_edge`. Raises `UserError`."""
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
