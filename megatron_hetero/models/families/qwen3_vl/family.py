"""The configuration of a model whose language model and encoder come from two folders.

Qwen3-VL, as the other parts of the program know it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from megatron_hetero.base.files import Only
from megatron_hetero.models.families.common import canonical_name, join_configurations, nested_name
from megatron_hetero.models.families.qwen3_vl import shapes as checks
from megatron_hetero.models.families.qwen3_vl.shapes import BUILT, FAMILY
from megatron_hetero.models.family import Family
from megatron_hetero.models.items.pictures import IMAGE_TOKENS, Pictures, rope_positions

if TYPE_CHECKING:
    from megatron_hetero.models.families.qwen3_vl.shapes import TextShape, VisionShape


def joined(own: Any, vision: Any, text_alone: bool) -> Any:
    """The configuration of a model with the language model of `own` and the encoder of `vision`. `text_alone`: `own` is
    of a Qwen3 language model, which differs from Qwen3-VL's in its rotary positions alone.
    """
    from transformers import Qwen3VLConfig

    rope = rope_settings(own.head_dim) if text_alone else None
    return join_configurations(Qwen3VLConfig, "Qwen3VLForConditionalGeneration", own, vision, rope)


def rope_settings(head_dim: int) -> dict[str, Any]:
    """What says which rotary frequencies turn with time, height and width; as in Qwen3-VL (24, 20 and 20 of 64), time
    gets what the other two leave.
    """
    frequencies = head_dim // 2
    space = 5 * frequencies // 16
    return {"mrope_section": [frequencies - 2 * space, space, space], "mrope_interleaved": True}


def _image_processor() -> type:
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    return Qwen2VLImageProcessorPil


class Qwen3VL:
    """See `megatron_hetero.models.family.Family`."""

    model_type = FAMILY
    language_models = ("qwen3",)
    title = "Qwen3-VL"
    built: Mapping[str, Only] = BUILT
    tokens = IMAGE_TOKENS
    items = (Pictures(_image_processor),)
    positions = staticmethod(rope_positions)

    def config_class(self, model_type: str) -> Any:
        from transformers import Qwen3Config, Qwen3VLConfig

        return Qwen3VLConfig if model_type == FAMILY else Qwen3Config

    def model_class(self) -> Any:
        from transformers import Qwen3VLForConditionalGeneration

        return Qwen3VLForConditionalGeneration

    check_encoder = staticmethod(checks.check_vision)
    check_text = staticmethod(checks.check_text)
    joined = staticmethod(joined)

    def encoder_shape(self, config: Any) -> VisionShape:
        from megatron_hetero.models.families.qwen3_vl.shapes import vision_shape

        return vision_shape(config.vision_config)

    def text_shape(self, config: Any) -> TextShape:
        from megatron_hetero.models.families.qwen3_vl.shapes import text_shape

        return text_shape(config)

    canonical_name = staticmethod(canonical_name)
    published_name = staticmethod(nested_name)


QWEN3_VL: Family = Qwen3VL()
