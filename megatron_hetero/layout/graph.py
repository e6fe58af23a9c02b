"""Graphs of modules: between which of them rows go, and what the rows are. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

from megatron_hetero.errors import UserError
from megatron_hetero.layout.edge import ByEdge, Edge, Ends, as_edge, edge_of
from megatron_hetero.layout.layout import Layout
from megatron_hetero.names import ROWS

if TYPE_CHECKING:
    import torch


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
