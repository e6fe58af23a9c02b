"""The configuration of a model whose language model and encoder come from two folders."""

from __future__ import annotations

from typing import Any

from megatron_hetero.models.common.configuration import joining


def joined(own: Any, vision: Any, text_alone: bool) -> Any:
    """The configuration of a model with the language model of `own` and the encoder of `vision`. `text_alone`: `own` is
    of a Qwen2 language model.
    """
    from transformers import Qwen2_5_VLConfig

    rope = {"mrope_section": mrope_section(own.hidden_size // own.num_attention_heads)} if text_alone else None
    return joining.joined(Qwen2_5_VLConfig, "Qwen2_5_VLForConditionalGeneration", own, vision, rope)


def mrope_section(head_dim: int) -> list[int]:
    """Rotary frequencies for time, height and width; as in Qwen2.5-VL, time gets what the other two leave."""
    frequencies = head_dim // 2
    space = 3 * frequencies // 8
    return [frequencies - 2 * space, space, space]
