"""The language model: Megatron's `GPTModel` with multimodal rotary embedding, rows placed into its embedding, and a
loss that looks at supervised positions only. Whole, or one pipeline stage of it:

    first stage    tokens -> embed -> enter (with rows) -> layers -> hidden
    others         hidden of the stage before           -> layers -> hidden
    last stage                                             ... and final norm -> loss
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

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

from megatron_hetero.distributed.platform import Platform, on_device
from megatron_hetero.models.common.attention import rotary_frequencies
from megatron_hetero.models.common.backend import layer_spec, padded, recompute_options, transformer_config
from megatron_hetero.models.common.inputs import TextInput
from megatron_hetero.models.common.loss import vocab_parallel_cross_entropy, vocab_parallel_hits
from megatron_hetero.models.qwen2_5_vl.shapes import TextShape
from megatron_hetero.sharding.stages import Stage


class TextModel(GPTModel):
    """Tokens and rows to the sum of token losses; or the part of `stage` in that, the whole where it is None.

    Where head and embedding share their weight but not their stage, the last stage holds a copy of it as
    `output_layer.weight`, which whoever trains the model keeps equal.
    """

    def __init__(
        self,
        shape: TextShape,
        groups: ProcessGroupCollection,
        platform: Platform,
        provider: BackendSpecProvider,
        *,
        dtype: torch.dtype,
        sequence_parallel: bool,
        recompute: str,
        stage: Stage | None = None,
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
            num_query_groups=shape.kv_heads * shape.kv_copies(tp),
            ffn_hidden_size=padded(shape.ffn, tp),
            layernorm_epsilon=shape.norm_eps,
            add_bias_linear=False,
            add_qkv_bias=True,
            tensor_model_parallel_size=tp,
            sequence_parallel=sequence_parallel and tp > 1,
            **recompute_options(recompute),
        )
        spec = layer_spec(provider, AttnMaskType.causal, before=stage.first)
        norm: Any = provider.layer_norm(rms_norm=True)
        block = TransformerBlockSubmodules([spec] * len(stage.layers), norm)
        super().__init__(
            config,
            ModuleSpec(module=TransformerBlock, submodules=block),  # pyright: ignore[reportArgumentType]
            vocab_size=padded(shape.vocab, tp),
            max_sequence_length=shape.max_positions,
            pre_process=stage.is_first,
            post_process=stage.is_last,
            share_embeddings_and_output_weights=shape.tied,
            position_embedding_type="none",
            pg_collection=groups,
        )
        self.shape, self.stage = shape, stage
        # Hidden states are handed over as an argument. Megatron's other way, an attribute, would keep the last ones.
        self.decoder.pre_process = True
        if stage.is_last:
            # Supervised positions are picked between gathering the sequence and the head, so that gathering is done
            # here.
            self.output_layer.sequence_parallel = False
            self.output_layer.allreduce_dgrad = False
            self.output_layer.disable_grad_reduce = True

    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, batch: TextInput, hidden: Tensor, rows: Tensor | None = None
    ) -> Tensor:
        """What this stage makes of a micro-batch: on the last stage the sum of the losses of all supervised tokens of
        the shard, fp32 scalar, equal on all tp ranks; on the others what the next stage takes as `hidden`.

        `hidden`: on the first stage what `embed` gave, with `rows`, see `enter`; on the others what the stage before
        returned, of shape `hidden_shape`.
        """
        if self.stage.is_first:
            assert rows is not None, "the first stage takes rows, none of them at least"
            hidden = self.enter(batch, hidden, rows)
        hidden = self.run_layers(batch, hidden)
        return self.loss(batch, hidden) if self.stage.is_last else hidden

    def hidden_shape(self, batch: TextInput) -> tuple[int, int, int]:
        """The shape of what one stage hands to the next on this rank: [S, 1, hidden], or [S / tp, 1, hidden] with
        sequence-parallel activations.
        """
        shards = self.pg_collection.tp.size() if self.config.sequence_parallel else 1
        return len(batch.tokens) // shards, 1, self.shape.hidden

    def embed(self, batch: TextInput) -> Tensor:
        """The embedding of the tokens, of shape `hidden_shape`, on the first stage. Rows are not needed yet."""
        return self.embedding(input_ids=batch.tokens.unsqueeze(0), position_ids=None)

    def enter(self, batch: TextInput, embedded: Tensor, rows: Tensor) -> Tensor:
        """What the layers of the first stage take: `embedded` with rows in their places.

        `embedded`: what `embed` gave. `rows`: [rows of this rank, hidden], in the order of `batch.rows_at`.
        """
        return embedded.squeeze(1).index_copy(0, batch.rows_at, rows).unsqueeze(1)

    def run_layers(self, batch: TextInput, hidden: Tensor) -> Tensor:
        """`hidden` after the layers of this stage, and after the final norm on the last one; of the same shape."""
        return self.decoder(
            hidden,
            None,
            rotary_pos_emb=rotary_table(batch.positions, self.shape),
            packed_seq_params=batch.attention,
        )

    def loss(self, batch: TextInput, hidden: Tensor) -> Tensor:
        """The sum of token losses (see `forward`), from what the layers of the last stage gave. Fills `batch.hits`."""
        tp = self.pg_collection.tp
        if self.config.sequence_parallel:
            hidden = gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=True, group=tp)
        else:
            hidden = copy_to_tensor_model_parallel_region(hidden, group=tp)
        weight = self.shared_embedding_or_output_weight() if self.share_embeddings_and_output_weights else None
        logits = self.output_layer(hidden[batch.supervised], weight=weight)[0].squeeze(1)
        local = self.vocab_size // tp.size()
        first = local * tp.rank()
        valid = max(0, min(local, self.shape.vocab - first))
        if batch.hits is not None:
            batch.hits.copy_(vocab_parallel_hits(logits.detach(), batch.targets, first, valid, tp))
        return vocab_parallel_cross_entropy(logits, batch.targets, first, valid, tp).sum()


def rotary_table(positions_3n: Tensor, shape: TextShape) -> Tensor:
    """Cosines and sines of the multimodal rotary embedding, fp32 [2, n, head_dim].

    Each section of frequencies turns with its own position: time, height, width (Wang et al. 2024, arXiv 2409.12191).
    """
    device = positions_3n.device
    frequencies = rotary_frequencies(shape.rope_theta, shape.head_dim, device)
    angles = positions_3n[_sections(shape.mrope_section, device)].transpose(0, 1).float() * frequencies
    angles = torch.cat((angles, angles), dim=-1)
    return torch.stack((angles.cos(), angles.sin()))


@lru_cache(maxsize=16)
def _sections(mrope_section: tuple[int, ...], device: torch.device) -> Tensor:
    """For each frequency the position that it turns with: 0 time, 1 height, 2 width. Moved to the device once."""
    return on_device(torch.arange(len(mrope_section)).repeat_interleave(torch.tensor(mrope_section)) % 3, device)
