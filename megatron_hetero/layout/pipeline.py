"""The layers of each pipeline stage of a module. Pure.

Stages are numbered in the order in which activations pass through them. Each pipeline rank has one stage, or several
(virtual stages, Narayanan et al. 2021, arXiv 2104.04473): stage i is on pipeline rank i mod pp.

    8 layers, pp 2                      pp 0: 0-3           pp 1: 4-7
    8 layers, pp 2, 2 stages per rank   pp 0: 0-1, 4-5      pp 1: 2-3, 6-7
    9 layers, pp 2                      pp 0: 0-4           pp 1: 5-8
   11 layers, pp 4                      pp 0: 0-2  pp 1: 3-5  pp 2: 6-8  pp 3: 9-10
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from itertools import accumulate
from math import lcm

from megatron_hetero.base.errors import UserError

LAYERS = "layers."
"""Prefix of the names of layer parameters, which the number of the layer follows."""


@dataclass(frozen=True)
class PipelineStage:
    """A pipeline stage: layers [first, last) of a module, after the embedding if `is_first`, and before the final norm
    and the head or merger if `is_last`.
    """

    first: int
    last: int
    is_first: bool
    is_last: bool

    @classmethod
    def whole(cls, layers: int) -> PipelineStage:
        """Return the only stage of a module with `layers` layers and no pipeline parallelism."""
        return cls(0, layers, True, True)

    @property
    def layers(self) -> range:
        """The numbers of the stage's layers in the whole module."""
        return range(self.first, self.last)

    def __str__(self) -> str:
        return f"layers {self.first}" if len(self.layers) == 1 else f"layers {self.first}-{self.last - 1}"

    def global_name(self, parameter: str) -> str:
        """Return the name in the whole module of a stage's `parameter`; each stage numbers its layers from 0."""
        if not parameter.startswith(LAYERS):
            return parameter
        number, _, rest = parameter.removeprefix(LAYERS).partition(".")
        return f"{LAYERS}{int(number) + self.first}.{rest}"


def cut_stages(
    layers: int,
    pp: int,
    *,
    per_rank: int = 1,
    split: Sequence[int] | None = None,
    costs: Sequence[float] | None = None,
    module: str = "text",
) -> tuple[PipelineStage, ...]:
    """Return the `pp * per_rank` stages of a module with `layers` layers, in order. `split`: number of layers of each
    stage, by default such that stages cost about the same; `costs`: cost of each layer, by default equal. Raises
    `UserError`, which names the module and the flag.
    """
    assert pp > 1 or per_rank == 1, "virtual stages need pipeline ranks"
    assert costs is None or len(costs) == layers, "each layer has a cost"
    count = pp * per_rank
    if layers < count:
        where, because = f"{module} stages (--{module}-parallel, axis pp)", "each pipeline stage has at least one layer"
        found = f"{layers} layers for {count} stages (pp:{pp}, {per_rank} per rank)"
        fix = "lower pp or the stages per rank"
        raise UserError.at(where, found=found, expected=f"at most {layers} stages", because=because, fix=fix)
    if split is not None:
        _check_split(layers, count, tuple(split), module)
    even = even_split(layers, count) if costs is None else split_by_cost(tuple(costs), count)
    ends = tuple(accumulate(even if split is None else split))
    return tuple(
        PipelineStage(first, last, i == 0, i == count - 1)
        for i, (first, last) in enumerate(zip((0, *ends), ends, strict=False))
    )


def stages_of_rank(stages: Sequence[PipelineStage], pp_rank: int, pp: int) -> tuple[PipelineStage, ...]:
    """Return the stages of pipeline rank `pp_rank`, in order."""
    return tuple(stages[pp_rank::pp])


def stage_of(stages: Sequence[PipelineStage], layer: int) -> int:
    """Return the number of the stage that contains `layer`."""
    return next(number for number, stage in enumerate(stages) if layer in stage.layers)


def even_split(layers: int, stages: int) -> tuple[int, ...]:
    """Return the number of layers of each stage; these numbers differ by at most one.

    Remaining layers go to the middle stages, from the front, then to the first stage, which needs the most memory. The
    last stage gets none: it also computes the head and loss (or the merger) and would slow the pipeline.
    """
    each, left = divmod(layers, stages)
    order = [*range(1, stages - 1), 0]
    return tuple(each + (i in order[:left]) for i in range(stages))


@lru_cache
def split_by_cost(costs: tuple[float, ...], stages: int) -> tuple[int, ...]:
    """Return the number of layers of each stage, minimizing the cost of the costliest stage, then of the next
    costliest, and so on. Of equally good splits, return the one whose stage ends are nearest to `even_split`; for equal
    costs, return `even_split`.
    """
    # Integer costs avoid rounding, so that sums of equal costs compare equal.
    exact = [*map(Fraction, costs)]
    unit = lcm(*(cost.denominator for cost in exact))
    before = [*accumulate((int(cost * unit) for cost in exact), initial=0)]
    # The best split so far for each number of layers: costs in descending order, distance to the even split, layers per
    # stage.
    best: dict[int, tuple[list[int], int, tuple[int, ...]]] = {0: ([], 0, ())}
    for left, even in zip(reversed(range(stages)), accumulate(even_split(len(costs), stages)), strict=True):
        best = {
            end: min(
                (sorted([*others, before[end] - before[start]])[::-1], off + abs(end - even), (*sizes, end - start))
                for start, (others, off, sizes) in best.items()
                if start < end
            )
            for end in range(min(best) + 1, len(costs) - left + 1)
        }
    return best[len(costs)][2]


def _check_split(layers: int, count: int, split: tuple[int, ...], module: str) -> None:
    if len(split) != count:
        found = f"{len(split)} number{'' if len(split) == 1 else 's'}"
        expected, why = f"{count}", f"the module has {count} pipeline stages"
    elif min(split) < 1:
        found, expected, why = f"a stage of {min(split)} layers", "1 or more", "each pipeline stage has a layer or more"
    elif sum(split) != layers:
        found, expected, why = f"{sum(split)} layers in all", f"{layers}", "the module has that many"
    else:
        return
    flag = f"--{module}-layers"
    written, even = (" ".join(map(str, numbers)) for numbers in (split, even_split(layers, count)))
    fix = f"try `{flag} {even}`, or leave it out"
    raise UserError.at(f"{module} split `{written}` ({flag})", found=found, expected=expected, because=why, fix=fix)
