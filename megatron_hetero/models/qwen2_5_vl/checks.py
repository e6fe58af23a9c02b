"""Which configurations are built here: those of the published architecture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron_hetero.errors import UserError
from megatron_hetero.files.json_objects import shown
from megatron_hetero.models.qwen2_5_vl.shapes import DEFAULT_SECTIONS


def check_vision(folder: Path, config: Any) -> None:
    """Check that the vision encoder of `folder` is one that is built here. Raises `UserError`."""
    vision, text = config.vision_config, config.text_config
    rope = vision.rope_parameters or {}
    rope_type = rope.get("rope_type", "default")
    _require(folder, (
        ("vision_config.hidden_act", vision.hidden_act, "silu"),
        ("vision_config.out_hidden_size", vision.out_hidden_size, text.hidden_size),
        ("vision_config.hidden_size % num_heads", vision.hidden_size % vision.num_heads, 0),
        *_head_dim("vision_config", vision, vision.hidden_size // vision.num_heads),
        ("vision_config.hidden_size / num_heads % 4", vision.hidden_size // vision.num_heads % 4, 0),
        ("vision_config.window_size % (patch_size * spatial_merge_size)",
         vision.window_size % (vision.patch_size * vision.spatial_merge_size), 0),
        ("vision_config.fullatt_block_indexes from depth on",
         [layer for layer in vision.fullatt_block_indexes if layer >= vision.depth], []),
        ("vision_config.rope_parameters.rope_type", "axial" if rope_type == "default" else rope_type, "axial"),
        ("vision_config.rope_parameters with rope_theta", "rope_theta" in rope, True),
    ))  # fmt: skip


def check_text(folder: Path, config: Any) -> None:
    """Check that the language model of `folder` is one that is built here. Raises `UserError`."""
    text = config.text_config
    rope = text.rope_parameters or {}
    _require(folder, (
        ("text_config.hidden_act", text.hidden_act, "silu"),
        ("text_config.rope_parameters.rope_type", rope.get("rope_type", "default"), "default"),
        ("text_config.rope_parameters with rope_theta", "rope_theta" in rope, True),
        ("text_config.sliding_window in use", bool(text.sliding_window and text.use_sliding_window), False),
        ("the kinds in text_config.layer_types", sorted(set(text.layer_types)), ["full_attention"]),
        ("the length of text_config.layer_types", len(text.layer_types), text.num_hidden_layers),
        ("text_config.hidden_size % num_attention_heads", text.hidden_size % text.num_attention_heads, 0),
        *_head_dim("text_config", text, text.hidden_size // text.num_attention_heads),
        ("text_config.num_attention_heads % num_key_value_heads",
         text.num_attention_heads % text.num_key_value_heads, 0),
        ("2 * sum of mrope_section", 2 * sum(rope.get("mrope_section", DEFAULT_SECTIONS)),
         text.hidden_size // text.num_attention_heads),
        ("text_config.pad_token_id below vocab_size", (text.pad_token_id or 0) < text.vocab_size, True),
    ))  # fmt: skip


def _head_dim(name: str, module: Any, implied: int) -> tuple[tuple[str, object, object], ...]:
    """The size of heads, where the configuration gives it besides what it follows from."""
    given = getattr(module, "head_dim", None)
    return () if given is None else ((f"{name}.head_dim", given, implied),)


def _require(folder: Path, expectations: Sequence[tuple[str, object, object]]) -> None:
    for name, found, expected in expectations:
        if found != expected:
            raise UserError(
                f"{folder / 'config.json'}: found {name} = {shown(found)}, expected {shown(expected)}, because the "
                "model is built for the published Qwen2.5-VL architecture; use a model of that architecture"
            )
