"""Pipeline stages: which layers of a module each of them holds. Pure.

Stages are numbered in the order in which activations pass through them. Each pipeline rank holds one of them, or
several (virtual stages, Narayanan et al. 2021, arXiv 2104.04473): stage i is on pipeline rank i mod pp.

    8 layers, pp 2                      pp 0: 0-3           pp 1: 4-7
    8 layers, pp 2, 2 stages per rank   pp 0: 0-1, 4-5      pp 1: 2-3, 6-7
    9 layers, pp 2                      pp 0: 0-4           pp 1: 5-8
   11 layers, pp 4                      pp 0: 0-2  pp 1: 3-5  pp 2: 6-8  pp 3: 9-10
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from megatron_hetero.base.errors import UserError

LAYERS = "layers."
"""What the names of the layers' parameters begin with, before the number of the layer."""


@dataclass(frozen=True)
class PipelineStage:
    """Layers [first, last) of a module, counted over the whole of it.

    `is_first`: with what comes before the layers (embedding). `is_last`: with what comes after them (final norm, head,
    merger).
    """

    first: int
    last: int
    is_first: bool
    is_last: bool

    @classmethod
    def whole(cls, layers: int) -> PipelineStage:
        """The only stage of a module with `layers` layers."""
        return cls(0, layers, True, True)

    @property
    def layers(self) -> range:
        """The numbers of its layers."""
        return range(self.first, self.last)

    def __str__(self) -> str:
        return f"layers {self.first}" if len(self.layers) == 1 else f"layers {self.first}-{self.last - 1}"

    def global_name(self, parameter: str) -> str:
        """The name of a parameter in the whole module: models number the layers of their own stage from 0."""
        if not parameter.startswith(LAYERS):
            return parameter
        number, _, rest = parameter.removeprefix(LAYERS).partition(".")
        return f"{LAYERS}{int(number) + self.first}.{rest}"


def cut_stages(
    layers: int, pp: int, *, per_rank: int = 1, split: Sequence[int] | None = None, module: str = "text"
) -> tuple[PipelineStage, ...]:
    """The `pp * per_rank` stages of a module with `layers` layers, in order.

    `split`: how many layers each stage holds (`parallel_layers.MODULE`), even where left out. Raises `UserError`, which
    names the module and the flag.
    """
    assert pp > 1 or per_rank == 1, "several stages on one rank only make sense where others lie between them"
    count = pp * per_rank
    if layers < count:
        raise UserError.at(
            f"{module} stages (--{module}-parallel, axis pp)",
            found=f"{layers} layers for {count} stages (pp:{pp}, {per_rank} per rank)",
            expected=f"at most {layers} stages",
            because="each pipeline stage holds a layer or more",
            fix="lower pp or the stages per rank",
        )
    if split is not None:
        _check_split(layers, count, tuple(split), module)
    ends = tuple(accumulate(even_split(layers, count) if split is None else split))
    return tuple(
        PipelineStage(first, last, i == 0, i == count - 1)
        for i, (first, last) in enumerate(zip((0, *ends), ends, strict=False))
    )


def stages_of_rank(stages: Sequence[PipelineStage], pp_rank: int, pp: int) -> tuple[PipelineStage, ...]:
    """Those that a pipeline rank holds, in order."""
    return tuple(stages[pp_rank::pp])


def stage_of(stages: Sequence[PipelineStage], layer: int) -> int:
    """The number of the stage that holds a layer."""
    return next(number for number, stage in enumerate(stages) if layer in stage.layers)


def even_split(layers: int, stages: int) -> tuple[int, ...]:
    """Layers of each stage, which differ by one at most.

    What is left over goes to the stages between the first and the last, from the front, then to the first; never to the
    last. That one computes head and loss (or the merger) too, so that a layer more would slow down the whole pipeline;
    the first keeps the activations of most micro-batches and holds the embedding, which costs memory but hardly time.
    """
    each, left = divmod(layers, stages)
    order = [*range(1, stages - 1), 0]
    return tuple(each + (i in order[:left]) for i in range(stages))


def _check_split(layers: int, count: int, split: tuple[int, ...], module: str) -> None:
    problem = _problem(layers, count, split)
    if problem is None:
        return
    found, expected, why = problem
    flag = f"--parallel_layers.{module}"
    written, even = (" ".join(map(str, numbers)) for numbers in (split, even_split(layers, count)))
    fix = f"try `{flag} {even}`, or leave it out"
    raise UserError.at(f"{module} split `{written}` ({flag})", found=found, expected=expected, because=why, fix=fix)


def _problem(layers: int, count: int, split: tuple[int, ...]) -> tuple[str, str, str] | None:
    """What was found in a split, what was expected, and why; None where nothing is wrong with it."""
    if len(split) != count:
        return _counted(len(split), "number"), f"{count}", f"the module has {_counted(count, 'pipeline stage')}"
    if min(split) < 1:
        return f"a stage of {min(split)} layers", "1 or more", "each pipeline stage holds a layer or more"
    if sum(split) != layers:
        return f"{sum(split)} layers in all", f"{layers}", "that is how many layers the module has"
    return None


def _counted(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"
