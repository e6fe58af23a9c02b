"""What `config.json` of a Qwen2.5-VL (or Qwen2) folder may say, key by key; how its values fit together is checked in
`checks`.
"""

from __future__ import annotations

from megatron_hetero.files.json_objects import Table
from megatron_hetero.models.common.configuration.rules import LANGUAGE, SIZE, SOME_LAYERS, VISION, whole_model

CONFIG: Table = whole_model({**VISION, "window_size": SIZE, "fullatt_block_indexes": SOME_LAYERS}, LANGUAGE)
