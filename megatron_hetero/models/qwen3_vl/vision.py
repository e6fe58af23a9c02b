"""The vision encoder of Qwen3-VL: learned positions, layer norms, MLPs without gates, and mergers of the outputs of
some layers (DeepStack, Meng et al. 2024, arXiv 2406.04334), whose rows enter the language model deeper.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch.nn.functional as F
from megatron.core.models.backends import BackendSpecProvider
from megatron.core.process_groups_config import ProcessGroupCollection
from torch import Tensor
from torch.nn import ModuleDict

from megatron_hetero.distributed.platform import Platform
from megatron_hetero.models.common.backend import gelu_tanh
from megatron_hetero.models.common.inputs import EncoderInput
from megatron_hetero.models.common.stages import vision
from megatron_hetero.models.common.stages.merger import PatchMerger
from megatron_hetero.models.common.stages.vision import Architecture
from megatron_hetero.models.qwen3_vl.position_table import PositionTable
from megatron_hetero.models.qwen3_vl.shapes import DEEPSTACK, VisionShape


class VisionModel(vision.VisionModel):
    """See `megatron_hetero.models.common.stages.vision`."""

    architecture = Architecture(rms_norm=False, gated=False, activation=gelu_tanh, embedding_bias=True)

    def __init__(
        self,
        shape: VisionShape,
        groups: ProcessGroupCollection,
        platform: Platform,
        provider: BackendSpecProvider,
        **options: Any,
    ):
        super().__init__(shape, groups, platform, provider, **options)
        if self.stage.is_first:
            self.pos_embed = PositionTable(self.config, shape.table_side, platform)
        # By their numbers in the whole module: a list would number those of this stage.
        self.deepstack_merger_list = ModuleDict({
            str(i): PatchMerger(self.config, shape, provider, groups.tp, of_units=True)
            for i, layer in enumerate(shape.deepstack)
            if layer in self.stage.layers
        })  # fmt: skip

    def mergers(self) -> Mapping[str, PatchMerger]:
        """Those of the DeepStack layers that this stage holds, by the name of their output."""
        return {f"{DEEPSTACK}{i}": merger for i, merger in self.deepstack_merger_list.items()}  # pyright: ignore[reportReturnType]

    def enter(self, batch: EncoderInput) -> Tensor:
        """The embedding of this rank's patches and of their positions, of shape `hidden_shape`, on the first stage."""
        hidden = super().enter(batch)
        positions = self._own_positions(batch, len(hidden))
        return hidden + self.pos_embed(positions).to(hidden.dtype).unsqueeze(1)

    def _own_positions(self, batch: EncoderInput, patches: int) -> Tensor:
        """Those of the patches that this rank embeds, [4, patches], zero for patches that pad. With sequence-parallel
        activations the ranks of tp embed the shard's patches in turn.
        """
        start = patches * self.tp_group.rank() if self.config.sequence_parallel else 0
        own = batch.positions[:, start : start + patches]
        return F.pad(own, (0, patches - own.shape[1]))
