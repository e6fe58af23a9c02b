"""Further views of layouts, as families may bring them."""

from __future__ import annotations

from megatron_hetero.layout.axes import EXPERTS, Axis, View

__all__ = ["BLOCKS", "EXPERTS"]
BLOCKS = View("blocks", (Axis("wp", "weights"), Axis("xp", "experts"), Axis("xdp", "samples")))
