"""A language model: Megatron's `GPTModel` with multimodal rotary embedding, rows placed into its embedding or added to
its hidden states, and a loss that looks at supervised positions only. Whole, or one pipeline stage of it:

    first stage    tokens -> embed -> enter (with rows) -> layers -> hidden
    others         hidden of the stage before           -> layers -> hidden
    last stage                                             ... and final norm -> loss

Rows of outputs that enter after a layer are added there, on the stage that holds it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Protocol

import torch
from megatron.core.models.backends import BackendSpecProvider
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlock, TransformerBlockSubmodules
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from megatron_hetero.distributed.platform import Platform
from megatron_hetero.layout.stages import Stage
from megatron_hetero.models.common.backend import layer_spec, transformer_config
from megatron_hetero.models.common.inputs import TextInput
from megatron_hetero.models.common.loss import VocabularyShard, head_loss
from megatron_hetero.models.common.offload.activations import ActivationOffload
from megatron_hetero.models.common.recompute.policy import Recompute
from megatron_hetero.models.common.stages.block import Between, Gathered, run_layers
from megatron_hetero.models.common.stages.rotary import multimodal_table
from megatron_hetero.models.common.weights.slices import split_length
from megatron_hetero.models.family import TextShape
from megatron_hetero.names import ROWS


class LanguageShape(TextShape, Protocol):
    """What the modules also need of the shape of a language model."""

    @property
    def rope_theta(self) -> float:
        """The base of the rotary frequencies."""
        ...

    @property
    def turns(self) -> tuple[int, ...]:
        """For each rotary frequency the position that it turns with: 0 time, 1 height, 2 width."""
        ...

    @property
    def norm_eps(self) -> float:
        """What norms add to the mean square."""
        ...

    @property
    def max_positions(self) -> int:
        """Tokens of the longest sample."""
        ...


class TextModel(GPTModel):
    """Tokens and rows to the sum of token losses; or the part of `stage` in that, the whole where it is None. Families
    say whether queries, keys and values have a bias (`qkv_bias`), and whether queries and keys are normed head by head
    (`head_norms`).

    Where head and embedding share their weight but not their stage, the last stage holds a copy of it as
    `output_layer.weight`, which the training loop has to keep equal.
    """

    qkv_bias: ClassVar[bool]
    head_norms: ClassVar[bool]

    def __init__(
        self,
        shape: LanguageShape,
        groups: ProcessGroupCollection,
        platform: Platform,
        provider: BackendSpecProvider,
        *,
        dtype: torch.dtype,
        sequence_parallel: bool,
        recompute: Recompute,
        stage: Stage | None = None,
        offload: ActivationOffload | None = None,
        compile_layers: bool = False,
    ):
        tp = groups.tp.size()
        stage = stage or Stage.whole(shape.layers)
        # To Megatron this is a model without pipeline parallelism: which layers a stage holds is said here alone.
        config = transformer_config(
            platform,
            params_dtype=dtype,
            num_layers=shape.layers,
            hidden_size=shape.hidden,
            num_attention_heads=shape.heads,
            kv_channels=shape.head_dim,
            num_query_groups=shape.kv_heads * shape.kv_copies(tp),
            ffn_hidden_size=tp * split_length(shape.ffn, tp),
            layernorm_epsilon=shape.norm_eps,
            add_bias_linear=False,
            add_qkv_bias=self.qkv_bias,
            tensor_model_parallel_size=tp,
            sequence_parallel=sequence_parallel and tp > 1,
        )
        spec = layer_spec(
            provider,
            AttnMaskType.causal,
            before=stage.first,
            head_norms=self.head_norms,
            recompute=recompute,
            compile_layers=compile_layers,
        )
        norm: Any = provider.layer_norm(rms_norm=True)
        block = TransformerBlockSubmodules([spec] * len(stage.layers), norm)
        super().__init__(
            config,
            ModuleSpec(module=TransformerBlock, submodules=block),  # pyright: ignore[reportArgumentType]
            vocab_size=tp * split_length(shape.vocab, tp),
            max_sequence_length=shape.max_positions,
            pre_process=stage.is_first,
            post_process=stage.is_last,
            share_embeddings_and_output_weights=shape.tied,
            position_embedding_type="none",
            pg_collection=groups,
        )
        self.shape, self.stage, self.offload = shape, stage, offload
        # Hidden states are handed over as an argument. Megatron's other way, an attribute, would keep the last ones.
        self.decoder.pre_process = True
        if self.head_norms and tp > 1:
            _mark_head_norms(self.decoder)

    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, batch: TextInput, hidden: Tensor, rows: Tensor | Mapping[str, Tensor] | None = None
    ) -> Tensor:
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
        shards = self.pg_collection.tp.size() if self.config.sequence_parallel else 1
        return len(batch.tokens) // shards, 1, self.shape.hidden

    def units(self) -> tuple[Gathered, ...]:
        """The parts of this stage that are gathered by themselves, in the order in which they run."""
        layers = tuple(Gathered(layer) for layer in self.decoder.layers)
        if not self.stage.is_first:
            return layers
        return (Gathered(self.embedding, read_again=self._shares_weight, in_backward=False), *layers)

    @property
    def _shares_weight(self) -> bool:
        """Whether the head of this stage is its embedding."""
        return self.share_embeddings_and_output_weights and self.stage.is_first and self.stage.is_last

    def embed(self, batch: TextInput) -> Tensor:
        """The embedding of the tokens, of shape `hidden_shape`, on the first stage. Rows are not needed yet."""
        return self.embedding(input_ids=batch.tokens.unsqueeze(0), position_ids=None)

    def enter(self, batch: TextInput, embedded: Tensor, rows: Tensor) -> Tensor:
        """What the layers of the first stage take: `embedded` with rows in their places.

        `embedded`: what `embed` gave. `rows`: [rows of this rank, hidden], in the order of `batch.rows_at[ROWS]`.
        """
        return embedded.squeeze(1).index_copy(0, batch.rows_at[ROWS], rows).unsqueeze(1)

    def run_layers(self, batch: TextInput, hidden: Tensor, added: Mapping[str, Tensor]) -> Tensor:
        """`hidden` after the layers of this stage, and after the final norm on the last one; of the same shape.

        `added`: rows that are added after a layer of this stage, by output, each [rows of this rank, hidden].
        """
        shape = self.shape
        table = multimodal_table(batch.positions, shape.rope_theta, shape.head_dim, shape.turns)
        after = {self._entry(name): _adding(rows, batch.rows_at[name]) for name, rows in added.items()}
        return run_layers(self.decoder, hidden, table, batch.attention, after, self.offload)

    def _entry(self, output: str) -> int:
        layer = self.shape.entry_layer(output)
        assert layer is not None and layer in self.stage.layers, (
            f"{output} enters after layer {layer}, which is not on this stage"
        )
        return layer

    def loss(self, batch: TextInput, hidden: Tensor) -> Tensor:
        """The sum of token losses (see `forward`), from what the layers of the last stage gave. Fills `batch.hits`."""
        tp = self.pg_collection.tp
        if self.config.sequence_parallel:
            hidden = gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=True, group=tp)
        else:
            hidden = copy_to_tensor_model_parallel_region(hidden, group=tp)
        if self._shares_weight and isinstance(self.embedding, FSDPModule):
            self.embedding.unshard()
        weight: Any = self.shared_embedding_or_output_weight() if self.share_embeddings_and_output_weights else None
        weight = self.output_layer.weight if weight is None else weight
        first = len(weight) * tp.rank()
        shard = VocabularyShard(first, max(0, min(len(weight), self.shape.vocab - first)), tp)
        return head_loss(hidden.squeeze(1)[batch.supervised], weight, batch.targets, shard, hits=batch.hits)


def _adding(rows: Tensor, places: Tensor) -> Between:
    def add(hidden: Tensor) -> Tensor:
        return hidden.squeeze(1).index_add(0, places, rows).unsqueeze(1)

    return add


def _mark_head_norms(block: TransformerBlock) -> None:
    """Each tp rank norms its own heads, so that gradients of the norms' weights, which all heads share, are parts that
    are to be added over tp: also where activations are whole, when Megatron does not mark them.
    """
    for layer in block.layers:
        attention: Any = layer.self_attention
        for norm in (attention.q_layernorm, attention.k_layernorm):
            norm.weight.sequence_parallel = True
