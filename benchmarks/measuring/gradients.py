"""Gradients as a rank has accumulated them."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_hetero.step.module import TrainedModule


def whole_gradient(module: TrainedModule, name: str) -> Tensor:
    """The accumulated gradient of a parameter, shaped like it; zero if it is frozen. Collective if data-parallel ranks
    share it.
    """
    if name not in module.trained:
        return torch.zeros(module.parameters[name].shape)
    return module.weights.whole(name, module.gradients.accumulated(name)[0])
