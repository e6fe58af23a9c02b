"""The model family Qwen3-VL-MoE, which is Qwen3-VL with experts, and its supported configurations."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_hetero.base.errors import UserError
from megatron_hetero.base.files import RESTORE, Json, Only, shown
from megatron_hetero.models.families.common import expert_fields, fused_expert, of_experts, positive, require
from megatron_hetero.models.families.qwen3_vl.family import DEFAULT_SECTIONS, Qwen3VL

# Importing shapes imports torch, which takes a second.
if TYPE_CHECKING:
    from megatron_hetero.models.families.qwen3_vl_moe.shapes import TextShape


class Qwen3VLMoe(Qwen3VL):
    """The model family `qwen3_vl_moe`, which also accepts language models of type `qwen3_moe`."""

    model_type, title = "qwen3_vl_moe", "Qwen3-VL-MoE"
    language_models = ("qwen3_moe",)
    built: Mapping[str, Only] = {
        **Qwen3VL.built,
        "norm_topk_prob": Only(
            (True,),
            because="the weights of a token's experts sum to 1 (transformers ignores the key in this family)",
            fix="use a model that was trained that way, such as the published ones",
        ),
    }

    def check_values(self, path: Path, values: dict[str, Json]) -> None:
        super().check_values(path, values)
        for at, section in (("", values), ("text_config.", values.get("text_config"))):
            if not isinstance(section, dict):
                continue
            numbers = [section.get(key) for key in ("num_experts", "num_local_experts")]
            if None not in numbers and len(set(map(shown, numbers))) > 1:
                raise UserError.at(
                    f"{path}: {at}num_experts",
                    found=f"{shown(numbers[0])} beside num_local_experts = {shown(numbers[1])}",
                    expected="the same number, or one of the keys",
                    because="both name the number of experts",
                    fix=RESTORE,
                )

    def check_text(self, folder: Path, config: Any) -> None:
        super().check_text(folder, config)
        text = config.text_config
        require(folder, self.title, (
            *of_experts(text, "moe_intermediate_size"),
            *positive("text_config", text, "decoder_sparse_step"),
            ("text_config.mlp_only_layers that the model does not have",
             [x for x in text.mlp_only_layers if not 0 <= x < text.num_hidden_layers], []),
            # In a configuration of type `qwen3_moe`, a missing key means that expert weights are not normalised.
            ("text_config.norm_topk_prob", getattr(text, "norm_topk_prob", True), True),
        ))  # fmt: skip
        if not any(_sparse(text)):
            raise UserError.at(
                folder / "config.json",
                found="no layer with experts (decoder_sparse_step and mlp_only_layers of text_config)",
                expected="at least one",
                because="a model without them is of another family",
                fix="correct these keys, or convert the model to Qwen3-VL",
            )

    def text_shape(self, config: Any) -> TextShape:
        from megatron_hetero.models.families.qwen3_vl_moe.shapes import TextShape

        text = config.text_config
        return TextShape.of(config, text.head_dim, DEFAULT_SECTIONS, **expert_fields(text), sparse=_sparse(text))

    def fused_name(self, name: str, /) -> tuple[str, int] | None:
        return fused_expert(name)


def _sparse(text: Any) -> tuple[bool, ...]:
    """Return for each layer whether it has experts."""
    dense, step = set(text.mlp_only_layers), text.decoder_sparse_step
    return tuple((number + 1) % step == 0 and number not in dense for number in range(text.num_hidden_layers))


QWEN3_VL_MOE = Qwen3VLMoe()
