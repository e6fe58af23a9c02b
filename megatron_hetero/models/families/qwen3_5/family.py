"""The model family Qwen3.5, and its supported configurations. Qwen3.6 and Qwen3.8 have the same model type."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_hetero.base.errors import UserError
from megatron_hetero.base.files import RESTORE, Json, Only, shown
from megatron_hetero.models.families.common import of_text, positive, require
from megatron_hetero.models.families.qwen3_vl.family import Qwen3VL

# Importing shapes imports torch, which takes a second.
if TYPE_CHECKING:
    from megatron_hetero.models.families.qwen3_5.shapes import TextShape

DEFAULT_SECTIONS = (11, 11, 10)
"""Default of `mrope_section`: numbers of rotary frequencies for time, height and width."""
ROTATED = 0.25
"""Fraction of each attention head that is rotated."""
DELTA, FULL = "linear_attention", "full_attention"
"""Kinds of layers in configurations: gated delta net and softmax attention."""

_PUBLISHED = "use a model that was trained that way, such as the published ones"


class Qwen3_5(Qwen3VL):
    """The model family `qwen3_5`, whose encoder is Qwen3-VL's without DeepStack. It also accepts `qwen3_5_text`."""

    model_type, title = "qwen3_5", "Qwen3.5"
    language_models = ("qwen3_5_text",)
    copied = ("mtp.*",)
    built: Mapping[str, Only] = {
        **Qwen3VL.built,
        "partial_rotary_factor": Only((ROTATED,), because="a quarter of each head is rotated", fix=_PUBLISHED),
        "attn_output_gate": Only(
            (True, None), because="the output of attention has a gate in this family", fix=_PUBLISHED
        ),
        "output_gate_type": Only(
            ("swish", "silu", None), because="the output of a delta net is gated with SiLU", fix=_PUBLISHED
        ),
        "mamba_ssm_dtype": Only(("float32", None), because="states of delta nets are in fp32", fix=_PUBLISHED),
        "mlp_only_layers": Only(([], None), because="all layers of a model have the same kind of MLP", fix=_PUBLISHED),
        "deepstack_visual_indexes": Only(
            ([],),
            because="the language model takes rows of the encoder's last layer alone",
            fix="use an encoder without DeepStack, such as the published ones",
        ),
    }

    def check_values(self, path: Path, values: dict[str, Json]) -> None:
        super().check_values(path, values)
        # transformers divides by `full_attention_interval` and drops the key.
        for at, section in (("", values), ("text_config.", values.get("text_config"))):
            every = section.get("full_attention_interval") if isinstance(section, dict) else None
            if every is not None and not (isinstance(every, int) and every > 0):
                raise UserError.at(
                    f"{path}: {at}full_attention_interval",
                    found=shown(every),
                    expected="a whole number above 0",
                    because="one layer in each interval has softmax attention",
                    fix=RESTORE,
                )

    def check_text(self, folder: Path, config: Any) -> None:
        text = config.text_config
        linear = [f"linear_{each}" for each in ("num_key_heads", "num_value_heads", "key_head_dim", "value_head_dim")]
        require(folder, self.title, positive("text_config", text, *linear, "linear_conv_kernel_dim", "head_dim"))
        require(folder, self.title, (
            ("text_config.linear_num_value_heads % linear_num_key_heads",
             text.linear_num_value_heads % text.linear_num_key_heads, 0),
            ("text_config.head_dim % 8", text.head_dim % 8, 0),
            *of_text(text, text.head_dim // 4, DEFAULT_SECTIONS, (DELTA, FULL)),
        ))  # fmt: skip

    def rope_settings(self, head_dim: int) -> dict[str, Any]:
        # As in published models (11, 11 and 10 of 32), time, height and width take frequencies in turn.
        frequencies = head_dim // 8
        sections = [(frequencies + 2 - turn) // 3 for turn in range(3)]
        return {"mrope_section": sections, "mrope_interleaved": True, "partial_rotary_factor": ROTATED}

    def encoder_settings(self, config: Any) -> dict[str, Any]:
        settings = super().encoder_settings(config)
        del settings["deepstack_visual_indexes"]
        return settings

    def text_shape(self, config: Any) -> TextShape:
        from megatron_hetero.models.families.qwen3_5.shapes import TextShape

        return TextShape.of(config, config.text_config.head_dim, DEFAULT_SECTIONS, **of_layers(config.text_config))


def of_layers(text: Any) -> dict[str, Any]:
    """Return the fields of a `TextShape` that describe its kinds of layers."""
    return {
        "full": tuple(kind == FULL for kind in text.layer_types),
        "key_heads": text.linear_num_key_heads,
        "value_heads": text.linear_num_value_heads,
        "key_dim": text.linear_key_head_dim,
        "value_dim": text.linear_value_head_dim,
        "taps": text.linear_conv_kernel_dim,
    }


QWEN3_5 = Qwen3_5()
