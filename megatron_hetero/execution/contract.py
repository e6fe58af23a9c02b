"""The interface of the interpreter: micro-batches, and models, which may be any `torch.nn.Module` or callable.

A module has one or more stages. Which of the protocols below a stage's model implements depends on its position.
`batch` is the module's entry in `DeviceMicroBatch.inputs`; only the model looks into it.

    stage                              is called with                returns
    first of an encoder                batch                         hidden states; on its last stage rows
    first of the text module           batch, rows                   hidden states; on its last stage the loss
    the same, where it `embeds`        batch, embed(batch), rows     the same
    any other                          batch, hidden states          the same

Rows are [needed, width], those that this rank needs of all encoders, concatenated by encoder. An encoder returns
exactly the rows that this rank holds in the boundary's plan, [held, width]; if it pads to divisible lengths for its
kernels, it drops the padding.

An encoder may have further outputs besides `rows`, which cross along the edges that are declared for them
(`Interpreter.build`, `outputs`). A stage that makes some returns all of its outputs by name, such as {"hidden": hidden
states, "deepstack.0": rows}; all rows are of that same shape. A stage of the text module that takes some is called with
rows by the name of the output, as the last argument also where it is not the first stage.

Hidden states have the shape given by the next stage's `hidden_shape` and the interpreter's dtype. The loss is a scalar,
the sum over this rank's part of the micro-batch.

Inputs are leaves of the model's own graph, which ends with its output. Models may communicate inside their module, in
one order on all ranks of a stage. If a schedule recomputes, an encoder is called twice per micro-batch and draws the
same random numbers both times.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from megatron_hetero.boundary.communicator import LoadedPlan
from megatron_hetero.distributed.platform import Platform
from megatron_hetero.layout.edge import Edge

LOSS = "loss"
"""The name of the sum of losses, beside those in `megatron_hetero.names`."""

StageOutput = Tensor | Mapping[str, Tensor]
"""The only output of a stage, or its outputs by name."""
Rows = Any
"""A `Tensor` where only `rows` enter a stage; else a `Mapping[str, Tensor]` of what enters it, by output."""


class EncoderStage(Protocol):
    """The first stage of an encoder."""

    def __call__(self, batch: Any, /) -> StageOutput:
        """Rows, [held, width], or hidden states if there are more stages."""
        ...


class TextStage(Protocol):
    """The first stage of the text module."""

    def __call__(self, batch: Any, rows: Any, /) -> Tensor:
        """The sum of losses, a scalar, or hidden states if there are more stages. `rows`: [needed, width], a tensor or,
        where an encoder has further outputs, `Rows` by name.
        """
        ...


class EmbeddingTextStage(Protocol):
    """The first stage of the text module, in two parts: `embed` overlaps with the crossing of rows."""

    def embed(self, batch: Any, /) -> Tensor:
        """The part that needs no rows; of any shape."""
        ...

    def __call__(self, batch: Any, embedded: Tensor, rows: Any, /) -> Tensor:
        """As `TextStage`, with the result of `embed`."""
        ...


class LaterStage(Protocol):
    """A stage of any module after its first."""

    def hidden_shape(self, batch: Any, /) -> Sequence[int]:
        """The shape of the hidden states that it receives, for the receive buffer."""
        ...

    def __call__(self, batch: Any, hidden: Tensor, /) -> StageOutput:
        """Hidden states for the next stage; on the last stage the module's output. With rows by name as one more
        argument where some enter the stage.
        """
        ...


StageModel = EncoderStage | TextStage | EmbeddingTextStage | LaterStage
"""The model of a stage."""


@dataclass(frozen=True, eq=False)
class ModuleOnRank:
    """A rank's part of a module.

    `stages`: the models of its stages on this rank, by stage number. `embeds`: whether the first stage of the text
    module is an `EmbeddingTextStage`. `trains_before_last`: whether stages before the last one, or rows that enter
    them, need gradients; without them, hidden states need none (a frozen encoder whose projector trains).
    """

    stages: Mapping[int, StageModel]
    embeds: bool = False
    trains_before_last: bool = True


@dataclass(frozen=True, eq=False)
class DeviceMicroBatch:
    """A rank's part of a micro-batch, on the device.

    `inputs`: the input of each module; without modules that have no work on any rank (an encoder in a micro-batch
    without images). `boundaries`: by edge, the plan of its rows; without edges along which none cross.
    """

    inputs: Mapping[str, Any]
    boundaries: Mapping[Edge, LoadedPlan]


@dataclass(frozen=True)
class RandomStates:
    """Access to the states of the random generators that models use.

    `read` returns a copy of the states; `write` restores one. Both run between the launches of a step, so they should
    not synchronise with the device (the state of a CUDA generator is on the host).
    """

    read: Callable[[], Any]
    write: Callable[[Any], None]

    @classmethod
    def of(cls, platform: Platform) -> RandomStates:
        """PyTorch's own generators."""
        return cls(platform.random_states, platform.set_random_states)
