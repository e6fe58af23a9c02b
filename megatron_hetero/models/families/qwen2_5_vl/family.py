"""The model family Qwen2.5-VL, and its supported configurations."""

from __future__ import annotations

from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from megatron_hetero.models.families.common import PICTURES, PictureFamily, of_text, of_vision, require
from megatron_hetero.models.items.videos import ProcessorDefaults, Videos

# Importing shapes imports torch, which takes a second.
if TYPE_CHECKING:
    from megatron_hetero.models.families.qwen2_5_vl.shapes import TextShape, VisionShape

DEFAULT_SECTIONS = (16, 24, 24)
"""Default of `mrope_section`: numbers of rotary frequencies for time, height and width."""

_MEAN, _STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
"""Mean and standard deviation of CLIP's pictures (Radford et al. 2021, arXiv 2103.00020)."""
_VIDEOS = ProcessorDefaults(fps=None, low=128 * 28**2, high=768 * 28**2, cap=128_000, mean=_MEAN, std=_STD)


class Qwen25VL(PictureFamily):
    """The model family `qwen2_5_vl`, which also accepts language models of type `qwen2`."""

    model_type, title = "qwen2_5_vl", "Qwen2.5-VL"
    language_models = ("qwen2",)
    encoders = MappingProxyType({"vision": (PICTURES, Videos(_VIDEOS, "frame", timestamps=False))})

    def check_encoder(self, folder: Path, config: Any) -> None:
        vision = config.vision_config
        require(folder, self.title, (
            ("vision_config.hidden_act", vision.hidden_act, "silu"),
            *of_vision(vision, config.text_config),
            ("vision_config.window_size % (patch_size * spatial_merge_size)",
             vision.window_size % (vision.patch_size * vision.spatial_merge_size), 0),
            ("vision_config.fullatt_block_indexes from depth on",
             [layer for layer in vision.fullatt_block_indexes if layer >= vision.depth], []),
        ))  # fmt: skip

    def check_text(self, folder: Path, config: Any) -> None:
        text = config.text_config
        implied = text.hidden_size // text.num_attention_heads
        require(folder, self.title, (
            ("text_config.hidden_size % num_attention_heads", text.hidden_size % text.num_attention_heads, 0),
            ("text_config.head_dim", getattr(text, "head_dim", None) or implied, implied),
            *of_text(text, implied, DEFAULT_SECTIONS),
        ))  # fmt: skip

    def rope_settings(self, head_dim: int) -> dict[str, Any]:
        # As in published models (16, 24 and 24 of 64), time gets the frequencies that height and width leave.
        frequencies = head_dim // 2
        space = 3 * frequencies // 8
        return {"mrope_section": [frequencies - 2 * space, space, space]}

    def encoder_shape(self, config: Any, encoder: str, /) -> VisionShape:
        from megatron_hetero.models.families.qwen2_5_vl.shapes import VisionShape

        vision = config.vision_config
        return VisionShape.of(
            vision,
            window=vision.window_size // vision.spatial_merge_size // vision.patch_size,
            full_layers=frozenset(vision.fullatt_block_indexes),
        )

    def text_shape(self, config: Any) -> TextShape:
        from megatron_hetero.models.families.qwen2_5_vl.shapes import TextShape

        text = config.text_config
        return TextShape.of(config, text.hidden_size // text.num_attention_heads, DEFAULT_SECTIONS)


QWEN2_5_VL = Qwen25VL()
