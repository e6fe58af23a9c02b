"""The vision encoder and its merger, from Megatron-Core layers.

    pixels of own patches -> patch embedding -> transformer block (window and full attention) -> merger -> rows

whole, or one pipeline stage of it: the patch embedding is on the first, the merger on the last, and hidden states of
patches pass between them.

Everything runs on the patches that this rank's shard holds. With sequence-parallel activations over `tp` the shard is
padded to whole units per rank and each rank embeds its own share; nothing that pads enters attention or leaves the
module.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.models.backends import BackendSpecProvider
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_block import TransformerBlock, TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from megatron_hetero.distributed.platform import Platform
from megatron_hetero.models.common.attention import rotary_frequencies
from megatron_hetero.models.common.backend import layer_spec, padded, recompute_options, transformer_config
from megatron_hetero.models.common.inputs import EncoderInput
from megatron_hetero.models.qwen2_5_vl.shapes import VisionShape
from megatron_hetero.sharding.items import padded_patches
from megatron_hetero.sharding.stages import Stage


class PatchMerger(torch.nn.Module):
    """Norm, then an MLP on each unit's concatenated patches. The `projector` of the model."""

    def __init__(self, config: TransformerConfig, shape: VisionShape, provider: BackendSpecProvider, tp: Any):
        super().__init__()
        width = shape.hidden * shape.unit
        self.width = width
        self.ln_q = provider.layer_norm(rms_norm=True)(config=config, hidden_size=shape.hidden, eps=shape.norm_eps)
        options = {"config": config, "init_method": None, "bias": True, "is_expert": False, "tp_group": tp}
        self.linear_fc1 = provider.column_parallel_linear()(
            width, width, gather_output=False, skip_bias_add=False, **options
        )
        self.linear_fc2 = provider.row_parallel_linear()(
            width, shape.out_hidden, input_is_parallel=True, skip_bias_add=False, **options
        )

    def forward(self, patches: Tensor) -> Tensor:
        """[S, 1, hidden] to rows [S / unit, out_hidden]."""
        units = self.ln_q(patches).view(-1, 1, self.width)
        hidden, _ = self.linear_fc1(units)
        return self.linear_fc2(torch.nn.functional.gelu(hidden))[0].squeeze(1)


class VisionModel(MegatronModule):
    """Patches to rows, each rank on its own share; or the part of `stage` in that, the whole where it is None."""

    def __init__(
        self,
        shape: VisionShape,
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
        config = transformer_config(
            platform,
            params_dtype=dtype,
            num_layers=shape.layers,
            hidden_size=shape.hidden,
            num_attention_heads=shape.heads,
            ffn_hidden_size=padded(shape.ffn, tp),
            layernorm_epsilon=shape.norm_eps,
            add_bias_linear=True,
            tensor_model_parallel_size=tp,
            sequence_parallel=sequence_parallel and tp > 1,
            **recompute_options(recompute),
        )
        super().__init__(config=config)
        self.shape, self.stage = shape, stage or Stage.whole(shape.layers)
        self._patch_shards = tp if config.sequence_parallel else 1
        if self.stage.is_first:
            self.patch_embed = _patch_embedding(config, shape, platform)
        self.decoder = TransformerBlock(
            config, _block_spec(shape, provider, self.stage), post_layer_norm=False, pg_collection=groups
        )
        if self.stage.is_last:
            self.merger = PatchMerger(config, shape, provider, groups.tp)

    def forward(self, batch: EncoderInput, hidden: Tensor | None = None) -> Tensor:
        """What this stage makes of a micro-batch: on the last stage the rows of this rank's units, [units, out_hidden],
        without those that pad it; on the others what the next stage takes as `hidden`.

        `hidden`: what the stage before returned, of shape `hidden_shape`; the first stage takes none.
        """
        if self.stage.is_first:
            hidden = self.enter(batch)
        assert hidden is not None, "stages after the first take hidden states"
        hidden = self.run_layers(batch, hidden)
        if not self.stage.is_last:
            return hidden
        rows = self.merger(hidden)
        return rows[: len(rows) - batch.padding // self.shape.unit]

    def hidden_shape(self, batch: EncoderInput) -> tuple[int, int, int]:
        """The shape of what one stage hands to the next on this rank: [patches of this rank, 1, hidden], padding
        included.
        """
        patches = padded_patches(batch.positions.shape[1], self.shape.unit, self._patch_shards)
        return patches // self._patch_shards, 1, self.shape.hidden

    def enter(self, batch: EncoderInput) -> Tensor:
        """The embedding of this rank's patches, of shape `hidden_shape`, on the first stage."""
        assert batch.pixels is not None, "the first stage embeds pixels"
        return self.patch_embed(batch.pixels).unsqueeze(1)

    def run_layers(self, batch: EncoderInput, hidden: Tensor) -> Tensor:
        """`hidden` after the layers of this stage, of the same shape."""
        table = rotary_table(batch.positions, self.shape)
        return self.decoder(hidden, None, rotary_pos_emb=table, packed_seq_params=batch.attention)


def _patch_embedding(config: TransformerConfig, shape: VisionShape, platform: Platform) -> torch.nn.Linear:
    embedding = torch.nn.Linear(
        shape.patch_elements, shape.hidden, bias=False, dtype=config.params_dtype, device=platform.device
    )
    # Sequence-parallel activations: each rank embeds its own patches, so that gradients are to be added over tp.
    embedding.weight.sequence_parallel = config.sequence_parallel  # pyright: ignore[reportAttributeAccessIssue]
    return embedding


def _block_spec(shape: VisionShape, provider: BackendSpecProvider, stage: Stage) -> TransformerBlockSubmodules:
    full = layer_spec(provider, AttnMaskType.no_mask, before=stage.first)
    windowed = layer_spec(provider, AttnMaskType.no_mask, windowed=True, before=stage.first)
    return TransformerBlockSubmodules(layer_specs=[full if i in shape.full_layers else windowed for i in stage.layers])


def rotary_table(positions_2n: Tensor, shape: VisionShape) -> Tensor:
    """Cosines and sines of the 2-D rotary embedding, fp32 [2, n, head_dim]: half of the angles by row, half by
    column.
    """
    frequencies = rotary_frequencies(shape.rope_theta, shape.head_dim // 2, positions_2n.device)
    angles = (positions_2n[..., None].float() * frequencies).transpose(0, 1).flatten(1)
    angles = torch.cat((angles, angles), dim=-1)
    return torch.stack((angles.cos(), angles.sin()))
