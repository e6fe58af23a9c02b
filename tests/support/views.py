"""Further views of layouts, as families may bring them."""

from __future__ import annotations

from megatron_hetero.layout.axes import Axis, View

EXPERTS = View("experts", (Axis("ep", "experts"), Axis("edp", "samples")))
BLOCKS = View("blocks", (Axis("wp", "weights"), Axis("xp", "experts"), Axis("xdp", "samples")))
