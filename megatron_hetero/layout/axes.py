"""The axes of parallelism, the views of a layout's ranks, and which degrees suit a module. Pure.

The degrees of the main view multiply to the number of ranks of a layout. A further view arranges the ranks of each
pipeline stage differently: its degrees multiply to the number of these ranks, so that some layers can be split
differently from the rest. Each parameter belongs to one view, which determines the ranks that hold its shards and the
ranks that sum its gradients.

Families declare further views in `ModuleShape.views`, such as `EXPERTS`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from math import prod
from typing import Literal, NamedTuple

Split = Literal["weights", "tokens", "samples", "layers", "experts"]


@dataclass(frozen=True)
class Axis:
    """An axis of parallelism. Ranks that differ only in this axis hold different shards of what it `splits`. `follows`:
    for an axis of a further view, the axis of the main view whose degree is its default; if empty, the default is 1.
    """

    name: str
    splits: Split
    follows: str = ""


TABLE = (
    Axis("tp", "weights"),
    Axis("sp", "tokens"),
    Axis("cp", "tokens"),
    Axis("dp", "samples"),
    Axis("pp", "layers"),
)
"""The axes of the main view, from the fastest-varying axis among a layout's ranks to the slowest."""
AXES = tuple(axis.name for axis in TABLE)


@dataclass(frozen=True)
class View:
    """An arrangement of ranks along `axes`, from the fastest-varying axis to the slowest. Exactly one axis splits
    samples; if a layout's text omits its degree, it takes the remaining ranks. The name has no dot.
    """

    name: str
    axes: tuple[Axis, ...]

    def __post_init__(self) -> None:
        assert "." not in self.name, "dots separate names of modules, views and tensors"
        assert len(self.axes_of("samples")) == 1, "a view has one axis of samples"

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the view's axes."""
        return tuple(axis.name for axis in self.axes)

    def axes_of(self, *splits: Split) -> tuple[str, ...]:
        """Return the names of the axes that split any of `splits`."""
        return tuple(axis.name for axis in self.axes if axis.splits in splits)

    @property
    def rest(self) -> str:
        """The name of the axis of samples, which takes the ranks that remain after the other axes."""
        return self.axes_of("samples")[0]

    @property
    def stated(self) -> tuple[str, ...]:
        """The names of all axes except `rest`; their degrees determine the degree of `rest`."""
        return tuple(name for name in self.names if name != self.rest)

    @property
    def shard_axes(self) -> tuple[str, ...]:
        """Axes along which ranks of a stage hold different shards of a parameter of this view."""
        return self.axes_of("weights", "experts")

    @property
    def sum_axes(self) -> tuple[str, ...]:
        """Axes along which ranks hold the same shards and sum their gradients."""
        return self.axes_of("tokens", "samples")


MAIN = View("main", TABLE)
"""The main view, which every layout has."""
axes_of = MAIN.axes_of
EXPERTS = View("experts", (Axis("ep", "experts", follows="tp"), Axis("edp", "samples")))
"""The view of layers with experts, which are divided over neighbouring ranks of a stage, regardless of the ranks'
coordinates in the main view (DeepSpeed and Megatron-Core call this folding). By default `ep` equals `tp`.
"""
SPLIT_EXPERTS = "etp"
"""The axis along which other libraries split the matrices of each expert."""
WHOLE_EXPERTS = (
    "experts are small: products with shards of their matrices would be thin, and tp ranks would repeat the exchange "
    "of tokens; ep divides whole experts"
)
"""The reason, in error messages, why this library does not split single experts."""


class Fold(NamedTuple):
    """A further view of a layout, with the degrees of its `stated` axes."""

    view: View
    degrees: tuple[int, ...]


def axis_names(views: Iterable[View]) -> tuple[str, ...]:
    """Return the names of the axes of the main view and of `views`, which must all differ."""
    names = (*AXES, *(name for view in views for name in view.names))
    assert len(set(names)) == len(names), f"an axis is in two views: {', '.join(names)}"
    return names


