"""What the interpreter is given: micro-batches, and models, which may be any `torch.nn.Module` or callable that fits.

A module has stages, most often one. Which of the protocols below its model fulfils depends on where the stage stands.
`batch` is whatever `DeviceMicroBatch.inputs` holds for the module; nobody but the model looks into it.

    stage                              is called with                returns
    first of an encoder                batch                         hidden states; on its last stage rows
    first of the text module           batch, rows                   hidden states; on its last stage the loss
    the same, where it `embeds`        batch, embed(batch), rows     the same
    any other                          batch, hidden states          the same

Rows are [rows, width], those that this rank needs of all encoders, one encoder after the other. What an encoder
returns are exactly those that this rank holds in the boundary's plan, [held, width]: where it computes on more, for
kernels that need divisible lengths, it drops them. Hidden states have the shape that the next stage's `hidden_shape`
says, and the interpreter's dtype. The loss is a scalar, the sum over this rank's part of the micro-batch.

What a model is given is a leaf of its own graph, which ends with what it returns. Models communicate inside their own
module as they like, if all ranks of a stage do so in one order. Where a schedule recomputes, an encoder is called twice
with a micro-batch, and draws the same random numbers both times.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from megatron_hetero.boundary.communicator import LoadedPlan
from megatron_hetero.distributed.platform import Platform


class EncoderStage(Protocol):
    """The first stage of an encoder."""

    def __call__(self, batch: Any, /) -> Tensor:
        """Rows, [held, width], or hidden states where there are more stages."""
        ...


class TextStage(Protocol):
    """The first stage of the text module."""

    def __call__(self, batch: Any, rows: Tensor, /) -> Tensor:
        """The sum of losses, a scalar, or hidden states where there are more stages. `rows`: [needed, width]."""
        ...


class EmbeddingTextStage(Protocol):
    """The first stage of the text module, in two parts: what needs no rows is computed while they are on their way."""

    def embed(self, batch: Any, /) -> Tensor:
        """What needs no rows, of any shape."""
        ...

    def __call__(self, batch: Any, embedded: Tensor, rows: Tensor, /) -> Tensor:
        """As `TextStage`, with what `embed` returned."""
        ...


class LaterStage(Protocol):
    """A stage of any module after its first."""

    def hidden_shape(self, batch: Any, /) -> Sequence[int]:
        """The shape of what it is given: the rank makes room for it before it arrives."""
        ...

    def __call__(self, batch: Any, hidden: Tensor, /) -> Tensor:
        """Hidden states for the next stage, or what the module's last stage returns."""
        ...


StageModel = EncoderStage | TextStage | EmbeddingTextStage | LaterStage
"""The model of a stage."""


@dataclass(frozen=True, eq=False)
class ModuleOnRank:
    """What a rank holds of a module.

    `stages`: the model of each of its stages here, by number. `embeds`: whether the first one, of the text module, is
    an `EmbeddingTextStage`.
    """

    stages: Mapping[int, StageModel]
    embeds: bool = False


@dataclass(frozen=True, eq=False)
class DeviceMicroBatch:
    """A micro-batch on the device, as far as a rank needs it.

    `inputs`: what each module reads; a module that has nothing to do, on all of its ranks, is missing (an encoder in a
    micro-batch without images). `boundaries`: by encoder, how its rows cross; missing where nothing does.
    """

    inputs: Mapping[str, Any]
    boundaries: Mapping[str, LoadedPlan]


@dataclass(frozen=True)
class RandomStates:
    """The states of the random generators that models draw from.

    `read` returns them, as a value of its own; `write` puts such a value back. Both run between the launches of a step:
    they should not wait for the device (the state of a CUDA generator is on the host).
    """

    read: Callable[[], Any]
    write: Callable[[Any], None]

    @classmethod
    def of(cls, platform: Platform) -> RandomStates:
        """PyTorch's own generators."""
        return cls(platform.random_states, platform.set_random_states)
