"""The vision encoder and its merger, from Megatron-Core layers.

    pixels of own patches -> patch embedding -> transformer block (window and full attention) -> merger -> rows

Everything runs on the patches that this rank's shard holds. With sequence-parallel activations over `tp` the shard is
padded to whole units per rank and each rank embeds its own share; nothing that pads enters attention or leaves the
module.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from megatron.core.models.backends import BackendSpecProvider
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_block import TransformerBlock, TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from megatron_hetero.models.attention import AttentionPlan
from megatron_hetero.models.backend import layer_spec, padded, recompute_options, transformer_config
from megatron_hetero.models.qwen2_5_vl.shapes import VisionShape
from megatron_hetero.platform import Platform


@dataclass(frozen=True)
class VisionInput:
    """What one rank encodes in one micro-batch.

    `pixels`: [patches of this rank, channels * temporal * patch * patch], padding included. `positions`: int64 [2, n],
    row and column of the shard's n real patches. `attention`: windows of the shard, sequences of the replica.
    """

    pixels: Tensor
    positions: Tensor
    attention: AttentionPlan


def padded_patches(patches: int, unit: int, sequence_shards: int) -> int:
    """Patches of a shard with padding: whole units for each of the ranks that share its activations, and never none.

    `sequence_shards`: tp with sequence-parallel activations, else 1. An empty shard takes part in collectives, and
    Megatron's layers do not accept tensors without elements.
    """
    share = unit * sequence_shards
    return max(1, -(-patches // share)) * share


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
    """Patches to rows, each rank on its own share."""

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
        self.shape = shape
        self.patch_embed = torch.nn.Linear(
            shape.patch_elements, shape.hidden, bias=False, dtype=dtype, device=platform.device
        )
        # Sequence-parallel activations: each rank embeds its own patches, so that gradients are to be added over tp.
        self.patch_embed.weight.sequence_parallel = config.sequence_parallel  # pyright: ignore
        self.decoder = TransformerBlock(
            config, _block_spec(shape, provider), post_layer_norm=False, pg_collection=groups
        )
        self.merger = PatchMerger(config, shape, provider, groups.tp)

    def forward(self, batch: VisionInput) -> Tensor:
        """Rows of this rank's units, [patches of this rank / unit, out_hidden], padding included."""
        hidden = self.patch_embed(batch.pixels).unsqueeze(1)
        table = rotary_table(batch.positions, self.shape)
        hidden = self.decoder(hidden, None, rotary_pos_emb=table, packed_seq_params=batch.attention)
        return self.merger(hidden)


def _block_spec(shape: VisionShape, provider: BackendSpecProvider) -> TransformerBlockSubmodules:
    full = layer_spec(provider, AttnMaskType.no_mask)
    windowed = layer_spec(provider, AttnMaskType.no_mask, windowed=True)
    return TransformerBlockSubmodules(
        layer_specs=[full if i in shape.full_layers else windowed for i in range(shape.layers)]
    )


def rotary_table(positions_2n: Tensor, shape: VisionShape) -> Tensor:
    """Cosines and sines of the 2-D rotary embedding, fp32 [2, n, head_dim]: half of the angles by row, half by
    column.
    """
    quarter = torch.arange(0, shape.head_dim // 2, 2, dtype=torch.float32) / (shape.head_dim // 2)
    frequencies = (1.0 / shape.rope_theta**quarter).to(positions_2n.device)
    angles = (positions_2n[..., None].float() * frequencies).transpose(0, 1).flatten(1)
    angles = torch.cat((angles, angles), dim=-1)
    return torch.stack((angles.cos(), angles.sin()))


def forward_flops_per_patch(shape: VisionShape) -> tuple[float, float]:
    """Cost model of encoding: (flops per patch, flops per patch and patch of its sequence in full-attention layers)."""
    window_patches = shape.window**2 * shape.unit
    linear = (
        shape.layers * (8 * shape.hidden**2 + 6 * shape.hidden * shape.ffn) + 2 * shape.patch_elements * shape.hidden
    )
    merger = 2 * shape.hidden * (shape.hidden * shape.unit + shape.out_hidden)
    windowed = (shape.layers - len(shape.full_layers)) * 4 * shape.hidden * window_patches
    return float(linear + merger + windowed), float(len(shape.full_layers) * 4 * shape.hidden)


def encoding_cost(grid: tuple[int, int, int], shape: VisionShape) -> float:
    """Predicted forward flops of encoding an image of `grid` patches."""
    linear, quadratic = forward_flops_per_patch(shape)
    frame = float(np.prod(grid[1:]))
    return grid[0] * (linear * frame + quadratic * frame * frame)
