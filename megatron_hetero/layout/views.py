"""Views: ways in which a layout sees its ranks. Pure.

The main view's degrees multiply to all ranks of a layout. A further view folds the ranks of each pipeline stage once
more: its degrees multiply to them too, whatever the main view's are, so that some layers can be split otherwise than
the rest. Each parameter belongs to one view, which says who holds its parts and who sums its gradients.

`VIEWS` lists the views of this package; a family may bring its own in `ModuleShape.views`. An example, which divides
experts over neighbouring ranks:

    View("experts", (Axis("ep", "experts"), Axis("edp", "samples")))
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from megatron_hetero.errors import UserError
from megatron_hetero.layout.axes import AXES, TABLE, Axis, Split


@dataclass(frozen=True)
class View:
    """A name, and axes from the one that varies fastest among the ranks to the slowest.

    One axis splits samples. It need not be written in a layout's text: its degree is what the others leave.

    Raises:
        UserError: not exactly one axis splits samples, or the name has a dot.
    """

    name: str
    axes: tuple[Axis, ...]

    def __post_init__(self) -> None:
        if "." in self.name:
            because, fix = "dots part names of modules, views and tensors", "rename the view"
            raise UserError.at(f"view {self.name}", found="a dot", expected="none", because=because, fix=fix)
        if (found := len(self.axes_of("samples"))) != 1:
            fix = "add one, whose degree is what the others leave of the ranks" if not found else "keep one"
            raise UserError.at(f"view {self.name}", found=f"{found} axes of samples", expected="one", fix=fix)

    @property
    def names(self) -> tuple[str, ...]:
        """The names of all axes."""
        return tuple(axis.name for axis in self.axes)

    def axes_of(self, *splits: Split) -> tuple[str, ...]:
        """The names of the axes that split any of these."""
        return tuple(axis.name for axis in self.axes if axis.splits in splits)

    @property
    def rest(self) -> str:
        """The axis whose degree is what the others leave."""
        return self.axes_of("samples")[0]

    @property
    def stated(self) -> tuple[str, ...]:
        """The other axes: those that a layout's text gives, or that are 1."""
        return tuple(name for name in self.names if name != self.rest)

    @property
    def part_axes(self) -> tuple[str, ...]:
        """Axes along which ranks of a stage hold different parts of a parameter of this view."""
        return self.axes_of("weights", "experts")

    @property
    def sum_axes(self) -> tuple[str, ...]:
        """Axes along which ranks hold the same parts, and sum their gradients."""
        return self.axes_of("tokens", "samples")


MAIN = View("main", TABLE)
"""The view of all parameters of a module that has no other."""
VIEWS = (MAIN,)
"""Views that modules may have."""


class Fold(NamedTuple):
    """A further view of a layout, with the degrees of its `stated` axes."""

    view: View
    degrees: tuple[int, ...]


def axis_names(views: Iterable[View]) -> tuple[str, ...]:
    """The names of the axes of the main view and of these. Raises `UserError` if two have one name."""
    names = (*AXES, *(name for view in views for name in view.names))
    if twice := [name for name, count in Counter(names).items() if count > 1]:
        fix = "rename one: a layout's text tells axes apart by name"
        raise UserError.at("views", found=f"axis `{twice[0]}` twice", expected="each axis in one view", fix=fix)
    return names
