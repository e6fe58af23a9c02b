"""The axes of parallelism, the views of a layout's ranks, and which degrees suit a module. Pure.

The main view's degrees multiply to all ranks of a layout. A further view folds the ranks of each pipeline stage once
more: its degrees multiply to them too, whatever the main view's are, so that some layers can be split otherwise than
the rest. Each parameter belongs to one view, which determines which ranks have its parts and which sum its gradients.

Families declare further views in `ModuleShape.views`. An example, which divides experts over neighbouring ranks:

    View("experts", (Axis("ep", "experts"), Axis("edp", "samples")))
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import product
from math import prod
from typing import Literal, NamedTuple

from megatron_hetero.base.errors import UserError

Split = Literal["weights", "tokens", "samples", "layers", "experts"]


@dataclass(frozen=True)
class Axis:
    """An axis by its name in layouts. Ranks that differ only in it have different parts of what it `splits`."""

    name: str
    splits: Split


TABLE = (
    Axis("tp", "weights"),
    Axis("sp", "tokens"),
    Axis("cp", "tokens"),
    Axis("dp", "samples"),
    Axis("pp", "layers"),
)
"""From the axis that varies fastest among a layout's ranks to the slowest."""
AXES = tuple(axis.name for axis in TABLE)


@dataclass(frozen=True)
class View:
    """Axes from the one that varies fastest among the ranks to the slowest. One of them splits samples; its degree,
    what the others leave of the ranks, may be omitted in a layout's text.

    Raises:
        UserError: not exactly one axis splits samples, or the name has a dot.
    """

    name: str
    axes: tuple[Axis, ...]

    def __post_init__(self) -> None:
        if "." in self.name:
            because, fix = "dots separate names of modules, views and tensors", "rename the view"
            raise UserError.at(f"view {self.name}", found="a dot", expected="none", because=because, fix=fix)
        if (found := len(self.axes_of("samples"))) != 1:
            fix = "add one, whose degree is what the others leave of the ranks" if not found else "keep one"
            raise UserError.at(f"view {self.name}", found=f"{found} axes of samples", expected="one", fix=fix)

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the axes."""
        return tuple(axis.name for axis in self.axes)

    def axes_of(self, *splits: Split) -> tuple[str, ...]:
        """Names of the axes that split any of these."""
        return tuple(axis.name for axis in self.axes if axis.splits in splits)

    @property
    def rest(self) -> str:
        """The axis of samples, whose degree is what the others leave of the ranks."""
        return self.axes_of("samples")[0]

    @property
    def stated(self) -> tuple[str, ...]:
        """The other axes, which are 1 unless a layout's text gives them."""
        return tuple(name for name in self.names if name != self.rest)

    @property
    def part_axes(self) -> tuple[str, ...]:
        """Axes along which ranks of a stage have different parts of a parameter of this view."""
        return self.axes_of("weights", "experts")

    @property
    def sum_axes(self) -> tuple[str, ...]:
        """Axes along which ranks have the same parts and sum their gradients."""
        return self.axes_of("tokens", "samples")


MAIN = View("main", TABLE)
"""The view that every layout has."""
axes_of = MAIN.axes_of


class Fold(NamedTuple):
    """A further view of a layout, with the degrees of its `stated` axes."""

    view: View
    degrees: tuple[int, ...]


def axis_names(views: Iterable[View]) -> tuple[str, ...]:
    """Names of the axes of the main view and of these. Raises `UserError` if two have one name."""
    names = (*AXES, *(name for view in views for name in view.names))
    if twice := [name for name, count in Counter(names).items() if count > 1]:
        fix = "rename one: a layout's text tells axes apart by name"
        raise UserError.at("views", found=f"axis `{twice[0]}` twice", expected="each axis in one view", fix=fix)
    return names


