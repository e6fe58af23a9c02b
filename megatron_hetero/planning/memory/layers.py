"""What the layers of a stage keep together, on the device and, where they are offloaded, on the host. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from megatron_hetero.models.common.offload.policy import OffloadSizes, offloaded_layers


@dataclass(frozen=True)
class LayerBytes:
    """What one layer keeps. `saved`: from its forward pass on. `stays`: of that on the device in any case. `again`:
    what it adds during its backward pass, where it is made again as a whole.
    """

    saved: int
    stays: int = 0
    again: int = 0


@dataclass(frozen=True)
class LayersBytes:
    """What the layers of a stage keep: `kept` on the device and `host` on the host, between their forward and backward
    passes. `passing`, `again`: how much more of the device they take at most during the forward, and the backward pass.
    """

    kept: int
    passing: int
    again: int
    host: int


def layers_bytes(layers: Sequence[LayerBytes], offload: OffloadSizes | None = None) -> LayersBytes:
    """Put layers together. `offload`: of what their activations are copied to the host in, if they are.

    A layer is on the device with the one before it: in the forward pass until that is copied, in the backward pass
    since it is fetched. In the backward pass, what later layers kept is gone.
    """
    moved = offloaded_layers(len(layers)) if offload else 0
    saved = [0, *accumulate(layer.saved for layer in layers)]
    stays = [0, *accumulate(layer.stays for layer in layers)]
    kept = stays[moved] + saved[-1] - saved[moved]
    more = []
    for number in range(len(layers)):
        away = min(moved, max(0, number - 1))
        more.append(stays[away] + saved[number + 1] - saved[away] - kept)
    again = (most + layer.again for most, layer in zip(more, layers, strict=True))
    host = sum(offload.on_host(layer.saved - layer.stays) for layer in layers[:moved]) if offload else 0
    return LayersBytes(kept, max(more, default=0), max(again, default=0), host)
