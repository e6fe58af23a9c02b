"""A vision encoder and its mergers, from Megatron-Core layers.

    own patches -> patch embedding -> transformer block -> merger -> rows
                                                  | after some layers
                                                  +-> merger of the layer -> rows of another output

whole, or one pipeline stage of it: the patch embedding is on the first, the merger on the last, the others where their
layers are, and hidden states of patches pass between them.

Everything runs on the patches that this rank's shard holds. With sequence-parallel activations over `tp` the shard is
padded to whole units per rank and each rank embeds its own share; nothing that pads enters attention or leaves the
module.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import ClassVar, Protocol

import torch
from megatron.core.models.backends import BackendSpecProvider
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_block import TransformerBlock, TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from megatron_hetero.distributed.platform import Platform
from megatron_hetero.layout.stages import Stage
from megatron_hetero.models.common.backend import layer_spec, transformer_config
from megatron_hetero.models.common.inputs import EncoderInput
from megatron_hetero.models.common.layers.linear import WholeLinear
from megatron_hetero.models.common.offload.activations import ActivationOffload
from megatron_hetero.models.common.recompute.policy import Recompute
from megatron_hetero.models.common.stages.block import Between, Gathered, run_layers
from megatron_hetero.models.common.stages.merger import PatchMerger
from megatron_hetero.models.common.stages.rotary import axial_table
from megatron_hetero.models.common.weights.slices import split_length
from megatron_hetero.models.family import EncoderShape
from megatron_hetero.models.items.types import padded_patches
from megatron_hetero.names import HIDDEN, ROWS


class VisionShape(EncoderShape, Protocol):
    """What the modules also need of the shape of an encoder."""

    @property
    def rope_theta(self) -> float:
        """The base of the rotary frequencies."""
        ...

    @property
    def norm_eps(self) -> float:
        """What norms add to the variance."""
        ...


@dataclass(frozen=True)
class Architecture:
    """How the encoders of families differ, apart from sizes. `rms_norm`: else layer norm, with a bias. `gated`: the
    MLP has a gate, which `activation` is applied to. `embedding_bias`: of the patch embedding.
    """

    rms_norm: bool
    gated: bool
    activation: Callable[[Tensor], Tensor]
    embedding_bias: bool


class VisionModel(MegatronModule):
    """Patches to rows, each rank on its own share; or the part of `stage` in that, the whole where it is None. Families
    say of which `architecture` theirs is.
    """

    architecture: ClassVar[Architecture]

    def __init__(
        self,
        shape: VisionShape,
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
        tp, kind, stage = groups.tp.size(), self.architecture, stage or Stage.whole(shape.layers)
        config = transformer_config(
            platform,
            params_dtype=dtype,
            rms_norm=kind.rms_norm,
            gated_linear_unit=kind.gated,
            activation_func=kind.activation,
            num_layers=shape.layers,
            hidden_size=shape.hidden,
            num_attention_heads=shape.heads,
            ffn_hidden_size=tp * split_length(shape.ffn, tp),
            layernorm_epsilon=shape.norm_eps,
            add_bias_linear=True,
            tensor_model_parallel_size=tp,
            sequence_parallel=sequence_parallel and tp > 1,
        )
        super().__init__(config=config)
        self.shape, self.stage, self.offload, self.tp_group = shape, stage, offload, groups.tp
        self._patch_shards = tp if config.sequence_parallel else 1
        if self.stage.is_first:
            self.patch_embed = _patch_embedding(config, shape, platform, bias=kind.embedding_bias)
        self.decoder = TransformerBlock(
            config,
            _block_spec(shape, provider, stage, recompute, rms_norm=kind.rms_norm, compile_layers=compile_layers),
            post_layer_norm=False,
            pg_collection=groups,
        )
        if self.stage.is_last:
            self.merger = PatchMerger(config, shape, provider, groups.tp)

    def forward(self, batch: EncoderInput, hidden: Tensor | None = None) -> Tensor | dict[str, Tensor]:
        """What this stage makes of a micro-batch: on the last stage the rows of this rank's units, [units, out_hidden],
        without those that pad it; on the others what the next stage takes as `hidden`. Where the stage gives the rows
        of other outputs too, all of them by name: `HIDDEN` or `ROWS` first, then theirs.

        `hidden`: what the stage before returned, of shape `hidden_shape`; the first stage takes none.
        """
        if self.stage.is_first:
            hidden = self.enter(batch)
        assert hidden is not None, "stages after the first take hidden states"
        others: dict[str, Tensor] = {}
        hidden = self.run_layers(batch, hidden, others)
        out = self._real_rows(batch, self.merger(hidden)) if self.stage.is_last else hidden
        return {ROWS if self.stage.is_last else HIDDEN: out} | others if others else out

    def hidden_shape(self, batch: EncoderInput) -> tuple[int, int, int]:
        """The shape of what one stage hands to the next on this rank: [patches of this rank, 1, hidden], padding
        included.
        """
        patches = padded_patches(batch.positions.shape[1], self.shape.unit, self._patch_shards)
        return patches // self._patch_shards, 1, self.shape.hidden

    def units(self) -> tuple[Gathered, ...]:
        """The parts of this stage that are gathered by themselves, in the order in which they run."""
        return tuple(Gathered(layer) for layer in self.decoder.layers)

    def enter(self, batch: EncoderInput) -> Tensor:
        """The embedding of this rank's patches, of shape `hidden_shape`, on the first stage."""
        assert batch.patches is not None, "the first stage embeds patches"
        return self.patch_embed(batch.patches).unsqueeze(1)

    def run_layers(self, batch: EncoderInput, hidden: Tensor, others: dict[str, Tensor]) -> Tensor:
        """`hidden` after the layers of this stage, of the same shape. `others` is filled with the rows of the outputs
        that are made after layers before the last.
        """
        table = axial_table(batch.positions[:2], self.shape.rope_theta, self.shape.head_dim)
        after = {self.shape.outputs[name]: self._into(others, name, batch) for name in self.mergers()}
        return run_layers(self.decoder, hidden, table, batch.attention, after, self.offload)

    def mergers(self) -> Mapping[str, PatchMerger]:
        """This stage's further mergers, by the name of their output; without the last one."""
        return {}

    def _into(self, others: dict[str, Tensor], name: str, batch: EncoderInput) -> Between:
        def merge(hidden: Tensor) -> Tensor:
            others[name] = self._real_rows(batch, self.mergers()[name](hidden))
            return hidden

        return merge

    def _real_rows(self, batch: EncoderInput, rows: Tensor) -> Tensor:
        return rows[: len(rows) - batch.padding // self.shape.unit]


def _patch_embedding(config: TransformerConfig, shape: VisionShape, platform: Platform, *, bias: bool) -> WholeLinear:
    embedding = WholeLinear(
        shape.patch_elements, shape.hidden, bias=bias, dtype=config.params_dtype, device=platform.device
    )
    # Sequence-parallel activations: each rank embeds its own patches, so that gradients are to be added over tp.
    for parameter in embedding.parameters():
        parameter.sequence_parallel = config.sequence_parallel  # pyright: ignore[reportAttributeAccessIssue]
    return embedding


def _block_spec(
    shape: VisionShape,
    provider: BackendSpecProvider,
    stage: Stage,
    recompute: Recompute,
    *,
    rms_norm: bool,
    compile_layers: bool,
) -> TransformerBlockSubmodules:
    full, windowed = (
        layer_spec(
            provider,
            AttnMaskType.no_mask,
            windowed=windowed,
            before=stage.first,
            rms_norm=rms_norm,
            recompute=recompute,
            compile_layers=compile_layers,
        )
        for windowed in (False, True)
    )
    return TransformerBlockSubmodules(layer_specs=[full if i in shape.full_layers else windowed for i in stage.layers])
