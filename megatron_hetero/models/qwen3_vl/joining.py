"""The configuration of a model whose language model and encoder come from two folders."""

from __future__ import annotations

from typing import Any

from megatron_hetero.models.common.configuration import joining


def joined(own: Any, vision: Any, text_alone: bool) -> Any:
    """The configuration of a model with the language model of `own` and the encoder of `vision`. `text_alone`: `own` is
    of a Qwen3 language model, which differs from Qwen3-VL's in its rotary positions alone.
    """
    from transformers import Qwen3VLConfig

    rope = rope_settings(own.head_dim) if text_alone else None
    return joining.joined(Qwen3VLConfig, "Qwen3VLForConditionalGeneration", own, vision, rope)


def rope_settings(head_dim: int) -> dict[str, Any]:
    """What says which rotary frequencies turn with time, height and width; as in Qwen3-VL (24, 20 and 20 of 64), time
    gets what the other two leave.
    """
    frequencies = head_dim // 2
    space = 5 * frequencies // 16
    return {"mrope_section": [frequencies - 2 * space, space, space], "mrope_interleaved": True}