@dataclass(frozen=True)
class ModuleShape:
    """The sizes of a module that limit its layouts. `attention_heads` are query heads. `views`: further views that its
    layers need. `parts`: numbers of what these views split, such as ``{"experts": 128}``.
    """

    name: str
    attention_heads: int
    kv_heads: int
    hidden_size: int
    layers: int
    kind: Literal["encoder", "text"]
    views: tuple[View, ...] = ()
    parts: Mapping[Split, int] = field(default_factory=dict[Split, int], hash=False)


class LayoutProblem(NamedTuple):
    """Why degrees do not suit a module: the axis to change, what was found and expected, and the reason."""

    axis: str
    found: str
    expected: str
    why: str


# A layout suits a module where
#   1. tp divides the query heads,
#   2. sp divides the heads that tp left,
#   3. pp is at most the number of layers,
#   4. the axes of a further view split what they split into no more parts than there are.
# The hidden size is never split, key/value heads are replicated as often as needed, and the widths of MLP and
# vocabulary are padded. So divisors of legal degrees are legal.
def problem_of(shape: ModuleShape, degrees: Mapping[str, int]) -> LayoutProblem | None:
    """The first reason why these degrees do not suit the module; None if they do. Axes of further views are 1 unless
    given.
    """
    tp, sp, pp, heads = degrees["tp"], degrees["sp"], degrees["pp"], shape.attention_heads
    if heads % tp:
        why = "each tensor-parallel rank computes whole heads"
        return LayoutProblem("tp", f"{heads} attention heads and tp:{tp}", f"tp to divide {heads}", why)
    if heads % (tp * sp):
        found = f"{heads} attention heads, tp:{tp} and sp:{sp}"
        why = "sequence-parallel attention exchanges tokens for whole heads"
        return LayoutProblem("sp", found, f"tp·sp to divide {heads}", why)
    if pp > shape.layers:
        found = f"{shape.layers} layers and pp:{pp}"
        return LayoutProblem("pp", found, f"pp of at most {shape.layers}", "each pipeline stage holds a layer or more")
    for axis in (axis for view in shape.views for axis in view.axes):
        most, degree = shape.parts.get(axis.splits), degrees.get(axis.name, 1)
        if most is not None and degree > most:
            found, why = f"{most} {axis.splits} and {axis.name}:{degree}", "each rank holds one of them or more"
            return LayoutProblem(axis.name, found, f"{axis.name} of at most {most}", why)
    return None


@lru_cache(maxsize=256)
def divisors(n: int) -> tuple[int, ...]:
    """The divisors of n, ascending."""
    return tuple(d for d in range(1, n + 1) if n % d == 0)


def closest_degrees(
    wanted: Mapping[str, int], ranks: int, shape: ModuleShape | None, views: Sequence[View] = ()
) -> dict[str, int]:
    """The legal degrees over `ranks` ranks that are closest to the `wanted` ones, which are 1 unless given. `dp` and
    the axis of samples of each further view take the ranks that are left; pure `dp` suits every shape.
    """
    axes = [axis for axis in AXES if axis != "dp"]
    best = _closest(axes, wanted, ranks, {}, shape)
    best |= {"dp": ranks // prod(best.values())}
    for view in views:
        best |= _closest(view.stated, wanted, ranks // best["pp"], best, shape)
    return best


def _closest(
    axes: Sequence[str], wanted: Mapping[str, int], ranks: int, others: Mapping[str, int], shape: ModuleShape | None
) -> dict[str, int]:
    """Legal degrees of `axes` whose product divides `ranks` and is as large as can be, given those of other axes."""
    options = ([d for d in divisors(ranks) if d <= wanted.get(axis, 1)] for axis in axes)
    candidates = (dict(zip(axes, degrees, strict=True)) for degrees in product(*options))
    legal = (
        degrees
        for degrees in candidates
        if ranks % prod(degrees.values()) == 0 and (shape is None or problem_of(shape, {**others, **degrees}) is None)
    )
    return max(legal, key=lambda degrees: prod(degrees.values()))
