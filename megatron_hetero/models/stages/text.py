"""A language model: embedding, layers, final norm and head, with multimodal rotary embedding, rows placed into its
embedding or added to its hidden states, and a loss that looks at supervised positions only. Whole, or one pipeline
stage of it:

    first stage    tokens -> embed -> enter (with rows) -> layers -> hidden
    others         hidden of the stage before           -> layers -> hidden
    last stage                                             ... and final norm -> loss

Rows of outputs that enter after a layer are added there, on the stage that holds it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron.core.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from megatron_hetero.execution.contract import Gathered
from megatron_hetero.layout.stages import Stage
from megatron_hetero.models.common.inputs import TextInput
from megatron_hetero.models.common.loss import VocabularyShard, head_loss
from megatron_hetero.models.common.offload.activations import ActivationOffload
from megatron_hetero.models.family import TextShape
from megatron_hetero.models.layers.parts import Site
from megatron_hetero.models.stages.stage import Between, ModuleStage
from megatron_hetero.names import ROWS


class TextModel(ModuleStage):
    """Tokens and rows to the sum of token losses; or the part of `stage` in that, the whole where it is None.

    Where head and embedding share their weight but not their stage, the last stage holds a copy of it as
    `output_layer.weight`, which the training loop has to keep equal.
    """

    embedding: Any
    output_layer: Any

    def __init__(
        self, shape: TextShape, site: Site, stage: Stage | None = None, offload: ActivationOffload | None = None
    ):
        super().__init__(shape.architecture, site, stage, offload)
        self.shape = shape
        if shape.tied and (self.stage.is_first or self.stage.is_last):
            # The gradient that autograd adds up is zero where the parameter's own sum has it already.
            self._head_weight.zero_out_wgrad = True

    def forward(self, batch: TextInput, hidden: Tensor, rows: Tensor | Mapping[str, Tensor] | None = None) -> Tensor:
        """What this stage makes of a micro-batch: on the last stage the sum of the losses of all supervised tokens of
        the shard, fp32 scalar, equal on all tp ranks; on the others what the next stage takes as `hidden`.

        `hidden`: on the first stage what `embed` gave, with `rows`, see `enter`; on the others what the stage before
        returned, of shape `hidden_shape`. `rows`: where those of several outputs enter on this stage, or of one on a
        later stage, by the name of the output, each in the order of `batch.rows_at`; an output that is not among them
        adds nothing.
        """
        by_output = {ROWS: rows} if isinstance(rows, Tensor) else dict(rows or {})
        if self.stage.is_first:
            assert ROWS in by_output, "the first stage takes rows, none of them at least"
            hidden = self.enter(batch, hidden, by_output.pop(ROWS))
        hidden = self.run_layers(batch, hidden, by_output)
        return self.loss(batch, hidden) if self.stage.is_last else hidden

    def hidden_shape(self, batch: TextInput) -> tuple[int, int, int]:
        """The shape of what one stage hands to the next on this rank: [S, 1, hidden], or [S / tp, 1, hidden] with
        sequence-parallel activations.
        """
        shards = self.groups.tp.size() if self.splits_activations else 1
        return len(batch.tokens) // shards, 1, self.shape.hidden

    def units(self) -> tuple[Gathered, ...]:
        """The parts of this stage that are gathered by themselves, in the order in which they run."""
        if not self.stage.is_first:
            return super().units()
        return (Gathered(self.embedding, read_again=self._shares_weight, in_backward=False), *super().units())

    @property
    def _shares_weight(self) -> bool:
        """Whether the head of this stage is its embedding."""
        return self.shape.tied and self.stage.is_first and self.stage.is_last

    @property
    def _head_weight(self) -> Any:
        """The weight that a tied model's embedding and head share, or the head's own."""
        tied = self.shape.tied and self.stage.is_first
        return self.embedding.word_embeddings.weight if tied else self.output_layer.weight

    def embed(self, batch: TextInput) -> Tensor:
        """The embedding of the tokens, of shape `hidden_shape`, on the first stage. Rows are not needed yet."""
        return self.embedding(batch.tokens)

    def enter(self, batch: TextInput, embedded: Tensor, rows: Tensor) -> Tensor:
        """What the layers of the first stage take: `embedded` with rows in their places.

        `embedded`: what `embed` gave. `rows`: [rows of this rank, hidden], in the order of `batch.rows_at[ROWS]`.
        """
        return embedded.squeeze(1).index_copy(0, batch.rows_at[ROWS], rows).unsqueeze(1)

    def run_layers(self, batch: TextInput, hidden: Tensor, added: Mapping[str, Tensor]) -> Tensor:
        """`hidden` after the layers of this stage, and after the final norm on the last one; of the same shape.

        `added`: rows that are added after a layer of this stage, by output, each [rows of this rank, hidden].
        """
        after = {self._entry(name): _adding(rows, batch.rows_at[name]) for name, rows in added.items()}
        return self._run(hidden, self.shape.rotary.table(batch.positions), batch.attention, after)

    def _entry(self, output: str) -> int:
        layer = self.shape.entry_layer(output)
        assert layer is not None and layer in self.stage.layers, (
            f"{output} enters after layer {layer}, which is not on this stage"
        )
        return layer

    def loss(self, batch: TextInput, hidden: Tensor) -> Tensor:
        """The sum of token losses (see `forward`), from what the layers of the last stage gave. Fills `batch.hits`."""
        tp = self.groups.tp
        if self.splits_activations:
            hidden = gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=True, group=tp)
        else:
            hidden = copy_to_tensor_model_parallel_region(hidden, group=tp)
        if self._shares_weight and isinstance(self.embedding, FSDPModule):
            self.embedding.unshard()
        weight = self._head_weight
        first = len(weight) * tp.rank()
        shard = VocabularyShard(first, max(0, min(len(weight), self.shape.vocab - first)), tp)
        return head_loss(hidden.squeeze(1)[batch.supervised], weight, batch.targets, shard, hits=batch.hits)


def _adding(rows: Tensor, places: Tensor) -> Between:
    def add(hidden: Tensor) -> Tensor:
        return hidden.squeeze(1).index_add(0, places, rows).unsqueeze(1)

    return add
