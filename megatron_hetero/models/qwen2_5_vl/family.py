"""Qwen2.5-VL, as the other parts of the program know it."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from megatron_hetero.files.json_objects import Table
from megatron_hetero.hf.weight_map import WeightMap
from megatron_hetero.models.common.demo_sizes import DemoSizes
from megatron_hetero.models.common.images.family import PictureFamily
from megatron_hetero.models.family import Family, TensorShapes
from megatron_hetero.models.qwen2_5_vl import checks, demo, joining, shapes, weights
from megatron_hetero.models.qwen2_5_vl.config_rules import CONFIG
from megatron_hetero.models.qwen2_5_vl.shapes import FAMILY, TextShape, VisionShape
from megatron_hetero.sharding.stages import Stage


class Qwen25VL(PictureFamily):
    """See `megatron_hetero.models.family.Family`."""

    model_type = FAMILY
    language_models = ("qwen2",)
    title = "Qwen2.5-VL"
    rules: Table = CONFIG

    def config_class(self, model_type: str) -> Any:
        from transformers import Qwen2_5_VLConfig, Qwen2Config

        return Qwen2_5_VLConfig if model_type == FAMILY else Qwen2Config

    def model_class(self) -> Any:
        from transformers import Qwen2_5_VLForConditionalGeneration

        return Qwen2_5_VLForConditionalGeneration

    def check_encoder(self, folder: Path, config: Any) -> None:
        checks.check_vision(folder, config)

    def check_text(self, folder: Path, config: Any) -> None:
        checks.check_text(folder, config)

    def joined(self, own: Any, encoder: Any, text_alone: bool) -> Any:
        return joining.joined(own, encoder, text_alone)

    def encoder_shape(self, config: Any) -> VisionShape:
        return shapes.vision_shape(config.vision_config)

    def text_shape(self, config: Any) -> TextShape:
        return shapes.text_shape(config)

    def image_processor_class(self) -> type:
        from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

        return Qwen2VLImageProcessorPil

    def write_demo(self, folder: Path, corpus: Iterable[str], sizes: DemoSizes, seed: int) -> None:
        demo.write_model(folder, corpus, sizes, seed)

    def encoder_model(self) -> type:
        from megatron_hetero.models.qwen2_5_vl.vision import VisionModel

        return VisionModel

    def text_model(self) -> type:
        from megatron_hetero.models.qwen2_5_vl.text import TextModel

        return TextModel

    def published_name(self, name: str) -> str:
        return name

    def encoder_tensors(self, shape: VisionShape) -> TensorShapes:
        return weights.encoder_tensors(shape)

    def text_tensors(self, shape: TextShape) -> TensorShapes:
        return weights.text_tensors(shape)

    def encoder_map(self, prefix: str, shape: VisionShape, tp_rank: int, tp: int, stage: Stage) -> WeightMap:
        return weights.encoder_map(prefix, shape, tp_rank, tp, stage)

    def text_map(self, shape: TextShape, tp_rank: int, tp: int, stage: Stage) -> WeightMap:
        return weights.text_map(shape, tp_rank, tp, stage)


QWEN2_5_VL: Family = Qwen25VL()
