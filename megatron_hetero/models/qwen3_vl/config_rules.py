"""What `config.json` of a Qwen3-VL (or Qwen3) folder may say, key by key; how its values fit together is checked in
`checks`.
"""

from __future__ import annotations

from dataclasses import replace

from megatron_hetero.files.json_objects import Table, one_of, whole
from megatron_hetero.models.common.configuration.rules import LANGUAGE, ROPE, SIZE, SOME_LAYERS, VISION, whole_model

FAMILY = "qwen3_vl"
DEFAULT_SECTIONS = (24, 20, 20)
"""Rotary frequencies for time, height and width, where a configuration gives none."""
INTERLEAVED = replace(
    one_of(True),
    because="height, width and time take rotary frequencies in turns",
    fix="use a model that was trained that way",
)
WITHOUT_BIAS = replace(
    one_of(False, None),
    because="queries, keys and values of this family have no bias",
    fix="use a model without them, such as the published ones",
)
_ROPE: Table = {**ROPE, "mrope_interleaved": INTERLEAVED}
_VISION: Table = {**VISION, "num_position_embeddings": whole(1, 2**20), "deepstack_visual_indexes": SOME_LAYERS}
_LANGUAGE: Table = {
    **LANGUAGE,
    "head_dim": SIZE,
    "attention_bias": WITHOUT_BIAS,
    "rope_scaling": _ROPE,
    "rope_parameters": _ROPE,
}
CONFIG: Table = whole_model(_VISION, _LANGUAGE)
