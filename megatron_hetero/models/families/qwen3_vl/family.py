"""The model family Qwen3-VL, and its supported configurations."""

from __future__ import annotations

import math
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from megatron_hetero.base.files import Only
from megatron_hetero.models.families.common import (
    PICTURES,
    SUPPORTED,
    PictureFamily,
    nested_name,
    of_text,
    of_vision,
    require,
)
from megatron_hetero.models.items.videos import ProcessorDefaults, Videos

# Importing shapes imports torch, which takes a second.
if TYPE_CHECKING:
    from megatron_hetero.models.families.qwen3_vl.shapes import VisionShape
    from megatron_hetero.models.language import LanguageModelShape

DEFAULT_SECTIONS = (24, 20, 20)
"""Default of `mrope_section`: numbers of rotary frequencies for time, height and width."""

_HALF = (0.5, 0.5, 0.5)
_VIDEOS = ProcessorDefaults(fps=2.0, low=128 * 32**2, high=768 * 32**2, cap=768, mean=_HALF, std=_HALF)


class Qwen3VL(PictureFamily):
    """The model family `qwen3_vl`, which also accepts language models of type `qwen3`."""

    model_type, title = "qwen3_vl", "Qwen3-VL"
    language_models = ("qwen3",)
    encoders = MappingProxyType({"vision": (PICTURES, Videos(_VIDEOS, "video", timestamps=True))})
    encoders_of = ("qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe")
    built = SUPPORTED | {
        "mrope_interleaved": Only(
            (True,),
            because="height, width and time take rotary frequencies in turns",
            fix="use a model that was trained that way",
        ),
        "attention_bias": Only(
            (False, None),
            because="queries, keys and values of this family have no bias",
            fix="use a model without them, such as the published ones",
        ),
    }

    def check_encoder(self, folder: Path, config: Any) -> None:
        vision = config.vision_config
        layers, places = list(_deepstack(vision)), vision.num_position_embeddings
        require(folder, self.title, (
            ("vision_config.hidden_act", vision.hidden_act, "gelu_pytorch_tanh"),
            *of_vision(vision, config.text_config),
            ("vision_config.num_position_embeddings beyond a square", places - math.isqrt(places) ** 2, 0),
            ("vision_config.deepstack_visual_indexes that no layer has",
             [x for x in layers if not 0 <= x < vision.depth], []),
            ("vision_config.deepstack_visual_indexes", layers, sorted(set(layers))),
        ))  # fmt: skip

    def check_text(self, folder: Path, config: Any) -> None:
        text = config.text_config
        require(folder, self.title, (
            ("text_config.head_dim % 2", text.head_dim % 2, 0),
            *of_text(text, text.head_dim, DEFAULT_SECTIONS),
        ))  # fmt: skip

    def rope_settings(self, head_dim: int) -> dict[str, Any]:
        # As in published models (24, 20 and 20 of 64), time gets the frequencies that height and width leave.
        frequencies = head_dim // 2
        space = 5 * frequencies // 16
        return {"mrope_section": [frequencies - 2 * space, space, space], "mrope_interleaved": True}

    def encoder_settings(self, config: Any) -> dict[str, Any]:
        # Configurations of families without DeepStack lack the key.
        return super().encoder_settings(config) | {"deepstack_visual_indexes": list(_deepstack(config.vision_config))}

    def encoder_shape(self, config: Any, encoder: str, /) -> VisionShape:
        from megatron_hetero.models.families.qwen3_vl.shapes import VisionShape

        vision = config.vision_config
        side = math.isqrt(vision.num_position_embeddings)
        return VisionShape.of(vision, table_side=side, deepstack=_deepstack(vision))

    def text_shape(self, config: Any) -> LanguageModelShape:
        from megatron_hetero.models.families.qwen3_vl.shapes import TextShape

        return TextShape.of(config, config.text_config.head_dim, DEFAULT_SECTIONS)

    def published_name(self, name: str, /) -> str:
        return nested_name(name)


def _deepstack(vision: Any) -> tuple[int, ...]:
    """Return the inner layers after which the encoder has an output; none if the configuration lacks the key."""
    return tuple(getattr(vision, "deepstack_visual_indexes", ()))


QWEN3_VL = Qwen3VL()