class LayoutProblem(Exception):
    """A problem of a layout: what was found, what was expected and why, and the axis to change, if any."""

    def __init__(self, found: str, expected: str, why: str, axis: str = "") -> None:
        super().__init__(found)
        self.found, self.expected, self.why, self.axis = found, expected, why, axis


class Limit(NamedTuple):
    """A limit on layouts: the product of the degrees of `axes` must divide `size`, the number of `units`, such as
    heads, in each layer of a `kind`. `layers`: the numbers of the layers with this limit; empty for all layers.
    """

    axes: tuple[str, ...]
    size: int
    kind: str = "attention"
    units: str = "heads"
    layers: tuple[int, ...] = ()

    def problem(self, degrees: Mapping[str, int]) -> LayoutProblem | None:
        """Return the problem of the first axis whose degree breaks the limit; None if no axis does."""
        subject = f"{self.size} {self.kind} {self.units}"
        if self.layers:
            some = ", ".join(map(str, self.layers[:4])) + ", …" * (len(self.layers) > 4)
            subject = f"{self.kind} of layers {some} has {self.size} {self.units}"
        for number, axis in enumerate(self.axes, 1):
            over = self.axes[:number]
            if self.size % prod(degrees[each] for each in over):
                *others, last = [subject, *(f"{each}:{degrees[each]}" for each in over)]
                found, expected = f"{', '.join(others)} and {last}", f"{'·'.join(over)} to divide {self.size}"
                split = "context" if axis == "cp" else "sequence"
                does = f"{split}-parallel {self.kind} exchanges tokens for"
                does = "each tensor-parallel rank computes" if axis == "tp" else does
                return LayoutProblem(found, expected, f"{does} whole {self.units}", axis)
        return None


@dataclass(frozen=True)
class ModuleShape:
    """The sizes of a module that limit its layouts. `attention_heads`: number of query heads. `views`: further views
    that the layers need. `counts`: number of items that these views split, such as ``{"experts": 128}``. `limits`:
    limits that the layers set; by default tp·sp must divide `attention_heads`.
    """

    name: str
    attention_heads: int
    kv_heads: int
    hidden_size: int
    layers: int
    kind: Literal["encoder", "text"]
    views: tuple[View, ...] = ()
    counts: Mapping[Split, int] = field(default_factory=dict[Split, int], hash=False)
    limits: tuple[Limit, ...] | None = None


# A layout suits a module where
#   1. degrees are within the limits of each kind of layer (tp divides the query heads, sp the heads of a tp rank),
#   2. pp is at most the number of layers,
#   3. the degree of each axis of a further view is at most the number of items that it splits, such as experts.
# The hidden size is never split, key/value heads are replicated as often as needed, and the widths of MLP and
# vocabulary are padded. So divisors of legal degrees are legal.
def problem_of(shape: ModuleShape, degrees: Mapping[str, int]) -> LayoutProblem | None:
    """Return the first reason why `degrees` do not suit the module; None if they do. Omitted degrees of further views
    are 1.
    """
    limits = (Limit(("tp", "sp"), shape.attention_heads),) if shape.limits is None else shape.limits
    for limit in limits:
        if problem := limit.problem(degrees):
            return problem
    pp = degrees["pp"]
    if pp > shape.layers:
        found = f"{shape.layers} layers and pp:{pp}"
        return LayoutProblem(found, f"pp of at most {shape.layers}", "each pipeline stage holds a layer or more", "pp")
    for axis in (axis for view in shape.views for axis in view.axes):
        count, degree = shape.counts.get(axis.splits), degrees.get(axis.name, 1)
        if count is not None and degree > count:
            found, why = f"{count} {axis.splits} and {axis.name}:{degree}", "each rank holds one of them or more"
            return LayoutProblem(found, f"{axis.name} of at most {count}", why, axis.name)
    return None


@lru_cache(maxsize=256)
def divisors(n: int) -> tuple[int, ...]:
    """Return the divisors of n, ascending."""
    return tuple(d for d in range(1, n + 1) if n % d == 0)
