"""The language model: Megatron's `GPTModel` with multimodal rotary embedding, rows placed into its embedding, and a
loss that looks at supervised positions only."""

from __future__ import annotations

from dataclasses import dataclass
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

from megatron_hetero.models.attention import AttentionPlan
from megatron_hetero.models.backend import layer_spec, padded, recompute_options, transformer_config
from megatron_hetero.models.loss import vocab_parallel_cross_entropy
from megatron_hetero.models.qwen2_5_vl.shapes import TextShape
from megatron_hetero.platform import Platform


@dataclass(frozen=True)
class TextInput:
    """What one rank's language model reads in one micro-batch: S tokens of its replica's pack, padding included. The
    ranks of a tp group read the same.

    `tokens`: int64 [S]. `positions`: int64 [3, n] for the n real tokens. `supervised`: int64 [t], which of the n
    tokens predict, and `targets`: int64 [t], what they must predict. `rows_at`: int64 [rows], where this rank's rows go
    in its shard of the embedding. `attention`: the samples of the pack.
    """

    tokens: Tensor
    positions: Tensor
    supervised: Tensor
    targets: Tensor
    rows_at: Tensor
    attention: AttentionPlan


class TextModel(GPTModel):
    """Tokens and rows to the sum of token losses."""

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
    ):
        tp = groups.tp.size()
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
        spec = layer_spec(provider, AttnMaskType.causal)
        norm: Any = provider.layer_norm(rms_norm=True)
        block = TransformerBlockSubmodules([spec] * shape.layers, norm)
        super().__init__(
            config,
            ModuleSpec(module=TransformerBlock, submodules=block),  # pyright: ignore[reportArgumentType]
            vocab_size=padded(shape.vocab, tp),
            max_sequence_length=shape.max_positions,
            share_embeddings_and_output_weights=shape.tied,
            position_embedding_type="none",
            pg_collection=groups,
        )
        self.shape = shape
        # Supervised positions are picked between gathering the sequence and the head, so that gathering is done here.
        self.output_layer.sequence_parallel = False
        self.output_layer.allreduce_dgrad = False
        self.output_layer.disable_grad_reduce = True

    def embed(self, batch: TextInput) -> Tensor:
        """The embedding of the tokens, [S, 1, hidden], or this rank's [S / tp, 1, hidden] with sequence-parallel
        activations. Rows are not needed yet.
        """
        return self.embedding(input_ids=batch.tokens.unsqueeze(0), position_ids=None)

    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, batch: TextInput, embedded: Tensor, rows: Tensor
    ) -> Tensor:
        """The sum of the losses of all supervised tokens of the shard, fp32 scalar, equal on all tp ranks.

        `embedded`: what `embed` gave. `rows`: [rows of this rank, hidden], in the order of `batch.rows_at`.
        """
        hidden = embedded.squeeze(1).index_copy(0, batch.rows_at, rows).unsqueeze(1)
        hidden = self.decoder(
            hidden,
            None,
            rotary_pos_emb=rotary_table(batch.positions, self.shape),
            packed_seq_params=batch.attention,
        )
        return self._loss(hidden, batch)

    def _loss(self, hidden: Tensor, batch: TextInput) -> Tensor:
        tp = self.pg_collection.tp
        if self.config.sequence_parallel:
            hidden = gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=True, group=tp)
        else:
            hidden = copy_to_tensor_model_parallel_region(hidden, group=tp)
        weight = self.shared_embedding_or_output_weight() if self.share_embeddings_and_output_weights else None
        logits, _ = self.output_layer(hidden[batch.supervised], weight=weight)
        local = self.vocab_size // tp.size()
        first = local * tp.rank()
        valid = max(0, min(local, self.shape.vocab - first))
        return vocab_parallel_cross_entropy(logits.squeeze(1), batch.targets, first, valid, tp).sum()


def rotary_table(positions_3n: Tensor, shape: TextShape) -> Tensor:
    """Cosines and sines of the multimodal rotary embedding, fp32 [2, n, head_dim].

    Each section of frequencies turns with its own position: time, height, width (Wang et al. 2024, arXiv 2409.12191).
    """
    exponents = torch.arange(0, shape.head_dim, 2, dtype=torch.float32) / shape.head_dim
    frequencies = (1.0 / shape.rope_theta**exponents).to(positions_3n.device)
    sections = torch.arange(len(shape.mrope_section)).repeat_interleave(torch.tensor(shape.mrope_section)) % 3
    angles = positions_3n[sections.to(positions_3n.device)].transpose(0, 1).float() * frequencies
    angles = torch.cat((angles, angles), dim=-1)
    return torch.stack((angles.cos(), angles.sin()))
