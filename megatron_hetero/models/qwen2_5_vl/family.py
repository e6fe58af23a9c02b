"""Qwen2.5-VL, as the other parts of the program know it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from megatron_hetero.files.json_objects import Only
from megatron_hetero.models.common.configuration.checks import BUILT
from megatron_hetero.models.common.stored_names import canonical_name
from megatron_hetero.models.family import Family
from megatron_hetero.models.items.pictures.geometry import rope_positions
from megatron_hetero.models.items.pictures.item_type import IMAGE_TOKENS, Pictures
from megatron_hetero.models.qwen2_5_vl import checks, joining
from megatron_hetero.models.qwen2_5_vl.checks import FAMILY

if TYPE_CHECKING:
    from megatron_hetero.models.qwen2_5_vl.shapes import TextShape, VisionShape


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
    joined = staticmethod(joining.joined)

    def encoder_shape(self, config: Any) -> VisionShape:
        from megatron_hetero.models.qwen2_5_vl.shapes import vision_shape

        return vision_shape(config.vision_config)

    def text_shape(self, config: Any) -> TextShape:
        from megatron_hetero.models.qwen2_5_vl.shapes import text_shape

        return text_shape(config)

    canonical_name = staticmethod(canonical_name)

    def published_name(self, name: str) -> str:
        return name


QWEN2_5_VL: Family = Qwen25VL()
