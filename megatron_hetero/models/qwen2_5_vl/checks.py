"""Which configurations are built here: those of the published architecture."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from megatron_hetero.models.common.configuration.checks import head_dim, of_text, of_vision, require

FAMILY, TITLE = "qwen2_5_vl", "Qwen2.5-VL"
DEFAULT_SECTIONS = (16, 24, 24)
"""Rotary frequencies for time, height and width, where a configuration gives none."""


def check_vision(folder: Path, config: Any) -> None:
    """Check that the vision encoder of `folder` is one that is built here. Raises `UserError`."""
    vision = config.vision_config
    require(folder, TITLE, (
        ("vision_config.hidden_act", vision.hidden_act, "silu"),
        *of_vision(vision, config.text_config),
        ("vision_config.window_size % (patch_size * spatial_merge_size)",
         vision.window_size % (vision.patch_size * vision.spatial_merge_size), 0),
        ("vision_config.fullatt_block_indexes from depth on",
         [layer for layer in vision.fullatt_block_indexes if layer >= vision.depth], []),
    ))  # fmt: skip


def check_text(folder: Path, config: Any) -> None:
    """Check that the language model of `folder` is one that is built here. Raises `UserError`."""
    text = config.text_config
    implied = text.hidden_size // text.num_attention_heads
    require(folder, TITLE, (
        ("text_config.hidden_size % num_attention_heads", text.hidden_size % text.num_attention_heads, 0),
        *head_dim("text_config", text, implied),
        *of_text(text, implied, DEFAULT_SECTIONS),
    ))  # fmt: skip
