"""Which degrees suit a module, by its shape, and the closest that do. Pure; used by `megatron_hetero.layout.layout`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from math import prod
from typing import Literal, NamedTuple

from megatron_hetero.layout.axes import AXES


@dataclass(frozen=True)
class ModuleShape:
    """What the checks need to know of a module.

    `attention_heads` are query heads; `kv_heads` may be fewer.
    """

    name: str
    attention_heads: int
    kv_heads: int
    hidden_size: int
    layers: int
    kind: Literal["encoder", "text"]


class LayoutProblem(NamedTuple):
    """Why degrees do not suit a module: the axis to change, what was found and expected, and the reason."""

    axis: str
    found: str
    expected: str
    why: str


# A layout suits a module where
#   1. tp divides the query heads,
#   2. sp divides the heads that tp left,
#   3. pp is at most the number of layers.
# The hidden size needs nothing, since it is never split; nor do key/value heads, which are replicated as often as it
# takes; nor do the MLP and the vocabulary, whose widths are padded. So divisors of legal degrees are legal.
def problem_of(shape: ModuleShape, degrees: Mapping[str, int]) -> LayoutProblem | None:
    """The first reason why these degrees, one for each axis, do not suit the module; None where they do."""
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
    return None


@lru_cache(maxsize=256)
def divisors(n: int) -> tuple[int, ...]:
    """The divisors of n, ascending."""
    return tuple(d for d in range(1, n + 1) if n % d == 0)


def closest_degrees(wanted: Mapping[str, int], ranks: int, shape: ModuleShape | None) -> dict[str, int]:
    """The legal degrees over `ranks` ranks that keep most of the wanted ones; `dp` takes what is left.

    There always are some, since pure `dp` suits every shape.

    Args:
        wanted: degrees by axis; those left out count as 1, and `dp` as wanted by nobody.
        ranks: number of ranks.
        shape: of the module, where it is known.
    """

    def options(axis: str) -> Sequence[int]:
        degree = wanted.get(axis, 1)
        return [d for d in divisors(ranks) if d <= degree]

    def legal(degrees: dict[str, int]) -> bool:
        return ranks % prod(degrees.values()) == 0 and (shape is None or problem_of(shape, degrees) is None)

    axes = [axis for axis in AXES if axis != "dp"]
    candidates = (dict(zip(axes, degrees, strict=True)) for degrees in product(*map(options, axes)))
    best = max(filter(legal, candidates), key=lambda degrees: prod(degrees.values()))
    return best | {"dp": ranks // prod(best.values())}
