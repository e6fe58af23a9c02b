"""What `config.json` of a Qwen2.5-VL (or Qwen2) folder may say, key by key; how its values fit together is checked in
`checks`.
"""

from __future__ import annotations

from megatron_hetero.files.json_objects import Table
from megatron_hetero.models.common.configuration.rules import LANGUAGE, SIZE, SOME_LAYERS, VISION, whole_model

FAMILY = "qwen2_5_vl"
DEFAULT_SECTIONS = (16, 24, 24)
"""Rotary frequencies for time, height and width, where a configuration gives none."""
CONFIG: Table = whole_model({**VISION, "window_size": SIZE, "fullatt_block_indexes": SOME_LAYERS}, LANGUAGE)
