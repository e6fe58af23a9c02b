"""The vision encoder of Qwen2.5-VL: window attention in most layers, and MLPs with gates."""

from __future__ import annotations

import torch.nn.functional as F

from megatron_hetero.models.common.stages import vision
from megatron_hetero.models.common.stages.vision import Architecture


class VisionModel(vision.VisionModel):
    """See `megatron_hetero.models.common.stages.vision`."""

    architecture = Architecture(rms_norm=True, gated=True, activation=F.silu, embedding_bias=False)
