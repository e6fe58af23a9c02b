"""Which configurations are built here: those of the published architecture."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from megatron_hetero.files.json_objects import Only
from megatron_hetero.models.common.configuration import checks
from megatron_hetero.models.common.configuration.checks import of_text, of_vision, require

FAMILY, TITLE = "qwen3_vl", "Qwen3-VL"
DEFAULT_SECTIONS = (24, 20, 20)
"""Rotary frequencies for time, height and width, where a configuration gives none."""
BUILT = {
    **checks.BUILT,
    "mrope_interleaved": Only(
        (True,),
        because="height, width and time take rotary frequencies in turns",
        fix="use a model that was trained that way",
    ),
    "attention_bias": Only(
        (False, None),
        because="queries, keys and values of this family have no bias",
        fix="use a model without them, such as the published ones",
    ),
}


def check_vision(folder: Path, config: Any) -> None:
    """Check that the vision encoder of `folder` is one that is built here. Raises `UserError`."""
    vision = config.vision_config
    layers, places = list(vision.deepstack_visual_indexes), vision.num_position_embeddings
    require(folder, TITLE, (
        ("vision_config.hidden_act", vision.hidden_act, "gelu_pytorch_tanh"),
        *of_vision(vision, config.text_config),
        ("vision_config.num_position_embeddings beyond a square", places - math.isqrt(places) ** 2, 0),
        ("vision_config.deepstack_visual_indexes that no layer has",
         [x for x in layers if not 0 <= x < vision.depth], []),
        ("vision_config.deepstack_visual_indexes", layers, sorted(set(layers))),
    ))  # fmt: skip


def check_text(folder: Path, config: Any) -> None:
    """Check that the language model of `folder` is one that is built here. Raises `UserError`."""
    text = config.text_config
    require(folder, TITLE, (
        ("text_config.head_dim % 2", text.head_dim % 2, 0),
        *of_text(text, text.head_dim, DEFAULT_SECTIONS),
    ))  # fmt: skip
