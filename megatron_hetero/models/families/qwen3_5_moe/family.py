"""The model family Qwen3.5-MoE, which is Qwen3.5 with experts, and its supported configurations."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_hetero.models.families.common import expert_fields, fused_expert, of_experts, require
from megatron_hetero.models.families.qwen3_5.family import DEFAULT_SECTIONS, Qwen3_5, of_layers

# Importing shapes imports torch, which takes a second.
if TYPE_CHECKING:
    from megatron_hetero.models.families.qwen3_5_moe.shapes import TextShape


class Qwen3_5Moe(Qwen3_5):
    """The model family `qwen3_5_moe`, with experts in all layers. It also accepts type `qwen3_5_moe_text`."""

    model_type, title = "qwen3_5_moe", "Qwen3.5-MoE"
    language_models = ("qwen3_5_moe_text",)

    def check_text(self, folder: Path, config: Any) -> None:
        super().check_text(folder, config)
        widths = "moe_intermediate_size", "shared_expert_intermediate_size"
        require(folder, self.title, of_experts(config.text_config, *widths))

    def text_shape(self, config: Any) -> TextShape:
        from megatron_hetero.models.families.qwen3_5_moe.shapes import TextShape

        text = config.text_config
        return TextShape.of(
            config,
            text.head_dim,
            DEFAULT_SECTIONS,
            **of_layers(text),
            **expert_fields(text),
            shared_ffn=text.shared_expert_intermediate_size,
        )

    def fused_name(self, name: str, /) -> tuple[str, int] | None:
        return fused_expert(name)


QWEN3_5_MOE = Qwen3_5Moe()
