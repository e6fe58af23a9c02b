"""The configuration of a model whose language model and encoder come from two folders.

Qwen2.5-VL, as the other parts of the program know it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from megatron_hetero.base.files import Only
from megatron_hetero.models.families.common import BUILT, canonical_name, join_configurations
from megatron_hetero.models.families.qwen2_5_vl import shapes as checks
from megatron_hetero.models.families.qwen2_5_vl.shapes import FAMILY
from megatron_hetero.models.family import Family
from megatron_hetero.models.items.pictures import IMAGE_TOKENS, Pictures, rope_positions

if TYPE_CHECKING:
    from megatron_hetero.models.families.qwen2_5_vl.shapes import TextShape, VisionShape


def joined(own: Any, vision: Any, text_alone: bool) -> Any:
    """The configuration of a model with the language model of `own` and the encoder of `vision`. `text_alone`: `own` is
    of a Qwen2 language model.
    """
    from transformers import Qwen2_5_VLConfig

    rope = {"mrope_section": mrope_section(own.hidden_size // own.num_attention_heads)} if text_alone else None
    return join_configurations(Qwen2_5_VLConfig, "Qwen2_5_VLForConditionalGeneration", own, vision, rope)


def mrope_section(head_dim: int) -> list[int]:
    """Rotary frequencies for time, height and width; as in Qwen2.5-VL, time gets what the other two leave."""
    frequencies = head_dim // 2
    space = 3 * frequencies // 8
    return [frequencies - 2 * space, space, space]


def _image_processor() -> type:
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    return Qwen2VLImageProcessorPil


class Qwen25VL:
    """See `megatron_hetero.models.family.Family`."""

    model_type = FAMILY
    language_models = ("qwen2",)
    title = "Qwen2.5-VL"
    built: Mapping[str, Only] = BUILT
    tokens = IMAGE_TOKENS
    items = (Pictures(_image_processor),)
    positions = staticmethod(rope_positions)

    def config_class(self, model_type: str) -> Any:
        from transformers import Qwen2_5_VLConfig, Qwen2Config

        return Qwen2_5_VLConfig if model_type == FAMILY else Qwen2Config

    def model_class(self) -> Any:
        from transformers import Qwen2_5_VLForConditionalGeneration

        return Qwen2_5_VLForConditionalGeneration

    check_encoder = staticmethod(checks.check_vision)
    check_text = staticmethod(checks.check_text)
    joined = staticmethod(joined)

    def encoder_shape(self, config: Any) -> VisionShape:
        from megatron_hetero.models.families.qwen2_5_vl.shapes import vision_shape

        return vision_shape(config.vision_config)

    def text_shape(self, config: Any) -> TextShape:
        from megatron_hetero.models.families.qwen2_5_vl.shapes import text_shape

        return text_shape(config)

    canonical_name = staticmethod(canonical_name)

    def published_name(self, name: str) -> str:
        return name


QWEN2_5_VL: Family = Qwen25VL()
