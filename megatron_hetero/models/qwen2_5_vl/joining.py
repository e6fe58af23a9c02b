"""The configuration of a model whose language model and encoder come from two folders."""

from __future__ import annotations

from typing import Any


def joined(own: Any, vision: Any, text_alone: bool) -> Any:
    """The configuration of a model with the language model of `own` and the encoder of `vision`."""
    from transformers import Qwen2_5_VLConfig

    text = _with_sections(own.to_dict()) if text_alone else own.text_config.to_dict()
    ids = () if text_alone else ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")
    return Qwen2_5_VLConfig(
        text_config=text,
        vision_config=vision.vision_config.to_dict() | {"out_hidden_size": text["hidden_size"]},
        tie_word_embeddings=own.tie_word_embeddings,
        architectures=["Qwen2_5_VLForConditionalGeneration"],
        **{name: getattr(own, name) for name in ids},
    )


def _with_sections(text: dict[str, Any]) -> dict[str, Any]:
    """The settings of a Qwen2 language model as those of Qwen2.5-VL's: its rotary frequencies in three sections.

    Tokens of text have three equal positions, so that on text alone nothing changes.
    """
    sections = {"mrope_section": mrope_section(text["hidden_size"] // text["num_attention_heads"])}
    left_out = ("architectures", "model_type", "transformers_version")
    kept = {name: value for name, value in text.items() if name not in left_out}
    return kept | {"rope_parameters": dict(text["rope_parameters"]) | sections}


def mrope_section(head_dim: int) -> list[int]:
    """Rotary frequencies for time, height and width; as in Qwen2.5-VL, time gets what the other two leave."""
    frequencies = head_dim // 2
    space = 3 * frequencies // 8
    return [frequencies - 2 * space, space, space]
