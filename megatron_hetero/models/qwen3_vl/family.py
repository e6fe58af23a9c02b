"""Qwen3-VL, as the other parts of the program know it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from megatron_hetero.files.json_objects import Only
from megatron_hetero.models.common.stored_names import canonical_name, nested_name
from megatron_hetero.models.family import Family
from megatron_hetero.models.items.pictures.geometry import rope_positions
from megatron_hetero.models.items.pictures.item_type import IMAGE_TOKENS, Pictures
from megatron_hetero.models.qwen3_vl import checks, joining
from megatron_hetero.models.qwen3_vl.checks import BUILT, FAMILY

if TYPE_CHECKING:
    from megatron_hetero.models.qwen3_vl.shapes import TextShape, VisionShape


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
    joined = staticmethod(joining.joined)

    def encoder_shape(self, config: Any) -> VisionShape:
        from megatron_hetero.models.qwen3_vl.shapes import vision_shape

        return vision_shape(config.vision_config)

    def text_shape(self, config: Any) -> TextShape:
        from megatron_hetero.models.qwen3_vl.shapes import text_shape

        return text_shape(config)

    canonical_name = staticmethod(canonical_name)
    published_name = staticmethod(nested_name)


QWEN3_VL: Family = Qwen3VL()
